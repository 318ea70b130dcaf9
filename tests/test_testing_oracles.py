"""The oracles on values checked by hand, and against the real collectives on drawn values."""

import math
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, find, given, settings
from hypothesis import strategies as st
from torch import Tensor

from fabric import Fabric
from fabric.testing import PerRank, RankPool, assert_same, differences, oracles
from fabric.testing import generators as gen
from fabric.tree import flatten

FEW = settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


def test_reductions_of_numbers_tensors_and_collections() -> None:
    Pair = namedtuple("Pair", "x y")
    first = Pair(1, [torch.tensor([1.0, 8.0])])
    second = Pair(2, [torch.tensor([2.0, 4.0])])
    _, sum_on_rank_1 = oracles.all_reduce([first, second], "sum")
    assert_same(sum_on_rank_1, Pair(3, [torch.tensor([3.0, 12.0])]))
    assert oracles.all_reduce([True, False], "min") == [False, False]
    assert oracles.all_reduce([6, 3], "bxor") == [5, 5]
    assert oracles.all_reduce([1.0, 2.0]) == [1.5, 1.5]
    assert oracles.all_reduce(["a", "b"]) == ["a", "b"]


def test_integers_wrap_around_in_their_dtype() -> None:
    large = torch.tensor([100], dtype=torch.int8)
    actual, _ = oracles.all_reduce([large, large], "sum")
    expected = torch.tensor([-56], dtype=torch.int8)
    assert_same(actual, expected)


def test_rows_go_where_they_belong() -> None:
    first = torch.tensor([0, 1])
    second = torch.tensor([10, 11])
    exchanged = oracles.all_to_all([first, second])
    assert_same(exchanged, [torch.tensor([0, 10]), torch.tensor([1, 11])])
    scattered = oracles.reduce_scatter([first, second], "sum")
    assert_same(scattered, [torch.tensor(10), torch.tensor(12)])
    gathered = oracles.all_gather([first, second])
    assert_same(gathered[1], torch.tensor([[0, 1], [10, 11]]))
    assert oracles.all_gather([1, 2]) == [[1, 2], [1, 2]]


def test_rows_of_two_lengths_are_gathered() -> None:
    first = torch.tensor([0, 1])
    second = torch.tensor([10])
    concatenated = oracles.all_gather([first, second], concat=True)
    assert_same(concatenated[0], torch.tensor([0, 1, 10]))
    ragged = oracles.all_gather([first, second], ragged=True)
    assert_same(ragged[0], [first, second])


def test_values_move_between_ranks() -> None:
    assert oracles.broadcast([1, 2, 3], src=1) == [2, 2, 2]
    assert oracles.scatter([None, "abc", None], src=1) == ["a", "b", "c"]
    assert oracles.gather([1, 2, 3], dst=2) == [None, None, [1, 2, 3]]


def test_ranks_outside_of_a_group_have_no_result() -> None:
    groups = [[0, 2], [3]]
    actual = oracles.in_groups(oracles.all_reduce, [1, 2, 4, 8], groups, "sum")
    assert actual == [5, None, 5, 8]


def losses_weighted_by_rank(inputs: list[Tensor]) -> list[Tensor]:
    """Return the sum over all ranks on each rank, times 1 on the first, and 2 on the second."""
    on_first_rank, on_second_rank = oracles.all_reduce(inputs, "sum")
    return [on_first_rank.sum(), 2 * on_second_rank.sum()]


def test_the_gradient_is_that_of_the_sum_of_all_losses() -> None:
    inputs = [torch.ones(2), torch.ones(2)]
    actual = oracles.gradients(losses_weighted_by_rank, inputs)
    expected = torch.full((2,), 3.0)
    assert_same(actual, [expected, expected])


def test_differences_are_named_with_their_path() -> None:
    actual = {"a": [1, torch.ones(2)], "b": 0}
    expected = {"a": [1.0, torch.tensor([1.0, 3.0])], "c": 0}
    assert list(differences(actual, expected)) == [
        "['a'][0]: 1 is a int, expected 1.0",
        "['a'][1]: 1 of 2 elements of float32 (2,), at [1] 1.0, expected 3.0",
        "['b']: not expected",
        "['c']: missing",
    ]


def test_equal_and_close_values_have_no_difference() -> None:
    nan = float("nan")
    assert not list(differences(nan, nan))
    assert not list(differences(torch.tensor(1.0), torch.tensor(1.001), atol=0.01))


def test_tensors_of_two_dtypes_are_not_the_same() -> None:
    doubles = torch.ones(1, dtype=torch.float64)
    with pytest.raises(AssertionError, match=r"float64 \(1,\), expected float32 \(1,\)"):
        assert_same(doubles, torch.ones(1))


def has_product_beyond_64_bits(trees: PerRank) -> bool:
    """Return whether a product of integers over ranks is too large, which fabric refuses."""
    leaves_of_ranks = [flatten(tree)[0] for tree in trees.values]
    for leaves in zip(*leaves_of_ranks, strict=True):
        if isinstance(leaves[0], int) and abs(math.prod(leaves)) > 0.99 * 2**63:
            return True
    return False


@FEW
@given(st.data())
def test_all_reduce_agrees_with_its_oracle(rank_pool: Callable[[int], RankPool], data: Any) -> None:
    size = data.draw(gen.world_sizes(2))
    op = data.draw(st.sampled_from(["sum", "mean", "min", "max", "product"]))
    trees = data.draw(gen.per_rank_trees(size, op))
    if op == "product":
        assume(not has_product_beyond_64_bits(trees))
    actual = rank_pool(size).run(lambda fabric, x: fabric.all_reduce(x, reduce_op=op), trees)
    assert_same(actual, oracles.all_reduce(trees.values, op))


def sum_that_ignores_strides(fabric: Fabric, x: Tensor) -> Tensor:
    dense_stride = torch.empty(x.shape).stride()
    dense = x.as_strided(x.shape, dense_stride)
    return fabric.all_reduce(dense, reduce_op="sum")


# laws/test_planted.py finds this bug in seconds.
@pytest.mark.slow
def test_a_planted_bug_is_found_and_shrunk(rank_pool: Callable[[int], RankPool]) -> None:
    def is_wrong(tensors: PerRank) -> bool:
        actual = rank_pool(2).run(sum_that_ignores_strides, tensors)
        expected = oracles.all_reduce(tensors.values, "sum")
        return any(differences(actual, expected))

    deterministic = settings(database=None, derandomize=True)
    counterexample = find(gen.per_rank_tensors(2), is_wrong, settings=deterministic)
    # Two elements are the fewest that can be apart, and the layout of one rank is enough.
    assert [tensor.shape for tensor in counterexample.values] == [(2,), (2,)]
    assert sorted(tensor.is_contiguous() for tensor in counterexample.values) == [False, True]
