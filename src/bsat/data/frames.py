"""Long frames, pandas or polars, to series on a regular grid, and back to frames.

Inside, a stamp is an int64: UTC nanoseconds, or the integer itself. A frequency is *fixed* (so many nanoseconds or
integers) or *civil* (months, business days, days of a time zone with summer time). Civil stamps are numbered by their
place in one calendar, so that both kinds are checked and filled by the same arithmetic.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any, NoReturn

import numpy as np
import pandas as pd
from pandas.tseries.frequencies import to_offset

DAY = 86_400_000_000_000
NANOSECONDS = {"ns": 1, "us": 1_000, "ms": 1_000_000, "s": 1_000_000_000, "D": DAY}
LONGEST = 50  # how many times its rows a series' grid may be long: beyond, a stamp is a slip of the pen
WAYS = 'Pass gaps="fit" to keep them as missing, gaps="fill" to interpolate, or'


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

    def stamps(self, row: int, start: int, count: int) -> Any:
        """The stamps of samples start, ..., start + count - 1 of a row, also past its end.

        A DatetimeIndex in the resolution and time zone that came in; a numpy array for integers and polars dates.
        """
        if start < 0:
            raise ValueError(f"`start` must be at least 0, a row's first sample; got {start}. Raise it.")
        return self._dress(_advance(self.first[row], np.arange(start, start + count), self.freq, self.tz))

    def future(self, horizon: int) -> Any:
        """The stamps of the `horizon` steps after the end of every row, row after row: (R * horizon,)."""
        ahead = self.lengths[:, None] + np.arange(horizon)
        return self._dress(_advance(self.first[:, None], ahead, self.freq, self.tz).ravel())

    def last(self) -> Any:
        """The stamp of every row's last sample: (R,)."""
        return self._dress(self.at(self.lengths - 1))

    def at(self, samples: np.ndarray) -> np.ndarray:
        """The stamp of sample samples[r] of every row r, as int64."""
        return _advance(self.first, samples, self.freq, self.tz)

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
            first=_advance(self.first, starts, self.freq, self.tz),
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


def kind_of(df: Any) -> str:
    """Tell a "pandas" frame from a "polars" one, without importing polars; a TypeError for anything else."""
    if isinstance(df, pd.DataFrame):
        return "pandas"
    name = type(df).__name__
    if type(df).__module__.split(".")[0] == "polars":
        if name == "DataFrame":
            return "polars"
        way = "Call .collect() first." if name == "LazyFrame" else "Call .to_frame(), and add the columns it lacks."
    elif isinstance(df, pd.Series):
        way = "Call .reset_index(), and name the columns."
    else:
        way = "Make one, e.g. with pd.DataFrame or pd.read_csv."
    raise TypeError(f"the data must be a pandas or polars DataFrame; got {type(df).__module__}.{name}. {way}")


def make_frame(like: str, columns: Mapping[str, Any]) -> Any:
    """A frame of the kind that `kind_of` told, "pandas" or "polars", with the columns in the order given."""
    if like == "polars":
        import polars

        return polars.DataFrame(dict(columns))
    return pd.DataFrame(dict(columns))


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
    columns = _columns(df, id_col, time_col, targets)
    stamps, unit, tz = _read_stamps(columns[time_col], time_col)
    codes, names = (None, ["y" if several else target_col]) if id_col is None else _read_ids(columns[id_col], id_col)
    rows, order = _sort(stamps, unit, tz, codes, names)

    given, freq = freq is not None, _infer_freq(rows) if freq is None else _check_freq(freq, rows.integer)
    place, step = _places(rows, freq)
    steps = rows.steps(place, fill=step)
    regular = bool((steps == step).all())
    if not regular:
        _check_grid(rows, place, step, steps, freq, gaps, given)
    del steps
    begins = place[rows.offsets[:-1]]
    grid = _offsets((place[rows.offsets[1:] - 1] - begins) // step + 1)  # (S + 1,) where the series start on the grid
    at = slice(None) if regular else (place - rows.each(begins)) // step + rows.each(grid[:-1])

    S, C = len(names), len(targets)
    values = np.full((C, grid[-1]), np.nan)
    starts, stops = np.empty((2, S, C), dtype=np.int64)
    for c, name in enumerate(targets):
        y = _read_target(columns[name], name)
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
        first=_advance(first, skipped, freq, tz) if skipped.any() else first,
        freq=freq,
        tz=tz,
        # a grid that is finer than the stamps that came in needs a finer unit
        unit="ns" if not rows.integer and (_fixed_step(freq, tz) or DAY) % NANOSECONDS[unit] else unit,
    )
    return panel.filled(panel.lengths[:, None]) if gaps == "fill" else panel


