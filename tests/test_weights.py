"""Weighted losses: a step is that of the sum of all losses over the sum of all weights, in one process."""

import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

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
from fabric._torch import full_tensor
from fabric.errors import ConfigurationError, NonFiniteGradientError, RankFailedError, UsageError
from fabric.strategies import DDPStrategy, FSDPStrategy
from tests.ranks import outcome, run_in_ranks

pytestmark = pytest.mark.timeout(90)

# The numbers of tokens of the samples, for each micro-batch of each step. Ranks take every other sample: one has no
# token in the first micro-batch, all have none in one, and the last step is shorter.
TOKENS = [[[0, 3, 0, 7], [5, 1, 2]], [[4, 4, 1, 9], [0, 0, 0], [2]], [[6, 1, 1, 1]]]
KINDS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "AdamW": partial(torch.optim.AdamW, lr=0.01),
}


def make(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2, bias=False), nn.Tanh(), nn.Linear(2, 1)
    ).to(dtype)


def samples(number: int, tokens: list[int]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(number)
    return [torch.randn(count, 3, generator=generator, dtype=torch.float64) for count in tokens]


def summed(model: nn.Module, tokens: Tensor) -> Tensor:
    return (model(tokens) - tokens.sum(-1, keepdim=True)).square().sum()


def plain(kind: str, clip: bool) -> list[Tensor]:
    """The loop of a single process that sees all samples of a step at once."""
    model = make()
    optimizer = KINDS[kind](model.parameters())
    for step, parts in enumerate(TOKENS):
        tokens = torch.cat([sample for part in parts for sample in samples(step, part)])
        optimizer.zero_grad()
        (summed(model, tokens) / len(tokens)).backward()
        for _ in range(2 * clip):
            nn.utils.clip_grad_norm_(model.parameters(), 0.2)
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def train(
    fabric: Fabric,
    kind: str,
    clip: bool,
    sync_each: bool = False,
    dtype: torch.dtype = torch.float64,
) -> Any:
    model = make(dtype)
    model, optimizer = fabric.setup(model, KINDS[kind](model.parameters()))
    for step, parts in enumerate(TOKENS):
        optimizer.zero_grad()
        for number, part in enumerate(parts):
            own = torch.cat(
                [*samples(step, part)[fabric.global_rank :: fabric.world_size], torch.zeros(0, 3)]
            )
            with fabric.no_backward_sync(model, enabled=not sync_each and number < len(parts) - 1):
                fabric.backward(summed(model, own.to(dtype)), weight=len(own))
        for _ in range(2 * clip):
            fabric.clip_gradients(model, optimizer, max_norm=0.2)
        optimizer.step()
    return [full_tensor(parameter.detach()) for parameter in model.parameters()]


CASES = [("SGD", False, False), ("SGD", True, True), ("AdamW", True, False), ("AdamW", False, True)]


def train_all(fabric: Fabric) -> list[Any]:
    return [train(fabric, *case) for case in CASES]


def single(function: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
    with Fabric(accelerator="cpu", **{"devices": 1, **options}) as fabric:
        return [function(fabric, *args)]


Fsdp = partial(FSDPStrategy, start_method="forkserver", auto_wrap_policy={nn.Linear})
RUNS = {
    "single": single,
    "dp": partial(single, devices=2, strategy="dp"),
    "ddp": run_in_ranks,
    "ddp on 3": partial(run_in_ranks, ranks=3),
    "fsdp": lambda *args: run_in_ranks(*args, strategy=Fsdp()),
    "SHARD_GRAD_OP": lambda *args: run_in_ranks(
        *args, strategy=Fsdp(sharding_strategy="SHARD_GRAD_OP")
    ),
    "HYBRID_SHARD": lambda *args: run_in_ranks(
        *args, ranks=4, strategy=Fsdp(sharding_strategy="HYBRID_SHARD", device_mesh=(2, 2))
    ),
}


@pytest.mark.parametrize("run", RUNS)
def test_a_step_is_that_of_all_samples_in_one_process(run: str) -> None:
    expected = [plain(kind, clip) for kind, clip, _ in CASES]
    for trained in RUNS[run](train_all):
        torch.testing.assert_close(trained, expected, rtol=1e-12, atol=1e-12)


# -- windows, in one process ------------------------------------------------------------------------------------------


@pytest.fixture
def fabric() -> Iterator[Fabric]:
    with Fabric(accelerator="cpu", devices=1) as fabric:
        yield fabric


Setup = tuple[nn.Linear, torch.optim.Optimizer]


def linear(fabric: Fabric) -> Any:
    """A weight of 1, of which ``value`` is the gradient for the sum of inputs ``value``, and an optimizer."""
    module = nn.Linear(1, 1, bias=False)
    nn.init.ones_(module.weight)
    return fabric.setup(module, torch.optim.SGD(module.parameters(), lr=1.0))


def add(fabric: Fabric, model: nn.Module, value: float, weight: Any, **options: Any) -> None:
    fabric.backward(model(torch.full((1, 1), value)).sum(), weight=weight, **options)


def moved(model: Any, optimizer: torch.optim.Optimizer) -> float:
    """What a step subtracts from the weight."""
    before = model.weight.item()
    optimizer.step()
    optimizer.zero_grad()
    return before - model.weight.item()


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_window_whose_gradients_are_cleared_leaves_no_weight(
    fabric: Fabric, set_to_none: bool
) -> None:
    model, optimizer = linear(fabric)
    add(fabric, model, 6.0, 3)
    optimizer.zero_grad(set_to_none)
    add(fabric, model, 6.0, 2)
    add(fabric, model, 2.0, 2)
    assert moved(model, optimizer) == 2.0
    add(fabric, model, math.inf, 3)
    with pytest.raises(NonFiniteGradientError):
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
    optimizer.zero_grad(set_to_none)
    add(fabric, model, 8.0, 2)
    fabric.clip_gradients(model, optimizer, max_norm=1.0)
    assert moved(model, optimizer) == pytest.approx(1.0, rel=1e-5)
    assert moved(model, optimizer) == 0.0


def test_gradients_of_shards_that_are_set_to_zero_leave_no_weight() -> None:
    with Fabric(accelerator="cpu", devices=1, strategy="fsdp") as fabric:
        model, optimizer = linear(fabric)
        add(fabric, model, 6.0, 3)
        optimizer.zero_grad(set_to_none=False)
        add(fabric, model, 6.0, 2)
        assert moved(model, optimizer) == 3.0


@pytest.mark.filterwarnings("ignore:Using backward")  # with create_graph
def test_each_backward_pass_of_a_loss_counts(fabric: Fabric) -> None:
    model, optimizer = linear(fabric)
    loss = model(torch.full((1, 1), 6.0)).sum()
    fabric.backward(loss, weight=2, retain_graph=True)
    fabric.backward(loss, weight=1)
    assert moved(model, optimizer) == 4.0
    fabric.backward(
        model(torch.tensor([[1.0], [2.0]])),
        torch.tensor([[1.0], [4.0]]),
        weight=3,
        create_graph=True,
    )
    assert moved(model, optimizer) == 3.0
    add(fabric, model, 0.0, 0)  # no terms here
    add(fabric, model, 5.0, torch.tensor(2.5))
    assert moved(model, optimizer) == 2.0


def test_gradients_of_parameters_that_no_module_has_and_sparse_ones_are_divided(
    fabric: Fabric,
) -> None:
    latent = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    embedding = nn.Embedding(3, 1, sparse=True)
    optimizer = torch.optim.SGD([*embedding.parameters(), latent], lr=1.0)
    model, optimizer = fabric.setup(embedding, optimizer)
    before = model.weight.detach().clone()
    fabric.backward(model(torch.tensor([0, 2, 2])).sum() + 4 * latent.sum(), weight=4)
    optimizer.step()
    torch.testing.assert_close(before - model.weight, torch.tensor([[0.25], [0.0], [0.5]]))
    assert latent.tolist() == [-1.0, -1.0]


def test_hooks_of_users_see_the_gradients_that_the_step_sees(fabric: Fabric) -> None:
    model, optimizer = linear(fabric)
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(model.weight.grad.item()))
    for _ in range(2):
        add(fabric, model, 6.0, 3)
        moved(model, optimizer)
    assert seen == [2.0, 2.0]


@pytest.mark.parametrize(
    "weight", [-1, -0.5, math.nan, math.inf, True, 1j, "3", torch.ones(1), torch.tensor(True), []]
)
def test_a_weight_that_is_no_number_of_terms_is_refused_before_anything_changes(
    fabric: Fabric, weight: Any
) -> None:
    model, optimizer = linear(fabric)
    with pytest.raises(ConfigurationError, match=r"weight=(.|\n)*rank 0"):
        add(fabric, model, 1.0, weight)
    assert model.weight.grad is None
    assert moved(model, optimizer) == 0.0


def test_losses_with_and_without_a_weight_never_meet_in_one_gradient(fabric: Fabric) -> None:
    model, optimizer = linear(fabric)
    plain_pass = lambda: fabric.backward(model(torch.ones(1, 1)).sum())  # noqa: E731
    plain_pass()
    with pytest.raises(UsageError, match=r"gradients of an earlier step(.|\n)*zero_grad"):
        add(fabric, model, 1.0, 1)
    assert moved(model, optimizer) == 1.0
    add(fabric, model, 4.0, 2)
    with pytest.raises(UsageError, match="no weight"):
        plain_pass()
    fabric.clip_gradients(model, optimizer, max_norm=10.0)
    for again in (plain_pass, lambda: add(fabric, model, 1.0, 1)):
        with pytest.raises(UsageError, match="clip_gradients"):
            again()
    optimizer.step()
    with pytest.raises(UsageError, match="earlier step"):
        add(fabric, model, 1.0, 1)
    optimizer.zero_grad()
    plain_pass()
    assert moved(model, optimizer) == 1.0


def test_a_step_without_weights_is_refused_before_it_changes_anything(fabric: Fabric) -> None:
    model, optimizer = linear(fabric)
    add(fabric, model, 3.0, 0)
    with pytest.raises(UsageError, match="sum of zero"):
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
    with pytest.raises(UsageError, match="sum of zero"):
        optimizer.step()
    assert model.weight.item() == 1.0
    optimizer.zero_grad()
    add(fabric, model, 6.0, 3)
    assert moved(model, optimizer) == 2.0


def test_a_closure_with_weights_is_refused(fabric: Fabric) -> None:
    model, optimizer = linear(fabric)
    for _ in range(2):  # at first it is not known before
        with pytest.raises(UsageError, match="closure"):
            optimizer.step(lambda: add(fabric, model, 1.0, 1))
    assert model.weight.item() == 0.5, "the second raises before the step"
    with pytest.raises(UsageError, match="closure"):
        optimizer.step(closure=lambda: None)
    with pytest.raises(UsageError, match="not been set up"):
        add(fabric, model, 1.0, 1, optimizer=torch.optim.SGD(model.parameters()))


def test_a_step_within_a_backward_pass_is_refused(fabric: Fabric) -> None:
    model, optimizer = linear(fabric)
    handle = model.weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    with pytest.raises(UsageError, match="within a backward pass"):
        add(fabric, model, 1.0, 1)
    handle.remove()
    optimizer.zero_grad()
    add(fabric, model, 6.0, 3)
    assert moved(model, optimizer) == 2.0


def test_a_backward_pass_that_raised_has_no_weight(fabric: Fabric) -> None:
    model, optimizer = linear(fabric)
    loss = model(torch.full((1, 1), 6.0)).sum()
    fabric.backward(loss, weight=3)
    with pytest.raises(RuntimeError, match="second time"):
        fabric.backward(loss, weight=3)
    assert moved(model, optimizer) == 2.0


def test_optimizers_of_one_loss_share_its_weight(fabric: Fabric) -> None:
    (first, one), (second, two) = linear(fabric), linear(fabric)
    third = fabric.setup_optimizers(torch.optim.SGD(first.parameters()))
    with pytest.raises(UsageError, match="shared parameters"):
        add(fabric, first, 1.0, 1)
    del third
    for value, weight in ((6.0, 2), (4.0, 3)):
        fabric.backward(
            (first(torch.full((1, 1), value)) + second(torch.full((1, 1), value))).sum(),
            weight=weight,
        )
    assert moved(first, one) == 2.0
    with pytest.raises(UsageError, match=r"different weighted losses(.|\n)*optimizer=") as raised:
        add(fabric, first, 1.0, 1)
    assert "rank 0" in str(raised.value)
    add(fabric, first, 3.0, 1, optimizer=one)  # that of the other goes on
    add(fabric, second, 5.0, 1, optimizer=[two])
    assert (moved(first, one), moved(second, two)) == (3.0, 2.5)


def test_losses_of_two_optimizers_in_turn_are_right_or_refused(fabric: Fabric) -> None:
    (discriminator, one), (generator, two) = linear(fabric), linear(fabric)

    def adversarial() -> Tensor:
        return discriminator(generator(torch.full((1, 1), 2.0))).sum()

    for _ in range(2):
        generator.weight.data.fill_(1.0)
        discriminator.weight.data.fill_(1.0)
        one.zero_grad()
        fabric.backward(discriminator(torch.full((1, 1), 6.0)).sum(), weight=3, optimizer=one)
        assert moved(discriminator, one) == 2.0
        two.zero_grad()
        fabric.backward(adversarial(), weight=2, optimizer=two)  # and into the discriminator
        two.step()
        assert generator.weight.item() == 2.0
    one.zero_grad()
    add(fabric, discriminator, 6.0, 3, optimizer=one)
    fabric.backward(generator(torch.ones(1, 1)).sum() * 0, optimizer=two)  # no weights of its own
    two.zero_grad()
    with pytest.raises(UsageError, match="reached parameters of SGD"):
        fabric.backward(adversarial(), weight=2, optimizer=two)
    one.zero_grad()
    two.zero_grad()
    add(fabric, discriminator, 6.0, 3)
    one.step()
    one.zero_grad()
    with pytest.raises(UsageError, match="optimizer="):
        fabric.backward(adversarial(), weight=2)


def test_gradients_of_a_loss_for_another_optimizer_are_not_stepped_with(fabric: Fabric) -> None:
    (first, one), (_, two) = linear(fabric), linear(fabric)
    add(fabric, first, 6.0, 3, optimizer=two)
    for refused in (one.step, lambda: fabric.clip_gradients(first, one, max_norm=1.0)):
        with pytest.raises(UsageError, match="gradients of weighted losses for other optimizers"):
            refused()
    with pytest.raises(
        UsageError, match="the gradients are of weighted losses for other optimizers"
    ):
        add(fabric, first, 6.0, 3, optimizer=one)
    one.zero_grad()
    add(fabric, first, 6.0, 3, optimizer=one)
    assert moved(first, one) == 2.0


def test_weights_on_a_device_are_not_read_before_the_next_step(
    fabric: Fabric, tmp_path: Path
) -> None:
    model, optimizer = linear(fabric)
    fabric._session.ensure_loss_weights().reads_at_once = False  # as on CUDA
    add(fabric, model, 6.0, torch.tensor(1))
    add(fabric, model, 6.0, 2)
    assert moved(model, optimizer) == 4.0
    for bad in (
        torch.tensor(0.0),
        torch.tensor(-1.0),
        torch.tensor(math.nan),
        torch.tensor(math.inf),
        0,
    ):
        add(fabric, model, 6.0, bad)
        assert moved(model, optimizer) == 0.0
        add(fabric, model, 6.0, 3)
        with pytest.raises(UsageError, match="sum of zero"):
            optimizer.step()
        optimizer.zero_grad()
        add(fabric, model, 6.0, bad)
        assert moved(model, optimizer) == 0.0
        with pytest.raises(UsageError, match="sum of zero"):
            fabric.save(tmp_path / "saved", {"model": model})
        add(fabric, model, 6.0, 3)
        assert moved(model, optimizer) == 2.0
    with pytest.raises(ConfigurationError):
        add(fabric, model, 1.0, torch.tensor(True))


# -- over ranks -------------------------------------------------------------------------------------------------------


def refusals(fabric: Fabric) -> list[str]:
    model, optimizer = linear(fabric)
    weight = 3 if fabric.global_rank else 3.0
    found = [outcome(lambda: add(fabric, model, 4.0, weight))]
    add(fabric, model, 4.0, 1)
    moved(model, optimizer)
    add(fabric, model, 4.0, 0)
    found.append(outcome(optimizer.step))
    optimizer.zero_grad()
    add(fabric, model, 4.0, weight)
    found.append(outcome(lambda: fabric.clip_gradients(model, optimizer, max_norm=1.0)))
    return [*found, str(model.weight.item())]


def test_what_only_the_ranks_together_know_is_refused_on_all_of_them() -> None:
    for kind, zero, step, weight in run_in_ranks(refusals):
        assert kind.startswith("CollectiveMismatchError")
        assert "sum of zero" in zero
        assert step.startswith("CollectiveMismatchError")
        assert weight == "-3.0"


def messages(fabric: Fabric) -> Any:
    model, optimizer = linear(fabric)
    latents = fabric.setup(nn.ParameterList([nn.Parameter(torch.zeros(1))]))
    other = fabric.setup_optimizers(torch.optim.SGD(latents.parameters(), lr=1.0))
    counts = []
    steps = []
    for _ in range(3):
        loss = model(torch.full((1, 1), 4.0)).sum() + latents[0].sum() * (
            6 if fabric.global_rank else 0
        )
        fabric.backward(loss, weight=1 + 2 * fabric.global_rank)
        with CommDebugMode() as mode:
            steps.append(moved(model, optimizer))
        counts.append(mode.get_total_counts())
        fabric.clip_gradients(latents, other, max_norm=10.0)
        other.step()
        steps.append(latents[0].item())
        other.zero_grad()
    fabric.backward(model(torch.ones(1, 1)).sum())  # and none for a loss without a weight
    with CommDebugMode() as mode:
        optimizer.step()
    return [*counts, mode.get_total_counts()], steps


def test_a_window_costs_one_message_for_all_its_optimizers() -> None:
    for counts, steps in run_in_ranks(messages):
        assert counts == [1, 1, 1, 0]
        assert steps == [2.0, -1.5, 2.0, -3.0, 2.0, -4.5]


# -- low precision ----------------------------------------------------------------------------------------------------

COUNT = 8192  # tokens of each rank in a step


def in_low_precision(fabric: Fabric, is_sum: bool, overflow: bool = False) -> Any:
    """Steps on the sum or the mean of equally many tokens; the parameters, the loss scale and which were skipped."""
    model, optimizer = fabric.setup(
        *(lambda m: (m, torch.optim.SGD(m.parameters(), lr=0.05)))(make(torch.float32))
    )
    skipped = []
    for step in range(6):
        tokens = samples(step, [2 * COUNT])[0].float()[fabric.global_rank :: fabric.world_size]
        size = len(tokens)
        if overflow and step == 2:
            tokens = tokens.clone()
            tokens[0] = math.inf
        optimizer.zero_grad()
        for part in tokens.chunk(2):
            loss = (model(part) - part.sum(-1, keepdim=True)).float().square().sum()
            if is_sum:
                fabric.backward(loss, weight=len(part))
            else:
                fabric.backward(loss / size)
        if step % 2:
            fabric.clip_gradients(model, optimizer, max_norm=0.5)
        optimizer.step()
        skipped.append(fabric.step_was_skipped(optimizer))
    scale = [] if fabric._session.scaler is None else [fabric._session.scaler.scale]
    return (
        [full_tensor(parameter.detach()).float() for parameter in model.parameters()],
        skipped,
        scale,
    )


def both(fabric: Fabric, *args: Any) -> Any:
    return in_low_precision(fabric, True, *args), in_low_precision(fabric, False, *args)


LOW: dict[str, tuple[Callable[..., list[Any]], float]] = {
    "16-mixed": (partial(single, precision="16-mixed"), 1e-4),
    "16-mixed ddp": (partial(run_in_ranks, precision="16-mixed"), 1e-4),
    "16-mixed fsdp": (
        lambda *args: run_in_ranks(*args, strategy=Fsdp(), precision="16-mixed"),
        1e-3,
    ),
    "16-true": (partial(single, precision="16-true"), 2e-3),
    "bf16-true": (partial(single, precision="bf16-true"), 2e-2),
    "fp16_compress": (
        lambda *args: run_in_ranks(*args, strategy=DDPStrategy(ddp_comm_hook=fp16_compress_hook)),
        1e-3,
    ),
}


@pytest.mark.parametrize("case", LOW)
def test_a_sum_with_a_weight_overflows_no_more_than_the_mean(case: str) -> None:
    run, tolerance = LOW[case]
    for (summed_up, skipped, scale), (mean, mean_skipped, mean_scale) in run(both):
        torch.testing.assert_close(summed_up, mean, rtol=tolerance, atol=tolerance)
        assert (sum(skipped), mean_scale) <= (sum(mean_skipped), scale)
    if case == "16-mixed ddp":
        for (summed_up, skipped, scale), (mean, _, mean_scale) in run(both, True):
            assert skipped == [False, False, True, False, False, False]
            torch.testing.assert_close(summed_up, mean, rtol=tolerance, atol=tolerance)
            assert scale >= mean_scale


# -- what is refused over ranks ---------------------------------------------------------------------------------------


def alone(fabric: Fabric) -> str:
    model, optimizer = linear(fabric)

    def drift() -> None:
        with fabric.join(model):
            for _ in range(1 + fabric.global_rank):
                add(fabric, model, 1.0, 1)
                optimizer.step()

    return outcome(
        drift
        if fabric.strategy.model_averaging_period is None
        else lambda: add(fabric, model, 1.0, 1)
    )


def test_ranks_that_step_alone_cannot_have_weights() -> None:
    for joined in run_in_ranks(alone):
        assert 'uneven="longest"' in joined
    state = PostLocalSGDState(process_group=None, subgroup=None, start_localSGD_iter=5)
    averaging = DDPStrategy(
        ddp_comm_state=state, ddp_comm_hook=post_localSGD_hook, model_averaging_period=2
    )
    for averaged in run_in_ranks(alone, strategy=averaging):
        assert "model_averaging_period" in averaged


def unreduced(fabric: Fabric) -> list[Any]:
    model, optimizer = fabric.setup(
        *(lambda m: (m, torch.optim.SGD(m.parameters(), lr=1.0)))(make())
    )
    tokens = torch.ones(4, 3, dtype=torch.float64)

    def pass_(sync: bool, **options: Any) -> None:
        with fabric.no_backward_sync(model, enabled=not sync):
            fabric.backward(summed(model, tokens), **options)

    def gradient() -> Tensor:
        return full_tensor(model[0].weight.grad).clone()

    pass_(sync=False, weight=4)
    optimizer.zero_grad()  # which clears no gradients that are not reduced: they keep their weight
    pass_(sync=True, weight=4)
    fabric.clip_gradients(model, optimizer, clip_val=1e9)
    kept = gradient()
    optimizer.zero_grad()
    pass_(sync=True, weight=4)
    fabric.clip_gradients(model, optimizer, clip_val=1e9)
    same = torch.allclose(kept, gradient(), rtol=1e-12)
    optimizer.zero_grad()
    pass_(sync=True, weight=4)
    pass_(sync=False, weight=4)
    optimizer.zero_grad()
    return [same, outcome(lambda: pass_(sync=True, weight=4))]


def test_gradients_that_are_not_reduced_keep_their_weights() -> None:
    for same, dropped in RUNS["fsdp"](unreduced):
        assert same
        assert "gradients of an earlier step" in dropped


def leaving_out(fabric: Fabric) -> None:
    model, optimizer = linear(fabric)
    for step in range(3):
        optimizer.zero_grad()
        add(fabric, model, 1.0, None if step == 1 and fabric.global_rank else 1)
        optimizer.step()


@pytest.mark.slow  # it waits for the timeout
def test_a_weight_that_one_rank_leaves_out_is_reported_and_is_no_hang(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(RankFailedError):
        run_in_ranks(leaving_out, timeout=4.0, launcher="forkserver")
    assert "in all_reduce at" in capfd.readouterr().err
