"""Sequences of collectives agree with the oracles. A call that differs is an error on all ranks."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from fabric.testing import RankPool, ThreadedWorld
from tests.laws.base import Subject, profile
from tests.laws.machines import disagreeing, interleaved
from tests.laws.planted import ReusesItsBuffer
from tests.ranks import run_in_ranks


def run_checked(size: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
    return run_in_ranks(fn, *args, ranks=size, check_collectives=True)


def check(machine: type[RuleBasedStateMachine], examples: int, steps: int) -> None:
    run_state_machine_as_test(
        machine, settings=settings(profile(examples), stateful_step_count=steps)
    )


def test_interleaved_collectives_agree_with_their_oracles(
    rank_pool: Callable[[int], RankPool],
) -> None:
    check(interleaved(Subject(rank_pool)), 15, steps=12)


@pytest.mark.slow
def test_a_buffer_that_is_used_again_is_found_by_two_reductions() -> None:
    with pytest.raises(AssertionError) as caught:
        check(interleaved(Subject(ThreadedWorld, ReusesItsBuffer)), 100, steps=6)
    printed = "\n".join(caught.value.__notes__)
    assert printed.count("name=") == 2
    assert printed.count("name='all_reduce") == 2


def test_a_call_that_differs_is_an_error_on_every_rank_of_its_group() -> None:
    check(disagreeing(run_checked), 8, steps=4)


MANY = [
    pytest.param(1, marks=pytest.mark.slow),
    pytest.param(4, marks=[pytest.mark.slow, pytest.mark.soak]),
]


@pytest.mark.parametrize("factor", MANY)
def test_many_interleaved_collectives_agree_with_their_oracles(
    rank_pool: Callable[[int], RankPool], factor: int
) -> None:
    check(interleaved(Subject(rank_pool)), 40 * factor, steps=30)


@pytest.mark.parametrize("factor", MANY)
def test_many_calls_that_differ_are_errors_on_every_rank_of_their_group(factor: int) -> None:
    check(disagreeing(run_checked), 25 * factor, steps=6)
