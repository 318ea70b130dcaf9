"""A GPT with accumulated gradients and a cosine schedule.

Each update is made from several micro-batches. ``fabric.no_backward_sync`` lets the processes average their gradients
once for each update, after the last micro-batch. The scheduler steps as often as in the plain loop.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset

from comparison import compare
from fabric import Fabric

MICRO_BATCH = 4
MICRO_BATCHES = 4
WORDS = 16
LENGTH = 8


def make_dataset() -> TensorDataset:
    """Return windows of a text, of shape (windows, LENGTH + 1): the inputs, and one more word to guess."""
    generator = torch.Generator().manual_seed(0)
    steps = torch.randint(1, 3, (96, LENGTH + 1), generator=generator)
    return TensorDataset(steps.cumsum(dim=1) % WORDS)


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 16)
        self.position = nn.Embedding(LENGTH, 16)
        block = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        hidden = self.embedding(words) + self.position.weight
        causal_mask = nn.Transformer.generate_square_subsequent_mask(LENGTH, dtype=torch.float64)
        return self.head(self.blocks(hidden, mask=causal_mask))


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return GPT().double()


def train_plain() -> list[float]:
    loader = DataLoader(make_dataset(), MICRO_BATCH)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = CosineAnnealingLR(optimizer, len(loader) // MICRO_BATCHES)
    losses = []
    for number, (window,) in enumerate(loader, start=1):
        scores = model(window[:, :-1])
        loss = cross_entropy(scores.flatten(0, 1), window[:, 1:].flatten())
        (loss / MICRO_BATCHES).backward()
        losses.append(loss.item())
        if number % MICRO_BATCHES == 0:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return losses


def train(fabric: Fabric) -> list[float]:
    loader = fabric.setup_dataloaders(DataLoader(make_dataset(), MICRO_BATCH // fabric.world_size))
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = CosineAnnealingLR(optimizer, len(loader) // MICRO_BATCHES)
    model, optimizer = fabric.setup(model, optimizer)
    losses = []
    for (window,), last in fabric.accumulate(loader, steps=MICRO_BATCHES):
        with fabric.no_backward_sync(model, enabled=not last):
            scores = model(window[:, :-1])
            loss = cross_entropy(scores.flatten(0, 1), window[:, 1:].flatten())
            fabric.backward(loss / MICRO_BATCHES)
        losses.append(fabric.all_reduce(loss.detach()).item())
        if last:
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return losses


if __name__ == "__main__":
    compare(train_plain, train)
