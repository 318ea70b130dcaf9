"""Scripts as users of Lightning Fabric write them run unchanged, with the numbers of a plain loop."""

import csv
import json
import math
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

from tests.compat.scripts.models import (
    GPT,
    Agent,
    Net,
    PPOAgent,
    Walk,
    adapt_and_evaluate,
    collect,
    images,
    loss_of,
    make_task,
    next_token_loss,
    sentences,
)

SCRIPTS = Path(__file__).parent / "scripts"


def run(script: str, folder: Path, *arguments: object) -> list[dict[str, float]]:
    """The records that a script prints, by ``python -m fabric_compat``."""
    command = [
        sys.executable,
        "-m",
        "fabric_compat",
        str(SCRIPTS / f"{script}.py"),
        *map(str, arguments),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "warn" not in done.stderr.lower(), done.stderr
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
    loader = DataLoader(images(64), 16, shuffle=True)
    test_loader = DataLoader(images(32, seed=1), 32)
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
    actual = run("image_classifier", tmp_path, "--save-model", "model.pt")
    assert_agree(actual, list(image_classifier()))
    Net().load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))


def gan() -> Iterator[dict[str, float]]:
    torch.manual_seed(3)
    generator = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 64))
    discriminator = nn.Sequential(nn.Linear(64, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
    optimizer_g, optimizer_d = (
        torch.optim.Adam(each.parameters(), lr=0.01, betas=(0.5, 0.999))
        for each in (generator, discriminator)
    )
    criterion = nn.BCEWithLogitsLoss()
    ones = torch.ones(16, 1)
    for index, (real, _) in enumerate(DataLoader(images(64), 16)):
        fake = generator(torch.cos(torch.arange(32.0) * (index + 1)).view(8, 4).repeat(2, 1))
        loss_d = criterion(discriminator(real.flatten(1)), ones)
        loss_d = loss_d + criterion(discriminator(fake.detach()), torch.zeros(16, 1))
        step(optimizer_d, loss_d)
        loss_g = criterion(discriminator(fake), ones)
        step(optimizer_g, loss_g)
        yield {"d": loss_d.item(), "g": loss_g.item()}


def kfold() -> Iterator[dict[str, float]]:
    dataset = images(64)
    losses = []
    for fold in range(4):
        torch.manual_seed(fold)
        held_out = range(fold, 64, 4)
        loader = DataLoader(
            Subset(dataset, [index for index in range(64) if index % 4 != fold]), 16, shuffle=True
        )
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for data, target in loader:
            step(optimizer, F.nll_loss(model(data), target))
        data, target = dataset[list(held_out)]
        losses.append(F.nll_loss(model(data), target).item())
        yield {"fold": fold, "loss": losses[-1]}
    yield {"mean": sum(losses) / 4}


def language_model_fsdp() -> Iterator[dict[str, float]]:
    torch.manual_seed(5)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for iteration, batch in enumerate(DataLoader(sentences(48), 8, shuffle=True)):
        loss = next_token_loss(model(batch[:, :-1]), batch[:, 1:])
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        yield {"iteration": iteration, "loss": loss.item(), "norm": norm.item()}


def pretrain() -> Iterator[dict[str, float]]:
    torch.manual_seed(1337)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1)
    for index, batch in enumerate(sentences(96).split(8)):
        cosine = 0.01 * (1 + math.cos(math.pi * (index - 4) / 8))
        optimizer.param_groups[0]["lr"] = 0.02 * (index + 1) / 4 if index < 4 else cosine
        loss = next_token_loss(model(batch[:, :-1]), batch[:, 1:])
        (loss / 2).backward()
        if index % 2:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            yield {"loss": loss.item(), "iter": index + 1, "step": (index + 1) // 2}


def meta_learning() -> Iterator[dict[str, float]]:
    torch.manual_seed(11)
    model = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for iteration in range(5):
        tasks = [make_task(8 * iteration + number, "cpu") for number in range(8)]
        loss = sum(adapt_and_evaluate(model, task) for task in tasks) / 8
        step(optimizer, loss)
        yield {"iteration": iteration, "loss": loss.item()}


def actor_critic() -> Iterator[dict[str, float]]:
    torch.manual_seed(7)
    agent = Agent()
    env = Walk()
    optimizer = torch.optim.Adam(agent.parameters(), lr=0.01)
    obs = env.position
    for update in range(5):
        rollout, obs = collect(agent, env, obs)
        loss = loss_of(agent, rollout)
        step(optimizer, loss)
        yield {"update": update, "loss": loss.item(), "reward": rollout["rewards"].mean().item()}


def ppo() -> Iterator[dict[str, float]]:
    torch.manual_seed(42)
    agent = PPOAgent()
    places = []
    optimizer = torch.optim.Adam(agent.parameters(), lr=0.02, eps=1e-5)
    for rank in range(2):
        torch.manual_seed(42 + rank)
        places.append((torch.get_rng_state(), env := Walk(), env.position))
    for update in range(4):
        optimizer.param_groups[0]["lr"] = 0.02 * (1 - update / 4)
        parts = []
        for rank, (state, env, obs) in enumerate(places):
            torch.set_rng_state(state)
            rollout, obs = collect(agent, env, obs)
            places[rank] = torch.get_rng_state(), env, obs
            parts.append(agent.evaluate(rollout, obs))
        data = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        for epoch in range(2):
            order = torch.randperm(32, generator=torch.Generator().manual_seed(42 + epoch))
            for indices in order.split(16):
                loss = agent.training_step({name: values[indices] for name, values in data.items()})
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
                optimizer.step()
        yield {"update": update, "loss": loss.item(), "reward": data["rewards"].mean().item()}


PLAIN = (gan, kfold, language_model_fsdp, meta_learning, actor_critic)


@pytest.mark.slow
@pytest.mark.parametrize("plain", PLAIN, ids=lambda plain: plain.__name__)
def test_a_script_has_the_numbers_of_the_plain_loop(plain, tmp_path: Path) -> None:
    assert_agree(run(plain.__name__, tmp_path), list(plain()))


@pytest.mark.slow
def test_ppo_with_hydra_has_the_numbers_of_the_plain_loop(tmp_path: Path) -> None:
    pytest.importorskip("hydra")
    assert_agree(run("ppo", tmp_path, "seed=42", "hydra.run.dir=a run"), list(ppo()))
    assert {path.name for path in tmp_path.iterdir()} == {"a run", "ppo.ckpt"}
    with open(tmp_path / "a run" / "ppo" / "version_0" / "metrics.csv", newline="") as file:
        assert [row["step"] for row in csv.DictReader(file)] == ["0", "1", "2", "3"]
    assert not list(tmp_path.glob("a run/*/version_1"))


@pytest.mark.slow
def test_pretraining_resumes_where_it_was_saved(tmp_path: Path) -> None:
    expected = list(pretrain())
    assert_agree(run("pretrain", tmp_path), expected)
    assert_agree(run("pretrain", tmp_path, "--resume"), expected[3:])
    for version, first in enumerate((2, 8)):
        with open(tmp_path / "logs" / f"version_{version}" / "metrics.csv", newline="") as file:
            rows = list(csv.DictReader(file))
        assert [int(row["step"]) for row in rows if row["loss"]] == list(range(first, 13, 2))
        assert all(float(row["samples_per_sec"]) > 0 for row in rows[-2:] if not row["loss"])
