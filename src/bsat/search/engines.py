"""Engines: trials in, trained ones out, as they finish. They know nothing of studies."""

from __future__ import annotations

import math
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
import time
import warnings
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from ..data.windows import Windows
from ..model import build_network
from ..model.fused import PRECISIONS
from ..tokens.door import check_choice, to_whole
from ..train import Epoch, History, TokenBatches, train
from ..train.batches import keeps_tokens
from ..train.checkpoint import Checkpoint
from ..train.device import count_cores
from ..train.population import Halving, Progress, Trained, Trial, train_population


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


class Listener(Protocol):
    """Who hears of a trial while it trains."""

    def epoch(self, number: int, last: Epoch, best: float) -> bool:
        """A trial has finished an epoch, with its best validation RMSE (scaled) so far. True says: end it here."""

    def alive(self, epoch: int) -> None:
        """Something has finished this epoch."""


class Desk(Listener, Protocol):
    """A search, as an engine sees it: where it gets trials, and tells of them by their numbers."""

    @property
    def scored(self) -> int:
        """Trials that have finished with a value, of which the sampler learns."""

    def draw(self, count: int) -> list[tuple[int, Trial]]:
        """At most so many new trials with their numbers; none when there are no more."""


class UnheardError(BaseException):
    """An error of who listens. It ends the search, and is not one of the trial: hence no Exception."""


@contextmanager
def _listening() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise UnheardError from error


Results = Generator[tuple[int, Trained | Failed], None, None]
"""The place of the desk, and what came of one of its trials; the index of a result is the trial's number."""


class Engine(Protocol):
    """Whatever trains trials. Results come in any order, one for every trial that was drawn; nothing but the end of the
    process, or a KeyboardInterrupt, may keep them back."""

    @property
    def name(self) -> str:
        """For the record."""

    @property
    def halving(self) -> Halving | None:
        """Its rungs. A desk decides at them, when it hears of an epoch, unless the engine does so itself."""

    def run(self, data: Data, desks: Sequence[Desk]) -> Results:
        """Train until no desk has any more trials. Searches may share the device, but never compare their trials."""


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
    name: str = field(default="optuna", init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "at_once", to_whole(self.at_once, "at_once", 1))

    def run(self, data: Data, desks: Sequence[Desk]) -> Results:
        """See `Engine`."""
        for place, desk in enumerate(desks):
            with closing(_run_processes(self.at_once, data, desk) if self.at_once > 1 else _run(data, desk)) as results:
                yield from ((place, result) for result in results)


def _run(data: Data, desk: Desk) -> Generator[Trained | Failed, None, None]:
    while drawn := desk.draw(1):
        ((number, trial),) = drawn
        try:
            yield train_alone(number, trial, data, desk)
        except Exception as error:  # one bad configuration must not end a search of hundreds
            yield Failed(number, explain(error))


