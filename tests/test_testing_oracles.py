"""The oracles on values that one can check by hand, and against the real collectives on values that nobody chose."""

from collections import namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, find, given, settings
from hypothesis import strategies as st

from fabric import Fabric
from fabric.testing import PerRank, RankPool, assert_same, differences, oracles
from fabric.testing import generators as gen

FEW = settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


def test_reductions_of_numbers_tensors_and_collections() -> None:
    Both = namedtuple("Both", "x y")
    values = [Both(1, [torch.tensor([1.0, 8.0])]), Both(2, [torch.tensor([2.0, 4.0])])]
    assert_same(oracles.all_reduce(values, "sum")[1], Both(3, [torch.tensor([3.0, 12.0])]))
    assert oracles.all_reduce([True, False], "min") == [False, False]
    assert oracles.all_reduce([6, 3], "bxor") == [5, 5]
    assert oracles.all_reduce([1.0, 2.0]) == [1.5, 1.5]
    assert oracles.all_reduce(["a", "b"]) == ["a", "b"]


def test_integers_wrap_around_in_their_dtype() -> None:
    large = [torch.tensor([100], dtype=torch.int8)] * 2
    assert_same(oracles.all_reduce(large, "sum")[0], torch.tensor([-56], dtype=torch.int8))


def test_rows_go_where_they_belong() -> None:
    values = [torch.tensor([0, 1]), torch.tensor([10, 11])]
    assert_same(oracles.all_to_all(values), [torch.tensor([0, 10]), torch.tensor([1, 11])])
    assert_same(oracles.reduce_scatter(values, "sum"), [torch.tensor(10), torch.tensor(12)])
    assert_same(oracles.all_gather(values)[1], torch.tensor([[0, 1], [10, 11]]))
    assert_same(
        oracles.all_gather([values[0], values[1][:1]], concat=True)[0], torch.tensor([0, 1, 10])
    )
    assert_same(
        oracles.all_gather([values[0], values[1][:1]], ragged=True)[0], [values[0], values[1][:1]]
    )
    assert oracles.all_gather([1, 2]) == [[1, 2], [1, 2]]


def test_values_move_between_ranks() -> None:
    assert oracles.broadcast([1, 2, 3], src=1) == [2, 2, 2]
    assert oracles.scatter([None, "abc", None], src=1) == ["a", "b", "c"]
    assert oracles.gather([1, 2, 3], dst=2) == [None, None, [1, 2, 3]]
    assert oracles.in_groups(oracles.all_reduce, [1, 2, 4, 8], [[0, 2], [3]], "sum") == [
        5,
        None,
        5,
        8,
    ]


def test_the_gradient_is_that_of_the_sum_of_all_losses() -> None:
    def losses(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        return [
            rank * reduced.sum()
            for rank, reduced in enumerate(oracles.all_reduce(inputs, "sum"), start=1)
        ]

    assert_same(
        oracles.gradients(losses, [torch.ones(2), torch.ones(2)]), [torch.full((2,), 3.0)] * 2
    )


def test_differences_are_named_where_they_are() -> None:
    actual = list(
        differences(
            {"a": [1, torch.ones(2)], "b": 0}, {"a": [1.0, torch.tensor([1.0, 3.0])], "c": 0}
        )
    )
    assert actual == [
        "['a'][0]: 1 is a int, expected 1.0",
        "['a'][1]: 1 of 2 elements of float32 (2,), at [1] 1.0, expected 3.0",
        "['b']: not expected",
        "['c']: missing",
    ]
    assert not list(differences(float("nan"), float("nan")))
    assert not list(differences(torch.tensor(1.0), torch.tensor(1.001), atol=0.01))
    with pytest.raises(AssertionError, match=r"float64 \(1,\), expected float32 \(1,\)"):
        assert_same(torch.ones(1, dtype=torch.float64), torch.ones(1))


@FEW
@given(st.data())
def test_all_reduce_agrees_with_its_oracle(rank_pool: Callable[[int], RankPool], data: Any) -> None:
    size = data.draw(gen.world_sizes(2))
    op = data.draw(st.sampled_from(["sum", "mean", "min", "max", "product"]))
    values = data.draw(gen.per_rank_trees(size, op))
    results = rank_pool(size).run(lambda fabric, x: fabric.all_reduce(x, reduce_op=op), values)
    assert_same(results, oracles.all_reduce(values.values, op))


# laws/test_planted.py finds the same one in seconds.
@pytest.mark.slow
def test_a_planted_bug_is_found_and_shrunk(rank_pool: Callable[[int], RankPool]) -> None:
    def ignores_strides(fabric: Fabric, x: torch.Tensor) -> torch.Tensor:
        dense = x.as_strided(x.shape, torch.empty(x.shape).stride())
        return fabric.all_reduce(dense, reduce_op="sum")

    def is_wrong(values: PerRank) -> bool:
        results = rank_pool(2).run(ignores_strides, values)
        return any(differences(results, oracles.all_reduce(values.values, "sum")))

    actual = find(
        gen.per_rank_tensors(2), is_wrong, settings=settings(database=None, derandomize=True)
    )
    # Two elements are the fewest that can be apart, and the layout of one rank is enough.
    assert [value.shape for value in actual.values] == [(2,), (2,)]
    assert sorted(value.is_contiguous() for value in actual.values) == [False, True]
