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
from bsat.data.files import like_ids


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


def test_ids_of_a_csv_stay_what_is_written(tmp_path):
    names = ["001", "1", "1E2", "100", "NA", "2024-01-01"]
    path = tmp_path / "ids.csv"
    path.write_text("unique_id,day,y\n" + "".join(f"{name},2024-01-01,1\n" for name in names))
    table, columns = read_frame(path)
    assert table["unique_id"].tolist() == names
    assert columns == {"id_col": "unique_id", "time_col": "day", "target_col": "y"}
    path.write_text("shop,ds,y\n007,2024-01-01,1\n,2024-01-02,1\n")
    assert read_frame(path, id_col="shop")[0]["shop"].isna().tolist() == [False, True]


@pytest.mark.parametrize(
    ("found", "known", "want"),
    [
        (["1", "22"], [1, 22], [1, 22]),
        ([1, 22], ["1", "22"], ["1", "22"]),
        (["001", "x"], [1], [1, "x"]),
        (["001", "1"], [1], ["001", 1]),
        (["1.5", "1E2"], [1.5, 100.0], [1.5, 100.0]),
        (["001", "1"], ["001", "1"], ["001", "1"]),
        ([1, 2], [1, 2], [1, 2]),
        (["1", "a"], [1, "a"], ["1", "a"]),
    ],
)
@pytest.mark.parametrize("dtype", [None, "category"])
def test_ids_are_compared_as_the_models_kind(found, known, want, dtype):
    assert like_ids(pd.Series(found, dtype=dtype), known).tolist() == want
