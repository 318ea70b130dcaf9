"""Scripts of users of Lightning Fabric run unchanged, with the numbers of a plain loop."""

import csv
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset

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

# What a script prints, or a plain loop yields, for a step.
Record = dict[str, float]


def run(script: str, folder: Path, *arguments: str) -> list[Record]:
    """Run a script with ``python -m fabric_compat``, and return the records that it prints."""
    path = SCRIPTS / f"{script}.py"
    done = subprocess.run(
        [sys.executable, "-m", "fabric_compat", str(path), *arguments],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "warn" not in done.stderr.lower(), done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def assert_agree(actual: list[Record], expected: list[Record]) -> None:
    assert len(actual) == len(expected)
    for actual_record, expected_record in zip(actual, expected, strict=True):
        assert actual_record == pytest.approx(expected_record, rel=1e-4)


def step(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def shuffled(dataset: Dataset, batch_size: int, seed: int, epoch: int = 0) -> DataLoader:
    """Return a loader whose batches are those of all ranks together."""
    sampler = DistributedSampler(dataset, num_replicas=1, rank=0, seed=seed)
    sampler.set_epoch(epoch)
    return DataLoader(dataset, batch_size, sampler=sampler)


def image_classifier() -> Iterator[Record]:
    torch.manual_seed(1)
    test_loader = DataLoader(images(32, seed=1), 32)
    model = Net()
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    for epoch in range(2):
        for batch, targets in shuffled(images(64), 16, seed=1, epoch=epoch):
            loss = F.nll_loss(model(batch), targets)
            step(optimizer, loss)
        optimizer.param_groups[0]["lr"] *= 0.7
        data, target = next(iter(test_loader))
        output = model(data)
        test_loss = F.nll_loss(output, target)
        correct = output.argmax(1) == target
        yield {"test_loss": test_loss.item(), "correct": correct.sum().item()}


# In `make test`, test_imports.py runs a script.
@pytest.mark.slow
def test_an_image_classifier(tmp_path: Path) -> None:
    actual = run("image_classifier", tmp_path, "--save-model", "model.pt")
    assert_agree(actual, list(image_classifier()))
    Net().load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))


