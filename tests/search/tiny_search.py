"""A search that takes seconds: a space of tiny networks on a short series."""

import json
import os
import time

from tiny_training import SMALL, make_case

import bsat
from bsat.model import NetworkConfig
from bsat.search import Data, Local, Population, Sampler, Search, Watch, run_search
from bsat.train import TrainConfig
from bsat.train.population import Halving
from small import SPACE

SAMPLER = Sampler(startup=4, candidates=20)
HALVING = Halving(grace=2, reduction=2)
TRAIN = TrainConfig(batch_size=64, max_epochs=5, patience=2, grace=2)
ENGINES = {
    "optuna": Local(halving=HALVING),
    "population": Population(startup=4, generation=3, halving=HALVING),
}
FEW = Local(at_once=2, halving=HALVING)


def make_data():
    case = make_case(rows=1)
    return Data(case.windows[0], case.windows[1], case.mean, case.deviation)


def make_search(**choices):
    given = {
        "name": "tiny",
        "tokenizer": bsat.BSplineTokenizer(8),
        "trials": 8,
        "space": SPACE,
        "network": NetworkConfig(**SMALL),
        "train": TRAIN,
        "sampler": SAMPLER,
        "seed": 1,
    }
    return Search(**{**given, **choices})


def search(folder, *, engine="optuna", data=None, report=None, lost=None, keep=None, done=None, **choices):
    engine = {**ENGINES, "few": FEW}[engine] if isinstance(engine, str) else engine
    watch = Watch(report, lost, keep, done)
    return run_search(data or make_data(), make_search(**choices), folder / "study.db", engine=engine, watch=watch)


def search_to_be_killed(folder, engine, trials):
    """In a process of its own. Notes when it begins, every network that it keeps, and what an earlier one had lost."""
    import torch

    torch.set_num_threads(1)
    os.environ["BSAT_THREADS"] = "1"
    note = (folder / "notes.jsonl").open("a", buffering=1)
    print(json.dumps({"begin": time.time()}), file=note)

    def keep(number, trained):
        print(json.dumps({"number": number, "point": SPACE.to_point(trained.trial)}), file=note)

    def lost(items):
        print(json.dumps({"lost": [item.number for item in items]}), file=note)

    def working(progress):
        nonlocal quiet
        if quiet and progress.running:
            quiet = False
            print(json.dumps({"working": time.time()}), file=note)

    quiet = True
    search(folder, engine=engine, trials=trials, keep=keep, lost=lost, report=working)
