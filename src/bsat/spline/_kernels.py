"""The numba kernels behind `bsat.spline.cpu`: one window in, knots and coefficients out, no (m, n) matrix anywhere.

How the work is cut so that a compiler can vectorise all of it:

* *Knots* (`place_window`): element-wise passes over the m samples. Roots are taken by a Newton-like iteration on a
  bit-level guess, since a library `pow` would cost more than all the rest.
* *Pieces* (`_raise_degree`): on each span between two knots every basis function is a polynomial. Their coefficients
  come from the Cox-de Boor recursion, carried out for many spans at once.
* *Gram matrix*: on a span it is A H A^T, with A the pieces' coefficients and H the Hankel matrix of the power sums of
  the sample positions. On a regular grid the power sums depend on the number of samples in the span alone, so they
  are looked up, and those of odd order vanish.
* *Solution*: banded LDL^T, with two right-hand sides: the samples' moments, and the one that measures the condition.

The degree is a compile-time constant, so that short loops unroll; each degree compiles on first use.
"""

from __future__ import annotations

from functools import cache, partial
from hashlib import sha256
from typing import Any

import numba
import numpy as np
from numba.core.caching import CompileResultCacheImpl
from numba.core.registry import cpu_target

from .spec import FEATURE_FLOOR, LARGEST, LONG, MAX_CONDITION, RIDGE, ROUNDING, SMALLEST

# No "nnan"/"ninf": a NaN must come out as a NaN.
_JIT: dict[str, Any] = {
    "nogil": True,
    "error_model": "numpy",
    "fastmath": {"reassoc", "contract", "nsz", "arcp"},
}

LANES = 32
"""Windows whose banded systems are solved side by side: a single one would spend its time waiting for divisions."""

SPANS = 64
"""Spans handled at once. A constant, so that the compiler knows the distance between the rows of the work arrays."""

STEP = 16
"""Numbers that a vectorised loop takes in one turn. Spans are filled up with empty ones to a multiple of it."""


@cache
def _digest() -> str | None:
    """Of all that machine code is made from: this source (as numba stamps it), the numbers it takes from elsewhere,
    numba, and the processor. None where there is no folder to keep it in."""
    try:
        source = CompileResultCacheImpl(_jit).locator.get_source_stamp()
    except RuntimeError:
        return None
    numbers = {name: value for name, value in globals().items() if isinstance(value, (int, float))}
    processor = cpu_target.target_context.codegen().magic_tuple()
    return sha256(repr((source, numbers, numba.__version__, processor)).encode()).hexdigest()[:16]


def _jit(function: Any, name: str = "", **options: Any) -> Any:
    """Compile under a name that serves one function and one `_digest`. Numba keeps all of one name in one list, and
    writes the list before the machine code: a process that is killed in between, or writes at the same time as another,
    would leave code on the list that was made from something else."""
    if not numba.config.DISABLE_JIT:  # type: ignore[attr-defined]
        function.__qualname__ = f"{name or function.__qualname__}_{_digest()}"
        options["cache"] = _digest() is not None
    return numba.njit(**_JIT, **options)(function)


_inline = partial(_jit, inline="always")


# ---------------------------------------------------------------------------------------------------------- knots


@_jit
def _gradient(y, x, regular, dy):
    """`reference.gradient`."""
    m = len(y)
    if regular:
        for i in range(1, m - 1):
            dy[i] = 0.5 * (y[i + 1] - y[i - 1])
        dy[0] = y[1] - y[0]
        dy[m - 1] = y[m - 1] - y[m - 2]
    else:
        for i in range(1, m - 1):
            h, k = x[i] - x[i - 1], x[i + 1] - x[i]
            dy[i] = (h * ((y[i + 1] - y[i]) / k) + k * ((y[i] - y[i - 1]) / h)) / (h + k)
        dy[0] = (y[1] - y[0]) / (x[1] - x[0])
        dy[m - 1] = (y[m - 1] - y[m - 2]) / (x[m - 1] - x[m - 2])


