"""Networks side by side are the networks they are alone: parameters, forecasts, statistics and dropout."""

import itertools
from dataclasses import replace

import pytest
import torch
from tiny_network import HEADS, LAYERS, TOKENIZERS, D, H, L, N, make_network
from tiny_stack import NO_DROPOUT, gradients, make_noise, make_side, padding, stack_up
from torch import nn

from bsat.model import NetworkConfig, build_network, stacked
from bsat.model.attention import Attention
from bsat.model.encoder import Encoder, EncoderLayer, TokenBatchNorm
from bsat.model.head import FlattenHead
from bsat.model.instance_norm import InstanceNorm
from bsat.model.network import Network
from bsat.model.positions import ENCODINGS, LearnedPositions, RotaryPositions
from bsat.model.stacked import Batch, Noise, Shape, Stack, describe, dropouts, feed_width, forward

CASES = {
    "l-rope+lpe": {},
    "l-rope": {"encoding": "l-rope", "n_layers": 3},
    "f-rope": {"encoding": "f-rope", "n_heads": 4},
    "f-rope+lpe": {"encoding": "f-rope+lpe", "n_heads": 1},
    "lpe": {"encoding": "lpe", "n_layers": 1},
    "odd heads": {"encoding": "lpe", "d_model": 12, "n_heads": 4},
    "heads of one number": {"encoding": "lpe", "n_heads": 8},
    "spline head": {"head": "spline"},
    "detail": {"tokenizer": "bspline, detail"},
    "patches": {"tokenizer": "patch", "encoding": "f-rope"},
    "down-sampling": {"tokenizer": "downsample"},
}
every_case = pytest.mark.parametrize("choices", CASES.values(), ids=CASES)


def close(got, want, size=1e-5):
    torch.testing.assert_close(got, want, rtol=size, atol=size)


# ---- which networks --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@pytest.mark.parametrize("head", ["flatten", "spline"])
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_built_network_is_described(encoding, head, tokenizer):
    shape = describe(make_network(tokenizer, encoding=encoding, head=head, ff_factor=3))
    assert shape == Shape(
        tokens=N,
        features=len(TOKENIZERS[tokenizer].level_features(L)),
        width=D,
        layers=LAYERS,
        heads=HEADS,
        feed=3 * D,
        horizon=H,
        rotary="rope" in encoding,
        learned="l-rope" in encoding,
        ranked="lpe" in encoding,
        spline=head == "spline" and tokenizer.startswith("bspline"),
    )
    assert shape.head_width == D // HEADS


def test_dropouts_and_feed_width_are_the_choices():
    network = make_network(dropout=0.1, ff_dropout=0.2, attention_dropout=0.3, ff_factor=3)
    assert dropouts(network) == (0.1, 0.2, 0.3)
    assert feed_width(network) == 3 * D


def of_another_kind(kind):
    """A part that is an instance of the class, but not that class."""
    return type(f"My{kind.__name__}", (kind,), {})


def turned_into(part, kind=None):
    part.__class__ = of_another_kind(kind or type(part))


SWAPS = {
    "network": lambda network: turned_into(network),
    "norm": lambda network: setattr(network, "norm", of_another_kind(InstanceNorm)([True, False])),
    "embedding": lambda network: setattr(network, "embedding", nn.Sequential(network.embedding)),
    "positions": lambda network: setattr(network, "positions", of_another_kind(LearnedPositions)(N, D)),
    "encoder": lambda network: turned_into(network.encoder, Encoder),
    "no layer": lambda network: setattr(network, "encoder", Encoder([])),
    "layer": lambda network: turned_into(network.encoder.layers[-1], EncoderLayer),
    "attention": lambda network: turned_into(network.encoder.layers[-1].attention, Attention),
    "rotary": lambda network: turned_into(network.encoder.layers[0].attention.rotary, RotaryPositions),
    "activation": lambda network: network.encoder.layers[1].feed_forward.__setitem__(1, nn.ReLU()),
    "feed-forward": lambda network: network.encoder.layers[0].feed_forward.append(nn.Identity()),
    "dropout": lambda network: network.encoder.layers[0].feed_forward.__setitem__(2, nn.Dropout(0.1)),
    "norm of attention": lambda network: setattr(network.encoder.layers[1], "attention_norm", nn.LayerNorm(D)),
    "norm of feed-forward": lambda network: turned_into(network.encoder.layers[0].feed_forward_norm, TokenBatchNorm),
    "head": lambda network: setattr(network, "head", of_another_kind(FlattenHead)(N, D, H)),
}


