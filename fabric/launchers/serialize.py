"""Pickles a call for the ranks, and what it returned for the launching process, by value."""

import copyreg
import io
import pickle
import sys
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType, MethodType
from typing import Any

from fabric.errors import ArgumentTypeError, MissingDependencyError

__all__ = ["Call", "dump_call", "dump_result", "has_cloudpickle", "load_result"]

Call = tuple[Callable[..., Any], Sequence[Any], Mapping[str, Any]]


def dump_call(
    call: Call, *, main_is_importable: bool, by_value: bool | None = None, by_name: bool = True
) -> tuple[bytes, bool]:
    """Pickle a call once, for all ranks.

    What lives in importable modules is pickled by name, and so is what a script defines: the ranks import the script,
    as with the standard library's ``multiprocessing``, and can pickle its classes in turn. Closures, lambdas and what a
    notebook defines are pickled by value when ``cloudpickle`` is installed.

    Args:
        call: function, positional and keyword arguments.
        main_is_importable: whether a rank could import ``__main__`` instead.
        by_value: whether ``cloudpickle`` may be used; None finds out whether it is installed.
        by_name: whether the standard library's ``pickle`` may be tried first.

    Returns:
        The bytes, and whether ``__main__`` has to be imported before they are loaded.

    Raises:
        MissingDependencyError: a function has to be pickled by value and ``cloudpickle`` is not installed.
        ArgumentTypeError: a part of the call cannot be pickled; the text names it.
    """
    by_value = has_cloudpickle() if by_value is None else by_value
    plain = _attempt(pickle.dumps, call) if by_name else None
    # Anything that is pickled by name holds the name of its module: without this text nothing refers to __main__.
    if isinstance(plain, bytes) and (main_is_importable or b"__main__" not in plain):
        return plain, b"__main__" in plain
    dump = _cloudpickle().dumps if by_value else pickle.dumps
    packed = _attempt(dump, call)
    if isinstance(packed, bytes) and by_value:
        return packed, False
    raise _refusal(call, dump, by_value)


def dump_result(value: Any) -> bytes:
    """Pickle what a rank returned: tensors detached, on the CPU, with nothing shared.

    Raises:
        ArgumentTypeError: a part of it cannot be pickled; the text names it.
    """
    payload = _attempt(_dump_by_value, value)
    if isinstance(payload, bytes):
        return payload
    name, part, error = _culprit("result", value, _dump_by_value)
    raise ArgumentTypeError(
        "what the function returned in a rank has to reach the launching process",
        f"{name} is a {type(part).__qualname__}, which cannot be pickled: {error}",
        "numbers, texts, tensors, state dicts, and collections of them",
        "return the values that you need; or None, or launch(..., return_result=False)",
    ) from error


def load_result(payload: bytes) -> Any:
    """What :func:`dump_result` pickled, in the process that launched the rank."""
    return pickle.loads(payload)  # noqa: S301 (our own child wrote it, on a pipe that nobody else holds)


def has_cloudpickle() -> bool:
    """Whether functions can be pickled by value."""
    # Takes 30 ms to import, and is needed by what starts ranks only.
    from lightning_utilities.core.imports import RequirementCache

    return bool(RequirementCache("cloudpickle>=3.0"))


def _cloudpickle() -> Any:
    import cloudpickle  # an optional dependency

    return cloudpickle


def _attempt(dump: Callable[[Any], bytes], value: Any) -> bytes | Exception:
    try:
        return dump(value)
    except Exception as error:  # noqa: BLE001 (a __reduce__ may raise anything; it is reported)
        return error


def _dump_by_value(value: Any) -> bytes:
    try:
        return _dump_with(pickle.Pickler, value)
    except Exception:
        if not has_cloudpickle():
            raise
        return _dump_with(_cloudpickle().Pickler, value)


def _dump_with(pickler_type: Any, value: Any) -> bytes:
    buffer = io.BytesIO()
    pickler = pickler_type(buffer, pickle.HIGHEST_PROTOCOL)
    pickler.dispatch_table = ChainMap(_tensor_reducers(), getattr(pickler, "dispatch_table", copyreg.dispatch_table))
    pickler.dump(value)
    return buffer.getvalue()


def _tensor_reducers() -> dict[type, Callable[[Any], Any]]:
    torch = sys.modules.get("torch")
    if torch is None:
        return {}

    def tensor(value: Any) -> Any:
        # The copy keeps a view from dragging all of its storage along.
        return value.detach().cpu().clone().__reduce_ex__(pickle.HIGHEST_PROTOCOL)

    def parameter(value: Any) -> Any:
        copy = torch.nn.Parameter(value.detach().cpu().clone(), value.requires_grad)
        return copy.__reduce_ex__(pickle.HIGHEST_PROTOCOL)

    return {torch.Tensor: tensor, torch.nn.Parameter: parameter}


def _refusal(call: Call, dump: Callable[[Any], bytes], by_value: bool) -> Exception:
    fn, args, kwargs = call
    parts = {"fn": fn, **{f"args[{index}]": value for index, value in enumerate(args)}}
    parts |= {f"kwargs[{name!r}]": value for name, value in kwargs.items()}
    for name, value in parts.items():
        if not by_value and _needs_value(value):
            return MissingDependencyError(
                f"launch({getattr(value, '__qualname__', name)})",
                f"{name} is defined where another process cannot import it, and cloudpickle is not installed",
                "a function at the top level of a module, or any function once cloudpickle is there",
                'pip install "torch-fabric[notebook]"',
            )
    where, part, error = next(
        (_culprit(name, value, dump) for name, value in parts.items() if isinstance(_attempt(dump, value), Exception)),
        ("fn", fn, None),
    )
    return ArgumentTypeError(
        f"launch({getattr(fn, '__qualname__', fn)}, ...)",
        f"{where} is a {type(part).__qualname__}, which cannot be pickled: {error}",
        "arguments that can be sent to another process",
        "build it inside the function, or use the start method 'fork', which inherits it",
    )


def _needs_value(value: Any) -> bool:
    return isinstance(value, (FunctionType, MethodType, type)) and (
        value.__module__ == "__main__" or isinstance(_attempt(pickle.dumps, value), Exception)
    )


def _culprit(name: str, value: Any, dump: Callable[[Any], bytes]) -> tuple[str, Any, Exception | None]:
    """The innermost entry of a collection that cannot be pickled: its path, itself and the reason."""
    entries: list[tuple[Any, Any]] = []
    if isinstance(value, Mapping):
        entries = list(value.items())
    elif isinstance(value, (list, tuple)):
        entries = list(enumerate(value))
    for key, entry in entries:
        if isinstance(_attempt(dump, entry), Exception):
            return _culprit(f"{name}[{key!r}]", entry, dump)
    error = _attempt(dump, value)
    return name, value, error if isinstance(error, Exception) else None
