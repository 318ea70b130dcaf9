"""A script that saves and ends when it should stop, and goes on where it was: after a restart for five steps more."""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from fabric import Fabric


def main(folder: Path) -> None:
    fabric = Fabric(accelerator="cpu", strategy="ddp")
    fabric.launch()
    model, optimizer = fabric.setup(*build())
    state = {"model": model, "optimizer": optimizer}
    last = folder / "last.pt"
    losses = fabric.load(last, state)["losses"] if last.exists() else []
    before = len(losses)
    while not before or len(losses) < before + 5:
        losses.append(train(model, optimizer, fabric.backward))
        time.sleep(0.05)  # as a loop that leaves the machine to others
        if fabric.should_stop:
            fabric.save(last, state | {"losses": losses})
            fabric.exit_preempted(requeue=True)
    restarts = os.environ.get("SLURM_RESTART_COUNT")
    answer = {"losses": losses, "before": before, "world_size": fabric.world_size, "restarts": restarts}
    (folder / f"{fabric.global_rank}.json").write_text(json.dumps(answer))


def build() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = torch.nn.Linear(4, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def train(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    backward: Callable[[torch.Tensor], None] = torch.Tensor.backward,
) -> float:
    """The loss of a step, which depends on all steps before it."""
    loss = model(torch.ones(2, 4)).square().mean()
    optimizer.zero_grad()
    backward(loss)
    optimizer.step()
    return loss.item()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
