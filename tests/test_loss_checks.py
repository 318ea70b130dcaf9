"""The first losses are checked against their weights. Losses that may be right are not reported."""

import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from torch.distributions import Categorical
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from fabric import Fabric
from fabric.diagnostics.loss_reduction import loss_reduction
from fabric.errors import ConfigurationError, UsageError
from fabric.precision import PRECISIONS, LossScale
from fabric.strategies import DDPStrategy, ModelParallelStrategy
from tests.ranks import outcome, run_in_ranks

BATCH = 8
CLASSES = 3
INPUTS = torch.linspace(-1, 1, BATCH * 4).reshape(BATCH, 4)
TARGETS = torch.arange(BATCH) % CLASSES
VALUES = torch.linspace(0, 1, BATCH * CLASSES).reshape(BATCH, CLASSES)
MASK = torch.arange(BATCH) < 5
RETURNS = torch.linspace(0.5, 2, BATCH)

# A scale with which the gradients of these sums do not overflow.
HALF = replace(PRECISIONS["16-mixed"], loss_scale=LossScale(init_scale=2.0**8))

TENSOR_PARALLEL = ModelParallelStrategy(
    tp_plan={"0": "colwise", "1": "rowwise"}, tensor_parallel_size=2
)
SEQUENCE_PARALLEL = ModelParallelStrategy(sequence_parallel_size=2)

Loss = Callable[[nn.Module], Tensor]


def losses_of_samples(model: nn.Module) -> Tensor:
    return functional.cross_entropy(model(INPUTS), TARGETS, reduction="none")


def squares(model: nn.Module) -> Tensor:
    return (model(INPUTS) - VALUES).square()


# -- means ----------------------------------------------------------------------------------------


def cross_entropy(model: nn.Module) -> Tensor:
    return functional.cross_entropy(model(INPUTS), TARGETS)


def smoothed_cross_entropy(model: nn.Module) -> Tensor:
    return functional.cross_entropy(model(INPUTS), TARGETS, label_smoothing=0.1)


def mean_of_squares(model: nn.Module) -> Tensor:
    return squares(model).mean()


def mean_of_norms(model: nn.Module) -> Tensor:
    return squares(model).sum(1).sqrt().mean()


def part_of_an_accumulated_mean(model: nn.Module) -> Tensor:
    return cross_entropy(model) / 4


def mean_by_hand(model: nn.Module) -> Tensor:
    return losses_of_samples(model).sum() / len(INPUTS)


def batch_mean_of_divergences(model: nn.Module) -> Tensor:
    log_probabilities = model(INPUTS).log_softmax(1)
    return functional.kl_div(log_probabilities, VALUES.softmax(1), reduction="batchmean")


def means_of_two_tasks(model: nn.Module) -> Tensor:
    return cross_entropy(model) + 0.1 * mean_of_squares(model)


def listed_means_of_two_tasks(model: nn.Module) -> Tensor:
    return torch.stack([cross_entropy(model), mean_of_squares(model)]).sum()


def contrastive(model: nn.Module) -> Tensor:
    features = functional.normalize(model(INPUTS), dim=1)
    return functional.cross_entropy(features @ features.T, torch.arange(BATCH))


MEANS: list[Loss] = [
    cross_entropy,
    smoothed_cross_entropy,
    mean_of_squares,
    mean_of_norms,
    part_of_an_accumulated_mean,
    mean_by_hand,
    batch_mean_of_divergences,
    means_of_two_tasks,
    listed_means_of_two_tasks,
    contrastive,
]


# -- sums -----------------------------------------------------------------------------------------


def summed_cross_entropy(model: nn.Module) -> Tensor:
    return functional.cross_entropy(model(INPUTS), TARGETS, reduction="sum")


def half_of_summed_squares(model: nn.Module) -> Tensor:
    return 0.5 * squares(model).sum()


def masked_sum(model: nn.Module) -> Tensor:
    return (losses_of_samples(model) * MASK).sum()


