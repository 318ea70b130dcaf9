"""Shared parts of the test kit: per-rank arguments, comparison of results, and the error of a failed call.

[Note: Worlds] A *world* has a ``size`` and ``run(fn, *args)``, which calls ``fn(fabric, *args)`` on every rank and
returns the results by rank. :class:`fabric.testing.RankPool` uses processes, :class:`fabric.testing.ThreadedWorld`
threads; code written for one runs in the other.
"""

import traceback
from collections import namedtuple
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from fabric.errors import ConfigurationError, RankFailedError
from fabric.launchers.rank import is_secondary
from fabric.tree import children, map_tensors

__all__ = [
    "Pair", "PerRank", "Record", "Report", "World", "assert_same", "check_arguments", "differences", "failure",
    "for_rank", "name_of", "raised",
]  # fmt: skip


class World(Protocol):
    """The interface of a world; see ``[Note: Worlds]``.

    Attributes:
        size: number of ranks.
    """

    size: int

    def run(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> list[Any]:
        """Call ``fn(fabric, *args, **kwargs)`` on every rank, and return the results in rank order."""
        ...


class PerRank:
    """An argument of ``run`` that differs between ranks: rank ``r`` is passed ``values[r]``.

    Attributes:
        values: one per rank.
    """

    def __init__(self, values: Sequence[Any]) -> None:
        self.values = values

    def __repr__(self) -> str:
        # Hypothesis prints this. Strides often matter, and torch does not show them.
        return f"PerRank({map_tensors(_Shown, list(self.values))!r})"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        # Without this method hypothesis prints the calls that made the value.
        printer.text(repr(self))


Pair = namedtuple("Pair", "first second")
"""A namedtuple for generated collections."""


@dataclass
class Record:
    """A dataclass for generated collections."""

    left: Any
    right: Any


class _Shown:
    def __init__(self, tensor: Tensor) -> None:
        self._text = (
            repr(tensor) if tensor.is_contiguous() else f"{tensor!r} of strides {tensor.stride()}"
        )

    def __repr__(self) -> str:
        return self._text


def for_rank(argument: Any, rank: int) -> Any:
    """The value that one rank gets of an argument of ``run``."""
    return argument.values[rank] if isinstance(argument, PerRank) else argument


@dataclass(frozen=True, kw_only=True)
class Report:
    """The outcome of a call on one rank.

    Attributes:
        rank: the rank.
        did: what happened, to follow "rank 0" in a sentence.
        failed: whether the rank raised, exited or timed out.
        secondary: 0 for a possible root cause, 1 for a rank that waits for others, 2 for a rank that lost its peers.
        exit_code: the exit code of its process, or 1.
        text: its traceback, or its stack at the timeout.
        error: the exception, if it can be pickled.
    """

    rank: int
    did: str = "returned"
    failed: bool = False
    secondary: int = 0
    exit_code: int = 1
    text: str = ""
    error: BaseException | None = None


def raised(rank: int, error: BaseException) -> Report:
    """The report of a rank whose function raised. To be called in the frame that called the function."""
    # The first frame is fabric's own, which does not help the reader.
    error = error.with_traceback(error.__traceback__ and error.__traceback__.tb_next)
    headline = traceback.TracebackException.from_exception(error)
    headline.__notes__ = None  # notes would be its last lines
    return Report(
        rank=rank,
        did="raised " + [*headline.format_exception_only()][-1].partition("\n")[0],
        failed=True,
        secondary=2 if is_secondary(error) else 0,
        text="".join(traceback.format_exception(error)),
        error=error,
    )


def failure(call: str, reports: Sequence[Report]) -> RankFailedError:
    """The error of a call in which at least one rank failed; ``reports`` has one report per rank."""
    failed = [report for report in reports if report.failed]
    # In rank order, not in the order of time: the same failure gives the same text in every run.
    cause = min(failed, key=lambda report: (report.secondary, report.exit_code == 1, report.rank))
    others = [f"rank {report.rank} {report.did}" for report in reports if report is not cause]
    shown = [cause, *(report for report in failed if report is not cause and report.secondary < 2)]
    error = RankFailedError(
        f"{call}: rank {cause.rank} of {len(reports)} {cause.did}",
        rank=cause.rank,
        exit_code=cause.exit_code,
        traceback="\n".join(
            f"rank {report.rank}: {report.text.rstrip()}" for report in shown if report.text
        ),
        problem="\n  ".join(others),
    )
    # Both: the interpreter prints __cause__; hypothesis distinguishes failures, to shrink each, by __context__.
    error.__cause__ = error.__context__ = cause.error
    return error


def check_arguments(fn: Any, args: Iterable[Any], size: int) -> None:
    """Raise a ConfigurationError unless every :class:`PerRank` has ``size`` values."""
    for argument in args:
        if isinstance(argument, PerRank) and len(argument.values) != size:
            request = f"run({name_of(fn)}, PerRank(...))"
            raise ConfigurationError(
                request, f"there are {len(argument.values)} values for {size} ranks"
            )


def name_of(fn: Any) -> str:
    """The name of a function for error texts."""
    return getattr(fn, "__qualname__", type(fn).__qualname__).replace(".<locals>", "")


def assert_same(actual: Any, expected: Any, *, rtol: float = 0.0, atol: float = 0.0) -> None:
    """Raise an AssertionError that names each leaf that differs, unless two collections are the same.

    They are the same if containers have equal types and keys or lengths, tensors equal shapes and dtypes, and values
    are equal, or with a tolerance ``|actual - expected| <= atol + rtol * |expected|``. NaN equals NaN.

    Args:
        actual: the result.
        expected: the expected result.
        rtol: relative tolerance for floating-point and complex values.
        atol: absolute tolerance for the same values.
    """
    __tracebackhide__ = True  # so that pytest shows the line of the test
    found = list(differences(actual, expected, rtol=rtol, atol=atol))
    if found:
        raise AssertionError("\n".join([f"{len(found)} difference(s)", *found[:10]]))


def differences(
    actual: Any, expected: Any, path: str = "", *, rtol: float = 0.0, atol: float = 0.0
) -> Iterator[str]:
    """Yield one line for each difference between two collections; see :func:`assert_same`.

    Args:
        actual: the result.
        expected: the expected result.
        path: the name of the collection in the lines.
        rtol: relative tolerance.
        atol: absolute tolerance.
    """
    where = path or "the value"
    own = children(actual)
    other = children(expected)
    if isinstance(actual, Tensor) and isinstance(expected, Tensor):
        yield from _between_tensors(
            actual.detach().cpu(), expected.detach().cpu(), where, rtol, atol
        )
    elif type(actual) is not type(expected):
        yield f"{where}: {actual!r:.80} is a {type(actual).__name__}, expected {expected!r:.80}"
    elif own or other:
        for name in own | other:
            if name in own and name in other:
                yield from differences(
                    own[name], other[name], f"{path}{name}", rtol=rtol, atol=atol
                )
            else:
                yield f"{path}{name}: {'not expected' if name in own else 'missing'}"
    elif actual != expected and (actual == actual or expected == expected):  # not both NaN
        is_near = isinstance(actual, float | complex) and abs(
            actual - expected
        ) <= atol + rtol * abs(expected)
        if not is_near:
            yield f"{where}: {actual!r:.80}, expected {expected!r:.80}"


def _between_tensors(
    actual: Tensor, expected: Tensor, where: str, rtol: float, atol: float
) -> Iterator[str]:
    kind, wanted = (
        f"{str(each.dtype).removeprefix('torch.')} {tuple(each.shape)}"
        for each in (actual, expected)
    )
    if kind != wanted:
        yield f"{where}: {kind}, expected {wanted}"
        return
    if not actual.is_floating_point() and not actual.is_complex():
        rtol = 0.0
        atol = 0.0
    wrong = ~torch.isclose(actual, expected, rtol, atol, equal_nan=True)
    if wrong.any():
        index = tuple(wrong.nonzero()[0].tolist())
        place = (
            f"{int(wrong.sum())} of {wrong.numel()} elements of {kind}, at {list(index)} "
            if index
            else ""
        )
        yield f"{where}: {place}{actual[index].item()}, expected {expected[index].item()}"
