"""Pickling of a call for the ranks, and of its result for the launching process."""

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

    Functions and classes of importable modules and of a script are pickled by name: the ranks
    import the script, as with the standard library's ``multiprocessing``, and can pickle its
    classes in turn. Closures, lambdas and definitions of a notebook are pickled by value if
    ``cloudpickle`` is installed.

    Args:
        call: the function and its arguments.
        main_is_importable: whether a rank could import ``__main__``.
        by_name: whether to try the standard library's ``pickle`` first.

    Returns:
        The bytes, and whether ``__main__`` has to be imported before the bytes are loaded.

    Raises:
        MissingDependencyError: a function has to be pickled by value and ``cloudpickle`` is not
            installed.
        ArgumentTypeError: a part of the call cannot be pickled. The text names the part.
    """
    if by_name:
        packed = _try_dump(pickle.dumps, call)
        if isinstance(packed, bytes):
            # Pickling by name stores the names of modules: if "__main__" is absent, nothing
            # refers to that module.
            needs_main = b"__main__" in packed
            if main_is_importable or not needs_main:
                return packed, needs_main
    if not has_cloudpickle():
        raise _call_error(call, pickle.dumps, by_value=False)
    dump_by_value = import_module("cloudpickle").dumps  # an optional dependency
    packed = _try_dump(dump_by_value, call)
    if isinstance(packed, bytes):
        return packed, False
    raise _call_error(call, dump_by_value, by_value=True)


def _call_error(
    call: Call, dump: Callable[[Any], bytes], *, by_value: bool
) -> MissingDependencyError | ArgumentTypeError:
    """Return the error for a call that cannot be pickled, which names the part that cannot."""
    request = f"launch({getattr(call.fn, '__qualname__', call.fn)}, ...)"
    unpicklable = _find_unpicklable(call, dump)
    is_definition = isinstance(unpicklable.value, FunctionType | MethodType | type)
    # If there is no error, the call can be pickled by name, but the ranks cannot import that name.
    if unpicklable.error is None or (is_definition and not by_value):
        return MissingDependencyError(
            request,
            problem="it is defined where another process cannot import it, and cloudpickle is not "
            "installed",
            suggestion='pip install "torch-fabric[notebook]"',
        )
    path = unpicklable.path.lstrip(".") or "it"
    return ArgumentTypeError(
        request,
        problem=f"{path} is {unpicklable.description}",
        suggestion="build it inside the function, or use the start method 'fork', which inherits "
        "it",
    )


def dump_result(value: Any) -> bytes:
    """Pickle the result of a rank, with tensors detached, on the CPU, without shared memory.

    Raises:
        ArgumentTypeError: a part of the result cannot be pickled. The text names the part.
    """
    packed = _try_dump(_dump_by_value, value)
    if isinstance(packed, bytes):
        return packed
    unpicklable = _find_unpicklable(value, _dump_by_value)
    raise ArgumentTypeError(
        "what the function returned in a rank has to reach the launching process",
        problem=f"result{unpicklable.path} is {unpicklable.description}",
        expected="numbers, texts, tensors, state dicts, and collections of them",
        suggestion="return the values that you need; or None, or launch(..., return_result=False)",
    ) from packed


def load(packed: bytes) -> Any:
    """Unpickle the output of :func:`dump_call` or :func:`dump_result`."""
    # The parent or a child of this process wrote the bytes, on a pipe that no other process holds.
    return pickle.loads(packed)  # noqa: S301


def has_cloudpickle() -> bool:
    """Return whether functions can be pickled by value."""
    # This import takes 30 ms, and only processes that start ranks need it.
    from lightning_utilities.core.imports import RequirementCache

    return bool(RequirementCache("cloudpickle>=3.0"))


def _try_dump(dump: Callable[[Any], bytes], value: Any) -> bytes | Exception:
    """Return the pickled value, or the error if it cannot be pickled."""
    try:
        return dump(value)
    except Exception as error:  # noqa: BLE001 (a __reduce__ may raise anything; it is reported)
        return error


class _Unpicklable(NamedTuple):
    """A value that cannot be pickled.

    Attributes:
        path: where the value is in its collection, such as ``".args[0]"``. Empty for the whole
            collection.
        value: the value.
        error: the error of pickling it. None if pickling succeeds after all.
    """

    path: str
    value: Any
    error: Exception | None

    @property
    def description(self) -> str:
        """The type and the error, to follow the name of the value in a sentence."""
        return f"a {type(self.value).__qualname__}, which cannot be pickled: {self.error}"


def _find_unpicklable(value: Any, dump: Callable[[Any], bytes]) -> _Unpicklable:
    """Return the first leaf of a collection that cannot be pickled, or else the collection."""
    from fabric.tree import flatten, leaf_paths  # imports torch, without which a rank starts faster

    leaves, structure = flatten(value)
    for path, leaf in zip(leaf_paths(structure), leaves, strict=True):
        packed = _try_dump(dump, leaf)
        if isinstance(packed, Exception):
            return _Unpicklable(path, leaf, packed)
    packed = _try_dump(dump, value)
    error = packed if isinstance(packed, Exception) else None
    return _Unpicklable("", value, error)


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
    reducers: dict[type, Callable[[Any], Any]] = {}
    torch = sys.modules.get("torch")
    if torch is not None:
        reducers[torch.Tensor] = _reduce_tensor
        reducers[torch.nn.Parameter] = _reduce_tensor
    default_reducers = getattr(pickler, "dispatch_table", copyreg.dispatch_table)
    pickler.dispatch_table = ChainMap(reducers, default_reducers)
    pickler.dump(value)
    return buffer.getvalue()


def _reduce_tensor(tensor: Any) -> Any:
    # The copy keeps a view from pickling all of its storage.
    copy = tensor.detach().cpu().clone()
    if type(tensor) is not type(copy):  # a Parameter
        copy = type(tensor)(copy, tensor.requires_grad)
    return copy.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
