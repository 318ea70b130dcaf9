"""The laws hold for fabric's collectives, on one to four real processes."""

from collections.abc import Callable

import pytest

from fabric.testing import RankPool
from tests.laws import exchanges, reductions, universal
from tests.laws.base import Law, Subject, check

LAWS = (*reductions.LAWS, *exchanges.LAWS, *universal.LAWS)
SHORT = 8
LONG = 25
SOAK = 100


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_law(rank_pool: Callable[[int], RankPool], law: Law) -> None:
    check(law, Subject(rank_pool), SHORT)


@pytest.mark.slow
@pytest.mark.parametrize("examples", [LONG, pytest.param(SOAK, marks=pytest.mark.soak)])
@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_law_in_many_examples(
    rank_pool: Callable[[int], RankPool], law: Law, examples: int
) -> None:
    assert len(LAWS) * SOAK >= 2000
    check(law, Subject(rank_pool), examples)
