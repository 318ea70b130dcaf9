"""Which cases of a long list run in which of `make test`, `make test-slow` and `make soak`."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from typing import Any

import pytest

Case = tuple[Any, ...]


def _no_marks(case: Case) -> list[Any]:
    """Return no marks."""
    return []


def sampled(
    cases: Iterable[Case],
    *,
    slow: int,
    quick: Collection[Case] = (),
    marks: Callable[[Case], list[Any]] = _no_marks,
) -> list[Any]:
    """Return the parameters of a test, each with the marks that say when it runs.

    The sample is spread evenly: each case that it takes has the parameters that came up least so
    far.

    Args:
        cases: All cases.
        slow: The number of cases that `make test-slow` runs besides the quick cases.
        quick: The cases that always run. `make soak` also runs the remaining cases.
        marks: Returns the marks that a case has besides.
    """
    candidates = [case for case in cases if case not in quick]
    sample = _sample(candidates, slow, quick)
    parameters = []
    for case in quick:
        parameter = pytest.param(*case, marks=marks(case))
        parameters.append(parameter)
    for case in candidates:
        case_marks = [pytest.mark.slow, *marks(case)]
        if case not in sample:
            case_marks.append(pytest.mark.soak)
        parameter = pytest.param(*case, marks=case_marks)
        parameters.append(parameter)
    return parameters


def _sample(candidates: list[Case], size: int, quick: Collection[Case]) -> list[Case]:
    """Choose cases whose parameters came up least in the quick cases and those chosen before."""
    counts: Counter[tuple[int, Any]] = Counter()
    for case in quick:
        counts.update(enumerate(case))
    sample: list[Case] = []
    remaining = list(candidates)
    while remaining and len(sample) < size:
        case = min(remaining, key=lambda case: _occurrences(case, counts))
        remaining.remove(case)
        sample.append(case)
        counts.update(enumerate(case))
    return sample


def _occurrences(case: Case, counts: Counter[tuple[int, Any]]) -> int:
    """Return how often the parameters of a case came up so far."""
    return sum(counts[parameter] for parameter in enumerate(case))
