"""What the worlds of the test kit share: values by rank, and the error that says which rank did what.

[Note: Worlds] A *world* has a ``size`` and ``run(fn, *args)``, which calls ``fn(fabric, *args)`` on every rank and
returns the results by rank. :class:`fabric.testing.RankPool` is one of processes, :class:`fabric.testing.ThreadedWorld`
one of threads; what is written for the one runs in the other.
"""

import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from fabric.errors import ConfigurationError, RankFailedError
from fabric.launchers.rank import is_secondary
from fabric.tree import map_tensors

__all__ = [
    "Pair",
    "PerRank",
    "Record",
    "Report",
    "World",
    "check_arguments",
    "check_size",
    "failure",
    "for_rank",
    "name_of",
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
    """An argument of ``run`` that differs between ranks: rank ``r`` is passed ``values[r]``.

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


def for_rank(argument: Any, rank: int) -> Any:
    """What one rank is passed for an argument of ``run``."""
    return argument.values[rank] if isinstance(argument, PerRank) else argument


@dataclass(frozen=True, kw_only=True)
class Report:
    """How a call went on one rank.

    Attributes:
        rank: the rank.
        did: what it did, as it follows "rank 0 " in a sentence.
        failed: whether it has not returned.
        secondary: 0 for what may be the root cause, 1 for a rank that waits for others, 2 for one that has lost them.
        exit_code: of its process, or 1.
        text: its traceback, or where it was.
        error: what it raised, where that could travel.
    """

    rank: int
    did: str = "returned"
    failed: bool = False
    secondary: int = 0
    exit_code: int = 1
    text: str = ""
    error: BaseException | None = None


def raised(rank: int, error: BaseException) -> Report:
    """The report of a rank whose function raised; called by the caller of that function."""
    # The first frame is ours, of no interest to the reader.
    error = error.with_traceback(error.__traceback__ and error.__traceback__.tb_next)
    return Report(
        rank=rank,
        did="raised " + traceback.format_exception_only(error)[-1].partition("\n")[0],
        failed=True,
        secondary=2 if is_secondary(error) else 0,
        text="".join(traceback.format_exception(error)),
        error=error,
    )


def failure(call: str, reports: Sequence[Report]) -> RankFailedError:
    """The error of a call in which at least one rank failed; ``reports`` has one of each rank."""
    failed = [report for report in reports if report.failed]
    # The ranks in their order, whichever was first: the same failure reads the same in every run.
    cause = min(failed, key=lambda report: (report.secondary, report.exit_code == 1, report.rank))
    others = [f"rank {report.rank} {report.did}" for report in reports if report is not cause]
    shown = [cause, *(report for report in failed if report is not cause and report.secondary < 2)]
    error = RankFailedError(
        f"{call}: rank {cause.rank} of {len(reports)} {cause.did}",
        rank=cause.rank,
        exit_code=cause.exit_code,
        traceback="\n".join(f"rank {report.rank}: {report.text.rstrip()}" for report in shown if report.text),
        problem="\n  ".join(others),
    )
    # Both: the interpreter prints the one; hypothesis tells failures apart, and so shrinks each of them, by the other.
    error.__cause__ = error.__context__ = cause.error
    return error


def check_size(request: str, size: int) -> None:
    """Raise a ConfigurationError unless this is a number of ranks."""
    if size < 1:
        raise ConfigurationError(
            f"{request}({size!r})", "there has to be one rank at least", suggestion=f"{request}(2)"
        )


def check_arguments(fn: Any, args: Iterable[Any], size: int) -> None:
    """Raise a ConfigurationError unless every :class:`PerRank` holds one value for each of ``size`` ranks."""
    for argument in args:
        if isinstance(argument, PerRank) and len(argument.values) != size:
            raise ConfigurationError(
                f"run({name_of(fn)}, PerRank(...)) in a world of {size}",
                f"there are {len(argument.values)} values, not one for each rank",
                suggestion="PerRank([value for rank in range(world.size)])",
            )


def name_of(fn: Any) -> str:
    """The name of a function in an error."""
    return getattr(fn, "__qualname__", type(fn).__qualname__).replace(".<locals>", "")
