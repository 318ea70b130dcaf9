"""Conformance suites for communicators, strategies and training steps, built-in or your own."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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
from fabric.communicators.base import BITWISE, MIN_MAX_PRODUCT
from fabric.errors import ArgumentTypeError, ConfigurationError
from fabric.strategies import Strategy, StrategyName
from fabric.testing.base import assert_same
from fabric.testing.pool import RankPool

__all__ = [
    "assert_equivalent",
    "check_communicator",
    "check_strategy",
    "failures_as_assertion_errors",
]

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
_TIMEOUT = 120.0  # seconds that one call on all ranks may take
_assert_raises = TestCase().assertRaises


def check_communicator(run: Callable[[Callable[[Communicator], None]], Any]) -> None:
    """Check that communicators behave as :class:`fabric.communicators.Communicator` documents.

    Args:
        run: a function with one argument, a check. It calls ``check(communicator)`` on all ranks,
            with a communicator of the rank, and raises if the check raises on any rank. For example
            ``lambda check: world.run(lambda fabric: check(MyCommunicator(fabric)))``. The checks
            are module-level functions, so that they can be pickled.

    Raises:
        AssertionError: a check fails. The text says which one, and the cause is the failure.
    """
    checks = (_check_oracles, _check_roots, _check_messages, _check_objects, _check_groups)
    for check in checks:
        with failures_as_assertion_errors(check):
            run(check)


def check_strategy(strategy: Strategy | StrategyName, world_size: int = 2, **options: Any) -> None:
    """Check that a strategy trains like one plain process, in float64, with exact collectives.

    Args:
        strategy: the name of the strategy, or the strategy, which must be picklable.
        world_size: the number of ranks.
        **options: arguments of :class:`fabric.Fabric`. They replace the defaults
            ``precision="64-true"`` and ``timeout=120``.

    Raises:
        AssertionError: a check fails. The text says which one, and the cause is the failure.
    """
    arguments: dict[str, Any] = {"precision": "64-true", "timeout": _TIMEOUT}
    arguments |= options
    with RankPool(world_size, strategy=strategy, **arguments) as pool:
        for check in (_check_strategy_collectives, _check_training):
            with failures_as_assertion_errors(check):
                pool.run(check)


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
    runs = _possible_runs(strategies, world_sizes)
    if len(runs) < 2:
        raise ConfigurationError(
            f"assert_equivalent(...) under {list(strategies)} on {list(world_sizes)} ranks",
            problem=f"there is {len(runs)} run, and a comparison needs two; strategies of a single "
            "process run on one rank only",
        )
    # The result of each rank, by the title of the run.
    results: dict[str, list[Any]] = {}
    for number, (strategy, size) in enumerate(runs):
        if isinstance(strategy, Strategy):
            name = strategy.name
        else:
            name = strategy
        with RankPool(size, timeout=timeout, strategy=strategy, **options) as pool:
            results[f"run {number}, {name} on {size} rank(s)"] = pool.run(step_fn, *args)
    # Every rank of every run should return the same as rank 0 of the first run.
    results_of_first_run = next(iter(results.values()))
    reference = results_of_first_run[0]
    expected: dict[str, list[Any]] = {}
    for title, rank_results in results.items():
        expected[title] = [reference] * len(rank_results)
    assert_same(results, expected, rtol=rtol, atol=atol)


def _possible_runs(
    strategies: Sequence[Strategy | StrategyName], world_sizes: Sequence[int]
) -> list[tuple[Strategy | StrategyName, int]]:
    """Return the pairs of a strategy and a number of ranks on which the strategy can run."""
    runs: list[tuple[Strategy | StrategyName, int]] = []
    for size in world_sizes:
        for strategy in strategies:
            if size == 1 or _connects_processes(strategy):
                runs.append((strategy, size))
    return runs


def _connects_processes(strategy: Strategy | StrategyName) -> bool:
    """Return whether a strategy can run on several ranks."""
    parsed_strategy = parse_strategy(strategy)
    # None stands for "auto", which connects several processes by DDP.
    return parsed_strategy is None or parsed_strategy.connects_processes


@contextmanager
def failures_as_assertion_errors(check: Callable[..., None]) -> Iterator[None]:
    """Replace an error of the block by an AssertionError that names the check.

    Args:
        check: the function that the block calls. Its docstring says what it checks.

    Raises:
        AssertionError: the block raised. The text is the docstring of the check, and the cause is
            the error of the block.
    """
    try:
        yield
    except Exception as error:
        raise AssertionError(f"failed: {check.__doc__}\n{error}") from error


# -- checks of communicators, which run on each rank ----------------------------------------------


def _check_oracles(communicator: Communicator) -> None:
    """Check that reductions, all_gather and all_to_all agree with their oracles.

    all_gather and all_to_all must leave their argument as it is. all_reduce writes into its
    argument, and reduce_scatter may.
    """
    rank = communicator.rank
    for dtype, shape in product(_DTYPES, _SHAPES):
        # all_reduce and all_gather take a tensor on each rank. all_to_all and reduce_scatter take a
        # tensor that has a row for each rank.
        values = _rank_values(communicator.size, dtype, shape)
        values_with_rows = _rank_values(communicator.size, dtype, (communicator.size, *shape))
        value = values[rank].clone()
        rows = values_with_rows[rank].clone()
        assert_same(communicator.all_gather(value), torch.stack(values))
        assert_same(communicator.all_to_all(rows), oracles.all_to_all(values_with_rows)[rank])
        # The arguments have not changed.
        assert_same([value, rows], [values[rank], values_with_rows[rank]])
        for op in _reductions(dtype):
            buffer = value.clone()
            reduced = communicator.all_reduce(buffer, op)
            assert reduced is buffer, "all_reduce returned another tensor"
            assert_same(buffer, oracles.all_reduce(values, op.value)[rank])
            reduced_row = communicator.reduce_scatter(rows.clone(), op)
            expected_row = oracles.reduce_scatter(values_with_rows, op.value)[rank]
            assert_same(reduced_row, expected_row)


def _reductions(dtype: torch.dtype) -> list[Reduce]:
    """Return the reductions that communicators support for a dtype."""
    if dtype.is_complex:
        return [Reduce.SUM]
    if dtype.is_floating_point:
        return [Reduce.SUM, *MIN_MAX_PRODUCT, Reduce.MEAN]
    return [Reduce.SUM, *MIN_MAX_PRODUCT, *BITWISE]


def _check_roots(communicator: Communicator) -> None:
    """Check that broadcast and scatter write the source's values, and that one rank gathers."""
    rank = communicator.rank
    for root, shape in product(range(communicator.size), _SHAPES):
        values = _rank_values(communicator.size, torch.float32, shape)
        # The root has to gather these rows. Then it scatters the rows.
        rows_of_root = None
        if rank == root:
            rows_of_root = torch.stack(values)
        buffer = values[rank].clone()
        output = torch.empty(shape)
        assert_same(communicator.gather(buffer, root), rows_of_root)
        received = communicator.broadcast(buffer, root)
        assert received is buffer, "broadcast returned another tensor"
        assert_same(buffer, values[root])
        row = communicator.scatter(rows_of_root, output, root)
        assert row is output, "scatter returned another tensor"
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
    # Texts of different lengths, so that the pickled objects differ in size.
    gathered = communicator.gather_objects((rank, "x" * rank))
    assert_same(gathered, [(number, "x" * number) for number in range(size)])
    if size > 1:  # a single rank pickles nothing
        unpicklable = threading.Lock()
        with _assert_raises(ArgumentTypeError):
            communicator.broadcast_object(unpicklable, 0)
        # Only the last rank has an object that cannot be pickled.
        value: object = 1
        if rank == size - 1:
            value = unpicklable
        with _assert_raises(ArgumentTypeError):
            communicator.gather_objects(value)
    communicator.barrier("objects")


