"""State machines that write programs of collectives.

One writes collectives that take the results of earlier collectives. The other writes calls, one of
which a rank makes differently.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, precondition, rule
from torch import Tensor

from fabric import Fabric
from fabric.errors import CollectiveMismatchError
from fabric.testing import PerRank, assert_same, oracles
from fabric.testing import generators as gen
from tests.laws.base import Subject
from tests.laws.operations import OPERATIONS, Operation, make_groups, reduction


def _gather_last(fabric: Any, value: Any, group: Any, size: int) -> Any:
    return fabric.all_gather(value, group)[-1]


def _gather_and_broadcast(fabric: Any, value: Any, group: Any, size: int) -> Any:
    """Gather on the first rank, and broadcast the value of the last."""
    last = None
    gathered = fabric.gather(value, 0, group)
    if gathered is not None:
        last = gathered[-1]
    return fabric.broadcast(last, 0, group)


def _broadcast_from_last(values: Sequence[Any]) -> list[Any]:
    return oracles.broadcast(values, len(values) - 1)


def _barrier(fabric: Any, value: Any, group: Any, size: int) -> Any:
    fabric.barrier(group=group)
    return value


def _reduce_scatter_and_all_gather(fabric: Any, value: Any, group: Any, size: int) -> Any:
    row = fabric.reduce_scatter(value, group, "sum")
    return fabric.all_gather(row, group)


# Operations whose result has the shape of their argument, so that each can follow any other.
# Integers wrap, and stay exact.
CHAINED = {
    **{f"all_reduce {op}": reduction(op) for op in gen.REDUCE_OPS if op != "mean"},
    "broadcast": OPERATIONS["broadcast"],
    "scatter": OPERATIONS["scatter"],
    "send and recv": OPERATIONS["send and recv"],
    "all_gather": Operation(_gather_last, _broadcast_from_last),
    "gather and broadcast": Operation(_gather_and_broadcast, _broadcast_from_last),
    "barrier": Operation(_barrier, list),
}
# Operations that need a row for each rank, and so all ranks.
CHAINED_OF_ALL_RANKS = {
    "all_to_all": OPERATIONS["all_to_all"],
    "reduce_scatter and all_gather": Operation(
        _reduce_scatter_and_all_gather, lambda values: oracles.all_reduce(values, "sum")
    ),
}


class Step(NamedTuple):
    """Values to begin with, or an operation on the result of an earlier step.

    Attributes:
        values: the values, or None for an operation.
        operation: the operation, or None for values.
        source: the index of the earlier step.
        in_group: whether the operation is made in the group of the rank.
    """

    values: PerRank | None = None
    operation: Operation | None = None
    source: int = 0
    in_group: bool = False


def run_program(fabric: Any, steps: list[Step], groups: list[list[int]]) -> list[Tensor]:
    """Run the steps on this rank, and return the results, which later steps may have changed."""
    group_of_rank = None
    if any(step.in_group for step in steps):
        group_of_rank = make_groups(fabric, groups)
    results: list[Tensor] = []
    for step in steps:
        if step.values is not None:
            results.append(step.values.values[fabric.global_rank])
            continue
        assert step.operation is not None
        source = results[step.source]
        if step.in_group:
            assert group_of_rank is not None
            size = group_of_rank.size
            results.append(step.operation.call(fabric, source, group_of_rank, size))
        else:
            results.append(step.operation.call(fabric, source, None, fabric.world_size))
    if group_of_rank is not None:
        group_of_rank.close()
    return results


def interleaved(subject: Subject) -> type[RuleBasedStateMachine]:
    """Return a machine that writes a program with its expected results, and runs it on ranks."""

    class Interleaved(RuleBasedStateMachine):
        results = Bundle("results")

        @initialize(data=st.data())
        def begin(self, data: st.DataObject) -> None:
            self.size = data.draw(gen.world_sizes(), "size")
            self.groups = data.draw(gen.partitions(self.size), "groups")
            self.steps: list[Step] = []
            self.expected: list[list[Tensor]] = []

        @rule(target=results, data=st.data())
        def values(self, data: st.DataObject) -> int:
            shape = (self.size, 2)
            values = data.draw(gen.per_rank_tensors(self.size, torch.int64, shape), "values")
            return self._add(Step(values), list(values.values))

        @rule(target=results, name=st.sampled_from(list(CHAINED)), source=results)
        def on_all_ranks(self, name: str, source: int) -> int:
            operation = CHAINED[name]
            return self._add(Step(None, operation, source), operation.oracle(self.expected[source]))

        @rule(target=results, name=st.sampled_from(list(CHAINED_OF_ALL_RANKS)), source=results)
        def by_rows(self, name: str, source: int) -> int:
            operation = CHAINED_OF_ALL_RANKS[name]
            return self._add(Step(None, operation, source), operation.oracle(self.expected[source]))

        @rule(target=results, name=st.sampled_from(list(CHAINED)), source=results)
        def in_group(self, name: str, source: int) -> int:
            operation = CHAINED[name]
            step = Step(None, operation, source, in_group=True)
            expected = oracles.in_groups(operation.oracle, self.expected[source], self.groups)
            return self._add(step, expected)

        def _add(self, step: Step, expected: list[Tensor]) -> int:
            """Add a step with its expected results by rank, and return its index."""
            self.steps.append(step)
            self.expected.append(expected)
            return len(self.steps) - 1

        def teardown(self) -> None:
            if not self.steps:
                return
            actual = subject.run(self.size, run_program, self.steps, self.groups)
            expected_by_rank = [list(results) for results in zip(*self.expected, strict=True)]
            assert_same(actual, expected_by_rank)

    return Interleaved


class Call(NamedTuple):
    """A collective, with everything in which ranks may differ."""

    operation: str
    reduce_op: str = "sum"
    shape: tuple[int, ...] = (2,)
    dtype: torch.dtype = torch.float32
    key: str = "x"
    root: int = 0


# The fields of a call that the ranks have to agree in, besides the operation.
AGREED_FIELDS = {
    "all_reduce": ("reduce_op", "shape", "dtype", "key"),
    "reduce_scatter": ("reduce_op", "shape", "dtype", "key"),
    "all_gather": ("shape", "dtype", "key"),
    "all_to_all": ("shape", "dtype", "key"),
    "broadcast": ("root",),
    "scatter": ("root",),
    "gather": ("root",),
    "barrier": ("key",),
}
CHANGED_FIELDS = Call("", reduce_op="max", shape=(1, 2), dtype=torch.float64, key="y", root=1)


def changed(call: Call, field: str) -> Call:
    """Return the call with another value of a field."""
    if field == "operation":
        operations = list(AGREED_FIELDS)
        previous = operations[operations.index(call.operation) - 1]
        return call._replace(operation=previous)
    return call._replace(**{field: getattr(CHANGED_FIELDS, field)})


def make_call(fabric: Fabric, call: Call, group: Any) -> None:
    value = {call.key: torch.zeros(call.shape, dtype=call.dtype)}
    rows = {call.key: torch.zeros(group.size, *call.shape, dtype=call.dtype)}
    actions: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: fabric.all_reduce(value, group, call.reduce_op),
        "reduce_scatter": lambda: fabric.reduce_scatter(rows, group, call.reduce_op),
        "all_gather": lambda: fabric.all_gather(value, group),
        "all_to_all": lambda: fabric.all_to_all(rows, group),
        "broadcast": lambda: fabric.broadcast(value, call.root, group),
        "scatter": lambda: fabric.scatter([value] * group.size, call.root, group),
        "gather": lambda: fabric.gather(value, call.root, group),
        "barrier": lambda: fabric.barrier(call.key, group),
    }
    actions[call.operation]()


class Difference(NamedTuple):
    """The call that one rank makes differently.

    Attributes:
        rank: the rank, or -1 if all ranks agree.
        index: the index of the call, or -1.
        field: the field of the call that the rank changes, or "missing" for a call left out.
    """

    rank: int = -1
    index: int = -1
    field: str = ""


def outcome_of_calls(
    fabric: Fabric, calls: list[Call], groups: list[list[int]], difference: Difference
) -> str:
    """Make the calls in the group of this rank, and return "error" for a mismatch, else "fine"."""
    group = make_groups(fabric, groups)
    try:
        for index, call in enumerate(calls):
            differs = fabric.global_rank == difference.rank and index == difference.index
            if not differs:
                make_call(fabric, call, group)
            elif difference.field != "missing":
                make_call(fabric, changed(call, difference.field), group)
        fabric.barrier("the end", group)
    except CollectiveMismatchError:
        return "error"
    return "fine"


def disagreeing(run_checked: Callable[..., list[Any]]) -> type[RuleBasedStateMachine]:
    """Return a machine that writes calls, at most one of which a rank makes differently.

    Args:
        run_checked: ``run_checked(size, fn, *args)`` runs ``fn(fabric, *args)`` on ranks in checked
            mode, in a process group of its own: after a mismatch the ranks are out of step.
    """

    class Disagreeing(RuleBasedStateMachine):
        @initialize(data=st.data())
        def begin(self, data: st.DataObject) -> None:
            self.size = data.draw(gen.world_sizes(min_size=2), "size")
            partitions = gen.partitions(self.size)
            has_group_of_several = partitions.filter(lambda groups: max(map(len, groups)) > 1)
            self.groups = data.draw(has_group_of_several, "groups")
            self.calls: list[Call] = []
            self.difference = Difference()

        @rule(operation=st.sampled_from(list(AGREED_FIELDS)))
        def agree(self, operation: str) -> None:
            self.calls.append(Call(operation))

        @precondition(lambda self: self.difference.rank == -1)
        @rule(operation=st.sampled_from(list(AGREED_FIELDS)), data=st.data())
        def disagree(self, operation: str, data: st.DataObject) -> None:
            ranks: list[int] = []
            for group in self.groups:
                if len(group) > 1:
                    ranks += group
            rank = data.draw(st.sampled_from(ranks), "rank")
            fields = ["operation", "missing", *AGREED_FIELDS[operation]]
            field = data.draw(st.sampled_from(fields), "field")
            self.difference = Difference(rank, len(self.calls), field)
            self.calls.append(Call(operation))

        def teardown(self) -> None:
            if not self.calls:
                return
            expected = ["fine"] * self.size
            for group in self.groups:
                if self.difference.rank in group:
                    for rank in group:
                        expected[rank] = "error"
            args = (self.calls, self.groups, self.difference)
            assert run_checked(self.size, outcome_of_calls, *args) == expected

    return Disagreeing
