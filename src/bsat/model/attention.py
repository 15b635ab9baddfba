"""Multi-head attention with residual scores (Realformer: He et al., 2021)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .dropout import Dropout
from .positions import RotaryPositions, rotate

PART = 8 * 2**20


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

    def forward(
        self, x: Tensor, positions: Tensor, scores: tuple[Tensor, ...] | None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """x (B, n, d), positions (B, n) or (n,) and the scores of the layer before to x and scores.

        Scores are (B h, n, n), in one part, or in several along the first axis; see `count_parts`.
        """
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
        parts = count_parts(x, 4 * B * h * n * n)
        split = zip(q.tensor_split(parts), (key * k**-0.5).tensor_split(parts), strict=True)
        if scores is None:
            scores = tuple(a @ b.mT for a, b in split)
        else:
            scores = tuple(torch.baddbmm(before, a, b.mT) for before, (a, b) in zip(scores, split, strict=True))
        weighed = [self.dropout(s.softmax(-1)) @ a for s, a in zip(scores, v.tensor_split(parts), strict=True)]
        mixed = weighed[0] if parts == 1 else torch.cat(weighed)  # (B h, n, k)
        return self.to_out(mixed.view(B, h, n, k).transpose(1, 2).reshape(B, n, d)), scores


def count_parts(x: Tensor, size: int) -> int:
    """In how many parts a CPU should make a tensor of so many bytes, along its first axis.

    Parts of a few MiB stay in the caches, and in memory that is at hand: a larger block is asked of the system anew,
    page by page, every time. A GPU has no such troubles.
    """
    return min(-(-size // PART), len(x)) if x.device.type == "cpu" and size > PART else 1
