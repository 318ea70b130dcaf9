"""The oracles on values checked by hand, and against the real collectives on drawn values."""

import math
from collections import namedtuple
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, assume, find, given, settings
from hypothesis import strategies as st
from torch import Tensor

from fabric import Fabric
from fabric.testing import PerRank, RankPool, ThreadedWorld, assert_same, differences, oracles
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


def test_whole_objects_move_and_are_reduced_by_a_function() -> None:
    lists = [[1, "a"], [{"x": 2}, None]]
    assert oracles.all_to_all(lists, objects=True) == [[1, {"x": 2}], ["a", None]]
    assert oracles.all_gather(lists, objects=True) == [lists, lists]
    sets = [{1}, {2}, {1, 3}]
    assert oracles.all_reduce(sets, set.union) == [{1, 2, 3}] * 3
    texts = [["a", "b"], ["c", "d"]]
    assert oracles.reduce_scatter(texts, str.__add__) == ["ac", "bd"]
    with pytest.raises(TypeError, match="objects=True"):
        oracles.all_to_all([[1, 2], [3, 4]])


def test_object_oracles_agree_with_raw_collectives(rank_pool: Callable[[int], RankPool]) -> None:
    values = [[torch.ones(2), torch.zeros(1)], [torch.tensor([3.0]), torch.tensor([4.0, 5.0])]]
    shapes = [[(2,), (1,)], [(1,), (2,)]]
    incoming = PerRank(oracles.all_to_all(shapes, objects=True))
    assert_same(
        rank_pool(2).run(gather_raw_objects, PerRank(values)),
        oracles.all_gather(values, objects=True),
    )
    assert_same(
        rank_pool(2).run(send_raw_objects, PerRank(values), incoming),
        oracles.all_to_all(values, objects=True),
    )


def gather_raw_objects(fabric: Fabric, value: Any) -> list[Any]:
    results: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(results, value)
    return results


def send_raw_objects(fabric: Fabric, value: list[Tensor], shapes: Any) -> list[Tensor]:
    results = [torch.empty(shape) for shape in shapes]
    requests: list[dist.P2POp] = []
    for rank, tensor in enumerate(value):
        if rank == dist.get_rank():
            results[rank] = tensor
            continue
        requests.append(dist.P2POp(dist.isend, tensor, rank))
        requests.append(dist.P2POp(dist.irecv, results[rank], rank))
    for work in dist.batch_isend_irecv(requests):
        work.wait()
    return results


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


def test_the_signs_of_zeros_and_nan_are_told_apart_on_request() -> None:
    nan = float("nan")
    assert not list(differences([0.0, torch.zeros(1)], [-0.0, -torch.zeros(1)]))
    signs = differences([0.0, torch.zeros(2)], [-0.0, torch.tensor([0.0, -0.0])], signed_zeros=True)
    assert list(signs) == [
        "[0]: 0.0, expected -0.0",
        "[1]: 1 of 2 elements of float32 (2,), at [1] 0.0, expected -0.0",
    ]
    assert list(differences(1j, complex(-0.0, 1), signed_zeros=True))
    assert not list(differences([1.0, -0.0, 2], [1.0, -0.0, 2], signed_zeros=True))
    assert len(list(differences([nan, torch.tensor(nan)], [nan, nan], equal_nan=False))) == 2
    tensor = torch.tensor([1.0, nan])
    with pytest.raises(AssertionError, match="nan, expected nan"):
        assert_same(tensor, tensor, equal_nan=False)


def test_no_number_is_close_to_infinity() -> None:
    infinity = float("inf")
    assert list(differences(1.0, infinity, rtol=0.1))
    assert not list(differences(infinity, infinity, rtol=0.1))


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


def maximum_without_nan(fabric: Fabric, x: Tensor) -> Tensor:
    return reduce(torch.fmax, fabric.all_gather(x))


def sum_from_zero(fabric: Fabric, x: Tensor) -> Tensor:
    total = torch.zeros_like(x)
    for row in fabric.all_gather(x):
        total += row
    return total


