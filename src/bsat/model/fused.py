"""The pass of `stacked`, and its gradient, as CUDA kernels around torch's matrix products.

Written for training steps that are captured in a CUDA graph: nothing here waits for the device, the gradient is laid
out by hand into one buffer, and what can be made again is not kept. The arithmetic is float32; sums over rows are in
float64.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from .. import nvrtc
from .positions import BASE
from .products import Products
from .stacked import Batch, Noise, Shape, Stack, sites

LAYERS, ATTENTION = (Path(__file__).with_name(name) for name in ("layers.cu", "attention.cu"))
MOST_TOKENS = 512
"""A thread for each; beyond it attention is not made for this."""

MOST_WINDOWS = 65_535
"""In a batch: a grid has no more blocks along its second axis."""

MEANWHILE = 2**22
"""Up to so many numbers in a feed-forward part, the gradients of weights are computed beside the rest."""

CHUNKS = 64
"""Into which rows are cut for sums over them, at most."""

SHARED = 40_000
"""Bytes of shared memory that a block of the attention kernels may take; 48 KiB are there without asking."""


def fits(shape: Shape | None) -> bool:
    """Whether the kernels can take networks of this shape (None: of a kind of its own); else `stacked` does."""
    if shape is None:
        return False
    deepest = shape.layers * shape.head_width
    return shape.layers <= 4 and shape.width % 2 == 0 and shape.tokens <= MOST_TOKENS and deepest <= 256


@dataclass
class Saved:
    """What the gradient needs of a layer."""

    x: Tensor
    qkv: Tensor
    mixed: Tensor
    spread: Tensor
    z1: Tensor
    stats1: Tensor
    x1: Tensor
    u: Tensor
    z2: Tensor
    stats2: Tensor


class Fused:
    """A stack's forward and backward pass.

    Args:
        stack: its parameters; they may change between calls, but not move.
        noise: of the training steps.
    """

    def __init__(self, stack: Stack, noise: Noise) -> None:
        self.stack, self.shape, self.noise = stack, stack.shape, noise
        shape, M, device = stack.shape, len(stack), stack.theta.device
        self.v, self.running = stack.views(), stack.running_views()
        self.grad = torch.zeros_like(stack.theta)
        self.g = stack.views(self.grad)
        self.size = stack.theta.shape[1]
        k, n = shape.head_width, shape.tokens
        # Two heads of few tokens fill the warps of a block better than one.
        self.packed = 2 if 0 < n % 32 <= 16 and n < 64 and shape.heads % 2 == 0 else 1
        self.threads = -(-self.packed * n // 32) * 32
        variants = []
        for depth in range(1, shape.layers + 1):
            tile = min(n, max(8, SHARED // (4 * (depth + 1) * k * self.packed)))
            sizes = {"DEPTH": depth, "WIDTH": k, "TILE": tile, "PACKED": self.packed, "MOST": self.threads}
            variants.append((ATTENTION, sizes))
        nvrtc.compile_ahead((LAYERS, {}), *variants, *Products.variants(device))
        self.kernels = nvrtc.program(LAYERS)
        self.attention = [nvrtc.program(path, **sizes) for path, sizes in variants]
        self.product = self.weight_product = Products(M, device)
        # The gradients of weights are nobody's input: what few small models leave idle can compute them meanwhile.
        self.aside = torch.cuda.Stream(device) if device.type == "cuda" else None
        if self.aside is not None:
            self.weight_product = Products(M, device)  # with work space of its own
        self._meanwhile = False
        self._held: list[Tensor] = []
        self.fixed_base = torch.full((1,), BASE, device=device).log() if shape.rotary and not shape.learned else None
        self.partial = torch.empty(M * CHUNKS * 2 * shape.width, dtype=torch.float64, device=device)
        self.squares = torch.empty(M, 256, dtype=torch.float64, device=device)

    # ------------------------------------------------------------------------------------------------------- launching

    def _each(self, name: str, numbers: int, *args: object) -> None:
        """A kernel over all numbers of every model."""
        blocks = max(1, min(-(-numbers // 512), 2048))
        self.kernels.launch(name, (blocks, len(self.stack)), 256, *args)

    def _columns(self, name: str, rows: int, columns: int, *args: object) -> None:
        """A kernel that goes down the columns."""
        self._down(name, columns, *args, chunks=self._chunks(rows, columns))

    def _down(self, name: str, columns: int, *args: object, chunks: int = 1) -> None:
        wide = 32 if columns >= 32 else 16 if columns >= 16 else 8
        grid = -(-columns // wide), chunks, len(self.stack)
        self.kernels.launch(name, grid, (wide, 256 // wide), *args)

    @staticmethod
    def _chunks(rows: int, columns: int) -> int:
        """Into how many parts the rows are cut for it; by the shape alone, so that sums do not depend on the stack."""
        return max(1, min(CHUNKS, rows * min(columns, 32) // 512))

    def _dropping(self, kind: int, training: bool) -> tuple[Tensor, Tensor, Tensor | None]:
        return self.noise.seeds, self.noise.step, self.noise.shares[kind] if training else None

    @contextmanager
    def _beside(self, *inputs: Tensor) -> Iterator[None]:
        """What is launched here may run beside what comes after, until the end of the backward pass. The inputs' memory
        is not reused before that."""
        if self.aside is None or not self._meanwhile:
            yield
            return
        self._held += inputs
        self.aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.aside):
            yield

    def _weight_grad(self, a: Tensor, b: Tensor, name: str) -> None:
        """(M, o, r) @ (M, r, i) into the gradient of a weight."""
        with self._beside(a, b):
            (self.weight_product if self._meanwhile else self.product)(a, b, out=self.g[name])

    def _left(self, rows: int, columns: int, sums: int = 2) -> Tensor:
        """Room for partial sums."""
        size = len(self.stack) * self._chunks(rows, columns) * sums * columns
        return torch.empty(size, dtype=torch.float64, device=self.grad.device)

    def _add_left(self, left: Tensor, rows: int, columns: int, name: str) -> None:
        """Partial sums into the gradient of a bias."""
        with self._beside(left):
            self._down("add_left", columns, left, self.g[name], columns, self._chunks(rows, columns), self.size)

    def _add_rows(self, x: Tensor, name: str) -> None:
        """Sums over the rows (M, rows, columns) into the gradient of a parameter."""
        with self._beside(x):
            self._down("add_rows", x.shape[2], x, self.g[name], x.shape[1], x.shape[2], self.size)

    # --------------------------------------------------------------------------------------------------------- forward

    def forward(self, batch: Batch, *, training: bool) -> tuple[Tensor, list[Saved], Tensor]:
        """Forecasts (M, B, H) before the head's bias, what the gradient needs, and the head's input."""
        v, shape, size = self.v, self.shape, self.size
        M, B, n = batch.positions.shape
        rows, d = B * n, shape.width
        x = self.product(batch.values.view(M, rows, shape.features), v["embedding.weight"].mT)
        rank = v["positions.by_rank"] if shape.ranked else None
        self._each("embed", rows * d, x, v["embedding.bias"], rank, *self._dropping(0, training), rows, d, n, size)
        saved: list[Saved] = []
        for i in range(shape.layers):
            x, layer = self._layer(i, x, [s.qkv for s in saved], batch, training)
            saved.append(layer)
        if batch.basis is not None:
            x = (batch.basis.view(M * B, n, n) @ x.view(M * B, n, d)).view(M, B, n * d)
        x = x.view(M, B, n * d)
        return self.product(x, v["head.project.weight"].mT), saved, x

    def _layer(self, i: int, x: Tensor, before: list[Tensor], batch: Batch, training: bool) -> tuple[Tensor, Saved]:
        v, shape, size, name, at = self.v, self.shape, self.size, f"encoder.layers.{i}", sites(i)
        M, B, n = batch.positions.shape
        rows, d = B * n, shape.width
        qkv = self.product(x, v[f"{name}.attention.to_qkv.weight"].mT)
        base, base_stride = self._log_base(i)
        self._each(
            "rotate", rows * d // 2, qkv, v[f"{name}.attention.to_qkv.bias"], batch.positions, base, rows, d,
            max(shape.head_width // 2, 1), size, base_stride,
        )  # fmt: skip
        mixed = torch.empty_like(x)
        spread = x.new_empty(M, B, shape.heads, n) if training else None
        four = [*before, qkv, None, None, None][:4]
        self.attention[i].launch(
            "attend", (shape.heads // self.packed, B, M), self.threads,
            *four, mixed, spread, *self._dropping(2, training), at[0], n, shape.heads,
        )  # fmt: skip
        z1 = self.product(mixed, v[f"{name}.attention.to_out.weight"].mT)
        x1, stats1 = self._norm(f"{name}.attention_norm", x, z1, v[f"{name}.attention.to_out.bias"], at[1], training)
        u = self.product(x1, v[f"{name}.feed_forward.0.weight"].mT)
        fed = torch.empty_like(u) if training else u
        self._columns(
            "gelu", rows, shape.feed, u, v[f"{name}.feed_forward.0.bias"], fed, *self._dropping(1, training), at[2],
            rows, shape.feed, size,
        )  # fmt: skip
        z2 = self.product(fed, v[f"{name}.feed_forward.3.weight"].mT)
        x2, stats2 = self._norm(f"{name}.feed_forward_norm", x1, z2, v[f"{name}.feed_forward.3.bias"], at[3], training)
        if not training:  # later layers still want the queries and keys; nobody wants the rest
            x = mixed = z1 = x1 = u = z2 = x.new_empty(0)
        return x2, Saved(x, qkv, mixed, spread, z1, stats1, x1, u, z2, stats2)  # type: ignore[arg-type]

    def _log_base(self, i: int) -> tuple[Tensor | None, int]:
        if self.shape.learned:
            return self.v[f"encoder.layers.{i}.attention.rotary.log_base"], self.size
        return self.fixed_base, 0

    def _norm(
        self, name: str, x: Tensor, y: Tensor, bias: Tensor, site: int, training: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Batch norm of x + drop(y + bias); in training y becomes that sum, otherwise the result."""
        M, rows, d = x.shape
        mean, var = self.running[f"{name}.running_mean"], self.running[f"{name}.running_var"]
        weight, shift, stride = self.v[f"{name}.weight"], self.v[f"{name}.bias"], self.stack.running.shape[1]
        if not training:
            self._each("norm_still", rows * d, x, y, bias, mean, var, weight, shift, rows, d, self.size, stride)
            return y, None
        stats, out = x.new_empty(M, 2, d), torch.empty_like(x)
        self._columns(
            "norm_sums", rows, d, x, y, bias, self.partial, *self._dropping(0, True), site, rows, d, self.size
        )
        self._columns(
            "norm_apply", rows, d, y, self.partial, self._chunks(rows, d), stats, mean, var, weight, shift, out, rows,
            d, self.size, stride,
        )  # fmt: skip
        return out, stats

    # -------------------------------------------------------------------------------------------------------- backward

    def backward(self, grad: Tensor, saved: list[Saved], last: Tensor, batch: Batch) -> None:
        """From the gradient of the forecasts (M, B, H) to that of all parameters, in `grad`."""
        v, shape = self.v, self.shape
        M, B, n = batch.positions.shape
        d = shape.width
        self._meanwhile = M * B * n * shape.feed <= MEANWHILE
        self._weight_grad(grad.mT, last, "head.project.weight")
        self._add_rows(grad, "head.project.bias")
        flow = self.product(grad, v["head.project.weight"])
        if batch.basis is not None:
            flow = batch.basis.view(M * B, n, n).mT @ flow.view(M * B, n, d)
        flow = flow.view(M, B * n, d)
        turned: list[Tensor] = [torch.empty_like(s.qkv) for s in saved]
        for i in reversed(range(shape.layers)):
            flow = self._layer_grad(i, flow, saved, turned, batch)
        sums = flow.new_empty(M, min(8, B), n * d)
        self.kernels.launch(
            "embed_grad", (-(-n * d // 128), sums.shape[1], M), 128, flow, sums, *self._dropping(0, True), B, n * d
        )
        if shape.ranked:
            self._add_rows(sums, "positions.by_rank")
        self._add_rows(sums.view(M, -1, d), "embedding.bias")
        self._weight_grad(flow.mT, batch.values.view(M, B * n, shape.features), "embedding.weight")
        if self.aside is not None and self._held:
            torch.cuda.current_stream().wait_stream(self.aside)
            self._held.clear()

    def _layer_grad(self, i: int, flow: Tensor, saved: list[Saved], turned: list[Tensor], batch: Batch) -> Tensor:
        v, g, shape, size, name, at = self.v, self.g, self.shape, self.size, f"encoder.layers.{i}", sites(i)
        M, B, n = batch.positions.shape
        rows, d, s = B * n, shape.width, saved[i]
        side = self._norm_grad(f"{name}.feed_forward_norm", flow, s.z2, s.stats2, f"{name}.feed_forward.3.bias", at[3])
        inner = self.product(side, v[f"{name}.feed_forward.3.weight"])
        fed = torch.empty_like(inner)
        left = self._left(rows, shape.feed)
        self._columns(
            "gelu_grad", rows, shape.feed, inner, s.u, v[f"{name}.feed_forward.0.bias"], fed, left,
            *self._dropping(1, True), at[2], rows, shape.feed, size,
        )  # fmt: skip
        self._add_left(left, rows, shape.feed, f"{name}.feed_forward.0.bias")
        self._weight_grad(side.mT, fed, f"{name}.feed_forward.3.weight")
        self._weight_grad(inner.mT, s.x1, f"{name}.feed_forward.0.weight")
        self.product(inner, v[f"{name}.feed_forward.0.weight"], out=flow, add=True)
        del inner, fed
        side = self._norm_grad(f"{name}.attention_norm", flow, s.z1, s.stats1, f"{name}.attention.to_out.bias", at[1])
        self._weight_grad(side.mT, s.mixed, f"{name}.attention.to_out.weight")
        mixed = self.product(side, v[f"{name}.attention.to_out.weight"])
        del side
        four = [*(s.qkv for s in saved[: i + 1]), None, None, None][:4]
        slopes = [*turned[: i + 1], None, None, None][:4]
        self.attention[i].launch(
            "attend_grad", (2 * shape.heads // self.packed, B, M), self.threads, *four, *slopes, s.mixed, mixed,
            s.spread, *self._dropping(2, True), at[0], n, shape.heads, int(i + 1 < shape.layers),
        )  # fmt: skip
        base, base_stride = self._log_base(i)
        left = self._left(rows, d // 2, 7)
        self._columns(
            "rotate_grad", rows, d // 2, turned[i], s.qkv, batch.positions, base, left, rows, d,
            max(shape.head_width // 2, 1), base_stride,
        )  # fmt: skip
        with self._beside(left):
            base_grad = g[f"{name}.attention.rotary.log_base"] if shape.learned else None
            bias, chunks = g[f"{name}.attention.to_qkv.bias"], self._chunks(rows, d // 2)
            self.kernels.launch("rotate_left", M, 256, left, bias, base_grad, d, chunks, size)
        self._weight_grad(turned[i].mT, s.x, f"{name}.attention.to_qkv.weight")
        return self.product(turned[i], v[f"{name}.attention.to_qkv.weight"], out=flow, add=True)

    def _norm_grad(self, name: str, flow: Tensor, z: Tensor, stats: Tensor, bias: str, site: int) -> Tensor:
        """Turns `flow` into the gradient of x in x + drop(y + bias), and returns that of y."""
        _, rows, d = flow.shape
        weight, shift = self.g[f"{name}.weight"], self.g[f"{name}.bias"]
        self._columns("norm_grad_sums", rows, d, flow, z, stats, self.partial, rows, d)
        side, left = torch.empty_like(flow), self._left(rows, d)
        self._columns(
            "norm_grad", rows, d, flow, z, stats, self.v[f"{name}.weight"], self.partial, self._chunks(rows, d), weight,
            shift, side, left, *self._dropping(0, True), site, rows, d, self.size,
        )  # fmt: skip
        self._add_left(left, rows, d, bias)
        return side

    # ------------------------------------------------------------------------------------------------------- optimizer

    def update(self, first: Tensor, second: Tensor, rates: Tensor, decays: Tensor) -> None:
        """Clip each model's gradient to norm 1, then AdamW at its own rate and decay, (M,) each, with its moments."""
        M, chunks = len(self.stack), min(256, -(-self.size // 1024))
        self.kernels.launch("norms", (chunks, M), 256, self.grad, self.squares, self.size)
        self._each(
            "adamw", self.size, self.stack.theta, self.grad, first, second, self.squares, rates, decays,
            self.noise.step, self.size, self.stack.free, chunks,
        )  # fmt: skip
