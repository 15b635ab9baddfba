"""How much device memory does training take? Hugging Face's PatchTST, our plain loop, our captured step, a population.

    python benchmarks/gpu_memory.py [--json]

Batch 128, 720 samples, 192 ahead, d_model 64, 3 layers, 4 heads. Each in a process of its own: networks and data are
made, then a few training steps run, and the peak of what torch had allocated from then on counts, parameters, gradients
and optimizer included. The data set (series, windows, tokens) is left out and printed apart: it grows with the number
of windows, not with the model. For a population the peak is divided by its members. "held" is the most that torch had
taken from the device, for reuse; of this, what captured steps need stays taken while they live. "estimate" is
`pack.training_bytes`, by which packs are sized.

Then the population is trained where only some of it fit (`torch.cuda.set_per_process_memory_fraction`) and nobody said
so: the pack runs out of memory, is split and begun anew. Scores are compared with those of one pack. ("memory for 11"
is 11 times what a model takes once its steps are captured; until then they take more, so that fewer fit.)
"""

from __future__ import annotations

import argparse
import inspect
import json
import subprocess
import sys
from typing import Any

import torch
from torch import Tensor

from bsat import BSplineTokenizer
from bsat.model.stacked import describe
from bsat.train import TrainConfig
from bsat.train.pack import training_bytes
from bsat.train.population import Trained, Trial, train_population
from gpu_training import BATCH, dropping, machine, need_gpu, pack_of, wait, walk_windows
from training import TOKENS, our_step, their_step

D, LAYERS, MANY, STEPS = 64, 3, 16, 3
ROOMS = 11, 5
"""For how many of a population there is memory."""
KINDS = {
    "theirs": "PatchTST",
    "plain": "plain loop",
    "captured": "captured",
    "brief": "captured, 16 bits",
    "population": f"population of {MANY}",
}
TARGETS = {45: 150, 180: 1200}
"""MiB of a captured step by tokens."""


def tensor_bytes(*objects: object) -> int:
    """Of the tensors that objects have as attributes, each counted once."""
    found = {a.data_ptr(): a.nbytes for o in objects for a in vars(o).values() if isinstance(a, Tensor)}
    return sum(found.values())


def measure(kind: str, n: int, device: str) -> dict[str, Any]:
    """In a process of its own."""
    data = estimate = 0
    members = MANY if kind == "population" else 1
    if device != "cuda":
        members = min(members, 2)
    if kind == "theirs":
        step, _ = their_step(D, LAYERS, n, device)
    elif kind == "plain":
        step, _ = our_step(D, LAYERS, n, device, keep=True)
        batches = inspect.getclosurevars(step).nonlocals["batches"]
        data = tensor_bytes(batches.windows, batches._kept)
    else:
        # The networks stay, as they do in a training.
        precision = "bfloat16" if kind == "brief" else "float32"
        windows = walk_windows(STEPS * BATCH, device)
        pack, networks = pack_of(members, dropping(D, LAYERS), n, windows, precision=precision)
        data = tensor_bytes(pack.train, pack.val, pack.train.windows, pack.val.windows)
        shape = describe(networks[0])
        assert shape is not None
        estimate = training_bytes(shape, BATCH, brief=kind == "brief")
    wait(device)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for i in range(2):
        if kind in ("theirs", "plain"):
            for _ in range(STEPS):
                step()
        else:
            pack.run_epoch(i)
    wait(device)
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else data
    held = torch.cuda.max_memory_reserved() if device == "cuda" else data
    return {
        "kind": kind,
        "tokens": n,
        "members": members,
        "peak_mib": (peak - data) / members / 2**20,
        "held_mib": (held - data) / members / 2**20,
        "data_mib": data / 2**20,
        "estimate_mib": estimate / 2**20,
    }


