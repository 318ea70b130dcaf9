"""REINFORCE: each process plays its own episodes.

The agent walks along a corridor, and is rewarded at its right end. Each episode draws its actions from a generator of
its own, so an episode is the same on whichever process it is played. Episodes differ in length; each counts once.
"""

import torch
from torch import Tensor, nn

from comparison import compare
from fabric import Fabric

UPDATES = 8
EPISODES = 6
LENGTH = 5
MAX_MOVES = 12


def make_policy() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(LENGTH, 16), nn.Tanh(), nn.Linear(16, 2)).double()


def play(policy: nn.Module, update: int, episode: int) -> Tensor:
    """Play an episode, and return its loss: the log-probabilities of the moves, weighted by the discounted reward."""
    generator = torch.Generator().manual_seed(update * EPISODES + episode)
    position = 0
    log_probabilities = []
    while position < LENGTH - 1 and len(log_probabilities) < MAX_MOVES:
        state = torch.zeros(LENGTH, dtype=torch.float64)
        state[position] = 1.0
        scores = policy(state).log_softmax(dim=0)
        move = int(torch.multinomial(scores.detach().exp(), 1, generator=generator))
        log_probabilities.append(scores[move])
        position = max(position + (1 if move == 1 else -1), 0)
    reward = 0.9 ** len(log_probabilities) if position == LENGTH - 1 else 0.0
    return -reward * torch.stack(log_probabilities).sum()


def train_plain() -> list[float]:
    policy = make_policy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.02)
    losses = []
    for update in range(UPDATES):
        episode_losses = [play(policy, update, episode) for episode in range(EPISODES)]
        loss = torch.stack(episode_losses).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def train(fabric: Fabric) -> list[float]:
    policy = make_policy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.02)
    policy, optimizer = fabric.setup(policy, optimizer)
    losses = []
    for update in range(UPDATES):
        episodes = range(fabric.global_rank, EPISODES, fabric.world_size)
        episode_losses = [play(policy, update, episode) for episode in episodes]
        loss = torch.stack(episode_losses).mean()
        optimizer.zero_grad()
        fabric.backward(loss)
        optimizer.step()
        losses.append(fabric.all_reduce(loss.detach()).item())
    return losses


if __name__ == "__main__":
    compare(train_plain, train)
