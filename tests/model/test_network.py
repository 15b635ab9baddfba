"""The network's parts against hand computations, and what must hold for the whole."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.interpolate import BSpline
from tiny_network import (
    HEADS,
    LAYERS,
    SMALL,
    TOKENIZERS,
    D,
    H,
    L,
    N,
    make_inputs,
    make_network,
    make_stream,
    make_windows,
)
from torch import nn

import bsat
from bsat.model import HEADS as HEAD_KINDS
from bsat.model import NORMS, FlattenHead, InstanceNorm, NetworkConfig, SplineHead, build_network
from bsat.model.dropout import Dropout

WIDTH = D // HEADS

# ---- attention -------------------------------------------------------------------------------------------------------


def project(attention, x):
    """q, k, v, each (B, h, n, k), one matrix at a time. The rows of the first two are laid out by half, head, pair."""
    weights, biases = attention.to_qkv.weight.chunk(3), attention.to_qkv.bias.chunk(3)
    q, k, v = (x @ w.T + b for w, b in zip(weights, biases, strict=True))
    q, k = (a.view(-1, N, 2, HEADS, WIDTH // 2).permute(0, 3, 1, 2, 4).flatten(3) for a in (q, k))
    return q, k, v.view(-1, N, HEADS, WIDTH).transpose(1, 2)


def raw_scores(attention, x, positions):
    """q'k / sqrt(k), (B, h, n, n), each pair turned as a complex number."""
    q, k, _ = project(attention, x)
    if attention.rotary is not None:
        half, base = WIDTH // 2, attention.rotary.log_base.exp()
        angles = positions[:, None, :, None] * base ** (-2 * torch.arange(half, dtype=torch.float64) / WIDTH)
        turn = torch.polar(torch.ones_like(angles), angles)
        q, k = (torch.view_as_real(torch.complex(a[..., :half], a[..., half:]) * turn).flatten(-2) for a in (q, k))
    return torch.einsum("bhik,bhjk->bhij", q, k) / math.sqrt(WIDTH)


def join_heads(attention, mixed):
    return attention.to_out(mixed.transpose(1, 2).reshape(-1, N, D))


def test_first_layer_is_torchs_attention():
    attention, x = make_network(encoding="lpe").encoder.layers[0].attention, make_stream()
    with torch.no_grad():
        q, k, v = project(attention, x)
        expected = join_heads(attention, nn.functional.scaled_dot_product_attention(q, k, v))
        got, _ = attention(x, torch.zeros(N).double(), None)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("encoding", ["lpe", "f-rope", "l-rope"])
def test_scores_are_handed_on_as_the_sum_of_raw_scores(encoding):
    """The whole encoder by hand: attention with the scores of all layers so far, then each norm after its sum."""
    encoder = make_network(encoding=encoding, n_layers=3).encoder
    x, (_, positions, _) = make_stream(), make_inputs()
    handed = []
    for layer in encoder.layers:
        layer.attention.register_forward_hook(lambda module, args, result: handed.append((args[2], result[1])))

    def norm(module, y):
        return (y - module.running_mean) / (module.running_var + 1e-5).sqrt() * module.weight + module.bias

    with torch.no_grad():
        got, total = encoder(x, positions), 0
        for i, layer in enumerate(encoder.layers):
            before = total
            total = total + raw_scores(layer.attention, x, positions)
            if i == 0:
                assert handed[i][0] is None
            else:
                torch.testing.assert_close(handed[i][0][0].view(-1, HEADS, N, N), before, rtol=0, atol=1e-10)
            torch.testing.assert_close(handed[i][1][0].view(-1, HEADS, N, N), total, rtol=0, atol=1e-10)
            mixed = torch.softmax(total, -1) @ project(layer.attention, x)[2]
            x = norm(layer.attention_norm, x + join_heads(layer.attention, mixed))
            up, _, _, down = layer.feed_forward
            x = norm(layer.feed_forward_norm, x + down(nn.functional.gelu(up(x))))
    torch.testing.assert_close(got, x, rtol=0, atol=1e-9)


