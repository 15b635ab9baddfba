"""The fast backend for NVIDIA GPUs: kernels in CUDA C (`gpu.cu`), compiled on first use, one thread a window.

Same functions and answers as `reference`; see `spec` for the shapes. For CUDA tensors of float32 or float64 that need
no gradient. The arithmetic is float64; results return in the dtype of the samples. No (m, n) matrix is ever written:
the work space of a call is bounded (`_budget`), whatever the number of windows.

The kernels settle every fit whose condition number is certainly at most MAX_CONDITION, which with the safe placement
is every one. The few others are handed to `autograd.fit`, for its exact condition number and its ridge.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import nvrtc
from . import autograd
from .autograd import basis, evaluate
from .spec import SplineFit, SplineSpec

__all__ = ["basis", "evaluate", "fit", "place", "tokenize", "tokenize_series", "usable"]

SOURCE = Path(__file__).with_suffix(".cu")
BLOCK = 128
STRETCH = 1.5
"""In average spans: how many samples a thread takes before it goes on to a knot, with all others of its warp that have
come to one."""
LEAST, MOST = 1 << 14, 1 << 18
"""Windows handled at once: enough to fill the largest GPUs, and no more than that takes."""


def usable(y: Any) -> bool:
    """Whether this backend can answer for these samples."""
    return (
        y.device.type == "cuda"
        and y.dtype in (torch.float32, torch.float64)
        and not (y.requires_grad and torch.is_grad_enabled())
        and nvrtc.available()
    )


@dataclass(frozen=True)
class _Samples:
    """Windows somewhere in memory: the i-th sample of window w is i * step numbers after where the window starts, which
    is starts[w], or w * row if there are no starts."""

    numbers: Tensor
    starts: Tensor | None
    row: int
    step: int
    count: int
    m: int

    @classmethod
    def of(cls, y: Tensor) -> _Samples:
        """From (B, m) windows, which may overlap."""
        return cls(y, None, y.stride(0), y.stride(1), *y.shape)

    def part(self, rows: slice) -> _Samples:
        """Some of the windows."""
        count = len(range(*rows.indices(self.count)))
        if self.starts is None:
            return replace(self, numbers=self.numbers[rows], count=count)
        return replace(self, starts=self.starts[rows], count=count)

    def windows(self, index: Tensor) -> Tensor:
        """Copies of some windows, (R, m) in float64."""
        if self.starts is None:
            return self.numbers[index].double()
        at = self.starts[index, None] + torch.arange(self.m, device=index.device)
        return self.numbers[at].double()


def place(y: Tensor, spec: SplineSpec, x: Tensor | None = None) -> Tensor:
    """Adaptive knots, (B, n + p + 1)."""
    return _place(_Samples.of(y.detach()), spec, x).to(y.dtype)


def fit(y: Tensor, knots: Tensor, degree: int, x: Tensor | None = None, *, exact_condition: bool = False) -> SplineFit:
    """Least squares at given knots, with the ridge fallback."""
    spec = SplineSpec(n=knots.shape[1] - degree - 1, degree=degree, clip_factor=math.inf)
    return _run(_Samples.of(y.detach()), spec, x, knots.detach(), exact_condition)._replace(knots=knots)


def tokenize(y: Tensor, spec: SplineSpec, x: Tensor | None = None, *, exact_condition: bool = False) -> SplineFit:
    """Knots and coefficients of all windows."""
    return _run(_Samples.of(y.detach()), spec, x, None, exact_condition)


def tokenize_series(series: Tensor, starts: Tensor, m: int, spec: SplineSpec) -> SplineFit:
    """The windows of m samples from each of ``starts`` (B,) of a (T,) series."""
    starts = starts.to(series.device, torch.int64).contiguous()
    return _run(_Samples(series.detach().contiguous(), starts, 0, 1, len(starts), m), spec, None, None, False)


def _run(samples: _Samples, spec: SplineSpec, x: Tensor | None, knots: Tensor | None, exact: bool) -> SplineFit:
    B, n, p, like = samples.count, spec.n, spec.degree, samples.numbers
    out = SplineFit(
        like.new_empty(B, n + p + 1),
        like.new_empty(B, n),
        like.new_empty(B),
        torch.zeros(B, dtype=torch.bool, device=like.device),
    )
    with _device(like):
        for rows in _chunks(samples, spec):
            chunk = _Chunk(samples.part(rows), spec, _positions(x, rows))
            t = chunk.place() if knots is None else knots[rows].T.double().contiguous()
            chunk.fit(t, *(a[rows] for a in out[:3]))
            del chunk, t  # before the next chunk asks for its memory
        # NaN marks a window that is not finite, and stays as it is.
        unsure = ~out.condition.isnan() if exact else out.condition.isinf()
        _look_closer(samples, spec, x, knots, exact, torch.nonzero(unsure)[:, 0], out)
    return out


def _place(samples: _Samples, spec: SplineSpec, x: Tensor | None) -> Tensor:
    """Knots in float64."""
    with _device(samples.numbers):
        parts = [_Chunk(samples.part(rows), spec, _positions(x, rows)).place().T for rows in _chunks(samples, spec)]
        return torch.cat(parts)


def _look_closer(
    samples: _Samples,
    spec: SplineSpec,
    x: Tensor | None,
    knots: Tensor | None,
    exact: bool,
    index: Tensor,
    out: SplineFit,
) -> None:
    """Fit some windows again, with the exact condition number and, where that is too large, the ridge."""
    size = max(1, min(1024, (1 << 25) // (samples.m * spec.n)))
    for some in index.split(size) if len(index) else ():
        y = samples.windows(some)
        at = x if x is None or x.ndim == 1 else x[some]
        t = _place(_Samples.of(y), spec, at) if knots is None else knots[some].double()
        again = autograd.fit(y, t, spec.degree, at, exact_condition=exact)
        for whole, part in zip(out[1:], again[1:], strict=True):
            whole[some] = part.to(whole.dtype)


class _Chunk:
    """The kernels' calls for windows that are handled at once."""

    def __init__(self, samples: _Samples, spec: SplineSpec, x: Tensor | None) -> None:
        self.samples, self.spec = samples, spec
        self.real = "float" if samples.numbers.dtype == torch.float32 else "double"
        count, m = samples.count, samples.m
        pack = 4 if self.real == "float" else 2
        self.y = samples.numbers.new_empty(-(-m // pack), count, pack)
        self.work = samples.numbers.new_empty((spec.degree + 2) * spec.n, count, dtype=torch.float64)
        self.grid = -(-count // BLOCK)
        # Positions of window w: x[w * xrow + i * xstep].
        self.x = None if x is None else x.double().contiguous() if x.ndim == 1 else x.double().T.contiguous()
        self.xrow, self.xstep = (0, 1) if x is None or x.ndim == 1 else (1, count)
        regular = int(x is None)
        self.turning: dict[str, object] = {"REAL": self.real}
        self.placing = {**self.turning, "REGULAR": regular, "ORDER": spec.order}
        self.fitting = {**self.turning, "REGULAR": regular, "DEGREE": spec.degree}
        nvrtc.compile_ahead(*((SOURCE, constants) for constants in (self.turning, self.placing, self.fitting)))
        nvrtc.program(SOURCE, **self.turning).launch(
            "turn",
            (-(-count // 32), -(-m // 32)),
            (32, 8),
            samples.numbers,
            samples.starts,
            samples.row,
            samples.step,
            m,
            count,
            self.y,
        )

    def place(self) -> Tensor:
        """Knots, (n + p + 1, count) in float64."""
        samples, spec = self.samples, self.spec
        t = self.work.new_empty(spec.n + spec.degree + 1, samples.count)
        nvrtc.program(SOURCE, **self.placing).launch(
            "place",
            self.grid,
            BLOCK,
            self.y,
            self.x,
            self.xrow,
            self.xstep,
            samples.count,
            samples.m,
            spec.n,
            spec.degree,
            int(spec.placement == "paper"),
            float(spec.clip_factor),
            spec.spacing(samples.m),
            float(spec.recency),
            t,
            self.work,
        )
        return t

    def fit(self, t: Tensor, knots: Tensor, coefficients: Tensor, condition: Tensor) -> None:
        """Coefficients and conditions at the knots t (n + p + 1, count), which go to `knots` too."""
        samples, spec = self.samples, self.spec
        nvrtc.program(SOURCE, **self.fitting).launch(
            "fit",
            self.grid,
            BLOCK,
            self.y,
            self.x,
            self.xrow,
            self.xstep,
            samples.count,
            samples.m,
            spec.n,
            math.ceil(STRETCH * samples.m / (spec.n - spec.degree)),
            t,
            self.work,
            knots,
            coefficients,
            condition,
        )


def _positions(x: Tensor | None, rows: slice) -> Tensor | None:
    return x if x is None or x.ndim == 1 else x[rows]


def _chunks(samples: _Samples, spec: SplineSpec) -> Iterator[slice]:
    """The windows in parts of equal size, as few as the work space allows."""
    window = samples.m * samples.numbers.element_size() + 8 * ((spec.degree + 3) * spec.n + spec.degree + 1)
    most = min(max(_budget(samples.numbers) // window, LEAST), MOST)
    parts = -(-samples.count // most)
    size = -(-samples.count // max(parts * BLOCK, 1)) * BLOCK
    return (slice(i, min(i + size, samples.count)) for i in range(0, samples.count, size))


def _budget(like: Tensor) -> int:
    """Bytes of work space that a call aims at: a small part of the device's memory."""
    if like.device.type != "cuda":
        return 1 << 28
    return min(torch.cuda.get_device_properties(like.device).total_memory // 32, 1 << 32)


def _device(like: Tensor) -> Any:
    return torch.cuda.device(like.device) if like.device.type == "cuda" else nullcontext()
