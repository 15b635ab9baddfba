"""What do several processes gain on one GPU, each with a search of its own?

    python benchmarks/gpu_processes.py [--json] [--processes 1,2,4,8] [--tokens 45]

Every process trains 24 configurations of the paper's space (those of gpu_search.py), in 16 bits, for two epochs of 84
steps on windows of a random walk: once to compile and to load, and again, for the clock, when all have come that far.
`work` is how much more is done in the same time than by one alone.

Without NVIDIA's MPS processes take turns; with it (`nvidia-cuda-mps-control -d` before) they run at the same time. The
table names the variable by which they find it, if it is set; `nvidia-smi` marks those that did as M+C.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from bsat.train.population import train_population
from gpu_search import draw
from gpu_training import machine, need_gpu, wait, walk_windows
from training import BATCH

TRIALS, STEPS, EPOCHS, PATIENCE = 24, 84, 2, 300.0


def work(folder: Path, count: int, tokens: int, device: str, steps: int) -> None:
    """What one process does; it prints its seconds."""
    windows, val = (walk_windows(number * BATCH, device) for number in (steps, -(-steps // 4)))
    deviation = torch.ones(1, dtype=torch.float64, device=device)
    precision = "bfloat16" if device == "cuda" else "float32"
    trials = TRIALS if device == "cuda" else 2

    def train() -> None:
        list(train_population(draw(trials, tokens, 0, EPOCHS), windows, val, deviation=deviation, precision=precision))
        wait(device)

    train()
    (folder / str(os.getpid())).touch()
    patience = time.monotonic() + PATIENCE
    while len(list(folder.iterdir())) < count:
        if time.monotonic() > patience:
            raise SystemExit(f"{count} processes should be here by now; one of them must have ended")
        time.sleep(0.01)
    began = time.perf_counter()
    train()
    print(time.perf_counter() - began)


def measure(count: int, tokens: int, device: str, steps: int) -> dict[str, Any]:
    """The slowest of so many processes at once."""
    with tempfile.TemporaryDirectory() as folder:
        mine = ["--inside", folder, "--processes", str(count), "--tokens", str(tokens), "--steps", str(steps)]
        command = [sys.executable, __file__, *mine, "--device", device]
        running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(count)]
        said = [process.communicate()[0] for process in running]
    if any(process.returncode for process in running):
        raise SystemExit(f"one of {count} processes failed; what it said is above")
    return {"processes": count, "seconds": max(map(float, said))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--processes", default="1,2,4,8", help="how many at a time")
    parser.add_argument("--tokens", type=int, default=45)
    parser.add_argument("--device", default="cuda", help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, default=STEPS, help=argparse.SUPPRESS)
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    need_gpu(args.device)
    if args.inside is not None:
        work(args.inside, int(args.processes), args.tokens, args.device, args.steps)
        return
    mps = os.environ.get("CUDA_MPS_PIPE_DIRECTORY")
    if not args.json:
        print(
            f"{machine(args.device)}; {args.tokens} tokens; CUDA_MPS_PIPE_DIRECTORY={mps}\n\nprocesses  seconds   work"
        )
    rows: list[dict[str, Any]] = []
    for word in args.processes.split(","):
        row = measure(int(word), args.tokens, args.device, args.steps)
        rows.append(row)
        row["work"] = row["processes"] / rows[0]["processes"] * rows[0]["seconds"] / row["seconds"]
        if not args.json:
            print(f"{row['processes']:>9}{row['seconds']:>9.2f}{row['work']:>6.2f}x", flush=True)
    if args.json:
        print(json.dumps({"machine": machine(args.device), "mps": mps, "tokens": args.tokens, "rows": rows}))


if __name__ == "__main__":
    main()
