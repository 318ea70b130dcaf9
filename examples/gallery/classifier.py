"""An image classifier with BatchNorm, and its accuracy on a test set that does not divide evenly.

``fabric.sync_batchnorm`` lets BatchNorm use the statistics of the whole batch. ``fabric.gather_for_metrics`` leaves out
the samples that a loader repeats, so each test sample counts once.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from comparison import compare
from fabric import Fabric

BATCH = 16


def make_dataset(size: int, seed: int) -> TensorDataset:
    """Return images of shape (1, 8, 8) with a bright row, and the number of that row."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(8, (size,), generator=generator)
    images = torch.randn(size, 1, 8, 8, dtype=torch.float64, generator=generator)
    images[torch.arange(size), 0, rows] += 1.0
    return TensorDataset(images, rows)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 8 * 8, 8)
    ).double()


def train_plain() -> list[float]:
    loader = DataLoader(make_dataset(96, seed=1), BATCH)
    test_loader = DataLoader(make_dataset(37, seed=2), BATCH)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    results = []
    for images, rows in loader:
        loss = cross_entropy(model(images), rows)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        results.append(loss.item())
    model.eval()
    correct = 0
    with torch.no_grad():
        for images, rows in test_loader:
            guesses = model(images).argmax(dim=1)
            correct += count_equal(guesses, rows)
    results.append(correct / 37)
    return results


def train(fabric: Fabric) -> list[float]:
    loader = fabric.setup_dataloaders(DataLoader(make_dataset(96, seed=1), BATCH // fabric.world_size))
    test_loader = fabric.setup_dataloaders(DataLoader(make_dataset(37, seed=2), BATCH // fabric.world_size))
    model = fabric.sync_batchnorm(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model, optimizer = fabric.setup(model, optimizer)
    results = []
    for images, rows in loader:
        loss = cross_entropy(model(images), rows)
        optimizer.zero_grad()
        fabric.backward(loss)
        optimizer.step()
        results.append(fabric.all_reduce(loss.detach()).item())
    model.eval()
    correct = 0
    with torch.no_grad():
        for images, rows in test_loader:
            guesses, rows = fabric.gather_for_metrics((model(images).argmax(dim=1), rows))
            correct += count_equal(guesses, rows)
    results.append(correct / 37)
    return results


def count_equal(guesses: Tensor, rows: Tensor) -> int:
    return int((guesses == rows).sum())


if __name__ == "__main__":
    compare(train_plain, train)
