"""A small character-level GPT."""

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.project_in = nn.Linear(width, 3 * width, bias=False)
        self.project_out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        # (batch, length, 3 * width) -> three of (batch, heads, length, width / heads)
        query, key, value = self.project_in(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        mixed = scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        return self.project_out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm_attention(x)))
        return x + self.dropout(self.mlp(self.norm_mlp(x)))


class GPT(nn.Module):
    """Maps tokens (batch, length), int64, to the logits (batch, length, vocabulary) of the next tokens."""

    def __init__(
        self, vocabulary: int, block_size: int, *, layers: int, width: int, heads: int = 4, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.block_size = block_size
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(block_size, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.5 * width**-0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    @torch.no_grad()
    def generate(self, tokens: Tensor, length: int, *, temperature: float = 0.6, seed: int = 0) -> Tensor:
        """Return ``tokens`` (int64, 1-dim), followed by ``length`` more, sampled one at a time."""
        was_training = self.training
        self.eval()
        generator = torch.Generator().manual_seed(seed)
        tokens = tokens.to(self.position.weight.device)
        for _ in range(length):
            logits = self(tokens[None, -self.block_size :])[0, -1].float().cpu()
            chosen = torch.multinomial((logits / temperature).softmax(0), 1, generator=generator)
            tokens = torch.cat([tokens, chosen.to(tokens.device)])
        self.train(was_training)
        return tokens.cpu()
