"""Folds, windows, the tokens of windows, seasons: nothing crosses an edge, and nothing depends on how it is cut."""

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_training import H, L, N, make_case

import bsat
from bsat.data import season_of
from bsat.data.folds import check_shares, fold_edges, window_ranges
from bsat.data.frames import to_panel
from bsat.data.windows import fit_scaling, make_windows
from bsat.train import batches as batches_room
from bsat.train.batches import bytes_per_window, make_inputs, run

# ---- folds -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "split"),
    [(17420, (10452, 3484, 3484)), (35040, (21024, 7008, 7008)), (70176, (42106, 14035, 14035))],
    ids=["ETTh1", "Alabama PV", "ECL"],
)
def test_folds_are_those_of_the_papers_table(length, split):
    edges = fold_edges(np.array([length]))
    assert tuple(np.diff(edges[0])) == split
    for fold, samples in enumerate(split):
        first, count = window_ranges(edges, fold, 720, 192)
        assert first[0] == edges[0, fold]
        assert count[0] == samples - 720 - 192 + 1


def test_windows_of_etth1():
    edges = fold_edges(np.array([17420]))
    assert [int(window_ranges(edges, fold, 720, 192)[1][0]) for fold in range(3)] == [9541, 2573, 2573]


shares = st.one_of(
    st.just((0.6, 0.2, 0.2)),
    st.floats(0.05, 0.95).map(lambda a: (a, 1 - a, 0.0)),
    st.tuples(st.floats(0.05, 1), st.floats(0.05, 1), st.floats(0.05, 1)).map(
        lambda s: (s[0] / sum(s), s[1] / sum(s), 1 - (s[0] + s[1]) / sum(s))
    ),
)


@given(lengths=st.lists(st.integers(1, 500), min_size=1, max_size=5), shares=shares)
@settings(max_examples=100, deadline=None)
def test_folds_cover_every_series_in_order(lengths, shares):
    edges = fold_edges(np.array(lengths), check_shares(shares))
    assert (edges[:, 0] == 0).all()
    assert (edges[:, 3] == lengths).all()
    assert (np.diff(edges) >= 0).all()
    wanted = np.outer(lengths, shares)
    assert (np.abs(np.diff(edges) - wanted) <= 1.0 + 1e-9).all()
    if shares[2] == 0:
        assert (edges[:, 2] == lengths).all()


@pytest.mark.parametrize(
    ("bad", "error", "match"),
    [
        ((0.6, 0.4), TypeError, r"`folds` must be three numbers.*got \(0\.6, 0\.4\).*\(0\.8, 0\.2, 0\)"),
        ("abc", TypeError, "three numbers"),
        (0.6, TypeError, "three numbers"),
        ((0.6, 0.2, 0.1), ValueError, r"add up to 1; got \(0\.6, 0\.2, 0\.1\), which add up to 0\.9"),
        ((0.8, 0.0, 0.2), ValueError, "must be positive"),
        ((0.0, 0.8, 0.2), ValueError, "must be positive"),
        ((0.9, 0.2, -0.1), ValueError, "must be positive"),
        ((float("nan"), 0.2, 0.2), ValueError, "must be positive"),
    ],
)
def test_bad_shares(bad, error, match):
    with pytest.raises(error, match=match):
        check_shares(bad)


# ---- windows ---------------------------------------------------------------------------------------------------------


def find_windows(offset, edges, fold, lookback, horizon):
    """The rule in words, for testing only: wholly inside the fold; failing any, only the horizon is."""
    low, high = edges[fold], edges[fold + 1]
    every = range(0, edges[3] - lookback - horizon + 1)
    inside = [s for s in every if low <= s and s + lookback + horizon <= high]
    if not inside and fold > 0:
        inside = [s for s in every if low <= s + lookback and s + lookback + horizon <= high]
    return [offset + s for s in inside]


