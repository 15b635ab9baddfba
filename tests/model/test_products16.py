"""Matrix products of bfloat16 as the GPU makes them, on the CPU: `model/product16.cu` through `Products16`."""

import pytest
import torch
from torch.nn.functional import gelu

import cuda_on_cpu
from bsat import nvrtc
from bsat.model.products import Products16
from bsat.model.stacked import Noise

CPU = torch.device("cpu")
HALF, WHOLE = torch.bfloat16, torch.float32
NAN = float("nan")
SIZES = [
    *[(1, 1, 1), (7, 9, 5), (24, 1, 40), (40, 24, 48), (100, 131, 50), (65, 600, 20)],
    *[(127, 33, 101), (200, 136, 56), (250, 24, 200)],
]


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch):
    cuda_on_cpu.install(monkeypatch)
    monkeypatch.setattr(nvrtc, "tensor_cores", lambda device: True)
    for path, sizes in Products16.variants(CPU):
        cuda_on_cpu.compile_ahead(path, sizes)


def factors(rows, depth, columns, kind, *, models=2, seed=0):
    """A and B, stored by row ("n") or by column ("t")."""
    generator = torch.Generator().manual_seed(seed)

    def draw(lines, long, turned):
        if turned:
            return torch.randn(models, long, lines, generator=generator).to(HALF).mT
        return torch.randn(models, lines, long, generator=generator).to(HALF)

    return draw(rows, depth, kind[0] == "t"), draw(depth, columns, kind[1] == "t")


def check(found, exact):
    """Float32 sums, and one rounding at the end."""
    small = 1e-5 * max(1.0, float(exact.abs().max()))
    error = (found.double() - exact).abs()
    assert (error <= small + (2**-8 * exact.abs() if found.dtype == HALF else 0)).all()


@pytest.mark.parametrize("kind", ["nn", "nt", "tn"])
@pytest.mark.parametrize(
    ("rows", "depth", "columns"),
    SIZES,
)
def test_they_are_right(rows, depth, columns, kind):
    a, b = factors(rows, depth, columns, kind)
    products, exact = Products16(CPU), a.double() @ b.double()
    whole = products(a, b, dtype=WHOLE)
    assert whole.dtype == WHOLE
    check(whole, exact)
    half = products(a, b)
    assert half.dtype == HALF
    assert torch.equal(half, whole.to(HALF))
    before = torch.randn(2, rows, columns)
    for dtype in HALF, WHOLE:
        out = before.to(dtype, copy=True)
        assert products(a, b, out=out, add=True) is out
        check(out, before.to(dtype).double() + exact)


def test_all_tiles_and_slices_are_met():
    """The sizes here go through every program, and with slices."""
    cuts = [Products16.cut(rows, columns, depth) for rows, depth, columns in SIZES]
    assert {tile for tile, *_ in cuts} == set(Products16.TILES)
    assert {tile for tile, tiles, *_ in cuts if tiles > 1} >= {(64, 32), (128, 64), (128, 128)}
    assert max(slices for *_, slices in cuts) > 1
    for size in [(23040, 96, 32), (128, 128, 5760), (1024, 128, 23040), (32, 33, 5760), (128, 192, 1440)]:
        _, tiles, slice_, slices = Products16.cut(*size)
        assert slices == 1 or tiles * slices <= Products16.BLOCKS
        assert slice_ * (slices - 1) < size[2] <= slice_ * slices


@pytest.mark.parametrize(("rows", "depth", "columns", "kind"), [(40, 24, 48, "nt"), (24, 520, 20, "tn")])
def test_a_model_gets_the_same_bits_whoever_is_beside_it(rows, depth, columns, kind):
    a, b = factors(rows, depth, columns, kind, models=3)
    together = Products16(CPU)(a, b, dtype=WHOLE)
    for model in range(3):
        one = slice(model, model + 1)
        assert torch.equal(Products16(CPU)(a[one], b[one], dtype=WHOLE)[0], together[model])


@pytest.mark.parametrize("depth", [40, 520])
@pytest.mark.parametrize(("start", "dtype"), [(0, WHOLE), (3, WHOLE), (4, WHOLE), (8, HALF), (3, HALF)])
def test_into_part_of_a_larger_buffer(start, dtype, depth):
    """Gradients lie in one buffer for all parameters, at any place in it; the numbers around must stay."""
    a, b = factors(6, depth, 16, "tn", models=3)
    buffer = torch.full((3, 120), 7.0, dtype=dtype)
    Products16(CPU)(a, b, out=buffer[:, start : start + 96].unflatten(1, (6, 16)))
    check(buffer[:, start : start + 96].view(3, 6, 16), a.double() @ b.double())
    assert (buffer[:, :start] == 7).all()
    assert (buffer[:, start + 96 :] == 7).all()


