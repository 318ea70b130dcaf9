"""DDP on real processes: its contract beyond equal numbers, which tests/test_parity.py shows."""

import contextlib
import math
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from torch.func import functional_call, grad, vmap
from torch.nn.utils.prune import l1_unstructured, remove

from fabric import Fabric
from fabric.errors import ConfigurationError
from fabric.strategies import DDPStrategy
from tests.models import Net, OneWeight, PartlyUnused
from tests.ranks import outcome, remedy, run_in_ranks


def make(fabric: Fabric, net: nn.Module) -> tuple[Any, torch.optim.Optimizer]:
    return fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))


def one_step(fabric: Fabric) -> torch.Tensor:
    """Return the parameters after one step on data that differs between ranks."""
    torch.manual_seed(0)
    model, optimizer = make(fabric, Net())
    torch.manual_seed(fabric.global_rank)
    loss = model(torch.randn(4, 4)).pow(2).mean()
    fabric.backward(loss)
    optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def gradients_of_samples(
    module: nn.Module, parameters: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    def loss(parameters: dict[str, torch.Tensor], sample: torch.Tensor) -> torch.Tensor:
        return functional_call(module, parameters, (sample,)).pow(2).sum()

    samples = torch.arange(8.0).view(2, 4)
    return vmap(grad(loss), in_dims=(None, 0))(parameters, samples)


INPUTS = torch.ones(2, 4)


def losses_by_way(net: nn.Module, model: Any, weight_model: Any) -> dict[str, Callable[[], Any]]:
    """Return functions that compute a loss, by the way that the forward pass goes.

    ``model`` is the prepared ``net``. ``weight_model`` is a prepared module without submodules.
    """
    block_inputs = torch.ones(1, 8)
    return {
        "model": lambda: model(INPUTS).sum(),
        "submodule": lambda: model.encoder(INPUTS).sum(),
        "block": lambda: model.blocks[0](block_inputs).sum(),
        "method": lambda: model.loss(INPUTS),
        "user's module": lambda: net(INPUTS).sum(),
        "model.module": lambda: model.module(INPUTS).sum(),
        "vmap": lambda: vmap(net)(INPUTS).sum(),
        "method without submodules": lambda: weight_model.penalty(),
        "training_step": lambda: model.training_step(INPUTS),
        "model and submodule": lambda: model(INPUTS).sum() + model.encoder(INPUTS).sum(),
    }


def backward_outside_of_no_sync(fabric: Fabric, model: Any) -> None:
    with fabric.no_backward_sync(model):
        loss = model(INPUTS).sum()
    fabric.backward(loss)


def accumulate(fabric: Fabric, model: Any) -> None:
    with fabric.no_backward_sync(model):
        loss = model.encoder(INPUTS).sum()
        fabric.backward(loss)
    loss = model(INPUTS).sum()
    fabric.backward(loss)


def passes(fabric: Fabric) -> dict[str, str]:
    """Return the outcomes of backward passes, by the way that the forward pass has gone."""
    net = Net()
    model, _ = make(fabric, net)
    weight_model, _ = make(fabric, OneWeight())

    def backward(compute_loss: Callable[[], Any]) -> None:
        fabric.backward(compute_loss())

    outcomes: dict[str, str] = {}
    for way, compute_loss in losses_by_way(net, model, weight_model).items():
        outcomes[way] = outcome(partial(backward, compute_loss))
    parameters = dict(net.named_parameters())
    outcomes["torch.func"] = outcome(partial(gradients_of_samples, net, parameters))
    outcomes["plain backward"] = outcome(lambda: model.loss(INPUTS).backward())
    outcomes["backward outside of no_sync"] = outcome(
        partial(backward_outside_of_no_sync, fabric, model)
    )
    outcomes["accumulation"] = outcome(partial(accumulate, fabric, model))
    outcomes["method without gradients"] = outcome(model.num_parameters)
    model.mark_forward_method("loss")
    outcomes["marked method"] = outcome(lambda: fabric.backward(model.loss(INPUTS)))
    return outcomes


@pytest.fixture(scope="module")
def outcomes_of_passes() -> list[dict[str, str]]:
    return run_in_ranks(passes)


@pytest.mark.parametrize(
    "way",
    [
        "model",
        "training_step",
        "accumulation",
        "model and submodule",
        "marked method",
        "method without gradients",
    ],
)
def test_a_pass_through_the_model_is_synchronized(
    outcomes_of_passes: list[dict[str, str]], way: str
) -> None:
    for results in outcomes_of_passes:
        assert results[way] == "fine"


@pytest.mark.parametrize(
    "way",
    [
        "submodule",
        "block",
        "method",
        "plain backward",
        "user's module",
        "model.module",
        "vmap",
        "torch.func",
        "method without submodules",
        "backward outside of no_sync",
    ],
)
def test_a_pass_around_the_model_raises(outcomes_of_passes: list[dict[str, str]], way: str) -> None:
    for rank, results in enumerate(outcomes_of_passes):
        assert "would not be synchronized" in results[way]
        assert f"on rank {rank}" in results[way]


def test_an_error_of_a_pass_around_the_model_names_the_way_and_a_remedy(
    outcomes_of_passes: list[dict[str, str]],
) -> None:
    for results in outcomes_of_passes:
        assert "model.encoder(...)" in results["submodule"]
        assert "mark_forward_method" in results["method"]
        for way in ("user's module", "model.module"):
            assert "Write: model(...), for model.module(...)" in results[way]
        assert "value.detach() for name, value" in results["torch.func"]


def detached_parameters(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach() for name, value in module.named_parameters()}


def gradients_of_samples_in_rank(fabric: Fabric) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model, _ = make(fabric, Net())
    module = fabric.unwrap(model)
    gradients = gradients_of_samples(module, detached_parameters(module))
    for parameter in module.parameters():
        assert parameter.grad is None
    return gradients


@pytest.mark.parametrize("strategy", ["ddp", "ddp_find_unused_parameters_true"])
def test_gradients_that_are_a_result_of_torch_func_are_those_of_the_plain_module(
    strategy: str,
) -> None:
    torch.manual_seed(0)
    net = Net()
    expected = gradients_of_samples(net, detached_parameters(net))
    for actual in run_in_ranks(gradients_of_samples_in_rank, strategy=strategy):
        torch.testing.assert_close(actual, expected)


def penalty_with_its_own_backward(fabric: Fabric) -> str:
    model = fabric.setup(Net())
    loss = model(torch.ones(2, 4)).sum()
    fabric.backward(model.head.weight.square().sum())
    error = outcome(lambda: fabric.backward(loss))
    model = fabric.setup(Net())
    loss = model(torch.ones(2, 4)).sum()
    fabric.backward(loss + model.head.weight.square().sum())
    return error


def test_a_penalty_with_a_backward_pass_of_its_own_is_explained_with_a_remedy_that_works() -> None:
    for error in run_in_ranks(penalty_with_its_own_backward):
        assert "as by a penalty on a weight with a backward pass of its own" in error
        assert "fabric.backward(loss + penalty)" in error


def remove_the_only_buffer(fabric: Fabric) -> str:
    layer = nn.Linear(4, 1)
    l1_unstructured(layer, "weight", 0.5)
    model = fabric.setup(layer)
    fabric.backward(model(torch.ones(2, 4)).mean())
    remove(layer, "weight")
    return outcome(lambda: fabric.backward(model(torch.ones(2, 4)).mean()))


def test_buffers_that_are_removed_after_setup_are_named_with_a_remedy_that_works() -> None:
    for error in run_in_ranks(remove_the_only_buffer):
        assert "as after torch.nn.utils.prune.remove(...)" in error
        assert "DDPStrategy(broadcast_buffers=False)" in error
    strategy = DDPStrategy(broadcast_buffers=False, start_method="forkserver")
    assert run_in_ranks(remove_the_only_buffer, strategy=strategy) == ["fine", "fine"]


def backward_alone_in_no_sync(fabric: Fabric) -> str:
    model, _ = make(fabric, Net())
    loss = model(torch.ones(2, 4)).sum()

    def backward() -> None:
        with fabric.no_backward_sync(model):
            fabric.backward(loss)

    return outcome(backward)


def test_no_sync_around_the_backward_pass_only_raises() -> None:
    for text in run_in_ranks(backward_alone_in_no_sync):
        assert "inside of no_backward_sync" in text


def detach_an_output_first(fabric: Fabric) -> tuple[str, str]:
    """Return the outcomes of a window after an output was detached, with and without gradients."""
    model, optimizer = make(fabric, Net())
    x = torch.ones(2, 4)

    def pass_in_window() -> None:
        with fabric.no_backward_sync(model):
            fabric.backward(model(x).mean())
        fabric.backward(model(x).mean())

    with torch.no_grad():
        model(x)
    without_gradients = outcome(pass_in_window)
    optimizer.zero_grad()
    model(x).detach()
    return outcome(pass_in_window), without_gradients


def test_a_window_after_a_detached_output_raises_with_a_remedy_that_works() -> None:
    for with_gradients, without_gradients in run_in_ranks(detach_an_output_first):
        assert "an earlier one without a backward pass" in with_gradients
        assert "with torch.no_grad(): around a forward pass" in with_gradients
        assert without_gradients == "fine"


class ScaledLayer(nn.Module):
    """A layer with a fixed bias and two buffers, whose elements may share memory."""

    def __init__(self, shares_memory: bool) -> None:
        super().__init__()
        layer = nn.Linear(2, 2)
        bias = torch.zeros(1).expand(2)
        scale = torch.rand(1).expand(2)
        offset = torch.rand(()).expand(1, 2)
        if not shares_memory:
            bias = bias.clone()
            scale = scale.clone()
            offset = offset.clone()
        layer.bias = nn.Parameter(bias, requires_grad=False)
        layer.register_buffer("scale", scale)
        self.layers = nn.Sequential(layer)
        self.register_buffer("offset", offset)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x) * self.layers[0].scale + self.offset


