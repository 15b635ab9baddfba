"""BSplineTokenizer beyond the contract: invariances, gaps, options, errors."""

import numpy as np
import pandas as pd
import pytest
import torch

from bsat import BSplineTokenizer
from bsat.spline import reference
from conftest import SIGNALS, L, make_signals

WINDOWS = SIGNALS["transformer"]


def test_tokens_are_algorithm_2():
    tok = BSplineTokenizer(24, 3)
    tokens = tok.transform(WINDOWS)
    want = reference.tokenize(WINDOWS, tok.spec)
    np.testing.assert_allclose(tokens.coefficients, want.coefficients, rtol=1e-8)
    np.testing.assert_allclose(tokens.centers, (want.knots[:, :24] + want.knots[:, 4:]) / 2, atol=1e-9)
    np.testing.assert_allclose(tokens.values[..., 1] * (L - 1), tokens.centers)
    assert tokens.fallback.dtype == bool
    assert tokens.degree == 3


@pytest.mark.parametrize("placement", ["safe", "paper"])
@pytest.mark.parametrize("degree", range(1, 7))
def test_scale_and_offset(degree, placement):
    """The tokens of a y + b are those of y, with a c + b for coefficients."""
    tok = BSplineTokenizer(24, degree, placement=placement)
    y = SIGNALS["solar"]
    one = tok.transform(y)
    for a, b in ((3.7, 0.0), (-1.0, 12.0), (1e-6, 1e-3), (1e6, -5e6)):
        two = tok.transform(a * y + b)
        np.testing.assert_allclose(two.knots, one.knots, atol=1e-5)
        fine = ~one.fallback
        np.testing.assert_allclose(
            two.coefficients[fine], a * one.coefficients[fine] + b, atol=1e-5 * (abs(a) * np.abs(y).max() + abs(b))
        )


@pytest.mark.parametrize("degree", [1, 3, 6])
def test_threads_do_not_matter(degree):
    many = make_signals(count=1500)["solar"]
    tok = BSplineTokenizer(24, degree)
    one = tok.transform(many, threads=1)
    for threads in (2, 5):
        two = tok.transform(many, threads=threads)
        np.testing.assert_array_equal(one.coefficients, two.coefficients)
        np.testing.assert_array_equal(one.knots, two.knots)


def test_threads_from_the_environment(monkeypatch):
    many = make_signals(count=600)["solar"]
    monkeypatch.setenv("BSAT_THREADS", "2")
    BSplineTokenizer(24).transform(many)
    monkeypatch.setenv("BSAT_THREADS", "two")
    with pytest.raises(ValueError, match="BSAT_THREADS must be a whole number of at least 1; got 'two'"):
        BSplineTokenizer(24).transform(many)


