"""How much memory does training on many series take? 2,000 series of 3,000 samples, beyond torch itself.

    python benchmarks/memory.py [--json] [--series 2000] [--samples 3000] [--epoch-windows 4096]

A fresh process imports torch, notes its memory, builds the frame, trains for one epoch with `Forecaster`'s defaults
(lookback 720, horizon 192, 45 tokens), forecasts all series, and reports its peak above the first note: the frame, the
check of the frame, windows, tokens, network and all. Fewer windows an epoch than the default only save time: memory
depends on the batch.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time


def measure(series: int, samples: int, epoch_windows: int) -> None:
    """In a process of its own; prints one JSON object."""
    import torch  # noqa: F401

    base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    import numpy as np
    import pandas as pd

    from bsat import Forecaster

    rng = np.random.default_rng(0)
    t = np.arange(samples)
    frame = pd.DataFrame(
        {
            "unique_id": np.repeat([f"s{i}" for i in range(series)], samples),
            "ds": np.tile(pd.date_range("2024-01-01", periods=samples, freq="h").to_numpy(), series),
            "y": (
                10 * np.sin(2 * np.pi * (t + rng.integers(0, 24, (series, 1))) / 24)
                + rng.normal(size=(series, samples))
            ).ravel(),
        }
    )
    with_frame = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    forecaster = Forecaster(192, 720, max_epochs=1, epoch_windows=epoch_windows, folds=(0.8, 0.2, 0), device="cpu")
    forecaster.fit(frame)
    fitted = time.perf_counter() - start
    forecasts = forecaster.predict(frame)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(
        json.dumps(
            {
                "torch_mib": base / 1024,
                "frame_mib": (with_frame - base) / 1024,
                "peak_beyond_torch_mib": (peak - base) / 1024,
                "fit_s": fitted,
                "predict_s": time.perf_counter() - start - fitted,
                "rows": len(forecasts),
            }
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--series", type=int, default=2000)
    parser.add_argument("--samples", type=int, default=3000)
    parser.add_argument("--epoch-windows", type=int, default=4096)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        measure(args.series, args.samples, args.epoch_windows)
        return
    words = [f"--{name}={getattr(args, name.replace('-', '_'))}" for name in ("series", "samples", "epoch-windows")]
    done = subprocess.run([sys.executable, __file__, "--child", *words], capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    result = {**json.loads(done.stdout.splitlines()[-1]), "plan": done.stderr.strip().splitlines()[:2]}
    if args.json:
        print(json.dumps(result))
        return
    print(f"{args.series:,} series of {args.samples:,} samples; MiB")
    print("\n".join(result["plan"]))
    print(f"torch alone {result['torch_mib']:,.0f}; the frame {result['frame_mib']:,.0f} more")
    print(f"peak beyond torch {result['peak_beyond_torch_mib']:,.0f} (allowed: 2,000)")
    print(f"fit {result['fit_s']:.0f} s, predict {result['predict_s']:.0f} s, {result['rows']:,} rows")


if __name__ == "__main__":
    main()
