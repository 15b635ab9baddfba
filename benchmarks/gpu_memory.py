"""How much device memory does training take? Hugging Face's PatchTST, our plain loop, our captured step, a population.

    python benchmarks/gpu_memory.py [--json]

Batch 128, 720 samples, 192 ahead, d_model 64, 3 layers, 4 heads. Each in a process of its own: networks and data are
made, then a few training steps run, and the peak of what torch had allocated from then on counts, parameters, gradients
and optimizer included. The data set (series, windows, tokens) is left out and printed apart: it grows with the number
of windows, not with the model. For a population the peak is divided by its members. "held" is the most that torch had
taken from the device, for reuse; of this, what captured steps need stays taken while they live. "estimate" is
`pack.training_bytes`, by which packs are sized.
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

from bsat.model.stacked import describe
from bsat.train.pack import training_bytes
from gpu_training import BATCH, dropping, machine, need_gpu, pack_of, wait, walk_windows
from training import TOKENS, our_step, their_step

D, LAYERS, MANY, STEPS = 64, 3, 16, 3
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--device", default="cuda", help=argparse.SUPPRESS)
    parser.add_argument("--child", nargs=2, metavar=("KIND", "TOKENS"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    need_gpu(args.device)
    if args.child:
        print(json.dumps(measure(args.child[0], int(args.child[1]), args.device)))
        return

    result: dict[str, Any] = {"machine": machine(args.device), "rows": []}
    if not args.json:
        print(f"{result['machine']}\nMiB a model: batch {BATCH}, d={D}, {LAYERS} layers\n")
        print(f"tokens  {'':18}{'peak':>9}{'held':>9}{'estimate':>10}{'data set':>10}")
    for n in TOKENS if args.device == "cuda" else TOKENS[:1]:
        for kind, name in KINDS.items():
            command = [sys.executable, __file__, "--device", args.device, "--child", kind, str(n)]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                sys.exit(done.stderr)
            row = json.loads(done.stdout.splitlines()[-1])
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
    if args.json:
        print(json.dumps(result))
        return
    for t in result["targets"]:
        print(
            f"captured, {t['tokens']} tokens: {t['got']:,.0f} MiB, wanted at most {t['wanted']:,}: {t['met']} "
            f"(the aim, PatchTST's: {t['aim']:,.0f})"
        )


if __name__ == "__main__":
    main()
