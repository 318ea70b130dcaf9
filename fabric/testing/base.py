"""The parts of the test kit that every world uses: arguments by rank, comparison, and errors.

A *world* has a ``size`` and a method ``run(fn, *args)``, which calls ``fn(fabric, *args)`` on every
rank and returns the results in rank order. The ranks of a :class:`fabric.testing.RankPool` are
processes, and the ranks of a :class:`fabric.testing.ThreadedWorld` are threads. Code that is
written for one world runs in the other.
"""

import traceback
from collections import namedtuple
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Protocol

import torch
from torch import Tensor

from fabric.errors import ConfigurationError, RankFailedError
from fabric.launchers.rank import is_secondary
from fabric.tree import children, flatten, map_leaves, map_tensors

__all__ = [
    "FailureRole",
    "Pair",
    "PerRank",
    "Record",
    "Report",
    "World",
    "arguments_of_rank",
    "assert_same",
    "check_arguments",
    "check_unchanged",
    "differences",
    "error_report",
    "function_name",
    "rank_failed_error",
    "timeout_report",
]


_SHOWN_DIFFERENCES = 10


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
        values: one value per rank.
    """

    def __init__(self, values: Sequence[Any]) -> None:
        self.values = values

    def __repr__(self) -> str:
        # Hypothesis prints this text. Strides often matter, and torch does not show them.
        shown_values = map_tensors(_TensorText, list(self.values))
        return f"PerRank({shown_values!r})"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        # Hypothesis calls this method to print a value. Otherwise it prints how it drew the value.
        printer.text(repr(self))


Pair = namedtuple("Pair", "first second")
"""A namedtuple for generated collections."""


@dataclass
class Record:
    """A dataclass for generated collections."""

    left: Any
    right: Any


class _TensorText:
    """A stand-in for a tensor in the text of a PerRank, which also shows unusual strides.

    The text is code that makes the tensor, after ``from torch import inf, nan, tensor``.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._text = repr(tensor)
        if type(tensor) is not Tensor:
            return
        if not tensor.is_contiguous():
            self._text = _strided_text(tensor)
        elif tensor.numel() == 0 and tensor.dim() > 1:
            # torch shows the shape as an argument that tensor() does not take.
            self._text = f"{tensor.flatten()!r}.reshape({tuple(tensor.shape)})"

    def __repr__(self) -> str:
        return self._text


def _strided_text(tensor: Tensor) -> str:
    """Return code that makes a tensor with its strides, from all elements that lie in its memory.

    The elements between those of the tensor are shown, too, since a collective may have read them.
    """
    elements_in_memory = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        elements_in_memory += (size - 1) * stride
    memory = tensor.detach().as_strided((elements_in_memory,), (1,))
    return f"{memory!r}.as_strided({tuple(tensor.shape)}, {tensor.stride()})"


