"""Any strategy, any number of ranks to any other, from a file or a folder of shards: the values are the same."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fabric import Fabric
from fabric.checkpoint import ShardedCheckpoint
from fabric.strategies import FSDPStrategy
from tests.loops import batches, make_model
from tests.ranks import SharedRanks

JOBS = {
    "single": {"strategy": "single_device", "devices": 1},
    **{f"dp-{n}": {"strategy": "dp", "devices": n} for n in (1, 2, 3, 4)},
    **{f"ddp-{n}": {"strategy": "ddp", "devices": n} for n in (1, 2, 3, 4)},
    **{f"fsdp-{n}": {"strategy": "fsdp", "devices": n} for n in (1, 2, 3, 4)},
    **{f"full-{n}": {"state_dict_type": "full", "devices": n} for n in (1, 2, 3, 4)},
    "hybrid-4": {"sharding_strategy": "HYBRID_SHARD", "device_mesh": (2, 2), "devices": 4},
}
SOME = ["single", "dp-2", "fsdp-2", "full-3"]


def run(job: str, function: Any, *args: Any) -> Any:
    options: dict[str, Any] = dict(JOBS[job])
    if "strategy" not in options:
        devices = options.pop("devices")
        options = {"strategy": FSDPStrategy(**options), "devices": devices}
    fabric = Fabric(accelerator="cpu", precision="64-true", launcher=SharedRanks(), **options)
    try:
        return fabric.launch(function, *args)
    finally:
        fabric.teardown()


def step(
    fabric: Fabric, model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor]
) -> float:
    x, y = (tensor[fabric.global_rank :: fabric.world_size] for tensor in batch)
    loss = nn.functional.mse_loss(model(x), y)
    fabric.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    return fabric.all_reduce(loss.detach()).item()


def train_and_save(fabric: Fabric, path: Path) -> None:
    model, optimizer = fabric.setup(*make_model(torch.float64))
    for batch in batches(torch.float64):
        step(fabric, model, optimizer, batch)
    fabric.save(path, {"model": model, "optimizer": optimizer})


def load_save_and_go_on(fabric: Fabric, paths: list[Path], copies: Path) -> list[float]:
    """Load each checkpoint into a fresh model, write it again as it was loaded, and the loss of one more step."""
    losses = []
    for path in paths:
        model, optimizer = fabric.setup(*make_model(torch.float64))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(9)
        state = {"model": model, "optimizer": optimizer}
        fabric.load(path, state)
        fabric.save(copies / path.name, state)
        losses.append(step(fabric, model, optimizer, next(batches(torch.float64))))
    return losses


def contents(path: Path) -> dict[str, Any]:
    loaded = (
        ShardedCheckpoint().load(path) if path.is_dir() else torch.load(path, weights_only=True)
    )
    return {"model": loaded["model"], "optimizer": loaded["optimizer"]}


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "jobs",
    [pytest.param(SOME, id="some"), pytest.param(list(JOBS), id="all", marks=pytest.mark.slow)],
)
def test_a_checkpoint_of_any_job_loads_into_any_other(jobs: list[str], tmp_path: Path) -> None:
    paths = [tmp_path / job for job in jobs]
    for job, path in zip(jobs, paths, strict=True):
        run(job, train_and_save, path)
    expected = None
    for job in jobs:
        copies = tmp_path / f"by-{job}"
        losses = run(job, load_save_and_go_on, paths, copies)
        sharded = job.startswith(("fsdp", "hybrid"))
        for path in paths:
            assert (copies / path.name).is_dir() is sharded
            torch.testing.assert_close(contents(copies / path.name), contents(path), rtol=0, atol=0)
        expected = expected or losses[0]
        assert losses == pytest.approx([expected] * len(jobs), rel=1e-10)
