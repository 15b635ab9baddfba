"""The paper's search for the clip factor g (section "Adaptive Clip-Factor")."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..spline import SplineSpec

GRID = np.round(np.arange(10, 126) / 100, 2)
"""0.10 to 1.25 in steps of 0.01"""


def search_clip_factor(windows: np.ndarray, spec: SplineSpec) -> tuple[float, np.ndarray]:
    """g* = argmin over the grid of the largest RMSE over the windows (R, L), and that RMSE for every g of GRID.

    The splines have degree 1, as in the paper, which does not say how many basis functions: we take the tokenizer's n.
    Ties go to the smaller g.
    """
    from ..spline import cpu

    at = np.arange(windows.shape[1], dtype=np.float64)
    worst = np.empty(len(GRID))
    for i, g in enumerate(GRID):
        fit = cpu.tokenize(windows, replace(spec, degree=1, clip_factor=float(g)))
        residual = cpu.evaluate(fit.knots, fit.coefficients, 1, at) - windows
        worst[i] = np.sqrt((residual**2).mean(1)).max()
    return float(GRID[worst.argmin()]), worst
