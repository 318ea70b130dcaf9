"""A precision is a row in a table, and casts what its fields say and nothing else."""

import dataclasses
import threading
from collections import namedtuple
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from torch import nn

from fabric import Fabric
from fabric.errors import ConfigurationError
from fabric.precision import (
    PRECISION_ALIASES,
    PRECISIONS,
    Precision,
    cast_inputs,
    cast_outputs,
    parse_precision,
)
from fabric.strategies import DataParallelStrategy, DDPStrategy, FSDPStrategy
from tests.ranks import run_in_ranks

Pair = namedtuple("Pair", "left right")


@dataclasses.dataclass
class Batch:
    image: torch.Tensor
    label: torch.Tensor
    name: str = "x"


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        (None, "32-true"),
        (32, "32-true"),
        ("32", "32-true"),
        (64, "64-true"),
        ("64", "64-true"),
        (16, "16-mixed"),
        ("16", "16-mixed"),
        ("bf16", "bf16-mixed"),
        ("BF16-Mixed", "bf16-mixed"),
        *[(name, name) for name in PRECISIONS],
    ],
)
def test_names_and_aliases_find_their_row(alias, name):
    assert parse_precision(alias) is PRECISIONS[name]
    assert PRECISIONS[name].name == name


def test_a_row_of_the_users_own_is_returned_unchanged_and_frozen():
    row = Precision(name="mine", param_dtype=torch.float64)
    assert parse_precision(row) is row
    with pytest.raises(dataclasses.FrozenInstanceError):
        row.name = "other"


@pytest.mark.parametrize(
    "value", ["fp16", "8", 8, 0, True, False, "", "16-mix", 16.0, torch.float16, "bf16true"]
)
def test_an_unknown_precision_is_refused_with_the_valid_names(value):
    with pytest.raises(ConfigurationError) as caught:
        parse_precision(value)
    error = caught.value
    assert error.request == f"precision={value!r}"
    for name in (*PRECISIONS, *PRECISION_ALIASES):
        assert repr(name) in error.expected


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("64-true", torch.float64), ("16-true", torch.float16), ("bf16-true", torch.bfloat16)],
)
def test_true_precisions_convert_floating_state_and_nothing_else(name, dtype):
    module = nn.BatchNorm1d(2)
    weight = module.weight
    module.register_buffer("mask", torch.tensor([True, False]))
    PRECISIONS[name].convert_module(module)
    assert module.weight is weight
    assert weight.dtype is dtype
    assert module.running_mean.dtype is dtype
    assert module.num_batches_tracked.dtype is torch.int64
    assert module.mask.dtype is torch.bool


@pytest.mark.parametrize("name", ["32-true", "16-mixed", "bf16-mixed"])
def test_mixed_precisions_and_32_true_leave_parameters_as_they_were_built(name):
    module = nn.Linear(1, 1).double()
    module.register_buffer("phase", torch.ones(1, dtype=torch.complex64))
    PRECISIONS[name].convert_module(module)
    assert module.weight.dtype is torch.float64
    assert module.phase.dtype is torch.complex64


@pytest.mark.parametrize("name", ["64-true", "16-true", "bf16-true"])
def test_complex_tensors_do_not_lose_their_imaginary_part(name):
    layer = nn.Linear(1, 1)
    layer.register_buffer("phase", torch.full((1,), 1j, dtype=torch.complex64))
    spectrum = nn.Parameter(torch.full((1,), 2j, dtype=torch.complex64))
    layer.register_parameter("spectrum", spectrum)
    PRECISIONS[name].convert_module(nn.Sequential(layer))
    assert layer.weight.dtype is PRECISIONS[name].param_dtype
    assert layer.phase.item() == 1j
    assert layer.spectrum.item() == 2j


@pytest.mark.parametrize(
    ("name", "dtype"), [("16-mixed", torch.float16), ("bf16-mixed", torch.bfloat16)]
)
def test_mixed_precisions_run_in_autocast_and_can_be_entered_again(name, dtype):
    layer = nn.Linear(2, 2)
    for _ in range(2):
        with PRECISIONS[name].forward_context("cpu"):
            assert layer(torch.ones(1, 2)).dtype is dtype
    assert layer(torch.ones(1, 2)).dtype is torch.float32
    assert layer.weight.dtype is torch.float32


