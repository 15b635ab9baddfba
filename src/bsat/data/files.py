"""Reading a series from a CSV or parquet file, with errors that say what to do."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import pandas as pd


def read_table(path: Path) -> pd.DataFrame:
    """A table from a .csv (also .gz, .xz, .zip) or .parquet file."""
    import pandas as pd

    if not path.is_file():
        raise ValueError(f"FILE must be a file; {path} {'is a folder' if path.is_dir() else 'does not exist'}.")
    suffixes = [s.lower() for s in path.suffixes]
    try:
        if ".parquet" in suffixes:
            table = pd.read_parquet(path)
        elif ".csv" in suffixes or ".txt" in suffixes:
            table = pd.read_csv(path)
        else:
            raise ValueError(f"FILE must end in .csv or .parquet; got {path.name}. Rename or convert it.")
    except (UnicodeDecodeError, pd.errors.ParserError, pd.errors.EmptyDataError, OSError) as error:
        raise ValueError(f"{path} cannot be read as a table: {error}") from error
    except Exception as error:  # pyarrow has exceptions of its own for a damaged parquet file
        if type(error).__module__.startswith("pyarrow"):
            raise ValueError(f"{path} cannot be read as a parquet file: {error}") from error
        raise
    if table.empty:
        raise ValueError(f"{path} must have at least one row and one column; it has shape {table.shape}.")
    return table


def read_series(path: Path, column: str | None = None) -> tuple[str, np.ndarray]:
    """One numeric column of a file as (name, float64 array); NaN where a value is missing.

    Without a name it takes `y` if there is one, else the only numeric column.
    """
    import pandas as pd

    table = read_table(path)
    if len(table.columns) == 1 and ";" in str(table.columns[0]):
        raise ValueError(
            f"{path.name} must be separated by commas; its first line is {str(table.columns[0])[:60]!r}. Convert it."
        )

    def holds_numbers(values: pd.Series) -> bool:
        return (
            pd.api.types.is_numeric_dtype(values)
            and not pd.api.types.is_bool_dtype(values)
            and bool(values.notna().any())
        )

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
