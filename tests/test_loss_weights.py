"""Weighted losses: a step is that of all losses over all weights, as in one process."""

import gc
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from weakref import ref

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from torch.distributed.tensor.debug import CommDebugMode

from fabric import Fabric
from fabric._torch import full_tensor, local_tensor
from fabric.errors import ConfigurationError, NonFiniteGradientError, RankFailedError, UsageError
from fabric.precision import PRECISIONS, LossScale
from fabric.strategies import DDPStrategy, FSDPStrategy
from tests.ranks import outcome, run_in_ranks

# The numbers of tokens of the samples, for each micro-batch of each step. Ranks take every other
# sample: one rank has no token in the first micro-batch, all ranks have none in one micro-batch,
# and the last step is shorter.
TOKENS = [
    [[0, 3, 0, 7], [5, 1, 2]],
    [[4, 4, 1, 9], [0, 0, 0], [2]],
    [[6, 1, 1, 1]],
]
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "AdamW": partial(torch.optim.AdamW, lr=0.01),
}


class Case(NamedTuple):
    """A variant of the training loop."""

    optimizer: str
    clips: bool
    syncs_every_micro_batch: bool


CASES = [
    Case("SGD", clips=False, syncs_every_micro_batch=False),
    Case("SGD", clips=True, syncs_every_micro_batch=True),
    Case("AdamW", clips=True, syncs_every_micro_batch=False),
    Case("AdamW", clips=False, syncs_every_micro_batch=True),
]


def make_model(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(3, 5),
        nn.Tanh(),
        nn.Linear(5, 2, bias=False),
        nn.Tanh(),
        nn.Linear(2, 1),
    )
    return model.to(dtype)


def samples(seed: int, tokens: list[int]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(count, 3, generator=generator, dtype=torch.float64) for count in tokens]


def sum_of_losses(model: nn.Module, tokens: Tensor) -> Tensor:
    errors = model(tokens) - tokens.sum(-1, keepdim=True)
    return errors.square().sum()


def train_plainly(case: Case) -> list[Tensor]:
    """Return the parameters after the loop of one process that sees all samples of a step."""
    model = make_model()
    optimizer = OPTIMIZERS[case.optimizer](model.parameters())
    for step, micro_batches in enumerate(TOKENS):
        step_samples: list[Tensor] = []
        for token_counts in micro_batches:
            step_samples += samples(step, token_counts)
        tokens = torch.cat(step_samples)
        optimizer.zero_grad()
        loss = sum_of_losses(model, tokens) / len(tokens)
        loss.backward()
        if case.clips:
            nn.utils.clip_grad_norm_(model.parameters(), 0.2)
            nn.utils.clip_grad_norm_(model.parameters(), 0.2)
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def train(fabric: Fabric, case: Case) -> list[Tensor]:
    """Return the parameters after the same loop on this rank's samples."""
    model = make_model()
    optimizer = OPTIMIZERS[case.optimizer](model.parameters())
    model, optimizer = fabric.setup(model, optimizer)
    for step, micro_batches in enumerate(TOKENS):
        optimizer.zero_grad()
        for number, token_counts in enumerate(micro_batches):
            rank_samples = samples(step, token_counts)[fabric.global_rank :: fabric.world_size]
            tokens = torch.cat([*rank_samples, torch.zeros(0, 3)]).double()
            is_last = number == len(micro_batches) - 1
            syncs = is_last or case.syncs_every_micro_batch
            with fabric.no_backward_sync(model, enabled=not syncs):
                loss = sum_of_losses(model, tokens)
                fabric.backward(loss, weight=len(tokens))
        if case.clips:
            fabric.clip_gradients(model, optimizer, max_norm=0.2)
            fabric.clip_gradients(model, optimizer, max_norm=0.2)
        optimizer.step()
    return [full_tensor(parameter.detach()) for parameter in model.parameters()]


def train_all_cases(fabric: Fabric) -> list[list[Tensor]]:
    return [train(fabric, case) for case in CASES]


def run_in_one_process(
    function: Callable[..., Any], *args: Any, devices: int = 1, **options: Any
) -> list[Any]:
    with Fabric(accelerator="cpu", devices=devices, **options) as fabric:
        return [function(fabric, *args)]


def run_sharded(
    function: Callable[..., Any],
    *args: Any,
    ranks: int = 2,
    precision: str | None = None,
    **options: Any,
) -> list[Any]:
    strategy = FSDPStrategy(start_method="forkserver", auto_wrap_policy={nn.Linear}, **options)
    return run_in_ranks(function, *args, ranks=ranks, strategy=strategy, precision=precision)


RUNS: dict[str, Callable[..., list[Any]]] = {
    "single": run_in_one_process,
    "dp": partial(run_in_one_process, devices=2, strategy="dp"),
    "ddp": run_in_ranks,
    "ddp on 3": partial(run_in_ranks, ranks=3),
    "fsdp": run_sharded,
    "SHARD_GRAD_OP": partial(run_sharded, sharding_strategy="SHARD_GRAD_OP"),
    "HYBRID_SHARD": partial(
        run_sharded, ranks=4, sharding_strategy="HYBRID_SHARD", device_mesh=(2, 2)
    ),
}


