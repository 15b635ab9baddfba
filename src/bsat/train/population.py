"""A list of configurations in, trained networks out, as they finish: many at once, as many as the device takes.

Configurations of one shape form a pack and are trained side by side (`pack`). With successive halving, all go as far as
a rung, the better part goes on to the next, and packs shrink. A network trained in a pack is the network it would have
been alone. So a pack that breaks, for want of memory say, is split and begun anew, and only what breaks alone fails.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from .. import nvrtc
from ..data.windows import Windows
from ..model import Network, NetworkConfig, build_network
from ..model.fused import PRECISIONS, takes_brief
from ..model.stacked import Shape, describe
from ..tokens import Tokenizer
from ..tokens.door import check_choice, to_whole
from .bank import Bank, Source, highest_degree
from .pack import Marks, Pack, free_memory, training_bytes
from .schedule import learning_rate_factor
from .settings import Epoch, History, TrainConfig, finished

SHARE = 0.6
"""Of the free memory that packs may fill: steps take half as much again and more while they are captured."""


@dataclass(frozen=True)
class Trial:
    """One configuration: tokens, network and training."""

    tokenizer: Tokenizer
    network: NetworkConfig = field(default_factory=NetworkConfig)
    train: TrainConfig = field(default_factory=TrainConfig)


@dataclass(frozen=True)
class Halving:
    """Successive halving: at epochs `grace`, `grace` x `reduction`, ... the best one in `reduction` goes on.

    The paper's scheduler is asynchronous; here all trials of a call meet at the rung.
    """

    grace: int = 20
    reduction: int = 3

    def __post_init__(self) -> None:
        object.__setattr__(self, "grace", to_whole(self.grace, "grace", 1))
        object.__setattr__(self, "reduction", to_whole(self.reduction, "reduction", 2))

    def rungs(self, max_epochs: int) -> list[int]:
        """Before which epochs trials are compared."""
        rungs, at = [], self.grace
        while at < max_epochs:
            rungs.append(at)
            at *= self.reduction
        return rungs

    def survivors(self, marks: dict[int, float]) -> set[int]:
        """Of trials with their validation RMSE, those that go on: at least one."""
        ranked = sorted((trial for trial in marks if math.isfinite(marks[trial])), key=lambda trial: marks[trial])
        return set(ranked[: max(1, len(ranked) // self.reduction)])


@dataclass
class Trained:
    """A trial that has come to its end."""

    index: int
    """in the list that was given"""
    trial: Trial
    history: History
    """`stopped` is "patience", "max_epochs", "halved" or "diverged\""""
    state: dict[str, Tensor]
    """its best weights, on the CPU: `network.load_state_dict(..., strict=False)`"""
    seconds: float
    """of the packs it was in, divided by their members"""
    pack: int
    """how many were trained beside it at first, itself included"""
    memory: int | None
    """peak bytes on the device while its first pack trained, divided by its members; None on a CPU"""

    @property
    def rmse(self) -> float:
        """The best validation RMSE, in the data's unit; infinity if there is none."""
        return self.history.best.val_rmse if self.history.best_epoch >= 0 else math.inf


@dataclass
class Progress:
    """How far a population has come."""

    trials: int
    finished: int = 0
    epoch: int = 0
    """of the pack at work"""
    members: int = 0
    """of the pack at work"""
    best: float = math.inf


@dataclass
class _Member:
    """One trial on its way."""

    index: int
    trial: Trial
    network: Network | None
    shape: Shape
    history: History = field(default_factory=History)
    seconds: float = 0.0
    beside: int = 0
    memory: int | None = None


