"""Training a module in evaluation mode is a warning in the first steps, on the first rank."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fabric import Fabric
from tests.ranks import run_in_ranks

WARNING = "SGD.step() trains {} in evaluation mode"


class Recurrent(nn.Module):
    """A recurrent layer, of which only the output is returned."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        with warnings.catch_warnings():
            # torch warns of dropout without a second layer.
            warnings.simplefilter("ignore")
            self.rnn = nn.RNN(4, 4, num_layers=num_layers, dropout=0.1)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.rnn(inputs)[0]


class Attention(nn.Module):
    """An attention layer, of which only the output is returned."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, dropout=0.1)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.attention(inputs, inputs, inputs)[0]


class Wrapper(nn.Module):
    """A module around a model, as those of PEFT."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor) -> Tensor:
        return self.model(inputs)


def with_dropout(probability: float = 0.1) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Dropout(probability))


def with_batch_norm(track_running_stats: bool = True) -> nn.Module:
    norm = nn.BatchNorm1d(4, track_running_stats=track_running_stats)
    return nn.Sequential(nn.Linear(4, 4), norm)


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1)


def train(fabric: Fabric, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(3):
        fabric.backward(model(torch.ones(2, 4)).sum())
        optimizer.step()
        optimizer.zero_grad()


def set_up_and_train(fabric: Fabric, net: nn.Module) -> None:
    model, optimizer = fabric.setup(net, sgd(net))
    train(fabric, model, optimizer)


def texts_of_warnings(action: Callable[..., object], *args: object) -> list[str]:
    """Run an action, and return the texts of its warnings. The action must not warn elsewhere."""
    with warnings.catch_warnings(record=True) as records:
        warnings.simplefilter("always")
        action(*args)
    for record in records:
        assert record.filename == __file__
    return [str(record.message) for record in records]


def single(**options: Any) -> Fabric:
    return Fabric(accelerator="cpu", devices=1, environment="none", **options)


@pytest.mark.parametrize(
    "net",
    [
        with_dropout(),
        with_batch_norm(),
        Recurrent(num_layers=2),
        Attention(),
        nn.TransformerEncoderLayer(4, 2, dim_feedforward=4),
    ],
    ids=lambda net: type(net).__name__,
)
def test_a_module_that_is_trained_in_evaluation_mode_is_one_warning(net: nn.Module) -> None:
    net.eval()
    with single() as fabric:
        (text,) = texts_of_warnings(set_up_and_train, fabric, net)
    assert WARNING.format(type(net).__name__) in text
    assert "model.train() before the loop" in text


def test_the_warning_names_a_layer() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.Dropout()).eval()
    with single() as fabric:
        (text,) = texts_of_warnings(set_up_and_train, fabric, net)
    assert "2 layer(s) compute, such as 1 (Dropout)" in text


def train_with_schedule(fabric: Fabric) -> None:
    net = with_dropout().eval()
    model, optimizer = fabric.setup(net, sgd(net))
    torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)
    train(fabric, model, optimizer)


def test_the_warning_names_the_line_of_the_user_also_with_a_schedule() -> None:
    with single() as fabric:
        assert len(texts_of_warnings(train_with_schedule, fabric)) == 1


def test_a_wrapper_in_training_mode_around_a_model_in_evaluation_mode_is_a_warning() -> None:
    with single() as fabric:
        (text,) = texts_of_warnings(set_up_and_train, fabric, Wrapper(with_dropout().eval()))
    assert WARNING.format("Wrapper") in text


@pytest.mark.parametrize(
    "net",
    [
        with_dropout(probability=0.0),
        with_batch_norm(track_running_stats=False),
        Recurrent(num_layers=1),
        nn.Linear(4, 4),
    ],
    ids=lambda net: type(net).__name__,
)
def test_a_module_that_computes_the_same_in_both_modes_is_not_a_warning(net: nn.Module) -> None:
    net.eval()
    with single() as fabric:
        assert texts_of_warnings(set_up_and_train, fabric, net) == []


def test_layers_in_evaluation_mode_in_a_module_in_training_mode_are_not_a_warning() -> None:
    net = with_batch_norm()
    net.get_submodule("1").eval()
    with single() as fabric:
        assert texts_of_warnings(set_up_and_train, fabric, net) == []


def validate_after_each_step(fabric: Fabric) -> None:
    net = with_dropout()
    model, optimizer = fabric.setup(net, sgd(net))
    for _ in range(3):
        fabric.backward(model(torch.ones(2, 4)).sum())
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        model(torch.ones(2, 4))
        model.train()


def test_a_validation_between_the_steps_is_not_a_warning() -> None:
    with single() as fabric:
        assert texts_of_warnings(validate_after_each_step, fabric) == []


def train_between_models_in_evaluation_mode(fabric: Fabric) -> None:
    """Train a generator on a discriminator in evaluation mode, and with a frozen teacher."""
    generator, generator_optimizer = fabric.setup(*with_optimizer(with_dropout()))
    discriminator, discriminator_optimizer = fabric.setup(*with_optimizer(with_dropout()))
    teacher = fabric.setup(with_dropout().eval().requires_grad_(False))
    for _ in range(3):
        discriminator.eval()
        fake = generator(torch.ones(2, 4))
        fabric.backward((discriminator(fake) - teacher(fake)).sum())
        generator_optimizer.step()
        discriminator_optimizer.zero_grad()
        discriminator.train()
        generator.eval()
        fabric.backward(discriminator(torch.ones(2, 4)).sum())
        discriminator_optimizer.step()
        generator.train()
        generator_optimizer.zero_grad()


def with_optimizer(net: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    return net, sgd(net)


def test_models_that_a_step_does_not_train_are_not_a_warning() -> None:
    with single() as fabric:
        assert texts_of_warnings(train_between_models_in_evaluation_mode, fabric) == []


def test_evaluation_mode_is_not_a_warning_if_the_checks_are_turned_off() -> None:
    with single(check_training=False) as fabric:
        assert texts_of_warnings(set_up_and_train, fabric, with_dropout().eval()) == []


def train_on_rank(fabric: Fabric) -> list[str]:
    fabric.seed_everything(0, per_rank="after_setup")
    net = nn.Sequential(nn.Linear(4, 4), nn.Dropout()).eval()
    model, optimizer = fabric.setup(net, sgd(net))
    inputs = torch.randn(2, 4)

    def train_on_own_inputs() -> None:
        for _ in range(3):
            fabric.backward(model(inputs).square().mean())
            optimizer.step()
            optimizer.zero_grad()

    return texts_of_warnings(train_on_own_inputs)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_only_the_first_rank_warns_of_evaluation_mode(strategy: str) -> None:
    first, second = run_in_ranks(train_on_rank, strategy=strategy)
    (text,) = first
    assert WARNING.format("Sequential") in text
    assert second == []


def test_a_resumed_run_is_checked_again(tmp_path: Path) -> None:
    with single() as fabric:
        model, optimizer = fabric.setup(*with_optimizer(with_dropout()))
        assert texts_of_warnings(train, fabric, model, optimizer) == []
        fabric.save(tmp_path / "checkpoint", {"model": model, "optimizer": optimizer})
    with single() as fabric:
        model, optimizer = fabric.setup(*with_optimizer(with_dropout().eval()))
        fabric.load(tmp_path / "checkpoint", {"model": model, "optimizer": optimizer})
        (text,) = texts_of_warnings(train, fabric, model, optimizer)
    assert "model.train() before the loop" in text


def test_the_warning_can_be_filtered() -> None:
    with single() as fabric, warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", ".*in evaluation mode")
        set_up_and_train(fabric, with_dropout().eval())