# Hybrid sharding reduces over replicas and shards. The weights do not depend on when shards gather.
MARKS = {
    "HYBRID_SHARD": [pytest.mark.slow],
    "SHARD_GRAD_OP": [pytest.mark.slow, pytest.mark.soak],
}


def runs() -> list[Any]:
    return [pytest.param(run, marks=MARKS.get(run, [])) for run in RUNS]


@pytest.mark.parametrize("run", runs())
def test_a_step_is_that_of_all_samples_in_one_process(run: str) -> None:
    expected = [train_plainly(case) for case in CASES]
    for actual in RUNS[run](train_all_cases):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


# -- windows, in one process -----------------------------------------------------------------------


@pytest.fixture
def fabric() -> Iterator[Fabric]:
    with Fabric(accelerator="cpu", devices=1) as fabric:
        yield fabric


def set_up_linear(fabric: Fabric) -> Any:
    """Set up a weight of 1, whose gradient is the sum of the inputs, and an optimizer."""
    module = nn.Linear(1, 1, bias=False)
    nn.init.ones_(module.weight)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    return fabric.setup(module, optimizer)


def backward(fabric: Fabric, model: nn.Module, value: float, weight: Any, **options: Any) -> None:
    inputs = torch.full((1, 1), value)
    loss = model(inputs).sum()
    fabric.backward(loss, weight=weight, **options)


def take_step(model: Any, optimizer: torch.optim.Optimizer) -> float:
    """Step, clear the gradients, and return what the step has subtracted from the weight."""
    before = model.weight.item()
    optimizer.step()
    optimizer.zero_grad()
    return before - model.weight.item()


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_window_whose_gradients_are_cleared_leaves_no_weight(
    fabric: Fabric, set_to_none: bool
) -> None:
    model, optimizer = set_up_linear(fabric)
    backward(fabric, model, 6.0, 3)
    optimizer.zero_grad(set_to_none)
    backward(fabric, model, 6.0, 2)
    backward(fabric, model, 2.0, 2)
    assert take_step(model, optimizer) == 2.0
    backward(fabric, model, math.inf, 3)
    with pytest.raises(NonFiniteGradientError):
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
    optimizer.zero_grad(set_to_none)
    backward(fabric, model, 8.0, 2)
    fabric.clip_gradients(model, optimizer, max_norm=1.0)
    assert take_step(model, optimizer) == pytest.approx(1.0, rel=1e-5)
    assert take_step(model, optimizer) == 0.0


def test_gradients_of_shards_that_are_set_to_zero_leave_no_weight() -> None:
    with Fabric(accelerator="cpu", devices=1, strategy="fsdp") as fabric:
        model, optimizer = set_up_linear(fabric)
        backward(fabric, model, 6.0, 3)
        optimizer.zero_grad(set_to_none=False)
        backward(fabric, model, 6.0, 2)
        assert take_step(model, optimizer) == 3.0


# torch warns of a reference cycle with create_graph.
@pytest.mark.filterwarnings("ignore:Using backward")
def test_each_backward_pass_of_a_loss_counts(fabric: Fabric) -> None:
    model, optimizer = set_up_linear(fabric)
    loss = model(torch.full((1, 1), 6.0)).sum()
    fabric.backward(loss, weight=2, retain_graph=True)
    fabric.backward(loss, weight=1)
    assert take_step(model, optimizer) == 4.0
    loss = model(torch.tensor([[1.0], [2.0]]))
    fabric.backward(
        loss,
        torch.tensor([[1.0], [4.0]]),
        weight=3,
        create_graph=True,
    )
    assert take_step(model, optimizer) == 3.0
    # A loss without terms changes nothing.
    backward(fabric, model, 0.0, 0)
    backward(fabric, model, 5.0, torch.tensor(2.5))
    assert take_step(model, optimizer) == 2.0


def test_gradients_of_parameters_that_no_module_has_and_sparse_ones_are_divided(
    fabric: Fabric,
) -> None:
    latent = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    embedding = nn.Embedding(3, 1, sparse=True)
    optimizer = torch.optim.SGD([*embedding.parameters(), latent], lr=1.0)
    model, optimizer = fabric.setup(embedding, optimizer)
    before = model.weight.detach().clone()
    loss = model(torch.tensor([0, 2, 2])).sum() + 4 * latent.sum()
    fabric.backward(loss, weight=4)
    optimizer.step()
    expected = torch.tensor([[0.25], [0.0], [0.5]])
    torch.testing.assert_close(before - model.weight, expected)
    assert latent.tolist() == [-1.0, -1.0]


def test_hooks_of_users_see_the_gradients_that_the_step_sees(fabric: Fabric) -> None:
    model, optimizer = set_up_linear(fabric)
    gradients = []
    optimizer.register_step_pre_hook(lambda *_: gradients.append(model.weight.grad.item()))
    for _ in range(2):
        backward(fabric, model, 6.0, 3)
        take_step(model, optimizer)
    assert gradients == [2.0, 2.0]


