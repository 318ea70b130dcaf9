"""Conformance suites for communicators, strategies and training steps, built-in or your own."""

from collections.abc import Callable, Sequence
from itertools import permutations, product
from typing import Any
from unittest import TestCase

import torch
from torch import Tensor, nn

import fabric.testing.oracles as oracles
from fabric._fabric import Fabric
from fabric._plan import parse_strategy
from fabric._session import prepared_module
from fabric.communicators import Communicator, Reduce
from fabric.communicators.base import BITWISE, ORDERED
from fabric.errors import ArgumentTypeError, ConfigurationError
from fabric.strategies import Strategy, StrategyName
from fabric.testing.base import assert_same
from fabric.testing.pool import RankPool

__all__ = ["apply_checks", "assert_equivalent", "check_communicator", "check_strategy"]

_DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.complex64,
)
_SHAPES = ((), (3,), (2, 2), (0,))
_TIMEOUT = 120.0  # seconds
_assert_raises = TestCase().assertRaises


def check_communicator(run: Callable[[Callable[[Communicator], None]], Any]) -> None:
    """Check that communicators behave as :class:`fabric.communicators.Communicator` documents.

    Args:
        run: calls a function on all ranks with the communicator of the rank, and raises if it
            raises on any rank, such as
            ``lambda check: world.run(lambda fabric: check(MyCommunicator(fabric)))``. The checks
            are module-level functions, so that they can be pickled.

    Raises:
        AssertionError: a check fails. The text says which, and its cause why.
    """
    apply_checks(
        run, _check_oracles, _check_one_rank, _check_messages, _check_objects, _check_groups
    )


def check_strategy(strategy: Strategy | StrategyName, world_size: int = 2, **options: Any) -> None:
    """Check that a strategy trains like one plain process, in float64, with exact collectives.

    Args:
        strategy: the name of the strategy, or the strategy, which must be picklable.
        world_size: the number of ranks.
        **options: arguments of :class:`fabric.Fabric`. They win over ``precision="64-true"`` and a
            timeout of 120 seconds.

    Raises:
        AssertionError: a check fails. The text says which, and its cause why.
    """
    arguments: dict[str, Any] = {"precision": "64-true", "timeout": _TIMEOUT}
    arguments |= options
    with RankPool(world_size, strategy=strategy, **arguments) as pool:
        apply_checks(pool.run, _check_strategy_collectives, _check_training)


def assert_equivalent(
    step_fn: Callable[..., Any],
    *args: Any,
    strategies: Sequence[Strategy | StrategyName] = ("single_device", "ddp", "fsdp"),
    world_sizes: Sequence[int] = (1, 2),
    rtol: float = 1e-5,
    atol: float = 1e-6,
    timeout: float = _TIMEOUT,
    **options: Any,
) -> None:
    """Compare a training step under several strategies and numbers of ranks.

    ``step_fn(fabric, *args)`` builds its model from a fixed seed, sets it up, and takes its rank's
    share of a global batch. It returns values that should not depend on the strategy or on the
    number of ranks: a loss reduced over ranks, a gradient norm, a full state dict.

    Args:
        step_fn: the step. It is sent to the ranks as by :meth:`fabric.testing.RankPool.run`.
        *args: arguments of the step after the fabric.
        strategies: names or strategies. Strategies of a single process run on one rank only.
        world_sizes: numbers of ranks.
        rtol: the relative tolerance. The order of summation differs between numbers of ranks.
        atol: the absolute tolerance.
        timeout: seconds that one run may take.
        **options: arguments of :class:`fabric.Fabric`, such as ``precision="64-true"``.

    Raises:
        AssertionError: results differ from those of the first strategy on the first number of
            ranks. The text names strategy, rank and leaf, with both values.
        ConfigurationError: there are fewer than two runs to compare.
        RankFailedError: the step failed.
    """
    runs: list[tuple[Strategy | StrategyName, int]] = []
    for size in world_sizes:
        for strategy in strategies:
            if size == 1 or _connects_processes(strategy):
                runs.append((strategy, size))
    if len(runs) < 2:
        raise ConfigurationError(
            f"assert_equivalent(...) under {list(strategies)} on {list(world_sizes)} ranks",
            f"there is {len(runs)} run, and a comparison needs two; strategies of a single process "
            "run on one rank only",
        )
    results: dict[str, list[Any]] = {}
    for number, (strategy, size) in enumerate(runs):
        name = strategy
        if isinstance(strategy, Strategy):
            name = strategy.name
        with RankPool(size, timeout=timeout, strategy=strategy, **options) as pool:
            results[f"run {number}, {name} on {size} rank(s)"] = pool.run(step_fn, *args)
    reference = next(iter(results.values()))[0]
    expected = {name: [reference] * len(by_rank) for name, by_rank in results.items()}
    assert_same(results, expected, rtol=rtol, atol=atol)


