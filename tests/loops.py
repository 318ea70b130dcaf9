"""A plain training loop in one process, and the loop with Fabric that has to equal it."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from fabric import Fabric
from fabric._torch import full_tensor

# The batch divides by 1 to 4 ranks times 1 and 3 micro-batches.
GLOBAL_BATCH = 36
STEPS = 3
WIDTH = 8


@dataclass
class Record:
    """The losses of all steps, the norm and gradients of the last step, and the parameters."""

    losses: list[float]
    norm: float
    gradients: list[Tensor]
    parameters: list[Tensor]


class Block(nn.Module):
    """A block of a transformer.

    The attention has no bias: the gradient of the keys' bias is zero except for rounding, which
    AdamW would amplify.
    """

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, bias=False, batch_first=True)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH),
            nn.GELU(),
            nn.Linear(2 * WIDTH, WIDTH),
        )

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        attended, _ = self.attention(h, h, h, need_weights=False)
        x = x + attended
        return x + self.mlp(x)


class Transformer(nn.Module):
    """A transformer of two blocks that returns one number for each sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(4, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x).mean(dim=1)


def make_model(dtype: torch.dtype = torch.float32) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = Transformer().to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4)
    return model, optimizer


def batches(dtype: torch.dtype = torch.float32) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield a global batch for each step, of shapes (GLOBAL_BATCH, 5, 4) and (GLOBAL_BATCH, 1)."""
    generator = torch.Generator().manual_seed(2)
    for _ in range(STEPS):
        inputs = torch.randn(GLOBAL_BATCH, 5, 4, generator=generator, dtype=torch.float64)
        targets = inputs.mean(dim=(1, 2), keepdim=True).squeeze(-1)
        yield inputs.to(dtype), targets.to(dtype)


def micro_batches(x: Tensor, y: Tensor, count: int) -> Iterator[tuple[Tensor, Tensor]]:
    return zip(x.chunk(count), y.chunk(count), strict=True)


def full_gradients(model: nn.Module) -> list[Tensor]:
    gradients = []
    for parameter in model.parameters():
        gradient = full_tensor(parameter.grad)
        gradients.append(gradient.clone())
    return gradients


def full_parameters(model: nn.Module) -> list[Tensor]:
    parameters = []
    for parameter in model.parameters():
        value = full_tensor(parameter.detach())
        parameters.append(value.clone())
    return parameters


def plain_loop(
    dtype: torch.dtype, autocast: torch.dtype | None, scaled: bool, accumulation: int
) -> Record:
    """Train without fabric, as torch's documentation does.

    Args:
        dtype: The dtype of the parameters and the data.
        autocast: The dtype of autocast, or None for no autocast.
        scaled: Whether a loss scaler scales the loss.
        accumulation: The number of micro-batches of a step.
    """
    model, optimizer = make_model(dtype)
    scaler = torch.amp.GradScaler("cpu", enabled=scaled)
    uses_autocast = autocast is not None
    record = Record([], 0.0, [], [])
    for step, (x, y) in enumerate(batches(dtype), start=1):
        step_loss = 0.0
        for inputs, targets in micro_batches(x, y, accumulation):
            with torch.autocast("cpu", dtype=autocast, enabled=uses_autocast):
                output = model(inputs)
            loss = mse_loss(output.to(dtype), targets) / accumulation
            scaled_loss = scaler.scale(loss)
            scaled_loss.backward()
            step_loss += loss.item()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        record.losses.append(step_loss)
        record.norm = norm.item()
        if step == STEPS:
            record.gradients = full_gradients(model)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    record.parameters = full_parameters(model)
    return record


def fabric_loop(fabric: Fabric, dtype: torch.dtype, accumulation: int) -> Record:
    """Train on this rank's samples of each micro-batch; record values over all ranks."""
    plain_model, plain_optimizer = make_model(dtype)
    model, optimizer = fabric.setup(plain_model, plain_optimizer)
    record = Record([], 0.0, [], [])
    rank_samples = slice(fabric.global_rank, None, fabric.world_size)
    for step, (x, y) in enumerate(batches(dtype), start=1):
        step_loss = 0.0
        for index, (inputs, targets) in enumerate(micro_batches(x, y, accumulation)):
            is_last = index == accumulation - 1
            with fabric.no_backward_sync(model, enabled=not is_last):
                output = model(inputs[rank_samples])
                loss = mse_loss(output, targets[rank_samples]) / accumulation
                fabric.backward(loss)
            mean_loss = fabric.all_reduce(loss.detach())
            step_loss += mean_loss.item()
        norm = fabric.clip_gradients(model, optimizer, max_norm=1.0)
        record.losses.append(step_loss)
        record.norm = norm.item()
        if step == STEPS:
            record.gradients = full_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
    record.parameters = full_parameters(model)
    return record


def assert_same(actual: Record, expected: Record, tolerance: float) -> None:
    """Compare two loops to an absolute and relative tolerance; 0 means bit for bit."""
    assert_close = partial(torch.testing.assert_close, rtol=tolerance, atol=tolerance)
    assert_close(torch.tensor(actual.losses), torch.tensor(expected.losses))
    assert_close(torch.tensor(actual.norm), torch.tensor(expected.norm))
    assert_close(actual.gradients, expected.gradients)
    assert_close(actual.parameters, expected.parameters)
