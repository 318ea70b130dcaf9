"""Every hostile case ends right or with an error of fabric's; see ``tests/hostile``."""

import pytest

from tests.hostile import checkpoints, collectives, processes, training
from tests.hostile.base import CASES, LIMIT, judge
from tests.sampling import sampled

assert all((checkpoints, collectives, processes, training)), "they register their cases"


@pytest.mark.timeout(2 * LIMIT)
@pytest.mark.parametrize("name", sampled([(name,) for name in CASES], slow=12))
def test_it_ends_right_or_with_an_error_of_fabrics_and_leaves_nothing(name: str) -> None:
    assert judge(name)[0] == []
