"""Scores in the data's unit, summed in float64, so that they do not depend on the batch size."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from ..model import Network
from .batches import TokenBatches, run

EVAL_BATCH = 512


@dataclass(frozen=True)
class Scores:
    """Over all windows and steps of a fold. SMAPE runs from 0 to 200 %."""

    rmse: float
    mae: float
    mse: float
    smape: float
    windows: int
    scaled_rmse: float
    """the RMSE of the scaled series, in which every series counts alike"""

    def to_dict(self) -> dict[str, float]:
        """For JSON."""
        return asdict(self)


class Tally:
    """Sums from which the scores are made."""

    def __init__(self) -> None:
        self.sums = torch.zeros(5, dtype=torch.float64)
        self.windows = 0

    def add(self, forecast: Tensor, truth: Tensor, mean: Tensor, deviation: Tensor) -> None:
        """Scaled forecasts and truths (B, H), NaN where there is none, and their scaling (B, 1) in float64."""
        forecast, truth = forecast.double(), truth.double()
        seen = ~torch.isnan(truth)
        error = torch.where(seen, forecast - truth, 0)
        size = (forecast * deviation + mean).abs() + (truth * deviation + mean).abs()
        in_unit = error * deviation
        relative = torch.where(seen & (size > 0), in_unit.abs() / size, 0)
        parts = [in_unit.square().sum(), in_unit.abs().sum(), relative.sum(), error.square().sum(), seen.sum()]
        self.sums += torch.stack([p.double() for p in parts]).cpu()
        self.windows += len(truth)

    def scores(self) -> Scores:
        """NaN if nothing was added."""
        squares, absolute, relative, scaled, count = (float(s) for s in self.sums)
        if count == 0:
            return Scores(math.nan, math.nan, math.nan, math.nan, 0, math.nan)
        return Scores(
            rmse=math.sqrt(squares / count),
            mae=absolute / count,
            mse=squares / count,
            smape=200 * relative / count,
            windows=self.windows,
            scaled_rmse=math.sqrt(scaled / count),
        )


@torch.no_grad()
def predict(network: Network, batches: TokenBatches, batch_size: int = EVAL_BATCH) -> Iterator[tuple[slice, Tensor]]:
    """Which windows, and their scaled forecasts (B, H), dropout off."""
    mode = network.training
    network.eval()
    try:
        for start in range(0, len(batches), batch_size):
            part = slice(start, min(start + batch_size, len(batches)))
            yield part, run(network, batches.inputs(part))
    finally:
        network.train(mode)


def evaluate(
    network: Network, batches: TokenBatches, mean: Tensor, deviation: Tensor, batch_size: int = EVAL_BATCH
) -> Scores:
    """Every window, whatever the batch size; `mean` and `deviation` (R,) are the rows' scaling, in float64."""
    tally = Tally()
    for part, forecast in predict(network, batches, batch_size):
        rows = batches.windows.rows[part].long()
        tally.add(forecast, batches.targets(part), mean[rows].unsqueeze(1), deviation[rows].unsqueeze(1))
    return tally.scores()
