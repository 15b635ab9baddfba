"""Long frames to series on a regular grid, and back."""

import datetime
import subprocess
import sys
import warnings
from decimal import Decimal

import numpy as np
import pandas as pd
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bsat.data.columns import kind_of, make_frame
from bsat.data.frames import to_panel


def make_long(*counts, freq="h", start="2024-01-01", tz=None, seed=0):
    """Series "a", "b", ... with so many rows each."""
    rng = np.random.default_rng(seed)
    parts = [
        pd.DataFrame(
            {"unique_id": name, "ds": pd.date_range(start, periods=n, freq=freq, tz=tz), "y": rng.normal(size=n)}
        )
        for name, n in zip("abcdefgh", counts, strict=False)
    ]
    return pd.concat(parts, ignore_index=True)


def with_stamps(stamps, values=None):
    y = np.arange(float(len(stamps))) if values is None else values
    return pd.DataFrame({"unique_id": "a", "ds": stamps, "y": y})


def assert_same(p, q):
    assert (p.ids, p.channels, p.freq, p.tz) == (q.ids, q.channels, q.freq, q.tz)
    for name in ("values", "offsets", "first"):
        np.testing.assert_array_equal(getattr(p, name), getattr(q, name))


def all_stamps(panel):
    return [s for r in range(len(panel)) for s in panel.stamps(r, 0, int(panel.lengths[r]))]


# ---- the panel -------------------------------------------------------------------------------------------------------


def test_a_panel_holds_the_frame():
    df = make_long(5, 3, freq="15min")
    before = df.copy()
    panel = to_panel(df)
    assert len(panel) == 2
    assert panel.ids == ["a", "b"]
    assert panel.channels is None
    assert panel.freq == "15min"
    assert panel.tz is None
    assert panel.values.dtype == np.float64
    assert panel.offsets.dtype == panel.first.dtype == np.int64
    assert panel.offsets.tolist() == [0, 5, 8]
    assert panel.lengths.tolist() == [5, 3]
    np.testing.assert_array_equal(panel.values, df["y"])
    assert all_stamps(panel) == df["ds"].tolist()
    assert repr(panel) == "Panel(2 rows, 8 samples, freq='15min', tz=None)"
    panel.values[:] = 0  # the panel's own memory
    pd.testing.assert_frame_equal(df, before)


def test_the_future_follows_every_row():
    panel = to_panel(make_long(5, 3))
    expected = pd.DatetimeIndex([f"2024-01-01 0{h}:00" for h in (5, 6, 7)] + [f"2024-01-01 0{h}:00" for h in (3, 4, 5)])
    assert list(panel.future(3)) == list(expected)
    assert list(panel.stamps(1, 3, 3)) == list(expected[3:])


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
@pytest.mark.parametrize("tz", [None, "UTC", "Europe/Berlin", "+02:00"])
def test_stamps_come_back_as_they_came(unit, tz):
    stamps = pd.date_range("2024-03-30 12:00", periods=40, freq="h", tz=tz, unit=unit)
    future = to_panel(with_stamps(stamps[:30])).future(10)
    assert future.dtype == stamps.dtype
    assert list(future) == list(stamps[30:])


def test_a_grid_finer_than_the_stamps_needs_a_finer_unit():
    stamps = pd.date_range("2024-01-01", periods=3, freq="s", unit="s")
    panel = to_panel(with_stamps(stamps), freq="500ms", gaps="fill")
    assert panel.values.tolist() == [0, 0.5, 1, 1.5, 2]
    assert panel.future(1)[0] == pd.Timestamp("2024-01-01 00:00:02.5")


def test_cut_and_tail():
    df = make_long(6, 4)
    panel = to_panel(df)
    cut = panel.cut([4, 1])
    assert cut.offsets.tolist() == [0, 4, 5]
    np.testing.assert_array_equal(cut.values, df["y"].to_numpy()[[0, 1, 2, 3, 6]])
    assert list(cut.future(1)) == [pd.Timestamp("2024-01-01 04:00"), pd.Timestamp("2024-01-01 01:00")]
    tail = panel.tail(5)
    np.testing.assert_array_equal(tail.values, df["y"].to_numpy()[[1, 2, 3, 4, 5, 6, 7, 8, 9]])
    assert list(tail.future(2)) == list(panel.future(2))
    assert panel.cut(panel.lengths) is panel
    assert panel.tail(6) is panel
    one = to_panel(make_long(6))
    assert np.shares_memory(one.cut(3).values, one.values)
    for lengths in ([7, 1], [0, 1], [1.5, 1]):
        with pytest.raises(ValueError, match=r"from 1 to the row's length; got .* for a row of 6"):
            panel.cut(lengths)
    with pytest.raises(ValueError, match="`count` must be at least 1; got 0"):
        panel.tail(0)
    with pytest.raises(ValueError, match=r"`start` must be at least 0.*got -1"):
        panel.stamps(0, -1, 3)


def test_tail_keeps_the_calendar():
    panel = to_panel(make_long(9, 4, freq="MS"))
    assert list(panel.tail(2).future(4)) == list(panel.future(4))
    assert panel.tail(2).stamps(0, 0, 1)[0] == pd.Timestamp("2024-08-01")


