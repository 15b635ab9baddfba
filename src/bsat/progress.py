"""What a user sees while a network trains: on the error stream, so that results can be piped."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

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
