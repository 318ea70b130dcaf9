"""The collectives by name, with their oracles. Each takes a value of each rank, and a group."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from fabric.testing import oracles


class Operation(NamedTuple):
    """A collective, and what it has to return.

    Attributes:
        call: takes the fabric, the value of this rank, the group or None, and the group's size.
        oracle: takes the values of all ranks, and returns their results.
    """

    call: Callable[[Any, Any, Any, int], Any]
    oracle: Callable[[Sequence[Any]], list[Any]]


def make_groups(fabric: Any, groups: Sequence[Sequence[int]]) -> Any:
    """Make all groups, and return the one that this rank is a member of. Collective."""
    joined = None
    for ranks in groups:
        group = fabric.new_group(ranks)
        if group:
            joined = group
    return joined


def pass_around_ring(fabric: Any, value: Any, group: Any, size: int) -> Any:
    """Send a value to the next rank of a ring, and return what the previous rank sent."""
    if size == 1:
        return value
    rank = fabric.global_rank if group is None else group.rank
    # Odd ranks receive first, so that not all ranks wait for a receiver.
    if rank % 2 == 1:
        received = fabric.recv((rank - 1) % size, group)
        fabric.send(value, (rank + 1) % size, group)
        return received
    fabric.send(value, (rank + 1) % size, group)
    return fabric.recv((rank - 1) % size, group)


def reduction(op: str) -> Operation:
    return Operation(
        lambda fabric, value, group, size: fabric.all_reduce(value, group, op),
        lambda values: oracles.all_reduce(values, op),
    )


def _row_of_reduction(op: str) -> Operation:
    return Operation(
        lambda fabric, value, group, size: fabric.reduce_scatter(value, group, op),
        lambda values: oracles.reduce_scatter(values, op),
    )


# These take any tree, and have a gradient.
ON_TREES = {
    "all_reduce sum": reduction("sum"),
    "all_reduce mean": reduction("mean"),
    "all_gather": Operation(
        lambda fabric, value, group, size: fabric.all_gather(value, group, sync_grads=True),
        oracles.all_gather,
    ),
    "all_gather concat": Operation(
        lambda fabric, value, group, size: fabric.all_gather(
            value, group, sync_grads=True, concat=True
        ),
        lambda values: oracles.all_gather(values, concat=True),
    ),
    "broadcast": Operation(
        lambda fabric, value, group, size: fabric.broadcast(value, size - 1, group),
        lambda values: oracles.broadcast(values, len(values) - 1),
    ),
}
# These take tensors with a row for each rank.
ON_ROWS = {
    "reduce_scatter sum": _row_of_reduction("sum"),
    "reduce_scatter mean": _row_of_reduction("mean"),
    "all_to_all": Operation(
        lambda fabric, value, group, size: fabric.all_to_all(value, group), oracles.all_to_all
    ),
}
# These take any object, which arrives detached.
ON_OBJECTS = {
    "scatter": Operation(
        lambda fabric, value, group, size: fabric.scatter([value] * size, size - 1, group),
        lambda values: oracles.broadcast(values, len(values) - 1),
    ),
    "gather": Operation(
        lambda fabric, value, group, size: fabric.gather(value, size - 1, group),
        lambda values: oracles.gather(values, len(values) - 1),
    ),
    "send and recv": Operation(pass_around_ring, lambda values: [values[-1], *values[:-1]]),
}
OPERATIONS = {**ON_TREES, **ON_ROWS, **ON_OBJECTS}
