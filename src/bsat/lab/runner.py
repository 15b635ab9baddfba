"""Experiments, run: search, select by the validation fold, score what was selected on the test fold once.

A store that runs are written to also holds what a search needs to go on: `studies.db` (Optuna's) and `weights/` (of the
runs that may yet be selected; they go when they have been scored). Neither is needed to make tables or figures.

The study is the truth while a search runs. The store follows it: whatever the study has finished and the store does not
have, it gets when the search goes on. So a process may be killed at any moment.
"""

from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from .. import nvrtc
from ..atomic import alone, leftovers, replacing, save_tensors
from ..data import catalog
from ..data.folds import fold_edges
from ..data.frames import to_panel
from ..data.season import season_of
from ..data.windows import Split, split_windows
from ..model import NetworkConfig, build_network
from ..model.fused import PRECISIONS
from ..search import (
    Data,
    Engine,
    Interrupted,
    Local,
    Population,
    Ray,
    Record,
    Search,
    SearchProgress,
    Watch,
    run_searches,
)
from ..search.cluster import import_ray
from ..search.contract import import_optuna
from ..search.study import read_search
from ..tokens import Tokenizer
from ..tokens.door import check_choice, to_whole
from ..train import TokenBatches, TrainConfig, evaluate, evaluate_naive
from ..train.batches import fit_tokenizer
from ..train.device import count_cores, find_device
from ..train.pack import free_memory
from ..train.population import Halving, Trained, Trial
from .models import MODELS
from .processes import run_side_by_side
from .protocol import Experiment, Protocol
from .runs import KEY, Run, Store, StoreError, naive_path, read, select, write_naive

if TYPE_CHECKING:
    import pandas as pd

ENGINES = ("optuna", "population", "ray")
CORES = 8
"""Trials at a time on a CPU, at most: each wants some 500 MiB."""
STUDIES, WEIGHTS = "studies.db", "weights"
RETRIES = 100
"""Times that a folder of weights is made for one file, while other searches take it away."""


@dataclass(frozen=True)
class Step:
    """Where a run of experiments stands."""

    experiment: Experiment
    seed: int
    progress: SearchProgress


@dataclass(frozen=True)
class Watcher:
    """Whoever wants to hear of it.

    Args:
        begin: with the experiments and seeds that are searched next, together.
        step: whenever a search has changed.
        lost: with what an interrupted process had in flight.
        scored: with an experiment, and how many of its runs were scored on the test fold.
    """

    begin: Callable[[list[tuple[Experiment, int]]], None] | None = None
    step: Callable[[Step], None] | None = None
    lost: Callable[[Experiment, int, list[Interrupted]], None] | None = None
    scored: Callable[[Experiment, int], None] | None = None


def make_engine(
    name: str,
    protocol: Protocol,
    *,
    at_once: int | None = None,
    address: str | None = None,
    precision: str = "float32",
    device: str = "auto",
) -> Engine | Ray:
    """An engine that halves as the protocol says. Without `at_once`, Optuna's has one trial at a time on a GPU, and on
    a CPU one for each core, up to `CORES`."""
    halving = None if protocol.grace is None else Halving(protocol.grace, protocol.reduction)
    if at_once is not None and name == "population":
        raise ValueError("`at_once` must be left out with engine 'population', which trains as many as fit.")
    if address is not None and name != "ray":
        raise ValueError(f"`address` is that of a Ray cluster; got {address!r} with engine {name!r}. Use engine 'ray'.")
    if name not in ENGINES:
        raise ValueError(f"`engine` must be one of {', '.join(ENGINES)}; got {name!r}. Choose one of them.")
    check_choice(precision, "precision", PRECISIONS)
    if precision != "float32" and name != "population":
        raise ValueError(f"`precision` must be 'float32' with engine {name!r}; got {precision!r}. Use 'population'.")
    if precision != "float32" and not nvrtc.tensor_cores(find_device(device)):
        raise ValueError(
            f"`precision` must be 'float32' without an NVIDIA GPU that has tensor cores; got {precision!r} on "
            f"{find_device(device).type!r}. Leave it out."
        )
    import_optuna()  # what is missing is told before anything is begun
    if name == "optuna":
        cores = 1 if find_device(device).type != "cpu" else min(count_cores(), CORES)
        return Local(cores if at_once is None else at_once, halving)
    if name == "population":
        return Population(halving=halving, precision=precision)
    import_ray("tune")
    at_once = 5 if at_once is None else at_once
    return Ray(address, at_once, halving, gpus=1 / at_once if find_device(device).type == "cuda" else 0)


