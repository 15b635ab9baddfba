"""Where tokens are: what rotary and learned positions promise."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_network import HEADS, D, L, N, count_parameters, make_inputs, make_network, make_stream

import bsat
from bsat.model import ENCODINGS, Attention, LearnedPositions, NetworkConfig, RotaryPositions, build_network
from bsat.model.positions import BASE, rotate

ROTARY = [e for e in ENCODINGS if "rope" in e]


def turn(rotary, x, at):
    return rotate(x, rotary(at))


def forecast(network, positions=None):
    values, centers, _ = make_inputs()
    with torch.no_grad():
        return network(values, centers if positions is None else positions)


# ---- rotate ----------------------------------------------------------------------------------------------------------


places = st.floats(-2000, 2000)


@given(
    i=places,
    j=places,
    shift=places,
    log_base=st.floats(0, 14),
    width=st.sampled_from([2, 4, 10]),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=100, deadline=None)
def test_a_turned_product_depends_on_the_distance_alone(i, j, shift, log_base, width, seed):
    q, k = torch.randn(2, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    rotary = RotaryPositions(width, learned=False, base=math.exp(log_base)).double()

    def product(a, b):
        a, b = torch.tensor([a, b], dtype=torch.float64)
        return float(turn(rotary, q, a) @ turn(rotary, k, b))

    scale = float(q.norm() * k.norm())
    assert product(i + shift, j + shift) == pytest.approx(product(i, j), abs=1e-10 * scale)
    assert product(i - j, 0.0) == pytest.approx(product(i, j), abs=1e-10 * scale)


@given(at=places, width=st.sampled_from([2, 4, 10]), seed=st.integers(0, 2**31))
@settings(max_examples=50, deadline=None)
def test_turning_keeps_the_length_of_every_pair(at, width, seed):
    x = torch.randn(3, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    rotary = RotaryPositions(width, learned=False).double()
    turned = turn(rotary, x, torch.full((3,), at, dtype=torch.float64))
    torch.testing.assert_close(turned.norm(dim=1), x.norm(dim=1), rtol=1e-12, atol=0)
    pairs, before = turned.view(3, 2, -1), x.view(3, 2, -1)
    torch.testing.assert_close(pairs.norm(dim=1), before.norm(dim=1), rtol=1e-12, atol=0)


def test_pairs_turn_as_complex_numbers_by_the_papers_angles():
    """Pair i = 1 ... k/2 turns by position x base^(-2 (i - 1) / k)."""
    rng, k = np.random.default_rng(0), 6
    x, at = rng.normal(size=(5, k)), rng.uniform(0, 720, 5)
    angles = at[:, None] * BASE ** (-2 * (np.arange(1, k // 2 + 1) - 1) / k)
    expected = (x[:, : k // 2] + 1j * x[:, k // 2 :]) * np.exp(1j * angles)
    rotary = RotaryPositions(k, learned=False).double()
    rotary.log_base.fill_(math.log(BASE))  # in float64, as the angles here
    rotary.exponents.copy_(torch.arange(0, k, 2, dtype=torch.float64) / -k)
    turned = turn(rotary, torch.tensor(x), torch.tensor(at)).numpy()
    np.testing.assert_allclose(turned[:, : k // 2], expected.real, atol=1e-12)
    np.testing.assert_allclose(turned[:, k // 2 :], expected.imag, atol=1e-12)


def test_position_zero_turns_nothing():
    x = make_stream()
    rotary = RotaryPositions(D, learned=True).double()
    assert torch.equal(turn(rotary, x, torch.zeros(N).double()), x)


@pytest.mark.parametrize("batched", [False, True])
def test_the_gradients_of_turning(batched):
    """Against finite differences, in what is turned and in the base; positions broadcast over the windows or not."""
    rotary = RotaryPositions(D, learned=True).double()
    _, centers, _ = make_inputs(count=2)
    at = centers if batched else centers[0]

    def turned(x, log_base):
        return rotate(x, torch.func.functional_call(rotary, {"log_base": log_base}, (at,)))

    x = make_stream(2).transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()  # not contiguous
    start = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)  # a small base, which all pairs feel
    assert torch.autograd.gradcheck(turned, (x, start))


def test_rotary_positions_need_an_even_head():
    with pytest.raises(ValueError, match=r"turn pairs, so `d_model` / `n_heads` must be even; got 3\. Change one"):
        RotaryPositions(3, learned=True)


# ---- rotary encodings ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plus", ["", "+lpe"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_learned_rope_starts_as_fixed_rope(plus, dtype):
    values, centers, _ = make_inputs(dtype=dtype)
    fixed = make_network(encoding="f-rope" + plus, dtype=dtype)
    learned = make_network(encoding="l-rope" + plus, dtype=dtype, seed=1)
    loaded = learned.load_state_dict(fixed.state_dict(), strict=False)
    assert not loaded.unexpected_keys
    assert len(loaded.missing_keys) == 2
    assert all(name.endswith("rotary.log_base") for name in loaded.missing_keys)
    assert [float(b.detach()) for b in learned.log_bases()] == pytest.approx([math.log(10_000)] * 2, rel=1e-7)
    assert fixed.log_bases() == []
    with torch.no_grad():
        assert torch.equal(learned(values, centers), fixed(values, centers))
        learned.log_bases()[1].sub_(1.0)
        assert not torch.allclose(learned(values, centers), fixed(values, centers), rtol=1e-5)


@pytest.mark.parametrize("learned", [False, True])
def test_scores_depend_on_differences_of_positions(learned):
    x, (_, centers, _) = make_stream(), make_inputs()
    torch.manual_seed(0)
    attention = Attention(D, HEADS, rotary=RotaryPositions(D // HEADS, learned=learned), dropout=0.0).double()
    with torch.no_grad():
        (scores,) = attention(x, centers, None)[1]
        (shifted,) = attention(x, centers + 123.456, None)[1]
        (stretched,) = attention(x, centers * 1.1, None)[1]
        moved = centers.clone()
        moved[:, 3] += 0.25
        (moved,) = attention(x, moved, None)[1]
    torch.testing.assert_close(shifted, scores, rtol=0, atol=1e-11)
    assert (stretched - scores).abs().max() > 1e-2
    # One token moved: its row and its column change, and nothing else does, nor how it looks at itself.
    changed = (moved - scores).abs() > 1e-6
    others = torch.arange(N) != 3
    assert changed[:, 3, others].any()
    assert changed[:, others, 3].any()
    assert not changed[:, others][:, :, others].any()
    assert not changed[:, 3, 3].any()


@pytest.mark.parametrize("encoding", ROTARY)
def test_forecasts_depend_on_differences_of_positions(encoding):
    network, (_, centers, _) = make_network(encoding=encoding), make_inputs()
    before = forecast(network)
    for shift in (-17.25, 0.5, 1000.0):
        torch.testing.assert_close(forecast(network, centers + shift), before, rtol=0, atol=1e-9)
    bent = centers.clone()
    bent[:, 2:] += 0.75
    assert (forecast(network, bent) - before).abs().max() > 1e-4


def test_one_row_of_positions_serves_all_windows():
    network, (_, centers, _) = make_network(encoding="l-rope"), make_inputs()
    row = centers[0]
    torch.testing.assert_close(forecast(network, row), forecast(network, row.expand(4, N)), rtol=0, atol=1e-12)


@pytest.mark.parametrize("encoding", ["l-rope", "l-rope+lpe"])
@pytest.mark.parametrize(("heads", "some"), [(1, True), (2, True), (4, False)], ids=["width 8", "width 4", "width 2"])
def test_gradients_reach_the_base_of_every_layer(encoding, heads, some):
    """But for heads of width 2, whose single pair turns at frequency 1 whatever the base."""
    network = make_network(encoding=encoding, n_heads=heads, n_layers=3)
    values, centers, _ = make_inputs()
    network(values, centers).square().sum().backward()
    assert len(network.log_bases()) == 3
    for log_base in network.log_bases():
        assert log_base.shape == ()
        assert (abs(float(log_base.grad)) > 1e-8) == some


def test_the_gradient_of_the_base_is_that_of_finite_differences():
    network = make_network(encoding="l-rope")
    values, centers, _ = make_inputs()
    network(values, centers).square().sum().backward()
    for log_base in network.log_bases():
        total = []
        for step in (1e-6, -1e-6):
            with torch.no_grad():
                log_base.add_(step)
                total.append(float(network(values, centers).square().sum()))
                log_base.sub_(step)
        assert float(log_base.grad) == pytest.approx((total[0] - total[1]) / 2e-6, rel=1e-4, abs=1e-6)


# ---- learned positions -----------------------------------------------------------------------------------------------


def test_learned_positions_add_a_vector_for_each_rank():
    positions = LearnedPositions(N, D).double()
    assert positions.by_rank.shape == (N, D)
    assert positions.by_rank.abs().max() <= 0.02
    x = make_stream()
    added = positions(x) - x
    torch.testing.assert_close(added, positions.by_rank.detach().expand(4, N, D), rtol=0, atol=1e-14)


def test_learned_positions_know_no_centers():
    network, (_, centers, _) = make_network(encoding="lpe"), make_inputs()
    assert torch.equal(forecast(network, centers * 2 + 7), forecast(network))


def test_learned_positions_tell_ranks_apart():
    """Averaged over the tokens, a permutation shows only through the learned positions."""
    order = torch.randperm(N, generator=torch.Generator().manual_seed(3))
    x, positions = make_stream(), torch.zeros(N).double()
    network = make_network(encoding="lpe")
    with torch.no_grad():
        network.positions.by_rank.mul_(50)  # learned by now
        plain = [network.encoder(a, positions).mean(1) for a in (x, x[:, order])]
        ranked = [network.encoder(network.positions(a), positions).mean(1) for a in (x, x[:, order])]
    torch.testing.assert_close(plain[0], plain[1], rtol=0, atol=1e-12)
    assert (ranked[0] - ranked[1]).abs().max() > 1e-3


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_the_encoder_is_permutation_equivariant(encoding):
    """Without a positional term; and with rotary ones if tokens take their positions along."""
    network, x, (_, centers, _) = make_network(encoding=encoding), make_stream(), make_inputs()
    order = torch.randperm(N, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        whole = network.encoder(x, centers)[:, order]
        together, alone = network.encoder(x[:, order], centers[:, order]), network.encoder(x[:, order], centers)
    torch.testing.assert_close(together, whole, rtol=0, atol=1e-11)
    assert ((alone - whole).abs().max() > 1e-3) == ("rope" in encoding)


# ---- parameters ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize(
    ("encoding", "formula"),
    [
        ("lpe", lambda layers: N * D),
        ("f-rope", lambda layers: 0),
        ("l-rope", lambda layers: layers),
        ("f-rope+lpe", lambda layers: N * D),
        ("l-rope+lpe", lambda layers: N * D + layers),
    ],
)
def test_how_many_parameters_an_encoding_adds(encoding, formula, layers):
    without = D * (2 + 1) + 5 * (N * D + 1)  # embedding, head
    attention, feed_forward, norms = 4 * D * (D + 1), D * 2 * D * 2 + 2 * D + D, 4 * D
    without += layers * (attention + feed_forward + norms)
    assert count_parameters(make_network(encoding="f-rope", n_layers=layers)) == without
    assert count_parameters(make_network(encoding=encoding, n_layers=layers)) - without == formula(layers)


def test_centers_lie_in_the_window():
    """So that what is turned are samples, not shares of the window."""
    _, centers, _ = make_inputs()
    assert centers.min() >= 0
    assert L / 2 < centers.max() <= L - 1


def test_positions_in_units_of_tokens():
    """The fastest pair turns by one radian from one token of a uniform grid to the next."""
    samples, tokens = (RotaryPositions(D, learned=True, unit=unit).double() for unit in (1.0, 16.0))
    positions = torch.arange(0, 720, 16.0, dtype=torch.float64)
    torch.testing.assert_close(tokens(positions), samples(positions / 16))
    assert tokens(positions)[:, 0].diff().tolist() == pytest.approx([1.0] * 44)
    network = build_network(NetworkConfig(rotary_unit="tokens"), bsat.DownsampleTokenizer(45), lookback=720, horizon=8)
    assert {layer.attention.rotary.unit for layer in network.encoder.layers} == {16.0}
    with pytest.raises(ValueError, match="`rotary_unit` must be one of"):
        NetworkConfig(rotary_unit="hours")