class Refused(NamedTuple):
    """What a rank saw of a module that ``setup`` refuses.

    Attributes:
        text: the error on this rank.
        expected: the output of rank 0's module before ``setup``.
        output: the output of the prepared module, after following the remedy of the error.
    """

    text: str
    expected: float
    output: float


def set_up_with_remedy(fabric: Fabric, shares_memory: bool, is_trainable: bool) -> Refused:
    torch.manual_seed(fabric.global_rank)
    module = ScaledLayer(shares_memory).requires_grad_(is_trainable)
    x = torch.ones(1, 2)
    expected = fabric.broadcast(module(x).sum().item())
    text = outcome(lambda: fabric.setup(module))
    exec(remedy(text), {"model": module})
    model = fabric.setup(module)
    return Refused(text, expected, model(x).sum().item())


def set_up_tensors_that_share_memory(fabric: Fabric) -> list[Refused]:
    is_second = fabric.global_rank == 1
    return [
        set_up_with_remedy(fabric, shares_memory=True, is_trainable=True),
        set_up_with_remedy(fabric, shares_memory=True, is_trainable=False),
        set_up_with_remedy(fabric, shares_memory=is_second, is_trainable=True),
        set_up_with_remedy(fabric, shares_memory=is_second, is_trainable=False),
    ]