def run_experiments(
    experiments: Sequence[Experiment],
    folder: os.PathLike[str] | str,
    *,
    engine: Engine | Ray | None = None,
    device: str = "auto",
    spread: bool = False,
    processes: int = 1,
    watcher: Watcher | None = None,
) -> Path:
    """Run what is not in the store yet, in the order given; returns the store's folder.

    Args:
        experiments: of one protocol.
        folder: of the store.
        engine: see `make_engine`; by default one trial after another.
        device: "auto", "cpu" or "cuda".
        spread: score all runs of a search on the test fold once it has selected, for the heatmap of spreads.
        processes: experiments at a time, each in a process of its own; with engine `Population` only.
        watcher: who wants to hear of it.
    """
    if not experiments:
        raise ValueError("`experiments` must hold at least one; got none.")
    engine, watcher = engine or Local(), watcher or Watcher()
    processes = to_whole(processes, "processes", 1)
    if processes > 1 and not isinstance(engine, Population):
        raise ValueError(
            f"`processes` must be 1 with engine {engine.name!r}, which may have several trials `at_once`; got "
            f"{processes}. Use engine 'population'."
        )
    material = Material(experiments[0].protocol, device)
    with Store(folder, material.protocol) as store:
        for other in experiments:
            store.check(other)
        laboratory = _Laboratory(store, material, engine, spread, watcher)
        groups = [list(group) for _, group in groupby(dict.fromkeys(experiments), key=laboratory.kin)]
        if processes == 1 or len(groups) == 1:
            for group in groups:
                laboratory.run(group)
            return Path(folder)
    assert isinstance(engine, Population)
    beside = min(processes, len(groups))
    engine = replace(engine, memory=engine.memory or int(0.7 * free_memory(material.device) / beside))
    run = partial(run_experiments, folder=folder, engine=engine, device=device, spread=spread)
    run_side_by_side(groups, processes, watcher, run)
    return Path(folder)


class Material:
    """What experiments of a protocol are made of: folds of the datasets, tokenizers, searches.

    Args:
        protocol: of the experiments.
        device: "auto", "cpu" or "cuda".
    """

    def __init__(self, protocol: Protocol, device: str = "auto") -> None:
        self.protocol, self.device = protocol, find_device(device)
        self.split = cache(self._load)
        """windows of the three folds, by the dataset's name"""

    def _load(self, dataset: str) -> Split:
        protocol = self.protocol
        panel = to_panel(catalog.load(dataset), freq=catalog.find_dataset(dataset).freq)
        split = split_windows(
            panel,
            fold_edges(panel.lengths),
            lookback=protocol.lookback,
            horizon=protocol.horizon,
            least=protocol.lookback,  # no dataset of the catalog has gaps
            device=self.device,
        )
        if not len(split.test):
            raise ValueError(
                f"the test fold of {dataset} must hold at least one window of lookback + horizon = "
                f"{protocol.lookback + protocol.horizon} samples; it has none. Shorten `lookback` or `horizon`."
            )
        return split

    def data(self, dataset: str) -> Data:
        """Without the test fold."""
        split = self.split(dataset)
        return Data(split.train, split.val, *self.scaling(dataset))

    def scaling(self, dataset: str) -> tuple[Tensor, Tensor]:
        """Mean and deviation, on the device."""
        split = self.split(dataset)
        return torch.from_numpy(split.mean).to(self.device), torch.from_numpy(split.deviation).to(self.device)

    def tokenizer(self, experiment: Experiment) -> Tokenizer:
        """Fitted to the train fold."""
        tokenizer = MODELS[experiment.model].make_tokenizer(experiment.tokens)
        return fit_tokenizer(tokenizer, self.split(experiment.dataset).train)

    def search(self, experiment: Experiment, seed: int, tokenizer: Tokenizer) -> Search:
        """Its `build` makes a trial of a configuration."""
        model, protocol = MODELS[experiment.model], self.protocol
        return Search(
            name=f"{_name(experiment)}-{seed}-{experiment.study}",
            tokenizer=tokenizer,
            trials=experiment.trials,
            space=model.space(protocol.space),
            network=NetworkConfig(encoding=experiment.encoding, **model.network),
            train=TrainConfig(max_epochs=protocol.max_epochs, seed=seed),
            seed=seed,
        )