class TestExtremes:
    """Numbers and types that once slipped through."""

    @pytest.mark.parametrize("degree", range(1, 7))
    @pytest.mark.parametrize("scale", [1e149, 1e-100, 1e-280, 1e-300, 5e-324])
    def test_huge_and_tiny_samples(self, degree, scale):
        y = scale * np.random.default_rng(0).integers(-9, 10, (20, L)).astype(float)
        if scale == 1e149:
            y /= 9
        tokens = BSplineTokenizer(24, degree).transform(y)
        for name in ("coefficients", "centers", "knots"):
            assert np.isfinite(getattr(tokens, name)).all()
        assert not tokens.fallback.any()
        assert (np.abs(tokens.coefficients) <= 40 * np.abs(y).max()).all()

    def test_small_integer_types(self):
        many = np.random.default_rng(0).normal(size=(2, 720))
        want = BSplineTokenizer(254).transform(many)
        np.testing.assert_array_equal(BSplineTokenizer(np.uint8(254)).transform(many).knots, want.knots)
        series = many.reshape(-1)
        got = BSplineTokenizer(24).transform_series(series, np.uint8(200), np.int8(100))
        np.testing.assert_array_equal(got.knots, BSplineTokenizer(24).transform_series(series, 200, 100).knots)

    def test_other_byte_order_and_read_only(self):
        want = BSplineTokenizer(24).transform(WINDOWS)
        swapped = WINDOWS.astype(">f8")
        frozen = WINDOWS.copy()
        frozen.setflags(write=False)
        for y in (swapped, frozen, np.asfortranarray(WINDOWS), WINDOWS[:, ::-1][:, ::-1]):
            np.testing.assert_array_equal(BSplineTokenizer(24).transform(y).coefficients, want.coefficients)

    @pytest.mark.parametrize(("n", "degree", "length"), [(3, 1, 4), (8, 6, 9), (4, 2, 5)])
    def test_smallest_windows(self, n, degree, length):
        y = np.random.default_rng(0).normal(size=(5, length))
        tok = BSplineTokenizer(n, degree)
        tokens = tok.transform(y)
        want = reference.tokenize(y, tok.spec)
        np.testing.assert_allclose(tokens.knots, want.knots, atol=1e-9)
        np.testing.assert_allclose(tokens.coefficients, want.coefficients, atol=1e-8 * np.abs(want.coefficients).max())

    def test_long_windows(self):
        y = np.random.default_rng(0).normal(size=(1, 20_000)).cumsum(1)
        tok = BSplineTokenizer(200)
        error = tok.inverse_transform(tok.transform(y)) - y
        assert error.std() < 0.2 * y.std()

    def test_index_of_a_nan_counts_channels(self):
        cube = np.zeros((4, L, 3))
        cube[1, 7, 2] = np.nan
        with pytest.raises(ValueError, match=r"index \(1, 7, 2\)"):
            BSplineTokenizer(24).transform(cube)
        gaps = np.zeros(cube.shape, bool)
        gaps[2, 10:, 1] = True
        with pytest.raises(ValueError, match="window 2, channel 1, has 10"):
            BSplineTokenizer(24).transform(np.zeros((4, L, 3)), mask=gaps)

    def test_series_names_the_window_with_too_few_samples(self):
        gaps = np.zeros(3000, bool)
        gaps[1500 : 1500 + 230] = True
        with pytest.raises(ValueError, match=r"window 1490 has 10 "):
            BSplineTokenizer(24).transform_series(np.zeros(3000), L, mask=gaps)

    @pytest.mark.parametrize(
        ("threads", "error"), [(0, ValueError), (-1, ValueError), (2.5, TypeError), ("2", TypeError)]
    )
    def test_threads(self, threads, error):
        with pytest.raises(error, match="`threads` must be"):
            BSplineTokenizer(24).transform(WINDOWS, threads=threads)
        with pytest.raises(error, match="`threads` must be"):
            BSplineTokenizer(24).transform_series(WINDOWS[0], 100, threads=threads)

    def test_float32_series_equals_its_windows(self):
        series = make_signals(700, 1)["transformer"][0].astype(np.float32)
        windows = np.stack([series[s : s + L] for s in range(0, 700 - L + 1)])
        a, b = BSplineTokenizer(24).transform_series(series, L), BSplineTokenizer(24).transform(windows)
        np.testing.assert_array_equal(a.values, b.values)


