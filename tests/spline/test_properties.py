"""What must hold for any input: the mathematics, and the safety of the safe placement."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from bsat.spline import SplineSpec, cpu, reference
from conftest import L

degrees = st.integers(1, 6)
samples = arrays(np.float64, (2, 90), elements=st.floats(-1e6, 1e6, width=32))


@given(y=samples, degree=degrees, n=st.integers(8, 60), g=st.sampled_from([0.1, 0.62, 1.25, np.inf]))
@settings(max_examples=150, deadline=None)
def test_partition_of_unity(y, degree, n, g):
    knots = cpu.place(y, SplineSpec(n=n, degree=degree, clip_factor=g))
    assert (np.diff(knots) >= 0).all()
    at = np.linspace(0, 89, 313)
    N = cpu.basis(knots, degree, at)
    np.testing.assert_allclose(N.sum(2), 1, atol=1e-12)
    assert (N >= 0).all()


@given(
    y=samples,
    degree=degrees,
    n=st.integers(8, 89),
    g=st.sampled_from([0.1, 0.62, 1.25, np.inf]),
    feature=st.sampled_from(["curvature", "slope", "uniform"]),
    recency=st.sampled_from([0.01, 1.0, 5.0, 1e4]),
)
@settings(max_examples=400, deadline=None)
def test_safe_placement_is_safe(y, degree, n, g, feature, recency):
    """No fallback, whatever the samples; and its rules about distances hold."""
    spec = SplineSpec(n=n, degree=degree, clip_factor=g, feature=feature, recency=recency)
    fit = cpu.tokenize(y, spec)
    assert not fit.fallback.any()
    assert np.isfinite(fit.coefficients).all()
    t = fit.knots[:, degree:-degree]
    gaps = np.diff(t)
    assert gaps[:, 1:-1].min(initial=np.inf) >= spec.spacing(90) - 1e-9 >= 1 - 1e-9
    assert gaps[:, 0].min() >= (degree + 1) / 2 - 1e-9
    assert gaps[:, -1].min() >= (degree + 1) / 2 - 1e-9


HOSTILE = {
    "spikes": lambda i, r: np.where(i == r.integers(5, L - 5, (60, 1)), 1e3, 0.0) + 1e-3 * r.normal(size=(60, L)),
    "step": lambda i, r: (i > r.integers(5, L - 5, (60, 1))) * 1.0,
    "burst": lambda i, r: r.normal(size=(60, L)) * (np.abs(i - r.integers(5, L - 5, (60, 1))) < 12),
    "heavy tails": lambda i, r: r.standard_cauchy((60, L)),
    "explosion": lambda i, r: np.exp(i / r.uniform(10, 60, (60, 1))),
    "ends": lambda i, r: np.where((i < 3) | (i > L - 4), 1.0, 0.0) * r.uniform(1, 2, (60, 1)),
}


@pytest.mark.parametrize("degree", range(1, 7))
@pytest.mark.parametrize("name", list(HOSTILE))
def test_hostile_series(name, degree):
    """A small cut of benchmarks/hostile.py."""
    windows = HOSTILE[name](np.arange(L)[None], np.random.default_rng(3))
    for n in (20, 60, 120):
        for g in (0.1, 0.62, np.inf):
            fit = cpu.tokenize(windows, SplineSpec(n=n, degree=degree, clip_factor=g))
            assert not fit.fallback.any()
            assert fit.condition.max() < 1e6
            assert (np.abs(fit.coefficients).max(1) <= 12 * np.abs(windows).max(1)).all()


@pytest.mark.parametrize("degree", range(1, 7))
@pytest.mark.parametrize("placement", ["safe", "paper"])
def test_polynomials_up_to_the_degree_are_reproduced(degree, placement):
    x = np.linspace(-1, 1, L)
    windows = np.stack([np.polynomial.chebyshev.chebval(x, np.eye(d + 1)[d]) for d in range(degree + 1)])
    for n in (degree + 2, 30, 100):
        spec = SplineSpec(n=n, degree=degree, clip_factor=0.62, placement=placement)
        fit = cpu.tokenize(windows, spec)
        curve = cpu.evaluate(fit.knots, fit.coefficients, degree, np.arange(L))
        np.testing.assert_allclose(curve[~fit.fallback], windows[~fit.fallback], atol=1e-9)
        assert placement == "paper" or not fit.fallback.any()


@given(y=samples, degree=degrees, power=st.integers(-30, 30))
@settings(max_examples=100, deadline=None)
def test_unit_does_not_matter(y, degree, power):
    spec = SplineSpec(n=20, degree=degree, clip_factor=0.62)
    one, two = cpu.tokenize(y, spec), cpu.tokenize(y * 2.0**power, spec)
    np.testing.assert_allclose(two.knots, one.knots, atol=1e-9)
    np.testing.assert_allclose(
        two.coefficients, one.coefficients * 2.0**power, rtol=1e-9, atol=1e-300 + 1e-7 * 2.0**power
    )


def test_constant_window_has_uniform_knots():
    for degree in range(1, 7):
        for value in (0.0, 7.0, -1e9):
            fit = cpu.tokenize(np.full((1, L), value), SplineSpec(n=20, degree=degree, clip_factor=0.62))
            np.testing.assert_allclose(fit.knots[0, degree : 20 + 1], np.linspace(0, L - 1, 20 - degree + 1), atol=1e-9)
            np.testing.assert_allclose(fit.coefficients, value, rtol=1e-9, atol=1e-9)


def test_knots_go_where_the_signal_bends():
    i = np.arange(L)
    y = np.where(i > L // 2, np.sin(i / 3.0), 0.0)[None]
    knots = cpu.place(y, SplineSpec(n=40, degree=3, clip_factor=1.25))[0]
    assert (knots[4:-4] > L // 2).mean() > 0.9


@pytest.mark.parametrize("degree", [1, 3, 6])
def test_recency_is_the_ratio_of_densities(degree):
    spec = SplineSpec(n=100, degree=degree, clip_factor=0.62, feature="uniform", recency=4.0)
    t = reference.place(np.zeros((1, 2000)), spec)[0, degree:-degree]
    gaps, middle = np.diff(t), (t[1:] + t[:-1]) / 2
    np.testing.assert_allclose(np.log(gaps), np.log(gaps[0]) - np.log(4) * (middle - middle[0]) / 1999, atol=1e-2)


def test_spread_moves_nothing_that_is_apart_and_is_symmetric():
    u = np.array([20.0, 30.0, 30.1, 30.2, 50.0, 70.5])
    moved = reference.spread(u, 2.0, 1.5, 100)
    np.testing.assert_array_equal(moved[[0, 4, 5]], u[[0, 4, 5]])
    np.testing.assert_allclose(moved[1:4], [28.6, 30.1, 31.6])
    np.testing.assert_allclose(reference.spread(99 - u[::-1], 2.0, 1.5, 100), 99 - moved[::-1])
