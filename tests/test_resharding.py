"""Checkpoints load with the same values into any strategy on any number of ranks."""

from collections.abc import Callable
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

STRATEGIES: dict[str, Callable[[], Any]] = {
    "single": lambda: "single_device",
    "dp": lambda: "dp",
    "ddp": lambda: "ddp",
    "fsdp": lambda: "fsdp",
    "full": lambda: FSDPStrategy(state_dict_type="full"),
    "hybrid": lambda: FSDPStrategy(sharding_strategy="HYBRID_SHARD", device_mesh=(2, 2)),
}
# A strategy and a number of ranks.
JOBS = ["single-1"]
for _strategy in ("dp", "ddp", "fsdp", "full"):
    JOBS += [f"{_strategy}-1", f"{_strategy}-2", f"{_strategy}-3", f"{_strategy}-4"]
JOBS += ["hybrid-4"]
SOME = ["single-1", "dp-2", "fsdp-2", "full-3"]


def run(job: str, function: Any, *args: Any) -> Any:
    strategy, _, ranks = job.partition("-")
    with Fabric(
        accelerator="cpu",
        devices=int(ranks),
        strategy=STRATEGIES[strategy](),
        precision="64-true",
        launcher=SharedRanks(),
    ) as fabric:
        return fabric.launch(function, *args)


def step(
    fabric: Fabric, model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor]
) -> float:
    x, y = batch
    rows_of_rank = slice(fabric.global_rank, None, fabric.world_size)
    loss = nn.functional.mse_loss(model(x[rows_of_rank]), y[rows_of_rank])
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
    """Load each checkpoint into a new model and save a copy; return the losses of one more step."""
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
    if path.is_dir():
        loaded = ShardedCheckpoint().load(path)
    else:
        loaded = torch.load(path, weights_only=True)
    return {"model": loaded["model"], "optimizer": loaded["optimizer"]}


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "jobs",
    [
        pytest.param(SOME, id="some"),
        pytest.param(JOBS, id="all", marks=[pytest.mark.slow, pytest.mark.soak]),
    ],
)
def test_a_checkpoint_of_any_job_loads_into_any_other(jobs: list[str], tmp_path: Path) -> None:
    paths = [tmp_path / job for job in jobs]
    for job, path in zip(jobs, paths, strict=True):
        run(job, train_and_save, path)
    losses = []
    for job in jobs:
        copies = tmp_path / f"by-{job}"
        losses += run(job, load_save_and_go_on, paths, copies)
        is_sharded = job.startswith(("fsdp", "hybrid"))
        for path in paths:
            copied = copies / path.name
            assert copied.is_dir() is is_sharded
            torch.testing.assert_close(contents(copied), contents(path), rtol=0, atol=0)
        expected = [losses[0]] * len(losses)
        assert losses == pytest.approx(expected, rel=1e-10)
