"""Attention with residual scores in float32: how the kernels of `attention32.cu` are launched."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from .. import nvrtc
from .stacked import Noise, Shape

SOURCE = Path(__file__).with_suffix(".cu")
MOST_TOKENS = 512
"""A thread for each; beyond it attention is not made for this."""

SHARED = 40_000
"""Bytes of shared memory that a block may take; 48 KiB are there without asking."""


class Attention32:
    """Of one stack.

    Args:
        shape: of its networks.
        noise: of the training steps.
    """

    @staticmethod
    def takes(shape: Shape) -> bool:
        """Whether the kernels are made for it."""
        deepest = shape.layers * shape.head_width
        return shape.layers <= 4 and shape.tokens <= MOST_TOKENS and deepest <= 256

    @staticmethod
    def packed(shape: Shape) -> int:
        """Heads of a block: two of few tokens fill its warps better than one."""
        return 2 if 0 < shape.tokens % 32 <= 16 and shape.tokens < 64 and shape.heads % 2 == 0 else 1

    @classmethod
    def variants(cls, shape: Shape) -> list[tuple[Path, dict[str, int]]]:
        """The programs of all layers."""
        packed, k, n = cls.packed(shape), shape.head_width, shape.tokens
        made = []
        for depth in range(1, shape.layers + 1):
            tile = min(n, max(8, SHARED // (4 * (depth + 1) * k * packed)))
            most = cls._threads(shape)
            made.append((SOURCE, {"DEPTH": depth, "WIDTH": k, "TILE": tile, "PACKED": packed, "MOST": most}))
        return made

    @classmethod
    def _threads(cls, shape: Shape) -> int:
        return -(-cls.packed(shape) * shape.tokens // 32) * 32

    def __init__(self, shape: Shape, noise: Noise) -> None:
        self.shape, self.noise = shape, noise
        self.blocks, self.threads = shape.heads // self.packed(shape), self._threads(shape)
        self.programs = [nvrtc.program(path, **sizes) for path, sizes in self.variants(shape)]

    def forward(self, qkvs: list[Tensor], training: bool, site: int) -> tuple[Tensor, Tensor | None]:
        """Values mixed (M, B n, d), and in training the logarithms (M, B, h, n) of the softmax's denominators.

        Args:
            qkvs: turned queries, turned keys and values (M, B n, 3 d) of this layer, after those of all before it.
            training: whether weights are dropped.
            site: where they are.
        """
        n, heads = self.shape.tokens, self.shape.heads
        M, rows, _ = qkvs[-1].shape
        mixed = qkvs[-1].new_empty(M, rows, self.shape.width)
        spread = torch.empty(M, rows // n, heads, n, device=mixed.device) if training else None
        self.programs[len(qkvs) - 1].launch(
            "attend", (self.blocks, rows // n, M), self.threads,
            *four(qkvs), mixed, spread, *self.noise.dropping(2, training), site, n, heads,
        )  # fmt: skip
        return mixed, spread

    def backward(
        self, qkvs: list[Tensor], turned: list[Tensor], mixed: Tensor, grad: Tensor, spread: Tensor, site: int, *,
        add: bool,
    ) -> None:  # fmt: skip
        """From the gradient of `mixed` to those of all queries and keys, and of this layer's values, in `turned`; with
        `add`, those of queries and keys are added to what is there."""
        n, heads = self.shape.tokens, self.shape.heads
        M, rows, _ = mixed.shape
        self.programs[len(qkvs) - 1].launch(
            "attend_grad", (2 * self.blocks, rows // n, M), self.threads,
            *four(qkvs), *four(turned), mixed, grad, spread, *self.noise.dropping(2, True), site, n, heads, int(add),
        )  # fmt: skip


def four(tensors: list[Tensor]) -> list[Tensor | None]:
    """As kernels take them: of up to four layers."""
    return [*tensors, None, None, None][:4]
