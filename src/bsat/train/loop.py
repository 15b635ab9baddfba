"""The training loop (paper, "Training Configuration"): AdamW, MSE, early stopping, the best weights back."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import torch
from torch import Tensor, nn

from ..model import Network
from ..tokens.door import to_whole
from .batches import TokenBatches, run
from .checkpoint import Checkpoint
from .metrics import evaluate
from .schedule import learning_rate_factor


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
    """

    learning_rate: float = 1e-3
    weight_decay: float = 1e-4
    batch_size: int = 128
    max_epochs: int = 100
    patience: int = 10
    grace: int = 10
    epoch_windows: int | None = 100_000
    seed: int = 2025

    def __post_init__(self) -> None:
        for name, least in (("batch_size", 1), ("max_epochs", 1), ("patience", 1), ("grace", 0), ("seed", 0)):
            object.__setattr__(self, name, to_whole(getattr(self, name), name, least))
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
    """"patience", "max_epochs", "interrupted" or "diverged\""""

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


REPORT_EVERY = 8
"""Steps on a GPU, which must wait for its loss to be read."""

Report = Callable[[int, int, float, "Epoch | None"], None]
"""Called after every step (on a GPU every few), and after every epoch, with epoch, step, mean loss so far, and the last
whole epoch."""


def train(
    network: Network,
    train_set: TokenBatches,
    val_set: TokenBatches,
    config: TrainConfig,
    *,
    mean: Tensor,
    deviation: Tensor,
    report: Report | None = None,
    checkpoint: Checkpoint | None = None,
) -> History:
    """Train a network in place and leave the weights with the least validation RMSE in it.

    The randomness of an epoch comes from the seed and its number alone, so a run repeats bitwise on a CPU, also when it
    is stopped and resumed from a checkpoint. Ctrl-C ends it with the best weights so far. The caller's random state is
    left as it was.

    Args:
        mean, deviation: (R,) in float64, the scaling of the series, for scores in the data's unit. With several series,
            the RMSE that decides is that of the scaled ones, in which all count alike.
        report: see `Report`.
        checkpoint: where the state is kept after every epoch, and found again.
    """
    optimizer = make_optimizer(network, config)
    history, best = History(), _copy(network)
    if checkpoint is not None:
        found = checkpoint.load(network, optimizer)
        if found is not None:
            best, meta = found
            history = History.from_dict(meta)
    device = train_set.windows.series.device
    steps = epoch_steps(len(train_set), config)
    forked = torch.random.fork_rng([device] if device.type == "cuda" else [])
    with forked:
        try:
            while not _finished(history, config):
                epoch = len(history.epochs)
                began = time.perf_counter()
                rate = config.learning_rate * learning_rate_factor(epoch)
                for group in optimizer.param_groups:
                    group["lr"] = rate
                seed_generators(_epoch_seed(config.seed, epoch), device)
                order = torch.randperm(len(train_set))[: config.epoch_windows].to(device)
                loss = _run_epoch(network, optimizer, train_set, order, config, epoch, report, history)
                scores = evaluate(network, val_set, mean, deviation)
                if not (math.isfinite(loss) and math.isfinite(scores.rmse)):
                    history.stopped = "diverged"
                    break
                bases = [float(b.detach().exp()) for b in network.log_bases()]
                seconds = time.perf_counter() - began
                done = Epoch(epoch, rate, loss, scores.rmse, scores.scaled_rmse, bases, seconds)
                history.epochs.append(done)
                if history.best_epoch < 0 or done.val_scaled_rmse < history.best.val_scaled_rmse:
                    history.best_epoch, best = epoch, _copy(network)
                if report is not None:
                    report(epoch, steps, loss, done)
                if checkpoint is not None:
                    checkpoint.save(network, optimizer, best, history.to_dict())
        except KeyboardInterrupt:
            if history.best_epoch < 0:
                raise
            history.stopped = "interrupted"
    if history.stopped == "diverged":
        message = (
            f"the loss is no longer a number in epoch {len(history.epochs)}, at learning_rate = {rate:g}. "
            f"Lower `learning_rate`."
        )
        if history.best_epoch < 0:
            raise FloatingPointError(message)
        warnings.warn(f"{message} The best weights so far are kept.", RuntimeWarning, stacklevel=2)
    if checkpoint is not None and history.stopped != "interrupted":
        checkpoint.save(network, optimizer, best, history.to_dict())  # with its end
    network.load_state_dict(best)
    network.eval()
    return history


def epoch_steps(windows: int, config: TrainConfig) -> int:
    """Optimizer steps in an epoch; the last batch may be smaller."""
    return math.ceil(min(windows, config.epoch_windows or windows) / config.batch_size)


def make_optimizer(network: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """AdamW; fused where torch has it."""
    free = [p for name, p in network.named_parameters() if name.endswith("log_base")]
    rest = [p for name, p in network.named_parameters() if not name.endswith("log_base")]
    groups = [{"params": rest, "weight_decay": config.weight_decay}, {"params": free, "weight_decay": 0.0}]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=config.learning_rate, fused=True)


def _run_epoch(
    network: Network,
    optimizer: torch.optim.Optimizer,
    batches: TokenBatches,
    order: Tensor,
    config: TrainConfig,
    epoch: int,
    report: Report | None,
    history: History,
) -> float:
    """The mean loss over the epoch's windows."""
    network.train()
    parameters = list(network.parameters())
    total = torch.zeros((), device=order.device)
    last = history.epochs[-1] if history.epochs else None
    for step, index in enumerate(order.split(config.batch_size)):
        loss = mse(run(network, batches.inputs(index)), batches.targets(index), gaps=batches.windows.gaps)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True)
        optimizer.step()
        total += loss.detach() * len(index)
        if report is not None and (order.device.type == "cpu" or step % REPORT_EVERY == 0):
            report(epoch, step + 1, float(total) / min((step + 1) * config.batch_size, len(order)), last)
    return float(total) / len(order)


def mse(forecast: Tensor, truth: Tensor, *, gaps: bool) -> Tensor:
    """Over what was observed."""
    if not gaps:
        return nn.functional.mse_loss(forecast, truth)
    seen = ~torch.isnan(truth)
    return torch.where(seen, forecast - torch.nan_to_num(truth), 0).square().sum() / seen.sum()


def _finished(history: History, config: TrainConfig) -> bool:
    done = len(history.epochs)
    if done >= config.max_epochs:
        history.stopped = "max_epochs"
    elif done > config.grace and done - 1 - history.best_epoch >= config.patience:
        history.stopped = "patience"
    else:
        history.stopped = ""
    return bool(history.stopped)


def seed_generators(seed: int, device: torch.device) -> None:
    """The CPU's generator and that of the device; no other GPU's."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)


def _epoch_seed(seed: int, epoch: int) -> int:
    """Neighbouring seeds must not share epochs."""
    return (seed * 1_000_003 + epoch) % 2**63


def _copy(network: nn.Module) -> dict[str, Tensor]:
    return {name: a.detach().clone() for name, a in network.state_dict().items()}
