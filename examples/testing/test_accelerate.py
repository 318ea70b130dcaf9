"""The collectives of Accelerate under the laws of fabric.testing, on 2 and 3 processes.

``pytest examples/testing/test_accelerate.py`` runs the laws. With ``--runxfail`` it reports what
they find in accelerate 1.15.0.
"""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fabric.errors import RankFailedError
from fabric.testing import assert_same, oracles
from fabric.testing.generators import per_rank_tensors

accelerate = pytest.importorskip("accelerate")

# The examples are the same in every run.
SETTINGS = settings(deadline=None, max_examples=25, derandomize=True, database=None, report_multiple_bugs=False)
# gloo has no int16.
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool])


def pool_of(rank_pool: Any, size: int) -> Any:
    """Return ranks that are forked from a process with Accelerate loaded."""
    return rank_pool(size, preload=["accelerate"], timeout=120.0, max_shrinking_time=10.0)


def gather(_: Any, x: Tensor) -> Tensor:
    return accelerate.Accelerator(cpu=True).gather(x)


def reduce(_: Any, x: Tensor, reduction: str) -> Tensor:
    return accelerate.Accelerator(cpu=True).reduce(x, reduction)


def gather_padded(_: Any, x: Tensor) -> Tensor:
    accelerator = accelerate.Accelerator(cpu=True)
    lengths = accelerator.gather(torch.tensor([len(x)]))
    rows = accelerator.gather(accelerator.pad_across_processes(x)[None])
    return torch.cat([row[:length] for row, length in zip(rows, lengths, strict=True)])


@pytest.mark.parametrize("size", [2, 3])
@SETTINGS
@given(st.data())
def test_tensors_are_gathered(rank_pool: Any, size: int, data: Any) -> None:
    x = data.draw(per_rank_tensors(size, DTYPES))
    results = pool_of(rank_pool, size).run(gather, x)
    assert_same(results, oracles.all_gather(x.values, concat=True))


@pytest.mark.parametrize("size", [2, 3])
@SETTINGS
@given(st.data())
def test_padded_floats_are_gathered(rank_pool: Any, size: int, data: Any) -> None:
    x = data.draw(per_rank_tensors(size, ragged=True))
    results = pool_of(rank_pool, size).run(gather_padded, x)
    assert_same(results, oracles.all_gather(x.values, concat=True))


@pytest.mark.xfail(
    raises=(AssertionError, RankFailedError),
    strict=True,
    reason="accelerate 1.15.0 pads booleans as int64, and a rank that needs no padding sends bool",
)
@pytest.mark.parametrize("size", [2, 3])
@SETTINGS
@given(st.data())
def test_padded_masks_are_gathered(rank_pool: Any, size: int, data: Any) -> None:
    x = data.draw(per_rank_tensors(size, torch.bool, ragged=True))
    results = pool_of(rank_pool, size).run(gather_padded, x)
    assert_same(results, oracles.all_gather(x.values, concat=True))


@pytest.mark.xfail(
    raises=AssertionError,
    strict=True,
    reason="accelerate 1.15.0 adds elements in the order of each rank's memory",
)
@pytest.mark.parametrize("size", [2, 3])
@SETTINGS
@given(st.data())
def test_matrices_are_reduced(rank_pool: Any, size: int, data: Any) -> None:
    x = data.draw(per_rank_tensors(size, shape=(2, 2)))
    results = pool_of(rank_pool, size).run(reduce, x, "sum")
    assert_same(results, oracles.all_reduce(x.values, "sum"))


@pytest.mark.xfail(
    raises=AssertionError,
    strict=True,
    reason="accelerate 1.15.0 computes the sum, although 'none' should not perform any operation",
)
@pytest.mark.parametrize("size", [2, 3])
@SETTINGS
@given(st.data())
def test_no_reduction_keeps_the_value(rank_pool: Any, size: int, data: Any) -> None:
    x = data.draw(per_rank_tensors(size, shape=(2,)))
    results = pool_of(rank_pool, size).run(reduce, x, "none")
    assert_same(results, x.values)