@given(
    lengths=st.lists(st.integers(1, 70), min_size=1, max_size=4),
    shares=shares,
    lookback=st.integers(1, 15),
    horizon=st.integers(1, 8),
)
@settings(max_examples=150, deadline=None)
def test_windows_cross_neither_series_nor_folds(lengths, shares, lookback, horizon):
    lengths = np.array(lengths)
    offsets, edges = np.concatenate([[0], np.cumsum(lengths)]), fold_edges(lengths, shares)
    series = torch.arange(offsets[-1], dtype=torch.float64)  # every sample is its own index
    seen = []
    for fold in range(3):
        windows = make_windows(series, offsets, edges, fold, lookback=lookback, horizon=horizon)
        found = [find_windows(o, e, fold, lookback, horizon) for o, e in zip(offsets[:-1], edges, strict=True)]
        assert windows.starts.tolist() == [s for row in found for s in row]
        assert windows.rows.tolist() == [r for r, row in enumerate(found) for _ in row]
        assert not windows.gaps
        if len(windows) == 0:
            continue
        past, future, rows = windows.past(slice(None)).long(), windows.future(slice(None)).long(), windows.rows.long()
        assert past.shape == (len(windows), lookback)
        assert future.shape == (len(windows), horizon)
        both = torch.cat([past, future], 1)
        assert (both.diff(dim=1) == 1).all()
        at, ends = torch.from_numpy(offsets), torch.from_numpy(offsets[:-1, None] + edges)
        assert (both[:, 0] >= at[rows]).all()
        assert (both[:, -1] < at[rows + 1]).all()
        assert (future[:, 0] >= ends[rows, fold]).all()  # what is scored never lies before its fold,
        assert (future[:, -1] < ends[rows, fold + 1]).all()  # nor after it
        if fold == 0:
            assert (past[:, 0] >= ends[rows, 0]).all()
        seen.append(set(future.ravel().tolist()))
    for i, one in enumerate(seen):
        assert all(one.isdisjoint(other) for other in seen[:i])


def test_a_short_fold_borrows_its_lookbacks_but_no_horizon():
    edges = fold_edges(np.array([100]), (0.6, 0.2, 0.2))
    for fold in (1, 2):
        low = edges[0, fold]
        first, count = window_ranges(edges, fold, 15, 5)  # fits exactly
        assert (first[0], count[0]) == (low, 1)
        first, count = window_ranges(edges, fold, 16, 5)  # one sample short
        assert (first[0], count[0]) == (low - 16, 20 - 5 + 1)
        first, count = window_ranges(edges, fold, 90, 5)  # longer than all that was before
        assert first[0] == max(low - 90, 0)
        assert count[0] == (0 if fold == 1 else 6)
    assert window_ranges(edges, 0, 56, 5)[1][0] == 0  # training borrows from nobody
    empty = fold_edges(np.array([100]), (0.8, 0.2, 0.0))
    assert window_ranges(empty, 2, 10, 1)[1][0] == 0


@given(
    seed=st.integers(0, 2**31),
    missing=st.floats(0.05, 0.9),
    least=st.integers(1, 12),
    lookback=st.integers(3, 12),
    horizon=st.integers(1, 6),
)
@settings(max_examples=60, deadline=None)
def test_windows_with_too_few_observed_samples_are_left_out(seed, missing, least, lookback, horizon):
    rng = np.random.default_rng(seed)
    lengths = np.array([60, 40])
    offsets, edges = np.concatenate([[0], np.cumsum(lengths)]), fold_edges(lengths)
    series = torch.from_numpy(np.where(rng.random(100) < missing, np.nan, np.arange(100.0)))
    for fold in range(3):
        every = make_windows(series, offsets, edges, fold, lookback=lookback, horizon=horizon)
        some = make_windows(series, offsets, edges, fold, lookback=lookback, horizon=horizon, least=least)
        assert some.gaps
        expected = []
        for start in every.starts.tolist():
            observed = ~np.isnan(series[start : start + lookback + horizon].numpy())
            if observed[:lookback].sum() >= least and observed[lookback:].any():
                expected.append(start)
        assert some.starts.tolist() == expected
        assert (some.starts[some.rows == 1] >= 60).all()
        assert (some.starts[some.rows == 0] < 60).all()


