"""How fast is a training step on a GPU, alone and among many, and is it the same training?

    python benchmarks/gpu_training.py [--json] [--quick]

Speed: ms a step (128 windows of 720 samples, 192 ahead, dropouts 0.1, 4 heads) of Hugging Face's PatchTST, of our plain
loop, of our captured step alone (`Pack` of one), and of a population, where the time is divided by its members. All do
ten steps between two waits for the device, so that what the host does counts, in turns in one process; the best of
several rounds. See benchmarks/training.py for the two plain ones.

Equality, on the shipped household series, dropout off: four networks with rates, decays, seeds and feed-forward widths
of their own, trained together, each alone, and each in the plain loop; and four of which halving drops two. Losses
agree to rounding, validation RMSEs less closely: the gradient of a bias in front of a batch norm is nothing but
rounding, which AdamW makes steps of, and which batch norm takes out in training but not quite in evaluation. With
dropout, whose masks differ: the validation RMSE over seeds of a population beside the plain loop.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import json
import platform
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

import bsat
from bsat import BSplineTokenizer, nvrtc
from bsat.data import load_shipped
from bsat.data.folds import fold_edges
from bsat.data.windows import Windows, fit_scaling, make_windows
from bsat.model import Network, NetworkConfig, build_network
from bsat.train import History, TokenBatches, TrainConfig, train
from bsat.train.bank import Bank
from bsat.train.pack import Pack
from bsat.train.population import Halving, Trained, Trial, train_population
from training import BATCH, DROPOUT, HEADS, SIZES, TOKENS, H, L, best_times, our_step, their_step

STEPS = 10
MANY = {16: 32}
"""Members of a population by width; 16 for all others."""
SOLO_TARGETS = {(16, 45): 12.0, (64, 45): 12.0}
MANY_TARGETS = {(16, 45): 60.0, (64, 45): 25.0}
"""Times as fast as Hugging Face's, by width and tokens."""
SAME = 1e-4


# ---------------------------------------------------------------------------------------- what the gpu_* programs share


def machine(device: str) -> str:
    """The first line of what is printed."""
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    parts = [f"CUDA {torch.version.cuda}" if device == "cuda" else "", f"Python {platform.python_version()}"]
    parts += [f"transformers {importlib.metadata.version('transformers')}", f"bsat {bsat.__version__}"]
    return ", ".join(part for part in (name, f"torch {torch.__version__}", *parts) if part)


def need_gpu(device: str) -> None:
    """Stop with a line if there is none; every program has a hidden `--device cpu`, which tries its logic."""
    if device == "cuda" and not nvrtc.available():
        raise SystemExit("this benchmark needs an NVIDIA GPU and torch with CUDA; torch sees none here")


def wait(device: str) -> None:
    """For the device."""
    if device == "cuda":
        torch.cuda.synchronize()


