"""Reversible instance normalisation (Kim et al., 2021): every window enters with mean 0 and deviation 1."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

NORMS = ("coefficients", "window")
SMALLEST_VARIANCE = 1e-5
"""Added to the variance, so that a constant window is divided by a number."""


class InstanceNorm(nn.Module):
    """Takes a window's level and spread out of its tokens, and puts them back into the forecast.

    Over "coefficients" (paper, section "Model Architecture") both are those of the numbers that the tokens hold: for
    BSAT the coefficients (and the detail, if asked for), for the baselines the samples. Over "window" they are those
    of the window's samples. Centers are positions, not levels, and pass through. RevIN's learned scale and offset are
    left out, as in PatchTST: the embedding that follows is linear.

    Args:
        levels: for each of the f values of a token, whether it is in the unit of the series.
        over: "coefficients" or "window".
    """

    levels: Tensor

    def __init__(self, levels: Sequence[bool], over: str = "coefficients") -> None:
        super().__init__()
        self.over = over
        self.all_levels = all(levels)
        self.register_buffer("levels", torch.tensor(list(levels)), persistent=False)

    def forward(self, values: Tensor, window: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Values (B, n, f), with the window's mean and variance (B,) if they are asked for, to normalised values, mean
        (B, 1) and deviation (B, 1)."""
        if self.over == "window":
            if window is None:
                raise ValueError("`window` must hold each window's mean and variance with norm='window'; got None.")
            mean, variance = (a.to(values.dtype)[:, None] for a in window)
        else:
            held = (values if self.all_levels else values[..., self.levels]).flatten(1)
            variance, mean = torch.var_mean(held, 1, correction=0, keepdim=True)
        deviation = (variance + SMALLEST_VARIANCE).sqrt()
        normal = (values - mean.unsqueeze(2)) / deviation.unsqueeze(2)
        return normal if self.all_levels else torch.where(self.levels, normal, values), mean, deviation

    @staticmethod
    def inverse(forecast: Tensor, mean: Tensor, deviation: Tensor) -> Tensor:
        """Back to the unit of the values."""
        return forecast * deviation + mean