def _connects_processes(strategy: Strategy | StrategyName) -> bool:
    parsed = parse_strategy(strategy)
    return parsed is None or parsed.connects_processes  # "auto" connects several processes by DDP


def apply_checks(run: Callable[[Callable[..., None]], Any], *checks: Callable[..., None]) -> None:
    """Run checks one after the other. The first failure raises with the check's docstring.

    Args:
        run: calls a check with its arguments.
        *checks: functions that raise if what their docstring says is not so.
    """
    for check in checks:
        try:
            run(check)
        except Exception as error:
            raise AssertionError(f"failed: {check.__doc__}\n{error}") from error


# -- communicators, on each rank ------------------------------------------------------------------


def _check_oracles(communicator: Communicator) -> None:
    """Check that reductions, all_gather and all_to_all agree with their oracles.

    all_reduce alone writes into its buffer.
    """
    rank = communicator.rank
    for dtype, shape in product(_DTYPES, _SHAPES):
        values = _values(communicator.size, dtype, shape)
        rows = _values(communicator.size, dtype, (communicator.size, *shape))
        value = values[rank].clone()
        rank_rows = rows[rank].clone()
        assert_same(communicator.all_gather(value), torch.stack(values))
        assert_same(communicator.all_to_all(rank_rows), oracles.all_to_all(rows)[rank])
        assert_same([value, rank_rows], [values[rank], rows[rank]])
        for op in _reductions(dtype):
            buffer = value.clone()
            assert communicator.all_reduce(buffer, op) is buffer, "all_reduce returns its buffer"
            assert_same(buffer, oracles.all_reduce(values, op.value)[rank])
            reduced = communicator.reduce_scatter(rank_rows.clone(), op)
            assert_same(reduced, oracles.reduce_scatter(rows, op.value)[rank])


def _reductions(dtype: torch.dtype) -> list[Reduce]:
    """Return the reductions that have a meaning for a dtype."""
    if dtype.is_complex:
        return [Reduce.SUM]
    if dtype.is_floating_point:
        return [Reduce.SUM, *ORDERED, Reduce.MEAN]
    return [Reduce.SUM, *ORDERED, *BITWISE]


def _check_one_rank(communicator: Communicator) -> None:
    """Check that broadcast and scatter write the source's values, and that one rank gathers."""
    rank = communicator.rank
    for root, shape in product(range(communicator.size), _SHAPES):
        values = _values(communicator.size, torch.float32, shape)
        stacked = None
        if rank == root:
            stacked = torch.stack(values)
        buffer = values[rank].clone()
        output = torch.empty(shape)
        assert_same(communicator.gather(buffer, root), stacked)
        assert communicator.broadcast(buffer, root) is buffer, "broadcast returns its buffer"
        assert_same(buffer, values[root])
        assert communicator.scatter(stacked, output, root) is output, "scatter returns its output"
        assert_same(output, values[rank])


def _check_messages(communicator: Communicator) -> None:
    """Check that messages between two ranks arrive in the order in which they were sent."""
    values = [torch.full((2,), float(number)) for number in range(3)]
    for src, dst in permutations(range(communicator.size), 2):
        if communicator.rank == src:
            for value in values:
                communicator.send(value, dst)
        if communicator.rank == dst:
            for value in values:
                assert_same(communicator.recv(torch.zeros(2), src), value)


