"""The search on Ray Tune, the paper's own engine: on this machine, or on all machines of a Ray cluster.

Tune asks Optuna for points, gives trials to the nodes, halves by ASHA, and starts a dead node's trials elsewhere. What
a search came to does not live in Ray, though, but in a folder that all nodes must reach under the same path (NFS or the
like), so it outlives any node, and Ray itself::

    NAME/search.json                         what is searched; going on with anything else is refused
    NAME/trials/0007.json                    a trial: its point once it is drawn, and at its end all that came of it
    NAME/trials/0007/training.safetensors    its training while it lasts, whole after every epoch (`train.checkpoint`)
    NAME/tune/0001/                          Tune's own files, one folder a process; nobody reads them

A process may be killed at any moment. The next one goes on from these files: finished trials are told to sampler and
scheduler and never trained again; those in flight keep number and point, and go on after their last whole epoch. Tune
could restore an experiment, too, but its snapshots are ten seconds old or more, so it would train finished trials
again, and they are pickles. All that is read here is JSON or safetensors. (Ray's own processes do exchange pickles:
whoever can reach a Ray cluster can run code on it.)

The paper's engine differs from `engines.Local` in two ways. ASHA keeps what lies above a quantile of the rung, Optuna's
pruner the best of it by rank. And OptunaSearch tells a halved trial as a complete one, with its best value so far.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import secrets
import shutil
import signal
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..atomic import alone, leftovers, replacing, whole
from ..tokens.door import to_whole
from ..train import Epoch, History
from ..train.checkpoint import NAME, Checkpoint
from ..train.population import Halving, Trained, Trial
from ..train.settings import finished
from .contract import Interrupted, Outcome, Record, Search, Tally, Watch, import_optuna
from .engines import Data, explain, pack_up, train_alone, unpack, value_of
from .space import Point

MAX_FAILURES = 3
"""A trial is started again after so many deaths of its worker or node; errors of its own are not repeated."""
ABOUT = "search.json"
# Of a result, as Tune sees it.
EPOCH, VALUE, STOPPED, REASON, UNREACHABLE, NODE, MEMORY = (
    "epoch", "value", "stopped", "reason", "unreachable", "node", "memory",
)  # fmt: skip


def import_ray(part: str = "") -> Any:
    """Ray, or a part of it, or how to get it."""
    try:
        return import_module(f"ray.{part}" if part else "ray")
    except ImportError as error:
        raise ImportError(
            f"a search on a cluster needs Ray Tune ({error}). Install it with: pip install 'bsat[cluster]'"
        ) from error


@dataclass(frozen=True)
class Ray:
    """Ray Tune, set as in the paper (appendix, "Search Strategy"): five trials at once, asynchronous halving.

    Args:
        address: of a running cluster, e.g. "10.0.0.1:6379", or "auto" on one of its nodes; None starts Ray on this
            machine for the time of the search.
        at_once: trials at a time, as far as the cluster has room.
        halving: its rungs; None trains all to their end.
        cpus, gpus: a trial's share of a node; e.g. gpus = 0.2 lets five share one.
    """

    address: str | None = None
    at_once: int = 5
    halving: Halving | None = field(default_factory=Halving)
    cpus: float = 1
    gpus: float = 0
    name: str = field(default="ray", init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "at_once", to_whole(self.at_once, "at_once", 1))
        for name in ("cpus", "gpus"):
            share = getattr(self, name)
            if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 <= share < math.inf:
                raise ValueError(f"`{name}` must be a number of at least 0; got {share!r}. Pass e.g. 1.")
        if self.address is not None and self.address.startswith("ray://"):
            raise ValueError(
                f"`address` must be that of the cluster itself, as `host:port`; got {self.address}, Ray's client. "
                f"Start the search on a node of the cluster, with address = 'auto'."
            )


@dataclass(frozen=True)
class Paused(Interrupted):
    """A trial that was in training when its process ended, and goes on."""

    saved: int = 0
    """epochs that are not lost"""

    def __str__(self) -> str:
        if not self.saved:
            return f"trial {self.number} was interrupted before its first epoch was whole; it begins again"
        return f"trial {self.number} was interrupted after {self.saved} whole epochs, which are kept; it goes on"


def run_on_ray(
    data: Data, search: Search, engine: Ray, folder: os.PathLike[str] | str, *, watch: Watch | None = None
) -> Outcome:
    """Search until so many trials have finished; go on with a search that is already in the folder.

    Args:
        data: the folds to train and to compare on; on whatever device: with `engine.gpus`, trials train on GPUs.
        search: what is searched for.
        engine: where.
        folder: may hold many searches. All nodes, which must have bsat installed, must reach it under this path.
        watch: who wants to hear of it. A trial has one number for good, so `keep` may come twice for one, if the
            process was killed before `done`.
    """
    import_ray("tune")
    import_optuna()
    watch = watch or Watch()
    home = _home(folder, search.name)
    with alone(home / ABOUT, search.name):
        ledger = _Ledger(home, _describe(data, search, engine))
        desk = _Desk(ledger, search, engine, watch)
        desk.open()
        if desk.done < search.trials:
            with _connected(engine):
                _fit(data, desk)
        if desk.error is not None:
            raise desk.error
        if desk.done < search.trials:
            raise KeyboardInterrupt  # Tune ends early for no other reason
    return Outcome(search.name, ledger.records(), desk.interrupted)


def read_trials(folder: os.PathLike[str] | str, name: str) -> list[Record]:
    """The trials of a search in a folder, whoever is working on it."""
    home = _home(folder, name)
    if not (home / ABOUT).is_file():
        known = ", ".join(sorted(path.parent.name for path in home.parent.glob(f"*/{ABOUT}"))) or "none"
        raise ValueError(f"`name` must be a search in {home.parent}; got {name!r}. It holds: {known}.")
    return _Ledger(home).records()


def _home(folder: os.PathLike[str] | str, name: str) -> Path:
    if not name or name in (".", "..") or any(c in name for c in "/\\:"):
        raise ValueError(f"`name` must serve as the name of a folder; got {name!r}. Leave out slashes and colons.")
    return Path(folder).resolve() / name


# --------------------------------------------------------------------------------------------------------- the folder


class _Ledger:
    """The folder of a search. The searching process alone writes the .json files, a trial's worker its training."""

    def __init__(self, folder: Path, about: dict[str, Any] | None = None) -> None:
        self.folder, self.trials = folder, folder / "trials"
        if about is not None:
            self._check(about)
            self.trials.mkdir(exist_ok=True)
            for left in (*leftovers(folder, age=3600), *leftovers(self.trials, age=3600)):
                left.unlink(missing_ok=True)
        self.about = about

    def _check(self, about: dict[str, Any]) -> None:
        path = self.folder / ABOUT
        if not path.exists():
            _write(path, about)
            return
        known = _read(path)
        for key, value in json.loads(json.dumps(about)).items():
            if known.get(key) != value:
                raise ValueError(
                    f"the search in {self.folder} must go on as it began, with {key} = {known.get(key)!r}; got "
                    f"{value!r}. Give the search another name, or the description it began with."
                )

    def path(self, number: int) -> Path:
        return self.trials / f"{number:04d}.json"

    def training(self, number: int) -> Path:
        return self.trials / f"{number:04d}"

    def fingerprint(self, number: int, point: Point) -> str:
        return hashlib.sha256(json.dumps([self.about, number, point]).encode()).hexdigest()

    def draw(self, number: int, point: Point) -> None:
        """From now on, this is the point of this number."""
        _write(self.path(number), {"number": number, "state": "running", "point": point})

    def note(self, number: int, result: dict[str, Any]) -> Record:
        """More of a trial. With a state that counts as finished, it will not be run again."""
        content = {**_read(self.path(number)), **result}
        _write(self.path(number), content)
        return _to_record(content)

    def clear(self, number: int) -> None:
        """The training is over."""
        shutil.rmtree(self.training(number), ignore_errors=True)

    def saved(self, number: int) -> int:
        """Whole epochs of a trial in flight."""
        try:
            return len(_read_training(self.training(number))[0].epochs)
        except OSError:
            return 0

    def records(self) -> list[Record]:
        """All, by their numbers."""
        return sorted((_to_record(_read(path)) for path in whole(self.trials, "*.json")), key=lambda r: r.number)


