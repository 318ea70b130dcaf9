"""A siamese network: one model embeds both halves of a pair, in two forward passes before one backward pass."""

import torch
from torch import Tensor, nn
from torch.nn.functional import pairwise_distance
from torch.utils.data import DataLoader, TensorDataset

from comparison import compare
from fabric import Fabric

BATCH = 8


def make_dataset() -> TensorDataset:
    """Return pairs of points, and whether both points of a pair are of the same class."""
    generator = torch.Generator().manual_seed(0)
    centers = torch.randn(4, 6, dtype=torch.float64, generator=generator)
    classes = torch.randint(4, (64, 2), generator=generator)
    points = centers[classes] + 0.1 * torch.randn(64, 2, 6, dtype=torch.float64, generator=generator)
    return TensorDataset(points[:, 0], points[:, 1], (classes[:, 0] == classes[:, 1]).double())


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2)).double()


def contrastive_loss(first: Tensor, second: Tensor, is_same: Tensor) -> Tensor:
    """Return the mean loss of pairs: near points for the same class, points at a distance of 1 for two classes."""
    distance = pairwise_distance(first, second)
    return (is_same * distance.square() + (1 - is_same) * (1 - distance).clamp(min=0).square()).mean()


def train_plain() -> list[float]:
    loader = DataLoader(make_dataset(), BATCH)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for left, right, is_same in loader:
        loss = contrastive_loss(model(left), model(right), is_same)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def train(fabric: Fabric) -> list[float]:
    loader = fabric.setup_dataloaders(DataLoader(make_dataset(), BATCH // fabric.world_size))
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = fabric.setup(model, optimizer)
    losses = []
    for left, right, is_same in loader:
        loss = contrastive_loss(model(left), model(right), is_same)
        optimizer.zero_grad()
        fabric.backward(loss)
        optimizer.step()
        losses.append(fabric.all_reduce(loss.detach()).item())
    return losses


if __name__ == "__main__":
    compare(train_plain, train)
