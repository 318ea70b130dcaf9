"""Laws that every collective keeps."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from fabric.testing import assert_same, oracles
from fabric.testing import generators as gen
from fabric.tree import flatten
from tests.laws.base import Draw, Subject
from tests.laws.operations import EVERY, MESSAGES, ROWS, WHOLE, own_group
from tests.laws.values import values_for


def every_collective_agrees_with_its_oracle_and_keeps_dtypes_and_structure(
    subject: Subject, draw: Draw
) -> None:
    """The comparison is of types, keys, fields, lengths, shapes and dtypes, besides values."""
    size = draw(gen.world_sizes(), "size")
    name = draw(st.sampled_from(list(EVERY)), "operation")
    values = draw(values_for(name, size), "values")
    operation = EVERY[name]
    found = subject.run(size, lambda fabric, x: operation.call(fabric, x, None, size), values)
    assert_same(found, operation.oracle(values.values))


def arguments_are_left_as_they_are(subject: Subject, draw: Draw) -> None:
    """They are not written to, and no result shares memory with them."""
    size = draw(gen.world_sizes(), "size")
    name = draw(st.sampled_from(list(EVERY)), "operation")
    values = draw(values_for(name, size), "values")
    operation = EVERY[name]

    def observed(fabric: Any, x: Any) -> tuple[Any, Any, int, int]:
        before = copy.deepcopy(x)
        versions = sum(tensor._version for tensor in tensors_of(x))
        result = operation.call(fabric, x, None, size)
        written = sum(tensor._version for tensor in tensors_of(x)) - versions
        # A message to oneself travels nowhere.
        alone = size == 1 and name == "send and recv"
        return before, x, written, 0 if alone else len(memory_of(x) & memory_of(result))

    for before, after, written, shared in subject.run(size, observed, values):
        assert_same(after, before)
        assert (written, shared) == (0, 0), (
            f"written to {written} times, {shared} results share memory with them"
        )


def tensors_of(tree: Any) -> list[Tensor]:
    return [leaf for leaf in flatten(tree)[0] if isinstance(leaf, Tensor)]


def memory_of(tree: Any) -> set[int]:
    """Where the storages of tensors begin; those without elements have none."""
    return {tensor.untyped_storage().data_ptr() for tensor in tensors_of(tree)} - {0}


def groups_share_the_world(subject: Subject, draw: Draw) -> None:
    """Each of several groups computes from the values of its members alone, at the same time as the others."""
    size = draw(gen.world_sizes(), "size")
    groups = draw(gen.partitions(size), "groups")
    name = draw(st.sampled_from([*WHOLE, *MESSAGES]), "operation")
    values = draw(values_for(name, size), "values")
    operation = EVERY[name]

    def in_own_group(fabric: Any, x: Any) -> Any:
        own = own_group(fabric, groups)
        result = operation.call(fabric, x, own, own.size)
        own.close()
        return result

    assert_same(
        subject.run(size, in_own_group, values),
        oracles.in_groups(operation.oracle, values.values, groups),
    )


def a_group_may_be_closed_at_once(subject: Subject, draw: Draw) -> None:
    """Also when no member has yet talked to another."""
    size = draw(gen.world_sizes(min_size=2), "size")
    groups = draw(gen.partitions(size), "groups")

    def made_and_closed(fabric: Any) -> None:
        for _ in range(3):
            own_group(fabric, groups).close()

    subject.run(size, made_and_closed)


def gradients_are_those_of_the_sum_of_all_losses(subject: Subject, draw: Draw) -> None:
    """The reference is one process that computes the loss of every rank and adds them."""
    size = draw(gen.world_sizes(), "size")
    name = draw(st.sampled_from([*WHOLE, *ROWS]), "operation")
    operation = EVERY[name]
    shape = (size, *draw(gen.shapes(max_dims=2, min_side=1)))
    values = draw(gen.per_rank_tensors(size, torch.float64, shape), "values")
    weights = draw(gen.per_rank(st.integers(-3, 3), size), "weights")

    def gradient(fabric: Any, x: Tensor, weight: int) -> Tensor:
        x = x.requires_grad_()
        (weight * operation.call(fabric, x, None, size).square()).sum().backward()
        assert x.grad is not None
        return x.grad

    def losses(inputs: list[Tensor]) -> Sequence[Tensor]:
        results = operation.oracle(inputs)
        return [
            (weight * own.square()).sum()
            for own, weight in zip(results, weights.values, strict=True)
        ]

    found = subject.run(size, gradient, values, weights)
    # A third has no exact double; whatever is a sum does.
    rtol = 1e-12 if name.endswith("mean") else 0.0
    assert_same(found, oracles.gradients(losses, values.values), rtol=rtol, atol=rtol)


def gradients_stay_in_their_group(subject: Subject, draw: Draw) -> None:
    size = draw(gen.world_sizes(min_size=2), "size")
    groups = draw(gen.partitions(size), "groups")
    name = draw(st.sampled_from([*WHOLE]), "operation")
    operation = WHOLE[name]
    values = draw(
        gen.per_rank_tensors(size, torch.float64, gen.shapes(max_dims=1, min_side=1)), "values"
    )

    def gradient(fabric: Any, x: Tensor) -> Tensor | None:
        x = x.requires_grad_()
        own = own_group(fabric, groups)
        operation.call(fabric, x, own, own.size).square().sum().backward()
        own.close()
        return x.grad

    def losses(inputs: list[Tensor]) -> list[Tensor]:
        return [own.square().sum() for own in oracles.in_groups(operation.oracle, inputs, groups)]

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