def arguments_of_rank(
    args: Sequence[Any], kwargs: Mapping[str, Any], rank: int
) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments that one rank is passed, from the arguments of ``World.run``.

    Each :class:`PerRank` is replaced by its value for the rank.
    """
    args_of_rank = [_value_of_rank(value, rank) for value in args]
    kwargs_of_rank = {name: _value_of_rank(value, rank) for name, value in kwargs.items()}
    return args_of_rank, kwargs_of_rank


def _value_of_rank(argument: Any, rank: int) -> Any:
    """Return the value of a :class:`PerRank` for a rank. Return any other argument unchanged."""
    if isinstance(argument, PerRank):
        return argument.values[rank]
    return argument


class FailureRole(IntEnum):
    """The role of a rank in a failed call. A rank of a lower role is blamed first."""

    POSSIBLE_CAUSE = 0
    """The rank failed by itself."""
    WAITING = 1
    """The rank waits for other ranks."""
    LOST_PEER = 2
    """The rank raised because another rank had failed."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """The outcome of a call on one rank.

    Attributes:
        rank: the rank.
        outcome: what happened, to follow "rank 0" in a sentence.
        has_failed: whether the rank raised, exited or timed out.
        role: the role of the rank if it has failed.
        exit_code: the exit code of the rank's process. 1 if the rank raised.
        stack: the rank's traceback, or its stack at the timeout. Empty if there is none.
        error: the exception of the rank. None if the rank did not raise, or if the exception cannot
            be pickled.
    """

    rank: int
    outcome: str = "returned"
    has_failed: bool = False
    role: FailureRole = FailureRole.POSSIBLE_CAUSE
    exit_code: int = 1
    stack: str = ""
    error: BaseException | None = None


def error_report(rank: int, error: BaseException) -> Report:
    """Return the report of a rank whose function raised.

    Call this function in the frame that called the rank's function, since that frame is left out
    of the traceback.
    """
    if error.__traceback__ is not None:
        # The first frame is the line of fabric that called the function.
        error = error.with_traceback(error.__traceback__.tb_next)
    formatter = traceback.TracebackException.from_exception(error)
    # Without notes, the last item has the type and the message. A SyntaxError has more items before
    # this one.
    formatter.__notes__ = None
    *_, type_and_message = formatter.format_exception_only()
    first_line, _, _ = type_and_message.partition("\n")
    role = FailureRole.POSSIBLE_CAUSE
    # A lost connection, a timeout and a mismatch of collectives may follow from another failure.
    if is_secondary(error):
        role = FailureRole.LOST_PEER
    return Report(
        rank=rank,
        outcome=f"raised {first_line}",
        has_failed=True,
        role=role,
        stack="".join(traceback.format_exception(error)),
        error=error,
    )


def timeout_report(
    rank: int,
    stack: str,
    timeout: float,
    *,
    is_waiting: bool,
    reason: str = "",
    position: str = "",
    exit_code: int = 1,
) -> Report:
    """Return the report of a rank that is still running at the timeout.

    Args:
        rank: the rank.
        stack: the current stack of the rank.
        timeout: the seconds that the call was allowed to take.
        is_waiting: whether the stack shows that the rank waits for other ranks.
        reason: why the call was allowed less than its timeout. Empty if it was not.
        position: the collective and the line that the rank is in. Empty if not known.
        exit_code: the exit code of the rank's process.
    """
    role = FailureRole.POSSIBLE_CAUSE
    if is_waiting:
        role = FailureRole.WAITING
    outcome = f"did not return within {timeout:g} s"
    if reason:
        outcome = f"{outcome} ({reason})"
    if position:
        outcome = f"{outcome}: {position}"
    return Report(
        rank=rank,
        outcome=outcome,
        has_failed=True,
        role=role,
        exit_code=exit_code,
        stack=stack,
    )


def rank_failed_error(call_text: str, reports: Sequence[Report]) -> RankFailedError:
    """Return the error of a call that failed on at least one rank.

    The error names the most likely cause, and then the outcome of every other rank.

    Args:
        call_text: the name of the function that was called.
        reports: one report per rank, in rank order.
    """
    failures = [report for report in reports if report.has_failed]
    cause = min(failures, key=_distance_from_root_cause)
    other_outcomes: list[str] = []
    stacks = [_titled_stack(cause)]
    for report in reports:
        if report is cause:
            continue
        other_outcomes.append(f"rank {report.rank} {report.outcome}")
        # Many ranks may have lost the rank that is the cause. Their tracebacks are left out.
        if report.has_failed and report.role < FailureRole.LOST_PEER:
            stacks.append(_titled_stack(report))
    shown_stacks = [stack for stack in stacks if stack]
    error = RankFailedError(
        f"{call_text}: rank {cause.rank} of {len(reports)} {cause.outcome}",
        rank=cause.rank,
        exit_code=cause.exit_code,
        traceback="\n".join(shown_stacks),
        # The error indents the first line of the problem by two spaces.
        problem="\n  ".join(other_outcomes),
    )
    # The interpreter prints __cause__. Hypothesis reads __context__ to tell different failures
    # apart, and then shrinks an example of each failure.
    error.__cause__ = cause.error
    error.__context__ = cause.error
    return error


def _distance_from_root_cause(report: Report) -> tuple[FailureRole, bool, int]:
    """Return a sort key of failed ranks that puts the most likely root cause first.

    Equally likely ranks are in rank order. So the same failure gives the same text in every run,
    which hypothesis needs.
    """
    # A process that was killed or has exited is a more likely cause than one that raised.
    has_raised = report.exit_code == 1
    return report.role, has_raised, report.rank


def _titled_stack(report: Report) -> str:
    """Return a rank's traceback or stack below the name of the rank, or "" if it has none."""
    if not report.stack:
        return ""
    return f"rank {report.rank}: {report.stack.rstrip()}"


def check_arguments(fn: Callable[..., Any], arguments: Iterable[object], size: int) -> None:
    """Raise a ConfigurationError unless every :class:`PerRank` has one value per rank.

    Args:
        fn: the function to call, for the error text.
        arguments: the positional and keyword arguments of the function.
        size: the number of ranks.
    """
    for argument in arguments:
        if isinstance(argument, PerRank) and len(argument.values) != size:
            raise ConfigurationError(
                f"run({function_name(fn)}, PerRank(...))",
                problem=f"there are {len(argument.values)} values for {size} ranks",
            )


