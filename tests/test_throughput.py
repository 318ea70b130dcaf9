"""Throughput: sums over ranks, model FLOPs as torch counts them, and what does not count as time."""

import csv
import re
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from fabric import Fabric, Throughput
from fabric.errors import ConfigurationError, UsageError
from fabric.loggers import CSVLogger
from fabric.strategies import ModelParallelStrategy
from tests.ranks import run_in_ranks

NAMES = {"samples_per_second", "tokens_per_second", "flops_per_second", "mfu"}


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)
        self.recompute = False

    def forward(self, x: Tensor) -> Tensor:
        return (
            checkpoint(self._forward, x, use_reentrant=False)
            if self.recompute
            else self._forward(x)
        )

    def _forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())


def flops_of_torch(samples: int) -> int:
    x = torch.ones(samples, 8, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        Blocks()(x).sum().backward()
    return counter.get_total_flops()


def train(
    fabric: Fabric, model: Any, samples: int, steps: int = 5, **options: Any
) -> dict[str, float]:
    """The rates of the last window; each sample is 3 tokens."""
    throughput = Throughput(fabric, warmup=1, every=2, peak_flops=1e6, **options)
    found = []
    for _ in range(steps):
        with throughput.count_flops():
            fabric.backward(model(torch.ones(samples, 8, requires_grad=True)).sum())
        found.append(throughput.update(samples, 3 * samples))
    assert [rates is not None for rates in found] == [False, False, True, False, True]
    assert found[-1] is not None
    return found[-1]


def train_on_ranks(fabric: Fabric) -> dict[str, float]:
    return train(fabric, fabric.setup(Blocks()), samples=2 + fabric.global_rank)


def test_rates_are_of_all_ranks_together_the_same_on_each_and_logged_by_the_first(tmp_path):
    first, second = run_in_ranks(train_on_ranks, loggers=CSVLogger(str(tmp_path)))
    assert first == second
    assert first.keys() == NAMES
    assert first["tokens_per_second"] == pytest.approx(3 * first["samples_per_second"])
    flops = (flops_of_torch(2) + flops_of_torch(3)) / 5  # of a sample
    assert first["flops_per_second"] == pytest.approx(flops * first["samples_per_second"])
    assert first["mfu"] == pytest.approx(first["flops_per_second"] / 2 / 1e6)
    [table] = tmp_path.rglob("metrics.csv")
    rows = list(csv.DictReader(table.read_text().splitlines()))
    assert [int(row["step"]) for row in rows] == [3, 5]
    assert float(rows[-1]["mfu"]) == first["mfu"]


def train_in_parts(fabric: Fabric) -> dict[str, float]:
    return train(fabric, fabric.setup(Blocks()), samples=4)


def test_parts_of_layers_count_each_batch_once_and_all_flops():
    strategy = ModelParallelStrategy(
        tensor_parallel_size=2, tp_plan={"up": "colwise", "down": "rowwise"}
    )
    actual = run_in_ranks(train_in_parts, strategy=strategy)[0]
    flops = flops_of_torch(4) / 4
    assert actual["flops_per_second"] == pytest.approx(flops * actual["samples_per_second"])
    assert actual["mfu"] == pytest.approx(actual["flops_per_second"] / 2 / 1e6)


def count_messages(fabric: Fabric) -> list[int]:
    throughput = Throughput(fabric, warmup=1, every=3)
    counts = []
    for _ in range(7):
        throughput.update(1)
        counts.append(sum(fabric._session.runtime.recorder.counts.values()))  # type: ignore[union-attr]
    return [after - before for before, after in pairwise(counts)]


def test_a_window_costs_one_message_and_a_step_none():
    assert run_in_ranks(count_messages)[0] == [0, 0, 1, 0, 0, 1]


@pytest.fixture
def alone():
    with Fabric(accelerator="cpu") as fabric:
        yield fabric


def test_what_is_computed_again_is_no_model_flop(alone):
    model = alone.setup(Blocks())
    model.recompute = True
    actual = train(alone, model, samples=4)
    assert actual["flops_per_second"] == pytest.approx(
        flops_of_torch(4) / 4 * actual["samples_per_second"]
    )


def test_a_compiled_model_is_counted_and_compiled_afterwards(alone):
    compiled = []

    def backend(graph: Any, _inputs: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    model = torch.compile(alone.setup(Blocks()), backend=backend)
    actual = train(alone, model, samples=4)
    assert len(compiled) == 1
    assert actual["flops_per_second"] == pytest.approx(
        flops_of_torch(4) / 4 * actual["samples_per_second"]
    )


def test_flops_of_a_first_step_without_samples_are_of_no_use_to_later_ones(alone):
    throughput = Throughput(alone, warmup=1, every=1)
    with throughput.count_flops():
        torch.ones(2, 2) @ torch.ones(2, 2)
    assert throughput.update(samples=0) is None
    actual = throughput.update(samples=4)
    assert actual is not None
    assert actual["samples_per_second"] > 0
    assert actual.get("flops_per_second", 0.0) == 0.0


def test_time_before_the_warmup_and_in_a_pause_does_not_count(alone):
    throughput = Throughput(alone, warmup=1, every=2)
    began = time.perf_counter()

    def busy(seconds: float) -> None:
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            pass

    busy(0.2)
    assert throughput.update(1) is None
    with throughput.paused():
        busy(0.3)
    throughput.update(torch.tensor(4))  # a tensor is read at the end of the window
    busy(0.05)
    actual = throughput.update(6)
    assert actual is not None
    assert actual.keys() == {"samples_per_second"}
    seconds = 10 / actual["samples_per_second"]
    assert 0.05 <= seconds <= time.perf_counter() - began - 0.5


def test_the_loop_of_the_page_logs_what_it_says(tmp_path):
    page = (Path(__file__).parents[1] / "docs" / "long-runs.md").read_text()
    [code] = re.findall(r"^## How fast\n+```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    names: dict[str, Any] = {"cross_entropy": nn.functional.cross_entropy}
    exec(code, names)
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5))
    with Fabric(accelerator="cpu", loggers=CSVLogger(str(tmp_path))) as fabric:
        model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters()))
        names["train"](fabric, model, optimizer, [(torch.ones(2, 3, dtype=torch.int64),) * 2] * 60)
    [row] = csv.DictReader(next(tmp_path.rglob("metrics.csv")).read_text().splitlines())
    assert row.keys() == {"step", *NAMES}
    assert row["step"] == "60"


def test_wrong_numbers_and_a_peak_without_flops_are_errors(alone):
    for options in ({"every": 0}, {"warmup": 0}, {"peak_flops": 0}, {"peak_flops": float("nan")}):
        with pytest.raises(ConfigurationError, match="Throughput"):
            Throughput(alone, **options)
    throughput = Throughput(alone, warmup=1, every=1, peak_flops=1e12)
    throughput.update(1)
    with pytest.raises(UsageError, match="no FLOPs were counted"):
        throughput.update(1)


def test_an_operation_without_a_formula_is_an_error_not_a_smaller_number(alone):
    x = torch.ones(4, 4)
    with pytest.raises(UsageError, match="no formula for cond"), Throughput(alone).count_flops():
        torch.cond(x.sum() > 0, lambda x: x @ x, lambda x: x, (x,))
