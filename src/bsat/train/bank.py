"""Tokens of all windows, normalised once, laid out so that a training step takes its batch with one look-up.

What instance normalisation does to a window holds no parameter, so it is done here: tokens are kept without the
window's level and spread, targets are compared in those units, and errors are scaled back.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..data.windows import Windows
from ..model import Network, SplineHead
from ..model.stacked import Batch
from ..spline.autograd import local_basis
from ..tokens import Tokenizer
from .batches import CHUNK, make_inputs, tokenize

Source = tuple[Tokenizer, Network]
"""Whose tokens, and a network that tells how they are normalised, in what positions are counted, and whether its head
needs the knots."""


def highest_degree(sources: Iterable[Source]) -> int:
    """Of their splines; 0 if there are none."""
    return max(getattr(tokenizer, "degree", 0) for tokenizer, _ in sources)


class Bank:
    """Tokens of W windows from each of K sources.

    Args:
        windows: past and future.
        sources: what to tokenize with; all have as many tokens and features.
        count: room for so many windows of each source, to be filled by `fill`; None tokenizes all windows now.
    """

    def __init__(self, windows: Windows, sources: Sequence[Source], count: int | None = None) -> None:
        if windows.series.dtype != torch.float32:
            raise TypeError(f"`series` must be float32 to train on; got {windows.series.dtype}. Use series.float().")
        self.windows, self.sources = windows, list(sources)
        self.series = windows.series.contiguous()
        self.count = len(windows) if count is None else count
        self.features = len(self.sources[0][0].level_features(windows.lookback))
        self.moving = any(tokenizer.adaptive for tokenizer, _ in self.sources)
        self._make_room()
        if count is None:
            every = torch.arange(self.count, device=self.series.device)
            for source in range(len(self.sources)):
                self.fill(source, every)

    def _make_room(self) -> None:
        tokenizer, network = self.sources[0]
        K, W, n = len(self.sources), self.count, tokenizer.n_tokens
        new = self.series.new_empty
        self.values = new(K, W, n, self.features)
        self.positions = new(K, W if self.moving else 1, n)
        self.levels = new(K, W, 2)
        self.starts = new(K, W, dtype=torch.int64)
        self.first: Tensor | None = None
        self.weights: Tensor | None = None
        if network.head.needs_knots:
            width = highest_degree(self.sources) + 1
            self.first = new(K, W, n, dtype=torch.int32).zero_()
            self.weights = new(K, W, n, width).zero_()

    def forget(self) -> None:
        """Give the memory back until something is filled in again."""
        self.values = self.positions = self.levels = self.starts = self.series.new_empty(0)
        self.first = self.weights = None

    def __len__(self) -> int:
        return self.count

    @staticmethod
    def size(windows: int, source: Source, lookback: int, degree: int | None = None) -> int:
        """Bytes that so many windows of one source take, in a bank whose highest degree this is."""
        tokenizer, network = source
        n, positions = tokenizer.n_tokens, windows if tokenizer.adaptive else 1
        numbers = n * len(tokenizer.level_features(lookback)) + 4
        if network.head.needs_knots:
            numbers += n * ((highest_degree([source]) if degree is None else degree) + 2)
        return 4 * (windows * numbers + positions * n)

    @torch.no_grad()
    def fill(self, source: int, index: Tensor) -> None:
        """Tokenize the windows at `index` with one of the sources."""
        tokenizer, network = self.sources[source]
        if not len(self.values):
            self._make_room()
        self.starts[source, : len(index)] = self.windows.starts[index]
        for at in range(0, len(index), CHUNK):
            part, rows = index[at : at + CHUNK], slice(at, at + CHUNK)
            past = self.windows.past(part)
            inputs = make_inputs(network, tokenize(tokenizer, past, gaps=self.windows.gaps), past)
            normal, mean, deviation = network.norm(inputs.values, inputs.window)
            self.values[source, rows] = normal
            self.levels[source, rows] = torch.cat([mean, deviation], 1)
            if self.moving or at == 0:
                self.positions[source, rows if self.moving else slice(None)] = network.to_unit(inputs.positions)
            if self.first is not None and self.weights is not None and inputs.knots is not None:
                head: Any = network.head
                assert isinstance(head, SplineHead)
                first, weights = local_basis(inputs.knots, head.degree, head.times)
                self.first[source, rows] = first.int()
                self.weights[source, rows, :, : weights.shape[2]] = weights.to(self.weights.dtype)

    def take(self, index: Tensor, banks: Tensor) -> tuple[Batch, Tensor, Tensor]:
        """Windows (M, B) of the sources (M,): the batch, its levels and spreads (M, B, 2), and its targets (M, B, H)
        in their units, NaN where missing. The kernel `take` does the same."""
        of = banks.long().unsqueeze(1)
        levels = self.levels[of, index]
        future = self.starts[of, index].unsqueeze(2) + self.windows.ahead
        targets = (self.series[future] - levels[..., :1]) / levels[..., 1:]
        positions = self.positions[of, index if self.moving else torch.zeros_like(index)]
        return Batch(self.values[of, index], positions, self._basis(of, index)), levels, targets

    def _basis(self, of: Tensor, index: Tensor) -> Tensor | None:
        """(M, B, n, n) for the spline head."""
        if self.first is None or self.weights is None:
            return None
        first, weights = self.first[of, index].long(), self.weights[of, index]
        n, width = first.shape[-1], weights.shape[-1]
        columns = first.unsqueeze(-1) + torch.arange(width, device=first.device)
        wide = weights.new_zeros(*first.shape, n + width).scatter(-1, columns, weights)
        return wide[..., :n]
