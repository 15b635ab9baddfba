"""Does a saved model forecast bitwise the same on another machine?

    python benchmarks/portable.py make FOLDER      # here
    python benchmarks/portable.py check FOLDER [--device cuda] [--json]      # there

`make` trains a small model on each shipped series, saves it, and keeps its forecasts and intervals from 30 cutoffs;
`check` loads the models, forecasts again and counts the numbers that differ in any bit.
"""

from __future__ import annotations

import argparse
import json
import platform
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from bsat import Forecaster
from bsat.data import SHIPPED, load_shipped


def forecasts(forecaster: Forecaster, name: str) -> pd.DataFrame:
    """Of 30 cutoffs in the test fold, with intervals."""
    return forecaster.cross_validation(load_shipped(name), n_windows=30, step=190, level=[80, 95], allow_fit=False)


def make(folder: Path) -> None:
    for name in SHIPPED:
        forecaster = Forecaster(192, 720, head="spline", max_epochs=3, epoch_windows=2000, verbose=False)
        forecaster.fit(load_shipped(name)).save(folder / name)
        forecasts(forecaster, name).to_parquet(folder / f"{name}.parquet")
        print(f"made {folder / name}")


def check(folder: Path, device: str) -> dict[str, Any]:
    rows = {}
    for name in SHIPPED:
        wanted = pd.read_parquet(folder / f"{name}.parquet")
        got = forecasts(Forecaster.load(folder / name, device=device, verbose=False), name)
        columns = [c for c in wanted.columns if c.startswith("BSAT")]
        a, b = wanted[columns].to_numpy(), got[columns].to_numpy()
        rows[name] = {
            "numbers": a.size,
            "differ": int(np.count_nonzero(a != b)),
            "largest_relative": float(np.abs(a - b).max() / np.abs(a).max()),
        }
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=["make", "check"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", default="cpu", help='of `check`: "cpu" or "cuda"')
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    if args.verb == "make":
        make(args.folder)
        return
    rows = check(args.folder, args.device)
    if args.json:
        print(json.dumps(rows))
        return
    where = torch.cuda.get_device_name() if args.device == "cuda" else platform.machine()
    print(f"Python {platform.python_version()}, torch {torch.__version__}, {args.device} ({where})")
    for name, r in rows.items():
        most = f"{r['largest_relative']:.1e}"
        print(f"{name:12}{r['differ']:>8,} of {r['numbers']:,} numbers differ; at most {most} relative")


if __name__ == "__main__":
    main()
