"""Reading a series from a CSV or parquet file, with errors that say what to do."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import pandas as pd


def read_table(path: Path, *, id_col: str | None = None) -> pd.DataFrame:
    """A table from a .csv (also .gz, .xz, .zip) or .parquet file; an index of stamps, or with a name, is a column.

    In a CSV, `id_col` stays text, as it is written: 001 is not 1, and NA is a name.
    """
    import warnings

    import pandas as pd

    if not path.is_file():
        raise ValueError(f"FILE must be a file; {path} {'is a folder' if path.is_dir() else 'does not exist'}.")
    suffixes = [s.lower() for s in path.suffixes]
    try:
        if ".parquet" in suffixes:
            table = pd.read_parquet(path)
            if isinstance(table.index, pd.DatetimeIndex) and table.index.name is None:
                table = table.rename_axis("ds")
            inside = [name for name in table.index.names if name is not None and name not in table.columns]
            table = table.reset_index(inside) if inside else table
        elif ".csv" in suffixes or ".txt" in suffixes:
            with warnings.catch_warnings():  # what stands beyond the header in a line may only be empty
                warnings.simplefilter("error", pd.errors.ParserWarning)
                marked = None if id_col is None else {id_col: "={}".format}  # pandas knows no missing value "=NA"
                table = pd.read_csv(path, index_col=False, converters=marked)
            if id_col in table.columns:
                ids = table[id_col].str[1:]
                table[id_col] = ids.mask(ids == "")
        else:
            raise ValueError(f"FILE must end in .csv or .parquet; got {path.name}. Rename or convert it.")
    except pd.errors.ParserWarning as error:
        check_commas(pd.read_csv(path, nrows=0), path)
        raise ValueError(
            f"{path.name} must name every column in its header; its lines have more values than that has names. Add "
            "the names that are missing, or drop the values."
        ) from error
    except (UnicodeDecodeError, pd.errors.ParserError, pd.errors.EmptyDataError, OSError) as error:
        raise ValueError(f"{path} cannot be read as a table: {error}") from error
    except Exception as error:  # pyarrow has exceptions of its own for a damaged parquet file
        if type(error).__module__.startswith("pyarrow"):
            raise ValueError(f"{path} cannot be read as a parquet file: {error}") from error
        raise
    check_commas(table, path)
    if table.empty:
        raise ValueError(f"{path} must have at least one row and one column; it has shape {table.shape}.")
    return table


def check_commas(table: pd.DataFrame, path: Path) -> None:
    """An error for a file whose columns are separated by semicolons."""
    if len(table.columns) == 1 and ";" in str(table.columns[0]):
        raise ValueError(
            f"{path.name} must be separated by commas; its first line is {str(table.columns[0])[:60]!r}. Convert it."
        )


def read_frame(
    path: Path, *, id_col: str | None = None, time_col: str | None = None, target_col: str | None = None
) -> tuple[pd.DataFrame, dict[str, str | None]]:
    """A long table from a file, and which of its columns hold id, time and target, as `Forecaster` calls them.

    What is not named is guessed: `unique_id`, or a single series; `ds`, or the first column of stamps; `y`, or the only
    other numeric column.
    """
    import pandas as pd

    from .columns import date_format

    table = read_table(path, id_col=id_col or "unique_id")
    columns = [str(c) for c in table.columns]
    table = table.set_axis(columns, axis=1)
    for option, name in (("--id-col", id_col), ("--time-col", time_col), ("--target-col", target_col)):
        if name is not None and name not in columns:
            raise ValueError(f"{option} must name a column of {path.name}; got {name!r}. It has {', '.join(columns)}.")
    if id_col is None and "unique_id" in columns:
        id_col = "unique_id"
    if time_col is None:
        dates = (c for c in columns if c != id_col and (holds_stamps(table[c]) or date_format(table[c])))
        time_col = "ds" if "ds" in columns else next(dates, None)
    if time_col is None:
        raise ValueError(
            f"{path.name} must have a column of time stamps, or --time-col must name it; it has {', '.join(columns)}."
        )
    table = with_dates(table, time_col)
    if target_col is None:
        rest = [
            c
            for c in columns
            if c not in (id_col, time_col) and not c.startswith("Unnamed:") and holds_numbers(table[c])
        ]  # an unnamed column is the index that pandas wrote
        if "y" in columns:
            target_col = "y"
        elif len(rest) == 1:
            target_col = rest[0]
        else:
            have = f"{len(rest)} ({', '.join(rest)})" if rest else f"none of {', '.join(columns)}"
            raise ValueError(f"{path.name} must have one numeric column, or --target-col must name it; it has {have}.")
    for name in (time_col, target_col):
        if is_number(name) or (name[:1].isdigit() and holds_stamps(pd.Series([name]))):
            raise ValueError(f"{path.name} must have a header line; its first line holds {name!r}. Add e.g. ds,y.")
    return table, {"id_col": id_col, "time_col": time_col, "target_col": target_col}


def read_again(
    path: Path, *, id_col: str | None, time_col: str, targets: Sequence[str], ids: Sequence[Any], dates: bool
) -> pd.DataFrame:
    """A table for a model that knows its columns and the series `ids`; one that it knows alone need not be named.

    The file's ids are taken for what the model's are, text or numbers. With `dates`, stamps such as 20240131 are read.
    """
    table = read_table(path, id_col=id_col)
    table = table.set_axis([str(c) for c in table.columns], axis=1)
    if id_col is not None and id_col not in table.columns and len(set(ids)) == 1:
        table[id_col] = ids[0]
    for name in (id_col, time_col, *targets):
        if name is not None and name not in table.columns:
            raise ValueError(
                f"{path.name} must have the column {name!r}, which the model was fitted with; it has "
                f"{', '.join(table.columns)}. Rename a column of it."
            )
    if id_col is not None:
        table[id_col] = like_ids(table[id_col], ids)
    return with_dates(table, time_col) if dates else table


def like_ids(column: pd.Series, known: Sequence[Any]) -> pd.Series:
    """Ids of a file as text if all known ones are text, as numbers if they are numbers, where that can be."""
    found, texts = column.drop_duplicates().tolist(), [isinstance(item, str) for item in known]
    same: dict[Any, Any] = {}
    if all(texts):
        same = {item: str(item) for item in found if isinstance(item, int)}
    elif not any(texts):
        same = {item: to_number(item) for item in found if isinstance(item, str)}
        if len(set(same.values())) < len(same):  # 001 beside 1: only one of them can be meant
            same = {item: number for item, number in same.items() if str(number) == item}
    return column.astype(object).map(lambda item: same.get(item, item)) if same else column


def to_number(text: str) -> Any:
    """A number if the text is one."""
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text


def with_dates(table: pd.DataFrame, time_col: str) -> pd.DataFrame:
    """Whole numbers such as 20240131 as dates."""
    import pandas as pd

    from .columns import date_format

    format = date_format(table[time_col])
    if format is None:
        return table
    return table.assign(**{time_col: pd.to_datetime(table[time_col].astype(str), format=format)})


def is_number(text: str) -> bool:
    """Whether a column's name is a value of it."""
    try:
        float(text)
    except ValueError:
        return False
    return True


