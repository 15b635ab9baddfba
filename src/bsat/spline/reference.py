"""The oracle: Algorithms 1 and 2 of the paper in plain numpy, one window at a time, for reading and for testing.

Every fast backend is tested against this file; nothing here is meant to be quick. Where the paper is silent or
disagrees with itself, the comment at the line says what we take.
"""

from __future__ import annotations

import numpy as np

from .spec import FEATURE_FLOOR, LONG, MAX_CONDITION, RIDGE, ROUNDING, SMALLEST, SplineFit, SplineSpec


def place(y: np.ndarray, spec: SplineSpec, x: np.ndarray | None = None) -> np.ndarray:
    """Adaptive knots, (B, n + p + 1)."""
    x = _positions(y, x)
    return np.stack([_place(window, at, spec) for window, at in zip(y, x, strict=True)])


def _place(y: np.ndarray, x: np.ndarray, spec: SplineSpec) -> np.ndarray:
    """Algorithm 1 for one window: (m,) samples at (m,) positions -> (n + p + 1,) knots."""
    p, k_int = spec.degree, spec.interior
    phi, F = feature_and_mass(y, x, spec)

    # Lines 12-14: invert the cumulative mass at equal quantiles.
    q = np.linspace(0, 1, k_int + 2)[1:-1]
    if spec.placement == "paper":
        # Line 12 pairs F with mid-points, so every knot sits half a sample to the left. Uniform knots do without.
        middle = np.concatenate([x[:1], (x[1:] + x[:-1]) / 2])
        interior = np.interp(q, F, x if (phi == 1).all() else middle)
    else:
        index = np.arange(len(y), dtype=float)
        u = spread(np.interp(q, F, index), (p + 1) / 2, spec.spacing(len(y)), len(y))
        inside = np.diff(x)[u.astype(int)] > LONG * (x[-1] - x[0]) / (len(x) - 1)
        interior = np.interp(np.where(inside, np.floor(u + 0.5), u), index, x)
    return np.concatenate([np.full(p + 1, x[0]), interior, np.full(p + 1, x[-1])])


def feature_and_mass(y: np.ndarray, x: np.ndarray, spec: SplineSpec) -> tuple[np.ndarray, np.ndarray]:
    """Lines 1-11: the feature function phi at the samples, (m,), and the cumulative mass F from 0 to 1, (m,)."""
    # Lines 1-6. Dividing by the mean leaves the knots as they are (phi counts only up to a factor) and keeps tiny and
    # huge units out of trouble.
    dy = y
    for _ in range(spec.order):
        dy = gradient(dy, x)
    mean = np.abs(dy).mean()
    adaptive = spec.order > 0 and mean > max(ROUNDING * np.abs(y).mean(), SMALLEST)
    phi = np.ones_like(y)  # the paper's 0/0 on a constant window: uniform knots
    if adaptive:
        phi = (np.abs(dy) / mean + FEATURE_FLOOR) ** (1 / spec.order)

    # Lines 7-10: interval masses, clipped at g times the mean mass of an interior knot. (The text divides by the number
    # of intervals instead; Algorithm 1's division reproduces the paper's g.)
    omega = (phi[1:] + phi[:-1]) / 2 * np.diff(x)
    if adaptive:
        omega = np.minimum(omega, spec.clip_factor * omega.sum() / spec.interior)

    # Recency (the paper's future work): the knot density grows geometrically, `recency` times over the window.
    middle = (x[1:] + x[:-1]) / 2
    omega = omega * spec.recency ** ((middle - x[0]) / (x[-1] - x[0]))

    F = np.concatenate([[0.0], np.cumsum(omega)])  # line 11
    return phi, F / F[-1]


def gradient(y: np.ndarray, x: np.ndarray) -> np.ndarray:
    """numpy.gradient: central differences of second order, one-sided at the ends. Written with the slopes on both
    sides, so that a constant has derivative 0 exactly on an irregular grid too."""
    slope, h = np.diff(y) / np.diff(x), np.diff(x)
    inner = (h[:-1] * slope[1:] + h[1:] * slope[:-1]) / (h[:-1] + h[1:])
    return np.concatenate([slope[:1], inner, slope[-1:]])


