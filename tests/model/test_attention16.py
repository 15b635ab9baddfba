"""Attention on tensor cores gives what plain torch gives, but for the rounding of 16 bits.

It runs on the CPU here (`cuda_on_cpu`), from the same source.
"""

from dataclasses import replace

import pytest
import torch
from tiny_stack import make_noise

import cuda_on_cpu
from bsat.model.attention16 import SOURCE, Attention16
from bsat.model.stacked import Noise, Shape

SITE = 5

CASES = {  # tokens, heads, width of a head, layers
    "a token": (1, 2, 8, 1),
    "few tokens": (5, 2, 8, 3),
    "an odd number of heads": (16, 3, 8, 2),
    "45 tokens": (45, 2, 32, 4),
    "two tiles": (50, 1, 16, 2),
    "two blocks": (100, 1, 8, 1),
    "a width of 24": (45, 2, 24, 1),
    "deeper than the registers": (50, 1, 40, 4),
    "deeper, and not in two equal parts": (17, 1, 48, 3),
    "a width of 8, four layers": (33, 2, 8, 4),
    "a width of 56": (20, 1, 56, 2),
    "a width of 2": (50, 8, 2, 4),
    "a width of 2, a layer": (17, 8, 2, 1),
    "a width of 4": (100, 4, 4, 2),
    "a width of 4, packed": (33, 4, 4, 3),
    "a width of 6": (20, 8, 6, 3),
}
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)

MANY = {  # tokens on both sides of what a block of the gradient can have of a head; and whether it has all
    "90 tokens": ((90, 1, 8, 4), True),
    "90 tokens, three pieces for a warp": ((90, 1, 32, 3), True),
    "90 tokens, too wide": ((90, 1, 32, 4), False),
    "180 tokens": ((180, 1, 4, 3), True),
    "180 tokens, all that fits": ((180, 1, 16, 3), True),
    "as many as there can be": ((192, 1, 2, 4), True),
    "one more": ((193, 1, 2, 4), False),
}


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch):
    cuda_on_cpu.install(monkeypatch)
    torch.use_deterministic_algorithms(True)  # memory that nothing was written to is not a number
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="module", autouse=True)
def compiled():
    """The depth that a case asks for, two at a time."""
    for case in [*CASES.values(), *(case for case, _ in MANY.values())]:
        cuda_on_cpu.compile_ahead(SOURCE, Attention16.variants(shape_of(case))[-1][1])


def shape_of(case):
    tokens, heads, width, layers = case
    return Shape(tokens, 3, heads * width, layers, heads, 16, 4, True, True, True, False)


class Deep(Attention16):
    """Compiles the last depth alone."""

    @staticmethod
    def variants(shape):
        last = Attention16.variants(shape)[-1]
        return [last] * shape.layers


def guarded(x, fill=torch.nan):
    """The same in bfloat16, with something else before and behind it in memory."""
    room = torch.full((x.numel() + 128,), fill, dtype=torch.bfloat16)
    inside = room[64 : 64 + x.numel()].view(x.shape)
    inside.copy_(x)
    return inside


def untouched(x, fill):
    """Whether what is around it is still there."""
    room = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage())
    around = torch.cat([room[:64], room[-64:]])
    return torch.equal(around.nan_to_num(-7.0), torch.full_like(around, fill).nan_to_num(-7.0))


def draw(case, *, M=2, B=2):
    """qkv of every layer, the output's gradient, and gradients that are there already."""
    tokens, heads, width, layers = case
    generator = torch.Generator().manual_seed(0)
    rows, d = B * tokens, heads * width

    def some(columns):
        return guarded(torch.randn(M, rows, columns, generator=generator))

    return [some(3 * d) for _ in range(layers)], some(d), [some(3 * d) for _ in range(layers)]


