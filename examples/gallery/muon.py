"""Muon for the matrices of the hidden layers, beside AdamW for the remaining parameters.

Muon makes the update of a matrix orthogonal, and computes in bfloat16. A rounding error of a gradient may grow there
to one of the fourth digit. So with ``--strategy fsdp`` the losses agree less closely than those of other examples.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from comparison import compare
from fabric import Fabric

BATCH = 16


def make_dataset() -> TensorDataset:
    inputs = torch.randn(128, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return TensorDataset(inputs, inputs[:, :4].argmax(dim=1))


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32, bias=False), nn.ReLU(), nn.Linear(32, 4)
    ).double()


def make_optimizers(model: nn.Sequential) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    muon = torch.optim.Muon(model[2].parameters(), lr=0.02)
    adamw = torch.optim.AdamW([*model[0].parameters(), *model[4].parameters()], lr=1e-2)
    return muon, adamw


def loss_of(model: nn.Module, inputs: Tensor, classes: Tensor) -> Tensor:
    return cross_entropy(model(inputs), classes)


def train_plain() -> list[float]:
    loader = DataLoader(make_dataset(), BATCH)
    model = make_model()
    muon, adamw = make_optimizers(model)
    losses = []
    for inputs, classes in loader:
        loss = loss_of(model, inputs, classes)
        muon.zero_grad()
        adamw.zero_grad()
        loss.backward()
        muon.step()
        adamw.step()
        losses.append(loss.item())
    return losses


def train(fabric: Fabric) -> list[float]:
    loader = fabric.setup_dataloaders(DataLoader(make_dataset(), BATCH // fabric.world_size))
    model = make_model()
    muon, adamw = make_optimizers(model)
    model, muon, adamw = fabric.setup(model, muon, adamw)
    losses = []
    for inputs, classes in loader:
        loss = loss_of(model, inputs, classes)
        muon.zero_grad()
        adamw.zero_grad()
        fabric.backward(loss)
        muon.step()
        adamw.step()
        losses.append(fabric.all_reduce(loss.detach()).item())
    return losses


if __name__ == "__main__":
    compare(train_plain, train)
