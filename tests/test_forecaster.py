"""The forecaster: from frames to forecasts, without looking ahead."""

import json
import re
import warnings

import numpy as np
import pandas as pd
import polars as pl
import pytest
import torch
from pandas.testing import assert_frame_equal

import bsat.forecaster
from bsat import BSplineTokenizer, DownsampleTokenizer, Forecaster, PatchTokenizer
from bsat.atomic import alone
from bsat.conformal import FLOOR, half_widths
from bsat.data.windows import Windows
from bsat.progress import TrainingBar
from small import H, L, make_forecaster, make_long, make_values, weights_of

LENGTHS = {"a": 400, "b": 360}
FOLDS = {"a": (240, 320, 400), "b": (216, 288, 360)}  # where train, validation and test end


@pytest.fixture(scope="module")
def frame():
    return make_long(**LENGTHS)


@pytest.fixture(scope="module")
def fitted(frame):
    """Shared: tests must not change it."""
    return make_forecaster().fit(frame)


def values_of(df, name):
    return df.loc[df["unique_id"] == name, "y"].to_numpy()


def windows_of(y, begin, end):
    """All windows inside [begin, end), past (W, L) and future (W, H)."""
    whole = np.lib.stride_tricks.sliding_window_view(y[begin:end], L + H)
    return whole[:, :L], whole[:, L:]


def with_values(df, change, where):
    """A copy of the frame with other values in some rows."""
    df = df.copy()
    df.loc[where, "y"] = change(df.loc[where, "y"])
    return df


def epochs_of(forecaster):
    """The history, but for how long it took."""
    return [{**e, "seconds": 0} for e in forecaster.history_.to_dict()["epochs"]]


def assert_same_weights(f, g):
    assert weights_of(f).keys() == weights_of(g).keys()
    for name, a in weights_of(f).items():
        np.testing.assert_array_equal(a, weights_of(g)[name], err_msg=name)


def assert_same(p, q):
    assert_frame_equal(p, q, check_exact=True)


# ---- predict ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokenizer", "name"),
    [(BSplineTokenizer(10), "BSAT"), (PatchTokenizer(12), "PatchTST"), (DownsampleTokenizer(12), "UDS")],
)
def test_forecasts_continue_every_series(frame, tokenizer, name):
    before = frame.copy()
    f = make_forecaster(tokenizer=tokenizer)
    assert f.fit(frame) is f
    assert f.name == name
    forecast = f.predict()
    assert list(forecast.columns) == ["unique_id", "ds", name]
    assert forecast["unique_id"].tolist() == ["a"] * H + ["b"] * H
    for series, rows in forecast.groupby("unique_id"):
        expected = pd.date_range("2024-01-01", periods=LENGTHS[series] + H, freq="h")[-H:]
        assert rows["ds"].tolist() == list(expected)
    assert forecast["ds"].dtype == frame["ds"].dtype
    assert np.isfinite(forecast[name]).all()
    assert_same(f.predict(frame), forecast)
    assert_frame_equal(frame, before)


def test_forecasts_are_in_the_unit_of_their_series(frame):
    """Not a network that has learned nothing."""
    f = make_forecaster(max_epochs=40, learning_rate=5e-3, d_model=16).fit(frame)
    naive = f.scores_["last value"].rmse
    assert f.scores_["test"].rmse < 0.5 * naive
    for name, rows in f.predict().groupby("unique_id"):
        past = values_of(frame, name)
        assert np.abs(rows["BSAT"].to_numpy() - past[-24:-12]).mean() < 0.6 * past.std()  # a day before


@pytest.mark.parametrize("freq", ["15min", "D", "MS", "B", "W-MON"])
def test_stamps_go_on_by_the_frequency_of_the_series(freq):
    df = make_long(freq=freq, start="2004-01-05" if freq != "MS" else "1990-01-01", a=300)
    f = make_forecaster().fit(df)
    expected = pd.date_range(df["ds"].iloc[0], periods=300 + H, freq=freq)[-H:]
    assert f.predict()["ds"].tolist() == list(expected)


def test_every_series_goes_on_where_it_ends():
    df = pd.concat([make_long(a=300), make_long(start="2025-07-01 06:00", z=330).replace({"unique_id": {"z": "b"}})])
    forecast = make_forecaster().fit(df).predict().set_index("unique_id")["ds"]
    assert forecast["a"].iloc[0] == pd.Timestamp("2024-01-01") + pd.Timedelta(hours=300)
    assert forecast["b"].iloc[0] == pd.Timestamp("2025-07-01 06:00") + pd.Timedelta(hours=330)


@pytest.mark.parametrize("tz", ["UTC", "Europe/Berlin", "+02:00"])
def test_stamps_with_a_time_zone_come_back_with_it(tz):
    df = make_long(start="2024-03-18", tz=tz, a=320)  # the clocks of Berlin change after 12 days and some hours
    forecast = make_forecaster().fit(df).predict()
    assert forecast["ds"].dtype == df["ds"].dtype
    assert forecast["ds"].tolist() == list(pd.date_range("2024-03-18", periods=320 + H, freq="h", tz=tz)[-H:])


@pytest.mark.parametrize("step", [1, 5])
def test_integer_stamps(fitted, frame, step):
    df = frame.assign(ds=100 + step * np.r_[0:400, 0:360])
    f = make_forecaster().fit(df)
    assert f.freq_ == step
    forecast = f.predict()
    expected = 100 + step * np.r_[400 : 400 + H, 360 : 360 + H]
    assert forecast["ds"].tolist() == expected.tolist()
    assert forecast["ds"].dtype == df["ds"].dtype
    assert forecast["BSAT"].tolist() == fitted.predict()["BSAT"].tolist()
    assert_same(f.predict(df), forecast)


def test_a_polars_frame_gives_a_polars_frame(fitted, frame):
    df = pl.from_pandas(frame)
    f = make_forecaster().fit(df)
    assert_same_weights(f, fitted)
    forecast = f.predict(df, level=[80])
    assert isinstance(forecast, pl.DataFrame)
    expected = pl.from_pandas(fitted.predict(level=[80]))
    assert forecast.columns == expected.columns
    assert forecast["ds"].dtype == df["ds"].dtype
    assert forecast.rows() == expected.rows()
    backtest = f.cross_validation(df, n_windows=2)
    assert isinstance(backtest, pl.DataFrame)
    assert backtest.rows() == pl.from_pandas(fitted.cross_validation(frame, n_windows=2)).rows()


def test_polars_stamps_with_a_time_zone():
    df = pl.from_pandas(make_long(start="2024-03-18", tz="Europe/Berlin", a=320))
    forecast = make_forecaster().fit(df).predict(df)
    assert forecast["ds"].dtype == df["ds"].dtype
    assert forecast["ds"][0] == df["ds"][-1] + pd.Timedelta(hours=1).to_pytimedelta()


def test_a_shuffled_frame_is_sorted_with_a_note(fitted, frame):
    shuffled = frame.sample(frac=1, random_state=3)
    with pytest.warns(UserWarning, match="The rows were sorted") as notes:
        f = make_forecaster().fit(shuffled)
    assert [note.filename for note in notes] == [__file__]
    with pytest.warns(UserWarning, match="The rows were sorted"):
        forecast = fitted.predict(shuffled)
    for name, rows in fitted.predict().groupby("unique_id"):
        assert forecast.loc[forecast["unique_id"] == name, "ds"].tolist() == rows["ds"].tolist()
        assert forecast.loc[forecast["unique_id"] == name, "BSAT"].tolist() == rows["BSAT"].tolist()
    assert_same(f.predict(frame), f.predict().sort_values("unique_id", kind="stable", ignore_index=True))


def test_shuffled_rows_train_the_same_network(fitted, frame):
    """Where the series still appear in the same order."""
    shuffled = pd.concat([part.sample(frac=1, random_state=3) for _, part in frame.groupby("unique_id")])
    with pytest.warns(UserWarning, match="The rows were sorted"):
        f = make_forecaster().fit(shuffled)
    assert_same_weights(f, fitted)
    assert_same(f.predict(), fitted.predict())


def test_interleaved_series_need_no_note(fitted, frame):
    wide = frame.sort_values(["ds", "unique_id"], kind="stable")
    assert_same(make_forecaster().fit(wide).predict(), fitted.predict())


