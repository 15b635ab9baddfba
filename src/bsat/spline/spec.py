"""What a spline backend is asked for, and what it answers.

Every backend (`reference`, `cpu`, `autograd`) offers the same four functions:

* ``place(y, spec, x=None) -> knots``
* ``basis(knots, degree, x) -> values of the basis functions``
* ``fit(y, knots, degree, x=None) -> SplineFit``
* ``evaluate(knots, coefficients, degree, x) -> curve``

and ``tokenize(y, spec, x=None)``, which is `place` followed by `fit`.

Shapes: B windows of m samples, n basis functions of degree p, n + p + 1 knots.
``y`` is (B, m). ``x`` holds the strictly increasing sample positions, (m,) or (B, m); None means 0, 1, ..., m - 1.
Inputs are assumed checked: validation happens once, at the door (`bsat.tokens`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

PLACEMENTS = ("safe", "paper")
FEATURES = ("curvature", "slope", "uniform")
DEGREES = range(1, 7)

MAX_CONDITION = 1e8
"""Above this condition number of the Gram matrix the fit falls back to ridge regression (paper, "Ridge Fallback")."""

RIDGE = 1e-6
"""The fallback adds ``RIDGE * trace(G) / n`` to the diagonal."""

FEATURE_FLOOR = 1e-6
"""Algorithm 1, line 5: eta = 1e-6 mean|y^(p)| keeps the feature positive on flat stretches, whatever the unit."""

ROUNDING = 4 * 2.0**-52
"""A window whose mean |y^(p)| is below ROUNDING * mean |y| has no measurable derivative: its knots are uniform."""


LARGEST = 1e150
"""Samples beyond this would overflow a float64 when they are multiplied."""


SMALLEST = 1e-290
"""A mean |y^(p)| below this is no measurable derivative either: its inverse would overflow."""


LONG = 4.0
"""An interval between samples is long if it exceeds LONG times the mean. The safe placement puts no knot inside one,
but on the nearer sample: a basis function that peaks where nothing was observed hangs on next to nothing."""


@dataclass(frozen=True, kw_only=True)
class SplineSpec:
    """All that shapes the knots and the fit of one window."""

    n: int
    degree: int
    clip_factor: float
    placement: str = "safe"
    feature: str = "curvature"
    recency: float = 1.0

    @property
    def interior(self) -> int:
        """k_int = k - 2 (p + 1), with k = n + p + 1 knots in all (Algorithm 1, line 8)."""
        return self.n - self.degree - 1

    def spacing(self, m: int) -> float:
        """The least distance of interior knots, in samples, under the safe placement in a window of m samples.

        1 + p / 8, or less (but at least 1) where n is so close to m that there is no room. At exactly 1 the fit can
        interpolate the samples, and its coefficients grow by orders of magnitude on signals that alternate from sample
        to sample; `benchmarks/hostile.py` has some.
        """
        wanted = 1 + self.degree / 8
        if self.interior < 2:
            return wanted
        return max(1.0, min(wanted, (m - 1 - (self.degree + 1)) / (self.interior - 1)))

    @property
    def order(self) -> int:
        """How often the samples are differentiated for the feature function; 0 for uniform knots."""
        return {"curvature": self.degree, "slope": 1, "uniform": 0}[self.feature]


class SplineFit(NamedTuple):
    """Arrays of the backend's kind: numpy, or torch on the device of the samples."""

    knots: Any
    """(B, n + p + 1), in the unit of ``x``"""
    coefficients: Any
    """(B, n)"""
    condition: Any
    """(B,) 2-norm condition number of the Gram matrix, or an upper bound of it that is at most MAX_CONDITION.
    NaN from `cpu` where a window is not finite"""
    fallback: Any
    """(B,) bool: the ridge answered, because the condition number exceeds MAX_CONDITION"""
