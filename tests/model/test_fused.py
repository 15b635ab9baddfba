"""The CUDA kernels give what plain torch gives: forecasts, statistics, every gradient, and the optimizer's steps.

They run on the CPU here (`cuda_on_cpu`), from the same source.
"""

import copy
from dataclasses import replace

import pytest
import torch
from tiny_network import D, H, N, make_network
from tiny_stack import gradients, make_noise, make_side, padding, shake, stack_up
from torch import nn

import bsat
import cuda_on_cpu
from bsat.model import NetworkConfig, build_network, fused, stacked
from bsat.model.fused import Fused
from bsat.model.stacked import Batch, Noise, describe

CASES = {
    "two layers, l-rope+lpe": {},
    "one layer, lpe": {"encoding": "lpe", "n_layers": 1, "n_heads": 4},
    "three layers, f-rope": {"encoding": "f-rope", "n_layers": 3, "n_heads": 4},
    "four layers, l-rope": {"encoding": "l-rope", "n_layers": 4, "n_heads": 4},
    "f-rope+lpe, a single head": {"encoding": "f-rope+lpe", "n_layers": 1, "n_heads": 1},
    "odd heads": {"encoding": "lpe", "d_model": 6, "n_heads": 2},
    "heads of one number": {"encoding": "lpe", "d_model": 4, "n_heads": 4, "n_layers": 2},
    "spline head": {"head": "spline", "n_layers": 1},
    "patches": {"tokenizer": "patch", "encoding": "l-rope", "n_layers": 1},
    "wider than a block": {"d_model": 36, "n_heads": 9, "n_layers": 1, "factors": (4, 2)},
    "one network": {"factors": (2,), "n_layers": 1},
    "one window": {"count": 1, "n_layers": 1},
}
every_case = pytest.mark.parametrize("choices", CASES.values(), ids=CASES)


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch):
    cuda_on_cpu.install(monkeypatch)


def targets_for(side):
    return torch.randn(*side.batch.positions.shape[:2], H, generator=torch.Generator().manual_seed(1))


def with_bias(kernels, forecast):
    """`Fused.forward` leaves the head's bias to those who compare."""
    return forecast + kernels.v["head.project.bias"].unsqueeze(1)


def slope(forecast, targets):
    """Of the mean squared error of each network."""
    return 2 * (forecast - targets) / targets[0].numel()


def check_gradient(kernels, want):
    """Each parameter's, by the size of its own gradient, or where that is all rounding, of the whole."""
    whole = want.norm(dim=1).max()
    wanted = kernels.stack.views(want)
    worst = {
        name: float((got - wanted[name]).abs().max() / wanted[name].abs().max().clamp(min=1e-3 * whole))
        for name, got in kernels.g.items()
    }
    assert {name: e for name, e in worst.items() if not e < 1e-4} == {}


def plain_step(stack, batch, noise, targets):
    """Forecast, statistics and gradient of plain torch, in double precision; the stack is left as it is."""
    double = copy.copy(stack)
    double.theta, double.running = stack.theta.double(), stack.running.double()
    basis = None if batch.basis is None else batch.basis.double()
    batch = Batch(batch.values.double(), batch.positions.double(), basis)
    forecast, grad = gradients(double, batch, noise, targets.double())
    return forecast.float(), double.running.float(), grad.float()


def train_step(stack, batch, noise, targets):
    """The same with the kernels, which keep their gradient."""
    kernels = Fused(stack, noise)
    for g in kernels.g.values():
        g.fill_(torch.nan)  # every number must be written
    forecast, saved, last = kernels.forward(batch, training=True)
    forecast = with_bias(kernels, forecast)
    kernels.backward(slope(forecast, targets), saved, last, batch)
    return kernels, forecast