def _check_groups(communicator: Communicator) -> None:
    """Check that groups number their members in ascending order, and refuse wrong members."""
    all_ranks = list(range(communicator.size))
    # All ranks in descending order, the even ranks, the odd ranks, and each rank alone.
    selections = [all_ranks[::-1], all_ranks[::2]]
    if len(all_ranks) > 1:
        selections.append(all_ranks[1::2])
    selections += [[rank] for rank in all_ranks]
    for members in selections:
        group = communicator.new_group(members)
        if communicator.rank not in members:
            assert not group, "a rank outside of the group got a group"
            continue
        assert group, "a member got no group"
        ordered_members = sorted(members)
        expected_rank = ordered_members.index(communicator.rank)
        assert_same((group.rank, group.size), (expected_rank, len(members)))
        total = group.all_reduce(torch.tensor([communicator.rank]), Reduce.SUM)
        assert_same(total, torch.tensor([sum(members)]))
        last_member = group.broadcast_object(communicator.rank, src=len(members) - 1)
        assert_same(last_member, ordered_members[-1])
        group.close()
        group.close()  # a second call does nothing
    no_members: list[int] = []
    equal_members = [0, 0]
    unknown_member = [communicator.size]
    for members in (no_members, equal_members, unknown_member):
        with _assert_raises(ConfigurationError):
            communicator.new_group(members)
    communicator.barrier("groups")