def train_population(
    trials: Sequence[Trial],
    train_windows: Windows,
    val_windows: Windows,
    *,
    deviation: Tensor,
    halving: Halving | None = None,
    rivals: Sequence[Hashable] | None = None,
    precision: str = "float32",
    memory: int | None = None,
    report: Callable[[Progress], None] | None = None,
    failed: Callable[[int, Exception], None] | None = None,
) -> Iterator[Trained]:
    """Train every trial and yield each as it finishes.

    Args:
        trials: what to train; tokenizers must be fitted.
        train_windows, val_windows: of the folds, on the device to train on.
        deviation: (R,) float64, the scaling of the rows, for scores in the data's unit.
        halving: end the worse ones early.
        rivals: a name for each trial; at a rung, only trials of one name are compared. By default all are.
        precision: "float32", or "bfloat16" to keep activations in 16 bits: several times as fast for wide networks. A
            warning tells which networks cannot have it, and train in float32.
        memory: bytes of device memory that tokens and a pack may take; by default most of what is free.
        report: called after every epoch of a pack.
        failed: called with the index of a trial that cannot be trained even alone, and why, and the others go on; by
            default the error is raised.
    """
    if not trials:
        raise ValueError("`trials` must hold at least one trial; got none.")
    if any(trial.train.deterministic for trial in trials):
        raise ValueError("`deterministic` must be False in a population, which has no slow steps; train it alone.")
    if rivals is not None and len(rivals) != len(trials):
        raise ValueError(f"`rivals` must name a group for each of the {len(trials)} trials; got {len(rivals)}.")
    check_choice(precision, "precision", PRECISIONS)
    members, groups = _gather(trials, train_windows, val_windows)
    brief = _find_brief(members, train_windows.series.device) if precision == "bfloat16" else set()
    rungs = sorted({r for t in trials for r in halving.rungs(t.train.max_epochs)}) if halving is not None else []
    progress = Progress(len(trials))
    banks = _Banks(members, train_windows, val_windows)
    if memory is None:
        memory = int(SHARE * free_memory(train_windows.series.device))
    room = max(memory - banks.size(), memory // 2)  # where tokens take more, packs of one would be slow for nothing
    parts = [part for group in groups for part in _split(group, members, train_windows, room, brief)]
    packs = [_Run(part, banks, deviation, precision) for part in parts]
    del members, groups, parts

    def note(done: Iterable[Trained]) -> Iterator[Trained]:
        for trained in done:
            progress.finished += 1
            yield trained

    for rung in [*rungs, None]:
        waiting, packs = packs, []
        while waiting:
            run = waiting.pop(0)
            try:
                for done in run.train_until(rung, progress, report):
                    yield from note(done)
            except _BrokenError as broken:
                if len(run.members) == 1:
                    (error,) = broken.args
                    if failed is None:
                        raise error from error.__cause__
                    failed(run.members[0].index, error)
                    progress.finished += 1
                    del error  # its traceback holds what the pack held
                waiting[:0] = run.halves()
                continue
            run.rest()
            packs.append(run)
        if rung is not None and halving is not None:
            marks: dict[Hashable, dict[int, float]] = {}
            for member in (m for run in packs for m in run.members):
                rival = None if rivals is None else rivals[member.index]
                marks.setdefault(rival, {})[member.index] = member.history.best.val_scaled_rmse
            survivors = set().union(*(halving.survivors(some) for some in marks.values()))
            for run in packs:
                yield from note(run.drop([m for m in run.members if m.index not in survivors], "halved"))
        packs = [run for run in packs if run.members]


def _gather(trials: Sequence[Trial], windows: Windows, val_windows: Windows) -> tuple[list[_Member], list[list[int]]]:
    """Build the networks, and say which may be trained together."""
    members: list[_Member] = []
    groups: dict[object, list[int]] = {}
    for index, trial in enumerate(trials):
        network = _build(trial, windows)
        shape = describe(network)
        assert shape is not None
        members.append(_Member(index, trial, network, shape))
        windows_read = _drawn(trial, windows), len(val_windows.some(trial.train.epoch_windows))
        alike = replace(shape, feed=0), trial.train.batch_size, trial.tokenizer.adaptive, windows_read
        groups.setdefault(alike, []).append(index)
    return members, list(groups.values())


def _build(trial: Trial, windows: Windows) -> Network:
    with torch.random.fork_rng([]):
        torch.default_generator.manual_seed(trial.train.seed)
        network = build_network(trial.network, trial.tokenizer, lookback=windows.lookback, horizon=windows.horizon)
    return network.to(windows.series.device)


def _find_brief(members: Sequence[_Member], device: torch.device) -> set[int]:
    """Who can have activations of 16 bits."""
    can = {m.index for m in members if nvrtc.serves(device) and takes_brief(m.shape, device)}
    if len(can) < len(members):
        warnings.warn(
            f"{len(members) - len(can)} of {len(members)} trials train in float32, not in bfloat16: that needs an "
            "NVIDIA GPU with tensor cores, a `d_model` that is a multiple of 16, heads of 2, 4, 6, 8, 16, 24 ... 64 "
            "numbers, and at most 4 layers and 512 tokens.",
            RuntimeWarning,
            stacklevel=3,
        )
    return can


def _split(
    group: list[int], members: list[_Member], windows: Windows, memory: int, brief: set[int]
) -> Iterator[list[_Member]]:
    """Packs that fit. Those with feed-forward parts of a width come together, so that little is padded."""
    some = sorted((members[i] for i in group), key=lambda m: m.shape.feed)
    degree = highest_degree((m.trial.tokenizer, m.network) for m in some if m.network is not None)
    while some:
        trial = some[-1].trial
        each = training_bytes(some[-1].shape, trial.train.batch_size, brief=some[-1].index in brief)
        drawn, network = _drawn(trial, windows), some[-1].network
        if drawn is not None and network is not None:  # tokens of its own
            each += Bank.size(drawn, (trial.tokenizer, network), windows.lookback, degree)
        room = max(1, memory // each)
        count = math.ceil(len(some) / math.ceil(len(some) / room))
        yield some[:count]
        some = some[count:]


_Kind = tuple[int, int, bool, bool, tuple[int | None, int]]
"""Tokens, features, whether knots are needed, whether tokens move; windows drawn an epoch, and validated on."""


class _Banks:
    """Tokens made once for all packs: a bank for each kind, with every source of it that any trial reads."""

    def __init__(self, members: Sequence[_Member], train_windows: Windows, val_windows: Windows) -> None:
        self.windows = train_windows, val_windows
        self._sources: dict[_Kind, dict[object, Source]] = {}
        self._kept: dict[_Kind, tuple[Bank | None, Bank]] = {}
        for member in members:
            assert member.network is not None
            source = member.trial.tokenizer, member.network
            self._sources.setdefault(self._kind(member), {}).setdefault(self._key(member), source)

    def _kind(self, member: _Member) -> _Kind:
        shape, trial, (train_windows, val_windows) = member.shape, member.trial, self.windows
        windows_read = _drawn(trial, train_windows), len(val_windows.some(trial.train.epoch_windows))
        return shape.tokens, shape.features, shape.spline, trial.tokenizer.adaptive, windows_read

    @staticmethod
    def _key(member: _Member) -> object:
        tokenizer, network = member.trial.tokenizer, member.trial.network
        unit = network.rotary_unit if "rope" in network.encoding else None
        return repr(tokenizer), getattr(tokenizer, "clip_factor_", None), network.norm, unit

    def size(self) -> int:
        """Bytes that all banks will take, but for windows that are drawn anew."""
        train_windows, total = self.windows[0], 0
        for kind, sources in self._sources.items():
            drawn, validate = kind[-1]
            every, degree = sources.values(), highest_degree(sources.values())
            for count in (validate, 0 if drawn else len(train_windows)):
                total += sum(Bank.size(count, source, train_windows.lookback, degree) for source in every if count)
        return total

    def shared(self, member: _Member) -> tuple[Bank | None, Bank]:
        """What all of its kind read."""
        kind = self._kind(member)
        if kind not in self._kept:
            (train_windows, val_windows), every = self.windows, list(self._sources[kind].values())
            validate = val_windows.some(member.trial.train.epoch_windows)
            train = None if _drawn(member.trial, train_windows) else Bank(train_windows, every)
            self._kept[kind] = train, Bank(validate, every)
        return self._kept[kind]

    def of(self, members: Sequence[_Member]) -> tuple[Bank, Bank, list[int], list[int]]:
        """Train bank, validation bank, and each member's source in either."""
        train_windows, most = self.windows[0], _drawn(members[0].trial, self.windows[0])
        sources = self._sources[self._kind(members[0])]
        train, val = self.shared(members[0])
        own = [list(sources).index(self._key(member)) for member in members]
        if train is None:  # everyone draws windows of their own
            each = [(m.trial.tokenizer, m.network) for m in members if m.network is not None]
            return Bank(train_windows, each, most), val, list(range(len(members))), own
        return train, val, own, own


def _drawn(trial: Trial, windows: Windows) -> int | None:
    """How many windows an epoch draws; None if it takes all."""
    most = trial.train.epoch_windows
    return most if most is not None and most < len(windows) else None


class _BrokenError(Exception):
    """A pack cannot be trained; with the error."""


class _Run:
    """A pack and the histories of its members."""

    def __init__(self, members: list[_Member], banks: _Banks, deviation: Tensor, precision: str) -> None:
        self.members, self.banks, self.deviation, self.precision = members, banks, deviation, precision
        self.pack: Pack | None = None
        self.rows = list(range(len(members)))
        """which row of the pack each member is"""

    def train_until(
        self, rung: int | None, progress: Progress, report: Callable[[Progress], None] | None
    ) -> Iterator[list[Trained]]:
        """Go on to an epoch, or to the end; yields those that stop on the way."""
        began = time.perf_counter()
        self.banks.shared(self.members[0])  # if they break, it is not the pack
        while self.members and (rung is None or len(self.members[0].history.epochs) < rung):
            epoch = len(self.members[0].history.epochs)
            try:
                pack, marks = self._run_epoch(epoch)
            except Exception as error:
                raise _BrokenError(error) from error
            now = time.perf_counter()
            share, began = (now - began) / len(self.members), now
            stopped = self._record(pack, epoch, marks, share)
            progress.epoch, progress.members = epoch, len(self.members)
            found = [m.history.best.val_rmse for m in self.members if m.history.best_epoch >= 0]
            progress.best = min([progress.best, *found])
            yield self.drop(stopped)
            if report is not None:
                report(progress)
            began = time.perf_counter()  # what the caller did meanwhile is not ours

    def _run_epoch(self, epoch: int) -> tuple[Pack, Marks]:
        if self.pack is None:
            self._begin()
        assert self.pack is not None
        self.pack.run_epoch(epoch)
        return self.pack, self.pack.evaluate()

    def _begin(self) -> None:
        banks = self.banks.of(self.members)
        networks = [m.network for m in self.members if m.network is not None]
        configs = [m.trial.train for m in self.members]
        self.pack = Pack(networks, configs, *banks, deviation=self.deviation, precision=self.precision)
        for member in self.members:
            member.beside = len(self.members)
        if self.pack.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.pack.device)

    def _record(self, pack: Pack, epoch: int, marks: Marks, seconds: float) -> list[_Member]:
        """Add the epoch to the histories; returns who stops."""
        stopped, improved = [], [False] * len(pack)
        peak = torch.cuda.max_memory_allocated(pack.device) if pack.device.type == "cuda" else None
        for member, row in zip(self.members, self.rows, strict=True):
            history, config = member.history, member.trial.train
            member.seconds += seconds
            if epoch == 0 and peak is not None:
                member.memory = peak // len(pack)
            loss, rmse, scaled = marks.losses[row], marks.rmses[row], marks.scaled_rmses[row]
            if not (math.isfinite(loss) and math.isfinite(rmse)):
                history.stopped = "diverged"
                stopped.append(member)
                continue
            rate = config.learning_rate * learning_rate_factor(epoch)
            history.epochs.append(Epoch(epoch, rate, loss, rmse, scaled, marks.bases[row], seconds))
            if history.best_epoch < 0 or scaled < history.best.val_scaled_rmse:
                history.best_epoch, improved[row] = epoch, True
            if finished(history, config):
                stopped.append(member)
        pack.keep_best(improved)
        return stopped

    def drop(self, members: Sequence[_Member], why: str | None = None) -> list[Trained]:
        """End some of them. The pack shrinks when a good part of it would only be carried along."""
        out = []
        for member in members:
            assert self.pack is not None
            at = self.members.index(member)
            row = self.rows[at]
            if why is not None:
                member.history.stopped = why
            state = {name: a.cpu() for name, a in self.pack.best_state(row).items()}
            out.append(
                Trained(member.index, member.trial, member.history, state, member.seconds, member.beside, member.memory)
            )
            del self.members[at], self.rows[at]
        if self.pack is not None and self.members and len(self.members) <= 0.75 * len(self.pack):
            self.pack.shrink(self.rows)
            self.rows = list(range(len(self.members)))
        if not self.members:
            self.pack = None
        return out

    def halves(self) -> list[_Run]:
        """Two packs, which begin anew, for one that broke; none if it had one member."""
        self.pack = None
        if len(self.members) == 1:
            return []
        for member in self.members:
            member.history, member.network = History(), member.network or _build(member.trial, self.banks.windows[0])
        middle = (len(self.members) + 1) // 2
        parts = self.members[:middle], self.members[middle:]
        return [_Run(part, self.banks, self.deviation, self.precision) for part in parts]

    def rest(self) -> None:
        """Others will train now: give back what can be made again."""
        if self.pack is not None:
            self.pack.release()
        for member in self.members:
            member.network = None