def plain(case, qkvs, noise):
    """The same as in `stacked.forward`, and the logarithms of the denominators."""
    n, heads, width, _ = case
    scores = 0
    for qkv in qkvs:
        M, d = len(qkv), heads * width
        parts = qkv.view(M, -1, n, 3 * d)
        B = parts.shape[1]
        q, key = (
            parts[..., a * d : (a + 1) * d].reshape(M, B, n, 2, heads, width // 2).permute(0, 1, 4, 2, 3, 5).flatten(-2)
            for a in (0, 1)
        )
        scores = scores + q @ key.mT * width**-0.5
    weights = scores.softmax(-1)
    if noise is not None:
        weights = noise(weights, SITE, 2)
    value = parts[..., 2 * d :].reshape(M, B, n, heads, width).transpose(2, 3)
    mixed = (weights @ value).transpose(2, 3).reshape(M, B * n, d)
    return mixed, scores.logsumexp(-1) / torch.log(torch.tensor(2.0, dtype=scores.dtype))


def error(found, wanted, least=1e-6):
    """By the largest number; where that is small, or all rounding, by `least`."""
    assert bool(found.isfinite().all())
    wanted = wanted.detach()
    return float((found.double() - wanted).abs().max() / wanted.abs().max().clamp(min=least))


def check(case, qkvs, grad, before, noise, *, training=True, add=False, least=None):
    attention = Deep(shape_of(case), noise)
    assert Attention16.takes(attention.shape)
    leaves = [qkv.double().requires_grad_() for qkv in qkvs]
    wanted, logs = plain(case, leaves, noise if training else None)
    mixed, spread = attention.forward(qkvs, training, SITE)
    assert error(mixed, wanted) < 1e-2
    if not training:
        assert spread is None
        return
    spread_logs = spread[: logs.numel()].view(logs.shape)
    assert float((spread_logs - logs.detach()).abs().max()) < 1e-3 * max(1.0, float(logs.detach().abs().max()) / 100)
    slopes = torch.autograd.grad(wanted, leaves, grad.double())
    d = grad.shape[-1]
    turned = [guarded(x, 3.0) for x in before] if add else [guarded(torch.full_like(x, torch.nan), 3.0) for x in qkvs]
    if add:
        turned[-1][..., 2 * d :] = torch.nan  # only ever written
    attention.backward(qkvs, turned, guarded(mixed), grad, spread, SITE, add=add)
    whole = max(float(slope.abs().max()) for slope in slopes)
    for layer, (found, slope) in enumerate(zip(turned, slopes, strict=True)):
        assert untouched(found, 3.0)
        for part in range(3):
            at = slice(part * d, (part + 1) * d)
            if part == 2 and layer < len(qkvs) - 1:  # the values of layers before: nothing of theirs
                left = before[layer] if add else torch.full_like(found, torch.nan)
                assert torch.equal(found[..., at].nan_to_num(9.0), left[..., at].nan_to_num(9.0))
                continue
            want = slope[..., at]
            if add and part < 2:
                want = want + before[layer][..., at].double()
            assert error(found[..., at], want, least=least or whole / 5) < 2e-2, (layer, part)


@every_case
def test_evaluation(case):
    check(case, *draw(case), make_noise(2), training=False)


@every_case
def test_a_training_step(case):
    check(case, *draw(case), make_noise(2))


@pytest.mark.parametrize("shares", [(0.2, 0.1, 0.3), (0.0, 0.0, 0.0)], ids=["dropout", "no dropout, added"])
@pytest.mark.parametrize("name", MANY)
def test_many_tokens(name, shares):
    case, whole = MANY[name]
    kept = Attention16.variants(shape_of(case))[-1][1]["WHOLE"]
    assert kept == (-(-case[0] // 16) * 16 if whole else 0)
    check(case, *draw(case, M=1, B=1), make_noise(1, shares), add=shares[2] == 0)


@pytest.mark.parametrize("name", ["few tokens", "a width of 24", "two tiles", "a width of 2", "a width of 6"])
def test_without_dropout_and_added_to_what_is_there(name):
    case = CASES[name]
    check(case, *draw(case), make_noise(2, (0.0, 0.0, 0.0)), add=True)


def test_dropout_of_one_network_alone():
    case = CASES["few tokens"]
    noise = make_noise(2)
    noise.shares[2, 0] = 0.0
    check(case, *draw(case), noise, add=True)


@pytest.mark.parametrize("name", ["few tokens", "two tiles"])
def test_scores_far_from_zero(name):
    """A weight of 1, all others of 0: gradients are what rounding leaves of numbers as large as queries and keys."""
    case = CASES[name]
    qkvs, grad, before = draw(case)
    for qkv in qkvs:
        qkv[..., : 2 * grad.shape[-1]] *= 30
    check(case, qkvs, grad, before, make_noise(2), least=100.0)


@pytest.mark.parametrize("case", [CASES["two tiles"], MANY["one more"][0]], ids=["two tiles", "193 tokens"])
def test_scores_all_far_below_zero(case):
    """What pads a tile has a score of 0, far above: none of it may be felt."""
    qkvs, grad, before = draw(case, M=1, B=1)
    d = grad.shape[-1]
    for qkv in qkvs:
        qkv[..., :d] += 20
        qkv[..., d : 2 * d] -= 20
    check(case, qkvs, grad, before, make_noise(1), least=100.0)


@pytest.mark.parametrize("case", [CASES["few tokens"], MANY["180 tokens"][0]], ids=["few tokens", "180 tokens"])
def test_nothing_depends_on_who_is_beside(case):
    qkvs, grad, _ = draw(case, M=3, B=1)
    noise = make_noise(3)

    def run(members):
        own = Noise(noise.seeds[members].clone(), noise.step, noise.shares[:, members].contiguous())
        attention, some = Deep(shape_of(case), own), [qkv[members].clone() for qkv in qkvs]
        mixed, spread = attention.forward(some, True, SITE)
        turned = [torch.zeros_like(qkv) for qkv in some]
        attention.backward(some, turned, mixed, grad[members].clone(), spread, SITE, add=False)
        logs = spread[: mixed[..., 0].numel() * shape_of(case).heads]
        return mixed, logs.view(len(members), -1), *turned

    for alone, among in zip(run([1]), run([0, 1, 2]), strict=True):
        assert torch.equal(alone[0], among[1])


def test_slopes_are_kept_only_where_a_block_cannot_have_all_keys():
    shape = shape_of((180, 4, 16, 3))
    assert [sizes["WHOLE"] for _, sizes in Attention16.variants(shape)] == [192] * 3
    assert Attention16.slopes(shape) == 0
    deeper = replace(shape, layers=4)  # the last layer alone
    assert [sizes["WHOLE"] for _, sizes in Attention16.variants(deeper)] == [192] * 3 + [0]
    assert Attention16.slopes(deeper) == 4 * 192**2
    for tokens in (1, 16, 45, 90, 192):
        for width in (2, 4, 8):
            small = replace(deeper, tokens=tokens, width=4 * width)
            assert Attention16.slopes(small) == 0
            assert Attention16.slopes(replace(small, tokens=193)) == 4 * 208**2


def test_which_shapes_it_takes():
    shape = shape_of((45, 2, 32, 4))
    assert Attention16.takes(shape)
    assert [sizes["DEPTH"] for _, sizes in Attention16.variants(shape)] == [1, 2, 3, 4]
    for width in (2, 4, 6, 8, 64):
        assert Attention16.takes(replace(shape, width=2 * width))
    others = [
        {"width": 2 * 12},
        {"width": 2 * 3},
        {"width": 2 * 72},
        {"layers": 5},
        {"tokens": 513},
    ]
    assert not any(Attention16.takes(replace(shape, **other)) for other in others)
