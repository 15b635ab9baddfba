"""What shapes a training, and what is recorded of it."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from ..tokens.door import to_whole


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How a network is trained. Batch size, epochs, schedule and stopping are the paper's; it searches the learning
    rate and the weight decay.

    Args:
        learning_rate: at its peak.
        weight_decay: AdamW's; of everything but the learned log-bases, which it would pull towards a base of 1.
        batch_size: windows a step.
        max_epochs: at most so many.
        patience: stop after so many epochs without a better validation RMSE,
        grace: but not within the first so many.
        epoch_windows: train on at most so many windows an epoch, drawn anew for each, and validate on as many, spread
            evenly; None means all.
        seed: of weights, order and dropout.
        deterministic: on a GPU, plain steps with torch's deterministic algorithms instead of captured ones; slower.
    """

    learning_rate: float = 1e-3
    weight_decay: float = 1e-4
    batch_size: int = 128
    max_epochs: int = 100
    patience: int = 10
    grace: int = 10
    epoch_windows: int | None = 100_000
    seed: int = 2025
    deterministic: bool = False

    def __post_init__(self) -> None:
        for name, least in (("batch_size", 1), ("max_epochs", 1), ("patience", 1), ("grace", 0), ("seed", 0)):
            object.__setattr__(self, name, to_whole(getattr(self, name), name, least))
        if self.seed >= 2**63:
            raise ValueError(f"`seed` must be less than 2^63; got {self.seed}. Lower it.")
        object.__setattr__(self, "deterministic", bool(self.deterministic))
        if self.epoch_windows is not None:
            object.__setattr__(self, "epoch_windows", to_whole(self.epoch_windows, "epoch_windows", 1))
        for name in ("learning_rate", "weight_decay"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise TypeError(f"`{name}` must be a number; got {value!r}. Pass a float.")
            if not (math.isfinite(value) and value >= 0) or (name == "learning_rate" and value == 0):
                rule = "positive" if name == "learning_rate" else "at least 0"
                raise ValueError(f"`{name}` must be {rule} and finite; got {value}. Pass e.g. 1e-3.")

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """The names of the choices."""
        return tuple(field.name for field in fields(cls))


@dataclass(frozen=True)
class Epoch:
    """What is recorded of an epoch; RMSE in the data's unit."""

    epoch: int
    learning_rate: float
    loss: float
    val_rmse: float
    val_scaled_rmse: float
    bases: list[float]
    """exp of each layer's log-base; empty without L-RoPE"""
    seconds: float


@dataclass
class History:
    """Of a training."""

    epochs: list[Epoch] = field(default_factory=list)
    best_epoch: int = -1
    stopped: str = ""
    """"patience", "max_epochs", "interrupted", "diverged", or "halved" by who watches"""

    @property
    def best(self) -> Epoch:
        """Whose weights were kept."""
        return self.epochs[self.best_epoch]

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "best_epoch": self.best_epoch,
            "stopped": self.stopped,
            "epochs": [asdict(e) for e in self.epochs],
        }

    @classmethod
    def from_dict(cls, d: dict[str, Any]) -> History:
        """From JSON."""
        return cls([Epoch(**e) for e in d["epochs"]], d["best_epoch"], d["stopped"])


def finished(history: History, config: TrainConfig) -> bool:
    """Whether the training is over; says why in the history."""
    done = len(history.epochs)
    if done >= config.max_epochs:
        history.stopped = "max_epochs"
    elif done > config.grace and done - 1 - history.best_epoch >= config.patience:
        history.stopped = "patience"
    else:
        history.stopped = ""
    return bool(history.stopped)


def epoch_steps(windows: int, config: TrainConfig) -> int:
    """Optimizer steps in an epoch; the last batch may be smaller."""
    return math.ceil(min(windows, config.epoch_windows or windows) / config.batch_size)


def epoch_seed(seed: int, epoch: int) -> int:
    """Neighbouring seeds must not share epochs."""
    return (seed * 1_000_003 + epoch) % 2**63


def draw_order(windows: int, config: TrainConfig, epoch: int, generator: torch.Generator | None = None) -> Tensor:
    """Which windows an epoch trains on, in which order; from the seed and the epoch's number alone."""
    generator = (generator or torch.Generator()).manual_seed(epoch_seed(config.seed, epoch))
    return torch.randperm(windows, generator=generator)[: config.epoch_windows]
