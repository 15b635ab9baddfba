"""CUDA C compiled while the program runs, with what torch's own wheels bring: no CUDA toolkit is needed.

    program = nvrtc.program(Path(__file__).with_suffix(".cu"), DEGREE=3)
    program.launch("name", grid, block, tensor, 45, 0.62)

A kernel is declared ``extern "C" __global__`` and takes pointers, ``int`` and ``double`` only: a tensor (or None) is
passed as a pointer, a Python int as an int, a float as a double. What was compiled is kept on disk. Launches go to
torch's current stream, so they can be captured in a CUDA graph.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .atomic import replacing

OPTIONS = ("--std=c++17", "--fmad=true", "--extra-device-vectorization")


@cache
def available() -> bool:
    """Whether there is an NVIDIA GPU, and a compiler for it in torch's wheels."""
    if not torch.cuda.is_available() or torch.version.cuda is None:
        return False
    try:
        _compiler()
        _driver()
    except OSError:
        return False
    return True


def serves(device: torch.device) -> bool:
    """Whether kernels can be launched on tensors of this device."""
    return device.type == "cuda" and available()


def tensor_cores(device: torch.device) -> bool:
    """Whether it multiplies matrices of TF32 (Ampere and later)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


def program(path: Path, **constants: object) -> Program:
    """The kernels of a source file for the current device; ``constants`` are defined before its first line."""
    return _program(path, tuple(constants.items()), torch.cuda.current_device())


@cache
def _program(path: Path, constants: tuple[tuple[str, object], ...], device: int) -> Program:
    return Program(path, dict(constants), device)


def compile_ahead(*requests: tuple[Path, Mapping[str, object]]) -> None:
    """Compile several programs side by side that will be asked for one by one."""
    device = torch.cuda.current_device()
    wanted = [request for path, constants in requests if (request := (path, _options(constants, device))) not in _ahead]
    if not wanted:
        return
    with ThreadPoolExecutor(min(len(wanted), 8)) as pool:
        for _ in pool.map(lambda request: _image(*request), wanted):
            pass
    _ahead.update(wanted)


_ahead: set[tuple[Path, tuple[str, ...]]] = set()


class Program:
    """Kernels of one source, loaded on one device."""

    def __init__(self, path: Path, constants: dict[str, object], device: int) -> None:
        self.path = path
        self._module = ctypes.c_void_p()
        self._kernels: dict[str, ctypes.c_void_p] = {}
        image = _image(path, _options(constants, device))
        torch.cuda.current_stream()  # makes sure that torch has its context up
        _check(_driver().cuModuleLoadData(ctypes.byref(self._module), image), path)

    def launch(self, name: str, grid: int | tuple[int, ...], block: int | tuple[int, ...], *args: Any) -> None:
        """Start a kernel on torch's current stream."""
        holders = [_as_c(arg) for arg in args]
        pointers = (ctypes.c_void_p * len(holders))(*(ctypes.addressof(h) for h in holders))
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        _check(
            _driver().cuLaunchKernel(self._kernel(name), *_three(grid), *_three(block), 0, stream, pointers, None), name
        )

    def _kernel(self, name: str) -> ctypes.c_void_p:
        if name not in self._kernels:
            kernel = ctypes.c_void_p()
            _check(_driver().cuModuleGetFunction(ctypes.byref(kernel), self._module, name.encode()), name)
            self._kernels[name] = kernel
        return self._kernels[name]


def _as_c(arg: Any) -> Any:
    if arg is None:
        return ctypes.c_void_p(None)
    if isinstance(arg, Tensor):
        return ctypes.c_void_p(arg.data_ptr())
    if isinstance(arg, bool) or not isinstance(arg, (int, float)):
        raise TypeError(f"a kernel takes tensors, ints and floats; got {arg!r}")
    if isinstance(arg, float):
        return ctypes.c_double(arg)
    if not -(2**31) <= arg < 2**31:
        raise OverflowError(f"a kernel's int has 32 bits; got {arg}")
    return ctypes.c_int(arg)


