"""The reference that every strategy is held against: a plain loop in one process, and the same loop with Fabric."""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fabric import Fabric
from fabric._torch import full_tensor

GLOBAL_BATCH = 36  # divides by 1 to 4 ranks times 1 and 3 micro-batches
STEPS = 3
WIDTH = 8


@dataclass
class Record:
    """What a loop did: the loss of each step, the norm and gradients of the last, the parameters at the end."""

    losses: list[float]
    norm: float
    gradients: list[Tensor]
    parameters: list[Tensor]


class Block(nn.Module):
    # No bias in the attention: the gradient of the keys' is zero but for rounding, which AdamW would blow up.
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, bias=False, batch_first=True)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        return x + self.mlp(x)


class Transformer(nn.Module):
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
    return model, torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4)


def batches(dtype: torch.dtype = torch.float32) -> Iterator[tuple[Tensor, Tensor]]:
    """One global batch for each step, of shapes (GLOBAL_BATCH, 5, 4) and (GLOBAL_BATCH, 1)."""
    generator = torch.Generator().manual_seed(2)
    for _ in range(STEPS):
        x = torch.randn(GLOBAL_BATCH, 5, 4, generator=generator, dtype=torch.float64)
        yield x.to(dtype), x.mean(dim=(1, 2), keepdim=True).squeeze(-1).to(dtype)


def plain_loop(
    dtype: torch.dtype, autocast: torch.dtype | None, scaled: bool, accumulation: int
) -> Record:
    """The loop without fabric, as torch's own documentation has it."""
    model, optimizer = make_model(dtype)
    scaler = torch.amp.GradScaler("cpu", enabled=scaled)
    record = Record([], 0.0, [], [])
    for x, y in batches(dtype):
        total = 0.0
        for part_x, part_y in zip(x.chunk(accumulation), y.chunk(accumulation), strict=True):
            with torch.autocast("cpu", dtype=autocast) if autocast else nullcontext():
                output = model(part_x)
            loss = nn.functional.mse_loss(output.to(dtype), part_y) / accumulation
            scaler.scale(loss).backward()
            total += loss.item()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        record.losses.append(total)
        record.norm = norm.item()
        record.gradients = [parameter.grad.clone() for parameter in model.parameters()]
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    record.parameters = [parameter.detach().clone() for parameter in model.parameters()]
    return record


def fabric_loop(fabric: Fabric, dtype: torch.dtype, accumulation: int) -> Record:
    """The same loop on this rank's share of each micro-batch; what it records is over all ranks."""
    plain_model, plain_optimizer = make_model(dtype)
    model, optimizer = fabric.setup(plain_model, plain_optimizer)
    record = Record([], 0.0, [], [])
    rank = fabric.global_rank
    size = fabric.world_size
    for x, y in batches(dtype):
        total = 0.0
        for index, (part_x, part_y) in enumerate(
            zip(x.chunk(accumulation), y.chunk(accumulation), strict=True)
        ):
            with fabric.no_backward_sync(model, enabled=index < accumulation - 1):
                output = model(part_x[rank::size])
                loss = nn.functional.mse_loss(output, part_y[rank::size]) / accumulation
                fabric.backward(loss)
            total += fabric.all_reduce(loss.detach()).item()
        norm = fabric.clip_gradients(model, optimizer, max_norm=1.0)
        record.losses.append(total)
        record.norm = norm.item()
        record.gradients = [full_tensor(parameter.grad).clone() for parameter in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    record.parameters = [
        full_tensor(parameter.detach()).clone() for parameter in model.parameters()
    ]
    return record


def assert_same(actual: Record, expected: Record, tolerance: float) -> None:
    """The two loops did the same, to an absolute and relative tolerance; 0 means bit for bit."""
    close: dict[str, Any] = {"rtol": tolerance, "atol": tolerance}
    torch.testing.assert_close(torch.tensor(actual.losses), torch.tensor(expected.losses), **close)
    torch.testing.assert_close(torch.tensor(actual.norm), torch.tensor(expected.norm), **close)
    torch.testing.assert_close(actual.gradients, expected.gradients, **close)
    torch.testing.assert_close(actual.parameters, expected.parameters, **close)
