"""The backend for training: batched torch on any device, differentiable in the samples and in the knots.

Same functions and answers as `reference`; see `spec` for the shapes. The arithmetic is float64 whatever comes in
(float32 where the device has no float64), because a Gram matrix squares the condition of the fit; results return in
the dtype of the samples.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .spec import FEATURE_FLOOR, LONG, MAX_CONDITION, RIDGE, ROUNDING, SMALLEST, SplineFit, SplineSpec


def place(y: Tensor, spec: SplineSpec, x: Tensor | None = None) -> Tensor:
    """Algorithm 1 for all windows at once; see `reference._place`, line by line the same."""
    return _place(_wide(y), _positions(y, x), spec, x is None).to(y.dtype)


def _place(y: Tensor, x: Tensor, spec: SplineSpec, regular: bool) -> Tensor:
    p, k_int, m = spec.degree, spec.interior, y.shape[1]
    dy = y
    for _ in range(spec.order):
        dy = _gradient(dy, x)
    mean = dy.abs().mean(1, keepdim=True)
    adaptive = (mean > (ROUNDING * y.abs().mean(1, keepdim=True)).clamp(min=SMALLEST)) & (spec.order > 0)
    ones = torch.ones_like(y)
    if spec.order > 0:
        # The inner `where` keeps 0/0 out of the backward pass of windows that are not adaptive.
        ratio = torch.where(adaptive, dy, ones).abs() / torch.where(adaptive, mean, ones[:, :1])
        phi = torch.where(adaptive, (ratio + FEATURE_FLOOR) ** (1 / spec.order), ones)
    else:
        phi = ones
    omega = (phi[:, 1:] + phi[:, :-1]) / 2 * x.diff(dim=1)
    if math.isfinite(spec.clip_factor):  # an infinite cap would make its gradient NaN
        cap = spec.clip_factor * omega.sum(1, keepdim=True) / k_int
        omega = torch.where(adaptive, torch.minimum(omega, cap), omega)
    middle = (x[:, 1:] + x[:, :-1]) / 2
    omega = omega * spec.recency ** ((middle - x[:, :1]) / (x[:, -1:] - x[:, :1]))

    F = torch.nn.functional.pad(omega.cumsum(1), (1, 0))
    q = torch.arange(1, k_int + 1, dtype=y.dtype, device=y.device) / (k_int + 1) * F[:, -1:]
    i = torch.searchsorted(F.detach().contiguous(), q.detach()).clamp(1, m - 1) - 1
    low, high = F.gather(1, i), F.gather(1, i + 1)
    share = (q - low) / (high - low)
    if spec.placement == "paper":
        middle = torch.cat([x[:, :1], middle], 1)
        grid = torch.where(adaptive, middle, x)
        interior = torch.lerp(grid.gather(1, i), grid.gather(1, i + 1), share)
    else:
        u = _spread(i + share, (p + 1) / 2, spec.spacing(m), m)
        if regular:
            interior = u
        else:
            i = u.detach().long().clamp(0, m - 2)
            inside = x.diff(dim=1).gather(1, i) > LONG * (x[:, -1:] - x[:, :1]) / (m - 1)
            u = torch.where(inside, (u.detach() + 0.5).floor(), u)
            interior = torch.lerp(x.gather(1, i), x.gather(1, i + 1), u - i)
    start, stop = x[:, :1].expand(-1, p + 1), x[:, -1:].expand(-1, p + 1)
    return torch.cat([start, interior, stop], 1)


def _gradient(y: Tensor, x: Tensor) -> Tensor:
    h = x.diff(dim=1)
    slope = y.diff(dim=1) / h
    inner = (h[:, :-1] * slope[:, 1:] + h[:, 1:] * slope[:, :-1]) / (h[:, :-1] + h[:, 1:])
    return torch.cat([slope[:, :1], inner, slope[:, -1:]], 1)


def _spread(u: Tensor, end: float, gap: float, m: int) -> Tensor:
    """See `reference.spread`."""
    steps = gap * torch.arange(u.shape[1], dtype=u.dtype, device=u.device)
    z = u - steps
    z = (z.cummax(1).values + z.flip(1).cummin(1).values.flip(1)) / 2
    return z.clamp(end, (m - 1) - end - float(steps[-1])) + steps


def local_basis(knots: Tensor, degree: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """The p + 1 basis functions that are not zero at positions (q,) or (B, q): the index of the first, (B, q), and
    their values, (B, q, p + 1)."""
    p, n = degree, knots.shape[1] - degree - 1
    t = _wide(knots)
    x = x.to(t).expand(len(t), -1)
    x = torch.maximum(torch.minimum(x, t[:, -1:]), t[:, :1])
    inner = t[:, p : n + 1].detach().contiguous()
    span = torch.searchsorted(inner, x.detach().contiguous(), right=True).clamp(1, n - p) - 1 + p  # (B, q)
    N = [torch.ones_like(x)]
    for q in range(1, p + 1):
        carried = torch.zeros_like(x)
        raised = []
        for a in range(q):
            right, left = t.gather(1, span + (a + 1)) - x, x - t.gather(1, span + (a + 1 - q))
            term = N[a] / (right + left)
            raised.append(carried + right * term)
            carried = left * term
        N = [*raised, carried]
    return span - p, torch.stack(N, 2)


def basis(knots: Tensor, degree: int, x: Tensor) -> Tensor:
    """Values of the basis functions, (B, q, n), at positions (q,) or (B, q); only p + 1 of the n are not zero."""
    first, values = local_basis(knots, degree, x)
    index = first.unsqueeze(2) + torch.arange(degree + 1, device=knots.device)
    out = values.new_zeros(*first.shape, knots.shape[1] - degree - 1).scatter(2, index, values)
    return out.to(knots.dtype)


def fit(y: Tensor, knots: Tensor, degree: int, x: Tensor | None = None, *, exact_condition: bool = False) -> SplineFit:
    """Least squares at given knots, with the ridge fallback; differentiable in ``y`` and ``knots``."""
    at = _positions(y, x)
    N = basis(_wide(knots), degree, at)
    G = N.mT @ N
    condition = _condition(G.detach(), exact_condition)
    fallback = ~(condition <= MAX_CONDITION)
    n = G.shape[1]
    trace = G.diagonal(dim1=1, dim2=2).sum(1)
    shift = torch.where(fallback, RIDGE * trace / n, torch.zeros_like(trace))
    G = G + shift[:, None, None] * torch.eye(n, dtype=G.dtype, device=G.device)
    c = torch.linalg.solve(G, N.mT @ _wide(y).unsqueeze(2)).squeeze(2)
    return SplineFit(knots, c.to(y.dtype), condition.to(y.dtype), fallback)


def _condition(G: Tensor, exact: bool) -> Tensor:
    """An upper bound of the condition number where that settles the matter, and the number itself elsewhere.

    The bound is the product of the infinity norms; G is totally positive, so the row sums of |G^-1| are
    |G^-1 (1, -1, 1, ...)| (see `_kernels._squeeze_condition`).
    """
    signs = 1.0 - 2.0 * (torch.arange(G.shape[1], device=G.device) % 2)
    L, failed = torch.linalg.cholesky_ex(G)
    inverse_rows = torch.cholesky_solve(signs.to(G).expand(len(G), -1).unsqueeze(2), L).abs().amax((1, 2))
    condition = G.sum(2).amax(1) * inverse_rows
    condition = torch.where(failed > 0, torch.full_like(condition, torch.inf), condition)
    unsure = torch.ones_like(failed, dtype=torch.bool) if exact else ~(condition <= MAX_CONDITION)
    if bool(unsure.any()):
        values = torch.linalg.eigvalsh(G[unsure])
        exactly = values[:, -1] / values[:, 0]
        condition[unsure] = torch.where(values[:, 0] > 0, exactly, torch.full_like(exactly, torch.inf))
    return condition


def tokenize(y: Tensor, spec: SplineSpec, x: Tensor | None = None, *, exact_condition: bool = False) -> SplineFit:
    """Knots and coefficients of all windows."""
    wide = _wide(y)
    at = _positions(y, x)
    result = fit(
        wide, _place(wide, at, spec, x is None), spec.degree, None if x is None else at, exact_condition=exact_condition
    )
    return SplineFit(*(a if a.dtype == torch.bool else a.to(y.dtype) for a in result))


def evaluate(knots: Tensor, coefficients: Tensor, degree: int, x: Tensor) -> Tensor:
    """The curves at positions (q,) or (B, q): (B, q)."""
    return (basis(knots, degree, x) @ coefficients.unsqueeze(2)).squeeze(2)


def _wide(a: Tensor) -> Tensor:
    return a.to(torch.float32 if a.device.type == "mps" else torch.float64)


def _positions(y: Tensor, x: Tensor | None) -> Tensor:
    wide = _wide(y)
    if x is None:
        x = torch.arange(y.shape[1], dtype=wide.dtype, device=y.device)
    return x.to(wide).expand(y.shape)