def split(n: int, room: int, device: str) -> dict[str, Any]:
    """Train a population as one pack, and again with memory for some of it only."""
    windows, epochs = walk_windows(STEPS * BATCH, device), 2
    configs = [TrainConfig(seed=seed, max_epochs=epochs) for seed in range(MANY if device == "cuda" else 2)]
    trials = [Trial(BSplineTokenizer(n), dropping(D, LAYERS), config) for config in configs]

    def train() -> list[Trained]:
        deviation = torch.ones(1, dtype=torch.float64, device=device)
        done = train_population(trials, windows, windows, deviation=deviation, memory=2**50)
        return sorted(done, key=lambda trained: trained.index)

    whole = train()
    if device == "cuda":
        torch.cuda.empty_cache()
        held, (_, total) = torch.cuda.memory_reserved(), torch.cuda.mem_get_info()
        each = max(trained.memory or 0 for trained in whole)
        torch.cuda.set_per_process_memory_fraction((held + (room + 0.5) * each) / total)
    parts = train()
    pairs = [
        (one.val_rmse, two.val_rmse)
        for a, b in zip(whole, parts, strict=True)
        for one, two in zip(a.history.epochs, b.history.epochs, strict=True)
    ]
    return {
        "tokens": n,
        "room": room,
        "pack": max(trained.pack for trained in whole),
        "packs": sorted({trained.pack for trained in parts}),
        "difference": max(abs(one / two - 1) for one, two in pairs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--device", default="cuda", help=argparse.SUPPRESS)
    parser.add_argument("--child", nargs=2, metavar=("KIND", "TOKENS"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    need_gpu(args.device)
    if args.child:
        kind, n = args.child[0], int(args.child[1])
        found = split(n, int(kind), args.device) if kind.isdigit() else measure(kind, n, args.device)
        print(json.dumps(found))
        return

    def apart(kind: str, n: int) -> dict[str, Any]:
        """`measure` or `split` in a process of its own."""
        command = [sys.executable, __file__, "--device", args.device, "--child", kind, str(n)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            sys.exit(done.stderr)
        return json.loads(done.stdout.splitlines()[-1])

    result: dict[str, Any] = {"machine": machine(args.device), "rows": []}
    if not args.json:
        print(f"{result['machine']}\nMiB a model: batch {BATCH}, d={D}, {LAYERS} layers\n")
        print(f"tokens  {'':18}{'peak':>9}{'held':>9}{'estimate':>10}{'data set':>10}")
    for n in TOKENS if args.device == "cuda" else TOKENS[:1]:
        for kind, name in KINDS.items():
            row = apart(kind, n)
            result["rows"].append(row)
            if not args.json:
                estimate = f"{row['estimate_mib']:>10,.1f}" if row["estimate_mib"] else f"{'':10}"
                cells = f"{row['peak_mib']:>9,.1f}{row['held_mib']:>9,.1f}{estimate}{row['data_mib']:>10.2f}"
                print(f"{n:>6}  {name:18}{cells}", flush=True)
    peaks = {(r["kind"], r["tokens"]): r["peak_mib"] for r in result["rows"]}
    result["targets"] = []
    for n, most in TARGETS.items():
        if ("captured", n) in peaks:
            got = peaks["captured", n]
            aim = peaks["theirs", n]
            result["targets"].append({"tokens": n, "wanted": most, "got": got, "met": got <= most, "aim": aim})
    result["split"] = [apart(str(room), TOKENS[0]) for room in ROOMS]
    if args.json:
        print(json.dumps(result))
        return
    for t in result["targets"]:
        print(
            f"captured, {t['tokens']} tokens: {t['got']:,.0f} MiB, wanted at most {t['wanted']:,}: {t['met']} "
            f"(the aim, PatchTST's: {t['aim']:,.0f})"
        )
    for s in result["split"]:
        print(
            f"a pack of {s['pack']} with memory for {s['room']}, {s['tokens']} tokens: trained in packs of "
            f"{' and '.join(map(str, s['packs']))}, scores apart by {s['difference']:.1e} at most"
        )


if __name__ == "__main__":
    main()
