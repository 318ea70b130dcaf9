"""A variational autoencoder, whose loss is a sum over the samples.

``reduce="sum"`` adds the gradients of the processes instead of averaging them. The noise of the whole batch is drawn on
every process alike, and each takes the rows of its samples: row r, r + n, ... for process r of n.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from comparison import compare
from fabric import Fabric

BATCH = 16
LATENT = 3


def make_dataset() -> TensorDataset:
    angles = torch.linspace(0, 6.28, 96, dtype=torch.float64).unsqueeze(1)
    frequencies = torch.arange(1, 9, dtype=torch.float64)
    return TensorDataset((angles * frequencies).sin())


class Autoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2 * LATENT))
        self.decoder = nn.Sequential(nn.Linear(LATENT, 32), nn.ReLU(), nn.Linear(32, 8))

    def forward(self, samples: Tensor, noise: Tensor) -> Tensor:
        """Return the loss of a batch: reconstruction error and KL divergence, summed over the samples."""
        mean, log_variance = self.encoder(samples).chunk(2, dim=1)
        latent = mean + noise * (log_variance / 2).exp()
        error = mse_loss(self.decoder(latent), samples, reduction="sum")
        divergence = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).sum()
        return error + divergence


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return Autoencoder().double()


def train_plain() -> list[float]:
    loader = DataLoader(make_dataset(), BATCH)
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for (samples,) in loader:
        noise = torch.randn(BATCH, LATENT, dtype=torch.float64, generator=generator)
        loss = model(samples, noise)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def train(fabric: Fabric) -> list[float]:
    loader = fabric.setup_dataloaders(DataLoader(make_dataset(), BATCH // fabric.world_size))
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    model, optimizer = fabric.setup(model, optimizer)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for (samples,) in loader:
        noise = torch.randn(BATCH, LATENT, dtype=torch.float64, generator=generator)
        loss = model(samples, noise[fabric.global_rank :: fabric.world_size])
        optimizer.zero_grad()
        fabric.backward(loss, reduce="sum")
        optimizer.step()
        losses.append(fabric.all_reduce(loss.detach(), reduce_op="sum").item())
    return losses


if __name__ == "__main__":
    compare(train_plain, train)
