"""What activations of 16 bits change: the same trials, trained in float32 and in bfloat16.

    bsat lab run etth1 ... --engine population --spread --store a
    bsat lab run etth1 ... --engine population --spread --store b --precision bfloat16
    python benchmarks/precision.py a b [--json]

Trials are paired by cell, seed and configuration. Printed are the mean of either, how the second differs from the first
(median, and half of all between the quartiles, in percent), the p-value of Wilcoxon's signed-rank test that nothing
differs, and the mean test RMSE of the runs that either search selected.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import pandas as pd
from scipy.stats import wilcoxon

from bsat.lab import read

CELL = ["dataset", "model", "tokens", "encoding"]


def load(store: str) -> pd.DataFrame:
    """Runs that gave a score, with their configurations as text."""
    runs = read(store, curves=False)
    runs["point"] = [json.dumps(point, sort_keys=True) for point in runs["configuration"]]
    return runs[runs["status"] != "failed"].drop_duplicates([*CELL, "seed", "point"])


def compare(one: pd.DataFrame, two: pd.DataFrame) -> list[dict[str, Any]]:
    """A row for each cell that both have."""
    both = one.merge(two, on=[*CELL, "seed", "point"], suffixes=("_a", "_b"))
    rows = []
    for cell, pairs in both.groupby(CELL):
        row: dict[str, Any] = {**dict(zip(CELL, cell, strict=True)), "pairs": len(pairs)}
        row["seconds_a"], row["seconds_b"] = float(pairs["seconds_a"].sum()), float(pairs["seconds_b"].sum())
        for score in ("val_rmse", "test_rmse"):
            a, b = pairs[f"{score}_a"], pairs[f"{score}_b"]
            known = a.notna() & b.notna()
            a, b = a[known], b[known]
            change = 100 * (b / a - 1)
            low, middle, high = change.quantile([0.25, 0.5, 0.75]) if len(change) else (float("nan"),) * 3
            row[score] = {
                "mean_a": float(a.mean()), "mean_b": float(b.mean()), "median_change_percent": float(middle),
                "quartiles_percent": [float(low), float(high)],
                "p": float(wilcoxon(a, b).pvalue) if len(a) and (a != b).any() else 1.0,
            }  # fmt: skip
        row["selected_a"], row["selected_b"] = (
            float(some[(some[CELL] == list(cell)).all(axis=1) & (some["why"] == "selected")]["test_rmse"].mean())
            for some in (one, two)
        )
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stores", nargs=2, help="folders that `bsat lab run` made")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    rows = compare(*(load(store) for store in args.stores))
    if not rows:
        raise SystemExit("the two stores have no cell in common")
    if args.json:
        text = json.dumps({"rows": rows})
        print(json.dumps(json.loads(text, parse_constant=lambda _: None)))  # what no run was scored for is null
        return
    for row in rows:
        cell = " ".join(str(row[name]) for name in CELL)
        print(f"{cell}: {row['pairs']} pairs; training {row['seconds_a']:.0f} s and {row['seconds_b']:.0f} s")
        for score in ("val_rmse", "test_rmse"):
            r = row[score]
            print(
                f"  {score:9} means {r['mean_a']:.4f} {r['mean_b']:.4f}, change {r['median_change_percent']:+.4f} % "
                f"({r['quartiles_percent'][0]:+.4f} to {r['quartiles_percent'][1]:+.4f}), p = {r['p']:.2g}"
            )
        print(f"  selected  test RMSE {row['selected_a']:.3f} and {row['selected_b']:.3f}")


if __name__ == "__main__":
    main()
