"""The loss scaler steps as torch.amp.GradScaler does, and changes its scale only when it may."""

import copy
import gc
import math
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.amp import GradScaler

from fabric import Fabric
from fabric.collectives import all_reduce
from fabric.communicators import Reduce
from fabric.errors import ConfigurationError, UsageError
from fabric.optim.loss_scaler import LossScaler
from fabric.precision import PRECISIONS, LossScale, Precision
from tests.models import OneWeight
from tests.ranks import outcome, run_in_ranks

CPU = torch.device("cpu")
OPTIONS = {"init_scale": 2.0**10, "growth_interval": 2}


def make_scaler(*optimizers: torch.optim.Optimizer, **options: Any) -> LossScaler:
    scaler = LossScaler(CPU, LossScale(**{**OPTIONS, **options}))
    for optimizer in optimizers:
        scaler.register(optimizer)
    return scaler


def twins(kind=torch.optim.AdamW, dtype=torch.float32, **options):
    """Return two equal models, each with its optimizer."""
    torch.manual_seed(1)
    first = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).to(dtype)
    second = copy.deepcopy(first)
    return [(model, kind(model.parameters(), lr=0.05, **options)) for model in (first, second)]


def have_equal_parameters(first: nn.Module, second: nn.Module) -> bool:
    return all(
        torch.equal(*pair) for pair in zip(first.parameters(), second.parameters(), strict=True)
    )


def batches(
    steps: int, overflow_at: tuple[int, ...] = (), dtype: torch.dtype = torch.float32
) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    for step in range(steps):
        batch = torch.randn(3, 4, generator=generator).to(dtype)
        if step in overflow_at:
            batch = batch * math.inf
        yield batch


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def sum_of_losses(models: list[nn.Module], batch: torch.Tensor) -> Any:
    return sum(loss_of(model, batch) for model in models)


# -- against torch ---------------------------------------------------------------------------------


