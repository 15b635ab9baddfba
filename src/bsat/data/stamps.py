"""Stamps, their frequency, and the regular grid that they must lie on.

Inside, a stamp is an int64: UTC nanoseconds, or the integer itself. A frequency is *fixed* (so many nanoseconds or
integers) or *civil* (months, business days, days of a time zone with summer time). Civil stamps are numbered by their
place in one calendar, so that both kinds are checked and filled by the same arithmetic.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import pandas as pd
from pandas.tseries.frequencies import to_offset

DAY = 86_400_000_000_000
NANOSECONDS = {"ns": 1, "us": 1_000, "ms": 1_000_000, "s": 1_000_000_000, "D": DAY}
LONGEST = 50  # how many times its rows a series' grid may be long: beyond, a stamp is a slip of the pen
WAYS = 'Pass gaps="fit" to keep them as missing, gaps="fill" to interpolate, or'


@dataclass(frozen=True, eq=False)
class Rows:
    """The frame's rows, series after series and in order of time; N rows, S series."""

    names: list[Any]  # S
    stamps: np.ndarray  # (N,) int64
    offsets: np.ndarray  # (S + 1,)
    unit: str
    tz: str | None

    @property
    def integer(self) -> bool:
        """Whether the stamps are integers rather than moments."""
        return self.unit not in NANOSECONDS

    def each(self, a: np.ndarray) -> np.ndarray:
        """(S,) to (N,)."""
        return np.repeat(a, np.diff(self.offsets))

    def steps(self, place: np.ndarray, fill: int) -> np.ndarray:
        """(N - 1,) differences, with `fill` from one series to the next."""
        steps = np.diff(place)
        steps[self.offsets[1:-1] - 1] = fill
        return steps

    def spans(self, place: np.ndarray, step: int) -> np.ndarray:
        """(S,) how many points of the grid a series covers, from its first row to its last."""
        return (place[self.offsets[1:] - 1] - place[self.offsets[:-1]]) // step + 1

    def name(self, i: int) -> Any:
        """The series that row i belongs to."""
        return self.names[int(np.searchsorted(self.offsets, i, side="right")) - 1]

    def when(self, i: int) -> str:
        """The stamp of row i, for a message."""
        return str(self.stamps[i] if self.integer else pd.Timestamp(self.stamps[i], tz=self.tz))


# ---- frequencies -----------------------------------------------------------------------------------------------------


def check_freq(freq: Any, integer: bool) -> str | int:
    """A frequency that the user gave, in pandas' spelling."""
    if integer or isinstance(freq, (int, np.integer)):
        if not integer or isinstance(freq, bool) or not isinstance(freq, (int, np.integer)) or freq < 1:
            kind = "a positive int for integer stamps" if integer else "an alias such as 'h' or 'MS' for datetimes"
            raise ValueError(f"`freq` must be {kind}; got {freq!r}. Change it, or leave it out.")
        return int(freq)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of old aliases, which get their new spelling
            offset = to_offset(to_offset(freq).freqstr)
        hours = (pd.offsets.BusinessHour, pd.offsets.CustomBusinessHour)
        if offset.n < 1 or isinstance(offset, hours):
            raise ValueError(f"{offset.freqstr} is not a positive step of days or of time")
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(
            f"`freq` must be an alias of pandas such as '15min', 'h', 'D', 'MS'; got {freq!r} ({error}). Change it."
        ) from error
    return str(offset.freqstr)


def infer_freq(rows: Rows) -> str | int:
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


def _infer_calendar(rows: Rows, wall: np.ndarray) -> str | None:
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


def _common_step(rows: Rows, place: np.ndarray) -> int:
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
    if step % DAY:
        return str(to_offset(pd.Timedelta(step)).freqstr)
    return str(to_offset(f"{step // DAY}D" if tz in (None, "UTC") else f"{step // DAY * 24}h").freqstr)


def fixed_step(freq: str | int, tz: str | None) -> int | None:
    """The step as a number of int64 stamps; None for a civil frequency."""
    if not isinstance(freq, str):
        return freq
    offset: Any = to_offset(freq)
    if isinstance(offset, pd.offsets.Day):
        return offset.n * DAY if tz in (None, "UTC") else None
    return offset.nanos if isinstance(offset, pd.offsets.Tick) else None


# ---- stamps and calendars --------------------------------------------------------------------------------------------


def advance(first: Any, steps: np.ndarray, freq: str | int, tz: str | None) -> np.ndarray:
    """The stamps `steps` steps after `first`; both may be arrays that broadcast."""
    step = fixed_step(freq, tz)
    if step is not None:
        return first + steps * step
    offset: Any = to_offset(str(freq))
    day, clock = _split(np.asarray(first), tz)
    ahead = steps * offset.n
    if isinstance(offset, pd.offsets.Day):
        return _join(day + ahead, clock, tz)
    place = np.searchsorted(_calendar(offset, day.min(), end=day.max()), day) + ahead
    return _join(_calendar(offset, day.min(), periods=int(place.max()) + 1)[place], clock, tz)


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


# ---- the grid --------------------------------------------------------------------------------------------------------


def places(rows: Rows, freq: str | int) -> tuple[np.ndarray, int]:
    """Numbers for the stamps that grow by `step` from one to the next, and that step."""
    step = fixed_step(freq, rows.tz)
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


def check_grid(
    rows: Rows, place: np.ndarray, step: int, steps: np.ndarray, freq: str | int, gaps: str, given: bool
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
    spans = rows.spans(place, step)
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


def _check_mixed(rows: Rows, place: np.ndarray, step: int, freq: str | int) -> None:
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
            fixed = fixed_step(freq, rows.tz)
            other: Any = _alias(own, rows.tz) if fixed else to_offset(f"{own}{to_offset(freq).base.freqstr}").freqstr
        else:
            other = own
        finer = repr(freq if step < own else other)
        raise ValueError(
            f"all series must have one frequency; series {rows.names[int(long[fits.argmax()])]!r} has {freq!r} and "
            f'series {rows.names[s]!r} has {other!r}. Resample them, pass them apart, or pass freq={finer}, gaps="fit".'
        )


def _refuse_off_grid(rows: Rows, i: int, freq: str | int) -> NoReturn:
    before, way = "", "Pass another freq=, or resample the series."
    if i not in rows.offsets:
        before, moved = f" after {rows.when(i - 1)}", int(rows.stamps[i] - rows.stamps[i - 1]) % DAY
        if rows.tz == "UTC" and moved in (DAY // 24, DAY - DAY // 24) and (fixed_step(freq, "UTC") or DAY) % DAY == 0:
            way = (
                "If these were local days with the offsets of summer and winter time, give them their zone with "
                'pd.to_datetime(..., utc=True).dt.tz_convert("Europe/Berlin"), or drop the offsets.'
            )
    raise ValueError(
        f"stamps must lie on the grid of freq={freq!r}; series {rows.name(i)!r} has {rows.when(i)}{before}, off the "
        f"grid. {way}"
    )
