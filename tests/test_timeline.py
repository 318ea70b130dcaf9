"""Timings name the phase and the rank that a step waits for, and a trace shows every rank."""

import itertools
import json
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from benchmarks.timing import count_calls
from fabric import Fabric
from fabric.errors import ConfigurationError, UsageError
from tests.ranks import outcome, run_in_ranks

SLEEP = 0.05  # seconds that the slow rank sleeps in a phase
# A measurement is repeated with a longer sleep if other processes have kept the ranks from their
# cores for longer than that: a rank that waits for a core is as late as one that sleeps.
TRIES = 3
PHASES = ("data", "forward", "backward", "optimizer", "save")


class SleepsIn:
    """Sleeps when it is called with one phase."""

    def __init__(self, phase: str | None, seconds: float = SLEEP) -> None:
        self.phase = phase
        self.seconds = seconds

    def __call__(self, phase: str, *_: object) -> None:
        if phase == self.phase:
            time.sleep(self.seconds)


class Batches(Dataset[Tensor]):
    def __init__(self, slow: SleepsIn, length: int) -> None:
        self.slow = slow
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitems__(self, batch: list[int]) -> list[Tensor]:
        self.slow("data")
        return [torch.ones(4) for _ in batch]


class Model(nn.Module):
    def __init__(self, slow: SleepsIn) -> None:
        super().__init__()
        self.slow = slow
        self.first = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        self.slow("forward")
        hidden = self.norm(self.first(x))
        if hidden.requires_grad:
            hidden.register_hook(partial(self.slow, "backward"))
        return self.last(hidden)


class Descent(torch.optim.SGD):
    slow = SleepsIn(None)

    def step(self, closure: Any = None) -> Any:
        self.slow("optimizer")
        return super().step(closure)


class Extra:
    def __init__(self, slow: SleepsIn) -> None:
        self.slow = slow

    def state_dict(self) -> dict[str, Any]:
        self.slow("save")
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def loop(
    fabric: Fabric,
    steps: int = 8,
    phase: str | None = None,
    folder: str = "",
    sleep: float = SLEEP,
) -> Iterator[int]:
    """Train, and yield after each step. Rank 0 is slow in one phase."""
    slow_phase = phase if fabric.global_rank == 0 else None
    slow = SleepsIn(slow_phase, sleep)
    module = Model(slow)
    model, optimizer = fabric.setup(module, Descent(module.parameters(), lr=0.1))
    optimizer.slow = slow
    batches = Batches(slow, 4 * steps * fabric.world_size)
    loader = fabric.setup_dataloaders(DataLoader(batches, batch_size=4))
    for number, batch in enumerate(loader):
        loss = model(batch).sum()
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if folder:
            fabric.save(f"{folder}/{fabric.strategy.name}", {"model": model, "extra": Extra(slow)})
        yield number


def seconds_without_core() -> float:
    """Return how long this thread has waited for a core since it began, which Linux counts."""
    counts = Path("/proc/thread-self/schedstat")
    if not counts.exists():
        return 0.0
    nanoseconds = counts.read_text().split()[1]
    return int(nanoseconds) / 1e9


def slowest_of(
    fabric: Fabric, folder: str, repetitions: int, measured_steps: int
) -> list[tuple[str, object]]:
    """Return for each phase, in which rank 0 was slow, which rank and phase were reported."""
    reports = []
    for phase in PHASES * repetitions:
        checkpoints = folder if phase == "save" else ""
        waited = 0.0
        for _ in range(TRIES):
            sleep = max(SLEEP, 2 * waited)
            before = 0.0
            with fabric.profile(f"{folder}/{phase}", steps=range(2, 2 + measured_steps)):
                for number in loop(fabric, 3 + measured_steps, phase, checkpoints, sleep):
                    if number == 1:
                        before = seconds_without_core()
                waited = seconds_without_core() - before
            waited = fabric.all_reduce(waited, reduce_op="max")
            if waited < sleep:
                break
        reports.append((phase, fabric.timings().slowest))
    return reports


def test_a_rank_that_sleeps_is_named_with_its_phase(tmp_path: Path) -> None:
    for actual in run_in_ranks(slowest_of, str(tmp_path), 1, 2, strategy="fsdp"):
        assert actual == [(phase, (0, phase)) for phase in PHASES]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_rank_that_sleeps_is_named_every_time(strategy: str, tmp_path: Path) -> None:
    for actual in run_in_ranks(slowest_of, str(tmp_path), 3, 5, strategy=strategy):
        assert actual == [(phase, (0, phase)) for phase in PHASES * 3]


def timings_of_loop(fabric: Fabric, sleep: float) -> tuple[Any, str, float]:
    for number in loop(fabric, phase="data", sleep=sleep):
        if number == 0:
            before = seconds_without_core()
    waited = seconds_without_core() - before
    timings = fabric.timings()
    return timings, str(timings), waited