def reconstruction_and_divergence(model: nn.Module) -> Tensor:
    """Return the loss of a variational autoencoder."""
    outputs = model(INPUTS)
    probabilities = outputs.sigmoid()
    reconstruction = functional.binary_cross_entropy(probabilities, VALUES, reduction="sum")
    return reconstruction - 0.5 * torch.sum(1 + outputs - outputs.pow(2) - outputs.exp())


def policy_gradient(model: nn.Module) -> Tensor:
    """Return the loss of REINFORCE."""
    log_probabilities = Categorical(logits=model(INPUTS)).log_prob(TARGETS)
    return -(log_probabilities * RETURNS).sum()


def policy_gradient_of_listed_actions(model: nn.Module) -> Tensor:
    losses: list[Tensor] = []
    for index in range(BATCH):
        distribution = Categorical(logits=model(INPUTS[index : index + 1]))
        log_probability = distribution.log_prob(TARGETS[index : index + 1])
        losses.append(-log_probability * RETURNS[index])
    return torch.cat(losses).sum()


SUMS: list[Loss] = [
    summed_cross_entropy,
    half_of_summed_squares,
    masked_sum,
    reconstruction_and_divergence,
    policy_gradient,
    policy_gradient_of_listed_actions,
]


# -- losses of which the graph does not tell ------------------------------------------------------


