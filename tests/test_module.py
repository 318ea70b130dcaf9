"""A module that was set up behaves as the user's module does."""

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from fabric import Fabric, FabricModule
from fabric.errors import ArgumentTypeError
from fabric.strategies import DDPStrategy, FSDPStrategy
from tests.models import Net
from tests.ranks import outcome, run_in_ranks


@pytest.fixture(params=["single_device", "ddp"])
def fabric(request: pytest.FixtureRequest) -> Iterator[Fabric]:
    with Fabric(accelerator="cpu", strategy=request.param, devices=1) as fabric:
        yield fabric


@pytest.fixture
def net() -> Net:
    return Net()


@pytest.fixture
def model(fabric: Fabric, net: Net) -> FabricModule:
    return fabric.setup(net)


def test_names_are_those_of_the_users_module(model: FabricModule, net: Net) -> None:
    assert list(dict(model.named_parameters())) == list(dict(net.named_parameters()))
    assert list(dict(model.named_modules())) == list(dict(net.named_modules()))
    assert list(model.state_dict()) == list(net.state_dict())
    for parameter, expected in zip(model.parameters(), net.parameters(), strict=True):
        assert parameter is expected


def test_names_inside_another_module_have_no_prefix_but_that_modules(
    model: FabricModule, net: Net
) -> None:
    outer = nn.ModuleDict({"net": model})
    assert list(outer.state_dict()) == [f"net.{name}" for name in net.state_dict()]
    parameter_names = [f"net.{name}" for name, _ in net.named_parameters()]
    assert list(dict(outer.named_parameters())) == parameter_names
    state_of_ones = {name: torch.ones_like(value) for name, value in outer.state_dict().items()}
    outer.load_state_dict(state_of_ones)
    assert net.head.bias.item() == 1


def test_attributes_read_and_write_through(model: FabricModule, net: Net) -> None:
    assert model.width == 8
    model.width = 3
    model.head = nn.Linear(8, 2)
    assert net.width == 3
    assert net.head.out_features == 2
    assert model(torch.ones(1, 4)).shape == (1, 2)
    del model.width
    assert not hasattr(net, "width")
    assert model.module is net


def test_a_missing_attribute_is_named_as_the_users(model: FabricModule) -> None:
    with pytest.raises(AttributeError, match="'Net' object has no attribute 'depth'"):
        _ = model.depth


def test_modes_reach_the_users_module(model: FabricModule, net: Net) -> None:
    assert model.eval() is model
    assert not net.training
    assert not net.head.training
    assert not model.training
    assert model.train().training
    assert net.training


def test_to_apply_and_requires_grad_reach_the_users_module(model: FabricModule, net: Net) -> None:
    assert model.to("cpu", torch.float32) is model
    net.double()
    assert model.double() is model
    modules: list[nn.Module] = []
    assert model.apply(modules.append) is model
    assert net in modules
    assert model not in modules
    model.requires_grad_(False)
    assert not net.head.weight.requires_grad


def test_hooks_registered_on_it_land_on_the_users_module(model: FabricModule, net: Net) -> None:
    calls = []
    model.register_forward_hook(lambda module, args, output: calls.append(module))
    model.register_full_backward_hook(lambda module, *_: calls.append(module))
    model(torch.ones(1, 4, requires_grad=True)).sum().backward()
    assert calls == [net, net]


def test_a_copy_shares_nothing_with_the_model(model: FabricModule, net: Net) -> None:
    copied = copy.deepcopy(model)
    assert isinstance(copied, FabricModule)
    with torch.no_grad():
        copied.head.bias.fill_(7)
        expected = model(torch.ones(1, 4)) + 7 - net.head.bias
    assert net.head.bias.item() != 7
    torch.testing.assert_close(copied(torch.ones(1, 4)), expected)


def test_a_pickle_gives_the_users_module_back(model: FabricModule, net: Net) -> None:
    loaded = pickle.loads(pickle.dumps(model))
    assert torch.equal(loaded(torch.ones(1, 4)), net(torch.ones(1, 4)))
    assert type(loaded.module) is Net


def test_a_module_may_be_compiled_before_setup(fabric: Fabric, net: Net) -> None:
    expected = net(torch.ones(2, 4)).sum().detach()
    model = fabric.setup(torch.compile(net, backend="aot_eager"))
    assert list(model.state_dict()) == list(net.state_dict())
    loss = model(torch.ones(2, 4)).sum()
    torch.testing.assert_close(loss.detach(), expected)
    fabric.backward(loss)
    assert net.encoder.weight.grad is not None


def test_a_module_may_be_compiled_after_setup(fabric: Fabric, net: Net) -> None:
    expected = net(torch.ones(2, 4)).sum().detach()
    model = torch.compile(fabric.setup(net), backend="aot_eager")
    loss = model(torch.ones(2, 4)).sum()
    torch.testing.assert_close(loss.detach(), expected)
    fabric.backward(loss)
    assert net.encoder.weight.grad is not None


def test_a_method_that_is_a_forward_pass_gets_the_precision() -> None:
    with Fabric(accelerator="cpu", precision="bf16-mixed", environment="none") as fabric:
        net = Net()
        dtypes = []
        net.head.register_forward_hook(lambda module, args, output: dtypes.append(output.dtype))
        model = fabric.setup(net)
        assert model.training_step(torch.ones(1, 4)).dtype is torch.float32
        model.mark_forward_method(model.loss)
        model.loss(torch.ones(1, 4))
        assert dtypes == [torch.bfloat16, torch.bfloat16]
        assert "forward" not in net.__dict__


