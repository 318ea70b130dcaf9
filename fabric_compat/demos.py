"""A small language model and its data, which examples of Lightning import."""

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.hub import download_url_to_file
from torch.utils.data import Dataset

_URL = (
    "https://raw.githubusercontent.com/pytorch/examples/main/"
    "word_language_model/data/wikitext-2/train.txt"
)


class Transformer(nn.Module):
    """An encoder and a decoder, which return log probabilities of the next words."""

    def __init__(
        self,
        vocab_size: int = 33278,
        ninp: int = 200,
        nhead: int = 2,
        nhid: int = 200,
        nlayers: int = 2,
        dropout: float = 0.2,
    ) -> None:
        super().__init__()
        self.ninp = ninp
        self.vocab_size = vocab_size
        self.pos_encoder = PositionalEncoding(ninp, dropout)
        self.embedding = nn.Embedding(vocab_size, ninp)
        self.transformer = nn.Transformer(
            ninp, nhead, nlayers, nlayers, nhid, dropout, batch_first=True
        )
        self.decoder = nn.Linear(ninp, vocab_size)

    def forward(self, inputs: Tensor, target: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return log probabilities of shape ``(words, vocab_size)``.

        The encoder reads ``inputs``, and the decoder reads ``target``. ``mask`` is for the decoder.
        By default it hides later words from earlier ones.
        """
        if mask is None:
            mask = nn.Transformer.generate_square_subsequent_mask(inputs.size(1), inputs.device)
        scale = math.sqrt(self.ninp)
        source = self.pos_encoder(self.embedding(inputs) * scale)
        shifted = self.pos_encoder(self.embedding(target) * scale)
        hidden = self.transformer(source, shifted, tgt_mask=mask)
        return self.decoder(hidden).log_softmax(-1).view(-1, self.vocab_size)


class PositionalEncoding(nn.Module):
    """Lightning's encoding, which adds the same waves to all words of a text.

    The waves are those of the position after the last word.
    """

    def __init__(self, dim: int, dropout: float = 0.1, max_len: int = 5000) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        indices = torch.arange(0, self.dim, 2, device=x.device, dtype=torch.float)
        angles = x.size(1) * torch.exp(indices * (-math.log(10000.0) / self.dim))
        waves = torch.stack([angles.sin(), angles.cos()], dim=1)
        return self.dropout(x + waves.flatten())


class WikiText2(Dataset[Any]):
    """The words of WikiText2 as numbers, in pairs of a block and the block one word later."""

    def __init__(
        self, data_dir: Any = "./data", block_size: int = 35, download: bool = True
    ) -> None:
        path = Path(data_dir, "wikitext-2.txt")
        if download:
            self.download(path)
        self.path = path
        self.block_size = block_size
        self.dictionary: dict[str, int] = {}
        numbers: list[int] = []
        for line in path.read_text(encoding="utf8").splitlines():
            for word in (*line.split(), "<eos>"):
                numbers.append(self.dictionary.setdefault(word, len(self.dictionary)))
        self.data = torch.tensor(numbers)

    @property
    def vocab_size(self) -> int:
        return len(self.dictionary)

    def __len__(self) -> int:
        # One block fewer, as in Lightning: the last full block may have no block one word later.
        return len(self.data) // self.block_size - 1

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return the words of a block, and the words that follow each of them."""
        start = index * self.block_size
        end = start + self.block_size
        return self.data[start:end], self.data[start + 1 : end + 1]

    @staticmethod
    def download(destination: Path) -> None:
        """Download the text, unless the file exists."""
        if not destination.exists():
            destination.parent.mkdir(parents=True, exist_ok=True)
            download_url_to_file(_URL, str(destination), progress=False)
