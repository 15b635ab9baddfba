"""What stands between Python and the CUDA kernels, as far as it can be seen without a GPU."""

import ctypes
import subprocess
import sys

import pytest
import torch

from bsat import nvrtc

# ---- arguments -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [0, 1, -1, 2**31 - 1, -(2**31)])
def test_an_int_is_passed_as_an_int(number):
    held = nvrtc._as_c(number)
    assert type(held) is ctypes.c_int
    assert held.value == number


@pytest.mark.parametrize("number", [2**31, -(2**31) - 1, 2**40])
def test_an_int_that_an_int_cannot_hold_is_refused(number):
    with pytest.raises(OverflowError, match=f"a kernel's int has 32 bits; got {number}"):
        nvrtc._as_c(number)


@pytest.mark.parametrize("number", [0.0, 0.1, -1e300, float("inf"), 3.0])
def test_a_float_is_passed_as_a_double(number):
    held = nvrtc._as_c(number)
    assert type(held) is ctypes.c_double
    assert held.value == number


def test_a_tensor_is_passed_as_a_pointer_to_its_first_number():
    a = torch.arange(10.0)
    for part in (a, a[3:], a.view(2, 5)[1]):
        held = nvrtc._as_c(part)
        assert type(held) is ctypes.c_void_p
        assert ctypes.cast(held, ctypes.POINTER(ctypes.c_float))[0] == part.flatten()[0]


def test_none_is_passed_as_a_null_pointer():
    held = nvrtc._as_c(None)
    assert type(held) is ctypes.c_void_p
    assert held.value is None


@pytest.mark.parametrize("arg", [True, False, "name", [1], (2.0,), 1j, torch.float32])
def test_other_kinds_are_refused(arg):
    with pytest.raises(TypeError, match="a kernel takes tensors, ints and floats; got"):
        nvrtc._as_c(arg)


@pytest.mark.parametrize(
    ("size", "three"), [(7, (7, 1, 1)), ((7,), (7, 1, 1)), ((7, 3), (7, 3, 1)), ((7, 3, 2), (7, 3, 2))]
)
def test_sizes_have_three_numbers(size, three):
    assert nvrtc._three(size) == three


# ---- launching -------------------------------------------------------------------------------------------------------


class Driver:
    """Takes the place of libcuda: remembers launches, and fails if it is told to."""

    def __init__(self, code=0):
        self.code, self.launches, self.looked_up = code, [], []

    def cuModuleGetFunction(self, kernel, module, name):
        self.looked_up.append(name)
        return 0

    def cuLaunchKernel(self, kernel, *rest):
        *sizes, shared, stream, pointers, _ = rest
        self.launches.append((sizes, shared, stream.value, list(pointers)))
        self.numbers = [ctypes.cast(p, ctypes.POINTER(ctypes.c_int))[0] for p in pointers]
        return self.code

    def cuGetErrorString(self, code, text):
        text._obj.value = b"too many resources"
        return 0


@pytest.fixture
def driver(monkeypatch):
    made = Driver()
    monkeypatch.setattr(nvrtc, "_driver", lambda: made)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: type("Stream", (), {"cuda_stream": 77})())
    return made


def loaded():
    """A program as if it had been compiled and loaded."""
    program = nvrtc.Program.__new__(nvrtc.Program)
    program._module, program._kernels = ctypes.c_void_p(), {}
    return program


def test_a_launch(driver):
    program = loaded()
    program.launch("twice", (5, 2), 64, 3, 8)
    program.launch("twice", 1, (8, 4), 9)
    (sizes, _, stream, pointers), (others, *_) = driver.launches
    assert sizes == [5, 2, 1, 64, 1, 1]
    assert others == [1, 1, 1, 8, 4, 1]
    assert stream == 77  # torch's own, so that it can be captured
    assert len(pointers) == 2
    assert driver.numbers == [9]
    assert driver.looked_up == [b"twice"]  # once


def test_a_launch_that_fails_says_why(driver):
    driver.code = 701
    with pytest.raises(RuntimeError, match=r"CUDA error 701 \(too many resources\) at twice"):
        loaded().launch("twice", 1, 1, 3)


# ---- what is compiled is kept ----------------------------------------------------------------------------------------


class Compiler:
    """Takes the place of NVRTC."""

    version = (12, 8)

    def nvrtcVersion(self, major, minor):
        # References into an array of two ints, by their distance from its beginning.
        major._obj[0], minor._obj[1] = self.version


@pytest.fixture
def compiler(monkeypatch, tmp_path):
    """The sources that were compiled, with a cache folder of the test's own."""
    made, compiled = Compiler(), []
    monkeypatch.setattr(nvrtc, "_compiler", lambda: made)

    def compile_(name, source, headers, options):
        compiled.append((name, headers, options))
        return b"image of " + source

    monkeypatch.setattr(nvrtc, "_compile", compile_)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    made.compiled = compiled
    return made


def test_a_source_is_compiled_once_and_kept(compiler, tmp_path):
    source = tmp_path / "some.cu"
    source.write_bytes(b"one")
    assert nvrtc._compile_or_find(source, ["-a"]) == b"image of one"
    assert nvrtc._compile_or_find(source, ["-a"]) == b"image of one"
    assert len(compiler.compiled) == 1
    assert compiler.compiled[0] == ("some.cu", {}, ["-a"])
    (kept,) = (tmp_path / "cache" / "bsat" / "kernels").iterdir()  # and nothing half written beside it
    assert kept.name.startswith("some-")
    assert kept.read_bytes() == b"image of one"


