"""A contrastive loss, whose negatives are the other samples of the batch.

Each process embeds its own samples. ``fabric.all_gather`` with ``sync_grads=True`` collects the embeddings of all, and
sends the gradients back to the process of each sample, so the loss is that of the whole batch.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize
from torch.utils.data import DataLoader, TensorDataset

from comparison import compare
from fabric import Fabric

BATCH = 16


def make_dataset() -> TensorDataset:
    """Return two noisy views of each sample."""
    generator = torch.Generator().manual_seed(0)
    samples = torch.randn(96, 6, dtype=torch.float64, generator=generator)
    first = samples + 0.3 * torch.randn(96, 6, dtype=torch.float64, generator=generator)
    second = samples + 0.3 * torch.randn(96, 6, dtype=torch.float64, generator=generator)
    return TensorDataset(first, second)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 4)).double()


def contrastive_loss(first: Tensor, second: Tensor) -> Tensor:
    """Return how badly each first view finds its second view among those of the batch."""
    similarity = normalize(first) @ normalize(second).t() / 0.1
    return cross_entropy(similarity, torch.arange(len(first)))


def train_plain() -> list[float]:
    loader = DataLoader(make_dataset(), BATCH)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for first, second in loader:
        embeddings = (model(first), model(second))
        loss = contrastive_loss(*embeddings)
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
    for first, second in loader:
        embeddings = (model(first), model(second))
        embeddings = fabric.all_gather(embeddings, sync_grads=True, concat=True)
        loss = contrastive_loss(*embeddings)
        optimizer.zero_grad()
        fabric.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    compare(train_plain, train)
