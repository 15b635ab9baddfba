"""The columns of a pandas or polars frame, read into arrays; and frames made of columns."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

import numpy as np
import pandas as pd

from .stamps import NANOSECONDS

DATE_NUMBERS = {
    "%Y%m%d": (19000101, 21001231), "%Y%m": (190001, 210012), "%Y%m%d%H": (1900010100, 2100123123),
}  # fmt: skip
CLOCK = re.compile(r"(T|,? +)\d{1,2}:\d\d(:\d\d)?(\.\d+)?(?:( ?)[AaPp][Mm])?(?:( ?)(Z|UTC|[+-]\d\d:?\d\d))?$")
ORDERS = {
    "nnY": ("mdY", "dmY"), "nnn": ("mdy", "dmy", "ymd"), "Ynn": ("Ymd",), "nY": ("mY",),
    "nbY": ("dbY", "dBY"), "nbn": ("dby", "dBy"), "bnY": ("bdY", "BdY"),
    "bY": ("bY", "BY"), "Yb": ("Yb", "YB"), "bn": ("by", "By"),
}  # fmt: skip
"""What the words of a date may be, as strptime calls them; n is a number, Y a year of four digits, b a month's name."""


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


def read_columns(df: Any, id_col: str | None, time_col: str, targets: list[str]) -> dict[str, pd.Series]:
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
    if kind == "pandas":
        return {name: df[name] for name in asked}
    return {name: df[name].to_pandas(use_pyarrow_extension_array=True) for name in asked}


def read_ids(column: pd.Series, name: str) -> tuple[np.ndarray | None, list[Any]]:
    """A number for every row, in the order of first appearance, and the ids; no numbers if there is one id only."""
    array: Any = column.array
    first, last = array[0], array[-1]
    if all(pd.api.types.is_scalar(x) and not pd.isna(x) for x in (first, last)) and first == last:
        if column.dtype == object:  # a list's count goes by identity first: ten times quicker than comparing objects
            same = column.to_numpy().tolist().count(first)
        else:  # a missing id is neither the same nor another
            same = 0 if array.isna().any() else int(np.count_nonzero(np.asarray(array == first)))
        if same == len(array):
            return None, [first.item() if isinstance(first, np.generic) else first]
    codes, uniques = array.factorize()
    if codes.min() < 0:
        row = int(codes.argmin())
        raise ValueError(
            f"column {name!r} must name a series in every row; row {row} holds {array[row]!r}. Drop or name it."
        )
    if str(column.dtype).startswith("dictionary"):  # arrow numbers these by category
        codes, appeared = pd.factorize(codes)
        uniques = uniques[appeared]
    return codes, [u.item() if isinstance(u, np.generic) else u for u in uniques.tolist()]


def read_target(column: pd.Series, name: str) -> np.ndarray:
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


def read_stamps(column: pd.Series, name: str) -> tuple[np.ndarray, str, str | None]:
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
        if (format := date_format(column)) is not None:
            raise ValueError(
                f"column {name!r} must hold stamps; its whole numbers look like dates, such as {column.iloc[0]}. "
                f'Convert it with pd.to_datetime(df[{name!r}], format="{format}"), or count from 0 if they are none.'
            )
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
    text = str(column.dropna().iloc[0]) if kind == "string" else ""
    formats = _formats(text)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of years that come first where days might
        # where each text is read by itself, 01/02/24 is in January and 13/02/24 in February
        warnings.filterwarnings("error", "Could not infer format", UserWarning)
        warnings.simplefilter("error", FutureWarning)  # of mixed time zones, an error since pandas 3
        stamps = _attempt(column, format="ISO8601")  # also dates with and without hours beside one another
        if stamps is None and (readings := _readings(column, formats)):
            return _choose(readings, column, name)
        # The last reads local times whose offset changes with summer time, which become UTC.
        for how in ({}, {"dayfirst": True}, {"format": "ISO8601", "utc": True}):
            stamps = _attempt(column, **how) if stamps is None else stamps
        if stamps is None and re.fullmatch(r"\d{4}-?[Qq][1-4]", text):
            months = column.str.replace(r"-?[Qq]([1-4])$", lambda m: f"-{3 * int(m[1]) - 2}", regex=True)
            stamps = _attempt(months, format="%Y-%m")
        if stamps is not None:
            return stamps
        warnings.simplefilter("ignore")
        tried: list[str | None] = [format for format in formats if not format.startswith("%y")] or [*formats] or [None]
        read = max((pd.to_datetime(column, format=f, errors="coerce", utc=True).notna() for f in tried), key=sum)
    bad = np.flatnonzero((column.notna() & ~read).to_numpy())
    if len(bad):
        got = f"row {bad[0]} holds {column.iloc[bad[0]]!r} ({len(bad)} in all). Mend those rows."
    else:
        way = "Convert it with pd.to_datetime(..., format=...), and utc=True where the offset changes."
        got = f"no one format fits all rows; the first is {text!r}. {way}"
    raise ValueError(f"column {name!r} must hold stamps that pd.to_datetime reads; {got}")


