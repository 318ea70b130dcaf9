"""The parts that both loops share: a small character-level GPT, its TP plan, the text, and the command line."""

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention
from torch.utils.data import TensorDataset

LENGTH = 32
CHARACTERS = "\n" + "".join(map(chr, range(32, 127)))
# "colwise" layers leave each rank with some columns of the output; "rowwise" layers then sum over
# the ranks. Attention is between the two: each rank computes some of the heads.
PLAN = {
    "blocks.*.attention.query": "colwise",
    "blocks.*.attention.key": "colwise",
    "blocks.*.attention.value": "colwise",
    "blocks.*.attention.out": "rowwise",
    "blocks.*.up": "colwise",
    "blocks.*.down": "rowwise",
    "head": "colwise_rep",
}


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.num_heads = heads
        self.query, self.key, self.value = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        # (batch, length, width) -> three of (batch, heads, length, width / heads)
        parts = (layer(x).unflatten(-1, (self.num_heads, -1)) for layer in (self.query, self.key, self.value))
        query, key, value = (part.transpose(1, 2) for part in parts)
        mixed = scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_attention(x))
        return x + self.down(gelu(self.up(self.norm_mlp(x))))


class GPT(nn.Module):
    """Maps tokens (batch, length), int64, to the logits (batch, length, vocabulary) of the next tokens."""

    def __init__(self, *, layers: int, width: int, heads: int = 4, vocabulary: int = len(CHARACTERS)) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(vocabulary, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def read_windows() -> TensorDataset:
    """Windows of argparse's source: pairs of int64 tensors of shape (LENGTH,), the second shifted by one character."""
    text = Path(argparse.__file__).read_text(encoding="utf-8")
    tokens = torch.tensor([max(0, CHARACTERS.find(character)) for character in text])
    last = (len(tokens) - 1) // LENGTH * LENGTH
    return TensorDataset(tokens[:last].view(-1, LENGTH), tokens[1 : last + 1].view(-1, LENGTH))


def parse_arguments(description: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps, those before --resume included")
    parser.add_argument("--batch-size", type=int, default=32, help="sequences a step, over all ranks together")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=64)
    with_fabric = parser.add_argument_group("known to train.py only")
    with_fabric.add_argument("--devices", type=int, default=4, help="number of CPU processes")
    with_fabric.add_argument("--tensor", type=int, default=2, help="in how many parts each layer is split")
    with_fabric.add_argument("--checkpoint", type=Path, default=Path("runs/mesh"))
    with_fabric.add_argument("--resume", action="store_true", help="continue from the checkpoint, on any mesh")
    return parser.parse_args()