def holds_numbers(values: pd.Series) -> bool:
    """Whether a column holds numbers, and at least one."""
    from pandas.api.types import is_bool_dtype, is_numeric_dtype

    return is_numeric_dtype(values) and not is_bool_dtype(values) and bool(values.notna().any())


def holds_stamps(values: pd.Series) -> bool:
    """Whether a column holds datetimes, or text that reads as such."""
    import warnings

    import pandas as pd

    if pd.api.types.is_datetime64_any_dtype(values):
        return True
    if pd.api.types.is_numeric_dtype(values) or values.empty:
        return False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the guess of a format
        text = values.head(20).astype(str)
        reads = (pd.to_datetime(text, errors="coerce", utc=True, dayfirst=first) for first in (False, True))
        return any(stamps.notna().all() for stamps in reads)


def read_series(path: Path, column: str | None = None, series: str | None = None) -> tuple[str, np.ndarray]:
    """One numeric column of a file as (name, float64 array); NaN where a value is missing.

    Without a name it takes `y` if there is one, else the only numeric column. Of several series in a column `unique_id`
    it takes the rows of one.
    """
    import pandas as pd

    table = read_table(path, id_col="unique_id")
    ids = table.pop("unique_id").astype(str) if "unique_id" in table.columns else pd.Series("", index=table.index)
    names = ids.drop_duplicates().tolist()
    if series is not None or len(names) > 1:
        if series not in names:
            have = f"{', '.join(names[:5])}{', ...' if len(names) > 5 else ''}" if any(names) else "no column unique_id"
            got = "none" if series is None else repr(series)
            raise ValueError(f"--id must name one series of {path.name}; got {got}. It has {have}.")
        table = table[ids == series]
    numeric = [str(c) for c in table.columns if holds_numbers(table[c])]
    if column is None:
        if "y" in numeric:
            column = "y"
        elif len(numeric) == 1:
            column = numeric[0]
        else:
            have = (
                f"{len(numeric)} ({', '.join(numeric)})" if numeric else f"none of {', '.join(map(str, table.columns))}"
            )
            raise ValueError(f"{path.name} must have one numeric column, or --column must name it; it has {have}.")
    if column not in table.columns:
        raise ValueError(
            f"--column must name a column of {path.name}; got {column!r}. It has {', '.join(map(str, table.columns))}."
        )
    if column not in numeric:
        row = int(np.argmax(pd.to_numeric(table[column], errors="coerce").isna().to_numpy()))
        raise ValueError(
            f"column {column!r} of {path.name} must hold numbers; row {row + 1} holds {table[column].iloc[row]!r}. "
            f"Numeric columns: {', '.join(numeric) or 'none'}."
        )
    return column, table[column].to_numpy(dtype=np.float64, na_value=np.nan)
