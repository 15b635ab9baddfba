"""What a search is, and what is told of it; whoever keeps and runs it: `study` (Optuna's file) or `cluster` (Ray)."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from ..model import NetworkConfig
from ..tokens import Tokenizer
from ..tokens.door import to_whole
from ..train import History, TrainConfig
from ..train.population import Halving, Trained, Trial
from .space import Point, Space, Whole

HOPELESS = 10
"""If so many trials in a row fail, the search gives up: it is not the points that are wrong."""


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
    """that had been reported, and are lost; 0 also if nobody reports them, as of a population"""

    def __str__(self) -> str:
        if not self.point:
            return f"trial {self.number} had no point yet"
        done = f" ({self.epochs} epochs done)" if self.epochs else ""
        return f"trial {self.number} was in flight{done}; its point is queued again"


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
        point = self.space.draw(self.seed)  # what cannot be built says so before anything is written
        for degree in {self.space.degree.low, self.space.degree.high} if isinstance(self.space.degree, Whole) else {0}:
            self.build({**point, "degree": degree} if "degree" in point else point)

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
        lost: at the beginning, if an earlier process was killed, with what it lost; or when this one is stopped.
        keep: with a trial's number and its network, before the study hears of it. If the process ends in between, the
            same point comes again under another number; so what is kept counts only once `done` tells of its trial.
        done: with every finished trial, once the study has it; at the beginning with those of earlier processes.
    """

    report: Callable[[SearchProgress], None] | None = None
    lost: Callable[[list[Interrupted]], None] | None = None
    keep: Callable[[int, Trained], None] | None = None
    done: Callable[[Record], None] | None = None


class Tally:
    """Counts what has finished, and tells who watches."""

    def __init__(self, search: Search, watch: Watch) -> None:
        self.search, self.watch = search, watch
        self.began = time.perf_counter()
        self.done = self.pruned = self.failed = self.streak = 0
        self.running = self.epoch = 0
        self.best: Record | None = None
        self._earlier = 0

    def open(self, interrupted: list[Interrupted], finished: list[Record]) -> None:
        """What earlier processes left."""
        if interrupted and self.watch.lost is not None:
            self.watch.lost(interrupted)
        for record in finished:
            self._count(record)
        self._earlier = self.done
        self.tell()

    def count(self, record: Record) -> None:
        """One more has finished."""
        self._count(record)
        self.tell()
        self.streak = self.streak + 1 if record.state == "failed" else 0
        if self.streak >= HOPELESS:
            raise RuntimeError(
                f"{self.streak} trials in a row failed, the last with: {record.reason}. They are kept as failed; mend "
                f"the cause and start again, for what is left."
            )

    def _count(self, record: Record) -> None:
        self.done += 1
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
        seconds, here = time.perf_counter() - self.began, self.done - self._earlier
        self.watch.report(
            SearchProgress(
                trials=self.search.trials,
                done=self.done,
                running=self.running,
                pruned=self.pruned,
                failed=self.failed,
                best=None if self.best is None else self.best.rmse,
                best_number=None if self.best is None else self.best.number,
                seconds=seconds,
                left=seconds / here * max(0, self.search.trials - self.done) if here else None,
                epoch=self.epoch,
            )
        )


class Rungs:
    """Asynchronous successive halving: at a rung a trial is compared with all that came there before it, and goes on if
    it is among the best one in `reduction` of them, or the best so far while they are few. What was interrupted does
    not count. (Optuna's pruner has the same rule, but keeps what interrupted trials had.)"""

    def __init__(self, halving: Halving | None, max_epochs: int) -> None:
        self.halving = halving
        self.values: dict[int, list[float]] = {r: [] for r in (halving.rungs(max_epochs) if halving else [])}

    def known(self, history: History) -> None:
        """A trial of an earlier process."""
        best = math.inf
        for epoch in history.epochs:
            best = min(best, epoch.val_scaled_rmse)
            if epoch.epoch + 1 in self.values:
                self.values[epoch.epoch + 1].append(best)

    def ends(self, epochs: int, best: float) -> bool:
        """Whether a trial with this best value after so many epochs ends here."""
        if self.halving is None or epochs not in self.values:
            return False
        rivals = self.values[epochs]
        rivals.append(best)
        return best > sorted(rivals)[max(0, len(rivals) // self.halving.reduction - 1)]