class SumOfSquares(torch.autograd.Function):
    """A loss with its own backward pass. Its node is called ``SumOfSquaresBackward``."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        ctx.save_for_backward(values)
        return values.square().sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (values,) = ctx.saved_tensors
        return 2 * values * gradients[0]


def own_function(model: nn.Module) -> Tensor:
    return SumOfSquares.apply(model(INPUTS))


def mean_over_a_mask(model: nn.Module) -> Tensor:
    return masked_sum(model) / MASK.sum()


def normalized_weights(model: nn.Module) -> Tensor:
    return (losses_of_samples(model) * (MASK / MASK.sum())).sum()


def divided_elements(model: nn.Module) -> Tensor:
    return (squares(model) / BATCH).sum()


def means_of_features(model: nn.Module) -> Tensor:
    return squares(model).mean(0).sum()


def sums_of_features(model: nn.Module) -> Tensor:
    return squares(model).sum(0).mean()


def sum_for_each_feature(model: nn.Module) -> Tensor:
    return squares(model).sum() / CLASSES


def mean_times_its_number(model: nn.Module) -> Tensor:
    return cross_entropy(model) * BATCH


def mean_times_its_number_as_a_tensor(model: nn.Module) -> Tensor:
    return torch.tensor(BATCH) * cross_entropy(model)


def sum_and_mean(model: nn.Module) -> Tensor:
    return summed_cross_entropy(model) + 0.1 * mean_of_squares(model)


def mean_and_penalty(model: nn.Module) -> Tensor:
    penalty = sum(parameter.square().sum() for parameter in model.parameters())
    return cross_entropy(model) + penalty


def correlations(model: nn.Module) -> Tensor:
    """Return the loss of Barlow Twins, whose matrix is a mean over the batch."""
    features = model(INPUTS)
    matrix = features.T @ features / BATCH
    return (matrix - torch.eye(CLASSES)).square().sum()


def learned_task_weights(model: nn.Module) -> Tensor:
    tasks = torch.stack([cross_entropy(model), mean_of_squares(model)])
    return (torch.exp(-model.bias[:2]) * tasks + model.bias[:2]).sum()


def dice(model: nn.Module) -> Tensor:
    probabilities = model(INPUTS).sigmoid()
    overlap = (probabilities * VALUES).sum()
    return 1 - 2 * overlap / (probabilities.sum() + VALUES.sum())


def deviations(model: nn.Module) -> Tensor:
    return model(INPUTS).std(0).sum()


def checkpointed(model: nn.Module) -> Tensor:
    """Return a loss whose graph cannot be read without computing it again."""
    return checkpoint(partial(mean_over_a_mask, model), use_reentrant=False)


UNCERTAIN: list[Loss] = [
    own_function,
    mean_over_a_mask,
    normalized_weights,
    divided_elements,
    means_of_features,
    sums_of_features,
    sum_for_each_feature,
    mean_times_its_number,
    mean_times_its_number_as_a_tensor,
    sum_and_mean,
    mean_and_penalty,
    correlations,
    learned_task_weights,
    dice,
    deviations,
    checkpointed,
]


# -- weights --------------------------------------------------------------------------------------


def make_model() -> Any:
    torch.manual_seed(0)
    return nn.Linear(4, CLASSES)


@pytest.fixture
def fabric() -> Iterator[Fabric]:
    with Fabric(accelerator="cpu", devices=1) as fabric:
        yield fabric


def set_up(fabric: Fabric) -> Any:
    net = make_model()
    return fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))


@pytest.mark.parametrize("loss", MEANS)
def test_a_mean_with_a_weight_is_refused(fabric: Fabric, loss: Loss) -> None:
    model, _ = set_up(fabric)
    for weight in (BATCH, torch.tensor(float(BATCH))):
        value = loss(model)
        with pytest.raises(UsageError, match="the loss is a mean") as caught:
            fabric.backward(value, weight=weight)
        assert "rank 0" in str(caught.value)
        assert "fabric.backward(loss * n, weight=n)" in str(caught.value)
    assert model.weight.grad is None


@pytest.mark.parametrize("loss", [*SUMS, *UNCERTAIN])
def test_a_sum_or_an_unknown_loss_may_have_a_weight(fabric: Fabric, loss: Loss) -> None:
    model, _ = set_up(fabric)
    value = loss(model)
    fabric.backward(value, weight=BATCH)


@pytest.mark.parametrize("loss", MEANS)
def test_both_remedies_of_a_mean_give_the_gradients_of_the_mean(fabric: Fabric, loss: Loss) -> None:
    model, optimizer = set_up(fabric)
    loss(model).backward()
    expected = model.weight.grad.clone()
    optimizer.zero_grad()
    value = loss(model)
    fabric.backward(value)
    assert torch.equal(model.weight.grad, expected)
    optimizer.zero_grad()
    value = loss(model) * BATCH
    fabric.backward(value, weight=BATCH)
    fabric.clip_gradients(model, optimizer, max_norm=1e9)
    torch.testing.assert_close(model.weight.grad, expected)


def step_after_a_refused_mean(fabric: Fabric, remedy: str) -> tuple[str, Tensor]:
    """Return the error of a mean with a weight, and the full weight after a step that follows it.

    Only if the loss is weighted, rank 0 has more samples than rank 1.
    """
    net = make_layers()
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=1.0))
    boundary = 5 if remedy == "weight" else 4
    parts_of_ranks = [slice(0, boundary), slice(boundary, BATCH)]
    part = parts_of_ranks[fabric.global_rank]
    inputs, targets = INPUTS[part], TARGETS[part]
    loss = functional.cross_entropy(model(inputs), targets)
    error = outcome(partial(fabric.backward, loss, weight=len(inputs)))
    loss = functional.cross_entropy(model(inputs), targets)
    if remedy == "weight":
        fabric.backward(loss * len(inputs), weight=len(inputs))
    else:
        fabric.backward(loss)
    optimizer.step()
    return error, weight_of(fabric, model)


@pytest.mark.parametrize("remedy", ["weight", "no weight"])
@pytest.mark.parametrize(
    "options",
    [{"strategy": "ddp"}, {"strategy": "fsdp"}, {"strategy": "fsdp", "precision": HALF}],
    ids=["ddp", "fsdp", "16-mixed"],
)
def test_a_mean_with_a_weight_is_refused_on_each_rank_and_both_remedies_are_exact(
    options: dict[str, Any], remedy: str
) -> None:
    net = make_layers()
    functional.cross_entropy(net(INPUTS), TARGETS).backward()
    expected = (net[0].weight - net[0].weight.grad).detach()
    tolerance = 1e-6
    if "precision" in options:
        tolerance = 1e-2
    results = run_in_ranks(step_after_a_refused_mean, remedy, **options)
    for rank, (error, weight) in enumerate(results):
        assert f"rank {rank}" in error
        assert "the loss is a mean" in error
        assert "fabric.backward(loss * n, weight=n)" in error
        assert "fabric.backward(loss)" in error
        torch.testing.assert_close(weight, expected, rtol=tolerance, atol=tolerance)


def test_a_mean_counts_as_one_term(fabric: Fabric) -> None:
    model, _ = set_up(fabric)
    for weight in (1, 0.5, 0, torch.tensor(1)):
        value = cross_entropy(model)
        fabric.backward(value, weight=weight)


def test_only_the_first_losses_are_checked(fabric: Fabric) -> None:
    model, optimizer = set_up(fabric)
    for _ in range(12):
        value = cross_entropy(model)
        fabric.backward(value)
    optimizer.zero_grad()
    value = cross_entropy(model)
    fabric.backward(value, weight=BATCH)


def test_without_the_check_a_mean_may_have_a_weight() -> None:
    with Fabric(accelerator="cpu", devices=1, check_training=False) as fabric:
        model, _ = set_up(fabric)
        value = cross_entropy(model)
        fabric.backward(value, weight=BATCH)


# -- sums on several ranks ------------------------------------------------------------------------


@pytest.mark.parametrize("loss", [*SUMS, *MEANS, *UNCERTAIN])
def test_only_a_certain_sum_counts_as_a_sum(loss: Loss) -> None:
    value = loss(make_model())
    reduction = loss_reduction(value, weight=None)
    is_sum = reduction is not None and reduction.is_plain_sum
    assert is_sum == (loss in SUMS)
    value.backward()


def warnings_of(fabric: Fabric, model: nn.Module, loss: Loss, **options: Any) -> list[str]:
    """Return the warnings of two backward passes of a loss."""
    with warnings.catch_warnings(record=True) as records:
        warnings.simplefilter("always")
        for _ in range(2):
            value = loss(model)
            fabric.backward(value, **options)
    return [str(record.message) for record in records]


def warn_of_sums(fabric: Fabric) -> list[list[str]]:
    model, optimizer = set_up(fabric)
    reports = [
        warnings_of(fabric, model, cross_entropy),
        warnings_of(fabric, model, mean_over_a_mask),
        warnings_of(fabric, model, summed_cross_entropy, reduce="sum"),
        warnings_of(fabric, model, summed_cross_entropy),
    ]
    optimizer.zero_grad()
    reports.append(warnings_of(fabric, model, summed_cross_entropy, weight=BATCH))
    return reports


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_sum_without_a_weight_is_one_warning_on_the_first_rank(strategy: str) -> None:
    first, second = run_in_ranks(warn_of_sums, strategy=strategy)
    *others, of_sum, of_weighted_sum = first
    assert others == [[], [], []]
    assert of_weighted_sum == []
    (message,) = of_sum
    assert "the loss of each of 2 processes is a sum over its samples" in message
    assert 'fabric.backward(loss, reduce="sum")' in message
    assert second == [[]] * 5


def test_in_one_process_a_sum_is_no_warning(fabric: Fabric) -> None:
    model, _ = set_up(fabric)
    assert warnings_of(fabric, model, summed_cross_entropy) == []


def sum_of_part(fabric: Fabric, model: nn.Module, part: slice) -> Tensor:
    """Return the summed loss of a part of the batch that only this rank has."""
    replicas = fabric.strategy._distinct_samples_communicator()
    inputs = INPUTS[part][replicas.rank :: replicas.size]
    targets = TARGETS[part][replicas.rank :: replicas.size]
    return functional.cross_entropy(model(inputs), targets, reduction="sum")


def weight_of(fabric: Fabric, model: nn.Module) -> Tensor:
    """Return the full weight of a model. Collective."""
    state_dict = fabric.get_state_dict(model)  # empty on other ranks than the first
    return fabric.broadcast(state_dict.get("0.weight"))


def make_layers() -> Any:
    """Return two layers, which tensor parallelism splits."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, CLASSES))