def test_columns_of_other_names(fitted, frame):
    names = {"unique_id": "meter", "ds": "when", "y": "load"}
    df = frame.rename(columns=names).assign(unused="text")
    f = make_forecaster(id_col="meter", time_col="when", target_col="load").fit(df)
    forecast = f.predict(df, level=[80])
    assert_same(forecast, fitted.predict(level=[80]).rename(columns=names))
    backtest = f.cross_validation(df, n_windows=2)
    assert list(backtest.columns)[:3] == ["meter", "when", "cutoff"]


def test_a_frame_of_one_series_needs_no_id(frame):
    one = frame[frame["unique_id"] == "a"]
    f = make_forecaster(id_col=None).fit(one.drop(columns="unique_id"))
    forecast = f.predict()
    assert list(forecast.columns) == ["ds", "BSAT"]
    assert_same(forecast, make_forecaster().fit(one).predict().drop(columns="unique_id"))
    assert_same(f.predict(one), forecast)
    assert list(f.cross_validation(one, n_windows=2).columns) == ["ds", "cutoff", "y", "BSAT"]


def test_several_targets_are_channels(frame):
    df = frame.assign(z=100 * np.r_[make_values(400, 8), make_values(360, 9)])
    f = make_forecaster(target_col=["y", "z"]).fit(df)
    forecast = f.predict(level=[80])
    assert list(forecast.columns) == ["unique_id", "channel", "ds", "BSAT", "BSAT-lo-80", "BSAT-hi-80"]
    assert forecast["unique_id"].tolist() == ["a"] * 2 * H + ["b"] * 2 * H
    assert forecast["channel"].tolist() == (["y"] * H + ["z"] * H) * 2
    for (name, channel), rows in forecast.groupby(["unique_id", "channel"]):
        past = df.loc[df["unique_id"] == name, channel]
        assert rows["BSAT"].between(past.min() - 2 * past.std(), past.max() + 2 * past.std()).all()
        assert rows["ds"].iloc[0] == df.loc[df["unique_id"] == name, "ds"].iloc[-1] + pd.Timedelta(hours=1)
    assert_same(f.predict(df, level=[80]), forecast)
    backtest = f.cross_validation(df, n_windows=2)
    assert {"channel", "cutoff", "y"} < set(backtest.columns)
    for row in backtest.iloc[::7].itertuples():
        assert row.y == df.loc[(df["unique_id"] == row.unique_id) & (df["ds"] == row.ds), row.channel].item()


def test_the_channels_of_a_frame_are_its_series_by_another_name(frame):
    """Two columns make the forecasts that two series would make."""
    a, b = values_of(frame, "a")[:360], values_of(frame, "b")
    stamps = frame["ds"].iloc[:360]
    wide = pd.DataFrame({"unique_id": "s", "ds": stamps, "a": a, "b": b})
    long = pd.concat([pd.DataFrame({"unique_id": n, "ds": stamps, "y": y}) for n, y in (("a", a), ("b", b))])
    by_channel = make_forecaster(target_col=["a", "b"]).fit(wide).predict()
    by_series = make_forecaster().fit(long).predict()
    assert by_channel["BSAT"].tolist() == by_series["BSAT"].tolist()
    assert by_channel["channel"].tolist() == by_series["unique_id"].tolist()


def test_a_series_that_fit_did_not_see(fitted, frame):
    new = make_long(n1=100, n2=L).replace({"unique_id": {"n1": "new", "n2": "just long enough"}})
    forecast = fitted.predict(pd.concat([frame, new]))
    assert list(dict.fromkeys(forecast["unique_id"])) == ["a", "b", "new", "just long enough"]
    assert np.isfinite(forecast["BSAT"]).all()
    assert_same(forecast.iloc[: 2 * H], fitted.predict())


@pytest.mark.parametrize(
    ("a", "b"), [(2.0, 0.0), (3.7, 12.3), (0.013, -900.0), (1.0, 1e6), (1e-45, 0.0), (1e42, 0.0), (1e-6, 1.0)]
)
def test_forecasts_follow_the_unit(fitted, a, b):
    """A series a y + b that fit did not see has the forecasts a f + b."""
    y = make_values(200, 11)
    stamps = pd.date_range("2024-01-01", periods=200, freq="h")
    plain = fitted.predict(pd.DataFrame({"unique_id": "new", "ds": stamps, "y": y}), level=[80])
    other = fitted.predict(pd.DataFrame({"unique_id": "new", "ds": stamps, "y": a * y + b}), level=[80])
    for column in ("BSAT", "BSAT-lo-80", "BSAT-hi-80"):
        back = (other[column].to_numpy() - b) / a
        np.testing.assert_allclose(back, plain[column], rtol=0, atol=1e-3 * y.std())


def test_a_series_does_not_depend_on_the_others(fitted, frame):
    other = with_values(frame, lambda y: 1000 - 5 * y[::-1].to_numpy(), frame["unique_id"] == "b")
    forecast = fitted.predict(other)
    assert_same(forecast.iloc[:H], fitted.predict().iloc[:H])
    assert (forecast["BSAT"].iloc[H:] != fitted.predict()["BSAT"].iloc[H:]).all()
    alone = fitted.predict(frame[frame["unique_id"] == "b"])
    np.testing.assert_allclose(alone["BSAT"], fitted.predict()["BSAT"].iloc[H:], rtol=1e-6)


def test_predict_looks_at_the_last_lookback_samples(fitted, frame):
    short = frame.groupby("unique_id").tail(L)
    assert_same(fitted.predict(short), fitted.predict())
    later = fitted.predict(frame.groupby("unique_id").head(200))
    assert later["ds"].iloc[0] == frame["ds"].iloc[200]
    assert (later["BSAT"] != fitted.predict()["BSAT"]).all()


def test_more_series_than_a_batch(fitted, monkeypatch):
    many = make_long(**{f"s{i}": 60 for i in range(23)})
    whole = fitted.predict(many)
    monkeypatch.setattr(bsat.forecaster, "PREDICT_BATCH", 5)
    np.testing.assert_allclose(fitted.predict(many)["BSAT"], whole["BSAT"], rtol=1e-6)


def test_a_past_that_is_too_short_is_refused(fitted, frame):
    short = pd.concat([frame, make_long(c=L - 1)])
    with pytest.raises(ValueError, match=r"lookback = 48 samples or more.*; 1 of 3 have fewer: 'c' \(47\).*drop_short"):
        fitted.predict(short)
    with pytest.raises(ValueError, match=r"1 of 1 have fewer: 'c' \(47\)\. Pass more of its past\.$"):
        make_forecaster(drop_short=True).fit(frame).predict(make_long(c=L - 1))


def test_another_frequency_is_refused(fitted):
    with pytest.raises(ValueError, match="freq='h'"):
        fitted.predict(make_long(freq="D", a=100))
    with pytest.raises(ValueError, match="freq='h'"):
        fitted.predict(make_long(freq="15min", a=300))


def test_constant_series_are_forecast_as_constant(frame):
    df = pd.concat([frame, make_long(c=300, d=300)])
    df.loc[df["unique_id"] == "c", "y"] = 5e6
    df.loc[df["unique_id"] == "d", "y"] = 0.0
    f = make_forecaster().fit(df)
    forecast = f.predict(level=[80]).set_index("unique_id")
    spread = np.median([values_of(frame, name)[: FOLDS[name][0]].std() for name in FOLDS])
    for name, value in (("c", 5e6), ("d", 0.0)):
        np.testing.assert_allclose(forecast.loc[name, "BSAT"], value, atol=0.3)
        # A series without any spread has that of the others, and intervals are at least a tenth of it a score.
        width = spread * FLOOR * half_widths(f.conformal_, [80.0])[0]
        np.testing.assert_allclose(forecast.loc[name, "BSAT-hi-80"] - forecast.loc[name, "BSAT"], width, atol=0.3)


def test_the_unit_does_not_matter_to_constant_series(frame):
    df = pd.concat([frame, make_long(c=300)])
    df.loc[df["unique_id"] == "c", "y"] = 2.0
    one = make_forecaster().fit(df).predict(level=[80])
    small = make_forecaster().fit(with_values(df, lambda y: y * 2**-20, slice(None))).predict(level=[80])
    numbers = ["BSAT", "BSAT-lo-80", "BSAT-hi-80"]
    np.testing.assert_allclose(small[numbers] * 2**20, one[numbers], rtol=1e-6)