def gan() -> Iterator[Record]:
    torch.manual_seed(3)
    generator = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 64))
    discriminator = nn.Sequential(nn.Linear(64, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
    optimizer_g = torch.optim.Adam(generator.parameters(), lr=0.01, betas=(0.5, 0.999))
    optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=0.01, betas=(0.5, 0.999))
    criterion = nn.BCEWithLogitsLoss()
    real_labels = torch.ones(16, 1)
    fake_labels = torch.zeros(16, 1)
    for index, (real, _) in enumerate(DataLoader(images(64), 16)):
        noise_of_rank = torch.cos(torch.arange(32.0) * (index + 1)).view(8, 4)
        fake = generator(noise_of_rank.repeat(2, 1))
        loss_real = criterion(discriminator(real.flatten(1)), real_labels)
        loss_fake = criterion(discriminator(fake.detach()), fake_labels)
        loss_d = loss_real + loss_fake
        step(optimizer_d, loss_d)
        loss_g = criterion(discriminator(fake), real_labels)
        step(optimizer_g, loss_g)
        yield {"d": loss_d.item(), "g": loss_g.item()}


def kfold() -> Iterator[Record]:
    dataset = images(64)
    losses = []
    for fold in range(4):
        torch.manual_seed(fold)
        held_out = list(range(fold, 64, 4))
        indices = [index for index in range(64) if index not in held_out]
        loader = shuffled(Subset(dataset, indices), 16, seed=fold)
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for data, target in loader:
            loss = F.nll_loss(model(data), target)
            step(optimizer, loss)
        data, target = dataset[held_out]
        held_out_loss = F.nll_loss(model(data), target).item()
        losses.append(held_out_loss)
        yield {"fold": fold, "loss": held_out_loss}
    yield {"mean": sum(losses) / 4}


def language_model_fsdp() -> Iterator[Record]:
    torch.manual_seed(5)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for iteration, batch in enumerate(shuffled(sentences(48), 8, seed=5)):
        loss = next_token_loss(model(batch[:, :-1]), batch[:, 1:])
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        yield {"iteration": iteration, "loss": loss.item(), "norm": norm.item()}


def pretrain_lr(index: int) -> float:
    """Return the learning rate of a batch: a linear warm-up of 4 batches, and a cosine of 8."""
    if index < 4:
        return 0.02 * (index + 1) / 4
    return 0.01 * (1 + math.cos(math.pi * (index - 4) / 8))


def pretrain() -> Iterator[Record]:
    torch.manual_seed(1337)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1)
    for index, batch in enumerate(sentences(96).split(8)):
        optimizer.param_groups[0]["lr"] = pretrain_lr(index)
        loss = next_token_loss(model(batch[:, :-1]), batch[:, 1:])
        (loss / 2).backward()
        number = index + 1
        if number % 2 == 0:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            yield {"loss": loss.item(), "iter": number, "step": number // 2}


def meta_learning() -> Iterator[Record]:
    torch.manual_seed(11)
    model = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for iteration in range(5):
        loss = torch.zeros(())
        for number in range(8 * iteration, 8 * iteration + 8):
            task = make_task(number, "cpu")
            loss = loss + adapt_and_evaluate(model, task)
        loss = loss / 8
        step(optimizer, loss)
        yield {"iteration": iteration, "loss": loss.item()}


def actor_critic() -> Iterator[Record]:
    torch.manual_seed(7)
    agent = Agent()
    env = Walk()
    optimizer = torch.optim.Adam(agent.parameters(), lr=0.01)
    obs = env.position
    for update in range(5):
        rollout, obs = collect(agent, env, obs)
        loss = loss_of(agent, rollout)
        step(optimizer, loss)
        reward = rollout["rewards"].mean()
        yield {"update": update, "loss": loss.item(), "reward": reward.item()}


@dataclass
class Player:
    """A rank of the script, which has its own environment and random numbers."""

    env: Walk
    obs: Tensor
    random_state: Tensor

    def collect(self, agent: PPOAgent) -> dict[str, Tensor]:
        """Return a rollout of the agent, evaluated."""
        torch.set_rng_state(self.random_state)
        rollout, self.obs = collect(agent, self.env, self.obs)
        self.random_state = torch.get_rng_state()
        return agent.evaluate(rollout, self.obs)


def new_player(rank: int) -> Player:
    torch.manual_seed(42 + rank)
    env = Walk()
    return Player(env, env.position, torch.get_rng_state())


def indices_of_minibatches() -> Iterator[Tensor]:
    """Yield the indices of the minibatches of an update, of two epochs."""
    for epoch in range(2):
        generator = torch.Generator().manual_seed(42 + epoch)
        yield from torch.randperm(32, generator=generator).split(16)


def ppo() -> Iterator[Record]:
    torch.manual_seed(42)
    agent = PPOAgent()
    optimizer = torch.optim.Adam(agent.parameters(), lr=0.02, eps=1e-5)
    players = [new_player(0), new_player(1)]
    for update in range(4):
        optimizer.param_groups[0]["lr"] = 0.02 * (1 - update / 4)
        rollouts = [player.collect(agent) for player in players]
        data: dict[str, Tensor] = {}
        for name in rollouts[0]:
            data[name] = torch.cat([rollout[name] for rollout in rollouts])
        for indices in indices_of_minibatches():
            minibatch = {name: values[indices] for name, values in data.items()}
            loss = agent.training_step(minibatch)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
            optimizer.step()
        reward = data["rewards"].mean()
        yield {"update": update, "loss": loss.item(), "reward": reward.item()}


def rows_of(path: Path) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


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
    metrics = rows_of(tmp_path / "a run" / "ppo" / "version_0" / "metrics.csv")
    assert [row["step"] for row in metrics] == ["0", "1", "2", "3"]
    assert not list(tmp_path.glob("a run/*/version_1"))


@pytest.mark.slow
def test_pretraining_resumes_where_it_was_saved(tmp_path: Path) -> None:
    expected = list(pretrain())
    assert_agree(run("pretrain", tmp_path), expected)
    assert_agree(run("pretrain", tmp_path, "--resume"), expected[3:])
    assert_metrics_are_logged(tmp_path / "logs" / "version_0" / "metrics.csv", first_step=2)
    assert_metrics_are_logged(tmp_path / "logs" / "version_1" / "metrics.csv", first_step=8)


def assert_metrics_are_logged(path: Path, first_step: int) -> None:
    metrics = rows_of(path)
    loss_steps = [int(row["step"]) for row in metrics if row["loss"]]
    assert loss_steps == list(range(first_step, 13, 2))
    for row in metrics[-2:]:
        if not row["loss"]:
            assert float(row["samples_per_sec"]) > 0
