"""Where tokens are: learned by rank, or turned into their queries and keys (paper, "Positional Encoding for
Non-Uniform Tokens")."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

BASE = 10_000.0
ENCODINGS = ("lpe", "f-rope", "l-rope", "f-rope+lpe", "l-rope+lpe")
ROTARY_UNITS = ("samples", "tokens")


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
    projections, and quicker. Positions are counted in `unit` samples; the paper's is 1.
    """

    log_base: Tensor
    exponents: Tensor

    def __init__(self, head_width: int, *, learned: bool, base: float = BASE, unit: float = 1.0) -> None:
        super().__init__()
        self.unit = unit
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

    def forward(self, positions: Tensor) -> Tensor:
        """Positions (B, n) or (n,), in samples, to angles (B, n, k/2) or (n, k/2)."""
        return self.to_unit(positions).unsqueeze(-1) * (self.log_base * self.exponents).exp()

    def to_unit(self, positions: Tensor) -> Tensor:
        """From samples."""
        return positions if self.unit == 1 else positions / self.unit


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Turn the pairs of x (..., k) by angles (..., k/2) that broadcast to it."""
    return _Rotate.apply(x, angles)


class _Rotate(torch.autograd.Function):
    """(a, b) -> (a cos - b sin, a sin + b cos). The gradient in x is turned back; that in the angle is along the output
    turned by a right angle. Written out, because autograd would keep and multiply twice as many tensors."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, angles: Tensor) -> Tensor:
        cos, sin = angles.cos(), angles.sin()
        out = _turn(x, cos, sin)
        ctx.save_for_backward(out, cos, sin)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        out, cos, sin = ctx.saved_tensors
        towards = None
        if ctx.needs_input_grad[1]:
            (a, b), (da, db) = out.chunk(2, -1), grad.chunk(2, -1)
            towards = torch.addcmul(db * a, da, b, value=-1).sum_to_size(cos.shape)
        return _turn(grad, cos, -sin), towards


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    first, second = out.chunk(2, -1)
    torch.mul(a, cos, out=first)
    first.addcmul_(b, sin, value=-1)
    torch.mul(a, sin, out=second)
    second.addcmul_(b, cos)
    return out
