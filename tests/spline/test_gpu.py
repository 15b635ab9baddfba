"""The GPU kernels give the reference's answers. They run on the CPU here (`cuda_on_cpu`), from the same source."""

import itertools

import numpy as np
import pytest
import torch

import bsat
import cuda_on_cpu
from bsat import spline
from bsat.spline import SplineSpec, autograd, gpu, reference
from bsat.tokens import bspline
from conftest import L, make_signals

DEGREES = range(1, 7)
FEATURES = ("curvature", "slope", "uniform")


def hostile() -> np.ndarray:
    """One window of each of the shared kinds, and some that try the arithmetic."""
    rng = np.random.default_rng(11)
    i, noise = np.arange(L), rng.normal(size=(4, L))
    more = [
        1e9 + noise[0],
        1e-200 * noise[1],
        1e140 * noise[2],
        np.exp(i / 15),
        np.zeros(L),
        5e-324 * np.sign(noise[3]),
    ]
    return np.concatenate([*make_signals(count=1).values(), more])


WINDOWS = hostile()


def positions() -> np.ndarray:
    """Irregular ones, with a gap in some."""
    steps = np.random.default_rng(5).uniform(0.2, 2.0, (len(WINDOWS), L - 1))
    steps[::3, 100] = 30.0
    x = np.concatenate([np.zeros((len(WINDOWS), 1)), steps.cumsum(1)], 1)
    return x / x[:, -1:] * (L - 1)


POSITIONS = {"regular": None, "irregular": positions()}


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch):
    cuda_on_cpu.install(monkeypatch)


@pytest.fixture(scope="module", autouse=True)
def compiled():
    """All variants that the tests ask for, on all processors."""
    for regular in (1, 0):
        ahead = [{"REAL": "double", "REGULAR": regular, "ORDER": order} for order in range(7)]
        ahead += [{"REAL": "double", "REGULAR": regular, "DEGREE": degree} for degree in DEGREES]
        cuda_on_cpu.compile_ahead(gpu.SOURCE, *ahead)


def tensor(a):
    return None if a is None else torch.tensor(a)


def relative(a, b):
    a, b = np.asarray(a, float), np.asarray(b, float)
    size = np.maximum(np.abs(b).max(1), 1e-300)
    return (np.abs(a - b).max(1) / size).max() if len(a) else 0.0


def agree(got, want, *, knots=1e-9, coefficients=1e-8):
    got = type(got)(*(a.numpy() for a in got))
    np.testing.assert_allclose(got.knots, want.knots, rtol=0, atol=knots)
    np.testing.assert_array_equal(got.fallback, want.fallback)
    good = want.condition < 1e6
    assert relative(got.coefficients[good], want.coefficients[good]) < coefficients
    # The bound never lies below the condition number, and decides as it does.
    fine = ~want.fallback
    assert (got.condition[fine] >= want.condition[fine] * (1 - 1e-6)).all()
    assert (got.condition[fine] <= 1e8).all()
    assert np.isfinite(got.coefficients).all()


@pytest.mark.parametrize("grid", ["regular", "irregular"])
@pytest.mark.parametrize("degree", DEGREES)
def test_agrees_with_the_reference(degree, grid):
    x = POSITIONS[grid]
    settings = [(degree + 2, 0.62, 1.0), (30, 0.1, 3.0), (60, np.inf, 1.0)]
    for (n, g, recency), placement, feature in itertools.product(settings, ("safe", "paper"), FEATURES):
        spec = SplineSpec(n=n, degree=degree, clip_factor=g, placement=placement, feature=feature, recency=recency)
        agree(gpu.tokenize(tensor(WINDOWS), spec, tensor(x)), reference.tokenize(WINDOWS, spec, x))


@pytest.mark.parametrize("degree", [1, 3, 6])
def test_where_hardly_anything_draws_the_knots(degree):
    """Signals with a derivative at their ends alone: between them rounding errors count a million times, everywhere."""
    i = np.arange(L)
    y = np.stack([(-1.0) ** i, np.where((i < 3) | (i >= L - 3), 1.0, 0.0)])
    for placement in ("safe", "paper"):
        spec = SplineSpec(n=40, degree=degree, clip_factor=np.inf, placement=placement)
        agree(gpu.tokenize(tensor(y), spec), reference.tokenize(y, spec), knots=1e-6, coefficients=1e-5)


