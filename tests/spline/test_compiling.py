"""Processes that compile at the same time share a cache, and must not get each other's machine code."""

import errno
import importlib.util
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import numba
import numpy as np
import pytest
from numba.core.caching import IndexDataCacheFile

from bsat.spline import _kernels, cpu, spec

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


def load(folder, old="", new=""):
    """The kernels from a copy of their source, with a change to it; numba's cache is beside it."""
    file, source = folder / "_kernels.py", Path(_kernels.__file__).read_text(encoding="utf-8").replace(old, new)
    if not file.exists() or file.read_text(encoding="utf-8") != source:  # to some versions of numba, the date matters
        file.write_text(source, encoding="utf-8")
    module_spec = importlib.util.spec_from_file_location("bsat.spline._copy", file)
    module = importlib.util.module_from_spec(module_spec)
    module_spec.loader.exec_module(module)
    return module


def test_a_process_that_is_killed_leaves_no_machine_code_of_another_source(tmp_path, monkeypatch):
    """Numba writes first that there is code, and then the code."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    y, change = np.ones(3), ("total += abs(y[i])", "total += 100 * abs(y[i])")
    assert load(tmp_path)._absolute_sum(y) == 3
    with monkeypatch.context() as patch:
        patch.setattr(IndexDataCacheFile, "_save_data", killed)
        with pytest.raises(InterruptedError):
            load(tmp_path, *change)._absolute_sum(y)
    after = load(tmp_path, *change)
    assert after._absolute_sum(y) == 300
    assert load(tmp_path, *change)._absolute_sum(y) == 300
    assert Path(after._absolute_sum.stats.cache_path, cpu._cached_as(after._absolute_sum)).exists()


def killed(file, name, data):
    raise InterruptedError


@pytest.mark.parametrize("changed", [(spec, "RIDGE", 1.0), (numba, "__version__", "0"), (numba.config, "CPU_NAME", "")])
def test_machine_code_is_named_after_what_it_is_made_from(changed, tmp_path, monkeypatch):
    """Or after an update nobody would wait, because of code that is no longer of use."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    before, same = load(tmp_path), load(tmp_path)
    monkeypatch.setattr(*changed)
    after = load(tmp_path)
    for name in ("basis", "place_window", "_raise_degree", "_root2"):
        files = [cpu._cached_as(getattr(kernels, name)) for kernels in (before, same, after)]
        assert files[0] == files[1] != files[2]


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


def test_code_of_another_source_does_not_let_it_through(tmp_path, monkeypatch):
    fcntl = pytest.importorskip("fcntl")
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    old, new = load(tmp_path).basis, load(tmp_path, "import annotations", "import annotations  # and a word").basis
    folder, done = Path(new.stats.cache_path), threading.Event()
    monkeypatch.setattr(_kernels, "basis", new)
    (folder / cpu._cached_as(old)).write_bytes(b"")

    def compile_alone():
        with cpu._alone(new):
            done.set()

    with (folder / ".bsat-compiling.lock").open("wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        thread = threading.Thread(target=compile_alone)
        thread.start()
        assert not done.wait(0.3)
        fcntl.flock(other, fcntl.LOCK_UN)
        assert done.wait(30)
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


def test_where_nothing_can_be_kept_it_is_compiled_for_this_process(monkeypatch):
    """A read-only system without a home: numba raises if it is told to keep something."""

    def nowhere(function):
        raise RuntimeError("cannot cache function: no locator available")

    def double(x):
        return 2 * x

    monkeypatch.setattr(_kernels, "CompileResultCacheImpl", nowhere)
    assert _kernels._digest.__wrapped__() is None
    monkeypatch.setattr(_kernels, "_digest", _kernels._digest.__wrapped__)
    kernel = _kernels._jit(double)
    monkeypatch.setattr(_kernels, "basis", kernel)
    with cpu._alone(kernel):
        assert kernel(3) == 6
    assert kernel.stats.cache_path is None


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