@pytest.mark.parametrize(
    "weight",
    [
        -1,
        -0.5,
        math.nan,
        math.inf,
        True,
        1j,
        "3",
        torch.ones(1),
        torch.tensor(True),
        [],
    ],
)
def test_a_weight_that_is_no_number_of_terms_is_refused_before_anything_changes(
    fabric: Fabric, weight: Any
) -> None:
    model, optimizer = set_up_linear(fabric)
    with pytest.raises(ConfigurationError, match=r"weight=(.|\n)*rank 0"):
        backward(fabric, model, 1.0, weight)
    assert model.weight.grad is None
    assert take_step(model, optimizer) == 0.0


def test_losses_with_and_without_a_weight_never_meet_in_one_gradient(fabric: Fabric) -> None:
    model, optimizer = set_up_linear(fabric)

    def backward_without_weight() -> None:
        loss = model(torch.ones(1, 1)).sum()
        fabric.backward(loss)

    def backward_with_weight() -> None:
        backward(fabric, model, 1.0, 1)

    backward_without_weight()
    with pytest.raises(UsageError, match=r"gradients of an earlier step(.|\n)*zero_grad"):
        backward_with_weight()
    assert take_step(model, optimizer) == 1.0
    backward(fabric, model, 4.0, 2)
    with pytest.raises(UsageError, match="no weight"):
        backward_without_weight()
    fabric.clip_gradients(model, optimizer, max_norm=10.0)
    with pytest.raises(UsageError, match="clip_gradients"):
        backward_without_weight()
    with pytest.raises(UsageError, match="clip_gradients"):
        backward_with_weight()
    optimizer.step()
    with pytest.raises(UsageError, match="earlier step"):
        backward_with_weight()
    optimizer.zero_grad()
    backward_without_weight()
    assert take_step(model, optimizer) == 1.0


def test_a_step_without_weights_is_refused_before_it_changes_anything(fabric: Fabric) -> None:
    model, optimizer = set_up_linear(fabric)
    backward(fabric, model, 3.0, 0)
    with pytest.raises(UsageError, match="sum of zero"):
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
    with pytest.raises(UsageError, match="sum of zero"):
        optimizer.step()
    assert model.weight.item() == 1.0
    optimizer.zero_grad()
    backward(fabric, model, 6.0, 3)
    assert take_step(model, optimizer) == 2.0


def test_a_closure_with_weights_is_refused(fabric: Fabric) -> None:
    model, optimizer = set_up_linear(fabric)
    # The first call cannot know of the weight before the closure runs: it raises after the step.
    for _ in range(2):
        with pytest.raises(UsageError, match="closure"):
            optimizer.step(lambda: backward(fabric, model, 1.0, 1))
    assert model.weight.item() == 0.5, "the second call raises before the step"
    with pytest.raises(UsageError, match="closure"):
        optimizer.step(closure=lambda: None)
    foreign_optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(UsageError, match="not been set up"):
        backward(fabric, model, 1.0, 1, optimizer=foreign_optimizer)


def test_a_step_within_a_backward_pass_is_refused(fabric: Fabric) -> None:
    model, optimizer = set_up_linear(fabric)
    handle = model.weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    with pytest.raises(UsageError, match="within a backward pass"):
        backward(fabric, model, 1.0, 1)
    handle.remove()
    optimizer.zero_grad()
    backward(fabric, model, 6.0, 3)
    assert take_step(model, optimizer) == 2.0


def test_a_backward_pass_that_raised_has_no_weight(fabric: Fabric) -> None:
    model, optimizer = set_up_linear(fabric)
    loss = model(torch.full((1, 1), 6.0)).sum()
    fabric.backward(loss, weight=3)
    with pytest.raises(RuntimeError, match="second time"):
        fabric.backward(loss, weight=3)
    assert take_step(model, optimizer) == 2.0


def test_optimizers_of_one_loss_share_its_weight(fabric: Fabric) -> None:
    first, first_optimizer = set_up_linear(fabric)
    second, second_optimizer = set_up_linear(fabric)
    third_optimizer = fabric.setup_optimizers(torch.optim.SGD(first.parameters()))
    with pytest.raises(UsageError, match="shared parameters"):
        backward(fabric, first, 1.0, 1)
    del third_optimizer
    for value, weight in ((6.0, 2), (4.0, 3)):
        inputs = torch.full((1, 1), value)
        loss = (first(inputs) + second(inputs)).sum()
        fabric.backward(loss, weight=weight)
    assert take_step(first, first_optimizer) == 2.0
    with pytest.raises(UsageError, match=r"different weighted losses(.|\n)*optimizer=") as raised:
        backward(fabric, first, 1.0, 1)
    assert "rank 0" in str(raised.value)
    # The window of the second optimizer goes on.
    backward(fabric, first, 3.0, 1, optimizer=first_optimizer)
    backward(fabric, second, 5.0, 1, optimizer=[second_optimizer])
    assert take_step(first, first_optimizer) == 3.0
    assert take_step(second, second_optimizer) == 2.5


def test_a_loss_of_two_optimizers_of_which_one_has_other_gradients_is_refused(
    fabric: Fabric,
) -> None:
    first, first_optimizer = set_up_linear(fabric)
    second, second_optimizer = set_up_linear(fabric)
    inputs = torch.ones(1, 1)
    fabric.backward(first(inputs).sum())
    loss = (first(inputs) + second(inputs)).sum()
    with pytest.raises(UsageError, match="gradients of an earlier step"):
        fabric.backward(loss, optimizer=[first_optimizer, second_optimizer], weight=2)


