"""The costs of fabric: counts that do not depend on the machine, and the record of times."""

import gc
import json
import subprocess
import sys
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.__main__ import all_cases
from benchmarks.cases import step
from benchmarks.framework import OURS, RAW, Case, Row, compare
from benchmarks.models import step_of, tiny
from benchmarks.report import PAGES, in_page, missed, tables, to_record
from benchmarks.timing import count_calls
from fabric import Fabric
from fabric._torch import DispatchMode
from tests.compilers import NEEDS_CPP_COMPILER
from tests.ranks import run_in_ranks

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "results.json"


def warm_calls(run_step: Callable[[], Any]) -> int:
    # The first steps are checked. With several ranks, the results of all must be in the store.
    for _ in range(8):
        run_step()
    return count_calls(run_step, number=10)


# The raw loops have autocast and a GradScaler of their own.
@pytest.mark.parametrize(
    ("precision", "max_calls"), [("32-true", 3), ("bf16-mixed", 4), ("16-mixed", 14)]
)
def test_a_step_on_one_device_makes_few_more_python_calls_than_the_raw_loop(
    precision: str, max_calls: int
) -> None:
    calls = warm_calls(step.ours(precision))
    raw_calls = warm_calls(step.raw(precision))
    assert calls - raw_calls <= max_calls


# Five of them note for the hang reports where this rank is.
@pytest.mark.parametrize(("strategy", "max_calls"), [("ddp", 16), ("fsdp", 15)])
def test_a_step_on_two_ranks_makes_few_more_python_calls_than_the_wrapper_by_hand(
    strategy: str, max_calls: int
) -> None:
    # The default, whatever --check-replicas says: a comparison of replicas makes calls.
    calls_of_ranks = run_in_ranks(count_ours, strategy=strategy, check_replicas=True)
    raw_calls_of_ranks = run_in_ranks(count_raw, strategy=strategy)
    for calls, raw_calls in zip(calls_of_ranks, raw_calls_of_ranks, strict=True):
        assert calls - raw_calls <= max_calls


def count_ours(fabric: Fabric) -> int:
    model, optimizer, inputs, targets = tiny()
    model, optimizer = fabric.setup(model, optimizer)
    run_step = step_of(model, optimizer, fabric.backward, inputs, targets)
    return warm_calls(run_step)


def count_raw(fabric: Fabric) -> int:
    model, _, inputs, targets = tiny()
    prepared: Any
    if fabric.strategy.name == "fsdp":
        prepared = fully_shard(model)
    else:
        prepared = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(prepared.parameters(), lr=0.01)
    run_step = step_of(prepared, optimizer, torch.Tensor.backward, inputs, targets)
    return warm_calls(run_step)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("has_gradients", [True, False])
def test_a_pass_in_a_loop_with_equal_batch_counts_makes_no_more_python_calls_than_outside(
    strategy: str, has_gradients: bool
) -> None:
    options = {"strategy": strategy, "check_replicas": True}
    for outside, inside in run_in_ranks(count_pass_in_loop, has_gradients, **options):
        assert inside == outside


def count_pass_in_loop(fabric: Fabric, has_gradients: bool) -> tuple[int, int]:
    model, optimizer, inputs, targets = tiny()
    model, optimizer = fabric.setup(model, optimizer)
    run_step = step_of(model, optimizer, fabric.backward, inputs, targets)
    run_pass = run_step
    if not has_gradients:
        run_pass = partial(run_without_gradients, model, inputs)
    outside = warm_calls(run_step)
    if not has_gradients:
        outside = warm_calls(run_pass)
    data = TensorDataset(torch.zeros(32))
    for number, _ in enumerate(fabric.setup_dataloaders(DataLoader(data))):
        if number == 0:
            # Now each rank has published how many batches it has.
            fabric.barrier()
            inside = warm_calls(run_pass)
            return outside, inside
    raise AssertionError("the loader has a batch")


def run_without_gradients(model: nn.Module, inputs: torch.Tensor) -> None:
    with torch.no_grad():
        model(inputs)


def test_to_build_another_model_costs_the_same_beside_a_large_one_that_is_set_up() -> None:
    for beside_small, beside_large in run_in_ranks(count_building):
        assert beside_small == beside_large


def count_building(fabric: Fabric) -> list[int]:
    counts = []
    for size in (1, 100):
        layers = [nn.Linear(2, 2) for _ in range(size)]
        model = fabric.setup(nn.Sequential(*layers))
        gc.collect()  # the model before
        counts.append(count_calls(lambda: nn.Linear(2, 2), number=5))
        del model
    return counts


def test_a_batch_on_the_cpu_makes_one_more_python_call_than_in_the_raw_loop() -> None:
    def calls(count: int, prepare: Callable[[DataLoader[Any]], Any]) -> int:
        dataset = TensorDataset(torch.zeros(4 * count))
        loader = prepare(DataLoader(dataset, batch_size=4))
        return count_calls(lambda: deque(loader, maxlen=0), number=3)

    with Fabric(accelerator="cpu", devices=1) as fabric:
        calls_of_10 = calls(10, fabric.setup_dataloaders) - calls(10, keep_loader)
        calls_of_110 = calls(110, fabric.setup_dataloaders) - calls(110, keep_loader)
    assert calls_of_110 - calls_of_10 == 100


def keep_loader(loader: DataLoader[Any]) -> DataLoader[Any]:
    return loader


def test_the_number_of_python_calls_is_that_of_the_python_functions_called() -> None:
    def inner() -> None: ...

    def outer() -> None:
        inner()
        inner()
        len("no Python function")

    # The call of outer itself is not counted.
    assert count_calls(outer) == 2


def test_to_ask_whether_to_stop_costs_three_python_calls_and_no_collective() -> None:
    for collectives, calls in run_in_ranks(count_asking):
        assert collectives == 0
        assert calls == 3


