"""Folds, and how many windows each of them holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

FOLDS = ("train", "val", "test")
SHARES = (0.6, 0.2, 0.2)
"""The paper's."""


def check_shares(shares: Any) -> tuple[float, float, float]:
    """Three shares of a series that add up to one; train and validation must not be empty."""
    way = "Pass e.g. (0.6, 0.2, 0.2), or (0.8, 0.2, 0) to keep no test fold."
    try:
        train, val, test = (float(s) for s in shares)
    except (TypeError, ValueError):
        raise TypeError(f"`folds` must be three numbers, train, validation and test; got {shares!r}. {way}") from None
    if not (train > 0 and val > 0 and test >= 0) or abs(train + val + test - 1) > 1e-6:
        raise ValueError(
            f"`folds` must be positive (the last may be 0) and add up to 1; got {(train, val, test)}, "
            f"which add up to {train + val + test:g}. {way}"
        )
    return train, val, test


def fold_edges(lengths: np.ndarray, shares: Sequence[float] = SHARES) -> np.ndarray:
    """(R,) lengths -> (R, 4) edges: fold k of row r runs from edge k to edge k + 1, in time.

    Train and validation are rounded to whole samples and the rest is test, which gives the splits of the paper's
    dataset table.
    """
    lengths = np.asarray(lengths, np.int64)
    train = np.rint(lengths * shares[0]).astype(np.int64)
    val = np.rint(lengths * shares[1]).astype(np.int64) if shares[2] > 0 else lengths - train
    return np.stack([np.zeros_like(train), train, np.minimum(train + val, lengths), lengths], 1)


def window_ranges(edges: np.ndarray, fold: int, lookback: int, horizon: int) -> tuple[np.ndarray, np.ndarray]:
    """For every row the first window's start in a fold, and how many windows there are, one sample apart.

    Lookback and horizon both lie inside the fold (DESIGN: windows), so a fold of m samples has m - L - H + 1. A
    validation or test fold too short for a single one takes its lookbacks from the samples before it, which are past
    by then, but never a horizon: m - H + 1 windows, or fewer at the very start of the series.
    """
    low, high = edges[:, fold], edges[:, fold + 1]
    first = low
    if fold > 0:
        short = high - low < lookback + horizon
        first = np.where(short, np.maximum(low - lookback, 0), low)
    count = np.maximum(high - first - lookback - horizon + 1, 0)
    return first, np.where(high > low, count, 0)
