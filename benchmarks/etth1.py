"""ETTh1's oil temperature with one default configuration and no search: BSAT beside PatchTST and UDS tokens.

    BSAT_DATA=folder python benchmarks/etth1.py [--json] [--tokens 45] [--seeds 2025 2026 2027]

The paper's setting: lookback 720, folds 60/20/20, test RMSE in °C, mean over the seeds; horizon 192 (the paper does not
give it; docs/model.md). The network and its training are `Forecaster`'s defaults, the same for all three tokenizers,
chosen once on validation folds. The paper's own figures, in the last column, come from 200 trials of search each.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import pandas as pd

from bsat import BSplineTokenizer, DownsampleTokenizer, Forecaster, PatchTokenizer
from bsat.lab import paper
from bsat.tokens import Tokenizer

MODELS = {"BSAT": "bsat", "PatchTST": "patchtst", "UDS": "uds"}
"""By their names in the laboratory."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--tokens", type=int, default=45)
    parser.add_argument("--seeds", type=int, nargs="+", default=[2025, 2026, 2027])
    parser.add_argument("--encoding", default="l-rope+lpe")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--device", default="auto")
    args = parser.parse_args()
    if "BSAT_DATA" not in os.environ or not (Path(os.environ["BSAT_DATA"]) / "ETTh1.csv").is_file():
        parser.error("BSAT_DATA must name a folder with ETTh1.csv (github.com/zhouhaoyi/ETDataset)")
    table = pd.read_csv(Path(os.environ["BSAT_DATA"]) / "ETTh1.csv")
    kinds: dict[str, Tokenizer] = {
        "BSAT": BSplineTokenizer(args.tokens),
        "PatchTST": PatchTokenizer(args.tokens),
        "UDS": DownsampleTokenizer(args.tokens),
    }
    rows: dict[str, Any] = {}
    naive: dict[str, float] = {}
    for name in args.models:
        runs = []
        for seed in args.seeds:
            began = time.perf_counter()
            forecaster = Forecaster(
                192, 720, kinds[name], encoding=args.encoding, seed=seed, device=args.device, verbose=False,
                id_col=None, time_col="date", target_col="OT",
            ).fit(table)  # fmt: skip
            scores = {k: s for k, s in forecaster.scores_.items() if s is not None}
            naive = {k: scores[k].rmse for k in ("last value", "seasonal naive")}
            runs.append(
                {
                    "seed": seed,
                    "test": scores["test"].to_dict(),
                    "val_rmse": scores["val"].rmse,
                    "epochs": len(forecaster.history_.epochs),
                    "bases": forecaster.history_.best.bases,
                    "seconds": time.perf_counter() - began,
                }
            )
        rmses = [r["test"]["rmse"] for r in runs]
        printed = paper.benchmark("etth1", MODELS[name], args.encoding, "rmse", args.tokens)
        rows[name] = {"rmse": statistics.mean(rmses), "paper": printed and printed.mean, "runs": runs}
        if not args.json:
            if len(rows) == 1:
                print(
                    f"ETTh1 OT, {args.tokens} tokens, {args.encoding}, H = 192; test RMSE in °C over {len(runs)} seeds"
                )
                print(f"{'':14}{'mean':>8}  {'seeds':24}{'MAE':>7}{'SMAPE':>8}{'epochs':>8}{'s a run':>9}{'paper':>8}")
            mae, smape, epochs, seconds = (
                statistics.mean(r[k] if k in r else r["test"][k] for r in runs)
                for k in ("mae", "smape", "epochs", "seconds")
            )
            each = " ".join(f"{v:.3f}" for v in rmses)
            theirs = f"{printed.mean:.3f}" if printed else "-"
            print(
                f"{name:14}{statistics.mean(rmses):>8.3f}  {each:24}{mae:>7.3f}{smape:>8.2f}{epochs:>8.0f}"
                f"{seconds:>9.0f}{theirs:>8}",
                flush=True,
            )
    if args.json:
        print(json.dumps({"tokens": args.tokens, "encoding": args.encoding, "models": rows, "naive": naive}))
        return
    print("\n".join(f"{name:14}{value:>8.3f}" for name, value in naive.items()))


if __name__ == "__main__":
    main()
