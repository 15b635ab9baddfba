"""Do conformal intervals keep their promise? Coverage on the test folds of the two shipped series.

    python benchmarks/intervals.py [--json] [--epochs 20] [--epoch-windows 4000]

Every window of the test fold, 192 steps ahead; intervals calibrated on the validation fold alone. Printed are the share
of truths inside, its least and largest over the steps ahead, and the mean width in the data's unit; beside, the same
for intervals that are not scaled by the window's deviation.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import numpy as np

from bsat import Forecaster
from bsat.conformal import half_widths, local_deviation, sorted_scores
from bsat.data import SHIPPED, load_shipped
from bsat.data.folds import fold_edges, window_ranges

LEVELS = (80.0, 95.0)


def fold_windows(y: np.ndarray, fold: int, L: int, H: int) -> tuple[np.ndarray, np.ndarray]:
    """Past (W, L) and future (W, H) of all windows of a fold."""
    first, count = window_ranges(fold_edges(np.array([len(y)])), fold, L, H)
    whole = np.lib.stride_tricks.sliding_window_view(y, L + H)[first[0] : first[0] + count[0]]
    return whole[:, :L], whole[:, L:]


def cover(error: np.ndarray, half: np.ndarray) -> dict[str, float]:
    """Of absolute errors (W, H) in half widths (W, H)."""
    inside = error <= half
    steps = inside.mean(0)
    return {
        "coverage": float(inside.mean()),
        "least_step": float(steps.min()),
        "most_step": float(steps.max()),
        "mean_width": float(2 * half.mean()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--epochs", type=int, default=20, help="at most so many (default: 20)")
    parser.add_argument("--epoch-windows", type=int, default=4000, help="windows an epoch (default: 4000)")
    args = parser.parse_args()

    rows: dict[str, Any] = {}
    for name in SHIPPED:
        frame = load_shipped(name)
        y = frame["y"].to_numpy()
        forecaster = Forecaster(
            192, 720, max_epochs=args.epochs, epoch_windows=args.epoch_windows, verbose=False, device="cpu"
        ).fit(frame)

        def errors(fold: int, most: int, forecaster: Forecaster = forecaster, y: np.ndarray = y) -> Any:
            past, future = fold_windows(y, fold, forecaster.lookback, forecaster.horizon)
            keep = np.unique(np.linspace(0, len(past) - 1, most).round().astype(int))
            forecast = np.concatenate([forecaster.forecast(part) for part in np.array_split(past[keep], 16)])
            deviation = forecaster.deviation_[0] * local_deviation(past[keep] / forecaster.deviation_[0])
            return np.abs(forecast - future[keep]), deviation

        val_error, _ = errors(1, 1000)
        test_error, test_deviation = errors(2, 10**9)
        fixed = sorted_scores(val_error, np.ones(len(val_error)))
        rows[name] = {}
        for i, level in enumerate(LEVELS):
            scaled = half_widths(forecaster.conformal_, LEVELS)[i] * test_deviation[:, None]
            plain = np.broadcast_to(half_widths(fixed, LEVELS)[i], test_error.shape)
            rows[name][f"{level:g}"] = {
                **cover(test_error, scaled),
                "windows": len(test_error),
                "not_scaled": cover(test_error, plain),
            }
    worst = max(abs(r["coverage"] - float(level) / 100) for row in rows.values() for level, r in row.items())
    if args.json:
        print(json.dumps({"rows": rows, "worst_miss": worst}))
        return
    print(f"{'':12}{'level':>6}{'windows':>9}{'covered':>10}{'by step':>18}{'width':>9}{'not scaled':>13}{'width':>9}")
    for name, row in rows.items():
        for level, r in row.items():
            plain = r["not_scaled"]
            steps = f"{r['least_step']:.1%} - {r['most_step']:.1%}"
            print(
                f"{name:12}{level:>4} %{r['windows']:>9,}{r['coverage']:>10.1%}{steps:>18}{r['mean_width']:>9.0f}"
                f"{plain['coverage']:>13.1%}{plain['mean_width']:>9.0f}"
            )
    print(f"worst miss {100 * worst:.1f} points (allowed: 5)")


if __name__ == "__main__":
    main()
