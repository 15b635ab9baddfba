"""The kernels with activations of 16 bits: what plain torch gives, but for rounding to 8 bits of mantissa.

They run on the CPU here (`cuda_on_cpu`), from the same source.
"""

import pytest
import torch
from test_fused import plain_step, slope, targets_for, with_bias
from tiny_stack import make_noise, make_side, padding, stack_up

import cuda_on_cpu
from bsat import nvrtc
from bsat.model import fused, stacked
from bsat.model.fused import Fused
from bsat.model.stacked import Batch, Noise

CASES = {
    "two layers, l-rope+lpe": {"d_model": 32, "n_heads": 4},
    "lpe": {"encoding": "lpe", "d_model": 16, "n_heads": 2},
    "f-rope, wide heads": {"encoding": "f-rope", "d_model": 32, "n_heads": 2, "n_layers": 1},
    "spline head": {"head": "spline", "d_model": 16, "n_heads": 1, "n_layers": 1},
    "patches": {"tokenizer": "patch", "d_model": 16, "n_heads": 2, "n_layers": 1},
}
every_case = pytest.mark.parametrize("choices", CASES.values(), ids=CASES)
BF16 = 2**-8
"""What rounding does to a number, at most, relative to it."""


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch):
    """Memory that nobody has written to is no number, on the device and in shared memory."""
    cuda_on_cpu.install(monkeypatch)
    monkeypatch.setattr(nvrtc, "tensor_cores", lambda device: True)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def brief(side, noise):
    assert fused.takes_brief(side.stack.shape, torch.device("cpu"))
    return Fused(side.stack, noise, brief=True)


def to_brief(batch):
    """As `Pack` hands it over."""
    return Batch(batch.values, batch.positions, None if batch.basis is None else batch.basis.bfloat16())


def apart(got, want):
    """Relative to the largest."""
    return float((got - want).abs().max() / want.abs().max())


@every_case
def test_evaluation(choices):
    side = make_side(**{"factors": (2, 1), "count": 4, **choices})
    want = stacked.forward(side.stack, side.stack.views(), side.batch, None)
    kernels = brief(side, make_noise(len(side.stack)))
    got, _, _ = kernels.forward(to_brief(side.batch), training=False)
    assert got.dtype == torch.float32
    assert 0 < apart(with_bias(kernels, got), want) < 8 * BF16


@pytest.mark.parametrize("shares", [(0.2, 0.1, 0.3), (0.0, 0.0, 0.0)], ids=["dropout", "no dropout"])
@every_case
def test_a_training_step(choices, shares):
    """Each parameter's gradient: its direction, and its length."""
    side = make_side(**{"factors": (2, 1), "count": 6, **choices})
    noise, targets = make_noise(len(side.stack), shares), targets_for(side)
    forecast, running, want = plain_step(side.stack, side.batch, noise, targets)
    kernels = brief(side, noise)
    batch = to_brief(side.batch)
    got, saved, last = kernels.forward(batch, training=True)
    got = with_bias(kernels, got)
    kernels.backward(slope(got, targets).bfloat16(), saved, last, batch)
    assert apart(got, forecast) < 12 * BF16
    assert apart(side.stack.running, running) < 4 * BF16
    assert torch.isfinite(kernels.grad).all()
    whole = want.norm(dim=1)
    wanted = side.stack.views(want)
    worst = {}
    for name, g in kernels.g.items():
        error = (g - wanted[name]).flatten(1).norm(dim=1)
        worst[name] = float((error / (wanted[name].flatten(1).norm(dim=1) + 0.02 * whole)).max())
    assert {name: e for name, e in worst.items() if not e < 0.1} == {}
    assert (kernels.grad[padding(side.stack)] == 0).all()


def test_a_narrow_network_gets_the_same_beside_a_wide_one():
    """Its feed-forward part ends where it ends: what lies beyond is never read."""
    side = make_side(factors=(1, 4), count=3, d_model=16, n_heads=2, n_layers=1)
    found = []
    for count in (2, 1):
        stack = stack_up(side.networks[:count])
        batch = Batch(side.batch.values[:count].contiguous(), side.batch.positions[:count].contiguous(), None)
        kernels = Fused(stack, make_noise(count), brief=True)
        got, saved, last = kernels.forward(batch, training=True)
        for layer in saved:
            layer.u[0, :, 16:] = torch.nan
        kernels.backward(torch.ones_like(got).bfloat16(), saved, last, batch)
        found.append((got[0], stack.save(0, theta=kernels.grad[0])))
    (a, a_grads), (b, b_grads) = found
    torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)
    for name, g in a_grads.items():
        assert torch.isfinite(g).all()
        if g.is_floating_point() and "running" not in name:
            torch.testing.assert_close(g, b_grads[name], rtol=0.05, atol=0.02 * float(b_grads[name].abs().max()))


def test_a_network_gets_the_same_bits_whoever_is_beside_it():
    """Forecast, statistics and gradient; and again in a second pass."""
    side = make_side(factors=(2, 2), count=5, d_model=16, n_heads=2)
    noise = make_noise(2)

    def step(networks, some):
        stack = stack_up(networks)
        shares = Noise(noise.seeds[some], noise.step, noise.shares[:, some].contiguous())
        kernels = Fused(stack, shares, brief=True)
        batch = Batch(side.batch.values[some], side.batch.positions[some], None)
        found = []
        for _ in range(2):
            got, saved, last = kernels.forward(batch, training=True)
            kernels.backward(got.bfloat16(), saved, last, batch)
            found.append((got, kernels.grad.clone()))
        assert torch.equal(found[0][0], found[1][0])
        assert torch.equal(found[0][1], found[1][1])
        return got, kernels.grad, stack.running

    together = step(side.networks, slice(0, 2))
    for m, network in enumerate(side.networks):
        for one, all_ in zip(step([network], slice(m, m + 1)), together, strict=True):
            assert torch.equal(one[0], all_[m])


@pytest.mark.parametrize(
    ("change", "taken"), [({}, True), ({"n_heads": 4}, True), ({"d_model": 24, "n_heads": 3}, False)]
)
def test_which_networks_can_have_it(change, taken):
    side = make_side(**{"factors": (1,), "count": 1, "d_model": 16, "n_heads": 2, "n_layers": 1, **change})
    assert fused.takes_brief(side.stack.shape, torch.device("cpu")) == taken
