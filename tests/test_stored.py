"""Checkpoints of every release, loaded by the present code; see ``tests/stored``."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from fabric import Fabric
from fabric._torch import full_tensor
from tests.ranks import run_in_ranks
from tests.stored import FOLDER, PRECISION, STRATEGIES, new_state, steps

CHECKPOINTS = sorted(path for name in STRATEGIES for path in FOLDER.glob(f"*/{name}"))


@dataclass
class Resumed:
    """What a rank loaded, and how it went on."""

    weight: list[list[float]]
    momentum: list[list[float]]
    values: dict[Any, Any]
    loss_scale: float
    random_number: float
    samples: list[float]
    final_weight: list[list[float]]
    sum_of_samples: float


def resume(fabric: Fabric, path: Path) -> Resumed:
    """Load a checkpoint, then train to the end of the epoch."""
    state = new_state(fabric)
    fabric.load(path, state)
    [weight, _] = state["model"].parameters()
    [buffers] = state["optimizer"].state.values()
    loaded_weight = full_tensor(weight.detach()).tolist()
    momentum = full_tensor(buffers["momentum_buffer"]).tolist()
    loss_scale = float(fabric.describe().split()[-1])
    random_number = torch.rand(1).item()
    samples = list(steps(fabric, state))
    return Resumed(
        weight=loaded_weight,
        momentum=momentum,
        values=state["values"],
        loss_scale=loss_scale,
        random_number=random_number,
        samples=samples,
        final_weight=full_tensor(weight.detach()).tolist(),
        sum_of_samples=state["metric"].compute().item(),
    )


def weights_and_momenta() -> list[tuple[float, float]]:
    """Return the upper left weight, and its momentum, after each step of the plain loop."""
    weight = 1.0
    momentum = 0.0
    history = []
    for first_sample in (1 / 8, 3 / 8, 5 / 8, 7 / 8):
        # Each of the two outputs has half of the loss. The second rank has the next sample.
        gradient = (first_sample + first_sample + 1 / 8) / 2 / 2
        momentum = 0.5 * momentum + gradient
        weight -= 0.5 * momentum
        history.append((weight, momentum))
    return history


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("path", CHECKPOINTS, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_a_run_saved_by_a_release_goes_on(path: Path, strategy: str) -> None:
    ranks = run_in_ranks(resume, path, strategy=strategy, precision=PRECISION)
    history = weights_and_momenta()
    for rank, resumed in enumerate(ranks):
        [weight, momentum] = history[0]
        assert resumed.weight == [[weight, weight + 1], [weight + 2, weight + 3]]
        assert resumed.momentum == [[momentum] * 2] * 2
        assert resumed.values == {"step": 1, "rates": [0.5, 2.0**-10], (1, True): b"\x00\xff"}
        assert resumed.loss_scale == 65536.0
        torch.manual_seed(rank)
        assert resumed.random_number == torch.rand(1).item()
        assert resumed.samples == [(3 + rank) / 8, (5 + rank) / 8, (7 + rank) / 8]
        [weight, momentum] = history[-1]
        assert resumed.final_weight == [[weight, weight + 1], [weight + 2, weight + 3]]
        # The metric of each rank goes on with the samples of that rank.
        assert resumed.sum_of_samples == 36 / 8