@_jit
def differentiate(y, x, regular, order, a, b):
    """The order-th derivative into a, by way of b."""
    _gradient(y, x, regular, a)
    for k in range(order - 1):
        if k % 2 == 0:
            _gradient(a, x, regular, b)
        else:
            _gradient(b, x, regular, a)
    if order % 2 == 0:
        for i in range(len(a)):
            a[i] = b[i]


@_jit
def _cut_derivative(y, slope, order, a, b, edge):
    """The order-th derivative of a window y of a regular series into a, given that of the series over the same
    samples: it is the same, but for the `order` samples at each end that one-sided differences reach."""
    m, reach = len(y), 2 * order + 1
    for i in range(m):
        a[i] = slope[i]
    for side in range(2):
        part = y[:reach] if side == 0 else y[m - reach :]
        differentiate(part, part, True, order, edge[:reach], b[:reach])
        for i in range(order):
            if side == 0:
                a[i] = edge[i]
            else:
                a[m - 1 - i] = edge[reach - 1 - i]


def _root(order: int) -> Any:
    """Compile an in-place order-th root of positive numbers of ordinary size.

    r ~ v^(-1/order) is guessed from the bits of v to some percent; with h = 1 - v r^order, the series of
    (1 - h)^(-1/order) mends it, to the fourth power of h first (error < 1e-5) and to the second then (rounding).
    """
    share = 2**32 // order
    tuned = {2: 0x11700, 3: 0x116C0, 4: 0xFD00, 5: 0xFD40, 6: 0xF300}[order]  # least largest |h|: 0.07 to 0.18
    magic = int(1023 * (1 + 1 / order) * 2**20) - tuned
    s = 1 / order
    c1, c2, c3, c4 = s, s * (s + 1) / 2, s * (s + 1) * (s + 2) / 6, s * (s + 1) * (s + 2) * (s + 3) / 24

    def root(v, scratch):
        bits, guess = v.view(np.int64), scratch.view(np.int64)
        for i in range(len(v)):
            guess[i] = (magic - (((bits[i] >> 32) * share) >> 32)) << 32
        for i in range(len(v)):
            r = scratch[i]
            power = r
            for _ in range(order - 1):
                power *= r
            h = 1.0 - v[i] * power
            r += r * h * (c1 + h * (c2 + h * (c3 + h * c4)))
            power = r
            for _ in range(order - 2):
                power *= r
            h = 1.0 - v[i] * power * r
            r += r * h * (c1 + h * c2)
            power = r
            for _ in range(order - 2):
                power *= r
            v[i] *= power

    return _jit(root, f"root{order}")


_root2, _root3, _root4, _root5, _root6 = (_root(order) for order in range(2, 7))


@_jit
def _take_root(v, order, scratch):
    if order == 2:
        _root2(v, scratch)
    elif order == 3:
        _root3(v, scratch)
    elif order == 4:
        _root4(v, scratch)
    elif order == 5:
        _root5(v, scratch)
    elif order == 6:
        _root6(v, scratch)


@_jit
def _running_sum(phi, cap, F):
    """F[i + 1] = F[i] + min((phi[i] + phi[i + 1]) / 2, cap), in four chains: one would wait for its own additions."""
    quarter = (len(F) - 1) // 4
    phi1, phi2, phi3 = phi[quarter:], phi[2 * quarter :], phi[3 * quarter :]
    F0, F1, F2, F3 = F[1:], F[quarter + 1 :], F[2 * quarter + 1 :], F[3 * quarter + 1 :]
    s0 = s1 = s2 = s3 = 0.0
    for i in range(quarter):
        s0 += min(0.5 * (phi[i] + phi[i + 1]), cap)
        s1 += min(0.5 * (phi1[i] + phi1[i + 1]), cap)
        s2 += min(0.5 * (phi2[i] + phi2[i + 1]), cap)
        s3 += min(0.5 * (phi3[i] + phi3[i + 1]), cap)
        F0[i], F1[i], F2[i], F3[i] = s0, s1, s2, s3
    F[0] = 0.0
    s1 += s0
    s2 += s1
    s3 += s2
    for i in range(quarter):
        F1[i] += s0
        F2[i] += s1
        F3[i] += s2
    for i in range(4 * quarter, len(F) - 1):
        s3 += min(0.5 * (phi[i] + phi[i + 1]), cap)
        F[i + 1] = s3


