"""The law of updates: an update does not depend on how the samples are split.

Every update is that of one process that sees all samples at once.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader

from fabric import Fabric
from fabric._torch import full_tensor
from fabric.precision import PRECISIONS, LossScale, Precision
from fabric.strategies import FSDPStrategy
from tests.laws.base import Draw, Law, Subject
from tests.ranks import run_in_ranks

STEPS = 3
LENGTH = 5
FEATURES = 3
WIDTH = 8
CLIP = 0.1  # This norm is below that of most gradients.
# How many tokens of a sample count, by micro-batch, rank and sample; and that by window.
WindowCounts = list[list[list[int]]]
Counts = list[WindowCounts]
# Inputs of shape (samples, LENGTH, FEATURES), and which tokens count, of shape (samples, LENGTH).
Batch = tuple[Tensor, Tensor]
# The batches of a window, by micro-batch and rank.
Window = list[list[Batch]]


class Outcome(NamedTuple):
    """The parameters after the loop, and how many steps were skipped."""

    parameters: Tensor
    skipped: int


class Variant(NamedTuple):
    """The name of the optimizer, and whether gradients are clipped."""

    optimizer: str
    clips: bool


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    "AdamW": partial(torch.optim.AdamW, lr=1e-3),
}
VARIANTS = [
    Variant("SGD", clips=False),
    Variant("SGD", clips=True),
    Variant("AdamW", clips=False),
    Variant("AdamW", clips=True),
]
# At this scale mean losses do not overflow, and sums over many tokens do.
MIXED = replace(PRECISIONS["16-mixed"], loss_scale=LossScale(init_scale=2.0**10))
# The kinds of weights that a loop may have, made from a tensor.
WEIGHTS: dict[str, Callable[[Tensor], Any]] = {
    "int": lambda count: int(count),
    "float": lambda count: float(count),
    "integer tensor": lambda count: count.sum(),
    "tensor": lambda count: count.double(),
}


@dataclass(frozen=True)
class Strategy:
    """A strategy of the law, and the numbers of ranks, or of replicas, that run it."""

    sizes: tuple[int, ...]
    make: Callable[[], Any]
    in_one_process: bool = False

    def world(self, precision: str | Precision, size: int) -> "Job":
        return Job(self, precision, size)


@dataclass
class Job:
    """A :class:`fabric.testing.World` for one strategy and precision.

    All examples share its processes.
    """

    strategy: Strategy
    precision: str | Precision
    size: int

    def run(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        options: dict[str, Any] = {
            "strategy": self.strategy.make(),
            "precision": self.precision,
        }
        if not self.strategy.in_one_process:
            return run_in_ranks(fn, *args, ranks=self.size, **options)
        with Fabric(accelerator="cpu", devices=self.size, **options) as fabric:
            return [fn(fabric, *args)]


def sharding(name: str, mesh: tuple[int, int] | None = None) -> Callable[[], FSDPStrategy]:
    return lambda: FSDPStrategy(sharding_strategy=name, device_mesh=mesh)


STRATEGIES = {
    "single": Strategy((1,), lambda: "single_device", in_one_process=True),
    "dp": Strategy((1, 2, 3, 4), lambda: "dp", in_one_process=True),
    "ddp": Strategy((1, 2, 3, 4), lambda: "ddp"),
    "FULL_SHARD": Strategy((1, 2, 3, 4), sharding("FULL_SHARD")),
    "SHARD_GRAD_OP": Strategy((1, 2, 3, 4), sharding("SHARD_GRAD_OP")),
    "HYBRID_SHARD": Strategy((4,), sharding("HYBRID_SHARD", (2, 2))),
}


class Block(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(self.norm(x)).tanh()


class Model(nn.Module):
    """A model that returns a number for each token.

    No gradient of a parameter is zero except for rounding, which AdamW would amplify.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x).squeeze(-1)


def make(optimizer: str, dtype: torch.dtype) -> tuple[nn.Module, torch.optim.Optimizer]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Model().to(dtype)
    return model, OPTIMIZERS[optimizer](model.parameters())


def batches(counts: Counts, dtype: torch.dtype) -> Iterator[Window]:
    """Yield windows of batches; the samples are the same in every process."""
    generator = torch.Generator().manual_seed(0)

    def batch(tokens: list[int]) -> Batch:
        shape = (len(tokens), LENGTH, FEATURES)
        inputs = torch.randn(shape, generator=generator, dtype=torch.float64)
        lengths = torch.tensor(tokens, dtype=torch.int64)
        mask = torch.arange(LENGTH) < lengths.unsqueeze(-1)
        return inputs.to(dtype), mask.view(len(tokens), LENGTH)

    for window_counts in counts:
        window = []
        for ranks in window_counts:
            window.append([batch(tokens) for tokens in ranks])
        yield window


