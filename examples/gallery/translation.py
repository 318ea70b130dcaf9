"""A translation model: sentences are padded to one length, and the loss is the mean over the words.

The processes have different numbers of words, so the mean of their means would be wrong. Fabric takes the sum of the
losses, and the number of words as its weight.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from comparison import compare
from fabric import Fabric

BATCH = 8
PADDING = 0
WORDS = 12


def make_dataset() -> TensorDataset:
    """Return sentences and their translations, which are the sentences in reverse."""
    generator = torch.Generator().manual_seed(0)
    sentences = torch.zeros(64, 10, dtype=torch.int64)
    translations = torch.zeros(64, 10, dtype=torch.int64)
    for row, length in enumerate(torch.randint(2, 11, (64,), generator=generator).tolist()):
        words = torch.randint(1, WORDS, (length,), generator=generator)
        sentences[row, :length] = words
        translations[row, :length] = words.flip(0)
    return TensorDataset(sentences, translations)


class Translator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 16, padding_idx=PADDING)
        self.transformer = nn.Transformer(16, 2, 1, 1, dim_feedforward=32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, WORDS)

    def forward(self, sentences: Tensor, translations: Tensor) -> Tensor:
        """Return the scores of each next word of the translations, of shape (batch, length, words)."""
        starts = nn.functional.pad(translations, (1, -1))
        causal_mask = nn.Transformer.generate_square_subsequent_mask(starts.shape[1], dtype=torch.float64)
        outputs = self.transformer(self.embedding(sentences), self.embedding(starts), tgt_mask=causal_mask)
        return self.head(outputs)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return Translator().double()


def train_plain() -> list[float]:
    loader = DataLoader(make_dataset(), BATCH)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for sentences, translations in loader:
        scores = model(sentences, translations)
        loss = cross_entropy(scores.flatten(0, 1), translations.flatten(), ignore_index=PADDING)
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
    for sentences, translations in loader:
        scores = model(sentences, translations)
        loss = cross_entropy(scores.flatten(0, 1), translations.flatten(), ignore_index=PADDING, reduction="sum")
        words = int((translations != PADDING).sum())
        optimizer.zero_grad()
        fabric.backward(loss, weight=words)
        optimizer.step()
        totals = fabric.all_reduce({"loss": loss.detach(), "words": words}, reduce_op="sum")
        losses.append(totals["loss"].item() / totals["words"])
    return losses


if __name__ == "__main__":
    compare(train_plain, train)
