"""Every backend gives the reference's answers, and the reference gives SciPy's."""

import itertools
from functools import cache

import numpy as np
import pytest
import scipy.interpolate
import torch

from bsat.spline import SplineSpec, _kernels, autograd, cpu, reference
from conftest import SIGNALS, L, make_signals

DEGREES = range(1, 7)


class Numpy:
    """The compiled backend."""

    def __getattr__(self, name):
        return getattr(cpu, name)


class Torch:
    """The torch backend, spoken to in numpy."""

    def __getattr__(self, name):
        function = getattr(autograd, name)

        def call(*args, **options):
            args = [torch.tensor(a) if isinstance(a, np.ndarray) else a for a in args]
            result = function(*args, **options)
            return result.numpy() if torch.is_tensor(result) else type(result)(*(a.numpy() for a in result))

        return call


WINDOWS = np.concatenate(list(SIGNALS.values()))


def irregular(windows: np.ndarray) -> np.ndarray:
    rng = np.random.default_rng(5)
    steps = rng.uniform(0.2, 2.0, (len(windows), windows.shape[1] - 1))
    x = np.concatenate([np.zeros((len(windows), 1)), steps.cumsum(1)], 1)
    return x / x[:, -1:] * (windows.shape[1] - 1)


POSITIONS = {"regular": None, "irregular": irregular(WINDOWS)}


@cache
def oracle(spec: SplineSpec, grid: str):
    """The reference's answer, worked out once for all backends."""
    return reference.tokenize(WINDOWS, spec, POSITIONS[grid])


def relative(a, b):
    return (np.abs(a - b).max(1) / np.abs(b).max(1)).max() if len(a) else 0.0


@pytest.mark.parametrize("grid", ["regular", "irregular"])
@pytest.mark.parametrize("degree", DEGREES)
@pytest.mark.parametrize("backend", [Numpy(), Torch()], ids=["cpu", "autograd"])
class TestBackend:
    """The contract of a backend (`spline.spec`)."""

    @pytest.mark.parametrize("feature", ["curvature", "slope", "uniform"])
    @pytest.mark.parametrize("placement", ["safe", "paper"])
    def test_agrees_with_the_reference(self, backend, degree, grid, placement, feature):
        for n, g, recency in ((degree + 2, 0.62, 1.0), (30, 0.1, 3.0), (60, np.inf, 1.0)):
            spec = SplineSpec(n=n, degree=degree, clip_factor=g, placement=placement, feature=feature, recency=recency)
            want = oracle(spec, grid)
            got = backend.tokenize(WINDOWS, spec, POSITIONS[grid])
            np.testing.assert_allclose(got.knots, want.knots, rtol=0, atol=1e-9)
            np.testing.assert_array_equal(got.fallback, want.fallback)
            good = want.condition < 1e6
            assert relative(got.coefficients[good], want.coefficients[good]) < 1e-8
            # The bound never lies below the condition number, and decides as it does.
            fine = ~want.fallback
            assert (got.condition[fine] >= want.condition[fine] * (1 - 1e-6)).all()
            assert np.isfinite(got.coefficients).all()

    def test_basis_and_curve(self, backend, degree, grid):
        x = np.linspace(-3, L + 2, 57)
        fit = oracle(SplineSpec(n=25, degree=degree, clip_factor=0.62), grid)
        want = reference.basis(fit.knots, degree, x)
        np.testing.assert_allclose(backend.basis(fit.knots, degree, x), want, atol=1e-12)
        each = x * np.linspace(0.2, 1, len(WINDOWS))[:, None]
        np.testing.assert_allclose(
            backend.evaluate(fit.knots, fit.coefficients, degree, each),
            reference.evaluate(fit.knots, fit.coefficients, degree, each),
            atol=1e-9,
        )

    def test_exact_condition(self, backend, degree, grid):
        spec = SplineSpec(n=40, degree=degree, clip_factor=0.62, placement="paper")
        want = oracle(spec, grid)
        got = backend.tokenize(WINDOWS, spec, POSITIONS[grid], exact_condition=True)
        sure = want.condition < 1e10
        np.testing.assert_allclose(got.condition[sure], want.condition[sure], rtol=0.011)


