"""What the commands show of a laboratory: progress while it works, and a summary that fits a terminal."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..progress import SearchBar
from .protocol import Experiment
from .runs import CELL, read, read_naive, read_protocol
from .tables import Scores, by_budget, label

if TYPE_CHECKING:
    from ..search import Engine, Interrupted, Ray
    from .runner import Step


def run_with_bar(
    experiments: Sequence[Experiment],
    folder: os.PathLike[str] | str,
    *,
    engine: Engine | Ray,
    device: str,
    spread: bool,
    processes: int,
    show: bool,
    say: bool,
) -> dict[str, Any]:
    """`run_experiments` with a progress bar, and a line for each cell that is done; returns the counts."""
    from .runner import Watcher, run_experiments

    began, scored = time.perf_counter(), 0
    seeds = experiments[0].protocol.seeds
    bar = SearchBar(sum(e.trials for e in experiments) * len(seeds), show=show)

    since: dict[Experiment, float] = {}

    def begin(searches: list[tuple[Experiment, int]]) -> None:
        since.update((e, time.perf_counter()) for e, _ in searches)
        if processes == 1:
            bar.restart(sum(e.trials for e, _ in searches))
        else:  # the store may have some seeds of a cell
            bar.trials -= sum(e.trials for e in {e for e, _ in searches} for s in seeds if (e, s) not in searches)

    def step(now: Step) -> None:
        e = now.experiment
        label = f"{e.model} {e.tokens} {e.encoding}" if processes == 1 else f"{processes} at once"
        bar.update((e, now.seed), now.progress, label)

    def lost(experiment: Experiment, seed: int, items: list[Interrupted]) -> None:
        for item in items:
            print(f"bsat: note: {name_of(experiment)} seed {seed}: {item}", file=sys.stderr)

    def done(experiment: Experiment, count: int) -> None:
        nonlocal scored
        scored += count
        if experiment not in since and processes > 1:  # the store has all of it
            bar.trials -= experiment.trials * len(seeds)
        if say:
            now = time.perf_counter()
            print(_line(folder, experiment, now - since.get(experiment, now)), flush=True)

    if show:
        trials: dict[int, set[int]] = {}
        for e in experiments:
            trials.setdefault(e.tokens, set()).add(e.trials)
        plan = f"{len(experiments)} cells, {len(seeds)} seeds, {by_budget(trials)} trials each; engine {engine.name}"
        print(f"{plan}; protocol {experiments[0].protocol.short}", file=sys.stderr)
    with bar:
        run_experiments(
            experiments,
            folder,
            engine=engine,
            device=device,
            spread=spread,
            processes=processes,
            watcher=Watcher(begin=begin, step=step, lost=lost, scored=done),
        )
    runs = read(folder, curves=False)
    counts = {status: int((runs["status"] == status).sum()) for status in ("finished", "halved", "failed")}
    return {
        "store": str(folder),
        "protocol": experiments[0].protocol.hash,
        "runs": len(runs),
        **counts,
        "scored": scored,
        "seconds": time.perf_counter() - began,
    }


def name_of(experiment: Experiment) -> str:
    """E.g. "etth1 45 BSAT L-RoPE LPE"."""
    return f"{experiment.dataset} {experiment.tokens} {label(experiment.model, experiment.encoding)}"


def _line(folder: os.PathLike[str] | str, experiment: Experiment, seconds: float) -> str:
    runs = read(folder, curves=False)
    for name in CELL:
        runs = runs[runs[name] == experiment.cell[name]]
    scores = Scores(runs, experiment.protocol)
    rmse = scores.mean(experiment.dataset, (experiment.model, experiment.encoding), experiment.tokens)
    counts = [f"{(runs['status'] == status).sum()} {status}" for status in ("halved", "failed")]
    words = ", ".join([f"{len(runs)} trials", *(c for c in counts if not c.startswith("0 "))])
    if not len(scores.selected):
        reasons = runs[runs["status"] == "failed"]["reason"].tolist()
        return f"{name_of(experiment):<34} no run could be tested ({words}); {reasons[-1] if reasons else 'see above'}"
    return f"{name_of(experiment):<34} test RMSE {rmse:.4g} of {len(scores.selected)} runs ({words}) {seconds:.0f} s"


def format_summary(folder: os.PathLike[str] | str) -> str:
    """The mean test RMSE of the selected runs, a table for each dataset."""
    protocol = read_protocol(folder)
    scores, naive = Scores(read(folder, curves=False), protocol), read_naive(folder)
    lines = [f"test RMSE, mean of the selected runs; protocol {protocol.short}"]
    for dataset in scores.datasets():
        budgets = scores.budgets(dataset)
        lines += ["", f"{dataset:<28}" + "".join(f"{tokens:>10}" for tokens in budgets)]
        table = {label(*row): [scores.mean(dataset, row, t) for t in budgets] for row in scores.rows(dataset=dataset)}
        table |= {name: [own["rmse"]] * len(budgets) for name, own in naive.get(dataset, {}).items()}
        for name, means in table.items():
            cells = "".join(f"{'–' if math.isnan(m) else format(m, '.4g'):>10}" for m in means)
            lines.append(f"{name:<28}{cells}")
    return "\n".join(lines)