class TestGaps:
    tok = BSplineTokenizer(20)

    def test_fits_what_was_observed(self):
        """Values under the mask do not matter at all."""
        missing = np.random.default_rng(1).random(WINDOWS.shape) < 0.3
        results = [
            self.tok.transform(np.where(missing, fill, WINDOWS), mask=missing) for fill in (np.nan, np.inf, 0.0, 1e9)
        ]
        for other in results[1:]:
            np.testing.assert_array_equal(results[0].coefficients, other.coefficients)
            np.testing.assert_array_equal(results[0].knots, other.knots)
        for i in range(len(WINDOWS)):
            seen = ~missing[i]
            x = np.arange(L, dtype=float)[seen]
            want = reference.tokenize(WINDOWS[i, seen][None], self.tok.spec, x)
            np.testing.assert_allclose(results[0].knots[i], want.knots[0], atol=1e-9)
            np.testing.assert_allclose(results[0].coefficients[i], want.coefficients[0], rtol=1e-8)

    def test_an_empty_mask_changes_nothing(self):
        a, b = self.tok.transform(WINDOWS), self.tok.transform(WINDOWS, mask=np.zeros(WINDOWS.shape, bool))
        np.testing.assert_array_equal(a.coefficients, b.coefficients)

    def test_complete_windows_beside_gappy_ones_change_nothing(self):
        missing = np.zeros(WINDOWS.shape, bool)
        missing[1, 50:80] = True
        a, b = self.tok.transform(WINDOWS), self.tok.transform(WINDOWS, mask=missing)
        np.testing.assert_array_equal(a.coefficients[[0, 2]], b.coefficients[[0, 2]])
        assert not b.fallback.any()

    def test_reconstruction_through_a_gap(self):
        smooth = np.sin(np.arange(L) / 20.0)[None]
        missing = np.zeros(smooth.shape, bool)
        missing[0, 100:104] = True
        missing[0, :7] = True
        tokens = self.tok.transform(np.where(missing, np.nan, smooth), mask=missing)
        curve = self.tok.inverse_transform(tokens)
        np.testing.assert_allclose(curve[0, 7:], smooth[0, 7:], atol=0.01)
        np.testing.assert_allclose(curve[0, :7], curve[0, 7])  # before the first sample: its end value
        assert tokens.knots.min() == 7.0

    @pytest.mark.parametrize("degree", [1, 2, 3])
    @pytest.mark.parametrize("gap", [10, 40, 150])
    def test_long_gaps_are_safe_up_to_degree_3(self, degree, gap):
        """No fallback, though nothing is known about a large part of the window. From degree 2 on, derivatives carried
        across the gap make coefficients there large, whatever the knots."""
        noise = np.random.default_rng(8).normal(size=(200, L))
        missing = np.zeros(noise.shape, bool)
        missing[:, 40 : 40 + gap] = True
        for n in (20, 40):
            tokens = BSplineTokenizer(n, degree).transform(noise, mask=missing)
            assert not tokens.fallback.any()
            assert degree > 1 or np.abs(tokens.coefficients).max() < 4 * np.abs(noise).max()
            t = tokens.knots
            assert not ((t > 39 + 1e-9) & (t < 40 + gap - 1e-9)).any()  # no knot where nothing was observed

    def test_times(self):
        smooth = lambda t: np.sin(t / 20.0)  # noqa: E731
        rng = np.random.default_rng(2)
        times = np.sort(rng.uniform(0, L - 1, (4, L)), 1)
        tokens = self.tok.transform(smooth(times), times=times)
        assert tokens.centers.min() >= 0
        assert tokens.centers.max() <= L - 1
        first, last = times[:, :1], times[:, -1:]
        at = first + np.linspace(0, 1, L) * (last - first)
        np.testing.assert_allclose(self.tok.inverse_transform(tokens), smooth(at), atol=0.02)

    def test_times_of_any_unit_and_kind(self):
        index = np.arange(L)
        want = self.tok.transform(WINDOWS)
        stamps = np.datetime64("2026-01-01") + index * np.timedelta64(15, "m")
        zoned = pd.date_range("2026-03-28", periods=L, freq="15min", tz="Europe/Berlin")  # over a change of the clocks
        for times in (
            index,
            index * 900.0 + 1e6,
            stamps,
            stamps - stamps[0],
            zoned,
            list(zoned.to_pydatetime()),
            torch.tensor(index),
            np.tile(index, (3, 1)),
        ):
            got = self.tok.transform(WINDOWS, times=times)
            np.testing.assert_allclose(got.knots, want.knots, atol=1e-6)
            np.testing.assert_allclose(got.coefficients, want.coefficients, rtol=1e-5)

    def test_times_and_mask_and_channels(self):
        cube = np.stack([WINDOWS, SIGNALS["noisy"]], 2)
        missing = np.random.default_rng(4).random(cube.shape) < 0.2
        times = np.cumsum(np.random.default_rng(5).uniform(0.5, 2, (3, L)), 1)
        tokens = self.tok.transform(cube, times=times, mask=missing)
        alone = self.tok.transform(cube[..., 1], times=times, mask=missing[..., 1])
        np.testing.assert_array_equal(tokens.coefficients[..., 1], alone.coefficients)

    def test_series_with_gaps(self):
        series = make_signals(600, 1)["transformer"][0].copy()
        missing = np.zeros(600, bool)
        missing[[5, 6, 300, 599]] = True
        series[missing] = np.nan
        tokens = self.tok.transform_series(series, L, 11, mask=missing)
        starts = range(0, 600 - L + 1, 11)
        windows, gaps = (np.stack([a[s : s + L] for s in starts]) for a in (series, missing))
        np.testing.assert_array_equal(tokens.coefficients, self.tok.transform(windows, mask=gaps).coefficients)

    def test_gradients_pass_a_mask(self):
        missing = torch.zeros(3, L, dtype=torch.bool)
        missing[:, 30:40] = True
        y = torch.tensor(WINDOWS, requires_grad=True)
        self.tok.transform(y, mask=missing).coefficients.sum().backward()
        assert (y.grad[:, 30:40] == 0).all()
        assert torch.isfinite(y.grad).all()
        assert (y.grad != 0).any()

    @pytest.mark.parametrize(
        ("options", "error", "match"),
        [
            (
                {"mask": np.arange(L) >= 20},
                ValueError,
                r"`mask` must have the shape of the samples, \(3, 240\); got \(240,\)",
            ),
            (
                {"mask": np.zeros((3, L))},
                TypeError,
                "`mask` must be boolean, True where a sample is missing; got float64",
            ),
            (
                {"mask": np.tile(np.arange(L) >= 20, (3, 1))},
                ValueError,
                "more observed samples than n_tokens = 20; window 0 has 20",
            ),
            ({"mask": np.ones((3, L), bool)}, ValueError, "window 0 has 0"),
            (
                {"times": np.arange(L)[::-1]},
                ValueError,
                r"`times` must increase strictly; got 239 at index \(0,\) followed by 238",
            ),
            ({"times": np.zeros(L)}, ValueError, "must increase strictly"),
            ({"times": np.full(L, np.datetime64("NaT"))}, ValueError, r"got NaT at index \(0,\)"),
            ({"times": np.arange(L - 1)}, ValueError, r"`times` must have shape .*got \(239,\)"),
            ({"times": np.where(np.arange(L) == 3, np.nan, np.arange(L))}, ValueError, "`times` must be finite"),
        ],
    )
    def test_errors(self, options, error, match):
        with pytest.raises(error, match=match):
            self.tok.transform(WINDOWS, **options)

    def test_a_nan_outside_the_mask_is_an_error(self):
        bad = WINDOWS.copy()
        bad[1, 9] = np.nan
        missing = np.zeros(bad.shape, bool)
        missing[0, 3] = True
        with pytest.raises(ValueError, match=r"does not mark as missing; got nan at index \(1, 9\)"):
            self.tok.transform(bad, mask=missing)


