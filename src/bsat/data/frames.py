"""`Panel`, the series of a long frame on a regular grid; `to_panel` checks a frame and makes one."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from .columns import read_columns, read_ids, read_stamps, read_target
from .stamps import DAY, NANOSECONDS, WAYS, Rows, advance, check_freq, check_grid, fixed_step, infer_freq, places


@dataclass(frozen=True, eq=False, repr=False)
class Panel:
    """Series on a regular grid, one row each, laid end to end.

    A series with C target columns makes C neighbouring rows. Row r is ``values[offsets[r]:offsets[r + 1]]``, NaN where
    a sample is missing, and starts at ``first[r]``.
    """

    ids: list[Any]  # R
    channels: list[str] | None  # R column names; None if there is a single target column
    values: np.ndarray  # (offsets[-1],) float64
    offsets: np.ndarray  # (R + 1,) int64
    first: np.ndarray  # (R,) int64: UTC nanoseconds, or the integer stamp itself
    freq: str | int  # a pandas alias such as "15min", "D", "MS"; or the step of integer stamps
    tz: str | None
    unit: str  # what the stamps came in: a resolution of datetime64 ("D": dates), or an integer type

    def __len__(self) -> int:
        return len(self.ids)

    def __repr__(self) -> str:
        return f"Panel({len(self)} rows, {len(self.values)} samples, freq={self.freq!r}, tz={self.tz!r})"

    @property
    def lengths(self) -> np.ndarray:
        """(R,) the number of samples of each row."""
        return np.diff(self.offsets)

    @property
    def keys(self) -> list[Any]:
        """What tells the rows apart: ids, or pairs of id and channel."""
        return self.ids if self.channels is None else list(zip(self.ids, self.channels, strict=True))

    def stamps(self, row: int, start: int, count: int) -> Any:
        """The stamps of samples start, ..., start + count - 1 of a row, also past its end.

        A DatetimeIndex in the resolution and time zone that came in; a numpy array for integers and polars dates.
        """
        if start < 0:
            raise ValueError(f"`start` must be at least 0, a row's first sample; got {start}. Raise it.")
        return self._dress(advance(self.first[row], np.arange(start, start + count), self.freq, self.tz))

    def future(self, horizon: int) -> Any:
        """The stamps of the `horizon` steps after the end of every row, row after row: (R * horizon,)."""
        ahead = self.lengths[:, None] + np.arange(horizon)
        return self._dress(advance(self.first[:, None], ahead, self.freq, self.tz).ravel())

    def last(self) -> Any:
        """The stamp of every row's last sample: (R,)."""
        return self._dress(self.at(self.lengths - 1))

    def at(self, samples: np.ndarray) -> np.ndarray:
        """The stamp of sample samples[r] of every row r, as int64."""
        return advance(self.first, samples, self.freq, self.tz)

    def select(self, keep: np.ndarray) -> Panel:
        """Only the rows that a boolean array keeps."""
        rows = np.flatnonzero(keep)
        return replace(
            self,
            ids=[self.ids[r] for r in rows],
            channels=None if self.channels is None else [self.channels[r] for r in rows],
            values=_slices(self.values, self.offsets[rows], self.offsets[rows + 1]),
            offsets=_offsets(self.lengths[rows]),
            first=self.first[rows],
        )

    def cut(self, lengths: Any) -> Panel:
        """Every row cut to its first lengths[r] samples; one number serves all rows."""
        stops = np.broadcast_to(np.asarray(lengths), (len(self),))
        bad = (stops < 1) | (stops > self.lengths) | (stops != stops.astype(np.int64))
        if bad.any():
            got = f"{stops[bad][0]} for a row of {self.lengths[bad][0]} ({bad.sum()} in all)"
            raise ValueError(f"`lengths` must be whole numbers from 1 to the row's length; got {got}. Change them.")
        return self._keep(np.zeros_like(self.lengths), stops.astype(np.int64))

    def filled(self, edges: np.ndarray) -> Panel:
        """Without gaps: straight lines between the samples that are there.

        Edges (R, k) rise along each row; what lies before an edge is filled from what lies before it alone, so that no
        fold looks into the next.
        """
        values = self.values.copy()
        gappy = np.isnan(values)
        if not gappy.any():
            return self
        for row in np.unique(np.searchsorted(self.offsets, np.flatnonzero(gappy), side="right") - 1):
            for stop in edges[row]:
                y = values[self.offsets[row] : self.offsets[row] + stop]
                missing = np.isnan(y)
                if missing.any():
                    y[missing] = np.interp(np.flatnonzero(missing), np.flatnonzero(~missing), y[~missing])
        return replace(self, values=values)

    def tail(self, count: int) -> Panel:
        """The last `count` samples of every row; rows that are shorter stay whole."""
        if count < 1:
            raise ValueError(f"`count` must be at least 1; got {count}. Raise it.")
        return self._keep(np.maximum(self.lengths - count, 0), self.lengths)

    def _keep(self, starts: np.ndarray, stops: np.ndarray) -> Panel:
        if not starts.any() and (stops == self.lengths).all():
            return self
        return replace(
            self,
            values=_slices(self.values, self.offsets[:-1] + starts, self.offsets[:-1] + stops),
            offsets=_offsets(stops - starts),
            first=advance(self.first, starts, self.freq, self.tz),
        )

    def _dress(self, stamps: np.ndarray) -> Any:
        if self.unit not in NANOSECONDS:
            narrow = stamps.astype(self.unit)
            return narrow if (narrow == stamps).all() else stamps
        moments = (stamps // NANOSECONDS[self.unit]).view(f"M8[{self.unit}]")
        if self.unit == "D":
            return moments
        index = pd.DatetimeIndex(moments)
        return index if self.tz is None else index.tz_localize("UTC").tz_convert(self.tz)


def to_panel(
    df: Any,
    *,
    id_col: str | None = "unique_id",
    time_col: str = "ds",
    target_col: str | Sequence[str] = "y",
    freq: str | int | None = None,
    gaps: str = "error",
) -> Panel:
    """The series of a long frame on a regular grid, in the order of their first appearance.

    `id_col=None`: the frame is one series, named after its target ("y" if there are several). `freq=None`: the most
    common step, or months and business days where the stamps lie on them; a series with another step is an error, not
    a gap. Missing stamps and NaN are an error, or with `gaps="fit"` NaN, or with `gaps="fill"` interpolated linearly;
    both of these cut NaN off either end of a row. The frame is not changed, and the panel shares no memory with it.
    """
    if gaps not in ("error", "fit", "fill"):
        raise ValueError(f"`gaps` must be one of 'error', 'fit', 'fill'; got {gaps!r}. Choose one of them.")
    several = isinstance(target_col, (list, tuple))
    targets: list[str] = list(target_col) if several else [target_col]  # type: ignore[list-item]
    columns = read_columns(df, id_col, time_col, targets)
    stamps, unit, tz = read_stamps(columns[time_col], time_col)
    codes, names = (None, ["y" if several else target_col]) if id_col is None else read_ids(columns[id_col], id_col)
    rows, order = _sort(stamps, unit, tz, codes, names)

    given, freq = freq is not None, infer_freq(rows) if freq is None else check_freq(freq, rows.integer)
    place, step = places(rows, freq)
    steps = rows.steps(place, fill=step)
    regular = bool((steps == step).all())
    if not regular:
        check_grid(rows, place, step, steps, freq, gaps, given)
    del steps
    grid = _offsets(rows.spans(place, step))  # (S + 1,) where the series start on the grid
    begins = place[rows.offsets[:-1]]
    at = slice(None) if regular else (place - rows.each(begins)) // step + rows.each(grid[:-1])

    S, C = len(names), len(targets)
    values = np.full((C, grid[-1]), np.nan)
    starts, stops = np.empty((2, S, C), dtype=np.int64)
    for c, name in enumerate(targets):
        y = read_target(columns[name], name)
        y = y if order is None else y[order]
        _check_values(rows, y, name, gaps)
        values[c, at] = y
        starts[:, c], stops[:, c] = _trim(rows, values[c], grid, name)
    lengths, skipped = (stops - starts).ravel(), (starts - grid[:-1, None]).ravel()
    laid = np.arange(C) * grid[-1]  # where the channels start in the flat values
    whole = C == 1 and lengths.sum() == grid[-1]
    first = np.repeat(rows.stamps[rows.offsets[:-1]], C)
    panel = Panel(
        ids=[name for name in names for _ in range(C)],
        channels=targets * S if several else None,
        values=values[0] if whole else _slices(values.ravel(), (starts + laid).ravel(), (stops + laid).ravel()),
        offsets=_offsets(lengths),
        first=advance(first, skipped, freq, tz) if skipped.any() else first,
        freq=freq,
        tz=tz,
        # a grid that is finer than the stamps that came in needs a finer unit
        unit="ns" if not rows.integer and (fixed_step(freq, tz) or DAY) % NANOSECONDS[unit] else unit,
    )
    return panel.filled(panel.lengths[:, None]) if gaps == "fill" else panel


def _sort(
    stamps: np.ndarray, unit: str, tz: str | None, codes: np.ndarray | None, names: list[Any]
) -> tuple[Rows, np.ndarray | None]:
    """The rows in order, and the order if it is not that of the frame."""
    S, order = len(names), None
    offsets = _offsets(np.array([len(stamps)]) if codes is None else np.bincount(codes, minlength=S))
    if codes is not None and (codes[1:] < codes[:-1]).any():
        # 16 bits are sorted by radix, five times quicker
        order = np.argsort(codes.astype(np.uint16) if S < 2**16 else codes, kind="stable")
        stamps = stamps[order]
    rows = Rows(names, stamps, offsets, unit, tz)
    steps = rows.steps(stamps, fill=1)
    if (steps < 0).any():
        i = int((steps < 0).argmax())
        warnings.warn(
            f"stamps should be in order; series {rows.name(i)!r} has {rows.when(i + 1)} after {rows.when(i)}. "
            "The rows were sorted. Sort the frame to save the time.",
            UserWarning,
            stacklevel=stack_level(),
        )
        inside = np.lexsort((stamps, rows.each(np.arange(S, dtype=np.int32))))
        order = inside if order is None else order[inside]
        rows = replace(rows, stamps=stamps[inside])
        steps = rows.steps(rows.stamps, fill=1)
    if (steps == 0).any():
        i, count = int((steps == 0).argmax()), np.count_nonzero(steps == 0)
        raise ValueError(
            f"the stamps of a series must differ; series {rows.name(i)!r} has {rows.when(i)} twice ({count} duplicates "
            "in all). Drop or average them; if they belong to several series, tell these apart with id_col=."
        )
    return rows, order


def stack_level() -> int:
    """The first frame outside of the package: where the user called."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] == __name__.split(".")[0]:
        frame, level = frame.f_back, level + 1
    return level


def _check_values(rows: Rows, y: np.ndarray, name: str, gaps: str) -> None:
    if np.isfinite(y).all():
        return
    infinite = np.isinf(y)
    bad = infinite if infinite.any() else np.isnan(y)
    if bad is not infinite and gaps != "error":
        return
    i, count = int(bad.argmax()), np.count_nonzero(bad)
    way = "Replace it by a number or NaN." if bad is infinite else f"{WAYS} drop them at the ends."
    raise ValueError(
        f"column {name!r} must hold finite numbers; series {rows.name(i)!r} has {y[i]} at {rows.when(i)} "
        f"({count} in all). {way}"
    )


def _trim(rows: Rows, y: np.ndarray, grid: np.ndarray, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Where each series starts and stops without the NaN at its ends."""
    missing = np.isnan(y)
    if not missing.any():
        return grid[:-1], grid[1:]
    given = np.flatnonzero(~missing)
    edges = np.searchsorted(given, grid)
    low, high = edges[:-1], edges[1:]
    if (low == high).any():
        s = int((low == high).argmax())
        raise ValueError(
            f"a series must have a value; {name!r} of series {rows.names[s]!r} is NaN throughout. Drop it."
        )
    return given[low], given[high - 1] + 1


def _slices(values: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
    """values[starts[r]:stops[r]] for every r, end to end; a view if there is one."""
    if len(starts) == 1:
        return values[starts[0] : stops[0]]
    return np.concatenate([values[i:j] for i, j in zip(starts, stops, strict=True)])


def _offsets(lengths: np.ndarray) -> np.ndarray:
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets
