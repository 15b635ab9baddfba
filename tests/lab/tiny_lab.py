"""Experiments that take seconds: tiny networks, short windows, few samples."""

import os
import time

from bsat.data import catalog
from bsat.lab import Experiment, Protocol
from bsat.lab.models import SPACES
from bsat.search import Local, Population
from bsat.train.population import Halving
from small import SPACE

PROTOCOL = Protocol(horizon=6, lookback=24, seeds=(1, 2), max_epochs=3, grace=1, reduction=2, selection=2)
POPULATION = Population(startup=4, generation=3, halving=Halving(1, 2))


def experiment(model="bsat", encoding="l-rope+lpe", trials=4, tokens=6, protocol=PROTOCOL):
    return Experiment("solar", model, tokens, encoding, trials, protocol)


def make_tiny(setitem, setattr_):
    """The catalog's solar series becomes 500 samples of its summer, and the paper's space a tiny one."""
    load = catalog.load
    setitem(SPACES, "paper", SPACE)
    setattr_(catalog, "load", lambda name, **_: load(name).iloc[4000:4500].reset_index(drop=True))


def run_to_be_killed(folder, engine, trials, model="bsat"):
    """In a process of its own. Notes when a search begins to train, and every training that comes to its end."""
    import json
    from pathlib import Path

    import torch

    from bsat.lab import runner

    torch.set_num_threads(1)
    os.environ["BSAT_THREADS"] = "1"
    make_tiny(dict.__setitem__, setattr)
    notes = (Path(folder).parent / "notes.jsonl").open("a", buffering=1)

    def note(**what):
        print(json.dumps({**what, "time": time.time()}), file=notes)

    keep = runner._Kept.keep

    def keep_and_note(self, number, trained):
        keep(self, number, trained)
        note(trained=number, point=self.search.space.to_point(trained.trial), seed=self.seed)

    runner._Kept.keep = keep_and_note
    quiet = True

    def step(now):
        nonlocal quiet
        if quiet and now.progress.running:
            quiet = False
            note(working=True)

    def lost(experiment, seed, items):
        note(lost=[item.number for item in items], seed=seed)

    note(begin=True)
    runner.run_experiments(
        [experiment(model, trials=trials)],
        folder,
        engine=POPULATION if engine == "population" else Local(halving=Halving(1, 2)),
        device="cpu",
        watcher=runner.Watcher(step=step, lost=lost),
    )
    note(end=True)


def run_tiny(group, **choices):
    """`run_experiments` in a process of its own, which knows nothing of what a test has changed."""
    from bsat.lab import runner

    if SPACES["paper"] is not SPACE:
        make_tiny(dict.__setitem__, setattr)
    return runner.run_experiments(group, **choices)


def run_or_not(group, *, watcher, folder):
    """Warns, fails or dies if that is the name of the encoding."""
    import warnings

    from bsat.data.download import DownloadError

    watcher.scored(group[0], os.getpid())
    word = group[0].encoding
    if word == "lpe":
        warnings.warn("take care", RuntimeWarning, stacklevel=1)
    if word == "f-rope":
        raise DownloadError("there is no room")
    if word == "l-rope":
        os._exit(3)
    if word == "f-rope+lpe":
        (folder / "alive").write_text(str(os.getpid()))
        while True:
            watcher.scored(group[0], os.getpid())
            time.sleep(0.01)


def watch_forever(folder):
    """In a process that will be killed."""
    from functools import partial

    from bsat.lab.processes import run_side_by_side
    from bsat.lab.runner import Watcher

    run_side_by_side([[experiment("uds", "f-rope+lpe")]], 2, Watcher(), partial(run_or_not, folder=folder))