def test_a_series_that_wakes_up_does_not_decide_for_the_others(fitted, frame):
    """Without a train fold to measure it by, its errors would be the whole validation score."""
    late = make_long(late=400)
    for quiet in (np.zeros(300), 1e-4 * make_values(300)):
        late["y"] = np.r_[quiet, 1000 + 400 * np.sin(np.arange(100))]
        with pytest.warns(UserWarning, match="left out of validation: 'late', constant as long as") as notes:
            f = make_forecaster().fit(pd.concat([frame, late]))
        assert [note.filename for note in notes] == [__file__]
        assert f.history_.best.val_scaled_rmse < 3
        assert np.isfinite(f.predict()["BSAT"]).all()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make_forecaster().fit(late)  # alone, it is all there is


# ---- intervals -------------------------------------------------------------------------------------------------------


def test_intervals_are_nested_around_the_forecast(fitted, frame):
    forecast = fitted.predict(frame, level=[95, 80])
    names = ["BSAT", "BSAT-lo-80", "BSAT-hi-80", "BSAT-lo-95", "BSAT-hi-95"]
    assert list(forecast.columns) == ["unique_id", "ds", *names]
    order = forecast[["BSAT-lo-95", "BSAT-lo-80", "BSAT", "BSAT-hi-80", "BSAT-hi-95"]].to_numpy()
    assert (np.diff(order, axis=1) >= 0).all()
    assert (order[:, 0] < order[:, -1]).all()
    assert_same(forecast[["unique_id", "ds", "BSAT"]], fitted.predict())
    assert_same(fitted.predict(level=[80, 95]), forecast)
    assert "BSAT-lo-92.5" in fitted.predict(level=[92.5])
    assert_same(fitted.predict(level=[]), fitted.predict())


def test_intervals_are_those_of_the_validation_errors(fitted, frame):
    """All of it again, by hand: errors in deviations of their window, sorted, and the score of rank ceil((K + 1) p)."""
    scores = []
    for name, (train, val, _) in FOLDS.items():
        y = values_of(frame, name)
        scaled = (y - y[:train].mean()) / y[:train].std()
        past, future = windows_of(scaled, train, val)
        own = windows_of(y, train, val)[0]
        forecast = (fitted.forecast(own, ids=[name] * len(own)) - y[:train].mean()) / y[:train].std()
        scores.append(np.abs(future - forecast) / np.sqrt(past.var(1) + FLOOR**2)[:, None])
    scores = np.sort(np.concatenate(scores), 0)
    np.testing.assert_allclose(fitted.conformal_, scores, rtol=1e-2, atol=1e-3)

    got = fitted.predict(level=[80])
    rank = int(np.ceil(0.8 * (len(scores) + 1)))
    for name, rows in got.groupby("unique_id"):
        y = values_of(frame, name)
        spread = y[: FOLDS[name][0]].std()
        width = fitted.conformal_[rank - 1] * np.sqrt(y[-L:].var() + (FLOOR * spread) ** 2)
        np.testing.assert_allclose(rows["BSAT-hi-80"] - rows["BSAT"], width, rtol=1e-4)
        np.testing.assert_allclose(rows["BSAT"] - rows["BSAT-lo-80"], width, rtol=1e-4)


@pytest.mark.parametrize("level", [[0], [0.8], [100], ["80"], "80", True, [True], [-1], [float("nan")]])
def test_bad_levels_are_refused(fitted, frame, level):
    for call in (fitted.predict, lambda level: fitted.cross_validation(frame, n_windows=1, level=level)):
        with pytest.raises((TypeError, ValueError), match=r"`level` must .*percentages"):
            call(level=level)


def test_a_level_that_needs_more_validation_windows_is_refused(fitted, frame):
    K = len(fitted.conformal_)
    assert sum(val - train - L - H + 1 for train, val, _ in FOLDS.values()) == K
    for call in (fitted.predict, lambda level: fitted.cross_validation(frame, n_windows=1, level=level)):
        with pytest.raises(ValueError, match=f"99 % needs 99 validation windows or more, and there are {K}"):
            call(level=[80, 99])


# ---- forecast --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_the_fast_path_agrees_with_predict(fitted, frame, kind, dtype):
    windows = np.stack([values_of(frame, name)[-L:] for name in LENGTHS]).astype(dtype)
    given = torch.from_numpy(windows) if kind == "torch" else windows
    out = fitted.forecast(given, ids=["a", "b"])
    assert isinstance(out, torch.Tensor if kind == "torch" else np.ndarray)
    assert out.shape == (2, H)
    assert out.dtype == given.dtype
    expected = fitted.predict()["BSAT"].to_numpy().reshape(2, H)
    spread = windows.std(1, keepdims=True)
    limit = 1e-4 if dtype == "float64" else 1e-3  # rounded samples have other knots
    assert (np.abs(np.asarray(out) - expected) / spread).max() < limit
    np.testing.assert_allclose(fitted.forecast(given[:1], ids=["a"]), out[:1], rtol=1e-5)


def test_the_fast_path_without_ids(fitted, frame):
    """Nearly the same numbers from any scaling, because the network normalises each window."""
    windows = np.stack([values_of(frame, name)[-L:] for name in LENGTHS])
    out = fitted.forecast(windows)
    spread = windows.std(1, keepdims=True)
    assert (np.abs(out - fitted.forecast(windows, ids=["a", "b"])) / spread).max() < 1e-2
    np.testing.assert_allclose(fitted.forecast(4 * windows), 4 * out, rtol=1e-6)
    assert np.isfinite(fitted.forecast(np.full((3, L), 7.0))).all()
    whole = np.rint(10 * windows).astype(int)
    np.testing.assert_array_equal(fitted.forecast(whole), fitted.forecast(whole.astype(float)))


def test_the_fast_path_knows_the_only_series(frame):
    f = make_forecaster().fit(frame[frame["unique_id"] == "a"])
    window = values_of(frame, "a")[None, -L:]
    np.testing.assert_array_equal(f.forecast(window), f.forecast(window, ids=["a"]))


def test_the_fast_path_does_not_write_on_its_input(fitted, frame):
    windows = values_of(frame, "a")[None, -L:].copy()
    windows.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert np.isfinite(fitted.forecast(windows)).all()


@pytest.mark.parametrize("shape", [(L,), (1, L - 1), (1, L + 1), (0, L), (1, L, 1)])
def test_the_fast_path_refuses_other_shapes(fitted, shape):
    with pytest.raises(ValueError, match=r"\(B, lookback\) = \(B, 48\); got " + re.escape(str(shape))):
        fitted.forecast(np.zeros(shape))


def test_the_fast_path_refuses_what_is_missing_or_unknown(fitted):
    windows = np.random.default_rng(0).normal(size=(2, L))
    with pytest.raises(ValueError, match=r"`ids` must name a series .* got 2 ids, 'c' among them"):
        fitted.forecast(windows, ids=["a", "c"])
    with pytest.raises(ValueError, match="for each of the 2 windows; got 1 ids"):
        fitted.forecast(windows, ids=["a"])
    with pytest.raises(TypeError, match="real numbers"):
        fitted.forecast([["1"] * L])
    for bad in (np.nan, np.inf):
        windows[1, 7] = bad
        with pytest.raises(ValueError, match=r"`windows` must .*\(1, 7\)"):
            fitted.forecast(windows)
        with pytest.raises(ValueError, match=r"`windows` must .*\(1, 7\)"):
            fitted.forecast(torch.from_numpy(windows))


# ---- scores ----------------------------------------------------------------------------------------------------------


def test_scores_are_those_of_every_window_of_the_fold(fitted, frame):
    errors, last, season = [], [], []
    for name, (_, val, test) in FOLDS.items():
        past, future = windows_of(values_of(frame, name), val, test)
        errors.append(future - fitted.forecast(past, ids=[name] * len(past)))
        last.append(future - past[:, -1:])
        season.append(future - past[:, L - 24 : L - 24 + H])
    assert fitted.scores_["test"].windows == sum(map(len, errors))
    for name, parts in (("test", errors), ("last value", last), ("seasonal naive", season)):
        error = np.concatenate(parts)
        rtol = 1e-3 if name == "test" else 1e-5
        np.testing.assert_allclose(fitted.scores_[name].rmse, np.sqrt(np.mean(error**2)), rtol=rtol)
        np.testing.assert_allclose(fitted.scores_[name].mae, np.abs(error).mean(), rtol=rtol)
    assert fitted.scores_["val"].windows == len(fitted.conformal_)
    np.testing.assert_allclose(fitted.scores_["val"].rmse, fitted.history_.best.val_rmse, rtol=1e-12)


