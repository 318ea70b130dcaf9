"""Checkpoints that releases have written, each by a job on two processes.

``test_stored.py`` loads them with the present code. ``python -m tests.stored`` writes those of this
release.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import SumMetric

from fabric import Fabric

# Has one folder for each release.
FOLDER = Path(__file__).parent
# The strategies with which a release writes, by the names of the checkpoints: one file, one folder.
STRATEGIES = {"file.ckpt": "ddp", "folder": "fsdp"}
# Saves a loss scale.
PRECISION = "16-mixed"


def new_state(fabric: Fabric) -> dict[str, Any]:
    """Return the objects of a job whose numbers are exact on every machine."""
    module = nn.Linear(2, 2)
    with torch.no_grad():
        module.weight.copy_(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        module.bias.zero_()
    module.bias.requires_grad_(False)
    plain_optimizer = torch.optim.SGD([module.weight], lr=0.5, momentum=0.5)
    model, optimizer = fabric.setup(module, plain_optimizer)
    # Small, so that no gradient overflows with the first loss scale.
    samples = torch.arange(1.0, 9.0).div(8).reshape(8, 1).expand(8, 2).clone()
    loader = fabric.setup_dataloaders(DataLoader(TensorDataset(samples), batch_size=1))
    return {
        "model": model,
        "optimizer": optimizer,
        "loader": loader,
        "metric": SumMetric(),
        "values": {"step": 0, "rates": [0.5, 2.0**-10], (1, True): b"\x00\xff"},
    }


def steps(fabric: Fabric, state: dict[str, Any]) -> Iterator[float]:
    """Train on the batches of an epoch, and yield the sample of each step."""
    for [sample] in state["loader"]:
        fabric.backward(state["model"](sample).mean())
        state["optimizer"].step()
        state["optimizer"].zero_grad()
        state["metric"].update(sample[0, 0])
        yield sample[0, 0].item()
