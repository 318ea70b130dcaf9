"""The law of updates: each is that of the single process that saw all samples at once, however they are split."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

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
CLIP = 0.1  # a norm below that of most gradients
# By window, micro-batch, rank and sample: how many of its tokens count.
Counts = list[list[list[list[int]]]]
# The parameters in the end, and how many steps were skipped.
Outcome = tuple[Tensor, int]
# Inputs of shape (samples, LENGTH, FEATURES), and which tokens count, of shape (samples, LENGTH).
Batch = tuple[Tensor, Tensor]

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    "AdamW": partial(torch.optim.AdamW, lr=1e-3),
}
VARIANTS = [(optimizer, clips) for optimizer in OPTIMIZERS for clips in (False, True)]
# With a scale at which means do not overflow, and sums over many tokens do.
MIXED = replace(PRECISIONS["16-mixed"], loss_scale=LossScale(init_scale=2.0**10))
# Kinds of weights that a loop may have.
WEIGHTS: dict[str, Callable[[Tensor], Any]] = {
    "int": lambda count: int(count),
    "float": lambda count: float(count),
    "integer tensor": lambda count: count.sum(),
    "tensor": lambda count: count.double(),
}


@dataclass(frozen=True)
class Strategy:
    """A strategy of the law, and the numbers of ranks, or replicas, that it is tried on."""

    sizes: tuple[int, ...]
    make: Callable[[], Any]
    in_one_process: bool = False

    def world(self, precision: str | Precision, size: int) -> "Job":
        return Job(self, precision, size)


@dataclass
class Job:
    """A world of :class:`fabric.testing.World` for one strategy and precision, on processes that all examples share."""

    strategy: Strategy
    precision: str | Precision
    size: int

    def run(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        options: dict[str, Any] = {"strategy": self.strategy.make(), "precision": self.precision}
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
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(self.norm(x)).tanh()


class Model(nn.Module):
    """For each token a number; no gradient of a parameter is zero but for rounding, which AdamW would blow up."""

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


def batches(counts: Counts, dtype: torch.dtype) -> Iterator[list[list[Batch]]]:
    """For each window the batches by micro-batch and rank; the samples are the same in every process."""
    generator = torch.Generator().manual_seed(0)

    def batch(tokens: list[int]) -> Batch:
        x = torch.randn(len(tokens), LENGTH, FEATURES, generator=generator, dtype=torch.float64)
        mask = torch.arange(LENGTH) < torch.tensor(tokens, dtype=torch.int64).unsqueeze(-1)
        return x.to(dtype), mask.view(len(tokens), LENGTH)

    for window in counts:
        yield [[batch(tokens) for tokens in ranks] for ranks in window]


def together(parts: list[Batch]) -> Batch:
    return torch.cat([x for x, _ in parts]), torch.cat([mask for _, mask in parts])


def sum_of_losses(model: nn.Module, batch: Batch) -> Tensor:
    x, mask = batch
    return ((model(x) - x.sum(-1).sin()).square() * mask).sum()


def whole(model: nn.Module) -> Tensor:
    return torch.cat(
        [full_tensor(parameter.detach()).double().flatten() for parameter in model.parameters()]
    )


def in_one_process(counts: Counts, optimizer_name: str, clips: bool) -> Tensor:
    """The parameters after the plain loop, each of whose steps has all samples of a window in one batch."""
    model, optimizer = make(optimizer_name, torch.float64)
    for window in batches(counts, torch.float64):
        batch = together([part for ranks in window for part in ranks])
        (sum_of_losses(model, batch) / batch[1].sum()).backward()
        if clips:
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
    return whole(model)


def on_ranks(
    fabric: Any, counts: Counts, variant: tuple[str, bool], weight: str, copies: int = 1
) -> Outcome:
    """The same windows, micro-batch by micro-batch on this rank's samples.

    Every token counts ``copies`` times, which makes sums large and changes no update. ``weight`` is their kind, or
    ``"known"``: each loss is divided by the sum of all weights before the backward pass, when only a test knows it.
    """
    dtype = fabric.precision.param_dtype or torch.float32
    (model, optimizer), skipped = fabric.setup(*make(variant[0], dtype)), 0
    for window in batches(counts, dtype):
        total = copies * sum(mask.sum() for ranks in window for _, mask in ranks)
        for index, ranks in enumerate(window):
            batch = together(ranks[fabric.global_rank :: fabric.world_size])
            with fabric.no_backward_sync(model, enabled=index < len(window) - 1):
                loss = copies * sum_of_losses(model, batch)
                if weight == "known":
                    fabric.backward(loss * (fabric.world_size / total))
                else:
                    fabric.backward(loss, weight=WEIGHTS[weight](copies * batch[1].sum()))
        if variant[1]:
            fabric.clip_gradients(model, optimizer, max_norm=CLIP)
        optimizer.step()
        skipped += fabric.step_was_skipped(optimizer)
        optimizer.zero_grad()
    return whole(model), skipped


def by_recipe(
    fabric: Any, counts: Counts, variant: tuple[str, bool], weight: str, lengths: list[int]
) -> Tensor:
    """The same by ``accumulate`` over loaders of these lengths, by rank; the parameters."""
    model, optimizer = fabric.setup(*make(variant[0], torch.float64))
    rounds = [ranks for window in batches(counts, torch.float64) for ranks in window]
    own = [ranks[fabric.global_rank] for ranks in rounds][: lengths[fabric.global_rank]]
    loader = fabric.setup_dataloaders(
        DataLoader(own, None), use_distributed_sampler=False, uneven="longest"
    )
    for batch, last in fabric.accumulate(loader, steps=len(counts[0])):
        with fabric.no_backward_sync(model, enabled=not last):
            fabric.backward(sum_of_losses(model, batch), weight=WEIGHTS[weight](batch[1].sum()))
        if last:
            if variant[1]:
                fabric.clip_gradients(model, optimizer, max_norm=CLIP)
            optimizer.step()
            optimizer.zero_grad()
    return whole(model)


@st.composite
def token_counts(draw: Draw, size: int) -> Counts:
    """Windows of micro-batches, the last one shorter; each rank has any samples in each, of any lengths.

    Somewhere in a window a token counts; in some windows just one does, on one rank.
    """
    length = draw(st.integers(1, 3))
    lengths = [length] * (STEPS - 1) + [draw(st.integers(1, length))]
    return [draw(_window(number, size)) for number in lengths]


@st.composite
def _window(draw: Draw, number: int, size: int) -> list[list[list[int]]]:
    samples = st.lists(st.integers(0, LENGTH), max_size=3)
    window = [[draw(samples) for _ in range(size)] for _ in range(number)]
    alone = draw(st.booleans())
    if alone:
        window = [[[0 for _ in tokens] for tokens in ranks] for ranks in window]
    if not any(tokens for ranks in window for own in ranks for tokens in own):
        window[draw(st.integers(0, number - 1))][draw(st.integers(0, size - 1))].append(1)
    return window


@st.composite
def uneven_counts(draw: Draw, size: int) -> tuple[Counts, list[int]]:
    """The same, where ranks run out of batches; and how many each of them has, which is 0 to all."""
    counts = draw(token_counts(size))
    rounds = [ranks for window in counts for ranks in window]
    longest = draw(st.integers(0, size - 1))
    lengths = [
        len(rounds) if rank == longest else draw(st.integers(0, len(rounds)))
        for rank in range(size)
    ]
    for rank, length in enumerate(lengths):
        for ranks in rounds[length:]:
            ranks[rank] = []
    for window in counts:
        if not any(tokens for ranks in window for own in ranks for tokens in own):
            window[0][longest].append(1)
    return counts, lengths


def exactly(sizes: tuple[int, ...]) -> Law:
    """In float64 the parameters after three steps are those of one process to 1e-10."""

    def updates_are_those_of_one_process(subject: Subject, draw: Draw) -> None:
        size = draw(st.sampled_from(sizes), "size")
        variant = draw(st.sampled_from(VARIANTS), "variant")
        counts = draw(token_counts(size), "counts")
        weight = draw(st.sampled_from(list(WEIGHTS)), "weight")
        expected = in_one_process(counts, *variant)
        for parameters, _ in subject.run(size, on_ranks, counts, variant, weight):
            torch.testing.assert_close(parameters, expected, rtol=1e-10, atol=1e-10)

    return updates_are_those_of_one_process


def exactly_where_ranks_run_out(sizes: tuple[int, ...]) -> Law:
    """Likewise where ranks have different numbers of batches, by the recipe of docs/exactness.md."""

    def updates_are_those_of_one_process(subject: Subject, draw: Draw) -> None:
        size = draw(st.sampled_from(sizes), "size")
        variant = draw(st.sampled_from(VARIANTS), "variant")
        (counts, lengths), weight = (
            draw(uneven_counts(size), "counts"),
            draw(st.sampled_from(list(WEIGHTS)), "weight"),
        )
        expected = in_one_process(counts, *variant)
        for parameters in subject.run(size, by_recipe, counts, variant, weight, lengths):
            torch.testing.assert_close(parameters, expected, rtol=1e-10, atol=1e-10)

    return updates_are_those_of_one_process


def to_rounding(sizes: tuple[int, ...]) -> Law:
    """In 16-mixed they are those of float64 to the rounding of float16, and no more steps are skipped than by means."""

    def updates_overflow_no_sooner_than_those_of_mean_losses(subject: Subject, draw: Draw) -> None:
        size = draw(st.sampled_from(sizes), "size")
        counts = draw(token_counts(size), "counts")
        variant = "SGD", draw(st.booleans(), "clips")
        weight = draw(st.sampled_from(list(WEIGHTS)), "weight")
        copies = draw(st.sampled_from([1, 64, 4096]), "copies")
        counts[0][0][0].append(LENGTH)  # the first micro-batch says how large the weights are
        by_means = subject.run(size, on_ranks, counts, variant, "known")
        expected = in_one_process(counts, *variant)
        for (parameters, skipped), (_, limit) in zip(
            subject.run(size, on_ranks, counts, variant, weight, copies), by_means, strict=True
        ):
            assert skipped <= limit
            if not skipped:
                torch.testing.assert_close(parameters, expected, rtol=5e-3, atol=5e-3)

    return updates_overflow_no_sooner_than_those_of_mean_losses
