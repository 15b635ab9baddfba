"""The paper's figures, made of stored runs; and memory and errors against tokens, which the paper gives as tables.

Markers, dashes and printed numbers carry what colours do, so that everything can be read in grey. Figures made twice
of one store by one installation are the same to the byte: they hold no date, and the ids in an SVG come from a fixed
salt.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..tokens.pictures import ACCENT, CURVE, INK, QUIET, new_figure, save
from . import paper
from .models import MODELS
from .protocol import ENCODINGS, Protocol
from .runs import CELL, read, read_protocol
from .tables import EMPTY, LEAST, PAPER_DATASETS, Scores, bca_interval, label

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = ("png", "svg")
START = 10_000
"""Where learned bases begin."""
SMALL = 8
"""Points of the smallest print."""
PRINT = "#5a5a5a"


class FigureError(ValueError):
    """A figure for which the runs are not enough, and what it would take."""


class Style(NamedTuple):
    """Each of the three is enough to tell lines apart."""

    color: str
    marker: str
    dash: Any


STYLES = (
    Style(CURVE, "o", "-"),
    Style(ACCENT, "s", "--"),
    Style(INK, "^", "-."),
    Style("#58b58a", "D", ":"),
    Style("#5aa9d6", "X", (0, (1, 3))),
    Style("#7a4a2b", "*", (0, (4, 1, 4, 3))),
    Style("#5a2d82", "v", (0, (7, 2, 1, 2, 1, 2))),
    Style("#b58a00", "P", (0, (9, 3))),
)


def _style(k: int) -> Style:
    return STYLES[k % len(STYLES)]


# ---- what is in the runs ---------------------------------------------------------------------------------------------


def _place(model: str) -> int:
    """Of its style, whatever other models there are."""
    known = list(MODELS)
    return known.index(model) if model in known else len(known)


def _ordered(found: Iterable[Any], known: Iterable[Any]) -> list[Any]:
    """Those that are known in their order, then the others in theirs."""
    place = {name: k for k, name in enumerate(known)}
    return sorted(set(found), key=lambda name: (place.get(name, len(place)), name))


def _datasets(runs: pd.DataFrame) -> list[str]:
    return _ordered(runs["dataset"], PAPER_DATASETS)


def _models(runs: pd.DataFrame) -> list[str]:
    return _ordered(runs["model"], MODELS)


def _encodings(runs: pd.DataFrame) -> list[str]:
    return _ordered(runs["encoding"], ENCODINGS)


def _budgets(runs: pd.DataFrame) -> list[int]:
    return sorted({int(tokens) for tokens in runs["tokens"]})


def _model(name: str) -> str:
    return MODELS[name].label


def _encoding(name: str) -> str:
    return label("bsat", name).removeprefix(f"{_model('bsat')} ")


def _tested(runs: pd.DataFrame, protocol: Protocol) -> Scores:
    scores = Scores(runs, protocol)
    if not len(scores.selected):
        raise FigureError(
            f"it needs test scores of selected runs; got {len(runs)} runs, {len(scores.waiting)} of them selected, "
            "none tested. `bsat lab run` scores what it selects when its search has ended."
        )
    return scores


# ---- the figures -----------------------------------------------------------------------------------------------------


def rescaled(selected: pd.DataFrame) -> pd.Series:
    """Test RMSE, (x - min) / (max - min) inside each dataset and budget (appendix, box-plots); 0 if all are equal."""
    groups = selected.groupby(["dataset", "tokens"])["test_rmse"]
    low, high = groups.transform("min"), groups.transform("max")
    return (selected["test_rmse"] - low) / (high - low).where(high > low, 1.0)


def boxes(runs: pd.DataFrame, protocol: Protocol) -> Figure:
    """Test RMSE of the selected runs, `rescaled`: a row of panels for each budget, which is the paper's box-plot.

    From quartile to quartile, with the median as a line and the mean as a diamond; whiskers reach to the last run
    within 1.5 times the box, and what lies beyond is a circle.
    """
    selected = _tested(runs, protocol).selected
    selected = selected.assign(scaled=rescaled(selected))
    cells = dict(iter(selected.groupby(CELL)["scaled"]))
    datasets, budgets = _datasets(selected), _budgets(selected)
    present = {d: set(zip(some["model"], some["encoding"], strict=True)) for d, some in selected.groupby("dataset")}
    kinds = [(m, e) for m in _models(selected) for e in _encodings(selected)]
    rows = [[row for row in kinds if row in present[dataset]] for dataset in datasets]
    widths = [max(2 + len(own), 8) for own in rows]  # a title has room

    figure = _new_figure(1.0 + 0.28 * sum(widths), 1.9 + 1.9 * len(budgets))
    panels = figure.subplots(
        len(budgets), len(datasets), sharex="col", sharey=True, squeeze=False, gridspec_kw={"width_ratios": widths}
    )
    for column, (dataset, own) in enumerate(zip(datasets, rows, strict=True)):
        lowest = panels[0][column]
        for tokens, axes in zip(budgets, panels[:, column], strict=True):
            for at, (model, encoding) in enumerate(own):
                values = cells.get((dataset, model, tokens, encoding))
                if values is not None:
                    _box(axes, at, values.to_numpy(), _style(_place(model)).color)
            if not axes.lines:  # no runs
                axes.set_visible(False)
                continue
            lowest = axes
            for at in range(1, len(own)):
                if own[at][0] != own[at - 1][0]:
                    axes.axvline(at - 0.5, color=QUIET, lw=0.6)
            axes.set_xticks(range(len(own)), [label(*row) for row in own], rotation=90, fontsize=SMALL)
            axes.set_xlim(-0.6, len(own) - 0.4)
            axes.set_ylim(-0.06, 1.06)
            axes.tick_params(axis="y", labelsize=SMALL)
            axes.set_title(f"{dataset}, {tokens} tokens", fontsize=9)
        lowest.tick_params(labelbottom=True)
        lowest.xaxis.set_in_layout(lowest is panels[-1][column])  # else there is room where no panel is
    for row in panels:
        next(axes for axes in row if axes.get_visible()).tick_params(labelleft=True)
    figure.supylabel("test RMSE, scaled to [0, 1]", fontsize=9)
    runs_of = sorted({len(values) for values in cells.values()})
    return _finish(figure, "Error of the selected runs", protocol, f"{_range(runs_of)} runs a box")


def _box(axes: Axes, at: int, values: np.ndarray, color: str) -> None:
    from matplotlib.colors import to_rgb

    line = {"color": INK, "lw": 0.9}
    axes.boxplot(
        values,
        positions=[at],
        widths=0.62,
        patch_artist=True,
        manage_ticks=False,
        showmeans=True,
        boxprops={"facecolor": [0.6 + 0.4 * c for c in to_rgb(color)], "edgecolor": INK, "lw": 0.9},
        medianprops={"color": INK, "lw": 1.8, "solid_capstyle": "butt"},
        meanprops={"marker": "D", "mfc": "white", "mec": INK, "ms": 3.5, "mew": 0.8},
        flierprops={"marker": "o", "mfc": "none", "mec": INK, "ms": 3, "mew": 0.7},
        whiskerprops=line,
        capprops=line,
    )


def best_bases(runs: pd.DataFrame, dataset: str) -> pd.DataFrame:
    """Of every model and budget the run with learned bases that has the least validation RMSE, whichever encoding."""
    learned = (runs["dataset"] == dataset) & (runs["status"] != "failed") & runs["bases"].map(len).gt(0)
    some = runs[learned & runs["val_rmse"].notna()]
    order = some.sort_values(["model", "tokens", "val_rmse", "encoding", "seed", "trial"], kind="stable")
    return order.drop_duplicates(["model", "tokens"])


def bases(runs: pd.DataFrame, protocol: Protocol, dataset: str) -> Figure:
    """The learned bases of every layer over the epochs, in `best_bases`; the paper shows one such run.

    A row of panels shares its scale. The dotted line is the epoch whose weights were kept.
    """
    from matplotlib.ticker import MaxNLocator

    best = best_bases(runs, dataset)
    if not len(best):
        raise FigureError(
            f"it needs a run on {dataset} that learned its bases; got none. Run one with encoding l-rope or l-rope+lpe."
        )
    models, budgets = _models(best), _budgets(best)
    figure = _new_figure(1.9 + 2.6 * len(budgets), 1.2 + 1.75 * len(models))
    panels = figure.subplots(len(models), len(budgets), sharex=True, sharey="row", squeeze=False)
    for axes in panels.flat:
        axes.set_visible(False)
    marks: dict[str, Any] = {}
    for run in best.to_dict("records"):
        axes = panels[models.index(run["model"])][budgets.index(run["tokens"])]
        axes.set_visible(True)
        values = np.array(run["bases"], dtype=np.float64)  # (epochs, layers)
        epochs = np.arange(1, len(values) + 1)
        marks["start"] = axes.axhline(START, color=QUIET, lw=0.8, zorder=0)
        for layer, line in enumerate(values.T):
            color, marker, dash = _style(layer)
            (drawn,) = axes.plot(
                epochs, line, color=color, ls=dash, lw=1.2, marker=marker, ms=3.5, markevery=max(1, len(epochs) // 6)
            )
            marks[f"layer {layer + 1}"] = drawn
        scores = np.array(run["curve"].get("val_rmse", ()), dtype=np.float64)
        if np.isfinite(scores).any():
            best_epoch = int(np.nanargmin(scores)) + 1
            marks["best epoch"] = axes.axvline(best_epoch, color=PRINT, lw=0.9, ls=":", zorder=0)
        axes.set_title(
            f"{label(run['model'], run['encoding'])}, {run['tokens']}\nseed {run['seed']}, trial {run['trial']}",
            fontsize=SMALL,
        )
        axes.tick_params(labelsize=SMALL, labelbottom=True, labelleft=True)
        axes.xaxis.set_major_locator(MaxNLocator(4, integer=True, min_n_ticks=1))
        axes.yaxis.set_major_locator(MaxNLocator(4))
        axes.yaxis.set_major_formatter(_base)
    panels[0][0].set_xlim(0, max(2, max(map(len, best["bases"])) + 0.5))  # shared
    for column in panels.T:
        [axes for axes in column if axes.get_visible()][-1].set_xlabel("epoch", fontsize=9)
    names = _ordered(marks, (f"layer {k}" for k in range(1, 100)))
    _legend(figure, [marks[name] for name in names], names)
    figure.supylabel("base", fontsize=9)
    return _finish(figure, f"Learned bases over the epochs on {dataset}", protocol, "best run by validation RMSE")


def spread_changes(runs: pd.DataFrame) -> pd.DataFrame:
    """Change in mean test RMSE from the first to the other quartiles of the spread of bases, in percent, by cell.

    The spread is the largest less the smallest base when the run ended (appendix, Learned RoPE Base Heatmap). It
    counts whatever runs have test scores, and leaves out cells with fewer than `LEAST` of them. Quartiles are bounded
    by `numpy.quantile`; a run on a boundary belongs to the lower one, and a quartile that ties leave empty is NaN.
    """
    import pandas as pd

    known = runs.dropna(subset="spread")
    records = []
    for cell, of in known.groupby(CELL):
        tested = of[of["test_rmse"].notna()]
        if len(tested) < LEAST:
            continue
        spread, rmse = tested["spread"].to_numpy(), tested["test_rmse"].to_numpy()
        quartile = np.searchsorted(np.quantile(spread, (0.25, 0.5, 0.75)), spread)
        means = [rmse[quartile == q].mean() if (quartile == q).any() else math.nan for q in range(4)]
        changes = {f"Q{q + 1}": 100 * (means[q] / means[0] - 1) for q in (1, 2, 3)}
        sizes = {"runs": len(of), "tested": len(tested)}
        records.append({**dict(zip(CELL, cell, strict=True)), **changes, "median": float(np.median(spread)), **sizes})
    return pd.DataFrame(records, columns=[*CELL, "Q2", "Q3", "Q4", "median", "runs", "tested"])


def spread(runs: pd.DataFrame, protocol: Protocol) -> Figure:
    """`spread_changes` as a heatmap with the median spread: a column of panels a dataset, a row of them an encoding.

    Blue is better than the first quartile, as in the paper; the sign says so too.
    """
    changes = spread_changes(runs)
    if not len(changes):
        raise FigureError(
            f"it needs a dataset, model, budget and encoding of which at least {LEAST} runs with learned bases have "
            "test scores, two for each quartile; got none. Score all runs of an encoding with L-RoPE, not the selected "
            "alone."
        )
    datasets, encodings = _datasets(changes), _encodings(changes)
    tasks = {
        e: [(m, t) for m in _models(of) for t in _budgets(of) if ((of["model"] == m) & (of["tokens"] == t)).any()]
        for e in encodings
        for of in [changes[changes["encoding"] == e]]
    }
    found = changes.set_index(CELL)
    heights = [len(tasks[e]) for e in encodings]
    columns = ["Q2", "Q3", "Q4"]
    limit = float(np.nanmax(np.abs(changes[columns].to_numpy()), initial=0.0)) or 1.0

    figure = _new_figure(2.2 + 2.5 * len(datasets), 1.7 + 0.45 * len(encodings) + 0.21 * sum(heights))
    panels = figure.subplots(len(encodings), len(datasets), squeeze=False, height_ratios=heights)
    for encoding, line in zip(encodings, panels, strict=True):
        names = [f"{_model(model)} {tokens}" for model, tokens in tasks[encoding]]
        for dataset, axes in zip(datasets, line, strict=True):
            keys = [(dataset, model, tokens, encoding) for model, tokens in tasks[encoding]]
            part = found.reindex(keys)
            if part["runs"].isna().all():
                axes.set_axis_off()
                continue
            values = part[columns].to_numpy(dtype=np.float64)
            image = axes.imshow(values, cmap="RdBu_r", vmin=-limit, vmax=limit, aspect="auto")
            for i, row in enumerate(values):
                for j, value in enumerate(row):
                    color = "white" if abs(value) > 0.6 * limit else INK
                    axes.text(j, i, _number(value, "{:+.1f}"), ha="center", va="center", fontsize=SMALL, color=color)
                median = _number(part["median"].iloc[i], "{:,.0f}")
                axes.text(3.1, i, median, ha="center", va="center", fontsize=SMALL)
            for i in range(1, len(keys)):
                if keys[i][1] != keys[i - 1][1]:
                    axes.axhline(i - 0.5, color=INK, lw=0.8)
            axes.set_xlim(-0.5, 3.7)
            axes.set_xticks([0, 1, 2, 3.1], [*columns, "median"], fontsize=SMALL)
            axes.tick_params(top=False, bottom=False, left=False, labeltop=True, labelbottom=False)
            axes.set_yticks(range(len(keys)), names, fontsize=SMALL)
            names = []  # beside the first panel of a line
            axes.set_title(f"{dataset}, {_encoding(encoding)}", fontsize=9)
    bar = figure.colorbar(image, ax=panels, location="bottom", shrink=0.5, aspect=40, fraction=0.03)
    bar.set_label("change of the mean test RMSE against Q1, %", fontsize=9)
    bar.ax.tick_params(labelsize=SMALL)
    counted = f"{changes['tested'].sum():,} tested runs of {changes['runs'].sum():,}"
    return _finish(figure, "Error by quartile of the spread of learned bases, and median spread", protocol, counted)


def memory(runs: pd.DataFrame, protocol: Protocol) -> Figure:
    """Peak memory of training against tokens, by tokenizer: the median over all runs, and from the least to the most.

    Of runs trained side by side each has its share of the peak, the tokens of all included: who was alone has most.
    """
    measured = runs[runs["memory"].notna()]
    if not len(measured):
        raise FigureError(
            f"it needs runs whose memory was measured; got {len(runs)} runs, none of them. Runs on a GPU have it."
        )
    models = _models(runs)
    figure = _new_figure(7, 4)
    axes = figure.subplots()
    for model in _models(measured):
        of = measured.loc[measured["model"] == model].groupby("tokens")["memory"]
        mib = of.agg(["median", "min", "max"]) / 2**20
        low, high = mib["median"] - mib["min"], mib["max"] - mib["median"]
        k = models.index(model)
        _line(axes, mib.index, mib["median"], (low, high), k, len(models), model)
    _tokens_axis(axes, _budgets(measured))
    axes.set_ylim(bottom=0)
    axes.set_ylabel("peak memory, MiB", fontsize=9)
    _legend(figure, *axes.get_legend_handles_labels())
    return _finish(figure, "Memory against tokens", protocol, f"{len(measured):,} runs: median, least and most")


def errors(runs: pd.DataFrame, protocol: Protocol, dataset: str) -> Figure:
    """Mean test RMSE of the selected runs with its 95 % BCa interval against tokens; hollow what the paper prints."""
    scores = _tested(runs[runs["dataset"] == dataset], protocol)
    selected, models = scores.selected, _models(runs)
    encodings, budgets = _encodings(selected), _budgets(selected)
    columns = min(3, len(encodings))
    lines = math.ceil(len(encodings) / columns)
    figure = _new_figure(2.4 + 2.9 * columns, 1 + 3 * lines)
    panels = figure.subplots(lines, columns, sharey=True, squeeze=False)
    for axes in panels.flat[len(encodings) :]:
        axes.set_visible(False)
    handles: dict[str, Any] = {}
    for encoding, axes in zip(encodings, panels.flat, strict=False):
        for model in _models(selected[selected["encoding"] == encoding]):
            at = [t for t in budgets if len(scores.values(dataset, (model, encoding), t))]
            mean = np.array([scores.mean(dataset, (model, encoding), t) for t in at])
            ends = np.array([bca_interval(scores.values(dataset, (model, encoding), t)) for t in at])
            reach = np.nan_to_num(np.abs(ends - mean[:, None])).T  # one run has no interval
            k = models.index(model)
            handles[_model(model)] = _line(axes, at, mean, reach, k, len(models), model)
            row = dataset, model, encoding
            printed = {t: paper.benchmark(*row, "rmse", t) or paper.ablation(*row, t) for t in at}
            theirs = {t: found.mean for t, found in printed.items() if found is not None}
            if theirs:
                x = _dodge(np.array(list(theirs)), k + 0.45, len(models))
                color, marker, _ = _style(_place(model))
                axes.plot(x, list(theirs.values()), ls="", marker=marker, mfc="white", mec=color, ms=6)
                handles["the paper"] = None
        _tokens_axis(axes, budgets)
        axes.set_title(_encoding(encoding), fontsize=9)
    for axes in panels[:, 0]:
        axes.set_ylabel("test RMSE", fontsize=9)
    _legend(figure, *_sorted_legend(handles, models))
    runs_of = sorted({len(of) for _, of in selected.groupby(CELL)})
    note = f"mean of {_range(runs_of)} selected runs and 95 % BCa interval"
    return _finish(figure, f"Error against tokens on {dataset}", protocol, note)


def pipeline(path: os.PathLike[str] | str) -> None:
    """The tokenizer at work, as in the paper 100 points and 12 tokens: a day and a little of a shipped series."""
    from ..data.shipped import SHIPPED, load_shipped
    from ..tokens.bspline import BSplineTokenizer

    about = SHIPPED["solar"]
    window = load_shipped("solar")["y"].to_numpy()[:100]
    title = f"100 samples as 12 tokens: solar irradiance in {about.unit}, every {about.cadence}"
    BSplineTokenizer(n_tokens=12, degree=3).plot(window, path, title=title)


# ---- what they share -------------------------------------------------------------------------------------------------


def _new_figure(width: float, height: float) -> Figure:
    """Wide enough for its title."""
    return new_figure(max(6.0, width), height)


def _base(value: float, _: Any) -> str:
    """Whole where it is; a short run hardly leaves the start."""
    return f"{value:,.0f}" if abs(value - round(value)) < 1e-6 else f"{value:,.2f}"


def _number(value: float, form: str) -> str:
    return EMPTY if math.isnan(value) else form.format(value)


def _range(counts: Sequence[int]) -> str:
    return f"{counts[0]}" if counts[0] == counts[-1] else f"{counts[0]} to {counts[-1]}"


def _dodge(tokens: Any, k: float, n: int) -> np.ndarray:
    """Beside each other instead of on top of each other."""
    return np.asarray(tokens, dtype=np.float64) * 2 ** (0.36 * ((k + 0.5) / n - 0.5))


def _line(axes: Axes, tokens: Any, values: Any, reach: Any, k: int, n: int, model: str) -> Any:
    color, marker, dash = _style(_place(model))
    return axes.errorbar(
        _dodge(tokens, k, n), values, np.asarray(reach), color=color, marker=marker, ls=dash, ms=5, capsize=3,
        lw=1.3, elinewidth=0.9, label=_model(model),
    )  # fmt: skip


def _tokens_axis(axes: Axes, budgets: Sequence[int]) -> None:
    axes.set_xscale("log")
    axes.set_xlim(budgets[0] / 1.3, budgets[-1] * 1.3)
    axes.set_xticks(budgets, [str(tokens) for tokens in budgets])
    axes.set_xticks([], minor=True)
    axes.set_xlabel("tokens", fontsize=9)
    axes.tick_params(labelsize=SMALL)
    axes.grid(axis="y", color=QUIET, lw=0.3)


def _sorted_legend(handles: dict[str, Any], models: Sequence[str]) -> tuple[list[Any], list[str]]:
    from matplotlib.lines import Line2D

    names = [name for name in map(_model, models) if name in handles]
    found = [handles[name] for name in names]
    if "the paper" in handles:
        names.append("the paper")
        found.append(Line2D([], [], ls="", marker="o", mfc="white", mec=INK, ms=6))
    return found, names


def _legend(figure: Figure, handles: Sequence[Any], names: Sequence[str]) -> None:
    figure.legend(handles, names, loc="outside right upper", frameon=False, fontsize=SMALL, handlelength=3.2)


def _finish(figure: Figure, title: str, protocol: Protocol, note: str) -> Figure:
    figure.suptitle(title, fontsize=11, x=0.02, ha="left")
    figure.supxlabel(f"protocol {protocol.short} · {note}", fontsize=SMALL, color=PRINT, x=0.02, ha="left")
    return figure


def _warn(text: str) -> None:
    warnings.warn(text, UserWarning, stacklevel=3)


def write_figures(
    store: os.PathLike[str] | str,
    out: os.PathLike[str] | str,
    formats: Sequence[str] = FORMATS,
    note: Callable[[str], None] = _warn,
) -> list[Path]:
    """Make the figures of a store and write each as NAME.png and NAME.svg; returns the paths.

    What the runs are not enough for is left out, and `note` is told why, a line each; without one it is a warning.
    """
    wrong = [f for f in formats if f not in FORMATS]
    if wrong or not formats:
        raise ValueError(f"`formats` must be some of {', '.join(FORMATS)}; got {list(formats)}.")
    protocol, runs = read_protocol(store), read(store)
    if not len(runs):
        raise ValueError(f"figures need runs; {Path(store)} has none yet. Run `bsat lab run` into it first.")
    datasets = _datasets(runs)
    jobs: dict[str, Callable[[pd.DataFrame, Protocol], Figure]] = {
        "boxes": boxes,
        **{f"errors-{name}": partial(errors, dataset=name) for name in datasets},
        **{f"bases-{name}": partial(bases, dataset=name) for name in datasets},
        "spread": spread,
        "memory": memory,
    }
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    paths = [out / f"pipeline.{form}" for form in formats]
    for path in paths:
        pipeline(path)
    for name, draw in jobs.items():
        try:
            figure = draw(runs, protocol)
        except FigureError as reason:
            note(f"{name} is not drawn: {reason}")
            continue
        for form in formats:
            paths.append(out / f"{name}.{form}")
            save(figure, paths[-1])
    return paths
