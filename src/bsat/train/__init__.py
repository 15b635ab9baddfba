"""Fitting a network to windows: batches, schedule, loop, checkpoint, metrics."""

from .batches import TokenBatches
from .loop import Epoch, History, TrainConfig, train
from .metrics import Scores, evaluate, predict
from .schedule import learning_rate_factor

__all__ = [
    "Epoch",
    "History",
    "Scores",
    "TokenBatches",
    "TrainConfig",
    "evaluate",
    "learning_rate_factor",
    "predict",
    "train",
]
