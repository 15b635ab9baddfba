"""Networks of one shape trained side by side: an epoch, an evaluation, the best weights of each.

On an NVIDIA GPU a training step is a handful of kernels (`model.fused`) captured once as a CUDA graph and replayed; the
host waits for the device once an epoch. Elsewhere it is plain torch (`model.stacked`). A network's numbers depend on
its own seed alone, not on who is trained beside it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import nvrtc
from ..model import Network, fused, stacked
from ..model.attention16 import Attention16
from ..model.stacked import Batch, Noise, Shape, Stack
from ..tokens.door import check_choice
from .bank import Bank
from .schedule import learning_rate_factor
from .settings import TrainConfig, draw_order

THREADS = 128


@dataclass(frozen=True)
class Marks:
    """What is known of each of M networks after an epoch; lists of M."""

    losses: list[float]
    rmses: list[float]
    scaled_rmses: list[float]
    bases: list[list[float]]


class Pack:
    """M networks and the state of their training.

    Args:
        networks: of one shape (`stacked.common_shape`); their weights are copied.
        configs: how each is trained; batch size and windows an epoch must be the same for all.
        train: tokens of the train fold. A bank with room for fewer windows than there are is filled anew every epoch,
            with the windows that were drawn; it has a source for each network then.
        val: tokens of the validation fold.
        banks: (M,) which source of the banks each network reads.
        val_banks: the same for `val`, if it differs.
        deviation: (R,) float64, the scaling of the rows, for scores in the data's unit.
        precision: "float32", or "bfloat16" to keep activations in 16 bits where the device and the shape allow it.
        capture: use CUDA graphs where there is a GPU.
    """

    def __init__(
        self,
        networks: Sequence[Network],
        configs: Sequence[TrainConfig],
        train: Bank,
        val: Bank,
        banks: Sequence[int],
        val_banks: Sequence[int] | None = None,
        *,
        deviation: Tensor,
        precision: str = "float32",
        capture: bool = True,
    ) -> None:
        for fold, bank in (("train", train), ("validation", val)):
            if len(bank.windows) == 0:
                raise ValueError(f"the {fold} fold must hold at least one window; got none. Bring more data.")
        check_choice(precision, "precision", fused.PRECISIONS)
        shape = stacked.common_shape([_described(network) for network in networks])
        self.stack = Stack(networks, shape)
        self.configs, self.train, self.val, self.capture = list(configs), train, val, capture
        self.precision = precision
        self.device = device = self.stack.theta.device
        if device.type not in ("cpu", "cuda"):
            raise ValueError(f"`device` must be 'cpu' or 'cuda' for networks side by side; got {device.type!r}.")
        size = configs[0].batch_size
        if shape.tokens * (len(train) % size or size) < 2:
            raise ValueError("a batch must hold more than one token, which batch norm needs. Change `batch_size`.")
        self.deviation = deviation.to(device, torch.float64)
        self.rows = val.windows.rows.int()
        self.drawn = len(train) < len(train.windows)
        if self.drawn and list(banks) != list(range(len(networks))):
            raise ValueError("a bank of drawn windows needs a source for each network")
        self.banks = torch.tensor(list(banks), dtype=torch.int32, device=device)
        self.val_banks = torch.tensor(list(val_banks or banks), dtype=torch.int32, device=device)
        self.first, self.second = torch.zeros_like(self.stack.theta), torch.zeros_like(self.stack.theta)
        self.best, self.best_running = self.stack.theta.clone(), self.stack.running.clone()
        shares = [stacked.dropouts(network) for network in networks]
        self.noise = Noise(
            torch.tensor([c.seed % 2**31 for c in configs], dtype=torch.int32, device=device),
            torch.zeros(1, dtype=torch.int32, device=device),
            torch.tensor(shares, device=device).T.contiguous(),
        )
        self._prepare()

    def __len__(self) -> int:
        return len(self.stack)

    def _prepare(self) -> None:
        """All that depends on how many networks there are."""
        M, device = len(self), self.device
        self.epoch_windows = min(len(self.train.windows), self.configs[0].epoch_windows or len(self.train.windows))
        self.order = torch.zeros(M, self.epoch_windows, dtype=torch.int64, device=device)
        self.val_order = torch.arange(len(self.val), device=device)
        self.done = torch.zeros(1, dtype=torch.int32, device=device)
        self.totals = torch.zeros(M, dtype=torch.float64, device=device)
        self.sums = torch.zeros(M, 3, dtype=torch.float64, device=device)
        self.rates = torch.zeros(M, device=device)
        self.decays = torch.tensor([c.weight_decay for c in self.configs], device=device)
        small = 2 * self.configs[0].batch_size <= fused.MOST_WINDOWS
        usable = nvrtc.serves(device) and small and fused.fits(self.stack.shape)
        brief = self.precision == "bfloat16" and usable and fused.takes_brief(self.stack.shape, device)
        with self._here():
            self.fused = fused.Fused(self.stack, self.noise, brief=brief) if usable else None
        self._graphs: dict[tuple[str, int], torch.cuda.CUDAGraph] = {}
        self._pool, self._stream = None, None
        if self.fused is not None and device.type == "cuda":
            self._pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)

    # ---------------------------------------------------------------------------------------------------------- epochs

    def _here(self) -> AbstractContextManager[object]:
        """Kernels go to the device that is current."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    def run_epoch(self, epoch: int) -> None:
        """Train every network on the windows of its own order."""
        orders = torch.stack([draw_order(len(self.train.windows), config, epoch) for config in self.configs])
        orders = orders.to(self.device)
        if self.drawn:
            for source, order in enumerate(orders):
                self.train.fill(source, order)
            orders = torch.arange(self.epoch_windows, device=self.device).expand(len(self), -1)
        self.order.copy_(orders)
        factor = learning_rate_factor(epoch)
        self.rates.copy_(torch.tensor([c.learning_rate * factor for c in self.configs]))
        self.totals.zero_()
        with self._here():
            self._run(self._train_step, "train", self.epoch_windows, self.configs[0].batch_size)

    def evaluate(self) -> Marks:
        """Score every network on the validation fold. Waits for the device, once."""
        self.sums.zero_()
        with self._here():
            self._run(self._val_step, "val", len(self.val), 2 * self.configs[0].batch_size)
        free, L = self.stack.free, self.stack.shape.layers
        bases = self.stack.theta[:, self.stack.theta.shape[1] - free :].exp()
        found = torch.cat([self.totals.unsqueeze(1), self.sums, bases.double()], 1).cpu()
        losses, squares, scaled, seen = found[:, :4].T
        return Marks(
            (losses / self.epoch_windows).tolist(),
            (squares / seen).sqrt().tolist(),
            (scaled / seen).sqrt().tolist(),
            found[:, 4 : 4 + (L if free else 0)].tolist(),
        )

    def keep_best(self, improved: Sequence[bool]) -> None:
        """Remember the weights of some as their best."""
        if any(improved):
            index = torch.tensor([m for m, better in enumerate(improved) if better], device=self.device)
            self.best[index], self.best_running[index] = self.stack.theta[index], self.stack.running[index]

    def best_state(self, member: int) -> dict[str, Tensor]:
        """The `state_dict` of a network's best weights."""
        return self.stack.save(member, theta=self.best[member], running=self.best_running[member])

    def shrink(self, members: Sequence[int]) -> None:
        """Drop all others."""
        index = torch.tensor(list(members), device=self.device)
        self.release()
        self.stack.keep(members)
        self.configs = [self.configs[m] for m in members]
        for name in ("first", "second", "best", "best_running", "banks", "val_banks"):
            setattr(self, name, getattr(self, name)[index])
        if self.drawn:
            self.train = Bank(self.train.windows, [self.train.sources[m] for m in members], len(self.train))
            self.banks = torch.arange(len(members), dtype=torch.int32, device=self.device)
        self.noise = Noise(
            self.noise.seeds[index].contiguous(), self.noise.step, self.noise.shares[:, index].contiguous()
        )
        self._prepare()

    def release(self) -> None:
        """Give the captured graphs and their memory back; they are made again when they are needed."""
        self._graphs.clear()
        if self._pool is not None:
            self._pool = torch.cuda.graph_pool_handle()
        if self.drawn:
            self.train.forget()  # every epoch fills it anew, at another place

    # ----------------------------------------------------------------------------------------------------------- steps

    def _run(self, step: Callable[[int], None], kind: str, windows: int, size: int) -> None:
        """All batches; the last may be smaller."""
        self.done.zero_()
        self._at = 0
        while self._at < windows:
            count = min(size, windows - self._at)
            if self._pool is None or not self.capture:
                step(count)
            else:
                self._replay(step, kind, count)
            self._at += count

    def _replay(self, step: Callable[[int], None], kind: str, count: int) -> None:
        if (kind, count) not in self._graphs:
            state = (self.stack.theta, self.stack.running, self.first, self.second, self.noise.step, self.done)
            changing = [*state, self.totals, self.sums]
            before = [a.clone() for a in changing]
            here, aside = torch.cuda.current_stream(), self._stream
            assert aside is not None
            aside.wait_stream(here)
            with torch.cuda.stream(aside):
                step(count)  # libraries set themselves up when they are first called, which a capture does not allow
            here.wait_stream(aside)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, stream=aside):
                step(count)
            for a, b in zip(changing, before, strict=True):
                a.copy_(b)
            self._graphs[kind, count] = graph
        self._graphs[kind, count].replay()

    def _train_step(self, count: int) -> None:
        if self.fused is None:
            self._plain_train_step(count)
            return
        batch, levels, targets = self._take(self.train, self.banks, self.order, self.order.shape[1], count)
        seen = None
        if self.train.windows.gaps:
            seen = torch.empty(len(self), dtype=torch.int32, device=self.device)
            self.fused.kernels.launch("count", len(self), THREADS, targets, seen, targets[0].numel())
        forecast, saved, last = self.fused.forward(batch, training=True)
        grad, squares = self._compare(forecast, levels, targets, seen, training=True)
        self.fused.backward(grad, saved, last, batch)
        self.fused.update(self.first, self.second, self.rates, self.decays)
        self.fused.kernels.launch("finish", len(self), THREADS, squares, self.totals, self.noise.step, self.done, count)

    def _val_step(self, count: int) -> None:
        if self.fused is None:
            self._plain_val_step(count)
            return
        batch, levels, targets = self._take(self.val, self.val_banks, self.val_order, 0, count)
        forecast, _, _ = self.fused.forward(batch, training=False)
        _, squares = self._compare(forecast, levels, targets, None, training=False)
        launch = self.fused.kernels.launch
        launch(
            "tally", len(self), THREADS, squares, self.val_order, self.rows, self.deviation, self.sums, self.done, count
        )
        launch("advance", 1, 1, self.done, count)

    def _take(self, bank: Bank, of: Tensor, order: Tensor, stride: int, count: int) -> tuple[Batch, Tensor, Tensor]:
        """`Bank.take`, by the order's next `count` windows."""
        M, windows = len(self), bank.windows
        n, f = bank.values.shape[2:]
        new = bank.values.new_empty
        values, positions = new(M, count, n, f), new(M, count, n)
        levels, targets = new(M, count, 2), new(M, count, windows.horizon)
        assert self.fused is not None
        launch = self.fused.kernels.launch
        launch(
            "take", (count, M), THREADS, bank.values, bank.positions, bank.levels, bank.series, bank.starts, order,
            of, self.done, values, positions, levels, targets, len(bank), stride, n * f, n, int(bank.moving),
            windows.lookback, windows.horizon,
        )  # fmt: skip
        basis = None
        if bank.first is not None and bank.weights is not None:
            basis = new(M, count, n, n, dtype=self.fused.act)
            launch(
                "basis", (count, M), THREADS, bank.first, bank.weights, order, of, self.done, basis, len(bank),
                stride, n, bank.weights.shape[3],
            )  # fmt: skip
        return Batch(values, positions, basis), levels, targets

    def _compare(
        self, forecast: Tensor, levels: Tensor, targets: Tensor, seen: Tensor | None, *, training: bool
    ) -> tuple[Tensor, Tensor]:
        """The gradient of each network's mean squared error (M, B, H), and sums of squares and counts (M, B, 2)."""
        assert self.fused is not None
        M, B, H = forecast.shape
        squares = torch.empty(M, B, 2, dtype=torch.float64, device=self.device)
        short = training and self.fused.act != torch.float32
        grad = torch.empty_like(forecast, dtype=self.fused.act) if short else forecast
        self.fused.kernels.launch(
            "compare", (B, M), THREADS, forecast, self.fused.v["head.project.bias"], targets, levels, seen,
            grad if training else None, squares, H, self.fused.size,
        )  # fmt: skip
        return grad, squares

    # ------------------------------------------------------------------------------------------------------ plain torch

    def _plain_train_step(self, count: int) -> None:
        index = self.order[:, self._at : self._at + count]
        batch, levels, targets = self.train.take(index, self.banks)
        leaves = {name: a.detach().requires_grad_() for name, a in self.stack.views().items()}
        forecast = stacked.forward(self.stack, leaves, batch, self.noise)
        seen = ~torch.isnan(targets)
        error = torch.where(seen, forecast - torch.nan_to_num(targets), 0) * levels[..., 1:]
        losses = error.square().sum((1, 2)) / seen.sum((1, 2))
        slopes = torch.autograd.grad(losses.sum(), list(leaves.values()))
        grad = torch.zeros_like(self.stack.theta)
        for a, b in zip(self.stack.views(grad).values(), slopes, strict=True):
            a.copy_(b)
        self._plain_update(grad)
        self.totals += losses.detach().double() * count

    @torch.no_grad()
    def _plain_update(self, grad: Tensor) -> None:
        """The kernels `norms` and `adamw`, which are `torch.optim.AdamW` after clipping."""
        theta, rates = self.stack.theta, self.rates.unsqueeze(1)
        grad *= (1 / (grad.norm(dim=1, keepdim=True) + 1e-6)).clamp(max=1)
        self.noise.step.add_(1)
        t = int(self.noise.step)
        decaying = theta[:, : theta.shape[1] - self.stack.free]
        decaying -= rates * self.decays.unsqueeze(1) * decaying
        self.first.lerp_(grad, 0.1)
        self.second.mul_(0.999).addcmul_(grad, grad, value=0.001)
        scale = (self.second.sqrt() / math.sqrt(1 - 0.999**t)).add_(1e-8)
        theta -= rates / (1 - 0.9**t) * self.first / scale

    @torch.no_grad()
    def _plain_val_step(self, count: int) -> None:
        index = self.val_order[self._at : self._at + count].expand(len(self), -1)
        batch, levels, targets = self.val.take(index, self.val_banks)
        forecast = stacked.forward(self.stack, self.stack.views(), batch, None)
        seen = ~torch.isnan(targets)
        error = torch.where(seen, (forecast - targets) * levels[..., 1:], 0).double()
        squares = error.square().sum(2)  # (M, B)
        unit = self.deviation[self.rows[index[0]].long()].square()
        self.sums += torch.stack([(squares * unit).sum(1), squares.sum(1), seen.sum((1, 2)).double()], 1)