# ---- reading columns -------------------------------------------------------------------------------------------------


def _columns(df: Any, id_col: str | None, time_col: str, targets: list[str]) -> dict[str, pd.Series]:
    """The columns asked for, polars ones as pandas columns over the same arrow memory."""
    kind = kind_of(df)
    have = list(df.columns)
    wanted = {"id_col": [] if id_col is None else [id_col], "time_col": [time_col], "target_col": targets}
    for parameter, names in wanted.items():
        for name in names:
            if name in have:
                continue
            way = f"Name the column with {parameter}=."
            if parameter == "id_col":
                way = f'{way[:-1]}, add it with df["{name}"] = "name", or pass id_col=None if the frame is one series.'
            if kind == "pandas" and (df.index.names != [None] or isinstance(df.index, pd.DatetimeIndex)):
                way += " Its index is not read: df.reset_index() makes columns of it."
            raise ValueError(f"the frame must have the column {name!r}; it has {have}. {way}")
    if len(set(have)) < len(have):
        twice = next(name for name in have if have.count(name) > 1)
        raise ValueError(f"column names must differ; {twice!r} appears {have.count(twice)} times. Rename or drop some.")
    asked = [name for names in wanted.values() for name in names]
    if not targets or len(set(asked)) < len(asked):
        raise ValueError(f"id, time and target must be different columns, one target at least; got {wanted}.")
    if len(df) == 0:
        raise ValueError("the frame must have at least one row; got none. Check the filter that made it.")
    arrow = {} if kind == "pandas" else {"use_pyarrow_extension_array": True}
    return {name: df[name].to_pandas(**arrow) if arrow else df[name] for name in asked}


def _read_ids(column: pd.Series, name: str) -> tuple[np.ndarray | None, list[Any]]:
    """A number for every row, in the order of first appearance, and the ids; no numbers if there is one id only."""
    array: Any = column.array
    first, last = array[0], array[-1]
    if all(pd.api.types.is_scalar(x) and not pd.isna(x) for x in (first, last)) and first == last:
        # a list's count goes by identity first, which makes it ten times quicker than comparing objects
        same = column.to_numpy().tolist().count(first) if column.dtype == object else (array == first).sum()
        if same == len(array):
            return None, [first.item() if isinstance(first, np.generic) else first]
    codes, uniques = pd.factorize(array)
    if codes.min() < 0:
        row = int(codes.argmin())
        raise ValueError(
            f"column {name!r} must name a series in every row; row {row} holds {array[row]!r}. Drop or name it."
        )
    if str(column.dtype).startswith("dictionary"):  # arrow numbers these by category
        codes, appeared = pd.factorize(codes)
        uniques = uniques[appeared]
    return codes, [u.item() if isinstance(u, np.generic) else u for u in uniques.tolist()]


def _read_target(column: pd.Series, name: str) -> np.ndarray:
    """Float64, NaN where a value is missing; perhaps the frame's own memory."""
    kind = column.dtype.kind
    if isinstance(column.dtype, np.dtype) and kind in "fiu":
        return column.to_numpy().astype(np.float64, copy=False)
    if pd.api.types.is_numeric_dtype(column.dtype) and kind not in "bc":
        return column.to_numpy(dtype=np.float64, na_value=np.nan)
    values, given = column.to_numpy(dtype=object), column.notna().to_numpy()
    numbers = (int, float, Decimal, np.integer, np.floating)
    bad = [i for i in np.flatnonzero(given) if not isinstance(values[i], numbers) or isinstance(values[i], bool)]
    if bad:
        row = bad[int(pd.to_numeric(pd.Series(values[bad]).astype(str), errors="coerce").isna().argmax())]
        raise TypeError(
            f"column {name!r} must hold numbers; row {row} holds {values[row]!r} (dtype {column.dtype}). "
            "Convert it, e.g. with pd.to_numeric, or choose another with target_col=."
        )
    y = np.full(len(values), np.nan)
    y[given] = values[given].astype(np.float64)
    return y


