"""How hard a series is for splines: the three figures of the paper's dataset analysis."""

from __future__ import annotations

import math

import numpy as np


def total_variation(series: np.ndarray) -> float:
    """sum |x_{i+1} - x_i|"""
    return float(np.abs(np.diff(series)).sum())


def curvature_norm(series: np.ndarray) -> float:
    """The L2 norm of the second differences."""
    return float(np.linalg.norm(np.diff(series, 2)))


def permutation_entropy(series: np.ndarray, order: int = 3) -> float:
    """The entropy of the ordinal patterns of `order` neighbours, 0 to 1 (Bandt and Pompe, 2002; delay 1).

    Equal values count in the order in which they stand. The paper does not give the order; 3 reproduces its 0.51 for
    solar power.
    """
    patterns = np.argsort(np.lib.stride_tricks.sliding_window_view(series, order), axis=1, kind="stable")
    counts = np.unique(patterns @ order ** np.arange(order), return_counts=True)[1]
    share = counts / counts.sum()
    return float(-(share * np.log(share)).sum() / math.log(math.factorial(order))) + 0.0
