"""``goodput_accelerate.py CHECKPOINTS LOG STEPS``: the job of ``goodput.py`` with Accelerate.

Each save is a folder ``step_N``. A restart loads the newest one, and skips the batches of its epoch
that were done, as Accelerate's own examples do.
"""

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator  # pyright: ignore[reportMissingImports]  # an extra
from accelerate.utils import (  # pyright: ignore[reportMissingImports]  # an extra
    DataLoaderConfiguration,
)
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader

from benchmarks.goodput_job import (
    BATCH,
    SAVE_EVERY,
    JobLog,
    build_dataset,
    build_model,
)

KEEP = 2


def restore(accelerator: Accelerator, folder: Path) -> int:
    """Load the newest checkpoint, and return its step, or 0 if there is none."""
    checkpoints = sorted(folder.glob("step_*"), key=os.path.getctime)
    if not checkpoints:
        return 0
    accelerator.load_state(str(checkpoints[-1]))
    return int(checkpoints[-1].name.removeprefix("step_"))


def save(accelerator: Accelerator, folder: Path, step: int) -> None:
    """Write a checkpoint, and then remove old ones."""
    accelerator.save_state(str(folder / f"step_{step}"))
    if accelerator.is_main_process:
        checkpoints = sorted(folder.glob("step_*"), key=os.path.getctime)
        for path in checkpoints[:-KEEP]:
            shutil.rmtree(path)


def main() -> None:
    folder, log_path, steps = sys.argv[1:]
    log = JobLog(log_path)
    # The sampler then draws each epoch from its number, for runs that can be resumed exactly.
    config = DataLoaderConfiguration(use_seedable_sampler=True)
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    torch.manual_seed(0)
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters())
    loader = DataLoader(build_dataset(), BATCH // accelerator.num_processes, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    step = restore(accelerator, Path(folder))
    log.restored()
    while step < int(steps):
        epoch, batches_to_skip = divmod(step, len(loader))
        loader.set_epoch(epoch)
        batches = loader
        if batches_to_skip > 0:
            batches = accelerator.skip_first_batches(loader, batches_to_skip)
        for inputs, targets, numbers in batches:
            loss = mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            step += 1
            # The types of these two allow collections, too.
            mean: Any = accelerator.reduce(loss.detach(), "mean")
            samples: Any = accelerator.gather_for_metrics(numbers)
            log.step(step, mean, samples)
            if step % SAVE_EVERY == 0:
                save(accelerator, Path(folder), step)
            if step == int(steps):
                break
    accelerator.wait_for_everyone()
    log.end()


if __name__ == "__main__":
    main()