@pytest.mark.parametrize("grid", ["regular", "irregular"])
def test_agrees_in_float32(grid):
    """The samples are rounded to float32 and so are the results, but nothing in between."""
    with np.errstate(under="ignore", over="ignore"):
        samples = WINDOWS.astype(np.float32)
    samples = samples[np.isfinite(samples).all(1)]
    x = None if grid == "regular" else POSITIONS[grid][0]
    for placement in ("safe", "paper"):
        spec = SplineSpec(n=45, degree=3, clip_factor=0.62, placement=placement)
        got = gpu.tokenize(tensor(samples), spec, tensor(x))
        assert all(a.dtype == torch.float32 for a in got[:3])
        agree(got, reference.tokenize(samples.astype(float), spec, x), knots=1e-5, coefficients=1e-6)


def test_one_row_of_positions_serves_all_windows():
    spec = SplineSpec(n=30, degree=3, clip_factor=0.62)
    x = tensor(POSITIONS["irregular"][0])
    for a, b in zip(
        gpu.tokenize(tensor(WINDOWS), spec, x),
        gpu.tokenize(tensor(WINDOWS), spec, x.expand(WINDOWS.shape)),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("degree", DEGREES)
def test_flags_agree_on_both_sides_of_the_threshold(degree):
    """See test_backends: knots draw together until the condition number passes 1e8."""
    y = make_signals(count=1)["noisy"]
    interior = np.linspace(10, L - 11, 30)

    def knots(gap):
        moved = interior.copy()
        moved[10 : 12 + degree] = moved[10] + 0.25 + gap * np.arange(degree + 2)
        return np.concatenate([np.zeros(degree + 1), moved, np.full(degree + 1, L - 1.0)])

    gaps = np.geomspace(2.0, 1e-3, 120)
    t = np.stack([knots(gap) for gap in gaps])
    many = np.repeat(y, len(t), 0)
    want, got = reference.fit(many, t, degree), gpu.fit(tensor(many), tensor(t), degree)
    assert 0 < want.fallback.sum() < len(t), "the construction must cross the threshold"
    np.testing.assert_array_equal(got.fallback.numpy(), want.fallback)


@pytest.mark.parametrize("placement", ["safe", "paper"])
def test_an_exact_condition(placement):
    spec = SplineSpec(n=40, degree=3, clip_factor=0.62, placement=placement)
    want = reference.tokenize(WINDOWS, spec)
    got = gpu.tokenize(tensor(WINDOWS), spec, exact_condition=True)
    sure = want.condition < 1e10
    np.testing.assert_allclose(got.condition.numpy()[sure], want.condition[sure], rtol=0.011)


def test_place_and_fit_are_the_parts_of_tokenize():
    spec, y = SplineSpec(n=40, degree=3, clip_factor=0.62, placement="paper"), tensor(WINDOWS)
    whole = gpu.tokenize(y, spec)
    torch.testing.assert_close(gpu.place(y, spec), whole.knots, rtol=0, atol=0)
    parts = gpu.fit(y, whole.knots, 3)
    for a, b in zip(parts, whole, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("stride", [1, 7])
def test_a_series_and_its_windows_are_the_same(stride):
    series = torch.tensor(make_signals(700, 1)["transformer"][0])
    starts = torch.arange(0, 700 - L + 1, stride)
    for placement in ("safe", "paper"):
        spec = SplineSpec(n=40, degree=3, clip_factor=0.62, placement=placement)
        want = gpu.tokenize(torch.stack([series[s : s + L] for s in starts]), spec)
        views = gpu.tokenize(series.unfold(0, L, stride), spec)
        apart = torch.stack([series, series], 1)[:, 1]  # a column of a table
        for got in (gpu.tokenize_series(series, starts, L, spec), gpu.tokenize_series(apart, starts, L, spec), views):
            for a, b in zip(got, want, strict=True):
                torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_windows_may_lie_in_memory_as_they_like():
    spec = SplineSpec(n=30, degree=3, clip_factor=0.62)
    want = gpu.tokenize(tensor(WINDOWS), spec)
    for y in (tensor(WINDOWS.T.copy()).T, tensor(np.repeat(WINDOWS, 2, 1))[:, ::2]):
        torch.testing.assert_close(gpu.tokenize(y, spec).coefficients, want.coefficients, rtol=0, atol=0)


def test_results_do_not_depend_on_the_batch(monkeypatch):
    windows = tensor(np.concatenate(list(make_signals(count=20).values())))
    for placement in ("safe", "paper"):
        spec = SplineSpec(n=40, degree=3, clip_factor=0.62, placement=placement)
        want = gpu.tokenize(windows, spec)
        for B in (1, 31, 33, 129):
            for a, b in zip(gpu.tokenize(windows[:B], spec), want, strict=True):
                torch.testing.assert_close(a, b[:B], rtol=0, atol=0)
        with monkeypatch.context() as patch:
            patch.setattr(gpu, "LEAST", 128)
            patch.setattr(gpu, "MOST", 128)
            for a, b in zip(gpu.tokenize(windows, spec), want, strict=True):
                torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("m", [7, 8, 9, 11])
def test_short_windows(m):
    """Of any length, against the size of a load; and shorter than two chains of differences."""
    y = np.random.default_rng(m).normal(size=(5, m))
    for degree in (1, 3, 4):
        for n in {degree + 2, m - 1}:
            spec = SplineSpec(n=n, degree=degree, clip_factor=0.62)
            agree(gpu.tokenize(tensor(y), spec), reference.tokenize(y, spec))


def test_a_long_window():
    y = make_signals(20_000, 1)["transformer"]
    spec = SplineSpec(n=45, degree=3, clip_factor=0.62, recency=2.0)
    agree(gpu.tokenize(tensor(y), spec), reference.tokenize(y, spec), knots=1e-7)


@pytest.mark.parametrize("placement", ["safe", "paper"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e200])
def test_a_window_that_is_not_finite_shows_in_its_condition_alone(value, placement):
    windows = make_signals(count=40)["transformer"].copy()
    spec = SplineSpec(n=30, degree=3, clip_factor=0.62, placement=placement)
    clean = gpu.tokenize(tensor(windows), spec)
    windows[17, 100] = value
    fit = gpu.tokenize(tensor(windows), spec)
    assert fit.condition[17].isnan()
    assert fit.coefficients[17].isnan().all()
    assert fit.knots[17].isnan().all()
    others = torch.arange(40) != 17
    torch.testing.assert_close(fit.coefficients[others], clean.coefficients[others], rtol=0, atol=0)


def test_knots_repeated_too_often_count_as_singular():
    knots = torch.tensor([[0, 0, 0, 0, 10, 20, 20, 20, 20, 20, 30, 30, 30, 30]], dtype=torch.float64)
    y = torch.randn(1, 31, dtype=torch.float64)
    assert gpu.fit(y, knots, 3).fallback[0]


# ------------------------------------------------------------------------------------------------------- the tokens


@pytest.fixture
def chosen(monkeypatch):
    """CPU tensors count as tensors on a GPU."""
    monkeypatch.setattr(spline, "on_gpu", spline.is_tensor)
    monkeypatch.setattr(bspline, "on_gpu", spline.is_tensor)
    monkeypatch.setattr(bspline, "_stays_on_cpu", lambda a: not spline.is_tensor(a))


def same_tokens(got, want):
    for name in want.arrays:
        a, b = getattr(got, name), getattr(want, name)
        assert (a is None) == (b is None)
        if b is not None:
            np.testing.assert_allclose(a.numpy().astype(float), b.astype(float), atol=1e-9)


@pytest.mark.parametrize("channels", [None, 2])
def test_tokens(chosen, channels):
    tok = bsat.BSplineTokenizer(30, detail=3)
    windows = make_signals(count=4)["transformer"]
    windows = windows if channels is None else np.stack([windows, windows[::-1]], 2)
    times = np.sort(np.random.default_rng(0).uniform(0, 9, L))
    mask = np.zeros(windows.shape, bool)
    mask[1, 40:60] = True
    for options in ({}, {"times": times}, {"mask": mask}):
        got = tok.transform(torch.tensor(windows), **options)
        same_tokens(got, tok.transform(windows, **options))
        curve = tok.inverse_transform(got)
        assert torch.is_tensor(curve)


@pytest.mark.parametrize("stride", [1, 9])
@pytest.mark.parametrize("channels", [None, 2])
def test_tokens_of_a_series(chosen, channels, stride):
    tok = bsat.BSplineTokenizer(30, detail=2, max_coefficient=18.0)
    series = make_signals(330, 1)["transformer"][0]
    series = series if channels is None else np.stack([series, series[::-1]], 1)
    same_tokens(tok.transform_series(torch.tensor(series), L, stride), tok.transform_series(series, L, stride))
    mask = np.zeros(series.shape, bool)
    mask[100] = True
    same_tokens(
        tok.transform_series(torch.tensor(series), L, 30, mask=torch.tensor(mask)),
        tok.transform_series(series, L, 30, mask=mask),
    )


def test_what_is_not_finite_is_named(chosen):
    windows = torch.tensor(make_signals(count=4)["transformer"])
    windows[2, 7] = torch.nan
    with pytest.raises(ValueError, match=r"finite.*\(2, 7\)"):
        bsat.BSplineTokenizer(30).transform(windows)


def test_tensors_on_the_cpu_do_without_it():
    y = torch.randn(2, L)
    assert not spline.on_gpu(y)
    assert not gpu.usable(y)
    assert spline.choose(y) is autograd


# ---------------------------------------------------------------------------------------------- the stand-in itself

KERNELS = r"""
extern "C" __global__ void add_up(const float* from, float* to, int n) {
    __shared__ float part[2];
    const int t = threadIdx.x;
    float value = t < n ? from[blockIdx.x * n + t] : 0.0f;
    for (int k = 16; k > 0; k /= 2) value += __shfl_down_sync(0xffffffffu, value, k);
    if (t % 32 == 0) part[t / 32] = value;
    __syncthreads();
    if (t == 0) to[blockIdx.x] = part[0] + part[1];
}

extern "C" __global__ void butterfly(int* to) {
    int value = threadIdx.x;
    for (int k = 16; k > 0; k /= 2) value = max(value, __shfl_xor_sync(0xffffffffu, value, k));
    to[threadIdx.x] = value * 100 + __shfl_sync(0xffffffffu, (int)threadIdx.x, 5);
    atomicAdd(&to[blockDim.x], 1);
}

extern "C" __global__ void stuck(double limit) {
    if (threadIdx.x < limit) __syncthreads();
}
"""


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    path = tmp_path_factory.mktemp("kernels") / "small.cu"
    path.write_text(KERNELS)
    return cuda_on_cpu.program(path)


def test_threads_meet_at_barriers_and_in_warps(small):
    numbers, sums = torch.rand(3, 50), torch.empty(3)
    small.launch("add_up", 3, 64, numbers, sums, 50)
    torch.testing.assert_close(sums, numbers.sum(1))
    out = torch.zeros(65, dtype=torch.int32)
    small.launch("butterfly", 1, 64, out)
    assert out.tolist() == [3105] * 32 + [6337] * 32 + [64]


def test_a_barrier_that_some_never_reach_is_an_error(small):
    small.launch("stuck", 1, 32, 32.0)
    with pytest.raises(RuntimeError, match=r"stuck.*never reach: 20 wait for the block.*12 have ended"):
        small.launch("stuck", 1, 32, 20.0)


def test_arguments_of_the_wrong_kind_are_an_error(small):
    with pytest.raises(TypeError, match=r"takes d .* got i"):
        small.launch("stuck", 1, 32, 32)