def test_losses_of_two_optimizers_in_turn_are_right_or_refused(fabric: Fabric) -> None:
    discriminator, discriminator_optimizer = set_up_linear(fabric)
    generator, generator_optimizer = set_up_linear(fabric)

    def adversarial_loss() -> Tensor:
        return discriminator(generator(torch.full((1, 1), 2.0))).sum()

    for _ in range(2):
        generator.weight.data.fill_(1.0)
        discriminator.weight.data.fill_(1.0)
        discriminator_optimizer.zero_grad()
        backward(fabric, discriminator, 6.0, 3, optimizer=discriminator_optimizer)
        assert take_step(discriminator, discriminator_optimizer) == 2.0
        generator_optimizer.zero_grad()
        # The gradients reach the discriminator, too.
        loss = adversarial_loss()
        fabric.backward(loss, weight=2, optimizer=generator_optimizer)
        generator_optimizer.step()
        assert generator.weight.item() == 2.0
    discriminator_optimizer.zero_grad()
    backward(fabric, discriminator, 6.0, 3, optimizer=discriminator_optimizer)
    # The generator has a loss without a weight meanwhile.
    loss = generator(torch.ones(1, 1)).sum() * 0
    fabric.backward(loss, optimizer=generator_optimizer)
    generator_optimizer.zero_grad()
    loss = adversarial_loss()
    with pytest.raises(UsageError, match="reached parameters of SGD"):
        fabric.backward(loss, weight=2, optimizer=generator_optimizer)
    discriminator_optimizer.zero_grad()
    generator_optimizer.zero_grad()
    backward(fabric, discriminator, 6.0, 3)
    discriminator_optimizer.step()
    discriminator_optimizer.zero_grad()
    loss = adversarial_loss()
    with pytest.raises(UsageError, match="optimizer="):
        fabric.backward(loss, weight=2)


def test_gradients_of_a_loss_for_another_optimizer_are_not_stepped_with(fabric: Fabric) -> None:
    model, optimizer = set_up_linear(fabric)
    _, another_optimizer = set_up_linear(fabric)
    backward(fabric, model, 6.0, 3, optimizer=another_optimizer)
    message = "gradients of weighted losses for other optimizers"
    with pytest.raises(UsageError, match=message):
        optimizer.step()
    with pytest.raises(UsageError, match=message):
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
    with pytest.raises(
        UsageError, match="the gradients are of weighted losses for other optimizers"
    ):
        backward(fabric, model, 6.0, 3, optimizer=optimizer)
    optimizer.zero_grad()
    backward(fabric, model, 6.0, 3, optimizer=optimizer)
    assert take_step(model, optimizer) == 2.0


def test_weights_on_a_device_are_not_read_before_the_next_step(
    fabric: Fabric, tmp_path: Path
) -> None:
    model, optimizer = set_up_linear(fabric)
    # On CUDA, weights are not read at once.
    fabric._session.ensure_loss_weights().weight_sums.reads_at_once = False
    backward(fabric, model, 6.0, torch.tensor(1))
    backward(fabric, model, 6.0, 2)
    assert take_step(model, optimizer) == 4.0
    bad_weights = [*torch.tensor([0.0, -1.0, math.nan, math.inf]), 0]
    for bad_weight in bad_weights:
        backward(fabric, model, 6.0, bad_weight)
        assert take_step(model, optimizer) == 0.0
        backward(fabric, model, 6.0, 3)
        with pytest.raises(UsageError, match="sum of zero"):
            optimizer.step()
        optimizer.zero_grad()
        backward(fabric, model, 6.0, bad_weight)
        assert take_step(model, optimizer) == 0.0
        with pytest.raises(UsageError, match="sum of zero"):
            fabric.save(tmp_path / "saved", {"model": model})
        backward(fabric, model, 6.0, 3)
        assert take_step(model, optimizer) == 2.0
    with pytest.raises(ConfigurationError):
        backward(fabric, model, 1.0, torch.tensor(True))


# -- over ranks ------------------------------------------------------------------------------------


def collect_refusals(fabric: Fabric) -> tuple[list[str], float]:
    """Return the weight, and the outcomes of three calls that only all ranks can refuse."""
    model, optimizer = set_up_linear(fabric)
    # The weight is an integer on rank 1 and a float on rank 0.
    weight = 3.0
    if fabric.global_rank == 1:
        weight = 3
    of_backward = outcome(lambda: backward(fabric, model, 4.0, weight))
    backward(fabric, model, 4.0, 1)
    take_step(model, optimizer)
    backward(fabric, model, 4.0, 0)
    of_step = outcome(optimizer.step)
    optimizer.zero_grad()
    backward(fabric, model, 4.0, weight)
    of_clipping = outcome(lambda: fabric.clip_gradients(model, optimizer, max_norm=1.0))
    return [of_backward, of_step, of_clipping], model.weight.item()