def _check_objects(communicator: Communicator) -> None:
    """Check that objects are sent by value, and that unpicklable ones are errors on all ranks."""
    size = communicator.size
    rank = communicator.rank
    for src in range(size):
        received = communicator.broadcast_object({"from": rank, "at": [1, "x"]}, src)
        assert_same(received, {"from": src, "at": [1, "x"]})
    gathered = communicator.gather_objects((rank, "x" * rank))
    assert_same(gathered, [(number, "x" * number) for number in range(size)])
    if size > 1:
        unpicklable = iter(lambda: 0, 1)
        with _assert_raises(ArgumentTypeError):
            communicator.broadcast_object(unpicklable, 0)
        with _assert_raises(ArgumentTypeError):
            communicator.gather_objects(unpicklable if rank == size - 1 else 1)
    communicator.barrier("objects")


def _check_groups(communicator: Communicator) -> None:
    """Check that groups number their members in ascending order, and refuse wrong members."""
    everyone = list(range(communicator.size))
    selections = [everyone[::-1], everyone[::2]]
    if len(everyone) > 1:
        selections.append(everyone[1::2])
    selections += [[rank] for rank in everyone]
    for members in selections:
        group = communicator.new_group(members)
        if communicator.rank not in members:
            assert not group, "a rank outside gets no group"
            continue
        assert group, "a member gets its group"
        members = sorted(members)
        assert_same((group.rank, group.size), (members.index(communicator.rank), len(members)))
        total = group.all_reduce(torch.tensor([communicator.rank]), Reduce.SUM)
        assert_same(total, torch.tensor([sum(members)]))
        assert_same(group.broadcast_object(communicator.rank, len(members) - 1), members[-1])
        group.close()
        group.close()
    for members in ([], [0, 0], [communicator.size]):
        with _assert_raises(ConfigurationError):
            communicator.new_group(members)
    communicator.barrier("groups")


# -- strategies, on each rank ---------------------------------------------------------------------


def _check_strategy_collectives(fabric: Fabric) -> None:
    """Check that collectives over collections agree with their oracles."""
    rank = fabric.global_rank
    values = []
    for number in range(fabric.world_size):
        values.append({"a": torch.tensor([number, 5]), "b": [float(number), number == 0]})
    value = values[rank]
    assert_same(fabric.all_reduce(value, reduce_op="max"), oracles.all_reduce(values, "max")[rank])
    assert_same(fabric.all_gather(value), oracles.all_gather(values)[rank])
    assert_same(fabric.broadcast(value, src=fabric.world_size - 1), values[-1])
    assert_same(fabric.strategy.reduce_boolean_decision(rank == 0, all=False), True)
    assert_same(fabric.strategy.reduce_boolean_decision(rank == 0), fabric.world_size == 1)
    fabric.barrier("strategy_collectives")


def _check_training(fabric: Fabric) -> None:
    """Check that steps train like a plain loop, and that state dicts have the same names.

    A step has one or two micro-batches.
    """
    plain, plain_optimizer = _model()
    module, optimizer = fabric.setup(*_model())
    generator = torch.Generator().manual_seed(2)
    for micro_batches in (1, 2, 2):
        batch = torch.randn(4 * fabric.world_size, 3, generator=generator, dtype=torch.float64)
        plain_optimizer.zero_grad()
        plain(batch).square().mean().backward()
        plain_optimizer.step()
        optimizer.zero_grad()
        chunks = batch.chunk(micro_batches * fabric.world_size)
        for number, inputs in enumerate(chunks[fabric.global_rank :: fabric.world_size], start=1):
            with fabric.no_backward_sync(module, enabled=number < micro_batches):
                fabric.backward(module(inputs).square().mean() / micro_batches)
        optimizer.step()
    prepared = prepared_module(module)
    state = fabric.strategy.get_module_state_dict(prepared)
    assert_same(dict(state), dict(plain.state_dict()), rtol=1e-10, atol=1e-12)
    fresh_state = _model()[0].state_dict()
    fabric.strategy.load_module_state_dict(prepared, fresh_state)
    assert_same(dict(fabric.strategy.get_module_state_dict(prepared)), dict(fresh_state))


def _model() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def _values(size: int, dtype: torch.dtype, shape: tuple[int, ...]) -> list[Tensor]:
    """Return small integers for each rank, whose sums and products are exact in every dtype."""
    indices = torch.arange(torch.Size(shape).numel())
    values = []
    for rank in range(size):
        values.append(((indices + 3 * rank) % 5).reshape(shape).to(dtype))
    return values
