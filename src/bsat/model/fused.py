"""The pass of `stacked`, and its gradient, as CUDA kernels.

Written for training steps that are captured in a CUDA graph: nothing here waits for the device, the gradient is laid
out by hand into one buffer, and what can be made again is not kept. The arithmetic is float32; sums over rows are in
float64. With `brief` the activations, and the parameters where they are multiplied, have 16 bits, and sums over a few
rows 32; parameters, their gradients, the optimizer and the forecasts have 32 still.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from .. import nvrtc
from .attention16 import Attention16
from .attention32 import Attention32
from .positions import BASE
from .products import Products16, Products32
from .stacked import Batch, Noise, Shape, Stack, sites

LAYERS = Path(__file__).with_name("layers.cu")
PRECISIONS = ("float32", "bfloat16")
MOST_WINDOWS = 65_535
"""In a batch: a grid has no more blocks along its second axis."""

MEANWHILE, BRIEF_MEANWHILE = 2**22, 2**28
"""Up to so many numbers in a feed-forward part, the gradients of weights are computed beside the rest; with 16 bits
they take less of a processor, and more of them."""

CHUNKS = 192
"""Into which rows are cut for sums over them, at most."""


def fits(shape: Shape | None) -> bool:
    """Whether the kernels can take networks of this shape (None: of a kind of its own); else `stacked` does."""
    return shape is not None and shape.width % 2 == 0 and Attention32.takes(shape)


def takes_brief(shape: Shape, device: torch.device) -> bool:
    """Whether activations of 16 bits can be had: where there are tensor cores, for a width that is a multiple of 16, a
    feed-forward width that is one of 8, and heads that `Attention16` takes."""
    even = shape.width % 16 == 0 and shape.feed % 8 == 0
    return even and Attention16.takes(shape) and nvrtc.tensor_cores(device)


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
    """what goes into gelu; in float32 without its bias"""
    fed: Tensor | None
    """made again if it is not kept"""
    z2: Tensor
    stats2: Tensor


class Fused:
    """A stack's forward and backward pass.

    Args:
        stack: its parameters; they may change between calls, but not move.
        noise: of the training steps.
        brief: keep activations in 16 bits; only where `takes_brief` allows it.
    """

    def __init__(self, stack: Stack, noise: Noise, *, brief: bool = False) -> None:
        self.stack, self.shape, self.noise = stack, stack.shape, noise
        shape, M, device = stack.shape, len(stack), stack.theta.device
        assert not brief or takes_brief(shape, device)
        self.brief = brief
        self.act = torch.bfloat16 if self.brief else torch.float32
        self.v, self.running = stack.views(), stack.running_views()
        self.short = torch.empty_like(stack.theta, dtype=self.act) if self.brief else stack.theta
        self.w = stack.views(self.short)
        """the parameters as products take them"""
        self.feeds = torch.tensor(stack.feeds, dtype=torch.int32, device=device) if self.brief else None
        self.grad = torch.zeros_like(stack.theta)
        self.g = stack.views(self.grad)
        self.size = stack.theta.shape[1]
        attention: type[Attention16 | Attention32] = Attention16 if self.brief else Attention32
        products = Products16.variants(device) if self.brief else []
        nvrtc.compile_ahead(
            (LAYERS, {"BRIEF": int(self.brief)}), *attention.variants(shape), *products, *Products32.variants(device)
        )
        self.kernels = nvrtc.program(LAYERS, BRIEF=int(self.brief))
        self.attention = attention(shape, noise)
        self.embedding_product = Products32(device)
        self.product = Products16(device) if self.brief else self.embedding_product
        # The gradients of weights are nobody's input: what few small models leave idle can compute them meanwhile.
        self.aside = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._meanwhile = False
        self._held: list[Tensor] = []
        self.fixed_base = torch.full((1,), BASE, device=device).log() if shape.rotary and not shape.learned else None
        self.squares = torch.empty(M, 256, dtype=torch.float64, device=device)

    # ------------------------------------------------------------------------------------------------------- launching

    def _each(self, name: str, numbers: int, *args: object) -> None:
        """A kernel over all numbers of every model."""
        blocks = max(1, min(-(-numbers // 512), 2048))
        self.kernels.launch(name, (blocks, len(self.stack)), 256, *args)

    def _columns(self, name: str, rows: int, columns: int, *args: object) -> None:
        """A kernel that goes down the columns, two at a time."""
        self._down(name, columns // 2, *args, chunks=self._chunks(rows, columns))

    def _down(self, name: str, threads: int, *args: object, chunks: int = 1) -> None:
        wide = 32 if threads >= 32 else 16 if threads >= 16 else 8
        grid = -(-threads // wide), chunks, len(self.stack)
        self.kernels.launch(name, grid, (wide, 256 // wide), *args)

    def _gather(self, name: str, columns: int, *args: object) -> None:
        """A kernel that adds up what others left, of two columns at a time; many threads share the parts of each."""
        self.kernels.launch(name, (-(-columns // 16), 1, len(self.stack)), (8, 32), *args)

    @staticmethod
    def _chunks(rows: int, columns: int) -> int:
        """Into how many parts the rows are cut for it; by the shape alone, so that sums do not depend on the stack."""
        return max(1, min(CHUNKS, rows * min(columns // 2, 32) // (2048 if columns >= 64 else 1024)))

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

    def _product(self, a: Tensor, b: Tensor, out: Tensor | None = None, *, add: bool = False, own: int = 0) -> Tensor:
        """(M, r, c) @ (M, c, s), written or added to `out`; of the first (1), second (2) or inner (3) axis, only what
        is within each model's own feed-forward width matters."""
        return self.product(a, b, out, add=add, limits=self.feeds if own else None, along=own)

    def _weight_grad(self, a: Tensor, b: Tensor, name: str, *, own: int = 0) -> None:
        """(M, o, r) @ (M, r, i) into the gradient of a weight."""
        with self._beside(a, b):
            self.product(a, b, self.g[name], limits=self.feeds if own else None, along=own)

    def _left(self, rows: int, columns: int) -> Tensor:
        """Room for two sums of each part and column."""
        form = len(self.stack), self._chunks(rows, columns), 2, columns
        return torch.empty(form, dtype=torch.float64, device=self.grad.device)

    def _add_left(self, left: Tensor, name: str) -> None:
        """Partial sums into the gradient of a bias."""
        _, chunks, _, columns = left.shape
        with self._beside(left):
            self._gather("add_left", columns, left, self.g[name], columns, chunks, self.size)

    def _add_rows(self, x: Tensor, name: str) -> None:
        """Sums over the rows (M, rows, columns) into the gradient of a parameter."""
        name_of = "add_rows" if x.dtype == torch.float32 else "add_acts"
        with self._beside(x):
            self._down(name_of, x.shape[2], x, self.g[name], x.shape[1], x.shape[2], self.size)

    # --------------------------------------------------------------------------------------------------------- forward

    def forward(self, batch: Batch, *, training: bool) -> tuple[Tensor, list[Saved], Tensor]:
        """Forecasts (M, B, H) before the head's bias, what the gradient needs, and the head's input."""
        v, shape, size = self.v, self.shape, self.size
        M, B, n = batch.positions.shape
        rows, d = B * n, shape.width
        if self.brief:
            self._each("shorten", size, self.stack.theta, self.short, size)
        embedded = self.embedding_product(batch.values.view(M, rows, shape.features), v["embedding.weight"].mT)
        x = torch.empty_like(embedded, dtype=self.act) if self.brief else embedded
        rank = v["positions.by_rank"] if shape.ranked else None
        dropping = self.noise.dropping(0, training)
        self._each("embed", rows * d, embedded, v["embedding.bias"], rank, x, *dropping, rows, d, n, size)
        saved: list[Saved] = []
        for i in range(shape.layers):
            x, layer = self._layer(i, x, [s.qkv for s in saved], batch, training)
            saved.append(layer)
        if batch.basis is not None:
            x = (batch.basis.view(M * B, n, n) @ x.view(M * B, n, d)).view(M, B, n * d)
        x = x.view(M, B, n * d)
        forecast = x.new_empty(M, B, shape.horizon, dtype=torch.float32)
        return self._product(x, self.w["head.project.weight"].mT, forecast), saved, x

    def _layer(self, i: int, x: Tensor, before: list[Tensor], batch: Batch, training: bool) -> tuple[Tensor, Saved]:
        name, at = f"encoder.layers.{i}", sites(i)
        qkv = self._turned(i, x, batch.positions)
        mixed, spread = self.attention.forward([*before, qkv], training, at[0])
        x1, z1, stats1 = self._norm(f"{name}.attention_norm", x, mixed, f"{name}.attention.to_out", at[1], training)
        u, fed = self._gelu(f"{name}.feed_forward.0", x1, at[2], training)
        x2, z2, stats2 = self._norm(
            f"{name}.feed_forward_norm", x1, fed, f"{name}.feed_forward.3", at[3], training, own=3
        )
        if not training:  # later layers still want the queries and keys; nobody wants the rest
            x = mixed = z1 = x1 = u = fed = z2 = x.new_empty(0)
        kept = fed if self.brief else None
        return x2, Saved(x, qkv, mixed, spread, z1, stats1, x1, u, kept, z2, stats2)  # type: ignore[arg-type]

    def _gelu(self, name: str, x: Tensor, site: int, training: bool) -> tuple[Tensor | None, Tensor]:
        """What goes into gelu (for the gradient), and drop(gelu) of it."""
        weight, bias = self.w[f"{name}.weight"].mT, self.v[f"{name}.bias"]
        masks = *self.noise.dropping(1, training), site
        if isinstance(self.product, Products16):
            return self.product.gelu(x, weight, bias, masks, self.feeds, keep=training)
        u = self.product(x, weight)
        _, rows, feed = u.shape
        fed = torch.empty_like(u) if training else u
        self._columns("gelu", rows, feed, u, bias, fed, *masks, rows, feed, self.size)
        return u, fed

    def _turned(self, i: int, x: Tensor, positions: Tensor) -> Tensor:
        """Queries and keys turned by the positions, and values."""
        _, rows, d = x.shape
        name = f"encoder.layers.{i}.attention.to_qkv"
        weight = self.w[f"{name}.weight"].mT
        bias: Tensor | None = self.v[f"{name}.bias"]
        base, base_stride = self._log_base(i)
        if isinstance(self.product, Products16):  # which adds the bias itself
            qkv, bias = self.product(x, weight, bias=bias), None
            if base is None:
                return qkv
        else:
            qkv = self.product(x, weight)
        self._each(
            "rotate", rows * d // 2, qkv, bias, positions, base, rows, d, max(self.shape.head_width // 2, 1),
            self.size, base_stride,
        )  # fmt: skip
        return qkv

    def _log_base(self, i: int) -> tuple[Tensor | None, int]:
        if self.shape.learned:
            return self.v[f"encoder.layers.{i}.attention.rotary.log_base"], self.size
        return self.fixed_base, 0

    def _norm(
        self, name: str, x: Tensor, a: Tensor, linear: str, site: int, training: bool, *, own: int = 0
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Batch norm of z = x + drop(a @ weight + bias); in training also z and its statistics, for the gradient."""
        M, rows, d = x.shape
        y_weight, y_bias = self.w[f"{linear}.weight"].mT, self.v[f"{linear}.bias"]
        mean, var = self.running[f"{name}.running_mean"], self.running[f"{name}.running_var"]
        weight, shift, stride = self.v[f"{name}.weight"], self.v[f"{name}.bias"], self.stack.running.shape[1]
        if not training:
            y = self._product(a, y_weight, own=own)
            self._each("norm_still", rows * d, x, y, y_bias, mean, var, weight, shift, rows, d, self.size, stride)
            return y, None, None
        masks = *self.noise.dropping(0, True), site
        if isinstance(self.product, Products16):
            z, left = self.product.norm(a, y_weight, y_bias, x, masks, limits=self.feeds if own else None)
        else:
            z, left = self.product(a, y_weight), self._left(rows, d)
            self._columns("norm_sums", rows, d, x, z, y_bias, left, *masks, rows, d, self.size)
        stats, out = x.new_empty(M, 2, d, dtype=torch.float32), torch.empty_like(x)
        self._gather("norm_stats", d, left, left.shape[1], stats, mean, var, rows, d, stride)
        self._columns("norm_apply", rows, d, z, stats, weight, shift, out, rows, d, self.size)
        return out, z, stats

    # -------------------------------------------------------------------------------------------------------- backward

    def backward(self, grad: Tensor, saved: list[Saved], last: Tensor, batch: Batch) -> None:
        """From the gradient of the forecasts (M, B, H) to that of all parameters, in `grad`."""
        shape = self.shape
        M, B, n = batch.positions.shape
        d = shape.width
        self._meanwhile = M * B * n * shape.feed <= (BRIEF_MEANWHILE if self.brief else MEANWHILE)
        self._weight_grad(grad.mT, last, "head.project.weight")
        self._add_rows(grad, "head.project.bias")
        flow = self._product(grad, self.w["head.project.weight"])
        if batch.basis is not None:
            flow = batch.basis.view(M * B, n, n).mT @ flow.view(M * B, n, d)
        flow = flow.view(M, B * n, d)
        turned: list[Tensor] = [torch.empty_like(s.qkv) for s in saved]
        left: Tensor | None = None
        for i in reversed(range(shape.layers)):
            left = self._layer_grad(i, flow, left, saved, turned, batch)
        sums = flow.new_empty(M, min(8, B), n * d, dtype=torch.float32)
        self.kernels.launch(
            "embed_grad", (-(-n * d // 128), sums.shape[1], M), 128, flow, sums, *self.noise.dropping(0, True), B, n * d
        )
        if shape.ranked:
            self._add_rows(sums, "positions.by_rank")
        self._add_rows(sums.view(M, -1, d), "embedding.bias")
        self._weight_grad(flow.mT, batch.values.view(M, B * n, shape.features).to(self.act), "embedding.weight")
        if self.aside is not None and self._held:
            torch.cuda.current_stream().wait_stream(self.aside)
            self._held.clear()

    def _layer_grad(
        self, i: int, flow: Tensor, left: Tensor | None, saved: list[Saved], turned: list[Tensor], batch: Batch
    ) -> Tensor | None:
        """Turns `flow` from the gradient of the layer's result into that of its input; `left` and what is returned are
        what `_flow` left of them."""
        w, g, shape, size, name = self.w, self.g, self.shape, self.size, f"encoder.layers.{i}"
        at = sites(i)
        M, B, n = batch.positions.shape
        rows, d, s = B * n, shape.width, saved[i]
        side = self._norm_grad(
            f"{name}.feed_forward_norm", flow, left, s.z2, s.stats2, f"{name}.feed_forward.3.bias", at[3]
        )
        inner, fed = self._gelu_grad(f"{name}.feed_forward", side, s, at[2])
        self._weight_grad(side.mT, fed, f"{name}.feed_forward.3.weight", own=2)
        self._weight_grad(inner.mT, s.x1, f"{name}.feed_forward.0.weight", own=1)
        left = self._flow(inner, w[f"{name}.feed_forward.0.weight"], flow, s.z1, s.stats1, own=3)
        del inner, fed
        side = self._norm_grad(
            f"{name}.attention_norm", flow, left, s.z1, s.stats1, f"{name}.attention.to_out.bias", at[1]
        )
        self._weight_grad(side.mT, s.mixed, f"{name}.attention.to_out.weight")
        mixed = self._product(side, w[f"{name}.attention.to_out.weight"])
        del side
        qkvs = [s.qkv for s in saved[: i + 1]]
        add = i + 1 < shape.layers
        self.attention.backward(qkvs, turned[: i + 1], s.mixed, mixed, s.spread, at[0], add=add)
        base, base_stride = self._log_base(i)
        chunks = self._chunks(rows, d)
        left = torch.empty(M * chunks * 7 * (d // 2), dtype=torch.float64, device=flow.device)
        self._down(
            "rotate_grad", d // 4 if self.brief else d // 2, turned[i], s.qkv, batch.positions, base, left, rows, d,
            max(shape.head_width // 2, 1), base_stride, chunks=chunks,
        )  # fmt: skip
        with self._beside(left):
            base_grad = g[f"{name}.attention.rotary.log_base"] if shape.learned else None
            bias = g[f"{name}.attention.to_qkv.bias"]
            blocks = -(-3 * d // 32) + 1
            self.kernels.launch("rotate_left", (blocks, 1, M), (32, 8), left, bias, base_grad, d, chunks, size)
        self._weight_grad(turned[i].mT, s.x, f"{name}.attention.to_qkv.weight")
        weight = w[f"{name}.attention.to_qkv.weight"]
        if i == 0:
            self._product(turned[i], weight, flow, add=True)
            return None
        return self._flow(turned[i], weight, flow, saved[i - 1].z2, saved[i - 1].stats2)

    def _gelu_grad(self, name: str, side: Tensor, s: Saved, site: int) -> tuple[Tensor, Tensor]:
        """The gradient of what goes into gelu, from that of the feed-forward part's result; and drop(gelu)."""
        weight, bias, masks = self.w[f"{name}.3.weight"], f"{name}.0.bias", (*self.noise.dropping(1, True), site)
        if isinstance(self.product, Products16):
            inner, left = self.product.gelu_grad(side, weight, s.u, masks, self.feeds)
            assert s.fed is not None
            fed = s.fed
        else:
            inner = self.product(side, weight)
            _, rows, feed = inner.shape
            fed, left = torch.empty_like(inner), self._left(rows, feed)
            self._columns("gelu_grad", rows, feed, inner, s.u, self.v[bias], fed, left, *masks, rows, feed, self.size)
        self._add_left(left, bias)
        return inner, fed

    def _flow(
        self, a: Tensor, weight: Tensor, flow: Tensor, z: Tensor, stats: Tensor, *, own: int = 0
    ) -> Tensor | None:
        """Adds a @ weight to `flow`, which makes it the gradient of the norm of z; and the sums that `_norm_grad` wants
        of it, where the product can leave them."""
        if isinstance(self.product, Products16):
            return self.product.flow(a, weight, flow, z, stats, limits=self.feeds if own else None)
        self.product(a, weight, flow, add=True)
        return None

    def _norm_grad(
        self, name: str, flow: Tensor, left: Tensor | None, z: Tensor, stats: Tensor, bias: str, site: int
    ) -> Tensor:
        """Turns `flow` into the gradient of x in x + drop(y + bias), and returns that of y."""
        _, rows, d = flow.shape
        weight, shift = self.g[f"{name}.weight"], self.g[f"{name}.bias"]
        if left is None:
            left = self._left(rows, d)
            self._columns("norm_grad_sums", rows, d, flow, z, stats, left, rows, d)
        shares, side = torch.empty_like(stats), torch.empty_like(flow)
        self._gather("norm_grad_stats", d, left, left.shape[1], shares, weight, shift, rows, d, self.size)
        left = self._left(rows, d)
        self._columns(
            "norm_grad", rows, d, flow, z, stats, self.v[f"{name}.weight"], shares, side, left,
            *self.noise.dropping(0, True), site, rows, d, self.size,
        )  # fmt: skip
        self._add_left(left, bias)
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
