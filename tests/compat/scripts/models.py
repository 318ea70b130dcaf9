"""Models and data of the scripts beside this file, and of the plain loops that they are compared with."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset


def images(count: int, seed: int = 0) -> TensorDataset:
    """Noise of 8 x 8 with a bright quarter, which is the class."""
    generator = torch.Generator().manual_seed(seed)
    targets = torch.randint(4, (count,), generator=generator)
    pixels = 0.5 * torch.randn(count, 1, 8, 8, generator=generator)
    for image, target in zip(pixels, targets.tolist(), strict=True):
        row, column = 4 * (target // 2), 4 * (target % 2)
        image[:, row : row + 4, column : column + 4] += 1
    return TensorDataset(pixels, targets)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.head = nn.Linear(4 * 9, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv(x)), 2)
        return F.log_softmax(self.head(x.flatten(1)), dim=1)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        past = x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]
        return x + F.gelu(self.mix(self.norm(past)))


class GPT(nn.Module):
    def __init__(self, vocabulary: int = 32, width: int = 16, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def sentences(count: int, length: int = 13) -> Tensor:
    """Arithmetic sequences modulo 32."""
    generator = torch.Generator().manual_seed(0)
    start, stride = torch.randint(32, (2, count, 1), generator=generator)
    return (start + stride * torch.arange(length)) % 32


def next_token_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())