def test_from_parts_of_larger_buffers():
    """Lines that end within a piece of 16 bytes; what comes after belongs to nobody."""
    a, b = factors(16, 48, 24, "tn")
    a[:, 13:], b[:, :, 21:] = NAN, NAN
    a, b = a[:, :13], b[:, :, :21]
    check(Products16(CPU)(a, b, dtype=WHOLE), a.double() @ b.double())
    a, b = factors(16, 48, 24, "nt")
    a, b = a[:, 3:, 8:], b[:, 8:, 2:]  # still aligned
    check(Products16(CPU)(a, b), a.double() @ b.double())
    a, b = a[:, :, 1:], b[:, 1:]  # no longer
    check(Products16(CPU)(a, b), a.double() @ b.double())


@pytest.mark.parametrize(("depth", "dtype"), [(32, HALF), (33, HALF), (32, WHOLE), (520, HALF), (520, WHOLE)])
def test_bias(depth, dtype):
    a, b = factors(20, depth, 40, "nt")
    bias = torch.randn(2, 50)[:, 3:43]
    check(Products16(CPU)(a, b, bias=bias, dtype=dtype), a.double() @ b.double() + bias[:, None].double())
    before = torch.randn(2, 20, 40).to(dtype)
    exact = before.double() + a.double() @ b.double() + bias[:, None].double()
    check(Products16(CPU)(a, b, out=before, add=True, bias=bias), exact)