class TestOptions:
    def test_clipping(self):
        plain = BSplineTokenizer(24).transform(SIGNALS["spiky"]).coefficients
        clipped = BSplineTokenizer(24, max_coefficient=2.0).transform(SIGNALS["spiky"]).coefficients
        assert np.abs(plain).max() > 2
        np.testing.assert_array_equal(clipped, np.clip(plain, -2, 2))

    def test_asinh(self):
        tok = BSplineTokenizer(24, coefficients="asinh")
        plain, tokens = BSplineTokenizer(24).transform(WINDOWS), tok.transform(WINDOWS)
        np.testing.assert_array_equal(tokens.coefficients, np.arcsinh(plain.coefficients))
        np.testing.assert_allclose(
            tok.inverse_transform(tokens), BSplineTokenizer(24).inverse_transform(plain), rtol=1e-9
        )

    def test_detail_is_the_window_across_each_token(self):
        line = np.arange(L, dtype=float)[None] * 2
        tokens = BSplineTokenizer(24, detail=4).transform(line)
        assert tokens.values.shape == (1, 24, 6)
        left, right = tokens.knots[:, :24], tokens.knots[:, 4:]
        want = left[..., None] + (right - left)[..., None] * (np.arange(4) + 0.5) / 4
        np.testing.assert_allclose(tokens.detail, 2 * want)

    def test_detail_with_gaps_is_the_same_for_arrays_and_tensors(self):
        missing = np.random.default_rng(1).random(WINDOWS.shape) < 0.3
        missing[0, :5] = missing[1, -5:] = True
        tok = BSplineTokenizer(20, detail=3)
        for times in (None, np.cumsum(np.random.default_rng(5).uniform(0.5, 2, (3, L)), 1)):
            a = tok.transform(WINDOWS, mask=missing, times=times)
            y = torch.tensor(WINDOWS, requires_grad=True)
            b = tok.transform(y, mask=torch.tensor(missing), times=times)
            np.testing.assert_allclose(b.values.detach().numpy(), a.values, atol=1e-6)

    def test_half_precision_tensors(self):
        """Too coarse for knots: the tokens come in float32."""
        for half in (torch.tensor(WINDOWS).bfloat16(), torch.tensor(WINDOWS).half(), WINDOWS.astype(np.float16)):
            tokens = BSplineTokenizer(24).transform(half)
            assert str(tokens.knots.dtype).endswith("float32")
            np.testing.assert_array_equal(
                tokens.coefficients, BSplineTokenizer(24).transform(np.asarray(half.tolist(), np.float32)).coefficients
            )

    def test_auto_clip_factor_is_the_papers_search(self):
        series = make_signals(1500, 1)["solar"][0]
        tok = BSplineTokenizer(30, clip_factor="auto", placement="paper")
        with pytest.raises(ValueError, match=r"'auto' and has not been searched yet\. Call fit"):
            tok.transform(WINDOWS)
        assert tok.fit(series, lookback=L) is tok
        # The same by hand, with the reference, on a coarse part of the grid.
        grid, worst = np.round(np.arange(10, 126) / 100, 2), tok.clip_search_
        assert worst.shape == grid.shape
        windows = np.stack([series[s : s + L] for s in range(0, 1500 - L + 1, 100)])
        for i in range(0, len(grid), 23):
            spec = reference.SplineSpec(n=30, degree=1, clip_factor=grid[i], placement="paper")
            fit = reference.tokenize(windows, spec)
            error = reference.evaluate(fit.knots, fit.coefficients, 1, np.arange(L)) - windows
            assert np.sqrt((error**2).mean(1)).max() == pytest.approx(worst[i], rel=1e-6)
        assert tok.clip_factor_ == grid[worst.argmin()]
        fixed = BSplineTokenizer(30, clip_factor=tok.clip_factor_, placement="paper")
        np.testing.assert_array_equal(tok.transform(WINDOWS).knots, fixed.transform(WINDOWS).knots)
        other = BSplineTokenizer(30, clip_factor="auto", placement="paper").fit(windows)
        assert other.clip_factor_ == tok.clip_factor_
        with pytest.raises(ValueError, match="`lookback` must be given with a series"):
            tok.fit(series)

    def test_set_params_forgets_what_was_fitted(self):
        tok = BSplineTokenizer(30, clip_factor="auto").fit(WINDOWS)
        tok.set_params(degree=2)
        assert not hasattr(tok, "clip_factor_")

    @pytest.mark.parametrize(
        ("options", "error", "match"),
        [
            ({"n_tokens": 4}, ValueError, r"`n_tokens` must be greater than degree \+ 1 = 4; got 4"),
            ({"n_tokens": 45.0}, TypeError, "`n_tokens` must be a whole number; got 45.0 of type float"),
            ({"n_tokens": True}, TypeError, "`n_tokens`"),
            ({"degree": 0}, ValueError, "`degree` must be at least 1; got 0"),
            ({"degree": 7}, ValueError, "`degree` must lie between 1 and 6; got 7"),
            ({"clip_factor": 0}, ValueError, "`clip_factor` must be positive; got 0"),
            ({"clip_factor": float("nan")}, ValueError, "`clip_factor` must be positive; got nan"),
            ({"clip_factor": "best"}, ValueError, "`clip_factor` must be one of 'auto'; got 'best'"),
            ({"clip_factor": None}, TypeError, "`clip_factor` must be a number; got None"),
            ({"placement": "fast"}, ValueError, "`placement` must be one of 'safe', 'paper'; got 'fast'"),
            (
                {"feature": "energy"},
                ValueError,
                "`feature` must be one of 'curvature', 'slope', 'uniform'; got 'energy'",
            ),
            ({"recency": -1}, ValueError, "`recency` must be positive and finite; got -1"),
            ({"recency": 1e9}, ValueError, "`recency` must lie between"),
            ({"max_coefficient": 0.0}, ValueError, "`max_coefficient` must be positive"),
            ({"coefficients": "log"}, ValueError, "`coefficients` must be one of 'plain', 'asinh'"),
            ({"coefficients": "asinh", "max_coefficient": 3.0}, ValueError, "Drop one of the two"),
            ({"detail": -1}, ValueError, "`detail` must be at least 0; got -1"),
        ],
    )
    def test_errors(self, options, error, match):
        with pytest.raises(error, match=match):
            BSplineTokenizer(**options)

    def test_more_tokens_than_samples(self):
        with pytest.raises(
            ValueError, match=r"strictly between degree \+ 1 = 4 and the window's length = 240; got 240"
        ):
            BSplineTokenizer(240).transform(WINDOWS)
        assert BSplineTokenizer(239).transform(WINDOWS).coefficients.shape == (3, 239)