def test_a_fabric_with_timings_says_where_its_steps_go() -> None:
    most_waited = 0.0
    for _ in range(TRIES):
        sleep = max(SLEEP, 2 * most_waited)
        results = run_in_ranks(timings_of_loop, sleep, timings=True)
        most_waited = max(waited for _, _, waited in results)
        if most_waited < sleep:
            break
    for timings, text, _ in results:
        assert timings.slowest == (0, "data")
        assert timings.steps == 7  # the first step had begun before
        assert timings.own["data"][0] >= sleep > timings.own["data"][1]
        # DDP sends the buffers of rank 0 in the forward pass, where rank 1 waits.
        assert timings.own["forward"][1] < sleep
        # On a loaded machine, rank 1 begins to wait a little later.
        assert timings.waited[1] > sleep / 2
        seconds_of_rank_1 = timings.waited[1]
        for seconds_by_rank in timings.own.values():
            seconds_of_rank_1 += seconds_by_rank[1]
        assert seconds_of_rank_1 == pytest.approx(timings.seconds, rel=0.2)
        assert "ms a step for rank 0, in data" in text


# -- the trace ------------------------------------------------------------------------------------


def read(path: Path) -> list[dict[str, Any]]:
    """Return the events of a trace, and check them by the format of Perfetto and Chrome."""
    trace = json.loads(path.read_text())
    assert trace["displayTimeUnit"] == "ms"
    started = set()
    for event in trace["traceEvents"]:
        assert isinstance(event["name"], str)
        assert type(event["pid"]) is int
        assert type(event["tid"]) is int
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name")
            assert isinstance(event["args"]["name"], str)
            continue
        assert event["ts"] >= 0
        key = (event["cat"], event.get("id"), event["pid"], event["name"])
        if event["ph"] == "X":
            assert event["dur"] >= 0
        elif event["ph"] == "b":
            started.add(key)
        else:
            assert key in started, "it ends before it begins"
    return trace["traceEvents"]


class Span(NamedTuple):
    """An event that lasts, in microseconds."""

    name: str
    begin: float
    end: float


def spans(events: list[dict[str, Any]], rank: int) -> list[Span]:
    spans_of_rank = []
    for event in events:
        if event["ph"] == "X" and event["pid"] == rank:
            end = round(event["ts"] + event["dur"], 3)  # to nanoseconds
            spans_of_rank.append(Span(event["name"], event["ts"], end))
    return spans_of_rank


def write_trace(fabric: Fabric, path: str, steps: range | None) -> None:
    with fabric.profile(path, steps):
        for number in loop(fabric, folder=path):
            fabric.barrier(f"after step {number}")


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_trace_has_the_phases_and_collectives_of_every_rank(
    strategy: str, tmp_path: Path
) -> None:
    path = tmp_path / "new" / "trace"
    run_in_ranks(write_trace, str(path), range(2, 5), strategy=strategy)
    events = read(path.with_suffix(".json"))
    for rank in range(2):
        names = [span.name for span in spans(events, rank)]
        assert {"step 2", "step 3", "step 4", *PHASES} <= set(names)
        assert not {"step 1", "step 5"} & set(names)
        assert names.count("backward") == 3
        assert names.count("optimizer") == 3
        assert any("barrier('after step 3') at " in name for name in names)
        titles = {}
        for event in events:
            if event["pid"] != rank:
                continue
            if event["ph"] == "b":
                assert event["name"].startswith("gloo:")
            if event["ph"] == "M":
                titles[event["name"]] = event["args"]["name"]
        assert titles == {"process_name": f"rank {rank}", "thread_name": "phases"}


def test_a_span_lies_inside_of_another_or_outside(tmp_path: Path) -> None:
    run_in_ranks(write_trace, str(tmp_path / "trace"), range(2, 5))
    events = read(tmp_path / "trace.json")
    for rank in range(2):
        for left, right in itertools.permutations(spans(events, rank), 2):
            overlaps = left.begin < right.begin < left.end < right.end
            assert not overlaps, (left, right)


def test_the_clocks_of_a_trace_are_those_of_rank_0(tmp_path: Path) -> None:
    run_in_ranks(write_trace, str(tmp_path / "trace"), range(2, 5))
    events = read(tmp_path / "trace.json")
    first = [span for span in spans(events, 0) if "barrier" in span.name]
    second = [span for span in spans(events, 1) if "barrier" in span.name]
    for left, right in zip(first, second, strict=True):
        # No rank leaves a barrier before all ranks have come, up to the 20 ms by which the clocks
        # of a busy machine differ.
        assert max(left.begin, right.begin) < min(left.end, right.end) + 20e3


def end_profiles_early(fabric: Fabric, folder: str) -> None:
    with fabric.profile(f"{folder}/break", range(2, 100)):
        for number in loop(fabric):
            if number == 4:
                break
    with fabric.profile(f"{folder}/never", range(50, 100)):
        list(loop(fabric, 2))
    with suppress(ZeroDivisionError), fabric.profile(f"{folder}/one rank"):
        list(loop(fabric, 2))
        assert 1 / fabric.global_rank


def profile_evaluation(fabric: Fabric, folder: str) -> None:
    module = nn.Linear(4, 1)
    model = fabric.setup(module)
    batches = Batches(SleepsIn("data"), 4 * fabric.world_size)
    loader = fabric.setup_dataloaders(DataLoader(batches, batch_size=2))
    with fabric.profile(f"{folder}/evaluation"), torch.no_grad():
        for batch in loader:
            model(batch)
    timings = fabric.timings()
    assert timings.steps == 1
    assert timings.own["data"][0] >= 2 * SLEEP


