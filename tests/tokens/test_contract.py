"""One contract for all tokenizers."""

import numpy as np
import pytest
import torch

import bsat
from conftest import SIGNALS, L, make_signals

TOKENIZERS = {
    "bspline": bsat.BSplineTokenizer(n_tokens=24),
    "bspline, paper": bsat.BSplineTokenizer(n_tokens=24, degree=2, placement="paper", max_coefficient=100.0),
    "bspline, detail": bsat.BSplineTokenizer(n_tokens=24, coefficients="asinh", detail=3, recency=2.0),
    "patch": bsat.PatchTokenizer(n_tokens=24),
    "downsample": bsat.DownsampleTokenizer(n_tokens=24),
}
WINDOWS = SIGNALS["transformer"]


def equal(a, b):
    for name in a.arrays:
        one, two = getattr(a, name), getattr(b, name)
        if one is None:
            assert two is None
        else:
            np.testing.assert_array_equal(np.asarray(one), np.asarray(two))


@pytest.mark.parametrize("tok", TOKENIZERS.values(), ids=TOKENIZERS)
class TestTokenizer:
    def test_shapes(self, tok):
        tokens = tok.transform(WINDOWS)
        assert tokens.values.shape[:2] == (3, 24)
        assert tokens.values.ndim == 3
        assert tokens.positions.shape == (3, 24)
        assert tokens.length == L
        assert len(tokens) == 3
        assert np.isfinite(tokens.values).all()

    def test_positions_rise_within_the_window(self, tok):
        positions = tok.transform(WINDOWS).positions
        assert (np.diff(positions) > 0).all()
        assert positions.min() >= 0
        assert positions.max() <= L

    def test_channels_are_independent(self, tok):
        cube = np.stack([SIGNALS["transformer"], SIGNALS["noisy"]], 2)
        tokens = tok.transform(cube)
        assert tokens.values.shape[:3] == (3, 24, 2)
        assert tokens.positions.shape == (3, 24, 2)
        for c, name in enumerate(("transformer", "noisy")):
            np.testing.assert_array_equal(tokens.values[:, :, c], tok.transform(SIGNALS[name]).values)
        back = tok.inverse_transform(tokens)
        assert back.shape == cube.shape
        np.testing.assert_array_equal(back[..., 1], tok.inverse_transform(tok.transform(SIGNALS["noisy"])))

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
    def test_torch_in_torch_out(self, tok, dtype):
        tensor = torch.tensor(WINDOWS, dtype=dtype)
        tokens = tok.transform(tensor)
        assert torch.is_tensor(tokens.values)
        assert tokens.values.dtype == dtype
        assert tokens.values.device == tensor.device
        equal(tokens, tok.transform(tensor.numpy()))
        curve = tok.inverse_transform(tokens)
        assert torch.is_tensor(curve)
        np.testing.assert_allclose(curve.numpy(), tok.inverse_transform(tok.transform(tensor.numpy())), rtol=1e-6)

    def test_batch_size_does_not_matter(self, tok):
        many = make_signals(count=41)["solar"]
        whole = tok.transform(many)
        for i in (0, 16, 40):
            equal(whole[i], tok.transform(many[i : i + 1]))
        equal(whole[5:9], tok.transform(many[5:9]))

    def test_series_equals_its_windows(self, tok):
        series = make_signals(700, 1)["transformer"][0]
        windows = np.stack([series[s : s + L] for s in range(0, 700 - L + 1, 13)])
        equal(tok.transform_series(series, L, 13), tok.transform(windows))
        two = np.stack([series, series[::-1]], 1)
        assert tok.transform_series(two, L, 13).values.shape[:3] == (len(windows), 24, 2)
        equal(tok.transform_series(torch.tensor(series), L, 13), tok.transform(windows))

    def test_inverse_has_the_length_asked_for(self, tok):
        tokens = tok.transform(WINDOWS)
        assert tok.inverse_transform(tokens).shape == (3, L)
        assert tok.inverse_transform(tokens, length=101).shape == (3, 101)
        for length in (0, 2.5):
            with pytest.raises((ValueError, TypeError), match="`length` must be"):
                tok.inverse_transform(tokens, length=length)
        error = np.sqrt(((tok.inverse_transform(tokens) - WINDOWS) ** 2).mean())
        assert error < WINDOWS.std()

    def test_a_constant_comes_back(self, tok):
        flat = np.full((2, L), 5.0)
        np.testing.assert_allclose(tok.inverse_transform(tok.transform(flat)), 5.0, rtol=1e-9)

    def test_lists_and_integers(self, tok):
        whole = np.round(WINDOWS).astype(int)
        equal(tok.transform(whole.tolist()), tok.transform(whole.astype(float)))

    def test_parameters(self, tok):
        from sklearn.base import clone

        copy = clone(tok)
        assert copy is not tok
        assert copy.get_params() == tok.get_params()
        equal(copy.transform(WINDOWS), tok.transform(WINDOWS))
        assert repr(copy) == repr(tok)
        assert (
            eval(repr(tok), vars(bsat) | {k: getattr(bsat, k) for k in bsat.__all__}).get_params() == tok.get_params()
        )
        assert copy.set_params(n_tokens=12) is copy
        assert copy.transform(WINDOWS).values.shape[1] == 12
        with pytest.raises(ValueError, match="no parameter 'tokens'"):
            copy.set_params(tokens=3)

    def test_pipeline(self, tok):
        from sklearn.linear_model import Ridge
        from sklearn.pipeline import make_pipeline

        many = make_signals(count=40)["transformer"]
        model = make_pipeline(tok, Ridge())
        model.fit(many, many[:, -1])
        assert model.predict(many[:5]).shape == (5,)
        assert model.score(many, many[:, -1]) > 0.5

    @pytest.mark.parametrize(
        ("windows", "error", "match"),
        [
            (np.zeros(L), ValueError, r"shape \(B, L\) or \(B, L, C\); got \(240,\).*windows\[None\]"),
            (np.zeros((2, 3, 4, 5)), ValueError, r"got \(2, 3, 4, 5\)"),
            (np.zeros((0, L)), ValueError, r"must not be empty; got shape \(0, 240\)"),
            (np.zeros((2, 0)), ValueError, "must not be empty"),
            (np.zeros((2, L), object), TypeError, "real numbers; got dtype object"),
            (np.zeros((2, L), complex), TypeError, "complex"),
            (np.zeros((2, L), bool), TypeError, "bool"),
            (np.full((2, L), "a"), TypeError, "real numbers"),
            (np.zeros((2, 10)), ValueError, "`n_tokens`.*length = 10"),
            (np.where(np.arange(L) == 7, np.nan, WINDOWS), ValueError, r"finite.*nan at index \(0, 7\) \(3 in all\)"),
            (np.where(np.arange(L) == 7, np.inf, WINDOWS), ValueError, "finite.*inf at index"),
            (np.where(np.arange(L) == 7, 1e200, WINDOWS), ValueError, r"within ±1e\+150"),
            (torch.zeros((2, L), dtype=torch.complex64), TypeError, "complex64"),
            (torch.full((2, L), torch.nan), ValueError, "finite"),
            (np.ma.masked_invalid(np.where(np.arange(L) == 7, np.nan, WINDOWS)), TypeError, "masked array"),
        ],
    )
    def test_bad_windows(self, tok, windows, error, match):
        with pytest.raises(error, match=match):
            tok.transform(windows)

    @pytest.mark.parametrize(
        ("series", "lookback", "stride", "error", "match"),
        [
            (np.zeros(100), L, 1, ValueError, "`lookback` must not exceed the length of `series` = 100; got 240"),
            (np.zeros((5, 5, 5)), 4, 1, ValueError, r"shape \(T,\) or \(T, C\)"),
            (np.zeros(500), L, 0, ValueError, "`stride` must be at least 1; got 0"),
            (np.zeros(500), 2.5, 1, TypeError, "`lookback` must be a whole number"),
            (np.full(500, np.nan), L, 1, ValueError, "finite"),
        ],
    )
    def test_bad_series(self, tok, series, lookback, stride, error, match):
        with pytest.raises(error, match=match):
            tok.transform_series(series, lookback, stride)