@dataclass(frozen=True)
class Population:
    """Batches of trials, those of one shape trained side by side (`train.population`), also if they belong to different
    searches; quick on a GPU.

    All trials of a search's batch meet at the rungs, so a batch must be large enough for halving to mean something, and
    small enough for the sampler to learn between batches: the startup trials, which are random anyway, are one batch,
    and generations follow.
    """

    startup: int = 40
    generation: int = 32
    halving: Halving | None = field(default_factory=Halving)
    memory: int | None = None
    """bytes of device memory that tokens and a pack may take; by default most of what is free"""
    precision: str = "float32"
    """or "bfloat16": see `train.population.train_population`"""

    @property
    def name(self) -> str:
        """For the record."""
        return "population" if self.precision == "float32" else f"population, {self.precision}"

    def __post_init__(self) -> None:
        check_choice(self.precision, "precision", PRECISIONS)
        object.__setattr__(self, "startup", to_whole(self.startup, "startup", 1))
        object.__setattr__(self, "generation", to_whole(self.generation, "generation", 1))

    def batch(self, scored: int) -> int:
        """What is missing of the startup, then a generation. A failed trial tells the sampler nothing, so it does not
        count: points are random until the startup is whole."""
        return self.startup - scored if scored < self.startup else self.generation

    def run(self, data: Data, desks: Sequence[Desk]) -> Results:
        """See `Engine`."""
        while batch := [
            _Drawn(place, number, trial)
            for place, desk in enumerate(desks)
            for number, trial in desk.draw(self.batch(desk.scored))
        ]:
            yield from self._run_batch(batch, data, desks)

    def _run_batch(self, batch: list[_Drawn], data: Data, desks: Sequence[Desk]) -> Results:
        """If it breaks as a whole, what is left of it is trained in halves, which meet at their rungs; and so on, until
        it is known whose fault it was."""
        left = {drawn.key: drawn for drawn in batch}
        try:
            for place, result in self._train(batch, data, desks):
                del left[place, result.index]
                yield place, result
            return
        except Exception as error:
            if len(batch) == 1:
                yield batch[0].place, Failed(batch[0].number, explain(error))
                return
        some = list(left.values())
        middle = (len(some) + 1) // 2
        for part in (some[:middle], some[middle:]):
            if part:
                yield from self._run_batch(part, data, desks)

    def _train(self, batch: list[_Drawn], data: Data, desks: Sequence[Desk]) -> Iterator[tuple[int, Trained | Failed]]:
        places = list(dict.fromkeys(drawn.place for drawn in batch))
        broken: list[tuple[int, Failed]] = []

        def report(progress: Progress) -> None:
            with _listening():
                for place in places:
                    desks[place].alive(progress.epoch + 1)

        def fail(index: int, error: Exception) -> None:
            broken.append((batch[index].place, Failed(batch[index].number, explain(error))))

        for trained in train_population(
            [drawn.trial for drawn in batch],
            data.train,
            data.val,
            deviation=data.deviation,
            halving=self.halving,
            rivals=[drawn.place for drawn in batch],
            precision=self.precision,
            memory=self.memory,
            report=report,
            failed=fail,
        ):
            drawn = batch[trained.index]
            trained.index = drawn.number
            yield drawn.place, trained
        yield from broken


@dataclass(frozen=True)
class _Drawn:
    """A trial of the search at a place."""

    place: int
    number: int
    trial: Trial

    @property
    def key(self) -> tuple[int, int]:
        return self.place, self.number


