"""The collectives of Lightning Fabric under the laws of fabric.testing, on 2 and 3 processes.

``pytest examples/testing/test_lightning_fabric.py`` runs the laws. With ``--runxfail`` it reports
what they find in lightning-fabric 2.6.6.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fabric.testing import assert_same, oracles
from fabric.testing.generators import per_rank_tensors

lightning_fabric = pytest.importorskip("lightning_fabric")

# The examples are the same in every run.
SETTINGS = settings(deadline=None, max_examples=25, derandomize=True, database=None, report_multiple_bugs=False)
# gloo has no int16.
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool])
# lightning-fabric 2.6.6 calls a function that torch 2.13.0 has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed.nn.functional")


def pool_of(rank_pool: Any, size: int) -> Any:
    """Return ranks that are forked from a process with Lightning Fabric loaded."""
    return rank_pool(size, preload=["lightning_fabric"], timeout=120.0)


def connect() -> Any:
    """Return the Fabric of this rank. It uses the process group that the rank has joined."""
    fabric = lightning_fabric.Fabric(accelerator="cpu", devices=dist.get_world_size())
    fabric.launch()
    return fabric


def gather(_: Any, x: Tensor) -> Tensor:
    return connect().all_gather(x)


def reduce(_: Any, x: Tensor, op: str) -> Tensor:
    return connect().all_reduce(x, reduce_op=op)


def gradient(_: Any, x: Tensor) -> Tensor:
    x.requires_grad_()
    connect().all_gather(x, sync_grads=True).square().sum().backward()
    assert x.grad is not None
    return x.grad


@pytest.mark.parametrize("size", [2, 3])
@SETTINGS
@given(st.data())
def test_tensors_are_gathered(rank_pool: Any, size: int, data: Any) -> None:
    x = data.draw(per_rank_tensors(size, DTYPES))
    results = pool_of(rank_pool, size).run(gather, x)
    assert_same(results, oracles.all_gather(x.values))


@pytest.mark.parametrize("size", [2, 3])
@SETTINGS
@given(st.data())
def test_a_gather_has_the_gradient_of_all_losses(rank_pool: Any, size: int, data: Any) -> None:
    x = data.draw(per_rank_tensors(size, torch.float64, shape=(2,)))

    def losses(inputs: list[Tensor]) -> list[Tensor]:
        return [rows.square().sum() for rows in oracles.all_gather(inputs)]

    results = pool_of(rank_pool, size).run(gradient, x)
    assert_same(results, oracles.gradients(losses, x.values))


@pytest.mark.xfail(
    raises=AssertionError,
    strict=True,
    reason="lightning-fabric 2.6.6 reduces the memory between the elements of a strided view",
)
@pytest.mark.parametrize("size", [2, 3])
@SETTINGS
@given(st.data())
def test_views_are_reduced(rank_pool: Any, size: int, data: Any) -> None:
    x = data.draw(per_rank_tensors(size, shape=(2,)))
    results = pool_of(rank_pool, size).run(reduce, x, "mean")
    assert_same(results, oracles.all_reduce(x.values, "mean"), rtol=1e-6)


@pytest.mark.xfail(
    raises=AssertionError,
    strict=True,
    reason="lightning-fabric 2.6.6 rounds the mean of integers towards zero",
)
@pytest.mark.parametrize("size", [2, 3])
@SETTINGS
@given(st.data())
def test_means_of_integers_are_exact(rank_pool: Any, size: int, data: Any) -> None:
    x = data.draw(per_rank_tensors(size, torch.int64, shape=(1,)))
    results = pool_of(rank_pool, size).run(reduce, x, "mean")
    expected = oracles.all_reduce(x.values, "mean")
    # The comparison is of values: it says nothing of the dtype.
    assert_same([result.float() for result in results], expected, rtol=1e-6)
