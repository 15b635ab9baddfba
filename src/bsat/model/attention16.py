"""Attention with residual scores, and its gradient, in bfloat16 on tensor cores."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from .. import nvrtc
from .attention32 import MOST_TOKENS, four
from .stacked import Noise, Shape

SOURCE = Path(__file__).with_suffix(".cu")
TILE, MOST_WARPS = 48, 6
"""As in the kernels: tokens in shared memory at once, warps of a block."""


class Attention16:
    """The kernels of `attention16.cu`.

    All tensors are bfloat16 and contiguous, and begin where 16 bytes can be read at once.

    Args:
        shape: of the networks.
        noise: of the training steps.
    """

    @staticmethod
    def takes(shape: Shape) -> bool:
        """Whether the kernels can take networks of this shape."""
        width = shape.head_width
        even = width in (2, 4, 6) or (width % 8 == 0 and 0 < width <= 64)
        return even and shape.layers <= 4 and shape.tokens <= MOST_TOKENS

    @staticmethod
    def variants(shape: Shape) -> list[tuple[Path, dict[str, int]]]:
        """What will be compiled, for `nvrtc.compile_ahead`."""
        packed = _packed(shape)
        return [
            (SOURCE, {"DEPTH": depth, "WIDTH": shape.head_width, "PACKED": packed})
            for depth in range(1, shape.layers + 1)
        ]

    def __init__(self, shape: Shape, noise: Noise) -> None:
        self.shape, self.noise = shape, noise
        self.programs = [nvrtc.program(path, **sizes) for path, sizes in self.variants(shape)]
        packed = _packed(shape)
        self.pieces = -(-shape.tokens // 16)
        """Of 16 tokens each."""
        blocks = -(-self.pieces // MOST_WARPS)
        self.threads = -(-self.pieces // blocks) * packed * 32
        self.blocks = blocks * shape.heads // packed
        """For a window."""

    def forward(self, qkvs: list[Tensor], training: bool, site: int) -> tuple[Tensor, Tensor | None]:
        """What the last of some layers sees, (M, B n, d), and what the gradient needs to know of it.

        Args:
            qkvs: of all layers so far, (M, B n, 3 d) each.
            training: dropout is on.
            site: where it acts.
        """
        shape = self.shape
        M, rows, _ = qkvs[0].shape
        n = shape.tokens
        mixed = qkvs[0].new_empty(M, rows, shape.width)
        logs = self._logs(M, rows)
        spread = mixed.new_empty(logs + logs // n * self.pieces**2 * 8, dtype=torch.float32) if training else None
        self.programs[len(qkvs) - 1].launch(
            "attend", (self.blocks, rows // n, M), self.threads,
            *four(qkvs), mixed, spread, None if spread is None else spread[logs:],
            *self.noise.dropping(2, training), site, n, shape.heads,
        )  # fmt: skip
        return mixed, spread

    def backward(
        self, qkvs: list[Tensor], turned: list[Tensor], mixed: Tensor, grad: Tensor, spread: Tensor, site: int, *,
        add: bool,
    ) -> None:  # fmt: skip
        """From the gradient of `mixed` to that of the queries and keys of all layers and of the last one's values.

        Args:
            qkvs: what `forward` was given.
            turned: where the gradients go, of the same shapes.
            mixed: what `forward` gave.
            grad: its gradient.
            spread: what else it gave.
            site: the same as there.
            add: to what `turned` holds of queries and keys; values are only ever written.
        """
        shape = self.shape
        M, rows, _ = qkvs[0].shape
        n, program = shape.tokens, self.programs[len(qkvs) - 1]
        slopes = mixed.new_empty(M, rows // n, shape.heads, self.pieces, self.pieces, 256)
        grid = self.blocks, rows // n, M
        program.launch(
            "attend_grad", grid, self.threads, *four(qkvs), *four(turned), mixed, grad, spread,
            spread[self._logs(M, rows) :], slopes, *self.noise.dropping(2, True), site, n, shape.heads, int(add),
        )  # fmt: skip
        program.launch(
            "attend_grad_queries", grid, self.threads, *four(qkvs), *four(turned), slopes, n, shape.heads, int(add)
        )

    def _logs(self, M: int, rows: int) -> int:
        """Logarithms of denominators, with room up to the next 16 bytes; then come the bits of what was dropped."""
        return -(-M * rows * self.shape.heads // 4) * 4


def _packed(shape: Shape) -> int:
    """Heads of a block: two where there are few tokens."""
    small = shape.tokens <= TILE and shape.layers * shape.head_width <= 128
    return 2 if small and shape.heads % 2 == 0 else 1