def test_batch_norm_is_over_all_tokens_of_all_windows():
    norm = make_network(dropout=0.0).encoder.layers[0].attention_norm.train()
    x = make_stream() * 3 + 1
    y = norm(x).detach()
    torch.testing.assert_close(y.mean((0, 1)), torch.zeros(D).double(), rtol=0, atol=1e-12)
    torch.testing.assert_close(y.var((0, 1), correction=0), torch.ones(D).double(), rtol=1e-4, atol=0)


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@pytest.mark.parametrize("head", HEAD_KINDS)
def test_windows_do_not_see_each_other_when_forecasting(tokenizer, head):
    network, (values, positions, knots) = make_network(tokenizer, head=head), make_inputs(tokenizer)
    with torch.no_grad():
        whole = network(values, positions, knots)
        assert whole.shape == (4, H)
        for i in range(4):
            one = slice(i, i + 1)
            alone = network(values[one], positions[one], None if knots is None else knots[one])
            torch.testing.assert_close(alone, whole[one], rtol=0, atol=1e-10)


# ---- dropout ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("p", [0.05, 0.3, 0.5, 0.9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dropout_keeps_the_share_and_the_expectation(p, dtype):
    drop, count = Dropout(p).train(), 200_001
    torch.manual_seed(0)
    out = drop(torch.full((count,), 2.0, dtype=dtype))
    exact = round(p * 2**16) / 2**16
    assert set(out.unique().tolist()) == {0.0, torch.tensor(2 / (1 - exact), dtype=dtype).item()}
    kept = (out != 0).double()
    spread = math.sqrt(p * (1 - p) / count)
    assert kept.mean() == pytest.approx(1 - p, abs=4 * spread)
    assert out.double().mean() == pytest.approx(2.0, abs=2 * 4 * spread / (1 - p))
    # Four neighbours share a random number of 64 bits; they must not share a fate.
    for lag in range(1, 9):
        pairs = ((kept[lag:] - 1 + p) * (kept[:-lag] - 1 + p)).mean() / (p * (1 - p))
        assert abs(float(pairs)) < 5 / math.sqrt(count)


def test_dropouts_gradient_is_the_mask_times_the_scale():
    x = make_stream().transpose(1, 2).requires_grad_()  # not contiguous
    assert not x.is_contiguous()
    torch.manual_seed(0)
    out = Dropout(0.25).train()(x)
    mask = (out != 0).double()
    assert 0.5 < mask.mean() < 0.95
    assert torch.equal(out.detach(), x.detach() * mask * (2**16 / (2**16 - 2**14)))
    weights = make_stream(seed=9).transpose(1, 2)
    (out * weights).sum().backward()
    torch.testing.assert_close(x.grad, weights * mask / 0.75, rtol=1e-14, atol=0)


@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 0), (5, 7, 3)])
def test_dropout_takes_any_shape(shape):
    out = Dropout(0.5).train()(torch.ones(shape))
    assert out.shape == shape
    assert ((out == 0) | (out == 2)).all()


def test_dropout_repeats_and_is_off_where_it_should_be():
    x, drop = make_stream(), Dropout(0.3).train()
    torch.manual_seed(5)
    one, two = drop(x), drop(x)
    assert not torch.equal(one, two)
    torch.manual_seed(5)
    assert torch.equal(drop(x), one)
    assert torch.equal(drop(x), two)
    assert drop.eval()(x) is x
    assert Dropout(0.0).train()(x) is x
    assert repr(drop) == "Dropout(p=0.3)"


@pytest.mark.parametrize("p", [1e-9, 1 - 1e-9])
def test_dropout_rates_beyond_16_bits(p):
    out = Dropout(p).train()(torch.ones(1000))
    assert (out.round() == round(1 - p)).all()


OFF = {"dropout": 0.0, "ff_dropout": 0.0, "attention_dropout": 0.0}


def two_passes(network):
    values, positions, _ = make_inputs()
    torch.manual_seed(0)
    with torch.no_grad():
        return network(values, positions), network(values, positions)


@pytest.mark.parametrize("part", OFF)
def test_every_dropout_is_on_in_training_and_off_otherwise(part):
    network = make_network(**{**OFF, part: 0.3})
    assert torch.equal(*two_passes(network.eval()))
    assert not torch.equal(*two_passes(network.train()))
    assert torch.equal(*two_passes(make_network(**OFF).train()))


