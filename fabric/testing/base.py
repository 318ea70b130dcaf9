"""The parts of the test kit that every world uses: arguments by rank, comparison, and errors.

[Note: Worlds] A *world* has a ``size`` and ``run(fn, *args)``, which calls ``fn(fabric, *args)``
on every rank and returns the results in rank order. :class:`fabric.testing.RankPool` uses
processes, :class:`fabric.testing.ThreadedWorld` uses threads. Code that is written for one world
runs in the other.
"""

import traceback
from collections import namedtuple
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from fabric.errors import ConfigurationError, RankFailedError
from fabric.launchers.rank import is_secondary
from fabric.tree import children, map_tensors

__all__ = [
    "Pair",
    "PerRank",
    "Record",
    "Report",
    "World",
    "arguments_of_rank",
    "assert_same",
    "check_arguments",
    "differences",
    "error_report",
    "function_name",
    "rank_failed_error",
]


class World(Protocol):
    """A number of ranks that run a function, as :class:`RankPool` and :class:`ThreadedWorld` do.

    Attributes:
        size: number of ranks.
    """

    size: int

    def run(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> list[Any]:
        """Call ``fn(fabric, *args, **kwargs)`` on every rank, and return the results in order."""
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
    """The text of a tensor, with its strides if the tensor is not contiguous."""

    def __init__(self, tensor: Tensor) -> None:
        self._text = repr(tensor)
        if not tensor.is_contiguous():
            self._text = f"{tensor!r} of strides {tensor.stride()}"

    def __repr__(self) -> str:
        return self._text


def arguments_of_rank(
    args: Sequence[Any], kwargs: Mapping[str, Any], rank: int
) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments that one rank is passed for those of ``run``."""
    args_of_rank = [_value_of_rank(value, rank) for value in args]
    kwargs_of_rank = {name: _value_of_rank(value, rank) for name, value in kwargs.items()}
    return args_of_rank, kwargs_of_rank


def _value_of_rank(argument: Any, rank: int) -> Any:
    if isinstance(argument, PerRank):
        return argument.values[rank]
    return argument


@dataclass(frozen=True, kw_only=True)
class Report:
    """The outcome of a call on one rank.

    Attributes:
        rank: the rank.
        did: what happened, to follow "rank 0" in a sentence.
        failed: whether the rank raised, exited or timed out.
        secondary: 0 for a possible root cause, 1 for a rank that waits for other ranks, 2 for a
            rank that lost its peers.
        exit_code: the exit code of the rank's process, or 1.
        text: the rank's traceback, or its stack at the timeout.
        error: the exception, if it can be pickled.
    """

    rank: int
    did: str = "returned"
    failed: bool = False
    secondary: int = 0
    exit_code: int = 1
    text: str = ""
    error: BaseException | None = None


def error_report(rank: int, error: BaseException) -> Report:
    """Return the report of a rank whose function raised.

    Call this function in the frame that called the rank's function, since that frame is left out
    of the traceback.
    """
    if error.__traceback__ is not None:
        # The first frame is fabric's own, which does not help the reader.
        error = error.with_traceback(error.__traceback__.tb_next)
    headline = traceback.TracebackException.from_exception(error)
    headline.__notes__ = None  # notes would be the last lines
    *_, last_lines = headline.format_exception_only()
    first_line, _, _ = last_lines.partition("\n")
    secondary = 0
    if is_secondary(error):
        secondary = 2
    return Report(
        rank=rank,
        did=f"raised {first_line}",
        failed=True,
        secondary=secondary,
        text="".join(traceback.format_exception(error)),
        error=error,
    )


def rank_failed_error(call: str, reports: Sequence[Report]) -> RankFailedError:
    """Return the error of a call that failed on at least one rank.

    Args:
        call: the name of the function that was called.
        reports: one per rank, in rank order.
    """
    failures = [report for report in reports if report.failed]
    # In rank order, not in the order of time: one failure gives one text in every run.
    cause = min(failures, key=_distance_from_root_cause)
    outcomes: list[str] = []
    tracebacks = [_titled_traceback(cause)]
    for report in reports:
        if report is cause:
            continue
        outcomes.append(f"rank {report.rank} {report.did}")
        if report.failed and report.secondary < 2:
            tracebacks.append(_titled_traceback(report))
    error = RankFailedError(
        f"{call}: rank {cause.rank} of {len(reports)} {cause.did}",
        rank=cause.rank,
        exit_code=cause.exit_code,
        traceback="\n".join(filter(None, tracebacks)),
        problem="\n  ".join(outcomes),
    )
    # The interpreter prints __cause__. Hypothesis tells failures apart by __context__, to shrink
    # each of them.
    error.__cause__ = cause.error
    error.__context__ = cause.error
    return error


def _distance_from_root_cause(report: Report) -> tuple[int, bool, int]:
    """Return a sort key of failed ranks: likely root causes first, in rank order."""
    raised = report.exit_code == 1  # a process that died by itself explains more
    return report.secondary, raised, report.rank


def _titled_traceback(report: Report) -> str:
    """Return a rank's traceback below the name of the rank, or "" if it has none."""
    if not report.text:
        return ""
    return f"rank {report.rank}: {report.text.rstrip()}"


def check_arguments(fn: Callable[..., Any], arguments: Iterable[object], size: int) -> None:
    """Raise a ConfigurationError unless every :class:`PerRank` has ``size`` values."""
    for argument in arguments:
        if isinstance(argument, PerRank) and len(argument.values) != size:
            request = f"run({function_name(fn)}, PerRank(...))"
            problem = f"there are {len(argument.values)} values for {size} ranks"
            raise ConfigurationError(request, problem=problem)


def function_name(fn: Callable[..., Any]) -> str:
    """Return the name of a function for error texts."""
    return getattr(fn, "__qualname__", type(fn).__qualname__).replace(".<locals>", "")


def assert_same(actual: object, expected: object, *, rtol: float = 0.0, atol: float = 0.0) -> None:
    """Raise an AssertionError that names each leaf that differs between two collections.

    Two collections are the same if containers have equal types and keys or lengths, tensors have
    equal shapes and dtypes, and values are equal, or with a tolerance
    ``|actual - expected| <= atol + rtol * |expected|``. NaN equals NaN.

    Args:
        actual: the result.
        expected: the expected result.
        rtol: relative tolerance for floating-point and complex values.
        atol: absolute tolerance for floating-point and complex values.

    Raises:
        AssertionError: the collections differ. The text has the first ten differences.
    """
    __tracebackhide__ = True  # so that pytest shows the line of the test
    lines = list(differences(actual, expected, rtol=rtol, atol=atol))
    if lines:
        raise AssertionError("\n".join([f"{len(lines)} difference(s)", *lines[:10]]))


def differences(
    actual: object, expected: object, path: str = "", *, rtol: float = 0.0, atol: float = 0.0
) -> Iterator[str]:
    """Yield one line for each difference between two collections. See :func:`assert_same`.

    Args:
        actual: the result.
        expected: the expected result.
        path: the name of the collection in the lines.
        rtol: relative tolerance.
        atol: absolute tolerance.
    """
    label = path or "the value"
    if isinstance(actual, Tensor) and isinstance(expected, Tensor):
        problem = _tensor_difference(actual.detach().cpu(), expected.detach().cpu(), rtol, atol)
        if problem:
            yield f"{label}: {problem}"
        return
    if type(actual) is not type(expected):
        yield f"{label}: {actual!r:.80} is a {type(actual).__name__}, expected {expected!r:.80}"
        return
    actual_children = children(actual)
    expected_children = children(expected)
    for name in actual_children | expected_children:
        child_path = f"{path}{name}"
        if name not in expected_children:
            yield f"{child_path}: not expected"
        elif name not in actual_children:
            yield f"{child_path}: missing"
        else:
            yield from differences(
                actual_children[name], expected_children[name], child_path, rtol=rtol, atol=atol
            )
    is_leaf = not actual_children and not expected_children
    if is_leaf and not _is_close(actual, expected, rtol, atol):
        yield f"{label}: {actual!r:.80}, expected {expected!r:.80}"


def _is_close(actual: Any, expected: Any, rtol: float, atol: float) -> bool:
    """Return whether two leaves other than tensors are equal, both NaN, or within the tolerance."""
    if actual == expected:
        return True
    if actual != actual and expected != expected:
        return True
    if isinstance(actual, float | complex):
        return abs(actual - expected) <= atol + rtol * abs(expected)
    return False


def _tensor_difference(actual: Tensor, expected: Tensor, rtol: float, atol: float) -> str:
    """Return the first difference between two tensors as text, or "" if there is none."""
    actual_kind = _dtype_and_shape(actual)
    expected_kind = _dtype_and_shape(expected)
    if actual_kind != expected_kind:
        return f"{actual_kind}, expected {expected_kind}"
    if not actual.is_floating_point() and not actual.is_complex():
        rtol = 0.0
        atol = 0.0
    is_wrong = ~torch.isclose(actual, expected, rtol, atol, equal_nan=True)
    if not is_wrong.any():
        return ""
    index = tuple(is_wrong.nonzero()[0].tolist())
    values = f"{actual[index].item()}, expected {expected[index].item()}"
    if actual.dim() == 0:
        return values
    count = int(is_wrong.sum())
    return f"{count} of {is_wrong.numel()} elements of {actual_kind}, at {list(index)} {values}"


def _dtype_and_shape(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
