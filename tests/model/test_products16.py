"""Matrix products of bfloat16 as the GPU makes them, on the CPU: `model/product16.cu` through `Products16`."""

import pytest
import torch

import cuda_on_cpu
from bsat import nvrtc
from bsat.model.products import Products16

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