@_jit
def _quantiles(F, m, k_int, u, bucket):
    """u[j] = the fractional index at which F reaches (j + 1) / (k_int + 1) of its total.

    A pass without branches notes, for every quantile, the last sample of the bucket before it, and the search starts
    there; walking along F would mispredict a branch at every knot.
    """
    rate, step = (k_int + 1) / F[m - 1], F[m - 1] / (k_int + 1)
    for j in range(k_int + 2):
        bucket[j] = 0
    for i in range(1, m):
        bucket[max(0, min(int(F[i] * rate), k_int)) + 1] = i
    i = 0
    for j in range(k_int):
        target = (j + 1) * step
        i = min(max(i, bucket[j + 1]), m - 2)
        while i > 0 and F[i] >= target:
            i -= 1
        while i < m - 2 and F[i + 1] < target:
            i += 1
        u[j] = i + (target - F[i]) / (F[i + 1] - F[i])


@_jit
def _to_positions(u, x, regular, middle, m):
    """Fractional indices to positions; with `middle` by way of Algorithm 1's mid-points, half a sample to the left."""
    if regular and not middle:
        return
    for j in range(len(u)):
        i = min(int(u[j]), m - 2)
        low, high = (float(i), i + 1.0) if regular else (x[i], x[i + 1])
        if middle:
            before = low if i == 0 else (i - 1.0 if regular else x[i - 1])
            low, high = 0.5 * (before + low), 0.5 * (low + high)
        u[j] = low + (u[j] - i) * (high - low)


@_jit
def place_window(y, size, x, slope, regular, p, order, g, paper, gap, recency, t, a, b, bucket):
    """Algorithm 1: knots of one window into t (n + p + 1). See `reference._place`, which this follows.

    size: sum of |y|. slope: the order-th derivative of the series over the window's samples, or empty. a, b, bucket:
    work space of m, m and n + 1 numbers.
    """
    m, k_int = len(y), len(t) - 2 * (p + 1)
    start = 0.0 if regular else x[0]
    length = (m - 1.0) if regular else x[m - 1] - x[0]
    u = t[p + 1 : p + 1 + k_int]

    adaptive = False
    if order > 0:
        if len(slope) > 0:
            _cut_derivative(y, slope, order, a, b, t)
        else:
            differentiate(y, x, regular, order, a, b)
        bend = 0.0
        for i in range(m):
            bend += abs(a[i])
        adaptive = bend > max(ROUNDING * size, SMALLEST * m)
        if adaptive:
            scale = m / bend
            for i in range(m):
                a[i] = abs(a[i]) * scale + FEATURE_FLOOR
            _take_root(a, order, b)
    for i in range(p + 1):
        t[i] = start
        t[len(t) - 1 - i] = start + length
    if not adaptive and recency == 1.0 and regular:
        for j in range(k_int):
            u[j] = (j + 1) * (length / (k_int + 1))
    else:
        phi, F = a, b
        if adaptive and recency == 1.0 and regular:
            total = -0.5 * (phi[0] + phi[m - 1])
            for i in range(m):
                total += phi[i]
            _running_sum(phi, g * total / k_int, F)
        else:
            total = 0.0
            F[0] = 0.0
            for i in range(m - 1):
                mass = 0.5 * (phi[i] + phi[i + 1]) if adaptive else 1.0
                F[i + 1] = mass * (1.0 if regular else x[i + 1] - x[i])
                total += F[i + 1]
            cap = g * total / k_int if adaptive else np.inf
            rate = np.log(recency) / length
            for i in range(m - 1):
                middle = i + 0.5 if regular else 0.5 * (x[i] + x[i + 1]) - start
                F[i + 1] = F[i] + min(F[i + 1], cap) * np.exp(rate * middle)
        _quantiles(F, m, k_int, u, bucket)
        if paper:
            _to_positions(u, x, regular, adaptive, m)

    if not paper:
        end = 0.5 * (p + 1)
        top = (m - 1) - end - gap * (k_int - 1)
        high = -np.inf
        for j in range(k_int):
            high = max(high, u[j] - gap * j)
            a[j] = high
        low = np.inf
        for j in range(k_int - 1, -1, -1):
            low = min(low, u[j] - gap * j)
            u[j] = min(max(0.5 * (a[j] + low), end), top) + gap * j
        if not regular:
            long = LONG * length / (m - 1)
            for j in range(k_int):
                i = min(int(u[j]), m - 2)
                if x[i + 1] - x[i] > long:
                    u[j] = np.floor(u[j] + 0.5)
        _to_positions(u, x, regular, False, m)