def _read_stamps(column: pd.Series, name: str) -> tuple[np.ndarray, str, str | None]:
    """The stamps as int64, their unit and their time zone."""
    is_integer, is_datetime = pd.api.types.is_integer_dtype, pd.api.types.is_datetime64_any_dtype
    arrow: Any = getattr(column.dtype, "pyarrow_dtype", None)
    dates = str(arrow) == "date32[day]"
    if not (dates or is_integer(column.dtype) or is_datetime(column.dtype)):
        column, arrow = _parse_stamps(column, name), None
    missing = np.asarray(column.array.isna())
    if missing.any():
        row = int(missing.argmax())
        raise ValueError(
            f"column {name!r} must hold a stamp in every row; row {row} holds {column.iloc[row]} ({missing.sum()} in "
            "all). Drop or mend those rows."
        )
    if is_integer(column.dtype):
        whole = column.to_numpy()
        return whole.astype(np.int64), whole.dtype.name, None
    if arrow is not None:  # by way of integers: pandas would make an object of every stamp
        unit, tz = ("D", None) if dates else (arrow.unit, arrow.tz)
        stamps = column.astype("int32[pyarrow]" if dates else "int64[pyarrow]").to_numpy().astype(np.int64)
    else:
        index = pd.DatetimeIndex(column.array)
        unit, tz, stamps = index.unit, None if index.tz is None else str(index.tz), index.asi8
    largest = np.iinfo(np.int64).max // NANOSECONDS[unit]
    if stamps.min() < -largest or stamps.max() > largest:
        span = f"{column.min()} to {column.max()}"
        raise ValueError(f"column {name!r} must stay between the years 1678 and 2262; got {span}. Mend or drop some.")
    if tz is not None:
        try:
            pd.Timestamp(0, tz=tz)
        except Exception as error:  # what is raised depends on the library behind the zone
            raise ValueError(f"column {name!r} must have a named time zone; got {tz}. Use .dt.tz_convert.") from error
    return stamps * NANOSECONDS[unit], unit, tz


