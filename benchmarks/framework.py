"""The framework of the benchmarks: cases, the processes they run in, and the statistics of the numbers.

[Note: Fair comparison] A contestant is one way of doing the same thing: raw torch, fabric, and the two peers. Each runs
in processes of its own, which are kept from round to round; in a round every contestant measures once, one after the
other while the rest sleep, and the order rotates from round to round. What is compared are numbers of one round, which
saw the same machine: the median over the rounds of ours - theirs, or of ours / theirs, and the quartiles beside it.
"""

import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from selectors import EVENT_READ, DefaultSelector
from typing import Any, Literal

__all__ = [
    "CONTESTANTS",
    "OURS",
    "RAW",
    "Case",
    "Comparison",
    "ContestantProcesses",
    "Failed",
    "Row",
    "compare",
    "run_case",
]

ROOT = Path(__file__).parents[1]
RAW = "raw"
OURS = "fabric"
CONTESTANTS = (RAW, OURS, "lightning-fabric", "accelerate")
# Seconds in which a contestant has to prepare itself, or to measure once.
DEADLINE = 240

Measure = Callable[[], Mapping[str, float]]


@dataclass(frozen=True)
class Row:
    """One number of a case.

    Attributes:
        unit: of the number: ``"us"``, ``"ms"``, ``"s"``, ``"calls"``, ``"MB"``; rates end in ``"/s"``, and more is
            better.
        by: whether ours and theirs are compared by ``"ratio"`` or by ``"difference"``.
        budget: how much ours may be over raw torch, as that ratio or difference; a rate's ratio is at least it.
    """

    unit: str
    by: Literal["ratio", "difference"] = "ratio"
    budget: float | None = None

    @property
    def is_rate(self) -> bool:
        return self.unit.endswith("/s")


@dataclass(frozen=True)
class Case:
    """Something that several contestants do.

    Attributes:
        name: what the command line calls it.
        title: what it measures, in a line.
        rows: the numbers, by name.
        contestants: for each of them a function ``prepare(quick)`` that gets everything ready and returns the function
            that measures once, ``measure() -> {row: number}``. It runs in each rank; the numbers of rank 0 count.
        ranks: number of processes of each contestant, connected by torchrun's variables.
        rounds: how often each measures, after a rehearsal; with ``--quick`` it is once, without one.
        starts: how often all of that is done, each time in new processes: where each of them keeps things in memory can
            make a few microseconds for as long as it lives.
        cuda: whether it needs a GPU.
        notes: why a contestant is missing, where that is known.
    """

    name: str
    title: str
    rows: Mapping[str, Row]
    contestants: Mapping[str, Callable[[bool], Measure]]
    ranks: int = 1
    rounds: int = 10
    starts: int = 1
    cuda: bool = False
    notes: Mapping[str, str] = field(default_factory=dict)


class Failed(Exception):
    """A contestant could not prepare or measure; the text is the last line of what it said."""


class ContestantProcesses:
    """The processes of one contestant in one case; they sleep between two rounds."""

    def __init__(self, module: str, case: str, contestant: str, ranks: int, quick: bool) -> None:
        command = [
            sys.executable,
            "-W",
            "ignore",
            "-m",
            "benchmarks.rank",
            module,
            case,
            contestant,
            str(int(quick)),
        ]
        self._processes = [
            subprocess.Popen(
                command,
                cwd=ROOT,
                env=_variables(rank, ranks, port),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                bufsize=1,
            )
            for port in [_free_port()]
            for rank in range(ranks)
        ]

    def result(self) -> dict[str, float]:
        """What rank 0 measured, or ``{}`` once all ranks are prepared."""
        first, *_ = [self._read(process) for process in self._processes]
        return first

    def measure(self) -> None:
        """Have every rank measure once."""
        for process in self._processes:
            assert process.stdin is not None
            # A rank that is gone is noticed when its result is read.
            with suppress(BrokenPipeError):
                process.stdin.write("measure\n")

    def close(self) -> None:
        """End the processes; those that do not exit by themselves are killed."""
        with ExitStack() as stack:
            for process in self._processes:
                stack.enter_context(process)
                with suppress(BrokenPipeError):
                    assert process.stdin is not None
                    process.stdin.close()
            for process in self._processes:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=10)
                process.kill()

    def _read(self, process: subprocess.Popen[str]) -> dict[str, float]:
        assert process.stdout is not None
        assert process.stderr is not None
        with DefaultSelector() as selector:
            selector.register(process.stdout, EVENT_READ)
            if not selector.select(timeout=DEADLINE):
                raise Failed(f"no answer within {DEADLINE} s")
        if line := process.stdout.readline():
            return json.loads(line)
        words = process.stderr.read().strip().splitlines()
        raise Failed(words[-1] if words else f"exit code {process.wait()}")


