"""Statistics and shipped series."""

import math
from importlib.resources import files

import numpy as np
import pandas as pd
import pytest

from bsat.data import (
    SHIPPED,
    curvature_norm,
    load_shipped,
    permutation_entropy,
    read_frame,
    read_table,
    total_variation,
)


def test_statistics_by_hand():
    y = np.array([0.0, 1.0, 3.0, 2.0, 2.0])
    assert total_variation(y) == 4.0
    assert curvature_norm(y) == pytest.approx(math.sqrt(1 + 9 + 1))
    assert permutation_entropy(np.arange(50.0)) == 0.0
    noise = np.random.default_rng(0).normal(size=100_000)
    assert permutation_entropy(noise) == pytest.approx(1.0, abs=1e-3)
    # 0 1 0 1 ...: two patterns of six, equally often
    assert permutation_entropy(np.arange(1002) % 2 * 1.0) == pytest.approx(math.log(2) / math.log(6), abs=1e-4)


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_series_are_whole(name):
    frame = load_shipped(name)
    assert list(frame.columns) == ["unique_id", "ds", "y"]
    assert (frame["unique_id"] == name).all()
    assert frame["y"].notna().all()
    steps = frame["ds"].diff().dropna()
    assert (steps == pd.Timedelta("15min")).all()
    assert len(frame) >= 35_000


def test_shipped_series_are_small():
    folder = files("bsat.data") / "shipped"
    assert sum(len((folder / shipped.file).read_bytes()) for shipped in SHIPPED.values()) <= 600_000


def test_unknown_shipped_series():
    with pytest.raises(ValueError, match="the shipped series are solar, household; got 'wind'"):
        load_shipped("wind")


def test_a_column_of_days_that_come_first_is_found(tmp_path):
    days = pd.date_range("2024-01-01", periods=30)
    pd.DataFrame({"day": days.strftime("%d/%m/%Y"), "load": np.arange(30.0)}).to_csv(tmp_path / "d.csv", index=False)
    assert read_frame(tmp_path / "d.csv")[1] == {"id_col": None, "time_col": "day", "target_col": "load"}


def test_lines_that_end_in_a_comma(tmp_path):
    path = tmp_path / "comma.csv"
    path.write_text("ds,y,temp\n2024-01-01,1,2,\n2024-01-02,3,4,\n")
    assert read_table(path).to_dict("list") == {"ds": ["2024-01-01", "2024-01-02"], "y": [1, 3], "temp": [2, 4]}
    path.write_text("ds,y,temp\n2024-01-01,1,2,5\n2024-01-02,3,4,\n")
    with pytest.raises(ValueError, match=r"comma.csv must name every column .* Add the names"):
        read_table(path)


@pytest.mark.parametrize("names", [["ds"], [None], ["day"], ["unique_id", "ds"]])
def test_an_index_with_a_name_is_a_column(tmp_path, names):
    days = pd.date_range("2024-01-01", periods=5)
    index = days.rename(names[0]) if len(names) == 1 else pd.MultiIndex.from_product([["a"], days], names=names)
    pd.DataFrame({"y": np.arange(5.0)}, index=index).to_parquet(tmp_path / "i.parquet")
    table, columns = read_frame(tmp_path / "i.parquet")
    assert columns["time_col"] == (names[-1] or "ds")
    assert columns["id_col"] == (names[0] if len(names) > 1 else None)
    assert list(table[columns["time_col"]]) == list(days)


@pytest.mark.parametrize(("form", "freq"), [("%Y%m%d", "D"), ("%Y%m", "MS"), ("%Y%m%d%H", "h")])
def test_dates_that_are_whole_numbers(tmp_path, form, freq):
    stamps = pd.date_range("2024-01-01", periods=30, freq=freq)
    pd.DataFrame({"y": np.arange(30.0), "t": stamps.strftime(form)}).to_csv(tmp_path / "n.csv", index=False)
    table, columns = read_frame(tmp_path / "n.csv")
    assert columns["time_col"] == "t"
    assert list(table["t"]) == list(stamps)