# -------------------------------------------------------------------------------------------------- least squares


def power_sums(m: int, degree: int) -> np.ndarray:
    """Row c, column k: the sum of v^(2k) over c integers centred on 0 (half-integers where c is even), c <= m."""
    sums = np.zeros((m + 1, degree + 1))
    sums[1:2, 0] = 1.0
    for count in range(2, m + 1):
        sums[count] = sums[count - 2] + 2 * ((count - 1) / 2) ** (2 * np.arange(degree + 1))
    return sums


@_inline
def _raise_degree(p, q, t, j0, count, center, filled, A, carried):
    """Cox-de Boor from degree q - 1 to q: the a-th function's polynomial gives (R - v) / (R + L) of itself to the a-th
    of the next degree and (L + v) / (R + L) to the one after it (`carried`), R and L being the distances of the center
    from the knots on its right and left."""
    for r in range(q + 1):
        for j in range(count):
            carried[r, j] = 0.0
    for a in range(q):
        above, below = t[p + j0 + a + 1 :], t[p + j0 + a + 1 - q :]
        for j in range(count):
            right, left = above[j] - center[j], center[j] - below[j]
            inverse = filled[j] / (right + left + (1.0 - filled[j]))
            before = 0.0
            for r in range(q):
                term = A[a, r, j] * inverse
                A[a, r, j] = carried[r, j] + right * term - before
                carried[r, j] = left * term + before
                before = term
            A[a, q, j] = carried[q, j] - before
            carried[q, j] = before
    for r in range(q + 1):
        for j in range(count):
            A[q, r, j] = carried[r, j]


@_inline
def _pieces(p, t, j0, count, center, filled, A, carried):
    """Coefficients of the p + 1 basis functions on `count` spans: A[a, r, j] belongs to v^r, v = x - center[j]."""
    for j in range(count):
        A[0, 0, j] = 1.0
    _raise_degree(p, 1, t, j0, count, center, filled, A, carried)
    if p >= 2:
        _raise_degree(p, 2, t, j0, count, center, filled, A, carried)
    if p >= 3:
        _raise_degree(p, 3, t, j0, count, center, filled, A, carried)
    if p >= 4:
        _raise_degree(p, 4, t, j0, count, center, filled, A, carried)
    if p >= 5:
        _raise_degree(p, 5, t, j0, count, center, filled, A, carried)
    if p >= 6:
        _raise_degree(p, 6, t, j0, count, center, filled, A, carried)


@_jit
def _spans(p, regular, x, t, m, spans, j0, count, first, center, filled):
    """Which samples lie in spans j0 ... j0 + count - 1: first[j] up to first[j + 1] - 1; first[0] is given.
    filled[j] is 1, or 0 where there is no sample: such a span's pieces are multiplied by 0, not divided by a width."""
    for j in range(count):
        low, high = first[j], m
        if j0 + j + 1 < spans:
            if regular:
                high = int(np.ceil(t[p + j0 + j + 1]))
            else:
                high = low
                while x[high] < t[p + j0 + j + 1]:
                    high += 1
        first[j + 1] = high
        filled[j] = 1.0 if high > low else 0.0
        center[j] = 0.0
        if high > low:
            center[j] = 0.5 * (low + high - 1) if regular else 0.5 * (x[low] + x[high - 1])


