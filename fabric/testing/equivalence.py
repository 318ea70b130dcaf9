"""Whether a user's own step gives the same numbers under every strategy."""

from collections.abc import Callable, Sequence
from typing import Any

from fabric._plan import parse_strategy
from fabric.errors import ConfigurationError
from fabric.strategies import Strategy
from fabric.testing.base import name_of
from fabric.testing.compare import differences
from fabric.testing.pool import RankPool

__all__ = ["assert_equivalent"]

_SHOWN = 5


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
    """Run a training step under several strategies and numbers of ranks, and hold all results against the first.

    ``step_fn(fabric, *args)`` builds its model from a fixed seed, sets it up, takes its rank's share of a global batch,
    and returns what should not depend on who computed it: a loss that was reduced over ranks, a gradient norm, a whole
    state dict.

    Args:
        step_fn: the step; it travels as by :meth:`fabric.testing.RankPool.run`.
        *args: what it is handed after the fabric.
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
            f"that makes {len(runs)} run(s), and strategies of a single process run on one rank only",
            "two runs at least",
            'strategies=("single_device", "ddp"), world_sizes=(1, 2)',
        )
    reference: list[Any] | None = None
    wrong: list[str] = []
    for strategy, size in runs:
        with RankPool(size, timeout=timeout, strategy=strategy, **options) as pool:
            results = pool.run(step_fn, *args)
        reference = results[:1] if reference is None else reference
        for rank, result in enumerate(results):
            found = list(differences(result, reference[0], rtol=rtol, atol=atol))
            if found:
                rest = [f"... and {len(found) - _SHOWN} more"] if len(found) > _SHOWN else []
                lines = [f"{_name(strategy)} on {size} rank(s), rank {rank}:", *found[:_SHOWN], *rest]
                wrong.append("\n    ".join(lines))
    if wrong:
        first = f"{_name(runs[0][0])} on {runs[0][1]} rank(s)"
        raise AssertionError("\n  ".join([f"{name_of(step_fn)} differs from what it gives under {first}:", *wrong]))


def _is_parallel(strategy: Strategy | str) -> bool:
    found = parse_strategy(strategy)
    return found is None or found.connects_processes


def _name(strategy: Strategy | str) -> str:
    return strategy if isinstance(strategy, str) else strategy.name
