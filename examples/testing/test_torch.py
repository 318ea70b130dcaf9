"""``torch.distributed`` under the laws of fabric.testing, on 2 and 3 processes.

``pytest examples/testing/test_torch.py`` runs the laws. With ``--runxfail`` it reports what they
find in torch 2.13.0.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fabric.testing import PerRank, assert_same, oracles
from fabric.testing.generators import per_rank_tensors

# The examples are the same in every run.
SETTINGS = settings(deadline=None, max_examples=25, derandomize=True, database=None, report_multiple_bugs=False)
# gloo has no int16.
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.uint8])


def all_reduce(_: Any, x: Tensor) -> Tensor:
    dist.all_reduce(x)
    return x


@pytest.mark.parametrize("size", [2, 3])
@SETTINGS
@given(st.data())
def test_all_reduce_of_dense_tensors_is_a_sum(rank_pool: Any, size: int, data: Any) -> None:
    drawn = data.draw(per_rank_tensors(size, DTYPES))
    x = PerRank([tensor.contiguous() for tensor in drawn.values])
    assert_same(rank_pool(size, timeout=120.0).run(all_reduce, x), oracles.all_reduce(x.values, "sum"))


@pytest.mark.xfail(
    raises=AssertionError,
    strict=True,
    reason="gloo in torch 2.13.0 sums the memory between the elements of a strided view",
)
@pytest.mark.parametrize("size", [2, 3])
@SETTINGS
@given(st.data())
def test_all_reduce_of_any_view_is_a_sum(rank_pool: Any, size: int, data: Any) -> None:
    x = data.draw(per_rank_tensors(size, shape=(2,)))
    assert_same(rank_pool(size, timeout=120.0).run(all_reduce, x), oracles.all_reduce(x.values, "sum"))
