"""Windows of many series, found by index and cut out when asked for; none is ever stored."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from .folds import FOLDS, window_ranges

if TYPE_CHECKING:
    from .frames import Panel


def fit_scaling(values: np.ndarray, offsets: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and deviation (R,) of the first ends[r] samples of every row, its train fold; missing samples left out.

    A constant row has deviation 1. In float64, with the mean taken out before the squares.
    """
    mean, deviation = np.zeros(len(ends)), np.ones(len(ends))
    for row, (start, count) in enumerate(zip(offsets[:-1], ends, strict=True)):
        part = values[start : start + count]
        part = part[~np.isnan(part)]
        if len(part) == 0:
            continue
        mean[row] = part.mean()
        spread = part.std()
        # Rounding leaves a constant row with a spread of its own.
        deviation[row] = spread if spread > 1e-12 * max(1e-300, float(np.abs(part).max())) else 1.0
    return mean, deviation


class Windows:
    """L samples of the past and H of the future of many series, one sample apart.

    Args:
        series: (sum of lengths,) scaled samples laid end to end, on the device of the model; NaN where missing.
        starts: (W,) where in `series` each window begins.
        rows: (W,) whose window it is.
        lookback: L
        horizon: H
        gaps: whether any sample is missing.
    """

    def __init__(self, series: Tensor, starts: Tensor, rows: Tensor, lookback: int, horizon: int, gaps: bool) -> None:
        self.series, self.starts, self.rows = series, starts, rows
        self.lookback, self.horizon, self.gaps = lookback, horizon, gaps
        self._past = torch.arange(lookback, device=series.device)
        self.ahead = torch.arange(lookback, lookback + horizon, device=series.device)

    def __len__(self) -> int:
        return len(self.starts)

    def past(self, index: Any) -> Tensor:
        """(B, L)"""
        return self.series[self.starts[index].unsqueeze(1) + self._past]

    def future(self, index: Any) -> Tensor:
        """(B, H)"""
        return self.series[self.starts[index].unsqueeze(1) + self.ahead]

    def some(self, most: int | None) -> Windows:
        """At most so many of them, spread evenly."""
        if most is None or len(self) <= most:
            return self
        keep = torch.linspace(0, len(self) - 1, most, dtype=torch.float64).round().long().to(self.starts.device)
        starts, rows = self.starts[keep], self.rows[keep]
        return Windows(self.series, starts, rows, self.lookback, self.horizon, self.gaps)


def make_windows(
    series: Tensor,
    offsets: np.ndarray,
    edges: np.ndarray,
    fold: int,
    *,
    lookback: int,
    horizon: int,
    least: int = 0,
) -> Windows:
    """All windows of a fold of every row.

    Args:
        series: see `Windows`.
        offsets: (R + 1,) where each row begins in `series`.
        edges: (R, 4) of its folds, see `folds`.
        fold: 0 train, 1 validation, 2 test.
        lookback: L
        horizon: H
        least: where samples are missing, windows with fewer observed ones in the past, or none in the future, are left
            out; 0 says that none is missing.
    """
    first, count = window_ranges(edges, fold, lookback, horizon)
    rows = np.repeat(np.arange(len(count), dtype=np.int32), count)
    within = np.arange(len(rows), dtype=np.int64) - np.repeat(np.cumsum(count) - count, count)
    starts = np.repeat(offsets[:-1] + first, count) + within
    if least > 0 and len(starts):
        seen = np.concatenate([[0], np.cumsum(~torch.isnan(series).cpu().numpy())])
        past = seen[starts + lookback] - seen[starts]
        future = seen[starts + lookback + horizon] - seen[starts + lookback]
        keep = (past >= least) & (future > 0)
        starts, rows = starts[keep], rows[keep]
    to = series.device
    return Windows(series, torch.from_numpy(starts).to(to), torch.from_numpy(rows).to(to), lookback, horizon, least > 0)


@dataclass(frozen=True, eq=False)
class Split:
    """The windows of the three folds of a panel, scaled by its train fold."""

    train: Windows
    val: Windows
    test: Windows
    mean: np.ndarray
    """(R,) float64"""
    deviation: np.ndarray


def split_windows(
    panel: Panel, edges: np.ndarray, *, lookback: int, horizon: int, least: int, device: torch.device | str
) -> Split:
    """Scale a panel, bring it to a device, and cut it. Train and validation must have windows; the test fold may not.

    Args:
        panel: one or more series.
        edges: (R, 4) of its folds, see `folds`.
        lookback: L
        horizon: H
        least: if samples are missing, how many a window must have.
        device: where the series goes.
    """
    mean, deviation = fit_scaling(panel.values, panel.offsets, edges[:, 1])
    scaled = panel.values - np.repeat(mean, panel.lengths)
    scaled /= np.repeat(deviation, panel.lengths)
    least = least if bool(np.isnan(scaled).any()) else 0
    series = torch.from_numpy(scaled.astype(np.float32)).to(device)
    del scaled
    train, val, test = (
        make_windows(series, panel.offsets, edges, fold, lookback=lookback, horizon=horizon, least=least)
        for fold in range(3)
    )
    for fold, found in enumerate((train, val)):
        if len(found) == 0:
            longest = int((edges[:, fold + 1] - edges[:, fold]).max())
            raise ValueError(
                f"the {FOLDS[fold]} fold must hold at least one window of lookback + horizon = {lookback + horizon} "
                f"samples; the longest series has {int(panel.lengths.max())} samples and {longest} of them in that "
                f"fold. Shorten `lookback` or `horizon`, change `folds`, or bring more data."
            )
    return Split(train, val, test, mean, deviation)