def _write(path: Path, content: dict[str, Any]) -> None:
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(content, allow_nan=False) + "\n", encoding="utf-8")


def _read(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}. The folder of the search is damaged.") from error
    return content


def _to_record(content: dict[str, Any]) -> Record:
    history = content.get("history")
    return Record(
        number=content["number"],
        state=content["state"],
        point=content["point"],
        value=content.get("value"),
        rmse=content.get("rmse"),
        seconds=content.get("seconds"),
        history=History.from_dict(history) if history else None,
        reason=content.get("reason", ""),
        repeats=None,
        engine="ray",
        memory=content.get("memory"),
        pack=content.get("pack"),
    )


def _read_training(folder: Path) -> tuple[History, dict[str, Tensor]]:
    """The history and the best weights in a trial's checkpoint."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(folder / NAME, "pt") as file:
            history = History.from_dict(json.loads(file.metadata()["history"]))
            names = [name for name in file.keys() if name.startswith("best.")]  # noqa: SIM118
            return history, {name[len("best.") :]: file.get_tensor(name) for name in names}
    except SafetensorError as error:
        raise OSError(f"{folder / NAME} is not a whole checkpoint ({error})") from error


def _describe(data: Data, search: Search, engine: Ray) -> dict[str, Any]:
    """All that shapes a search, but for its length."""
    digest = hashlib.sha256()
    folds, mean, deviation, _ = pack_up(data)
    for part in (*(a for fold in folds for a in fold[:3]), mean, deviation):
        digest.update(f"{part.dtype}{part.shape}".encode())
        digest.update(part.tobytes())
    tokenizer = search.tokenizer
    about = {
        "name": search.name,
        **search.describe(),
        "tokenizer": {"kind": type(tokenizer).__name__, **tokenizer.get_params()},
        "network": asdict(search.network),
        "train": asdict(search.train),
        "halving": None if engine.halving is None else asdict(engine.halving),
        "data": {"sha256": digest.hexdigest(), "lookback": data.train.lookback, "horizon": data.train.horizon},
    }
    if hasattr(tokenizer, "clip_factor_"):
        about["tokenizer"]["clip_factor_"] = float(tokenizer.clip_factor_)
    return about


# ------------------------------------------------------------------------------------------------ the searching process


class _Desk:
    """What this process knows of the search; Tune asks it for points and tells it of results."""

    def __init__(self, ledger: _Ledger, search: Search, engine: Ray, watch: Watch) -> None:
        self.ledger, self.search, self.engine, self.watch = ledger, search, engine, watch
        self.tally = Tally(search, watch)
        self.running: set[int] = set()
        self.interrupted: list[Interrupted] = []
        self.earlier: list[Record] = []
        """finished before this process began"""
        self.waiting: list[tuple[int, Point]] = []
        """drawn before, and not finished"""
        self.flying: set[int] = set()
        """drawn from this desk, and not finished"""
        self.deaths: Counter[int] = Counter()
        self.next = 0
        self.nodes: dict[int, list[str]] = {}
        self.error: BaseException | None = None
        """ends the search"""

    def __reduce__(self) -> Any:
        """Tune pickles whoever listens to it, for a restore that never comes."""
        return object, ()

    @property
    def done(self) -> int:
        return self.tally.done

    def open(self) -> None:
        """Take up what is there."""
        for record in self.ledger.records():
            self.next = record.number + 1
            if record.finished:
                self.earlier.append(record)
                continue
            self.waiting.append((record.number, record.point))
            self.interrupted.append(Paused(record.number, record.point, 0, self.ledger.saved(record.number)))
        self.tally.open(self.interrupted, self.earlier)

    def draw(self) -> tuple[int, Point | None] | None:
        """A number, and its point if it has one; None if there are enough."""
        if self.waiting:
            number, point = self.waiting.pop(0)
        elif self.done + len(self.flying) < self.search.trials:
            number, point = self.next, None
            self.next += 1
        else:
            return None
        self.flying.add(number)
        return number, point

    # ---- what Tune tells

    def start(self, number: int) -> None:
        self.running.add(number)
        self._tell()

    def epoch(self, number: int, result: dict[str, Any]) -> None:
        nodes = self.nodes.setdefault(number, [])
        if result[NODE] not in nodes[-1:]:
            nodes.append(result[NODE])
            self.ledger.note(number, {"nodes": nodes})
        self.tally.epoch = result[EPOCH]
        self.tally.tell()

    def rest(self, number: int) -> None:
        """Its worker died, and Tune will start it again."""
        self.deaths[number] += 1
        self.running.discard(number)
        self._tell()

    def give_up(self, number: int, point: Point, account: str) -> None:
        """Its worker died, and Tune will not start it again. Tune at times hears of one death twice, and gives up at
        once; then the trial is drawn again."""
        self.rest(number)
        if self.deaths[number] > MAX_FAILURES:
            self.fail(number, f"its worker died {self.deaths[number]} times; Ray's account is in {account}")
        else:
            self.flying.discard(number)
            self.waiting.append((number, point))

    def finish(self, number: int, point: Point, result: dict[str, Any]) -> None:
        """A trial has come to its end, or was halved."""
        if result.get(UNREACHABLE):
            raise RuntimeError(result[UNREACHABLE])
        if result.get(REASON):
            self.fail(number, result[REASON])
            return
        history, weights = self._fetch(number, result[EPOCH])
        history.stopped = result[STOPPED] or "halved"
        trained = Trained(
            index=number,
            trial=self.search.build(point),
            history=history,
            state=weights,
            seconds=sum(epoch.seconds for epoch in history.epochs),
            pack=1,
            memory=result[MEMORY],
        )
        if self.watch.keep is not None:
            self.watch.keep(number, trained)
        self._end(
            number,
            {
                "state": "pruned" if history.stopped == "halved" else "complete",
                "value": value_of(trained),
                "rmse": trained.rmse,
                "seconds": trained.seconds,
                "memory": trained.memory,
                "pack": 1,
                "history": history.to_dict(),
            },
        )

    def fail(self, number: int, reason: str) -> None:
        """A trial gave no network."""
        self._end(number, {"state": "failed", "reason": reason})

    def _fetch(self, number: int, epochs: int) -> tuple[History, dict[str, Tensor]]:
        """What its worker saved before it told of its last epoch. Shared folders may show it a little late."""
        folder, patience = self.ledger.training(number), time.monotonic() + 90
        while True:
            try:
                history, weights = _read_training(folder)
                if len(history.epochs) >= epochs:
                    return history, weights
                why = f"it has {len(history.epochs)} epochs instead of {epochs}"
            except OSError as error:
                why = str(error)
            if time.monotonic() > patience:
                raise RuntimeError(
                    f"trial {number} must find its checkpoint in {folder}, which all nodes must reach under this path; "
                    f"{why}. Choose a shared folder."
                )
            time.sleep(0.2)

    def _end(self, number: int, result: dict[str, Any]) -> None:
        record = self.ledger.note(number, result)
        self.ledger.clear(number)
        self.running.discard(number)
        self.flying.discard(number)
        self.tally.running = len(self.running)
        self.tally.count(record)

    def _tell(self) -> None:
        self.tally.running = len(self.running)
        self.tally.tell()


def _fit(data: Data, desk: _Desk) -> None:
    tune, search, engine, ledger = import_ray("tune"), desk.search, desk.engine, desk.ledger
    packed = (*pack_up(data)[:3], "cuda" if engine.gpus else "cpu")
    trainable = tune.with_parameters(
        _train_on_node, packed=packed, search=search, ledger=ledger, threads=max(1, int(engine.cpus))
    )
    storage = ledger.folder / "tune"
    storage.mkdir(exist_ok=True)
    tuner = tune.Tuner(
        tune.with_resources(trainable, {"cpu": engine.cpus, "gpu": engine.gpus}),
        tune_config=tune.TuneConfig(
            search_alg=_make_searcher(desk),
            scheduler=_make_scheduler(desk),
            num_samples=-1,  # until the searcher says that it has finished
            max_concurrent_trials=engine.at_once,
            reuse_actors=True,  # a new process would import torch for every trial
            trial_dirname_creator=lambda trial: f"{trial.config['number']:04d}-{trial.trial_id}",
        ),
        run_config=tune.RunConfig(
            name=f"{1 + sum(1 for _ in storage.iterdir()):04d}",
            storage_path=str(storage),
            failure_config=tune.FailureConfig(max_failures=MAX_FAILURES),
            callbacks=[_make_listener(desk)],
            stop=_make_stopper(desk),
            verbose=0,
        ),
    )
    with _hushed(), _signals():
        tuner.fit()


def _make_searcher(desk: _Desk) -> Any:
    """OptunaSearch with our points, each from a sampler seeded by its number, so that a resumed search draws as one
    that was never stopped; and with what earlier processes found."""
    optuna, search, ledger = import_optuna(), desk.search, desk.ledger

    class Searcher(import_ray("tune.search.optuna").OptunaSearch):  # type: ignore[misc]
        def suggest(self, trial_id: str) -> dict[str, Any] | str | None:
            drawn = desk.draw()
            if drawn is None:  # one in flight may yet come back
                return self.FINISHED if desk.done >= search.trials else None
            number, point = drawn
            self._ot_study.sampler = search.sampler.make(search.seed, number)
            if point is not None:
                self._ot_study.enqueue_trial(point)
            config: Point = super().suggest(trial_id)
            if point is None:
                ledger.draw(number, config)
            return {**config, "number": number}

        def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None:
            """Optuna need not hear of epochs: it does not halve here."""

        def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
            failed = error or not result or not math.isfinite(result.get(VALUE, math.inf))
            super().on_trial_complete(trial_id, None if failed else result, failed)

        def save(self, checkpoint_path: str) -> None:
            """Nobody would read it."""

    with _quiet_optuna(optuna):
        searcher = Searcher(search.space.suggest, metric=VALUE, mode="min", sampler=search.sampler.make(search.seed, 0))
    for record in desk.earlier:
        fixed = optuna.trial.FixedTrial(record.point)
        search.space.suggest(fixed)
        searcher._ot_study.add_trial(
            optuna.trial.create_trial(
                state=optuna.trial.TrialState.FAIL if record.value is None else optuna.trial.TrialState.COMPLETE,
                value=record.value,
                params=fixed.params,
                distributions=fixed.distributions,
            )
        )
    return searcher


def _make_scheduler(desk: _Desk) -> Any:
    """ASHA, with the rungs as earlier processes left them."""
    halving, longest = desk.engine.halving, desk.search.train.max_epochs
    schedulers = import_ray("tune.schedulers")
    if halving is None or not halving.rungs(longest):
        return schedulers.FIFOScheduler()
    asha = schedulers.ASHAScheduler(
        time_attr=EPOCH,
        metric=VALUE,
        mode="min",
        max_t=longest,
        grace_period=halving.grace,
        reduction_factor=halving.reduction,
    )
    for record in desk.earlier:
        if record.history is None:
            continue
        known, best, result = _Known(f"earlier-{record.number}"), math.inf, {}
        asha.on_trial_add(None, known)
        for epoch in record.history.epochs:
            best = min(best, epoch.val_scaled_rmse)
            result = {EPOCH: epoch.epoch + 1, VALUE: best}
            asha.on_trial_result(None, known, result)
        asha.on_trial_complete(None, known, result)
    return asha


@dataclass(frozen=True)
class _Known:
    """All that a scheduler wants of a trial."""

    trial_id: str


def _make_listener(desk: _Desk) -> Any:
    """Tune's word to the desk. Tune would take an error of a listener for one of the trial; here it ends the search."""

    def guarded(what: Callable[[], None]) -> None:
        if desk.error is not None:
            return
        try:
            what()
        except BaseException as error:
            desk.error = error

    def number(trial: Any) -> int:
        return int(trial.config["number"])

    class Listener(import_ray("tune").Callback):  # type: ignore[misc]
        def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
            guarded(lambda: desk.start(number(trial)))

        def on_trial_result(
            self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **info: Any
        ) -> None:
            guarded(lambda: desk.epoch(number(trial), result))

        def on_trial_recover(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
            guarded(lambda: desk.rest(number(trial)))

        def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
            guarded(lambda: desk.finish(number(trial), _point(trial.config), trial.last_result))

        def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
            guarded(lambda: desk.give_up(number(trial), _point(trial.config), f"{trial.path}/error.txt"))

    return Listener()


def _point(config: dict[str, Any]) -> Point:
    """Of what Tune knows of a trial."""
    return {name: value for name, value in config.items() if name != "number"}


def _make_stopper(desk: _Desk) -> Any:
    """Ends it all after an error of ours."""

    class Stop(import_ray("tune").Stopper):  # type: ignore[misc]
        def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
            return False

        def stop_all(self) -> bool:
            return desk.error is not None

    return Stop()


# ------------------------------------------------------------------------------------------------------------ on a node


def _train_on_node(
    config: dict[str, Any], *, packed: tuple[Any, ...], search: Search, ledger: _Ledger, threads: int
) -> None:
    """A trial, in a worker of Ray. Its own errors are results: whatever it raises, Tune would try again."""
    ray, tune = import_ray(), import_ray("tune")
    torch.set_num_threads(threads)
    node = ray.get_runtime_context().get_node_id()
    number = int(config["number"])
    point = _point(config)

    def tell(**result: Any) -> None:
        nothing = {EPOCH: 0, VALUE: math.inf, STOPPED: "", REASON: "", UNREACHABLE: "", MEMORY: None}
        tune.report({**nothing, NODE: node, **result})

    if not (ledger.folder / ABOUT).is_file():
        why = f"all nodes must reach {ledger.folder} under this path; {ray.util.get_node_ip_address()} does not"
        tell(**{UNREACHABLE: f"{why}. Choose a shared folder."})
        return
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*NumPy array is not writable.*")  # Ray shares it; so do we
            data = unpack(packed)
        trial = search.build(point)
        reporter = _Reporter(ledger.training(number), ledger.fingerprint(number, point), trial, tell)
        if train_alone(number, trial, data, _Alone(), reporter).history.best_epoch < 0:
            tell(**{REASON: f"diverged in its first epoch, at learning_rate = {point['learning_rate']:g}"})
    except _UnwrittenError as error:
        tell(**{UNREACHABLE: str(error)})
    except Exception as error:
        tell(**{REASON: explain(error)})


class _UnwrittenError(Exception):
    """The disk is full, or gone: nothing that a trial could be blamed for."""


class _Reporter(Checkpoint):
    """Tells Tune of an epoch once it is on disk, so that what Tune knows is never lost."""

    def __init__(self, folder: Path, fingerprint: str, trial: Trial, tell: Callable[..., None]) -> None:
        folder.mkdir(exist_ok=True)
        super().__init__(folder, fingerprint, resume=True)
        self.trial, self.tell = trial, tell

    def save(
        self, network: nn.Module, optimizer: torch.optim.Optimizer, best: dict[str, Tensor], history: dict[str, Any]
    ) -> None:
        """See `Checkpoint`."""
        try:
            super().save(network, optimizer, best, history)
        except OSError as error:
            raise _UnwrittenError(f"{self.path} cannot be written: {error}. Make room, and go on.") from error
        seen = History.from_dict(history)
        if not seen.stopped and finished(seen, self.trial.train):
            return  # the last epoch is told with its end, which comes right after
        device = next(network.parameters()).device
        self.tell(
            **{
                EPOCH: len(seen.epochs),
                VALUE: seen.best.val_scaled_rmse,
                STOPPED: seen.stopped if history["stopped"] else "",
                MEMORY: torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
            }
        )


class _Alone:
    """Who hears of a trial's epochs is its checkpoint."""

    def epoch(self, number: int, last: Epoch, best: float) -> bool:
        """ASHA ends it from outside."""
        return False

    def alive(self, epoch: int) -> None:
        """Tune hears of it."""


# ----------------------------------------------------------------------------------------------------------- around Ray


@contextmanager
def _connected(engine: Ray) -> Iterator[None]:
    """A connection, unless the caller has one already."""
    ray = import_ray()
    if ray.is_initialized():
        _check_room(ray.nodes(), engine)
        yield
        return
    variables = {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "PYTHONBREAKPOINT": os.environ.get("PYTHONBREAKPOINT"),  # which Ray would leave changed
    }
    start: dict[str, Any] = {"address": engine.address}
    if engine.address is None:
        start = {"address": "local", "include_dashboard": False}
        if not any(name.startswith("RAY_AUTH_") for name in os.environ):
            # Else Ray writes one into the home folder, and whatever cluster is started later insists on it.
            variables |= {"RAY_AUTH_TOKEN": _token(), "RAY_AUTH_MODE": None}
    with _environment(**variables):
        ray.init(**start, log_to_driver=False, logging_level=logging.ERROR)
        try:
            _check_room(ray.nodes(), engine)
            yield
        finally:
            ray.shutdown()


@cache
def _token() -> str:
    """A process's Ray remembers its first token."""
    return secrets.token_hex(32)


def _check_room(nodes: list[dict[str, Any]], engine: Ray) -> None:
    """Tune would wait for ever."""
    alive = [node["Resources"] for node in nodes if node["Alive"]]
    if not any(node.get("CPU", 0) >= engine.cpus and node.get("GPU", 0) >= engine.gpus for node in alive):
        have = "; ".join(f"{node.get('CPU', 0):g} CPUs and {node.get('GPU', 0):g} GPUs" for node in alive)
        raise ValueError(
            f"a node must have room for a trial, {engine.cpus:g} CPUs and {engine.gpus:g} GPUs; the cluster's have "
            f"{have}. Lower `cpus` or `gpus`."
        )


@contextmanager
def _hushed() -> Iterator[None]:
    """Tune without its tables and loggers; what it has to say of a trial comes by its result."""
    logger = logging.getLogger("ray.tune")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with (
            _quiet_optuna(import_optuna()),
            _environment(
                TUNE_DISABLE_AUTO_CALLBACK_LOGGERS="1", TUNE_PRINT_ALL_TRIAL_ERRORS="0", RAY_AIR_NEW_OUTPUT="0"
            ),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


@contextmanager
def _quiet_optuna(optuna: Any) -> Iterator[None]:
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        yield
    finally:
        optuna.logging.set_verbosity(verbosity)


@contextmanager
def _environment(**variables: str | None) -> Iterator[None]:
    """Variables for a while; None stands for one that is not set, whatever others make of it meanwhile."""
    before = {name: os.environ.get(name) for name in variables}

    def put(values: Mapping[str, str | None]) -> None:
        for name, value in values.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

    put(variables)
    try:
        yield
    finally:
        put(before)


@contextmanager
def _signals() -> Iterator[None]:
    """Tune ends at Ctrl-C by a handler of its own, which it leaves behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    names = [name for name in ("SIGINT", "SIGUSR1") if hasattr(signal, name)]
    before = {name: signal.getsignal(getattr(signal, name)) for name in names}
    try:
        yield
    finally:
        for name, handler in before.items():
            signal.signal(getattr(signal, name), handler)
