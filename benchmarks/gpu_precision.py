"""Training steps with activations of 16 bits against float32: how much faster, and how far apart the gradients are.

    python benchmarks/gpu_precision.py [--json] [--quick]

Packs of networks as a search makes them: few of each shape, with feed-forward factors of 2, 4, 6 and 8. A step is 128
windows of 720 samples for each model; the time is that of a model. `gradient` is the largest relative difference of any
parameter's gradient in the first step, weights and biases apart from the rotary bases; `bases` is theirs.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from typing import Any

import torch

from bsat import BSplineTokenizer
from bsat.data.windows import Windows
from bsat.model import NetworkConfig, build_network
from bsat.train import TrainConfig
from bsat.train.bank import Bank
from bsat.train.pack import Pack
from gpu_training import clear, machine, need_gpu, walk_windows
from training import BATCH, H, L, best_times

STEPS, FACTORS = 10, (2, 4, 6, 8)
SHAPES = [(16, 4), (16, 8), (32, 4), (32, 8), (64, 4), (64, 8), (128, 4), (128, 8)]
"""d_model, heads"""
TOKENS, LAYERS, MEMBERS = (45, 90, 180), 3, 4


def make_pack(d: int, heads: int, n: int, precision: str, windows: Windows) -> Pack:
    """Networks of one shape that differ in their feed-forward widths and their seeds."""
    device, tokenizer = windows.series.device, BSplineTokenizer(n)
    torch.manual_seed(0)
    networks = [
        build_network(
            NetworkConfig(
                d_model=d, n_heads=heads, n_layers=LAYERS, ff_factor=FACTORS[m % len(FACTORS)], dropout=0.1,
                ff_dropout=0.1, attention_dropout=0.1,
            ), tokenizer, lookback=L, horizon=H,
        ).to(device)
        for m in range(MEMBERS)
    ]  # fmt: skip
    train, val = (Bank(some, [(tokenizer, networks[0])]) for some in (windows, windows.some(BATCH)))
    configs = [TrainConfig(seed=seed, batch_size=BATCH) for seed in range(MEMBERS)]
    deviation = torch.ones(1, dtype=torch.float64, device=device)
    return Pack(networks, configs, train, val, [0] * MEMBERS, deviation=deviation, precision=precision)


def first_gradient(pack: Pack) -> dict[str, torch.Tensor]:
    """Of every parameter, (M, numbers)."""
    assert pack.fused is not None
    pack.order.copy_(torch.arange(pack.order.shape[1], device=pack.device).expand(len(pack), -1))
    pack.done.zero_()
    pack._train_step(BATCH)
    return {name: g.flatten(1).clone() for name, g in pack.fused.g.items()}


def differences(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> tuple[float, float]:
    """The largest, of weights and biases and of the bases, relative to the gradient or a thousandth of the whole."""
    whole = torch.cat(list(one.values()), 1).norm(dim=1)
    worst = {True: 0.0, False: 0.0}
    for name, g in one.items():
        error = (two[name] - g).norm(dim=1) / (g.norm(dim=1) + 1e-3 * whole)
        kind = name.endswith("log_base")
        worst[kind] = max(worst[kind], float(error.max()))
    return worst[False], worst[True]


def measure(d: int, heads: int, n: int, rounds: int) -> dict[str, Any]:
    """One row."""
    windows = walk_windows(STEPS * BATCH, "cuda")
    exact, brief = (make_pack(d, heads, n, precision, windows) for precision in ("float32", "bfloat16"))
    gradient, bases = differences(first_gradient(exact), first_gradient(brief))
    times = best_times([partial(pack.run_epoch, 0) for pack in (exact, brief)], rounds, "cuda")
    row = {"d_model": d, "heads": heads, "tokens": n, "gradient": gradient, "bases": bases}
    row |= dict(zip(("float32_ms", "bfloat16_ms"), (1e3 * t / STEPS / MEMBERS for t in times), strict=True))
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="fewer sizes and rounds")
    args = parser.parse_args()
    need_gpu("cuda")
    rows = []
    if not args.json:
        print(f"{machine('cuda')}\nms a step of a model, {MEMBERS} together, {LAYERS} layers\n")
        print("  d heads tokens   float32  bfloat16           gradient  bases")
    for d, heads in SHAPES:
        for n in TOKENS[::2] if args.quick else TOKENS:
            row = measure(d, heads, n, 2 if args.quick else 4)
            rows.append(row)
            clear("cuda")
            if not args.json:
                ratio = row["float32_ms"] / row["bfloat16_ms"]
                print(
                    f"{d:>3}{heads:>6}{n:>7}{row['float32_ms']:>10.3f}{row['bfloat16_ms']:>10.3f}{ratio:>7.2f}x"
                    f"{row['gradient']:>12.3f}{row['bases']:>7.3f}",
                    flush=True,
                )
    if args.json:
        print(json.dumps({"machine": machine("cuda"), "rows": rows}))


if __name__ == "__main__":
    main()