def mean_that_truncates(fabric: Fabric, x: Tensor) -> Tensor:
    total = fabric.all_reduce(x, reduce_op="sum")
    return (total // fabric.world_size).float()


@pytest.mark.parametrize(
    ("function", "op", "counterexample"),
    [
        (maximum_without_nan, "max", "PerRank([tensor([0.]), tensor([nan])])"),
        (sum_from_zero, "sum", "PerRank([tensor([-0.]), tensor([-0.])])"),
        (mean_that_truncates, "mean", "PerRank([tensor([0]), tensor([1])])"),
    ],
)
def test_bugs_of_special_values_are_found_and_shrunk(
    function: Callable[[Fabric, Tensor], Tensor], op: str, counterexample: str
) -> None:
    world = ThreadedWorld(2)
    dtype = torch.int64 if op == "mean" else torch.float32
    tensors = gen.per_rank_tensors(2, dtype, (1,), special_values=True)

    def is_wrong(tensors: PerRank) -> bool:
        actual = world.run(function, tensors)
        expected = oracles.all_reduce(tensors.values, op)
        return any(differences(actual, expected, signed_zeros=op == "sum"))

    deterministic = settings(database=None, derandomize=True)
    assert repr(find(tensors, is_wrong, settings=deterministic)) == counterexample


@FEW
@given(st.data())
def test_collectives_agree_with_their_oracle_on_special_values(
    rank_pool: Callable[[int], RankPool], data: Any
) -> None:
    op = data.draw(st.sampled_from(["sum", "mean", "min", "max"]))
    trees = data.draw(gen.per_rank_trees(2, op, special_values=True))
    actual = rank_pool(2).run(lambda fabric, x: fabric.all_reduce(x, reduce_op=op), trees)
    has_one_zero = op in ("sum", "mean")
    assert_same(actual, oracles.all_reduce(trees.values, op), signed_zeros=has_one_zero)


def test_the_mean_of_integers_is_not_rounded() -> None:
    assert oracles.all_reduce([1, 2]) == [1.5, 1.5]
    integers = [torch.tensor([1]), torch.tensor([2])]
    assert_same(oracles.all_reduce(integers), [torch.tensor([1.5]), torch.tensor([1.5])])


def total(tensors: Sequence[Tensor]) -> Tensor:
    return reduce(torch.add, tensors)


def total_in_half_the_bits(tensors: Sequence[Tensor]) -> Tensor:
    return total([tensor.bfloat16() for tensor in tensors]).float()


def total_without_the_last_rank(tensors: Sequence[Tensor]) -> Tensor:
    return total(tensors[:-1])


@FEW
@given(st.data())
def test_sums_in_any_order_agree_within_the_tolerance_of_their_dtype(data: Any) -> None:
    size = data.draw(st.integers(2, 8))
    dtype = data.draw(st.sampled_from(gen.FLOATS))
    parts = data.draw(gen.per_rank_tensors(size, dtype, exact=False)).values
    in_other_order = data.draw(st.permutations(parts))
    rounded_once = total([part.double() for part in parts]).to(dtype)
    for expected in (total(in_other_order), rounded_once, oracles.all_reduce(parts, "sum")[0]):
        assert_same(total(parts), expected, summed=parts)
        assert_same(total(parts) / size, expected / size, summed=parts)


@pytest.mark.parametrize("wrong_total", [total_in_half_the_bits, total_without_the_last_rank])
def test_wrong_sums_are_found_beyond_the_tolerance(
    wrong_total: Callable[[Sequence[Tensor]], Tensor],
) -> None:
    def is_wrong(parts: PerRank) -> bool:
        actual = wrong_total(parts.values)
        return any(differences(actual, total(parts.values), summed=parts.values))

    deterministic = settings(database=None, derandomize=True)
    find(gen.per_rank_tensors(3, exact=False), is_wrong, settings=deterministic)


def test_the_tolerance_of_sums_is_computed_from_finite_numbers() -> None:
    summed = [{"loss": 3.0, "name": "a"}, {"loss": float("inf"), "name": "b"}]
    epsilon = torch.finfo(torch.float64).eps
    assert not list(differences(1.0, 1.0 + 6 * epsilon, summed=summed))
    assert list(differences(1.0, 1.0 + 7 * epsilon, summed=summed))
    assert list(differences(1, 2, summed=summed))


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
