"""Diagnosis and pictures."""

import numpy as np
import pytest
from matplotlib.image import imread
from PIL import Image

from bsat import BSplineTokenizer, DownsampleTokenizer
from bsat.spline import reference
from bsat.tokens import pictures
from conftest import L, make_signals

SERIES = make_signals(900, 1)["transformer"][0]


def test_figures_are_what_they_say(capsys):
    windows = np.stack([SERIES[s : s + L] for s in range(0, 900 - L + 1, 20)])
    fit = reference.tokenize(windows, BSplineTokenizer(24, placement="paper").spec)
    limit = float(np.median(np.abs(fit.coefficients).max(1)))
    d = BSplineTokenizer(24, placement="paper", max_coefficient=limit).diagnose(SERIES, L, 20)

    def rmse(curve):
        return np.sqrt(((curve - windows) ** 2).mean())

    assert d.windows == len(windows)
    clipped = np.clip(fit.coefficients, -limit, limit)
    assert d.rmse == pytest.approx(rmse(reference.evaluate(fit.knots, clipped, 3, np.arange(L))), rel=1e-9)
    plain = BSplineTokenizer(24, feature="uniform", placement="paper", max_coefficient=limit)
    assert d.rmse_uniform == pytest.approx(rmse(plain.inverse_transform(plain.transform(windows))))
    sampler = DownsampleTokenizer(24)
    assert d.rmse_downsample == pytest.approx(rmse(sampler.inverse_transform(sampler.transform(windows))))
    assert d.condition["100%"] == pytest.approx(fit.condition.max(), rel=0.011)
    assert d.fallback_rate == fit.fallback.mean()
    assert d.clip_rate == (np.abs(fit.coefficients).max(1) > limit).mean()
    assert 0 < d.clip_rate < 1
    ratio = np.abs(fit.coefficients).max(1) / np.abs(windows).max(1)
    assert d.coefficient_ratio == pytest.approx(ratio.max(), rel=1e-6)
    starts = [start for start, _ in d.worst]
    assert all(abs(a - b) >= L for a in starts for b in starts if a != b)
    assert d.worst[0][1] == pytest.approx(d.per_window["rmse"].max())
    report = capsys.readouterr().out
    for word in (
        "ridge fallback",
        "coefficients clipped",
        "condition number",
        "uniform knots",
        "down-sampling",
        "entropy",
    ):
        assert word in report
    assert "per_window" not in d.to_dict()


def test_a_flat_series_has_nothing_to_divide_by(capsys):
    d = BSplineTokenizer(24).diagnose(np.zeros(500), L, quiet=True)
    assert d.rmse == pytest.approx(0, abs=1e-12)
    assert capsys.readouterr().out == ""
    assert "nan" not in str(d)


def test_few_colors_are_enough(tmp_path):
    """A saved picture has a palette; no color is far from what was drawn, and white stays white."""
    figure = pictures.new_figure(6, 4)
    figure.set_layout_engine("none")  # which would move things between one drawing and the next
    shades = figure.subplots().imshow(np.linspace(0, 1, 4000).reshape(50, 80), cmap="viridis")
    figure.colorbar(shades)
    pictures.save(figure, tmp_path / "few.png")
    figure.savefig(tmp_path / "all.png", dpi=pictures.DPI)
    few, full = (imread(tmp_path / name)[..., :3] for name in ("few.png", "all.png"))
    assert len(np.unique(few.reshape(-1, 3), axis=0)) <= 256 < len(np.unique(full.reshape(-1, 3), axis=0))
    assert np.abs(few - full).max() < 0.08
    assert (few[0, 0] == 1).all()
    assert (tmp_path / "few.png").stat().st_size < 0.6 * (tmp_path / "all.png").stat().st_size


def test_pictures(tmp_path):
    tok = BSplineTokenizer(24)
    tok.diagnose(SERIES, L, 20, plot=tmp_path / "d.png", quiet=True)
    tok.plot(SERIES[:L], tmp_path / "p.png")
    for name in ("d.png", "p.png"):
        with Image.open(tmp_path / name) as picture:
            assert picture.mode == "P"
            assert "transparency" not in picture.info  # which nothing uses
        image = imread(tmp_path / name)[..., :3]
        assert min(image.shape[:2]) > 500
        assert image.std() > 0.05
    tok.plot(SERIES[:L], tmp_path / "p.svg")
    assert "</svg>" in (tmp_path / "p.svg").read_text()
    assert len(list(tmp_path.iterdir())) == 3
    tok.plot(SERIES[:L], tmp_path / "p.svg", title="cost_$a_{$")  # no formula


@pytest.mark.parametrize(
    ("window", "path", "match"),
    [
        (SERIES[:L], "p.jpg", r"must end in \.png, \.svg, \.pdf; got 'p\.jpg'"),
        (SERIES[:L], "no/p.png", "needs an existing folder"),
        (SERIES[None, :L], "p.png", r"shape \(L,\)"),
        (np.full(L, np.nan), "p.png", "must be finite"),
    ],
)
def test_bad_pictures(tmp_path, window, path, match):
    with pytest.raises(ValueError, match=match):
        BSplineTokenizer(24).plot(window, tmp_path / path)
    assert list(tmp_path.iterdir()) == []


def test_bad_diagnoses():
    tok = BSplineTokenizer(24)
    with pytest.raises(ValueError, match="one channel at a time"):
        tok.diagnose(np.zeros((500, 2)), L)
    with pytest.raises(ValueError, match="must not exceed the length"):
        tok.diagnose(np.zeros(100), L)