def _variables(rank: int, ranks: int, port: int) -> dict[str, str]:
    # Python has to keep its bytecode, or imports would measure the compiler.
    unwanted = ("RANK", "WORLD_SIZE", "PYTHONDONTWRITEBYTECODE")
    clean = {name: value for name, value in os.environ.items() if name not in unwanted}
    # The ranks write their results to stdout, and errors to stderr, which nobody reads before the end.
    one = {
        **clean,
        "OMP_NUM_THREADS": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if ranks == 1:
        return one
    variables = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "GROUP_RANK": 0,
        "WORLD_SIZE": ranks,
        "LOCAL_WORLD_SIZE": ranks,
    }
    rendezvous = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "TORCHELASTIC_RUN_ID": "benchmark",
    }
    return one | {name: str(value) for name, value in (variables | rendezvous).items()}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


Rounds = list[dict[str, dict[str, float]]]


def run_case(
    case: Case, module: str, *, quick: bool, say: Callable[[str], None]
) -> tuple[Rounds, dict[str, str]]:
    """Run all contestants of a case.

    Args:
        case: the case.
        module: where the ranks find it.
        quick: raw torch and fabric alone, once, at smaller sizes.
        say: called with a line of progress.

    Returns:
        For each round and contestant the numbers by row; and by contestant why it is missing.

    Raises:
        Failed: raw torch or fabric did.
    """
    missing = {
        name: case.notes.get(name, "does not have it")
        for name in CONTESTANTS
        if name not in case.contestants
    }
    began = time.monotonic()
    rounds: Rounds = []
    for start in range(1 if quick else case.starts):

        def say_where(number: int, done: int = start * case.rounds) -> None:
            count = 1 if quick else case.starts * case.rounds
            say(f"{case.name}: round {done + number} of {count}, {time.monotonic() - began:.0f} s")

        rounds += _run_once(case, module, quick, missing, say_where)
    return rounds, missing


def _run_once(
    case: Case, module: str, quick: bool, missing: dict[str, str], say: Callable[[int], None]
) -> Rounds:
    """All rounds of a case, in processes of their own; notes in ``missing`` who is."""
    running: dict[str, ContestantProcesses] = {}
    rounds: Rounds = []
    with ExitStack() as stack:
        for name in case.contestants:
            if quick and name not in (RAW, OURS):
                missing[name] = "left out by --quick"
                continue
            running[name] = ContestantProcesses(module, case.name, name, case.ranks, quick)
            stack.callback(running[name].close)
        for name in list(running):
            _result(running, name, missing)
        # Round 0 is the rehearsal.
        first, count = (1, 1) if quick else (0, case.rounds)
        for number in range(first, count + 1):
            say(number)
            results = {}
            for name in _rotated(list(running), number):
                running[name].measure()
                if result := _result(running, name, missing):
                    results[name] = result
            rounds.append(results)
    return rounds[1 - first :]


def _result(
    running: dict[str, ContestantProcesses], name: str, missing: dict[str, str]
) -> dict[str, float] | None:
    """A contestant's numbers; a peer that has none is dropped, with its reason."""
    try:
        return running[name].result()
    except Failed as failure:
        if name in (RAW, OURS):
            raise
        missing[name] = str(failure)
        running.pop(name).close()
        return None


def _rotated(names: list[str], number: int) -> Iterator[str]:
    for index in range(len(names)):
        yield names[(index + number) % len(names)]


@dataclass(frozen=True)
class Comparison:
    """The median over the rounds, and the quartiles."""

    median: float
    low: float
    high: float


def compare(rounds: Rounds, row: str, ours: str, theirs: str, by: str) -> Comparison | None:
    """How ``ours`` stands to ``theirs``, by the ratio or the difference of numbers of one round; None without both."""
    pairs = [
        (numbers[ours][row], numbers[theirs][row])
        for numbers in rounds
        if row in numbers.get(ours, {}) and row in numbers.get(theirs, {})
    ]
    if not pairs:
        return None
    return spread([mine - other if by == "difference" else mine / other for mine, other in pairs])


def spread(values: Sequence[float]) -> Comparison:
    """The median and the quartiles of at least one number."""
    if len(values) == 1:
        return Comparison(values[0], values[0], values[0])
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Comparison(median, low, high)


def find_case(module: str, name: str) -> Case:
    """A case by the module that defines it and its name."""
    return next(case for case in cases_of(import_module(module)) if case.name == name)


def cases_of(module: Any) -> list[Case]:
    """The cases that a module defines, in its order."""
    return list(module.CASES)