@pytest.mark.parametrize("overflow_at", [(), (0,), (3,), (2, 3, 4, 9)])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_scale_and_parameters_follow_torchs_scaler_step_by_step(kind, overflow_at):
    (ours, optimizer), (theirs, reference) = twins(kind)
    scaler = make_scaler(optimizer)
    torch_scaler = GradScaler("cpu", **OPTIONS)
    for batch in batches(12, overflow_at):
        optimizer.zero_grad()
        reference.zero_grad()
        loss = loss_of(ours, batch)
        scaler.scale_loss(loss).backward()
        torch_loss = loss_of(theirs, batch)
        torch_scaler.scale(torch_loss).backward()
        assert scaler.scale == torch_scaler.get_scale()
        optimizer.step()
        torch_scaler.step(reference)
        torch_scaler.update()
        assert have_equal_parameters(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_every_dtype_that_can_be_unscaled_equals_the_plain_loop(dtype):
    (ours, optimizer), (plain, reference) = twins(torch.optim.SGD, dtype)
    scaler = make_scaler(optimizer)
    for batch in batches(6, dtype=dtype):
        optimizer.zero_grad()
        reference.zero_grad()
        loss = loss_of(ours, batch)
        scaler.scale_loss(loss).backward()
        loss_of(plain, batch).backward()
        optimizer.step()
        reference.step()
    assert have_equal_parameters(ours, plain)


def test_accumulation_uses_one_scale_and_equals_torchs():
    (ours, optimizer), (theirs, reference) = twins()
    scaler = make_scaler(optimizer, growth_interval=1)
    torch_scaler = GradScaler("cpu", init_scale=2.0**10, growth_interval=1)
    for step, batch in enumerate(batches(9, overflow_at=(4,))):
        loss = loss_of(ours, batch)
        scaler.scale_loss(loss).backward()
        torch_loss = loss_of(theirs, batch)
        torch_scaler.scale(torch_loss).backward()
        assert scaler.scale == torch_scaler.get_scale()
        if step % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
            torch_scaler.step(reference)
            torch_scaler.update()
            reference.zero_grad()
            assert have_equal_parameters(ours, theirs)


def test_unscaling_and_clipping_before_the_step_equals_torchs():
    (ours, optimizer), (theirs, reference) = twins(torch.optim.SGD)
    scaler = make_scaler(optimizer)
    torch_scaler = GradScaler("cpu", **OPTIONS)
    for batch in batches(6, overflow_at=(2,)):
        optimizer.zero_grad()
        reference.zero_grad()
        loss = loss_of(ours, batch)
        scaler.scale_loss(loss).backward()
        torch_loss = loss_of(theirs, batch)
        torch_scaler.scale(torch_loss).backward()
        overflows = not batch.isfinite().all()
        assert scaler.unscale(optimizer) == overflows
        assert scaler.unscale(optimizer) == overflows
        torch_scaler.unscale_(reference)
        for model in (ours, theirs):
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()
        torch_scaler.step(reference)
        torch_scaler.update()
        assert have_equal_parameters(ours, theirs)


# -- when the scale changes ------------------------------------------------------------------------


def test_second_optimizer_sees_the_same_loss_scale():
    # With one update for each optimizer, a growth step would scale the second one wrongly.
    weights = [nn.Parameter(torch.ones(1)) for _ in range(2)]
    optimizers = [torch.optim.SGD([weight], lr=1.0) for weight in weights]
    scaler = make_scaler(*optimizers, growth_interval=1)
    for expected in (0.0, -1.0):
        loss = weights[0].sum() + weights[1].sum()
        scaler.scale_loss(loss).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert [weight.item() for weight in weights] == [expected, expected]
    loss = weights[0].sum()
    scaler.scale_loss(loss).backward()
    assert scaler.scale == 2.0**12


def test_one_growth_for_two_optimizers_that_share_a_backward():
    models = [model for model, _ in twins()]
    references = copy.deepcopy(models)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.05) for model in models]
    torch_optimizers = [torch.optim.AdamW(model.parameters(), lr=0.05) for model in references]
    scaler = make_scaler(*optimizers, growth_interval=2)
    torch_scaler = GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    for batch in batches(7, overflow_at=(3,)):
        loss = sum_of_losses(models, batch)
        scaler.scale_loss(loss).backward()
        torch_loss = sum_of_losses(references, batch)
        torch_scaler.scale(torch_loss).backward()
        assert scaler.scale == torch_scaler.get_scale()
        for optimizer in optimizers:
            optimizer.step()
        for optimizer in torch_optimizers:
            torch_scaler.step(optimizer)
        torch_scaler.update()
        for optimizer in (*optimizers, *torch_optimizers):
            optimizer.zero_grad()
    for model, reference in zip(models, references, strict=True):
        assert have_equal_parameters(model, reference)


def step_with_shared_parameters(
    model: nn.Module, scaler: LossScaler | None, overflow_at: tuple[int, ...] = ()
) -> None:
    """Step three optimizers of one model. The first and the last share parameters with the second.

    Without a scaler, the loop leaves out the batches that overflow.
    """
    parameters = list(model.parameters())
    groups = (parameters[:2], parameters[1:], parameters[3:])
    optimizers = [torch.optim.SGD(group, lr=0.05) for group in groups]
    if scaler is not None:
        for optimizer in optimizers:
            scaler.register(optimizer)
    for step, batch in enumerate(batches(6, overflow_at)):
        if scaler is None and step in overflow_at:
            continue
        loss = loss_of(model, batch)
        if scaler is not None:
            loss = scaler.scale_loss(loss)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad()


@pytest.mark.parametrize("overflow_at", [(), (2,)])
def test_gradients_of_optimizers_that_share_parameters_are_unscaled_once(overflow_at):
    (model, _), (plain_model, _) = twins()
    step_with_shared_parameters(model, make_scaler(), overflow_at)
    step_with_shared_parameters(plain_model, None, overflow_at)
    assert have_equal_parameters(model, plain_model)


def test_kept_gradients_of_optimizers_that_share_parameters_are_scaled_once():
    (model, first), (plain_model, plain_optimizer) = twins(torch.optim.SGD)
    second = torch.optim.SGD(model.parameters(), lr=0.05)
    scaler = make_scaler(first, second)
    for batch in batches(2):
        loss = loss_of(model, batch)
        scaler.scale_loss(loss).backward()
        scaler.unscale(first)
        loss_of(plain_model, batch).backward()
    second.step()
    plain_optimizer.step()
    assert have_equal_parameters(model, plain_model)


