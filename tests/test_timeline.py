"""Where the time of a step goes: the table, the rank that others wait for, and the trace."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from benchmarks.timing import count_calls
from fabric import Fabric
from fabric.errors import ConfigurationError, UsageError
from tests.ranks import outcome, run_in_ranks

SLEEP = 0.05  # of the slow rank, which is what is measured
PHASES = ("data", "forward", "backward", "optimizer", "save")


class Slow:
    """Sleeps in one phase."""

    def __init__(self, phase: str | None) -> None:
        self.phase = phase

    def __call__(self, phase: str, *_: object) -> None:
        if phase == self.phase:
            time.sleep(SLEEP)


class Batches(Dataset[Tensor]):
    def __init__(self, slow: Slow, length: int) -> None:
        self.slow = slow
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitems__(self, batch: list[int]) -> list[Tensor]:
        self.slow("data")
        return [torch.ones(4) for _ in batch]


class Model(nn.Module):
    def __init__(self, slow: Slow) -> None:
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
    slow = Slow(None)

    def step(self, closure: Any = None) -> Any:
        self.slow("optimizer")
        return super().step(closure)


class Extra:
    def __init__(self, slow: Slow) -> None:
        self.slow = slow

    def state_dict(self) -> dict[str, Any]:
        self.slow("save")
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def loop(
    fabric: Fabric, steps: int = 8, phase: str | None = None, folder: str = ""
) -> Iterator[int]:
    """A training loop, step by step, of which rank 0 is slow in one phase."""
    slow = Slow(phase if fabric.global_rank == 0 else None)
    module = Model(slow)
    model, optimizer = fabric.setup(module, Descent(module.parameters(), lr=0.1))
    optimizer.slow = slow
    batches = Batches(slow, 4 * steps * fabric.world_size)
    loader = fabric.setup_dataloaders(DataLoader(batches, batch_size=4))
    for number, batch in enumerate(loader):
        fabric.backward(model(batch).sum())
        optimizer.step()
        optimizer.zero_grad()
        if folder:
            fabric.save(f"{folder}/{fabric.strategy.name}", {"model": model, "extra": Extra(slow)})
        yield number


def seconds_without_core() -> float:
    """How long this thread has waited for a core since it began, which is late as much as one that sleeps."""
    counts = Path("/proc/thread-self/schedstat")  # Linux has it
    return int(counts.read_text().split()[1]) / 1e9 if counts.exists() else 0.0


def slowest_of(fabric: Fabric, folder: str, tries: int) -> list[tuple[str, object]]:
    found = []
    for phase in PHASES * tries:
        for _ in range(5):  # until others have left the ranks their cores
            before = seconds_without_core()
            with fabric.profile(f"{folder}/{phase}", steps=range(2, 7)):
                list(loop(fabric, 8, phase, folder if phase == "save" else ""))
            if fabric.all_reduce(seconds_without_core() - before, reduce_op="max") < SLEEP:
                break
        found.append((phase, fabric.timings().slowest))
    return found


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_rank_that_sleeps_is_named_with_its_phase(strategy: str, tmp_path: Path) -> None:
    for actual in run_in_ranks(slowest_of, str(tmp_path), 1, strategy=strategy):
        assert actual == [(phase, (0, phase)) for phase in PHASES]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_rank_that_sleeps_is_named_every_time(strategy: str, tmp_path: Path) -> None:
    for actual in run_in_ranks(slowest_of, str(tmp_path), 5, strategy=strategy):
        assert actual == [(phase, (0, phase)) for phase in PHASES * 5]


def measured(fabric: Fabric) -> tuple[Any, str]:
    for _ in loop(fabric, phase="data"):
        pass
    found = fabric.timings()
    return found, str(found)


def test_a_fabric_with_timings_says_where_its_steps_go() -> None:
    for actual, text in run_in_ranks(measured, timings=True):
        assert actual.slowest == (0, "data")
        assert actual.steps == 7  # the first one was under way
        assert actual.own["data"][0] >= SLEEP > actual.own["data"][1]
        assert (
            actual.own["forward"][1] < SLEEP < actual.waited[1]
        )  # DDP sends the buffers of rank 0
        assert sum(actual.own[name][1] for name in actual.own) + actual.waited[1] == pytest.approx(
            actual.seconds, rel=0.2
        )
        assert "ms a step for rank 0, in data" in text


# -- the trace ------------------------------------------------------------------------------------


def read(path: Path) -> list[dict[str, Any]]:
    """The events of a trace, which is as Perfetto's and Chrome's format says."""
    trace = json.loads(path.read_text())
    assert trace["displayTimeUnit"] == "ms"
    begun = set()
    for event in trace["traceEvents"]:
        assert isinstance(event["name"], str)
        assert type(event["pid"]) is type(event["tid"]) is int
        kind = event["ph"]
        if kind == "M":
            assert event["name"] in ("process_name", "thread_name")
            assert isinstance(event["args"]["name"], str)
            continue
        assert event["ts"] >= 0
        assert kind != "X" or event["dur"] >= 0
        key = (event["cat"], event.get("id"), event["pid"], event["name"])
        assert kind in "Xb" or key in begun, "it ends before it begins"
        begun |= {key} if kind == "b" else set()
    return trace["traceEvents"]


def ends(event: dict[str, Any]) -> tuple[float, float]:
    return event["ts"], round(event["ts"] + event["dur"], 3)  # nanoseconds


def spans(events: list[dict[str, Any]], rank: int) -> list[dict[str, Any]]:
    return [event for event in events if event["ph"] == "X" and event["pid"] == rank]


def traced(fabric: Fabric, path: str, steps: range | None) -> None:
    with fabric.profile(path, steps):
        for number in loop(fabric, folder=path):
            fabric.barrier(f"after step {number}")


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_trace_has_the_phases_and_collectives_of_every_rank(
    strategy: str, tmp_path: Path
) -> None:
    run_in_ranks(traced, str(tmp_path / "new" / "trace"), range(2, 5), strategy=strategy)
    events = read(tmp_path / "new" / "trace.json")
    for rank in range(2):
        names = [event["name"] for event in spans(events, rank)]
        assert {"step 2", "step 3", "step 4", *PHASES} <= set(names)
        assert not {"step 1", "step 5"} & set(names)
        assert names.count("backward") == names.count("optimizer") == 3
        assert any("barrier('after step 3') at " in name for name in names)
        calls = [event["name"] for event in events if event["ph"] == "b" and event["pid"] == rank]
        assert {name.partition(":")[0] for name in calls} == {"gloo"}
        assert {"process_name": f"rank {rank}", "thread_name": "phases"} == {
            event["name"]: event["args"]["name"]
            for event in events
            if event["ph"] == "M" and event["pid"] == rank
        }
        for one in spans(events, rank):  # one lies inside of another or outside
            for other in spans(events, rank):
                (begin, end), (first, last) = ends(one), ends(other)
                assert not (begin < first < end < last), (one, other)


def test_the_clocks_of_a_trace_are_those_of_rank_0(tmp_path: Path) -> None:
    run_in_ranks(traced, str(tmp_path / "trace"), range(2, 5))
    events = read(tmp_path / "trace.json")
    waits = [
        [event for event in spans(events, rank) if "barrier" in event["name"]] for rank in range(2)
    ]
    for mine, others in zip(*waits, strict=True):
        (begin, end), (first, last) = ends(mine), ends(others)
        assert (
            max(begin, first) < min(end, last) + 1e3
        )  # nobody leaves a barrier before all have come


def stopped(fabric: Fabric, folder: str) -> list[str]:
    """Profiles that end in other ways than by the last of their steps."""
    with fabric.profile(f"{folder}/break", range(2, 100)):
        for number in loop(fabric):
            if number == 4:
                break
    with fabric.profile(f"{folder}/never", range(50, 100)):
        list(loop(fabric, 2))
    with suppress(ZeroDivisionError), fabric.profile(f"{folder}/one rank"):
        list(loop(fabric, 2))
        assert 1 / fabric.global_rank
    with fabric.profile(f"{folder}/evaluation"), torch.no_grad():
        model = fabric.setup(nn.Linear(4, 1))
        for batch in fabric.setup_dataloaders(
            DataLoader(Batches(Slow("data"), 4 * fabric.world_size), batch_size=2)
        ):
            model(batch)
    found = fabric.timings()
    assert (found.steps, found.own["data"][0] >= 2 * SLEEP) == (1, True)
    with fabric.profile(f"{folder}/again"):
        list(loop(fabric, 2))
        inside = outcome(lambda: fabric.profile(f"{folder}/inside").__enter__())
    (Path(folder) / "a file").touch()
    return [inside, outcome(lambda: fabric.profile(f"{folder}/a file/trace").__enter__())]


def test_a_profile_that_ends_early_writes_what_it_has(tmp_path: Path) -> None:
    errors = run_in_ranks(stopped, str(tmp_path))
    names = {path.stem: {event["name"] for event in read(path)} for path in tmp_path.glob("*.json")}
    assert names.keys() == {"break", "never", "one rank", "evaluation", "again"}
    assert {"step 2", "step 3", "step 4"} <= names["break"]
    assert names["never"] == {"process_name", "thread_name"}
    assert {"step 0", "step 1", "optimizer"} <= names["one rank"]
    assert {"data", "forward"} <= names["evaluation"]
    assert all("another profile is under way" in inside for inside, _ in errors)
    assert [unwritable.partition(":")[0] for _, unwritable in errors] == [
        "FileExistsError",
        "UsageError",
    ]
    assert "FileExistsError" in errors[1][1]


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
    torch.optim.SGD(
        [torch.nn.Parameter(torch.zeros(1))]
    )  # from now on the hooks of its subclasses are called twice
    with Fabric(accelerator="cpu", strategy=strategy, devices=devices) as fabric:
        with fabric.profile(tmp_path / "trace.json"):
            list(loop(fabric, phase="backward"))
        actual = fabric.timings()
    assert actual.own["backward"][0] >= SLEEP
    assert {"data", "forward", "backward", "optimizer", "other"} == actual.own.keys()
    assert (actual.slowest, actual.waited) == (None, [0.0])
    assert "the others wait" not in str(actual)
    assert {"step 0", "step 7"} <= {event["name"] for event in read(tmp_path / "trace.json")}


def test_steps_are_those_of_the_optimizer_that_stepped_first() -> None:
    with Fabric(accelerator="cpu", devices=1, timings=True) as fabric:
        modules = [nn.Linear(1, 1) for _ in range(2)]
        pairs = [
            fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.1)) for module in modules
        ]
        for _ in range(5):
            for _, (model, optimizer) in zip(range(3), 2 * pairs[:1] + pairs[1:], strict=True):
                fabric.backward(model(torch.ones(1, 1)).sum())
                if model is pairs[1][0] or _ == 1:  # accumulates gradients of the first
                    optimizer.step()
        assert fabric.timings().steps == 4


def test_nothing_is_left_of_a_profile(tmp_path: Path) -> None:
    with Fabric(accelerator="cpu", devices=1, check_training=False) as fabric:
        model, optimizer = fabric.setup(
            module := nn.Linear(1, 1), torch.optim.SGD(module.parameters(), lr=0.1)
        )

        def step() -> None:
            fabric.backward(model(torch.ones(1, 1)).sum())
            optimizer.step()

        before = after_some(step)
        with fabric.profile(tmp_path / "trace"):
            assert after_some(step) > before
        assert after_some(step) == before


def after_some(step: Callable[[], Any]) -> int:
    step()
    return count_calls(step, number=3)