def concatenate(batches: Iterable[Batch]) -> Batch:
    inputs, masks = zip(*batches, strict=True)
    return torch.cat(inputs), torch.cat(masks)


def micro_batches_of_rank(fabric: Any, window: Window) -> list[Batch]:
    """Return the micro-batches of this rank.

    The samples of all replicas are in one batch where one process has several replicas.
    """
    rank_batches = slice(fabric.global_rank, None, fabric.world_size)
    return [concatenate(ranks[rank_batches]) for ranks in window]


def batch_of_all_ranks(window: Window) -> Batch:
    """Return all samples of a window in one batch."""
    return concatenate([concatenate(ranks) for ranks in window])


def sum_of_losses(model: nn.Module, batch: Batch) -> Tensor:
    inputs, mask = batch
    errors = model(inputs) - inputs.sum(-1).sin()
    return (errors.square() * mask).sum()


def flat_parameters(model: nn.Module) -> Tensor:
    parameters = [full_tensor(parameter.detach()).double() for parameter in model.parameters()]
    return torch.cat([parameter.flatten() for parameter in parameters])


def in_one_process(counts: Counts, variant: Variant) -> Tensor:
    """Return the parameters after a plain loop that has all samples of a window in one batch."""
    model, optimizer = make(variant.optimizer, torch.float64)
    for window in batches(counts, torch.float64):
        batch = batch_of_all_ranks(window)
        loss = sum_of_losses(model, batch) / batch[1].sum()
        loss.backward()
        if variant.clips:
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
    return flat_parameters(model)


def on_ranks(
    fabric: Any, counts: Counts, variant: Variant, weight: str, copies: int = 1
) -> Outcome:
    """Train on this rank's samples of each micro-batch.

    Args:
        fabric: The fabric of this rank.
        counts: The numbers of tokens.
        variant: The optimizer, and whether gradients are clipped.
        weight: The kind of the weights, or ``"known"``: each loss is divided by the sum of all
            weights before the backward pass, which only a test knows.
        copies: How many times every token counts, which makes sums large and changes no update.
    """
    dtype = fabric.precision.param_dtype or torch.float32
    model, optimizer = fabric.setup(*make(variant.optimizer, dtype))
    skipped = 0
    for window in batches(counts, dtype):
        _, mask = batch_of_all_ranks(window)
        sum_of_weights = copies * mask.sum()
        micro_batches = micro_batches_of_rank(fabric, window)
        for index, batch in enumerate(micro_batches):
            is_last = index == len(micro_batches) - 1
            with fabric.no_backward_sync(model, enabled=not is_last):
                loss = copies * sum_of_losses(model, batch)
                if weight == "known":
                    fabric.backward(loss * (fabric.world_size / sum_of_weights))
                else:
                    count = copies * batch[1].sum()
                    fabric.backward(loss, weight=WEIGHTS[weight](count))
        if variant.clips:
            fabric.clip_gradients(model, optimizer, max_norm=CLIP)
        optimizer.step()
        skipped += fabric.step_was_skipped(optimizer)
        optimizer.zero_grad()
    return Outcome(flat_parameters(model), skipped)


def by_recipe(
    fabric: Any, counts: Counts, variant: Variant, weight: str, lengths: list[int]
) -> Tensor:
    """Return the parameters after ``accumulate`` over loaders of these lengths, by rank."""
    model, optimizer = fabric.setup(*make(variant.optimizer, torch.float64))
    rank_batches: list[Batch] = []
    for window in batches(counts, torch.float64):
        rank_batches += [ranks[fabric.global_rank] for ranks in window]
    rank_batches = rank_batches[: lengths[fabric.global_rank]]
    loader = DataLoader(rank_batches, None)
    loader = fabric.setup_dataloaders(loader, use_distributed_sampler=False, uneven="longest")
    for batch, is_last in fabric.accumulate(loader, steps=len(counts[0])):
        with fabric.no_backward_sync(model, enabled=not is_last):
            loss = sum_of_losses(model, batch)
            count = batch[1].sum()
            fabric.backward(loss, weight=WEIGHTS[weight](count))
        if is_last:
            if variant.clips:
                fabric.clip_gradients(model, optimizer, max_norm=CLIP)
            optimizer.step()
            optimizer.zero_grad()
    return flat_parameters(model)