def step_after_a_sum(fabric: Fabric) -> Tensor:
    """Return the weight after a step with the gradients of two micro-batches."""
    net = make_layers()
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=1.0))
    with fabric.no_backward_sync(model):
        loss = sum_of_part(fabric, model, slice(0, 4))
        fabric.backward(loss, reduce="sum")
    loss = sum_of_part(fabric, model, slice(4, 8))
    fabric.backward(loss, reduce="sum")
    optimizer.step()
    return weight_of(fabric, model)


@pytest.mark.parametrize(
    "options",
    [
        {"strategy": "ddp"},
        {"strategy": "fsdp"},
        {"strategy": "dp", "ranks": 1},
        {"strategy": "ddp", "precision": HALF},
        {"strategy": TENSOR_PARALLEL},
        {"strategy": SEQUENCE_PARALLEL},
    ],
    ids=["ddp", "fsdp", "dp", "16-mixed", "tensor parallel", "sequence parallel"],
)
def test_a_sum_over_ranks_is_that_of_one_process(options: dict[str, Any]) -> None:
    net = make_layers()
    functional.cross_entropy(net(INPUTS), TARGETS, reduction="sum").backward()
    expected = (net[0].weight - net[0].weight.grad).detach()
    tolerance = 1e-5
    if "precision" in options:
        tolerance = 1e-2
    for weight in run_in_ranks(step_after_a_sum, **options):
        torch.testing.assert_close(weight, expected, rtol=tolerance, atol=tolerance)


