"""The framework of the benchmarks: cases, their processes, and the statistics of the numbers.

A contestant is raw torch, fabric, or one of the two peers. Each contestant runs in its own
processes, which live from round to round. In a round every contestant measures once, while the
others sleep. The order rotates from round to round. Only numbers of the same round are compared,
because the machine was equally busy: the report has the median over the rounds of ours - theirs, or
of ours / theirs, and the quartiles.
"""

import json
import os
import shutil
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
    "find_cpp_compiler",
    "run_case",
]

ROOT = Path(__file__).parents[1]
RAW = "raw"
OURS = "fabric"
CONTESTANTS = (RAW, OURS, "lightning-fabric", "accelerate")
# Seconds that a contestant has to prepare, and to measure once. On a busy machine, torch.compile
# takes minutes.
DEADLINE = 600

Measure = Callable[[], Mapping[str, float]]


@dataclass(frozen=True)
class Row:
    """One number of a case.

    Attributes:
        unit: The unit: ``"us"``, ``"ms"``, ``"s"``, ``"calls"``, ``"MB"``. The units of rates end
            in ``"/s"``. Higher rates are better.
        by: Whether ours and theirs are compared by ``"ratio"`` or by ``"difference"``.
        budget: The highest ratio or difference to raw torch; for rates, the lowest ratio.
    """

    unit: str
    by: Literal["ratio", "difference"] = "ratio"
    budget: float | None = None

    @property
    def is_rate(self) -> bool:
        return self.unit.endswith("/s")


@dataclass(frozen=True)
class Case:
    """A task that several contestants do.

    Attributes:
        name: The name on the command line.
        title: A line that says what the case measures.
        rows: The numbers, by name.
        contestants: A function ``prepare(quick)`` for each contestant, which returns the function
            that measures once, ``measure() -> {row: number}``. Every rank calls the functions.
            Only the numbers of rank 0 count.
        ranks: The number of processes of each contestant, connected by torchrun's variables.
        rounds: The number of rounds after a rehearsal. ``--quick`` has one round and no rehearsal.
        starts: How often all rounds are repeated in new processes. The addresses of objects in
            memory can cost a process a few microseconds for its lifetime.
        cuda: Whether the case needs a GPU.
        cpp: Whether the case needs a C++ compiler, as ``torch.compile`` does on a CPU.
        notes: Why contestants are missing, by contestant.
    """

    name: str
    title: str
    rows: Mapping[str, Row]
    contestants: Mapping[str, Callable[[bool], Measure]]
    ranks: int = 1
    rounds: int = 10
    starts: int = 1
    cuda: bool = False
    cpp: bool = False
    notes: Mapping[str, str] = field(default_factory=dict)


def find_cpp_compiler() -> str | None:
    """Return the path of the C++ compiler that ``torch.compile`` uses on a CPU, or None."""
    default = "clang++" if sys.platform == "darwin" else "g++"
    return shutil.which(os.environ.get("CXX", default))


class Failed(Exception):
    """An error of a contestant. The text is the last line of the contestant's standard error."""


class ContestantProcesses:
    """The processes of one contestant in one case. The processes sleep between two rounds."""

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
        self._processes: list[subprocess.Popen[str]] = []
        port = _free_port()
        for rank in range(ranks):
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=_variables(rank, ranks, port),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                bufsize=1,
            )
            self._processes.append(process)

    def result(self) -> dict[str, float]:
        """Wait for all ranks, and return the numbers of rank 0.

        The first result, after the preparation, is empty.
        """
        results = [self._read(process) for process in self._processes]
        return results[0]

    def measure(self) -> None:
        """Tell every rank to measure once."""
        for process in self._processes:
            assert process.stdin is not None
            # Reading the result reports a rank that has ended.
            with suppress(BrokenPipeError):
                process.stdin.write("measure\n")

    def close(self) -> None:
        """End the processes, and kill the processes that do not exit by themselves."""
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
        line = process.stdout.readline()
        if line:
            return json.loads(line)
        error_lines = process.stderr.read().strip().splitlines()
        if error_lines:
            raise Failed(error_lines[-1])
        raise Failed(f"exit code {process.wait()}")


def _variables(rank: int, ranks: int, port: int) -> dict[str, str]:
    # Without cached bytecode, imports would measure the compiler.
    unwanted = ("RANK", "WORLD_SIZE", "PYTHONDONTWRITEBYTECODE")
    clean = {name: value for name, value in os.environ.items() if name not in unwanted}
    variables = {
        **clean,
        "OMP_NUM_THREADS": "1",
        # Nobody reads stderr before the end, so the ranks log little.
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if ranks == 1:
        return variables
    return {
        **variables,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "benchmark",
    }


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
        case: The case.
        module: The module that defines the case.
        quick: Whether only raw torch and fabric run, once, at smaller sizes.
        say: A function that prints a line of progress.

    Returns:
        The numbers by round, contestant and row; and by contestant the reason why it is missing.

    Raises:
        Failed: Raw torch or fabric failed.
    """
    missing: dict[str, str] = {}
    for name in CONTESTANTS:
        if name not in case.contestants:
            missing[name] = case.notes.get(name, "does not have it")
    began = time.monotonic()
    rounds: Rounds = []
    starts = 1 if quick else case.starts
    count = 1 if quick else case.starts * case.rounds
    for start in range(starts):

        def say_progress(number: int, done: int = start * case.rounds) -> None:
            seconds = time.monotonic() - began
            say(f"{case.name}: round {done + number} of {count}, {seconds:.0f} s")

        rounds += _run_once(case, module, quick, missing, say_progress)
    return rounds, missing


def _run_once(
    case: Case, module: str, quick: bool, missing: dict[str, str], say: Callable[[int], None]
) -> Rounds:
    """Run all rounds of a case in new processes, and add missing contestants to ``missing``."""
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
                result = _result(running, name, missing)
                if result:
                    results[name] = result
            rounds.append(results)
    return rounds[1 - first :]


def _result(
    running: dict[str, ContestantProcesses], name: str, missing: dict[str, str]
) -> dict[str, float] | None:
    """Return a contestant's numbers. Close a peer that fails, with the reason in ``missing``."""
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
    """The median and the quartiles over the rounds."""

    median: float
    low: float
    high: float


def compare(rounds: Rounds, row: str, ours: str, theirs: str, by: str) -> Comparison | None:
    """Return how ``ours`` compares with ``theirs`` within a round, by ratio or difference.

    Returns None if no round has both numbers.
    """
    relations: list[float] = []
    for numbers in rounds:
        if row not in numbers.get(ours, {}) or row not in numbers.get(theirs, {}):
            continue
        our_number = numbers[ours][row]
        their_number = numbers[theirs][row]
        if by == "difference":
            relations.append(our_number - their_number)
        else:
            relations.append(our_number / their_number)
    if not relations:
        return None
    return spread(relations)


def spread(values: Sequence[float]) -> Comparison:
    """Return the median and the quartiles of at least one number."""
    if len(values) == 1:
        return Comparison(values[0], values[0], values[0])
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Comparison(median, low, high)


def find_case(module: str, name: str) -> Case:
    """Return the case of this name in a module."""
    for case in cases_of(import_module(module)):
        if case.name == name:
            return case
    raise KeyError(name)


def cases_of(module: Any) -> list[Case]:
    """Return the cases that a module defines, in the module's order."""
    return list(module.CASES)