def test_tensors_whose_elements_share_memory_are_named_with_a_remedy_that_works() -> None:
    for results in run_in_ranks(set_up_tensors_that_share_memory):
        for refused in results:
            assert "ConfigurationError: setup(ScaledLayer) with DDPStrategy" in refused.text
            assert "elements of layers.0.bias, offset, layers.0.scale share memory" in refused.text
            assert "model.layers[0].scale = model.layers[0].scale.clone()" in refused.text
            assert refused.output == pytest.approx(refused.expected)


class Table(nn.Module):
    """A weight, and a buffer of integers."""

    def __init__(self, buffer: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.register_buffer("buffer", buffer)

    def forward(self) -> torch.Tensor:
        return self.weight * self.buffer.sum()


def broadcast_unusual_buffers(fabric: Fabric) -> dict[str, float]:
    """Return the output of a model with a buffer that torch can copy, by the kind of the buffer."""
    integers = fabric.global_rank + torch.arange(6)
    buffers = {
        "overlapping windows": integers.unfold(0, 3, 1),
        "expanded without effect": integers[:1].expand(1, 1),
        "no elements": integers[:0].view(1, 0).expand(3, 0),
        "transposed": integers.view(2, 3).t(),
        "unusual stride": integers.view(2, 3).unsqueeze(0).transpose(0, 1),
        "column": integers.unsqueeze(0).transpose(0, 1),
        "scalar": integers[0],
    }
    sums: dict[str, float] = {}
    for kind, buffer in buffers.items():
        model = fabric.setup(Table(buffer))
        model()
        sums[kind] = model().item()
        assert model.buffer.data_ptr() == buffer.data_ptr()
    return sums


def test_buffers_with_unusual_strides_are_copied_from_rank_0() -> None:
    for sums in run_in_ranks(broadcast_unusual_buffers):
        assert sums == {
            "overlapping windows": 30.0,
            "expanded without effect": 0.0,
            "no elements": 0.0,
            "transposed": 15.0,
            "unusual stride": 15.0,
            "column": 15.0,
            "scalar": 0.0,
        }


def use_ranks_own_buffers(fabric: Fabric) -> float:
    expanded = torch.full((1,), fabric.global_rank).expand(2)
    model = fabric.setup(Table(expanded))
    fabric.backward(model())
    return model().item()


def test_a_buffer_that_is_not_copied_may_share_memory() -> None:
    strategy = DDPStrategy(start_method="forkserver", broadcast_buffers=False)
    assert run_in_ranks(use_ranks_own_buffers, strategy=strategy) == [0.0, 2.0]


class TiedLayers(nn.Module):
    """An embedding, and an output layer with the same weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 4)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(indices))


def accumulate_on_static_graph(
    fabric: Fabric, first_number: int, has_weight: bool
) -> list[torch.Tensor]:
    """Return the weight after each of two windows of three passes.

    Args:
        fabric: the job.
        first_number: the number of the first pass that may skip the synchronization.
        has_weight: whether the losses are sums with a weight.
    """
    torch.manual_seed(0)
    model, optimizer = make(fabric, TiedLayers())
    weights: list[torch.Tensor] = []
    number = 0
    for _ in range(2):
        for position in range(3):
            last = position == 2
            is_enabled = not last and number >= first_number
            indices = torch.tensor([number, 2 * fabric.global_rank])
            with fabric.no_backward_sync(model, enabled=is_enabled):
                errors = model(indices).square()
                if has_weight:
                    fabric.backward(errors.sum(), weight=len(errors))
                else:
                    fabric.backward(errors.mean())
            number += 1
        optimizer.step()
        optimizer.zero_grad()
        weights.append(model.head.weight.detach().clone())
    return weights


def skip_the_first_synchronization(fabric: Fabric) -> list[str]:
    """Return the outcomes of loops whose first forward pass is in ``no_backward_sync``."""
    plain, _ = make(fabric, Net())
    x = torch.ones(2, 4)

    def accumulate() -> None:
        with fabric.no_backward_sync(plain):
            fabric.backward(plain(x).sum())

    def backward_outside() -> None:
        with fabric.no_backward_sync(plain):
            loss = plain(x).sum()
        loss.backward()

    return [
        outcome(lambda: accumulate_on_static_graph(fabric, 0, has_weight=False)),
        outcome(accumulate),
        outcome(backward_outside),
    ]


def test_a_static_graph_needs_a_first_pass_with_synchronization() -> None:
    strategy = DDPStrategy(start_method="forkserver", static_graph=True)
    for outcomes in run_in_ranks(skip_the_first_synchronization, strategy=strategy):
        for text in outcomes:
            assert "UsageError: the first backward pass of" in text
            assert "no_backward_sync(model, enabled=not last and number > 0)" in text


@pytest.mark.parametrize("has_weight", [False, True])
def test_a_static_graph_accumulates_after_its_first_pass(has_weight: bool) -> None:
    strategy = DDPStrategy(start_method="forkserver", static_graph=True)
    expected = run_in_ranks(accumulate_on_static_graph, 0, has_weight)
    results = run_in_ranks(accumulate_on_static_graph, 1, has_weight, strategy=strategy)
    for rank_weights, expected_weights in zip(results, expected, strict=True):
        torch.testing.assert_close(rank_weights, expected_weights)


def evaluate_before_training(fabric: Fabric) -> list[str]:
    """Return the outcomes of passes in ``no_backward_sync`` that record no static graph."""
    model, _ = make(fabric, Net())
    x = torch.ones(2, 4)

    def accumulate() -> None:
        with fabric.no_backward_sync(model):
            fabric.backward(model(x).mean())

    with fabric.no_backward_sync(model):
        outcomes = [outcome(lambda: model(x))]
    outcomes.append(outcome(lambda: fabric.backward(model(x).mean())))
    outcomes.append(outcome(accumulate))
    outcomes.append(outcome(lambda: fabric.backward(model(x).mean())))
    return outcomes


def test_a_static_graph_allows_forward_passes_before_its_first_backward_pass() -> None:
    strategy = DDPStrategy(start_method="forkserver", static_graph=True)
    results = run_in_ranks(evaluate_before_training, strategy=strategy)
    assert results == [["fine"] * 4] * 2


def sync_states(fabric: Fabric) -> list[bool]:
    """Return whether gradients are synchronized after inner blocks and after an error."""
    module = Net()
    model = fabric.setup(module)
    strategy = fabric.strategy
    prepared = model._fabric_prepared
    synchronizes = strategy.gradient_contract(prepared).synchronizes
    states = []
    with fabric.no_backward_sync(model):
        with fabric.no_backward_sync(model, enabled=False), fabric.no_backward_sync([model, model]):
            states.append(synchronizes())
        with strategy.block_backward_sync(prepared):
            pass
        states.append(synchronizes())
    with contextlib.suppress(KeyError), fabric.no_backward_sync(model):
        raise KeyError
    states.append(synchronizes())
    return states


def test_no_backward_sync_restores_the_state_before() -> None:
    results = run_in_ranks(sync_states)
    assert results == [[False, False, True]] * 2


def set_up_frozen(fabric: Fabric) -> tuple[list[float], bool]:
    """Return the broadcast weight of a frozen module, and whether the module is not wrapped."""
    net = OneWeight().requires_grad_(False)
    nn.init.constant_(net.weight, fabric.global_rank + 1)
    model = fabric.setup(net)
    with fabric.no_backward_sync(model):
        model(torch.ones(4))
    return net.weight.tolist(), model._fabric_prepared is net


def test_a_module_without_trainable_parameters_is_broadcast_and_not_wrapped() -> None:
    results = run_in_ranks(set_up_frozen)
    assert results == [([1.0] * 4, True)] * 2


def two_steps_unused(fabric: Fabric) -> str:
    module = PartlyUnused()
    # torch does not count frozen parameters.
    module.used.bias.requires_grad_(False)
    # torch names only the numbers of the parameters. This module has fewer.
    other_model = fabric.setup(nn.Linear(4, 4, bias=False))
    model = fabric.setup(module)

    def steps() -> None:
        for _ in range(2):
            loss = model(torch.ones(2, 4)).sum()
            fabric.backward(loss)

    result = outcome(steps)
    del other_model
    return result


def test_an_unused_parameter_is_named() -> None:
    for text in run_in_ranks(two_steps_unused):
        assert "left_out.weight, left_out.bias" in text
        assert "ddp_find_unused_parameters_true" in text
    strategy = "ddp_forkserver_find_unused_parameters_true"
    results = run_in_ranks(two_steps_unused, strategy=strategy)
    assert results == ["fine", "fine"]


@pytest.mark.parametrize(
    ("options", "tolerance"),
    [
        ({"ddp_comm_hook": default_hooks.allreduce_hook}, 0.0),
        ({"ddp_comm_hook": default_hooks.fp16_compress_hook}, 1e-3),
        (
            {
                "ddp_comm_hook": default_hooks.allreduce_hook,
                "ddp_comm_wrapper": default_hooks.fp16_compress_wrapper,
            },
            1e-3,
        ),
    ],
)
def test_comm_hooks_carry_the_gradients(options: dict[str, Any], tolerance: float) -> None:
    expected = run_in_ranks(one_step)[0]
    strategy = DDPStrategy(start_method="forkserver", **options)
    for actual in run_in_ranks(one_step, strategy=strategy):
        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def step_on(fabric: Fabric, model: Any, optimizer: torch.optim.Optimizer, value: float) -> None:
    loss = model(torch.full((4,), value))
    fabric.backward(loss)
    optimizer.step()
    optimizer.zero_grad()


def max_and_min_over_ranks(fabric: Fabric, tensor: torch.Tensor) -> list[torch.Tensor]:
    return [fabric.all_reduce(tensor.detach(), reduce_op=op) for op in ("max", "min")]


def weights_under_power_sgd(fabric: Fabric) -> list[torch.Tensor]:
    net = OneWeight()
    model, optimizer = make(fabric, net)
    for _ in range(4):
        step_on(fabric, model, optimizer, float(fabric.global_rank))
    return max_and_min_over_ranks(fabric, net.weight)


def test_power_sgd_keeps_replicas_equal() -> None:
    state = powerSGD_hook.PowerSGDState(
        process_group=None, matrix_approximation_rank=1, start_powerSGD_iter=2
    )
    strategy = DDPStrategy(
        start_method="forkserver", ddp_comm_state=state, ddp_comm_hook=powerSGD_hook.powerSGD_hook
    )
    for largest, smallest in run_in_ranks(weights_under_power_sgd, strategy=strategy):
        assert torch.equal(largest, smallest)


def averaging_strategy(start_step: int, period: int) -> DDPStrategy:
    """Return a strategy that averages the models every ``period`` steps after ``start_step``."""
    state = PostLocalSGDState(
        process_group=None,
        subgroup=None,
        start_localSGD_iter=start_step,
        post_local_gradient_allreduce=False,
    )
    return DDPStrategy(
        start_method="forkserver",
        ddp_comm_state=state,
        ddp_comm_hook=post_localSGD_hook,
        model_averaging_period=period,
    )


def distances_of_replicas(fabric: Fabric) -> list[float]:
    """Return the distance between replicas after each step on data that differs between ranks.

    The optimizer also has a frozen parameter, which never has a gradient.
    """
    net = OneWeight()
    net.frozen = nn.Parameter(torch.ones(1), requires_grad=False)
    model, optimizer = make(fabric, net)
    distances = []
    for _ in range(8):
        step_on(fabric, model, optimizer, float(fabric.global_rank))
        largest, smallest = max_and_min_over_ranks(fabric, net.weight)
        distances.append((largest - smallest).max().item())
    return distances


def test_replicas_beside_a_frozen_parameter_are_averaged_every_so_many_steps() -> None:
    strategy = averaging_strategy(start_step=2, period=3)
    for distances in run_in_ranks(distances_of_replicas, strategy=strategy):
        assert max(distances[:3]) < 1e-6
        assert min(distances[3:5]) >= 1e-6
        assert distances[5] < 1e-6
        assert min(distances[6:]) >= 1e-6


def save_between_averages(fabric: Fabric, path: Path) -> list[str]:
    """Return the warnings of a save of replicas that differ."""
    model, optimizer = make(fabric, OneWeight())
    for _ in range(2):
        step_on(fabric, model, optimizer, float(fabric.global_rank))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fabric.save(path, {"model": model, "optimizer": optimizer})
    return [str(warning.message) for warning in caught]


def test_a_save_of_replicas_between_two_averages_warns_that_it_has_those_of_rank_0(
    tmp_path: Path,
) -> None:
    strategy = averaging_strategy(start_step=0, period=3)
    of_rank_0, of_rank_1 = run_in_ranks(save_between_averages, tmp_path / "a", strategy=strategy)
    [message] = of_rank_0
    assert "a checkpoint has those of rank 0" in message
    assert of_rank_1 == []


def average_after_overflow(fabric: Fabric) -> list[float]:
    """Return the weight after a step that overflows, and after two steps that do not."""
    net = OneWeight()
    model, optimizer = make(fabric, net)
    step_on(fabric, model, optimizer, math.inf)
    after_overflow = net.weight.mean().item()
    for _ in range(2):
        step_on(fabric, model, optimizer, float(fabric.global_rank))
    return [after_overflow, net.weight.mean().item()]


def test_a_step_that_overflows_is_a_step_of_the_period_of_averages() -> None:
    strategy = averaging_strategy(start_step=0, period=2)
    for weights in run_in_ranks(average_after_overflow, strategy=strategy, precision="16-mixed"):
        assert weights == [1.0, pytest.approx(0.9)]


class TwoWeights(nn.Module):
    """A model with two weights, of which each rank uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.ones(2))
        self.second = nn.Parameter(torch.full((2,), 3.0))


