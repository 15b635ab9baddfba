"""How fast is a training step? BSAT's network beside Hugging Face's PatchTST, equal sizes, tokens and dropouts.

    python benchmarks/training.py [--json] [--quick] [--threads 2] [--device cpu]

A step is forward, MSE, backward, clipping of the gradient norm to 1 and AdamW, on 128 windows of 720 samples, 192
steps ahead. Ours takes its tokens by index, as `train` does, and makes them on the fly in a second column. Theirs has
a flatten head as ours has (`pooling_type=None`), patches of twice the stride, batch norm, and its own defaults
elsewhere. Both run in turns in one process; the best of several rounds counts. Ours also turns queries and keys
(L-RoPE) and hands attention scores from layer to layer, which theirs does not.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from bsat import BSplineTokenizer
from bsat.data.folds import fold_edges
from bsat.data.windows import make_windows
from bsat.model import NetworkConfig, build_network
from bsat.train import TokenBatches, TrainConfig
from bsat.train.batches import run
from bsat.train.loop import make_optimizer, mse

L, H, BATCH, HEADS, DROPOUT = 720, 192, 128, 4, 0.1
SIZES = ((16, 2), (64, 3), (128, 4))
TOKENS = (45, 90, 180)


def our_step(d: int, layers: int, n: int, device: str, *, keep: bool) -> tuple[Callable[[], None], int]:
    """A step of our training, and the number of parameters."""
    series = torch.from_numpy(np.random.default_rng(0).normal(size=6000).cumsum() * 0.03).float().to(device)
    windows = make_windows(series, np.array([0, 6000]), fold_edges(np.array([6000])), 0, lookback=L, horizon=H)
    tokenizer = BSplineTokenizer(n)
    config = NetworkConfig(
        d_model=d, n_layers=layers, n_heads=HEADS, dropout=DROPOUT, ff_dropout=DROPOUT, attention_dropout=DROPOUT
    )
    network = build_network(config, tokenizer, lookback=L, horizon=H).to(device).train()
    batches = TokenBatches(windows, tokenizer, network, keep=keep)
    optimizer = make_optimizer(network, TrainConfig())
    parameters = list(network.parameters())

    def step() -> None:
        index = torch.randint(len(batches), (BATCH,), device=device)
        loss = mse(run(network, batches.inputs(index)), batches.targets(index), gaps=False)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True)
        optimizer.step()

    return step, sum(p.numel() for p in parameters)


def their_step(d: int, layers: int, n: int, device: str) -> tuple[Callable[[], None], int]:
    """A step of Hugging Face's PatchTST, and the number of parameters."""
    from transformers import PatchTSTConfig, PatchTSTForPrediction

    config = PatchTSTConfig(
        num_input_channels=1,
        context_length=L,
        prediction_length=H,
        patch_length=2 * L // n,
        patch_stride=L // n,
        d_model=d,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        ffn_dim=4 * d,
        attention_dropout=DROPOUT,
        ff_dropout=DROPOUT,
        path_dropout=DROPOUT,
        positional_dropout=DROPOUT,
        pooling_type=None,
        loss="mse",
    )
    network: torch.nn.Module = PatchTSTForPrediction(config)
    network.to(device).train()
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-4)
    past, future = torch.randn(BATCH, L, 1, device=device), torch.randn(BATCH, H, 1, device=device)

    def step() -> None:
        loss = network(past_values=past, future_values=future).loss
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()

    return step, sum(p.numel() for p in network.parameters())


def best_times(steps: list[Callable[[], None]], rounds: int, device: str) -> list[float]:
    """Seconds of each, the best of several rounds in turns."""
    best = [float("inf")] * len(steps)
    for number in range(rounds + 1):
        for i, step in enumerate(steps):
            if device != "cpu":
                torch.cuda.synchronize()
            start = time.perf_counter()
            step()
            if device != "cpu":
                torch.cuda.synchronize()
            if number > 0:  # the first warms up
                best[i] = min(best[i], time.perf_counter() - start)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="45 tokens only, fewer rounds")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of torch")
    parser.add_argument("--device", default="cpu", help='"cpu" or "cuda"')
    args = parser.parse_args()

    torch.manual_seed(0)
    torch.set_num_threads(args.threads)
    rows: list[dict[str, Any]] = []
    if not args.json:
        print(f"torch {torch.__version__}, {args.device}, {args.threads} threads; ms a step of {BATCH} windows")
        print(f"{'':14}{'tokens':>8}{'theirs':>10}{'ours':>10}{'on the fly':>12}{'windows/s':>12}{'ratio':>8}")
    for d, layers in SIZES:
        for n in TOKENS[:1] if args.quick else TOKENS:
            theirs, their_size = their_step(d, layers, n, args.device)
            ours, our_size = our_step(d, layers, n, args.device, keep=True)
            lazy, _ = our_step(d, layers, n, args.device, keep=False)
            rounds = max(4, (8 if args.quick else 24) * 45 // n)
            t = best_times([theirs, ours, lazy], rounds, args.device)
            row = {
                "d_model": d,
                "layers": layers,
                "tokens": n,
                "their_parameters": their_size,
                "our_parameters": our_size,
                "their_step_s": t[0],
                "our_step_s": t[1],
                "our_step_on_the_fly_s": t[2],
                "their_windows_per_s": BATCH / t[0],
                "our_windows_per_s": BATCH / t[1],
                "ratio": t[0] / t[1],
                "ratio_on_the_fly": t[0] / t[2],
            }
            rows.append(row)
            if not args.json:
                print(
                    f"d={d:<4} layers={layers}{n:>8}{1e3 * t[0]:>10.1f}{1e3 * t[1]:>10.1f}{1e3 * t[2]:>12.1f}"
                    f"{BATCH / t[1]:>12,.0f}{t[0] / t[1]:>8.2f}",
                    flush=True,
                )
    least = min(row["ratio"] for row in rows)
    if args.json:
        print(json.dumps({"rows": rows, "least_ratio": least}))
    else:
        print(f"least ratio {least:.2f}" + (" (target: 1.3)" if args.device == "cpu" else ""))


if __name__ == "__main__":
    main()