def test_scale_waits_while_another_optimizer_still_accumulates():
    (first, stepping), (second, accumulating) = twins(torch.optim.SGD)
    scaler = make_scaler(stepping, accumulating, growth_interval=1)
    for step, batch in enumerate(batches(4)):
        stepping.zero_grad()
        loss = sum_of_losses([first, second], batch)
        scaler.scale_loss(loss).backward()
        assert scaler.scale == 2.0**10
        stepping.step()
        if step == 3:
            accumulating.step()
            accumulating.zero_grad()
    plain, reference = twins(torch.optim.SGD)[1]
    for batch in batches(4):
        loss_of(plain, batch).backward()
    reference.step()
    assert have_equal_parameters(second, plain)
    loss = loss_of(first, batch)
    scaler.scale_loss(loss).backward()
    assert scaler.scale == 2.0**11


@pytest.mark.parametrize("set_to_none", [True, False])
def test_alternating_optimizers_that_clear_their_gradients_do_not_hold_the_scale(set_to_none):
    weights = [nn.Parameter(torch.ones(1)) for _ in range(2)]
    optimizers = [torch.optim.SGD([weight], lr=0.1) for weight in weights]
    scaler = make_scaler(*optimizers, growth_interval=1)
    scales = []
    for step in range(6):
        weight = weights[step % 2]
        optimizer = optimizers[step % 2]
        optimizer.zero_grad(set_to_none=set_to_none)
        loss = weight.sum()
        scaler.scale_loss(loss).backward()
        scales.append(scaler.scale)
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
    assert scales == [2.0**10, 2.0**11, 2.0**12, 2.0**13, 2.0**14, 2.0**15]


def test_gradients_kept_after_a_step_are_scaled_again():
    (ours, optimizer), (plain, reference) = twins(torch.optim.SGD)
    scaler = make_scaler(optimizer, growth_interval=1)
    for batch in batches(5):
        loss = loss_of(ours, batch)
        scaler.scale_loss(loss).backward()
        loss_of(plain, batch).backward()
        optimizer.step()
        reference.step()
        for parameter, expected in zip(ours.parameters(), plain.parameters(), strict=True):
            assert torch.equal(parameter.grad, expected.grad)
    assert have_equal_parameters(ours, plain)


def test_gradients_unscaled_and_then_accumulated_further_are_right():
    (ours, optimizer), (plain, reference) = twins(torch.optim.SGD)
    scaler = make_scaler(optimizer)
    for batch in batches(3):
        loss = loss_of(ours, batch)
        scaler.scale_loss(loss).backward()
        scaler.unscale(optimizer)
        loss_of(plain, batch).backward()
    optimizer.step()
    reference.step()
    assert have_equal_parameters(ours, plain)


def test_gradients_from_before_the_registration_count():
    (ours, optimizer), (plain, reference) = twins(torch.optim.SGD)
    early, late = batches(2)
    loss_of(ours, early).backward()
    scaler = make_scaler(optimizer)
    loss = loss_of(ours, late)
    scaler.scale_loss(loss).backward()
    for batch in (early, late):
        loss_of(plain, batch).backward()
    optimizer.step()
    reference.step()
    assert have_equal_parameters(ours, plain)


def test_a_second_step_on_the_same_gradients_does_not_unscale_twice():
    (ours, optimizer), (plain, reference) = twins(torch.optim.SGD)
    scaler = make_scaler(optimizer)
    (batch,) = batches(1)
    loss = loss_of(ours, batch)
    scaler.scale_loss(loss).backward()
    loss_of(plain, batch).backward()
    for _ in range(2):
        optimizer.step()
        reference.step()
    assert have_equal_parameters(ours, plain)


# -- overflow --------------------------------------------------------------------------------------


def test_an_overflow_skips_the_step_and_leaves_gradients_and_state():
    model, optimizer = twins()[0]
    scaler = make_scaler(optimizer)
    good, bad = batches(2, overflow_at=(1,))
    loss = loss_of(model, good)
    scaler.scale_loss(loss).backward()
    optimizer.step()
    before = copy.deepcopy(model)
    state = copy.deepcopy(optimizer.state_dict())
    optimizer.zero_grad()
    loss = loss_of(model, bad)
    scaler.scale_loss(loss).backward()
    grads = [parameter.grad for parameter in model.parameters()]
    optimizer.step()
    assert have_equal_parameters(before, model)
    for parameter, grad in zip(model.parameters(), grads, strict=True):
        assert parameter.grad is grad
    assert str(optimizer.state_dict()) == str(state)


