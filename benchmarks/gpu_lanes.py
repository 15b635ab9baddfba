"""What does a search gain from several packs under way at a time on one GPU, and is it the same training?

    python benchmarks/gpu_lanes.py [--json] [--quick]

Configurations drawn from the paper's space (those of gpu_search.py), trained for two epochs of 84 steps on windows of a
random walk: seconds by the number of packs under way (`lanes` of `train_population`), kernels compiled before. `apart`
is the largest relative difference of any loss or validation RMSE from those of one pack after another.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import torch

from bsat.train.population import Trained, train_population
from gpu_search import draw
from gpu_training import clear, machine, need_gpu, wait, walk_windows
from training import BATCH

STEPS, EPOCHS = 84, 2
LANES = (1, 2, 3, 4, 6, 8)


def curves(trained: list[Trained]) -> torch.Tensor:
    """Losses and scores of all, by their places in the list."""
    ordered = sorted(trained, key=lambda t: t.index)
    return torch.tensor([x for t in ordered for e in t.history.epochs for x in (e.loss, e.val_rmse)])


def measure(n: int, trials: int, precision: str, lanes: tuple[int, ...]) -> list[dict[str, Any]]:
    """Rows of one number of tokens."""
    windows, val = (walk_windows(steps * BATCH, "cuda") for steps in (STEPS, STEPS // 4))
    deviation = torch.ones(1, dtype=torch.float64, device="cuda")
    rows, first = [], torch.empty(0)
    for number, count in enumerate((lanes[0], *lanes)):  # the first compiles
        drawn = draw(trials, n, 0, EPOCHS)
        wait("cuda")
        began = time.perf_counter()
        found = list(train_population(drawn, windows, val, deviation=deviation, precision=precision, lanes=count))
        seconds, these = time.perf_counter() - began, curves(found)
        first = first if number else these
        apart = float(((these - first).abs() / first.abs()).max())
        if number:
            rows.append({"tokens": n, "precision": precision, "lanes": count, "seconds": seconds, "apart": apart})
        clear("cuda")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="fewer configurations, 16 bits only")
    args = parser.parse_args()
    need_gpu("cuda")
    trials = 24 if args.quick else 72
    rows = []
    if not args.json:
        print(f"{machine('cuda')}\n{trials} configurations\n\ntokens  precision  lanes  seconds  faster     apart")
    for n in (45, 180):
        for precision in ("bfloat16",) if args.quick else ("float32", "bfloat16"):
            some = measure(n, trials, precision, (1, 2, 4) if args.quick else LANES)
            rows += some
            for row in [] if args.json else some:
                ratio = some[0]["seconds"] / row["seconds"]
                cells = f"{row['lanes']:>7}{row['seconds']:>9.2f}{ratio:>7.2f}x{row['apart']:>10.1e}"
                print(f"{n:>6}  {precision:9}{cells}", flush=True)
    if args.json:
        print(json.dumps({"machine": machine("cuda"), "trials": trials, "rows": rows}))


if __name__ == "__main__":
    main()