def clear(device: str) -> None:
    """Give memory back that nothing holds."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def walk_windows(count: int, device: str, *, lookback: int = L, horizon: int = H) -> Windows:
    """So many windows, one sample apart, of a random walk."""
    steps = np.random.default_rng(0).normal(size=count + lookback + horizon - 1)
    series = torch.from_numpy(steps.cumsum() * 0.03).float().to(device)
    starts = torch.arange(count, device=device)
    return Windows(series, starts, torch.zeros_like(starts, dtype=torch.int32), lookback, horizon, gaps=False)


def pack_of(
    members: int, config: NetworkConfig, n: int, windows: Windows, *, precision: str = "float32"
) -> tuple[Pack, list[Network]]:
    """Networks that differ in their seeds; an epoch trains on all windows. The networks are returned too."""
    device, tokenizer = windows.series.device, BSplineTokenizer(n)
    networks = [
        build_network(config, tokenizer, lookback=windows.lookback, horizon=windows.horizon).to(device)
        for _ in range(members)
    ]
    train_bank = Bank(windows, [(tokenizer, networks[0])])
    val_bank = Bank(windows.some(BATCH), [(tokenizer, networks[0])])
    configs = [TrainConfig(seed=seed, batch_size=BATCH) for seed in range(members)]
    deviation = torch.ones(1, dtype=torch.float64, device=device)
    banks = train_bank, val_bank, [0] * members
    return Pack(networks, configs, *banks, deviation=deviation, precision=precision), networks


def dropping(d: int, layers: int) -> NetworkConfig:
    """The network of benchmarks/training.py."""
    return NetworkConfig(
        d_model=d, n_layers=layers, n_heads=HEADS, dropout=DROPOUT, ff_dropout=DROPOUT, attention_dropout=DROPOUT
    )


# --------------------------------------------------------------------------------------------------------------- speed


def ten(step: Callable[[], None]) -> Callable[[], None]:
    """Several steps at a time."""

    def steps() -> None:
        for _ in range(STEPS):
            step()

    return steps


def speed(sizes: Sequence[tuple[int, int]], tokens: Sequence[int], rounds: int, device: str) -> list[dict[str, Any]]:
    """Seconds a step, and a step of one model."""
    rows = []
    for d, layers in sizes:
        for n in tokens:
            many = MANY.get(d, 16) if device == "cuda" else 2
            theirs, their_size = their_step(d, layers, n, device)
            ours, our_size = our_step(d, layers, n, device, keep=True)
            windows = walk_windows(STEPS * BATCH, device)
            solo, population = (pack_of(members, dropping(d, layers), n, windows)[0] for members in (1, many))

            jobs: list[Callable[[], None]] = [ten(theirs), ten(ours)]
            jobs += [partial(solo.run_epoch, 0), partial(population.run_epoch, 0)]
            t = best_times(jobs, rounds, device)
            each = [t[0] / STEPS, t[1] / STEPS, t[2] / STEPS, t[3] / STEPS / many]
            rows.append(
                {
                    "d_model": d,
                    "layers": layers,
                    "tokens": n,
                    "members": many,
                    "their_parameters": their_size,
                    "our_parameters": our_size,
                    "theirs_s": each[0],
                    "plain_s": each[1],
                    "captured_s": each[2],
                    "population_s": each[3],
                    "plain_ratio": each[0] / each[1],
                    "captured_ratio": each[0] / each[2],
                    "population_ratio": each[0] / each[3],
                }
            )
            del theirs, ours, solo, population, jobs
            clear(device)
    return rows


def speed_targets(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What was wanted and what was got."""
    found = []
    for kind, targets in (("captured", SOLO_TARGETS), ("population", MANY_TARGETS)):
        for row in rows:
            wanted = targets.get((row["d_model"], row["tokens"]))
            if wanted is not None:
                got = row[f"{kind}_ratio"]
                found.append(
                    {
                        "what": f"{kind}, d={row['d_model']}, {row['tokens']} tokens",
                        "wanted": wanted,
                        "got": got,
                        "met": got >= wanted,
                    }
                )
    return found


# ------------------------------------------------------------------------------------------------------------- equality


@dataclass(frozen=True)
class Data:
    """A scaled series and some of its windows."""

    train: Windows
    val: Windows
    mean: Tensor
    deviation: Tensor


def shipped(name: str, most: int, device: str) -> Data:
    """At most so many windows of each fold of a shipped series."""
    y = load_shipped(name)["y"].to_numpy()
    offsets, edges = np.array([0, len(y)]), fold_edges(np.array([len(y)]))
    mean, deviation = fit_scaling(y, offsets, edges[:, 1])
    series = torch.from_numpy(((y - mean) / deviation).astype(np.float32)).to(device)
    train_windows, val_windows = (
        make_windows(series, offsets, edges, fold, lookback=L, horizon=H).some(most) for fold in (0, 1)
    )
    return Data(train_windows, val_windows, *(torch.from_numpy(a).to(device) for a in (mean, deviation)))


def together(trials: Sequence[Trial], data: Data, halving: Halving | None = None) -> list[Trained]:
    """Trained side by side, in the order of the trials."""
    done = train_population(trials, data.train, data.val, deviation=data.deviation, halving=halving)
    return sorted(done, key=lambda trained: trained.index)