def average_without_gradients(fabric: Fabric) -> list[list[float]]:
    """Return both weights after each of four steps, which each rank makes with other gradients."""
    net = TwoWeights()
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    fabric.setup(net, optimizer)
    weights = []
    for step in range(4):
        # As DDP's hook leaves them in an earlier step of local SGD: each rank has its own.
        net.first.grad = None
        net.second.grad = None
        if fabric.global_rank == 0:
            net.first.grad = torch.ones(2)
        elif step != 1:
            net.second.grad = torch.ones(2)
        optimizer.step()
        weights.append([net.first[0].item(), net.second[0].item()])
    return weights


def test_a_rank_without_gradients_takes_part_in_each_average() -> None:
    strategy = averaging_strategy(start_step=0, period=2)
    options = {"check_training": False}
    of_rank_0, of_rank_1 = run_in_ranks(average_without_gradients, strategy=strategy, **options)
    # The first step and the third one average.
    assert of_rank_0 == [[0.5, 2.5], [-0.5, 2.5], [-0.5, 2.0], [-1.5, 2.0]]
    assert of_rank_1 == [[0.5, 2.5], [0.5, 2.5], [-0.5, 2.0], [-0.5, 1.0]]


@pytest.mark.parametrize("period", [0, -1, 1.5, True])
def test_a_period_of_averages_that_is_no_number_of_steps_is_refused(period: Any) -> None:
    with pytest.raises(ConfigurationError, match="no number of steps"):
        averaging_strategy(start_step=0, period=period)


