"""Pickles a call for the ranks, and its result for the launching process."""

import copyreg
import io
import pickle
import sys
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from types import FunctionType, MethodType
from typing import Any, NamedTuple

from fabric.errors import ArgumentTypeError, MissingDependencyError

__all__ = ["Call", "dump_call", "dump_result", "has_cloudpickle", "load"]


class Call(NamedTuple):
    """A function with its arguments."""

    fn: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]


def dump_call(call: Call, *, main_is_importable: bool, by_name: bool = True) -> tuple[bytes, bool]:
    """Pickle a call once, for all ranks.

    Functions and classes of importable modules and of a script are pickled by name: the ranks import the script, as
    with the standard library's ``multiprocessing``, and can pickle its classes in turn. Closures, lambdas and
    definitions of a notebook are pickled by value if ``cloudpickle`` is installed.

    Args:
        call: function, positional and keyword arguments.
        main_is_importable: whether a rank could import ``__main__`` instead.
        by_name: whether the standard library's ``pickle`` may be tried first.

    Returns:
        The bytes, and whether ``__main__`` has to be imported before they are loaded.

    Raises:
        MissingDependencyError: a function has to be pickled by value and ``cloudpickle`` is not installed.
        ArgumentTypeError: a part of the call cannot be pickled; the text names it.
    """
    packed = _attempt(pickle.dumps, call) if by_name else None
    # Pickling by name stores the name of the module: without the text "__main__" nothing refers to it.
    if isinstance(packed, bytes) and (main_is_importable or b"__main__" not in packed):
        return packed, b"__main__" in packed
    by_value = has_cloudpickle()
    dump = (
        import_module("cloudpickle").dumps if by_value else pickle.dumps
    )  # an optional dependency
    if by_value and isinstance(packed := _attempt(dump, call), bytes):
        return packed, False
    name, part, error = _culprit(call, dump)
    request = f"launch({getattr(call.fn, '__qualname__', call.fn)}, ...)"
    if isinstance(error, bytes) or (
        not by_value and isinstance(part, FunctionType | MethodType | type)
    ):
        raise MissingDependencyError(
            request,
            "it is defined where another process cannot import it, and cloudpickle is not installed",
            suggestion='pip install "torch-fabric[notebook]"',
        )
    raise ArgumentTypeError(
        request,
        f"{name.lstrip('.') or 'it'} is a {type(part).__qualname__}, which cannot be pickled: {error}",
        suggestion="build it inside the function, or use the start method 'fork', which inherits it",
    )


def dump_result(value: Any) -> bytes:
    """Pickle a rank's result: tensors detached, on the CPU, without shared memory.

    Raises:
        ArgumentTypeError: a part of it cannot be pickled; the text names it.
    """
    packed = _attempt(_dump_by_value, value)
    if isinstance(packed, bytes):
        return packed
    name, part, error = _culprit(value, _dump_by_value)
    raise ArgumentTypeError(
        "what the function returned in a rank has to reach the launching process",
        f"result{name} is a {type(part).__qualname__}, which cannot be pickled: {error}",
        "numbers, texts, tensors, state dicts, and collections of them",
        "return the values that you need; or None, or launch(..., return_result=False)",
    ) from packed


def load(packed: bytes) -> Any:
    """Unpickle the output of :func:`dump_call` or :func:`dump_result`."""
    return pickle.loads(packed)  # noqa: S301 (our own parent or child wrote it, on a pipe that no other process holds)


def has_cloudpickle() -> bool:
    """Whether functions can be pickled by value."""
    # Takes 30 ms to import; only processes that start ranks need it.
    from lightning_utilities.core.imports import RequirementCache

    return bool(RequirementCache("cloudpickle>=3.0"))


def _attempt(dump: Callable[[Any], bytes], value: Any) -> bytes | Exception:
    try:
        return dump(value)
    except Exception as error:  # noqa: BLE001 (a __reduce__ may raise anything; it is reported)
        return error


def _culprit(value: Any, dump: Callable[[Any], bytes]) -> tuple[str, Any, bytes | Exception]:
    """Path, value and error of the first leaf that cannot be pickled; else of the whole collection."""
    from fabric.tree import flatten, leaf_paths  # imports torch, without which a rank starts faster

    leaves, structure = flatten(value)
    for path, leaf in zip(leaf_paths(structure), leaves, strict=True):
        if isinstance(error := _attempt(dump, leaf), Exception):
            return path, leaf, error
    return "", value, _attempt(dump, value)


def _dump_by_value(value: Any) -> bytes:
    try:
        return _dump_with(pickle.Pickler, value)
    except Exception:
        if not has_cloudpickle():
            raise
        return _dump_with(import_module("cloudpickle").Pickler, value)


def _dump_with(pickler_type: Any, value: Any) -> bytes:
    buffer = io.BytesIO()
    pickler = pickler_type(buffer, pickle.HIGHEST_PROTOCOL)
    torch = sys.modules.get("torch")
    tensors = (
        {} if torch is None else dict.fromkeys((torch.Tensor, torch.nn.Parameter), _reduce_tensor)
    )
    pickler.dispatch_table = ChainMap(
        tensors, getattr(pickler, "dispatch_table", copyreg.dispatch_table)
    )
    pickler.dump(value)
    return buffer.getvalue()


def _reduce_tensor(tensor: Any) -> Any:
    # The copy keeps a view from dragging all of its storage along.
    copy = tensor.detach().cpu().clone()
    if type(tensor) is not type(copy):  # a Parameter
        copy = type(tensor)(copy, tensor.requires_grad)
    return copy.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
