"""How large do coefficients become, and what does that cost? The paper's placement of knots beside the safe one.

    BSAT_DATA=folder python benchmarks/coefficients.py DATASET [--json] [--tokens 180] [--degrees 1,2,3,4,5,6]
                                               [--placements paper,safe] [--train] [--epochs 6] [--windows 4800]

DATASET is a name of the catalog (`bsat data list`). All windows of its folds, in deviations of the train fold, with the
clip factor that the paper's search finds: the largest coefficient of each fold; how many windows are crowded, with 50
knots or more that are closer to the next than samples are; the least distance of two knots, in samples, in the median
of the test windows and in the worst one; the share of test windows with a coefficient beyond 10, where the laboratory
clips. With `--train`, a small network (2 layers of 16, L-RoPE LPE, clipped) learns from each. Its test RMSE: of all
windows, of those with a larger coefficient than any of the train fold (in brackets how many), of crowded ones, and of
all others.
"""

from __future__ import annotations

import argparse
import json
from itertools import product
from typing import Any

import numpy as np
import torch

from bsat import BSplineTokenizer
from bsat.data.windows import Split, Windows
from bsat.lab.models import CLIP_AT
from bsat.lab.protocol import Protocol
from bsat.lab.runner import Material
from bsat.model import NetworkConfig, build_network
from bsat.train import TokenBatches, TrainConfig, predict, train
from bsat.train.batches import fit_tokenizer

NETWORK = NetworkConfig(encoding="l-rope+lpe", n_layers=2, d_model=16, n_heads=4)
CROWD = 50


def look(windows: Windows, tokenizer: BSplineTokenizer) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(B,) each: the largest coefficient, before it is clipped; whether the window is crowded; the least distance of
    two interior knots, in samples."""
    plain = BSplineTokenizer(**{**tokenizer.get_params(), "max_coefficient": None})
    tokens = plain.transform(windows.past(slice(None)).numpy())
    apart = np.diff(tokens.knots[:, tokenizer.degree + 1 : -tokenizer.degree - 1], axis=1)
    return np.abs(tokens.coefficients).max(1), (apart < 1).sum(1) >= CROWD, apart.min(1)


def learn(
    split: Split, tokenizer: BSplineTokenizer, config: TrainConfig, parts: dict[str, np.ndarray]
) -> dict[str, float | None]:
    """Test RMSE of these parts of the windows, if there are any."""
    torch.manual_seed(config.seed)
    network = build_network(NETWORK, tokenizer, lookback=split.train.lookback, horizon=split.train.horizon)
    mean, deviation = torch.from_numpy(split.mean), torch.from_numpy(split.deviation)
    folds = (split.train, split.val.some(config.epoch_windows), split.test)
    train_set, val_set, test_set = (TokenBatches(windows, tokenizer, network, keep=False) for windows in folds)
    train(network, train_set, val_set, config, mean=mean, deviation=deviation)
    errors = [(forecast - test_set.targets(part)).square().mean(1) for part, forecast in predict(network, test_set)]
    squares = torch.cat(errors).double().numpy() * split.deviation[0] ** 2
    return {name: float(np.sqrt(squares[part].mean())) if part.any() else None for name, part in parts.items()}


def describe(row: dict[str, Any]) -> str:
    """A line of the table."""
    sizes = "".join(f"{value:>8.1f}" for value in row["largest"].values())
    crowds = "{train:>7}{val:>5}{test:>6}".format(**row["crowded"])
    knots = "{median:>8.2f}{least:>6.2f}".format(**row["closest"])
    line = f"{row['placement']:9}{row['degree']:>7}{sizes}{crowds}{knots}{row['clipped']:>8.2%}"
    if "rmse" not in row:
        return line
    told = {name: "-" if value is None else f"{value:.2f}" for name, value in row["rmse"].items()}
    told["beyond"] += f" ({row['beyond']})" if row["beyond"] else ""
    return line + "{all:>7}{beyond:>13}{crowded:>9}{others:>8}".format(**told)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset", help="a name of the catalog")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--tokens", type=int, default=180)
    parser.add_argument("--degrees", default="1,2,3,4,5,6")
    parser.add_argument("--train", action="store_true", help="train as well")
    parser.add_argument("--placements", default="paper,safe")
    parser.add_argument("--epochs", type=int, default=6, help="at most so many")
    parser.add_argument("--windows", type=int, default=4800, help="in an epoch")
    args = parser.parse_args()
    placements = args.placements.split(",")
    config = TrainConfig(max_epochs=args.epochs, epoch_windows=args.windows, learning_rate=1e-3, seed=2025)
    split = Material(Protocol(), "cpu").split(args.dataset)
    folds = {"train": split.train, "val": split.val, "test": split.test}
    samples = max(float(w.past(slice(None)).abs().max()) for w in folds.values())
    result: dict[str, Any] = {"dataset": args.dataset, "tokens": args.tokens, "largest_sample": samples, "rows": []}
    factors: dict[str, float] = {}
    for placement in placements:
        fitted = fit_tokenizer(BSplineTokenizer(args.tokens, clip_factor="auto", placement=placement), split.train)
        factors[placement] = fitted.clip_factor_  # type: ignore[attr-defined]
    if not args.json:
        counts = ", ".join(f"{len(windows):,} {fold}" for fold, windows in folds.items())
        searched = ", ".join(f"{factor} ({placement})" for placement, factor in factors.items())
        print(f"{args.dataset}, {args.tokens} tokens; windows: {counts}; largest sample {samples:.2f}")
        print(f"clip factors: {searched}\n")
        print("                    largest coefficient    crowded windows   knots, test  beyond  trained: test RMSE of")
        heads = "train     val    test  train  val  test  median least      10    all       beyond  crowded  others"
        print(f"placement degree   {heads}")
    for placement, degree in product(placements, map(int, args.degrees.split(","))):
        own: dict[str, Any] = {"placement": placement, "clip_factor": factors[placement], "max_coefficient": CLIP_AT}
        tokenizer = BSplineTokenizer(args.tokens, degree, **own)
        found, crowded, closest = {}, {}, {}
        for fold, windows in folds.items():
            found[fold], crowded[fold], closest[fold] = look(windows, tokenizer)
        row: dict[str, Any] = {"degree": degree, **own}
        row["largest"] = {fold: float(of.max()) for fold, of in found.items()}
        row["crowded"] = {fold: int(of.sum()) for fold, of in crowded.items()}
        row["closest"] = {"median": float(np.median(closest["test"])), "least": float(closest["test"].min())}
        row["clipped"] = float((found["test"] > CLIP_AT).mean())
        if args.train:
            parts = {"beyond": found["test"] > row["largest"]["train"], "crowded": crowded["test"]}
            parts = {"all": np.full(len(split.test), True), **parts, "others": ~(parts["beyond"] | parts["crowded"])}
            row |= {"beyond": int(parts["beyond"].sum()), "rmse": learn(split, tokenizer, config, parts)}
        if not args.json:
            print(describe(row), flush=True)
        result["rows"].append(row)
    if args.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