def plainly(trial: Trial, data: Data) -> History:
    """Trained in the plain loop, with torch's own dropout."""
    with torch.random.fork_rng([]):
        torch.default_generator.manual_seed(trial.train.seed)
        network = build_network(trial.network, trial.tokenizer, lookback=L, horizon=H)
    network.to(data.train.series.device)
    sets = [TokenBatches(windows, trial.tokenizer, network, keep=True) for windows in (data.train, data.val)]
    config = replace(trial.train, deterministic=True)
    return train(network, sets[0], sets[1], config, mean=data.mean, deviation=data.deviation)


def curve(history: History) -> np.ndarray:
    """(epochs, 2): training losses and validation RMSEs."""
    return np.array([(e.loss, e.val_rmse) for e in history.epochs])


def apart(some: Sequence[np.ndarray], others: Sequence[np.ndarray]) -> float:
    """The largest relative difference of curves."""
    return max(float(np.max(np.abs(a - b) / np.abs(b))) for a, b in zip(some, others, strict=True))


def bitwise(some: Sequence[np.ndarray], others: Sequence[np.ndarray]) -> bool:
    """Whether curves are the same to the last bit."""
    return all(np.array_equal(a, b) for a, b in zip(some, others, strict=True))


def four_trials(epochs: int) -> list[Trial]:
    """That differ in all that one pack allows."""
    own = [(2, 1e-3, 1e-4, 2025), (4, 5e-4, 1e-2, 7), (4, 1e-4, 0.0, 11), (8, 2e-3, 1e-3, 2026)]
    return [
        Trial(
            BSplineTokenizer(45),
            NetworkConfig(d_model=32, ff_factor=feed, dropout=0.0, ff_dropout=0.0, attention_dropout=0.0),
            TrainConfig(learning_rate=rate, weight_decay=decay, seed=seed, max_epochs=epochs),
        )
        for feed, rate, decay, seed in own
    ]


def equality(data: Data) -> dict[str, Any]:
    """Together, alone, in the plain loop, and with two dropped on the way."""
    trials = four_trials(2)
    beside = together(trials, data)
    alone = [together([trial], data)[0] for trial in trials]
    loop = [curve(plainly(trial, data)) for trial in trials]
    curves, alone_curves = ([curve(t.history) for t in some] for some in (beside, alone))
    longer = four_trials(4)
    whole = together(longer, data)
    halved = together(longer, data, Halving(grace=2, reduction=2))
    kept = [t.index for t in halved if t.history.stopped != "halved"]
    kept_curves, whole_curves = ([curve(run[i].history) for i in kept] for run in (halved, whole))
    again = [curve(t.history) for t in together(trials, data)]
    alike = [replace(trial, network=replace(trial.network, ff_factor=4)) for trial in trials]
    alike_curves = [curve(t.history) for t in together(alike, data)]
    alike_alone = [curve(together([trial], data)[0].history) for trial in alike]
    return {
        "losses_apart_alone": apart([c[:, :1] for c in curves], [c[:, :1] for c in alone_curves]),
        "rmses_apart_alone": apart([c[:, 1:] for c in curves], [c[:, 1:] for c in alone_curves]),
        "bitwise_alone": bitwise(curves, alone_curves),
        "bitwise_alone_one_width": bitwise(alike_curves, alike_alone),
        "bitwise_again": bitwise(curves, again),
        "losses_apart_plain": apart([c[:, :1] for c in curves], [c[:, :1] for c in loop]),
        "rmses_apart_plain": apart([c[:, 1:] for c in curves], [c[:, 1:] for c in loop]),
        "dropped": len(trials) - len(kept),
        "apart_after_dropping": apart(kept_curves, whole_curves),
        "bitwise_after_dropping": bitwise(kept_curves, whole_curves),
        "wanted": SAME,
    }


