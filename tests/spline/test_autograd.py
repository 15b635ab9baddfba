"""Gradients of the torch backend, against finite differences."""

import numpy as np
import pytest
import torch

from bsat import BSplineTokenizer
from bsat.spline import SplineSpec, autograd, reference
from conftest import make_signals


@pytest.mark.parametrize("degree", range(1, 7))
def test_gradients_of_the_fit(degree):
    """With respect to the samples and to the knots."""
    rng = np.random.default_rng(degree)
    y = torch.tensor(rng.normal(size=(2, 31)), requires_grad=True)
    n = degree + 6
    # Knots away from the samples, where the basis functions of low degree have kinks.
    interior = np.sort(rng.choice(np.arange(3, 27), (1, n - degree - 1), replace=False)) + rng.uniform(
        0.2, 0.8, (2, n - degree - 1)
    )
    ends = np.zeros((2, degree + 1)), np.full((2, degree + 1), 30.0)
    knots = torch.tensor(np.concatenate([ends[0], interior, ends[1]], 1))

    def coefficients(y, inner):
        full = torch.cat([knots[:, : degree + 1], inner, knots[:, -degree - 1 :]], 1)
        return autograd.fit(y, full, degree).coefficients

    inner = knots[:, degree + 1 : -degree - 1].clone().requires_grad_()
    assert torch.autograd.gradcheck(coefficients, (y, inner), eps=1e-6, atol=1e-5)


@pytest.mark.parametrize("feature", ["curvature", "slope"])
@pytest.mark.parametrize("placement", ["safe", "paper"])
@pytest.mark.parametrize("degree", [1, 2, 3, 5])
def test_gradients_through_the_placement(degree, placement, feature):
    """From the samples through knots, centers and coefficients: training can run through the whole tokenizer."""
    rng = np.random.default_rng(degree)
    y = torch.tensor(rng.normal(size=(1, 40)).cumsum(1), requires_grad=True)
    spec = SplineSpec(n=degree + 5, degree=degree, clip_factor=np.inf, placement=placement, feature=feature)

    def tokens(y):
        fit = autograd.tokenize(y, spec)
        return fit.coefficients, fit.knots[:, degree + 1 : -degree - 1]

    assert torch.autograd.gradcheck(tokens, (y,), eps=1e-7, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("degree", [1, 3, 6])
def test_float32_in_float32_out(degree):
    y = make_signals()["transformer"]
    spec = SplineSpec(n=30, degree=degree, clip_factor=0.62)
    want = reference.tokenize(y, spec)
    fit = autograd.tokenize(torch.tensor(y, dtype=torch.float32), spec)
    assert fit.coefficients.dtype == fit.knots.dtype == torch.float32
    assert fit.fallback.dtype == torch.bool
    np.testing.assert_allclose(fit.coefficients.numpy(), want.coefficients, rtol=1e-3, atol=1e-3)


def test_no_nan_in_the_gradient_of_a_flat_window():
    for degree in range(1, 7):
        y = torch.full((2, 60), 3.0, requires_grad=True)
        fit = autograd.tokenize(y, SplineSpec(n=20, degree=degree, clip_factor=0.62))
        (fit.coefficients.sum() + fit.knots.sum()).backward()
        assert torch.isfinite(y.grad).all()


def test_a_gradient_step_through_the_tokenizer_lowers_a_loss():
    y = torch.tensor(make_signals()["transformer"], requires_grad=True)
    tok = BSplineTokenizer(20)
    tokens = tok.transform(y)
    loss = ((tok.inverse_transform(tokens) - y.detach()) ** 2).mean() + tokens.values.square().mean()
    loss.backward()
    with torch.no_grad():
        moved = y - 1.0 * y.grad
    after = tok.transform(moved)
    assert after.values.square().mean() < tokens.values.square().mean()
