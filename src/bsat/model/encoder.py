"""PatchTST's encoder: attention and feed-forward, each added to its input and then batch-normalised."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from .attention import Attention, count_parts
from .dropout import Dropout


class TokenBatchNorm(nn.BatchNorm1d):
    """Batch norm of each of d features over all tokens of all windows."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, n, d) -> (B, n, d)"""
        return super().forward(x.flatten(0, 1)).view(x.shape)


class EncoderLayer(nn.Module):
    """x = norm(x + attention(x)); x = norm(x + W2 drop(gelu(W1 x))).

    Args:
        attention: with its width.
        d_model: d
        d_ff: width of the feed-forward part.
        dropout: of what either part adds to the stream (the paper's general dropout).
        ff_dropout: inside the feed-forward part (its fully-connected dropout).
    """

    def __init__(self, attention: Attention, *, d_model: int, d_ff: int, dropout: float, ff_dropout: float) -> None:
        super().__init__()
        self.attention = attention
        self.d_ff = d_ff
        self.attention_norm = TokenBatchNorm(d_model)
        self.feed_forward = nn.Sequential(
            nn.Linear(d_model, d_ff), nn.GELU(), Dropout(ff_dropout), nn.Linear(d_ff, d_model)
        )
        self.feed_forward_norm = TokenBatchNorm(d_model)
        self.dropout = Dropout(dropout)

    def forward(
        self, x: Tensor, positions: Tensor, scores: tuple[Tensor, ...] | None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """See `Attention`."""
        mixed, scores = self.attention(x, positions, scores)
        x = self.attention_norm(x + self.dropout(mixed))
        parts = count_parts(x, 4 * x.shape[0] * x.shape[1] * self.d_ff)
        fed = self.feed_forward(x) if parts == 1 else torch.cat([self.feed_forward(a) for a in x.tensor_split(parts)])
        return self.feed_forward_norm(x + self.dropout(fed)), scores


class Encoder(nn.Module):
    """Layers one after another; each hands its attention scores to the next."""

    def __init__(self, layers: Iterable[EncoderLayer]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """x (B, n, d), positions (B, n) or (n,) -> (B, n, d)"""
        scores = None
        for layer in self.layers:
            x, scores = layer(x, positions, scores)
        return x