@pytest.mark.parametrize("tok", [bsat.PatchTokenizer(24), bsat.DownsampleTokenizer(24)], ids=["patch", "downsample"])
def test_uniform_tokenizers_refuse_gaps(tok):
    with pytest.raises(ValueError, match=r"complete windows.*BSplineTokenizer"):
        tok.transform(WINDOWS, mask=np.zeros(WINDOWS.shape, bool))
    with pytest.raises(ValueError, match="`times` must be None"):
        tok.transform(WINDOWS, times=np.arange(L))


def test_patches_are_patchtsts():
    """T patches of two strides, the last one padded with the last value."""
    window = np.arange(L, dtype=float)[None]
    tokens = bsat.PatchTokenizer(24).transform(window)
    assert tokens.values.shape == (1, 24, 20)
    np.testing.assert_array_equal(tokens.values[0, 0], np.arange(20))
    np.testing.assert_array_equal(tokens.values[0, 1], np.arange(10, 30))
    np.testing.assert_array_equal(tokens.values[0, -1], np.minimum(np.arange(230, 250), 239))
    np.testing.assert_array_equal(tokens.positions[0, :2], [9.5, 19.5])
    np.testing.assert_array_equal(bsat.PatchTokenizer(24).inverse_transform(tokens), window)
    with pytest.raises(ValueError, match=r"must divide the window's length = 240; got 50\. Use 40 or 48"):
        bsat.PatchTokenizer(50).transform(window)


def test_tokens_of_another_tokenizer_are_refused():
    patch, sample, spline = bsat.PatchTokenizer(24), bsat.DownsampleTokenizer(24), bsat.BSplineTokenizer(24)
    for tok, other in ((patch, sample), (sample, patch), (sample, spline), (spline, sample), (patch, spline)):
        with pytest.raises(TypeError, match="`tokens` must come from this tokenizer's transform"):
            tok.inverse_transform(other.transform(WINDOWS))


def test_downsampling_keeps_the_newest_sample():
    window = np.arange(L, dtype=float)[None]
    tokens = bsat.DownsampleTokenizer(24).transform(window)
    np.testing.assert_array_equal(tokens.values[0, :, 0], np.arange(9, 240, 10))
    np.testing.assert_array_equal(tokens.positions[0], np.arange(9, 240, 10))
    np.testing.assert_allclose(bsat.DownsampleTokenizer(24).inverse_transform(tokens)[0, 9:], np.arange(9, 240))