@pytest.mark.parametrize("kind", ["nn", "nt", "tn"])
@pytest.mark.parametrize("along", [1, 2, 3])
@pytest.mark.parametrize(("rows", "depth", "columns"), [(72, 40, 48), (16, 776, 24), (70, 27, 33)])
def test_limits(rows, depth, columns, along, kind):
    """A model ends where it ends: nothing beyond is read or written."""
    full = (rows, columns, depth)[along - 1]
    ends = [8, min(64, full) // 8 * 8, full // 8 * 8, 0]
    a, b = factors(rows, depth, columns, kind, models=len(ends))
    exact = a.double() @ b.double()
    bias, inside = torch.randn(len(ends), columns), torch.ones(len(ends), rows, columns, dtype=torch.bool)
    for model, end in enumerate(ends):
        if along == 1:
            a[model, end:], inside[model, end:] = NAN, False
        elif along == 2:
            b[model, :, end:], inside[model, :, end:] = NAN, False
        else:
            exact[model] = a[model, :, :end].double() @ b[model, :end].double()
            a[model, :, end:], b[model, end:] = NAN, NAN
    limits = torch.tensor(ends, dtype=torch.int32)
    for dtype in HALF, WHOLE:
        out = torch.full((len(ends), rows, columns), 7.0, dtype=dtype)
        Products16(CPU)(a, b, out=out, bias=bias, limits=limits, along=along)
        check(out[inside], (exact + bias[:, None].double())[inside])
        assert (out[~inside] == 7).all()


# ---- and what follows them -------------------------------------------------------------------------------------------

FOLLOWED = [(70, 24, 24), (130, 16, 136), (72, 24, 48), (150, 24, 120)]
SITE = 6
followed = pytest.mark.parametrize(("rows", "depth", "columns"), FOLLOWED)


def test_all_tiles_are_followed():
    cuts = [Products16.cut(rows, columns, depth, whole=True) for rows, depth, columns in FOLLOWED]
    assert {tile for tile, *_ in cuts} == set(Products16.TILES)
    assert max(tiles for _, tiles, *_ in cuts) == 9


@pytest.fixture
def unwritten():
    """Memory that nobody has written to is no number."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def limited(rows, depth, columns, kind, along):
    """Three models, no numbers beyond the ends of two, if there are; their ends, and the exact product."""
    full = columns if along == 2 else depth
    ends = torch.tensor([full // 2 // 8 * 8, full, 8], dtype=torch.int32)
    a, b = factors(rows, depth, columns, kind, models=3)
    for model, end in enumerate(ends if along else []):
        (b[model].mT if along == 2 else b[model])[end:] = NAN
    exact = a.double() @ (b if along == 2 else b.nan_to_num(0)).double()
    if along == 3:
        a[b[:, :, :1].mT.isnan().expand_as(a)] = NAN
    return a, b, ends, exact


def draw(*form, dtype=HALF):
    return torch.randn(form, generator=torch.Generator().manual_seed(1)).to(dtype)


def masks(like, *, columns_first=False):
    """What kernels are told of them, and the factors that they are; the second model has none."""
    noise = Noise(torch.tensor([3, 5, 9]).int(), torch.tensor([7]).int(), torch.tensor([[0.3, 0.0, 0.5]]))
    factors = noise(torch.ones(like.shape), SITE, 0, columns_first=columns_first)
    assert 0 < (factors == 0).sum() < factors.numel() / 2
    return noise.dropping(0, True), factors.double()


def check_inside(found, exact):
    """And that the rest is not written."""
    assert torch.equal(found.isnan(), exact.isnan())
    check(found.nan_to_num(0), exact.nan_to_num(0))


def check_sums(left, exact):
    """Over rows; zeros beyond a model's columns."""
    exact = exact.nan_to_num(0)
    torch.testing.assert_close(left.sum(1), exact.sum(1), rtol=0, atol=1e-6 * float(exact.abs().sum(1).max()))
    assert (left.sum(1)[(exact == 0).all(1)] == 0).all()


def together(call, *given):
    """The results of all models; each gets the same bits alone."""
    found = call(*given)
    for model in range(3):
        alone = call(*(x[model : model + 1] if x.shape[0] == 3 else x for x in given))
        for one, all_ in zip(alone, found, strict=True):
            torch.testing.assert_close(one[0], all_[model], rtol=0, atol=0, equal_nan=True)
    return found


@followed
@pytest.mark.usefixtures("unwritten")
def test_gelu(rows, depth, columns):
    """What the gradient will see is what gelu saw."""
    x, weight, ends, exact = limited(rows, depth, columns, "nt", 2)
    bias = draw(3, columns, dtype=WHOLE)
    told, kept = masks(exact, columns_first=True)

    def call(x, weight, bias, ends, *told, keep=True):
        return Products16(CPU).gelu(x, weight, bias, (*told, SITE), ends, keep=keep)

    u, fed = together(call, x, weight, bias, ends, *told)
    check_inside(u, exact + bias[:, None].double())
    check_inside(fed, gelu(u.double()) * kept)
    nothing, still = call(x, weight, bias, ends, *told[:2], None, keep=False)
    assert nothing is None
    check_inside(still, gelu(u.double()))


@followed
@pytest.mark.usefixtures("unwritten")
def test_gelu_grad(rows, depth, columns):
    grad, weight, ends, exact = limited(rows, depth, columns, "nn", 2)
    u = draw(3, rows, columns)
    told, kept = masks(exact, columns_first=True)
    inner, left = together(
        lambda grad, weight, u, ends, *told: Products16(CPU).gelu_grad(grad, weight, u, (*told, SITE), ends),
        *(grad, weight, u, ends, *told),
    )
    leaf = u.double().requires_grad_()
    (slope,) = torch.autograd.grad(gelu(leaf).sum(), leaf)
    check_inside(inner, exact * kept * slope)
    check_sums(left[:, :, 0], exact * kept * slope)


@pytest.mark.parametrize("own", [True, False])
@followed
@pytest.mark.usefixtures("unwritten")
def test_norm(rows, depth, columns, own):
    """Also where depths differ; the sums are of numbers that are not rounded yet."""
    a, weight, ends, exact = limited(rows, depth, columns, "nt", 3 if own else 0)
    bias, x = draw(3, columns, dtype=WHOLE), draw(3, rows, columns)
    told, kept = masks(exact)

    def call(a, weight, bias, x, ends, *told):
        return Products16(CPU).norm(a, weight, bias, x, (*told, SITE), limits=ends if own else None)

    z, left = together(call, a, weight, bias, x, ends, *told)
    exact = x.double() + (exact + bias[:, None].double()) * kept
    check(z, exact)
    check_sums(left[:, :, 0], exact)
    check_sums(left[:, :, 1], exact**2)


@pytest.mark.parametrize("own", [True, False])
@followed
@pytest.mark.usefixtures("unwritten")
def test_flow(rows, depth, columns, own):
    """The sums are of what others will read."""
    a, weight, ends, exact = limited(rows, depth, columns, "nn", 3 if own else 0)
    before, z, stats = draw(3, rows, columns), draw(3, rows, columns) + 3, draw(3, 2, columns, dtype=WHOLE)

    def call(a, weight, before, z, stats, ends):
        flow = before.clone()
        return flow, Products16(CPU).flow(a, weight, flow, z, stats, limits=ends if own else None)

    flow, left = together(call, a, weight, before, z, stats, ends)
    check(flow, before.double() + exact)
    check_sums(left[:, :, 0], flow.double())
    mean, inverse = stats[:, :, None].double().unbind(1)
    check_sums(left[:, :, 1], flow.double() * (z.double() - mean) * inverse)
