"""The training loop (paper, "Training Configuration"): AdamW, MSE, early stopping, the best weights back."""

from __future__ import annotations

import math
import os
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Self

import torch
from torch import Tensor, nn

from .. import nvrtc
from ..data.windows import Windows
from ..model import Network, fused
from ..model.stacked import describe
from ..tokens import Tokenizer
from .bank import Bank
from .batches import TokenBatches, run
from .checkpoint import Checkpoint
from .metrics import evaluate
from .pack import Pack, free_memory
from .schedule import learning_rate_factor
from .settings import Epoch, History, TrainConfig, draw_order, epoch_seed, epoch_steps, finished

REPORT_EVERY = 8
"""Steps on a GPU, which must wait for its loss to be read."""

Report = Callable[[int, int, float, "Epoch | None"], "bool | None"]
"""Called after every step (on a GPU every few, or none), and after every epoch, with epoch, step, mean loss so far, and
the last whole epoch. While steps are captured, the network itself has its new weights only after the training. True
after an epoch ends the training there, if it has not come to its own end: it is "halved"."""


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
    is stopped and resumed from a checkpoint. On an NVIDIA GPU the steps are captured as CUDA graphs. Ctrl-C ends it
    with the best weights so far. The caller's random state is left as it was.

    Args:
        mean, deviation: (R,) in float64, the scaling of the series, for scores in the data's unit. With several series,
            the RMSE that decides is that of the scaled ones, in which all count alike.
        report: see `Report`.
        checkpoint: where the state is kept after every epoch, and found again.
    """
    windows = train_set.windows, val_set.windows
    captured = captured_tokens(network, train_set.tokenizer, config, *windows) is not None
    # A process's first optimizer makes torch load its compiler, for seconds; captured steps need one only for files.
    optimizer = None if captured and checkpoint is None else make_optimizer(network, config)
    history, best = History(), _copy(network)
    if checkpoint is not None and optimizer is not None:
        found = checkpoint.load(network, optimizer)
        if found is not None:
            best, meta = found
            history = History.from_dict(meta)
    engine: _Captured | _Plain
    if captured or optimizer is None:
        engine = _Captured(network, optimizer, train_set, val_set, config, deviation)
    else:
        engine = _Plain(network, optimizer, train_set, val_set, config, mean, deviation, report)
    steps = epoch_steps(len(train_set), config)
    with engine:
        try:
            while not finished(history, config):
                epoch = len(history.epochs)
                began = time.perf_counter()
                rate = config.learning_rate * learning_rate_factor(epoch)
                loss, rmse, scaled_rmse, bases = engine.run_epoch(epoch, rate, history)
                if not (math.isfinite(loss) and math.isfinite(rmse)):
                    history.stopped = "diverged"
                    break
                done = Epoch(epoch, rate, loss, rmse, scaled_rmse, bases, time.perf_counter() - began)
                history.epochs.append(done)
                if history.best_epoch < 0 or done.val_scaled_rmse < history.best.val_scaled_rmse:
                    history.best_epoch, best = epoch, engine.weights()
                halved = report is not None and report(epoch, steps, loss, done)
                if halved and not finished(history, config):
                    history.stopped = "halved"
                    break
                if checkpoint is not None and optimizer is not None:
                    engine.write_back()
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
    if checkpoint is not None and optimizer is not None and history.stopped != "interrupted":
        checkpoint.save(network, optimizer, best, history.to_dict())  # with its end
    network.load_state_dict(best)
    network.eval()
    return history


def make_optimizer(network: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """AdamW; fused where torch has it."""
    free = [p for name, p in network.named_parameters() if name.endswith("log_base")]
    rest = [p for name, p in network.named_parameters() if not name.endswith("log_base")]
    groups = [{"params": rest, "weight_decay": config.weight_decay}, {"params": free, "weight_decay": 0.0}]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=config.learning_rate, fused=True)


def captured_tokens(
    network: Network, tokenizer: Tokenizer, config: TrainConfig, train_windows: Windows, val_windows: Windows
) -> int | None:
    """Bytes of tokens that a training with captured steps keeps on the device; None if kernels, network or memory do
    not allow it, or determinism is asked for."""
    device, single = train_windows.series.device, all(p.dtype == torch.float32 for p in network.parameters())
    single = single and train_windows.series.dtype == torch.float32
    if not nvrtc.serves(device) or config.deterministic or not single or not fused.fits(describe(network)):
        return None
    if 2 * config.batch_size > fused.MOST_WINDOWS:
        return None
    drawn = min(len(train_windows), config.epoch_windows or len(train_windows))
    size = Bank.size(drawn + len(val_windows), (tokenizer, network), train_windows.lookback)
    return size if size <= free_memory(device) // 2 else None


class _Plain:
    """An epoch at a time, step by step, in plain torch."""

    def __init__(
        self,
        network: Network,
        optimizer: torch.optim.Optimizer,
        train_set: TokenBatches,
        val_set: TokenBatches,
        config: TrainConfig,
        mean: Tensor,
        deviation: Tensor,
        report: Report | None,
    ) -> None:
        self.network, self.optimizer, self.config, self.report = network, optimizer, config, report
        self.train_set, self.val_set, self.scaling = train_set, val_set, (mean, deviation)
        self.device = train_set.windows.series.device
        self._around = ExitStack()

    def __enter__(self) -> Self:
        self._around.enter_context(torch.random.fork_rng([self.device] if self.device.type == "cuda" else []))
        if self.config.deterministic and self.device.type == "cuda":
            self._around.enter_context(_deterministic())
        return self

    def __exit__(self, *error: object) -> None:
        self._around.close()

    def run_epoch(self, epoch: int, rate: float, history: History) -> tuple[float, float, float, list[float]]:
        """Train, then validate: the mean loss, the RMSE, that of the scaled series, and the learned bases."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        seed_generators(epoch_seed(self.config.seed, epoch), self.device)
        order = draw_order(len(self.train_set), self.config, epoch, torch.default_generator).to(self.device)
        loss = self._run_steps(order, epoch, history)
        scores = evaluate(self.network, self.val_set, *self.scaling)
        bases = [float(b.detach().exp()) for b in self.network.log_bases()]
        return loss, scores.rmse, scores.scaled_rmse, bases

    def _run_steps(self, order: Tensor, epoch: int, history: History) -> float:
        network, batches, size = self.network.train(), self.train_set, self.config.batch_size
        parameters = list(network.parameters())
        total = torch.zeros((), device=self.device)
        last = history.epochs[-1] if history.epochs else None
        for step, index in enumerate(order.split(size)):
            loss = mse(run(network, batches.inputs(index)), batches.targets(index), gaps=batches.windows.gaps)
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True)
            self.optimizer.step()
            total += loss.detach() * len(index)
            if self.report is not None and (self.device.type == "cpu" or step % REPORT_EVERY == 0):
                self.report(epoch, step + 1, float(total) / min((step + 1) * size, len(order)), last)
        return float(total) / len(order)

    def weights(self) -> dict[str, Tensor]:
        """A copy of the network's state."""
        return _copy(self.network)

    def write_back(self) -> None:
        """Network and optimizer are up to date."""