def _parse_stamps(column: pd.Series, name: str) -> pd.Series:
    """Text, dates and datetime objects as datetime64, Python integers as integers."""
    column = column.astype(object)
    kind = pd.api.types.infer_dtype(column, skipna=True)
    if kind == "integer":
        return column.astype("Int64")
    if kind not in ("string", "date", "datetime", "datetime64", "empty"):
        way = ".dt.to_timestamp()" if kind == "period" else "pd.to_datetime or .astype(int)"
        raise TypeError(
            f"column {name!r} must hold datetimes, dates, text that pd.to_datetime reads, or whole numbers; "
            f"got {kind}, e.g. {column.iloc[0]!r}. Convert it with {way}."
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that text has no clear format: the errors below say more
        for form in ("ISO8601", None):  # the first also reads dates with and without hours beside one another
            try:
                return pd.to_datetime(column, format=form)
            except (ValueError, TypeError, OverflowError) as error:
                reason = error
        readable = pd.to_datetime(column, errors="coerce", utc=True).notna()
    bad = np.flatnonzero((column.notna() & ~readable).to_numpy())
    if len(bad):
        got = f"row {bad[0]} holds {column.iloc[bad[0]]!r} ({len(bad)} in all). Mend those rows."
    else:
        got = f"pandas says: {reason} Convert it with pd.to_datetime(..., utc=True)."
    raise ValueError(f"column {name!r} must hold stamps that pd.to_datetime reads; {got}") from reason


# ---- rows in order ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Rows:
    """The frame's rows, series after series and in order of time; N rows, S series."""

    names: list[Any]  # S
    stamps: np.ndarray  # (N,) int64
    offsets: np.ndarray  # (S + 1,)
    unit: str
    tz: str | None

    @property
    def integer(self) -> bool:
        return self.unit not in NANOSECONDS

    def each(self, a: np.ndarray) -> np.ndarray:
        """(S,) to (N,)."""
        return np.repeat(a, np.diff(self.offsets))

    def steps(self, place: np.ndarray, fill: int) -> np.ndarray:
        """(N - 1,) differences, with `fill` from one series to the next."""
        steps = np.diff(place)
        steps[self.offsets[1:-1] - 1] = fill
        return steps

    def name(self, i: int) -> Any:
        return self.names[int(np.searchsorted(self.offsets, i, side="right")) - 1]

    def when(self, i: int) -> str:
        if self.integer:
            return str(self.stamps[i])
        stamp = pd.Timestamp(self.stamps[i])
        return str(stamp if self.tz is None else stamp.tz_localize("UTC").tz_convert(self.tz))


def _sort(
    stamps: np.ndarray, unit: str, tz: str | None, codes: np.ndarray | None, names: list[Any]
) -> tuple[_Rows, np.ndarray | None]:
    """The rows in order, and the order if it is not that of the frame."""
    S, order = len(names), None
    offsets = _offsets(np.array([len(stamps)]) if codes is None else np.bincount(codes, minlength=S))
    if codes is not None and (codes[1:] < codes[:-1]).any():
        # 16 bits are sorted by radix, five times quicker
        order = np.argsort(codes.astype(np.uint16) if S < 2**16 else codes, kind="stable")
        stamps = stamps[order]
    rows = _Rows(names, stamps, offsets, unit, tz)
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


# ---- frequencies and grids -------------------------------------------------------------------------------------------


def _check_freq(freq: Any, integer: bool) -> str | int:
    """A frequency that the user gave, in pandas' spelling."""
    if integer or isinstance(freq, (int, np.integer)):
        if not integer or isinstance(freq, bool) or not isinstance(freq, (int, np.integer)) or freq < 1:
            kind = "a positive int for integer stamps" if integer else "an alias such as 'h' or 'MS' for datetimes"
            raise ValueError(f"`freq` must be {kind}; got {freq!r}. Change it, or leave it out.")
        return int(freq)
    try:
        offset = to_offset(to_offset(freq).freqstr)
        hours = (pd.offsets.BusinessHour, pd.offsets.CustomBusinessHour)
        if offset.n < 1 or isinstance(offset, hours):
            raise ValueError(f"{offset.freqstr} is not a positive step of days or of time")
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(
            f"`freq` must be an alias of pandas such as '15min', 'h', 'D', 'MS'; got {freq!r} ({error}). Change it."
        ) from error
    return str(offset.freqstr)


def _infer_freq(rows: _Rows) -> str | int:
    """The step of the stamps; of local days or months rather than of hours, where both fit."""
    if len(rows.stamps) == len(rows.names):
        raise ValueError(f"a series must have two rows to tell its frequency; {rows.names[0]!r} has one. Pass freq=.")
    step = _common_step(rows, rows.stamps)
    if rows.integer:
        return step
    fixed = _alias(step, rows.tz)
    if step < 23 * DAY // 24:
        return fixed
    day, clock = _split(rows.stamps, rows.tz)
    if step >= 28 * DAY:
        month = day.view("M8[D]").astype("M8[M]")
        for alias, edge in (("MS", month.astype("M8[D]")), ("ME", (month + 1).astype("M8[D]") - 1)):
            if (day.view("M8[D]") == edge).all():
                return str(to_offset(f"{_common_step(rows, month.view(np.int64))}{alias}").freqstr)
    wall = day * DAY + clock
    local = _common_step(rows, wall)
    steps = rows.steps(wall, fill=local)
    if local == DAY and ((day + 3) % 7 < 5).all() and (steps == 3 * DAY).any():
        return "B"  # never a Saturday or Sunday, and a Monday after a Friday
    days = str(to_offset(f"{local // DAY}D").freqstr) if local % DAY == 0 else fixed
    if not (steps % local).any():
        return days
    if not (rows.steps(rows.stamps, fill=step) % step).any():
        return fixed
    return _infer_calendar(rows, wall) or days


def _infer_calendar(rows: _Rows, wall: np.ndarray) -> str | None:
    """What pandas makes of stamps without any fixed step, such as the last business day of a month."""
    found = set()
    for i, j in zip(rows.offsets[:-1], rows.offsets[1:], strict=True):
        if j - i >= 3:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that it will return an offset, which is taken as well
                guess: Any = pd.infer_freq(pd.DatetimeIndex(wall[i:j].view("M8[ns]")))
            found.add(getattr(guess, "freqstr", guess))
            if None in found or len(found) > 1:
                return None
    return found.pop() if found else None


def _common_step(rows: _Rows, place: np.ndarray) -> int:
    """The most common step over all series, the smaller of two."""
    i = rows.offsets[(np.diff(rows.offsets) > 1).argmax()]
    guess = int(place[i + 1] - place[i])
    steps = rows.steps(place, fill=guess)
    if (steps == guess).all():
        return guess
    values, counts = np.unique(np.delete(steps, rows.offsets[1:-1] - 1), return_counts=True)
    return int(values[counts.argmax()])


def _alias(step: int, tz: str | None) -> str:
    """Nanoseconds in pandas' words; its "D" is a local day, so 24 h are one only where all days are as long."""
    whole_days = step % DAY == 0 and tz in (None, "UTC")
    return str(to_offset(f"{step // DAY}D" if whole_days else pd.Timedelta(step)).freqstr)


def _fixed_step(freq: str | int, tz: str | None) -> int | None:
    """The step as a number of int64 stamps; None for a civil frequency."""
    if not isinstance(freq, str):
        return freq
    offset: Any = to_offset(freq)
    if isinstance(offset, pd.offsets.Day):
        return offset.n * DAY if tz in (None, "UTC") else None
    return offset.nanos if isinstance(offset, pd.offsets.Tick) else None


def _split(stamps: np.ndarray, tz: str | None) -> tuple[np.ndarray, np.ndarray]:
    """Local days since 1970 and nanoseconds of the day."""
    if tz is None:
        return np.divmod(stamps, DAY)
    index = pd.DatetimeIndex(np.ravel(stamps).view("M8[ns]")).tz_localize("UTC").tz_convert(tz).tz_localize(None)
    day, clock = np.divmod(index.asi8.reshape(np.shape(stamps)), DAY)
    # some zones turn the clock at midnight: the day then starts at one, and that is its midnight
    return day, np.where(_join(day, np.zeros_like(clock), tz) == stamps, 0, clock)


def _join(day: np.ndarray, clock: np.ndarray, tz: str | None) -> np.ndarray:
    """The inverse of `_split`: of a local time that comes twice the first, for one that is left out the next."""
    wall = day * DAY + clock
    if tz is None:
        return wall
    index = pd.DatetimeIndex(wall.ravel().view("M8[ns]"))
    index = index.tz_localize(tz, ambiguous=np.ones(wall.size, dtype=bool), nonexistent="shift_forward")
    return index.asi8.reshape(wall.shape)


def _calendar(offset: Any, start: int, **span: Any) -> np.ndarray:
    """The days of a civil frequency since 1970, from the day `start`: up to the day `end`, or `periods` of them."""
    if "end" in span:
        span["end"] = pd.Timestamp(int(span["end"]) * DAY)
    dates: Any = pd.date_range(pd.Timestamp(int(start) * DAY), freq=offset.base, unit="ns", **span)
    return dates.asi8 // DAY


def _advance(first: Any, steps: np.ndarray, freq: str | int, tz: str | None) -> np.ndarray:
    """The stamps `steps` steps after `first`; both may be arrays that broadcast."""
    step = _fixed_step(freq, tz)
    if step is not None:
        return first + steps * step
    offset: Any = to_offset(str(freq))
    day, clock = _split(np.asarray(first), tz)
    ahead = steps * offset.n
    if isinstance(offset, pd.offsets.Day):
        return _join(day + ahead, clock, tz)
    place = np.searchsorted(_calendar(offset, day.min(), end=day.max()), day) + ahead
    return _join(_calendar(offset, day.min(), periods=int(place.max()) + 1)[place], clock, tz)


def _places(rows: _Rows, freq: str | int) -> tuple[np.ndarray, int]:
    """Numbers for the stamps that grow by `step` from one to the next, and that step."""
    step = _fixed_step(freq, rows.tz)
    if step is not None:
        return rows.stamps, step
    offset: Any = to_offset(str(freq))
    day, clock = _split(rows.stamps, rows.tz)
    place, off = day, clock != rows.each(clock[rows.offsets[:-1]])
    if not isinstance(offset, pd.offsets.Day):
        calendar = _calendar(offset, day.min(), end=day.max())
        if not len(calendar):
            _refuse_off_grid(rows, 0, freq)
        place = np.minimum(np.searchsorted(calendar, day), len(calendar) - 1)
        off |= calendar[place] != day
    if off.any():
        _refuse_off_grid(rows, int(off.argmax()), freq)
    return place, offset.n


def _refuse_off_grid(rows: _Rows, i: int, freq: str | int) -> NoReturn:
    before = f" after {rows.when(i - 1)}" if i not in rows.offsets else ""
    raise ValueError(
        f"stamps must lie on the grid of freq={freq!r}; series {rows.name(i)!r} has {rows.when(i)}{before}, off the "
        "grid. Pass another freq=, or resample the series."
    )


def _check_grid(
    rows: _Rows, place: np.ndarray, step: int, steps: np.ndarray, freq: str | int, gaps: str, given: bool
) -> None:
    """An error for mixed frequencies, for stamps off the grid, and for missing ones unless they may be."""
    if gaps == "error" or not given:  # a given frequency says onto which grid all series are to be put
        _check_mixed(rows, place, step, freq)
    off = steps % step != 0
    if off.any():
        _refuse_off_grid(rows, int(off.argmax()) + 1, freq)
    if gaps == "error":
        lacks = np.flatnonzero(steps != step)
        i, number = int(lacks[0]), steps[lacks] // step - 1
        count = len(np.unique(np.searchsorted(rows.offsets, lacks, side="right")))
        raise ValueError(
            f"stamps must follow one another by freq={freq!r}; series {rows.name(i)!r} lacks {number[0]} after "
            f"{rows.when(i)} ({number.sum()} in all, in {count} of {len(rows.names)} series). {WAYS} resample."
        )
    spans = (place[rows.offsets[1:] - 1] - place[rows.offsets[:-1]]) // step + 1
    far = spans > LONGEST * np.diff(rows.offsets)
    if far.any():
        s = int(far.argmax())
        i, j = rows.offsets[s : s + 2]
        jump = int(i + steps[i : j - 1].argmax())
        raise ValueError(
            f"the grid of a series must not be over {LONGEST} times as long as its rows; series {rows.names[s]!r} has "
            f"{j - i} rows but {spans[s]} steps of freq={freq!r}, with a jump from {rows.when(jump)} to "
            f"{rows.when(jump + 1)}. Mend that stamp, or pass a longer freq=."
        )


def _check_mixed(rows: _Rows, place: np.ndarray, step: int, freq: str | int) -> None:
    """A series none of whose steps is that of the grid has a frequency of its own, not gaps."""
    counts = np.diff(rows.offsets)
    long = np.flatnonzero(counts > 1)
    fits = np.add.reduceat(rows.steps(place, fill=0) == step, rows.offsets[long], dtype=np.int64)
    if not fits.any():
        return
    for s in long[(fits == 0) & (counts[long] > 2)]:
        values, numbers = np.unique(np.diff(place[rows.offsets[s] : rows.offsets[s + 1]]), return_counts=True)
        if values[0] < step and 2 * numbers.max() <= numbers.sum():
            continue  # it has no frequency at all
        own = int(values[numbers.argmax()])
        if isinstance(freq, str):
            fixed = _fixed_step(freq, rows.tz)
            other: Any = _alias(own, rows.tz) if fixed else to_offset(f"{own}{to_offset(freq).base.freqstr}").freqstr
        else:
            other = own
        finer = repr(freq if step < own else other)
        raise ValueError(
            f"all series must have one frequency; series {rows.names[int(long[fits.argmax()])]!r} has {freq!r} and "
            f'series {rows.names[s]!r} has {other!r}. Resample them, pass them apart, or pass freq={finer}, gaps="fit".'
        )


# ---- values ----------------------------------------------------------------------------------------------------------


def _check_values(rows: _Rows, y: np.ndarray, name: str, gaps: str) -> None:
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


def _trim(rows: _Rows, y: np.ndarray, grid: np.ndarray, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Where each series starts and stops without the NaN at its ends."""
    missing = np.isnan(y)
    if not missing.any():
        return grid[:-1], grid[1:]
    given = np.flatnonzero(~missing)
    low, high = np.searchsorted(given, grid)[:-1], np.searchsorted(given, grid)[1:]
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
