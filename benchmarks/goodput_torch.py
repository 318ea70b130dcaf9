"""``goodput_torch.py CHECKPOINTS LOG STEPS``: the job of ``goodput.py`` in plain torch.

It uses DDP and torch.distributed.checkpoint. A save is complete when the file ``latest`` names it.
The position in the data is that of the step: the order of each epoch is drawn from its number.
"""

import os
import shutil
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from benchmarks.goodput_job import (
    BATCH,
    SAVE_EVERY,
    JobLog,
    build_dataset,
    build_model,
)


def save(folder: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Write a checkpoint, then let ``latest`` name it, and then remove the previous one."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    target = folder / f"step-{step}"
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=target)
    if dist.get_rank() == 0:
        (folder / "latest.new").write_text(target.name)
        os.replace(folder / "latest.new", folder / "latest")
        for path in folder.glob("step-*"):
            if path != target:
                shutil.rmtree(path)


def restore(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load the newest checkpoint, and return its step, or 0 if there is none."""
    latest = folder / "latest"
    if not latest.exists():
        return 0
    name = latest.read_text()
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(state, checkpoint_id=folder / name)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    return int(name.removeprefix("step-"))


def main() -> None:
    folder, log_path, steps = sys.argv[1:]
    log = JobLog(log_path)
    dist.init_process_group("gloo")
    world_size = dist.get_world_size()
    torch.manual_seed(0)
    model = DistributedDataParallel(build_model())
    optimizer = torch.optim.AdamW(model.parameters())
    dataset = build_dataset()
    sampler = DistributedSampler(dataset, shuffle=True)
    loader = DataLoader(dataset, BATCH // world_size, sampler=sampler)
    Path(folder).mkdir(exist_ok=True)
    step = restore(Path(folder), model, optimizer)
    log.restored()
    while step < int(steps):
        epoch, batches_to_skip = divmod(step, len(loader))
        sampler.set_epoch(epoch)
        for index, (inputs, targets, numbers) in enumerate(loader):
            if index < batches_to_skip:
                continue
            loss = mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            mean = loss.detach() / world_size
            dist.all_reduce(mean)
            samples_of_ranks = [torch.empty_like(numbers) for _ in range(world_size)]
            dist.all_gather(samples_of_ranks, numbers)
            log.step(step, mean, torch.cat(samples_of_ranks))
            if step % SAVE_EVERY == 0:
                save(Path(folder), step, model, optimizer)
            if step == int(steps):
                break
    dist.barrier()
    log.end()


if __name__ == "__main__":
    main()