def overflow_on_one_rank(fabric: Fabric) -> tuple[list[float], list[float]]:
    """Return the weights and loss scales after an overflow on rank 1, and after a good step."""
    net = OneWeight()
    model, optimizer = make(fabric, net)
    values = [(1.0, 1.0), (math.inf, 1.0)][fabric.global_rank]
    weights = []
    scales = []
    for value in values:
        step_on(fabric, model, optimizer, value)
        weights.append(net.weight.mean().item())
        scales.append(float(fabric.describe().split()[-1]))
    return weights, scales


def test_an_overflow_on_one_rank_skips_the_step_on_all() -> None:
    for weights, scales in run_in_ranks(overflow_on_one_rank, precision="16-mixed"):
        assert weights == [1.0, pytest.approx(0.9)]
        assert scales == [65536.0, 32768.0]


def learning_rates(fabric: Fabric) -> list[float]:
    net = OneWeight()
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    model, optimizer, scheduler = fabric.setup(net, optimizer, scheduler=scheduler)
    loss = model(torch.ones(4))
    fabric.backward(loss)
    rates = []
    for _ in range(3):
        optimizer.step()
        scheduler.step()
        rates.append(scheduler.get_last_lr()[0])
    return rates


def test_a_scheduler_is_stepped_once_not_once_per_process() -> None:
    results = run_in_ranks(learning_rates)
    assert results == [[0.5, 0.25, 0.125]] * 2