@_inline
def _sample_moments(p, y, low, high, center, Y, j):
    """Y[r, j] = sum of y v^r over the samples low ... high - 1 of a regular grid, with v = x - center."""
    m0 = m1 = m2 = m3 = m4 = m5 = m6 = 0.0
    part, offset = y[low:high], low - center
    for i in range(len(part)):
        v, w = offset + i, part[i]
        m0 += w
        w *= v
        m1 += w
        if p >= 2:
            w *= v
            m2 += w
        if p >= 3:
            w *= v
            m3 += w
        if p >= 4:
            w *= v
            m4 += w
        if p >= 5:
            w *= v
            m5 += w
        if p >= 6:
            w *= v
            m6 += w
    Y[0, j], Y[1, j] = m0, m1
    if p >= 2:
        Y[2, j] = m2
    if p >= 3:
        Y[3, j] = m3
    if p >= 4:
        Y[4, j] = m4
    if p >= 5:
        Y[5, j] = m5
    if p >= 6:
        Y[6, j] = m6


@_jit
def _all_moments(p, y, x, low, high, center, S, Y, j):
    """S[k, j] = sum of v^k and Y[r, j] = sum of y v^r over the samples low ... high - 1, wherever they lie."""
    for k in range(2 * p + 1):
        S[k, j] = 0.0
    for r in range(p + 1):
        Y[r, j] = 0.0
    for i in range(low, high):
        power = 1.0
        for k in range(2 * p + 1):
            S[k, j] += power
            if k <= p:
                Y[k, j] += power * y[i]
            power *= x[i] - center


