"""Minimal checkpoints: only the weights, the optimizer and the step."""

from pathlib import Path

import torch
from torch import nn
from torch.optim import Optimizer


def save(path: Path, model: nn.Module, optimizer: Optimizer, step: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, path)


def load(path: Path, model: nn.Module, optimizer: Optimizer) -> int:
    """Load both and return the step. The epoch restarts: its order and the random state are not in the file."""
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["step"]
