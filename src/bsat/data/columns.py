"""The columns of a pandas or polars frame, read into arrays; and frames made of columns."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

import numpy as np
import pandas as pd

from .stamps import NANOSECONDS


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
        if is_date_number(column):
            raise ValueError(
                f"column {name!r} must hold stamps; its whole numbers look like dates, such as {column.iloc[0]}. "
                f'Convert it with pd.to_datetime(df[{name!r}], format="%Y%m%d"), or count from 0 if they are none.'
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
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that text has no clear format: the errors below say more
        warnings.simplefilter("error", FutureWarning)  # of mixed time zones, an error since pandas 3
        # The first also reads dates with and without hours beside one another, the third 31/12/2024, and the last local
        # times whose offset changes with summer time, which become UTC.
        for how in ({"format": "ISO8601"}, {}, {"dayfirst": True}, {"format": "ISO8601", "utc": True}):
            try:
                return pd.to_datetime(column, **how)
            except (ValueError, TypeError, OverflowError, FutureWarning) as error:
                reason = error
        readable = pd.to_datetime(column, errors="coerce", utc=True).notna()
    bad = np.flatnonzero((column.notna() & ~readable).to_numpy())
    if len(bad):
        got = f"row {bad[0]} holds {column.iloc[bad[0]]!r} ({len(bad)} in all). Mend those rows."
    else:
        got = f"pandas says: {reason} Convert it with pd.to_datetime(..., utc=True)."
    raise ValueError(f"column {name!r} must hold stamps that pd.to_datetime reads; {got}") from reason


def is_date_number(column: pd.Series) -> bool:
    """Whether whole numbers are dates such as 20240131."""
    if not pd.api.types.is_integer_dtype(column.dtype) or not column.between(19000101, 21001231).all():
        return False
    return bool(pd.to_datetime(column.astype(str), format="%Y%m%d", errors="coerce").notna().all())
