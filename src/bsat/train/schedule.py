"""The learning rate of an epoch (paper, "Training Configuration")."""

from __future__ import annotations

import math


def learning_rate_factor(
    epoch: float, *, warmup: int = 10, decay: int = 40, start: float = 0.05, end: float = 0.01
) -> float:
    """From 5 % linearly to 100 % of the learning rate over `warmup` epochs, then along a cosine to 1 % over `decay`
    epochs, and 1 % from there on."""
    if epoch < warmup:
        return start + (1 - start) * epoch / warmup
    share = min((epoch - warmup) / decay, 1.0) if decay > 0 else 1.0
    return end + (1 - end) * (1 + math.cos(math.pi * share)) / 2