# -- checks of strategies, which run on each rank -------------------------------------------------


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
    # Only rank 0 decides "yes".
    is_any_true = fabric.strategy.reduce_boolean_decision(rank == 0, all=False)
    assert_same(is_any_true, True)
    are_all_true = fabric.strategy.reduce_boolean_decision(rank == 0, all=True)
    assert_same(are_all_true, fabric.world_size == 1)
    fabric.barrier("strategy_collectives")


def _check_training(fabric: Fabric) -> None:
    """Check that steps train like a plain loop, and that state dicts have the same names.

    A step has one or two micro-batches.
    """
    plain_module, plain_optimizer = _seeded_model()
    module, optimizer = fabric.setup(*_seeded_model())
    generator = torch.Generator().manual_seed(2)  # all ranks draw the same global batches
    for num_micro_batches in (1, 2, 2):
        batch = torch.randn(4 * fabric.world_size, 3, generator=generator, dtype=torch.float64)
        plain_optimizer.zero_grad()
        plain_module(batch).square().mean().backward()
        plain_optimizer.step()
        optimizer.zero_grad()
        # The chunks have equal sizes. So the mean of their gradients is the gradient of the global
        # batch, whichever rank gets which chunks.
        chunks = batch.chunk(num_micro_batches * fabric.world_size)
        micro_batches = chunks[fabric.global_rank :: fabric.world_size]
        for number, micro_batch in enumerate(micro_batches, start=1):
            is_last = number == num_micro_batches
            with fabric.no_backward_sync(module, enabled=not is_last):
                loss = module(micro_batch).square().mean()
                fabric.backward(loss / num_micro_batches)
        optimizer.step()
    prepared = prepared_module(module)
    state = fabric.strategy.get_module_state_dict(prepared)
    assert_same(dict(state), dict(plain_module.state_dict()), rtol=1e-10, atol=1e-12)
    # Loading the initial state has to undo the training.
    initial_module, _ = _seeded_model()
    initial_state = initial_module.state_dict()
    fabric.strategy.load_module_state_dict(prepared, initial_state)
    loaded_state = fabric.strategy.get_module_state_dict(prepared)
    assert_same(dict(loaded_state), dict(initial_state))


def _seeded_model() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a new model and optimizer, with the same parameters at each call and on each rank."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def _rank_values(size: int, dtype: torch.dtype, shape: tuple[int, ...]) -> list[Tensor]:
    """Return one tensor per rank. All ranks compute the same list.

    The elements are integers from 0 to 4 in every dtype. Their sums and products over a few ranks
    are exact.
    """
    indices = torch.arange(torch.Size(shape).numel())
    values: list[Tensor] = []
    for rank in range(size):
        elements = (indices + 3 * rank) % 5
        values.append(elements.reshape(shape).to(dtype))
    return values
