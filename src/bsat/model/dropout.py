"""Dropout that costs a CPU no more than it must."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Dropout(nn.Module):
    """`torch.nn.Dropout`; on a CPU the mask comes from 16 random bits an element instead of a number drawn for each.

    torch draws a CPU's dropout masks one number after another, which takes longer than the matrix products of a small
    encoder (`benchmarks/training.py`). There p is rounded to a multiple of 2^-16, and what stays is scaled by exactly
    that p, so that the expectation is right.
    """

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        """Drop in training, pass on otherwise."""
        if not self.training or self.p == 0.0:
            return x
        threshold = round(self.p * 65536)
        if x.device.type != "cpu" or not 0 < threshold < 65536:
            return nn.functional.dropout(x, self.p)
        return _Drop.apply(x, threshold)

    def extra_repr(self) -> str:
        """For `print(network)`."""
        return f"p={self.p}"


class _Drop(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, threshold: int) -> Tensor:
        count = x.numel()
        bits = torch.empty((count + 3) // 4, dtype=torch.int64).random_(-(2**63), None)  # all 64 bits
        keep = torch.empty_like(x, memory_format=torch.contiguous_format)  # numbers: a boolean mask multiplies slower
        torch.ge(bits.view(torch.int16)[:count], threshold - 32768, out=keep.view(-1))
        keep.mul_(65536 / (65536 - threshold))
        ctx.save_for_backward(keep)
        return x * keep

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (keep,) = ctx.saved_tensors
        return grad * keep, None