def test_channels_are_neighbouring_rows():
    df = make_long(4, 3)
    df["z"] = -df["y"]
    panel = to_panel(df, target_col=["y", "z"])
    assert panel.ids == ["a", "a", "b", "b"]
    assert panel.channels == ["y", "z", "y", "z"]
    assert panel.lengths.tolist() == [4, 4, 3, 3]
    y, z = panel.values[:4], panel.values[4:8]
    np.testing.assert_array_equal(y, df["y"][:4])
    np.testing.assert_array_equal(z, -y)
    np.testing.assert_array_equal(panel.values[11:], df["z"][4:])
    assert to_panel(df, target_col=("z",)).channels == ["z", "z"]
    assert len(panel.future(2)) == 8


def test_channels_are_trimmed_each_by_itself():
    df = make_long(5)
    df["z"] = [np.nan, 1, np.nan, 3, np.nan]
    panel = to_panel(df, target_col=["y", "z"], gaps="fill")
    assert panel.lengths.tolist() == [5, 3]
    assert panel.values[5:].tolist() == [1, 2, 3]
    assert list(panel.future(1)) == [pd.Timestamp("2024-01-01 05:00"), pd.Timestamp("2024-01-01 04:00")]


# ---- kinds of frames -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("thing", "match"),
    [
        ({"y": [1]}, "got builtins.dict. Make one"),
        ([1, 2], "got builtins.list"),
        (np.zeros(3), "got numpy.ndarray"),
        ("data.csv", "got builtins.str"),
        (None, "got builtins.NoneType"),
        (pd.Series([1.0]), "Series. Call .reset_index"),
        (pl.Series([1.0]), "Series. Call .to_frame"),
        (pl.LazyFrame({"y": [1.0]}), r"LazyFrame. Call .collect\(\)"),
    ],
)
def test_only_frames(thing, match):
    with pytest.raises(TypeError, match="must be a pandas or polars DataFrame; .*" + match):
        to_panel(thing)


def test_kinds():
    assert kind_of(pd.DataFrame()) == "pandas"
    assert kind_of(pl.DataFrame()) == "polars"


