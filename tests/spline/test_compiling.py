"""Processes that compile at the same time share a cache, and must not get each other's machine code."""

import errno
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from bsat.spline import _kernels, cpu

ROOTS = """
import numpy as np
from bsat.spline import _kernels
v = np.linspace(0.5, 2, 50)
for k in range(2, 7):
    a = v.copy()
    _kernels._take_root(a, k, np.empty(50))
    print(np.abs(a**k - v).max())
"""


def roots(folder):
    """A process that takes all roots; how far each is off, and it prints so."""
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(folder)}
    return subprocess.Popen([sys.executable, "-c", ROOTS], env=environment, stdout=subprocess.PIPE, text=True)


def test_kernels_that_are_alike_are_kept_apart(tmp_path):
    """Five functions from one source line; three processes compile them, and a fourth finds what they left."""
    crowd = [roots(tmp_path) for _ in range(3)]
    for process in [*crowd, roots(tmp_path)]:
        errors = [float(word) for word in process.communicate(timeout=600)[0].split()]
        assert len(errors) == 5
        assert max(errors) < 1e-12
    indices = [path.name for path in tmp_path.rglob("*.nbi")]
    assert len([name for name in indices if ".root" in name]) == 5


def test_every_variant_has_a_name_of_its_own():
    variants = [_kernels.kernel(p, regular) for p in (1, 2) for regular in (True, False)]
    variants += [_kernels._root2, _kernels._root3, _kernels._root6]
    assert len({variant.py_func.__qualname__ for variant in variants}) == len(variants)


class Kernel:
    """What `cpu` sees of a compiled function."""

    def __init__(self, folder, called=None):
        self.stats = SimpleNamespace(cache_path=str(folder), cache_misses=0)
        self.py_func, self.called = test_every_variant_has_a_name_of_its_own, called

    def __call__(self, *args):
        self.called.set()


def test_only_one_process_compiles_at_a_time(tmp_path, monkeypatch):
    fcntl = pytest.importorskip("fcntl")
    done = threading.Event()
    monkeypatch.setattr(_kernels, "basis", Kernel(tmp_path))
    monkeypatch.setattr(_kernels, "kernel", lambda degree, regular: Kernel(tmp_path, done))
    with Path(tmp_path, ".bsat-compiling.lock").open("wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        thread = threading.Thread(target=cpu._kernel.__wrapped__, args=(3, True))
        thread.start()
        assert not done.wait(0.3)
        fcntl.flock(other, fcntl.LOCK_UN)
        assert done.wait(600)
    thread.join()


def test_whoever_finds_it_compiled_does_not_wait(tmp_path, monkeypatch):
    fcntl = pytest.importorskip("fcntl")
    kernel = Kernel(tmp_path)
    monkeypatch.setattr(_kernels, "basis", kernel)
    with Path(tmp_path, ".bsat-compiling.lock").open("wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        Path(tmp_path, cpu._cached_as(kernel)).write_bytes(b"")
        with cpu._alone(kernel):
            pass


def test_the_file_is_where_numba_puts_it():
    for kernel in (cpu._compiled("basis"), cpu._kernel(1, True)):
        assert Path(kernel.stats.cache_path, cpu._cached_as(kernel)).exists()


def test_a_cache_that_cannot_be_locked_is_no_hindrance(tmp_path, monkeypatch):
    for folder in (tmp_path / "nowhere", tmp_path):
        kernel = Kernel(folder)
        monkeypatch.setattr(_kernels, "basis", kernel)
        with cpu._alone(kernel):
            pass
        monkeypatch.setattr("fcntl.flock", no_locks)  # next time the folder is there


def no_locks(file, how):
    raise OSError(errno.ENOLCK, "no locks available")


def test_functions_that_numba_leaves_alone_need_no_lock(monkeypatch):
    monkeypatch.setattr(_kernels, "basis", no_locks)
    with cpu._alone(no_locks):
        pass


def test_what_there_is_but_one_of_is_compiled_for_the_arrays_it_gets():
    """Otherwise a second version would be compiled outside of the lock."""
    knots, c, x = np.array([[0, 0, 0.5, 1, 1.0]]), np.array([[1.0, 2, 3]]), np.linspace(0, 1, 7)
    cpu.basis(knots, 1, x)
    cpu.evaluate(knots, c, 1, x)
    assert len(_kernels.basis.signatures) == len(_kernels.evaluate.signatures) == 1
