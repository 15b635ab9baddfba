"""The fast backend for CPUs: compiled kernels (`_kernels`), blocks of windows, threads with the GIL released.

Same functions and answers as `reference`; see `spec` for the shapes.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from . import _kernels
from .spec import SplineFit, SplineSpec

if TYPE_CHECKING:
    from collections.abc import Iterator

BLOCK = 256
"""Windows a thread takes at a time: enough to forget the cost of handing them over, few enough to share evenly."""


def default_threads() -> int:
    """BSAT_THREADS if set, else the processors this process may use."""
    wanted = os.environ.get("BSAT_THREADS", "")
    if wanted:
        if not wanted.isdigit() or int(wanted) < 1:
            raise ValueError(f"BSAT_THREADS must be a whole number of at least 1; got {wanted!r}. Unset or mend it.")
        return int(wanted)
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def place(y: np.ndarray, spec: SplineSpec, x: np.ndarray | None = None, *, threads: int | None = None) -> np.ndarray:
    """Adaptive knots, (B, n + p + 1)."""
    return tokenize(y, spec, x, threads=threads).knots


def fit(
    y: np.ndarray,
    knots: np.ndarray,
    degree: int,
    x: np.ndarray | None = None,
    *,
    exact_condition: bool = False,
    threads: int | None = None,
) -> SplineFit:
    """Least squares at given knots, with the ridge fallback."""
    spec = SplineSpec(n=knots.shape[1] - degree - 1, degree=degree, clip_factor=np.inf)
    return _run(y, spec, x, np.array(knots, float, order="C"), exact_condition, threads)


def tokenize(
    y: np.ndarray,
    spec: SplineSpec,
    x: np.ndarray | None = None,
    *,
    exact_condition: bool = False,
    threads: int | None = None,
) -> SplineFit:
    """Knots and coefficients of all windows. The condition is an upper bound, or good to 1 % if `exact_condition`."""
    return _run(y, spec, x, None, exact_condition, threads)


def tokenize_series(
    series: np.ndarray,
    starts: np.ndarray,
    m: int,
    spec: SplineSpec,
    *,
    knots: np.ndarray | None = None,
    coefficients: np.ndarray | None = None,
    threads: int | None = None,
) -> SplineFit:
    """The windows of m samples from each of ``starts`` of a (T,) series, without copying them. Where they overlap,
    they share the derivatives, bit for bit the same as each window's own. ``knots`` and ``coefficients`` may name
    float64 arrays to write to."""
    first, stop = int(starts.min()), int(starts.max()) + m
    series, starts = _plain(series[first:stop]), _plain(starts - first, np.int64)
    slope = np.empty(0)
    # A window's end differs from the series' over `order` samples, which are worked out from 2 order + 1.
    if spec.order > 0 and len(starts) * m > len(series) and 2 * spec.order + 1 <= min(m, spec.n + spec.degree + 1):
        slope = np.empty(len(series))
        _compiled("differentiate")(series, series, True, spec.order, slope, np.empty(len(series)))
    out = _empty(len(starts), spec, knots, coefficients)
    kernel = _kernel(spec.degree, regular=True)

    def work(start: int, stop: int) -> None:
        rows = slice(start, stop)
        kernel(
            series, starts[rows], m, slope, _NOWHERE, *_settings(spec, m, True, False, True), *(a[rows] for a in out)
        )

    run_blocks(work, len(starts), threads)
    return out


def _run(
    y: np.ndarray, spec: SplineSpec, x: np.ndarray | None, knots: np.ndarray | None, exact: bool, threads: int | None
) -> SplineFit:
    B, m = y.shape
    regular = x is None
    out = _empty(B, spec, knots)
    at = None if x is None else np.broadcast_to(np.asarray(x, float), y.shape)
    kernel = _kernel(spec.degree, regular)

    def work(start: int, stop: int) -> None:
        rows = slice(start, stop)
        kernel(
            _plain(y[rows]).reshape(-1),
            np.arange(0, (stop - start) * m, m),
            m,
            np.empty(0),
            _NOWHERE if at is None else _plain(at[rows]),
            *_settings(spec, m, knots is None, exact, regular),
            *(array[rows] for array in out),
        )

    run_blocks(work, B, threads)
    return out


def _plain(a: np.ndarray, dtype: type = np.float64) -> np.ndarray:
    """C-contiguous and writable, so that numba sees one type and compiles once; a copy only where it is not."""
    return np.require(a, dtype, ("C", "W"))


_NOWHERE = np.zeros((1, 1))


def _settings(spec: SplineSpec, m: int, place: bool, exact: bool, regular: bool) -> tuple[Any, ...]:
    """The kernel's arguments from `place` to `sums`."""
    sums = _power_sums(m, spec.degree) if regular else np.empty((0, spec.degree + 1))
    return (
        place,
        spec.order,
        float(spec.clip_factor),
        spec.placement == "paper",
        spec.spacing(m),
        float(spec.recency),
        exact,
        sums,
    )