def with_dropout(data: Data, seeds: int, epochs: int) -> dict[str, Any]:
    """The best validation RMSE of a population and of the plain loop, over the same seeds, and whether they differ.

    A seed has the same weights and order of windows in both; the masks are others. Two tests: of two samples (Welch),
    and of pairs.
    """
    from scipy import stats

    network = dropping(32, 2)
    trials = [Trial(BSplineTokenizer(45), network, TrainConfig(seed=s, max_epochs=epochs)) for s in range(seeds)]
    many = [t.rmse for t in together(trials, data)]
    plain = [plainly(trial, data).best.val_rmse for trial in trials]
    return {
        "seeds": seeds,
        "epochs": epochs,
        "population": {"mean": statistics.mean(many), "std": statistics.stdev(many), "each": many},
        "plain": {"mean": statistics.mean(plain), "std": statistics.stdev(plain), "each": plain},
        "welch_p": float(stats.ttest_ind(many, plain, equal_var=False).pvalue),
        "paired_p": float(stats.ttest_rel(many, plain).pvalue),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="45 tokens only, fewer rounds and epochs")
    parser.add_argument("--device", default="cuda", help=argparse.SUPPRESS)
    args = parser.parse_args()
    need_gpu(args.device)

    torch.manual_seed(0)
    here = args.device == "cuda"
    result: dict[str, Any] = {"machine": machine(args.device)}
    if not args.json:
        print(f"{result['machine']}\nms a step of {BATCH} windows, and times as fast as Hugging Face's PatchTST\n")
    sizes, tokens = (SIZES, TOKENS[:1] if args.quick else TOKENS) if here else (SIZES[:1], TOKENS[:1])
    result["speed"] = speed(sizes, tokens, (4 if args.quick else 12) if here else 1, args.device)
    result["targets"] = speed_targets(result["speed"])
    if not args.json:
        print(f"{'':15}{'tokens':>6}{'PatchTST':>10}{'plain':>10}{'captured':>18}{'a model of many':>22}")
        for r in result["speed"]:
            name = f"d={r['d_model']}, {r['layers']} layers"
            cells = f"{1e3 * r['theirs_s']:>10.2f}" + "".join(
                f"{1e3 * r[f'{kind}_s']:>9.3f}{r[f'{kind}_ratio']:>6.1f}x" for kind in ("plain", "captured")
            )
            last = f"{1e3 * r['population_s']:>9.4f}{r['population_ratio']:>6.1f}x of {r['members']}"
            print(f"{name:15}{r['tokens']:>6}{cells}{last}")
        for t in result["targets"]:
            print(f"{t['what']}: {t['got']:.1f}x, wanted {t['wanted']:.0f}x: {t['met']}")

    data = shipped("household", 2000 if here else 150, args.device)
    result["equality"] = e = equality(data)
    if not args.json:
        print("\nfour networks together, dropout off: largest relative difference of losses, of validation RMSEs")
        for kind, name in (("alone", "each alone"), ("plain", "the plain loop")):
            print(
                f"  {name:18}{e[f'losses_apart_{kind}']:.1e}  {e[f'rmses_apart_{kind}']:.1e}  (losses: wanted {SAME:g})"
            )
        print(f"  {e['dropped']} of 4 dropped    {e['apart_after_dropping']:.1e} the curves of those that stay")
        print(
            f"  bitwise equal: alone {e['bitwise_alone']}, alone and all of one width {e['bitwise_alone_one_width']}, "
            f"repeated {e['bitwise_again']}, dropped {e['bitwise_after_dropping']}"
        )
    clear(args.device)
    data = shipped("household", 4000 if here else 150, args.device)
    seeds, epochs = (8, 6 if args.quick else 12) if here else (3, 1)
    result["dropout"] = o = with_dropout(data, seeds, epochs)
    if args.json:
        print(json.dumps(result))
        return
    print(f"\nwith dropout, {seeds} seeds, {epochs} epochs: best validation RMSE, W (mean, deviation of the seeds)")
    for name in ("population", "plain"):
        print(f"  {name:12}{o[name]['mean']:>10.3f}{o[name]['std']:>9.3f}")
    print(f"  the same? p = {o['welch_p']:.2f} (two samples), {o['paired_p']:.2f} (pairs)")


if __name__ == "__main__":
    main()
