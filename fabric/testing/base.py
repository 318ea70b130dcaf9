"""What the worlds of the test kit share: values by rank, and the error that says which rank did what.

[Note: Worlds] A *world* has a ``size`` and ``run(fn, *args)``, which calls ``fn(fabric, *args)`` on every rank and
returns the results by rank. :class:`fabric.testing.RankPool` is one of processes, :class:`fabric.testing.ThreadedWorld`
one of threads; what is written for the one runs in the other.
"""

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from fabric.errors import ArgumentTypeError, ConfigurationError, RankFailedError
from fabric.launchers.rank import is_secondary
from fabric.tree import map_tensors

__all__ = [
    "Pair",
    "PerRank",
    "Record",
    "Report",
    "World",
    "check_call",
    "check_world",
    "failure",
    "name_of",
    "own_part",
    "raised",
]


class World(Protocol):
    """Ranks that run functions; see the note at the top."""

    @property
    def size(self) -> int:
        """Number of ranks."""
        ...

    def run(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> list[Any]:
        """What ``fn(fabric, *args, **kwargs)`` returned on each rank, in rank order."""
        ...


@dataclass(frozen=True)
class PerRank:
    """An argument of ``run`` that differs between ranks: rank ``r`` is handed ``values[r]``.

    Attributes:
        values: one for each rank.
    """

    values: Sequence[Any]

    def __repr__(self) -> str:
        # What hypothesis prints: strides are often what matters, and torch does not show them.
        return f"PerRank({map_tensors(_Shown, list(self.values))!r})"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        # Without this method hypothesis prints the fields of a dataclass, whatever its repr.
        printer.text(repr(self))


class Pair(NamedTuple):
    """A namedtuple for generated collections."""

    first: Any
    second: Any


@dataclass
class Record:
    """A dataclass for generated collections."""

    left: Any
    right: Any


class _Shown:
    def __init__(self, tensor: Tensor) -> None:
        self._text = repr(tensor) if tensor.is_contiguous() else f"{tensor!r} of strides {tensor.stride()}"

    def __repr__(self) -> str:
        return self._text


def own_part(argument: Any, rank: int) -> Any:
    """What a rank is handed for an argument of ``run``."""
    return argument.values[rank] if isinstance(argument, PerRank) else argument


@dataclass(frozen=True, kw_only=True)
class Report:
    """How a call went on one rank.

    Attributes:
        rank: the rank.
        did: what it did, as it follows "rank 0 " in a sentence.
        failed: whether it has not returned.
        suspicion: how far from being the cause, from 0: 1 waits for other ranks, 2 has lost them.
        exit_code: of its process, or 1.
        text: its traceback, or where it was.
        error: what it raised, where that could travel.
    """

    rank: int
    did: str = "returned"
    failed: bool = False
    suspicion: int = 0
    exit_code: int = 1
    text: str = ""
    error: BaseException | None = None


def raised(rank: int, error: BaseException) -> Report:
    """The report of a rank whose function raised; called in the function that called it."""
    # The first frame is ours, of no interest to the reader.
    error = error.with_traceback(error.__traceback__ and error.__traceback__.tb_next)
    return Report(
        rank=rank,
        did="raised " + traceback.format_exception_only(error)[-1].partition("\n")[0],
        failed=True,
        suspicion=2 if is_secondary(error) else 0,
        text="".join(traceback.format_exception(error)),
        error=error,
    )


def failure(call: str, reports: Sequence[Report]) -> RankFailedError:
    """The error of a call in which at least one rank failed; ``reports`` are all that came, at most one a rank."""
    failed = [report for report in reports if report.failed]
    # The ranks in their order, whichever was first: the same failure reads the same in every run.
    blamed = min(failed, key=lambda report: (report.suspicion, report.exit_code == 1, report.rank))
    others = [f"rank {report.rank} {report.did}" for report in reports if report is not blamed]
    telling = [blamed, *(report for report in failed if report is not blamed and report.suspicion < 2)]
    error = RankFailedError(
        f"{call}: rank {blamed.rank} of {len(reports)} {blamed.did}",
        rank=blamed.rank,
        exit_code=blamed.exit_code,
        traceback="\n".join(f"rank {report.rank}: {report.text.rstrip()}" for report in telling if report.text),
        problem="\n  ".join(others),
    )
    # Both: the interpreter prints the one; hypothesis tells failures apart, and so shrinks each of them, by the other.
    error.__cause__ = error.__context__ = blamed.error
    return error


def check_world(asked: str, size: Any, timeout: Any) -> None:
    """Raise a ConfigurationError unless these are a number of ranks and a number of seconds."""
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ConfigurationError(f"{asked}({size!r})", "there is no such number of ranks", "1, 2, ...", f"{asked}(2)")
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or timeout <= 0:
        raise ConfigurationError(
            f"{asked}(..., timeout={timeout!r})",
            "it is no time that a call could take",
            "a number of seconds above 0",
            f"{asked}({size}, timeout=30.0)",
        )


def check_call(fn: Any, args: Sequence[Any], size: int) -> None:
    """Raise unless ``fn`` is a function and every :class:`PerRank` holds one value for each of ``size`` ranks."""
    if not callable(fn):
        raise ArgumentTypeError(
            f"run({fn!r})",
            f"{type(fn).__name__} is not a function",
            "a function that takes the fabric of its rank first",
            "run(lambda fabric, x: fabric.all_reduce(x), x)",
        )
    for argument in args:
        if isinstance(argument, PerRank) and len(argument.values) != size:
            raise ConfigurationError(
                f"run({name_of(fn)}, PerRank(...)) in a world of {size}",
                f"there are {len(argument.values)} values",
                f"{size} values, one for each rank",
                "PerRank([value for rank in range(world.size)])",
            )


def name_of(fn: Any) -> str:
    """How a function is called in an error."""
    return getattr(fn, "__qualname__", type(fn).__qualname__).replace(".<locals>", "")
