"""What the commands show of a forecaster: tables of scores and pictures of forecasts."""

from __future__ import annotations

import os
import textwrap
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import torch

from .conformal import rank
from .data.frames import Panel
from .forecaster import Forecaster
from .pictures import draw_forecast
from .train import Scores
from .train.metrics import Tally

if TYPE_CHECKING:
    from .search import Outcome

NAIVE = ("last value", "seasonal naive")


def format_scores(forecasters: Mapping[str, Forecaster]) -> str:
    """A table of the test fold's scores, the naive forecasts below, the best of each column starred."""
    rows: dict[str, Scores] = {}
    for name, forecaster in forecasters.items():
        scores = forecaster.scores_["test"]
        if scores is not None:
            rows[name] = scores
    if not rows:  # none was held back, or the training may go on
        val = {name: f.scores_["val"] for name, f in forecasters.items()}
        return "\n".join(f"{name}: validation RMSE {s.rmse:.4g}, MAE {s.mae:.4g}" for name, s in val.items() if s)
    any_one = next(iter(forecasters.values()))
    rows |= {name: s for name in NAIVE if (s := any_one.scores_.get(name)) is not None}
    columns = ("rmse", "mae", "smape")
    least = {c: min(getattr(s, c) for s in rows.values()) for c in columns}
    width = max(map(len, rows)) + 2
    lines = [f"{'test fold':{width}}{'RMSE':>11}{'MAE':>11}{'SMAPE':>11}"]
    for name, scores in rows.items():
        cells = []
        for c in columns:
            value = getattr(scores, c)
            text = f"{value:.1f} %" if c == "smape" else f"{value:.4g}"
            cells.append(f"{text + ('*' if value == least[c] else ' '):>11}")
        lines.append(f"{name:{width}}{''.join(cells)}")
    lines.append(f"{next(iter(rows.values())).windows:,} windows; * is best")
    return "\n".join(lines)


def scores_dict(forecaster: Forecaster) -> dict[str, Any]:
    """For JSON."""
    return {
        "name": forecaster.name,
        "scores": {name: None if s is None else s.to_dict() for name, s in forecaster.scores_.items()},
        "epochs": len(forecaster.history_.epochs),
        "best_epoch": forecaster.history_.best_epoch,
        "stopped": forecaster.history_.stopped,
        "parameters": sum(p.numel() for p in forecaster.network_.parameters()),
    }


def trials_dict(outcome: Outcome, count: int = 5) -> dict[str, Any]:
    """Of a search, for JSON: what became of the trials, and the best."""
    counts = {state: sum(r.state == state for r in outcome.finished) for state in ("complete", "pruned", "failed")}
    best = [{"trial": r.number, "val_rmse": r.rmse, **r.point} for r in outcome.best(count)]
    return {"search": outcome.name, "trials": counts, "best": best}


def format_trials(outcome: Outcome, count: int = 5) -> str:
    """The best trials of a search, by their validation RMSE."""
    about = trials_dict(outcome, count)
    lines = [", ".join(f"{number} {state}" for state, number in about["trials"].items() if number) + "; the best:"]
    for trial in about["best"]:
        rest = {k: v for k, v in trial.items() if k not in ("trial", "val_rmse")}
        words = ", ".join(f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in rest.items())
        lines += textwrap.wrap(
            f"trial {trial['trial']}: val RMSE {trial['val_rmse']:.4g}; {words}", 78, subsequent_indent="    "
        )
    return "\n".join(lines)