def test_what_only_the_ranks_together_know_is_refused_on_all_of_them() -> None:
    for (of_backward, of_step, of_clipping), weight in run_in_ranks(collect_refusals):
        assert of_backward.startswith("CollectiveMismatchError")
        assert "sum of zero" in of_step
        assert of_clipping.startswith("CollectiveMismatchError")
        assert weight == -3.0


def count_messages(fabric: Fabric) -> tuple[list[int], list[float]]:
    """Return the number of collectives of each step, and what the steps have changed."""
    model, optimizer = set_up_linear(fabric)
    module = nn.ParameterList([nn.Parameter(torch.zeros(1))])
    latents = fabric.setup(module)
    latents_optimizer = torch.optim.SGD(latents.parameters(), lr=1.0)
    latents_optimizer = fabric.setup_optimizers(latents_optimizer)
    latents_factor = 6 if fabric.global_rank == 1 else 0
    counts = []
    steps = []
    for _ in range(3):
        latents_loss = latents_factor * latents[0].sum()
        loss = model(torch.full((1, 1), 4.0)).sum() + latents_loss
        fabric.backward(loss, weight=1 + 2 * fabric.global_rank)
        with CommDebugMode() as mode:
            steps.append(take_step(model, optimizer))
        counts.append(mode.get_total_counts())
        fabric.clip_gradients(latents, latents_optimizer, max_norm=10.0)
        latents_optimizer.step()
        steps.append(latents[0].item())
        latents_optimizer.zero_grad()
    # A loss without a weight costs no message.
    loss = model(torch.ones(1, 1)).sum()
    fabric.backward(loss)
    with CommDebugMode() as mode:
        optimizer.step()
    counts.append(mode.get_total_counts())
    return counts, steps


def test_a_window_costs_one_message_for_all_its_optimizers() -> None:
    for counts, steps in run_in_ranks(count_messages):
        assert counts == [1, 1, 1, 0]
        assert steps == [2.0, -1.5, 2.0, -3.0, 2.0, -4.5]


# -- low precision ---------------------------------------------------------------------------------

COUNT = 8192  # The tokens of a rank in a step.


class LowPrecisionRun(NamedTuple):
    """What a loop in low precision did; the loss scale is 0 where nothing is scaled."""

    parameters: list[Tensor]
    skipped: list[bool]
    loss_scale: float


