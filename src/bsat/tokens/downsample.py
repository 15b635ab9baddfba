"""Uniform down-sampling (UDS): every token is one sample of the window. The paper's simple baseline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ..spline import is_tensor
from .contract import Tokenizer, Tokens, complete
from .door import to_numpy, to_whole


@dataclass(frozen=True, eq=False)
class UniformTokens(Tokens):
    """Tokens at the same positions in every window."""

    values: Any
    positions: Any
    length: int

    arrays: ClassVar[tuple[str, ...]] = ("values", "positions")


class DownsampleTokenizer(Tokenizer):
    """n evenly spaced samples, the newest among them.

    The paper does not say which samples it keeps. We take those that end n equal parts of the window, so that nothing
    newer than the last token is thrown away; a part that is not a whole number of samples is rounded down.
    """

    label = "UDS"

    def __init__(self, n_tokens: int = 45) -> None:
        self.n_tokens = to_whole(n_tokens, "n_tokens", 2)

    def level_features(self, lookback: int) -> list[bool]:
        """The sample."""
        self._check_length(lookback)
        return [True]

    def _check_length(self, L: int) -> None:
        if self.n_tokens > L:
            raise ValueError(
                f"`n_tokens` must not exceed the window's length = {L}; got {self.n_tokens}. "
                f"Lower `n_tokens` or lengthen the lookback."
            )

    def transform(self, windows: Any, *, times: Any = None, mask: Any = None) -> UniformTokens:
        """Values (B, n[, C], 1): the samples."""
        a = complete(windows, times, mask, "DownsampleTokenizer")
        L = a.shape[1]
        self._check_length(L)
        keep = (np.arange(1, self.n_tokens + 1) * L) // self.n_tokens - 1
        values = a[:, keep]
        return UniformTokens(values[..., None], same_positions(keep, values), L)

    def inverse_transform(self, tokens: UniformTokens, length: int | None = None) -> Any:  # type: ignore[override]
        """Straight lines between the samples; the first value holds before it."""
        at = even_points(tokens, 1, length)
        values = tokens.values[..., 0]
        keep = tokens.positions[0] if values.ndim == 2 else tokens.positions[0, :, 0]
        keep = np.asarray(to_numpy(keep), np.float64)
        right = np.clip(np.searchsorted(keep, at), 1, len(keep) - 1)
        share = np.clip((at - keep[right - 1]) / (keep[right] - keep[right - 1]), 0, 1)
        if is_tensor(values):
            share = values.new_tensor(share)
        share = share[:, None] if values.ndim == 3 else share
        return values[:, right - 1] * (1 - share) + values[:, right] * share


def even_points(tokens: Any, width: int, length: int | None) -> np.ndarray:
    """Where `inverse_transform` is asked for the window: `length` points from 0 to L - 1. Checks that the tokens are of
    the right kind, `width` values each."""
    if not isinstance(tokens, UniformTokens) or tokens.values.shape[-1] != width:
        raise TypeError(f"`tokens` must come from this tokenizer's transform; got other {type(tokens).__name__}.")
    count = tokens.length if length is None else to_whole(length, "length", 1)
    return np.linspace(0, tokens.length - 1, count)


def same_positions(at: np.ndarray, like: Any) -> Any:
    """(n,) positions for every window (and channel) of ``like`` (B, n[, C]), as a view."""
    if is_tensor(like):
        out = like.new_tensor(at)
        return (out[:, None] if like.ndim == 3 else out).expand(like.shape[: like.ndim])
    out = at.astype(like.dtype)
    return np.broadcast_to(out[:, None] if like.ndim == 3 else out, like.shape)
