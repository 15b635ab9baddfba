"""Where tokens are: learned by rank, or turned into their queries and keys (paper, "Positional Encoding for
Non-Uniform Tokens")."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

BASE = 10_000.0
ENCODINGS = ("lpe", "f-rope", "l-rope", "f-rope+lpe", "l-rope+lpe")


class LearnedPositions(nn.Module):
    """LPE: a learned vector for each rank from left to right, added to the embedding: n d parameters.

    It starts uniform in +-0.02, as PatchTST's does; the paper does not say.
    """

    def __init__(self, n_tokens: int, d_model: int) -> None:
        super().__init__()
        self.by_rank = nn.Parameter(torch.empty(n_tokens, d_model).uniform_(-0.02, 0.02))

    def forward(self, x: Tensor) -> Tensor:
        """(B, n, d) -> (B, n, d). Tokens stand in the order of their centers, so their index is their rank."""
        return x + self.by_rank


class RotaryPositions(nn.Module):
    """RoPE on real-valued positions: pair i of a head turns by position x base^(-2 (i - 1) / k).

    With ``learned`` it is L-RoPE: base = exp(phi), phi a parameter that starts at log 10,000; one parameter a layer. A
    head of width 2 has a single pair, which turns at frequency 1 whatever the base: nothing to learn there.

    The pairs are (1, 1 + k/2), (2, 2 + k/2), ... rather than neighbours: the same up to the order of the rows of the
    projections, and quicker.
    """

    log_base: Tensor
    exponents: Tensor

    def __init__(self, head_width: int, *, learned: bool, base: float = BASE) -> None:
        super().__init__()
        if head_width % 2:
            raise ValueError(
                f"rotary positions turn pairs, so `d_model` / `n_heads` must be even; got {head_width}. Change one."
            )
        start = torch.tensor(math.log(base))
        if learned:
            self.log_base = nn.Parameter(start)
        else:
            self.register_buffer("log_base", start, persistent=False)
        self.register_buffer("exponents", torch.arange(0, head_width, 2) / -head_width, persistent=False)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Positions (B, n) or (n,), in samples, to cosines and sines (B, n, k/2) or (n, k/2)."""
        angles = positions.unsqueeze(-1) * (self.log_base * self.exponents).exp()
        return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs of x (..., k)."""
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)