def train_in_low_precision(
    fabric: Fabric, *, has_weights: bool, overflows: bool = False
) -> LowPrecisionRun:
    """Step on equally many tokens on each rank: on their sums with weights, or on their mean."""
    model = make_model(torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model, optimizer = fabric.setup(model, optimizer)
    skipped = []
    for step in range(6):
        [tokens_of_all_ranks] = samples(step, [2 * COUNT])
        tokens = tokens_of_all_ranks.float()[fabric.global_rank :: fabric.world_size]
        if overflows and step == 2:
            tokens = tokens.clone()
            tokens[0] = math.inf
        optimizer.zero_grad()
        for micro_batch in tokens.chunk(2):
            errors = model(micro_batch) - micro_batch.sum(-1, keepdim=True)
            loss = errors.float().square().sum()
            if has_weights:
                fabric.backward(loss, weight=len(micro_batch))
            else:
                fabric.backward(loss / len(tokens))
        if step % 2 == 1:
            fabric.clip_gradients(model, optimizer, max_norm=0.5)
        optimizer.step()
        skipped.append(fabric.step_was_skipped(optimizer))
    loss_scale = 0.0
    if fabric._session.scaler is not None:
        loss_scale = fabric._session.scaler.scale
    parameters = [full_tensor(parameter.detach()).float() for parameter in model.parameters()]
    return LowPrecisionRun(parameters, skipped, loss_scale)


def compare_sum_and_mean(
    fabric: Fabric, overflows: bool = False
) -> tuple[LowPrecisionRun, LowPrecisionRun]:
    of_sum = train_in_low_precision(fabric, has_weights=True, overflows=overflows)
    of_mean = train_in_low_precision(fabric, has_weights=False, overflows=overflows)
    return of_sum, of_mean


# How to run each case, and the tolerance of its parameters.
LOW_PRECISION: dict[str, tuple[Callable[..., list[Any]], float]] = {
    "16-mixed": (partial(run_in_one_process, precision="16-mixed"), 1e-4),
    "16-mixed ddp": (partial(run_in_ranks, precision="16-mixed"), 1e-4),
    "16-mixed fsdp": (partial(run_sharded, precision="16-mixed"), 1e-3),
    "16-true": (partial(run_in_one_process, precision="16-true"), 2e-3),
    "bf16-true": (partial(run_in_one_process, precision="bf16-true"), 2e-2),
    "fp16_compress": (
        partial(run_in_ranks, strategy=DDPStrategy(ddp_comm_hook=fp16_compress_hook)),
        1e-3,
    ),
}


@pytest.mark.parametrize("case", LOW_PRECISION)
def test_a_sum_with_a_weight_overflows_no_more_than_the_mean(case: str) -> None:
    run, tolerance = LOW_PRECISION[case]
    for of_sum, of_mean in run(compare_sum_and_mean):
        torch.testing.assert_close(
            of_sum.parameters, of_mean.parameters, rtol=tolerance, atol=tolerance
        )
        assert sum(of_sum.skipped) <= sum(of_mean.skipped)
        assert of_sum.loss_scale >= of_mean.loss_scale


def test_an_overflow_of_a_weighted_loss_skips_one_step_and_no_more_scale_than_the_mean() -> None:
    run, tolerance = LOW_PRECISION["16-mixed ddp"]
    for of_sum, of_mean in run(compare_sum_and_mean, True):
        assert of_sum.skipped == [False, False, True, False, False, False]
        torch.testing.assert_close(
            of_sum.parameters, of_mean.parameters, rtol=tolerance, atol=tolerance
        )
        assert of_sum.loss_scale >= of_mean.loss_scale


def train_after_a_large_batch(fabric: Fabric, path: str, resumes: bool) -> tuple[list[bool], Any]:
    """Return which of the steps after the first were skipped, and the weight at the end."""
    model, optimizer = set_up_linear(fabric)
    if resumes:
        fabric.load(path, {"model": model, "optimizer": optimizer})
    else:
        backward(fabric, model, 4.0, 4096)
        optimizer.step()
        optimizer.zero_grad()
        fabric.save(path, {"model": model, "optimizer": optimizer})
    skipped: list[bool] = []
    for _ in range(4):
        # Divided by the small divisor of these batches, the scaled gradients overflow.
        backward(fabric, model, 16.0, 4)
        optimizer.step()
        optimizer.zero_grad()
        skipped.append(fabric.step_was_skipped(optimizer))
    # Empty on other ranks than the first.
    state_dict = fabric.get_state_dict(model)
    return skipped, state_dict.get("weight")


@pytest.mark.parametrize(
    "options", [{"ranks": 1}, {"strategy": "ddp"}, {"strategy": "fsdp"}], ids=str
)
def test_a_resumed_run_skips_the_steps_of_the_uninterrupted_run(
    options: dict[str, Any], tmp_path: Path
) -> None:
    path = str(tmp_path / "checkpoint")
    options = {"precision": "16-mixed", **options}
    uninterrupted = run_in_ranks(train_after_a_large_batch, path, False, **options)
    resumed = run_in_ranks(train_after_a_large_batch, path, True, **options)
    assert uninterrupted[0][0][:2] == [False, True]
    assert resumed == uninterrupted


# -- what is refused over ranks --------------------------------------------------------------------


def join_with_weights(fabric: Fabric) -> str:
    model, optimizer = set_up_linear(fabric)

    def step_alone() -> None:
        with fabric.join(model):
            for _ in range(1 + fabric.global_rank):
                backward(fabric, model, 1.0, 1)
                optimizer.step()

    return outcome(step_alone)


def average_models_with_weights(fabric: Fabric) -> str:
    model, _ = set_up_linear(fabric)
    return outcome(lambda: backward(fabric, model, 1.0, 1))


def test_ranks_that_step_alone_cannot_have_weights() -> None:
    for error in run_in_ranks(join_with_weights):
        assert 'uneven="longest"' in error
    state = PostLocalSGDState(process_group=None, subgroup=None, start_localSGD_iter=5)
    strategy = DDPStrategy(
        ddp_comm_state=state, ddp_comm_hook=post_localSGD_hook, model_averaging_period=2
    )
    for error in run_in_ranks(average_models_with_weights, strategy=strategy):
        assert "model_averaging_period" in error


class UnreducedOutcome(NamedTuple):
    """Gradients after passes that are dropped before they are reduced, and alone."""

    after_unreduced: Tensor
    after_reduced_and_unreduced: Tensor
    alone: Tensor


def leave_gradients_unreduced(fabric: Fabric) -> UnreducedOutcome:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer = fabric.setup(model, optimizer)
    tokens = torch.ones(4, 3, dtype=torch.float64)

    def pass_backward(*, syncs: bool) -> None:
        with fabric.no_backward_sync(model, enabled=not syncs):
            loss = sum_of_losses(model, tokens)
            fabric.backward(loss, weight=4)

    def averaged_gradient() -> Tensor:
        fabric.clip_gradients(model, optimizer, clip_val=1e9)
        return full_tensor(model[0].weight.grad).clone()

    pass_backward(syncs=False)
    optimizer.zero_grad()
    pass_backward(syncs=True)
    after_unreduced = averaged_gradient()
    optimizer.zero_grad()
    pass_backward(syncs=True)
    pass_backward(syncs=False)
    optimizer.zero_grad()
    pass_backward(syncs=True)
    after_reduced_and_unreduced = averaged_gradient()
    optimizer.zero_grad()
    pass_backward(syncs=True)
    alone = averaged_gradient()
    return UnreducedOutcome(after_unreduced, after_reduced_and_unreduced, alone)


def test_gradients_that_are_cleared_before_they_are_reduced_leave_no_weight() -> None:
    for result in run_sharded(leave_gradients_unreduced):
        for gradient in (result.after_unreduced, result.after_reduced_and_unreduced):
            torch.testing.assert_close(gradient, result.alone, rtol=1e-12, atol=1e-8)


def leave_a_weight_out(fabric: Fabric) -> None:
    model, optimizer = set_up_linear(fabric)
    for step in range(3):
        optimizer.zero_grad()
        weight = 1
        if step == 1 and fabric.global_rank == 1:
            weight = None
        backward(fabric, model, 1.0, weight)
        optimizer.step()


@pytest.mark.slow  # The test waits for the timeout.
def test_a_weight_that_one_rank_leaves_out_is_reported_and_is_no_hang(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(RankFailedError):
        run_in_ranks(leave_a_weight_out, timeout=4.0, launcher="forkserver")
    assert "in all_reduce at" in capfd.readouterr().err


def add_a_pass_without_a_weight(fabric: Fabric, order: str, syncs: bool) -> list[str]:
    """Return the outcomes of two steps with a weighted loss, and with a plain backward pass.

    Args:
        fabric: the job.
        order: when the plain backward pass comes: before another weighted loss, before clipping, or
            between clipping and the step.
        syncs: whether it synchronizes gradients.
    """
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer = fabric.setup(model, optimizer)
    tokens = torch.ones(4, 3, dtype=torch.float64)

    def take_weighted_step() -> None:
        fabric.backward(sum_of_losses(model, tokens), weight=4)
        if order == "after clipping":
            fabric.clip_gradients(model, optimizer, clip_val=1e9)
        with fabric.no_backward_sync(model, enabled=not syncs):
            sum_of_losses(model, tokens).backward()
        if order == "before a weighted loss":
            fabric.backward(sum_of_losses(model, tokens), weight=4)
        optimizer.step()

    refusals: list[str] = []
    for _ in range(2):
        refusals.append(outcome(take_weighted_step))
        # The error says to clear the gradients.
        optimizer.zero_grad()
        fabric.backward(sum_of_losses(model, tokens), weight=4)
        optimizer.step()
        optimizer.zero_grad()
    return refusals


def add_passes_without_a_weight(fabric: Fabric) -> list[str]:
    refusals: list[str] = []
    for order in ("before a weighted loss", "before the step", "after clipping"):
        for syncs in (True, False):
            refusals.extend(add_a_pass_without_a_weight(fabric, order, syncs))
    return refusals


@pytest.mark.parametrize("run", ["single", "dp", "ddp", "fsdp"])
def test_a_plain_backward_pass_after_a_weighted_one_is_refused(run: str) -> None:
    for refusals in RUNS[run](add_passes_without_a_weight):
        for refusal in refusals:
            assert "a backward pass without fabric.backward" in refusal
            assert "fabric.backward(loss, weight=n) for every loss of a step" in refusal


class WindowOutcome(NamedTuple):
    """What three steps subtract from two weights, and how many messages a pass sends."""

    kept: list[float]
    dropped: list[float]
    dropped_through_data: list[float]
    messages: int


def take_step_of_all(model: Any, optimizer: torch.optim.Optimizer) -> list[float]:
    """Step, clear the gradients, and return what the step has subtracted from each weight."""
    before = full_tensor(model.weight.detach()).clone()
    optimizer.step()
    optimizer.zero_grad()
    return (before - full_tensor(model.weight.detach())).flatten().tolist()


def train_with_zero_gradients_on_one_rank(fabric: Fabric, syncs: bool) -> WindowOutcome:
    """Keep and drop a pass whose gradient is exactly zero on one rank, in the first windows.

    Before gradients are reduced, that of rank 1 is zero. Afterwards, that of the second weight is
    zero, which is the shard of rank 1 under FSDP.
    """
    module = nn.Linear(1, 2, bias=False)
    nn.init.ones_(module.weight)
    model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=1.0))
    value = 0.0
    if fabric.global_rank == 0:
        value = 6.0
    inputs = torch.full((1, 1), value)
    later_inputs = torch.full((1, 1), 6.0)

    def train_first_weight() -> None:
        with fabric.no_backward_sync(model, enabled=not syncs):
            loss = model(inputs)[:, 0].sum()
            fabric.backward(loss, weight=3)

    def train_both_weights() -> None:
        loss = model(later_inputs).sum()
        fabric.backward(loss, weight=3)

    train_first_weight()
    # FSDP keeps gradients that are not reduced elsewhere.
    if model.weight.grad is not None:
        local_tensor(model.weight.grad).nan_to_num_()
    with CommDebugMode() as mode:
        train_both_weights()
    kept = take_step_of_all(model, optimizer)
    train_first_weight()
    optimizer.zero_grad(set_to_none=False)
    train_both_weights()
    dropped = take_step_of_all(model, optimizer)
    train_both_weights()
    model.weight.grad.data.zero_()
    train_both_weights()
    dropped_through_data = take_step_of_all(model, optimizer)
    return WindowOutcome(kept, dropped, dropped_through_data, mode.get_total_counts())