@pytest.mark.parametrize("degree", DEGREES)
@pytest.mark.parametrize("backend", [Numpy(), Torch()], ids=["cpu", "autograd"])
def test_flags_agree_on_both_sides_of_the_threshold(backend, degree):
    """Knots draw together around a basis function until hardly a sample is left in its support and the condition
    number passes 1e8: no estimate may miss it."""
    y = make_signals(count=1)["noisy"]
    interior = np.linspace(10, L - 11, 30)

    def knots(gap):
        moved = interior.copy()
        moved[10 : 12 + degree] = moved[10] + 0.25 + gap * np.arange(degree + 2)
        return np.concatenate([np.zeros(degree + 1), moved, np.full(degree + 1, L - 1.0)])[None]

    gaps = np.geomspace(2.0, 1e-3, 300)
    kappas = np.array([reference.fit(y, knots(g), degree).condition[0] for g in gaps])
    crossing = np.flatnonzero((kappas[:-1] <= 1e8) & (kappas[1:] > 1e8))
    assert len(crossing), "the construction must cross the threshold"
    low, high = gaps[crossing[0]], gaps[crossing[0] + 1]
    for _ in range(40):
        middle = np.sqrt(low * high)
        if reference.fit(y, knots(middle), degree).condition[0] <= 1e8:
            low = middle
        else:
            high = middle
    for gap in itertools.chain(
        gaps[::7], low * (1 + np.geomspace(1e-4, 0.3, 12)), high * (1 - np.geomspace(1e-4, 0.3, 12))
    ):
        want = reference.fit(y, knots(gap), degree)
        got = backend.fit(y, knots(gap), degree)
        assert got.fallback[0] == want.fallback[0], (gap, want.condition[0], got.condition[0])


@pytest.mark.parametrize("degree", DEGREES)
def test_reference_against_scipy(degree):
    """SciPy's least-squares spline at the same knots."""
    spec = SplineSpec(n=35, degree=degree, clip_factor=0.62)
    fit = oracle(spec, "regular")
    x = np.arange(L, dtype=float)
    for y, t, c in zip(WINDOWS, fit.knots, fit.coefficients, strict=True):
        want = scipy.interpolate.make_lsq_spline(x, y, t, degree)
        np.testing.assert_allclose(c, want.c, atol=1e-9 * np.abs(want.c).max())
        design = scipy.interpolate.BSpline.design_matrix(x, t, degree).toarray()
        np.testing.assert_allclose(reference.basis(t[None], degree, x)[0], design, atol=1e-13)


def test_reference_gradient_is_numpys():
    rng = np.random.default_rng(0)
    y, x = rng.normal(size=50), np.sort(rng.uniform(0, 10, 50))
    np.testing.assert_allclose(reference.gradient(y, x), np.gradient(y, x), rtol=1e-9)


@pytest.mark.parametrize("feature", ["curvature", "slope", "uniform"])
@pytest.mark.parametrize("degree", DEGREES)
def test_a_series_shares_its_derivatives_exactly(degree, feature):
    """Overlapping windows of a series: bit for bit the windows' own tokens."""
    series = make_signals(900, 1)["transformer"][0]
    spec = SplineSpec(n=30, degree=degree, clip_factor=0.62, feature=feature)
    starts = np.arange(0, 900 - L + 1, 7)
    windows = np.stack([series[s : s + L] for s in starts])
    for a, b in zip(cpu.tokenize_series(series, starts, L, spec), cpu.tokenize(windows, spec), strict=True):
        np.testing.assert_array_equal(a, b)


def test_knots_repeated_too_often_count_as_singular():
    """The tokenizer never places such knots; a NaN must still not pass for a good fit."""
    knots = np.array([[0, 0, 0, 0, 10, 20, 30, 30, 30, 30, 30]], float)
    y = np.random.default_rng(0).normal(size=(1, 31))
    assert reference.fit(y, knots, 3).fallback[0]
    assert cpu.fit(y, knots, 3).fallback[0]


def test_power_sums():
    for count in (0, 1, 2, 7, 50):
        v = np.arange(count) - (count - 1) / 2
        want = [(v ** (2 * k)).sum() for k in range(7)]
        np.testing.assert_allclose(_kernels.power_sums(50, 6)[count], want, rtol=1e-12)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e200])
def test_a_window_that_is_not_finite_shows_in_its_condition_alone(value):
    windows = make_signals(count=40)["transformer"].copy()
    spec = SplineSpec(n=30, degree=3, clip_factor=0.62)
    clean = cpu.tokenize(windows, spec)
    windows[17, 100] = value
    fit = cpu.tokenize(windows, spec)
    assert np.isnan(fit.condition[17])
    assert np.isnan(fit.coefficients[17]).all()
    others = np.arange(40) != 17
    np.testing.assert_array_equal(fit.coefficients[others], clean.coefficients[others])