def test_a_forward_method_that_raises_leaves_forward_as_it_was(
    model: FabricModule, net: Net
) -> None:
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        model.training_step(torch.ones(1, 5))
    assert "forward" not in net.__dict__
    assert model(torch.ones(1, 4)).shape == (1, 1)


@pytest.mark.parametrize("method", ["nonsense", "width", "forward"])
def test_what_is_no_method_cannot_be_marked(model: FabricModule, method: str) -> None:
    with pytest.raises(ArgumentTypeError, match=method):
        model.mark_forward_method(method)


@pytest.mark.parametrize(
    ("precision", "input_dtype", "compute_dtype", "output_dtype"),
    [
        ("32-true", torch.float64, torch.float32, torch.float32),
        ("64-true", torch.float32, torch.float64, torch.float64),
        ("bf16-true", torch.float32, torch.bfloat16, torch.bfloat16),
        ("16-true", torch.float32, torch.float16, torch.float16),
        ("bf16-mixed", torch.float32, torch.bfloat16, torch.float32),
        ("16-mixed", torch.float32, torch.float16, torch.float32),
    ],
)
def test_dtypes_of_a_forward_pass(
    precision: str,
    input_dtype: torch.dtype,
    compute_dtype: torch.dtype,
    output_dtype: torch.dtype,
) -> None:
    with Fabric(accelerator="cpu", precision=precision, environment="none") as fabric:
        net = Net()
        dtypes = []
        net.head.register_forward_hook(lambda module, args, output: dtypes.append(output.dtype))
        model = fabric.setup(net)
        assert model(torch.ones(1, 4, dtype=input_dtype)).dtype is output_dtype
        assert dtypes == [compute_dtype]
        assert net.steps.dtype is torch.int64


def test_full_precision_leaves_parameters_as_they_were_built() -> None:
    with Fabric(accelerator="cpu", environment="none") as fabric:
        model = fabric.setup(Net().double())
        assert model(torch.ones(1, 4)).dtype is torch.float64


@pytest.mark.parametrize(
    "net", [nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1).half()), nn.ReLU()], ids=str
)
def test_inputs_stay_as_they_are_where_parameters_have_no_dtype_in_common(net: nn.Module) -> None:
    with Fabric(accelerator="cpu", environment="none") as fabric:
        dtypes = []
        net.register_forward_pre_hook(lambda _, args: dtypes.append(args[0].dtype))
        net.forward = lambda x: x
        fabric.setup(net)(torch.ones(1, 4, dtype=torch.float64))
        assert dtypes == [torch.float64]


# -- conversions after setup -----------------------------------------------------------------------


def convert_after_setup(fabric: Fabric) -> dict[str, str]:
    model = fabric.setup(Net())
    texts = {
        "double": outcome(model.double),
        "float": outcome(model.float),
        "half": outcome(model.half),
        "bfloat16": outcome(model.bfloat16),
        "cpu": outcome(model.cpu),
        "to": outcome(lambda: model.to(torch.float64)),
        "type": outcome(lambda: model.type(torch.float64)),
        "to the same dtype": outcome(lambda: model.to("cpu", torch.float32)),
    }
    fabric.backward(model(torch.ones(2, 4)).sum())
    return texts


@pytest.mark.timeout(90)
@pytest.mark.parametrize("strategy", [FSDPStrategy, DDPStrategy])
def test_a_change_of_the_dtype_is_refused_where_gradients_are_synchronized(
    strategy: type[FSDPStrategy | DDPStrategy],
) -> None:
    for texts in run_in_ranks(convert_after_setup, strategy=strategy(start_method="forkserver")):
        for name in ("float", "cpu", "to the same dtype"):
            assert texts.pop(name) == "fine"
        for text in texts.values():
            assert text != "fine"
        for name in ("to", "type"):
            assert "synchronized in torch.float32, and would then be torch.float64" in texts[name]


def test_a_change_of_the_dtype_applies_to_the_next_forward_pass_on_one_device() -> None:
    with Fabric(accelerator="cpu", devices=1) as fabric:
        model = fabric.setup(Net())
        assert model.double()(torch.ones(2, 4)).dtype is torch.float64
        assert model.to(torch.bfloat16)(torch.ones(2, 4)).dtype is torch.bfloat16


# -- containers and methods ------------------------------------------------------------------------


def test_a_container_that_was_set_up_is_a_container() -> None:
    with Fabric(accelerator="cpu", devices=1) as fabric:
        layers = [nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)]
        model: Any = fabric.setup(nn.Sequential(*layers))
    assert len(model) == 3
    assert model[0] is layers[0]
    assert list(model) == layers
    assert model[-1] in model
    assert len(model[:2]) == 2


def test_a_module_without_a_length_is_true_and_is_no_container() -> None:
    with Fabric(accelerator="cpu", devices=1) as fabric:
        model: Any = fabric.setup(Net())
    assert model
    for action in (lambda: len(model), lambda: model[0], lambda: iter(model)):
        assert "Net" in outcome(action)


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x)


def call_method(fabric: Fabric) -> str:
    model: Any = fabric.setup(Tower())
    return outcome(lambda: fabric.backward(model.encode(torch.ones(2, 5)).sum()))


@pytest.mark.timeout(90)
@pytest.mark.parametrize("strategy", [FSDPStrategy, DDPStrategy])
def test_the_error_of_a_method_that_bypasses_the_forward_pass_names_the_method(
    strategy: type[FSDPStrategy | DDPStrategy],
) -> None:
    for text in run_in_ranks(call_method, strategy=strategy(start_method="forkserver")):
        assert "model.encode(...)" in text
        assert "model.head" not in text
