"""The laws find bugs, and shrink them to the counterexample that a person would write."""

import re
from collections.abc import Callable

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from fabric.testing import RankPool
from tests.laws import planted
from tests.laws.base import Law, Subject, check, profile
from tests.laws.exchanges import ragged_gathers_agree_with_their_oracle
from tests.laws.reductions import all_reduce_agrees_with_its_oracle
from tests.laws.universal import (
    arguments_are_left_as_they_are,
    gradients_are_those_of_the_sum_of_all_losses,
    groups_share_the_world,
)

ENOUGH = 300


def counterexample(
    law: Law, pool: Callable[[int], RankPool], broken: type[planted.Broken]
) -> dict[str, str]:
    """Return what hypothesis prints of its counterexample, by the label of each value."""
    with pytest.raises(AssertionError) as caught:
        check(law, Subject(pool, broken), ENOUGH)
    printed = "\n".join(caught.value.__notes__)
    return dict(re.findall(r"^Draw \d+ \((\w+)\): (.*)$", printed, flags=re.MULTILINE))


def test_an_ignored_reduction_shrinks_to_one_number_that_differs(
    rank_pool: Callable[[int], RankPool],
) -> None:
    actual = counterexample(
        all_reduce_agrees_with_its_oracle, rank_pool, planted.IgnoresTheReduction
    )
    assert actual == {
        "size": "2",
        "reduce_op": "'mean'",
        "values": "PerRank([0.0, 0.25])",
    }


def test_ignored_strides_shrink_to_two_elements_that_are_apart(
    rank_pool: Callable[[int], RankPool],
) -> None:
    actual = counterexample(all_reduce_agrees_with_its_oracle, rank_pool, planted.IgnoresStrides)
    assert actual["size"] == "1"
    assert actual["reduce_op"] == "'sum'"
    # 77 is the fill value of the memory between the two elements.
    assert "tensor([ 0., 77.,  0.]).as_strided((2,), (2,))" in actual["values"]


def test_a_ragged_gather_that_is_off_by_one_shrinks_to_one_row(
    rank_pool: Callable[[int], RankPool],
) -> None:
    actual = counterexample(
        ragged_gathers_agree_with_their_oracle, rank_pool, planted.TakesARowOfPadding
    )
    assert actual == {
        "size": "2",
        "values": "PerRank([tensor([]), tensor([0.])])",
        "option": "'ragged'",
    }


@pytest.mark.parametrize(
    ("broken", "law"),
    [
        (planted.WorksInPlace, arguments_are_left_as_they_are),
        (planted.KeepsGradientsAtHome, gradients_are_those_of_the_sum_of_all_losses),
        (planted.ReducesInTheWorld, groups_share_the_world),
    ],
    ids=lambda value: value.__name__,
)
def test_other_bugs_are_found_too(
    rank_pool: Callable[[int], RankPool], broken: type[planted.Broken], law: Law
) -> None:
    subject = Subject(rank_pool, broken)

    # To shrink a counterexample takes ten times as long as to find it.
    @settings(profile(ENOUGH), phases=[Phase.generate])
    @given(st.data())
    def holds(data: st.DataObject) -> None:
        law(subject, data.draw)

    with pytest.raises(AssertionError):
        holds()
