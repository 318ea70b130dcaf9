"""An update does not depend on the strategy, the processes, the split of data or accumulation."""

from functools import partial

import pytest

from tests.laws import planted
from tests.laws.base import Subject, check
from tests.laws.exactness import (
    MIXED,
    STRATEGIES,
    exactly,
    exactly_where_ranks_run_out,
    to_rounding,
)

# Numbers of examples.
SHORT = 4
MEDIUM = 12
LONG = 30
SOAK = 400
SLOW = [
    pytest.param(MEDIUM, marks=pytest.mark.slow),
    pytest.param(SOAK, marks=[pytest.mark.slow, pytest.mark.soak]),
]


@pytest.mark.parametrize("examples", [SHORT, *SLOW])
@pytest.mark.parametrize("name", STRATEGIES)
def test_an_update_is_that_of_one_process_with_all_samples(name: str, examples: int) -> None:
    strategy = STRATEGIES[name]
    check(exactly(strategy.sizes), Subject(partial(strategy.world, "64-true")), examples)


@pytest.mark.parametrize("examples", [SHORT, *SLOW])
@pytest.mark.parametrize("name", ["ddp", "FULL_SHARD"])
def test_an_update_is_that_of_one_process_where_ranks_run_out_of_batches(
    name: str, examples: int
) -> None:
    strategy = STRATEGIES[name]
    law = exactly_where_ranks_run_out(strategy.sizes)
    check(law, Subject(partial(strategy.world, "64-true")), examples)


@pytest.mark.parametrize("examples", SLOW)
@pytest.mark.parametrize("name", ["single", "ddp", "FULL_SHARD"])
def test_an_update_in_float16_is_that_of_one_process_to_rounding_without_more_overflows(
    name: str, examples: int
) -> None:
    strategy = STRATEGIES[name]
    check(to_rounding(strategy.sizes), Subject(partial(strategy.world, MIXED)), examples)


@pytest.mark.slow
@pytest.mark.parametrize(
    "broken",
    [planted.IgnoresAWeight, planted.DividesByTheWorldTwice, planted.DividesTheTailByAFullWindow],
    ids=lambda value: value.__name__,
)
def test_a_loss_that_is_divided_by_the_wrong_number_breaks_the_law(
    broken: type[planted.Broken],
) -> None:
    subject = Subject(partial(STRATEGIES["ddp"].world, "64-true"), broken)
    with pytest.raises(AssertionError, match="not close"):
        check(exactly((2,)), subject, LONG)
