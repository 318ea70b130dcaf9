"""A module that was set up behaves as the user's module does."""

import copy
import pickle
from collections.abc import Iterable, Iterator
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


def names(named: Iterable[tuple[str, Any]]) -> list[str]:
    return [name for name, _ in named]


def test_names_are_those_of_the_users_module(model: FabricModule, net: Net) -> None:
    assert names(model.named_parameters()) == names(net.named_parameters())
    assert names(model.named_modules()) == names(net.named_modules())
    assert list(model.state_dict()) == list(net.state_dict())
    for parameter, expected in zip(model.parameters(), net.parameters(), strict=True):
        assert parameter is expected


def test_names_inside_another_module_have_no_prefix_but_that_modules(
    model: FabricModule, net: Net
) -> None:
    outer = nn.ModuleDict({"net": model})
    state = outer.state_dict()
    assert list(state) == [f"net.{name}" for name in net.state_dict()]
    parameter_names = [f"net.{name}" for name in names(net.named_parameters())]
    assert names(outer.named_parameters()) == parameter_names
    state_of_ones = {name: torch.ones_like(value) for name, value in state.items()}
    outer.load_state_dict(state_of_ones)
    assert net.head.bias.item() == 1


def test_attributes_read_and_write_through(model: FabricModule, net: Net) -> None:
    assert model.width == 8
    model.width = 3
    model.head = nn.Linear(8, 2)
    assert net.width == 3
    assert net.head.out_features == 2
    output = model(torch.ones(1, 4))
    assert output.shape == (1, 2)
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
    assert model.train() is model
    assert model.training
    assert net.training