def test_neither_polars_nor_torch_is_imported():
    code = (
        "import sys, pandas as pd; from bsat.data.columns import make_frame; from bsat.data.frames import to_panel; "
        "df = pd.DataFrame({'unique_id': 'a', 'ds': [1, 2], 'y': [1., 2.]}); p = to_panel(df); "
        "make_frame('pandas', {'ds': p.future(2)}); assert not {'polars', 'torch'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("tz", [None, "UTC", "Europe/Berlin"])
@pytest.mark.parametrize("freq", ["15min", "D", "MS"])
def test_polars_and_pandas_give_the_same_panel(tz, freq):
    df = make_long(40, 30, 30, freq=freq, tz=tz, start="2024-03-01")
    panel, other = to_panel(df), to_panel(pl.from_pandas(df))
    assert_same(panel, other)
    columns = {"unique_id": np.repeat(["a", "b", "c"], 5), "ds": other.future(5), "BSAT": np.arange(15.0)}
    frame = make_frame("polars", columns)
    assert isinstance(frame, pl.DataFrame)
    assert frame.columns == list(columns)
    assert frame.schema["ds"] == pl.from_pandas(df).schema["ds"]
    like = make_frame("pandas", {**columns, "ds": panel.future(5)})
    assert list(like.columns) == list(columns)
    assert like["ds"].dtype == df["ds"].dtype
    assert frame["ds"].to_list() == like["ds"].tolist()


@given(
    ids=st.lists(st.sampled_from(["x", "y", "z"]), min_size=1, max_size=3, unique=True),
    count=st.integers(2, 12),
    step=st.sampled_from(["15min", "h", "7D", "MS"]),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=40, deadline=None)
def test_shuffled_rows_give_the_same_panel(ids, count, step, seed):
    rng = np.random.default_rng(seed)
    stamps = pd.date_range("2023-05-01", periods=count, freq=step)
    df = pd.DataFrame(
        {"unique_id": np.repeat(ids, count), "ds": np.tile(stamps, len(ids)), "y": rng.normal(size=count * len(ids))}
    )
    panel = to_panel(df)
    mixed = df.sample(frac=1, random_state=seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        for frame in (mixed, pl.from_pandas(mixed)):
            shuffled = to_panel(frame)
            assert shuffled.ids == list(dict.fromkeys(mixed["unique_id"]))
            assert shuffled.freq == panel.freq
            for r, name in enumerate(shuffled.ids):
                k = panel.ids.index(name)
                row = slice(*panel.offsets[k : k + 2])
                np.testing.assert_array_equal(shuffled.values[slice(*shuffled.offsets[r : r + 2])], panel.values[row])
                assert shuffled.first[r] == panel.first[k]


@pytest.mark.parametrize("dtype", ["polars date", "arrow date", "arrow timestamp"])
def test_arrow_stamps(dtype):
    days = [datetime.date(2024, 1, 1) + datetime.timedelta(days=i) for i in range(4)]
    if dtype == "polars date":
        df = pl.DataFrame({"unique_id": "a", "ds": days, "y": [1.0, 2, 3, 4]})
        panel = to_panel(df)
        assert make_frame("polars", {"ds": panel.future(2)})["ds"].to_list() == [
            datetime.date(2024, 1, 5),
            datetime.date(2024, 1, 6),
        ]
        monthly = to_panel(df.with_columns(ds=pl.date(2024, pl.int_range(1, 5), 1)))
        assert monthly.freq == "MS"
        assert monthly.future(1).tolist() == [datetime.date(2024, 5, 1)]
    else:
        arrow = "date32[day][pyarrow]" if dtype == "arrow date" else "timestamp[ms, tz=Europe/Berlin][pyarrow]"
        ds = pd.Series(pd.to_datetime(days)) if dtype == "arrow date" else pd.Series(pd.to_datetime(days, utc=True))
        panel = to_panel(with_stamps(ds.astype(arrow)))
        assert panel.freq == "D"
        assert panel.tz == (None if dtype == "arrow date" else "Europe/Berlin")
        assert pd.Timestamp(panel.future(1)[0]).date() == datetime.date(2024, 1, 5)


# ---- columns ---------------------------------------------------------------------------------------------------------


def test_missing_columns():
    df = make_long(4)
    with pytest.raises(ValueError, match=r"must have the column 'ds'; it has \['unique_id', 'time', 'y'\].*time_col="):
        to_panel(df.rename(columns={"ds": "time"}))
    with pytest.raises(ValueError, match=r"must have the column 'load'.*target_col="):
        to_panel(df, target_col=["y", "load"])
    with pytest.raises(ValueError, match=r"must have the column 'site'.*id_col="):
        to_panel(df, id_col="site")
    with pytest.raises(ValueError, match=r"'unique_id'; .*df\[\"unique_id\"\] = \"name\".*id_col=None"):
        to_panel(df.drop(columns="unique_id"))
    with pytest.raises(ValueError, match=r"'ds'; .*reset_index\(\)"):
        to_panel(df.set_index("ds"))
    with pytest.raises(ValueError, match=r"'ds'; .*reset_index\(\)"):
        to_panel(df.set_index("ds").rename_axis(None))
    with pytest.raises(ValueError, match="must have the column 'ds'"):
        to_panel(pl.from_pandas(df).drop("ds"))


def test_other_names_and_one_series():
    df = make_long(4).rename(columns={"unique_id": "site", "ds": "time", "y": "load"})
    assert to_panel(df, id_col="site", time_col="time", target_col="load").ids == ["a"]
    single = to_panel(df.drop(columns="site"), id_col=None, time_col="time", target_col="load")
    assert single.ids == ["load"]
    several = to_panel(df.assign(z=1.0), id_col=None, time_col="time", target_col=["load", "z"])
    assert several.ids == ["y", "y"]
    assert several.channels == ["load", "z"]


def test_columns_must_differ():
    df = make_long(3)
    with pytest.raises(ValueError, match="column names must differ; 'y' appears 2 times"):
        to_panel(pd.concat([df, df[["y"]]], axis=1))
    for targets in (["y", "y"], []):
        with pytest.raises(ValueError, match="must be different columns, one target at least"):
            to_panel(df, target_col=targets)
    with pytest.raises(ValueError, match="must be different columns"):
        to_panel(df, time_col="unique_id")


@pytest.mark.parametrize("convert", [lambda df: df, pl.from_pandas])
def test_an_empty_frame(convert):
    with pytest.raises(ValueError, match="at least one row; got none"):
        to_panel(convert(make_long(3).iloc[:0]))


def test_gaps_is_a_choice():
    with pytest.raises(ValueError, match="`gaps` must be one of 'error', 'fit', 'fill'; got 'drop'"):
        to_panel(make_long(3), gaps="drop")


# ---- ids -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("kind", ["str", "object", "category", "string", "int64", "Int64", "large_string[pyarrow]"])
def test_ids_of_any_type_in_order_of_appearance(kind, count):
    wanted = [7, 3, 5][:count] if "nt64" in kind else ["z", "a", "m"][:count]
    df = pd.DataFrame({"unique_id": np.repeat(wanted, 2), "ds": [1, 2] * count, "y": np.arange(2.0 * count)})
    panel = to_panel(df.astype({"unique_id": kind}))
    assert panel.ids == wanted
    assert all(type(name) is type(wanted[0]) for name in panel.ids)
    assert panel.values.tolist() == df["y"].tolist()


def test_polars_categories_keep_the_order_of_appearance():
    ids = pl.Series(["b", "b", "a", "a"], dtype=pl.Enum(["a", "b"]))
    df = pl.DataFrame({"unique_id": ids, "ds": [1, 2, 1, 2], "y": [1, 2, 3, 4]})
    for frame in (df, df.with_columns(pl.col("unique_id").cast(pl.Categorical))):
        panel = to_panel(frame)
        assert panel.ids == ["b", "a"]
        assert panel.values.tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("where", [0, 2, 3])
@pytest.mark.parametrize("kind", ["str", "object", "string", "category"])
def test_missing_ids(kind, where):
    df = make_long(4).astype({"unique_id": kind})
    df.loc[where, "unique_id"] = None
    with pytest.raises(ValueError, match=f"column 'unique_id' must name a series in every row; row {where} holds"):
        to_panel(df)
    with pytest.raises(ValueError, match=f"row {where} holds"):
        to_panel(pl.from_pandas(df))


# ---- targets ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["int64", "uint8", "float32", "Int64", "Float64", "double[pyarrow]", "decimal"])
def test_numbers_of_any_type(dtype):
    df = make_long(4)
    numbers = pd.Series([3, 1, 4, 1])
    df["y"] = [Decimal(int(v)) for v in numbers] if dtype == "decimal" else numbers.astype(dtype)
    for frame in (df, pl.from_pandas(df)):
        panel = to_panel(frame)
        assert panel.values.dtype == np.float64
        assert panel.values.tolist() == [3, 1, 4, 1]


@pytest.mark.parametrize("dtype", ["Float64", "Int64", "double[pyarrow]", "object"])
def test_nullable_numbers(dtype):
    df = make_long(4)
    df["y"] = pd.Series([3, None, 4, 1], dtype=dtype)
    for frame in (df, pl.from_pandas(df)):
        np.testing.assert_array_equal(to_panel(frame, gaps="fit").values, [3, np.nan, 4, 1])


@pytest.mark.parametrize(
    ("values", "match"),
    [
        (["1", "abc", "2"], "row 1 holds 'abc'"),
        (["1", "2", "3"], "row 0 holds '1'.*pd.to_numeric"),
        ([1.0, "abc", 2.0], "row 1 holds 'abc'"),
        ([True, False, True], "row 0 holds True"),
        (pd.to_datetime(["2024-01-01"] * 3), "row 0 holds Timestamp"),
        ([1 + 2j, 0j, 0j], r"row 0 holds \(1\+2j\)"),
        ([[1], [2], [3]], r"row 0 holds \[1\]"),
    ],
)
def test_targets_that_are_not_numbers(values, match):
    df = make_long(3)
    df["load"] = pd.Series(values)
    with pytest.raises(TypeError, match="column 'load' must hold numbers; " + match):
        to_panel(df, target_col="load")


def test_polars_targets_that_are_not_numbers():
    df = pl.DataFrame({"unique_id": ["a", "a"], "ds": [1, 2], "y": ["5", "abc"], "b": [True, False]})
    with pytest.raises(TypeError, match="column 'y' must hold numbers; row 1 holds 'abc'"):
        to_panel(df)
    with pytest.raises(TypeError, match="column 'b' must hold numbers; row 0 holds True"):
        to_panel(df, target_col="b")


@pytest.mark.parametrize("gaps", ["error", "fit", "fill"])
def test_infinity(gaps):
    df = make_long(4, 4)
    df.loc[[1, 6], "y"] = [np.nan, -np.inf] if gaps != "error" else [0.0, -np.inf]
    with pytest.raises(ValueError, match="series 'b' has -inf at 2024-01-01 02:00:00"):
        to_panel(df, gaps=gaps)


def test_nan_in_the_target():
    df = make_long(4, 6)
    df.loc[[4, 6, 7, 9], "y"] = np.nan
    with pytest.raises(
        ValueError,
        match=r"'y' must .*series 'b' has nan at 2024-01-01 00:00:00 \(4 in all\).*gaps=\"fit\".*gaps=\"fill\"",
    ):
        to_panel(df)
    y = df["y"].to_numpy()
    fit, fill = to_panel(df, gaps="fit"), to_panel(df, gaps="fill")
    np.testing.assert_array_equal(fit.values, np.r_[y[:4], y[5], np.nan, np.nan, y[8]])
    np.testing.assert_allclose(fill.values, np.r_[y[:4], np.linspace(y[5], y[8], 4)], rtol=1e-14)
    for panel in (fit, fill):
        assert panel.lengths.tolist() == [4, 4]
        assert list(panel.stamps(1, 0, 1)) == [pd.Timestamp("2024-01-01 01:00")]
        assert list(panel.future(1)) == [pd.Timestamp("2024-01-01 04:00"), pd.Timestamp("2024-01-01 05:00")]


@pytest.mark.parametrize("gaps", ["fit", "fill"])
def test_a_series_of_nan(gaps):
    df = make_long(3, 3, 3)
    df.loc[3:5, "y"] = np.nan
    with pytest.raises(ValueError, match="'y' of series 'b' is NaN throughout"):
        to_panel(df, gaps=gaps)


# ---- stamps ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["int64", "int32", "uint16", "Int64", "object", "int64[pyarrow]"])
def test_integer_stamps(dtype):
    df = with_stamps(pd.Series([10, 15, 20, 25], dtype=dtype))
    panel = to_panel(df)
    assert panel.freq == 5
    assert panel.first.tolist() == [10]
    assert panel.future(3).tolist() == [30, 35, 40]
    assert panel.future(3).dtype == (dtype if dtype in ("int64", "int32", "uint16") else "int64")


@pytest.mark.parametrize("first", [202390, 1_700_000_000, 2020010120])
def test_counts_that_are_no_dates(first):
    assert to_panel(with_stamps(np.arange(first, first + 30))).freq == 1


def test_integer_stamps_do_not_wrap():
    panel = to_panel(with_stamps(np.array([100, 110, 120], dtype=np.int8)))
    assert panel.future(2).tolist() == [130, 140]


@pytest.mark.parametrize(
    "stamps",
    [
        ["2024-01-01", "2024-01-02", "2024-01-03"],
        [datetime.date(2024, 1, d) for d in (1, 2, 3)],
        pd.Series([datetime.datetime(2024, 1, d) for d in (1, 2, 3)], dtype=object),
    ],
)
def test_text_and_dates(stamps):
    panel = to_panel(with_stamps(stamps))
    assert panel.freq == "D"
    assert list(panel.future(1)) == [pd.Timestamp("2024-01-04")]
    if not isinstance(stamps, pd.Series):
        assert list(to_panel(pl.DataFrame({"ds": stamps, "y": [1, 2, 3]}), id_col=None).future(1)) == [
            np.datetime64("2024-01-04") if not isinstance(stamps[0], str) else pd.Timestamp("2024-01-04")
        ]


@pytest.mark.parametrize(
    ("stamps", "error", "match"),
    [
        (["2024-01-01", "soon", "2024-01-03"], ValueError, r"row 1 holds 'soon' \(1 in all\)"),
        ([20240130, 20240131, 20240201], ValueError, 'look like dates.*format="%Y%m%d"'),
        ([202401, 202402, 202403], ValueError, 'look like dates, such as 202401.*format="%Y%m"'),
        ([2020010122, 2020010123, 2020010200], ValueError, 'look like dates.*format="%Y%m%d%H"'),
        ([1.0, 2.0, 3.0], TypeError, "got floating"),
        ([True, False, True], TypeError, "got boolean"),
        (pd.period_range("2024-01", periods=3, freq="M"), TypeError, r"got period.*to_timestamp\(\)"),
        (pd.to_timedelta([1, 2, 3]), TypeError, "got timedelta"),
        (pd.to_datetime(["2024-01-01", None, "2024-01-03"]), ValueError, r"row 1 holds NaT \(1 in all\)"),
        (["2024-01-01", "2024-01-02", None], ValueError, "row 2 holds NaT"),
        (pd.Series([1, 2, None], dtype="Int64"), ValueError, "row 2 holds <NA>"),
        ([None, None, None], ValueError, "row 0 holds"),
        (np.array(["2024", "2025", "3000"], "M8[s]"), ValueError, "between the years 1678 and 2262; got .* to 3000"),
    ],
)
def test_stamps_that_cannot_be(stamps, error, match):
    with pytest.raises(error, match="column 'ds' must .*" + match):
        to_panel(with_stamps(stamps))


def test_out_of_order_is_sorted_with_a_note():
    df = make_long(5, 4)
    swapped = df.iloc[[0, 2, 1, 3, 4, 5, 6, 7, 8]]
    with pytest.warns(UserWarning, match="series 'a' has 2024-01-01 01:00:00 after 2024-01-01 02:00:00") as notes:
        panel = to_panel(swapped)
    assert notes[0].filename == __file__
    assert_same(panel, to_panel(df))


def test_interleaved_series_are_silent():
    df = make_long(5, 4)
    interleaved = df.sort_values("ds", kind="stable")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same(to_panel(interleaved), to_panel(df))


def test_duplicate_stamps():
    df = make_long(4, 4)
    with pytest.raises(ValueError, match=r"series 'b' has 2024-01-01 01:00:00 twice \(1 duplicates in all\).*id_col="):
        to_panel(df.iloc[[0, 1, 2, 3, 4, 5, 5, 6, 7]])


# ---- frequencies -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("freq", "expected"),
    [
        ("500ms", "500ms"),
        ("15min", "15min"),
        ("h", "h"),
        ("36h", "36h"),
        ("D", "D"),
        ("7D", "7D"),
        ("W-MON", "7D"),
        ("MS", "MS"),
        ("ME", "ME"),
        ("QS", "3MS"),
        ("YE", "12ME"),
        ("B", "B"),
        ("BME", "BME"),
        ("WOM-3FRI", "WOM-3FRI"),
    ],
)
def test_the_frequency_is_inferred(freq, expected):
    stamps = pd.date_range("2023-02-01 00:00", periods=30, freq=freq)
    panel = to_panel(with_stamps(stamps[:20]))
    assert panel.freq == expected
    assert len(panel.values) == 20
    assert list(panel.future(10)) == list(stamps[20:])
    assert list(to_panel(with_stamps(stamps[:20]), freq=freq).future(10)) == list(stamps[20:])


def test_short_months():
    july = to_panel(with_stamps(pd.to_datetime(["2024-07-01", "2024-08-01"])))  # 31 days, but a month is meant
    assert july.freq == "MS"
    assert list(july.future(1)) == [pd.Timestamp("2024-09-01")]


@pytest.mark.parametrize("start", ["2024-03-25", "2024-10-20", "2024-01-05"])
@pytest.mark.parametrize("hour", [0, 9])
@pytest.mark.parametrize("freq", ["D", "7D", "MS", "B"])
def test_local_days_across_the_change_of_clocks(start, hour, freq):
    stamps = pd.date_range(f"{start} {hour:02}:00", periods=120, freq=freq, tz="Europe/Berlin")
    panel = to_panel(with_stamps(stamps[:12]))
    assert panel.freq == freq
    assert list(panel.future(108)) == list(stamps[12:])
    assert list(panel.stamps(0, 0, 120)) == list(stamps)


def test_hours_across_the_change_of_clocks():
    stamps = pd.date_range("2024-10-26", periods=72, freq="h", tz="Europe/Berlin")  # 02:00 comes twice
    panel = to_panel(with_stamps(stamps[:24]))
    assert panel.freq == "h"
    assert list(panel.future(48)) == list(stamps[24:])
    fixed = pd.date_range("2024-03-25", periods=12, freq="D", tz="UTC").tz_convert("Europe/Berlin")
    assert to_panel(with_stamps(fixed)).freq == "24h"


def test_clocks_that_change_at_midnight():
    days = pd.date_range("2024-04-20", periods=20, freq="D")  # the 26th starts at one o'clock in Cairo
    stamps = days.tz_localize("Africa/Cairo", nonexistent="shift_forward")
    assert stamps[6].hour == 1
    panel = to_panel(with_stamps(stamps[:10]))
    assert panel.freq == "D"
    assert list(panel.future(10)) == list(stamps[10:])
    assert list(panel.tail(4).future(10)) == list(stamps[10:])  # whose first day is the 26th
    assert list(panel.cut(3).future(10)) == list(stamps[3:13])


def test_rows_with_calendars_of_their_own():
    df = pd.concat(
        [
            with_stamps(pd.date_range("2020-01-31 06:00", periods=5, freq="ME")),
            with_stamps(pd.date_range("2023-04-30", periods=3, freq="ME")).assign(unique_id="b"),
        ]
    )
    panel = to_panel(df)
    assert list(panel.future(2)) == [
        pd.Timestamp(t) for t in ("2020-06-30 06:00", "2020-07-31 06:00", "2023-07-31", "2023-08-31")
    ]
    every_other = pd.concat(
        [
            with_stamps(pd.date_range("2024-01-01", periods=4, freq="2MS")),
            with_stamps(pd.date_range("2024-02-01", periods=4, freq="2MS")).assign(unique_id="b"),
        ]
    )
    panel = to_panel(every_other)
    assert panel.freq == "2MS"
    assert list(panel.future(1)) == [pd.Timestamp("2024-09-01"), pd.Timestamp("2024-10-01")]


@pytest.mark.parametrize("freq", ["nonsense", "-1h", "bh", "0D", 3, pd.DateOffset(months=1)])
def test_frequencies_that_cannot_be(freq):
    with pytest.raises(ValueError, match="`freq` must be"):
        to_panel(make_long(4), freq=freq)


@pytest.mark.parametrize("freq", ["h", 0, True, 1.5])
def test_integer_stamps_have_integer_frequencies(freq):
    with pytest.raises(ValueError, match="`freq` must be a positive int for integer stamps; got"):
        to_panel(with_stamps([1, 2, 3]), freq=freq)


def test_one_row_needs_a_frequency():
    df = make_long(1, 1)
    with pytest.raises(ValueError, match=r"two rows to tell its frequency; 'a' has one. Pass freq="):
        to_panel(df)
    assert list(to_panel(df, freq="2h").future(1)) == [pd.Timestamp("2024-01-01 02:00")] * 2
    for others in (make_long(1, 5), make_long(5, 1), make_long(1, 5, 1)):
        panel = to_panel(others)
        assert panel.freq == "h"
        assert len(panel.values) == len(others)
    assert list(to_panel(make_long(1, freq="MS"), freq="MS").future(1)) == [pd.Timestamp("2024-02-01")]


# ---- gaps ------------------------------------------------------------------------------------------------------------


def test_missing_stamps_are_an_error():
    df = make_long(10, 10, 10).drop(index=[3, 4, 25])
    with pytest.raises(
        ValueError,
        match=r"freq='h'; series 'a' lacks 2 after 2024-01-01 02:00:00 \(3 in all, in 2 of 3 series\).*gaps=\"fit\"",
    ):
        to_panel(df)


def test_missing_months_and_holidays():
    months = make_long(10, freq="MS").drop(index=[4])
    with pytest.raises(ValueError, match="freq='MS'; series 'a' lacks 1 after 2024-04-01"):
        to_panel(months)
    panel = to_panel(months, gaps="fit")
    assert np.flatnonzero(np.isnan(panel.values)).tolist() == [4]
    assert list(panel.future(1)) == [pd.Timestamp("2024-11-01")]
    days = make_long(15, freq="B").drop(index=[8])
    with pytest.raises(ValueError, match="freq='B'; series 'a' lacks 1 after"):
        to_panel(days)


@given(data=st.data(), freq=st.sampled_from(["15min", "h", "D", "MS"]), tz=st.sampled_from([None, "America/New_York"]))
@settings(max_examples=60, deadline=None)
def test_dropped_stamps_are_nan_exactly_there(data, freq, tz):
    df = make_long(20, 15, freq=freq, tz=tz, start="2024-02-01")
    inner = [i for i in range(35) if i not in (0, 19, 20, 34)]
    dropped = data.draw(st.lists(st.sampled_from(inner), unique=True, max_size=20))
    panel = to_panel(df.drop(index=dropped), freq=freq, gaps="fit")
    expected = df["y"].to_numpy().copy()
    expected[dropped] = np.nan
    np.testing.assert_array_equal(panel.values, expected)
    assert all_stamps(panel) == df["ds"].tolist()
    filled = to_panel(df.drop(index=dropped), freq=freq, gaps="fill")
    by_pandas = pd.Series(expected).interpolate()  # no series ends in a gap, so it does not reach across
    np.testing.assert_allclose(filled.values, by_pandas, rtol=1e-12, atol=1e-12)


def test_large_grids_do_not_overflow():
    # the number of a row times the step of 31 days in nanoseconds is beyond int64
    stamps = pd.date_range("1950-01-01", periods=800, freq="31D").to_numpy()
    df = pd.DataFrame({"unique_id": np.repeat(np.arange(50), 800), "ds": np.tile(stamps, 50), "y": 1.0})
    panel = to_panel(df.drop(index=[5, 39_990]), gaps="fit")
    assert np.flatnonzero(np.isnan(panel.values)).tolist() == [5, 39_990]


def test_stamps_off_the_grid():
    df = make_long(6)
    df.loc[3, "ds"] += pd.Timedelta("10min")
    for gaps in ("error", "fit"):
        with pytest.raises(
            ValueError, match="series 'a' has 2024-01-01 03:10:00 after 2024-01-01 02:00:00, off the grid"
        ):
            to_panel(df, gaps=gaps)
    with pytest.raises(ValueError, match="freq='W-SUN'; series 'a' has 2024-01-01 00:00:00, off the grid"):
        to_panel(make_long(6, freq="W-MON"), freq="W")
    with pytest.raises(ValueError, match=r"freq='MS'; series 'a' has 2024-02-01 05:00:00 after .*, off the grid"):
        to_panel(with_stamps(["2024-01-01", "2024-02-01 05:00", "2024-03-01"]), freq="MS")
    with pytest.raises(ValueError, match="freq='MS'; series 'a' has 2024-01-05"):
        to_panel(make_long(1, start="2024-01-05"), freq="MS")
    with pytest.raises(ValueError, match="freq=2; series 'a' has 4 after 1, off the grid"):
        to_panel(with_stamps([-1, 1, 4]), freq=2)


@pytest.mark.parametrize("gaps", ["error", "fit", "fill"])
@pytest.mark.parametrize("slow_first", [True, False])
def test_mixed_frequencies_are_not_gaps(gaps, slow_first):
    slow = make_long(40).assign(unique_id="slow").drop(index=[7])
    fast = make_long(60, freq="15min").assign(unique_id="fast").drop(index=[9])
    df = pd.concat([slow, fast] if slow_first else [fast, slow])
    with pytest.raises(
        ValueError,
        match=r"one frequency; series 'fast' has '15min' and series 'slow' has 'h'.*freq='15min', gaps=\"fit\"",
    ):
        to_panel(df, gaps=gaps)
    more = pd.concat([df, make_long(90).assign(unique_id="more")])  # now most steps are hours
    with pytest.raises(ValueError, match=r"series '(slow|more)' has 'h' and series 'fast' has '15min'"):
        to_panel(more, gaps=gaps)
    if gaps != "error":  # the way out that the message names
        panel = to_panel(df, freq="15min", gaps=gaps)
        assert sorted(panel.lengths.tolist()) == [60, 39 * 4 + 1]


def test_mixed_calendars():
    df = pd.concat([make_long(12, freq="MS"), make_long(6, freq="QS").assign(unique_id="q")])
    with pytest.raises(ValueError, match="series 'a' has 'MS' and series 'q' has '3MS'"):
        to_panel(df, gaps="fit")
    days = pd.concat([make_long(90, freq="D"), make_long(8, freq="QS").assign(unique_id="q")])
    with pytest.raises(ValueError, match="series 'a' has 'D' and series 'q' has '91D'"):
        to_panel(days, gaps="fit")
    numbers = pd.DataFrame({"unique_id": list("aaaabbb"), "ds": [1, 2, 3, 4, 1, 4, 7], "y": 1.0})
    with pytest.raises(ValueError, match="series 'a' has 1 and series 'b' has 3"):
        to_panel(numbers)


@pytest.mark.parametrize("gaps", ["fit", "fill"])
def test_a_slip_of_the_pen_in_a_stamp(gaps):
    df = make_long(10, 10)
    df.loc[19, "ds"] = pd.Timestamp("2042-01-01")
    with pytest.raises(
        ValueError, match=r"over 50 times .*'b' has 10 rows but .* from 2024-01-01 08:00:00 to 2042-01-01 00:00:00"
    ):
        to_panel(df, gaps=gaps)


def test_local_times_across_summer_time_become_utc():
    """What pandas writes into a CSV for Europe/Paris: the offset changes, the hours do not."""
    local = pd.date_range("2024-03-30 20:00", periods=10, freq="h", tz="Europe/Paris")
    panel = to_panel(pd.DataFrame({"ds": local.map(str), "y": np.arange(10.0)}), id_col=None)
    assert (panel.freq, panel.tz) == ("h", "UTC")
    assert panel.future(1)[0] == local[-1] + pd.Timedelta("1h")


@pytest.mark.parametrize(("freq", "count"), [("D", 400), ("MS", 30), ("W", 80), ("B", 400)])
def test_local_days_with_offsets_need_their_zone(freq, count):
    days = pd.date_range("2023-01-01", periods=count, freq=freq, tz="Europe/Berlin")
    text = pd.Series([day.isoformat() for day in days])
    way = r"off the grid\. If these were local days.*pd.to_datetime\(\.\.\., utc=True\).*, or drop the offsets"
    with pytest.raises(ValueError, match=way):
        to_panel(with_stamps(text))
    for mended in (pd.to_datetime(text, utc=True).dt.tz_convert("Europe/Berlin"), text.str[:19]):
        assert len(to_panel(with_stamps(mended)).values) == count


def test_days_may_come_first():
    days = pd.date_range("2024-01-01", periods=40, freq="D")
    panel = to_panel(pd.DataFrame({"ds": days.strftime("%d/%m/%Y"), "y": np.arange(40.0)}), id_col=None)
    assert panel.freq == "D"
    assert panel.future(1)[0] == days[-1] + pd.Timedelta("1D")


TWO_DIGITS = [f"%d{s}%m{s}%y{clock}" for s in "/-." for clock in ("", " %H:%M", " %H:%M:%S")]


@pytest.mark.parametrize("form", [*TWO_DIGITS, "%d/%m/%Y %I:%M %p", "%m/%d/%y", "%m/%d/%Y %I:%M:%S %p"])
@pytest.mark.parametrize(
    "days",
    [
        pd.date_range("2022-01-01", periods=730),
        pd.date_range("2022-01-01", periods=730)[::-1],
        pd.date_range("2022-01-01", periods=730).delete([5, 6, 100]),
        pd.date_range("2022-01-01", periods=500, freq="B"),
        pd.date_range("2022-02-01", periods=10),  # no day over 12, but only one reading is regular
        pd.date_range("2022-01-01", periods=30, freq="MS"),
        pd.date_range("2022-01-01", periods=30, freq="ME"),
    ],
)
@pytest.mark.filterwarnings("ignore:stamps should be in order")
def test_numbers_of_a_date_come_in_one_order_in_all_rows(form, days):
    panel = to_panel(with_stamps(days.strftime(form)), gaps="fit")
    assert panel.stamps(0, 0, 1)[0] == days.min()
    assert panel.last()[0] == days.max()
    assert np.isfinite(panel.values).sum() == len(days)


@pytest.mark.parametrize(
    "form", ["%d-%b-%y", "%d %B %Y", "%b %d, %Y %I:%M %p", "%Y-%m-%d %I:%M %p", "%d/%m/%Y %H:%M %z"]
)
def test_dates_with_names_and_halves_of_the_day(form):
    days = pd.date_range("2022-01-01", periods=200, tz="UTC" if "%z" in form else None)
    assert list(to_panel(with_stamps(days.strftime(form))).future(1)) == [days[-1] + pd.Timedelta("1D")]


def test_years_of_two_digits_may_come_first():
    """Where that makes the steps most regular, or nothing else can be: 22-01-01 might be a day of 2001."""
    days = pd.date_range("2022-01-01", periods=400)
    assert to_panel(with_stamps(days.strftime("%y-%m-%d"))).future(1)[0] == days[-1] + pd.Timedelta("1D")
    gaps = days.delete(range(5, 400, 3))
    assert to_panel(with_stamps(gaps.strftime("%y-%m-%d")), gaps="fit").last()[0] == gaps[-1]
    days = pd.date_range("1999-12-01", periods=400).delete([5, 6, 100])
    assert to_panel(with_stamps(days.strftime("%y-%m-%d")), gaps="fit").last()[0] == days[-1]


@pytest.mark.parametrize("stamps", [["01/2022", "02/2022"], ["Apr 2022", "May 2022"], ["2022Q1", "2022Q2"]])
def test_months_and_quarters(stamps):
    assert to_panel(with_stamps(stamps)).freq in ("MS", "3MS")


@pytest.mark.parametrize("form", ["%d/%m/%y", "%m/%d/%Y"])
@pytest.mark.parametrize("freq", ["D", "MS"])
def test_dates_that_read_two_ways(form, freq):
    """The first ten days of January, or the first days of ten months."""
    text = pd.date_range("2022-01-01", periods=10, freq=freq).strftime(form)
    with pytest.raises(
        ValueError, match=r"column 'ds' must .* one way only; row 1 .* is 2022-0[12]-0[12] .* and 2022-0[12]-0"
    ):
        to_panel(with_stamps(text))
    assert to_panel(with_stamps(pd.to_datetime(text, format=form))).freq == freq  # the way out


@pytest.mark.parametrize(
    ("stamps", "match"),
    [
        (["30/01/22", "30/02/22", "01/03/22"], r"row 1 holds '30/02/22' \(1 in all\)"),
        (["Mon 3 Jan 22", "Tue 4 Jan 22"], "no one format .* the first is 'Mon 3 Jan 22'.* format="),
    ],
)
def test_texts_are_not_read_one_by_one(stamps, match):
    with pytest.raises(ValueError, match=match):
        to_panel(with_stamps(stamps))