def check_unchanged(
    fn: Callable[..., Any], actual: Sequence[object], original: Sequence[object]
) -> None:
    """Check that a function has not changed its arguments in place.

    Tensors, numbers and text are compared, in collections too. Other objects may have changed.

    Args:
        fn: the function, for the error text.
        actual: the arguments after the call.
        original: the arguments before the call.

    Raises:
        AssertionError: an argument has changed. The text names the argument's position.
    """
    lines = list(
        differences(
            map_leaves(_value_or_type, list(actual)),
            map_leaves(_value_or_type, list(original)),
            signed_zeros=True,
        )
    )
    if lines:
        title = f"{function_name(fn)} has changed its arguments in place"
        raise AssertionError("\n".join([title, *lines[:_SHOWN_DIFFERENCES]]))


def _value_or_type(leaf: object) -> object:
    """Return a leaf of a type that can be compared. Return the type of any other leaf."""
    if isinstance(leaf, Tensor | float | int | complex | str | bytes | None):
        return leaf
    return type(leaf)


def function_name(fn: Callable[..., Any]) -> str:
    """Return the name of a function, or of the type of another callable object, for error texts.

    The text ``.<locals>`` in the name of a nested function is left out.
    """
    qualified_name = getattr(fn, "__qualname__", type(fn).__qualname__)
    return qualified_name.replace(".<locals>", "")


@dataclass(frozen=True)
class _Equality:
    """What counts as equal.

    Attributes:
        rtol: as in :func:`assert_same`.
        atol: as in :func:`assert_same`.
        equal_nan: as in :func:`assert_same`.
        signed_zeros: as in :func:`assert_same`.
        epsilons: how many times the machine epsilon of its dtype a value may differ, in addition to
            the other tolerances. Above 0 only for sums over ranks.
    """

    rtol: float
    atol: float
    equal_nan: bool
    signed_zeros: bool
    epsilons: float = 0.0


def assert_same(
    actual: object,
    expected: object,
    *,
    rtol: float = 0.0,
    atol: float = 0.0,
    equal_nan: bool = True,
    signed_zeros: bool = False,
    summed: Sequence[object] = (),
) -> None:
    """Check that two collections are the same, leaf by leaf.

    - Containers need equal types and equal keys or lengths.
    - Tensors need equal shapes, dtypes and values. Devices and strides may differ.
    - Other leaves need equal types and values.
    - Floating-point and complex values ``a`` and ``e`` also count as equal if
      ``|a - e| <= atol + rtol * |e|``, or if both are NaN.

    Args:
        actual: the result.
        expected: the expected result.
        rtol: the relative tolerance.
        atol: the absolute tolerance.
        equal_nan: whether NaN equals NaN.
        signed_zeros: whether 0.0 differs from -0.0.
        summed: the values of all ranks, if sums or means of them are compared whose order of
            addition may differ. Then ``n * eps * s`` is added to ``atol``: ``n`` is the number of
            ranks, ``eps`` the machine epsilon of the dtype of the result, and ``s`` the sum over
            the ranks of the largest finite magnitude. Two sums in any order differ by less.

    Raises:
        AssertionError: the collections differ. The text has the number of differences, and the
            first ten of them.
    """
    __tracebackhide__ = True  # pytest then shows the line of the test instead of this one
    found_differences = differences(
        actual,
        expected,
        rtol=rtol,
        atol=atol,
        equal_nan=equal_nan,
        signed_zeros=signed_zeros,
        summed=summed,
    )
    lines = list(found_differences)
    if lines:
        raise AssertionError(
            "\n".join([f"{len(lines)} difference(s)", *lines[:_SHOWN_DIFFERENCES]])
        )


def differences(
    actual: object,
    expected: object,
    path: str = "",
    *,
    rtol: float = 0.0,
    atol: float = 0.0,
    equal_nan: bool = True,
    signed_zeros: bool = False,
    summed: Sequence[object] = (),
) -> Iterator[str]:
    """Yield one line for each difference between two collections. See :func:`assert_same`.

    Args:
        actual: the result, or a part of the result at ``path``.
        expected: the expected result, or the part of it at ``path``.
        path: the name of the collection in the lines.
        rtol: the relative tolerance.
        atol: the absolute tolerance.
        equal_nan: whether NaN equals NaN.
        signed_zeros: whether 0.0 differs from -0.0.
        summed: the values of all ranks, as in :func:`assert_same`.
    """
    # The bound n * eps * s of assert_same(), without the factor eps, which depends on the dtype of
    # each result.
    epsilons = len(summed) * sum(_largest_magnitude(value) for value in summed)
    equality = _Equality(rtol, atol, equal_nan, signed_zeros, epsilons)
    return _differences(actual, expected, path, equality)