def test_past_and_future_are_slices_of_the_series():
    case = make_case(rows=2)
    windows = case.windows[1]
    for index in (slice(3, 9), torch.tensor([5, 0, 5, 11])):
        starts = windows.starts[index].tolist()
        past, future = windows.past(index), windows.future(index)
        for i, s in enumerate(starts):
            assert torch.equal(past[i], windows.series[s : s + L])
            assert torch.equal(future[i], windows.series[s + L : s + L + H])


@pytest.mark.parametrize("most", [None, 1, 2, 7, 50, 10_000])
def test_some_windows_are_spread_evenly(most):
    windows = make_case().windows[0]
    some = windows.some(most)
    assert len(some) == min(len(windows), most or len(windows))
    place = torch.searchsorted(windows.starts, some.starts)
    assert torch.equal(windows.starts[place], some.starts)
    assert torch.equal(windows.rows[place], some.rows)
    if len(some) > 1:
        assert place[0] == 0
        assert place[-1] == len(windows) - 1
        assert place.diff().min() >= 1
        assert place.diff().max() - place.diff().min() <= 1


def test_scaling_is_that_of_the_train_fold():
    rng = np.random.default_rng(0)
    values = rng.normal(size=400) * 3 + 1e6
    values[100:200] = 0.1  # a constant has that of the others, also if rounding gives it a spread
    values[200:300:3] = np.nan
    values[300:] = np.nan
    offsets, ends = np.arange(5) * 100, np.full(4, 60)
    mean, deviation = fit_scaling(values, offsets, ends)
    np.testing.assert_allclose(mean, [values[:60].mean(), 0.1, np.nanmean(values[200:260]), 0.0], rtol=1e-12)
    own = values[:60].std(), np.nanstd(values[200:260])
    np.testing.assert_allclose(deviation, [own[0], np.median(own), own[1], np.median(own)], rtol=1e-12)
    np.testing.assert_array_equal(fit_scaling(values, offsets, ends, 7.0)[1][[1, 3]], 7.0)
    still = np.array([0.0, 0.0, -5.0, -5.0])
    np.testing.assert_array_equal(fit_scaling(still, np.array([0, 2, 4]), np.array([2, 2]))[1], [1.0, 5.0])
    values[60:100] += 1e9  # what comes after does not count
    assert fit_scaling(values, offsets, ends)[0][0] == mean[0]


# ---- tokens ----------------------------------------------------------------------------------------------------------


