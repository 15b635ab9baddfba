"""Do stored runs come out again? One run of each cell, trained once more for its first epoch, here and in plain torch.

    BSAT_DATA=folder python benchmarks/replay.py STORE [--json] [--device cpu] [--dataset etth1] [--tokens 45,90]
                                                       [--models bsat,uds] [--encodings lpe]

STORE is a folder of runs with their curves (`bsat lab run`; `docs/results/runs` has those of the selected runs). Of
each cell the run with the smallest network is taken that has a curve. `loss` and `validation` are how far the first
epoch of the stored curve is from this one's, relatively. Dropout follows from the seed, so both train on the same
masks: with float32 they differ by rounding, with 16 bits by some 1e-4. Tokens are made anew, too, by this device.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch

import bsat
from bsat.lab import Experiment, read
from bsat.lab.runner import Material
from bsat.lab.runs import CELL, read_protocol
from bsat.train.population import train_population


def pick(runs: pd.DataFrame) -> pd.DataFrame:
    """The smallest run of each cell."""
    runs = runs[[bool(curve) and len(curve["loss"]) > 0 for curve in runs["curve"]]]
    sizes = pd.Series(
        [c["n_layers"] * c["d_model"] * (c["n_heads"] + c["ff_factor"]) for c in runs["configuration"]], runs.index
    )
    ordered = runs.assign(size=sizes).sort_values(["size", "seed", "trial"])
    return ordered.groupby(CELL, sort=False).first().reset_index().sort_values(["tokens", "model", "encoding"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path, help="the folder of runs")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--device", default="cpu", help='"cpu" or "cuda"')
    parser.add_argument("--dataset", help="one of them only")
    parser.add_argument("--tokens", default="", help="some budgets only")
    parser.add_argument("--models", default="", help="some models only")
    parser.add_argument("--encodings", default="", help="some encodings only")
    args = parser.parse_args()
    runs, protocol = read(args.store), read_protocol(args.store)
    material = Material(protocol, args.device)
    if args.dataset:
        runs = runs[runs["dataset"] == args.dataset]
    if args.tokens:
        runs = runs[runs["tokens"].isin([int(word) for word in args.tokens.split(",")])]
    if args.models:
        runs = runs[runs["model"].isin(args.models.split(","))]
    if args.encodings:
        runs = runs[runs["encoding"].isin(args.encodings.split(","))]
    if runs.empty:
        raise SystemExit(f"{args.store} has no such runs")
    rows: list[dict[str, Any]] = []
    device = args.device if args.device == "cpu" else torch.cuda.get_device_name()
    machine = f"{device}, torch {torch.__version__}, Python {platform.python_version()}, bsat {bsat.__version__}"
    if not args.json:
        print(f"{machine}; protocol {protocol.short}\n")
        print(f"{'cell':50}{'trained in':24}{'loss':>10}{'validation':>12}{'seconds':>9}")
    for run in pick(runs).to_dict("records"):
        dataset, model, tokens, encoding = (run[name] for name in CELL)
        experiment = Experiment(dataset, model, tokens, encoding, 1, protocol)
        began = time.perf_counter()
        search = material.search(experiment, int(run["seed"]), material.tokenizer(experiment))
        trial = search.build(run["configuration"])
        trial = replace(trial, train=replace(trial.train, max_epochs=1))
        data = material.data(dataset)
        (trained,) = train_population([trial], data.train, data.val, deviation=data.deviation)
        first = trained.history.epochs[0]
        row = {name: run[name] for name in (*CELL, "seed", "trial", "engine")}
        row["loss"] = run["curve"]["loss"][0] / first.loss - 1
        row["validation"] = run["curve"]["val_rmse"][0] / first.val_rmse - 1
        row["seconds"] = time.perf_counter() - began
        rows.append(row)
        if not args.json:
            name = f"{dataset} {tokens} {model} {encoding}"
            marks = f"{row['loss']:>10.1e}{row['validation']:>12.1e}{row['seconds']:>9.0f}"
            print(f"{name:50}{run['engine']:24}{marks}", flush=True)
    worst = {
        engine: max(abs(row[name]) for row in rows if row["engine"] == engine for name in ("loss", "validation"))
        for engine in sorted({row["engine"] for row in rows})
    }
    if args.json:
        print(json.dumps({"machine": machine, "rows": rows, "worst": worst}))
        return
    print("\n" + "; ".join(f"{engine}: at most {value:.1e} apart" for engine, value in worst.items()))


if __name__ == "__main__":
    main()
