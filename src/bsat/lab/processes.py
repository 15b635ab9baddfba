"""Experiments side by side, each in a process of its own: on a GPU, one fills the pauses of another."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import pickle
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import fields
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ..search.engines import explain, uninterrupted
from ..train.device import count_cores

if TYPE_CHECKING:
    from .protocol import Experiment
    from .runner import Watcher

Groups = Sequence[list["Experiment"]]


def run_side_by_side(groups: Groups, count: int, watcher: Watcher, run: Callable[..., object]) -> None:
    """Calls ``run(group, watcher=...)`` for every group, `count` at a time in processes of their own, and tells the
    watcher what they say. The first error ends all: what the store has is kept, and what was in flight is found by
    whoever goes on.

    Args:
        groups: of experiments.
        count: of processes, at most.
        watcher: who wants to hear of it.
        run: it is sent to the processes, so it must be a function of a module, or a `partial` of one.
    """
    context = multiprocessing.get_context("spawn")  # CUDA and threads do not survive a fork
    waiting = list(groups)
    workers: dict[Any, _Worker] = {}
    try:
        while waiting or workers:
            while waiting and len(workers) < count:
                worker = _Worker(context, run, min(count, len(groups)))
                workers[worker.line] = worker
                worker.begin(waiting.pop(0))
            for line in multiprocessing.connection.wait(list(workers)):
                kind, content = workers[line].hear()
                if kind == "error":
                    raise content
                if kind == "warning":
                    warnings.warn(content, stacklevel=3)
                elif kind != "done":
                    if (hear := getattr(watcher, kind)) is not None:
                        hear(*content)
                elif waiting:
                    workers[line].begin(waiting.pop(0))
                else:
                    workers.pop(line).end()
    finally:
        for worker in workers.values():
            worker.process.kill()
        for worker in workers.values():
            worker.process.join()


class _Worker:
    """A process, and the line to it."""

    def __init__(self, context: Any, run: Callable[..., object], beside: int) -> None:
        self.line, other = context.Pipe()
        threads = max(1, count_cores() // beside)
        self.process = context.Process(target=_work, args=(other, run, threads), daemon=True)
        with uninterrupted():
            self.process.start()
        other.close()  # so that its end is noticed
        self.group: list[Experiment] = []

    def begin(self, group: list[Experiment]) -> None:
        """Let it run some experiments."""
        self.group = group
        with suppress(OSError):  # if it has died, that shows when its next word is read
            self.line.send(group)

    def hear(self) -> tuple[str, Any]:
        """Its next word."""
        try:
            return self.line.recv()
        except (EOFError, OSError):
            self.process.join()
            names = ", ".join(" ".join(map(str, experiment.cell.values())) for experiment in self.group)
            return "error", RuntimeError(
                f"the process that ran {names} ended with exit code {self.process.exitcode}. What it had finished is "
                "in the store: run the same again to go on, with fewer `processes` if memory was short."
            )

    def end(self) -> None:
        """There is nothing more to do."""
        self.line.close()
        self.process.join()


def _work(line: Any, run: Callable[..., object], threads: int) -> None:
    """In a process of its own, until nobody listens any more."""
    from .runner import Watcher

    def tell(kind: str, *content: Any) -> None:
        try:
            line.send((kind, content))
        except OSError:
            os._exit(1)

    def warn(message: Warning | str, *_: Any, **__: Any) -> None:
        line.send(("warning", message))

    torch.set_num_threads(threads)
    warnings.showwarning = warn
    watcher = Watcher(**{part.name: partial(tell, part.name) for part in fields(Watcher)})
    with suppress(EOFError, OSError):
        while True:
            group = line.recv()
            try:
                run(group, watcher=watcher)
                word: tuple[str, Any] = "done", None
            except Exception as error:
                word = "error", _sendable(error)
            line.send(word)


def _sendable(error: Exception) -> Exception:
    """The error, if it comes out of a line as it went in; else what it says."""
    with suppress(Exception):
        if str(pickle.loads(pickle.dumps(error))) == str(error):
            return error
    return RuntimeError(explain(error))
