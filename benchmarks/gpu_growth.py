"""How do the costs of training on a GPU grow, with tokens, lookback and the number of series?

    python benchmarks/gpu_growth.py [--json]

* ms a captured step (128 windows of 720 samples, 192 ahead, d_model 64, 3 layers) as tokens grow;
* making the tokens of 8,192 windows (45 each) and training on them for an epoch, as the lookback grows;
* an epoch of `train` with the default network, validation included, as the series get more: random walks of 2,000
  samples, lookback 720, horizon 96, at most 100,000 windows an epoch, drawn and tokenized anew if there are more.

Kernels are compiled before the clock starts. Best of several; of the epochs also the first, in which steps are
captured, and what comes before it.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from bsat import BSplineTokenizer
from bsat.data.folds import fold_edges
from bsat.data.windows import make_windows
from bsat.model import NetworkConfig, build_network
from bsat.train import TokenBatches, TrainConfig, train
from bsat.train.bank import Bank
from bsat.train.settings import epoch_steps
from gpu_training import BATCH, STEPS, H, L, clear, dropping, machine, need_gpu, pack_of, wait, walk_windows
from training import best_times

TOKENS = (22, 45, 90, 180, 360)
LOOKBACKS = (720, 2_000, 5_000, 20_000)
SERIES = (1, 10, 100, 1_000)
WINDOWS = 8192


def by_tokens(counts: tuple[int, ...], rounds: int, device: str) -> list[dict[str, Any]]:
    """A captured step."""
    rows = []
    windows = walk_windows(STEPS * BATCH, device)
    for n in counts:
        pack, _ = pack_of(1, dropping(64, 3), n, windows)
        (took,) = best_times([partial(pack.run_epoch, 0)], rounds, device)
        rows.append({"tokens": n, "step_s": took / STEPS, "token_s": took / STEPS / (BATCH * n)})
        del pack
        clear(device)
    return rows


def by_lookback(lookbacks: tuple[int, ...], count: int, rounds: int, device: str) -> list[dict[str, Any]]:
    """Tokens, and an epoch on them."""
    rows = []
    for lookback in lookbacks:
        windows = walk_windows(count, device, lookback=lookback)
        pack, networks = pack_of(1, dropping(64, 3), 45, windows)

        source = BSplineTokenizer(45), networks[0]
        jobs: list[Callable[[], Any]] = [partial(Bank, windows, [source]), partial(pack.run_epoch, 0)]
        tokens, epoch = best_times(jobs, rounds, device)
        rows.append(
            {
                "lookback": lookback,
                "windows": count,
                "tokens_s": tokens,
                "epoch_s": epoch,
                "samples_per_s": count * lookback / tokens,
                "windows_per_s": count / (tokens + epoch),
            }
        )
        del pack, jobs
        clear(device)
    return rows


def by_series(counts: tuple[int, ...], epochs: int, device: str) -> list[dict[str, Any]]:
    """Epochs of `train`."""
    rows = []
    length, horizon = 2000, 96
    for count in counts:
        walks = np.random.default_rng(0).normal(size=(count, length)).cumsum(1)
        edges = fold_edges(np.full(count, length))
        part = walks[:, : edges[0, 1]]
        scaled = (walks - part.mean(1, keepdims=True)) / part.std(1, keepdims=True)
        series = torch.from_numpy(scaled.ravel().astype(np.float32)).to(device)
        offsets = np.arange(count + 1) * length
        config = TrainConfig(max_epochs=epochs, epoch_windows=100_000)
        train_windows, val_windows = (
            make_windows(series, offsets, edges, fold, lookback=L, horizon=horizon) for fold in (0, 1)
        )
        tokenizer = BSplineTokenizer(45)
        network = build_network(NetworkConfig(), tokenizer, lookback=L, horizon=horizon).to(device)
        sets = [
            TokenBatches(windows, tokenizer, network, keep=False)
            for windows in (train_windows, val_windows.some(config.epoch_windows))
        ]
        scaling = torch.zeros(count, dtype=torch.float64), torch.ones(count, dtype=torch.float64)
        mean, deviation = (a.to(device) for a in scaling)
        wait(device)
        began = time.perf_counter()
        history = train(network, sets[0], sets[1], config, mean=mean, deviation=deviation)
        wait(device)
        took = time.perf_counter() - began
        seconds = [e.seconds for e in history.epochs]
        drawn = min(len(train_windows), 100_000)
        rows.append(
            {
                "series": count,
                "windows": len(train_windows),
                "drawn": drawn,
                "steps": epoch_steps(len(train_windows), config),
                "tokens_s": took - sum(seconds),
                "first_s": seconds[0],
                "epoch_s": min(seconds[1:] or seconds),
                "windows_per_s": drawn / min(seconds[1:] or seconds),
            }
        )
        del network, sets
        clear(device)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--device", default="cuda", help=argparse.SUPPRESS)
    args = parser.parse_args()
    need_gpu(args.device)

    torch.manual_seed(0)
    here = args.device == "cuda"
    result: dict[str, Any] = {"machine": machine(args.device)}
    if not args.json:
        print(f"{result['machine']}\nbatch {BATCH}; times are the best of several\n")
    result["tokens"] = by_tokens(TOKENS if here else TOKENS[:2], 12 if here else 1, args.device)
    if not args.json:
        print(f"tokens   ms a captured step   ns a token   (d=64, 3 layers, horizon {H})")
        for r in result["tokens"]:
            print(f"{r['tokens']:>6}{1e3 * r['step_s']:>21.3f}{1e9 * r['token_s']:>13.1f}")
    lookbacks, windows = (LOOKBACKS, WINDOWS) if here else (LOOKBACKS[:2], 256)
    result["lookback"] = by_lookback(lookbacks, windows, 5 if here else 1, args.device)
    if not args.json:
        print(f"\nlookback   tokens, s   epoch, s   windows/s   million samples/s   ({windows:,} windows, 45 tokens)")
        for r in result["lookback"]:
            print(
                f"{r['lookback']:>8,}{r['tokens_s']:>12.4f}{r['epoch_s']:>11.4f}{r['windows_per_s']:>12,.0f}"
                f"{r['samples_per_s'] / 1e6:>20,.0f}"
            )
    if here:
        by_series((1,), 1, args.device)  # compiles
    result["series"] = by_series(SERIES if here else SERIES[:1], 4 if here else 2, args.device)
    if args.json:
        print(json.dumps(result))
        return
    print("\nseries   windows   an epoch   steps   before, s   first, s   epoch, s   windows/s   (default network)")
    for r in result["series"]:
        print(
            f"{r['series']:>6,}{r['windows']:>10,}{r['drawn']:>11,}{r['steps']:>8,}{r['tokens_s']:>12.3f}"
            f"{r['first_s']:>11.3f}{r['epoch_s']:>11.4f}{r['windows_per_s']:>12,.0f}"
        )


if __name__ == "__main__":
    main()
