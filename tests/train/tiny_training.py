"""Trainings that take a blink: a few short series in different units, and a network of a few hundred weights."""

from dataclasses import dataclass

import numpy as np
import torch

import bsat
from bsat.data.folds import fold_edges
from bsat.data.windows import Windows, fit_scaling, make_windows
from bsat.model import Network, NetworkConfig, build_network
from bsat.tokens import Tokenizer
from bsat.train import TokenBatches
from conftest import make_signals

L, H, N = 48, 6, 8
SMALL = {"d_model": 8, "n_heads": 2, "n_layers": 1, "ff_factor": 2}


@dataclass
class Case:
    """Series scaled and cut into folds, and the network to train on them."""

    values: np.ndarray  # (R, T) in the data's unit, NaN where missing
    windows: list[Windows]  # train, val, test
    mean: torch.Tensor  # (R,)
    deviation: torch.Tensor
    tokenizer: Tokenizer
    network: Network

    def batches(self, fold: int, *, keep: bool = False) -> TokenBatches:
        return TokenBatches(self.windows[fold], self.tokenizer, self.network, keep=keep)

    @property
    def scaling(self) -> dict[str, torch.Tensor]:
        return {"mean": self.mean, "deviation": self.deviation}


def make_network(tokenizer: Tokenizer, *, seed=0, **choices) -> Network:
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        return build_network(NetworkConfig(**{**SMALL, **choices}), tokenizer, lookback=L, horizon=H)


def make_case(tokenizer=None, *, rows=2, length=240, gaps=False, seed=0, **choices) -> Case:
    """Row r is in a unit 10^r times finer than that of row 0, with another level. With gaps, the first row has none,
    the second some, and the third two long ones."""
    tokenizer = tokenizer or bsat.BSplineTokenizer(N)
    row = np.arange(rows)[:, None]
    values = make_signals(length, rows)["transformer"] * 10.0**row - 20 * row
    if gaps:
        values[1, ::7] = np.nan
        if rows > 2:
            values[2, 60:105] = values[2, 180:200] = np.nan
    edges = fold_edges(np.full(rows, length))
    offsets = np.arange(rows + 1) * length
    mean, deviation = fit_scaling(values.ravel(), offsets, edges[:, 1])
    series = torch.from_numpy(((values - mean[:, None]) / deviation[:, None]).astype(np.float32).ravel())
    least = tokenizer.n_tokens + 1 if gaps else 0
    windows = [make_windows(series, offsets, edges, k, lookback=L, horizon=H, least=least) for k in range(3)]
    network = make_network(tokenizer, seed=seed, **choices)
    return Case(values, windows, torch.from_numpy(mean), torch.from_numpy(deviation), tokenizer, network)
