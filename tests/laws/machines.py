"""State machines: collectives one after the other, each on the results of earlier ones; and calls that differ."""

from collections.abc import Callable
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
from tests.laws.operations import EVERY, Operation, own_group, reduction

# Those that return what has the shape of their argument, so that each can follow each; integers
# wrap, and stay exact.
CHAINED = {
    **{f"all_reduce {op}": reduction(op) for op in gen.REDUCE_OPS if op != "mean"},
    **{name: EVERY[name] for name in ("broadcast", "scatter", "send and recv")},
    "all_gather": Operation(
        lambda fabric, value, group, size: fabric.all_gather(value, group)[-1],
        lambda values: oracles.broadcast(values, len(values) - 1),
    ),
    "gather and broadcast": Operation(
        lambda fabric, value, group, size: fabric.broadcast(
            (fabric.gather(value, 0, group) or [None])[-1], 0, group
        ),
        lambda values: oracles.broadcast(values, len(values) - 1),
    ),
    "barrier": Operation(
        lambda fabric, value, group, size: (fabric.barrier(group=group), value)[1], list
    ),
}
# These need a row for each rank, and so all ranks.
CHAINED_IN_THE_WORLD = {
    "all_to_all": EVERY["all_to_all"],
    "reduce_scatter and all_gather": Operation(
        lambda fabric, value, group, size: fabric.all_gather(
            fabric.reduce_scatter(value, group, "sum"), group
        ),
        lambda values: oracles.all_reduce(values, "sum"),
    ),
}


class Step(NamedTuple):
    """An operation on the result of an earlier step, counted from 0; or values to begin with."""

    values: PerRank | None = None
    operation: Operation | None = None
    source: int = 0
    in_group: bool = False


def played(fabric: Any, steps: list[Step], groups: list[list[int]]) -> list[Tensor]:
    """The result of every step on this rank, looked at when all are done."""
    own = own_group(fabric, groups) if any(step.in_group for step in steps) else None
    found: list[Tensor] = []
    for step in steps:
        if step.values is not None:
            found.append(step.values.values[fabric.global_rank])
        elif step.operation is not None:
            group = own if step.in_group else None
            size = fabric.world_size if group is None else group.size
            found.append(step.operation.call(fabric, found[step.source], group, size))
    if own is not None:
        own.close()
    return found


def interleaved(subject: Subject) -> type[RuleBasedStateMachine]:
    """A machine that writes a program of collectives with its results; real ranks then run it in one go."""

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
            values = data.draw(
                gen.per_rank_tensors(self.size, torch.int64, (self.size, 2)), "values"
            )
            return self._add(Step(values), list(values.values))

        @rule(target=results, name=st.sampled_from(list(CHAINED)), source=results)
        def in_world(self, name: str, source: int) -> int:
            return self._add(
                Step(None, CHAINED[name], source), CHAINED[name].oracle(self.expected[source])
            )

        @rule(target=results, name=st.sampled_from(list(CHAINED_IN_THE_WORLD)), source=results)
        def by_rows(self, name: str, source: int) -> int:
            operation = CHAINED_IN_THE_WORLD[name]
            return self._add(Step(None, operation, source), operation.oracle(self.expected[source]))

        @rule(target=results, name=st.sampled_from(list(CHAINED)), source=results)
        def in_group(self, name: str, source: int) -> int:
            oracle = CHAINED[name].oracle
            step = Step(None, CHAINED[name], source, in_group=True)
            return self._add(step, oracles.in_groups(oracle, self.expected[source], self.groups))

        def _add(self, step: Step, expected: list[Tensor]) -> int:
            self.steps.append(step)
            self.expected.append(expected)
            return len(self.steps) - 1

        def teardown(self) -> None:
            if self.steps:
                found = subject.run(self.size, played, self.steps, self.groups)
                assert_same(found, [list(own) for own in zip(*self.expected, strict=True)])

    return Interleaved


class Call(NamedTuple):
    """A collective, with everything in which ranks may differ."""

    operation: str
    reduce_op: str = "sum"
    shape: tuple[int, ...] = (2,)
    dtype: torch.dtype = torch.float32
    key: str = "x"
    root: int = 0


# What the ranks of an operation have to agree in, besides the operation.
AGREED = {
    "all_reduce": ("reduce_op", "shape", "dtype", "key"),
    "reduce_scatter": ("reduce_op", "shape", "dtype", "key"),
    "all_gather": ("shape", "dtype", "key"),
    "all_to_all": ("shape", "dtype", "key"),
    "broadcast": ("root",),
    "scatter": ("root",),
    "gather": ("root",),
    "barrier": ("key",),
}
OTHER = Call("", reduce_op="max", shape=(1, 2), dtype=torch.float64, key="y", root=1)


def changed(call: Call, how: str) -> Call:
    """The call as a rank makes it that differs."""
    operations = list(AGREED)
    another = operations[operations.index(call.operation) - 1]
    return call._replace(**{how: another if how == "operation" else getattr(OTHER, how)})


def made(fabric: Fabric, call: Call, group: Any) -> None:
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


def outcome(
    fabric: Fabric, calls: list[Call], groups: list[list[int]], rank: int, at: int, how: str
) -> str:
    """What this rank sees of calls of which ``rank`` makes the one at ``at`` in another way, or leaves it out."""
    own = own_group(fabric, groups)
    try:
        for place, call in enumerate(calls):
            differs = (fabric.global_rank, place) == (rank, at)
            if not differs:
                made(fabric, call, own)
            elif how != "missing":
                made(fabric, changed(call, how), own)
        fabric.barrier("the end", own)
    except CollectiveMismatchError:
        return "told"
    return "fine"


def disagreeing(checked: Callable[..., list[Any]]) -> type[RuleBasedStateMachine]:
    """A machine that writes calls, of which one rank makes one differently.

    ``checked(size, fn, *args)`` runs ``fn(fabric, *args)`` on ranks with checks on, in a process
    group of its own: after a mismatch the ranks are out of step.
    """

    class Disagreeing(RuleBasedStateMachine):
        @initialize(data=st.data())
        def begin(self, data: st.DataObject) -> None:
            self.size = data.draw(gen.world_sizes(min_size=2), "size")
            self.groups = data.draw(
                gen.partitions(self.size).filter(lambda groups: max(map(len, groups)) > 1), "groups"
            )
            self.calls: list[Call] = []
            self.rank = -1
            self.at = -1
            self.how = ""

        @rule(operation=st.sampled_from(list(AGREED)))
        def agree(self, operation: str) -> None:
            self.calls.append(Call(operation))

        @precondition(lambda self: not self.how)
        @rule(operation=st.sampled_from(list(AGREED)), data=st.data())
        def disagree(self, operation: str, data: st.DataObject) -> None:
            accompanied = [rank for group in self.groups if len(group) > 1 for rank in group]
            self.rank = data.draw(st.sampled_from(accompanied), "rank")
            self.how = data.draw(
                st.sampled_from(["operation", "missing", *AGREED[operation]]), "how"
            )
            self.at = len(self.calls)
            self.calls.append(Call(operation))

        def teardown(self) -> None:
            if not self.calls:
                return
            found = checked(
                self.size, outcome, self.calls, self.groups, self.rank, self.at, self.how
            )
            [group] = [group for group in self.groups if self.rank in group] or [[]]
            assert found == ["told" if rank in group else "fine" for rank in range(self.size)]

    return Disagreeing
