"""What the tests share: signals like those of real series, signals made to hurt, and the command line."""

import os
import resource
import signal
import sys
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from bsat.cli import main

# Networks this small gain nothing from a second thread, and on a busy machine every operation would wait for it: here,
# and in the processes that tests start.
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")

L = 240
SLOW = ("test_runner.py", "test_cluster.py", "test_study.py", "test_population.py")


def pytest_collection_modifyitems(items):
    """Slow files come first, so that no process waits for another's at the end."""
    items.sort(key=lambda item: item.path.name not in SLOW)


def make_signals(length: int = L, count: int = 3, seed: int = 7) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    i = np.arange(length)[None]
    at = rng.integers(5, length - 5, (count, 1))
    noise = rng.normal(size=(count, length))
    day = np.sin(2 * np.pi * (i + rng.uniform(0, 24, (count, 1))) / 24)
    return {
        "transformer": 15 + 4 * day + 0.3 * noise.cumsum(1),  # like ETTh1's oil temperature
        "noisy": noise,
        "spiky": 0.01 * noise + np.where(i == at, 50.0, 0.0),
        "flat": np.full((count, length), 3.25),
        "flat with a step": np.where(i > at, 1.0, 0.0),
        "solar": np.maximum(0, np.sin(2 * np.pi * (i + at) / 96)) * rng.uniform(0.5, 1, (count, length)) ** 0.3,
        "burst": noise * (np.abs(i - at) < 8),
        "ramp": 0.1 * i + np.zeros((count, 1)),
    }


SIGNALS = make_signals()


@contextmanager
def full_disk(left):
    """No file can grow beyond so many bytes."""
    before, written = resource.getrlimit(resource.RLIMIT_FSIZE), sys.dont_write_bytecode
    sys.dont_write_bytecode = True  # Python would keep half of a module that is imported in here, for good
    resource.setrlimit(resource.RLIMIT_FSIZE, (left, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        sys.dont_write_bytecode = written


@pytest.fixture
def ctrl_c():
    """Press it. Whoever starts the tests in the background may have switched it off."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield lambda: signal.raise_signal(signal.SIGINT)
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def bsat(monkeypatch, capsys, tmp_path):
    """Run `bsat WORDS...` in an empty folder; returns exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["bsat", *map(str, words)])
        with pytest.raises(SystemExit) as stop:
            main()
        out, err = capsys.readouterr()
        return stop.value.code, out, err

    return run