def _empty(
    B: int, spec: SplineSpec, knots: np.ndarray | None = None, coefficients: np.ndarray | None = None
) -> SplineFit:
    t = np.empty((B, spec.n + spec.degree + 1)) if knots is None else knots
    c = np.empty((B, spec.n)) if coefficients is None else coefficients
    return SplineFit(t, c, np.empty(B), np.empty(B, bool))


_compiling = threading.Lock()


@contextmanager
def _alone(kernel: Any) -> Iterator[None]:
    """Compile on one thread of one process at a time. Numba's cache is not made for several that write: they could end
    up with each other's machine code. Whoever finds a kernel in the cache need not wait."""
    with _compiling, ExitStack() as stack:
        if sys.platform != "win32":
            import fcntl

            # A folder that cannot be written to, or is none, needs no lock; some cannot have one. NUMBA_DISABLE_JIT
            # leaves no cache.
            with suppress(OSError, AttributeError, TypeError):
                folder = Path(_kernels.basis.stats.cache_path)
                file = stack.enter_context((folder / ".bsat-compiling.lock").open("ab"))
                while not (folder / _cached_as(kernel)).exists():
                    try:
                        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        stack.callback(fcntl.flock, file, fcntl.LOCK_UN)
                        break
                    except BlockingIOError:
                        time.sleep(0.05)
        yield


def _cached_as(kernel: Any) -> str:
    """The file of a kernel's machine code; numba writes it last. The kernel's name keeps it from being another's."""
    code, name = kernel.py_func.__code__, kernel.py_func.__qualname__
    version = f"py{sys.version_info.major}{sys.version_info.minor}{getattr(sys, 'abiflags', '')}"
    return f"_kernels.{name}-{code.co_firstlineno}.{version}.1.nbc"


@cache
def _compiled(name: str) -> Any:
    """A kernel that there is but one of."""
    kernel, a, row = getattr(_kernels, name), np.zeros(2), np.arange(4.0)[None]
    trials = {
        "differentiate": (a, a, True, 1, a, a),
        "basis": (row, 1, a[None], np.zeros((1, 2, 2))),
        "evaluate": (row, a[None], a[None], 1, a[None]),
    }
    with _alone(kernel):
        kernel(*trials[name])
    return kernel


@cache
def _kernel(degree: int, regular: bool) -> Any:
    """The kernel, compiled; with a word to the user if that takes a while."""
    kernel = _kernels.kernel(degree, regular)
    spec = SplineSpec(n=degree + 2, degree=degree, clip_factor=1.0)
    m = degree + 3
    x = _NOWHERE if regular else np.arange(m, dtype=float)[None]
    word = f"compiling the degree-{degree} spline kernel (once per machine, up to half a minute)"
    series, starts, fit = np.zeros(m), np.zeros(1, np.int64), _empty(1, spec)
    with _word_if_slow(word, lambda: bool(kernel.stats.cache_misses)), _alone(kernel):
        kernel(series, starts, m, np.empty(0), x, *_settings(spec, m, True, False, regular), *fit)
    return kernel


def run_blocks(work: Callable[[int, int], None], count: int, threads: int | None) -> None:
    """Call ``work(start, stop)`` for blocks that cover 0 ... count - 1, on several threads if it pays."""
    blocks = [(start, min(start + BLOCK, count)) for start in range(0, count, BLOCK)]
    workers = min(default_threads() if threads is None else threads, len(blocks))
    if workers < 2:
        for block in blocks:
            work(*block)
        return
    with ThreadPoolExecutor(workers, "bsat") as pool:
        for _ in pool.map(lambda block: work(*block), blocks):
            pass


def basis(knots: np.ndarray, degree: int, x: np.ndarray) -> np.ndarray:
    """Values of the basis functions, (B, q, n), at positions (q,) or (B, q)."""
    at = np.broadcast_to(np.asarray(x, float), (len(knots), np.shape(x)[-1]))
    out = np.zeros((*at.shape, knots.shape[1] - degree - 1))
    _compiled("basis")(_plain(knots), degree, _plain(at), out)
    return out


def evaluate(
    knots: np.ndarray, coefficients: np.ndarray, degree: int, x: np.ndarray, *, threads: int | None = None
) -> np.ndarray:
    """The curves at positions (q,) or (B, q): (B, q)."""
    at = np.broadcast_to(np.asarray(x, float), (len(knots), np.shape(x)[-1]))
    out, run = np.empty(at.shape), _compiled("evaluate")

    def work(start: int, stop: int) -> None:
        arrays = (_plain(a[start:stop]) for a in (knots, coefficients, at))
        run(*arrays, degree, out[start:stop])

    run_blocks(work, len(out), threads)
    return out


@lru_cache(maxsize=32)
def _power_sums(m: int, degree: int) -> np.ndarray:
    return _kernels.power_sums(m, degree)


@contextmanager
def _word_if_slow(message: str, so: Callable[[], bool], after: float = 1.0) -> Iterator[None]:
    """Say on stderr what is going on if it takes more than a moment, and is `so`: on a busy machine, loading from the
    cache takes a while too."""
    done = threading.Event()

    def watch() -> None:
        while not done.wait(after):
            if so():
                print(f"bsat: {message} ...", file=sys.stderr, flush=True)
                return

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        done.set()
