"""Windows of many series, found by index and cut out when asked for; none is ever stored."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from .folds import FOLDS, window_ranges
from .frames import stack_level

if TYPE_CHECKING:
    from .frames import Panel


FAR = 1e3
"""Deviations of its train fold: a row whose validation fold lies farther off says nothing of how others are learned."""

STILL = 1e-6
"""How far a constant row may lie off and still be constant."""

FARTHEST = 1e15
"""Deviations beyond which squares of single precision are no longer numbers."""


def fit_scaling(
    values: np.ndarray, offsets: np.ndarray, ends: np.ndarray, otherwise: float | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Mean and deviation (R,) of the first ends[r] samples of every row, its train fold; missing samples left out.

    A constant row, which has no deviation, takes `otherwise`, by default the median of the rows that have one; if there
    is none, the size of its mean; if that is 0, 1. In float64, with the mean taken out before the squares.
    """
    mean, spread = _measure(values, offsets, ends)
    return mean, _complete(mean, spread, otherwise)


def _complete(mean: np.ndarray, spread: np.ndarray, otherwise: float | None = None) -> np.ndarray:
    if otherwise is None and spread.any():
        otherwise = float(np.median(spread[spread > 0]))
    own = np.where(mean == 0, 1.0, np.abs(mean))
    return np.where(spread > 0, spread, own if otherwise is None else otherwise)


def _measure(values: np.ndarray, offsets: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and deviation, 0 where a row is constant."""
    mean, deviation = np.zeros(len(ends)), np.zeros(len(ends))
    for row, (start, count) in enumerate(zip(offsets[:-1], ends, strict=True)):
        part = values[start : start + count]
        part = part[~np.isnan(part)]
        if len(part) == 0:
            continue
        mean[row] = part.mean()
        spread = part.std()
        # Rounding leaves a constant row with a spread of its own.
        deviation[row] = spread if spread > 1e-12 * max(1e-300, float(np.abs(part).max())) else 0.0
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
        return self._only(torch.linspace(0, len(self) - 1, most, dtype=torch.float64).round().long())

    def of(self, rows: np.ndarray) -> Windows:
        """Those of the rows that a boolean array (R,) keeps."""
        return self if rows.all() else self._only(torch.from_numpy(rows)[self.rows.long().cpu()])

    def _only(self, keep: Tensor) -> Windows:
        keep = keep.to(self.starts.device)
        return Windows(self.series, self.starts[keep], self.rows[keep], self.lookback, self.horizon, self.gaps)


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

    Validation tells when to stop, and every row counts in units of its own train fold. A row that begins to move only
    then, or lies thousands of deviations off, would decide it alone, so it is left out of it, with a warning.

    Args:
        panel: one or more series.
        edges: (R, 4) of its folds, see `folds`.
        lookback: L
        horizon: H
        least: if samples are missing, how many a window must have.
        device: where the series goes.
    """
    mean, spread = _measure(panel.values, panel.offsets, edges[:, 1])
    deviation = _complete(mean, spread)
    scaled = panel.values - np.repeat(mean, panel.lengths)
    scaled /= np.repeat(deviation, panel.lengths)
    check_size(scaled, panel)
    steady = _largest(panel, edges, scaled) <= np.where(spread > 0, FAR, STILL)
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
            if least > 0 and window_ranges(edges, fold, lookback, horizon)[1].any():
                raise ValueError(
                    f"the {FOLDS[fold]} fold must hold at least one window with {least} observed samples or more among "
                    f"its lookback = {lookback}, one more than there are tokens; it has none. Use fewer tokens, a "
                    f"longer `lookback`, or a coarser `freq`."
                )
            raise ValueError(
                f"the {FOLDS[fold]} fold must hold at least one window of lookback + horizon = {lookback + horizon} "
                f"samples; the longest series has {int(panel.lengths.max())} samples and {longest} of them in that "
                f"fold. Shorten `lookback` or `horizon`, change `folds`, or bring more data."
            )
    if len(judges := val.of(steady)) and len(judges) < len(val):
        val = judges
        names = [panel.ids[row] for row in np.flatnonzero(~steady)]
        warnings.warn(
            f"left out of validation: {', '.join(map(repr, names[:3]))}{', ...' * (len(names) > 3)}, constant as long "
            f"as the train fold lasts, or {FAR:,.0f} of its deviations off later. Forecasts of them may be poor.",
            stacklevel=stack_level(),
        )
    return Split(train, val, test, mean, deviation)


def _largest(panel: Panel, edges: np.ndarray, scaled: np.ndarray) -> np.ndarray:
    """(R,) of every row's validation fold."""
    begin, end = panel.offsets[:-1] + edges[:, 1], panel.offsets[:-1] + edges[:, 2]
    return np.array([np.nanmax(np.abs(scaled[a:b]), initial=0.0) for a, b in zip(begin, end, strict=True)])


def check_size(scaled: np.ndarray, panel: Panel) -> None:
    """Refuse samples so far off that the network could not compute with them: fill values, most of the time."""
    if max(-np.nanmin(scaled, initial=0.0), np.nanmax(scaled, initial=0.0)) <= FARTHEST:
        return
    worst = int(np.nanargmax(np.abs(scaled)))
    row = int(np.searchsorted(panel.offsets, worst, side="right")) - 1
    stamp = panel.stamps(row, worst - int(panel.offsets[row]), 1)[0]
    raise ValueError(
        f"samples must lie within {FARTHEST:g} deviations of their series' train fold; {panel.ids[row]!r} has "
        f"{panel.values[worst]:g} at {stamp}. If it stands for a missing sample, make it NaN and pass gaps='fit' or "
        f"'fill'; else leave the series out."
    )