def test_without_a_test_fold_there_are_no_test_scores(frame):
    f = make_forecaster(folds=(0.8, 0.2, 0)).fit(frame)
    assert f.scores_["test"] is None
    assert {name for name, scores in f.scores_.items() if scores is not None} == {"val"}


def test_without_a_season_its_score_is_none():
    f = make_forecaster().fit(make_long(a=400).assign(ds=range(400)))
    assert f.scores_["seasonal naive"] is None
    assert f.scores_["last value"].rmse > 0


def test_without_a_test_fold_validation_is_scored(frame):
    f = make_forecaster(folds=(0.8, 0.2, 0)).fit(frame)
    assert f.scores_["val"].windows == 80 + 72 - 2 * (L + H - 1)


# ---- training --------------------------------------------------------------------------------------------------------


def test_every_series_is_scaled_by_its_own_train_fold(fitted, frame):
    for row, (name, (train, _, _)) in enumerate(FOLDS.items()):
        y = values_of(frame, name)
        assert fitted.mean_[row] == y[:train].mean()
        assert fitted.deviation_[row] == y[:train].std()


def test_a_fit_repeats_bitwise(fitted, frame):
    torch.manual_seed(1)
    np.random.seed(1)
    torch_state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].copy()
    again = make_forecaster().fit(frame)
    assert torch.equal(torch.get_rng_state(), torch_state)
    np.testing.assert_array_equal(np.random.get_state()[1], numpy_state)
    assert_same_weights(again, fitted)
    assert epochs_of(again) == epochs_of(fitted)
    assert again.scores_ == fitted.scores_
    assert_same(again.predict(level=[80]), fitted.predict(level=[80]))
    other = make_forecaster(seed=7).fit(frame)
    assert (other.predict()["BSAT"] != fitted.predict()["BSAT"]).all()


def test_a_seed_may_be_an_integer_of_numpy(frame):
    assert_same_weights(make_forecaster(seed=np.int64(3)).fit(frame), make_forecaster(seed=3).fit(frame))


def test_a_second_fit_starts_anew(fitted, frame):
    f = make_forecaster().fit(make_long(freq="D", z=300))
    f.fit(frame)
    assert_same_weights(f, fitted)
    assert_same(f.predict(), fitted.predict())


