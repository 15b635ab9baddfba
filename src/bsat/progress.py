"""What a user sees while networks train: on the error stream, so that results can be piped."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from .search import SearchProgress
    from .train import Epoch


class TrainingBar:
    """A bar with loss, validation RMSE and the most time that may be left (early stopping may end it sooner)."""

    def __init__(self, steps: int, max_epochs: int, *, label: str, show: bool) -> None:
        self.steps, self.max_epochs, self.label, self.show = steps, max_epochs, label, show
        self._bar: Any = None
        self._task: Any = None
        self._began = False

    def __enter__(self) -> Self:
        if self.show:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=12),
                TextColumn("{task.fields[epoch]}/{task.fields[most]}"),
                TextColumn("{task.fields[loss]}"),
                TimeElapsedColumn(),
                TextColumn("≤"),
                TimeRemainingColumn(elapsed_when_finished=False),
                console=Console(stderr=True),
                transient=True,
                redirect_stdout=sys.stdout.isatty(),
            )
            self._bar.start()
            self._task = self._bar.add_task(
                self.label, total=self.steps * self.max_epochs, epoch=0, most=self.max_epochs, loss=""
            )
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, epoch: int, step: int, loss: float, last: Epoch | None) -> None:
        """See `train.loop.Report`."""
        if self._bar is None:
            return
        if not self._began:  # a resumed training has not run the epochs before at the speed of light
            self._began = True
            self._bar.reset(self._task, completed=epoch * self.steps + step - 1)
        text = f"loss {loss:.3f}" + (f" val {last.val_rmse:.4g}" if last is not None else "")
        self._bar.update(self._task, completed=epoch * self.steps + step, epoch=epoch + 1, loss=text)


class SearchBar:
    """A bar of trials, with what became of them, the best validation RMSE and the time left.

    Args:
        trials: of all searches together.
        show: whether there is one.
    """

    def __init__(self, trials: int, *, show: bool) -> None:
        self.trials, self.show = trials, show
        self.began = time.perf_counter()
        self._now: dict[Any, SearchProgress] = {}
        self._first: dict[Any, int] = {}
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Self:
        return self

    def _start(self) -> None:
        """Not before there is something to show: mistakes are told first."""
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=10),
            TextColumn("{task.fields[text]}"),
            console=Console(stderr=True),
            transient=True,
            redirect_stdout=sys.stdout.isatty(),  # what goes to a file is none of its business
        )
        self._bar.start()
        self._task = self._bar.add_task("search", total=self.trials, text="")

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()

    def restart(self, trials: int) -> None:
        """Other searches begin."""
        self.trials, self.began = trials, time.perf_counter()
        self._now, self._first = {}, {}
        if self._bar is not None:
            self._bar.reset(self._task, total=self.trials)

    def update(self, key: Any, progress: SearchProgress, label: str) -> None:
        """One of the searches has changed."""
        self._now[key] = progress
        self._first.setdefault(key, progress.done)
        if self.show and self._bar is None:
            self._start()
        if self._bar is not None:
            self._bar.update(self._task, total=self.trials, completed=self.done, description=label, text=self.text())

    @property
    def done(self) -> int:
        """Trials of all searches so far, those of earlier processes included."""
        return sum(p.done for p in self._now.values())

    def text(self) -> str:
        """E.g. "12/40, 2 running, 5 pruned, best 3.012, epoch 7, 0:41 left"."""
        all_ = self._now.values()
        counts = {word: sum(getattr(p, word) for p in all_) for word in ("running", "pruned", "failed")}
        parts = [f"{self.done}/{self.trials}", *(f"{n} {word}" for word, n in counts.items() if n)]
        best = [p.best for p in all_ if p.best is not None]
        running = [p.epoch for p in all_ if p.running]
        parts += [f"best {min(best):.4g}"] if best else []
        parts += [f"epoch {max(running)}"] if running else []
        here = self.done - sum(self._first.values())
        if here:
            left = (time.perf_counter() - self.began) / here * max(0, self.trials - self.done)
            parts.append(f"{_clock(left)} left")
        return ", ".join(parts)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
