"""Engines: a few trials in, trained ones out, as they finish. They know nothing of studies."""

from __future__ import annotations

import math
import multiprocessing
import multiprocessing.connection
import os
import time
import warnings
from collections.abc import Generator, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from .. import nvrtc
from ..data.windows import Windows
from ..model import build_network
from ..tokens.door import to_whole
from ..train import Epoch, History, TokenBatches, train
from ..train.batches import bytes_per_window
from ..train.population import Halving, Progress, Trained, Trial, train_population

KEPT_TOKENS = 512 * 2**20
"""Bytes of tokens that a training on its own keeps; as `Forecaster` does."""


@dataclass(frozen=True, eq=False)
class Data:
    """What trials are trained and compared on. There is no place for the test fold: a search must not see it."""

    train: Windows
    val: Windows
    mean: Tensor
    """(R,) float64, the scaling of the rows, for scores in the data's unit"""
    deviation: Tensor


@dataclass(frozen=True)
class Failed:
    """A trial that gave no network, and why."""

    index: int
    """its number"""
    reason: str


class Desk(Protocol):
    """Where an engine gets its trials, and tells of them by their numbers."""

    @property
    def done(self) -> int:
        """Trials that have finished."""

    def draw(self, count: int) -> list[tuple[int, Trial]]:
        """At most so many new trials with their numbers; none when there are no more."""

    def epoch(self, number: int, last: Epoch, best: float) -> bool:
        """A trial has finished an epoch, with its best validation RMSE (scaled) so far. True says: end it here."""

    def alive(self, epoch: int) -> None:
        """Something has finished this epoch."""


class Engine(Protocol):
    """Whatever trains trials. Results come in any order, one for every trial that was drawn; nothing but the end of the
    process, or a KeyboardInterrupt, may keep them back. The index of a result is the trial's number."""

    @property
    def name(self) -> str:
        """For the record."""

    @property
    def halving(self) -> Halving | None:
        """Its rungs. The desk decides at them, when it hears of an epoch, unless the engine does so itself."""

    def run(self, data: Data, desk: Desk) -> Generator[Trained | Failed, None, None]:
        """Train until the desk has no more trials."""


@dataclass(frozen=True)
class Local:
    """One trial after another on this machine, or a few at a time in processes of their own. Every epoch is reported,
    and the study halves asynchronously, as the paper's scheduler does: a trial is compared with all that reached its
    rung before it.

    One at a time, every point knows of all results before it, and a search repeats. A few at a time, what the sampler
    knows depends on who finishes first, and a trial that takes its process down is a failed trial.
    """

    at_once: int = 1
    halving: Halving | None = field(default_factory=Halving)
    name: str = field(default="local", init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "at_once", to_whole(self.at_once, "at_once", 1))

    def run(self, data: Data, desk: Desk) -> Generator[Trained | Failed, None, None]:
        """See `Engine`."""
        if self.at_once > 1:
            with closing(_run_processes(self.at_once, data, desk)) as results:
                yield from results
            return
        while drawn := desk.draw(1):
            ((number, trial),) = drawn
            try:
                yield train_alone(number, trial, data, desk)
            except Exception as error:  # one bad configuration must not end a search of hundreds
                yield Failed(number, explain(error))