def _formats(text: str) -> list[str]:
    """The formats that a text such as "31/12/24 11:30 PM" may be written in: month, day, or year first."""
    clock = CLOCK.search(text)
    words = re.split(r"([-/., ]+)", text[: clock.start()] if clock else text)  # with what stands between them
    kinds = {r"\d{4}": "Y", r"\d\d?": "n", r"[A-Za-z]{3,}": "b"}
    shape = ["".join(kind for rule, kind in kinds.items() if re.fullmatch(rule, word)) or "?" for word in words[::2]]
    end = ""
    if clock:
        gap, seconds, fraction, half, before, zone = clock.groups()
        end = gap + ("%H:%M" if half is None else "%I:%M") + (":%S" if seconds else "") + (".%f" if fraction else "")
        end += "" if half is None else f"{half}%p"
        end += "" if zone is None else f"{before}%{'Z' if zone == 'UTC' else 'z'}"
    between = [*words[1::2], end]
    orders = ("ymd",) if shape == ["n"] * 3 and int(words[0]) > 31 else ORDERS.get("".join(shape), ())
    return ["".join(f"%{letter}{gap}" for letter, gap in zip(order, between, strict=True)) for order in orders]


def _attempt(column: pd.Series, **how: Any) -> pd.Series | None:
    try:
        return pd.to_datetime(column, **how)
    except (ValueError, TypeError, OverflowError, FutureWarning, UserWarning):
        return None


def _readings(column: pd.Series, formats: list[str]) -> dict[str, tuple[int, pd.Series]]:
    """What the whole column is in each format that fits it, and its breaks."""
    tried = {format: _attempt(column, format=format) for format in formats}
    found = {format: (_breaks(stamps), stamps) for format, stamps in tried.items() if stamps is not None}
    years = [breaks for format, (breaks, _) in found.items() if format.startswith("%y")]
    if len(found) == 1 < len(formats) and any(years):
        return {}  # a day that does not exist, 30/02/24, is no year either
    return found


def _breaks(stamps: pd.Series) -> int:
    """How many steps are not the most common one; in months, where there is one day of each."""
    index = pd.DatetimeIndex(stamps.dropna().unique()).sort_values()
    if len(index) < 2:
        return 0
    count = len(index) - 1 - int(np.unique(np.diff(index.asi8), return_counts=True)[1].max())
    months = np.diff(np.asarray(index.year) * 12 + np.asarray(index.month))
    ends = index.is_month_end.all()
    if count and months.all() and (ends or (index.day == index.day[0]).all()):
        odd = not (ends or index.is_month_start.all())  # rarely is a month's fifth day meant
        count = min(count, len(months) - int(np.unique(months, return_counts=True)[1].max()) + odd)
    return count


def _choose(readings: dict[str, tuple[int, pd.Series]], column: pd.Series, name: str) -> pd.Series:
    """The reading with the fewest breaks; an error where two have as few."""
    least = min(breaks for breaks, _ in readings.values())
    likely = [format for format, (breaks, _) in readings.items() if breaks == least]
    stamps = readings[likely[0]][1]
    for other in likely[1:]:
        differ = (stamps != readings[other][1]) & column.notna()
        if differ.any():
            row = int(differ.to_numpy().argmax())
            raise ValueError(
                f"column {name!r} must hold stamps that can be read in one way only; row {row} holds "
                f"{column.iloc[row]!r}, which is {stamps.iloc[row]} by {likely[0]} and {readings[other][1].iloc[row]} "
                f"by {other}. Convert it first, e.g. with pd.to_datetime(df[{name!r}], format={other!r}), or write "
                "2024-12-31."
            )
    return stamps


def date_format(column: pd.Series) -> str | None:
    """The format of whole numbers that are dates, such as 20240131, 202401 (a month) or 2024013123 (an hour)."""
    if not pd.api.types.is_integer_dtype(column.dtype):
        return None
    for format, (first, last) in DATE_NUMBERS.items():
        if column.between(first, last).all():
            stamps = pd.to_datetime(column.astype(str), format=format, errors="coerce")
            return format if stamps.notna().all() else None
    return None