def use_contract(fabric: Fabric) -> dict[str, Any]:
    strategy = fabric.strategy
    communicator = strategy.communicator().new_group([0, 1])
    rank = fabric.global_rank
    results = {
        "global_rank": strategy.global_rank,
        "local_rank": strategy.local_rank,
        "node_rank": strategy.node_rank,
        "world_size": strategy.world_size,
        "is_global_zero": strategy.is_global_zero,
        "is_distributed": strategy.is_distributed,
        "sampler": strategy.distributed_sampler_kwargs,
        "all_reduce": strategy.all_reduce({"x": torch.tensor([float(rank)]), "n": 3}),
        "all_reduce of a group": None,
        "reduce": strategy.reduce(torch.tensor(rank), reduce_op="sum").item(),
        "all_gather": strategy.all_gather(torch.tensor([rank])).tolist(),
        "broadcast": strategy.broadcast({"from": rank}, src=2),
        "all": strategy.reduce_boolean_decision(rank > 0),
        "any": strategy.reduce_boolean_decision(rank > 0, all=False),
        "batch_to_device": strategy.batch_to_device([torch.ones(1), "text"]),
    }
    if communicator:
        mean = strategy.all_reduce(torch.tensor(float(rank)), group=communicator)
        results["all_reduce of a group"] = mean.item()
    strategy.barrier("end")
    return results