def test_an_overflow_of_one_optimizer_does_not_skip_the_other():
    (first, first_optimizer), (second, second_optimizer) = twins(torch.optim.SGD)
    scaler = make_scaler(first_optimizer, second_optimizer)
    before = copy.deepcopy(first)
    good, bad = batches(2, overflow_at=(1,))
    loss = loss_of(first, bad) + loss_of(second, good)
    scaler.scale_loss(loss).backward()
    first_optimizer.step()
    second_optimizer.step()
    assert have_equal_parameters(first, before)
    assert not have_equal_parameters(second, before)


def make_scaler_of_ranks(fabric: Fabric, **options: Any) -> LossScaler:
    """Make a scaler that reduces whether gradients overflow over the ranks."""
    communicator = fabric.strategy.runtime.communicator

    def max_over_ranks(overflows: torch.Tensor) -> torch.Tensor:
        return all_reduce(communicator, overflows, Reduce.MAX)

    scaler = LossScaler(CPU, LossScale(**options), max_over_ranks=max_over_ranks)
    scaler.gradients_may_differ = True
    return scaler


def overflow_on_one_rank(fabric: Fabric) -> tuple[list[float], float, float]:
    """Return the weight, the scale and the pending overflow after three steps.

    The second step overflows on rank 1. The gradients of the third are zero on rank 0.
    """
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = make_scaler_of_ranks(fabric, **OPTIONS)
    scaler.register(optimizer)
    # Each rank's factor of each step.
    factors = [(1.0, 1.0, 0.0), (1.0, math.inf, 1.0)][fabric.global_rank]
    for factor in factors:
        loss = (weight * factor).sum()
        scaler.scale_loss(loss).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weight.tolist(), scaler.scale, scaler.state_dict()["pending"]


def test_an_overflow_on_one_rank_skips_the_step_on_all():
    first, second = run_in_ranks(overflow_on_one_rank)
    assert first == ([0.0, 0.0], 2.0**9, 0.0)
    assert second == ([-1.0, -1.0], 2.0**9, 0.0)


def hold_scaled_gradients_on_one_rank(fabric: Fabric) -> float:
    stepping = nn.Parameter(torch.ones(1))
    waiting = nn.Parameter(torch.ones(1))
    stepping_optimizer = torch.optim.SGD([stepping], lr=1.0)
    waiting_optimizer = torch.optim.SGD([waiting], lr=1.0)
    scaler = make_scaler_of_ranks(fabric, init_scale=4.0, growth_interval=1)
    scaler.register(stepping_optimizer)
    scaler.register(waiting_optimizer)
    # The gradients of the waiting parameter are zero on rank 0.
    loss = stepping.sum() + waiting.sum() * fabric.global_rank
    scaler.scale_loss(loss).backward()
    stepping_optimizer.step()
    loss = stepping.sum()
    scaler.scale_loss(loss).backward()
    return scaler.scale


def test_ranks_agree_on_whether_scaled_gradients_are_held():
    scales = run_in_ranks(hold_scaled_gradients_on_one_rank)
    assert scales == [4.0, 4.0]


def test_repeated_indices_of_a_sparse_gradient_overflow_only_in_sum():
    embedding = nn.Embedding(3, 2, sparse=True)
    optimizer = torch.optim.SGD(embedding.parameters(), lr=0.1)
    scaler = make_scaler(optimizer, init_scale=2.0**127)
    before = embedding.weight.detach().clone()
    loss = embedding(torch.tensor([1, 1, 1, 1])).sum()
    scaler.scale_loss(loss).backward()
    optimizer.step()
    assert torch.equal(embedding.weight, before)


def test_sparse_gradients_equal_the_plain_loop():
    torch.manual_seed(3)
    ours = nn.Embedding(5, 2, sparse=True)
    plain = copy.deepcopy(ours)
    optimizer = torch.optim.SparseAdam(list(ours.parameters()), lr=0.1)
    reference = torch.optim.SparseAdam(list(plain.parameters()), lr=0.1)
    scaler = make_scaler(optimizer, growth_interval=1)
    for indices in ([0, 1, 1], [4, 4], [2]):
        loss = ours(torch.tensor(indices)).square().sum()
        scaler.scale_loss(loss).backward()
        plain(torch.tensor(indices)).square().sum().backward()
        optimizer.step()
        reference.step()
    assert torch.equal(ours.weight, plain.weight)