class FrozenStatistics(nn.Module):
    """A module that keeps its batch normalization in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.head = nn.Linear(2, 1)

    def train(self, mode: bool = True) -> "FrozenStatistics":
        super().train(mode)
        self.norm.eval()
        return self


def test_a_module_may_override_train() -> None:
    with Fabric(accelerator="cpu", devices=1, environment="none") as fabric:
        model = fabric.setup(FrozenStatistics())
        for mode in (False, True):
            assert model.train(mode) is model
            assert model.training == mode
            assert model.head.training == mode
            assert not model.norm.training


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
    x = torch.ones(1, 4, requires_grad=True)
    loss = model(x).sum()
    loss.backward()
    assert calls == [net, net]


def test_a_copy_shares_nothing_with_the_model(model: FabricModule, net: Net) -> None:
    x = torch.ones(1, 4)
    copied = copy.deepcopy(model)
    assert isinstance(copied, FabricModule)
    with torch.no_grad():
        copied.head.bias.fill_(7)
        expected = model(x) + 7 - net.head.bias
    assert net.head.bias.item() != 7
    torch.testing.assert_close(copied(x), expected)


def test_a_pickle_gives_the_users_module_back(model: FabricModule, net: Net) -> None:
    pickled = pickle.dumps(model)
    loaded = pickle.loads(pickled)
    assert type(loaded.module) is Net
    x = torch.ones(1, 4)
    assert torch.equal(loaded(x), net(x))


def test_a_module_may_be_compiled_before_setup(fabric: Fabric, net: Net) -> None:
    x = torch.ones(2, 4)
    expected = net(x).detach()
    compiled = torch.compile(net, backend="aot_eager")
    model = fabric.setup(compiled)
    assert list(model.state_dict()) == list(net.state_dict())
    output = model(x)
    torch.testing.assert_close(output.detach(), expected)
    loss = output.sum()
    fabric.backward(loss)
    assert net.encoder.weight.grad is not None


def test_a_module_may_be_compiled_after_setup(fabric: Fabric, net: Net) -> None:
    x = torch.ones(2, 4)
    expected = net(x).detach()
    model = fabric.setup(net)
    compiled = torch.compile(model, backend="aot_eager")
    output = compiled(x)
    torch.testing.assert_close(output.detach(), expected)
    loss = output.sum()
    fabric.backward(loss)
    assert net.encoder.weight.grad is not None


def record_dtypes(module: nn.Module) -> list[torch.dtype]:
    """Return a list to which each forward pass of a module adds the dtype of its output."""
    dtypes: list[torch.dtype] = []
    module.register_forward_hook(lambda module, args, output: dtypes.append(output.dtype))
    return dtypes


def test_a_method_that_is_a_forward_pass_gets_the_precision() -> None:
    x = torch.ones(1, 4)
    with Fabric(accelerator="cpu", precision="bf16-mixed", environment="none") as fabric:
        net = Net()
        dtypes = record_dtypes(net.head)
        model = fabric.setup(net)
        loss = model.training_step(x)
        assert loss.dtype is torch.float32
        model.mark_forward_method(model.loss)
        model.loss(x)
        assert dtypes == [torch.bfloat16, torch.bfloat16]
        assert "forward" not in net.__dict__


def test_a_forward_method_that_raises_leaves_forward_as_it_was(
    model: FabricModule, net: Net
) -> None:
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        model.training_step(torch.ones(1, 5))
    assert "forward" not in net.__dict__
    output = model(torch.ones(1, 4))
    assert output.shape == (1, 1)


@pytest.mark.parametrize("method", ["nonsense", "width", "forward"])
def test_a_name_that_is_no_method_cannot_be_marked(model: FabricModule, method: str) -> None:
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
        dtypes = record_dtypes(net.head)
        model = fabric.setup(net)
        x = torch.ones(1, 4, dtype=input_dtype)
        output = model(x)
        assert output.dtype is output_dtype
        assert dtypes == [compute_dtype]
        assert net.steps.dtype is torch.int64


def test_full_precision_leaves_parameters_as_they_were_built() -> None:
    with Fabric(accelerator="cpu", environment="none") as fabric:
        net = Net().double()
        model = fabric.setup(net)
        output = model(torch.ones(1, 4))
        assert output.dtype is torch.float64


def net_of_two_dtypes() -> nn.Module:
    float32_layer = nn.Linear(4, 4)
    float16_layer = nn.Linear(4, 1).half()
    return nn.Sequential(float32_layer, float16_layer)


@pytest.mark.parametrize(
    "net",
    [net_of_two_dtypes(), nn.ReLU()],
    ids=["two dtypes", "no dtype"],
)
def test_inputs_stay_as_they_are_where_parameters_have_no_dtype_in_common(net: nn.Module) -> None:
    with Fabric(accelerator="cpu", environment="none") as fabric:
        net.forward = lambda x: x
        dtypes = record_dtypes(net)
        model = fabric.setup(net)
        x = torch.ones(1, 4, dtype=torch.float64)
        model(x)
        assert dtypes == [torch.float64]


# -- conversions after setup -----------------------------------------------------------------------


def convert_after_setup(fabric: Fabric) -> dict[str, str]:
    module = Net()
    model = fabric.setup(module)
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
    output = model(torch.ones(2, 4))
    loss = output.sum()
    fabric.backward(loss)
    return texts


@pytest.mark.parametrize("strategy_class", [FSDPStrategy, DDPStrategy])
def test_a_change_of_the_dtype_is_refused_where_gradients_are_synchronized(
    strategy_class: type[FSDPStrategy | DDPStrategy],
) -> None:
    strategy = strategy_class(start_method="forkserver")
    for texts in run_in_ranks(convert_after_setup, strategy=strategy):
        for name in ("float", "cpu", "to the same dtype"):
            assert texts.pop(name) == "fine"
        for text in texts.values():
            assert text != "fine"
        for name in ("to", "type"):
            assert "synchronized in torch.float32, and would then be torch.float64" in texts[name]


def test_a_change_of_the_dtype_applies_to_the_next_forward_pass_on_one_device() -> None:
    x = torch.ones(2, 4)
    with Fabric(accelerator="cpu", devices=1) as fabric:
        module = Net()
        model = fabric.setup(module)
        model.double()
        assert model(x).dtype is torch.float64
        model.to(torch.bfloat16)
        assert model(x).dtype is torch.bfloat16


# -- containers and methods ------------------------------------------------------------------------


def test_a_container_that_was_set_up_is_a_container() -> None:
    with Fabric(accelerator="cpu", devices=1) as fabric:
        layers = [
            nn.Linear(4, 4),
            nn.ReLU(),
            nn.Linear(4, 2),
        ]
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
    texts = [
        outcome(lambda: len(model)),
        outcome(lambda: model[0]),
        outcome(lambda: iter(model)),
    ]
    for text in texts:
        assert "Net" in text


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x)


def train_on_output_of_method(fabric: Fabric) -> str:
    model: Any = fabric.setup(Tower())

    def train() -> None:
        output = model.encode(torch.ones(2, 5))
        loss = output.sum()
        fabric.backward(loss)

    return outcome(train)


@pytest.mark.parametrize("strategy_class", [FSDPStrategy, DDPStrategy])
def test_the_error_of_a_method_that_bypasses_the_forward_pass_names_the_method(
    strategy_class: type[FSDPStrategy | DDPStrategy],
) -> None:
    strategy = strategy_class(start_method="forkserver")
    for text in run_in_ranks(train_on_output_of_method, strategy=strategy):
        assert "model.encode(...)" in text
        assert "model.head" not in text


def test_parameters_that_torch_cannot_exchange_are_named_with_a_remedy_that_works() -> None:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        with Fabric(accelerator="cpu", devices=1) as fabric:
            model = fabric.setup(nn.Linear(2, 1))
            fabric.backward(model(torch.ones(1, 2)).mean())
            with pytest.raises(RuntimeError, match="Cannot swap") as caught:
                model.load_state_dict(model.state_dict())
            # As the end of the block would call it.
            fabric.strategy.on_exception(caught.value)
            [note] = caught.value.__notes__
            assert "set_swap_module_params_on_conversion(False) after fabric.setup(...)" in note
            torch.__future__.set_swap_module_params_on_conversion(False)
            model.load_state_dict(model.state_dict())
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
