"""Tokens on disk: found again, never wrong, never half."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from bsat import BSplineTokenizer, TokenCache
from bsat.tokens import cache as module
from conftest import L, full_disk, make_signals

SERIES = make_signals(700, 1)["transformer"][0]


def same(a, b):
    for name in a.arrays:
        if getattr(a, name) is None:
            assert getattr(b, name) is None
        else:
            np.testing.assert_array_equal(getattr(a, name), getattr(b, name))
    assert (a.length, a.coefficient_kind) == (b.length, b.coefficient_kind)


@pytest.fixture
def never_compute(monkeypatch):
    def refuse(*args, **options):
        raise AssertionError("computed what the cache holds")

    return lambda: monkeypatch.setattr(BSplineTokenizer, "_transform_series", refuse)


@pytest.mark.parametrize("options", [{}, {"detail": 2, "coefficients": "asinh"}])
@pytest.mark.parametrize(
    "series", [SERIES, SERIES.astype(np.float32), np.stack([SERIES, SERIES[::-1]], 1), torch.tensor(SERIES)]
)
def test_read_equals_computed(tmp_path, never_compute, series, options):
    tok = BSplineTokenizer(24, **options)
    want = tok.transform_series(series, L, 5)
    same(tok.transform_series(series, L, 5, cache=tmp_path), want)
    never_compute()
    again = tok.transform_series(series, L, 5, cache=tmp_path)
    same(again, want)
    assert type(again.coefficients) is type(want.coefficients)
    assert again.coefficients.dtype == want.coefficients.dtype
    assert len(list(TokenCache(tmp_path).files())) == 1
    assert [p.suffix for p in tmp_path.iterdir()] == [".safetensors"]


def test_every_setting_has_its_own_file(tmp_path):
    def store(series=SERIES, lookback=L, stride=5, mask=None, **options):
        BSplineTokenizer(**{"n_tokens": 24, **options}).transform_series(
            series, lookback, stride, mask=mask, cache=tmp_path
        )

    other = SERIES.copy()
    other[-1] += 1e-9
    gap = np.arange(700) == 30
    variants = [
        {},
        {"n_tokens": 25},
        {"degree": 2},
        {"clip_factor": 0.5},
        {"clip_factor": np.inf},
        {"placement": "paper"},
        {"feature": "slope"},
        {"recency": 2.0},
        {"max_coefficient": 10.0},
        {"coefficients": "asinh"},
        {"detail": 1},
        {"series": other},
        {"series": SERIES.astype(np.float32)},
        {"lookback": L - 1},
        {"stride": 6},
        {"mask": gap},
    ]
    for count, variant in enumerate(variants, 1):
        for _ in range(2):
            store(**variant)
        assert len(list(TokenCache(tmp_path).files())) == count, variant


@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty", "text", "header"])
def test_damage_is_noticed_and_mended(tmp_path, damage):
    tok = BSplineTokenizer(24)
    want = tok.transform_series(SERIES, L, 5, cache=tmp_path)
    ((path, size),) = TokenCache(tmp_path).files()
    data = bytearray(path.read_bytes())
    if damage == "flipped":
        data[size // 2] ^= 1
    data = {
        "truncated": data[: size // 2],
        "flipped": data,
        "empty": b"",
        "text": b"hello",
        "header": b"\xff" * 8 + data[8:],
    }[damage]
    path.write_bytes(data)
    with pytest.warns(RuntimeWarning, match="is damaged .*computing its tokens again"):
        same(tok.transform_series(SERIES, L, 5, cache=tmp_path), want)
    same(tok.transform_series(SERIES, L, 5, cache=tmp_path), want)  # no warning any more


def test_a_full_disk_costs_no_tokens_and_leaves_nothing_behind(tmp_path):
    tok = BSplineTokenizer(24)
    want = tok.transform_series(SERIES, L, 5)
    with full_disk(100), pytest.warns(RuntimeWarning, match="cannot be written .*its tokens are not kept"):
        same(tok.transform_series(SERIES, L, 5, cache=tmp_path), want)
    assert list(tmp_path.iterdir()) == []
    same(tok.transform_series(SERIES, L, 5, cache=tmp_path), want)
    assert len(list(tmp_path.iterdir())) == 1


def test_two_processes_write_the_same_key(tmp_path):
    code = (
        "import numpy as np, sys, bsat\n"
        "series = np.sin(np.arange(3000) / 9.0)\n"
        "for _ in range(15):\n"
        "    t = bsat.BSplineTokenizer(24).transform_series(series, 240, cache=sys.argv[1])\n"
        "    for path, _ in list(bsat.TokenCache(sys.argv[1]).files()): path.unlink(missing_ok=True)\n"
        "print(float(t.coefficients.sum()))\n"
    )
    both = [
        subprocess.Popen([sys.executable, "-W", "error", "-c", code, tmp_path], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    answers = [process.communicate()[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert answers[0] == answers[1]


def test_odd_caches(tmp_path):
    tok = BSplineTokenizer(24)
    for cache in ("", 1, []):
        with pytest.raises(TypeError, match="`cache` must be a folder, a TokenCache or True"):
            tok.transform_series(SERIES, L, 50, cache=cache)
    with pytest.raises(ValueError, match="requires gradients"):
        tok.transform_series(torch.tensor(SERIES, requires_grad=True), L, 50, cache=tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(FileExistsError):
        tok.transform_series(SERIES, L, 50, cache=tmp_path / "file")


def test_folder_and_clearing(tmp_path, monkeypatch):
    monkeypatch.setenv("BSAT_CACHE", str(tmp_path / "here"))
    assert module.default_folder() == tmp_path / "here"
    tok = BSplineTokenizer(24)
    tok.transform_series(SERIES, L, 50, cache=True)
    keep = tmp_path / "here" / "notes.txt"
    keep.write_text("not ours")
    leftover = tmp_path / "here" / ".bsat-writing-killed.tokens.safetensors"
    leftover.write_text("half")
    assert len(list(TokenCache().files())) == TokenCache().clear()[0] == 1
    assert leftover.exists()  # it may be a writer at work
    os.utime(leftover, (0, 0))
    tok.transform_series(SERIES, L, 50, cache=True)
    store = TokenCache()
    ((path, size),) = store.files()
    assert size == os.path.getsize(path)
    assert store.clear()[0] == 2
    assert list((tmp_path / "here").iterdir()) == [keep]
    assert list(TokenCache(tmp_path / "nowhere").files()) == []
    assert TokenCache(tmp_path / "nowhere").clear() == (0, 0)
