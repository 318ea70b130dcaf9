"""A check of `make wheel`: training, saving and loading with the wheel and its requirements."""

import importlib.util
import tempfile
from pathlib import Path

import torch

from fabric import Fabric


def main() -> None:
    """Train, save and load on 2 processes under DDP and under FSDP."""
    extras = [
        name
        for name in ("numpy", "safetensors", "cloudpickle", "hypothesis")
        if importlib.util.find_spec(name)
    ]
    assert not extras, f"an environment without extras holds {extras}"
    with tempfile.TemporaryDirectory() as folder:
        for strategy in ("ddp", "fsdp"):
            with Fabric(
                accelerator="cpu", devices=2, strategy=strategy, launcher="spawn"
            ) as fabric:
                fabric.launch(train, Path(folder, strategy))
            print(f"{strategy}: trained, saved and loaded on 2 processes")


def train(fabric: Fabric, path: Path) -> None:
    """Train, save, change the model, and load it, on each rank."""
    torch.manual_seed(0)
    with fabric.init_module():
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 2))
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters()))
    for _ in range(2):
        optimizer.zero_grad()
        fabric.backward(model(torch.ones(3, 4)).sum())
        optimizer.step()
    targets = {"model": model, "optimizer": optimizer}
    output = model(torch.ones(3, 4)).detach()
    fabric.save(path, {**targets, "step": 1})
    fabric.save(path, {**targets, "step": 2}, async_=True)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert fabric.load(path, targets)["step"] == 2
    assert torch.equal(model(torch.ones(3, 4)), output)


if __name__ == "__main__":
    main()
