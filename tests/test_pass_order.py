"""The order in which the ranks run the passes of several models."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fabric import Fabric
from fabric.errors import RankFailedError
from fabric.strategies import FSDPStrategy
from tests.ranks import outcome, run_in_ranks

BATCH = torch.linspace(-1, 1, 12, dtype=torch.float64).view(3, 4)


class Generator(nn.Module):
    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.layer = nn.Linear(4, outputs, dtype=torch.float64)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layer(inputs)


class Critic(Generator):
    pass


class TwoModels:
    """Two set-up models, each with its optimizer."""

    def __init__(self, fabric: Fabric, outputs_of_critic: int = 4) -> None:
        torch.manual_seed(0)
        self.fabric = fabric
        self.batch = BATCH + fabric.global_rank
        self.models: list[Any] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        for model in (Generator(4), Critic(outputs_of_critic)):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            prepared, prepared_optimizer = fabric.setup(model, optimizer)
            self.models.append(prepared)
            self.optimizers.append(prepared_optimizer)

    @property
    def state(self) -> dict[str, Any]:
        return {"generator": self.models[0], "critic": self.models[1]}

    def step(self, swapped: str = "") -> None:
        """Make a step of each model, with the models swapped in the forward or backward passes."""
        order = [0, 1]
        if swapped == "forward":
            order.reverse()
        losses: dict[int, Tensor] = {}
        for index in order:
            losses[index] = self.models[index](self.batch * (index + 1)).square().mean()
        if swapped == "sum":
            self.fabric.backward(losses[0] + losses[1])
        else:
            order = [0, 1]
            if swapped == "backward":
                order.reverse()
            for index in order:
                self.fabric.backward(losses[index])
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()


def train_in_another_order(
    fabric: Fabric, swapped: str, outputs_of_critic: int, earlier_steps: int = 1
) -> str:
    two_models = TwoModels(fabric, outputs_of_critic)
    for _ in range(earlier_steps):
        two_models.step()
    if fabric.global_rank == 0:
        swapped = ""
    return outcome(lambda: two_models.step(swapped))


# With unequal shapes, gloo would end the process.
@pytest.mark.parametrize(
    ("outputs_of_critic", "earlier_steps", "check_collectives"),
    [(4, 1, False), (6, 1, False), (4, 10, True)],
)
def test_backward_passes_in_another_order_are_an_error_on_all_ranks(
    outputs_of_critic: int, earlier_steps: int, check_collectives: bool
) -> None:
    outcomes = run_in_ranks(
        train_in_another_order,
        "backward",
        outputs_of_critic,
        earlier_steps,
        check_collectives=check_collectives,
    )
    for rank, text in enumerate(outcomes):
        assert text.startswith("UsageError: backward pass of "), text
        assert f" on rank {rank}\n" in text
        assert "backward pass of Generator (set-up model 1)" in text
        assert "backward pass of Critic (set-up model 2)" in text


def fail_in_another_order(fabric: Fabric, swapped: str, outputs_of_critic: int) -> None:
    text = train_in_another_order(fabric, swapped, outputs_of_critic)
    raise AssertionError(text)


# The rank that raises has to end, since the other rank may wait for it in a collective of FSDP2.
@pytest.mark.parametrize(
    ("swapped", "outputs_of_critic"), [("backward", 4), ("backward", 6), ("forward", 4)]
)
def test_passes_of_sharded_models_in_another_order_are_an_error(
    swapped: str, outputs_of_critic: int
) -> None:
    strategy = FSDPStrategy(start_method="forkserver")
    with (
        Fabric(accelerator="cpu", devices=2, strategy=strategy) as fabric,
        pytest.raises(RankFailedError, match="UsageError") as caught,
    ):
        fabric.launch(fail_in_another_order, swapped, outputs_of_critic)
    text = str(caught.value)
    assert f"{swapped} pass of Generator (set-up model 1)" in text
    assert f"{swapped} pass of Critic (set-up model 2)" in text


def train_long(fabric: Fabric, folder: str, swapped: str) -> str:
    """Return the error of the save after a step in another order on rank 1."""
    two_models = TwoModels(fabric)
    for _ in range(10):
        two_models.step()
    if fabric.global_rank == 0:
        swapped = ""
    two_models.step(swapped)
    two_models.step()
    return outcome(lambda: fabric.save(folder, two_models.state))


@pytest.mark.parametrize(
    ("strategy", "swapped"), [("ddp", "backward"), ("fsdp", "backward"), ("fsdp", "forward")]
)
def test_a_save_finds_that_later_passes_were_in_another_order(
    strategy: str, swapped: str, tmp_path: Path
) -> None:
    path = tmp_path / "checkpoint"
    outcomes = run_in_ranks(train_long, str(path), swapped, strategy=strategy, check_replicas=True)
    for text in outcomes:
        assert text.startswith("ReplicaDriftError"), text
        assert "the order of the latest passes differs" in text
        assert "backward pass of Generator (set-up model 1)" in text
    assert not path.exists()


def train_in_one_order(fabric: Fabric, folder: str) -> None:
    two_models = TwoModels(fabric)
    for number in range(10):
        generator = two_models.models[0]
        with fabric.no_backward_sync(generator):
            fabric.backward(generator(two_models.batch).mean())
        if number % 2 == 0:
            two_models.step()
        else:
            two_models.step("sum")
        with torch.no_grad():
            two_models.models[1](BATCH)
    fabric.save(folder, two_models.state)


@pytest.mark.parametrize("strategy", ["ddp", "ddp_find_unused_parameters_true", "fsdp"])
def test_passes_in_one_order_are_fine(strategy: str, tmp_path: Path) -> None:
    run_in_ranks(train_in_one_order, str(tmp_path / "checkpoint"), strategy=strategy)