# A scale with which no gradient overflows.
SCALED = replace(PRECISIONS["16-mixed"], loss_scale=LossScale(init_scale=2.0**8))


@pytest.mark.parametrize("syncs", [True, False])
@pytest.mark.parametrize("precision", ["32-true", SCALED], ids=["32-true", "16-mixed"])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_gradients_that_are_zero_on_one_rank_keep_their_weight_until_they_are_cleared(
    strategy: str, precision: Any, syncs: bool
) -> None:
    # Replicas are compared in saves alone, so that no such message is counted.
    first, second = run_in_ranks(
        train_with_zero_gradients_on_one_rank,
        syncs,
        strategy=strategy,
        precision=precision,
        check_replicas=True,
    )
    # Both ranks make the same collectives: neither asks alone for a new divisor.
    assert first == second
    assert first.kept == [1.5, 1.0]
    assert first.dropped == first.dropped_through_data == [2.0, 2.0]


@pytest.mark.parametrize("reads_at_once", [True, False])
def test_gradients_that_are_cleared_through_data_leave_no_weight(
    fabric: Fabric, monkeypatch: pytest.MonkeyPatch, reads_at_once: bool
) -> None:
    model, optimizer = set_up_linear(fabric)
    backward(fabric, model, 6.0, 3)
    assert take_step(model, optimizer) == 2.0
    weight_sums = fabric._session.ensure_loss_weights().weight_sums
    monkeypatch.setattr(weight_sums, "reads_at_once", reads_at_once)
    backward(fabric, model, 6.0, 3)
    model.weight.grad.data.zero_()
    backward(fabric, model, 6.0, 2)
    backward(fabric, model, 2.0, 2)
    assert take_step(model, optimizer) == 2.0