class _Laboratory:
    """A store, open, and what it takes to fill it."""

    def __init__(self, store: Store, material: Material, engine: Engine | Ray, spread: bool, watcher: Watcher) -> None:
        self.store, self.material, self.engine, self.spread, self.watcher = store, material, engine, spread, watcher
        self.device = device = material.device
        self.weights = _Weights(store.folder / WEIGHTS)
        self.device_name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        self.stored: dict[tuple[Any, ...], dict[str, Any]] = {}
        """configurations by the keys of their runs"""

    def kin(self, experiment: Experiment) -> tuple[Any, ...]:
        """Experiments with the same one, next to each other, are searched together by an engine that can."""
        e = experiment
        if not isinstance(self.engine, Population):
            return (e,)
        return e.dataset, e.tokens, e.encoding, e.trials, MODELS[e.model].kin

    # ---- searching

    def run(self, experiments: list[Experiment]) -> None:
        """Search them, select, and score; others may work on other experiments of the store meanwhile."""
        with ExitStack() as stack:
            for experiment in experiments:
                stack.enter_context(alone(self.store.folder / "run", _name(experiment)))
            runs = read(self.store.folder, curves=False)
            self._check_meaning(experiments, runs)
            self.stored = dict(zip(zip(*(runs[name] for name in KEY), strict=True), runs["configuration"], strict=True))
            open_ = [(e, seed) for e in experiments for seed in self.store.protocol.seeds if not self._whole(e, seed)]
            if open_:
                self._search_all(open_)
            for experiment in experiments:
                self._score(experiment)

    def _check_meaning(self, experiments: list[Experiment], runs: pd.DataFrame) -> None:
        """A name must mean today what it meant when the runs of the store were made."""
        for experiment in experiments:
            mine = runs
            for name, value in experiment.cell.items():
                mine = mine[mine[name] == value]
            if set(mine["study"].dropna()) - {experiment.study}:
                raise StoreError(
                    f"{self.store.folder} has runs of {_name(experiment)} made by another version of bsat, for which "
                    f"{experiment.model!r} or its space meant something else. Name another folder for new ones."
                )

    def _search_all(self, open_: list[tuple[Experiment, int]]) -> None:
        data, studies = self.material.data(open_[0][0].dataset), self.store.folder / STUDIES
        tokenizers = {e: self.material.tokenizer(e) for e, _ in open_}
        searches = [self.material.search(e, seed, tokenizers[e]) for e, seed in open_]
        for (experiment, seed), search in zip(open_, searches, strict=True):
            self._check_study(experiment, seed, search, studies)
        if self.watcher.begin is not None:
            self.watcher.begin(open_)
        watches = [self._watch(e, seed, search) for (e, seed), search in zip(open_, searches, strict=True)]
        run_searches(data, searches, studies, engine=self.engine, watches=watches)

    def _of(self, experiment: Experiment, seed: int) -> dict[int, dict[str, Any]]:
        """The configurations of a search that are in the store, by their numbers."""
        begin = (*experiment.cell.values(), seed)
        return {key[5]: point for key, point in self.stored.items() if key[:5] == begin}

    def _whole(self, experiment: Experiment, seed: int) -> bool:
        """Whether the store has all trials of a search."""
        return len(self._of(experiment, seed)) >= experiment.trials

    def _check_study(self, experiment: Experiment, seed: int, search: Search, studies: Path) -> None:
        """What the store has of a search, its study must know: else numbers would come to mean other trials."""
        known = {r.number: r.point for r in read_search(studies, search.name, self.engine)}
        for number, point in self._of(experiment, seed).items():
            if known.get(number) != point:
                raise StoreError(
                    f"{self.store.folder} has trial {number} of {_name(experiment)}, seed {seed}, but its search by "
                    f"engine {self.engine.name!r} does not know it: the search was begun by another engine, or its "
                    f"files ({STUDIES}) are gone. Go on with that engine, or name another folder."
                )

    def _watch(self, experiment: Experiment, seed: int, search: Search) -> Watch:
        watcher, kept = self.watcher, _Kept(self, experiment, seed, search)

        def report(progress: SearchProgress) -> None:
            if watcher.step is not None:
                watcher.step(Step(experiment, seed, progress))

        def lost(items: list[Interrupted]) -> None:
            if watcher.lost is not None:
                watcher.lost(experiment, seed, items)

        def done(record: Record) -> None:
            key = (*experiment.cell.values(), seed, record.number)
            if key not in self.stored:
                self.store.add(self._run_of(experiment, seed, record))
                self.stored[key] = record.point
            kept.done(record)

        return Watch(report=report, lost=lost, keep=kept.keep, done=done)

    def _run_of(self, experiment: Experiment, seed: int, record: Record) -> Run:
        shared: dict[str, Any] = {
            "experiment": experiment,
            "seed": seed,
            "trial": record.number,
            "configuration": record.point,
            "seconds": record.seconds,
            "memory": record.memory,
            "pack": record.pack,
            "device": self.device_name,
            "engine": record.engine or self.engine.name,
        }
        if record.history is None or record.state == "failed":
            return Run(status="failed", reason=record.reason or "failed", **shared)
        return Run.from_history(record.history, **shared)

    # ---- scoring

    def _score(self, experiment: Experiment) -> None:
        """Only now the test fold is looked at."""
        runs = read(self.store.folder, curves=False)
        for name, value in experiment.cell.items():
            runs = runs[runs[name] == value]
        chosen = select(runs, self.store.protocol.selection)
        count = self._score_runs(experiment, chosen.to_dict("records"), "selected")
        if self.spread:
            rest = select(runs, len(runs))
            count += self._score_runs(
                experiment, rest[rest["rank"] > self.store.protocol.selection].to_dict("records"), "spread"
            )
        self._score_naive(experiment.dataset)
        for seed in self.store.protocol.seeds:
            self.weights.clear(experiment, seed)
        if self.watcher.scored is not None:
            self.watcher.scored(experiment, count)

    def _score_runs(self, experiment: Experiment, runs: list[Any], why: str) -> int:
        """Those that have no scores yet."""
        tokenizer: Tokenizer | None = None
        count, wanting = 0, []
        for run in runs:
            seed, trial = int(run["seed"]), int(run["trial"])
            if not math.isnan(run["test_rmse"]):
                continue
            state = self.weights.load(experiment, seed, trial, run["configuration"])
            if state is None:
                wanting.append(f"seed {seed}, trial {trial}: its weights are no longer whole in {self.weights.folder}")
                continue
            tokenizer = tokenizer or self.material.tokenizer(experiment)
            built = self.material.search(experiment, seed, tokenizer).build(run["configuration"])
            scores = self._test(experiment.dataset, built, state)
            if all(map(math.isfinite, scores.values())):
                self.store.add_test(experiment, seed, trial, scores, why)
                count += 1
            else:
                wanting.append(f"seed {seed}, trial {trial}: a score is not finite ({scores})")
        if wanting:
            warnings.warn(
                f"{len(wanting)} runs of {_name(experiment)} cannot be scored on the test fold, and tables count them "
                f"as not tested; {wanting[0]}.",
                RuntimeWarning,
                stacklevel=2,
            )
        return count

    def _score_naive(self, dataset: str) -> None:
        """What the test fold makes of forecasts that learn nothing, once for a store."""
        if naive_path(self.store.folder, dataset).exists():
            return
        season = season_of(catalog.find_dataset(dataset).freq) or 0
        found = evaluate_naive(self.material.split(dataset).test, *self.material.scaling(dataset), season)
        scores = {name: own.to_dict() for name, own in found.items()}
        write_naive(self.store.folder, self.store.protocol, dataset, scores)

    def _test(self, dataset: str, trial: Trial, state: dict[str, Tensor]) -> dict[str, float]:
        split, protocol = self.material.split(dataset), self.store.protocol
        network = build_network(trial.network, trial.tokenizer, lookback=protocol.lookback, horizon=protocol.horizon)
        network.load_state_dict(state, strict=False)
        network.to(self.device)
        batches = TokenBatches(split.test, trial.tokenizer, network, keep=False)
        scores = evaluate(network, batches, *self.material.scaling(dataset)).to_dict()
        return {name: scores[name] for name in ("rmse", "mae", "mse", "smape")} | self._rates(split, trial.tokenizer)

    def _rates(self, split: Split, tokenizer: Tokenizer) -> dict[str, float]:
        """How often the tokens of the test fold needed help: the share of windows with a ridge, or a clipped one."""
        if not tokenizer.adaptive:
            return {}
        fallback = clipped = 0
        most: float | None = tokenizer.max_coefficient  # type: ignore[attr-defined]
        for start in range(0, len(split.test), 4096):
            tokens = tokenizer.transform(split.test.past(slice(start, start + 4096)))
            fallback += int(tokens.fallback.sum())  # type: ignore[attr-defined]
            if most is not None:
                clipped += int((tokens.coefficients.abs() >= most).any(1).sum())  # type: ignore[attr-defined]
        return {"fallback": fallback / len(split.test), "clipped": clipped / len(split.test)}