def test_where_dropout_is():
    """After the embedding, on what attention and feed-forward add, inside the latter, and on the attention weights."""
    network, (values, positions, _) = make_network(), make_inputs()
    dropped = []
    for module in network.modules():
        if isinstance(module, Dropout):
            module.register_forward_hook(lambda module, args, result: dropped.append((module.p, tuple(result.shape))))
    network(values, positions)
    stream, c = (4, N, D), NetworkConfig()
    layer = [(c.attention_dropout, (4 * HEADS, N, N)), (c.dropout, stream), (c.ff_dropout, (4, N, 2 * D))]
    assert dropped == [(c.dropout, stream), *[*layer, (c.dropout, stream)] * LAYERS]


# ---- weights ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokenizer", ["bspline", "patch"])
def test_weights_are_xavier_uniform(tokenizer):
    network = make_network(tokenizer, d_model=16, horizon=20)
    matrices = {}
    for name, module in network.named_modules():
        if isinstance(module, nn.Linear):
            assert (module.bias == 0).all(), name
            parts = module.weight.detach().chunk(3) if name.endswith("to_qkv") else [module.weight.detach()]
            matrices |= {f"{name}.{i}": part for i, part in enumerate(parts)}
    assert sum(name.startswith("encoder.layers.0.attention.to_qkv") for name in matrices) == 3
    for name, weight in matrices.items():
        fan_out, fan_in = weight.shape
        if "to_qkv" in name:
            assert (fan_out, fan_in) == (16, 16)  # each of them, not all three as one
        bound = math.sqrt(6 / (fan_in + fan_out))
        assert weight.abs().max() <= bound, name
        if weight.numel() >= 200:
            assert weight.abs().max() > 0.95 * bound, name
            assert float(weight.std()) == pytest.approx(bound / math.sqrt(3), rel=0.2), name
    q, k, v = (matrices[f"encoder.layers.0.attention.to_qkv.{i}"] for i in range(3))
    assert not torch.equal(q, k)
    assert not torch.equal(k, v)