@_inline
def _assemble(p, regular, degree, y, x, t, n, sums, G, z, A, H, S, Y, carried, center, filled, first):
    """Gram matrix G[d, i] = <N_i, N_{i+d}> and right-hand side z[i] = <N_i, y>. t, and the rows of G and z, are at
    least SPANS longer than they have to be, for the empty spans at the end."""
    m, spans = len(y), n - p
    for i in range(n + p):
        z[i] = 0.0
    for d in range(p + 1):
        for i in range(n + p):
            G[d, i] = 0.0
    first[0] = 0
    for j0 in range(0, spans, SPANS):
        count = min(SPANS, (spans - j0 + STEP - 1) // STEP * STEP)
        _spans(degree, regular, x, t, m, spans, j0, count, first, center, filled)
        for j in range(count):
            if regular:
                for k in range(p + 1):
                    S[2 * k, j] = sums[first[j + 1] - first[j], k]
                _sample_moments(p, y, first[j], first[j + 1], center[j], Y, j)
            else:
                _all_moments(degree, y, x, first[j], first[j + 1], center[j], S, Y, j)
        first[0] = first[count]
        _pieces(p, t, j0, count, center, filled, A, carried)
        for a in range(p + 1):
            for s in range(p + 1):
                if not regular:
                    for j in range(count):
                        total = 0.0
                        for r in range(p + 1):
                            total += A[a, r, j] * S[r + s, j]
                        H[s, j] = total
                elif s % 2 == 0:
                    for j in range(count):
                        total = 0.0
                        for r in range(0, p + 1, 2):
                            total += A[a, r, j] * S[r + s, j]
                        H[s, j] = total
                else:
                    for j in range(count):
                        total = 0.0
                        for r in range(1, p + 1, 2):
                            total += A[a, r, j] * S[r + s, j]
                        H[s, j] = total
            for b in range(a, p + 1):
                row = G[b - a, j0 + a :]
                for j in range(count):
                    total = 0.0
                    for s in range(p + 1):
                        total += H[s, j] * A[b, s, j]
                    row[j] += total
            row = z[j0 + a :]
            for j in range(count):
                total = 0.0
                for r in range(p + 1):
                    total += Y[r, j] * A[a, r, j]
                row[j] += total


@_jit
def _factor(p, G, n, D):
    """G = L diag(1 / D[0]) L^T with L[i + d, i] = D[d, i] for d > 0, for G.shape[2] matrices side by side."""
    lanes = G.shape[2]
    for d in range(p + 1):
        for i in range(n + p):
            for k in range(lanes):
                D[d, i, k] = G[d, i, k]
    for i in range(n):
        for k in range(lanes):
            D[0, i, k] = 1.0 / D[0, i, k]
        for b in range(p, 0, -1):  # from the outermost band inwards: those with a < b are not yet divided
            for k in range(lanes):
                factor = D[b, i, k] * D[0, i, k]
                D[0, i + b, k] -= factor * D[b, i, k]
                D[b, i, k] = factor
            for a in range(1, b):
                for k in range(lanes):
                    D[b - a, i + a, k] -= D[b, i, k] * D[a, i, k]


@_jit
def _solve(p, D, n, z):
    """Overwrite the right-hand sides z (n + p, lanes), zero in the last p rows, with the solutions."""
    lanes = z.shape[1]
    for i in range(n):
        for a in range(1, p + 1):
            for k in range(lanes):
                z[i + a, k] -= D[a, i, k] * z[i, k]
    for back in range(n):
        i = n - 1 - back
        for k in range(lanes):
            z[i, k] *= D[0, i, k]
        for a in range(1, p + 1):
            for k in range(lanes):
                z[i, k] -= D[a, i, k] * z[i + a, k]


@_jit
def _squeeze_condition(p, G, D, n, exact):
    """The 2-norm condition number of G (one lane), squeezed between certain bounds by power iteration.

    G is totally positive, so G and |G^-1| = E G^-1 E, with E = diag(1, -1, 1, ...), have no negative entries, and
    |G^-1| has the eigenvalues of G^-1. For a matrix M without negative entries and a positive vector v, the ratios
    (M v)_i / v_i bound the largest eigenvalue from above (Collatz-Wielandt) and the Rayleigh quotient from below.
    Stops when the bounds fall on one side of MAX_CONDITION, and returns the one nearer to it; or, if `exact`, when they
    are within 1 % of each other.
    """
    v, image = np.zeros((2, n + p, 1)), np.zeros((n + p, 1))
    for i in range(n):
        v[0, i, 0] = v[1, i, 0] = 1.0
    below = above = 0.0
    for _ in range(2000):
        below = above = 1.0
        for side in range(2):  # 0: the largest eigenvalue of G, 1: of |G^-1|
            u = v[side]
            if side == 0:
                for i in range(n):
                    value = G[0, i, 0] * u[i, 0]
                    for d in range(1, p + 1):
                        value += G[d, i, 0] * u[i + d, 0]
                        if i >= d:
                            value += G[d, i - d, 0] * u[i - d, 0]
                    image[i, 0] = value
            else:
                for i in range(n + p):
                    image[i, 0] = u[i, 0] if i % 2 == 0 else -u[i, 0]
                _solve(p, D, n, image)
                for i in range(1, n, 2):
                    image[i, 0] = -image[i, 0]
            bound = product = square = 0.0
            for i in range(n):
                bound = max(bound, image[i, 0] / u[i, 0])
                product += image[i, 0] * u[i, 0]
                square += u[i, 0] * u[i, 0]
            for i in range(n):
                u[i, 0] = image[i, 0] / bound
            below *= product / square
            above *= bound
        if exact:
            if above < 1.01 * below:
                return below
        elif above <= MAX_CONDITION:
            return above
        elif below > MAX_CONDITION:
            return below
    return below


@_jit
def _look_closer(p, G, rhs, n, singular, exact, c):
    """One window whose cheap bound says that kappa may exceed MAX_CONDITION, or whose kappa is wanted to 1 %.
    Returns kappa; overwrites c with the ridge solution if kappa is too large."""
    one, D, z = np.zeros((p + 1, n + p, 1)), np.zeros((p + 1, n + p, 1)), np.zeros((n + p, 1))
    trace = 0.0
    for i in range(n):
        z[i, 0] = rhs[i]
        trace += G[0, i]
        for d in range(p + 1):
            one[d, i, 0] = G[d, i]
    kappa = np.inf
    if not singular:
        _factor(p, one, n, D)
        kappa = _squeeze_condition(p, one, D, n, exact)
    if not kappa <= MAX_CONDITION:
        for i in range(n):
            one[0, i, 0] += RIDGE * trace / n
        _factor(p, one, n, D)
        _solve(p, D, n, z)
        for i in range(n):
            c[i] = z[i, 0]
    return kappa


@_jit
def _solve_all(p, grams, rhs, n, count, exact, G, D, z, s, bounds, c, condition, fallback):
    """Coefficients, condition and fallback of `count` windows from their systems: grams (lanes, p + 1, .) and
    rhs (lanes, .). G, D, z, s, bounds are work space, with the lanes along the last axis."""
    lanes = G.shape[2]
    for d in range(p + 1):
        for i in range(n + p):
            for k in range(lanes):
                G[d, i, k] = grams[k, d, i]
    for i in range(n + p):
        for k in range(lanes):
            z[i, k] = rhs[k, i]
            s[i, k] = 0.0 if i >= n else 1.0 if i % 2 == 0 else -1.0
    _factor(p, G, n, D)
    _solve(p, D, n, z)
    _solve(p, D, n, s)

    # kappa is at least largest G_ii / least pivot, since 1 / pivot is a diagonal entry of the inverse of a leading
    # block, and at most the product of the infinity norms of G and G^-1; the row sums of |G^-1| are
    # |G^-1 (1, -1, 1, ...)|, because G is totally positive.
    largest, least, norm, inverse_norm, row = bounds[0], bounds[1], bounds[2], bounds[3], bounds[4]
    for k in range(lanes):
        largest[k] = norm[k] = inverse_norm[k] = 0.0
        least[k] = np.inf
    for i in range(n):
        for k in range(lanes):
            largest[k] = max(largest[k], G[0, i, k])
            least[k] = min(least[k], 1.0 / D[0, i, k])
            inverse_norm[k] = max(inverse_norm[k], abs(s[i, k]))
            row[k] = G[0, i, k]
        for d in range(1, p + 1):
            for k in range(lanes):
                row[k] += G[d, i, k]
        for d in range(1, min(p, i) + 1):
            for k in range(lanes):
                row[k] += G[d, i - d, k]
        for k in range(lanes):
            norm[k] = max(norm[k], row[k])
    for k in range(count):
        for i in range(n):
            c[k, i] = z[i, k]
        # A NaN among the coefficients (knots repeated more than p + 1 times) counts as singular too.
        singular = not (least[k] * MAX_CONDITION >= largest[k]) or np.isnan(c[k, 0])
        kappa = norm[k] * inverse_norm[k]
        if np.isnan(grams[k, 0, 0]):
            kappa = np.nan
        elif exact or singular or not kappa <= MAX_CONDITION:
            kappa = _look_closer(p, grams[k], rhs[k], n, singular, exact, c[k])
        condition[k] = kappa
        fallback[k] = kappa > MAX_CONDITION


@_jit
def _absolute_sum(y):
    total = 0.0
    for i in range(len(y)):
        total += abs(y[i])
    return total


@_jit
def _blank(t, G, z, n):
    """A window that cannot be fitted: knots and, by way of G, everything else NaN."""
    for i in range(len(t)):
        t[i] = np.nan
    for i in range(G.shape[1]):
        z[i] = 0.0
        for d in range(len(G)):
            G[d, i] = np.nan if d == 0 else 0.0


@cache
def kernel(p: int, regular: bool) -> Any:
    """The compiled loop over windows for degree p, on a regular grid or on any."""

    def run(series, starts, m, slope, x, place, order, g, paper, gap, recency, exact, sums, t, c, condition, fallback):
        """Windows of m samples of `series` from each of the B `starts`, at positions x (B, m), unused if `regular`;
        `slope` may hold the order-th derivative of the series. Places the knots into t (B, n + p + 1) or, if not
        `place`, takes them from there; then fits c (B, n), condition (B,), fallback (B,). A window that is not finite,
        or beyond LARGEST, gets the condition NaN."""
        n = c.shape[1]
        degree, grid = t.shape[1] - n - 1, sums.shape[0] > 0  # p and `regular`, but not as compile-time constants
        a, b, bucket = np.empty(m), np.empty(m), np.empty(n + 1, np.int64)
        A, S = np.empty((p + 1, p + 1, SPANS)), np.empty((2 * p + 1, SPANS))
        H, Y, carried = np.empty((p + 1, SPANS)), np.empty((p + 1, SPANS)), np.empty((p + 1, SPANS))
        center, filled, first = np.empty(SPANS), np.empty(SPANS), np.empty(SPANS + 1, np.int64)
        grams, rhs = np.zeros((LANES, p + 1, n + p + SPANS)), np.zeros((LANES, n + p + SPANS))
        knots = np.empty(n + p + 1 + SPANS)
        G, D, bounds = np.empty((p + 1, n + p, LANES)), np.empty((p + 1, n + p, LANES)), np.empty((5, LANES))
        z, s = np.empty((n + p, LANES)), np.empty((n + p, LANES))
        for k in range(LANES):
            for i in range(n):
                grams[k, 0, i] = 1.0  # lanes without a window hold the identity
        for w in range(0, len(starts), LANES):
            count = min(LANES, len(starts) - w)
            for k in range(count):
                start = starts[w + k]
                yw, dw = series[start : start + m], slope[start : start + m]
                tw, xw, gk, zk = t[w + k], x[0 if regular else w + k], grams[k], rhs[k]
                size = _absolute_sum(yw)
                if not size <= m * LARGEST:
                    # A NaN, an infinity, or too large: say so through the condition, and leave the rest alone.
                    _blank(tw, gk, zk, n)
                    continue
                if place:
                    place_window(yw, size, xw, dw, grid, degree, order, g, paper, gap, recency, tw, a, b, bucket)
                for i in range(n + p + 1):
                    knots[i] = tw[i]
                for i in range(n + p + 1, len(knots)):
                    knots[i] = tw[n + p]
                _assemble(
                    p, regular, degree, yw, xw, knots, n, sums, gk, zk, A, H, S, Y, carried, center, filled, first
                )
            _solve_all(degree, grams, rhs, n, count, exact, G, D, z, s, bounds, c[w:], condition[w:], fallback[w:])

    return _jit(run, f"run_{p}_{'regular' if regular else 'anywhere'}")


# ---------------------------------------------------------------------------------------------------- evaluation


@_jit
def _local_basis(t, p, n, x, N):
    """The p + 1 basis functions that live at x, into N; returns the index of the first. x is moved into the knots."""
    x = min(max(x, t[p]), t[n])
    low, high = p, n  # t[low] <= x < t[high], or x is the right end
    while high - low > 1:
        middle = (low + high) // 2
        if t[middle] <= x:
            low = middle
        else:
            high = middle
    while t[low] == t[low + 1] and low > p:
        low -= 1
    N[0] = 1.0
    for q in range(1, p + 1):
        carried = 0.0
        for a in range(q):
            right, left = t[low + a + 1] - x, x - t[low + a + 1 - q]
            term = N[a] / (right + left)
            N[a] = carried + right * term
            carried = left * term
        N[q] = carried
    return low - p


@_jit
def basis(t, p, x, out):
    """out (B, q, n), zero on entry: the basis functions of knots t (B, n + p + 1) at x (B, q)."""
    N = np.empty(p + 1)
    for b in range(len(t)):
        for i in range(x.shape[1]):
            first = _local_basis(t[b], p, out.shape[2], x[b, i], N)
            for a in range(p + 1):
                out[b, i, first + a] = N[a]


@_jit
def evaluate(t, c, x, p, out):
    """out (B, q) = the splines with knots t and coefficients c at x (B, q)."""
    N = np.empty(p + 1)
    for b in range(len(t)):
        for i in range(x.shape[1]):
            first = _local_basis(t[b], p, c.shape[1], x[b, i], N)
            value = 0.0
            for a in range(p + 1):
                value += c[b, first + a] * N[a]
            out[b, i] = value
