"""`Forecaster`: fit, predict, backtest, save and load, on the long frames that people already have."""

from __future__ import annotations

import copy
import hashlib
import inspect
import json
import os
import sys
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import pandas as pd
import torch
from huggingface_hub import ModelHubMixin
from torch import Tensor

from . import storage
from .atomic import alone
from .conformal import MOST, check_levels, half_widths, local_deviation, sorted_scores
from .data import season_of
from .data.columns import kind_of, make_frame
from .data.folds import SHARES, check_shares, fold_edges
from .data.frames import Panel, stack_level, to_panel
from .data.stamps import check_freq
from .data.windows import Split, Windows, check_size, fit_scaling, split_windows
from .model import Network, NetworkConfig, build_network
from .model.stacked import describe
from .progress import TrainingBar
from .spline import LARGEST
from .tokens import TOKENIZERS, BSplineTokenizer, Tokenizer
from .tokens.door import check_choice, check_finite, to_array, to_numpy, to_whole
from .train import History, Scores, TokenBatches, TrainConfig, evaluate, evaluate_beside_naive, predict, train
from .train.batches import bytes_per_window, fit_tokenizer, keeps_tokens, make_inputs, run, tokenize
from .train.checkpoint import NAME, Checkpoint
from .train.device import find_device
from .train.loop import captured_tokens
from .train.pack import training_bytes
from .train.settings import epoch_steps

GAPS = ("error", "fit", "fill")
PREDICT_BATCH = 512


