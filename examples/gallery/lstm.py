"""An LSTM with truncated backpropagation: the hidden state goes from window to window.

A long text is cut into columns that are read side by side, so there is no ``DataLoader``. Each process reads its own
columns, and carries the hidden state of these columns.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from comparison import compare
from fabric import Fabric

WORDS = 20
COLUMNS = 8
WINDOW = 5

Hidden = tuple[Tensor, Tensor]


def make_columns() -> Tensor:
    """Return a text as word numbers, of shape (time, columns)."""
    generator = torch.Generator().manual_seed(0)
    steps = torch.randint(1, 4, (61, COLUMNS), generator=generator)
    return steps.cumsum(dim=0) % WORDS


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 16)
        self.lstm = nn.LSTM(16, 32)
        self.head = nn.Linear(32, WORDS)

    def forward(self, words: Tensor, hidden: Hidden | None) -> tuple[Tensor, Hidden]:
        outputs, next_hidden = self.lstm(self.embedding(words), hidden)
        return self.head(outputs), next_hidden


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return LanguageModel().double()


def train_plain() -> list[float]:
    text = make_columns()
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    losses = []
    hidden = None
    for start in range(0, len(text) - 1, WINDOW):
        inputs = text[start : start + WINDOW]
        targets = text[start + 1 : start + 1 + WINDOW]
        outputs, hidden = model(inputs, hidden)
        hidden = (hidden[0].detach(), hidden[1].detach())
        loss = cross_entropy(outputs.flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.25)
        optimizer.step()
        losses.append(loss.item())
    return losses


def train(fabric: Fabric) -> list[float]:
    text = make_columns()[:, fabric.global_rank :: fabric.world_size]
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer = fabric.setup(model, optimizer)
    losses = []
    hidden = None
    for start in range(0, len(text) - 1, WINDOW):
        inputs = text[start : start + WINDOW]
        targets = text[start + 1 : start + 1 + WINDOW]
        outputs, hidden = model(inputs, hidden)
        hidden = (hidden[0].detach(), hidden[1].detach())
        loss = cross_entropy(outputs.flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=0.25)
        optimizer.step()
        losses.append(fabric.all_reduce(loss.detach()).item())
    return losses


if __name__ == "__main__":
    compare(train_plain, train)