@dataclass(frozen=True)
class Population:
    """Batches of trials, those of one shape trained side by side (`train.population`); quick on a GPU.

    All trials of a batch meet at the rungs, so a batch must be large enough for halving to mean something, and small
    enough for the sampler to learn between batches: the startup trials, which are random anyway, are one batch, and
    generations follow.
    """

    startup: int = 40
    generation: int = 32
    halving: Halving | None = field(default_factory=Halving)
    memory: int | None = None
    """bytes of device memory that a pack may take; by default most of what is free"""
    name: str = field(default="population", init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "startup", to_whole(self.startup, "startup", 1))
        object.__setattr__(self, "generation", to_whole(self.generation, "generation", 1))

    def batch(self, done: int) -> int:
        """What is missing of the startup, then a generation."""
        return self.startup - done if done < self.startup else self.generation

    def run(self, data: Data, desk: Desk) -> Generator[Trained | Failed, None, None]:
        """See `Engine`."""
        while drawn := desk.draw(self.batch(desk.done)):
            yield from self._run_batch(dict(drawn), data, desk)

    def _run_batch(self, batch: dict[int, Trial], data: Data, desk: Desk) -> Iterator[Trained | Failed]:
        """If it breaks, what is left of it is trained one by one, to find out whose fault it was."""
        left = dict(batch)
        try:
            for trained in self._train(batch, data, desk):
                del left[trained.index]
                yield trained
        except Exception as error:
            if len(left) == 1:
                yield Failed(next(iter(left)), explain(error))
                return
        for number, trial in left.items():
            try:
                yield from self._train({number: trial}, data, desk)
            except Exception as error:
                yield Failed(number, explain(error))

    def _train(self, batch: dict[int, Trial], data: Data, desk: Desk) -> Iterator[Trained]:
        def report(progress: Progress) -> None:
            desk.alive(progress.epoch + 1)

        numbers, trials = list(batch), list(batch.values())
        for trained in train_population(
            trials, data.train, data.val,
            deviation=data.deviation, halving=self.halving, memory=self.memory, report=report,
        ):  # fmt: skip
            trained.index = numbers[trained.index]
            yield trained


class _HalvedError(Exception):
    """Thrown through `train` to end it."""


def train_alone(number: int, trial: Trial, data: Data, desk: Desk) -> Trained:
    """The network that a pack would have made of the trial, by `bsat.train.train`."""
    device, config, began = data.train.series.device, trial.train, time.perf_counter()
    with torch.random.fork_rng([]):
        torch.default_generator.manual_seed(config.seed)
        network = build_network(
            trial.network, trial.tokenizer, lookback=data.train.lookback, horizon=data.train.horizon
        ).to(device)
    val_windows = data.val.some(config.epoch_windows)
    size = bytes_per_window(trial.tokenizer, network, data.train.lookback) * (len(data.train) + len(val_windows))
    every = config.epoch_windows is None or len(data.train) <= config.epoch_windows
    keep = trial.tokenizer.adaptive and every and size <= KEPT_TOKENS and not nvrtc.serves(device)
    train_set, val_set = (TokenBatches(w, trial.tokenizer, network, keep=keep) for w in (data.train, val_windows))
    seen = History()

    def report(epoch: int, step: int, loss: float, last: Epoch | None) -> None:
        if last is None or last.epoch != epoch:  # within an epoch
            return
        seen.epochs.append(last)
        if seen.best_epoch < 0 or last.val_scaled_rmse < seen.best.val_scaled_rmse:
            seen.best_epoch = epoch
        desk.alive(epoch + 1)
        if desk.epoch(number, last, seen.best.val_scaled_rmse) and epoch + 1 < config.max_epochs:
            raise _HalvedError

    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # that it diverged is in the history
            history = train(
                network, train_set, val_set, config, mean=data.mean, deviation=data.deviation, report=report
            )
        if history.stopped == "interrupted":
            raise KeyboardInterrupt
        state = {name: a.detach().cpu() for name, a in network.state_dict().items()}
    except FloatingPointError:  # in its first epoch
        history, state = History(stopped="diverged"), {}
    except _HalvedError:
        seen.stopped = "halved"
        history, state = seen, {}
    memory = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    return Trained(number, trial, history, state, time.perf_counter() - began, 1, memory)


def explain(error: Exception) -> str:
    """An error as one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:500]


def value_of(trained: Trained) -> float:
    """What the search minimises: the validation RMSE of the scaled series, which also stops trainings and decides at
    rungs. With one series it is the RMSE in the data's unit, but for a factor."""
    return trained.history.best.val_scaled_rmse if trained.history.best_epoch >= 0 else math.inf


