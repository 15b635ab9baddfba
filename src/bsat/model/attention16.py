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
"""As in the kernels: tokens in shared memory at once, warps of a block (of one that has all keys, up to 12)."""

MOST_WHOLE, SHARED = 192, 48 * 1024
"""Keys of which a block of the gradient may have all, and the bytes of shared memory that it has for them."""


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
        same = {"WIDTH": shape.head_width, "PACKED": _packed(shape)}
        depths = range(1, shape.layers + 1)
        return [(SOURCE, {"DEPTH": depth, **same, "WHOLE": _whole(shape, depth)}) for depth in depths]

    @staticmethod
    def slopes(shape: Shape) -> int:
        """The most numbers that the gradient of a layer keeps for each window: the slopes of scores, if any."""
        whole = all(_whole(shape, depth) for depth in range(1, shape.layers + 1))
        return 0 if whole else shape.heads * _pieces(shape) ** 2 * 256

    def __init__(self, shape: Shape, noise: Noise) -> None:
        self.shape, self.noise = shape, noise
        variants = self.variants(shape)
        self.programs = [nvrtc.program(path, **sizes) for path, sizes in variants]
        self.whole = [sizes["WHOLE"] > 0 for _, sizes in variants]
        """Whether a block of the gradient has all keys of its heads."""
        self.pieces = _pieces(shape)
        """Of 16 tokens each."""
        self.blocks = -(-self.pieces // MOST_WARPS)
        """For a head, or those that are packed."""

    def _sizes(self, M: int, rows: int, blocks: int) -> tuple[tuple[int, int, int], int]:
        """A grid with so many blocks for a head, and the threads of a block."""
        packed = _packed(self.shape)
        grid = blocks * self.shape.heads // packed, rows // self.shape.tokens, M
        return grid, -(-self.pieces // blocks) * packed * 32

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
            "attend", *self._sizes(M, rows, self.blocks),
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
        whole = self.whole[len(qkvs) - 1]
        slopes = None if whole else mixed.new_empty(M, rows // n, self.slopes(shape))
        sizes = self._sizes(M, rows, 1 if whole else self.blocks)
        dropping = self.noise.dropping(2, True)
        program.launch(
            "attend_grad", *sizes, *four(qkvs), *four(turned), mixed, grad, spread,
            spread[self._logs(M, rows) :], slopes, *dropping, site, n, shape.heads, int(add),
        )  # fmt: skip
        if not whole:
            program.launch(
                "attend_grad_queries", *sizes, *four(qkvs), *four(turned), slopes, dropping[-1], n, shape.heads,
                int(add),
            )  # fmt: skip

    def _logs(self, M: int, rows: int) -> int:
        """Logarithms of denominators, with room up to the next 16 bytes; then come the bits of what was dropped."""
        return -(-M * rows * self.shape.heads // 4) * 4


def _pieces(shape: Shape) -> int:
    """Of 16 tokens each."""
    return -(-shape.tokens // 16)


def _packed(shape: Shape) -> int:
    """Heads of a block: two where there are few tokens."""
    small = shape.tokens <= TILE and shape.layers * shape.head_width <= 128
    return 2 if small and shape.heads % 2 == 0 else 1


def _whole(shape: Shape, depth: int) -> int:
    """Keys of a head, in pieces of 16, if a block of the gradient can have them all; else 0."""
    keys, packed = 16 * _pieces(shape), _packed(shape)
    columns, beside = (-(-width // 16) * 16 for width in (depth * shape.head_width, shape.head_width))
    if keys > MOST_WHOLE or columns > 128:
        return 0
    rows = -(-keys // TILE) * TILE
    of_key = 2 * (columns + TILE) + TILE // 8  # its numbers, and its slopes and bits with the queries of a tile
    tile = 2 * TILE * (columns + beside + 8)
    return keys if packed * (keys * of_key + tile + 8 * rows) <= SHARED else 0
