"""A search that outlives its process: Optuna's study in an SQLite file, trials trained by an engine.

The study is the truth. What a trial came to is written before the trial is told as finished, so a process may be killed
at any moment: the next one tells what was written, marks what was still in training as failed, with the reason, and
queues those points again. `optuna-dashboard sqlite:///FILE` shows it all, also while it runs.

The sampler is seeded for every trial by the study's seed and the trial's place in the order, not once for a process.
A resumed search would otherwise draw its first random points again.
"""

from __future__ import annotations

import errno
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..atomic import replacing
from ..model import NetworkConfig
from ..tokens import Tokenizer
from ..tokens.door import to_whole
from ..train import Epoch, History, TrainConfig
from ..train.population import Halving, Trained, Trial
from .engines import Data, Engine, Failed, Local, value_of
from .space import Point, Space

if TYPE_CHECKING:
    from .cluster import Ray

# Attributes of a trial in the study.
RESULT, REASON, REPEATS, POINT, ENGINE = "result", "reason", "repeats", "point", "engine"
INTERRUPTED = "interrupted"
HOPELESS = 10
"""If so many trials have finished and all failed, the search gives up: it is not the points that are wrong."""


def import_optuna() -> Any:
    """Optuna, or how to get it."""
    try:
        import optuna
    except ImportError as error:
        raise ImportError(f"a search needs Optuna ({error}). Install it with: pip install 'bsat[search]'") from error
    return optuna