def _three(size: int | tuple[int, ...]) -> tuple[int, int, int]:
    whole = (size,) if isinstance(size, int) else size
    x, y, z = (*whole, 1, 1)[:3]
    return x, y, z


def _options(constants: Mapping[str, object], device: int) -> tuple[str, ...]:
    major, minor = torch.cuda.get_device_capability(device)
    return f"--gpu-architecture=sm_{major}{minor}", *OPTIONS, *(f"-D{k}={v}" for k, v in constants.items())


@cache
def _image(path: Path, options: tuple[str, ...]) -> bytes:
    return _compile_or_find(path, list(options))


def _compile_or_find(path: Path, options: list[str]) -> bytes:
    """The machine code, from the cache folder if it has been compiled before."""
    source = path.read_bytes()
    version = (ctypes.c_int * 2)()
    _compiler().nvrtcVersion(ctypes.byref(version, 0), ctypes.byref(version, 4))
    headers = {header.name: header.read_bytes() for header in sorted(path.parent.glob("*.cuh"))}
    key = hashlib.sha256(repr((tuple(version), options)).encode() + source + b"".join(headers.values())).hexdigest()
    name = f"{path.stem}-{key[:32]}.cubin"
    with suppress(OSError, RuntimeError):  # a folder that is not there or cannot be read costs a few seconds
        return (_folder() / name).read_bytes()
    image = _compile(path.name, source, headers, options)
    with suppress(OSError, RuntimeError):
        _folder().mkdir(parents=True, exist_ok=True)
        with replacing(_folder() / name, sync=True) as temporary:
            temporary.write_bytes(image)
    return image


def _folder() -> Path:
    """Where what was compiled is kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bsat" / "kernels"


def _compile(name: str, source: bytes, headers: Mapping[str, bytes], options: Sequence[str]) -> bytes:
    """Headers are handed over: NVRTC would look for files of their names in the working folder first."""
    rtc, handle = _compiler(), ctypes.c_void_p()
    texts, names, array = (
        (ctypes.c_char_p * len(some))(*some)
        for some in (list(headers.values()), [h.encode() for h in headers], [o.encode() for o in options])
    )
    if rtc.nvrtcCreateProgram(ctypes.byref(handle), source, name.encode(), len(headers), texts, names) != 0:
        raise RuntimeError(f"NVRTC did not take {name}")
    try:
        failed = rtc.nvrtcCompileProgram(handle, len(options), array) != 0
        size = ctypes.c_size_t()
        if failed:
            rtc.nvrtcGetProgramLogSize(handle, ctypes.byref(size))
            log = ctypes.create_string_buffer(size.value)
            rtc.nvrtcGetProgramLog(handle, log)
            raise RuntimeError(f"{name} does not compile with {' '.join(options)}:\n{log.value.decode()}")
        rtc.nvrtcGetCUBINSize(handle, ctypes.byref(size))
        image = ctypes.create_string_buffer(size.value)
        rtc.nvrtcGetCUBIN(handle, image)
        return image.raw
    finally:
        rtc.nvrtcDestroyProgram(ctypes.byref(handle))


@cache
def _compiler() -> ctypes.CDLL:
    """NVRTC: torch has loaded it, or brings it."""
    major = str(torch.version.cuda).split(".")[0]
    windows = os.name == "nt"
    names = [f"nvrtc64_{major}0_0.dll"] if windows else [f"libnvrtc.so.{major}", "libnvrtc.so"]
    for name in names:
        with suppress(OSError):
            return ctypes.CDLL(name)
    raise OSError(f"none of {', '.join(names)} could be loaded")


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")


def _check(code: int, what: object) -> None:
    if code != 0:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(code, ctypes.byref(text))
        raise RuntimeError(f"CUDA error {code} ({(text.value or b'?').decode()}) at {what}")
