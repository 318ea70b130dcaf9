"""Compares collections leaf by leaf, and the results of a training step under several strategies."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fabric._plan import parse_strategy
from fabric.errors import ConfigurationError
from fabric.strategies import Strategy
from fabric.testing.base import name_of
from fabric.testing.pool import RankPool

__all__ = ["assert_equivalent", "assert_same", "differences"]

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
        raise AssertionError("\n".join([f"{len(found)} difference(s)", *_first(found)]))


def assert_equivalent(
    step_fn: Callable[..., Any],
    *args: Any,
    strategies: Sequence[Strategy | str] = ("single_device", "ddp", "fsdp"),
    world_sizes: Sequence[int] = (1, 2),
    rtol: float = 1e-5,
    atol: float = 1e-6,
    timeout: float = 120.0,
    **options: Any,
) -> None:
    """Run a training step under several strategies and numbers of ranks, and compare all results with the first.

    ``step_fn(fabric, *args)`` builds its model from a fixed seed, sets it up, takes its rank's share of a global batch,
    and returns what should not depend on who computed it: a loss that was reduced over ranks, a gradient norm, a whole
    state dict.

    Args:
        step_fn: the step; it is sent to the ranks as by :meth:`fabric.testing.RankPool.run`.
        *args: what it is called with after the fabric.
        strategies: names or strategies. Those of a single process run on one rank only.
        world_sizes: numbers of ranks.
        rtol: relative tolerance; the order of summation differs between numbers of ranks.
        atol: absolute tolerance.
        timeout: seconds that one run may take.
        **options: of :class:`fabric.Fabric`, such as ``precision="64-true"``.

    Raises:
        AssertionError: some results differ from those of the first strategy on the first number of ranks; the text
            names strategy, rank and leaf, with both values.
        ConfigurationError: fewer than two runs to compare.
        RankFailedError: the step failed.
    """
    runs = [(s, size) for size in world_sizes for s in strategies if size == 1 or _is_parallel(s)]
    if len(runs) < 2:
        raise ConfigurationError(
            f"assert_equivalent(..., strategies={list(strategies)}, world_sizes={list(world_sizes)})",
            f"that makes {len(runs)} run(s); it takes two, and strategies of a single process run on one rank only",
        )
    names = [f"{s if isinstance(s, str) else s.name} on {size} rank(s)" for s, size in runs]
    results: list[list[Any]] = []
    for strategy, size in runs:
        with RankPool(size, timeout=timeout, strategy=strategy, **options) as pool:
            results.append(pool.run(step_fn, *args))
    lines = [f"{name_of(step_fn)} differs from what it gives under {names[0]}:"]
    for name, by_rank in zip(names, results, strict=True):
        for rank, result in enumerate(by_rank):
            found = list(differences(result, results[0][0], rtol=rtol, atol=atol))
            lines += ["\n    ".join([f"{name}, rank {rank}:", *_first(found)])] if found else []
    if len(lines) > 1:
        raise AssertionError("\n  ".join(lines))


def _is_parallel(strategy: Strategy | str) -> bool:
    found = parse_strategy(strategy)
    return found is None or found.connects_processes


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


def _first(lines: list[str]) -> list[str]:
    return lines if len(lines) <= _SHOWN else [*lines[:_SHOWN], f"... and {len(lines) - _SHOWN} more"]


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
