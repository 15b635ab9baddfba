"""Multi-head attention with residual scores (Realformer: He et al., 2021)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .dropout import Dropout
from .positions import RotaryPositions, rotate


class Attention(nn.Module):
    """softmax(Q K' / sqrt(k) + the scores of the layer before) V, projected.

    Args:
        d_model: d
        n_heads: h
        rotary: turns queries and keys by their positions, or None.
        dropout: of the attention weights.
    """

    def __init__(self, d_model: int, n_heads: int, *, rotary: RotaryPositions | None, dropout: float) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.to_qkv = nn.Linear(d_model, 3 * d_model)
        self.to_out = nn.Linear(d_model, d_model)
        self.rotary = rotary
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor, positions: Tensor, scores: Tensor | None) -> tuple[Tensor, Tensor]:
        """x (B, n, d), positions (B, n) or (n,) and the scores (B h, n, n) of the layer before to x and scores."""
        B, n, d = x.shape
        h, k = self.n_heads, d // self.n_heads
        qk, v = self.to_qkv(x).split([2 * d, d], -1)
        # Within queries and keys, the first halves of all heads come first: long rows turn quicker than short ones.
        if self.rotary is not None:
            angles = self.rotary(positions).tile(h).unsqueeze(-2)  # (B, n, 1, d/2) or (n, 1, d/2)
            qk = rotate(qk.view(B, n, 2, d), angles)
        halves = 2 - k % 2  # an odd head has none, and no positions to turn by
        q, key = qk.reshape(B, n, 2, halves, h, k // halves).permute(2, 0, 4, 1, 3, 5).reshape(2, B * h, n, k).unbind(0)
        v = v.reshape(B, n, h, k).transpose(1, 2).reshape(B * h, n, k)
        key = key * k**-0.5
        scores = q @ key.mT if scores is None else torch.baddbmm(scores, q, key.mT)
        mixed = self.dropout(scores.softmax(-1)) @ v  # (B h, n, k)
        return self.to_out(mixed.view(B, h, n, k).transpose(1, 2).reshape(B, n, d)), scores