@pytest.mark.parametrize("swap", SWAPS.values(), ids=SWAPS)
def test_a_network_with_a_part_of_another_kind_is_not_described(swap):
    network = make_network()
    assert describe(network) is not None
    swap(network)
    assert describe(network) is None


def test_a_module_that_is_no_network_is_not_described():
    assert describe(nn.Linear(2, 3)) is None


def test_the_common_shape_is_as_wide_as_the_widest():
    narrow, wide = (describe(make_network(ff_factor=factor)) for factor in (1, 3))
    assert stacked.common_shape([narrow, wide, narrow]) == wide


@pytest.mark.parametrize("choices", [{"encoding": "lpe"}, {"n_heads": 4}, {"n_layers": 1}, {"head": "spline"}])
def test_other_differences_cannot_be_stacked(choices):
    shapes = [describe(make_network()), describe(make_network(**choices))]
    with pytest.raises(ValueError, match="may differ in their feed-forward width alone"):
        stacked.common_shape(shapes)


# ---- parameters ------------------------------------------------------------------------------------------------------


def kept(network):
    """What a stack holds of a network's state: all but a counter that nothing reads."""
    return {name: a for name, a in network.state_dict().items() if not name.endswith("num_batches_tracked")}


def same(one, two):
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


@every_case
def test_what_goes_in_comes_out(choices):
    side = make_side(**choices)
    assert len(side.stack) == 3
    for member, network in enumerate(side.networks):
        state = side.stack.save(member)
        assert same(state, kept(network))
        assert all(state[name].shape == a.shape for name, a in kept(network).items())  # also of the log-bases
        fresh = make_network(
            dtype=torch.float32, seed=99, ff_factor=(2, 1, 2)[member], **{"tokenizer": "bspline", **choices}
        )
        missing, unexpected = fresh.load_state_dict(state, strict=False)
        assert unexpected == []
        assert all(name.endswith("num_batches_tracked") for name in missing)
        assert same(kept(fresh), kept(network))


def test_what_is_saved_is_a_copy():
    stack = make_side().stack
    state = stack.save(0)
    before = {name: a.clone() for name, a in state.items()}
    stack.theta.add_(1)
    stack.running.add_(1)
    assert same(state, before)


def test_a_state_of_another_moment_is_saved_by_the_same_layout():
    side = make_side()
    theta, running = side.stack.theta[1] + 1, side.stack.running[1] - 1
    state = side.stack.save(1, theta=theta, running=running)
    for name, a in kept(side.networks[1]).items():
        torch.testing.assert_close(state[name], a - 1 if "running" in name else a + 1, rtol=0, atol=0)


def test_loading_a_narrower_network_leaves_nothing_of_the_wider_one():
    side = make_side(factors=(2, 2))
    side.stack.feeds[0] = D
    narrow = make_side(factors=(1,), seed=5).networks[0]
    side.stack.load(0, narrow.state_dict())
    assert same(side.stack.save(0), kept(narrow))
    unused = padding(side.stack)[0]
    assert unused.sum() >= LAYERS * (2 * D + 1) * D
    assert (side.stack.theta[0, unused] == 0).all()


def test_keeping_some():
    side = make_side(factors=(2, 1, 2, 1))
    side.stack.keep([3, 0])
    assert len(side.stack) == 2
    assert side.stack.feeds == [D, 2 * D]
    assert same(side.stack.save(0), kept(side.networks[3]))
    assert same(side.stack.save(1), kept(side.networks[0]))