def refused_profiles(fabric: Fabric, folder: str) -> tuple[str, str]:
    """Return the errors of a profile inside of another, and of a folder that is a file."""
    with fabric.profile(f"{folder}/again"):
        list(loop(fabric, 2))
        nested = outcome(lambda: fabric.profile(f"{folder}/inside").__enter__())
    (Path(folder) / "a file").touch()
    return nested, outcome(lambda: fabric.profile(f"{folder}/a file/trace").__enter__())


def names_by_file(folder: Path) -> dict[str, set[str]]:
    names = {}
    for path in folder.glob("*.json"):
        names[path.stem] = {event["name"] for event in read(path)}
    return names


def test_a_profile_that_ends_early_writes_what_it_has(tmp_path: Path) -> None:
    run_in_ranks(end_profiles_early, str(tmp_path))
    names = names_by_file(tmp_path)
    assert names.keys() == {"break", "never", "one rank"}
    assert {"step 2", "step 3", "step 4"} <= names["break"]
    assert names["never"] == {"process_name", "thread_name"}
    assert {"step 0", "step 1", "optimizer"} <= names["one rank"]


def test_an_evaluation_is_profiled_too(tmp_path: Path) -> None:
    run_in_ranks(profile_evaluation, str(tmp_path))
    assert {"data", "forward"} <= names_by_file(tmp_path)["evaluation"]


def test_a_nested_profile_and_a_path_that_cannot_be_written_are_refused(tmp_path: Path) -> None:
    first, second = run_in_ranks(refused_profiles, str(tmp_path))
    for nested, _ in (first, second):
        assert "another profile is under way" in nested
    _, unwritable = first
    assert unwritable.startswith("FileExistsError")
    _, unwritable = second
    assert unwritable.startswith("UsageError")
    assert "FileExistsError" in unwritable
    assert names_by_file(tmp_path).keys() == {"again"}


@pytest.mark.parametrize("steps", [range(0), range(-3, 2), range(0, 10, 2), 5, [1, 2]])
def test_steps_are_consecutive_and_counted_from_0(steps: Any, tmp_path: Path) -> None:
    with (
        Fabric(accelerator="cpu", devices=1) as fabric,
        pytest.raises(ConfigurationError, match="range"),
    ):
        fabric.profile(tmp_path / "trace", steps).__enter__()


# -- one process ----------------------------------------------------------------------------------


def test_without_a_measurement_there_are_no_timings() -> None:
    with (
        Fabric(accelerator="cpu", devices=1) as fabric,
        pytest.raises(UsageError, match="timings=True"),
    ):
        fabric.timings()


@pytest.mark.parametrize(("strategy", "devices"), [("auto", 1), ("dp", 2)])
def test_one_process_is_measured_too(strategy: str, devices: int, tmp_path: Path) -> None:
    # The first SGD wraps its step: from then on the hooks of subclasses are called twice.
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
    with Fabric(accelerator="cpu", strategy=strategy, devices=devices) as fabric:
        with fabric.profile(tmp_path / "trace.json"):
            list(loop(fabric, phase="backward"))
        timings = fabric.timings()
    assert timings.own["backward"][0] >= SLEEP
    assert timings.own.keys() == {"data", "forward", "backward", "optimizer", "other"}
    assert timings.slowest is None
    assert timings.waited == [0.0]
    assert "the others wait" not in str(timings)
    assert {"step 0", "step 7"} <= {event["name"] for event in read(tmp_path / "trace.json")}


def set_up_linear(fabric: Fabric) -> Any:
    module = nn.Linear(1, 1)
    return fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))


def test_steps_are_those_of_the_optimizer_that_stepped_first() -> None:
    x = torch.ones(1, 1)
    with Fabric(accelerator="cpu", devices=1, timings=True) as fabric:
        accumulating, accumulating_optimizer = set_up_linear(fabric)
        model, optimizer = set_up_linear(fabric)
        for _ in range(5):
            loss = accumulating(x).sum()
            fabric.backward(loss)
            loss = accumulating(x).sum()
            fabric.backward(loss)
            accumulating_optimizer.step()
            loss = model(x).sum()
            fabric.backward(loss)
            optimizer.step()
        assert fabric.timings().steps == 4


def test_nothing_is_left_of_a_profile(tmp_path: Path) -> None:
    with Fabric(accelerator="cpu", devices=1, check_training=False) as fabric:
        model, optimizer = set_up_linear(fabric)

        def step() -> None:
            loss = model(torch.ones(1, 1)).sum()
            fabric.backward(loss)
            optimizer.step()

        before = calls_of(step)
        with fabric.profile(tmp_path / "trace"):
            assert calls_of(step) > before
        assert calls_of(step) == before


def calls_of(step: Callable[[], Any]) -> int:
    """Return how many Python calls a step makes, after a first step."""
    step()
    return count_calls(step, number=3)