def test_true_precisions_have_no_autocast():
    for name in ("32-true", "64-true", "16-true", "bf16-true"):
        with PRECISIONS[name].forward_context("cpu"):
            assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("field", ["param_dtype", "compute_dtype", "reduce_dtype", "output_dtype"])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int64, torch.complex64])
def test_a_dtype_that_torch_does_not_train_in_is_refused(field, dtype):
    with pytest.raises(ConfigurationError) as caught:
        Precision(name="mine", **{field: dtype})
    assert f"{field}={dtype}" in str(caught.value)


def test_autocast_to_float32_is_refused():
    # torch would warn and compute without autocast.
    with pytest.raises(ConfigurationError, match=r"compute_dtype=torch\.float32"):
        Precision(name="mine", compute_dtype=torch.float32)


def test_only_16_mixed_scales_the_loss():
    assert [name for name, row in PRECISIONS.items() if row.loss_scale] == ["16-mixed"]


# -- inputs ----------------------------------------------------------------------------------------


def test_inputs_of_the_right_dtype_pass_without_a_copy():
    args = (torch.ones(2), torch.ones(2).long(), torch.ones(1).bool())
    kwargs = {}
    cast_args, cast_kwargs = cast_inputs(torch.float32, args, kwargs)
    assert cast_args is args
    assert cast_kwargs is kwargs


def test_floating_inputs_are_cast_at_any_depth():
    nested = {
        "list": [torch.ones(1)],
        "pair": Pair(torch.ones(1).half(), 3),
        "batch": Batch(torch.ones(1), torch.ones(1).int()),
    }
    (tensor, text, number), kwargs = cast_inputs(
        torch.float64, (torch.ones(2), "text", 1.5), {"nested": nested}
    )
    assert tensor.dtype is torch.float64
    assert text == "text"
    assert number == 1.5
    nested = kwargs["nested"]
    assert nested["list"][0].dtype is torch.float64
    assert nested["pair"].left.dtype is torch.float64
    assert nested["batch"].image.dtype is torch.float64
    assert nested["batch"].label.dtype is torch.int32
    assert nested["batch"].name == "x"


@pytest.mark.parametrize(
    "dtype", [torch.int8, torch.int64, torch.uint8, torch.bool, torch.complex64]
)
def test_other_dtypes_are_never_cast(dtype):
    tensor = torch.ones(2).to(dtype)
    (cast,), kwargs = cast_inputs(torch.bfloat16, (tensor,), {"x": tensor})
    assert cast is tensor
    assert kwargs["x"] is tensor


def test_a_container_that_a_forward_pass_fills_stays_the_object_of_the_caller():
    cache = {"keys": [torch.ones(1)]}
    hidden = []
    (_, cast), kwargs = cast_inputs(
        torch.float32, (torch.ones(1).double(), cache), {"hidden": hidden}
    )
    assert cast is cache
    assert kwargs["hidden"] is hidden


def test_gradients_flow_back_through_the_cast():
    x = torch.ones(2, requires_grad=True)
    (cast,), _ = cast_inputs(torch.float64, (x,), {})
    cast.sum().backward()
    assert x.grad.dtype is torch.float32


# -- outputs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_outputs_are_cast_to_float32_at_any_depth(dtype):
    tensor = torch.ones(1, dtype=dtype)
    assert cast_outputs(torch.float32, tensor).dtype is torch.float32
    output = cast_outputs(torch.float32, {"list": [tensor], "pair": Pair(tensor, 1)})
    assert output["list"][0].dtype is torch.float32
    assert output["pair"].left.dtype is torch.float32


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.int64, torch.bool, torch.complex64]
)
def test_outputs_of_more_bits_and_of_no_floats_are_returned_unchanged(dtype):
    tensor = torch.ones(2).to(dtype)
    output = [tensor, {"x": tensor}, None, "text"]
    assert cast_outputs(torch.float32, tensor) is tensor
    assert cast_outputs(torch.float32, output) is output