def test_weights_follow_torchs_seed():
    one, two, other = (make_network(seed=seed).state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert not torch.equal(one["embedding.weight"], other["embedding.weight"])
    assert not torch.equal(one["positions.by_rank"], other["positions.by_rank"])


# ---- instance norm ---------------------------------------------------------------------------------------------------


LEVELS = [True, False, True]


def test_instance_norm_by_hand():
    values = 7 * torch.randn(5, N, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 3
    normal, mean, deviation = InstanceNorm(LEVELS)(values)
    held = values[..., [0, 2]].flatten(1).numpy()
    np.testing.assert_allclose(mean[:, 0], held.mean(1), rtol=1e-12)
    np.testing.assert_allclose(deviation[:, 0], np.sqrt(held.var(1) + 1e-5), rtol=1e-12)
    assert torch.equal(normal[..., 1], values[..., 1])  # centers are positions, not levels
    after = normal[..., [0, 2]].flatten(1)
    np.testing.assert_allclose(after.mean(1), 0, atol=1e-12)
    np.testing.assert_allclose(after.var(1, correction=0), 1, atol=1e-5)


@pytest.mark.parametrize("over", NORMS)
@pytest.mark.parametrize("levels", [LEVELS, [True] * 3])
def test_inverse_undoes_instance_norm(over, levels):
    values = 7 * torch.randn(5, N, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 3
    window = (torch.arange(5.0), torch.arange(5.0) + 0.5) if over == "window" else None
    normal, mean, deviation = InstanceNorm(levels, over)(values, window)
    assert mean.shape == deviation.shape == (5, 1)
    if window is not None:
        np.testing.assert_allclose(mean[:, 0], window[0])
        np.testing.assert_allclose(deviation[:, 0], (window[1] + 1e-5).sqrt())
    for i in range(3):
        back = InstanceNorm.inverse(normal[..., i], mean, deviation) if levels[i] else normal[..., i]
        torch.testing.assert_close(back, values[..., i], rtol=1e-12, atol=1e-12)


def test_a_constant_window_is_no_division_by_zero():
    normal, mean, deviation = InstanceNorm([True])(torch.full((2, N, 1), 4.25))
    assert (normal == 0).all()
    assert (mean == 4.25).all()
    np.testing.assert_allclose(deviation, math.sqrt(1e-5), rtol=1e-6)


def test_the_window_norm_needs_the_window():
    values, positions, _ = make_inputs()
    with pytest.raises(ValueError, match=r"`window` must hold each window's mean and variance with norm='window'"):
        make_network(norm="window")(values, positions)


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@pytest.mark.parametrize("norm", NORMS)
@given(a=st.floats(0.5, 100), b=st.floats(-1000, 1000))
@settings(max_examples=8, deadline=None)
def test_a_change_of_unit_changes_the_unit_of_the_forecast(tokenizer, norm, a, b):
    """From the window to the forecast: a y + b is forecast as a f + b, up to the 1e-5 in the variance."""
    network = make_network(tokenizer, norm=norm, head="spline")

    def forecast(windows):
        tokens = TOKENIZERS[tokenizer].transform(windows)
        moments = (windows.mean(1), windows.var(1, correction=0)) if norm == "window" else None
        with torch.no_grad():
            return network(tokens.values, tokens.positions, getattr(tokens, "knots", None), moments)

    windows = make_windows()
    before, after = forecast(windows), forecast(a * windows + b)
    torch.testing.assert_close(after, a * before + b, rtol=0, atol=1e-4 * a * float(windows.std()))


# ---- heads -----------------------------------------------------------------------------------------------------------


def make_spline_head(degree=3):
    torch.manual_seed(0)
    return SplineHead(N, D, H, lookback=L, degree=degree).double()


def windows_with_gaps():
    """One whole, one that begins and one that ends with missing samples, so that knots do not span the window."""
    windows, missing = make_windows(3), torch.zeros(3, L, dtype=torch.bool)
    missing[1, :7], missing[2, -5:], missing[2, 20:24] = True, True, True
    return windows.masked_fill(missing, torch.nan), missing


def latent_basis(knots, degree=3):
    """scipy's, (B, n, n): values of the basis functions at n even times, held at the ends of the knots."""
    times = np.linspace(0, L - 1, N)
    return np.stack([BSpline.design_matrix(times.clip(t[0], t[-1]), t, degree).toarray() for t in knots.numpy()])


def test_the_spline_head_evaluates_a_latent_spline():
    windows, missing = windows_with_gaps()
    tokens, head, x = TOKENIZERS["bspline"].transform(windows, mask=missing), make_spline_head(), make_stream(3)
    assert tokens.knots[1, 0] > 0
    assert tokens.knots[2, -1] < L - 1
    rows = latent_basis(tokens.knots)
    np.testing.assert_allclose(rows.sum(2), 1, atol=1e-12)
    with torch.no_grad():
        expected = head.project((torch.tensor(rows) @ x).flatten(1))
        torch.testing.assert_close(head(x, tokens.knots), expected, rtol=0, atol=1e-10)


def test_a_constant_latent_passes_the_spline_head_unchanged():
    _, _, knots = make_inputs()
    head, flatten = make_spline_head(), FlattenHead(N, D, H).double()
    flatten.load_state_dict(head.state_dict())
    constant = make_stream()[:, :1].expand(-1, N, -1)
    with torch.no_grad():
        torch.testing.assert_close(head(constant, knots), flatten(constant), rtol=0, atol=1e-12)
        assert (head(make_stream(), knots) - flatten(make_stream())).abs().max() > 1e-3


def test_the_spline_head_reads_times_not_ranks():
    """A latent that is linear in time is seen the same, wherever the knots lie."""
    _, _, knots = make_inputs()
    greville = torch.stack([knots[:, i + 1 : i + 4].mean(1) for i in range(N)], 1)  # (B, n), where p = 3 is linear
    assert greville[:, 3].std() > 0.1  # they do lie elsewhere in every window
    slope = make_stream(1)[:, :1]
    head = make_spline_head()
    with torch.no_grad():
        seen = head(greville.unsqueeze(2) * slope, knots)
        times = torch.linspace(0, L - 1, N, dtype=torch.float64)[None, :, None]
        torch.testing.assert_close(seen, head.project((times * slope).flatten(1)).expand(4, H), rtol=0, atol=1e-9)


def test_the_spline_head_needs_knots():
    values, positions, knots = make_inputs()
    network = make_network(head="spline")
    assert isinstance(network.head, SplineHead)
    assert network.head.needs_knots
    assert network(values, positions, knots).shape == (4, H)
    with pytest.raises(ValueError, match=r"`knots` must be given with head='spline'; got None\. Pass tokens\.knots"):
        network(values, positions)


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@pytest.mark.parametrize("head", HEAD_KINDS)
def test_which_head_a_tokenizer_gets(tokenizer, head):
    kind = SplineHead if head == "spline" and tokenizer.startswith("bspline") else FlattenHead
    network = make_network(tokenizer, head=head)
    assert type(network.head) is kind
    assert network.head.needs_knots == (kind is SplineHead)


def test_both_heads_have_the_same_weights_to_save():
    flatten, spline = (make_network(head=head).state_dict() for head in HEAD_KINDS)
    assert list(flatten) == list(spline)
    assert all(torch.equal(flatten[name], spline[name]) for name in flatten)


# ---- choices ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("choice", "error", "match"),
    [
        ({"encoding": "rope"}, ValueError, r"`encoding` must be one of 'lpe', 'f-rope', .*; got 'rope'"),
        ({"head": "mean"}, ValueError, r"`head` must be one of 'flatten', 'spline'; got 'mean'"),
        ({"norm": "batch"}, ValueError, r"`norm` must be one of 'coefficients', 'window'; got 'batch'"),
        ({"d_model": 0}, ValueError, r"`d_model` must be at least 1; got 0"),
        ({"n_layers": 0}, ValueError, r"`n_layers` must be at least 1; got 0"),
        ({"n_heads": -1}, ValueError, r"`n_heads` must be at least 1; got -1"),
        ({"ff_factor": 1.5}, TypeError, r"`ff_factor` must be a whole number; got 1\.5"),
        ({"n_layers": True}, TypeError, r"`n_layers` must be a whole number; got True"),
        ({"d_model": 30}, ValueError, r"`d_model` must be a multiple of n_heads = 4; got 30\. Change one"),
        ({"d_model": 12}, ValueError, r"`d_model` / `n_heads` must be even for encoding='l-rope\+lpe'.*got 3\."),
        ({"dropout": 1.0}, ValueError, r"`dropout` must lie in \[0, 1\); got 1\.0"),
        ({"ff_dropout": -0.1}, ValueError, r"`ff_dropout` must lie in \[0, 1\); got -0\.1"),
        ({"attention_dropout": float("nan")}, ValueError, r"`attention_dropout` must lie in \[0, 1\); got nan"),
        ({"dropout": "0.1"}, TypeError, r"`dropout` must be a number; got '0\.1'"),
        ({"dropout": True}, TypeError, r"`dropout` must be a number; got True"),
    ],
)
def test_bad_choices(choice, error, match):
    with pytest.raises(error, match=match):
        NetworkConfig(**choice)


def test_an_odd_head_is_fine_where_nothing_turns():
    values, positions, _ = make_inputs()
    assert make_network(encoding="lpe", d_model=6, n_heads=2)(values, positions).shape == (4, H)


def test_the_names_of_the_choices_are_the_constructors():
    assert NetworkConfig.names() == tuple(NetworkConfig.__annotations__)
    with pytest.raises(TypeError):
        NetworkConfig("lpe")


def test_asinh_coefficients_need_the_window_norm():
    tokenizer = bsat.BSplineTokenizer(N, coefficients="asinh")
    with pytest.raises(ValueError, match=r"`norm` must be 'window' with a tokenizer of coefficients='asinh'"):
        build_network(NetworkConfig(**SMALL), tokenizer, lookback=L, horizon=H)
    network = build_network(NetworkConfig(norm="window", **SMALL), tokenizer, lookback=L, horizon=H)
    assert len(network.encoder.layers) == LAYERS


def test_tokens_must_fit_into_the_window():
    for tokenizer, match in ((bsat.BSplineTokenizer(50), "strictly between"), (bsat.PatchTokenizer(7), "must divide")):
        with pytest.raises(ValueError, match=match):
            build_network(NetworkConfig(**SMALL), tokenizer, lookback=L, horizon=H)


@pytest.mark.parametrize("encoding", ["lpe", "l-rope+lpe"])
def test_a_forecast_made_in_parts_is_the_same(encoding, monkeypatch):
    """Outputs and gradients, with parts of one window and of several, and a rest."""
    values, positions, _ = make_inputs()
    network = make_network(encoding=encoding, n_layers=3).double().eval()

    def run():
        network.zero_grad()
        out = network(values, positions)
        out.square().sum().backward()
        return [out.detach(), *(p.grad.clone() for p in network.parameters())]

    whole = run()
    one = 8 * HEADS * N * N  # bytes of a window's scores
    for part in (one // 2, one, 2 * one, 1):
        monkeypatch.setattr("bsat.model.attention.PART", part)
        for a, b in zip(run(), whole, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
