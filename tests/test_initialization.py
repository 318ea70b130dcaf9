"""Modules and tensors are created where and as asked, and nothing is changed once the context is left."""

import pytest
import torch
from torch import nn

from fabric.initialization import created_on

CPU, META = torch.device("cpu"), torch.device("meta")


def test_new_tensors_are_made_on_the_device_and_in_the_dtype():
    with created_on(META, torch.bfloat16):
        layer, count = nn.Linear(2, 2), torch.arange(3)
        explicit = torch.ones(1, device="cpu", dtype=torch.float64)
    assert (layer.weight.device, layer.weight.dtype) == (META, torch.bfloat16)
    assert (count.device, count.dtype) == (META, torch.int64)
    assert (explicit.device, explicit.dtype) == (CPU, torch.float64)


def test_values_are_those_of_a_plain_construction():
    with created_on(CPU, torch.float64):
        torch.manual_seed(3)
        inside = nn.Linear(4, 4)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        torch.manual_seed(3)
        plain = nn.Linear(4, 4)
    finally:
        torch.set_default_dtype(before)
    assert torch.equal(inside.weight, plain.weight)


def test_leaving_restores_everything_also_on_an_error():
    with pytest.raises(KeyError), created_on(META, torch.float16, empty=True):
        raise KeyError
    assert torch.get_default_dtype() is torch.float32
    layer = nn.Linear(2, 2)
    assert (layer.weight.device, layer.weight.dtype) == (CPU, torch.float32)


def test_contexts_nest():
    with created_on(META, torch.float16):
        with created_on(CPU, torch.float64):
            assert torch.ones(1).dtype is torch.float64
            assert torch.ones(1).device == CPU
        assert (torch.ones(1).dtype, torch.ones(1).device) == (torch.float16, META)
    assert torch.ones(1).dtype is torch.float32


def test_without_a_dtype_the_default_stays():
    with created_on(CPU):
        assert torch.ones(1).dtype is torch.get_default_dtype()


def test_empty_draws_no_random_numbers_in_common_layers():
    state = torch.get_rng_state()
    with created_on(CPU, empty=True):
        nn.Sequential(nn.Linear(4, 4), nn.Conv2d(2, 2, 3), nn.Embedding(4, 2), nn.LSTM(2, 2))
    assert torch.equal(torch.get_rng_state(), state)


def test_empty_still_fills_with_constants():
    with created_on(CPU, empty=True):
        norm = nn.BatchNorm1d(3)
        buffer = nn.init.constant_(torch.empty(2), 5.0)
    assert norm.weight.tolist() == [1.0] * 3
    assert norm.running_mean.tolist() == [0.0] * 3
    assert buffer.tolist() == [5.0, 5.0]


@pytest.mark.parametrize("call", [lambda t: nn.init.normal_(t), lambda t: nn.init.normal_(tensor=t, std=2.0)])
def test_skipped_functions_return_the_tensor_itself(call):
    tensor = torch.full((2,), 3.0)
    with created_on(CPU, empty=True):
        assert call(tensor) is tensor
    assert tensor.tolist() == [3.0, 3.0]
