"""The collectives of torchmetrics under the laws of fabric.testing, on 2 and 3 processes.

``pytest examples/testing/test_torchmetrics.py`` runs the laws. With ``--runxfail`` it reports what
they find in torchmetrics 1.9.0.
"""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fabric.errors import RankFailedError
from fabric.testing import PerRank, assert_same, oracles
from fabric.testing.generators import per_rank_tensors

torchmetrics = pytest.importorskip("torchmetrics")

# The examples are the same in every run.
SETTINGS = settings(deadline=None, max_examples=25, derandomize=True, database=None, report_multiple_bugs=False)
# gloo has no int16.
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool])


def pool_of(rank_pool: Any, size: int) -> Any:
    """Return ranks that are forked from a process with torchmetrics loaded."""
    return rank_pool(size, preload=["torchmetrics"], timeout=120.0, max_shrinking_time=10.0)


def gather(_: Any, x: Tensor) -> list[Tensor]:
    return torchmetrics.utilities.distributed.gather_all_tensors(x)


@pytest.mark.parametrize("size", [2, 3])
@SETTINGS
@given(st.data())
def test_tensors_of_any_lengths_are_gathered(rank_pool: Any, size: int, data: Any) -> None:
    x = data.draw(per_rank_tensors(size, DTYPES, ragged=True))
    results = pool_of(rank_pool, size).run(gather, x)
    assert_same(results, oracles.all_gather(x.values, ragged=True))


def area_under_curve(_: Any, samples: list[tuple[float, int]]) -> Tensor:
    metric = torchmetrics.classification.BinaryAUROC()
    for score, label in samples:
        metric.update(torch.tensor([score]), torch.tensor([label]))
    return metric.compute()


@pytest.mark.xfail(
    raises=RankFailedError,
    strict=True,
    reason="torchmetrics 1.9.0: a rank without samples sends labels as float32, the others as int64",
)
@pytest.mark.parametrize("size", [2, 3])
@SETTINGS
@given(st.data())
def test_a_metric_does_not_depend_on_the_rank_of_a_sample(rank_pool: Any, size: int, data: Any) -> None:
    negative = st.tuples(st.sampled_from([0.25, 0.5, 0.75]), st.just(0))
    positive = st.tuples(st.sampled_from([0.25, 0.5, 0.75]), st.just(1))
    samples = [data.draw(negative), data.draw(positive)]
    samples += data.draw(st.lists(negative | positive, max_size=3))
    samples_of_ranks: list[list[tuple[float, int]]] = [[] for _ in range(size)]
    for sample in samples:
        rank = data.draw(st.integers(0, size - 1))
        samples_of_ranks[rank].append(sample)
    results = pool_of(rank_pool, size).run(area_under_curve, PerRank(samples_of_ranks))
    # This process has no process group, so the metric is that of the samples that it passes.
    assert_same(results, [area_under_curve(None, samples)] * size)