# -- losses, schedulers, closures ------------------------------------------------------------------


def test_a_float16_loss_has_room_for_the_scale():
    weight = nn.Parameter(torch.ones(1))
    scaled = make_scaler(init_scale=2.0**16).scale_loss(weight.half().sum())
    assert scaled.dtype is torch.float32
    assert scaled.item() == 2.0**16
    scaled.backward()
    assert weight.grad.dtype is torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(), (3,)])
def test_a_scaled_loss_keeps_its_dtype_and_shape(dtype, shape):
    scaled = make_scaler().scale_loss(torch.ones(shape, dtype=dtype))
    assert scaled.dtype is dtype
    assert scaled.shape == shape
    assert scaled.eq(2.0**10).all()


def test_an_earlier_scheduler_does_not_bypass_the_scaler():
    (ours, optimizer), (plain, reference) = twins(torch.optim.SGD)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    reference_scheduler = torch.optim.lr_scheduler.StepLR(reference, 2, 0.5)
    scaler = make_scaler(optimizer)
    for batch in batches(5):
        optimizer.zero_grad()
        reference.zero_grad()
        loss = loss_of(ours, batch)
        scaler.scale_loss(loss).backward()
        loss_of(plain, batch).backward()
        optimizer.step()
        reference.step()
        scheduler.step()
        reference_scheduler.step()
    assert have_equal_parameters(ours, plain)


def closure():
    return torch.zeros(())


@pytest.mark.parametrize(
    ("args", "kwargs"), [((closure,), {}), ((), {"closure": closure})], ids=["position", "keyword"]
)
def test_a_closure_is_refused(args, kwargs):
    _, optimizer = twins()[0]
    make_scaler(optimizer)
    with pytest.raises(UsageError, match="closure"):
        optimizer.step(*args, **kwargs)
    optimizer.step(None)


def test_float16_parameters_are_refused_before_anything_is_unscaled():
    half = nn.Parameter(torch.ones(1).half())
    full = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([full, half], lr=1.0)
    scaler = make_scaler(optimizer, init_scale=4.0)
    loss = half.float().sum() + full.sum()
    scaler.scale_loss(loss).backward()
    for _ in range(2):
        with pytest.raises(ConfigurationError, match=r"model\.float"):
            optimizer.step()
    assert full.grad.item() == 4.0


def test_optimizers_are_not_kept_alive():
    model, optimizer = twins()[0]
    scaler = make_scaler(optimizer)
    reference = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert reference() is None
    assert scaler.scale_loss(loss_of(model, torch.ones(1, 4))).requires_grad


# -- state -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("stop_after", [1, 2, 4, 5])
def test_a_run_goes_on_exactly_from_a_state_dict(stop_after):
    (model, optimizer), (resumed_model, resumed_optimizer) = twins()
    scaler = make_scaler(optimizer)
    resumed_scaler = make_scaler(resumed_optimizer)
    for step, batch in enumerate(batches(8, overflow_at=(3,))):
        if step == stop_after:
            optimizer_state = resumed_optimizer.state_dict()
            scaler_state = resumed_scaler.state_dict()
            resumed_optimizer = torch.optim.AdamW(resumed_model.parameters(), lr=0.05)
            resumed_optimizer.load_state_dict(optimizer_state)
            resumed_scaler = make_scaler(resumed_optimizer, init_scale=1.0)
            resumed_scaler.load_state_dict(scaler_state)
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        scaler.scale_loss(loss).backward()
        optimizer.step()
        resumed_optimizer.zero_grad()
        resumed_scaler.scale_loss(loss_of(resumed_model, batch)).backward()
        resumed_optimizer.step()
        assert scaler.state_dict() == resumed_scaler.state_dict()
        assert have_equal_parameters(model, resumed_model)


def test_a_state_that_lacks_something_changes_nothing():
    scaler = make_scaler()
    with pytest.raises(KeyError, match="growth_tracker"):
        scaler.load_state_dict({"scale": 2.0, "pending": None})
    assert scaler.scale == 2.0**10


