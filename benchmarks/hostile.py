"""Is the safe placement safe? Hundreds of thousands of fits on series made to break it, beside the paper's placement.

    python benchmarks/hostile.py [--json] [--windows 100]

Every series is fitted at degrees 1 to 6, with 45, 90 and 180 tokens, clip factors from 0.1 to none and two features.
For each placement it prints the share of ridge fallbacks, the largest condition number and the largest |c| / max|y|.

The last four rows are the worst that can be asked of a B-spline basis as such: signals that jump between -1 and 1, or
sweep through the frequency at which neighbouring basis functions alternate. There, degrees 5 and 6 need coefficients
beyond 12 max|y| with uniform knots too, as the last column shows; so they are summed up apart. They were set apart
after their figures were seen, and the distance 1 + p / 8 of the safe placement was chosen on these same series.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from typing import Any

import numpy as np

from bsat.spline import SplineSpec, cpu

L = 720
DEGREES, TOKENS, CLIPS, FEATURES = range(1, 7), (45, 90, 180), (0.1, 0.3, 0.62, 1.25, np.inf), ("curvature", "slope")
RESONANT = ("square wave", "coin flips", "alternating", "sweep")


def hostile_series(count: int, seed: int = 2025) -> dict[str, np.ndarray]:
    """Name -> (count, L) windows."""
    rng = np.random.default_rng(seed)
    i = np.arange(L)[None]
    at = rng.integers(5, L - 5, (count, 1))
    normal = rng.normal(size=(count, L))
    phase = rng.uniform(0, 96, (count, 1))
    return {
        "noise": normal,
        "heavy tails": rng.standard_cauchy((count, L)),
        "random walk": normal.cumsum(1),
        "one spike": np.where(i == at, 1e3, 0.0) + 1e-3 * normal,
        "bare spike": np.where(i == at, 1.0, 0.0),
        "spikes at the ends": np.where((i < 3) | (i >= L - 3), 1.0, 0.0) * rng.uniform(0.5, 2, (count, 1)),
        "step": (i > at) * 1.0,
        "staircase": np.floor(i * rng.uniform(0.005, 0.05, (count, 1))),
        "solar days": np.maximum(0, np.sin(2 * np.pi * (i + phase) / 96)) * rng.uniform(0.3, 1, (count, 1)),
        "solar with clouds": np.maximum(0, np.sin(2 * np.pi * (i + phase) / 96)) * rng.uniform(0.2, 1, (count, L)),
        "burst in silence": normal * (np.abs(i - at) < 12),
        "explosion": np.exp(i / rng.uniform(15, 60, (count, 1))),
        "tiny on huge": 1e9 + normal,
        "square wave": np.sign(np.sin(2 * np.pi * i / rng.uniform(4, 40, (count, 1)))),
        "coin flips": np.sign(normal),
        "alternating": (-1.0) ** i * (np.abs(i - at) < rng.integers(4, L, (count, 1))),
        "sweep": np.sin(np.pi * i**2 / (2 * L) * rng.uniform(0.2, 1, (count, 1)) + phase),
    }


def measure(windows: np.ndarray, placement: str, features: tuple[str, ...]) -> dict[str, Any]:
    """Over all degrees, token counts, clip factors and features; "ratios" by degree."""
    size = np.abs(windows).max(1)
    fits = fallbacks = 0
    kappa = 0.0
    ratios = dict.fromkeys(map(str, DEGREES), 0.0)
    for p, n, g, feature in itertools.product(DEGREES, TOKENS, CLIPS, features):
        spec = SplineSpec(n=n, degree=p, clip_factor=g, placement=placement, feature=feature)
        fit = cpu.tokenize(windows, spec)
        fits += len(windows)
        fallbacks += int(fit.fallback.sum())
        kappa = max(kappa, float(fit.condition.max()))
        ratios[str(p)] = max(ratios[str(p)], float((np.abs(fit.coefficients).max(1) / size).max()))
    return {"fits": fits, "fallbacks": fallbacks, "condition": kappa, "ratio": max(ratios.values()), "ratios": ratios}


def together(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The sums and maxima of several measurements."""
    return {
        "fits": sum(r["fits"] for r in rows),
        "fallbacks": sum(r["fallbacks"] for r in rows),
        "condition": max(r["condition"] for r in rows),
        "ratio": max(r["ratio"] for r in rows),
        "ratios": {p: max(r["ratios"][p] for r in rows) for p in rows[0]["ratios"]},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--windows", type=int, default=100, help="windows per series (default: 100)")
    args = parser.parse_args()

    start = time.perf_counter()
    rows = {}
    for name, windows in hostile_series(args.windows).items():
        rows[name] = {
            "safe": measure(windows, "safe", FEATURES),
            "paper": measure(windows, "paper", FEATURES),
            "uniform": measure(windows, "safe", ("uniform",)),
        }
        if not args.json:
            if len(rows) == 1:
                print(f"{'':20}{'safe':^29}{'paper':^29}{'uniform':>9}")
                print(f"{'':20}" + f"{'fallback':>10}{'kappa <=':>10}{'|c|/|y|':>9}" * 2 + f"{'|c|/|y|':>9}")
            cells = "".join(
                f"{r['fallbacks'] / r['fits']:>10.2%}{r['condition']:>10.1e}{r['ratio']:>9.1f}"
                for r in (rows[name]["safe"], rows[name]["paper"])
            )
            print(f"{name:20}{cells}{rows[name]['uniform']['ratio']:>9.1f}", flush=True)

    hostile = {
        k: together([r[k] for name, r in rows.items() if name not in RESONANT]) for k in ("safe", "paper", "uniform")
    }
    resonant = {k: together([rows[name][k] for name in RESONANT]) for k in ("safe", "paper", "uniform")}
    if args.json:
        print(json.dumps({"rows": rows, "hostile": hostile, "resonant": resonant}))
        return
    print()
    for label, part in (("hostile", hostile), ("last four rows", resonant)):
        safe = part["safe"]
        print(
            f"{label}: safe, {safe['fits']:,} fits, {safe['fallbacks']} fallbacks, kappa <= {safe['condition']:.1e}, "
            f"|c| <= {safe['ratio']:.1f} max|y|; by degree"
        )
        for kind in ("safe", "uniform", "paper"):
            print(f"  {kind:8}" + "".join(f"{part[kind]['ratios'][str(p)]:>9.1f}" for p in DEGREES))
    print(f"{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