def test_headers_are_those_beside_the_source(compiler, tmp_path, monkeypatch):
    """Wherever the process works: NVRTC must not look for them itself."""
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "words.cuh").write_bytes(b"another's")
    monkeypatch.chdir(tmp_path / "here")
    source = tmp_path / "some.cu"
    source.write_bytes(b"one")
    (tmp_path / "words.cuh").write_bytes(b"ours")
    nvrtc._compile_or_find(source, [])
    assert compiler.compiled == [("some.cu", {"words.cuh": b"ours"}, [])]


def test_headers_are_handed_over(monkeypatch):
    class Compiler:
        def nvrtcCreateProgram(self, handle, source, name, count, headers, names):
            self.made = source, name, list(headers)[:count], list(names)[:count]
            return 1

    made = Compiler()
    monkeypatch.setattr(nvrtc, "_compiler", lambda: made)
    with pytest.raises(RuntimeError, match=r"NVRTC did not take some\.cu"):
        nvrtc._compile("some.cu", b"one", {"a.cuh": b"first", "b.cuh": b"second"}, ["-x"])
    assert made.made == (b"one", b"some.cu", [b"first", b"second"], [b"a.cuh", b"b.cuh"])


def test_any_change_compiles_anew(compiler, tmp_path):
    source, header = tmp_path / "some.cu", tmp_path / "some.cuh"
    source.write_bytes(b"one")

    def compiles(options=("-a",)):
        before = len(compiler.compiled)
        nvrtc._compile_or_find(source, list(options))
        return len(compiler.compiled) > before

    assert compiles()
    source.write_bytes(b"two")
    assert compiles()
    header.write_bytes(b"used by it")
    assert compiles()
    header.write_bytes(b"used by it, and changed")
    assert compiles()
    assert compiles(["-a", "-DDEGREE=3"])
    compiler.version = (13, 0)
    assert compiles()
    assert not compiles()
    source.write_bytes(b"one")
    header.unlink()
    compiler.version = (12, 8)
    assert not compiles()  # that of the first time is still there


def test_a_folder_that_cannot_be_written_to_is_no_hindrance(compiler, tmp_path):
    source = tmp_path / "some.cu"
    source.write_bytes(b"one")
    (tmp_path / "cache").write_text("a file where the folder should be")
    for _ in range(2):
        assert nvrtc._compile_or_find(source, []) == b"image of one"
    assert len(compiler.compiled) == 2


# ---- without a GPU ---------------------------------------------------------------------------------------------------


@pytest.fixture
def machine(monkeypatch):
    """A machine with GPU, compiler and driver, until a test takes one away."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    for part in ("_compiler", "_driver"):
        monkeypatch.setattr(nvrtc, part, lambda: None)
    return monkeypatch


def fail():
    raise OSError("none of libnvrtc.so could be loaded")


def test_what_kernels_need(machine):
    available = nvrtc.available.__wrapped__  # the answer is kept otherwise
    assert available()
    for owner, name, instead in [
        (torch.cuda, "is_available", lambda: False),
        (torch.version, "cuda", None),  # as in torch for AMD's GPUs
        (nvrtc, "_compiler", fail),
        (nvrtc, "_driver", fail),
    ]:
        with machine.context() as patch:
            patch.setattr(owner, name, instead)
            assert not available()
    assert available()


@pytest.mark.parametrize("there", [True, False])
def test_kernels_serve_gpus_alone(monkeypatch, there):
    monkeypatch.setattr(nvrtc, "available", lambda: there)
    assert not nvrtc.serves(torch.device("cpu"))
    assert not nvrtc.serves(torch.device("mps"))
    assert nvrtc.serves(torch.device("cuda", 0)) == there


EVERY_MODULE = """
import ctypes, pkgutil, sys, importlib

class NoCuda(ctypes.CDLL):
    def __init__(self, name, *args, **kwargs):
        if name is not None and ("cuda" in str(name) or "nvrtc" in str(name)):
            raise OSError(f"{name} was asked for")
        super().__init__(name, *args, **kwargs)

import torch
torch.cuda.is_available = lambda: False
ctypes.CDLL = NoCuda
import bsat
names = [m.name for m in pkgutil.walk_packages(bsat.__path__, "bsat.") if m.name != "bsat.__main__"]
for name in names:
    importlib.import_module(name)
for name in bsat.__all__:
    getattr(bsat, name)
from bsat import nvrtc
assert not nvrtc.available()
assert not nvrtc.serves(torch.device("cpu"))
assert not torch.cuda.is_initialized()
assert "triton" not in sys.modules
print(len(names), "bsat.train.population" in names, "bsat.model.fused" in names, "bsat.spline.gpu" in names)
"""


def test_every_module_is_imported_without_cuda():
    answer = subprocess.run([sys.executable, "-c", EVERY_MODULE], capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr
    count, *known = answer.stdout.split()
    assert int(count) > 40
    assert known == ["True"] * 3