def count_asking(fabric: Fabric) -> tuple[int, int]:
    with CommDebugMode() as mode:
        assert not fabric.should_stop
        calls = count_calls(lambda: fabric.should_stop, number=10)
        calls_of_lambda = count_calls(lambda: None, number=10)
    return mode.get_total_counts(), calls - calls_of_lambda


def test_a_tree_costs_one_collective_for_each_dtype() -> None:
    tree = {
        "floats": [float(number) for number in range(100)],
        "tensors": [torch.ones(2, 2) for _ in range(100)],
        "integers": [1, torch.tensor(2)],
    }
    expected = {"float64", "float32", "int64"}
    for reduced, gathered in run_in_ranks(count_collectives, tree):
        assert reduced == len(expected)
        assert gathered == len(expected)


def count_collectives(fabric: Fabric, tree: Any) -> list[int]:
    counts = []
    for collective in (partial(fabric.all_reduce, reduce_op="sum"), fabric.all_gather):
        with CommDebugMode() as mode:
            collective(tree)
        counts.append(mode.get_total_counts())
    return counts


def test_a_number_is_reduced_in_few_python_calls_and_few_operators() -> None:
    for calls_of_float, calls_of_tensor, *operators in run_in_ranks(count_reduced_number):
        assert calls_of_float <= 30
        assert calls_of_tensor <= 33
        # Copy the numbers to the rows, exchange the rows, and add them.
        assert operators == [3, 3]


def count_reduced_number(fabric: Fabric) -> list[int]:
    metrics = {f"metric {number}": float(number) for number in range(1000)}
    reduce_metrics = partial(fabric.all_reduce, metrics, reduce_op="sum")
    reduce_float = partial(fabric.all_reduce, 1.0, reduce_op="sum")
    reduce_tensor = partial(fabric.all_reduce, torch.ones(()), reduce_op="sum")
    calls = [
        count_calls(reduce_number, number=10) for reduce_number in (reduce_float, reduce_tensor)
    ]
    for reduce_floats in (reduce_float, reduce_metrics):
        reduce_floats()  # makes the rows
        with Operators() as operators:
            reduce_floats()
        calls.append(operators.count)
    return calls


class Operators(DispatchMode):
    """Counts the operators that torch runs."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


# -- the record of what it costs in time -----------------------------------------------------------


def rounds(raw: list[float], ours: list[float]) -> list[dict[str, dict[str, float]]]:
    measured: list[dict[str, dict[str, float]]] = []
    for raw_time, our_time in zip(raw, ours, strict=True):
        measured.append({RAW: {"time": raw_time}, OURS: {"time": our_time}})
    return measured


def test_numbers_are_compared_within_their_round() -> None:
    # The machine is ten times slower in the last round, but the ratio of that round is the same.
    actual = compare(rounds([1, 2, 10], [1.1, 2.2, 11]), "time", OURS, RAW, "ratio")
    assert actual is not None
    assert actual.low == pytest.approx(1.1)
    assert actual.high == pytest.approx(1.1)


@pytest.mark.parametrize(
    ("row", "ours", "message"),
    [
        (Row("us", "difference", 3), [12.0, 12.0, 12.0], None),
        (Row("us", "difference", 3), [14.0, 14.0, 14.0], "beyond the spread"),
        (Row("us", "difference", 3), [8.0, 14.0, 14.0], "within the spread"),
        (Row("us", "ratio", 1.1), [12.0, 12.0, 12.0], "beyond the spread"),
        (Row("tokens/s", "ratio", 0.99), [12.0, 12.0, 12.0], None),
        (Row("tokens/s", "ratio", 0.99), [8.0, 8.0, 8.0], "beyond the spread"),
    ],
)
def test_a_missed_budget_is_told(row: Row, ours: list[float], message: str | None) -> None:
    case = Case("case", "A case", {"time": row}, {})
    lines = missed(to_record(case, rounds([10.0] * 3, ours), {}))
    if message is None:
        assert lines == []
    else:
        [line] = lines
        assert message in line


def test_a_missing_peer_is_a_dash_with_its_reason() -> None:
    case = Case("case", "A case", {"time": Row("us")}, {})
    record = to_record(case, rounds([1.0], [2.0]), {"accelerate": "No module named 'accelerate'"})
    text = tables({"machine": "here", "cases": {"case": record}})
    assert "| time | us | 1 | 2 | - | - | 2.00x (2.00 to 2.00) | - | - |" in text
    assert "- accelerate: No module named 'accelerate'" in text


def test_the_pages_and_the_tables_are_those_of_the_committed_results() -> None:
    results = json.loads(RESULTS.read_text())
    for page in PAGES:
        assert in_page(page.read_text(), results) == page.read_text()
    assert RESULTS.with_suffix(".md").read_text() == tables(results)


def first_case_of_each_module() -> list[str]:
    first_of_module: dict[str, str] = {}
    for name, (module, _) in all_cases().items():
        first_of_module.setdefault(module, name)
    return list(first_of_module.values())


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(first_case_of_each_module(), id="one of each module", marks=pytest.mark.slow),
        pytest.param(["gpt-tensor"], id="tensor parallelism", marks=pytest.mark.slow),
        pytest.param(
            ["gpt-tensor-compiled", "gpt-tensor-compiling"],
            id="compiled",
            marks=[pytest.mark.slow, NEEDS_CPP_COMPILER],
        ),
        pytest.param(list(all_cases()), id="all", marks=[pytest.mark.slow, pytest.mark.soak]),
    ],
)
def test_cases_of_the_benchmarks_run(cases: list[str]) -> None:
    command = [sys.executable, "-m", "benchmarks", "--quick", *cases]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