@st.composite
def token_counts(draw: Draw, size: int) -> Counts:
    """Draw windows of micro-batches, the last one shorter, for a number of ranks.

    Each rank has any number of samples in a micro-batch, of any lengths. At least one token counts
    in a window; in some windows only one token counts, on one rank.
    """
    length = draw(st.integers(1, 3))
    last_length = draw(st.integers(1, length))
    lengths = [length] * (STEPS - 1) + [last_length]
    return [draw(_window(length, size)) for length in lengths]


@st.composite
def _window(draw: Draw, length: int, size: int) -> WindowCounts:
    samples = st.lists(st.integers(0, LENGTH), max_size=3)
    has_one_token = draw(st.booleans())
    window: WindowCounts = []
    for _ in range(length):
        ranks = [draw(samples) for _ in range(size)]
        if has_one_token:
            ranks = [[0] * len(tokens) for tokens in ranks]
        window.append(ranks)
    if not has_tokens(window):
        micro_batch = draw(st.integers(0, length - 1))
        rank = draw(st.integers(0, size - 1))
        window[micro_batch][rank].append(1)
    return window


def has_tokens(window: WindowCounts) -> bool:
    """Return whether any token of a window counts."""
    return any(any(itertools.chain(*ranks)) for ranks in window)


@st.composite
def uneven_counts(draw: Draw, size: int) -> tuple[Counts, list[int]]:
    """Draw numbers of tokens where ranks run out of batches, and the numbers of batches by rank.

    At least one rank has all batches.
    """
    counts = draw(token_counts(size))
    micro_batches = list(itertools.chain(*counts))
    longest = draw(st.integers(0, size - 1))
    lengths = []
    for rank in range(size):
        length = len(micro_batches)
        if rank != longest:
            length = draw(st.integers(0, len(micro_batches)))
        lengths.append(length)
        for ranks in micro_batches[length:]:
            ranks[rank] = []
    for window in counts:
        if not has_tokens(window):
            window[0][longest].append(1)
    return counts, lengths


def exactly(sizes: tuple[int, ...]) -> Law:
    """Return the law that in float64 the parameters are those of one process to 1e-10."""

    def updates_are_those_of_one_process(subject: Subject, draw: Draw) -> None:
        size = draw(st.sampled_from(sizes), "size")
        variant = draw(st.sampled_from(VARIANTS), "variant")
        counts = draw(token_counts(size), "counts")
        weight = draw(st.sampled_from(list(WEIGHTS)), "weight")
        expected = in_one_process(counts, variant)
        for outcome in subject.run(size, on_ranks, counts, variant, weight):
            torch.testing.assert_close(outcome.parameters, expected, rtol=1e-10, atol=1e-10)

    return updates_are_those_of_one_process


def exactly_where_ranks_run_out(sizes: tuple[int, ...]) -> Law:
    """Return that law for ranks with different numbers of batches, by docs/exactness.md."""

    def updates_are_those_of_one_process(subject: Subject, draw: Draw) -> None:
        size = draw(st.sampled_from(sizes), "size")
        variant = draw(st.sampled_from(VARIANTS), "variant")
        counts, lengths = draw(uneven_counts(size), "counts")
        weight = draw(st.sampled_from(list(WEIGHTS)), "weight")
        expected = in_one_process(counts, variant)
        for parameters in subject.run(size, by_recipe, counts, variant, weight, lengths):
            torch.testing.assert_close(parameters, expected, rtol=1e-10, atol=1e-10)

    return updates_are_those_of_one_process


def to_rounding(sizes: tuple[int, ...]) -> Law:
    """Return the law of 16-mixed precision.

    The parameters are those of float64 to the rounding of float16, and no more steps are skipped
    than with mean losses.
    """

    def updates_overflow_no_sooner_than_those_of_mean_losses(subject: Subject, draw: Draw) -> None:
        size = draw(st.sampled_from(sizes), "size")
        counts = draw(token_counts(size), "counts")
        variant = Variant("SGD", draw(st.booleans(), "clips"))
        weight = draw(st.sampled_from(list(WEIGHTS)), "weight")
        copies = draw(st.sampled_from([1, 64, 4096]), "copies")
        # The first micro-batch shows how large the weights are.
        counts[0][0][0].append(LENGTH)
        expected = in_one_process(counts, variant)
        outcomes_of_means = subject.run(size, on_ranks, counts, variant, "known")
        outcomes = subject.run(size, on_ranks, counts, variant, weight, copies)
        for outcome, outcome_of_means in zip(outcomes, outcomes_of_means, strict=True):
            assert outcome.skipped <= outcome_of_means.skipped
            if outcome.skipped == 0:
                torch.testing.assert_close(outcome.parameters, expected, rtol=5e-3, atol=5e-3)

    return updates_overflow_no_sooner_than_those_of_mean_losses
