"""Where the time of a training step goes on a GPU, kernel by kernel, and what packs gain from running side by side.

    python benchmarks/gpu_kernels.py [--json] [--quick] [--precision bfloat16]

The packs are those of gpu_precision.py. The times of kernels are the profiler's, in microseconds of one model's step;
`step` is that of the captured step by the clock, which is more where kernels wait for each other and less where they
overlap. `side by side`: how much less time the packs of a number of tokens take when each has a stream of its own than
one after another.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from bsat.model.fused import PRECISIONS
from bsat.train.pack import Pack
from gpu_precision import MEMBERS, SHAPES, STEPS, TOKENS, make_pack
from gpu_training import clear, machine, need_gpu, walk_windows
from training import BATCH, best_times

SHOWN = 24


def kernels_of(pack: Pack) -> dict[str, float]:
    """Microseconds of a model's step by kernel, the dearest first."""
    pack.done.zero_()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(STEPS - 1):
            pack._train_step(BATCH)
        torch.cuda.synchronize()
    times: defaultdict[str, float] = defaultdict(float)
    for event in seen.key_averages():
        times[event.key.split("(")[0].split("<")[0][-40:]] += event.self_device_time_total / (STEPS - 1) / MEMBERS
    return {name: time for name, time in sorted(times.items(), key=lambda item: -item[1]) if time > 0}


def run_all(packs: list[Pack], streams: list[torch.cuda.Stream]) -> None:
    """An epoch of every pack, each on its stream."""
    for pack, stream in zip(packs, streams, strict=True):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            pack.run_epoch(0)


def show(n: int, rows: list[dict[str, Any]]) -> None:
    """A column for each pack, a line for each kernel."""
    shapes = [f"{row['d_model']}/{row['heads']}" for row in rows]
    print(f"\n{f'{n} tokens; d/heads':42}" + "".join(f"{shape:>8}" for shape in shapes))
    times = [row["kernels_us"] for row in rows]
    names = sorted(set().union(*times), key=lambda name: -sum(some.get(name, 0.0) for some in times))
    lines = [(name, [some.get(name, 0.0) for some in times]) for name in names[:SHOWN]]
    lines += [("all kernels", [sum(some.values()) for some in times]), ("step", [row["step_us"] for row in rows])]
    for name, values in lines:
        print(f"{name:42}" + "".join(f"{value:>8.1f}" for value in values))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="fewer sizes and rounds")
    parser.add_argument("--precision", choices=PRECISIONS, default="bfloat16", help="of the activations")
    args = parser.parse_args()
    need_gpu("cuda")
    rounds, shapes = (2, [(16, 8), (64, 4), (128, 4)]) if args.quick else (4, SHAPES)
    windows = walk_windows(STEPS * BATCH, "cuda")
    rows: list[dict[str, Any]] = []
    gains: dict[int, float] = {}
    for n in TOKENS[::2] if args.quick else TOKENS:
        packs = [make_pack(d, heads, n, args.precision, windows) for d, heads in shapes]
        steps: list[Callable[[], None]] = [partial(pack.run_epoch, 0) for pack in packs]
        times = best_times(steps, rounds, "cuda")
        for (d, heads), pack, time in zip(shapes, packs, times, strict=True):
            row = {"d_model": d, "heads": heads, "tokens": n, "step_us": 1e6 * time / STEPS / MEMBERS}
            rows.append(row | {"kernels_us": kernels_of(pack)})
        here, aside = torch.cuda.current_stream(), [torch.cuda.Stream() for _ in packs]
        after, beside = best_times(
            [partial(run_all, packs, [here] * len(packs)), partial(run_all, packs, aside)], rounds, "cuda"
        )
        gains[n] = after / beside
        del packs, steps
        clear("cuda")
    if args.json:
        print(json.dumps({"machine": machine("cuda"), "rows": rows, "side_by_side": gains}))
        return
    print(f"{machine('cuda')}\n{args.precision}, microseconds of a model's step, {MEMBERS} together")
    for n, gain in gains.items():
        show(n, [row for row in rows if row["tokens"] == n])
        print(f"side by side: {gain:.2f}x")


if __name__ == "__main__":
    main()
