"""The collectives by name, each with its oracle, in one form: of a value that each rank has, in a group."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from fabric.testing import oracles


class Operation(NamedTuple):
    """``call(fabric, value, group, size)`` on a rank of a group of ``size``; ``oracle(values)`` for all of it."""

    call: Callable[[Any, Any, Any, int], Any]
    oracle: Callable[[Sequence[Any]], list[Any]]


def own_group(fabric: Any, groups: Sequence[Sequence[int]]) -> Any:
    """The group of this rank, of several that share the world; every rank makes all of them."""
    [own] = [group for ranks in groups if (group := fabric.new_group(ranks))]
    return own


def around(fabric: Any, value: Any, group: Any, size: int) -> Any:
    """What the rank before has sent to this one, in a ring."""
    rank = fabric.global_rank if group is None else group.rank
    if size == 1:
        return value
    if rank % 2:
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


# Sums and means of exact values, so that all of them have a gradient; of any collection.
WHOLE = {
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
# Of tensors with a row for each rank.
ROWS = {
    "reduce_scatter sum": _row_of_reduction("sum"),
    "reduce_scatter mean": _row_of_reduction("mean"),
    "all_to_all": Operation(
        lambda fabric, value, group, size: fabric.all_to_all(value, group), oracles.all_to_all
    ),
}
# Of any object, which arrives detached.
MESSAGES = {
    "scatter": Operation(
        lambda fabric, value, group, size: fabric.scatter([value] * size, size - 1, group),
        lambda values: oracles.broadcast(values, len(values) - 1),
    ),
    "gather": Operation(
        lambda fabric, value, group, size: fabric.gather(value, size - 1, group),
        lambda values: oracles.gather(values, len(values) - 1),
    ),
    "send and recv": Operation(
        around, lambda values: [values[rank - 1] for rank in range(len(values))]
    ),
}
EVERY = {**WHOLE, **ROWS, **MESSAGES}