def check_step(stack, batch, noise, targets):
    forecast, running, grad = plain_step(stack, batch, noise, targets)
    kernels, got = train_step(stack, batch, noise, targets)
    torch.testing.assert_close(got, forecast, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(stack.running, running, rtol=1e-5, atol=1e-5)
    check_gradient(kernels, grad)
    return got


# ---- the pass and its gradient ---------------------------------------------------------------------------------------


@every_case
def test_evaluation(choices):
    side = make_side(**{"factors": (2, 1), "count": 4, **choices})
    want = stacked.forward(side.stack, side.stack.views(), side.batch, None)
    running, theta = side.stack.running.clone(), side.stack.theta.clone()
    kernels = Fused(side.stack, make_noise(len(side.stack)))
    got, _, _ = kernels.forward(side.batch, training=False)
    torch.testing.assert_close(with_bias(kernels, got), want, rtol=1e-5, atol=1e-5)
    assert torch.equal(side.stack.running, running)
    assert torch.equal(side.stack.theta, theta)


@pytest.mark.parametrize("dropout", [True, False], ids=["dropout", "no dropout"])
@every_case
def test_a_training_step(choices, dropout):
    side = make_side(**{"factors": (2, 1), "count": 4, **choices})
    shares = (0.2, 0.1, 0.3) if dropout else (0.0, 0.0, 0.0)
    check_step(side.stack, side.batch, make_noise(len(side.stack), shares), targets_for(side))


def test_each_network_has_its_own_dropouts():
    """Also none at all, beside others that have some."""
    side = make_side(factors=(2, 1, 2, 1), count=3, n_layers=1)
    noise = replace(
        make_noise(4), shares=torch.tensor([[0.2, 0.0, 0.0, 0.0], [0.0, 0.4, 0.0, 0.0], [0.0, 0.0, 0.5, 0.0]])
    )
    got = check_step(side.stack, side.batch, noise, targets_for(side))
    quiet = make_side(factors=(2, 1, 2, 1), count=3, n_layers=1)
    without = stacked.forward(quiet.stack, quiet.stack.views(), quiet.batch, make_noise(4, (0.0, 0.0, 0.0)))
    torch.testing.assert_close(got[3], without[3], rtol=1e-5, atol=1e-5)
    assert all((got[m] - without[m]).abs().max() > 1e-3 for m in range(3))


def made_up(networks, count, n, features, seed=0):
    """Numbers in place of tokens, for more of them than the tokenizers of the tests make."""
    g = torch.Generator().manual_seed(seed)
    M = len(networks)
    positions = torch.rand(M, count, n, generator=g).sort(-1).values * 100
    return Batch(torch.randn(M, count, n, features, generator=g), positions, None)


@pytest.mark.parametrize(
    ("tokens", "width", "heads", "layers", "count"),
    [
        (70, 8, 2, 2, 2),  # more tokens than a warp has threads, and no multiple of them
        (33, 24, 2, 1, 20),  # more rows than a block takes at once
        (40, 128, 2, 4, 1),  # layers and heads as deep as fits, so that not all tokens lie in shared memory together
    ],
)
def test_larger_ones(tokens, width, heads, layers, count):
    config = NetworkConfig(encoding="l-rope", d_model=width, n_heads=heads, n_layers=layers, ff_factor=1)
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        network = shake(build_network(config, bsat.PatchTokenizer(tokens), lookback=3 * tokens, horizon=H), 1, 0.02)
    assert fused.fits(describe(network))
    stack, noise = stack_up([network]), make_noise(1)
    batch = made_up([network], count, tokens, stack.shape.features)
    targets = torch.randn(1, count, H, generator=torch.Generator().manual_seed(1))
    check_step(stack, batch, noise, targets)


def test_a_network_alone_gets_the_same_bits_of_noise():
    """And so do all others in a stack: whoever is beside, forecast, statistics and gradient are the same."""
    side = make_side(factors=(1, 3), count=3, n_layers=1)
    noise, targets = make_noise(2), targets_for(side)
    kernels, got = train_step(side.stack, side.batch, noise, targets)
    for m, network in enumerate(side.networks):
        one = slice(m, m + 1)
        alone = stack_up([network])
        own_noise = Noise(noise.seeds[one], noise.step, noise.shares[:, one].contiguous())
        batch = Batch(side.batch.values[one], side.batch.positions[one], None)
        own, forecast = train_step(alone, batch, own_noise, targets[one])
        torch.testing.assert_close(forecast[0], got[m], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(alone.running[0], side.stack.running[m], rtol=1e-5, atol=1e-5)
        for name, g in own.g.items():
            beside = kernels.g[name][one][tuple(slice(s) for s in g.shape)]
            torch.testing.assert_close(g, beside, rtol=1e-3, atol=2e-5, msg=lambda t, name=name: f"{name}: {t}")


def test_passes_leave_nothing_behind():
    """The same step again, on the same buffers, gives the same numbers to the last bit."""
    side = make_side(factors=(2, 1), count=4)
    noise, targets = make_noise(2), targets_for(side)
    kernels = Fused(side.stack, noise)
    found = []
    for _ in range(2):
        forecast, saved, last = kernels.forward(side.batch, training=True)
        kernels.backward(slope(forecast, targets), saved, last, side.batch)
        found.append((forecast.clone(), kernels.grad.clone()))
        kernels.forward(side.batch, training=False)
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])
    noise.step.add_(1)
    forecast, _, _ = kernels.forward(side.batch, training=True)
    assert not torch.equal(forecast, found[0][0])


# ---- the optimizer ---------------------------------------------------------------------------------------------------

RATES, DECAYS = (1e-2, 3e-3, 0.1), (0.1, 0.0, 0.5)


def reference_optimizers(networks):
    return [
        torch.optim.AdamW(
            [
                {"params": [p for n, p in network.named_parameters() if "log_base" not in n], "weight_decay": decay},
                {"params": [p for n, p in network.named_parameters() if "log_base" in n], "weight_decay": 0.0},
            ],
            lr=rate,
        )
        for network, rate, decay in zip(networks, RATES, DECAYS, strict=True)
    ]


