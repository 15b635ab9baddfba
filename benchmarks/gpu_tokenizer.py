"""How fast is the tokenizer on a GPU, and does it give the reference's answers there?

    python benchmarks/gpu_tokenizer.py [--json] [--quick]

* windows per second for degrees 1 to 6 and 45, 90, 180 tokens at L = 720, from windows (B, L) in float32 that are too
  many for any cache, and straight from a series and the places where its windows start; beside them, in the same run,
  the torch backend on the same GPU and the compiled backend on this machine's processors;
* how the time of one configuration divides among the kernels;
* agreement with the reference on the series of `benchmarks/hostile.py`;
* the cost as the lookback grows.

Times are the device's own (CUDA events), the best of several, of whole calls: from samples in the GPU's memory to
knots, coefficients, conditions and flags there. Targets: 20 million windows per second with degree 3 and 45 tokens, and
2 million with any degree and number of tokens.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bsat import nvrtc
from bsat.spline import SplineSpec, autograd, cpu, gpu, reference
from hostile import hostile_series

L, G = 720, 0.62
DEGREES, TOKENS = range(1, 7), (45, 90, 180)
TARGET, LEAST = 20e6, 2e6


def best_time(job: Callable[[int], object], rounds: int) -> float:
    """Seconds on the device, the best of several; the job is told the number of the round."""
    job(0)  # compile
    best = float("inf")
    for i in range(rounds):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        job(i)
        stop.record()
        torch.cuda.synchronize()
        best = min(best, start.elapsed_time(stop) / 1e3)
    return best


def make_windows(B: int, m: int, seed: int) -> Tensor:
    """Random walks with a daily cycle, (B, m) in float32."""
    random = torch.Generator("cuda").manual_seed(seed)
    walk = torch.randn(B, m, generator=random, device="cuda").mul_(0.3).cumsum(1)
    phase = torch.rand(B, 1, generator=random, device="cuda") * 24
    return walk.add_((2 * torch.pi * (torch.arange(m, device="cuda") + phase) / 24).sin_().mul_(4.0))


def speed(rounds: int, B: int) -> list[dict[str, Any]]:
    """Windows per second."""
    buffers = [make_windows(B, L, seed) for seed in range(2)]  # each many times the size of an L2 cache
    series = [make_windows(1, B + L - 1, seed)[0] for seed in range(2)]
    starts = torch.arange(B, device="cuda")
    few = buffers[0][:512]
    on_cpu = few.double().cpu().numpy()
    rows = []
    for p in DEGREES:
        for n in TOKENS:
            spec = SplineSpec(n=n, degree=p, clip_factor=G)

            def from_windows(i: int, spec: SplineSpec = spec) -> object:
                return gpu.tokenize(buffers[i % 2], spec)

            def from_series(i: int, spec: SplineSpec = spec) -> object:
                return gpu.tokenize_series(series[i % 2], starts, L, spec)

            def with_torch(i: int, spec: SplineSpec = spec) -> object:
                return autograd.tokenize(few, spec)

            cpu.tokenize(on_cpu[:2], spec)  # compile
            begin = time.perf_counter()
            cpu.tokenize(on_cpu, spec)
            took = time.perf_counter() - begin
            row = {
                "degree": p,
                "tokens": n,
                "windows": B / best_time(from_windows, rounds),
                "series": B / best_time(from_series, rounds),
                "torch": len(few) / best_time(with_torch, 2),
                "cpu": len(few) / took,
            }
            rows.append({**row, "times_torch": row["windows"] / row["torch"]})
    return rows


def stages(rounds: int) -> dict[str, float]:
    """Nanoseconds a window of each kernel, with degree 3 and 45 tokens, for one chunk of windows."""
    spec = SplineSpec(n=45, degree=3, clip_factor=G)
    y = make_windows(1 << 17, L, 0)
    samples = gpu._Samples.of(y)
    chunk = gpu._Chunk(samples, spec, None)
    t = chunk.place()
    out = (y.new_empty(len(y), spec.n + 4), y.new_empty(len(y), spec.n), y.new_empty(len(y)))
    jobs: dict[str, Callable[[int], object]] = {
        "turn": lambda i: gpu._Chunk(samples, spec, None),
        "place": lambda i: chunk.place(),
        "fit": lambda i: chunk.fit(t, *out),
    }
    return {name: best_time(job, rounds) / len(y) * 1e9 for name, job in jobs.items()}


def agreement(count: int) -> list[dict[str, Any]]:
    """With the reference, for samples and results in float64 and in float32."""
    rows = []
    windows = np.concatenate(list(hostile_series(count).values()))
    with np.errstate(over="ignore"):
        windows = windows[np.isfinite(windows.astype(np.float32)).all(1)]
    for dtype in (np.float64, np.float32):
        samples = windows.astype(dtype)
        tensor = torch.tensor(samples, device="cuda")
        for placement in ("safe", "paper"):
            coefficients = knots = 0.0
            flags = fallbacks = fits = 0
            for p in DEGREES:
                for n in (45, 180):
                    spec = SplineSpec(n=n, degree=p, clip_factor=G, placement=placement)
                    want = reference.tokenize(samples.astype(float), spec)
                    got = type(want)(*(a.cpu().numpy() for a in gpu.tokenize(tensor, spec)))
                    good = want.condition < 1e6
                    size = np.maximum(np.abs(want.coefficients).max(1), 1e-300)
                    error = np.abs(got.coefficients - want.coefficients).max(1) / size
                    coefficients = max(coefficients, float(error[good].max()))
                    knots = max(knots, float(np.abs(got.knots - want.knots).max()))
                    flags += int((got.fallback != want.fallback).sum())
                    fallbacks += int(want.fallback.sum())
                    fits += len(samples)
            rows.append(
                {
                    "dtype": np.dtype(dtype).name,
                    "placement": placement,
                    "fits": fits,
                    "coefficients": coefficients,
                    "knots": knots,
                    "fallbacks": fallbacks,
                    "flags_that_differ": flags,
                }
            )
    return rows


def growth(rounds: int) -> list[dict[str, Any]]:
    """Windows, and samples, per second as the lookback grows."""
    rows = []
    for m in (720, 2_000, 5_000, 20_000):
        B = max(1 << 16, (1 << 27) // m)
        y = make_windows(B, m, 0)
        for n in (45, 180):
            spec = SplineSpec(n=n, degree=3, clip_factor=G)
            took = best_time(lambda i, y=y, spec=spec: gpu.tokenize(y, spec), rounds)  # type: ignore[misc]
            rows.append({"lookback": m, "tokens": n, "windows": B / took, "samples": B * m / took})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="fewer rounds, windows and comparisons")
    args = parser.parse_args()
    if not nvrtc.available():
        raise SystemExit("this benchmark needs an NVIDIA GPU and torch with CUDA; torch sees none here")

    rounds = 3 if args.quick else 10
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "speed": speed(rounds, 1 << (17 if args.quick else 18)),
        "stages": stages(rounds),
        "growth": growth(rounds),
        "agreement": agreement(1 if args.quick else 4),
    }
    rates = [r[kind] for r in result["speed"] for kind in ("windows", "series")]
    main_row = next(r for r in result["speed"] if (r["degree"], r["tokens"]) == (3, 45))
    result["targets"] = {
        "degree 3, 45 tokens": {"wanted": TARGET, "windows": main_row["windows"], "series": main_row["series"]},
        "any": {"wanted": LEAST, "least": min(rates)},
    }
    if args.json:
        print(json.dumps(result))
        return

    print(f"{result['device']}, torch {result['torch']}; windows of {L} samples, millions a second\n")
    print("degree tokens  windows   series    torch      cpu  x torch")
    for r in result["speed"]:
        cells = "".join(f"{r[k] / 1e6:>9.2f}" for k in ("windows", "series")) + "".join(
            f"{r[k] / 1e6:>9.4f}" for k in ("torch", "cpu")
        )
        print(f"{r['degree']:>6}{r['tokens']:>7}{cells}{r['times_torch']:>9.0f}")
    for name, target in result["targets"].items():
        got = min(v for k, v in target.items() if k != "wanted")
        print(f"{name}: {got / 1e6:.1f} million, wanted {target['wanted'] / 1e6:.0f}: {got >= target['wanted']}")
    print("\nnanoseconds a window, degree 3, 45 tokens: ", end="")
    print(", ".join(f"{name} {took:.2f}" for name, took in result["stages"].items()))
    print("\nlookback tokens  million windows/s  billion samples/s")
    for r in result["growth"]:
        print(f"{r['lookback']:>8}{r['tokens']:>7}{r['windows'] / 1e6:>19.2f}{r['samples'] / 1e9:>19.1f}")
    print("\nagainst the reference, on hostile series")
    print("dtype   placement    fits  fallbacks  flags that differ  coefficients     knots")
    for r in result["agreement"]:
        print(
            f"{r['dtype']:8}{r['placement']:9}{r['fits']:>8}{r['fallbacks']:>11}{r['flags_that_differ']:>19}"
            f"{r['coefficients']:>14.1e}{r['knots']:>10.1e}"
        )


if __name__ == "__main__":
    main()
