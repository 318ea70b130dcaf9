"""``goodput_fabric.py CHECKPOINTS LOG STEPS``: the job of ``goodput.py`` with fabric."""

import sys

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader

from benchmarks.goodput_job import (
    BATCH,
    SAVE_EVERY,
    JobLog,
    build_dataset,
    build_model,
)
from fabric import Fabric


def main() -> None:
    folder, log_path, steps = sys.argv[1:]
    log = JobLog(log_path)
    with Fabric(accelerator="cpu", devices=2) as fabric:
        fabric.launch()
        torch.manual_seed(0)
        model: nn.Module = build_model()
        optimizer = torch.optim.AdamW(model.parameters())
        model, optimizer = fabric.setup(model, optimizer)
        loader = DataLoader(build_dataset(), BATCH // fabric.world_size, shuffle=True)
        loader = fabric.setup_dataloaders(loader)
        checkpoints = fabric.checkpoints(folder, keep=2)
        state = {"model": model, "optimizer": optimizer, "loader": loader}
        step = checkpoints.restore(state) or 0
        log.restored()
        while step < int(steps):
            for inputs, targets, numbers in loader:
                loss = mse_loss(model(inputs), targets)
                optimizer.zero_grad()
                fabric.backward(loss)
                optimizer.step()
                step += 1
                mean = fabric.all_reduce(loss.detach())
                log.step(step, mean, fabric.gather_for_metrics(numbers))
                if step % SAVE_EVERY == 0:
                    checkpoints.save(step, state)
                if step == int(steps):
                    break


if __name__ == "__main__":
    main()
