"""Do rotary positions in samples carry over to another year? The worst selected runs of a cell, trained again.

    BSAT_DATA=... python benchmarks/rotary_unit.py docs/results/runs [--runs 2] [--json]

Of BSAT with L-RoPE LPE on ETTh1 at 45 tokens, the selected runs with the largest test RMSE are trained again on the
CPU, once with `rotary_unit="samples"`, as the paper has it, and once with "tokens". Each training takes some minutes.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import torch

from bsat.data import catalog
from bsat.data.folds import fold_edges
from bsat.data.frames import to_panel
from bsat.data.windows import Split, split_windows
from bsat.lab import read, read_protocol
from bsat.lab.models import MODELS
from bsat.model import NetworkConfig, build_network
from bsat.search import Data
from bsat.search.engines import train_alone
from bsat.train import Epoch, TokenBatches, TrainConfig, evaluate
from bsat.train.batches import fit_tokenizer

DATASET, MODEL, TOKENS, ENCODING = "etth1", "bsat", 45, "l-rope+lpe"


class Quiet:
    """Nobody listens."""

    def epoch(self, number: int, last: Epoch, best: float) -> bool:
        """Never ends it."""
        return False

    def alive(self, epoch: int) -> None:
        """Is not told."""


def load(lookback: int, horizon: int) -> Split:
    """The folds."""
    panel = to_panel(catalog.load(DATASET), freq=catalog.find_dataset(DATASET).freq)
    edges = fold_edges(panel.lengths)
    return split_windows(panel, edges, lookback=lookback, horizon=horizon, least=lookback, device=torch.device("cpu"))


def train_again(run: Any, split: Split, protocol: Any, unit: str) -> dict[str, float]:
    """Validation and test RMSE of a run's configuration with positions in this unit."""
    model = MODELS[MODEL]
    tokenizer = fit_tokenizer(model.make_tokenizer(TOKENS), split.train)
    trial = model.space(protocol.space).to_trial(
        run.configuration,
        tokenizer,
        NetworkConfig(encoding=ENCODING, rotary_unit=unit),
        TrainConfig(max_epochs=protocol.max_epochs, seed=int(run.seed)),
    )
    mean, deviation = torch.from_numpy(split.mean), torch.from_numpy(split.deviation)
    done = train_alone(0, trial, Data(split.train, split.val, mean, deviation), Quiet())
    network = build_network(trial.network, trial.tokenizer, lookback=protocol.lookback, horizon=protocol.horizon)
    network.load_state_dict(done.state, strict=False)
    test = evaluate(network, TokenBatches(split.test, trial.tokenizer, network, keep=False), mean, deviation)
    return {"val_rmse": done.rmse, "test_rmse": test.rmse, "epochs": len(done.history.epochs)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", help="a folder of runs")
    parser.add_argument("--runs", type=int, default=2, help="how many to train again (default: 2)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    protocol, runs = read_protocol(args.store), read(args.store, curves=False)
    for name, value in (("dataset", DATASET), ("model", MODEL), ("tokens", TOKENS), ("encoding", ENCODING)):
        runs = runs[runs[name] == value]
    worst = runs[runs["why"] == "selected"].nlargest(args.runs, "test_rmse")
    split, rows = load(protocol.lookback, protocol.horizon), []
    if not args.json:
        print("layers   d heads   stored val, test   in samples val, test   in tokens val, test")
    for run in worst.itertuples():
        point: Any = run.configuration
        row: dict[str, Any] = {name: point[name] for name in ("n_layers", "d_model", "n_heads")}
        row["stored"] = {"val_rmse": run.val_rmse, "test_rmse": run.test_rmse}
        for unit in ("samples", "tokens"):
            row[unit] = train_again(run, split, protocol, unit)
        rows.append(row)
        if not args.json:
            pairs = [(row[name]["val_rmse"], row[name]["test_rmse"]) for name in ("stored", "samples", "tokens")]
            scores = "".join(f"{val:>13.3f}{test:>8.3f}" for val, test in pairs)
            print(f"{row['n_layers']:>6}{row['d_model']:>4}{row['n_heads']:>6}{scores}", flush=True)
    if args.json:
        print(json.dumps({"rows": rows}))


if __name__ == "__main__":
    main()