def test_after_close_an_optimizer_steps_as_if_it_had_never_been_watched() -> None:
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = LossScaler(CPU, LossScale())
    scaler.register(optimizer)
    loss = (weight * math.inf).sum()
    scaler.scale_loss(loss).backward()
    optimizer.step()
    assert weight.item() == 1
    scaler.close()
    weight.grad = torch.ones(1)
    optimizer.step()
    assert weight.item() == 0


# -- with Fabric: settings, and steps that were skipped -------------------------------------------

SMALL = replace(PRECISIONS["16-mixed"], loss_scale=LossScale(init_scale=2.0**4, growth_interval=2))


class StepState(NamedTuple):
    """The state after a step."""

    was_skipped: bool
    learning_rate: float
    scale: float


def fabric_in_one_process(precision: Precision | str | None = None) -> Fabric:
    return Fabric(accelerator="cpu", devices=1, environment="none", precision=precision)


def set_up_linear(fabric: Fabric) -> tuple[Any, torch.optim.Optimizer]:
    module = nn.Linear(2, 1, bias=False)
    return fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))


def set_up_with_sgd(fabric: Fabric, net: nn.Module) -> tuple[Any, torch.optim.Optimizer]:
    return fabric.setup(net, torch.optim.SGD(net.parameters(), lr=1.0))


def described_scale(fabric: Fabric) -> float:
    fabric.barrier()  # The barrier connects, where nothing did before.
    return float(fabric.describe().rpartition("loss scale")[2])


def train_with_an_overflow(fabric: Fabric, bad_rank: int = 0) -> list[StepState]:
    """Make five steps, the second of which overflows; return the states before and after them."""
    model, optimizer = set_up_linear(fabric)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)

    def state() -> StepState:
        was_skipped = fabric.step_was_skipped(optimizer)
        return StepState(was_skipped, optimizer.param_groups[0]["lr"], described_scale(fabric))

    states = [state()]
    for step in range(5):
        inputs = torch.ones(1, 2)
        if step == 1 and fabric.global_rank == bad_rank:
            inputs *= math.inf
        loss = model(inputs).sum()
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if not fabric.step_was_skipped(optimizer):
            scheduler.step()
        states.append(state())
    return states


def skipped_steps_of_a_sum(fabric: Fabric) -> list[bool]:
    """Return which steps overflow. The loss is the sum over two samples. The first one is large."""
    torch.manual_seed(0)
    model, optimizer = set_up_with_sgd(fabric, nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)))
    samples = torch.tensor([[4.0], [0.01]]).expand(2, 4)
    inputs = samples[fabric.global_rank :: fabric.world_size]
    skipped: list[bool] = []
    for _ in range(12):
        outputs = model(inputs)
        loss = outputs.float().square().sum() * 1e-3
        fabric.backward(loss, reduce="sum")
        optimizer.step()
        optimizer.zero_grad()
        skipped.append(fabric.step_was_skipped(optimizer))
    return skipped


def test_a_sum_over_ranks_overflows_at_the_scale_of_one_process_over_the_number_of_ranks() -> None:
    large = replace(SMALL, loss_scale=LossScale(init_scale=2.0**29, growth_interval=3))
    half_as_large = replace(SMALL, loss_scale=LossScale(init_scale=2.0**28, growth_interval=3))
    [expected] = run_in_ranks(
        skipped_steps_of_a_sum, ranks=1, strategy="single_device", precision=large
    )
    assert expected[0]
    assert not all(expected)
    for skipped in run_in_ranks(skipped_steps_of_a_sum, precision=half_as_large):
        assert skipped == expected
    [first_skipped, *_] = run_in_ranks(skipped_steps_of_a_sum, precision=large)
    assert sum(first_skipped) > sum(expected)


# The scale changes at the start of the next backward pass.
EXPECTED_STATES = [
    StepState(False, 0.1, 16.0),
    StepState(False, 0.05, 16.0),
    StepState(True, 0.05, 16.0),
    StepState(False, 0.025, 8.0),
    StepState(False, 0.0125, 8.0),
    StepState(False, 0.00625, 16.0),
]


