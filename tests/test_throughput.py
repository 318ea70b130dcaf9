"""Throughput sums over ranks, counts model FLOPs as torch does, and leaves pauses out."""

import csv
import re
import time
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


def read_rows(table: Path) -> list[dict[str, str]]:
    with table.open(newline="") as file:
        return list(csv.DictReader(file))


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)
        self.recompute = False

    def forward(self, x: Tensor) -> Tensor:
        if self.recompute:
            return checkpoint(self._forward, x, use_reentrant=False)
        return self._forward(x)

    def _forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())


def flops_of_torch(samples: int) -> int:
    x = torch.ones(samples, 8, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        loss = Blocks()(x).sum()
        loss.backward()
    return counter.get_total_flops()


def train(fabric: Fabric, model: Any, samples: int) -> dict[str, float]:
    """Train for five steps, and return the rates of the last window. A sample is 3 tokens."""
    throughput = Throughput(fabric, warmup=1, every=2, peak_flops=1e6)
    steps_with_rates = []
    rates = None
    for step in range(1, 6):
        x = torch.ones(samples, 8, requires_grad=True)
        with throughput.count_flops():
            loss = model(x).sum()
            fabric.backward(loss)
        rates = throughput.update(samples, 3 * samples)
        if rates is not None:
            steps_with_rates.append(step)
    assert steps_with_rates == [3, 5]
    assert rates is not None
    return rates


def assert_has_flops_per_sample(rates: dict[str, float], flops_per_sample: float) -> None:
    expected = flops_per_sample * rates["samples_per_second"]
    assert rates["flops_per_second"] == pytest.approx(expected)


def train_on_ranks(fabric: Fabric) -> dict[str, float]:
    module = Blocks()
    model = fabric.setup(module)
    return train(fabric, model, samples=2 + fabric.global_rank)


def test_rates_are_of_all_ranks_together_the_same_on_each_and_logged_by_the_first(tmp_path):
    first, second = run_in_ranks(train_on_ranks, loggers=CSVLogger(str(tmp_path)))
    assert first == second
    assert first.keys() == NAMES
    assert first["tokens_per_second"] == pytest.approx(3 * first["samples_per_second"])
    flops_of_both_ranks = flops_of_torch(2) + flops_of_torch(3)
    assert_has_flops_per_sample(first, flops_of_both_ranks / 5)
    assert first["mfu"] == pytest.approx(first["flops_per_second"] / 2 / 1e6)
    [table] = tmp_path.rglob("metrics.csv")
    row_of_step_3, row_of_step_5 = read_rows(table)
    assert row_of_step_3["step"] == "3"
    assert row_of_step_5["step"] == "5"
    assert float(row_of_step_5["mfu"]) == first["mfu"]


def train_tensor_parallel(fabric: Fabric) -> dict[str, float]:
    module = Blocks()
    model = fabric.setup(module)
    return train(fabric, model, samples=4)


def test_split_layers_count_each_batch_once_and_all_flops():
    tp_plan = {"up": "colwise", "down": "rowwise"}
    strategy = ModelParallelStrategy(tensor_parallel_size=2, tp_plan=tp_plan)
    rates, _ = run_in_ranks(train_tensor_parallel, strategy=strategy)
    assert_has_flops_per_sample(rates, flops_of_torch(4) / 4)
    assert rates["mfu"] == pytest.approx(rates["flops_per_second"] / 2 / 1e6)


def count_messages(fabric: Fabric) -> list[int]:
    """Return the number of messages of each of six steps."""
    throughput = Throughput(fabric, warmup=1, every=3)
    counts = fabric._session.runtime.recorder.counts  # type: ignore[union-attr]
    throughput.update(1)
    messages_of_steps = []
    for _ in range(6):
        messages_before = sum(counts.values())
        throughput.update(1)
        messages = sum(counts.values()) - messages_before
        messages_of_steps.append(messages)
    return messages_of_steps


def test_a_window_costs_one_message_and_a_step_none():
    messages_of_steps, _ = run_in_ranks(count_messages)
    assert messages_of_steps == [0, 0, 1, 0, 0, 1]


@pytest.fixture
def single_process():
    with Fabric(accelerator="cpu") as fabric:
        yield fabric


def test_what_is_computed_again_is_no_model_flop(single_process):
    model = single_process.setup(Blocks())
    model.recompute = True
    rates = train(single_process, model, samples=4)
    assert_has_flops_per_sample(rates, flops_of_torch(4) / 4)


def test_a_compiled_model_is_counted_and_compiled_afterwards(single_process):
    compiled = []

    def backend(graph: Any, _inputs: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    module = single_process.setup(Blocks())
    model = torch.compile(module, backend=backend)
    rates = train(single_process, model, samples=4)
    assert len(compiled) == 1
    assert_has_flops_per_sample(rates, flops_of_torch(4) / 4)


def test_flops_of_a_first_step_without_samples_are_of_no_use_to_later_steps(single_process):
    throughput = Throughput(single_process, warmup=1, every=1)
    with throughput.count_flops():
        torch.ones(2, 2) @ torch.ones(2, 2)
    assert throughput.update(samples=0) is None
    rates = throughput.update(samples=4)
    assert rates is not None
    assert rates["samples_per_second"] > 0
    assert rates.get("flops_per_second", 0.0) == 0.0


def compute_for(seconds: float) -> None:
    deadline = time.perf_counter() + seconds
    while time.perf_counter() < deadline:
        pass


def test_time_before_the_warmup_and_in_a_pause_does_not_count(single_process):
    throughput = Throughput(single_process, warmup=1, every=2)
    started = time.perf_counter()
    compute_for(0.2)
    assert throughput.update(1) is None
    with throughput.paused():
        compute_for(0.3)
    # A tensor is read at the end of the window.
    throughput.update(torch.tensor(4))
    compute_for(0.05)
    rates = throughput.update(6)
    assert rates is not None
    assert rates.keys() == {"samples_per_second"}
    seconds = 10 / rates["samples_per_second"]
    assert seconds >= 0.05
    assert seconds <= time.perf_counter() - started - 0.5


def documented_code() -> str:
    """Return the code of the section on throughput of the page on long runs."""
    page = Path(__file__).parents[1] / "docs" / "long-runs.md"
    section = re.compile(r"^## How fast\n+```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
    [code] = section.findall(page.read_text())
    return code


def test_the_loop_of_the_page_logs_what_it_says(tmp_path):
    names: dict[str, Any] = {"cross_entropy": nn.functional.cross_entropy}
    exec(documented_code(), names)
    plain_model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5))
    plain_optimizer = torch.optim.SGD(plain_model.parameters())
    tokens = torch.ones(2, 3, dtype=torch.int64)
    batches = [(tokens, tokens)] * 60
    with Fabric(accelerator="cpu", loggers=CSVLogger(str(tmp_path))) as fabric:
        model, optimizer = fabric.setup(plain_model, plain_optimizer)
        names["train"](fabric, model, optimizer, batches)
    [table] = tmp_path.rglob("metrics.csv")
    [row] = read_rows(table)
    assert row.keys() == {"step", *NAMES}
    assert row["step"] == "60"


@pytest.mark.parametrize(
    "options",
    [{"every": 0}, {"warmup": 0}, {"peak_flops": 0}, {"peak_flops": float("nan")}],
    ids=repr,
)
def test_wrong_numbers_are_errors(single_process, options):
    with pytest.raises(ConfigurationError, match="Throughput"):
        Throughput(single_process, **options)


def test_a_peak_without_flops_is_an_error(single_process):
    throughput = Throughput(single_process, warmup=1, every=1, peak_flops=1e12)
    throughput.update(1)
    with pytest.raises(UsageError, match="no FLOPs were counted"):
        throughput.update(1)


def test_an_operation_without_a_formula_is_an_error_not_a_smaller_number(single_process):
    x = torch.ones(4, 4)
    throughput = Throughput(single_process)
    with pytest.raises(UsageError, match="no formula for cond"), throughput.count_flops():
        torch.cond(x.sum() > 0, lambda x: x @ x, lambda x: x, (x,))
