"""Our CUDA kernels on a machine without a GPU: the same source, compiled as C++ and run one thread after another.

`cuda_on_cpu.h` defines CUDA's words; `program` stands in for `bsat.nvrtc.program`, with CPU tensors. Slow, and made for
small problems; but every line of a kernel, its barriers and its warp shuffles are run, and a wrong kind or number of
arguments, which a GPU would swallow, is an error.

    @pytest.fixture
    def on_cpu(monkeypatch):
        cuda_on_cpu.install(monkeypatch)
"""

import ctypes
import hashlib
import re
import shutil
import subprocess
import tempfile
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path

import torch

from bsat import nvrtc

HEADER = Path(__file__).with_suffix(".h")
OPTIONS = ("-std=c++17", "-O1", "-fPIC", "-fno-gnu-unique", "-w", "-ffp-contract=off")
KERNEL = re.compile(r'extern\s+"C"\s+__global__\s+(?:\w+\([^)]*\)\s+)*void\s+(?:\w+\([^)]*\)\s+)*(\w+)\s*\(')


def install(monkeypatch) -> None:
    """Let `bsat.nvrtc` run kernels on the CPU for the time of a test."""
    monkeypatch.setattr(nvrtc, "program", program)
    monkeypatch.setattr(nvrtc, "available", lambda: True)
    monkeypatch.setattr(nvrtc, "serves", lambda device: True)
    monkeypatch.setattr(nvrtc, "compile_ahead", lambda *requests: None)


def program(path, **constants) -> "Program":
    """Like `nvrtc.program`."""
    return Program(_library(Path(path), tuple(constants.items())))


def compile_ahead(path, *constants: dict) -> None:
    """Compile several variants side by side, for tests that will ask for them one by one."""
    for some in constants:
        _start(Path(path), tuple(some.items()))


class Program:
    """Kernels of one source."""

    def __init__(self, library):
        self._library = library

    def launch(self, name, grid, block, *args) -> None:
        """Run a kernel to its end."""
        signature = getattr(self._library, f"signature_{name}")
        signature.restype = ctypes.c_char_p
        letters, holders = signature().decode(), [nvrtc._as_c(arg) for arg in args]
        given = "".join({ctypes.c_void_p: "p", ctypes.c_int: "i", ctypes.c_double: "d"}[type(h)] for h in holders)
        if given != letters:
            raise TypeError(f"kernel {name} takes {letters} (pointers, ints, doubles); got {given}")
        if any(isinstance(arg, torch.Tensor) and arg.device.type != "cpu" for arg in args):
            raise TypeError(f"kernel {name} runs on the CPU here and takes CPU tensors")
        shape = (ctypes.c_uint * 6)(*nvrtc._three(grid), *nvrtc._three(block))
        pointers = (ctypes.c_void_p * len(holders))(*(ctypes.addressof(h) for h in holders))
        if getattr(self._library, f"run_{name}")(shape, pointers):
            trouble = self._library.cuda_on_cpu_trouble
            trouble.restype = ctypes.c_char_p
            raise RuntimeError(f"kernel {name}, {trouble().decode()}")


@cache
def _library(path: Path, constants: tuple) -> ctypes.CDLL:
    return ctypes.CDLL(str(_start(path, constants).result()))


@cache
def _start(path: Path, constants: tuple) -> Future:
    return _workers().submit(_compile, path, constants)


@cache
def _workers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(2)


@cache
def _folder() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="bsat-cuda-on-cpu-")


def _compile(path: Path, constants: tuple) -> Path:
    compiler, header = _prepare()
    defines = [f"-D{name}={value}" for name, value in constants]
    # Without a name, nothing in the source is shared with other libraries, nor in a section that only others share.
    # Constants come after the header: with one defined before it, what was compiled beforehand cannot be used.
    words = [f"#define {name} {value}" for name, value in constants]
    lines = [f'#include "{header}"', *words, "namespace {", f'#include "{path}"', "}"]
    for name in _kernels(compiler, path, defines):
        lines += [
            f'extern "C" int run_{name}(const unsigned* s, void** a) {{ return cuda_on_cpu::run({name}, s, a); }}',
            f'extern "C" const char* signature_{name}() {{ return cuda_on_cpu::signature({name}); }}',
        ]
    key = hashlib.sha256(repr((str(path), constants)).encode()).hexdigest()[:16]
    source = header.parent / f"{path.stem}-{key}.cpp"
    source.write_text("\n".join(lines) + "\n")
    library = source.with_suffix(".so")
    answer = _call(compiler, *OPTIONS, "-shared", "-Wl,-Bsymbolic", "-o", library, source)
    assert answer.returncode == 0, f"{path.name} does not compile with {dict(constants)}:\n{answer.stderr}"
    return library


def _kernels(compiler: str, path: Path, defines: list[str]) -> list[str]:
    """The kernels that the constants leave in the source."""
    answer = _call(compiler, *defines, "-E", "-P", "-x", "c++", path)
    assert answer.returncode == 0, answer.stderr
    names = sorted(set(KERNEL.findall(answer.stdout)))
    assert names, f'{path} has no extern "C" __global__ kernel with {defines}'
    return names


_preparing = threading.Lock()


def _prepare() -> tuple[str, Path]:
    """The compiler, and the header in the session's folder."""
    with _preparing:
        return _prepare_once()


@cache
def _prepare_once() -> tuple[str, Path]:
    compiler = shutil.which("g++") or shutil.which("clang++")
    assert compiler, "the tests of the GPU kernels need a C++ compiler: install g++ (apt install g++) or clang++"
    header = Path(_folder().name) / HEADER.name
    shutil.copy(HEADER, header)
    # Compiled beforehand, a header takes a quarter of the time; a compiler that cannot use it reads the text.
    _call(compiler, *OPTIONS, "-x", "c++-header", "-o", f"{header}.gch", header)
    return compiler, header


def _call(*command: object) -> subprocess.CompletedProcess:
    return subprocess.run([str(part) for part in command], capture_output=True, text=True)