@dataclass(frozen=True)
class Sampler:
    """Optuna's tree-structured Parzen estimator as the paper sets it (appendix, "Search Strategy")."""

    startup: int = 40
    """random points at first, until so many have finished"""
    candidates: int = 500
    """points compared by their expected improvement"""
    constant_liar: bool = True
    multivariate: bool = True
    group: bool = True

    def make(self, seed: int, place: int) -> Any:
        """The sampler for the point of this place in the order."""
        optuna = import_optuna()
        (state,) = np.random.SeedSequence([seed, place]).generate_state(1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            return optuna.samplers.TPESampler(
                n_startup_trials=self.startup,
                n_ei_candidates=self.candidates,
                constant_liar=self.constant_liar,
                multivariate=self.multivariate,
                group=self.group,
                seed=int(state),
            )


@dataclass(frozen=True)
class Interrupted:
    """A trial that was in training when its process ended."""

    number: int
    point: Point
    """empty if it was not even drawn"""
    epochs: int
    """that had been reported, and are lost"""

    def __str__(self) -> str:
        if not self.point:
            return f"trial {self.number} had no point yet"
        return f"trial {self.number} lost {self.epochs} reported epochs; its point is queued again"


@dataclass(frozen=True)
class Record:
    """A trial of a study."""

    number: int
    state: str
    """"complete", "pruned", "failed", "interrupted", "running" or "waiting\""""
    point: Point
    value: float | None
    """the least validation RMSE of the scaled series"""
    rmse: float | None
    """in the data's unit"""
    seconds: float | None
    history: History | None
    reason: str
    """why it failed"""
    repeats: int | None
    """the interrupted trial whose point it takes up"""
    engine: str | None
    memory: int | None = None
    """peak bytes on the device; None on a CPU"""
    pack: int | None = None
    """how many trained beside it"""

    @property
    def finished(self) -> bool:
        """Whether it counts: it will not be run again."""
        return self.state in ("complete", "pruned", "failed")

    def better_than(self, other: Record | None) -> bool:
        """By the validation RMSE, of whatever has one; of equals the earlier one."""
        if self.value is None or not self.finished:
            return False
        return other is None or other.value is None or (self.value, self.number) < (other.value, other.number)


@dataclass(frozen=True)
class SearchProgress:
    """How far a search has come."""

    trials: int
    done: int
    """finished in whatever way, the pruned and the failed included"""
    running: int
    pruned: int
    failed: int
    best: float | None
    """the least validation RMSE, in the data's unit"""
    best_number: int | None
    seconds: float
    """since this process began"""
    left: float | None
    """seconds, at the pace of this process; None before its first trial has finished"""
    epoch: int = 0
    """of what trains now"""


@dataclass
class Outcome:
    """What a search found."""

    name: str
    records: list[Record]
    """all, in the order in which they were asked for"""
    interrupted: list[Interrupted] = field(default_factory=list)
    """what an earlier process had lost in flight, when this one began"""

    @property
    def finished(self) -> list[Record]:
        """Those that count."""
        return [record for record in self.records if record.finished]

    def best(self, count: int = 1) -> list[Record]:
        """By the validation RMSE; those that were halved have one, too."""
        scored = [r for r in self.finished if r.value is not None]
        return sorted(scored, key=lambda r: (r.value, r.number))[:count]


@dataclass(frozen=True, kw_only=True)
class Search:
    """What is searched for.

    Args:
        name: of the study: the experiment's hash, since a study must not go on under another description.
        tokenizer: fitted; its degree is searched if the space has one.
        trials: that finish, over all processes that worked on it. Failed ones count, interrupted ones do not.
        space: by default the paper's for this tokenizer.
        network, train: what is the same for all trials.
        sampler: by default the paper's.
        seed: of the points; that of the networks is in `train`.
    """

    name: str
    tokenizer: Tokenizer
    trials: int = 200
    space: Space = None  # type: ignore[assignment]
    network: NetworkConfig = field(default_factory=NetworkConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    sampler: Sampler = field(default_factory=Sampler)
    seed: int = 2025

    def __post_init__(self) -> None:
        object.__setattr__(self, "trials", to_whole(self.trials, "trials", 1))
        object.__setattr__(self, "seed", to_whole(self.seed, "seed", 0))
        if self.space is None:
            object.__setattr__(self, "space", Space.for_tokenizer(self.tokenizer))
        self.build(self.space.draw(self.seed))  # what cannot be built says so before anything is written

    def build(self, point: Point) -> Trial:
        """The trial at a point."""
        return self.space.to_trial(point, self.tokenizer, self.network, self.train)

    def describe(self) -> dict[str, Any]:
        """What must stay as it is when a search goes on; for JSON."""
        return {"space": self.space.to_dict(), "sampler": asdict(self.sampler), "seed": self.seed}


@dataclass(frozen=True)
class Watch:
    """Whoever wants to hear of a search; all are called in the process that searches.

    Args:
        report: whenever something has changed.
        lost: at the beginning, if an earlier process was interrupted, with what it lost.
        keep: with a trial's number and its network, before the study hears of it. If the process ends in between, the
            same point comes again under another number; so what is kept counts only once `done` tells of its trial.
        done: with every finished trial, once the study has it; at the beginning with those of earlier processes.
    """

    report: Callable[[SearchProgress], None] | None = None
    lost: Callable[[list[Interrupted]], None] | None = None
    keep: Callable[[int, Trained], None] | None = None
    done: Callable[[Record], None] | None = None


def run_search(
    data: Data,
    search: Search,
    storage: os.PathLike[str] | str,
    *,
    engine: Engine | Ray | None = None,
    watch: Watch | None = None,
) -> Outcome:
    """Search until so many trials have finished; go on with a search that is already there. See `run_searches`."""
    (outcome,) = run_searches(data, [search], storage, engine=engine, watches=[watch or Watch()])
    return outcome


def run_searches(
    data: Data,
    searches: Sequence[Search],
    storage: os.PathLike[str] | str,
    *,
    engine: Engine | Ray | None = None,
    watches: Sequence[Watch] | None = None,
) -> list[Outcome]:
    """Several searches on the same data: at once if the engine can, else one after the other.

    Args:
        data: the folds to train and to compare on.
        searches: with a name of its own each.
        storage: the SQLite file; it may hold many studies. With Ray, a folder beside it, of the same name without its
            suffix, which all nodes must reach.
        engine: by default `Local`.
        watches: one for each search.
    """
    from .cluster import Ray, run_on_ray

    if len({search.name for search in searches}) < len(searches):
        raise ValueError(f"`searches` must have different names; got {', '.join(s.name for s in searches)}.")
    path, engine = Path(storage), engine or Local()
    watches = list(watches or [Watch()] * len(searches))
    if isinstance(engine, Ray):
        folder = path.with_suffix("")
        pairs = zip(searches, watches, strict=True)
        return [run_on_ray(data, search, engine, folder=folder, watch=watch) for search, watch in pairs]
    with ExitStack() as stack:
        desks = []
        for search, watch in zip(searches, watches, strict=True):
            stack.enter_context(_alone(path, search.name))
            book = _Book(path, search, engine.halving)
            stack.callback(book.close)
            desks.append(_Desk(book, search, engine.name, watch))
        try:
            for desk in desks:
                desk.open()
            with closing(engine.run(data, desks)) as results:
                for place, result in results:
                    desks[place].finish(result)
        except BaseException as error:
            for desk in desks:
                desk.book.recover(f"{type(error).__name__} ended the search")
            raise
    return [Outcome(desk.search.name, desk.book.records(), desk.interrupted) for desk in desks]


def read_records(storage: os.PathLike[str] | str, name: str) -> list[Record]:
    """The trials of a study, whoever is working on it."""
    optuna = import_optuna()
    path = Path(storage)
    if not path.is_file():
        raise FileNotFoundError(f"{path} must be the file of a search; there is none.")
    backend = _open(path)
    try:
        study = optuna.load_study(study_name=name, storage=backend)
        return [to_record(frozen) for frozen in study.get_trials(deepcopy=False)]
    except KeyError:
        known = ", ".join(optuna.get_all_study_names(backend)) or "none"
        raise ValueError(f"`name` must be a study of {path}; got {name!r}. It holds: {known}.") from None
    finally:
        _close(backend)


# --------------------------------------------------------------------------------------------------------- the study


class _Book:
    """The study, and what this process writes into it."""

    def __init__(self, path: Path, search: Search, halving: Halving | None) -> None:
        self.optuna = optuna = import_optuna()
        self.path, self.name, self.space, self.sampler = path, search.name, search.space, search.sampler
        self.seed = search.seed
        pruner = (
            optuna.pruners.NopPruner()
            if halving is None
            else optuna.pruners.SuccessiveHalvingPruner(
                min_resource=halving.grace, reduction_factor=halving.reduction, min_early_stopping_rate=0
            )
        )
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(path) as temporary:  # Optuna makes its tables in many steps
                _close(_open(temporary))
        self.backend = _open(path)
        verbosity = optuna.logging.get_verbosity()
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        try:
            self.study = optuna.create_study(
                study_name=self.name, storage=self.backend, direction="minimize", pruner=pruner, load_if_exists=True
            )
        finally:
            optuna.logging.set_verbosity(verbosity)
        self._check(search.describe())
        self._id = self.backend.get_study_id_from_name(self.name)
        self.placed = 0
        """points that were drawn, repetitions not counted"""

    def _check(self, about: dict[str, Any]) -> None:
        known = self.study.user_attrs
        for key, value in about.items():
            if key not in known:
                self.study.set_user_attr(key, value)
            elif _plain(known[key]) != _plain(value):
                raise ValueError(
                    f"study {self.name!r} in {self.path} must go on as it began, with {key} = {known[key]!r}; "
                    f"got {value!r}. Give the search another name, or the description it began with."
                )

    def close(self) -> None:
        """Let go of the file. Records can still be read."""
        self._last = [to_record(frozen) for frozen in self.study.get_trials(deepcopy=False)]
        _close(self.backend)

    def records(self) -> list[Record]:
        """After `close`."""
        return self._last

    def record(self, number: int) -> Record:
        """One trial."""
        return to_record(self.backend.get_trial(self._trial_id(number)))

    def _trial_id(self, number: int) -> int:
        return int(self.backend.get_trial_id_from_study_id_trial_number(self._id, number))

    def _note(self, number: int, key: str, value: Any) -> None:
        self.backend.set_trial_user_attr(self._trial_id(number), key, value)

    # ---- asking

    def ask(self, count: int, engine: str) -> list[tuple[Any, Point]]:
        """Points for so many trials: first those that wait, then new ones."""
        asked = []
        for _ in range(count):
            self.study.sampler = self.sampler.make(self.seed, self.placed)
            trial = self.study.ask()
            point = self.space.suggest(trial)
            trial.set_user_attr(ENGINE, engine)
            if REPEATS not in trial.user_attrs:
                self.placed += 1
            asked.append((trial, point))
        return asked

    # ---- telling

    def finish(self, number: int, result: dict[str, Any]) -> None:
        """A trial has come to its end. Once the first line is done, it will not be run again."""
        self._note(number, RESULT, result)
        self._tell(number, result)

    def _tell(self, number: int, result: dict[str, Any]) -> None:
        state = self.optuna.trial.TrialState
        if result["reason"]:
            self._note(number, REASON, result["reason"])
            self.study.tell(number, state=state.FAIL)
        elif result["stopped"] == "halved":
            # A pruned trial's value is the last that was reported.
            step = len(result["history"]["epochs"])
            self.backend.set_trial_intermediate_value(self._trial_id(number), step, result["value"])
            self.study.tell(number, state=state.PRUNED)
        else:
            self.study.tell(number, result["value"])

    # ---- after an interruption

    def recover(self, why: str) -> list[Interrupted]:
        """Set right what a process left behind, whose end may have come between any two lines, of these too."""
        state = self.optuna.trial.TrialState
        every = self.study.get_trials(deepcopy=False)
        taken_up = {t.user_attrs[REPEATS] for t in every if REPEATS in t.user_attrs}
        lost = []
        for trial in every:
            if trial.state != state.RUNNING:
                continue
            if RESULT in trial.user_attrs:
                self._tell(trial.number, trial.user_attrs[RESULT])
                continue
            point = trial.user_attrs.get(POINT) or dict(trial.params)
            whole = set(point) == set(self.space.ranges)
            if whole and trial.number not in taken_up:
                self.study.enqueue_trial(point, user_attrs={REPEATS: trial.number, POINT: point})
            item = Interrupted(trial.number, point if whole else {}, len(trial.intermediate_values))
            self._note(trial.number, REASON, f"{INTERRUPTED}: {why}; {item}")
            self.study.tell(trial.number, state=state.FAIL)
            lost.append(item)
        # A point that was not wholly drawn is drawn again, the same if it is a random one.
        self.placed = sum(
            REPEATS not in t.user_attrs and set(t.params) == set(self.space.ranges)
            for t in self.study.get_trials(deepcopy=False)
        )
        return lost


def _result(result: Trained | Failed) -> dict[str, Any]:
    """What is written of a trial's end."""
    if isinstance(result, Failed):
        return {"reason": result.reason, "stopped": "failed", "value": None, "rmse": None, "seconds": None}
    history, reason = result.history, ""
    if history.best_epoch < 0:
        reason = f"diverged in its first epoch, at learning_rate = {result.trial.train.learning_rate:g}"
    return {
        "reason": reason,
        "stopped": history.stopped,
        "value": None if reason else value_of(result),
        "rmse": None if reason else result.rmse,
        "seconds": result.seconds,
        "memory": result.memory,
        "pack": result.pack,
        "history": history.to_dict(),
    }


def to_record(frozen: Any) -> Record:
    """From an Optuna trial."""
    attrs = frozen.user_attrs
    result = attrs.get(RESULT, {})
    state = {"COMPLETE": "complete", "PRUNED": "pruned", "FAIL": "failed"}.get(frozen.state.name)
    reason = attrs.get(REASON, "")
    if state is None:
        state = frozen.state.name.lower()
    elif state == "failed" and RESULT not in attrs:
        state = "interrupted"
    return Record(
        number=frozen.number,
        state=state,
        point=dict(attrs.get(POINT) or frozen.params),
        value=result.get("value"),
        rmse=result.get("rmse"),
        seconds=result.get("seconds"),
        history=History.from_dict(result["history"]) if result.get("history") else None,
        reason=reason,
        repeats=attrs.get(REPEATS),
        engine=attrs.get(ENGINE),
        memory=result.get("memory"),
        pack=result.get("pack"),
    )


def _plain(value: Any) -> Any:
    """As it is after a way through JSON."""
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, (list, tuple)) else value


def _open(path: Path) -> Any:
    text = str(path.resolve())
    if "?" in text:
        raise ValueError(
            f"`storage` must not have a question mark in its path; got {text}. SQLite's addresses end there."
        )
    text = text.replace("{", "{{").replace("}", "}}")  # Optuna fills in templates
    return import_optuna().storages.RDBStorage(
        f"sqlite:///{text}", engine_kwargs={"connect_args": {"timeout": 60}}
    )  # others may be reading


def _close(backend: Any) -> None:
    backend.remove_session()
    backend.engine.dispose()


@contextmanager
def _alone(path: Path, name: str) -> Iterator[None]:
    """One process at a time works on a study, so whatever is running when another begins has lost its process."""
    if sys.platform == "win32":
        yield
        return
    import fcntl

    path.parent.mkdir(parents=True, exist_ok=True)
    with (path.parent / f".{path.name}.{name}.lock").open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BlockingIOError(
                f"study {name!r} in {path} is being searched by another process. Wait for it."
            ) from None
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.EINVAL, errno.ENOSYS):
                raise
        yield


