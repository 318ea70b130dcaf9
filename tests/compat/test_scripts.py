"""Scripts as users of Lightning Fabric write them run unchanged, with the numbers of a plain loop."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset

from tests.compat.scripts.models import Net, images

SCRIPTS = Path(__file__).parent / "scripts"


def run(script: str, folder: Path, *arguments: object) -> list[dict[str, float]]:
    """The records that a script prints, by ``python -m fabric_compat``."""
    command = [sys.executable, "-m", "fabric_compat", str(SCRIPTS / f"{script}.py"), *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def assert_agree(found: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    assert [record.keys() for record in found] == [record.keys() for record in expected]
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, rel=1e-4)


def step(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def image_classifier() -> Iterator[dict[str, float]]:
    torch.manual_seed(1)
    loader, test_loader = DataLoader(images(64), 16, shuffle=True), DataLoader(images(32, seed=1), 32)
    model = Net()
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    for _ in range(2):
        for batch, targets in loader:
            step(optimizer, F.nll_loss(model(batch), targets))
        optimizer.param_groups[0]["lr"] *= 0.7
        data, target = next(iter(test_loader))
        output = model(data)
        yield {
            "test_loss": F.nll_loss(output, target).item(),
            "correct": (output.argmax(1) == target).sum().item(),
        }


def test_an_image_classifier(tmp_path: Path) -> None:
    found = run("image_classifier", tmp_path, "--save-model", "model.pt")
    assert_agree(found, list(image_classifier()))
    Net().load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))


def gan() -> Iterator[dict[str, float]]:
    torch.manual_seed(3)
    generator = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 64))
    discriminator = nn.Sequential(nn.Linear(64, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
    optimizer_g, optimizer_d = (
        torch.optim.Adam(each.parameters(), lr=0.01, betas=(0.5, 0.999)) for each in (generator, discriminator)
    )
    criterion, ones = nn.BCEWithLogitsLoss(), torch.ones(16, 1)
    for index, (real, _) in enumerate(DataLoader(images(64), 16)):
        fake = generator(torch.cos(torch.arange(32.0) * (index + 1)).view(8, 4).repeat(2, 1))
        loss_d = criterion(discriminator(real.flatten(1)), ones)
        loss_d = loss_d + criterion(discriminator(fake.detach()), torch.zeros(16, 1))
        step(optimizer_d, loss_d)
        loss_g = criterion(discriminator(fake), ones)
        step(optimizer_g, loss_g)
        yield {"d": loss_d.item(), "g": loss_g.item()}


def kfold() -> Iterator[dict[str, float]]:
    dataset, losses = images(64), []
    for fold in range(4):
        torch.manual_seed(fold)
        held_out = range(fold, 64, 4)
        loader = DataLoader(Subset(dataset, [index for index in range(64) if index % 4 != fold]), 16, shuffle=True)
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for data, target in loader:
            step(optimizer, F.nll_loss(model(data), target))
        data, target = dataset[list(held_out)]
        losses.append(F.nll_loss(model(data), target).item())
        yield {"fold": fold, "loss": losses[-1]}
    yield {"mean": sum(losses) / 4}


@pytest.mark.slow
@pytest.mark.parametrize("plain", [gan, kfold], ids=lambda plain: plain.__name__)
def test_a_script_has_the_numbers_of_the_plain_loop(plain, tmp_path: Path) -> None:
    assert_agree(run(plain.__name__, tmp_path), list(plain()))
