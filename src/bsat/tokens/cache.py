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
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..atomic import LEFTOVERS, replacing
from ..spline import is_tensor

if TYPE_CHECKING:
    from .bspline import BSplineTokenizer, BSplineTokens

FORMAT = 1
"""Raise it whenever the same settings would give other tokens, or the file's layout changes."""

SUFFIX = ".tokens.safetensors"


def default_folder() -> Path:
    """BSAT_CACHE, or the user's cache folder."""
    if os.environ.get("BSAT_CACHE"):
        return Path(os.environ["BSAT_CACHE"])
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bsat" / "tokens"


def as_cache(cache: TokenCache | os.PathLike[str] | str | bool) -> TokenCache:
    """What `transform_series` takes for a cache."""
    if isinstance(cache, TokenCache):
        return cache
    return TokenCache(default_folder() if cache is True else Path(cache))  # type: ignore[arg-type]


class TokenCache:
    """A folder of token files; no other file in it is ever touched."""

    def __init__(self, folder: os.PathLike[str] | str | None = None) -> None:
        self.folder = default_folder() if folder is None else Path(folder)

    def __repr__(self) -> str:
        return f"TokenCache({str(self.folder)!r})"

    def tokens(
        self, tokenizer: BSplineTokenizer, series: Any, lookback: int, stride: int, missing: Any, threads: int | None
    ) -> BSplineTokens:
        """From disk if they are there and whole, else computed and stored."""
        path = self.folder / (self.key(tokenizer, series, lookback, stride, missing) + SUFFIX)
        if path.exists():
            try:
                return self._read(path, series)
            except (OSError, ValueError) as error:
                warnings.warn(f"{path} is damaged ({error}); computing its tokens again.", RuntimeWarning, stacklevel=3)
        tokens = tokenizer._transform_series(series, lookback, stride, missing, threads)
        self._write(path, tokens)
        return tokens

    def key(self, tokenizer: BSplineTokenizer, series: Any, lookback: int, stride: int, missing: Any) -> str:
        """A hash of the data and of all that shapes the tokens."""
        settings = {
            **tokenizer.get_params(),
            "clip_factor": repr(tokenizer.spec.clip_factor),
            "lookback": int(lookback),
            "stride": int(stride),
            "format": FORMAT,
        }
        digest = hashlib.blake2b(json.dumps(settings, sort_keys=True, default=float).encode(), digest_size=16)
        for array in (series, missing):
            if array is not None:
                a = np.ascontiguousarray(array.detach().cpu().numpy() if is_tensor(array) else array)
                digest.update(f"{a.dtype.str}{a.shape}".encode())
                digest.update(a.data)
        return digest.hexdigest()

    def _write(self, path: Path, tokens: BSplineTokens) -> None:
        from safetensors.numpy import save_file

        arrays = {}
        for name in tokens.arrays:
            value = getattr(tokens, name)
            if value is not None:
                arrays[name] = np.ascontiguousarray(value.detach().cpu().numpy() if is_tensor(value) else value)
        metadata = {"length": str(tokens.length), "kind": tokens.coefficient_kind, "checksum": _checksum(arrays)}
        self.folder.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            save_file(arrays, temporary, metadata=metadata)

    def _read(self, path: Path, like: Any) -> BSplineTokens:
        from safetensors import SafetensorError, safe_open

        from .bspline import BSplineTokens

        try:
            with safe_open(path, "numpy") as file:
                metadata = file.metadata() or {}
                arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise ValueError(f"not a whole safetensors file: {error}") from error
        if metadata.get("checksum") != _checksum(arrays):
            raise ValueError("its checksum does not match its content")
        fields: dict[str, Any] = {name: arrays.get(name) for name in BSplineTokens.arrays}
        if is_tensor(like):
            import torch

            fields = {k: None if v is None else torch.from_numpy(v).to(like.device) for k, v in fields.items()}
        return BSplineTokens(**fields, length=int(metadata["length"]), coefficient_kind=metadata["kind"])

    def files(self) -> Iterator[tuple[Path, int]]:
        """The token files and their sizes in bytes."""
        if self.folder.is_dir():
            for path in sorted(self.folder.glob(f"*{SUFFIX}")):
                yield path, path.stat().st_size

    def clear(self) -> tuple[int, int]:
        """Delete the token files, and what a killed writer left; returns how many, and how many bytes."""
        count = size = 0
        leftovers = [(p, p.stat().st_size) for p in self.folder.glob(LEFTOVERS)] if self.folder.is_dir() else []
        for path, length in [*self.files(), *leftovers]:
            path.unlink(missing_ok=True)
            count, size = count + 1, size + length
        return count, size


def _checksum(arrays: dict[str, np.ndarray]) -> str:
    """Against damage, not against malice: quick, and of every byte."""
    value = 0
    for name in sorted(arrays):
        value = zlib.crc32(f"{name}{arrays[name].dtype.str}{arrays[name].shape}".encode(), value)
        value = zlib.crc32(np.ascontiguousarray(arrays[name]).view(np.uint8).data, value)
    return f"crc32:{value:08x}"
