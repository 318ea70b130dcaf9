"""Text that every machine with Python has: the source of the standard library, character by character."""

import sysconfig
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

CHARACTERS = "\n" + "".join(map(chr, range(32, 127)))
VALIDATION_SIZE = 2**14


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Windows of ``block_size`` characters that do not overlap, each with the characters that follow them.

    Item ``i`` is ``(inputs, targets)``, two int64 tensors of shape (block_size,); ``targets`` is one character ahead.
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
    """Positions in ``CHARACTERS`` as an int64 tensor; a character that is not there becomes a question mark."""
    position = {character: index for index, character in enumerate(CHARACTERS)}
    return torch.tensor([position.get(character, position["?"]) for character in text])


def decode(tokens: Tensor) -> str:
    return "".join(CHARACTERS[token] for token in tokens.tolist())


def read_windows(text_size: int, block_size: int) -> tuple[Windows, Windows]:
    """Windows of ``text_size`` characters to train on, and of those after them to validate on."""
    tokens = encode(read_source(text_size + VALIDATION_SIZE + 2))
    return Windows(tokens[: text_size + 1], block_size), Windows(tokens[text_size + 1 :], block_size)


def make_loaders(data: tuple[Windows, Windows], batch_size: int) -> tuple[DataLoader, DataLoader]:
    """Shuffled batches to train on and batches in order to validate on.

    Each loader has a generator of its own, so that the order of the samples depends on the seed alone and not on how
    many random numbers the model has drawn.
    """
    order, unused = (torch.Generator().manual_seed(torch.initial_seed()) for _ in range(2))
    return (
        DataLoader(data[0], batch_size, shuffle=True, drop_last=True, generator=order),
        DataLoader(data[1], batch_size, drop_last=True, generator=unused),
    )