def test_the_contract_of_every_strategy_on_three_ranks() -> None:
    group_means = [0.5, 0.5, None]
    for rank, results in enumerate(run_in_ranks(use_contract, ranks=3)):
        assert results == {
            "global_rank": rank,
            "local_rank": rank,
            "node_rank": 0,
            "world_size": 3,
            "is_global_zero": rank == 0,
            "is_distributed": True,
            "sampler": {"num_replicas": 3, "rank": rank},
            "all_reduce": {"x": torch.tensor([1.0]), "n": 3},
            "all_reduce of a group": group_means[rank],
            "reduce": 3,
            "all_gather": [[0], [1], [2]],
            "broadcast": {"from": 2},
            "all": False,
            "any": True,
            "batch_to_device": [torch.ones(1), "text"],
        }


def train_with_synchronized_norms(fabric: Fabric) -> list[torch.Tensor]:
    layer = nn.BatchNorm1d(4)
    calls = []
    layer.register_forward_hook(lambda *call: calls.append(call))
    model = fabric.setup(nn.Sequential(layer, nn.Linear(4, 4)))
    assert model[0] is layer
    model(torch.full((2, 4), float(fabric.global_rank)))
    assert layer.running_mean is not None
    mean = layer.running_mean.clone()
    fabric.teardown()
    assert type(layer) is nn.BatchNorm1d
    layer(torch.ones(2, 4))
    assert len(calls) == 2
    return [mean]


def test_the_option_for_batch_norms_changes_their_class_until_teardown() -> None:
    strategy = DDPStrategy(sync_batchnorm=True)
    for (mean,) in run_in_ranks(train_with_synchronized_norms, strategy=strategy):
        torch.testing.assert_close(mean, torch.full((4,), 0.05))


def test_a_strategy_works_without_fabric() -> None:
    strategy = DDPStrategy()
    strategy.setup_environment()
    try:
        model = strategy.setup_module(strategy.module_to_device(Net()))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(1, 4)).sum().backward()
        assert strategy.optimizer_step(optimizer, lambda: 5.0) == 5.0
        state = strategy.get_module_state_dict(model)
        assert "encoder.weight" in state
        strategy.load_module_state_dict(model, state)
    finally:
        strategy.teardown()
