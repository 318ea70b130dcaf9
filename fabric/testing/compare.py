"""Where two collections differ, said so that the reader sees it."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

__all__ = ["assert_same", "differences"]

_SHOWN = 10


def assert_same(actual: Any, expected: Any, *, rtol: float = 0.0, atol: float = 0.0) -> None:
    """Raise an AssertionError that names every leaf that differs, unless two collections are the same.

    The same are: containers of one type with the same keys or lengths, tensors of one shape and dtype, and values that
    are equal, or with a tolerance ``|actual - expected| <= atol + rtol * |expected|``. Not-a-number equals itself.

    Args:
        actual: what was found.
        expected: what should have been.
        rtol: relative tolerance for floating-point and complex values.
        atol: absolute tolerance for the same.
    """
    __tracebackhide__ = True  # pytest shows the line of the test
    found = list(differences(actual, expected, rtol=rtol, atol=atol))
    if found:
        rest = [f"... and {len(found) - _SHOWN} more"] if len(found) > _SHOWN else []
        raise AssertionError("\n".join([f"{len(found)} difference(s)", *found[:_SHOWN], *rest]))


def differences(actual: Any, expected: Any, path: str = "", *, rtol: float = 0.0, atol: float = 0.0) -> Iterator[str]:
    """One line for each place in which two collections differ; see :func:`assert_same`.

    Args:
        actual: what was found.
        expected: what should have been.
        path: how the collection is called in the lines.
        rtol: relative tolerance.
        atol: absolute tolerance.
    """
    where = path or "the value"
    if isinstance(actual, Tensor) and isinstance(expected, Tensor):
        yield from _of_tensors(actual.detach(), expected.detach(), where, rtol, atol)
    elif type(actual) is not type(expected):
        yield f"{where}: {_shown(actual)} is a {type(actual).__name__}, expected {_shown(expected)}"
    elif (entries := _entries(expected)) is not None:
        own = _entries(actual) or {}
        for name in [*own, *(name for name in entries if name not in own)]:
            if name not in entries:
                yield f"{path}{name}: not expected"
            elif name not in own:
                yield f"{path}{name}: missing"
            else:
                yield from differences(own[name], entries[name], f"{path}{name}", rtol=rtol, atol=atol)
    elif isinstance(actual, float | complex):
        own, other = (torch.tensor(value, dtype=torch.complex128) for value in (actual, expected))
        if not _close(own, other, rtol, atol):
            yield f"{where}: {_shown(actual)}, expected {_shown(expected)}"
    elif actual != expected:
        yield f"{where}: {_shown(actual)}, expected {_shown(expected)}"


def _entries(tree: Any) -> dict[str, Any] | None:
    """The children of a collection by the way to them; None for a leaf."""
    if isinstance(tree, dict):
        return {f"[{key!r}]": value for key, value in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return {f".{name}": value for name, value in zip(tree._fields, tree, strict=True)}  # type: ignore[attr-defined]
    if isinstance(tree, list | tuple):
        return {f"[{index}]": value for index, value in enumerate(tree)}
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return {f".{field.name}": getattr(tree, field.name) for field in dataclasses.fields(tree)}
    return None


def _of_tensors(actual: Tensor, expected: Tensor, where: str, rtol: float, atol: float) -> Iterator[str]:
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        yield f"{where}: {_kind(actual)}, expected {_kind(expected)}"
        return
    wrong = ~_close(actual.cpu(), expected.cpu(), rtol, atol)
    if not wrong.any():
        return
    index = tuple(wrong.nonzero()[0].tolist())
    place = f"{int(wrong.sum())} of {actual.numel()} elements of {_kind(actual)}, at {list(index)} " if index else ""
    yield f"{where}: {place}{actual[index].item()}, expected {expected[index].item()}"


def _close(actual: Tensor, expected: Tensor, rtol: float, atol: float) -> Tensor:
    if actual.is_floating_point() or actual.is_complex():
        return torch.isclose(actual, expected, rtol, atol, equal_nan=True)
    return actual == expected


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