class _Captured:
    """The same on a GPU as captured graphs: a pack of one."""

    def __init__(
        self,
        network: Network,
        optimizer: torch.optim.Optimizer | None,
        train_set: TokenBatches,
        val_set: TokenBatches,
        config: TrainConfig,
        deviation: Tensor,
    ) -> None:
        self.network, self.optimizer = network, optimizer
        source, windows = (train_set.tokenizer, network), train_set.windows
        drawn = config.epoch_windows if config.epoch_windows and config.epoch_windows < len(windows) else None
        train, val = Bank(windows, [source], drawn), Bank(val_set.windows, [source])
        self.pack = Pack([network], [config], train, val, [0], deviation=deviation)
        self._moments("load")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.pack.release()

    def run_epoch(self, epoch: int, rate: float, history: History) -> tuple[float, float, float, list[float]]:
        """See `_Plain`."""
        self.pack.run_epoch(epoch)
        marks = self.pack.evaluate()
        return marks.losses[0], marks.rmses[0], marks.scaled_rmses[0], marks.bases[0]

    def weights(self) -> dict[str, Tensor]:
        """A copy of the network's state."""
        return {**_copy(self.network), **self.pack.stack.save(0)}

    def write_back(self) -> None:
        """Bring network and optimizer up to date, for a checkpoint."""
        self.network.load_state_dict(self.weights())
        self._moments("save")

    @torch.no_grad()
    def _moments(self, way: str) -> None:
        """AdamW's moments between the optimizer, if there is one, and the pack."""
        if self.optimizer is None:
            return
        pack, steps = self.pack, self.pack.noise.step
        first, second = pack.stack.views(pack.first), pack.stack.views(pack.second)
        for name, parameter in self.network.named_parameters():
            if way == "save":
                self.optimizer.state[parameter] = {
                    "step": steps[0].float().clone(),
                    "exp_avg": first[name][0].reshape(parameter.shape).clone(),
                    "exp_avg_sq": second[name][0].reshape(parameter.shape).clone(),
                }
            elif parameter in self.optimizer.state:
                state = self.optimizer.state[parameter]
                first[name][0].copy_(state["exp_avg"].reshape(first[name][0].shape))
                second[name][0].copy_(state["exp_avg_sq"].reshape(second[name][0].shape))
                steps.copy_(state["step"].reshape(1))


@contextmanager
def _deterministic() -> Iterator[None]:
    """Only algorithms of torch that repeat bitwise."""
    before = torch.are_deterministic_algorithms_enabled()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # torch insists on it
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def mse(forecast: Tensor, truth: Tensor, *, gaps: bool) -> Tensor:
    """Over what was observed."""
    if not gaps:
        return nn.functional.mse_loss(forecast, truth)
    seen = ~torch.isnan(truth)
    return torch.where(seen, forecast - torch.nan_to_num(truth), 0).square().sum() / seen.sum()


def seed_generators(seed: int, device: torch.device) -> None:
    """The CPU's generator and that of the device; no other GPU's."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)


def _copy(network: nn.Module) -> dict[str, Tensor]:
    return {name: a.detach().clone() for name, a in network.state_dict().items()}
