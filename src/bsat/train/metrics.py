"""Scores in the data's unit, summed in float64, so that they do not depend on the batch size."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from ..data.windows import Windows
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
        relative = torch.where(seen & (size != 0), in_unit.abs() / size, 0)  # a forecast of NaN scores NaN
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
    return evaluate_beside_naive(network, batches, mean, deviation, None, batch_size)["model"]


def evaluate_beside_naive(
    network: Network,
    batches: TokenBatches,
    mean: Tensor,
    deviation: Tensor,
    season: int | None,
    batch_size: int = EVAL_BATCH,
) -> dict[str, Scores]:
    """Scores of "model", and with a season also of "last value" and "seasonal naive", in one pass over the fold.

    A season of 0 says that there is none, and leaves the seasonal one out.
    """
    tallies = {"model": Tally()}
    for part, forecast in predict(network, batches, batch_size):
        rows = batches.windows.rows[part].long()
        truth, scale = batches.targets(part), (mean[rows].unsqueeze(1), deviation[rows].unsqueeze(1))
        tallies["model"].add(forecast, truth, *scale)
        if season is not None:
            _add_naive(tallies, batches.windows.past(part), truth, season, *scale)
    return {name: tally.scores() for name, tally in tallies.items()}


def evaluate_naive(
    windows: Windows, mean: Tensor, deviation: Tensor, season: int, batch_size: int = EVAL_BATCH
) -> dict[str, Scores]:
    """Scores of "last value" and, if there is a season, of "seasonal naive"."""
    tallies: dict[str, Tally] = {}
    for start in range(0, len(windows), batch_size):
        part = slice(start, min(start + batch_size, len(windows)))
        rows = windows.rows[part].long()
        scale = mean[rows].unsqueeze(1), deviation[rows].unsqueeze(1)
        _add_naive(tallies, windows.past(part), windows.future(part), season, *scale)
    return {name: tally.scores() for name, tally in tallies.items()}


def _add_naive(
    tallies: dict[str, Tally], past: Tensor, truth: Tensor, season: int, mean: Tensor, deviation: Tensor
) -> None:
    for name, naive in naive_forecasts(past, truth.shape[1], season).items():
        tallies.setdefault(name, Tally()).add(naive, truth, mean, deviation)


def naive_forecasts(past: Tensor, horizon: int, season: int) -> dict[str, Tensor]:
    """The last value, and the last season over and over, (B, H) each; a missing sample takes the one before it."""
    index = torch.arange(past.shape[1], device=past.device).expand(past.shape)
    before = torch.where(torch.isnan(past), -1, index).cummax(1).values
    filled = past.gather(1, before.clamp(min=0))
    filled = torch.where(before < 0, torch.nanmean(past, 1, keepdim=True), filled)
    forecasts = {"last value": filled[:, -1:].expand(-1, horizon)}
    if 0 < season <= past.shape[1]:
        steps = torch.arange(horizon, device=past.device) % season
        forecasts["seasonal naive"] = filled[:, past.shape[1] - season + steps]
    return forecasts
