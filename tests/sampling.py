"""Which cases of a long list run in which of `make test`, `make test-slow` and `make soak`."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from typing import Any

import pytest

Case = tuple[Any, ...]


def sampled(
    cases: Iterable[Case],
    *,
    slow: int,
    quick: Collection[Case] = (),
    marks: Callable[[Case], list[Any]] = lambda case: [],
) -> list[Any]:
    """Parameters of a test: ``quick`` ones always run, ``slow`` others in `make test-slow`, the rest in `make soak`.

    The sample is spread evenly: each case that it takes has the parameters that came up least so far. ``marks`` are
    marks that a case has besides.
    """
    rest = [case for case in cases if case not in quick]
    seen = Counter(part for case in quick for part in enumerate(case))
    sample: list[Case] = []
    while len(sample) < min(slow, len(rest)):
        left = [case for case in rest if case not in sample]
        sample.append(min(left, key=lambda case: sum(seen[part] for part in enumerate(case))))
        seen.update(enumerate(sample[-1]))
    when = {
        case: [pytest.mark.slow] if case in sample else [pytest.mark.slow, pytest.mark.soak]
        for case in rest
    }
    return [
        pytest.param(*case, marks=[*when.get(case, []), *marks(case)]) for case in [*quick, *rest]
    ]
