"""Matrix products of many models at once, on tensor cores."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from .. import nvrtc

PRODUCT = Path(__file__).with_name("product.cu")


class Products:
    """Matrix products of M models, (M, r, c) @ (M, c, s).

    On tensor cores they are ours (`product.cu`), because torch's float32 products do not use them, and because they are
    cut by the shapes of one model: what a model gets does not depend on how many there are. Elsewhere they are torch's.
    """

    TALL, DEEP, BLOCKS = 64, 16, 128

    @staticmethod
    def variants(device: torch.device) -> list[tuple[Path, dict[str, int]]]:
        """The programs, by how many columns a block takes."""
        return [(PRODUCT, {"WIDE": wide}) for wide in (16, 32, 64)] if nvrtc.tensor_cores(device) else []

    def __init__(self, models: int, device: torch.device) -> None:
        variants = self.variants(device)
        self.ours = bool(variants)
        if self.ours:
            self.programs = {sizes["WIDE"]: nvrtc.program(path, **sizes) for path, sizes in variants}
            self.partial = torch.empty(models * self.BLOCKS * self.TALL * 64, device=device)

    def __call__(self, a: Tensor, b: Tensor, out: Tensor | None = None, *, add: bool = False) -> Tensor:
        """The product, written or added to `out` if it is given."""
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
        launch = self.programs[wide].launch
        launch(
            f"product_{'t' if turn_a else 'n'}{'t' if turn_b else 'n'}", (tiles, slices, M), 128,
            a, b, out, self.partial, rows, columns, depth, a_stride, b_stride, out.stride(1), a.stride(0), b.stride(0),
            out.stride(0), slice_, int(aligned), int(add),
        )  # fmt: skip
        if slices > 1:
            blocks = -(-rows * columns // 256)
            strides = out.stride(1), out.stride(0)
            launch("product_sum", (blocks, M), 256, self.partial, out, rows, columns, *strides, slices, int(add))
        return out
