"""Gradients of earlier backward passes that the user drops: nothing of them reaches a step."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from fabric import Fabric
from fabric._torch import full_tensor
from fabric.strategies import FSDPStrategy, ModelParallelStrategy
from tests.ranks import run_in_ranks

WINDOWS = 2
# The second of the three micro-batches of each window is dropped, with the first.
DROPPED = 1
LAST = 2


class Clip(nn.Module):
    """Two layers, the last of which is on one rank, and a parameter that cannot be sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.last = nn.Linear(8, 1)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.last(self.first(x).tanh())


def make_model() -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(0)
    module = Clip().double()
    return module, torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


def micro_batch(window: int, number: int) -> Tensor:
    """Return the samples of all ranks. Those of the dropped micro-batches are huge."""
    generator = torch.Generator().manual_seed(10 * window + number)
    samples = torch.randn(8, 4, generator=generator, dtype=torch.float64)
    if number == LAST:
        return samples
    return 100 * samples


def train_plainly() -> list[Tensor]:
    """Return the parameters after steps with the micro-batches that are not dropped."""
    model, optimizer = make_model()
    for window in range(WINDOWS):
        optimizer.zero_grad()
        model(micro_batch(window, LAST)).square().mean().backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def clear_by_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()


def set_to_zero_by_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad(set_to_none=False)


