"""Matrix products of many models at once, on tensor cores."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from .. import nvrtc

PRODUCT32 = Path(__file__).with_name("product32.cu")
PRODUCT16 = Path(__file__).with_name("product16.cu")

Masks = tuple[Tensor, Tensor, Tensor | None, int]
"""What `Noise.dropping` says, and the site."""


class Products32:
    """Matrix products of M models, (M, r, c) @ (M, c, s).

    On tensor cores they are ours (`product32.cu`), because torch's float32 products do not use them, and because they
    are cut by the shapes of one model: what a model gets does not depend on how many there are. Elsewhere they are
    torch's.
    """

    TALL, DEEP, BLOCKS = 64, 16, 128

    @staticmethod
    def variants(device: torch.device) -> list[tuple[Path, dict[str, int]]]:
        """The programs, by how many columns a block takes."""
        return [(PRODUCT32, {"WIDE": wide}) for wide in (16, 32, 64)] if nvrtc.tensor_cores(device) else []

    def __init__(self, device: torch.device) -> None:
        variants = self.variants(device)
        self.ours = bool(variants)
        self.programs = {sizes["WIDE"]: nvrtc.program(path, **sizes) for path, sizes in variants}

    def __call__(
        self, a: Tensor, b: Tensor, out: Tensor | None = None, *, add: bool = False, limits: Tensor | None = None,
        along: int = 0,
    ) -> Tensor:  # fmt: skip
        """The product, written or added to `out` if it is given. What lies beyond the `limits` of `Products16` must be
        zero here, and is multiplied like the rest."""
        if not self.ours:
            if add and out is not None:
                return out.baddbmm_(a, b)
            return torch.bmm(a, b) if out is None else torch.bmm(a, b, out=out)
        (M, rows, depth), columns = a.shape, b.shape[2]
        if out is None:
            out = a.new_empty(M, rows, columns)
        turn_a, turn_b = a.stride(2) != 1, b.stride(2) != 1
        a_stride, b_stride = a.stride(2 if turn_a else 1), b.stride(2 if turn_b else 1)
        wide = 16 if columns <= 16 else 32 if columns <= 32 else 64
        tiles = -(-rows // self.TALL) * -(-columns // wide)
        slices = min(-(-depth // 128), max(1, self.BLOCKS // tiles))
        slice_ = -(-depth // (slices * self.DEEP)) * self.DEEP
        slices = -(-depth // slice_)
        sizes = (rows, columns, depth, a_stride, b_stride, out.stride(1), *(t.stride(0) for t in (a, b, out)))
        aligned = all(s % 4 == 0 for s in sizes) and all(t.data_ptr() % 16 == 0 for t in (a, b, out))
        partial = a.new_empty(M, slices, rows, columns) if slices > 1 else None
        launch = self.programs[wide].launch
        launch(
            f"product_{'t' if turn_a else 'n'}{'t' if turn_b else 'n'}", (tiles, slices, M), 128,
            a, b, out, partial, rows, columns, depth, a_stride, b_stride, out.stride(1), a.stride(0), b.stride(0),
            out.stride(0), slice_, int(aligned), int(add),
        )  # fmt: skip
        if slices > 1:
            blocks = -(-rows * columns // 256)
            strides = out.stride(1), out.stride(0)
            launch("product_sum", (blocks, M), 256, partial, out, rows, columns, *strides, slices, int(add))
        return out


class Products16:
    """Matrix products of M models, (M, r, c) @ (M, c, s), of bfloat16 with float32 sums (`product16.cu`).

    They are cut by the shapes of one model: what a model gets does not depend on how many there are. For devices with
    tensor cores only.
    """

    # How many rows and columns a block may take, and how many threads it has then.
    TILES: ClassVar = {(128, 128): 256, (128, 64): 128, (64, 64): 128, (64, 32): 128}
    DEEP, LEAST, BLOCKS = 32, 256, 48  # a stage of the depth, the least depth of a slice, blocks of a model with slices

    @staticmethod
    def variants(device: torch.device) -> list[tuple[Path, dict[str, int]]]:
        """The programs, by what a block takes."""
        if not nvrtc.tensor_cores(device):
            return []
        return [(PRODUCT16, {"TALL": tall, "WIDE": wide}) for tall, wide in Products16.TILES]

    def __init__(self, device: torch.device) -> None:
        self.programs = {
            (sizes["TALL"], sizes["WIDE"]): nvrtc.program(path, **sizes) for path, sizes in self.variants(device)
        }

    @classmethod
    @cache
    def cut(cls, rows: int, columns: int, depth: int, *, whole: bool = False) -> tuple[tuple[int, int], int, int, int]:
        """What a block takes of a model's product, how many blocks that makes, and the depth and number of slices; one
        if it is to be `whole`.

        It weighs what is multiplied, what is brought to the blocks, and what slices write and read.
        """
        found = []
        for tall, wide in cls.TILES:
            tiles = -(-rows // tall) * -(-columns // wide)
            slices = max(1, min(depth // cls.LEAST, 1 if whole else cls.BLOCKS // tiles))
            slice_ = max(1, -(-depth // (slices * cls.DEEP))) * cls.DEEP
            slices = max(1, -(-depth // slice_))
            cost = tiles * depth * (tall * wide + 64 * (tall + wide))
            if slices > 1:
                cost += 256 * slices * rows * columns
            found.append((cost, (tall, wide), tiles, slice_, slices))
        return min(found)[1:]

    def __call__(
        self,
        a: Tensor,
        b: Tensor,
        out: Tensor | None = None,
        *,
        add: bool = False,
        dtype: torch.dtype = torch.bfloat16,
        bias: Tensor | None = None,
        limits: Tensor | None = None,
        along: int = 0,
    ) -> Tensor:
        """The product, written or added to `out` if it is given, else as `dtype`.

        `bias` (M, s), of float32, is added to every row. With `limits` (M), of int32 and multiples of 8, a model's rows
        (along = 1), columns (2) or depth (3) end there: what lies beyond is neither read nor written.
        """
        M, rows, columns, kind, eights, factors = self._factors(a, b, bias, limits, along)
        if out is None:
            out = a.new_empty(M, rows, columns, dtype=dtype)
        full = out.dtype == torch.float32
        assert (M, rows, columns) == tuple(out.shape)
        assert full or out.dtype == torch.bfloat16
        assert out.stride(2) == 1
        piece = 2 if full else 8
        aligned = all(s % piece == 0 for s in (columns, out.stride(1), out.stride(0)))
        aligned = aligned and out.data_ptr() % (8 if full else 16) == 0
        tile, tiles, slice_, slices = self.cut(rows, columns, a.shape[2])
        partial = None
        if slices > 1:
            partial = torch.empty(M * slices * rows * (columns + columns % 2), device=a.device)
        launch, strides = self.programs[tile].launch, (out.stride(1), out.stride(0))
        launch(
            f"product_{kind}{'' if eights else '_odd'}", (tiles, slices, M), self.TILES[tile], *factors, slice_, out,
            partial, *strides, int(aligned), int(full), int(add),
        )  # fmt: skip
        if slices > 1:
            launch(
                "product_sum", (-(-rows * columns // 256), M), 256, partial, out, bias, limits, rows, columns,
                a.shape[2], *strides, *factors[-2:], slice_, slices, int(full), int(add),
            )  # fmt: skip
        return out

    @staticmethod
    def _factors(
        a: Tensor, b: Tensor, bias: Tensor | None, limits: Tensor | None, along: int
    ) -> tuple[int, int, int, str, bool, tuple[Tensor | int | None, ...]]:
        """The form of the result; how the factors are stored, whether in pieces of 16 bytes; and what kernels take."""
        (M, rows, depth), columns = a.shape, b.shape[2]
        turn_a, turn_b = a.stride(2) != 1, b.stride(2) != 1
        assert (M, depth, columns) == tuple(b.shape)
        assert a.dtype == b.dtype == torch.bfloat16
        assert a.stride(1 if turn_a else 2) == b.stride(1 if turn_b else 2) == 1
        assert not turn_a or not turn_b
        assert bias is None or (bias.dtype == torch.float32 and bias.shape == (M, columns) and bias.stride(1) == 1)
        assert (limits is None) == (along == 0)
        assert limits is None or limits.dtype == torch.int32
        a_stride, b_stride = a.stride(2 if turn_a else 1), b.stride(2 if turn_b else 1)
        # Lines along the depth must be whole pieces. Others may end within one, if the next line begins after it.
        ends = [] if turn_a and not turn_b else [depth]
        eights = all(s % 8 == 0 for s in (*ends, a_stride, b_stride, a.stride(0), b.stride(0)))
        eights = eights and all(t.data_ptr() % 16 == 0 for t in (a, b))
        kind = f"{'t' if turn_a else 'n'}{'t' if turn_b else 'n'}"
        strides = a_stride, b_stride, a.stride(0), b.stride(0), 0 if bias is None else bias.stride(0)
        return M, rows, columns, kind, eights, (a, b, bias, limits, rows, columns, depth, *strides, along)

    # ------------------------------------------------------------------------------------------- and what follows them

    # All activations here are (M, rows, columns) without gaps, and columns a multiple of 8. Sums over rows are left as
    # (M, parts, 2, columns), as `layers.cu` collects them.

    def gelu(
        self, x: Tensor, weight: Tensor, bias: Tensor, masks: Masks, limits: Tensor | None, *, keep: bool
    ) -> tuple[Tensor | None, Tensor]:
        """u = x @ weight + bias, if it is to be kept, and drop(gelu(u)), up to each model's own columns."""
        out = self._room(x, weight)
        u = torch.empty_like(out) if keep else None
        self._follow("nt_gelu", x, weight, (u, out, *masks), bias=bias, limits=limits, along=2)
        return u, out

    def gelu_grad(
        self, grad: Tensor, weight: Tensor, u: Tensor, masks: Masks, limits: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The gradient of u, if that of drop(gelu(u)) is grad @ weight; and its sums."""
        out, left = self._room(grad, weight), self._left(grad, weight)
        self._follow("nn_gelu_grad", grad, weight, (u, out, left, *masks), limits=limits, along=2)
        return out, left

    def norm(
        self, a: Tensor, weight: Tensor, bias: Tensor, x: Tensor, masks: Masks, *, limits: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """z = x + drop(a @ weight + bias), up to each model's own depth; and sums of it and of its squares."""
        z, left = self._room(a, weight), self._left(a, weight)
        self._follow("nt_norm", a, weight, (x, z, left, *masks), bias=bias, limits=limits, along=3)
        return z, left

    def flow(
        self, a: Tensor, weight: Tensor, flow: Tensor, z: Tensor, stats: Tensor, *, limits: Tensor | None = None
    ) -> Tensor:
        """Adds a @ weight to `flow`, up to each model's own depth. Returns sums of what that makes, and of its products
        with z, less the mean and times the inverse deviation of `stats` (M, 2, s)."""
        left = self._left(a, weight)
        assert stats.shape == (left.shape[0], 2, left.shape[3])
        assert stats.is_contiguous()
        self._follow("nn_flow", a, weight, (flow, z, stats, left), limits=limits, along=3)
        return left

    def _follow(
        self, name: str, a: Tensor, b: Tensor, own: Sequence[Tensor | int | None], *, bias: Tensor | None = None,
        limits: Tensor | None = None, along: int = 0,
    ) -> None:  # fmt: skip
        M, rows, columns, kind, eights, factors = self._factors(a, b, bias, limits, 0 if limits is None else along)
        assert name.startswith(kind)
        assert eights
        assert columns % 8 == 0
        for tensor in own:
            if isinstance(tensor, Tensor) and tensor.dtype == torch.bfloat16:
                assert tensor.shape == (M, rows, columns)
                assert tensor.is_contiguous()
                assert tensor.data_ptr() % 16 == 0
        tile, tiles, _, _ = self.cut(rows, columns, a.shape[2], whole=True)
        self.programs[tile].launch(f"product_{name}", (tiles, 1, M), self.TILES[tile], *factors, *own)

    @staticmethod
    def _room(a: Tensor, b: Tensor) -> Tensor:
        return a.new_empty(*a.shape[:2], b.shape[2])

    def _left(self, a: Tensor, b: Tensor) -> Tensor:
        """Room for two sums of each column of the blocks one above the other."""
        (M, rows, depth), columns = a.shape, b.shape[2]
        (tall, _), *_ = self.cut(rows, columns, depth, whole=True)
        return a.new_empty(M, -(-rows // tall), 2, columns, dtype=torch.float64)
