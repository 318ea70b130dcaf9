"""The loss scaler does what torch.amp.GradScaler does, step by step, and changes its scale only when it may."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.amp import GradScaler

from fabric.errors import ConfigurationError, UsageError
from fabric.optim.loss_scaler import LossScaler
from fabric.precision import LossScale
from tests.ranks import run_in_ranks

CPU = torch.device("cpu")
OPTIONS = {"init_scale": 2.0**10, "growth_interval": 2}


def scaler_of(*optimizers, **options):
    scaler = LossScaler(CPU, LossScale(**{**OPTIONS, **options}))
    for optimizer in optimizers:
        scaler.register(optimizer)
    return scaler


def twins(kind=torch.optim.AdamW, dtype=torch.float32, **options):
    """Two equal models, each with an optimizer of its own."""
    torch.manual_seed(1)
    first = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).to(dtype)
    second = copy.deepcopy(first)
    return [(model, kind(model.parameters(), lr=0.05, **options)) for model in (first, second)]


def same_parameters(first, second):
    return all(
        torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True)
    )


def batches(steps, overflow_at=(), dtype=torch.float32):
    generator = torch.Generator().manual_seed(2)
    for step in range(steps):
        batch = torch.randn(3, 4, generator=generator).to(dtype)
        yield batch * math.inf if step in overflow_at else batch


def loss_of(model, batch):
    return model(batch).square().mean()


# -- against torch --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overflow_at", [(), (0,), (3,), (2, 3, 4, 9)])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_scale_and_parameters_follow_torchs_scaler_step_by_step(kind, overflow_at):
    (ours, optimizer), (theirs, reference) = twins(kind)
    scaler = scaler_of(optimizer)
    torchs = GradScaler("cpu", **OPTIONS)
    for batch in batches(12, overflow_at):
        for one in (optimizer, reference):
            one.zero_grad()
        scaler.scale_loss(loss_of(ours, batch)).backward()
        torchs.scale(loss_of(theirs, batch)).backward()
        assert scaler.scale == torchs.get_scale()
        optimizer.step()
        torchs.step(reference)
        torchs.update()
        assert same_parameters(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_every_dtype_that_can_be_unscaled_equals_the_plain_loop(dtype):
    (ours, optimizer), (plain, reference) = twins(torch.optim.SGD, dtype)
    scaler = scaler_of(optimizer)
    for batch in batches(6, dtype=dtype):
        optimizer.zero_grad()
        reference.zero_grad()
        scaler.scale_loss(loss_of(ours, batch)).backward()
        loss_of(plain, batch).backward()
        optimizer.step()
        reference.step()
    assert same_parameters(ours, plain)


def test_accumulation_uses_one_scale_and_equals_torchs():
    (ours, optimizer), (theirs, reference) = twins()
    scaler = scaler_of(optimizer, growth_interval=1)
    torchs = GradScaler("cpu", init_scale=2.0**10, growth_interval=1)
    for step, batch in enumerate(batches(9, overflow_at=(4,))):
        scaler.scale_loss(loss_of(ours, batch)).backward()
        torchs.scale(loss_of(theirs, batch)).backward()
        assert scaler.scale == torchs.get_scale()
        if step % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
            torchs.step(reference)
            torchs.update()
            reference.zero_grad()
            assert same_parameters(ours, theirs)


def test_unscaling_and_clipping_before_the_step_equals_torchs():
    (ours, optimizer), (theirs, reference) = twins(torch.optim.SGD)
    scaler = scaler_of(optimizer)
    torchs = GradScaler("cpu", **OPTIONS)
    for batch in batches(6, overflow_at=(2,)):
        optimizer.zero_grad()
        reference.zero_grad()
        scaler.scale_loss(loss_of(ours, batch)).backward()
        torchs.scale(loss_of(theirs, batch)).backward()
        actual = scaler.unscale(optimizer)
        assert scaler.unscale(optimizer) == actual == (not batch.isfinite().all())
        torchs.unscale_(reference)
        for model in (ours, theirs):
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()
        torchs.step(reference)
        torchs.update()
        assert same_parameters(ours, theirs)


# -- when the scale changes -----------------------------------------------------------------------------------------


def test_second_optimizer_sees_the_same_loss_scale():
    """The trap of one update per optimizer: on a growth step the second one was scaled wrongly."""
    weights = [nn.Parameter(torch.ones(1)) for _ in range(2)]
    optimizers = [torch.optim.SGD([weight], lr=1.0) for weight in weights]
    scaler = scaler_of(*optimizers, growth_interval=1)
    for expected in (0.0, -1.0):
        scaler.scale_loss(weights[0].sum() + weights[1].sum()).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert [weight.item() for weight in weights] == [expected, expected]
    scaler.scale_loss(weights[0].sum()).backward()
    assert scaler.scale == 2.0**12


def test_one_growth_for_two_optimizers_that_share_a_backward():
    (first, a), (second, b) = twins()
    scaler = scaler_of(a, b, growth_interval=2)
    torchs = GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    (third, c), (fourth, d) = twins()
    for batch in batches(7, overflow_at=(3,)):
        scaler.scale_loss(loss_of(first, batch) + loss_of(second, batch)).backward()
        torchs.scale(loss_of(third, batch) + loss_of(fourth, batch)).backward()
        assert scaler.scale == torchs.get_scale()
        for ours, theirs in ((a, c), (b, d)):
            ours.step()
            torchs.step(theirs)
        torchs.update()
        for optimizer in (a, b, c, d):
            optimizer.zero_grad()
    assert same_parameters(first, third)
    assert same_parameters(second, fourth)


def test_scale_waits_while_another_optimizer_still_accumulates():
    (first, a), (second, b) = twins(torch.optim.SGD)
    scaler = scaler_of(a, b, growth_interval=1)
    for step, batch in enumerate(batches(4)):
        a.zero_grad()
        scaler.scale_loss(loss_of(first, batch) + loss_of(second, batch)).backward()
        assert scaler.scale == 2.0**10
        a.step()
        if step == 3:
            b.step()
            b.zero_grad()
    plain, reference = twins(torch.optim.SGD)[1]
    for batch in batches(4):
        loss_of(plain, batch).backward()
    reference.step()
    assert same_parameters(second, plain)
    scaler.scale_loss(loss_of(first, batch)).backward()
    assert scaler.scale == 2.0**11


@pytest.mark.parametrize("set_to_none", [True, False])
def test_alternating_optimizers_that_clear_their_gradients_do_not_hold_the_scale(set_to_none):
    weight = nn.Parameter(torch.ones(1))
    other = nn.Parameter(torch.ones(1))
    optimizers = [torch.optim.SGD([weight], lr=0.1), torch.optim.SGD([other], lr=0.1)]
    scaler = scaler_of(*optimizers, growth_interval=1)
    scales = []
    for step in range(6):
        optimizer = optimizers[step % 2]
        optimizer.zero_grad(set_to_none=set_to_none)
        scaler.scale_loss(weight.sum() if step % 2 == 0 else other.sum()).backward()
        scales.append(scaler.scale)
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
    assert scales == [2.0 ** (10 + step) for step in range(6)]


def test_gradients_kept_after_a_step_are_scaled_again():
    (ours, optimizer), (plain, reference) = twins(torch.optim.SGD)
    scaler = scaler_of(optimizer, growth_interval=1)
    for batch in batches(5):
        scaler.scale_loss(loss_of(ours, batch)).backward()
        loss_of(plain, batch).backward()
        optimizer.step()
        reference.step()
        for a, b in zip(ours.parameters(), plain.parameters(), strict=True):
            assert torch.equal(a.grad, b.grad)
    assert same_parameters(ours, plain)


def test_gradients_unscaled_and_then_accumulated_further_are_right():
    (ours, optimizer), (plain, reference) = twins(torch.optim.SGD)
    scaler = scaler_of(optimizer)
    for batch in batches(3):
        scaler.scale_loss(loss_of(ours, batch)).backward()
        scaler.unscale(optimizer)
        loss_of(plain, batch).backward()
    optimizer.step()
    reference.step()
    assert same_parameters(ours, plain)


def test_gradients_from_before_the_registration_count():
    (ours, optimizer), (plain, reference) = twins(torch.optim.SGD)
    early, late = batches(2)
    loss_of(ours, early).backward()
    scaler = scaler_of(optimizer)
    scaler.scale_loss(loss_of(ours, late)).backward()
    for batch in (early, late):
        loss_of(plain, batch).backward()
    optimizer.step()
    reference.step()
    assert same_parameters(ours, plain)


def test_a_second_step_on_the_same_gradients_does_not_unscale_twice():
    (ours, optimizer), (plain, reference) = twins(torch.optim.SGD)
    scaler = scaler_of(optimizer)
    (batch,) = batches(1)
    scaler.scale_loss(loss_of(ours, batch)).backward()
    loss_of(plain, batch).backward()
    for _ in range(2):
        optimizer.step()
        reference.step()
    assert same_parameters(ours, plain)


# -- overflow -------------------------------------------------------------------------------------------------------


def test_an_overflow_skips_the_step_and_leaves_gradients_and_state():
    model, optimizer = twins()[0]
    scaler = scaler_of(optimizer)
    good, bad = batches(2, overflow_at=(1,))
    scaler.scale_loss(loss_of(model, good)).backward()
    optimizer.step()
    before = copy.deepcopy(model)
    state = copy.deepcopy(optimizer.state_dict())
    optimizer.zero_grad()
    scaler.scale_loss(loss_of(model, bad)).backward()
    grads = [parameter.grad for parameter in model.parameters()]
    optimizer.step()
    assert same_parameters(before, model)
    assert all(
        parameter.grad is grad for parameter, grad in zip(model.parameters(), grads, strict=True)
    )
    assert str(optimizer.state_dict()) == str(state)


def test_an_overflow_of_one_optimizer_does_not_skip_the_other():
    (first, a), (second, b) = twins(torch.optim.SGD)
    scaler = scaler_of(a, b)
    before = copy.deepcopy(first)
    good, bad = batches(2, overflow_at=(1,))
    scaler.scale_loss(loss_of(first, bad) + loss_of(second, good)).backward()
    a.step()
    b.step()
    assert same_parameters(first, before)
    assert not same_parameters(second, before)


def overflow_on_one_rank(fabric):
    from fabric.collectives import all_reduce
    from fabric.communicators import Reduce

    communicator = fabric.strategy.runtime.communicator
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = LossScaler(
        CPU,
        LossScale(**OPTIONS),
        max_over_ranks=lambda found: all_reduce(communicator, found, Reduce.MAX),
    )
    scaler.gradients_differ = True
    scaler.register(optimizer)
    for step in range(3):
        factor = math.inf if step == 1 and fabric.global_rank == 1 else 1.0
        scaler.scale_loss(
            (weight * factor).sum() * (0.0 if step == 2 and fabric.global_rank == 0 else 1.0)
        ).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weight.detach(), scaler.scale, scaler.state_dict()["pending"]


@pytest.mark.timeout(60)
def test_an_overflow_on_one_rank_skips_the_step_on_all():
    first, second = run_in_ranks(overflow_on_one_rank)
    assert first[1:] == second[1:] == (2.0**9, 0.0)
    assert first[0].tolist() == [0.0, 0.0]
    assert second[0].tolist() == [-1.0, -1.0]


def zero_part_on_one_rank(fabric):
    from fabric.collectives import all_reduce
    from fabric.communicators import Reduce

    communicator = fabric.strategy.runtime.communicator
    stepping = nn.Parameter(torch.ones(1))
    waiting = nn.Parameter(torch.ones(1))
    optimizers = [torch.optim.SGD([weight], lr=1.0) for weight in (stepping, waiting)]
    scaler = LossScaler(
        CPU,
        LossScale(init_scale=4.0, growth_interval=1),
        max_over_ranks=lambda found: all_reduce(communicator, found, Reduce.MAX),
    )
    scaler.gradients_differ = True
    for optimizer in optimizers:
        scaler.register(optimizer)
    scaler.scale_loss(stepping.sum() + waiting.sum() * fabric.global_rank).backward()
    optimizers[0].step()
    scaler.scale_loss(stepping.sum()).backward()
    return scaler.scale


@pytest.mark.timeout(60)
def test_ranks_agree_on_whether_scaled_gradients_are_held():
    scales = run_in_ranks(zero_part_on_one_rank)
    assert scales == [4.0, 4.0]


def test_repeated_indices_of_a_sparse_gradient_overflow_only_in_sum():
    embedding = nn.Embedding(3, 2, sparse=True)
    optimizer = torch.optim.SGD(embedding.parameters(), lr=0.1)
    scaler = scaler_of(optimizer, init_scale=2.0**127)
    before = embedding.weight.detach().clone()
    scaler.scale_loss(embedding(torch.tensor([1, 1, 1, 1])).sum()).backward()
    optimizer.step()
    assert torch.equal(embedding.weight, before)


def test_sparse_gradients_equal_the_plain_loop():
    torch.manual_seed(3)
    ours = nn.Embedding(5, 2, sparse=True)
    plain = copy.deepcopy(ours)
    optimizer, reference = (
        torch.optim.SparseAdam(list(model.parameters()), lr=0.1) for model in (ours, plain)
    )
    scaler = scaler_of(optimizer, growth_interval=1)
    for indices in ([0, 1, 1], [4, 4], [2]):
        scaler.scale_loss(ours(torch.tensor(indices)).square().sum()).backward()
        plain(torch.tensor(indices)).square().sum().backward()
        optimizer.step()
        reference.step()
    assert torch.equal(ours.weight, plain.weight)


# -- losses, schedulers, closures -----------------------------------------------------------------------------------


def test_a_float16_loss_has_room_for_the_scale():
    weight = nn.Parameter(torch.ones(1))
    scaled = scaler_of(init_scale=2.0**16).scale_loss(weight.half().sum())
    assert (scaled.dtype, scaled.item()) == (torch.float32, 2.0**16)
    scaled.backward()
    assert weight.grad.dtype is torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(), (3,)])
def test_a_scaled_loss_keeps_its_dtype_and_shape(dtype, shape):
    scaled = scaler_of().scale_loss(torch.ones(shape, dtype=dtype))
    assert (scaled.dtype, scaled.shape) == (dtype, shape)
    assert bool((scaled == 2.0**10).all())


def test_an_earlier_scheduler_does_not_bypass_the_scaler():
    (ours, optimizer), (plain, reference) = twins(torch.optim.SGD)
    schedulers = [torch.optim.lr_scheduler.StepLR(one, 2, 0.5) for one in (optimizer, reference)]
    scaler = scaler_of(optimizer)
    for batch in batches(5):
        optimizer.zero_grad()
        reference.zero_grad()
        scaler.scale_loss(loss_of(ours, batch)).backward()
        loss_of(plain, batch).backward()
        optimizer.step()
        reference.step()
        for scheduler in schedulers:
            scheduler.step()
    assert same_parameters(ours, plain)


@pytest.mark.parametrize("call", [lambda o: o.step(lambda: 0), lambda o: o.step(closure=lambda: 0)])
def test_a_closure_is_refused(call):
    _, optimizer = twins()[0]
    scaler_of(optimizer)
    with pytest.raises(UsageError, match="closure"):
        call(optimizer)
    optimizer.step(None)


def test_float16_parameters_are_refused_before_anything_is_unscaled():
    half = nn.Parameter(torch.ones(1).half())
    full = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([full, half], lr=1.0)
    scaler = scaler_of(optimizer, init_scale=4.0)
    scaler.scale_loss(half.float().sum() + full.sum()).backward()
    for _ in range(2):
        with pytest.raises(ConfigurationError, match=r"model\.float"):
            optimizer.step()
    assert full.grad.item() == 4.0


def test_optimizers_are_not_kept_alive():
    import gc
    import weakref

    model, optimizer = twins()[0]
    scaler = scaler_of(optimizer)
    reference = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert reference() is None
    assert scaler.scale_loss(loss_of(model, torch.ones(1, 4))).requires_grad


# -- state ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stop_after", [1, 2, 4, 5])
def test_a_run_goes_on_exactly_from_a_state_dict(stop_after):
    (whole, optimizer), (parts, resumed) = twins()
    scaler = scaler_of(optimizer)
    before = scaler_of(resumed)
    for step, batch in enumerate(batches(8, overflow_at=(3,))):
        if step == stop_after:
            fresh = torch.optim.AdamW(parts.parameters(), lr=0.05)
            fresh.load_state_dict(resumed.state_dict())
            after = scaler_of(fresh, init_scale=1.0)
            after.load_state_dict(before.state_dict())
            before = after
            resumed = fresh
        for model, one, own in ((whole, optimizer, scaler), (parts, resumed, before)):
            one.zero_grad()
            own.scale_loss(loss_of(model, batch)).backward()
            one.step()
        assert scaler.state_dict() == before.state_dict()
        assert same_parameters(whole, parts)


def test_a_state_that_lacks_something_changes_nothing():
    scaler = scaler_of()
    with pytest.raises(KeyError, match="growth_tracker"):
        scaler.load_state_dict({"scale": 2.0, "pending": None})
    assert scaler.scale == 2.0**10


def test_after_close_an_optimizer_steps_as_if_it_had_never_been_watched() -> None:
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = LossScaler(torch.device("cpu"), LossScale())
    scaler.register(optimizer)
    scaler.scale_loss((weight * float("inf")).sum()).backward()
    optimizer.step()
    assert weight.item() == 1
    scaler.close()
    weight.grad = torch.ones(1)
    optimizer.step()
    assert weight.item() == 0