class Forecaster(ModelHubMixin, library_name="bsat", tags=["time-series-forecasting"]):
    """The paper's model around a tokenizer, for one series or thousands.

    One network serves all series, each scaled by the mean and deviation of its own train fold. `fit` trains on the
    first fold, stops by the second and scores the third, once, at the end.

    Args:
        horizon: H, the steps to forecast.
        lookback: L, the samples that a forecast looks at.
        tokenizer: `BSplineTokenizer`, `PatchTokenizer` or `DownsampleTokenizer`; None means BSAT with L / 16 tokens.
        encoding, head, norm, rotary_unit, d_model, n_layers, n_heads, ff_factor, dropout, ff_dropout,
            attention_dropout: see `bsat.model.NetworkConfig`.
        learning_rate, weight_decay, batch_size, max_epochs, patience, grace, epoch_windows, seed, deterministic: see
            `bsat.train.TrainConfig`.
        folds: shares of every series for training, validation and test; (0.8, 0.2, 0) keeps no test fold.
        gaps: what to do about missing stamps and NaN: "error", "fit" (fit the spline to what is there) or "fill"
            (interpolate).
        drop_short: leave out series shorter than lookback + horizon instead of refusing them.
        freq: the step between stamps; None finds it out.
        id_col, time_col, target_col: columns of the frame. Several target columns are channels of their series, each
            with forecasts of its own; id_col=None says that the frame is one series.
        device: "auto" takes a GPU if there is one; or "cpu", "cuda", "cuda:1", ...
        verbose: show the plan and a progress bar, on the error stream.

    After `fit`: `scores_` ("val", and of the test fold "test", "last value" and "seasonal naive"), `history_`,
    `network_`, `tokenizer_`, `freq_`.
    """

    def __init__(
        self,
        horizon: int,
        lookback: int = 720,
        tokenizer: Tokenizer | None = None,
        *,
        encoding: str = NetworkConfig.encoding,
        head: str = NetworkConfig.head,
        norm: str = NetworkConfig.norm,
        rotary_unit: str = NetworkConfig.rotary_unit,
        d_model: int = NetworkConfig.d_model,
        n_layers: int = NetworkConfig.n_layers,
        n_heads: int = NetworkConfig.n_heads,
        ff_factor: int = NetworkConfig.ff_factor,
        dropout: float = NetworkConfig.dropout,
        ff_dropout: float = NetworkConfig.ff_dropout,
        attention_dropout: float = NetworkConfig.attention_dropout,
        learning_rate: float = TrainConfig.learning_rate,
        weight_decay: float = TrainConfig.weight_decay,
        batch_size: int = TrainConfig.batch_size,
        max_epochs: int = TrainConfig.max_epochs,
        patience: int = TrainConfig.patience,
        grace: int = TrainConfig.grace,
        epoch_windows: int | None = TrainConfig.epoch_windows,
        seed: int = TrainConfig.seed,
        deterministic: bool = TrainConfig.deterministic,
        folds: Sequence[float] = SHARES,
        gaps: str = "error",
        drop_short: bool = False,
        freq: str | int | None = None,
        id_col: str | None = "unique_id",
        time_col: str = "ds",
        target_col: str | Sequence[str] = "y",
        device: str = "auto",
        verbose: bool = True,
    ) -> None:
        self.horizon = to_whole(horizon, "horizon", 1)
        self.lookback = to_whole(lookback, "lookback", 2)
        if tokenizer is None:
            tokenizer = BSplineTokenizer(default_tokens(self.lookback))
        if not isinstance(tokenizer, Tokenizer):
            raise TypeError(
                f"`tokenizer` must be one of {', '.join(TOKENIZERS)}; got {tokenizer!r}. "
                f"Pass e.g. bsat.BSplineTokenizer(n_tokens=45)."
            )
        tokenizer.level_features(self.lookback)  # checks that they fit together
        self.tokenizer = tokenizer
        given = dict(locals())
        self.network_config = NetworkConfig(**{name: given[name] for name in NetworkConfig.names()})
        self.train_config = TrainConfig(**{name: given[name] for name in TrainConfig.names()})
        self.folds = check_shares(folds)
        check_choice(gaps, "gaps", GAPS)
        if gaps == "fit" and not tokenizer.adaptive:
            raise ValueError(
                f"`gaps` must be 'error' or 'fill' with {type(tokenizer).__name__}, which needs complete windows; "
                f"got 'fit'. Use BSplineTokenizer, which fits what was observed."
            )
        self.gaps, self.drop_short = gaps, bool(drop_short)
        if isinstance(freq, np.timedelta64):  # which numpy counts among the integers
            freq = pd.Timedelta(freq)
        self.freq = freq if freq is None else check_freq(freq, isinstance(freq, int | np.integer))
        self.id_col, self.time_col = id_col, time_col
        if not isinstance(target_col, str) and not (
            isinstance(target_col, Sequence) and all(isinstance(name, str) for name in target_col)
        ):
            raise TypeError(
                f"`target_col` must be the name of a column, or a list of them; got {target_col!r}. Pass e.g. 'y'."
            )
        self.target_col = target_col if isinstance(target_col, str) else list(target_col)
        taken = {"channel", "cutoff", "y", tokenizer.label} & {id_col, time_col}
        if taken:
            raise ValueError(
                f"`id_col` and `time_col` must not be {', '.join(map(repr, sorted(taken)))}: the forecasts have "
                f"columns of these names. Rename it in the frame."
            )
        self.device, self.verbose = device, bool(verbose)
        find_device(device)

    def get_params(self) -> dict[str, Any]:
        """The constructor's arguments."""
        flat = {**vars(self.network_config), **vars(self.train_config), **vars(self)}
        return {name: flat[name] for name in list(inspect.signature(type(self).__init__).parameters)[1:]}

    def __repr__(self) -> str:
        signature = inspect.signature(type(self).__init__).parameters
        shown = [f"{k}={v!r}" for k, v in self.get_params().items() if v != signature[k].default]
        return f"{type(self).__name__}({', '.join(shown)})"

    @property
    def name(self) -> str:
        """The column of the forecasts: BSAT, PatchTST or UDS."""
        return self.tokenizer.label

    # ------------------------------------------------------------------------------------------------------- fit

    def fit(self, df: Any, *, checkpoint: os.PathLike[str] | str | None = None, resume: bool = False) -> Self:
        """Train on a long frame.

        Args:
            df: pandas or polars, one row per series and stamp.
            checkpoint: a folder where the state of the training is kept after every epoch.
            resume: go on from that state; the result is that of a training never interrupted.
        """
        kind = kind_of(df)
        panel = self._to_panel(df, self.freq)
        self._fit(panel, self.folds, checkpoint=checkpoint, resume=resume)
        self._kind = kind
        return self

    def _to_panel(self, df: Any, freq: str | int | None) -> Panel:
        """The frame's series. With gaps="fill" they still have their gaps: what may be filled from what depends on the
        folds and cutoffs."""
        panel = to_panel(
            df,
            id_col=self.id_col,
            time_col=self.time_col,
            target_col=self.target_col,
            freq=freq,
            gaps="error" if self.gaps == "error" else "fit",
        )
        low, high = np.nanmin(panel.values), np.nanmax(panel.values)
        if max(-low, high) > LARGEST:
            raise ValueError(f"values must stay within ±{LARGEST:g}; got {max(-low, high):g}. Change the unit.")
        return panel

    def split(self, df: Any) -> tuple[Split, Tokenizer]:
        """What `fit` would train on: the windows of the folds, and the tokenizer, fitted to the first of them."""
        _, _, split, tokenizer = self._prepare(self._to_panel(df, self.freq), self.folds)
        return split, tokenizer

    def _prepare(self, panel: Panel, folds: Sequence[float]) -> tuple[Panel, Panel, Split, Tokenizer]:
        """The panel without what is too short, the same with its gaps filled if that is wanted, windows, tokenizer."""
        given = panel = self._without_short(panel)
        edges = fold_edges(panel.lengths, folds)
        if self.gaps == "fill":
            panel = panel.filled(edges)
        split = split_windows(
            panel,
            edges,
            lookback=self.lookback,
            horizon=self.horizon,
            least=self.tokenizer.n_tokens + 1,
            device=find_device(self.device),
        )
        return given, panel, split, fit_tokenizer(self.tokenizer, split.train)

    def _fit(
        self,
        panel: Panel,
        folds: Sequence[float],
        *,
        checkpoint: os.PathLike[str] | str | None = None,
        resume: bool = False,
    ) -> Self:
        L, H = self.lookback, self.horizon
        given, panel, split, tokenizer = self._prepare(panel, folds)
        device, edges = split.train.series.device, fold_edges(panel.lengths, folds)
        train_windows, val_windows = split.train, split.val.some(self.train_config.epoch_windows)
        mean, deviation, series = split.mean, split.deviation, split.train.series
        with torch.random.fork_rng([]):
            torch.default_generator.manual_seed(self.train_config.seed)
            network = build_network(self.network_config, tokenizer, lookback=L, horizon=H)
        network.to(device)
        token_bytes = bytes_per_window(tokenizer, network, L) * (len(train_windows) + len(val_windows))
        keep = keeps_tokens(tokenizer, network, self.train_config, train_windows, val_windows)
        captured = captured_tokens(network, tokenizer, self.train_config, train_windows, val_windows)
        kept = captured if captured is not None else token_bytes if keep else None
        self._say(self._plan(panel, network, series, train_windows, val_windows, kept, captured is not None))
        train_set = TokenBatches(train_windows, tokenizer, network, keep=keep)
        val_set = TokenBatches(val_windows, tokenizer, network, keep=keep)
        scaling = torch.from_numpy(mean).to(device), torch.from_numpy(deviation).to(device)
        state = None
        for item in dict.fromkeys(panel.ids):
            try:
                _plain_id(item)
            except ValueError as error:
                if checkpoint is not None:  # whoever keeps one will want to save
                    raise
                warnings.warn(f"this forecaster cannot be saved: {error}", stacklevel=stack_level())
                break
        if resume and checkpoint is None:
            raise ValueError("`resume` needs the folder of the training to go on with; pass it as `checkpoint`.")
        bar = TrainingBar(
            epoch_steps(len(train_windows), self.train_config),
            self.train_config.max_epochs,
            label=self.name,
            show=self.verbose,
        )
        with ExitStack() as held:
            if checkpoint is not None:
                held.enter_context(alone(Path(checkpoint) / NAME, "training"))
                state = Checkpoint(checkpoint, self._fingerprint(panel, folds, tokenizer), resume=resume)
                if resume and not state.path.exists():
                    self._say(f"nothing to resume in {checkpoint}: starting anew")
            held.enter_context(bar)
            history = train(
                network,
                train_set,
                val_set,
                self.train_config,
                mean=scaling[0],
                deviation=scaling[1],
                report=bar if self.verbose else None,
                checkpoint=state,
            )
        # Nothing of an older fit is touched before this one has come so far.
        self.history_, self.network_, self.tokenizer_ = history, network, tokenizer
        self._exact: Network | None = None
        self._kind = "pandas"
        self.freq_ = panel.freq
        self.ids_, self.channels_ = panel.ids, panel.channels
        self.mean_, self.deviation_ = mean, deviation
        self.learned_until_ = panel.at(edges[:, 2])  # the first stamp that neither training nor validation saw
        self._tail = given.tail(L)
        if self.gaps == "fill":  # a gap that reaches into the window is filled from what lies before it, too
            begins = self._tail.offsets[:-1]
            whole = given.filled(given.lengths[:, None]).tail(L)
            self._tail = replace(self._tail, values=self._tail.values.copy())
            self._tail.values[begins] = whole.values[begins]
        self._rows = {key: row for row, key in enumerate(panel.keys)}
        self.conformal_ = self._calibrate(val_set)
        test = TokenBatches(split.test, self.tokenizer_, network, keep=False)
        self.scores_: dict[str, Scores | None] = {
            "val": evaluate(network, val_set, *scaling),
            **dict.fromkeys(("test", "last value", "seasonal naive")),
        }
        if len(test) and history.stopped != "interrupted":  # a training that may go on must not have seen it
            beside = evaluate_beside_naive(network, test, *scaling, season_of(panel.freq) or 0)
            self.scores_ |= {"test" if name == "model" else name: scores for name, scores in beside.items()}
        self._say(self._outcome())
        return self

    def _without_short(self, panel: Panel) -> Panel:
        """What `fit` can take windows from."""
        need = self.lookback + self.horizon
        return self._long_enough(panel, need, "lookback + horizon", "Shorten `lookback` or `horizon`")

    def _long_enough(self, panel: Panel, need: int, sum_: str, way: str, what: str = "") -> Panel:
        """The series with `need` samples or more; if others are not to be dropped, or all are short, an error."""
        short = panel.lengths < need
        if not short.any():
            return panel
        names = ", ".join(f"{panel.ids[r]!r} ({panel.lengths[r]})" for r in np.flatnonzero(short)[:3])
        names += ", ..." if short.sum() > 3 else ""
        if not self.drop_short or short.all():
            raise ValueError(
                f"every series must have {sum_} = {need} samples or more{what}; {int(short.sum())} of "
                f"{len(panel)} have fewer: {names}. {way}{'.' if short.all() else ', or pass drop_short=True.'}"
            )
        note = f"left out {int(short.sum())} series shorter than {need} samples: {names}."
        warnings.warn(note, stacklevel=stack_level())
        return panel.select(~short)

    def _fingerprint(self, panel: Panel, folds: Sequence[float], tokenizer: Tokenizer) -> str:
        """Of all that shapes a training, but for how long it may last."""
        skip = {"device", "verbose", "tokenizer", "max_epochs", "patience", "grace"}
        params = {k: v for k, v in self.get_params().items() if k not in skip}
        text = json.dumps([params, repr(tokenizer), tuple(folds)], default=str)
        digest = hashlib.sha256(text.encode())
        digest.update(np.ascontiguousarray(panel.values).data)
        digest.update(np.ascontiguousarray(panel.offsets).data)
        return digest.hexdigest()

    def _plan(
        self,
        panel: Panel,
        network: Network,
        series: Tensor,
        train_windows: Windows,
        val_windows: Windows,
        kept: int | None,
        captured: bool,
    ) -> str:
        """What will be trained on what, and the memory it takes."""
        c, t = self.network_config, self.train_config
        n, d = self.tokenizer.n_tokens, c.d_model
        weights = sum(p.numel() for p in network.parameters())
        # What a step keeps for its backward pass, in numbers a window: the stream, the feed-forward part, the scores.
        layer = 18 * n * d + 4 * n * d * c.ff_factor + 4 * c.n_heads * n * n
        work = 4 * t.batch_size * (c.n_layers * layer + self.lookback + self.horizon) * 3 // 2
        shape = describe(network) if captured else None
        if shape is not None:
            work = training_bytes(shape, t.batch_size)
        index = sum(w.starts.nbytes + w.rows.nbytes for w in (train_windows, val_windows))
        parts = {
            "series": series.nbytes + panel.values.nbytes,
            "index": index,
            "tokens": kept or 0,
            "network": 5 * 4 * weights,
            "batch": work,
        }
        total = sum(parts.values())
        shown = ", ".join(f"{name} {size / 2**20:,.1f}" for name, size in parts.items() if size)
        one_epoch = min(len(train_windows), t.epoch_windows or len(train_windows))
        some = f" ({one_epoch:,} an epoch)" if one_epoch < len(train_windows) else ""
        lazily = "made batch by batch" if kept is None and self.tokenizer.adaptive else ""
        return (
            f"{self.name}: {len(panel):,} series, {len(panel.values):,} samples, every {panel.freq}; "
            f"windows: {len(train_windows):,} train{some}, {len(val_windows):,} validation\n"
            f"{weights:,} parameters; memory about {total / 2**20:,.0f} MiB ({shown})"
            + (f"; tokens are {lazily}" if lazily else "")
        )

    def _outcome(self) -> str:
        h, val, test = self.history_, self.scores_["val"], self.scores_["test"]
        why = {
            "patience": "no better for a while",
            "max_epochs": "all epochs done",
            "interrupted": "interrupted: the best weights so far are kept",
            "diverged": "diverged: the best weights so far are kept",
        }[h.stopped]
        parts = [f"validation RMSE {val.rmse:.4g}"] if val else []
        parts += [f"test RMSE {test.rmse:.4g}, MAE {test.mae:.4g}"] if test else []
        return f"{self.name}: {len(h.epochs)} epochs ({why}), best {h.best_epoch + 1}; " + "; ".join(parts)

    def _say(self, text: str) -> None:
        if self.verbose:
            print(text, file=sys.stderr, flush=True)

    def _calibrate(self, val_set: TokenBatches) -> np.ndarray:
        """Sorted conformity scores (K, H) of validation windows; see `conformal`."""
        some = TokenBatches(val_set.windows.some(MOST), self.tokenizer_, self.network_, keep=False)
        errors, deviations = [], []
        for part, forecast in predict(self.network_, some):
            errors.append((some.targets(part) - forecast).cpu().numpy().astype(np.float64))
            deviations.append(local_deviation(some.windows.past(part).cpu().numpy().astype(np.float64)))
        return sorted_scores(np.concatenate(errors), np.concatenate(deviations))

    # --------------------------------------------------------------------------------------------------- predict

    def predict(self, df: Any = None, *, level: Sequence[float] | None = None) -> Any:
        """Forecasts of the `horizon` steps after each series' end: id, time, forecast, and intervals for each level.

        The network runs in float64 and the scaled forecasts are rounded to float32, so that they are bitwise the same
        on every machine, but for a rare tie.

        Args:
            df: series to forecast, at least `lookback` samples of each; None takes those of `fit`. A series that `fit`
                did not see is scaled by what is given of it. Comes back as the same kind of frame.
            level: percentages, such as [80, 95], for conformal intervals.
        """
        self._check_fitted()
        levels = check_levels(level) if level is not None else []
        if df is None:
            return self._frame(self._kind, self._tail, self._intervals(self._ready(self._tail), levels))
        kind = kind_of(df)
        panel = self._to_panel(df, self.freq_)
        panel = self._long_enough(panel, self.lookback, "lookback", "Pass more of its past", " to be forecast")
        return self._frame(kind, panel, self._intervals(self._ready(panel), levels))

    def _ready(self, panel: Panel) -> Panel:
        """With gaps="fill", the panel without gaps; not if most of a window would be invented."""
        if self.gaps != "fill":
            return panel
        tail = panel.tail(self.lookback)
        missing = np.isnan(tail.values).reshape(len(tail), self.lookback).mean(1)
        if missing.max() > 0.5:
            row = int(missing.argmax())
            raise ValueError(
                f"gaps='fill' must not make up most of a window; the last {self.lookback} steps of {tail.ids[row]!r} "
                f"at freq={panel.freq!r} lack {missing[row]:.0%}. Bring more samples, or samples of that frequency."
            )
        return panel.filled(panel.lengths[:, None])

    def _check_fitted(self) -> None:
        if not hasattr(self, "network_"):
            raise ValueError(
                "this forecaster is not fitted yet. Call fit(df), or load one with Forecaster.load(folder)."
            )

    def _intervals(self, panel: Panel, levels: Sequence[float]) -> dict[str, np.ndarray]:
        """Column -> (R, H), in the data's unit, from the last `lookback` samples of every row."""
        L = self.lookback
        tail = panel.tail(L)
        mean, deviation = self._scaling(panel)
        scaled = (tail.values.reshape(-1, L) - mean[:, None]) / deviation[:, None]
        check_size(scaled.ravel(), tail)
        # Rounded as in training: a rounding error in a sample moves knots by its p-th root, so the same tokens matter.
        scaled = scaled.astype(np.float32).astype(np.float64)
        self._check_observed(panel, scaled)
        forecast = self._run_exact(scaled)
        columns = {self.name: forecast}
        if levels:
            widths = half_widths(self.conformal_, levels)  # (V, H)
            local = local_deviation(scaled)[:, None]
            for one, width in zip(levels, widths, strict=True):
                for word, sign in (("lo", -1), ("hi", 1)):
                    columns[f"{self.name}-{word}-{one:g}"] = forecast + sign * local * width
        return {name: a.astype(np.float32) * deviation[:, None] + mean[:, None] for name, a in columns.items()}

    def _scaling(self, panel: Panel) -> tuple[np.ndarray, np.ndarray]:
        """(R,) each: that of the train fold for series that `fit` saw, else of what is given."""
        rows = np.array([self._rows.get(key, -1) for key in panel.keys])
        mean, deviation = self.mean_[rows], self.deviation_[rows]
        new = rows < 0
        if new.any():
            own = fit_scaling(panel.values, panel.offsets, panel.lengths, float(np.median(self.deviation_)))
            mean, deviation = np.where(new, own[0], mean), np.where(new, own[1], deviation)
        return mean, deviation

    def _check_observed(self, panel: Panel, windows: np.ndarray) -> None:
        if self.gaps != "fit":
            return
        counts = (~np.isnan(windows)).sum(1)
        if counts.min() <= self.tokenizer.n_tokens:
            row = int(counts.argmin())
            raise ValueError(
                f"the last lookback = {self.lookback} steps of a series must have more observed samples than "
                f"n_tokens = {self.tokenizer.n_tokens}; {panel.ids[row]!r} has {counts[row]}. "
                f"Wait for more of them, or fill them."
            )

    @torch.no_grad()
    def _run_exact(self, windows: np.ndarray) -> np.ndarray:
        """Scaled windows (R, L), NaN where missing, to scaled forecasts (R, H) in float64."""
        if self._exact is None:
            where = "cpu" if next(self.network_.parameters()).device.type == "mps" else None
            self._exact = copy.deepcopy(self.network_).to(where, torch.float64).eval()
        network = self._exact
        device = next(network.parameters()).device
        parts = []
        for start in range(0, len(windows), PREDICT_BATCH):
            # Tokens come from the CPU whatever the device, since a GPU's differ from them in the last digits.
            past = torch.from_numpy(windows[start : start + PREDICT_BATCH])
            tokens = tokenize(self.tokenizer_, past, gaps=self.gaps == "fit")
            parts.append(run(network, make_inputs(network, tokens, past).to(device)).cpu().numpy())
        out = np.concatenate(parts)
        if not np.isfinite(out).all():
            raise FloatingPointError("the network's forecast is not finite. Its weights are damaged: train it again.")
        return out

    def _frame(self, kind: str, panel: Panel, columns: dict[str, np.ndarray]) -> Any:
        """A long frame of forecasts (R, H)."""
        stamps = {self.time_col: panel.future(self.horizon)}
        return make_frame(kind, self._names(panel, self.horizon) | stamps | {k: a.ravel() for k, a in columns.items()})

    def _names(self, panel: Panel, times: int) -> dict[str, Any]:
        """The columns that say whose forecast it is, every row `times` times."""
        names = {} if self.id_col is None else {self.id_col: _repeat(panel.ids, times)}
        return names if panel.channels is None else {**names, "channel": _repeat(panel.channels, times)}

    @torch.no_grad()
    def forecast(self, windows: Any, *, ids: Sequence[Any] | None = None) -> Any:
        """The fast path for serving: windows (B, lookback) in the data's unit to forecasts (B, horizon).

        No frames, no stamps: numpy in, numpy out; torch in, torch out, on its device. In float32, on the device of the
        network. `ids` names the series of each window, as pairs of id and channel if there are channels. Without, they
        are scaled as the series of `fit` if there was only one, else by their own mean and deviation, which is nearly
        the same thing, because the network normalises each window anyway.
        """
        self._check_fitted()
        given = to_array(windows, "windows")
        if given.ndim != 2 or given.shape[1] != self.lookback or len(given) == 0:
            raise ValueError(
                f"`windows` must have shape (B, lookback) = (B, {self.lookback}); got {tuple(given.shape)}. "
                f"A single window needs a batch axis: `windows[None]`."
            )
        check_finite(given, "windows", way="Fill the gaps first, or use predict() with gaps='fit'.")
        network = self.network_
        device = next(network.parameters()).device
        past = given if isinstance(given, Tensor) else torch.from_numpy(np.array(given))
        past = past.to(device, torch.float64 if device.type != "mps" else torch.float32)
        if ids is not None or len(self._rows) == 1:
            keys = list(ids) if ids is not None else list(self._rows) * len(given)
            unknown = [key for key in keys if key not in self._rows]
            if unknown or len(keys) != len(given):
                raise ValueError(
                    f"`ids` must name a series of `fit` for each of the {len(given)} windows; got {len(keys)} ids"
                    + (f", {unknown[0]!r} among them. Leave `ids` out for unknown ones." if unknown else ".")
                )
            rows = [self._rows[key] for key in keys]
            mean, deviation = (past.new_tensor(a[rows])[:, None] for a in (self.mean_, self.deviation_))
        else:
            deviation, mean = torch.std_mean(past, 1, correction=0, keepdim=True)
            deviation = torch.where(deviation > 0, deviation, float(np.median(self.deviation_)))
        scaled = ((past - mean) / deviation).float()
        network.eval()
        out = run(network, make_inputs(network, self.tokenizer_.transform(scaled), scaled)) * deviation + mean
        if isinstance(given, Tensor):
            return out.to(given.device, given.dtype)
        return to_numpy(out).astype(given.dtype)

    # ---------------------------------------------------------------------------------------------------- backtest

    def cross_validation(
        self,
        df: Any,
        *,
        n_windows: int = 4,
        step: int | None = None,
        refit: bool = False,
        allow_fit: bool = True,
        level: Sequence[float] | None = None,
    ) -> Any:
        """Forecasts from moving cutoffs, beside what came: id, time, cutoff, y, forecast (and intervals).

        The last cutoff leaves `horizon` samples, the others lie `step` samples before one another; each series is
        counted from its own end. No model sees anything of a series after its cutoff: with ``refit`` a fresh one is
        fitted before every cutoff; without, one serves all: this one, if it is fitted and all cutoffs come after what
        it learned from, else a fresh one, fitted on what comes before the first cutoff. (Where series end at different
        times, the fresh one may have seen of other series what is later by the calendar.) This forecaster is not
        changed.

        Args:
            df: the series.
            n_windows: how many cutoffs.
            step: samples between them; None means `horizon`.
            refit: see above.
            allow_fit: without it, cutoffs within what this forecaster learned from are an error.
            level: as for `predict`.
        """
        n_windows = to_whole(n_windows, "n_windows", 1)
        step = self.horizon if step is None else to_whole(step, "step", 1)
        levels = check_levels(level) if level is not None else []
        kind = kind_of(df)
        panel = self._long_enough(
            self._to_panel(df, getattr(self, "freq_", self.freq)),
            self.lookback + self.horizon + step * (n_windows - 1),
            "lookback + horizon + step (n_windows - 1)",
            "Lower `n_windows` or `step`",
            f" for `n_windows` = {n_windows} cutoffs {step} apart",
        )
        cuts = panel.lengths - self.horizon - step * np.arange(n_windows - 1, -1, -1)[:, None]  # (n_windows, R)
        model = None if refit else self._unspoiled(panel, cuts[0])
        if model is None and not allow_fit:
            raise ValueError(
                "cutoffs must come after what the model learned from, its train and validation folds. "
                "Lower `n_windows` or `step`, bring newer samples, or let a fresh model be trained."
            )
        stamps, cutoffs, columns = [], [], []
        for k, cut in enumerate(cuts):
            before = panel.cut(cut)
            if model is None or refit:
                model = self._fresh()
                try:
                    model._fit(before, _without_test(self.folds))
                except ValueError as error:
                    raise ValueError(f"fitting on what comes before cutoff {k + 1} of {n_windows}: {error}") from error
                if model.history_.stopped == "interrupted":
                    raise KeyboardInterrupt
                self._say(f"fitted before cutoff {k + 1} of {n_windows}")
            truth = panel.values[(panel.offsets[:-1] + cut)[:, None] + np.arange(self.horizon)]
            stamps.append(before.future(self.horizon))
            cutoffs.append(before.last().repeat(self.horizon))
            columns.append({"y": truth, **model._intervals(self._ready(before), levels)})
        # From one cutoff after another to one series after another.
        shape = n_windows, len(panel), self.horizon
        order = np.arange(np.prod(shape)).reshape(shape).transpose(1, 0, 2).ravel()
        whole = {name: np.concatenate([part[name].ravel() for part in columns])[order] for name in columns[0]}
        names = self._names(panel, n_windows * self.horizon)
        names |= {self.time_col: _join(stamps)[order], "cutoff": _join(cutoffs)[order]}
        return make_frame(kind, {**names, **whole})

    def _unspoiled(self, panel: Panel, cut: np.ndarray) -> Forecaster | None:
        """This forecaster, if it has learned from nothing at or after the cutoffs."""
        if not hasattr(self, "network_"):
            return None
        known, at = np.array([self._rows.get(key, -1) for key in panel.keys]), panel.at(cut)
        learned = np.where(known < 0, np.iinfo(np.int64).min, self.learned_until_[known])
        if not (learned <= at).all():
            return None
        strange = np.flatnonzero((known < 0) & (at < self.learned_until_.max()))
        if len(strange):
            one = panel.ids[strange[0]]
            warnings.warn(
                f"{len(strange)} of {len(panel)} series have ids that `fit` did not see, {one!r} (of type "
                f"{type(one).__name__}) for one, and cutoffs within the time that it learned from. If they are its "
                f"series by other names, these forecasts are of what the model was trained on.",
                stacklevel=stack_level(),
            )
        return self

    def _fresh(self) -> Forecaster:
        return type(self)(**self.get_params())

    # ------------------------------------------------------------------------------------------------- save and load

    def save(self, folder: os.PathLike[str] | str) -> None:
        """Into a folder: `config.json` and `model.safetensors`. Nothing is pickled."""
        self._check_fitted()
        tail = self._tail
        tensors = {f"network.{name}": a for name, a in self.network_.state_dict().items()}
        arrays = {
            "conformal": self.conformal_,
            "mean": self.mean_,
            "deviation": self.deviation_,
            "tail.values": tail.values,
            "tail.offsets": tail.offsets,
            "tail.first": tail.first,
            "learned_until": self.learned_until_,
        }
        tensors |= {name: torch.from_numpy(np.ascontiguousarray(a)) for name, a in arrays.items()}
        params = self.get_params()
        tokenizer: dict[str, Any] = {
            "kind": type(self.tokenizer).__name__,
            "params": _plain(self.tokenizer.get_params()),
        }
        if hasattr(self.tokenizer_, "clip_factor_"):
            tokenizer["clip_factor_"] = float(self.tokenizer_.clip_factor_)
        config = {
            "forecaster": {k: v for k, v in params.items() if k not in ("tokenizer", "device", "verbose")},
            "tokenizer": tokenizer,
            "series": {
                "ids": [_plain_id(i) for i in self.ids_],
                "channels": self.channels_,
                "freq": self.freq_,
                "tz": tail.tz,
                "unit": tail.unit,
            },
            "scores": {name: None if s is None else s.to_dict() for name, s in self.scores_.items()},
            "history": self.history_.to_dict(),
        }
        storage.write_folder(folder, config, tensors)

    @classmethod
    def load(cls, folder: os.PathLike[str] | str, *, device: str = "auto", verbose: bool = True) -> Self:
        """A forecaster that `save` wrote; it predicts bitwise the same. Anything else is a ValueError."""
        return cls._load(folder, device=device, verbose=verbose, links=False)

    @classmethod
    def _load(cls, folder: os.PathLike[str] | str, *, device: str, verbose: bool, links: bool) -> Self:
        find_device(device)
        config, tensors = storage.read_folder(folder, links=links)
        try:
            kind = config["tokenizer"]["kind"]
            if kind not in TOKENIZERS:
                raise ValueError(f"unknown tokenizer {kind!r}")
            params = {k: (float(v) if v == "inf" else v) for k, v in config["tokenizer"]["params"].items()}
            tokenizer = TOKENIZERS[kind](**params)
            self = cls(**config["forecaster"], tokenizer=tokenizer, device=device, verbose=verbose)
            self._restore(config, tensors)
        except (KeyError, TypeError, ValueError, RuntimeError, IndexError, AttributeError) as error:
            raise ValueError(f"{folder} is not a whole forecaster: {type(error).__name__}: {error}") from error
        return self

    def _restore(self, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        self.tokenizer_ = copy.deepcopy(self.tokenizer)
        if "clip_factor_" in config["tokenizer"]:
            self.tokenizer_.clip_factor_ = float(config["tokenizer"]["clip_factor_"])  # type: ignore[attr-defined]
        network = build_network(self.network_config, self.tokenizer_, lookback=self.lookback, horizon=self.horizon)
        prefix = "network."
        weights = {name[len(prefix) :]: a for name, a in tensors.items() if name.startswith(prefix)}
        for name, a in tensors.items():
            if a.is_floating_point() and name != "tail.values" and not bool(torch.isfinite(a).all()):
                raise ValueError(f"tensor {name} holds numbers that are not finite")
        network.load_state_dict(weights)
        self.network_ = network.to(find_device(self.device)).eval()
        self._exact = None
        self._kind = "pandas"
        arrays = {name: a.numpy() for name, a in tensors.items() if not name.startswith(prefix)}
        about = config["series"]
        self.ids_, self.channels_, self.freq_ = about["ids"], about["channels"], about["freq"]
        self.mean_, self.deviation_, self.conformal_ = (arrays[k] for k in ("mean", "deviation", "conformal"))
        self.learned_until_ = arrays["learned_until"]
        self._tail = Panel(
            ids=self.ids_,
            channels=self.channels_,
            values=arrays["tail.values"],
            offsets=arrays["tail.offsets"],
            first=arrays["tail.first"],
            freq=self.freq_,
            tz=about["tz"],
            unit=about["unit"],
        )
        R, tail = len(self.ids_), self._tail
        rows = (self.mean_, self.deviation_, self.learned_until_, tail.first)
        if (
            any(a.shape != (R,) for a in rows)
            or self.conformal_.ndim != 2
            or self.conformal_.shape[1] != self.horizon
            or tail.offsets.shape != (R + 1,)
            or tail.offsets[0] != 0
            or (tail.lengths < self.lookback).any()
            or tail.values.shape != (tail.offsets[-1],)
        ):
            raise ValueError("its parts do not fit together")
        self.history_ = History.from_dict(config["history"])
        self.scores_ = {name: None if s is None else Scores(**s) for name, s in config["scores"].items()}
        self._rows = {key: row for row, key in enumerate(tail.keys)}

    def _save_pretrained(self, save_directory: Path) -> None:
        """For `save_pretrained` and `push_to_hub` of huggingface_hub."""
        self.save(save_directory)

    @classmethod
    def _from_pretrained(  # type: ignore[override]
        cls,
        *,
        model_id: str,
        revision: str | None = None,
        cache_dir: str | Path | None = None,
        force_download: bool = False,
        local_files_only: bool = False,
        token: str | bool | None = None,
        device: str = "auto",
        verbose: bool = True,
        tokenizer: Any = None,
    ) -> Self:
        """For `from_pretrained` of huggingface_hub: a folder, or a repository of the hub.

        `tokenizer` is what the mixin finds of that name in the config; the folder's own reader looks for itself.
        """
        if Path(model_id).is_dir():
            return cls.load(model_id, device=device, verbose=verbose)
        from huggingface_hub import snapshot_download

        folder = snapshot_download(
            model_id,
            revision=revision,
            cache_dir=cache_dir,
            force_download=force_download,
            local_files_only=local_files_only,
            token=token,
            allow_patterns=[storage.CONFIG, storage.TENSORS],
        )
        return cls._load(folder, device=device, verbose=verbose, links=True)


def default_tokens(lookback: int) -> int:
    """As many as the paper's smallest budget: 45 for 720 samples."""
    return max(8, round(lookback / 16))


def _without_test(folds: Sequence[float]) -> tuple[float, float, float]:
    """The shares of train and validation where nothing is held back for a test."""
    train, val, _ = folds
    return train / (train + val), val / (train + val), 0.0


def _repeat(items: list[Any], times: int) -> list[Any]:
    """Every item so many times."""
    return items * times if len(items) == 1 else [item for item in items for _ in range(times)]


def _join(stamps: list[Any]) -> Any:
    """Indexes or arrays of stamps, one after another."""
    return stamps[0].append(stamps[1:]) if hasattr(stamps[0], "append") else np.concatenate(stamps)


def _plain(params: dict[str, Any]) -> dict[str, Any]:
    """JSON has no infinity."""
    return {k: "inf" if v == float("inf") else v for k, v in params.items()}


def _plain_id(item: Any) -> Any:
    if isinstance(item, (str, int, float)) and not isinstance(item, bool):
        return item
    raise ValueError(f"ids must be text or numbers to be saved; got {item!r}. Convert the id column first.")