# ---------------------------------------------------------------------------------------------------------- progress


class _Desk:
    """See `engines.Desk`: the study, and the counts for the progress."""

    def __init__(self, book: _Book, search: Search, engine: str, watch: Watch) -> None:
        self.book, self.search, self.engine, self.watch = book, search, engine, watch
        self.began = time.perf_counter()
        self.done = self.pruned = self.failed = self.here = self.at = 0
        self.best: Record | None = None
        self.interrupted: list[Interrupted] = []
        self._asked: dict[int, Any] = {}

    def open(self) -> None:
        """Take up what is there."""
        self.interrupted = self.book.recover("its process ended")
        if self.interrupted and self.watch.lost is not None:
            self.watch.lost(self.interrupted)
        for frozen in self.book.study.get_trials(deepcopy=False):
            record = to_record(frozen)
            if record.finished:
                self._count(record)
        self.here = 0
        self.tell()

    def draw(self, count: int) -> list[tuple[int, Trial]]:
        asked = self.book.ask(min(count, self.search.trials - self.done - len(self._asked)), self.engine)
        self._asked |= {trial.number: trial for trial, _ in asked}
        if asked:
            self.at = 0
            self.tell()
        return [(trial.number, self.search.build(point)) for trial, point in asked]

    def epoch(self, number: int, last: Epoch, best: float) -> bool:
        trial = self._asked[number]
        trial.report(best, last.epoch + 1)
        return bool(trial.should_prune())

    def alive(self, epoch: int) -> None:
        self.at = epoch
        self.tell()

    def finish(self, result: Trained | Failed) -> None:
        """A trial has come to its end."""
        number = result.index
        if isinstance(result, Trained) and self.watch.keep is not None and result.history.best_epoch >= 0:
            self.watch.keep(number, result)
        self.book.finish(number, _result(result))
        del self._asked[number]
        self._count(self.book.record(number))
        self.tell()
        self._check_hope()

    def _count(self, record: Record) -> None:
        self.done += 1
        self.here += 1
        self.pruned += record.state == "pruned"
        self.failed += record.state == "failed"
        if record.better_than(self.best):
            self.best = record
        if self.watch.done is not None:
            self.watch.done(record)

    def tell(self) -> None:
        """Show how far it is."""
        if self.watch.report is None:
            return
        seconds, trials = time.perf_counter() - self.began, self.search.trials
        self.watch.report(
            SearchProgress(
                trials=trials,
                done=self.done,
                running=len(self._asked),
                pruned=self.pruned,
                failed=self.failed,
                best=None if self.best is None else self.best.rmse,
                best_number=None if self.best is None else self.best.number,
                seconds=seconds,
                left=seconds / self.here * max(0, trials - self.done) if self.here else None,
                epoch=self.at,
            )
        )

    def _check_hope(self) -> None:
        if self.failed >= HOPELESS and self.failed == self.done:
            reasons = [
                r.reason for r in map(to_record, self.book.study.get_trials(deepcopy=False)) if r.state == "failed"
            ]
            raise RuntimeError(
                f"all of the first {self.done} trials failed, the last with: {reasons[-1]}. They are kept; mend the "
                f"cause and search under another name."
            )
