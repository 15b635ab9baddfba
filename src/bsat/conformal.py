"""Intervals around forecasts by split-conformal prediction (Papadopoulos et al., 2002; Lei et al., 2018).

The scores are the absolute errors on validation windows, each divided by the deviation of its own window (the
locally-weighted variant of Lei et al.), for every step ahead. Dividing makes intervals breathe with the season: a
series that has become calmer gets narrower ones. Windows overlap, so the guarantee for exchangeable data is only
approximate; `benchmarks/intervals.py` measures what comes out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

MOST = 1000
"""Validation windows that are kept, spread evenly: neighbours tell the same, and files stay small."""


FLOOR = 0.1
"""In deviations of the train fold."""


def check_levels(level: Any) -> list[float]:
    """Percentages from 1 to less than 100, without repetition."""
    number = isinstance(level, (int, float, np.integer, np.floating)) and not isinstance(level, bool)
    levels = [level] if number else level
    if isinstance(levels, (str, bytes)) or not isinstance(levels, Iterable):
        raise TypeError(f"`level` must be a list of percentages; got {level!r}. Pass e.g. [80, 95].")
    levels = list(levels)
    for one in levels:
        if isinstance(one, bool) or not isinstance(one, (int, float, np.integer, np.floating)):
            raise TypeError(f"`level` must hold percentages; got {one!r}. Pass e.g. [80, 95].")
        if not 1 <= one < 100:
            raise ValueError(f"`level` must be percentages from 1 to less than 100; got {one}. Pass e.g. [80, 95].")
    return sorted({float(one) for one in levels})


def local_deviation(windows: np.ndarray) -> np.ndarray:
    """The deviation (B,) of each scaled window's observed samples, and a tenth of the series' own at least.

    Without that floor a machine that was off and is switched on would be off by thousands of its window's deviations,
    and the intervals of every other window would pay for it.
    """
    return np.sqrt(np.nanvar(windows, axis=1) + FLOOR**2)


def sorted_scores(errors: np.ndarray, deviation: np.ndarray) -> np.ndarray:
    """Absolute errors (W, H), NaN where there is no truth, and deviations (W,), to scores (K, H), each step's sorted.

    A step with fewer truths than others repeats its largest score, which makes its intervals wider, not narrower.
    """
    scores = np.sort(np.abs(errors) / deviation[:, None], axis=0)  # NaN goes last
    largest = np.nanmax(np.where(np.isnan(scores), -np.inf, scores), axis=0)
    return np.where(np.isnan(scores), np.where(np.isfinite(largest), largest, np.nanmax(largest)), scores)


def rank(K: int, level: float) -> int:
    """Which of K sorted scores bounds a level; beyond K if there are too few."""
    return math.ceil((K + 1) * level / 100 - 1e-9)


def half_widths(scores: np.ndarray, levels: Sequence[float]) -> np.ndarray:
    """Sorted scores (K, H) and levels (V,) to half widths (V, H), in deviations of the window.

    The ceil((K + 1) level)-th smallest of K scores, which covers at least `level` of exchangeable truths.
    """
    K = len(scores)
    ranks = [rank(K, level) for level in levels]
    if ranks and max(ranks) > K:
        worst = max(levels)
        least = math.ceil(worst / (100 - worst) - 1e-6)
        enough = ", or give `fit` more data, or more `epoch_windows`."
        way = "Lower the level" + (enough if least <= MOST else f": of {MOST:,} that are kept, no more can be told.")
        raise ValueError(
            f"`level` must leave room above it: {worst:g} % needs {least} validation windows or more, and there are "
            f"{K}. {way}"
        )
    return scores[np.array(ranks, int) - 1]