def draw_last_window(
    forecaster: Forecaster, table: Any, path: Path, level: Sequence[float] = (80, 95), unit: str = ""
) -> Path | None:
    """The forecast of the last `horizon` samples of the first series that has them, beside what came.

    Returns the path; a picture that cannot be drawn (too many gaps, say) is a note and None, since a model was trained.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # `fit` has told about the frame
            panel = forecaster._to_panel(table, forecaster.freq_)
        keep = panel.lengths >= forecaster.lookback + forecaster.horizon
        panel = panel.select(np.arange(len(panel)) == int(keep.argmax()))
        truth = panel.values[-forecaster.horizon :]
        _draw(forecaster, panel.cut(panel.lengths - forecaster.horizon), path, level, truth, unit)
    except ValueError as error:
        warnings.warn(f"no picture: {error}", stacklevel=2)
        return None
    return path


def draw_future(forecaster: Forecaster, table: Any, path: os.PathLike[str] | str, level: Sequence[float]) -> None:
    """The forecast beyond the end of the first series."""
    panel = forecaster._tail if table is None else forecaster._to_panel(table, forecaster.freq_)
    _draw(forecaster, panel.select(np.arange(len(panel)) == 0), path, level, None, "")


def _draw(
    forecaster: Forecaster,
    before: Panel,
    path: os.PathLike[str] | str,
    level: Sequence[float],
    truth: np.ndarray | None,
    unit: str,
) -> None:
    K = len(forecaster.conformal_)
    levels = [float(v) for v in level if rank(K, v) <= K]
    before = forecaster._ready(before)
    columns = {name: a[0] for name, a in forecaster._intervals(before, levels).items()}
    name = forecaster.name
    shown = forecaster.lookback
    channel = f" / {before.channels[0]}" if before.channels else ""
    draw_forecast(
        path,
        past=(before.stamps(0, len(before.values) - shown, shown), before.values[-shown:]),
        future=before.future(forecaster.horizon),
        name=name,
        forecast=columns[name],
        bands={v: (columns[f"{name}-lo-{v:g}"], columns[f"{name}-hi-{v:g}"]) for v in levels},
        truth=truth,
        title=f"{before.ids[0]}{channel}: {forecaster.horizon} steps ahead from {forecaster.lookback} samples "
        f"as {forecaster.tokenizer.n_tokens} tokens",
        unit=unit or str(before.channels[0] if before.channels else forecaster.target_col),
    )


def backtest_scores(forecaster: Forecaster, result: pd.DataFrame) -> dict[str, Any]:
    """Scores per cutoff and over all, and the coverage of each interval."""
    name = forecaster.name
    levels = [c.removeprefix(f"{name}-lo-") for c in result.columns if c.startswith(f"{name}-lo-")]

    def score(part: pd.DataFrame) -> dict[str, float]:
        tally = Tally()
        one = torch.ones(1, 1, dtype=torch.float64)
        forecast, truth = (torch.tensor(part[column].to_numpy())[None] for column in (name, "y"))
        tally.add(forecast, truth, mean=0 * one, deviation=one)
        scores = tally.scores()
        out = {"rmse": scores.rmse, "mae": scores.mae, "smape": scores.smape}
        seen = part[part["y"].notna()]
        for v in levels:
            inside = (seen["y"] >= seen[f"{name}-lo-{v}"]) & (seen["y"] <= seen[f"{name}-hi-{v}"])
            out[f"coverage-{v}"] = float(inside.mean())
        return out

    cutoffs = {str(cutoff): score(part) for cutoff, part in result.groupby("cutoff", sort=True)}
    return {"name": name, "all": score(result), "cutoffs": cutoffs}


def format_backtest(scores: Mapping[str, Any]) -> str:
    """A table, one line a cutoff."""
    names = list(scores["all"])
    titles = [n.upper() if "-" not in n else f"in {n.split('-', 1)[1]} %" for n in names]
    lines = [f"{'cutoff':22}" + "".join(f"{t:>12}" for t in titles)]
    for cutoff, row in [*scores["cutoffs"].items(), ("all", scores["all"])]:
        cells = (
            f"{v:.1f} %" if n == "smape" else f"{100 * v:.1f} %" if "-" in n else f"{v:.4g}" for n, v in row.items()
        )
        lines.append(f"{cutoff:22}" + "".join(f"{c:>12}" for c in cells))
    return "\n".join(lines)


def draw_backtest(forecaster: Forecaster, result: pd.DataFrame, path: os.PathLike[str] | str) -> None:
    """The first series: truth and the forecasts of all cutoffs."""
    from .pictures import draw_cutoffs

    name = forecaster.name
    keys = [k for k in (forecaster.id_col, "channel") if k in result.columns]
    first = result
    for key in keys:
        first = first[first[key] == first[key].iloc[0]]
    levels = [c.removeprefix(f"{name}-lo-") for c in first.columns if c.startswith(f"{name}-lo-")]
    title = " / ".join(str(first[key].iloc[0]) for key in keys) or str(forecaster.target_col)
    draw_cutoffs(path, first, forecaster.time_col, name, levels, f"{title}: forecasts from moving cutoffs")