def norms_in_hooks(fabric: Fabric) -> list[float]:
    """Return the norms that two hooks of the user see, and the weight after their changes."""
    net = OneWeight()
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    norms: list[float] = []

    def note_norm_and_halve(stepped: torch.optim.Optimizer, *_: Any) -> None:
        [grad] = [parameter.grad for parameter in stepped.param_groups[0]["params"]]
        assert grad is not None
        norms.append(grad.norm().item())
        grad.mul_(0.5)

    optimizer.register_step_pre_hook(note_norm_and_halve)
    model, optimizer = fabric.setup(net, optimizer)
    optimizer.register_step_pre_hook(note_norm_and_halve)
    fabric.backward(model(torch.ones(4)))
    optimizer.step()
    return [*norms, net.weight.mean().item()]


def test_hooks_of_the_user_see_gradients_without_the_scale_whenever_they_were_registered() -> None:
    with Fabric(accelerator="cpu", devices=1, precision="32-true") as fabric:
        expected = norms_in_hooks(fabric)
    with Fabric(accelerator="cpu", devices=1, precision="16-mixed") as fabric:
        assert norms_in_hooks(fabric) == expected
    assert run_in_ranks(norms_in_hooks, precision="16-mixed") == [expected, expected]


def test_a_scheduler_leaves_out_the_steps_that_were_skipped() -> None:
    with fabric_in_one_process(SMALL) as fabric:
        assert train_with_an_overflow(fabric) == EXPECTED_STATES


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_all_ranks_know_of_an_overflow_on_one_of_them(strategy: str) -> None:
    results = run_in_ranks(train_with_an_overflow, 1, strategy=strategy, precision=SMALL)
    assert results == [EXPECTED_STATES, EXPECTED_STATES]


def test_other_precisions_skip_no_step() -> None:
    with fabric_in_one_process() as fabric:
        model, optimizer = set_up_linear(fabric)
        loss = model(torch.ones(1, 2)).sum()
        fabric.backward(loss)
        optimizer.step()
        assert not fabric.step_was_skipped(optimizer)


def test_steps_of_two_optimizers_are_skipped_apart() -> None:
    with fabric_in_one_process(SMALL) as fabric:
        good, good_optimizer = set_up_linear(fabric)
        bad, bad_optimizer = set_up_linear(fabric)
        loss = good(torch.ones(1, 2)).sum() + bad(torch.full((1, 2), math.inf)).sum()
        fabric.backward(loss)
        good_optimizer.step()
        bad_optimizer.step()
        assert not fabric.step_was_skipped(good_optimizer)
        assert fabric.step_was_skipped(bad_optimizer)


def test_two_optimizers_of_one_loss_unscale_their_gradients() -> None:
    with fabric_in_one_process("16-mixed") as fabric:
        nets = [OneWeight(), OneWeight()]
        first, first_optimizer = set_up_with_sgd(fabric, nets[0])
        second, second_optimizer = set_up_with_sgd(fabric, nets[1])
        loss = first(torch.ones(4)) + second(torch.ones(4))
        fabric.backward(loss)
        first_optimizer.step()
        second_optimizer.step()
        for net in nets:
            assert net.weight.tolist() == [0.0] * 4


def test_a_step_is_unscaled_where_a_scheduler_was_made_before_the_setup() -> None:
    with fabric_in_one_process("16-mixed") as fabric:
        net = OneWeight()
        optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        model, optimizer, _ = fabric.setup(net, optimizer, scheduler=scheduler)
        loss = model(torch.ones(4))
        fabric.backward(loss)
        optimizer.step()
        assert net.weight.tolist() == [0.0] * 4


def scales_while_one_optimizer_accumulates(fabric: Fabric) -> list[float]:
    stepping, stepping_optimizer = set_up_with_sgd(fabric, OneWeight())
    accumulating, accumulating_optimizer = set_up_with_sgd(fabric, OneWeight())
    scales = []
    for _ in range(3):
        # The accumulated gradients are zero on rank 0.
        inputs = torch.full((4,), float(fabric.global_rank))
        with fabric.no_backward_sync(accumulating):
            loss = accumulating(inputs)
            fabric.backward(loss)
        scales.append(described_scale(fabric))
        loss = stepping(torch.full((4,), math.inf))
        fabric.backward(loss)
        stepping_optimizer.step()
        stepping_optimizer.zero_grad()
    accumulating_optimizer.zero_grad()
    return scales


