"""Laws that every collective keeps."""

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor

from fabric.testing import assert_same, oracles
from fabric.testing import generators as gen
from fabric.tree import flatten
from tests.laws.base import Draw, Subject
from tests.laws.operations import ON_OBJECTS, ON_ROWS, ON_TREES, OPERATIONS, make_groups
from tests.laws.values import values_for


def every_collective_agrees_with_its_oracle_and_keeps_dtypes_and_structure(
    subject: Subject, draw: Draw
) -> None:
    """The comparison is of types, keys, fields, lengths, shapes and dtypes, besides values."""
    size = draw(gen.world_sizes(), "size")
    name = draw(st.sampled_from(list(OPERATIONS)), "operation")
    values = draw(values_for(name, size), "values")
    operation = OPERATIONS[name]
    results = subject.run(size, lambda fabric, x: operation.call(fabric, x, None, size), values)
    assert_same(results, operation.oracle(values.values))


def arguments_are_left_as_they_are(subject: Subject, draw: Draw) -> None:
    """Arguments are not written to, and no result shares memory with them."""
    size = draw(gen.world_sizes(), "size")
    name = draw(st.sampled_from(list(OPERATIONS)), "operation")
    values = draw(values_for(name, size), "values")
    operation = OPERATIONS[name]

    def observe_call(fabric: Any, x: Any) -> Observation:
        before = copy.deepcopy(x)
        version_before = version_of(x)
        result = operation.call(fabric, x, None, size)
        shared = memory_of(x) & memory_of(result)
        return Observation(before, x, version_of(x) - version_before, len(shared))

    for observation in subject.run(size, observe_call, values):
        assert_same(observation.after, observation.before)
        assert observation.writes == 0
        # On one process, a message to itself is the value itself.
        if size > 1 or name != "send and recv":
            assert observation.shared_storages == 0


class Observation(NamedTuple):
    """The arguments of a call before and after it.

    Attributes:
        before: a copy of the arguments, made before the call.
        after: the arguments after the call.
        writes: how often tensors of the arguments were changed in place.
        shared_storages: how many storages are shared by the arguments and the result.
    """

    before: Any
    after: Any
    writes: int
    shared_storages: int


def version_of(tree: Any) -> int:
    return sum(tensor._version for tensor in tensors_of(tree))


def tensors_of(tree: Any) -> list[Tensor]:
    return [leaf for leaf in flatten(tree)[0] if isinstance(leaf, Tensor)]


def memory_of(tree: Any) -> set[int]:
    """Return the addresses of the storages of tensors. An empty storage has address 0, and none."""
    return {tensor.untyped_storage().data_ptr() for tensor in tensors_of(tree)} - {0}


def groups_share_the_world(subject: Subject, draw: Draw) -> None:
    """Groups that work at the same time compute from the values of their members alone."""
    size = draw(gen.world_sizes(), "size")
    groups = draw(gen.partitions(size), "groups")
    name = draw(st.sampled_from([*ON_TREES, *ON_OBJECTS]), "operation")
    values = draw(values_for(name, size), "values")
    operation = OPERATIONS[name]

    def run_in_group(fabric: Any, x: Any) -> Any:
        group = make_groups(fabric, groups)
        result = operation.call(fabric, x, group, group.size)
        group.close()
        return result

    results = subject.run(size, run_in_group, values)
    expected = oracles.in_groups(operation.oracle, values.values, groups)
    assert_same(results, expected)


def a_group_may_be_closed_at_once(subject: Subject, draw: Draw) -> None:
    """A group may be closed before its members have exchanged anything."""
    size = draw(gen.world_sizes(min_size=2), "size")
    groups = draw(gen.partitions(size), "groups")

    def make_and_close(fabric: Any) -> None:
        for _ in range(3):
            make_groups(fabric, groups).close()

    subject.run(size, make_and_close)


def gradients_are_those_of_the_sum_of_all_losses(subject: Subject, draw: Draw) -> None:
    """The reference is one process that computes the loss of every rank and adds them."""
    size = draw(gen.world_sizes(), "size")
    name = draw(st.sampled_from([*ON_TREES, *ON_ROWS]), "operation")
    operation = OPERATIONS[name]
    shape = (size, *draw(gen.shapes(max_dims=2, min_side=1)))
    values = draw(gen.per_rank_tensors(size, torch.float64, shape), "values")
    weights = draw(gen.per_rank(st.integers(-3, 3), size), "weights")

    def gradient(fabric: Any, x: Tensor, weight: int) -> Tensor:
        x = x.requires_grad_()
        (weight * operation.call(fabric, x, None, size).square()).sum().backward()
        assert x.grad is not None
        return x.grad

    def losses(inputs: list[Tensor]) -> Sequence[Tensor]:
        losses_by_rank = []
        for result, weight in zip(operation.oracle(inputs), weights.values, strict=True):
            losses_by_rank.append((weight * result.square()).sum())
        return losses_by_rank

    results = subject.run(size, gradient, values, weights)
    # A third is not an exact double. Sums of exact values are.
    rtol = 1e-12 if name.endswith("mean") else 0.0
    assert_same(results, oracles.gradients(losses, values.values), rtol=rtol, atol=rtol)


def gradients_stay_in_their_group(subject: Subject, draw: Draw) -> None:
    size = draw(gen.world_sizes(min_size=2), "size")
    groups = draw(gen.partitions(size), "groups")
    name = draw(st.sampled_from([*ON_TREES]), "operation")
    operation = ON_TREES[name]
    values = draw(
        gen.per_rank_tensors(size, torch.float64, gen.shapes(max_dims=1, min_side=1)), "values"
    )

    def gradient(fabric: Any, x: Tensor) -> Tensor | None:
        x = x.requires_grad_()
        group = make_groups(fabric, groups)
        operation.call(fabric, x, group, group.size).square().sum().backward()
        group.close()
        return x.grad

    def losses(inputs: list[Tensor]) -> list[Tensor]:
        results = oracles.in_groups(operation.oracle, inputs, groups)
        return [result.square().sum() for result in results]

    rtol = 1e-12 if name.endswith("mean") else 0.0
    expected = oracles.gradients(losses, values.values)
    assert_same(subject.run(size, gradient, values), expected, rtol=rtol, atol=rtol)


LAWS = (
    every_collective_agrees_with_its_oracle_and_keeps_dtypes_and_structure,
    arguments_are_left_as_they_are,
    groups_share_the_world,
    a_group_may_be_closed_at_once,
    gradients_are_those_of_the_sum_of_all_losses,
    gradients_stay_in_their_group,
)