def spread(u: np.ndarray, end: float, gap: float, m: int) -> np.ndarray:
    """The safe placement: move interior knots ``u``, given in sample indices, as little as possible (in the maximum
    norm) so that neighbours are at least ``gap`` apart and both end spans at least ``end`` wide.

    With z_j = u_j - j gap the first rule says that z must not decrease; the nearest such sequence in the maximum norm
    is the mean of z's running maximum from the left and its running minimum from the right.
    """
    steps = gap * np.arange(len(u))
    z = u - steps
    z = (np.maximum.accumulate(z) + np.minimum.accumulate(z[::-1])[::-1]) / 2
    return np.clip(z, end, (m - 1) - end - steps[-1]) + steps


def basis(knots: np.ndarray, degree: int, x: np.ndarray) -> np.ndarray:
    """N_{i,p}(x) by the Cox-de Boor relation (paper, eq. 1): (B, k) knots, (q,) or (B, q) positions -> (B, q, n).

    Positions outside the knots are moved to the nearer end. The last span is closed on the right.
    """
    x = np.broadcast_to(x, (len(knots), np.shape(x)[-1]))
    return np.stack([_basis(t, degree, at) for t, at in zip(knots, x, strict=True)])


def _basis(t: np.ndarray, p: int, x: np.ndarray) -> np.ndarray:
    x = np.clip(x, t[0], t[-1])[:, None]
    last = x == t[-1]
    N = np.where(last, (t[:-1] < x) & (x <= t[1:]), (t[:-1] <= x) & (x < t[1:])).astype(float)
    for q in range(1, p + 1):
        k = len(t) - q - 1
        left = _divide(x - t[:k], t[q : q + k] - t[:k])
        right = _divide(t[q + 1 :] - x, t[q + 1 :] - t[1 : k + 1])
        N = left * N[:, :k] + right * N[:, 1:]
    return N


def _divide(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a / b, and 0 where b is 0 (the convention of the Cox-de Boor relation at repeated knots)."""
    return np.where(b > 0, a / np.where(b > 0, b, 1.0), 0.0)


def fit(y: np.ndarray, knots: np.ndarray, degree: int, x: np.ndarray | None = None) -> SplineFit:
    """Least squares with the ridge fallback of the paper's text.

    Algorithm 2 falls back "on exception", but a rank-deficient fit seldom raises; the text's rule (condition number
    of the Gram matrix above 1e8, lambda = 1e-6 trace(G) / n) is the one we take.
    """
    N = basis(knots, degree, _positions(y, x))
    coefficients, condition = [], []
    for window, B in zip(y, N, strict=True):
        G = B.T @ B
        kappa = np.linalg.cond(G)
        if kappa <= MAX_CONDITION:
            c = np.linalg.lstsq(B, window, rcond=None)[0]
        else:
            n = len(G)
            c = np.linalg.solve(G + RIDGE * np.trace(G) / n * np.eye(n), B.T @ window)
        coefficients.append(c)
        condition.append(kappa)
    kappas = np.asarray(condition)
    return SplineFit(knots, np.stack(coefficients), kappas, ~(kappas <= MAX_CONDITION))


def tokenize(y: np.ndarray, spec: SplineSpec, x: np.ndarray | None = None) -> SplineFit:
    """Algorithm 2 without its clipping, which belongs to the tokens."""
    return fit(y, place(y, spec, x), spec.degree, x)


def evaluate(knots: np.ndarray, coefficients: np.ndarray, degree: int, x: np.ndarray) -> np.ndarray:
    """C(x) = sum_i c_i N_{i,p}(x) (paper, eq. 2): (B, q)."""
    return np.einsum("bqn,bn->bq", basis(knots, degree, x), coefficients)


def _positions(y: np.ndarray, x: np.ndarray | None) -> np.ndarray:
    """(B, m) positions; integers where none are given, so that the grid is exactly uniform."""
    return np.broadcast_to(np.arange(y.shape[1], dtype=float) if x is None else x, y.shape)
