"""Matrix products as the GPU makes them, on the CPU: `model/product32.cu` through `Products32`."""

import pytest
import torch
from tiny_stack import make_noise, make_side

import cuda_on_cpu
from bsat import nvrtc
from bsat.model.fused import Fused
from bsat.model.products import Products32

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch):
    cuda_on_cpu.install(monkeypatch)
    monkeypatch.setattr(nvrtc, "tensor_cores", lambda device: True)


def factors(rows, depth, columns, kind, *, models=2, seed=0):
    """A and B, stored by row ("n") or by column ("t")."""
    generator = torch.Generator().manual_seed(seed)

    def draw(lines, long, turned):
        if turned:
            return torch.randn(models, long, lines, generator=generator).mT
        return torch.randn(models, lines, long, generator=generator)

    return draw(rows, depth, kind[0] == "t"), draw(depth, columns, kind[1] == "t")


def error(found, a, b):
    exact = a.double() @ b.double()
    return float((found - exact).abs().max() / exact.abs().max())


@pytest.mark.parametrize("kind", ["nn", "nt", "tn"])
@pytest.mark.parametrize(
    ("rows", "depth", "columns"),
    [(1, 1, 1), (5, 2, 16), (7, 9, 5), (64, 16, 64), (70, 40, 48), (33, 300, 16), (48, 600, 20), (20, 52, 130)],
)
def test_products_are_as_exact_as_float32(rows, depth, columns, kind):
    a, b = factors(rows, depth, columns, kind)
    products = Products32(CPU)
    assert error(products(a, b), a, b) < 2e-6
    before = torch.randn(2, rows, columns)
    out = before.clone()
    assert products(a, b, out=out, add=True) is out
    exact = a.double() @ b.double()
    assert float((out - before - exact).abs().max()) < 4e-6 * max(1.0, float(exact.abs().max()))


def test_one_pass_on_a_tensor_core_would_not_do():
    """The kernel's arithmetic is what makes it exact: TF32 alone is a thousand times worse."""
    a, b = factors(40, 64, 40, "nn")
    short = [(x.view(torch.int32) & ~0x1FFF).view(torch.float32) for x in (a, b)]
    assert error(short[0] @ short[1], a, b) > 1e-4
    assert error(Products32(CPU)(a, b), a, b) < 1e-6


@pytest.mark.parametrize(("rows", "depth", "columns", "kind"), [(40, 24, 48, "nt"), (24, 500, 20, "tn")])
def test_a_model_gets_the_same_bits_whoever_is_beside_it(rows, depth, columns, kind):
    a, b = factors(rows, depth, columns, kind, models=3)
    together = Products32(CPU)(a, b)
    for model in range(3):
        one = slice(model, model + 1)
        assert torch.equal(Products32(CPU)(a[one], b[one])[0], together[model])


def test_into_part_of_a_larger_buffer():
    """Gradients lie in one buffer for all parameters, at any place in it; the numbers around must stay."""
    for start in (0, 3, 4):
        a, b = factors(6, 40, 10, "tn", models=3)
        buffer = torch.full((3, 80), 7.0)
        Products32(CPU)(a, b, out=buffer[:, start : start + 60].unflatten(1, (6, 10)))
        assert error(buffer[:, start : start + 60].view(3, 6, 10), a, b) < 1e-6
        assert (buffer[:, :start] == 7).all()
        assert (buffer[:, start + 60 :] == 7).all()


def test_a_whole_step_with_them():
    side = make_side()
    batch, noise = side.batch, make_noise(len(side.stack))
    grads = []
    for ours in (True, False):
        fused = Fused(side.stack, noise)
        assert fused.product.ours
        fused.product.ours = ours
        running = side.stack.running.clone()
        forecast, saved, last = fused.forward(batch, training=True)
        side.stack.running.copy_(running)
        fused.backward(torch.ones_like(forecast) + forecast, saved, last, batch)
        grads.append(fused.grad.clone())
    assert float((grads[0] - grads[1]).abs().max()) < 2e-5 * float(grads[1].abs().max())
