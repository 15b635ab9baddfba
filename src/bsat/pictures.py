"""Pictures of forecasts and of what a network learned."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from .tokens.pictures import ACCENT, CURVE, INK, QUIET, add_legend, check_format, new_figure, plain, save
from .train import History

if TYPE_CHECKING:
    import pandas as pd


def draw_forecast(
    path: os.PathLike[str] | str,
    *,
    past: tuple[Any, np.ndarray],
    future: Any,
    name: str,
    forecast: np.ndarray,
    bands: Mapping[float, tuple[np.ndarray, np.ndarray]] | None = None,
    truth: np.ndarray | None = None,
    title: str = "",
    unit: str = "value",
) -> None:
    """What was, what is forecast, in which bands, and what came.

    Args:
        path: a .png, .svg or .pdf.
        past: stamps and samples.
        future: stamps (H,) of the forecasts.
        name: of the forecast.
        forecast: (H,)
        bands: level -> lower and upper (H,).
        truth: (H,), if it is known.
        title: of the picture.
        unit: of the samples.
    """
    figure = new_figure(9, 3.8)
    axes = figure.subplots()
    axes.plot(*past, color=INK, lw=0.9, label="past")
    if truth is not None:
        axes.plot(future, truth, color=INK, lw=0.9, ls=":", label="what came")
    shade = _shades(bands or {})
    for level in sorted(bands or {}, reverse=True):
        low, high = (bands or {})[level]
        axes.fill_between(future, low, high, color=shade[level], lw=0, label=f"{level:g} %")
    axes.plot(future, forecast, color=CURVE, lw=1.5, label=name)
    axes.set_ylabel(plain(unit))
    axes.margins(x=0.01)
    figure.suptitle(plain(title), fontsize=11)
    _date_axis(axes, future)
    add_legend(axes)
    save(figure, path)


def draw_bases(path: os.PathLike[str] | str, history: History, title: str = "") -> None:
    """The learned rotary base of every layer over the epochs (the paper's figure of learned bases)."""
    from matplotlib.ticker import MaxNLocator

    check_format(path)
    bases = np.array([epoch.bases for epoch in history.epochs])  # (epochs, layers)
    if bases.size == 0:
        raise ValueError("there are learned bases only with encoding='l-rope' or 'l-rope+lpe'. Train with one of them.")
    figure = new_figure(7, 3.4)
    axes = figure.subplots()
    for layer in range(bases.shape[1]):
        shade = layer / max(1, bases.shape[1] - 1)
        color = tuple((1 - shade) * a + shade * b for a, b in zip((0.12, 0.37, 0.66), (0.78, 0.31, 0.18), strict=True))
        axes.plot(
            np.arange(1, len(bases) + 1), bases[:, layer], color=color, marker="o", ms=3, label=f"layer {layer + 1}"
        )
    axes.axhline(10_000, color=QUIET, lw=0.8, ls="--", label="start")
    axes.axvline(history.best_epoch + 1, color=QUIET, lw=0.8, ls=":", label="best epoch")
    axes.set_xlabel("epoch")
    axes.set_ylabel("base")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    figure.suptitle(plain(title), fontsize=11)
    add_legend(axes)
    save(figure, path)


def draw_cutoffs(
    path: os.PathLike[str] | str, table: pd.DataFrame, time_col: str, name: str, levels: list[str], title: str
) -> None:
    """A backtest of one series: what came, and the forecast of every cutoff."""
    figure = new_figure(9, 3.8)
    axes = figure.subplots()
    truth = table.drop_duplicates(time_col).sort_values(time_col)
    shade = _shades([float(level) for level in levels])
    for i, (cutoff, part) in enumerate(table.groupby("cutoff", sort=True)):
        for level in sorted(levels, key=float, reverse=True):
            low, high = part[f"{name}-lo-{level}"], part[f"{name}-hi-{level}"]
            label = f"{level} %" if i == 0 else None
            axes.fill_between(part[time_col], low, high, color=shade[float(level)], lw=0, label=label)
        label = f"{name}, cutoff by cutoff" if i == 0 else None
        color = CURVE if i % 2 == 0 else ACCENT
        axes.plot(part[time_col], part[name], color=color, lw=1.4, label=label, zorder=3)  # above the next one's bands
        axes.axvline(cutoff, color=QUIET, lw=0.8, ls=":", label="cutoff" if i == 0 else None)  # type: ignore[arg-type]
    axes.plot(truth[time_col], truth["y"], color=INK, lw=0.9, label="what came", zorder=4)
    axes.set_ylabel("value")
    axes.margins(x=0.01)
    figure.suptitle(plain(title), fontsize=11)
    _date_axis(axes, truth[time_col])
    add_legend(axes)
    save(figure, path)


def _shades(levels: Iterable[float]) -> dict[float, tuple[float, ...]]:
    """The wider the band, the paler; opaque, so that the legend shows what the picture does."""
    ordered = sorted(levels)
    pale = [0.66 + 0.22 * (i + 1) / len(ordered) for i in range(len(ordered))]
    return {v: tuple(p + (1 - p) * c for c in (0.12, 0.37, 0.66)) for v, p in zip(ordered, pale, strict=True)}


def _date_axis(axes: Any, stamps: Any) -> None:
    """Dates without repeating the year at every tick."""
    if not (hasattr(stamps, "dt") or hasattr(stamps, "tz_localize")):
        return
    from matplotlib.dates import AutoDateLocator, ConciseDateFormatter

    locator = AutoDateLocator()
    axes.xaxis.set_major_locator(locator)
    axes.xaxis.set_major_formatter(ConciseDateFormatter(locator))
