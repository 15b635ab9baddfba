"""A search that outlives its process: Optuna's study in an SQLite file, trials trained by an engine.

The study is the truth. What a trial came to is written before the trial is told as finished, so a process may be killed
at any moment: the next one tells what was written, marks what was still in training as failed, with the reason, and
queues those points again. `optuna-dashboard sqlite:///FILE` shows it all, also while it runs.

The sampler is seeded for every trial by the study's seed and the trial's place in the order, not once for a process.
A resumed search would otherwise draw its first random points again.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

from ..atomic import alone, replacing
from ..train import Epoch, History
from ..train.population import Trained, Trial
from .cluster import Ray, read_trials, run_on_ray
from .contract import Interrupted, Outcome, Record, Rungs, Search, Tally, Watch, import_optuna
from .engines import Data, Engine, Failed, Local, UnheardError, explain, value_of
from .space import Point

# Attributes of a trial in the study.
RESULT, REASON, REPEATS, POINT, ENGINE = "result", "reason", "repeats", "point", "engine"
INTERRUPTED = "interrupted"


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
    if len({search.name for search in searches}) < len(searches):
        raise ValueError(f"`searches` must have different names; got {', '.join(s.name for s in searches)}.")
    path, engine = Path(storage), engine or Local()
    watches = list(watches or [Watch()] * len(searches))
    if isinstance(engine, Ray):
        folder = path.with_suffix("")
        pairs = zip(searches, watches, strict=True)
        return [run_on_ray(data, search, engine, folder=folder, watch=watch) for search, watch in pairs]
    with ExitStack() as stack:
        stack.enter_context(_told_as_files(path))
        desks = []
        for search, watch in zip(searches, watches, strict=True):
            stack.enter_context(alone(path, search.name))
            book = _Book(path, search)
            stack.callback(book.close)
            desks.append(_Desk(book, search, engine, watch))
        try:
            for desk in desks:
                desk.open()
            with closing(engine.run(data, desks)) as results:
                for place, result in results:
                    desks[place].finish(result)
        except BaseException as error:
            cause = error.__cause__ if isinstance(error, UnheardError) else None
            for desk in desks:
                desk.stop(f"{type(cause or error).__name__} ended the search")
            if cause is not None:
                raise cause from None
            raise
    return [Outcome(desk.search.name, desk.book.records(), desk.interrupted) for desk in desks]


@contextmanager
def _told_as_files(path: Path) -> Iterator[None]:
    """What is wrong with the file of the study, as an error of a file."""
    optuna = import_optuna()
    from sqlalchemy.exc import SQLAlchemyError

    try:
        yield
    except (optuna.exceptions.StorageInternalError, SQLAlchemyError) as error:
        why = " ".join(str(error.__cause__ or error).split())[:200]
        raise OSError(
            f"{path} cannot be used as the file of a study: {why}. Make room if the disk is full; else move the file "
            f"away, and the search begins anew."
        ) from error


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


def read_names(storage: os.PathLike[str] | str) -> list[str]:
    """The studies of a file; none if there is no file."""
    path = Path(storage)
    if not path.is_file():
        return []
    with _told_as_files(path):
        backend = _open(path)
        try:
            return list(import_optuna().get_all_study_names(backend))
        finally:
            _close(backend)


def read_search(storage: os.PathLike[str] | str, name: str, engine: Engine | Ray) -> list[Record]:
    """The finished trials of a search that `run_searches` would go on with; none if it has not begun."""
    path = Path(storage)
    try:
        if isinstance(engine, Ray):
            found = read_trials(path.with_suffix(""), name)
        else:
            with _told_as_files(path):
                found = read_records(path, name)
    except (FileNotFoundError, ValueError):
        return []
    return [record for record in found if record.finished]


# --------------------------------------------------------------------------------------------------------- the study


class _Book:
    """The study, and what this process writes into it."""

    def __init__(self, path: Path, search: Search) -> None:
        self.optuna = optuna = import_optuna()
        self.path, self.name, self.space, self.sampler = path, search.name, search.space, search.sampler
        self.seed = search.seed
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(path, keep=True) as temporary:  # Optuna makes its tables in many steps
                _close(_open(temporary))
        self.backend = _open(path)
        verbosity = optuna.logging.get_verbosity()
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        try:
            self.study = optuna.create_study(
                study_name=self.name, storage=self.backend, direction="minimize", load_if_exists=True
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
        self._last = self.read()
        _close(self.backend)

    def records(self) -> list[Record]:
        """After `close`."""
        return self._last

    def read(self) -> list[Record]:
        """Before `close`."""
        return [to_record(frozen) for frozen in self.study.get_trials(deepcopy=False)]

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


class _Desk:
    """See `engines.Desk`: a study, and the counts for the progress."""

    def __init__(self, book: _Book, search: Search, engine: Engine, watch: Watch) -> None:
        self.book, self.search, self.engine, self.watch = book, search, engine.name, watch
        self.tally, self.rungs = Tally(search, watch), Rungs(engine.halving, search.train.max_epochs)
        self.interrupted: list[Interrupted] = []
        self._asked: dict[int, Any] = {}

    @property
    def scored(self) -> int:
        return self.tally.done - self.tally.failed

    def open(self) -> None:
        """Take up what is there."""
        self.interrupted = self.book.recover("its process ended")
        finished = [record for record in self.book.read() if record.finished]
        for record in finished:
            if record.history is not None:
                self.rungs.known(record.history)
        self.tally.open(self.interrupted, finished)

    def stop(self, why: str) -> None:
        """An error, or Ctrl-C, ends the search."""
        lost = self.book.recover(why)
        if lost and self.watch.lost is not None:
            self.watch.lost(lost)

    def draw(self, count: int) -> list[tuple[int, Trial]]:
        drawn: list[tuple[int, Trial]] = []
        while asked := self.book.ask(
            min(count - len(drawn), self.search.trials - self.tally.done - len(self._asked)), self.engine
        ):
            for trial, point in asked:
                self._asked[trial.number] = trial
                try:
                    drawn.append((trial.number, self.search.build(point)))
                except Exception as error:  # a point of which nothing can be built
                    self.finish(Failed(trial.number, explain(error)))
        if drawn:
            self.tally.running, self.tally.epoch = len(self._asked), 0
            self.tally.tell()
        return drawn

    def epoch(self, number: int, last: Epoch, best: float) -> bool:
        self._asked[number].report(best, last.epoch + 1)
        return self.rungs.ends(last.epoch + 1, best)

    def alive(self, epoch: int) -> None:
        self.tally.epoch = epoch
        self.tally.tell()

    def finish(self, result: Trained | Failed) -> None:
        """A trial has come to its end."""
        number = result.index
        if isinstance(result, Trained) and self.watch.keep is not None and result.history.best_epoch >= 0:
            self.watch.keep(number, result)
        self.book.finish(number, _result(result))
        del self._asked[number]
        self.tally.running = len(self._asked)
        self.tally.count(self.book.record(number))