SETTINGS = {
    "bspline": (bsat.BSplineTokenizer(N), {}),
    "bspline, spline head": (bsat.BSplineTokenizer(N), {"head": "spline"}),
    "bspline, detail": (bsat.BSplineTokenizer(N, detail=3), {"head": "spline"}),
    "bspline, asinh, window norm": (bsat.BSplineTokenizer(N, coefficients="asinh"), {"norm": "window"}),
    "patch": (bsat.PatchTokenizer(N), {"head": "spline"}),
    "patch, window norm": (bsat.PatchTokenizer(N), {"norm": "window"}),
    "downsample": (bsat.DownsampleTokenizer(N), {}),
    "gaps": (bsat.BSplineTokenizer(N), {"head": "spline", "gaps": True}),
    "gaps, window norm": (bsat.BSplineTokenizer(N), {"norm": "window", "gaps": True}),
    "gaps, detail": (bsat.BSplineTokenizer(N, detail=3), {"gaps": True}),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_kept_tokens_are_those_made_batch_by_batch(name, monkeypatch):
    monkeypatch.setattr(batches_room, "CHUNK", 37)  # several of them, and a rest
    tokenizer, choices = SETTINGS[name]
    case = make_case(tokenizer, rows=3, **choices)
    kept, made = case.batches(0, keep=True), case.batches(0, keep=False)
    W = len(kept)
    assert W == len(made) == len(case.windows[0]) > 100
    order = torch.randperm(W, generator=torch.Generator().manual_seed(0))
    for index in (slice(0, 1), slice(20, 60), slice(W - 5, W), order[:32], order, slice(None)):
        one, two = kept.inputs(index), made.inputs(index)
        assert torch.equal(one.values, two.values)
        assert torch.equal(one.positions, two.positions)
        assert (one.knots is None) == (two.knots is None) == (not case.network.head.needs_knots)
        assert one.knots is None or torch.equal(one.knots, two.knots)
        assert (one.window is None) == (two.window is None) == (choices.get("norm") != "window")
        assert one.window is None or all(torch.equal(a, b) for a, b in zip(one.window, two.window, strict=True))
        assert torch.equal(kept.targets(index).nan_to_num(7e7), case.windows[0].future(index).nan_to_num(7e7))
        with torch.no_grad():
            forecast = run(case.network.eval(), one)
        assert torch.isfinite(forecast).all()
        assert torch.equal(forecast, run(case.network, two).detach())


@pytest.mark.parametrize("name", ["bspline", "bspline, spline head", "bspline, detail", "patch"])
def test_the_memory_foretold_is_what_kept_tokens_take(name):
    tokenizer, choices = SETTINGS[name]
    case = make_case(tokenizer, **choices)
    foretold = bytes_per_window(tokenizer, case.network, L)
    if not tokenizer.adaptive:
        assert foretold == 0  # they are views of the series, made anew
        return
    kept = case.batches(0, keep=True)._kept
    arrays = [getattr(kept, name) for name in kept.arrays]
    assert sum(a.nbytes for a in arrays if a is not None) == foretold * len(case.windows[0])


def test_no_windows_no_tokens():
    case = make_case()
    none = case.windows[0]
    none.starts, none.rows = none.starts[:0], none.rows[:0]
    assert len(case.batches(0, keep=True)) == 0


def test_the_window_norm_looks_at_what_was_observed():
    case = make_case(rows=3, gaps=True, norm="window")
    past = case.windows[0].past(slice(None))
    assert torch.isnan(past).any(1).sum() > 50
    inputs = case.batches(0).inputs(slice(None))
    mean, variance = (a.double().numpy() for a in inputs.window)
    exact = past.double().numpy()
    np.testing.assert_allclose(mean, np.nanmean(exact, 1), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(variance, np.nanvar(exact, 1), rtol=1e-5)
    with pytest.raises(ValueError, match="`past` must hold the windows with norm='window'; got None"):
        make_inputs(case.network, case.tokenizer.transform(past[:1].nan_to_num()), None)


def test_uniform_tokens_share_one_row_of_positions():
    for tokenizer, ndim in ((bsat.PatchTokenizer(N), 1), (bsat.BSplineTokenizer(N), 2)):
        for keep in (False, True):
            assert make_case(tokenizer).batches(0, keep=keep).inputs(slice(0, 5)).positions.ndim == ndim


# ---- seasons ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("freq", "season"),
    [
        ("15min", 96),
        ("h", 24),
        ("12h", 2),
        ("s", 86_400),
        ("7h", None),
        ("36h", None),
        ("D", 7),
        ("24h", 7),
        ("2D", None),
        ("B", 5),
        ("bh", None),
        ("W", 52),
        ("W-WED", 52),
        ("2W", 26),
        ("7D", 52),
        ("14D", 26),
        ("MS", 12),
        ("ME", 12),
        ("BME", 12),
        ("WOM-2TUE", 12),
        ("3MS", 4),
        ("12MS", None),
        ("QS", 4),
        ("QE-NOV", 4),
        ("BQS", 4),
        ("YS", None),
        ("BYE", None),
        (1, None),
        (24, None),
    ],
)
def test_season_of(freq, season):
    assert season_of(freq) == season


@pytest.mark.parametrize(("freq", "season"), [("W", 52), ("D", 7), ("30min", 48), ("MS", 12), ("QS", 4), ("B", 5)])
def test_the_season_of_a_frame_whose_frequency_is_found_out(freq, season):
    frame = pd.DataFrame({"unique_id": "a", "ds": pd.date_range("2020-01-06", periods=60, freq=freq), "y": 1.0})
    panel = to_panel(frame, id_col="unique_id", time_col="ds", target_col="y", freq=None, gaps="error")
    assert season_of(panel.freq) == season
