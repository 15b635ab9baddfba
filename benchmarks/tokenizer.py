"""How fast is the tokenizer? Beside the loop that everyone would write, in the same run.

    python benchmarks/tokenizer.py [--json] [--quick]

* windows per second for degrees 1 to 6 and 45, 90, 180 tokens at L = 720, on one thread and on two, against a loop over
  windows with numpy.gradient and scipy.interpolate.make_lsq_spline, with and without a check of the condition number;
* the search for the clip factor (116 values, n = 180);
* all windows of a series of a million samples, with the peak memory above that of the output;
* reading tokens from the cache against computing them.

Times are the best of several, interleaved. With BSAT_DATA set, the windows are those of ETTh1's OT; else of a shipped
series. The clip factor's figure is for the first 10,452 rows of ETTh1 then.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import scipy.interpolate

from bsat import BSplineTokenizer, TokenCache
from bsat.data import load_shipped

L, G = 720, 0.62


def best_times(jobs: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """The best of several rounds in which every job has its turn, since the machine's speed drifts."""
    best = dict.fromkeys(jobs, float("inf"))
    for _ in range(rounds):
        for name, job in jobs.items():
            start = time.perf_counter()
            job()
            best[name] = min(best[name], time.perf_counter() - start)
    return best


def obvious_loop(windows: np.ndarray, n: int, p: int, check: bool) -> np.ndarray:
    """Algorithms 1 and 2 as one would write them with numpy and SciPy."""
    x = np.arange(L, dtype=float)
    middle = np.concatenate([x[:1], (x[1:] + x[:-1]) / 2])
    q = np.linspace(0, 1, n - p + 1)[1:-1]
    out = np.empty((len(windows), n))
    for i, y in enumerate(windows):
        dy = y
        for _ in range(p):
            dy = np.gradient(dy, x)
        dy = np.abs(dy)
        phi = (dy + 1e-6 * dy.mean()) ** (1 / p)
        omega = (phi[1:] + phi[:-1]) / 2 * np.diff(x)
        omega = np.minimum(omega, G * omega.sum() / (n - p - 1))
        F = np.concatenate([[0], np.cumsum(omega)])
        interior = np.interp(q, F / F[-1], middle)
        t = np.concatenate([np.full(p + 1, x[0]), interior, np.full(p + 1, x[-1])])
        if check:
            N = scipy.interpolate.BSpline.design_matrix(x, t, p).toarray()
            np.linalg.cond(N.T @ N)
        out[i] = scipy.interpolate.make_lsq_spline(x, y, t, p).c
    return out


