"""Which part of the model `bsat-spline` does it: the head, the detail, or what instance norm looks at?

    BSAT_DATA=folder python benchmarks/spline_parts.py DATASET [--json] [--tokens 45] [--seeds 2025 2026] [--jobs 2]
                                                               [--windows N] [--only ROW ...] [--feature uniform]

Each of `head="spline"`, `detail=8` and `norm="window"` on and off, the two baselines beside; `Forecaster`'s default
network, lookback 720, horizon 192, at most 30 epochs (of all windows, or of N, drawn anew each time) and no search.
Test RMSE in the data's unit, mean over the seeds, and how far below that of the first row. DATASET is a name of the
catalog (`bsat data list`). `--feature uniform` tells what placing the knots gives: the same splines on even knots.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from typing import Any

import torch

from bsat import BSplineTokenizer, DownsampleTokenizer, Forecaster, PatchTokenizer
from bsat.data import catalog
from bsat.spline.spec import FEATURES

EPOCHS = 30
PARTS = [dict(zip(("head", "detail", "norm"), on, strict=True)) for on in product((False, True), repeat=3)]
BASELINES = {"UDS": DownsampleTokenizer, "PatchTST": PatchTokenizer}


def train(
    name: str,
    parts: dict[str, bool],
    feature: str,
    dataset: str,
    tokens: int,
    seed: int,
    epochs: int,
    windows: int | None,
) -> dict[str, Any]:
    """One training, scored once on the test fold."""
    torch.set_num_threads(1)
    began = time.perf_counter()
    given: dict[str, Any] = {"max_epochs": epochs, "epoch_windows": windows}
    if parts.get("head"):
        given["head"] = "spline"
    if parts.get("norm"):
        given["norm"] = "window"
    kind = BASELINES.get(name)
    own: dict[str, Any] = {"feature": feature, "detail": 8 * parts.get("detail", False)}
    tokenizer = BSplineTokenizer(tokens, **own) if kind is None else kind(tokens)
    forecaster = Forecaster(192, 720, tokenizer, seed=seed, device="cpu", verbose=False, **given)
    found = forecaster.fit(catalog.load(dataset))
    scores = {key: score.rmse for key, score in found.scores_.items() if score is not None}
    spent = time.perf_counter() - began
    return {"name": name, "seed": seed, **scores, "epochs": len(found.history_.epochs), "seconds": spent}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset", help="a name of the catalog")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--tokens", type=int, default=45)
    parser.add_argument("--seeds", type=int, nargs="+", default=[2025, 2026])
    parser.add_argument("--jobs", type=int, default=2, help="trainings at a time")
    parser.add_argument("--windows", type=int, help="in an epoch; all by default")
    named = {" ".join(part for part in parts if parts[part]) or "-": parts for parts in PARTS}
    named |= {name: {} for name in BASELINES}
    parser.add_argument("--only", nargs="+", choices=named, default=list(named), metavar="ROW", help="some of the rows")
    parser.add_argument("--feature", default="curvature", choices=FEATURES, help="what draws knots")
    parser.add_argument("--epochs", type=int, default=EPOCHS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not args.json:
        epoch = f" of {args.windows} windows" if args.windows else ""
        what = f"{args.dataset}, {args.tokens} tokens, knots by {args.feature}, at most {args.epochs} epochs{epoch}"
        print(f"{what}; test RMSE over {len(args.seeds)} seeds\n")
        print(f"{'':20}{'mean':>10}{'below':>9}   {'seeds':24}{'epochs':>7}{'s a run':>9}", flush=True)
    rows: list[dict[str, Any]] = []
    with ProcessPoolExecutor(args.jobs, multiprocessing.get_context("spawn")) as pool:
        given, long = (args.feature, args.dataset, args.tokens), (args.epochs, args.windows)
        jobs = {
            name: [pool.submit(train, name, named[name], *given, seed, *long) for seed in args.seeds]
            for name in args.only
        }
        for name, own in jobs.items():
            runs = [job.result() for job in own]
            rows.append({"name": name, "rmse": statistics.mean(run["test"] for run in runs), "runs": runs})
            if not args.json:
                epochs, seconds = (statistics.mean(run[key] for run in runs) for key in ("epochs", "seconds"))
                mean = f"{rows[-1]['rmse']:>10.4g}{1 - rows[-1]['rmse'] / rows[0]['rmse']:>9.1%}"
                seeds = " ".join(f"{run['test']:.4g}" for run in runs)
                print(f"{name:20}{mean}   {seeds:24}{epochs:>7.0f}{seconds:>9.0f}", flush=True)
    naive = {key: rows[0]["runs"][0][key] for key in ("last value", "seasonal naive")}
    if args.json:
        of = {"dataset": args.dataset, "tokens": args.tokens, "feature": args.feature}
        print(json.dumps({**of, "rows": rows, "naive": naive}))
        return
    for key, value in naive.items():
        print(f"{key:20}{value:>10.4g}{1 - value / rows[0]['rmse']:>9.1%}")


if __name__ == "__main__":
    main()
