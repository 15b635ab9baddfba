"""What does `predict` cost beyond the network? Latency for one series beside the bare forward pass.

    python benchmarks/predict.py [--json] [--threads 2]

The bare forward is the trained network on ready tokens of one window, in float32. `predict()` forecasts the series of
`fit`; `predict(frame)` checks a frame of 720 or 20,000 rows first; `forecast(window)` is the fast path without frames.
The limit is twice the bare forward plus 3 ms. In turns, best and median of many.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch

from bsat import Forecaster
from bsat.data import load_shipped
from bsat.train.batches import make_inputs, run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of torch")
    parser.add_argument("--rounds", type=int, default=200, help="calls of each (default: 200)")
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    frame = load_shipped("solar")
    forecaster = Forecaster(192, 720, max_epochs=1, epoch_windows=256, verbose=False, device="cpu").fit(frame)
    short, long = frame.iloc[-720:], frame.iloc[-20_000:]
    window = short["y"].to_numpy()[None]
    network = forecaster.network_
    scaled = torch.from_numpy((window - forecaster.mean_[0]) / forecaster.deviation_[0]).float()
    with torch.no_grad():
        inputs = make_inputs(network, forecaster.tokenizer_.transform(scaled), scaled)

    def bare() -> None:
        with torch.no_grad():
            run(network, inputs)

    jobs: dict[str, Callable[[], object]] = {
        "bare forward": bare,
        "predict()": lambda: forecaster.predict(),
        "predict() with levels": lambda: forecaster.predict(level=[80, 95]),
        "predict(720 rows)": lambda: forecaster.predict(short),
        "predict(20,000 rows)": lambda: forecaster.predict(long),
        "forecast(window)": lambda: forecaster.forecast(window),
    }
    times: dict[str, list[float]] = {name: [] for name in jobs}
    for number in range(args.rounds + 5):
        for name, job in jobs.items():
            start = time.perf_counter()
            job()
            if number >= 5:
                times[name].append(1e3 * (time.perf_counter() - start))
    best = {name: min(t) for name, t in times.items()}
    middle = {name: statistics.median(t) for name, t in times.items()}
    limit = 2 * best["bare forward"] + 3
    within = all(best[name] <= limit for name in jobs if name.startswith("predict"))
    if args.json:
        print(json.dumps({"best_ms": best, "median_ms": middle, "limit_ms": limit, "within": within}))
        return
    print(f"torch {torch.__version__}, cpu, {args.threads} threads; ms for one series, 720 samples to 192 steps")
    print(f"{'':24}{'best':>8}{'median':>8}")
    for name in jobs:
        print(f"{name:24}{best[name]:>8.2f}{middle[name]:>8.2f}")
    print(f"limit, 2 x bare forward + 3: {limit:.2f} ms; {'within' if within else 'MISSED'}")


if __name__ == "__main__":
    main()