def speed(windows: np.ndarray, rounds: int, loop_windows: int) -> list[dict[str, Any]]:
    """Windows per second, and how many times the loop's."""
    rows = []
    few = windows[:: max(1, len(windows) // loop_windows)][:loop_windows]
    for p in range(1, 7):
        for n in (45, 90, 180):
            tok = BSplineTokenizer(n, p, clip_factor=G)
            tok.transform(windows[:2])  # compile
            fewer = few[: max(4, len(few) // 4)]
            jobs: dict[str, Callable[[], object]] = {
                "loop": partial(obvious_loop, few, n, p, check=False),
                "loop_checked": partial(obvious_loop, fewer, n, p, check=True),
                # The idle threads of a BLAS library spin for a while after a call; let them leave the processors.
                "pause": partial(time.sleep, 0.1),
                "one": partial(tok.transform, windows, threads=1),
                "two": partial(tok.transform, windows, threads=2),
            }
            took = best_times(jobs, rounds)
            per = {
                "loop": took["loop"] / len(few),
                "loop_checked": took["loop_checked"] / len(fewer),
                "one": took["one"] / len(windows),
                "two": took["two"] / len(windows),
            }
            rows.append(
                {
                    "degree": p,
                    "tokens": n,
                    **{f"{k}_us": v * 1e6 for k, v in per.items()},
                    "windows_per_second": 1 / per["two"],
                    "times_loop": per["loop"] / per["two"],
                    "times_loop_checked": per["loop_checked"] / per["two"],
                }
            )
    return rows


def clip_search(series: np.ndarray) -> dict[str, Any]:
    """The paper's grid search, after compilation."""
    tok = BSplineTokenizer(180, clip_factor="auto", placement="paper")
    tok.fit(series, lookback=L)
    took = best_times({"fit": lambda: tok.fit(series, lookback=L)}, 3)
    return {"clip_factor": tok.clip_factor_, "seconds": took["fit"], "windows": (len(series) - L) // 100 + 1}


def million() -> dict[str, Any]:
    """A million samples at stride 1, in a process of its own, so that the peak is this job's."""
    answer = subprocess.run([sys.executable, __file__, "--million"], capture_output=True, text=True, check=True)
    return json.loads(answer.stdout.splitlines()[-1])


def million_here() -> dict[str, Any]:
    series = np.cumsum(np.random.default_rng(0).normal(size=1_000_000))
    tok = BSplineTokenizer(45)
    tok.transform_series(series[:2000], L)  # compile, load
    with open("/proc/self/statm") as file:  # what the process holds now: interpreter, numba, the compiled kernel
        before = int(file.read().split()[1]) * resource.getpagesize() / 2**20
    start = time.perf_counter()
    tokens = tok.transform_series(series, L)
    took = time.perf_counter() - start
    output = sum(getattr(tokens, name).nbytes for name in tokens.arrays if getattr(tokens, name) is not None) / 2**20
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {
        "windows": len(tokens),
        "seconds": took,
        "output_mib": output,
        "peak_mib": peak,
        "before_mib": before,
        "peak_above_output_mib": peak - output,
    }


def cache(series: np.ndarray) -> dict[str, Any]:
    """Tokens of all windows of the series: computed, written, read (from the page cache, a disk's best case)."""
    tok = BSplineTokenizer(45)
    with tempfile.TemporaryDirectory() as folder:
        store = TokenCache(folder)
        start = time.perf_counter()
        tokens = tok.transform_series(series, L, cache=store)
        first = time.perf_counter() - start
        took = best_times(
            {
                "compute": lambda: tok.transform_series(series, L),
                "read": lambda: tok.transform_series(series, L, cache=store),
            },
            3,
        )
        size = sum(size for _, size in store.files())
    return {
        "windows": len(tokens),
        "file_mib": size / 2**20,
        "compute_seconds": took["compute"],
        "compute_and_write_seconds": first,
        "read_seconds": took["read"],
        "read_over_compute": took["read"] / took["compute"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--million", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.million:
        print(json.dumps(million_here()))
        return

    data = os.environ.get("BSAT_DATA")
    if data:
        import pandas as pd

        series, source = pd.read_csv(Path(data) / "ETTh1.csv")["OT"].to_numpy(float), "ETTh1 OT"
    else:
        series, source = load_shipped("solar")["y"].to_numpy(), "shipped solar"
    windows = np.ascontiguousarray(np.lib.stride_tricks.sliding_window_view(series, L)[::4][:4000])
    result: dict[str, Any] = {
        "source": source,
        "machine": {"processors": os.cpu_count(), "machine": platform.machine(), "python": platform.python_version()},
        "speed": speed(windows, 4 if args.quick else 16, 40),
        "clip_search": clip_search(series[:10_452]),
        "million": million(),
        "cache": cache(series),
    }
    if args.json:
        print(json.dumps(result))
        return

    print(f"windows of {L} samples of {source}; µs a window\n")
    print("degree tokens    loop  +check  1 thread 2 threads   windows/s  x loop  x +check")
    for r in result["speed"]:
        print(
            f"{r['degree']:>6}{r['tokens']:>7}{r['loop_us']:>8.0f}{r['loop_checked_us']:>8.0f}{r['one_us']:>10.2f}"
            f"{r['two_us']:>10.2f}{r['windows_per_second']:>12,.0f}{r['times_loop']:>8.0f}{r['times_loop_checked']:>10.0f}"
        )
    s, m, c = result["clip_search"], result["million"], result["cache"]
    print(f"\nclip factor search, n = 180, {s['windows']} windows: g = {s['clip_factor']:.2f} in {s['seconds']:.2f} s")
    print(
        f"a million samples, stride 1, n = 45: {m['seconds']:.1f} s, output {m['output_mib']:,.0f} MiB, "
        f"peak {m['peak_above_output_mib']:,.0f} MiB above it ({m['before_mib']:,.0f} held before the work began)"
    )
    print(
        f"cache, {c['windows']:,} windows, {c['file_mib']:,.0f} MiB: compute {c['compute_seconds']:.2f} s, read "
        f"{c['read_seconds']:.2f} s ({c['read_over_compute']:.2f} of computing)"
    )


if __name__ == "__main__":
    main()