@pytest.mark.parametrize("horizon", [4, 5, 6, 7])
@pytest.mark.parametrize("encoding", ["l-rope", "f-rope"])
def test_log_bases_come_last(encoding, horizon):
    """So that those that do not decay are the last ones of a row, whatever the sizes of the others."""
    stack = stack_up([make_network(dtype=torch.float32, encoding=encoding, horizon=horizon, n_layers=3)])
    learned = 3 if encoding == "l-rope" else 0
    assert stack.free == learned
    assert stack.theta.shape[1] % 4 == 0
    if learned:
        torch.testing.assert_close(stack.theta[0, -3:].exp(), torch.full((3,), 1e4), rtol=1e-5, atol=0)
    spans = sorted((a, b) for a, b, _ in stack.table.values())
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(spans))  # nothing lies twice
    assert all(
        name.endswith("log_base") for name, (a, _, _) in stack.table.items() if a >= len(stack.theta[0]) - learned
    )


def test_views_are_the_parameters_themselves():
    side = make_side()
    side.stack.views()["head.project.bias"][1] = 7.0
    side.stack.running_views()["encoder.layers.1.attention_norm.running_var"][2] = 3.0
    assert (side.stack.save(1)["head.project.bias"] == 7).all()
    assert (side.stack.save(2)["encoder.layers.1.attention_norm.running_var"] == 3).all()
    assert same(side.stack.save(0), kept(side.networks[0]))


@pytest.mark.parametrize("head", ["flatten", "spline"])
def test_what_pads_a_narrow_network_stays_zero(head):
    """Under dropout, decay and AdamW, whose steps have the rate's size however small a gradient is."""
    side = make_side(factors=(1, 3, 2), head=head)
    stack, noise = side.stack, make_noise(3)
    unused = padding(stack)
    assert [int(a) for a in unused.sum(1) - unused.sum(1)[1]] == [
        LAYERS * 2 * D * (2 * D + 1),
        0,
        LAYERS * D * (2 * D + 1),
    ]
    optimizer = torch.optim.AdamW([stack.theta], lr=0.05, weight_decay=0.1)
    targets = torch.randn(3, 5, H, generator=torch.Generator().manual_seed(0))
    before = stack.theta.clone()
    for _ in range(5):
        _, stack.theta.grad = gradients(stack, side.batch, noise, targets)
        assert (stack.theta.grad[unused] == 0).all()
        optimizer.step()
        noise.step.add_(1)
    assert (stack.theta[unused] == 0).all()
    assert ((stack.theta != before) | unused)[:, : stack.theta.shape[1] - stack.free].all()


# ---- forecasts -------------------------------------------------------------------------------------------------------


@every_case
def test_forecasts_are_the_networks_own(choices):
    side = make_side(**choices)
    running = side.stack.running.clone()
    forecast = forward(side.stack, side.stack.views(), side.batch, None)
    assert forecast.shape == (3, 5, H)
    for member in range(3):
        close(forecast[member], side.own(member).detach())
    assert torch.equal(side.stack.running, running)
    assert (forecast[0] - forecast[1]).abs().max() > 0.1  # they are no copies of each other


@every_case
def test_training_without_dropout_is_the_networks_own(choices):
    """Forecasts by the batch's statistics, the running ones after several batches, and the gradient."""
    side = make_side(**NO_DROPOUT, **choices)
    before = side.stack.running.clone()
    noise, targets = make_noise(3, (0.0, 0.0, 0.0)), torch.randn(3, 5, H, generator=torch.Generator().manual_seed(1))
    for _ in range(3):
        forecast, grad = gradients(side.stack, side.batch, noise, targets)
    assert (side.stack.running - before).abs().max() > 0.05
    slopes = side.stack.views(grad)
    for member, network in enumerate(side.networks):
        network.train()
        for _ in range(3):
            own = side.own(member)
        close(forecast[member], own.detach())
        saved = side.stack.save(member)
        for name, a in network.named_buffers():
            if "running" in name:
                close(saved[name], a)
        (own - targets[member]).square().mean().backward()
        for name, p in network.named_parameters():
            part = slopes[name][member].reshape(-1, *slopes[name].shape[2:])
            part = part[tuple(slice(s) for s in p.shape)].reshape(p.shape) if p.ndim else part.reshape(())
            torch.testing.assert_close(part, p.grad, rtol=1e-3, atol=2e-5, msg=lambda m, name=name: f"{name}: {m}")