def _differences(actual: object, expected: object, path: str, equality: _Equality) -> Iterator[str]:
    """Yield one line for each difference between two collections. See :func:`differences`."""
    label = path or "the value"
    if isinstance(actual, Tensor) and isinstance(expected, Tensor):
        problem = _tensor_difference(actual.detach().cpu(), expected.detach().cpu(), equality)
        if problem:
            yield f"{label}: {problem}"
        return
    if type(actual) is not type(expected):
        problem = f"{_shortened(actual)} is a {type(actual).__name__}"
        yield f"{label}: {problem}, expected {_shortened(expected)}"
        return
    # The children of a collection by name, such as ".left" or "[0]". A leaf has no children.
    actual_children = children(actual)
    expected_children = children(expected)
    # The names in order: those of `actual`, then those that only `expected` has.
    all_names = list(actual_children | expected_children)
    for name in all_names:
        child_path = f"{path}{name}"
        if name not in expected_children:
            yield f"{child_path}: not expected"
        elif name not in actual_children:
            yield f"{child_path}: missing"
        else:
            yield from _differences(
                actual_children[name], expected_children[name], child_path, equality
            )
    # An empty container is compared as a leaf, too.
    is_leaf = not all_names
    if is_leaf and not _is_same_leaf(actual, expected, equality):
        yield f"{label}: {_shortened(actual)}, expected {_shortened(expected)}"


def _shortened(value: object) -> str:
    """Return at most 80 characters of the ``repr`` of a value."""
    return repr(value)[:80]


def _is_same_leaf(actual: Any, expected: Any, equality: _Equality) -> bool:
    """Return whether two leaves of one type, which are not tensors, are equal.

    Numbers also count as equal within the tolerance, or if both are NaN.
    """
    if isinstance(actual, float | complex):
        # Tensors are made of the numbers, so that both follow the same rules.
        wide_dtype = torch.complex128 if isinstance(actual, complex) else torch.float64
        numbers = torch.tensor([actual, expected], dtype=wide_dtype)
        return not _is_wrong(numbers[0], numbers[1], equality).item()
    if actual == expected:
        return True
    # A number of another library, such as Decimal: only NaN is not equal to itself.
    return equality.equal_nan and actual != actual and expected != expected


def _largest_magnitude(value: object) -> float:
    """Return the largest finite magnitude of the numbers in a collection, or 0.0 without any."""
    leaves, _ = flatten(value)
    largest = 0.0
    for leaf in leaves:
        if not isinstance(leaf, Tensor | float | int | complex):
            continue
        magnitudes = torch.as_tensor(leaf).detach().cpu().to(torch.complex128).abs()
        finite_magnitudes = magnitudes[magnitudes.isfinite()]
        if finite_magnitudes.numel():
            largest = max(largest, finite_magnitudes.max().item())
    return largest


def _is_wrong(actual: Tensor, expected: Tensor, equality: _Equality) -> Tensor:
    """Return a boolean for each element: whether two tensors of one dtype and shape differ there.

    The tolerances apply to floating-point and complex tensors.
    """
    if not actual.is_floating_point() and not actual.is_complex():
        return actual != expected
    rounding_of_sums = equality.epsilons * torch.finfo(actual.dtype).eps
    atol = equality.atol + rounding_of_sums
    is_close = torch.isclose(actual, expected, equality.rtol, atol, equal_nan=equality.equal_nan)
    if not equality.signed_zeros:
        return ~is_close
    return ~is_close | _differs_in_sign_of_zero(actual, expected)


def _differs_in_sign_of_zero(actual: Tensor, expected: Tensor) -> Tensor:
    """Return a boolean for each element: whether one tensor has 0.0 and the other one -0.0."""
    if actual.is_complex():
        real_actual = torch.view_as_real(actual.resolve_conj())
        real_expected = torch.view_as_real(expected.resolve_conj())
        return _differs_in_sign_of_zero(real_actual, real_expected).any(-1)
    has_other_sign = actual.signbit() != expected.signbit()
    return (actual == 0) & (expected == 0) & has_other_sign


def _tensor_difference(actual: Tensor, expected: Tensor, equality: _Equality) -> str:
    """Return the first difference between two tensors as text, or "" if there is none.

    The tensors are on one device.
    """
    actual_kind = _dtype_and_shape(actual)
    expected_kind = _dtype_and_shape(expected)
    if actual_kind != expected_kind:
        return f"{actual_kind}, expected {expected_kind}"
    is_wrong = _is_wrong(actual, expected, equality)
    if not is_wrong.any():
        return ""
    first_index = tuple(is_wrong.nonzero()[0].tolist())
    values = f"{actual[first_index].item()}, expected {expected[first_index].item()}"
    if actual.dim() == 0:
        return values
    count = int(is_wrong.sum())
    return (
        f"{count} of {is_wrong.numel()} elements of {actual_kind}, at {list(first_index)} {values}"
    )


def _dtype_and_shape(tensor: Tensor) -> str:
    """Return the dtype and the shape of a tensor as text, such as ``"float32 (2, 3)"``."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
