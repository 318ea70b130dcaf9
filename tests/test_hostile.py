"""Programs that go wrong end with an error of fabric; the cases are in ``tests/hostile``."""

import random

import pytest

from tests.hostile import checkpoints, collectives, processes, training
from tests.hostile.base import CASES, judge
from tests.sampling import sampled

# Spread over all kinds, and the same in every run.
NAMES = random.Random(0).sample(sorted(CASES), len(CASES))
assert all((checkpoints, collectives, processes, training)), "they register their cases"


@pytest.mark.parametrize("name", sampled([(name,) for name in NAMES], slow=28))
def test_a_case_ends_right_or_with_an_error_of_fabric_and_leaves_nothing(name: str) -> None:
    assert judge(name).problems == []