def train_alone(number: int, trial: Trial, data: Data, desk: Listener, checkpoint: Checkpoint | None = None) -> Trained:
    """The network that a pack would have made of the trial, by `bsat.train.train`."""
    device, config, began = data.train.series.device, trial.train, time.perf_counter()
    with torch.random.fork_rng([]):
        torch.default_generator.manual_seed(config.seed)
        network = build_network(
            trial.network, trial.tokenizer, lookback=data.train.lookback, horizon=data.train.horizon
        ).to(device)
    val_windows = data.val.some(config.epoch_windows)
    keep = keeps_tokens(trial.tokenizer, network, config, data.train, val_windows)
    train_set, val_set = (TokenBatches(w, trial.tokenizer, network, keep=keep) for w in (data.train, val_windows))
    best = math.inf

    def report(epoch: int, step: int, loss: float, last: Epoch | None) -> bool:
        nonlocal best
        if last is None or last.epoch != epoch:  # within an epoch
            return False
        best = min(best, last.val_scaled_rmse)
        with _listening():
            desk.alive(epoch + 1)
            return desk.epoch(number, last, best)

    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # that it diverged is in the history
            history = train(
                network,
                train_set,
                val_set,
                config,
                mean=data.mean,
                deviation=data.deviation,
                report=report,
                checkpoint=checkpoint,
            )
        if history.stopped == "interrupted":
            raise KeyboardInterrupt
        state = {name: a.detach().cpu() for name, a in network.state_dict().items()}
    except FloatingPointError:  # in its first epoch
        history, state = History(stopped="diverged"), {}
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
    threads = max(1, count_cores() // count)
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
                heard = worker.hear()
                if isinstance(heard, tuple):
                    desk.alive(heard[1].epoch + 1)
                    worker.answer(desk.epoch(*heard))
                    continue
                del busy[line]
                if worker.process.is_alive():
                    idle.append(worker)
                yield heard
    finally:
        for worker in [*idle, *busy.values()]:
            worker.process.kill()
        for worker in [*idle, *busy.values()]:
            worker.process.join()


class _Worker:
    """A process, and the line to it."""

    def __init__(self, context: Any, data: Data, threads: int) -> None:
        self.line, other = context.Pipe()
        self.number = -1
        self.process = context.Process(target=_work, args=(other, threads), daemon=True)
        with uninterrupted():
            self.process.start()
        try:
            other.close()  # so that its end is noticed
            self.answer(pack_up(data))
        except BaseException:  # Ctrl-C, while nobody knows of it yet
            self.process.kill()
            raise

    def begin(self, number: int, trial: Trial) -> None:
        """Let it train."""
        self.number = number
        self.answer((number, trial))

    def answer(self, word: Any) -> None:
        """If it has died meanwhile, that shows when its next word is read."""
        with suppress(OSError):
            self.line.send(word)

    def hear(self) -> Any:
        """Its next word: an epoch, or what came of the trial."""
        try:
            word = self.line.recv()
        except (EOFError, OSError):
            self.process.join()
            return Failed(self.number, f"its process ended with exit code {self.process.exitcode}")
        if isinstance(word, Trained):
            word.state = {name: torch.from_numpy(a) for name, a in word.state.items()}
        return word


class _Line:
    """The desk, seen from a worker. If the process at the other end dies, the worker does with the next word."""

    def __init__(self, line: Any) -> None:
        self.line = line

    def epoch(self, number: int, last: Epoch, best: float) -> bool:
        """Tell, and wait for the decision."""
        try:
            self.line.send((number, last, best))
            return bool(self.line.recv())
        except (EOFError, OSError):
            os._exit(1)

    def alive(self, epoch: int) -> None:
        """The other side knows by the epoch."""


@contextmanager
def uninterrupted() -> Iterator[None]:
    """A terminal sends Ctrl-C to all processes; those that are started in here leave it to their parent."""
    if threading.current_thread() is not threading.main_thread():  # which alone may say so
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _work(line: Any, threads: int) -> None:
    torch.set_num_threads(threads)
    with suppress(EOFError, OSError):
        data = unpack(line.recv())
        while True:
            number, trial = line.recv()
            try:
                result: Any = train_alone(number, trial, data, _Line(line))
                result.state = {name: a.numpy() for name, a in result.state.items()}
                line.send(result)
            except Exception as error:
                line.send(Failed(number, explain(error)))


def pack_up(data: Data) -> tuple[Any, ...]:
    """As numpy arrays: torch's own way to send tensors wants the sender to live, and room in /dev/shm, of which a
    container may have little."""
    folds = [
        (w.series.cpu().numpy(), w.starts.cpu().numpy(), w.rows.cpu().numpy(), w.lookback, w.horizon, w.gaps)
        for w in (data.train, data.val)
    ]
    return folds, data.mean.cpu().numpy(), data.deviation.cpu().numpy(), str(data.train.series.device)


def unpack(packed: tuple[Any, ...]) -> Data:
    """The way back."""
    folds, mean, deviation, device = packed

    def tensor(a: np.ndarray) -> Tensor:
        return torch.from_numpy(a).to(device)

    train_windows, val_windows = (
        Windows(tensor(series), tensor(starts), tensor(rows), lookback, horizon, gaps)
        for series, starts, rows, lookback, horizon, gaps in folds
    )
    return Data(train_windows, val_windows, tensor(mean), tensor(deviation))