def test_positions_matter_where_they_should():
    moved = torch.rand(N, generator=torch.Generator().manual_seed(3)).cumsum(0) * 10
    for encoding in ENCODINGS:
        side = make_side(encoding=encoding)
        elsewhere = replace(side.batch, positions=side.batch.positions + moved)
        one, two = (forward(side.stack, side.stack.views(), batch, None) for batch in (side.batch, elsewhere))
        assert torch.equal(one, two) == (encoding == "lpe")


def test_every_layers_base_is_its_own():
    side = make_side(encoding="l-rope", n_layers=3)
    one = forward(side.stack, side.stack.views(), side.batch, None)
    for layer in range(3):
        side.stack.views()[f"encoder.layers.{layer}.attention.rotary.log_base"][1] -= 2
        two = forward(side.stack, side.stack.views(), side.batch, None)
        side.stack.load(1, side.networks[1].state_dict())
        assert (one[1] - two[1]).abs().max() > 1e-4
        assert torch.equal(one[[0, 2]], two[[0, 2]])


# ---- dropout ---------------------------------------------------------------------------------------------------------

COUNT = 200_000


def masks(seeds=(1, 2), shares=(0.1, 0.4), *, step=0, site=0, shape=(COUNT,)):
    noise = Noise(
        torch.tensor(seeds, dtype=torch.int32),
        torch.tensor([step], dtype=torch.int32),
        torch.tensor([[0.0] * len(seeds), shares, [0.9] * len(seeds)]),
    )
    return noise(torch.ones(len(seeds), *shape), site, 1)


@pytest.mark.parametrize("seed", [0, 1, 2025, 2**31 - 1])
@pytest.mark.parametrize("share", [0.01, 0.1, 0.5, 0.9])
def test_the_share_that_is_dropped(share, seed):
    (mask,) = masks([seed], [share])
    dropped = int((mask == 0).sum())
    assert abs(dropped - share * COUNT) < 4.5 * (COUNT * share * (1 - share)) ** 0.5
    torch.testing.assert_close(mask[mask != 0].unique(), torch.tensor([1 / (1 - share)]))
    assert float(mask.mean()) == pytest.approx(1, abs=4.5 * (share / (1 - share) / COUNT) ** 0.5)  # as if none was


def test_a_share_of_none_beside_others():
    mask = masks([1, 1, 1], [0.0, 0.3, 0.0])
    assert (mask[0] == 1).all()
    assert (mask[2] == 1).all()
    assert (mask[1] == 0).any()
    assert masks([1, 1], [0.0, 0.0]).eq(1).all()


def independent(one, two, share):
    """Whether as many are dropped in both as by chance."""
    both = float(((one == 0) & (two == 0)).sum())
    return abs(both - share**2 * one.numel()) < 5 * (one.numel() * share**2 * (1 - share**2)) ** 0.5


def test_masks_differ():
    """Between seeds, steps and places, and from number to number."""
    share = 0.4
    (mask,) = masks([7], [share])
    others = {
        "next seed": masks([8], [share])[0],
        "far seed": masks([2**30], [share])[0],
        "next step": masks([7], [share], step=1)[0],
        "late step": masks([7], [share], step=10_000)[0],
        "next place": masks([7], [share], site=1)[0],
        "last place": masks([7], [share], site=16)[0],
        "next number": mask.roll(1),
        "next row": mask.roll(64),
    }
    assert [name for name, other in others.items() if not independent(mask, other, share)] == []
    assert torch.equal(mask, masks([7], [share])[0])
    # Step and place are no sum: the next step at one place is not this step at the next.
    assert independent(others["next step"], others["next place"], share)


def test_no_two_places_share_their_masks():
    places = [0, *itertools.chain.from_iterable(stacked.sites(layer) for layer in range(6))]
    assert len(set(places)) == len(places) == 1 + 6 * 4


def test_no_row_or_column_is_dropped_as_one():
    mask = masks([3], [0.5], shape=(400, 500))[0]
    for axis in (0, 1):
        shares = (mask == 0).float().mean(axis)
        assert (shares - 0.5).abs().max() < 5 * (0.25 / mask.shape[axis]) ** 0.5