def test_updates_are_those_of_torchs_adamw_after_clipping():
    """Gradients of norms far below, about and far above 1, and one of zero; rates that change on the way."""
    networks = [
        shake(make_network(seed=m, dtype=torch.float32, n_layers=1, ff_factor=factor), m)
        for m, factor in enumerate((2, 1, 2))
    ]
    stack, noise = stack_up(networks), make_noise(3, step=0)
    unused, kernels = padding(stack), Fused(stack, noise)
    first, second = torch.zeros_like(stack.theta), torch.zeros_like(stack.theta)
    optimizers = reference_optimizers(networks)
    generator = torch.Generator().manual_seed(2)
    for step, size in enumerate([1e-3, 1e5, 0.05, 0.0, 1e-6]):
        factor = 1 + step
        for m, network in enumerate(networks):
            for name, p in network.named_parameters():
                p.grad = size * 10.0 ** (m - 1) * torch.randn(p.shape, generator=generator)
                block = kernels.g[name][m]
                block.zero_()
                block[tuple(slice(s) for s in p.shape)] = p.grad
            nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            for group in optimizers[m].param_groups:
                group["lr"] = RATES[m] * factor
            optimizers[m].step()
        kernels.update(first, second, torch.tensor(RATES) * factor, torch.tensor(DECAYS))
        noise.step.add_(1)
        for m, network in enumerate(networks):
            saved = stack.save(m)
            for name, p in network.named_parameters():
                torch.testing.assert_close(
                    saved[name], p.detach(), rtol=2e-5, atol=2e-6, msg=lambda t, name=name: f"{name}: {t}"
                )
        assert (stack.theta[unused] == 0).all()
    moments = stack.views(first), stack.views(second)
    for m, network in enumerate(networks):
        for name, p in network.named_parameters():
            state = optimizers[m].state[p]
            for got, want in zip(moments, (state["exp_avg"], state["exp_avg_sq"]), strict=True):
                part = got[name][m][tuple(slice(s) for s in p.shape)].reshape(p.shape)
                torch.testing.assert_close(part, want, rtol=1e-4, atol=1e-7)


def test_the_norm_that_is_clipped_is_each_networks_own():
    """A network whose gradient has exploded takes nothing from its neighbour, and one that is no number neither."""
    side = make_side(factors=(2, 2, 2), n_layers=1)
    before, noise = side.stack.theta.clone(), make_noise(3, step=0)
    kernels = Fused(side.stack, noise)
    kernels.grad.copy_(torch.randn(kernels.grad.shape, generator=torch.Generator().manual_seed(0)) * 1e-3)
    small = kernels.grad[1].clone()
    kernels.grad[0] *= 1e9
    kernels.grad[2] = torch.nan
    first, second = torch.zeros_like(before), torch.zeros_like(before)
    kernels.update(first, second, torch.full((3,), 0.01), torch.zeros(3))
    torch.testing.assert_close(first[1], 0.1 * small, rtol=1e-5, atol=0)
    assert float((first[0] / 0.1).norm()) == pytest.approx(1, rel=1e-4)
    torch.testing.assert_close(side.stack.theta[1], before[1] - 0.01 * small / (small.abs() + 1e-8), rtol=0, atol=1e-6)
    assert torch.isfinite(side.stack.theta[:2]).all()
    assert torch.isnan(side.stack.theta[2]).any()


def test_what_pads_a_narrow_network_stays_zero():
    side = make_side(factors=(1, 3), count=3, n_layers=2)
    noise, targets = make_noise(2), targets_for(side)
    unused, kernels = padding(side.stack), Fused(side.stack, noise)
    assert unused[0].sum() - unused[1].sum() == 2 * 2 * D * (2 * D + 1)
    before = side.stack.theta.clone()
    first, second = torch.zeros_like(before), torch.zeros_like(before)
    for _ in range(3):
        forecast, saved, last = kernels.forward(side.batch, training=True)
        kernels.backward(slope(with_bias(kernels, forecast), targets), saved, last, side.batch)
        assert (kernels.grad[unused] == 0).all()
        kernels.update(first, second, torch.tensor([0.1, 0.1]), torch.tensor([0.1, 0.1]))
        noise.step.add_(1)
    assert (side.stack.theta[unused] == 0).all()
    assert ((side.stack.theta != before) | unused)[:, : before.shape[1] - side.stack.free].all()


# ---- which networks --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "taken"),
    [
        ({}, True),
        ({"layers": 4}, True),
        ({"layers": 5}, False),
        ({"tokens": 512}, True),
        ({"tokens": 513}, False),
        ({"width": 7, "heads": 1, "rotary": False, "learned": False}, False),  # halves of queries are turned as one
        ({"width": 256, "heads": 1, "layers": 1}, True),
        ({"width": 512, "heads": 4, "layers": 2}, True),
        ({"width": 512, "heads": 4, "layers": 3}, False),
        ({"width": 512, "heads": 1, "layers": 1}, False),
    ],
)
def test_which_networks_fit(change, taken):
    shape = describe(make_network())
    assert shape.tokens == N
    assert fused.fits(replace(shape, **change)) == taken


def test_a_network_of_its_own_kind_does_not_fit():
    assert not fused.fits(None)