def clear_by_model(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.zero_grad()


def set_to_zero_by_model(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.zero_grad(set_to_none=False)


def set_data_to_zero(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.data.zero_()


def clear_by_hand(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        parameter.grad = None


def set_to_zero_by_hand(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.zero_()


def clear_by_outer_module(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    nn.ModuleList([model]).zero_grad()


def clear_by_parts(model: Any, optimizer: torch.optim.Optimizer) -> None:
    model.first.zero_grad()
    model.last.zero_grad()
    model.scale.grad = None


CLEARINGS = [
    clear_by_optimizer,
    set_to_zero_by_optimizer,
    clear_by_model,
    set_to_zero_by_model,
    set_data_to_zero,
    clear_by_hand,
    set_to_zero_by_hand,
    clear_by_outer_module,
    clear_by_parts,
]
Clear = Callable[[nn.Module, torch.optim.Optimizer], None]


def train(
    fabric: Fabric, clear: Clear, has_weight: bool, place: str, accumulates_locally: bool = True
) -> list[Tensor]:
    """Return the parameters after windows whose first micro-batches are dropped.

    Args:
        fabric: the job.
        clear: drops the gradients.
        has_weight: whether the losses are sums with a weight.
        place: where the gradients are dropped. ``"within"`` is within ``no_backward_sync``, after
            the passes of the dropped micro-batches, and ``"after"`` is after the context.
            ``"between"`` is between the forward and the backward pass of the last micro-batch.
        accumulates_locally: whether only the last pass of a window reduces gradients.
    """
    model, optimizer = fabric.setup(*make_model())
    for window in range(WINDOWS):
        for number in range(LAST + 1):
            rank_samples = micro_batch(window, number)[fabric.global_rank :: fabric.world_size]
            is_local = accumulates_locally and number != LAST
            with fabric.no_backward_sync(model, enabled=is_local):
                errors = model(rank_samples).square()
                if place == "between" and number == LAST:
                    clear(model, optimizer)
                if has_weight:
                    fabric.backward(errors.sum(), weight=len(rank_samples))
                else:
                    fabric.backward(errors.mean())
                if place == "within" and number == DROPPED:
                    clear(model, optimizer)
            if place == "after" and number == DROPPED:
                clear(model, optimizer)
        optimizer.step()
        optimizer.zero_grad()
    return [full_tensor(parameter.detach()) for parameter in model.parameters()]


def train_in_all_ways(fabric: Fabric) -> list[list[Tensor]]:
    parameters = train_in_some_ways(fabric)
    for clear in CLEARINGS:
        for has_weight in (False, True):
            parameters.append(train(fabric, clear, has_weight, "after"))
            parameters.append(train(fabric, clear, has_weight, "between"))
    return parameters


def train_in_some_ways(fabric: Fabric) -> list[list[Tensor]]:
    parameters: list[list[Tensor]] = []
    for has_weight in (False, True):
        parameters.append(train(fabric, clear_by_optimizer, has_weight, "within"))
        parameters.append(train(fabric, clear_by_parts, has_weight, "between", False))
    return parameters


def shard(**options: Any) -> FSDPStrategy:
    return FSDPStrategy(start_method="forkserver", auto_wrap_policy={nn.Linear}, **options)


RUNS: dict[str, Callable[..., list[Any]]] = {
    "single": partial(run_in_ranks, ranks=1, strategy="auto"),
    "ddp": run_in_ranks,
    "fsdp": partial(run_in_ranks, strategy=shard()),
    "HYBRID_SHARD": partial(
        run_in_ranks,
        ranks=4,
        strategy=shard(sharding_strategy="HYBRID_SHARD", device_mesh=(2, 2)),
    ),
    "SHARD_GRAD_OP": partial(run_in_ranks, strategy=shard(sharding_strategy="SHARD_GRAD_OP")),
    "mesh": partial(run_in_ranks, strategy=ModelParallelStrategy(data_parallel_size=2)),
}


# The other strategies drop gradients as "fsdp" does.
ALL_WAYS = ("single", "ddp", "fsdp")


def runs_and_ways() -> list[Any]:
    parameters = []
    for run in RUNS:
        if run in ALL_WAYS:
            parameters.append(pytest.param(run, train_in_all_ways, id=run))
        else:
            parameters.append(pytest.param(run, train_in_some_ways, id=f"{run}, some ways"))
            marks = [pytest.mark.slow, pytest.mark.soak]
            parameters.append(pytest.param(run, train_in_all_ways, id=run, marks=marks))
    return parameters


@pytest.mark.parametrize(("run", "ways"), runs_and_ways())
def test_gradients_that_are_dropped_within_a_window_reach_no_step(
    run: str, ways: Callable[[Fabric], list[list[Tensor]]]
) -> None:
    expected = train_plainly()
    for parameters_by_way in RUNS[run](ways):
        for actual in parameters_by_way:
            torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def train_in_low_precision(fabric: Fabric) -> list[list[Tensor]]:
    parameters = [
        train_one_micro_batch(fabric, clear_by_model, between_passes=False),
        train(fabric, clear_by_optimizer, has_weight=False, place="within"),
    ]
    for clear in (clear_by_parts, set_to_zero_by_hand):
        for has_weight in (False, True):
            parameters.append(train(fabric, clear, has_weight, "between"))
            parameters.append(train(fabric, clear, has_weight, "between", False))
    return parameters


def train_one_micro_batch(
    fabric: Fabric, clear: Clear, between_passes: bool, compiles: bool = False
) -> list[Tensor]:
    """Return the parameters after steps with the last micro-batch of each window alone.

    Args:
        fabric: the job.
        clear: clears the gradients of the step before.
        between_passes: clear between a forward and a backward pass, and otherwise before both.
        compiles: compile the model.
    """
    model, optimizer = fabric.setup(*make_model())
    forward: Any = model
    if compiles:
        forward = torch.compile(model, backend="eager")
    for window in range(WINDOWS):
        rank_samples = micro_batch(window, LAST)[fabric.global_rank :: fabric.world_size]
        if not between_passes:
            clear(model, optimizer)
        loss = forward(rank_samples).square().mean()
        if between_passes:
            clear(model, optimizer)
        fabric.backward(loss)
        optimizer.step()
    return [full_tensor(parameter.detach()) for parameter in model.parameters()]


def clear_between_passes(fabric: Fabric) -> list[list[Tensor]]:
    return [train_one_micro_batch(fabric, clear, between_passes=True) for clear in CLEARINGS]


def clear_before_passes(fabric: Fabric) -> list[list[Tensor]]:
    return [train_one_micro_batch(fabric, clear, between_passes=False) for clear in CLEARINGS]


def clear_between_compiled_passes(fabric: Fabric) -> list[list[Tensor]]:
    parameters: list[list[Tensor]] = []
    for clear in (clear_by_model, clear_by_parts, set_to_zero_by_hand):
        parameters.append(train_one_micro_batch(fabric, clear, True, compiles=True))
    return parameters


def clear_between_several_passes(fabric: Fabric) -> list[list[Tensor]]:
    """Return the parameters after steps with other passes before the backward pass."""
    model, optimizer = fabric.setup(*make_model())
    for window in range(WINDOWS):
        rank_samples = micro_batch(window, LAST)[fabric.global_rank :: fabric.world_size]
        inputs = rank_samples.clone().requires_grad_()
        torch.autograd.grad(model(inputs).sum(), inputs)  # gradients of the inputs only
        first_outputs = model(rank_samples[:1])
        model.first.zero_grad()
        other_outputs = model(rank_samples[1:])
        model.last.zero_grad(set_to_none=False)
        model.scale.grad = None
        with torch.no_grad():
            model(rank_samples)
        loss = torch.cat([first_outputs, other_outputs]).square().mean()
        loss.backward()  # without fabric.backward
        optimizer.step()
    return [[full_tensor(parameter.detach()) for parameter in model.parameters()]]


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_gradients_that_fsdp_keeps_in_another_dtype_are_dropped(precision: Any) -> None:
    for plain, *parameters_by_way in run_in_ranks(
        train_in_low_precision, strategy=shard(), precision=precision
    ):
        for dropped in parameters_by_way:
            torch.testing.assert_close(dropped, plain, rtol=0, atol=0)


@pytest.mark.parametrize("run", ["ddp", "fsdp"])
@pytest.mark.parametrize(
    "function",
    [
        clear_between_passes,
        clear_before_passes,
        clear_between_compiled_passes,
        clear_between_several_passes,
    ],
)
def test_gradients_of_the_step_before_are_cleared(
    run: str, function: Callable[[Fabric], list[list[Tensor]]]
) -> None:
    expected = train_plainly()
    for parameters_by_way in RUNS[run](function):
        for actual in parameters_by_way:
            torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def step_without_gradients(fabric: Fabric) -> float:
    """Return how far a step moves parameters whose gradients were cleared after a forward pass."""
    model, optimizer = fabric.setup(*make_model())
    samples = micro_batch(0, LAST)
    fabric.backward(model(samples).square().mean())
    before = [full_tensor(parameter.detach()).clone() for parameter in model.parameters()]
    model(samples)
    clear_by_parts(model, optimizer)
    optimizer.step()
    moves: list[float] = []
    for old, parameter in zip(before, model.parameters(), strict=True):
        moves.append((full_tensor(parameter.detach()) - old).abs().max().item())
    return max(moves)


@pytest.mark.parametrize("run", ["ddp", "fsdp"])
def test_a_step_after_gradients_were_cleared_behind_a_forward_pass_changes_nothing(
    run: str,
) -> None:
    assert RUNS[run](step_without_gradients) == [0.0, 0.0]


class HeadFirst(nn.Module):
    """Two layers. All of the last one, which is registered first, is on one rank."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(8, 1)
        self.first = nn.Linear(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).tanh())


def make_head_first() -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(0)
    module = HeadFirst().double()
    return module, torch.optim.SGD(module.parameters(), lr=0.01)


PARTS = [("first", True), ("first", False), ("last", True), ("last", False)]


def drop_part_plainly(name: str, set_to_none: bool) -> list[Tensor]:
    """Return the parameters after windows in which gradients of one layer are dropped."""
    model, optimizer = make_head_first()
    for window in range(WINDOWS):
        num_samples = 0
        for number in range(LAST + 1):
            samples = micro_batch(window, number) / 10
            num_samples += len(samples)
            loss = model(samples).square().sum()
            if number == LAST:
                model.get_submodule(name).zero_grad(set_to_none)
            loss.backward()
        for parameter in model.parameters():
            parameter.grad /= num_samples
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach() for parameter in model.parameters()]


def drop_part(
    fabric: Fabric, name: str, set_to_none: bool, is_between: bool, accumulates_locally: bool
) -> list[Tensor]:
    model, optimizer = fabric.setup(*make_head_first())
    layer = getattr(model, name)
    for window in range(WINDOWS):
        for number in range(LAST + 1):
            samples = micro_batch(window, number)[fabric.global_rank :: fabric.world_size] / 10
            is_local = accumulates_locally and number != LAST
            if number == LAST and not is_between:
                layer.zero_grad(set_to_none)
            with fabric.no_backward_sync(model, enabled=is_local):
                loss = model(samples).square().sum()
                if number == LAST and is_between:
                    layer.zero_grad(set_to_none)
                fabric.backward(loss, weight=len(samples))
        optimizer.step()
        optimizer.zero_grad()
    return [full_tensor(parameter.detach()) for parameter in model.parameters()]


def drop_parts(fabric: Fabric) -> list[list[list[Tensor]]]:
    parameters_by_part: list[list[list[Tensor]]] = []
    for name, set_to_none in PARTS:
        parameters: list[list[Tensor]] = []
        for is_between in (False, True):
            for accumulates_locally in (False, True):
                parameters.append(
                    drop_part(fabric, name, set_to_none, is_between, accumulates_locally)
                )
        parameters_by_part.append(parameters)
    return parameters_by_part


@pytest.mark.parametrize("run", ["ddp", "fsdp"])
def test_gradients_of_one_layer_that_are_dropped_leave_the_others_and_their_weight(
    run: str,
) -> None:
    expected = [drop_part_plainly(name, set_to_none) for name, set_to_none in PARTS]
    for parameters_by_part in RUNS[run](drop_parts):
        for parameters, expected_parameters in zip(parameters_by_part, expected, strict=True):
            for actual in parameters:
                torch.testing.assert_close(actual, expected_parameters, rtol=1e-12, atol=1e-12)


def make_gan() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 2))
    critic = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))
    return generator.double(), critic.double()


def gan_samples(step: int) -> tuple[Tensor, Tensor]:
    """Return the noise and the real samples of all ranks, 7 each, so that ranks have 4 and 3."""
    generator = torch.Generator().manual_seed(step)
    noise = torch.randn(7, 2, generator=generator, dtype=torch.float64)
    real = torch.randn(7, 2, generator=generator, dtype=torch.float64) + 3
    return noise, real


GAN_STEPS = 4


def train_gan_plainly() -> list[Tensor]:
    generator, critic = make_gan()
    for_generator = torch.optim.Adam(generator.parameters(), lr=0.05)
    for_critic = torch.optim.Adam(critic.parameters(), lr=0.05)
    for step in range(GAN_STEPS):
        noise, real = gan_samples(step)
        fake = generator(noise)
        verdict = critic(torch.cat([real, fake.detach()]))
        truth = torch.cat([torch.ones_like(verdict[:7]), torch.zeros_like(verdict[:7])])
        binary_cross_entropy_with_logits(verdict, truth).backward()
        for_critic.step()
        for_critic.zero_grad()
        verdict = critic(fake)
        binary_cross_entropy_with_logits(verdict, torch.ones_like(verdict)).backward()
        for_generator.step()
        for_generator.zero_grad()
        for_critic.zero_grad()
    return [parameter.detach() for parameter in (*generator.parameters(), *critic.parameters())]


def clear_critic_by_optimizer(critic: Any, for_critic: torch.optim.Optimizer) -> None:
    for_critic.zero_grad()


def clear_critic_by_parts(critic: Any, for_critic: torch.optim.Optimizer) -> None:
    critic[0].zero_grad()
    for parameter in critic[2].parameters():
        parameter.grad = None


def train_gan(fabric: Fabric, clear: Any, is_between: bool) -> list[Tensor]:
    """Return the parameters of a GAN that is trained by the loop of docs/how-to/several-models.md.

    Args:
        fabric: the job.
        clear: drops the gradients that the generator's loss sends through the critic.
        is_between: drop them between the next forward and backward pass of the critic.
    """
    generator, critic = make_gan()
    generator, for_generator = fabric.setup(
        generator, torch.optim.Adam(generator.parameters(), lr=0.05)
    )
    critic, for_critic = fabric.setup(critic, torch.optim.Adam(critic.parameters(), lr=0.05))
    for step in range(GAN_STEPS):
        noise, real = gan_samples(step)
        noise = noise[fabric.global_rank :: fabric.world_size]
        real = real[fabric.global_rank :: fabric.world_size]
        fake = generator(noise)
        verdict = critic(torch.cat([real, fake.detach()]))
        if is_between:
            clear(critic, for_critic)
        truth = torch.cat([torch.ones(len(real), 1), torch.zeros(len(real), 1)]).double()
        loss = binary_cross_entropy_with_logits(verdict, truth, reduction="sum")
        fabric.backward(loss, weight=len(verdict), optimizer=for_critic)
        for_critic.step()
        for_critic.zero_grad()

        with fabric.no_backward_sync(critic):
            verdict = critic(fake)
            loss = binary_cross_entropy_with_logits(
                verdict, torch.ones_like(verdict), reduction="sum"
            )
            fabric.backward(loss, weight=len(verdict), optimizer=for_generator)
        for_generator.step()
        for_generator.zero_grad()
        if not is_between:
            clear(critic, for_critic)
    parameters = [*generator.parameters(), *critic.parameters()]
    return [full_tensor(parameter.detach()) for parameter in parameters]


def train_gan_in_all_ways(fabric: Fabric) -> list[list[Tensor]]:
    parameters: list[list[Tensor]] = []
    for clear in (clear_critic_by_optimizer, clear_critic_by_parts):
        for is_between in (False, True):
            parameters.append(train_gan(fabric, clear, is_between))
    return parameters


@pytest.mark.parametrize("run", ["single", "ddp", "fsdp"])
def test_a_gan_with_loss_weights_is_that_of_one_process(run: str) -> None:
    expected = train_gan_plainly()
    for parameters_by_way in RUNS[run](train_gan_in_all_ways):
        for actual in parameters_by_way:
            torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


def keep_gradients(fabric: Fabric) -> list[Tensor]:
    """Return the gradients of a window in which gradients are changed in place, not dropped."""
    model, _ = fabric.setup(*make_model())
    for number in range(LAST + 1):
        rank_samples = micro_batch(0, number)[fabric.global_rank :: fabric.world_size]
        with fabric.no_backward_sync(model, enabled=number == DROPPED):
            fabric.backward(model(rank_samples).square().mean())
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.nan_to_num_()
    return [full_tensor(parameter.grad) for parameter in model.parameters()]


@pytest.mark.parametrize("run", ["ddp", "fsdp"])
def test_gradients_that_are_changed_in_place_are_not_dropped(run: str) -> None:
    module, _ = make_model()
    for number in range(LAST + 1):
        module(micro_batch(0, number)).square().mean().backward()
    expected = [parameter.grad for parameter in module.parameters()]
    for actual in RUNS[run](keep_gradients):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def raise_zero_division(*args: Any) -> None:
    raise ZeroDivisionError


def fail_within_a_window(fabric: Fabric) -> list[Tensor]:
    """Return the gradients of a window with two forward passes that raise."""
    model, _ = fabric.setup(*make_model())
    for number in range(LAST + 1):
        rank_samples = micro_batch(0, number)[fabric.global_rank :: fabric.world_size]
        if number > 0:
            handle = model.last.register_forward_pre_hook(raise_zero_division)
            with pytest.raises(ZeroDivisionError):
                model(rank_samples)
            handle.remove()
        # The first pass reduces gradients, and the second does not.
        with fabric.no_backward_sync(model, enabled=number == DROPPED):
            fabric.backward(model(rank_samples).square().mean())
    return [full_tensor(parameter.grad) for parameter in model.parameters()]


@pytest.mark.parametrize("run", ["ddp", "fsdp"])
def test_a_forward_pass_that_raises_leaves_the_gradients_of_its_window(run: str) -> None:
    module, _ = make_model()
    for number in range(LAST + 1):
        module(micro_batch(0, number)).square().mean().backward()
    expected = [parameter.grad for parameter in module.parameters()]
    for actual in RUNS[run](fail_within_a_window):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
