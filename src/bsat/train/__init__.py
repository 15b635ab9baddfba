"""Fitting a network to windows: batches, schedule, loop, checkpoint, metrics."""

from .batches import TokenBatches
from .loop import train
from .metrics import Scores, evaluate, evaluate_beside_naive, evaluate_naive, naive_forecasts, predict
from .schedule import learning_rate_factor
from .settings import Epoch, History, TrainConfig

__all__ = [
    "Epoch",
    "History",
    "Scores",
    "TokenBatches",
    "TrainConfig",
    "evaluate",
    "evaluate_beside_naive",
    "evaluate_naive",
    "learning_rate_factor",
    "naive_forecasts",
    "predict",
    "train",
]
