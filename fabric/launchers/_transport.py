"""How a call travels to the ranks, and what it returned travels back: pickled, by value."""

import copyreg
import importlib.util
import io
import pickle
import sys
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType, MethodType
from typing import Any

from fabric.errors import ArgumentTypeError, MissingDependencyError

__all__ = ["Call", "dump_result", "load_result", "main_source", "pack_call"]

Call = tuple[Callable[..., Any], Sequence[Any], Mapping[str, Any]]


def main_source() -> tuple[str, str] | None:
    """Where a fresh process finds the module ``__main__``: ``("module", name)``, ``("path", file)`` or None.

    None in an interactive session or a notebook, and for ``python -m package``, whose code is not a library.
    """
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        is_entry_point = spec.name == "__main__" or spec.name.endswith(".__main__")
        return None if is_entry_point else ("module", spec.name)
    path = getattr(main, "__file__", None)
    return None if path is None else ("path", path)


def pack_call(
    call: Call, *, main_is_importable: bool, by_value: bool | None = None, by_name: bool = True
) -> tuple[bytes, bool]:
    """Pickle a call once, for all ranks.

    What lives in importable modules travels by name, and so does what a script defines: the ranks import the script, as
    with the standard library's ``multiprocessing``, and can pickle its classes in turn. Closures, lambdas and what a
    notebook defines travel by value when ``cloudpickle`` is installed.

    Args:
        call: function, positional and keyword arguments.
        main_is_importable: whether a rank could import ``__main__`` instead.
        by_value: whether ``cloudpickle`` may be used; None finds out whether it is installed.
        by_name: whether the standard library's ``pickle`` may be tried first.

    Returns:
        The bytes, and whether ``__main__`` has to be imported before they are loaded.

    Raises:
        MissingDependencyError: a function has to travel by value and ``cloudpickle`` is not installed.
        ArgumentTypeError: a part of the call cannot be pickled; the text names it.
    """
    by_value = has_cloudpickle() if by_value is None else by_value
    plain = _attempt(pickle.dumps, call) if by_name else None
    # Anything that travels by name holds the name of its module, so without this text nothing refers to __main__.
    if isinstance(plain, bytes) and b"__main__" not in plain:
        return plain, False
    if isinstance(plain, bytes) and main_is_importable:
        return plain, True
    if by_value:
        packed = _attempt(_cloudpickle().dumps, call)
        if isinstance(packed, bytes):
            return packed, False
    raise _refusal(call, by_value)


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
        "what the function returned in a rank has to travel to the launching process",
        f"{name} is a {type(part).__qualname__}, which cannot be pickled: {error}",
        "numbers, texts, tensors, state dicts, and collections of them",
        "return the values that you need; or None, or launch(..., return_result=False)",
    ) from error


def load_result(payload: bytes) -> Any:
    """What :func:`dump_result` pickled, in the process that launched the rank."""
    return pickle.loads(payload)  # noqa: S301 (our own child wrote it, on a pipe that nobody else holds)


def has_cloudpickle() -> bool:
    """Whether functions can travel by value."""
    return importlib.util.find_spec("cloudpickle") is not None


def _cloudpickle() -> Any:
    import cloudpickle  # an optional dependency

    return cloudpickle


def _attempt(dump: Callable[[Any], bytes], value: Any) -> bytes | Exception:
    try:
        return dump(value)
    except Exception as error:  # noqa: BLE001 (a __reduce__ may raise anything; it is reported)
        return error


def _dump_by_value(value: Any) -> bytes:
    plain = _attempt(lambda value: _dump_with(pickle.Pickler, value), value)
    if isinstance(plain, bytes):
        return plain
    if not has_cloudpickle():
        raise plain
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


def _refusal(call: Call, by_value: bool) -> Exception:
    fn, args, kwargs = call
    parts: dict[str, Any] = {"fn": fn}
    parts |= {f"args[{index}]": value for index, value in enumerate(args)}
    parts |= {f"kwargs[{name!r}]": value for name, value in kwargs.items()}
    dump = _cloudpickle().dumps if by_value else pickle.dumps
    refused = (
        name
        for name, value in parts.items()
        if isinstance(_attempt(dump, value), Exception) or (not by_value and _needs_value(value))
    )
    name = next(refused, "fn")
    value = parts[name]
    if not by_value and _needs_value(value):
        return MissingDependencyError(
            f"launch({getattr(value, '__qualname__', name)})",
            f"{name} is defined inside a function, in a notebook or at a prompt, where another process cannot import "
            "it; it has to travel by value, and cloudpickle is not installed",
            "a function at the top level of a module, or any function once cloudpickle is there",
            'pip install "torch-fabric[notebook]"',
        )
    where, part, error = _culprit(name, value, dump)
    return ArgumentTypeError(
        f"launch({getattr(fn, '__qualname__', fn)}, ...)",
        f"{where} is a {type(part).__qualname__}, which cannot be pickled: {error}",
        "arguments that can travel to another process",
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