def free_memory(device: torch.device) -> int:
    """Bytes that are free on a device, those that torch holds for reuse included; on a CPU, 2 GiB."""
    if device.type != "cuda":
        return 2**31
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused


def training_bytes(shape: Shape, batch: int, *, brief: bool = False) -> int:
    """About what a training step of one network takes on the device, its parameters included; `brief` with activations
    of 16 bits."""
    rows, d = batch * shape.tokens, shape.width
    kept = shape.layers * (8 * d + shape.feed + shape.heads)
    passing = 6 * d + 2 * shape.feed + (shape.layers - 1) * 3 * d
    basis = shape.tokens if shape.spline else 0
    if not fused.fits(shape):  # plain torch keeps the attention weights and more of everything
        kept += shape.layers * (5 * shape.heads * shape.tokens + 10 * d + 2 * shape.feed)
    parameters = shape.tokens * d * (shape.horizon + 1) + shape.layers * d * (4 * d + 2 * shape.feed)
    if not brief:
        return 4 * (rows * (kept + passing + basis + d) + 7 * parameters)
    # The feed-forward part is kept twice, and what the gradients of weights need until they are all computed. Scores
    # come in pieces of 16 x 16: a layer keeps their dropped bits, and one at a time has their slopes, where it must.
    held = shape.layers * (2 * shape.feed + 2 * d)
    gone = batch * shape.heads * (-(-shape.tokens // 16) * 16) ** 2 * shape.layers // 8
    slopes = 2 * batch * Attention16.slopes(shape)
    logs = 4 * rows * shape.layers * shape.heads
    return 2 * rows * (kept + passing + held + basis + d) + logs + gone + slopes + 30 * parameters


def _described(network: Network) -> Shape:
    shape = stacked.describe(network)
    if shape is None:
        raise ValueError("`networks` must be made by `build_network`, without parts of another kind.")
    return shape
