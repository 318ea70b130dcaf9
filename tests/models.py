"""Small models that several test files use."""

import torch
from torch import Tensor, nn


class Net(nn.Module):
    """An encoder, blocks in a container and a head, with methods that call the forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(4, 8)
        self.blocks = nn.ModuleList([nn.Linear(8, 8)])
        self.head = nn.Linear(8, 1)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.width = 8

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.encoder(x)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)

    def loss(self, x: Tensor) -> Tensor:
        output = self(x)
        return output.pow(2).mean()

    def training_step(self, x: Tensor) -> Tensor:
        return self.loss(x)

    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())


class OneWeight(nn.Module):
    """A module without submodules."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight).sum()

    def penalty(self) -> Tensor:
        return self.weight.pow(2).sum()


class PartlyUnused(nn.Module):
    """A module with a layer that its forward pass leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(4, 1)
        self.left_out = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)