def test_ranks_have_the_same_loss_scale_while_one_of_two_optimizers_accumulates() -> None:
    scales = run_in_ranks(scales_while_one_optimizer_accumulates, precision="16-mixed")
    assert scales == [[65536.0] * 3] * 2


# -- losses that are not scaled --------------------------------------------------------------------


def mix_with_unscaled_losses(fabric: Fabric) -> dict[str, str]:
    """Return the outcomes of backward passes without ``fabric.backward`` beside others with it."""
    model, optimizer = set_up_with_sgd(fabric, nn.Linear(2, 2))
    other_model, other_optimizer = set_up_with_sgd(fabric, nn.Linear(2, 2))
    inputs = torch.ones(1, 2)

    def scaled_pass() -> None:
        loss = model(inputs).sum()
        fabric.backward(loss)

    outcomes: dict[str, str] = {}
    scaled_pass()
    model(inputs).sum().backward()
    outcomes["after"] = outcome(optimizer.step)
    outcomes["before another loss"] = outcome(scaled_pass)
    outcomes["once more"] = outcome(scaled_pass)
    optimizer.zero_grad()
    scaled_pass()
    outcomes["cleared"] = outcome(optimizer.step)
    optimizer.zero_grad()
    with fabric.no_backward_sync(model):
        model(inputs).sum().backward()
    outcomes["local"] = outcome(scaled_pass)
    optimizer.zero_grad()
    scaled_pass()
    other_model(inputs).sum().backward()
    outcomes["other optimizer"] = outcome(other_optimizer.step)
    outcomes["first optimizer"] = outcome(optimizer.step)
    return outcomes


@pytest.mark.parametrize("strategy", ["single_device", "ddp", "fsdp"])
def test_a_loss_that_is_not_scaled_is_refused_beside_those_that_are(strategy: str) -> None:
    ranks = 1 if strategy == "single_device" else 2
    options = {"strategy": strategy, "ranks": ranks, "precision": SMALL}
    for rank, outcomes in enumerate(run_in_ranks(mix_with_unscaled_losses, **options)):
        assert outcomes.pop("cleared") == outcomes.pop("first optimizer") == "fine"
        for name, text in outcomes.items():
            assert text.startswith("UsageError"), name
            assert f"on rank {rank}" in text
            assert "its loss was not multiplied by the loss scale" in text
            assert "fabric.backward(loss), in place of loss.backward(), for every loss" in text


@pytest.mark.parametrize("precision", [SMALL, "32-true"])
def test_an_optimizer_that_is_not_set_up_has_no_answer(precision: Precision | str) -> None:
    with fabric_in_one_process(precision) as fabric:
        model, _ = set_up_linear(fabric)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(UsageError, match=r"step_was_skipped\(SGD\)"):
            fabric.step_was_skipped(optimizer)


def test_loading_a_checkpoint_restores_its_scale(tmp_path: Path) -> None:
    with fabric_in_one_process("16-mixed") as fabric:
        fabric.save(tmp_path / "file.pt", {"n": 1})
    with fabric_in_one_process(SMALL) as fabric:
        assert described_scale(fabric) == 2.0**4
        fabric.load(tmp_path / "file.pt", {"n": 0})
        assert described_scale(fabric) == 2.0**16


@pytest.mark.parametrize("value", [0, -2.0, 3.0, math.inf, math.nan, 2.0**-127, 2.0**128])
def test_a_first_scale_is_a_power_of_two_in_the_range_of_float32(value: float) -> None:
    with pytest.raises(ConfigurationError, match="power of two"):
        LossScale(init_scale=value)


@pytest.mark.parametrize("value", [0, -1, 2.5, True, 2**31])
def test_a_growth_interval_is_a_number_of_steps(value: Any) -> None:
    with pytest.raises(ConfigurationError, match="number of steps"):
        LossScale(growth_interval=value)


@pytest.mark.parametrize("value", [1, 2.0**-126, 2.0**127])
def test_the_limits_themselves_are_valid(value: float) -> None:
    precision = replace(SMALL, loss_scale=LossScale(init_scale=value, growth_interval=1))
    with fabric_in_one_process(precision) as fabric:
        # The scale is printed with six digits.
        assert described_scale(fabric) == pytest.approx(value, rel=1e-5)
