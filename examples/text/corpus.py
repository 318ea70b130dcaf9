"""A text dataset that needs no download: the source of Python's standard library, as characters."""

import sysconfig
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

CHARACTERS = "\n" + "".join(map(chr, range(32, 127)))
VALIDATION_SIZE = 2**14


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Non-overlapping windows of ``block_size`` characters, each with the characters that follow.

    Item ``i`` is ``(inputs, targets)``, int64 tensors of shape (block_size,); ``targets`` is
    shifted by one character.
    """

    def __init__(self, tokens: Tensor, block_size: int) -> None:
        self.tokens, self.block_size = tokens, block_size

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.block_size

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        window = self.tokens[index * self.block_size :][: self.block_size + 1]
        return window[:-1], window[1:]


def read_source(size: int) -> str:
    """The first ``size`` characters of the public top-level modules, in the order of their names."""
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("[a-z]*.py"), key=lambda path: path.name)
    parts: list[str] = []
    length = 0
    for path in paths:
        if length >= size:
            break
        parts.append(path.read_text(encoding="utf-8", errors="replace"))
        length += len(parts[-1])
    text = "".join(parts)
    if len(text) < size:
        raise SystemExit(f"--text-size {size}: the modules of this Python hold {len(text)} characters")
    return text[:size]


def encode(text: str) -> Tensor:
    """Positions in ``CHARACTERS`` as an int64 tensor; other characters become question marks."""
    position = {character: index for index, character in enumerate(CHARACTERS)}
    return torch.tensor([position.get(character, position["?"]) for character in text])


def decode(tokens: Tensor) -> str:
    return "".join(CHARACTERS[token] for token in tokens.tolist())


def read_windows(text_size: int, block_size: int) -> tuple[Windows, Windows]:
    """Windows of the first ``text_size`` characters for training, and of the next characters for validation."""
    tokens = encode(read_source(text_size + VALIDATION_SIZE + 2))
    return Windows(tokens[: text_size + 1], block_size), Windows(tokens[text_size + 1 :], block_size)


def make_loaders(data: tuple[Windows, Windows], batch_size: int) -> tuple[DataLoader, DataLoader]:
    """Make the loaders: shuffled training batches, and validation batches in order.

    Each loader has its own generator, so that the order of the samples depends only on the seed,
    not on how many random numbers the model has drawn.
    """
    order, unused = (torch.Generator().manual_seed(torch.initial_seed()) for _ in range(2))
    return (
        DataLoader(data[0], batch_size, shuffle=True, drop_last=True, generator=order),
        DataLoader(data[1], batch_size, drop_last=True, generator=unused),
    )