# -- a precision of the user's own -----------------------------------------------------------------


class RoundedPrecision(Precision):
    """A precision that halves parameters in setup, and records the threads of forward passes."""

    threads: ClassVar[list[int]] = []

    def convert_module(self, module: nn.Module) -> None:
        super().convert_module(module)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.mul_(0.5)

    @contextmanager
    def forward_context(self, device_type: str) -> Iterator[None]:
        assert device_type == "cpu"
        self.threads.append(threading.get_ident())
        with super().forward_context(device_type):
            yield


class Probe(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        assert threading.get_ident() in RoundedPrecision.threads
        return super().forward(input)


def train_with(fabric: Fabric) -> tuple[float, int]:
    """Return a parameter after setup, and the number of contexts of one forward pass."""
    RoundedPrecision.threads.clear()
    module = Probe(1, 1, bias=False)
    nn.init.ones_(module.weight)
    model = fabric.setup(module)
    weight = fabric.strategy.get_module_state_dict(model.module)["weight"].item()
    loss = model(torch.ones(2, 1)).sum()
    fabric.backward(loss)
    return weight, len(RoundedPrecision.threads)


DTYPES = [
    {},
    {"compute_dtype": torch.bfloat16, "output_dtype": torch.float32, "reduce_dtype": torch.float32},
]


@pytest.mark.parametrize("dtypes", DTYPES, ids=["true", "mixed"])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_both_methods_of_a_precision_are_called_on_every_rank(strategy, dtypes):
    precision = RoundedPrecision(name="rounded", **dtypes)
    for weight, contexts in run_in_ranks(train_with, strategy=strategy, precision=precision):
        assert weight == 0.5
        assert contexts == 1


@pytest.mark.parametrize("dtypes", DTYPES, ids=["true", "mixed"])
def test_both_methods_of_a_precision_are_called_on_one_device(dtypes):
    with Fabric(accelerator="cpu", precision=RoundedPrecision(name="rounded", **dtypes)) as fabric:
        assert train_with(fabric) == (0.5, 1)


@pytest.mark.parametrize("dtypes", DTYPES, ids=["true", "mixed"])
def test_the_context_of_a_precision_is_entered_in_the_thread_of_each_replica(dtypes):
    precision = RoundedPrecision(name="rounded", **dtypes)
    with Fabric(accelerator="cpu", strategy="dp", devices=2, precision=precision) as fabric:
        # The contexts of the caller's thread and of the threads of two replicas.
        assert train_with(fabric) == (0.5, 3)


def test_fabric_autocast_enters_the_context_of_a_precision():
    RoundedPrecision.threads.clear()
    with (
        Fabric(accelerator="cpu", precision=RoundedPrecision(name="rounded")) as fabric,
        fabric.autocast(),
    ):
        assert len(RoundedPrecision.threads) == 1


def test_a_strategy_alone_warns_at_its_callers_line_that_it_does_not_scale_the_loss():
    strategy = FSDPStrategy(precision="16-mixed")
    strategy.setup_environment()
    try:
        with pytest.warns(UserWarning, match="does not scale the loss") as warnings:
            strategy.setup(SimpleNamespace(model=nn.Linear(1, 1), optimizers=[]))
        assert [warning.filename for warning in warnings] == [__file__]
    finally:
        strategy.teardown()


@pytest.mark.parametrize("strategy_class", [DataParallelStrategy, DDPStrategy, FSDPStrategy])
def test_a_strategy_alone_refuses_a_precision_whose_context_it_would_not_enter(strategy_class):
    strategy = strategy_class(precision=RoundedPrecision(name="rounded"))
    strategy.setup_environment()
    try:
        with pytest.raises(ConfigurationError, match="forward context"):
            strategy.setup(SimpleNamespace(model=nn.Linear(1, 1), optimizers=[]))
    finally:
        strategy.teardown()
