"""PatchTST's patches (Nie et al., 2023): every token is a stretch of the window, two strides long."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..spline import is_tensor
from .contract import Tokenizer, complete
from .door import to_whole
from .downsample import UniformTokens, even_points, same_positions


class PatchTokenizer(Tokenizer):
    """n patches with stride L / n and length 2 L / n.

    The paper gives stride 720 / T and patch length 2 x stride, which makes T - 1 patches; like PatchTST we repeat the
    last value for one stride at the end, which makes T. A token's
    position is the middle of its patch, padding included.
    """

    label = "PatchTST"

    def __init__(self, n_tokens: int = 45) -> None:
        self.n_tokens = to_whole(n_tokens, "n_tokens", 1)

    def level_features(self, lookback: int) -> list[bool]:
        """All samples of a patch."""
        return [True] * (2 * self._stride(lookback))

    def _stride(self, L: int) -> int:
        if L % self.n_tokens:
            divisors = [d for d in range(1, L + 1) if L % d == 0]
            near = sorted(sorted(divisors, key=lambda d: abs(d - self.n_tokens))[:2])
            raise ValueError(
                f"`n_tokens` must divide the window's length = {L}; got {self.n_tokens}. "
                f"Use {' or '.join(map(str, near))}, or another lookback."
            )
        return L // self.n_tokens

    def transform(self, windows: Any, *, times: Any = None, mask: Any = None) -> UniformTokens:
        """Values (B, n[, C], 2 L / n): the samples of each patch."""
        a = complete(windows, times, mask, "PatchTokenizer")
        L, n = a.shape[1], self.n_tokens
        stride = self._stride(L)
        if is_tensor(a):
            values = _pad(a, stride).unfold(1, 2 * stride, stride).contiguous()
        else:
            values = np.lib.stride_tricks.sliding_window_view(_pad(a, stride), 2 * stride, axis=1)[:, ::stride]
        return UniformTokens(values, same_positions(np.arange(n) * stride + stride - 0.5, values[..., 0]), L)

    def inverse_transform(self, tokens: UniformTokens, length: int | None = None) -> Any:  # type: ignore[override]
        """The window itself, from the first half of each patch, or straight lines between its samples."""
        at = even_points(tokens, 2 * (getattr(tokens, "length", 0) // self.n_tokens), length)
        values, L = tokens.values, tokens.length
        first = values[..., : values.shape[-1] // 2]  # (B, n[, C], stride)
        if is_tensor(first):
            window = first.movedim(-1, 2).flatten(1, 2)
        else:
            window = np.moveaxis(first, -1, 2).reshape(len(first), L, *first.shape[2:-1])
        if length is None or length == L:
            return window
        left = np.minimum(at.astype(int), max(L - 2, 0))
        share = (at - left).reshape(-1, *[1] * (window.ndim - 2))
        if is_tensor(window):
            share = window.new_tensor(share)
        return window[:, left] * (1 - share) + window[:, np.minimum(left + 1, L - 1)] * share


def _pad(a: Any, stride: int) -> Any:
    """Repeat the last value at the end, `stride` times."""
    if is_tensor(a):
        import torch

        return torch.cat([a, a[:, -1:].expand(-1, stride, *a.shape[2:])], 1)
    return np.concatenate([a, np.repeat(a[:, -1:], stride, axis=1)], 1)