def train_on_uneven_batches(fabric: Fabric) -> Tensor:
    net = make_layers()
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=1e-2))
    indices = range(fabric.global_rank, 5, fabric.world_size)
    data = TensorDataset(INPUTS, TARGETS)
    loader = DataLoader(data, sampler=indices)
    loader = fabric.setup_dataloaders(loader, use_distributed_sampler=False, uneven="longest")
    for inputs, targets in loader:
        loss = functional.cross_entropy(model(inputs), targets, reduction="sum")
        fabric.backward(loss, reduce="sum")
        optimizer.step()
        optimizer.zero_grad()
    return weight_of(fabric, model)


def test_a_repeated_batch_adds_nothing_to_a_sum() -> None:
    net = make_layers()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
    for batch in (slice(0, 2), slice(2, 4), slice(4, 5)):
        functional.cross_entropy(net(INPUTS[batch]), TARGETS[batch], reduction="sum").backward()
        optimizer.step()
        optimizer.zero_grad()
    for weight in run_in_ranks(train_on_uneven_batches):
        torch.testing.assert_close(weight, net[0].weight.detach())


@pytest.mark.parametrize("options", [{"reduce": "max"}, {"reduce": "sum", "weight": 2}])
def test_what_is_no_sum_over_ranks_is_refused(fabric: Fabric, options: dict[str, Any]) -> None:
    model, _ = set_up(fabric)
    value = summed_cross_entropy(model)
    with pytest.raises(ConfigurationError, match="reduce="):
        fabric.backward(value, **options)
    assert model.weight.grad is None


def sum_of_a_batch(fabric: Fabric) -> str:
    model, _ = set_up(fabric)
    value = summed_cross_entropy(model)
    return outcome(partial(fabric.backward, value, reduce="sum"))


def sum_within_join(fabric: Fabric) -> str:
    model, _ = set_up(fabric)
    with fabric.join(model, divide_by_initial_world_size=False):
        value = summed_cross_entropy(model)
        result = outcome(partial(fabric.backward, value, reduce="sum"))
        value.backward()
    return result


def test_a_sum_is_refused_where_gradients_are_not_averaged_over_all_ranks() -> None:
    state = PostLocalSGDState(process_group=None, subgroup=None, start_localSGD_iter=5)
    drifting = DDPStrategy(
        ddp_comm_state=state, ddp_comm_hook=post_localSGD_hook, model_averaging_period=2
    )
    results = [
        *run_in_ranks(sum_of_a_batch, strategy=drifting),
        *run_in_ranks(sum_within_join),
    ]
    for result in results:
        assert "gradients are not averaged over all ranks" in result