# -- optimizers that are set up late ---------------------------------------------------------------


def set_up_between_backward_and_step(
    fabric: Fabric, weight: int | None, clears: bool
) -> tuple[list[Tensor], list[Tensor]]:
    """Train the last layer, and all layers after a second optimizer is set up.

    Returns:
        The parameters, and those of a plain loop in which the second optimizer takes no part in the
        step that it is set up in.
    """
    plain = make_model(torch.float32)
    module = make_model(torch.float32)
    model, optimizer = fabric.setup(module, torch.optim.SGD(module[4].parameters(), lr=0.1))
    optimizers = [optimizer]
    plain_optimizers = [torch.optim.SGD(plain[4].parameters(), lr=0.1)]
    for number in range(3):
        batch = torch.full((2, 3), 0.5 + number)
        if weight is None:
            fabric.backward(0.1 * model(batch).mean())
        else:
            fabric.backward(0.1 * model(batch).sum(), weight=weight)
        plain_loss = 0.1 * plain(batch).mean()
        plain_loss.backward()
        if number == 1:
            late = torch.optim.SGD(module[:4].parameters(), lr=0.1)
            if clears:
                late.zero_grad()
            optimizers.append(fabric.setup_optimizers(late))
            plain_optimizers.append(torch.optim.SGD(plain[:4].parameters(), lr=0.1))
            plain_optimizers[1].zero_grad()
        for stepping in (*optimizers, *plain_optimizers):
            stepping.step()
        model.zero_grad()
        plain.zero_grad()
    return list(module.parameters()), list(plain.parameters())


@pytest.mark.parametrize(("precision", "weight"), [("32-true", 2), ("16-mixed", None)])
def test_an_optimizer_that_is_set_up_between_backward_and_step_does_not_step_by_other_gradients(
    precision: str, weight: int | None
) -> None:
    with Fabric(accelerator="cpu", devices=1, precision=precision) as fabric:
        with pytest.raises(UsageError, match="its parameters have gradients from before") as caught:
            set_up_between_backward_and_step(fabric, weight, clears=False)
        assert "optimizer.zero_grad() before this setup" in str(caught.value)
    with Fabric(accelerator="cpu", devices=1, precision=precision) as fabric:
        parameters, expected = set_up_between_backward_and_step(fabric, weight, clears=True)
        torch.testing.assert_close(parameters, expected, rtol=1e-3, atol=1e-3)


def train_twice_with_schedulers(fabric: Fabric) -> Tensor:
    """Train two models one after the other, and return the second one's parameters.

    Only rank 1 collects the first optimizer, which is in a reference cycle with its scheduler, by
    itself.
    """
    gc.disable()
    parameters = torch.empty(0)
    for number in range(2):
        model, optimizer = set_up_linear(fabric)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        for _ in range(2):
            backward(fabric, model, 1.0 + number, 3 + 100 * number)
            optimizer.step()
            optimizer.zero_grad()
        parameters = full_tensor(model.weight.detach()).clone()
        del model, optimizer, scheduler
        if fabric.global_rank == 1:
            gc.collect()
    gc.enable()
    return parameters


def test_a_dropped_optimizer_that_one_rank_has_not_collected_has_no_loss() -> None:
    first, second = run_in_ranks(train_twice_with_schedulers)
    assert torch.equal(first, second)


def test_a_function_that_drops_its_optimizer_frees_it(fabric: Fabric) -> None:
    model, optimizer = set_up_linear(fabric)
    kept = locals()
    for _ in range(3):
        backward(fabric, model, 1.0, 2)
        optimizer.step()
        optimizer.zero_grad()
    assert kept["model"] is model
    del kept
    backward(fabric, model, 1.0, 2)
    optimizer.step()
    dropped = ref(optimizer)
    del model, optimizer
    gc.collect()
    assert dropped() is None
