"""Tokens on disk, found again by the content of the series and everything that shapes the tokens.

The library computes unless it is asked to cache, because its kernel is about as quick as a disk (see
`benchmarks/tokenizer.py`). A cache file is a safetensors file with a checksum of what it holds; it is written under a
temporary name and renamed, so that two processes may write the same key and a reader never sees half a file.
"""

from __future__ import annotations

import hashlib
import json
import os
import warnings
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from ..atomic import leftovers, replacing, save_tensors, whole
from .door import to_numpy

FORMAT = 1
"""Raise it whenever the same settings would give other tokens, or the file's layout changes."""

SUFFIX = ".tokens.safetensors"


def default_folder() -> Path:
    """BSAT_CACHE, or the user's cache folder."""
    if os.environ.get("BSAT_CACHE"):
        return Path(os.environ["BSAT_CACHE"])
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bsat" / "tokens"


def as_cache(cache: TokenCache | os.PathLike[str] | str | bool) -> TokenCache:
    """What `transform_series` takes for a cache, ready to be written to."""
    if cache is True:
        cache = default_folder()
    if not isinstance(cache, TokenCache):
        if not isinstance(cache, (str, os.PathLike)) or str(cache) == "":
            raise TypeError(f"`cache` must be a folder, a TokenCache or True; got {cache!r}. Pass a path.")
        cache = TokenCache(cache)
    cache.folder.mkdir(parents=True, exist_ok=True)
    if not os.access(cache.folder, os.W_OK):
        raise PermissionError(
            f"`cache` must be a folder that can be written to; {cache.folder} is not. Choose another."
        )
    return cache


class TokenCache:
    """A folder of token files; no other file in it is ever touched."""

    def __init__(self, folder: os.PathLike[str] | str | None = None) -> None:
        self.folder = default_folder() if folder is None else Path(folder)

    def __repr__(self) -> str:
        return f"TokenCache({str(self.folder)!r})"

    def load(self, key: str) -> dict[str, np.ndarray] | None:
        """The arrays stored under a key; None, and a warning, if the file is damaged."""
        path = self.folder / (key + SUFFIX)
        try:
            return _read(path)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            warnings.warn(f"{path} is damaged ({error}); computing its tokens again.", RuntimeWarning, stacklevel=4)
            return None

    def store(self, key: str, arrays: dict[str, np.ndarray]) -> None:
        """Write them, whole or not at all: a warning, if they cannot be."""
        arrays = {name: np.ascontiguousarray(a) for name, a in arrays.items()}
        path = self.folder / (key + SUFFIX)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with replacing(path) as temporary:
                save_tensors(arrays, temporary, {"checksum": _checksum(arrays)})
        except OSError as error:
            warnings.warn(f"{path} cannot be written ({error}); its tokens are not kept.", RuntimeWarning, stacklevel=4)

    def files(self) -> Iterator[tuple[Path, int]]:
        """The token files and their sizes in bytes."""
        if self.folder.is_dir():
            for path in whole(self.folder, f"*{SUFFIX}"):
                with suppress(FileNotFoundError):  # another process may be clearing
                    yield path, path.stat().st_size

    def clear(self) -> tuple[int, int]:
        """Delete the token files, and what a killed writer left an hour ago or more; returns how many, and how many
        bytes."""
        doomed = list(self.files())
        for path in leftovers(self.folder, age=3600):
            with suppress(FileNotFoundError):
                doomed.append((path, path.stat().st_size))
        for path, _ in doomed:
            path.unlink(missing_ok=True)
        return len(doomed), sum(size for _, size in doomed)


def make_key(settings: dict[str, Any], *data: Any) -> str:
    """A hash of the settings and of the content of the arrays or tensors (or None) that shape the tokens."""
    text = json.dumps({**settings, "format": FORMAT}, sort_keys=True, default=float)
    digest = hashlib.blake2b(text.encode(), digest_size=16)
    for array in data:
        if array is None:
            digest.update(b"none")
            continue
        a = np.ascontiguousarray(to_numpy(array))
        digest.update(f"{a.dtype.str}{a.shape}".encode())
        digest.update(a.data)
    return digest.hexdigest()


def _read(path: Path) -> dict[str, np.ndarray]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "numpy") as file:
            checksum = (file.metadata() or {}).get("checksum")
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"not a whole safetensors file: {error}") from error
    if checksum != _checksum(arrays):
        raise ValueError("its checksum does not match its content")
    return arrays


def _checksum(arrays: dict[str, np.ndarray]) -> str:
    """Against damage, not against malice: quick, and of every byte."""
    value = 0
    for name in sorted(arrays):
        value = zlib.crc32(f"{name}{arrays[name].dtype.str}{arrays[name].shape}".encode(), value)
        value = zlib.crc32(np.ascontiguousarray(arrays[name]).view(np.uint8).data, value)
    return f"crc32:{value:08x}"
