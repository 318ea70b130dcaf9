"""The model, the data and the training step of the cases."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

__all__ = ["step_of", "tiny"]


def tiny(
    device: str = "cpu", width: int = 16
) -> tuple[nn.Sequential, torch.optim.Optimizer, Tensor, Tensor]:
    """Return a model so small that a step is only overhead, its optimizer, and a batch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inputs = torch.randn(8, width, device=device)
    targets = torch.randn(8, width, device=device)
    return model, optimizer, inputs, targets


def step_of(
    model: Callable[[Tensor], Tensor],
    optimizer: Any,
    backward: Callable[[Tensor], Any],
    inputs: Tensor,
    targets: Tensor,
) -> Callable[[], None]:
    """Return the hand-written step. Only the objects from the library differ."""

    def step() -> None:
        loss = mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        backward(loss)
        optimizer.step()

    return step