# -------------------------------------------------------------------------------------------------- a few at a time


def _run_processes(count: int, data: Data, desk: Desk) -> Generator[Trained | Failed, None, None]:
    """Each trial in a process that lives for several; only this one speaks with the desk."""
    context = multiprocessing.get_context("spawn")  # CUDA and threads do not survive a fork
    threads = max(1, (os.cpu_count() or 1) // count)
    idle: list[_Worker] = []
    busy: dict[Any, _Worker] = {}
    try:
        while True:
            for number, trial in desk.draw(count - len(busy)) if len(busy) < count else []:
                idle = [worker for worker in idle if worker.process.is_alive()]
                worker = idle.pop() if idle else _Worker(context, data, threads)
                worker.begin(number, trial)
                busy[worker.line] = worker
            if not busy:
                return
            for line in multiprocessing.connection.wait(list(busy)):
                worker = busy[line]
                try:
                    heard = worker.line.recv()
                    if isinstance(heard, tuple):
                        desk.alive(heard[1].epoch + 1)
                        worker.line.send(desk.epoch(*heard))
                        continue
                except (EOFError, OSError):
                    worker.process.join()
                    heard = Failed(worker.number, f"its process ended with exit code {worker.process.exitcode}")
                else:
                    idle.append(worker)
                del busy[line]
                yield heard
    finally:
        for worker in [*idle, *busy.values()]:
            worker.process.kill()
            worker.process.join()


class _Worker:
    """A process, and the line to it."""

    def __init__(self, context: Any, data: Data, threads: int) -> None:
        self.line, other = context.Pipe()
        self.number = -1
        self.process = context.Process(target=_work, args=(other, _pack_up(data), threads), daemon=True)
        self.process.start()
        other.close()  # so that its end is noticed

    def begin(self, number: int, trial: Trial) -> None:
        """Let it train. If it has died meanwhile, that shows when its answer is read."""
        self.number = number
        with suppress(OSError):
            self.line.send((number, trial))


class _Line:
    """The desk, seen from a worker. If the process at the other end dies, the worker does with the next word."""

    done = 0

    def __init__(self, line: Any) -> None:
        self.line = line

    def draw(self, count: int) -> list[tuple[int, Trial]]:
        """Nobody asks."""
        return []

    def epoch(self, number: int, last: Epoch, best: float) -> bool:
        """Tell, and wait for the decision."""
        try:
            self.line.send((number, last, best))
            return bool(self.line.recv())
        except (EOFError, OSError):
            os._exit(1)

    def alive(self, epoch: int) -> None:
        """The other side knows by the epoch."""


def _work(line: Any, packed: tuple[Any, ...], threads: int) -> None:
    torch.set_num_threads(threads)
    data = _unpack(packed)
    with suppress(EOFError, OSError):
        while True:
            number, trial = line.recv()
            try:
                result: Trained | Failed = train_alone(number, trial, data, _Line(line))
            except Exception as error:
                result = Failed(number, explain(error))
            line.send(result)


def _pack_up(data: Data) -> tuple[Any, ...]:
    """As numpy arrays: torch's own way to send tensors wants the sender to live."""
    folds = [
        (w.series.cpu().numpy(), w.starts.cpu().numpy(), w.rows.cpu().numpy(), w.lookback, w.horizon, w.gaps)
        for w in (data.train, data.val)
    ]
    return folds, data.mean.cpu().numpy(), data.deviation.cpu().numpy(), str(data.train.series.device)


def _unpack(packed: tuple[Any, ...]) -> Data:
    folds, mean, deviation, device = packed

    def tensor(a: np.ndarray) -> Tensor:
        return torch.from_numpy(a).to(device)

    train_windows, val_windows = (
        Windows(tensor(series), tensor(starts), tensor(rows), lookback, horizon, gaps)
        for series, starts, rows, lookback, horizon, gaps in folds
    )
    return Data(train_windows, val_windows, tensor(mean), tensor(deviation))