def _name(experiment: Experiment) -> str:
    return "-".join(map(str, experiment.cell.values()))


# ---- weights ---------------------------------------------------------------------------------------------------------


_State = dict[str, Tensor]


class _Weights:
    """Of the runs that may yet be scored: a file each, by experiment, seed and trial."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, experiment: Experiment, seed: int, trial: int) -> Path:
        return self.folder / f"{experiment.study}-{seed}-{trial}.safetensors"

    def save(self, experiment: Experiment, seed: int, trial: int, point: Mapping[str, Any], state: _State) -> None:
        path, whole = self.path(experiment, seed, trial), {name: a.contiguous() for name, a in state.items()}
        try:
            with self._file(path) as temporary:
                save_tensors(whole, temporary, {"point": json.dumps(point, sort_keys=True)})
        except OSError as error:
            raise OSError(
                f"the weights of a run could not be written to {path}: {error}. Make room, and go on."
            ) from error

    @contextmanager
    def _file(self, path: Path) -> Iterator[Path]:
        """A place to write to. Another search may take the folder away, until there is something in it."""
        with ExitStack() as stack:
            for left in reversed(range(RETRIES)):
                try:
                    self.folder.mkdir(parents=True, exist_ok=True)
                    temporary = stack.enter_context(replacing(path, sync=True))
                    break
                except (FileNotFoundError, FileExistsError):
                    if not left:
                        raise
            yield temporary

    def load(self, experiment: Experiment, seed: int, trial: int, point: Mapping[str, Any]) -> _State | None:
        """None if they are gone, damaged, or another configuration's."""
        path = self.path(experiment, seed, trial)
        if not path.is_file():
            return None
        try:
            with safe_open(path, "pt") as file:
                if (file.metadata() or {}).get("point") != json.dumps(point, sort_keys=True):
                    return None
            return load_file(path)
        except SafetensorError:
            return None

    def drop(self, experiment: Experiment, seed: int, trial: int) -> None:
        self.path(experiment, seed, trial).unlink(missing_ok=True)

    def clear(self, experiment: Experiment, seed: int) -> None:
        """Theirs alone, and what a killed process was writing: other searches may be at work in the same folder."""
        stem = f"{experiment.study}-{seed}-"
        for path in (*self.folder.glob(f"{stem}*.safetensors"), *leftovers(self.folder, stem)):
            path.unlink(missing_ok=True)
        with suppress(OSError):
            self.folder.rmdir()  # if it is empty


class _Kept:
    """Which weights of a search stay on the disk: those of its best so far, or of all if all will be scored."""

    def __init__(self, laboratory: _Laboratory, experiment: Experiment, seed: int, search: Search) -> None:
        self.laboratory, self.experiment, self.seed, self.search = laboratory, experiment, seed, search
        self.best: list[tuple[float, int]] = []

    def keep(self, number: int, trained: Trained) -> None:
        if self.laboratory.spread or self._place(trained.rmse, number):
            point = self.search.space.to_point(trained.trial)
            self.laboratory.weights.save(self.experiment, self.seed, number, point, trained.state)

    def _place(self, rmse: float, number: int) -> bool:
        most = self.laboratory.store.protocol.selection
        return len(self.best) < most or (rmse, number) < self.best[-1]

    def done(self, record: Record) -> None:
        if record.rmse is None or not self._place(record.rmse, record.number):
            return
        self.best = sorted([*self.best, (record.rmse, record.number)])
        for _, number in self.best[self.laboratory.store.protocol.selection :]:
            if not self.laboratory.spread:
                self.laboratory.weights.drop(self.experiment, self.seed, number)
        del self.best[self.laboratory.store.protocol.selection :]
