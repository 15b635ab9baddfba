"""Windows as the network wants them: tokens and targets, by index, where the model is."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .. import nvrtc
from ..data.windows import Windows
from ..model import Network
from ..tokens import BSplineTokenizer, BSplineTokens, Tokenizer, Tokens
from .settings import TrainConfig

CHUNK = 4096
"""Windows tokenized at once when all are."""
KEPT_TOKENS = 512 * 2**20
"""Bytes of tokens that a training on its own keeps."""


@dataclass(frozen=True)
class Inputs:
    """What `Network.forward` takes."""

    values: Tensor
    positions: Tensor
    knots: Tensor | None
    window: tuple[Tensor, Tensor] | None

    def to(self, device: torch.device) -> Inputs:
        """The same on another device."""
        knots = None if self.knots is None else self.knots.to(device)
        window = None if self.window is None else (self.window[0].to(device), self.window[1].to(device))
        return Inputs(self.values.to(device), self.positions.to(device), knots, window)


def tokenize(tokenizer: Tokenizer, past: Tensor, *, gaps: bool) -> Tokens:
    """Tokens of windows (B, L); with `gaps`, samples that are NaN are missing."""
    missing = torch.isnan(past) if gaps else None
    return tokenizer.transform(past, mask=missing if missing is not None and bool(missing.any()) else None)


def fit_tokenizer(tokenizer: Tokenizer, windows: Windows) -> Tokenizer:
    """A copy, fitted to the train fold if it asks for it: windows 100 samples apart."""
    tokenizer = copy.deepcopy(tokenizer)
    if isinstance(tokenizer, BSplineTokenizer) and not tokenizer.__sklearn_is_fitted__():
        every = torch.arange(0, len(windows), 100, device=windows.starts.device)
        some = windows.past(every[torch.linspace(0, len(every) - 1, min(len(every), 2000)).long()])
        some = some[~torch.isnan(some).any(1)]
        if len(some) == 0:
            raise ValueError(
                "`clip_factor` = 'auto' needs windows without missing samples to search on, and the train fold has "
                "none. Give a number, e.g. 0.62."
            )
        tokenizer.fit(some.cpu())
    return tokenizer


def make_inputs(network: Network, tokens: Tokens, past: Tensor | None) -> Inputs:
    """Tokens, and the windows where the network's norm looks at them, as the network wants them."""
    knots = tokens.knots if network.head.needs_knots else None  # type: ignore[attr-defined]
    positions = tokens.positions if isinstance(tokens, BSplineTokens) else tokens.positions[0]
    window = None
    if network.norm.over == "window":
        if past is None:
            raise ValueError("`past` must hold the windows with norm='window'; got None.")
        seen = ~torch.isnan(past)
        count = seen.sum(1)
        mean = torch.where(seen, past, 0).sum(1) / count
        variance = torch.where(seen, past - mean.unsqueeze(1), 0).square().sum(1) / count
        window = mean, variance
    return Inputs(tokens.values, positions, knots, window)


def run(network: Network, inputs: Inputs) -> Tensor:
    """The forecasts (B, H)."""
    return network(inputs.values, inputs.positions, inputs.knots, inputs.window)


class TokenBatches:
    """Inputs and targets of windows, by index.

    Args:
        windows: past and future.
        tokenizer: makes the tokens.
        network: tells what else it needs.
        keep: make all tokens now and index them; else they are made batch by batch, from the same numbers.
    """

    def __init__(self, windows: Windows, tokenizer: Tokenizer, network: Network, *, keep: bool) -> None:
        self.windows, self.tokenizer, self.network = windows, tokenizer, network
        self._kept = self._tokenize_all() if keep and len(windows) else None

    def __len__(self) -> int:
        return len(self.windows)

    def _tokenize(self, past: Tensor) -> Tokens:
        return tokenize(self.tokenizer, past, gaps=self.windows.gaps)

    def _tokenize_all(self) -> Tokens:
        """Only what the network reads is kept."""
        kept: dict[str, Any] = {}
        W = len(self)
        for start in range(0, W, CHUNK):
            tokens = self._tokenize(self.windows.past(slice(start, start + CHUNK)))
            names = [n for n in tokens.arrays if getattr(tokens, n) is not None and n != "fallback"]
            for name in names:
                part = getattr(tokens, name)
                if name == "knots" and not self.network.head.needs_knots:
                    part = part[:, :0]
                if name not in kept:
                    kept[name] = part.new_empty((W, *part.shape[1:]))
                kept[name][start : start + CHUNK] = part
        if isinstance(tokens, BSplineTokens):
            return replace(tokens, **{"detail": None, "fallback": None, **kept})
        return replace(tokens, **kept)  # type: ignore[type-var]

    def inputs(self, index: Any) -> Inputs:
        """Of the windows at an index or slice."""
        if self._kept is not None:
            past = self.windows.past(index) if self.network.norm.over == "window" else None
            return make_inputs(self.network, self._kept[index], past)
        past = self.windows.past(index)
        return make_inputs(self.network, self._tokenize(past), past)

    def targets(self, index: Any) -> Tensor:
        """(B, H); NaN where missing."""
        return self.windows.future(index)


def keeps_tokens(
    tokenizer: Tokenizer, network: Network, config: TrainConfig, train_windows: Windows, val_windows: Windows
) -> bool:
    """Whether a training had better make all tokens at its beginning."""
    if nvrtc.serves(train_windows.series.device):  # there tokens are made faster than they are fetched
        return False
    every = config.epoch_windows is None or len(train_windows) <= config.epoch_windows
    size = bytes_per_window(tokenizer, network, train_windows.lookback) * (len(train_windows) + len(val_windows))
    return tokenizer.adaptive and every and size <= KEPT_TOKENS


def bytes_per_window(tokenizer: Tokenizer, network: Network, lookback: int) -> int:
    """That keeping the tokens of a window takes."""
    if not tokenizer.adaptive:
        return 0
    features = len(tokenizer.level_features(lookback))
    knots = tokenizer.n_tokens + tokenizer.degree + 1 if network.head.needs_knots else 0  # type: ignore[attr-defined]
    return 4 * (tokenizer.n_tokens * features + knots)