def test_a_fit_that_fails_leaves_the_forecaster_as_it_was(frame, monkeypatch):
    f = make_forecaster(tokenizer=BSplineTokenizer(10, clip_factor="auto")).fit(frame)
    before, clip_factor = f.predict(level=[80]), f.tokenizer_.clip_factor_

    def fail(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(bsat.forecaster, "train", fail)
    other = with_values(frame, lambda y: np.round(y / 8) ** 3, slice(None))  # steps, which want another clip factor
    with pytest.raises(KeyboardInterrupt):
        f.fit(other)
    assert f.tokenizer_.clip_factor_ == clip_factor
    assert_same(f.predict(level=[80]), before)


def test_the_tokenizer_that_was_passed_in_is_left_alone(frame):
    tokenizer = BSplineTokenizer(10, clip_factor="auto")
    f = make_forecaster(tokenizer=tokenizer).fit(frame)
    assert not hasattr(tokenizer, "clip_factor_")
    train = [windows_of(values_of(frame, name), 0, train)[0] for name, (train, _, _) in FOLDS.items()]
    scaled = [(w - m) / d for w, m, d in zip(train, f.mean_, f.deviation_, strict=True)]
    expected = BSplineTokenizer(10, clip_factor="auto").fit(np.concatenate(scaled)[::100].astype(np.float32))
    assert f.tokenizer_.clip_factor_ == expected.clip_factor_


def in_test_fold(samples):
    """Whether samples of the frame, laid end to end, lie in the test fold of their series."""
    return ((samples >= 320) & (samples < 400)) | (samples >= 400 + 288)


def test_the_test_fold_is_read_once_after_training(frame, monkeypatch):
    reads, trained = [], []

    def spy_on(part, begin, end):
        real = getattr(Windows, part)

        def read(self, index):
            samples = self.starts[index].reshape(-1, 1).numpy() + np.arange(begin, end)
            reads.append((part, bool(trained), samples))
            return real(self, index)

        monkeypatch.setattr(Windows, part, read)

    def train(*args, real=bsat.forecaster.train, **kwargs):
        history = real(*args, **kwargs)
        trained.append(True)
        return history

    spy_on("past", 0, L)
    spy_on("future", L, L + H)
    monkeypatch.setattr(bsat.forecaster, "train", train)
    f = make_forecaster().fit(frame)
    assert trained == [True]
    before = np.concatenate([samples.ravel() for _, after, samples in reads if not after])
    assert len(before)
    assert not in_test_fold(before).any()
    futures = [samples for part, after, samples in reads if part == "future" and after]
    scored = np.concatenate([samples[in_test_fold(samples).any(1)] for samples in futures])
    assert len(scored) == len(np.unique(scored[:, 0])) == f.scores_["test"].windows == 34


@pytest.mark.parametrize("gaps", ["error", "fit", "fill"])
def test_the_test_fold_changes_nothing_about_the_training(frame, gaps):
    rows = in_test_fold(np.arange(len(frame)))
    plain = make_forecaster(gaps=gaps).fit(frame)
    other = make_forecaster(gaps=gaps).fit(with_values(frame, lambda y: 50 + 9 * y.to_numpy() ** 2, rows))
    assert_same_weights(plain, other)
    assert epochs_of(plain) == epochs_of(other)
    np.testing.assert_array_equal(plain.mean_, other.mean_)
    np.testing.assert_array_equal(plain.deviation_, other.deviation_)
    np.testing.assert_array_equal(plain.conformal_, other.conformal_)
    assert plain.scores_["val"] == other.scores_["val"]
    assert plain.scores_["test"] != other.scores_["test"]


@pytest.mark.parametrize("gaps", ["fit", "fill"])
def test_a_gap_before_the_test_fold_is_not_filled_from_it(frame, gaps):
    """The last two samples of the validation fold and the first of the test fold are missing."""
    holes = frame.copy()
    holes.loc[318:320, "y"] = np.nan
    rows = in_test_fold(np.arange(len(frame)))
    plain = make_forecaster(gaps=gaps).fit(holes)
    other = make_forecaster(gaps=gaps).fit(with_values(holes, lambda y: 50 + 9 * y, rows))
    assert_same_weights(plain, other)
    assert epochs_of(plain) == epochs_of(other)
    np.testing.assert_array_equal(plain.conformal_, other.conformal_)


def test_the_plan_is_printed_before_training(frame, monkeypatch, capsys):
    said = []

    def train(*args, real=bsat.forecaster.train, **kwargs):
        said.append(capsys.readouterr())
        return real(*args, **kwargs)

    monkeypatch.setattr(bsat.forecaster, "train", train)
    f = make_forecaster(verbose=True).fit(frame)
    ((out, plan),) = said
    n_train = sum(train - L - H + 1 for train, _, _ in FOLDS.values())
    n_val = sum(val - train - L - H + 1 for train, val, _ in FOLDS.values())
    assert f"windows: {n_train} train (200 an epoch), {n_val} validation" in plan
    assert "BSAT: 2 series, 760 samples, every h" in plan
    weights = sum(a.size for name, a in weights_of(f).items() if "running" not in name and "num_batches" not in name)
    assert f"{weights:,} parameters" in plan
    assert re.search(r"memory about [1-9][\d,]* MiB \(.*batch \d+", plan)
    after = capsys.readouterr()
    assert re.search(r"2 epochs \(all epochs done\), best [12]; validation RMSE .*; test RMSE ", after.err)
    assert out == after.out == ""


def test_nothing_is_printed_if_asked_for(frame, capsys):
    f = make_forecaster().fit(frame)
    f.predict()
    f.cross_validation(frame, n_windows=1, refit=True)
    assert capsys.readouterr() == ("", "")


# ---- checkpoints -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def three_epochs(frame):
    return make_forecaster(max_epochs=3).fit(frame)


@pytest.fixture
def interrupt(monkeypatch):
    """Press Ctrl-C in the middle of an epoch, or after its validation."""

    def at(epoch, when):
        def press(self, now, step, loss, last):
            validated = last is not None and last.epoch == now
            if now == epoch and validated == (when == "after"):
                raise KeyboardInterrupt

        monkeypatch.setattr(TrainingBar, "__call__", press)

    return at


@pytest.mark.parametrize("when", ["within", "after"])
def test_an_interrupted_training_resumes_to_the_same_forecasts(
    frame, three_epochs, tmp_path, interrupt, when, monkeypatch
):
    interrupt(1, when)
    f = make_forecaster(max_epochs=3, verbose=True).fit(frame, checkpoint=tmp_path / "state")
    assert f.history_.stopped == "interrupted"
    assert len(f.history_.epochs) == (1 if when == "within" else 2)
    assert np.isfinite(f.predict()["BSAT"]).all()  # of the best weights so far
    monkeypatch.undo()
    g = make_forecaster(max_epochs=3).fit(frame, checkpoint=tmp_path / "state", resume=True)
    assert g.history_.stopped == "max_epochs"
    assert epochs_of(g) == epochs_of(three_epochs)
    assert_same_weights(g, three_epochs)
    assert_same(g.predict(level=[80]), three_epochs.predict(level=[80]))


def test_an_interrupt_before_the_first_validation_is_passed_on(frame, tmp_path, interrupt):
    interrupt(0, "within")
    with pytest.raises(KeyboardInterrupt):
        make_forecaster(verbose=True).fit(frame, checkpoint=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_an_unfinished_training_is_not_thrown_away(frame, tmp_path, interrupt, monkeypatch):
    interrupt(1, "within")
    f = make_forecaster(max_epochs=3, verbose=True).fit(frame, checkpoint=tmp_path)
    assert f.scores_["test"] is None  # a training that may go on has not looked at the test fold
    assert f.scores_["val"] is not None
    monkeypatch.undo()
    with pytest.raises(ValueError, match=r"not finished\. Resume it, or delete"):
        make_forecaster(max_epochs=3).fit(frame, checkpoint=tmp_path)
    assert make_forecaster(max_epochs=3).fit(frame, checkpoint=tmp_path, resume=True).scores_["test"] is not None
    make_forecaster(max_epochs=1).fit(frame, checkpoint=tmp_path)  # a finished one makes room


def test_two_trainings_do_not_share_a_folder(frame, tmp_path):
    told = pytest.raises(BlockingIOError, match=r"training in .* is being worked on by another process")
    with alone(tmp_path / "training.safetensors", "training"), told:  # as another process does while it trains
        make_forecaster().fit(frame, checkpoint=tmp_path)
    make_forecaster().fit(frame, checkpoint=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["training.safetensors"]


def test_what_a_killed_training_was_writing_goes_with_the_next(frame, tmp_path):
    (tmp_path / ".bsat-writing-training-1.safetensors").write_text("half")
    make_forecaster().fit(frame, checkpoint=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["training.safetensors"]


def test_resuming_nothing_is_told(frame, tmp_path, capsys):
    make_forecaster(verbose=True).fit(frame, checkpoint=tmp_path, resume=True)
    assert "nothing to resume" in capsys.readouterr().err


def test_an_interrupt_ends_a_backtest(frame, interrupt):
    interrupt(1, "within")
    with pytest.raises(KeyboardInterrupt):
        make_forecaster(max_epochs=3, verbose=True).cross_validation(frame, n_windows=2, refit=True)


def test_a_backtest_may_be_forbidden_to_fit(fitted, frame):
    fitted.cross_validation(frame, n_windows=1, allow_fit=False)
    for f, count in ((fitted, 20), (make_forecaster(), 1)):
        with pytest.raises(ValueError, match="must come after what the model learned from"):
            f.cross_validation(frame, n_windows=count, step=1 if count == 1 else 12, allow_fit=False)


@pytest.mark.parametrize(
    "columns", [{"id_col": "BSAT"}, {"time_col": "cutoff"}, {"id_col": "channel"}, {"time_col": "y"}]
)
def test_columns_must_not_collide_with_those_of_the_forecasts(columns):
    with pytest.raises(ValueError, match="the forecasts have columns of these names"):
        make_forecaster(**columns)


def test_filled_series_are_forecast_alike_with_and_without_a_frame(frame):
    """Also where a gap lies across the edge of the test fold, within the last window."""
    short = frame[frame["unique_id"] == "a"].iloc[:300]
    f = make_forecaster(gaps="fill", folds=(0.6, 0.3, 0.1))
    gappy = short.drop(index=[*short.index[248:256], *short.index[262:278]])  # window: 252 on; fold: 270 on
    f.fit(gappy)
    assert_same(f.predict(level=[80]), f.predict(gappy, level=[80]))
    thin = short.drop(index=short.index[255:290])
    with pytest.raises(ValueError, match="must not make up most of a window"):
        f.predict(thin)


def test_an_unseen_series_with_gaps_is_scaled_by_all_that_is_given(frame):
    f = make_forecaster(gaps="fill").fit(frame)
    new = make_long(new=300)
    new.loc[:200, "y"] += 1000
    mean, deviation = new["y"].mean(), new["y"].std(ddof=0)
    assert f._scaling(f._ready(f._to_panel(new, f.freq_))) == (pytest.approx([mean]), pytest.approx([deviation]))


def test_a_finished_training_can_be_prolonged(frame, three_epochs, tmp_path):
    make_forecaster(max_epochs=2).fit(frame, checkpoint=tmp_path)
    for _ in range(2):  # the second time there is nothing left to do
        f = make_forecaster(max_epochs=3).fit(frame, checkpoint=tmp_path, resume=True)
        assert epochs_of(f) == epochs_of(three_epochs)
        assert_same(f.predict(), three_epochs.predict())


def test_a_checkpoint_changes_nothing_and_is_started_over_unless_resumed(frame, fitted, tmp_path):
    for resume in (True, False):  # the first time there is nothing to go on from
        f = make_forecaster().fit(frame, checkpoint=tmp_path, resume=resume)
        assert_same_weights(f, fitted)
        assert [path.name for path in tmp_path.iterdir()] == ["training.safetensors"]


def test_a_checkpoint_of_another_training_is_refused(frame, tmp_path):
    make_forecaster(max_epochs=1).fit(frame, checkpoint=tmp_path)
    other = with_values(frame, lambda y: y + 1e-9, [700])
    for f, df in (
        (make_forecaster(), other),
        (make_forecaster(), frame.iloc[:-1]),
        (make_forecaster(seed=1), frame),
        (make_forecaster(dropout=0.2), frame),
        (make_forecaster(tokenizer=BSplineTokenizer(10, clip_factor=0.5)), frame),
        (make_forecaster(tokenizer=BSplineTokenizer(9)), frame),
        (make_forecaster(folds=(0.7, 0.3, 0)), frame),
    ):
        with pytest.raises(ValueError, match="belongs to a training on other data or with other settings"):
            f.fit(df, checkpoint=tmp_path, resume=True)


def test_a_damaged_checkpoint_is_refused(frame, tmp_path):
    make_forecaster(max_epochs=1).fit(frame, checkpoint=tmp_path)
    path = tmp_path / "training.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match="not a whole checkpoint"):
        make_forecaster().fit(frame, checkpoint=tmp_path, resume=True)


def test_resuming_needs_a_checkpoint(frame):
    with pytest.raises(ValueError, match="`resume` needs the folder"):
        make_forecaster().fit(frame, resume=True)


# ---- gaps ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gappy(frame):
    """Stamps that are left out, NaN, both inside the last lookback too, and a NaN at the very end of "a"."""
    df = frame.drop(index=[30, 31, 250, 380, 381, 740])
    df.loc[[100, 101, 102, 310, 375, 399, 405, 730], "y"] = np.nan
    return df


def test_gaps_are_an_error_that_names_the_first(frame):
    with pytest.raises(ValueError, match=r"series 'b' lacks 2 after 2024-01-01 04:00:00 \(2 in all, in 1 of 2 series"):
        make_forecaster().fit(frame.drop(index=[405, 406]))
    holes = with_values(frame, lambda y: np.nan, [405, 406])
    with pytest.raises(ValueError, match=r"'y' must hold finite.*series 'b' has nan at 2024-01-01 05:00:00 \(2 in all"):
        make_forecaster().fit(holes)


@pytest.mark.parametrize(
    "changes", [{}, {"head": "spline"}, {"norm": "window"}, {"tokenizer": BSplineTokenizer(10, detail=2)}]
)
@pytest.mark.parametrize("gaps", ["fit", "fill"])
def test_series_with_gaps(gappy, gaps, changes):
    f = make_forecaster(gaps=gaps, **changes).fit(gappy)
    forecast = f.predict(level=[80])
    assert np.isfinite(forecast.drop(columns=["unique_id", "ds"])).all(axis=None)
    by_name = forecast.set_index("unique_id")["ds"]
    hours = pd.Timedelta(hours=1) * np.arange(H)
    assert by_name["a"].tolist() == list(pd.Timestamp("2024-01-01") + pd.Timedelta(hours=399) + hours)
    assert by_name["b"].tolist() == list(pd.Timestamp("2024-01-01") + pd.Timedelta(hours=360) + hours)
    assert_same(f.predict(gappy, level=[80]), forecast)


def test_filling_is_interpolating(gappy, frame):
    filled = frame.iloc[np.r_[0:399, 400:760]].copy()
    filled.loc[filled.index.difference(gappy.index[gappy["y"].notna()]), "y"] = np.nan
    filled["y"] = filled.groupby("unique_id")["y"].transform(lambda y: y.interpolate())
    plain = make_forecaster().fit(filled)
    f = make_forecaster(gaps="fill").fit(gappy)
    np.testing.assert_allclose(f.mean_, plain.mean_, rtol=1e-12)
    np.testing.assert_allclose(f.predict()["BSAT"], plain.predict()["BSAT"], rtol=1e-3)


@pytest.mark.parametrize("gaps", ["fit", "fill"])
def test_without_gaps_all_ways_are_one(fitted, frame, gaps):
    f = make_forecaster(gaps=gaps).fit(frame)
    assert_same_weights(f, fitted)
    assert_same(f.predict(level=[80]), fitted.predict(level=[80]))


def test_what_is_missing_is_not_read(frame):
    """Two frames that differ only in how they say that a sample is missing."""
    missing = [30, 31, 250, 380, 381, 740]
    dropped = make_forecaster(gaps="fit").fit(frame.drop(index=missing))
    nan = make_forecaster(gaps="fit").fit(with_values(frame, lambda y: np.nan, missing))
    assert_same_weights(dropped, nan)
    assert_same(dropped.predict(), nan.predict())


def test_a_past_with_too_few_samples_is_refused(frame):
    f = make_forecaster(gaps="fit").fit(frame)
    holes = frame.drop(index=range(361, 399))  # leaves 10 of the last 48
    with pytest.raises(ValueError, match="more observed samples than n_tokens = 10; 'a' has 10"):
        f.predict(holes)
    assert np.isfinite(f.predict(frame.drop(index=range(362, 399)))["BSAT"]).all()


def test_tokens_that_need_complete_windows_cannot_fit_gaps():
    for tokenizer in (PatchTokenizer(12), DownsampleTokenizer(12)):
        with pytest.raises(ValueError, match=f"`gaps` must be 'error' or 'fill' with {type(tokenizer).__name__}"):
            make_forecaster(tokenizer=tokenizer, gaps="fit")
        make_forecaster(tokenizer=tokenizer, gaps="fill")


def test_gaps_with_an_unfitted_clip_factor(gappy, frame):
    f = make_forecaster(gaps="fit", tokenizer=BSplineTokenizer(10, clip_factor="auto")).fit(gappy)
    assert np.isfinite(f.predict()["BSAT"]).all()
    holes = frame.drop(index=frame.index[::20])
    with pytest.raises(ValueError, match=r"needs windows without missing samples .* Give a number"):
        make_forecaster(gaps="fit", tokenizer=BSplineTokenizer(10, clip_factor="auto")).fit(holes)


# ---- backtest --------------------------------------------------------------------------------------------------------


@pytest.fixture
def fits(monkeypatch):
    """The lengths of the series of every fit from here on."""
    lengths = []

    def fit(self, panel, *args, real=Forecaster._fit, **kwargs):
        lengths.append(panel.lengths.tolist())
        return real(self, panel, *args, **kwargs)

    monkeypatch.setattr(Forecaster, "_fit", fit)
    return lengths


@pytest.mark.parametrize("step", [None, 5, 20])
def test_a_backtest_sets_forecasts_beside_what_came(fitted, frame, step):
    backtest = fitted.cross_validation(frame, n_windows=3, step=step)
    assert list(backtest.columns) == ["unique_id", "ds", "cutoff", "y", "BSAT"]
    assert len(backtest) == 2 * 3 * H
    assert np.isfinite(backtest["BSAT"]).all()
    joined = backtest.merge(frame, on=["unique_id", "ds"], suffixes=("", "_frame"), validate="many_to_one")
    assert len(joined) == len(backtest)
    assert joined["y"].tolist() == joined["y_frame"].tolist()
    hour = pd.Timedelta(hours=1)
    for name, rows in backtest.groupby("unique_id"):
        end = frame.loc[frame["unique_id"] == name, "ds"].iloc[-1]
        cutoffs = [end - hour * (H + (step or H) * k) for k in (2, 1, 0)]
        assert rows["cutoff"].tolist() == [c for c in cutoffs for _ in range(H)]
        assert rows["ds"].tolist() == [c + hour * h for c in cutoffs for h in range(1, H + 1)]
    for column in ("ds", "cutoff"):
        assert backtest[column].dtype == frame["ds"].dtype


def test_a_backtest_with_intervals(fitted, frame):
    backtest = fitted.cross_validation(frame, n_windows=2, level=[80])
    assert list(backtest.columns) == ["unique_id", "ds", "cutoff", "y", "BSAT", "BSAT-lo-80", "BSAT-hi-80"]
    assert (backtest["BSAT-lo-80"] < backtest["BSAT"]).all()
    assert (backtest["BSAT"] < backtest["BSAT-hi-80"]).all()


@pytest.mark.parametrize("stamps", ["integers", "tz"])
def test_a_backtest_with_other_stamps(frame, stamps):
    ds = np.r_[0:400, 0:360] if stamps == "integers" else frame["ds"].dt.tz_localize("Europe/Berlin")
    backtest = make_forecaster().cross_validation(frame.assign(ds=ds), n_windows=2)
    assert backtest["ds"].dtype == backtest["cutoff"].dtype == ds.dtype
    one = 1 if stamps == "integers" else pd.Timedelta(hours=1)
    assert backtest["ds"].iloc[0] == backtest["cutoff"].iloc[0] + one
    assert backtest["ds"].iloc[H - 1 + H] == list(ds)[399]


def test_a_fitted_forecaster_is_used_for_what_it_has_not_learned_from(fitted, frame, fits):
    backtest = fitted.cross_validation(frame, n_windows=3)
    assert fits == []
    for cut in (1, 2, 3):
        before = frame.groupby("unique_id").head(400).groupby("unique_id", group_keys=False)
        part = pd.concat([rows.iloc[: len(rows) - H * cut] for _, rows in before])
        expected = fitted.predict(part)
        cutoffs = part.groupby("unique_id")["ds"].max()
        got = backtest[backtest["cutoff"] == backtest["unique_id"].map(cutoffs)]
        assert got["BSAT"].tolist() == expected["BSAT"].tolist()
        assert got["ds"].tolist() == expected["ds"].tolist()


def test_a_fitted_forecaster_is_not_used_for_what_it_learned_from(fitted, frame, fits):
    """Of "a" 80 samples are left for the test, and of "b" 72: five cutoffs fit in with a step of 12, six do in "a"."""
    fitted.cross_validation(frame, n_windows=6)
    assert fits == []  # "b" is cut at 288, which is where its validation fold ends
    backtest = fitted.cross_validation(frame, n_windows=6, step=13)
    assert fits == [[400 - H - 5 * 13, 360 - H - 5 * 13]]
    assert_same(backtest, make_forecaster().cross_validation(frame, n_windows=6, step=13))


def test_a_forecaster_that_was_fitted_to_the_whole_series_is_not_used(frame, fits):
    f = make_forecaster(folds=(0.8, 0.2, 0)).fit(frame)
    fits.clear()
    f.cross_validation(frame, n_windows=1)
    assert fits == [[400 - H, 360 - H]]
    longer = make_long(a=400 + H, b=360 + H)
    f.cross_validation(longer, n_windows=1)
    assert len(fits) == 1


def test_without_refit_one_model_serves_all_cutoffs(frame, fits):
    f = make_forecaster()
    f.cross_validation(frame, n_windows=3)
    assert fits == [[400 - 3 * H, 360 - 3 * H]]
    assert not hasattr(f, "network_")


def test_with_refit_every_cutoff_has_its_own_model(fitted, frame, fits):
    for f in (fitted, make_forecaster()):
        fits.clear()
        backtest = f.cross_validation(frame, n_windows=3, refit=True)
        assert fits == [[400 - k * H, 360 - k * H] for k in (3, 2, 1)]
    fresh = make_forecaster(folds=(0.75, 0.25, 0))
    before = frame.drop(index=[*range(400 - 2 * H, 400), *range(760 - 2 * H, 760)])
    expected = fresh.fit(before).predict()
    got = pd.concat([rows.iloc[H : 2 * H] for _, rows in backtest.groupby("unique_id")])
    assert got["ds"].tolist() == expected["ds"].tolist()
    assert got["BSAT"].tolist() == expected["BSAT"].tolist()


@pytest.mark.parametrize("refit", [False, True])
@pytest.mark.parametrize("gaps", ["error", "fit", "fill"])
def test_a_backtest_does_not_look_ahead(frame, refit, gaps):
    """Forecasts from a cutoff are bitwise the same, whatever comes after it; with gaps, one lies across the cutoff."""
    cut = {"a": 400 - 2 * H, "b": 360 - 2 * H}
    sample = frame.groupby("unique_id").cumcount()
    after = sample >= frame["unique_id"].map(cut)
    if gaps != "error":
        frame = with_values(frame, lambda y: np.nan, (sample - frame["unique_id"].map(cut)).between(-3, 1))
    f = make_forecaster(gaps=gaps)
    plain = f.cross_validation(frame, n_windows=3, refit=refit, level=[80])
    other = f.cross_validation(
        with_values(frame, lambda y: 50 + y.to_numpy() ** 2, after), n_windows=3, refit=refit, level=[80]
    )
    number = plain.groupby("unique_id").cumcount() // H
    early = number <= 1
    forecasts = ["unique_id", "ds", "cutoff", "BSAT", "BSAT-lo-80", "BSAT-hi-80"]
    assert_same(plain.loc[early, forecasts], other.loc[early, forecasts])
    assert (plain.loc[~early, "BSAT"] != other.loc[~early, "BSAT"]).all()


@pytest.mark.parametrize("gaps", ["fit", "fill"])
def test_what_came_is_missing_where_the_frame_has_a_gap(frame, gaps):
    missing = [392, 393, 750]
    backtest = make_forecaster(gaps=gaps).cross_validation(frame.drop(index=missing), n_windows=2)
    lost = frame.loc[missing, ["unique_id", "ds"]].apply(tuple, axis=1).tolist()
    for row in backtest.itertuples():
        assert np.isnan(row.y) == ((row.unique_id, row.ds) in lost)


@pytest.mark.parametrize("refit", [False, True])
def test_a_backtest_does_not_change_the_forecaster(frame, refit):
    f = make_forecaster().fit(frame)
    before, weights, attributes = f.predict(level=[80]), weights_of(f), set(vars(f))
    weights = {name: a.copy() for name, a in weights.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that 'c' is new
        f.cross_validation(make_long(a=380, c=340), n_windows=2, refit=refit)
    assert set(vars(f)) == attributes
    for name, a in weights_of(f).items():
        np.testing.assert_array_equal(a, weights[name])
    assert_same(f.predict(level=[80]), before)


def test_series_by_other_names_are_pointed_out(fitted, frame):
    """They may be what the model was trained on."""
    renamed = frame.assign(unique_id=frame["unique_id"].map({"a": 1, "b": 2}))
    with pytest.warns(UserWarning, match=r"2 of 2 series have ids that `fit` did not see, 1 \(of type int\) for one"):
        fitted.cross_validation(renamed, n_windows=20, allow_fit=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fitted.cross_validation(make_long(start="2025-01-01", c=400), n_windows=2, allow_fit=False)  # all of it later


def test_bad_backtests_are_refused(fitted, frame):
    with pytest.raises(ValueError, match=r"= 372 samples or more for `n_windows` = 27 cutoffs 12 apart.*'b' \(360\)"):
        fitted.cross_validation(frame, n_windows=27)
    with pytest.warns(UserWarning, match=r"left out 1 series shorter than 96 samples: 's' \(80\)"):
        backtest = make_forecaster(drop_short=True).cross_validation(pd.concat([frame, make_long(s=80)]), n_windows=4)
    assert set(backtest["unique_id"]) == {"a", "b"}
    for name in ("n_windows", "step"):
        with pytest.raises(ValueError, match=f"`{name}` must be at least 1; got 0"):
            fitted.cross_validation(frame, **{name: 0})
        with pytest.raises(TypeError, match=f"`{name}` must be a whole number"):
            fitted.cross_validation(frame, **{name: 1.5})
    with pytest.raises(TypeError, match="pandas or polars DataFrame"):
        fitted.cross_validation({"y": [1.0]})


# ---- frames that are refused -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        (lambda df: df.drop(columns="y"), ValueError, "must have the column 'y'"),
        (lambda df: df.drop(columns="unique_id"), ValueError, "must have the column 'unique_id'.*id_col=None"),
        (lambda df: df.set_index("ds"), ValueError, r"must have the column 'ds'.*reset_index"),
        (lambda df: df.assign(y=["much"] * len(df)), TypeError, "'y' must hold numbers; row 0 holds 'much'"),
        (lambda df: with_values(df, lambda y: np.nan, [7]), ValueError, "'y' must hold finite numbers.*'a' has nan"),
        (lambda df: with_values(df, lambda y: np.inf, [7]), ValueError, "'y' must hold finite numbers.*'a' has inf"),
        (lambda df: with_values(df, lambda y: 1e200, [7]), ValueError, r"values must stay within ±1e\+150"),
        (lambda df: df.iloc[[0, *range(760)]], ValueError, "'a' has 2024-01-01 00:00:00 twice"),
        (lambda df: df.drop(index=50), ValueError, "'a' lacks 1 after 2024-01-03 01:00:00"),
        (lambda df: pd.concat([df, make_long(freq="D", c=100)]), ValueError, "all series must have one frequency"),
        (lambda df: pd.concat([df, make_long(c=59)]), ValueError, r"= 60 samples or more; 1 of 3.*'c' \(59\)"),
        (lambda df: df.iloc[:0], ValueError, "at least one row"),
        (lambda df: df.assign(ds=pd.NaT), ValueError, "stamp in every row"),
        (lambda df: df.assign(unique_id=None), ValueError, "must name a series in every row"),
        (lambda df: df.to_dict("list"), TypeError, r"pandas or polars DataFrame; got builtins\.dict"),
        (lambda df: df.to_numpy(), TypeError, r"pandas or polars DataFrame; got numpy\.ndarray"),
        (lambda df: df["y"], TypeError, r"pandas or polars DataFrame; got .*Series"),
        (lambda df: pl.from_pandas(df).lazy(), TypeError, r"collect\(\)"),
        (lambda df: None, TypeError, "pandas or polars DataFrame; got"),
    ],
)
def test_bad_frames_are_refused(frame, change, kind, message):
    f = make_forecaster()
    with pytest.raises(kind, match=message):
        f.fit(change(frame))
    assert not hasattr(f, "network_")


@pytest.mark.parametrize("freq", ["D", "quickly", 1])
def test_a_frequency_that_does_not_fit_is_refused(frame, freq):
    with pytest.raises(ValueError, match="freq"):
        make_forecaster(freq=freq).fit(frame)


def test_a_frequency_that_was_given(fitted, frame):
    assert_same(make_forecaster(freq="h").fit(frame).predict(), fitted.predict())


@pytest.mark.parametrize("freq", [pd.Timedelta("1h"), np.timedelta64(1, "h"), pd.offsets.Hour()])
def test_a_frequency_of_another_kind_can_be_saved(frame, freq, tmp_path):
    f = make_forecaster(freq=freq, tokenizer=BSplineTokenizer(10, recency=np.float32(1), max_coefficient=np.int64(10)))
    assert f.freq == "h"
    f.fit(frame).save(tmp_path / "m")
    assert_same(Forecaster.load(tmp_path / "m", verbose=False).predict(), f.predict())


@pytest.mark.parametrize("value", [1e20, 9.97e36, -1e39])
def test_fill_values_are_refused_by_name(fitted, frame, value):
    for row in (230, 300, 390):
        wrong = with_values(frame, lambda y: value, row)
        message = rf"within 1e\+15 deviations .*; 'a' has {re.escape(f'{value:g}')} at {frame['ds'][row]}.*NaN"
        if row > 240:  # else it is part of the deviation
            with pytest.raises(ValueError, match=message):
                make_forecaster().fit(wrong)
    with pytest.raises(ValueError, match=message):
        fitted.predict(wrong)


def test_short_series_are_left_out_if_asked_for(fitted, frame):
    df = pd.concat([make_long(s1=59, s2=10), frame])
    with pytest.raises(ValueError, match=r"2 of 4 have fewer: 's1' \(59\), 's2' \(10\)\. .*drop_short=True"):
        make_forecaster().fit(df)
    f = make_forecaster(drop_short=True)
    with pytest.warns(UserWarning, match=r"left out 2 series shorter than 60 .* 's1' \(59\), 's2' \(10\)") as notes:
        f.fit(df)
    assert [note.filename for note in notes] == [__file__]
    assert_same_weights(f, fitted)
    assert_same(f.predict(), fitted.predict())
    with pytest.warns(UserWarning, match="left out 2 series") as notes:
        backtest = f.cross_validation(df, n_windows=1)
    assert [note.filename for note in notes] == [__file__]
    assert_same(backtest, fitted.cross_validation(frame, n_windows=1))
    with pytest.warns(UserWarning, match=r"left out 1 series shorter than 48 samples: 's2' \(10\)"):
        forecast = f.predict(df)
    assert_same(forecast[forecast["unique_id"] != "s1"].reset_index(drop=True), fitted.predict())


def test_only_short_series_are_refused():
    df = make_long(a=59, b=40)
    with pytest.raises(ValueError, match=r"lookback \+ horizon = 60 samples or more; 2 of 2 have fewer.*`horizon`\.$"):
        make_forecaster(drop_short=True).fit(df)


def test_too_few_observed_samples_are_told_as_such():
    df = make_long(a=400).iloc[::6]
    with pytest.raises(ValueError, match=r"window with 11 observed samples or more among its lookback = 48.*fewer tok"):
        make_forecaster(gaps="fit", freq="h").fit(df)


def test_folds_too_short_for_a_window_are_refused():
    with pytest.raises(ValueError, match=r"the train fold must hold at least one window of .* 100 samples and 59"):
        make_forecaster(folds=(0.59, 0.3, 0.11)).fit(make_long(a=100))
    with pytest.raises(ValueError, match="the val fold must hold at least one window"):
        make_forecaster(folds=(0.95, 0.05, 0)).fit(make_long(a=200))


# ---- the constructor -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"horizon": 0}, ValueError, "`horizon` must be at least 1; got 0"),
        ({"horizon": 2.5}, TypeError, "`horizon` must be a whole number"),
        ({"horizon": True}, TypeError, "`horizon` must be a whole number"),
        ({"lookback": 1}, ValueError, "`lookback` must be at least 2"),
        ({"target_col": 1}, TypeError, "`target_col` must be the name of a column, or a list of them; got 1"),
        ({"lookback": 10}, ValueError, "`n_tokens` must lie strictly between .* and the window's length = 10; got 10"),
        ({"tokenizer": PatchTokenizer(11)}, ValueError, "`n_tokens` must divide the window's length = 48; got 11"),
        ({"tokenizer": "bspline"}, TypeError, "`tokenizer` must be one of BSplineTokenizer, .*; got 'bspline'"),
        ({"tokenizer": BSplineTokenizer}, TypeError, "`tokenizer` must be one of"),
        ({"encoding": "sinus"}, ValueError, "`encoding` must be one of .*; got 'sinus'"),
        ({"head": "hydra"}, ValueError, "`head` must be one of 'flatten', 'spline'; got 'hydra'"),
        ({"norm": "batch"}, ValueError, "`norm` must be one of .*; got 'batch'"),
        ({"gaps": "ignore"}, ValueError, "`gaps` must be one of 'error', 'fit', 'fill'; got 'ignore'"),
        ({"d_model": 9}, ValueError, "`d_model` must be a multiple of n_heads = 2; got 9"),
        ({"dropout": 1.0}, ValueError, r"`dropout` must lie in \[0, 1\); got 1.0"),
        ({"learning_rate": 0}, ValueError, "`learning_rate` must be positive"),
        ({"max_epochs": 0}, ValueError, "`max_epochs` must be at least 1"),
        ({"epoch_windows": 0}, ValueError, "`epoch_windows` must be at least 1"),
        ({"folds": (0.6, 0.4)}, TypeError, "`folds` must be three numbers"),
        ({"folds": (0.6, 0.2, 0.3)}, ValueError, "add up to 1; got .* 1.1"),
        ({"folds": (1.0, 0.0, 0.0)}, ValueError, "`folds` must be positive"),
        ({"folds": "most"}, TypeError, "`folds` must be three numbers"),
        ({"device": "quantum"}, ValueError, "`device` must be 'auto', 'cpu' or 'cuda'; got 'quantum'"),
        ({"device": None}, ValueError, "`device` must be"),
    ],
)
def test_bad_settings_are_refused(changes, kind, message):
    with pytest.raises(kind, match=message):
        make_forecaster(**changes)


@pytest.mark.parametrize("device", ["cuda", "cuda:0"])
def test_a_device_that_is_not_there_is_refused(monkeypatch, device):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ValueError, match=f"`device` = '{device}' must be there; torch sees 0 CUDA devices"):
        make_forecaster(device=device)


def test_an_unfitted_forecaster_says_so(frame, tmp_path):
    f = make_forecaster()
    for call in (f.predict, lambda: f.predict(frame), lambda: f.forecast(np.zeros((1, L))), lambda: f.save(tmp_path)):
        with pytest.raises(ValueError, match=r"not fitted yet\. Call fit\(df\)"):
            call()


def test_parameters_come_back_as_they_went_in():
    changes = {
        "head": "spline",
        "ff_dropout": 0.3,
        "weight_decay": 0.5,
        "folds": (0.7, 0.2, 0.1),
        "target_col": ["u", "v"],
        "id_col": None,
        "tokenizer": PatchTokenizer(12),
        "freq": "h",
        "drop_short": True,
    }
    f = make_forecaster(**changes)
    params = f.get_params()
    assert {name: params[name] for name in changes} == changes
    assert Forecaster(**params).get_params() == params
    json.dumps({name: value for name, value in params.items() if name != "tokenizer"})
    again = eval(repr(f), {"Forecaster": Forecaster, "PatchTokenizer": PatchTokenizer})
    assert repr(again) == repr(f)
    assert {**again.get_params(), "tokenizer": 0} == {**params, "tokenizer": 0}


def test_a_repr_shows_what_is_not_usual():
    assert repr(Forecaster(96)) == "Forecaster(horizon=96, tokenizer=BSplineTokenizer(n_tokens=45))"
    f = Forecaster(24, 96, BSplineTokenizer(6, clip_factor="auto"), seed=1)
    shown = "tokenizer=BSplineTokenizer(n_tokens=6, clip_factor='auto'), seed=1"
    assert repr(f) == f"Forecaster(horizon=24, lookback=96, {shown})"


@pytest.mark.parametrize("lookback", [9, 48, 100, 720])
def test_the_usual_tokenizer_fits_the_lookback(lookback):
    f = Forecaster(horizon=5, lookback=lookback)
    assert isinstance(f.tokenizer, BSplineTokenizer)
    assert f.tokenizer.n_tokens == max(8, round(lookback / 16))
