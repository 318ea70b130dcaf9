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
_assert_raises = TestCase().assertRaises
_SHAPES = ((), (3,), (2, 2), (0,))


def check_communicator(run: Callable[[Callable[[Communicator], None]], Any]) -> None:
    """Check that communicators behave as :class:`fabric.communicators.Communicator` documents.

    Args:
        run: calls a function on all ranks, with the communicator of the rank, and raises if it raises on any rank:
            ``lambda check: world.run(lambda fabric: check(MyCommunicator(fabric)))``. The checks are module-level
            functions, so that they can be pickled.

    Raises:
        AssertionError: a check fails; the text says which, and its cause why.
    """
    apply_checks(
        run, _check_oracles, _check_one_rank, _check_messages, _check_objects, _check_groups
    )


def check_strategy(strategy: Strategy | StrategyName, world_size: int = 2, **options: Any) -> None:
    """Check that a strategy trains like one plain process, in float64, and that its collectives are exact.

    Args:
        strategy: its name, or the strategy, which must be picklable.
        world_size: number of ranks.
        **options: of :class:`fabric.Fabric`.

    Raises:
        AssertionError: a check fails; the text says which, and its cause why.
    """
    with RankPool(
        world_size, **{"strategy": strategy, "precision": "64-true", "timeout": 120.0, **options}
    ) as pool:
        apply_checks(pool.run, _check_strategy_collectives, _check_training)


def assert_equivalent(
    step_fn: Callable[..., Any],
    *args: Any,
    strategies: Sequence[Strategy | StrategyName] = ("single_device", "ddp", "fsdp"),
    world_sizes: Sequence[int] = (1, 2),
    rtol: float = 1e-5,
    atol: float = 1e-6,
    timeout: float = 120.0,
    **options: Any,
) -> None:
    """Run a training step under several strategies and numbers of ranks, and compare all results with the first.

    ``step_fn(fabric, *args)`` builds its model from a fixed seed, sets it up, takes its rank's part of a global batch,
    and returns values that should not depend on the strategy or number of ranks: a loss reduced over ranks, a gradient
    norm, a full state dict.

    Args:
        step_fn: the step; sent to the ranks as by :meth:`fabric.testing.RankPool.run`.
        *args: its arguments after the fabric.
        strategies: names or strategies. Strategies of a single process run on one rank only.
        world_sizes: numbers of ranks.
        rtol: relative tolerance; the order of summation differs between numbers of ranks.
        atol: absolute tolerance.
        timeout: seconds that one run may take.
        **options: of :class:`fabric.Fabric`, such as ``precision="64-true"``.

    Raises:
        AssertionError: some results differ from those of the first strategy on the first number of ranks; the text
            names strategy, rank and leaf, with both values.
        ConfigurationError: there are fewer than two runs to compare.
        RankFailedError: the step failed.
    """
    connected = {
        s for s in strategies if (parsed := parse_strategy(s)) is None or parsed.connects_processes
    }
    runs = [(s, size) for size in world_sizes for s in strategies if size == 1 or s in connected]
    if len(runs) < 2:
        raise ConfigurationError(
            f"assert_equivalent(...) under {list(strategies)} on {list(world_sizes)} ranks",
            f"that is {len(runs)} run; it takes two, and strategies of a single process run on one rank only",
        )
    results: dict[str, list[Any]] = {}
    for number, (strategy, size) in enumerate(runs):
        name = strategy if isinstance(strategy, str) else strategy.name
        with RankPool(size, timeout=timeout, strategy=strategy, **options) as pool:
            results[f"run {number}, {name} on {size} rank(s)"] = pool.run(step_fn, *args)
    reference = next(iter(results.values()))[0]
    expected = {name: [reference] * len(by_rank) for name, by_rank in results.items()}
    assert_same(results, expected, rtol=rtol, atol=atol)


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
            raise AssertionError(f"not so: {check.__doc__}\n{error}") from error


# -- communicators, on each rank --------------------------------------------------------------------------------------


def _check_oracles(communicator: Communicator) -> None:
    """Reductions, all_gather and all_to_all agree with their oracles; all_reduce alone writes into its buffer."""
    size = communicator.size
    rank = communicator.rank
    for dtype, shape in product(_DTYPES, _SHAPES):
        values = _values(size, dtype, shape)
        rows = _values(size, dtype, (size, *shape))
        own = values[rank].clone()
        own_rows = rows[rank].clone()
        assert_same(communicator.all_gather(own), torch.stack(values))
        assert_same(communicator.all_to_all(own_rows), oracles.all_to_all(rows)[rank])
        assert_same([own, own_rows], [values[rank], rows[rank]])
        real = (Reduce.SUM, *ORDERED, *([Reduce.MEAN] if dtype.is_floating_point else BITWISE))
        for op in [Reduce.SUM] if dtype.is_complex else real:
            buffer = own.clone()
            assert communicator.all_reduce(buffer, op) is buffer, "all_reduce returns its buffer"
            assert_same(buffer, oracles.all_reduce(values, op.value)[rank])
            reduced = communicator.reduce_scatter(own_rows.clone(), op)
            assert_same(reduced, oracles.reduce_scatter(rows, op.value)[rank])