def test_a_mask_does_not_depend_on_who_is_beside():
    together = masks([5, 9, 7], [0.2, 0.4, 0.1], shape=(10, 20, 3))
    for member, (seed, share) in enumerate([(5, 0.2), (9, 0.4), (7, 0.1)]):
        assert torch.equal(masks([seed], [share], shape=(10, 20, 3))[0], together[member])


def test_by_column_a_mask_does_not_depend_on_the_width():
    """So a narrow feed-forward part keeps its masks beside a wide one."""
    noise = make_noise(2, (0.0, 0.3, 0.0))
    narrow = noise(torch.ones(2, 40, 6), 5, 1, columns_first=True)
    wide = noise(torch.ones(2, 40, 11), 5, 1, columns_first=True)
    assert torch.equal(wide[:, :, :6], narrow)
    by_row = [noise(torch.ones(2, 40, width), 5, 1)[:, :, :6] for width in (6, 11)]
    assert not torch.equal(*by_row)


def test_the_gradient_passes_the_same_mask():
    x = torch.randn(2, 30, generator=torch.Generator().manual_seed(0), requires_grad=True)
    noise = make_noise(2, (0.5, 0.0, 0.0))
    noise(x, 3, 0).sum().backward()
    assert torch.equal(x.grad, noise(torch.ones(2, 30), 3, 0))


@pytest.mark.parametrize("kind", [0, 1, 2])
def test_each_dropout_acts_where_it_should(kind):
    """Forecasts of training, averaged over many masks: none is that of no dropout, and every kind has an effect."""
    side = make_side(factors=(2,), n_layers=1)
    shares = [0.0, 0.0, 0.0]
    quiet = forward(side.stack, side.stack.views(), side.batch, make_noise(1, shares))
    shares[kind] = 0.3
    some = [forward(side.stack, side.stack.views(), side.batch, make_noise(1, shares, step=t)) for t in range(3)]
    assert not torch.equal(some[0], quiet)
    assert not torch.equal(some[0], some[1])
    assert not torch.equal(some[1], some[2])


def test_evaluation_drops_nothing():
    side, other = (make_side(dropout=p, ff_dropout=p, attention_dropout=p) for p in (0.0, 0.5))
    one, two = (forward(s.stack, s.stack.views(), s.batch, None) for s in (side, other))
    assert torch.equal(one, two)


@pytest.mark.parametrize("head", ["flatten", "spline"])
def test_a_training_step_does_not_depend_on_who_is_beside(head):
    """Forecast, statistics and gradient, with all dropouts, also beside a network with a wider feed-forward part."""
    side = make_side(factors=(1, 3, 2), head=head)
    noise, targets = make_noise(3), torch.randn(3, 5, H, generator=torch.Generator().manual_seed(1))
    forecast, grad = gradients(side.stack, side.batch, noise, targets)
    together = side.stack.views(grad)
    for m, network in enumerate(side.networks):
        alone = stack_up([network])
        one = slice(m, m + 1)
        basis = None if side.batch.basis is None else side.batch.basis[one]
        batch = Batch(side.batch.values[one], side.batch.positions[one], basis)
        own_noise = Noise(noise.seeds[one], noise.step, noise.shares[:, one])
        own, own_grad = gradients(alone, batch, own_noise, targets[one])
        close(own[0], forecast[m])
        close(alone.running[0], side.stack.running[m])
        for name, part in alone.views(own_grad).items():
            beside = together[name][one][tuple(slice(s) for s in part.shape)]
            torch.testing.assert_close(part, beside, rtol=1e-3, atol=2e-5, msg=lambda t, name=name: f"{name}: {t}")


def test_a_stack_of_networks_built_by_hand():
    """`Network` takes its parts from outside; one put together from the usual ones is like any other. Its
    stream has one dropout, though."""
    built = build_network(NetworkConfig(d_model=8, n_heads=2), TOKENIZERS["bspline"], lookback=L, horizon=H)

    def put_together(dropout):
        return Network(
            norm=built.norm,
            embedding=built.embedding,
            positions=built.positions,
            encoder=built.encoder,
            head=built.head,
            dropout=dropout,
        )

    by_hand = put_together(built.dropout.p)
    assert describe(by_hand) == describe(built)
    assert describe(put_together(0.3)) is None
    assert same(Stack([by_hand], describe(by_hand)).save(0), kept(built))
