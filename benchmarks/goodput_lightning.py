"""``goodput_lightning.py CHECKPOINTS LOG STEPS``: the job of ``goodput.py`` with Lightning Fabric.

The checkpoint is one file, which each save replaces. It has the step, and a restart skips the
batches of its epoch that were done.
"""

import sys
from pathlib import Path

import torch
from lightning_fabric import Fabric  # pyright: ignore[reportMissingImports]  # an extra
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader

from benchmarks.goodput_job import (
    BATCH,
    SAVE_EVERY,
    JobLog,
    build_dataset,
    build_model,
)


def main() -> None:
    folder, log_path, steps = sys.argv[1:]
    log = JobLog(log_path)
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    torch.manual_seed(0)
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = fabric.setup(model, optimizer)
    loader = DataLoader(build_dataset(), BATCH // fabric.world_size, shuffle=True)
    loader = fabric.setup_dataloaders(loader)
    checkpoint = Path(folder, "last.ckpt")
    state = {"model": model, "optimizer": optimizer, "step": 0}
    if checkpoint.exists():
        fabric.load(checkpoint, state)
    step: int = state["step"]
    log.restored()
    while step < int(steps):
        batches_to_skip = step % len(loader)
        for index, (inputs, targets, numbers) in enumerate(loader):
            if index < batches_to_skip:
                continue
            loss = mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            fabric.backward(loss)
            optimizer.step()
            step += 1
            mean = fabric.all_reduce(loss.detach())
            log.step(step, mean, fabric.all_gather(numbers).flatten())
            if step % SAVE_EVERY == 0:
                state["step"] = step
                fabric.save(checkpoint, state)
            if step == int(steps):
                break
    fabric.barrier()
    log.end()


if __name__ == "__main__":
    main()