def _check_one_rank(communicator: Communicator) -> None:
    """broadcast and scatter write the values of the source rank into the buffer; gather returns only on one rank."""
    size = communicator.size
    rank = communicator.rank
    for other, shape in product(range(size), _SHAPES):
        values = _values(size, torch.float32, shape)
        buffer = values[rank].clone()
        output = torch.empty(shape)
        assert_same(
            communicator.gather(buffer, other), torch.stack(values) if rank == other else None
        )
        assert communicator.broadcast(buffer, other) is buffer, "broadcast returns its buffer"
        assert_same(buffer, values[other])
        rows = torch.stack(values) if rank == other else None
        assert communicator.scatter(rows, output, other) is output, "scatter returns its output"
        assert_same(output, values[rank])


def _check_messages(communicator: Communicator) -> None:
    """Messages between two ranks arrive in the order they were sent."""
    values = [torch.full((2,), float(number)) for number in range(3)]
    for src, dst in permutations(range(communicator.size), 2):
        if communicator.rank == src:
            for value in values:
                communicator.send(value, dst)
        if communicator.rank == dst:
            assert_same([communicator.recv(torch.zeros(2), src) for _ in values], values)


def _check_objects(communicator: Communicator) -> None:
    """Objects are sent by value, in rank order; an unpicklable object is an error on every rank."""
    size = communicator.size
    rank = communicator.rank
    for src in range(size):
        assert_same(
            communicator.broadcast_object({"from": rank, "at": [1, "x"]}, src),
            {"from": src, "at": [1, "x"]},
        )
    assert_same(
        communicator.gather_objects((rank, "x" * rank)),
        [(other, "x" * other) for other in range(size)],
    )
    if size > 1:
        unpicklable = (number for number in range(2))
        with _assert_raises(ArgumentTypeError):
            communicator.broadcast_object(unpicklable, 0)
        with _assert_raises(ArgumentTypeError):
            communicator.gather_objects(unpicklable if rank == size - 1 else 1)
    communicator.barrier("objects")


def _check_groups(communicator: Communicator) -> None:
    """Groups number their members in ascending order and are independent; invalid groups are refused."""
    everyone = list(range(communicator.size))
    for members in filter(
        None, [everyone[::-1], *([rank] for rank in everyone), everyone[::2], everyone[1::2]]
    ):
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


# -- strategies, on each rank -----------------------------------------------------------------------------------------


def _check_strategy_collectives(fabric: Fabric) -> None:
    """Collectives over collections agree with their oracles."""
    values = [
        {"a": torch.tensor([rank, 5]), "b": [float(rank), rank == 0]}
        for rank in range(fabric.world_size)
    ]
    own = values[fabric.global_rank]
    rank = fabric.global_rank
    assert_same(fabric.all_reduce(own, reduce_op="max"), oracles.all_reduce(values, "max")[rank])
    assert_same(fabric.all_gather(own), oracles.all_gather(values)[rank])
    assert_same(fabric.broadcast(own, src=fabric.world_size - 1), values[-1])
    assert_same(fabric.strategy.reduce_boolean_decision(rank == 0, all=False), True)
    assert_same(fabric.strategy.reduce_boolean_decision(rank == 0), fabric.world_size == 1)
    fabric.barrier("strategy_collectives")


def _check_training(fabric: Fabric) -> None:
    """Steps of one and two micro-batches train like a plain loop; the state has the same names, and can be loaded."""
    size = fabric.world_size
    rank = fabric.global_rank
    generator = torch.Generator().manual_seed(2)
    (plain, plain_optimizer), (module, optimizer) = _model(), fabric.setup(*_model())
    for count in (1, 2, 2):
        batch = torch.randn(4 * size, 3, generator=generator, dtype=torch.float64)
        plain_optimizer.zero_grad()
        plain(batch).square().mean().backward()
        plain_optimizer.step()
        optimizer.zero_grad()
        for number, part in enumerate(batch.chunk(count * size)[rank::size], start=1):
            with fabric.no_backward_sync(module, enabled=number < count):
                fabric.backward(module(part).square().mean() / count)
        optimizer.step()
    prepared = prepared_module(module)
    state = fabric.strategy.get_module_state_dict(prepared)
    assert_same(dict(state), dict(plain.state_dict()), rtol=1e-10, atol=1e-12)
    fabric.strategy.load_module_state_dict(prepared, _model()[0].state_dict())
    assert_same(
        dict(fabric.strategy.get_module_state_dict(prepared)), dict(_model()[0].state_dict())
    )


def _model() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def _values(size: int, dtype: torch.dtype, shape: tuple[int, ...]) -> list[Tensor]:
    """Small integers, different on every rank, whose sums and products are exact in every dtype."""
    count = torch.Size(shape).numel()
    return [((torch.arange(count) + 3 * rank) % 5).reshape(shape).to(dtype) for rank in range(size)]
