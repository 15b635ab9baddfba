"""The paper's tables, made of stored runs and nothing else.

A cell is about the runs that the protocol selects: of every experiment the 5 best of each seed by validation RMSE, 15
in all, scored on the test fold ("Reproducibility"). A table made twice of one store is the same to the byte.

Intervals and tests take these runs as independent, as the paper does. They are not quite: runs of one seed come from
one search, so that intervals are rather too narrow and p-values rather too small.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from ..atomic import replacing
from ..data.catalog import CATALOG
from . import paper
from .models import MODELS
from .protocol import BUDGETS, ENCODINGS, Protocol
from .runs import CELL, METRICS, STATUSES, read, read_naive, read_protocol, select

if TYPE_CHECKING:
    import pandas as pd

RESAMPLES, CONFIDENCE, SEED = 10_000, 0.95, 2025
"""Of the intervals. Every cell starts from the same seed, so that each can be recomputed by itself."""
BENCHMARKED = ("lpe", "l-rope+lpe")
"""The encodings of the paper's full benchmark."""
FORMATS = ("md", "tex", "csv")
EMPTY = "–"
LEAST = 8
"""Tested runs of a cell below which nothing is said about their spreads: quartiles of two runs each."""
PAPER_DATASETS = ("etth1", "alabama-pv", "ecl")

Row = tuple[str, str]
"""A model and an encoding."""


# ---- statistics ------------------------------------------------------------------------------------------------------


def _scipy_stats() -> Any:
    try:
        from scipy import stats
    except ImportError as error:
        raise ImportError("the laboratory's tables need scipy: pip install 'bsat[lab]'") from error
    return stats


def bca_interval(values: Any) -> tuple[float, float]:
    """95 % BCa interval of the mean, from 10,000 resamples (Full Benchmark): `scipy.stats.bootstrap`'s, seed 2025.

    One value has none, (NaN, NaN). Where BCa is not defined because all values are the same, or differ by rounding
    alone, it is from the smallest to the largest.
    """
    import warnings

    x = np.asarray(values, dtype=np.float64)
    if len(x) < 2:
        return math.nan, math.nan
    low, high = float(x.min()), float(x.max())
    if low == high:
        return low, high
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its DegenerateDataWarning, and the division by zero before it
        found = (
            _scipy_stats()
            .bootstrap(
                (x,),
                np.mean,
                n_resamples=RESAMPLES,
                confidence_level=CONFIDENCE,
                method="BCa",
                rng=np.random.default_rng(SEED),
            )
            .confidence_interval
        )
    if math.isfinite(found.low) and math.isfinite(found.high):
        return float(found.low), float(found.high)
    return low, high


def wilcoxon(a: Any, b: Any) -> float:
    """Two-sided p of the signed-rank test for pairs. Equal pairs are dropped; exact, or normal where differences tie.

    NaN without pairs, 1 if all are equal.
    """
    difference = np.asarray(a, dtype=np.float64) - np.asarray(b, dtype=np.float64)
    if not len(difference):
        return math.nan
    difference = difference[difference != 0]
    if not len(difference):
        return 1.0
    tied = len(np.unique(np.abs(difference))) < len(difference)
    return float(_scipy_stats().wilcoxon(difference, method="asymptotic" if tied else "exact").pvalue)


def rank_sum(a: Any, b: Any) -> float:
    """What that test adds up: ranks by size of the differences, with their signs. Negative says that `a` is smaller,
    whatever the sign of the median, which knows nothing of sizes."""
    difference = np.asarray(a, dtype=np.float64) - np.asarray(b, dtype=np.float64)
    difference = difference[difference != 0]
    return float(np.sign(difference) @ _scipy_stats().rankdata(np.abs(difference)))


def holm(p: Sequence[float]) -> list[float]:
    """Holm's correction: the i-th smallest of m is multiplied by m - i + 1, never falls below the one before, and stays
    at most 1. NaN is no test and does not count."""
    order = sorted((k for k in range(len(p)) if not math.isnan(p[k])), key=lambda k: p[k])
    out, least = [math.nan] * len(p), 0.0
    for i, k in enumerate(order):
        least = max(least, min(1.0, p[k] * (len(order) - i)))
        out[k] = least
    return out


def marks(values: Sequence[float]) -> list[str]:
    """ "best", "second" or nothing; smaller is better, and equals share a mark."""
    distinct = sorted({v for v in values if not math.isnan(v)})[:2]
    names = dict(zip(distinct, ("best", "second"), strict=False))
    return [names.get(v, "") for v in values]


def place(ours: float, low: float, high: float) -> str:
    """Where ours, rounded as printed, lies: "inside" the interval, or how far "below" (a smaller error) or "above" its
    nearer end."""
    if math.isnan(ours):
        return ""
    rounded = round(ours, 3)
    if rounded < round(low, 3):
        return f"below by {100 * (1 - ours / low):.1f} %"
    return f"above by {100 * (ours / high - 1):.1f} %" if rounded > round(high, 3) else "inside"


# ---- tables ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """What is printed, and how."""

    text: str
    mark: str = ""
    """ "best" is bold, "second" underlined"""


@dataclass(frozen=True)
class Table:
    """One table: printed cells for Markdown and LaTeX, and a frame of all numbers, unrounded, for CSV."""

    name: str
    title: str
    header: tuple[str, ...]
    rows: list[list[Cell]]
    frame: pd.DataFrame
    notes: list[str] = field(default_factory=list)
    rules: frozenset[int] = frozenset()
    """rows before which a line is drawn"""
    words: int = 1
    """so many columns on the left are words"""

    def to_markdown(self) -> str:
        """With the notes below as a list."""
        wrap = {"best": "**{}**", "second": "<u>{}</u>", "": "{}"}
        lines = ["| " + " | ".join(wrap[c.mark].format(c.text) for c in row) + " |" for row in self.rows]
        ruler = "|" + " --- |" * self.words + " ---: |" * (len(self.header) - self.words)
        head = f"| {' | '.join(self.header)} |"
        notes = "\n".join(f"- {note}" for note in self.notes)
        return "\n".join([f"### {self.title}", "", head, ruler, *lines, "", notes]) + "\n"

    def to_latex(self) -> str:
        """Needs the packages that its first line names; never wider or taller than a page."""
        wrap = {"best": r"\textbf{%s}", "second": r"\underline{%s}", "": "%s"}
        lines = []
        for k, row in enumerate(self.rows):
            if k in self.rules:
                lines.append(r"\midrule")
            lines.append(" & ".join(wrap[c.mark] % _latex(c.text) for c in row) + r" \\")
        return (
            "\n".join(
                [
                    r"% \usepackage{booktabs, adjustbox}",
                    r"\begin{table*}[htbp]",
                    r"\centering",
                    r"\small",
                    r"\begin{adjustbox}{max width=\textwidth, max totalheight=0.8\textheight}",
                    rf"\begin{{tabular}}{{{'l' * self.words}{'c' * (len(self.header) - self.words)}}}",
                    r"\toprule",
                    " & ".join(rf"\textbf{{{_latex(h)}}}" if h else "" for h in self.header) + r" \\",
                    r"\midrule",
                    *lines,
                    r"\bottomrule",
                    r"\end{tabular}",
                    r"\end{adjustbox}",
                    rf"\caption{{{_latex(self.title)}. {_latex(' '.join(self.notes))}}}",
                    rf"\label{{tab:bsat_{self.name.replace('-', '_')}}}",
                    r"\end{table*}",
                ]
            )
            + "\n"
        )

    def to_csv(self) -> str:
        """All numbers to the last digit, one line each, with the hash of the protocol."""
        return str(self.frame.to_csv(index=False, lineterminator="\n"))


_ESCAPES = {
    **{c: "\\" + c for c in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
    "–": "--",
    "<": r"$<$",
}


def _latex(text: str) -> str:
    return "".join(_ESCAPES.get(c, c) for c in text.replace("`", ""))


def label(model: str, encoding: str) -> str:
    """As the paper writes it: "BSAT L-RoPE LPE"."""
    words = encoding.replace("+", " ").upper().replace("ROPE", "RoPE")
    return f"{MODELS[model].label} {words}"


def by_budget(counts: Mapping[int, set[int]]) -> str:
    """Numbers that budgets of tokens have, in words: "200", or "40 (45 tokens) and 24 (90, 180 tokens)"."""
    spans: dict[str, list[str]] = {}
    for tokens, found in sorted(counts.items()):
        span = f"{min(found)} to {max(found)}" if len(found) > 1 else str(min(found))
        spans.setdefault(span, []).append(str(tokens))
    if len(spans) < 2:
        return next(iter(spans), "no")
    return " and ".join(f"{span} ({', '.join(budgets)} tokens)" for span, budgets in spans.items())


class Scores:
    """The test scores of the selected runs, by cell."""

    def __init__(self, runs: pd.DataFrame, protocol: Protocol) -> None:
        self.protocol = protocol
        self.trials = runs.groupby([*CELL, "seed"]).size()
        chosen = select(runs, protocol.selection)
        tested = chosen["test_rmse"].notna()
        self.selected = chosen[tested]
        self.waiting = chosen[~tested]
        self._groups = dict(iter(self.selected.groupby(CELL)))

    def values(self, dataset: str, row: Row, tokens: int, metric: str = "rmse") -> np.ndarray:
        """Of a cell, by seed and rank; empty if there are none."""
        group = self.group(dataset, row, tokens)
        return np.empty(0) if group is None else group[f"test_{metric}"].to_numpy(dtype=np.float64)

    def group(self, dataset: str, row: Row, tokens: int) -> pd.DataFrame | None:
        """The runs of a cell."""
        return self._groups.get((dataset, row[0], tokens, row[1]))

    def mean(self, dataset: str, row: Row, tokens: int, metric: str = "rmse") -> float:
        """NaN if there are no runs."""
        values = self.values(dataset, row, tokens, metric)
        return float(values.mean()) if len(values) else math.nan

    def deviation(self, dataset: str, row: Row, tokens: int) -> float:
        """Standard deviation of the RMSE, of a sample: n - 1 in the denominator (see `paper`)."""
        values = self.values(dataset, row, tokens)
        return float(values.std(ddof=1)) if len(values) > 1 else math.nan

    def datasets(self) -> list[str]:
        """The paper's first, in its order."""
        found = set(self.selected["dataset"])
        return [d for d in PAPER_DATASETS if d in found] + sorted(found - set(PAPER_DATASETS))

    def rows(self, encodings: Iterable[str] = ENCODINGS, dataset: str | None = None) -> list[Row]:
        """Models and encodings that there are, in the paper's order."""
        some = self.selected if dataset is None else self.selected[self.selected["dataset"] == dataset]
        found = set(zip(some["model"], some["encoding"], strict=True))
        wanted = set(encodings)
        return [(m, e) for m in MODELS for e in ENCODINGS if e in wanted and (m, e) in found]

    def budgets(self, dataset: str | None = None) -> list[int]:
        """That there are."""
        some = self.selected if dataset is None else self.selected[self.selected["dataset"] == dataset]
        return sorted({int(t) for t in some["tokens"]})

    def tasks(self) -> list[tuple[str, int]]:
        """Datasets with their budgets."""
        return [(dataset, tokens) for dataset in self.datasets() for tokens in self.budgets(dataset)]

    def _trials(self, rows: Sequence[Row], tasks: Sequence[tuple[str, int]]) -> str:
        """How many were searched: "40", or "40 (45 tokens) and 24 (90, 180 tokens)", or "24 to 40" if cells differ."""
        counts: dict[int, set[int]] = {}
        for cell, count in self.trials.items():
            dataset, model, tokens, encoding, _ = cast("tuple[str, str, int, str, int]", cell)
            if (model, encoding) in rows and (dataset, tokens) in tasks:
                counts.setdefault(tokens, set()).add(int(count))
        return by_budget(counts)

    def notes(self, rows: Sequence[Row], tasks: Sequence[tuple[str, int]]) -> list[str]:
        """The protocol, and which cells fall short of it."""
        p = self.protocol
        wanted, short = p.selection * len(p.seeds), []
        for row in rows:
            for dataset, tokens in tasks:
                n = len(self.values(dataset, row, tokens))
                w = self.waiting
                at = (w["dataset"] == dataset) & (w["tokens"] == tokens)
                untested = int((at & (w["model"] == row[0]) & (w["encoding"] == row[1])).sum())
                if untested or 0 < n < wanted:  # a cell without runs is a dash, which says enough
                    more = f", {untested} not yet tested" if untested else ""
                    short.append(f"{label(*row)} {dataset} {tokens} ({n}{more})")
        halving = "no halving" if p.grace is None else f"halving by {p.reduction} from epoch {p.grace}"
        notes = [
            f"Protocol `{p.short}`: horizon {p.horizon}, lookback {p.lookback}, space {p.space}, "
            f"{self._trials(rows, tasks)} trials a seed, at most {p.max_epochs} epochs, {halving}; test scores of the "
            f"{p.selection} best runs by validation RMSE of each seed ({', '.join(map(str, p.seeds))})."
        ]
        if short:
            notes.append(f"Fewer than {wanted} runs: {'; '.join(short)}.")
        return notes


def _frame(records: list[dict[str, Any]], protocol: Protocol) -> pd.DataFrame:
    import pandas as pd

    return pd.DataFrame(records).assign(protocol=protocol.hash)


def _rules(rows: Sequence[Row], each: int = 1) -> frozenset[int]:
    """Where another model begins."""
    return frozenset(k * each for k in range(1, len(rows)) if rows[k][0] != rows[k - 1][0])


def _printed(form: str, *values: float | None) -> str:
    return EMPTY if any(v is None or math.isnan(v) for v in values) else form.format(*values)


def benchmark_table(
    scores: Scores,
    dataset: str,
    encodings: Iterable[str] = BENCHMARKED,
    naive: Mapping[str, Mapping[str, float]] | None = None,
) -> Table:
    """Mean (95 % BCa interval) of four metrics over the budgets, beside the paper's; below, those of naive forecasts.

    Bold and underlined are the best and the second of a metric over all models and budgets, as in the paper.
    """
    rows, budgets = scores.rows(encodings, dataset), scores.budgets(dataset)
    records: list[dict[str, Any]] = []
    for row in rows:
        for metric in METRICS:
            for tokens in budgets:
                values = scores.values(dataset, row, tokens, metric)
                mean, (low, high) = scores.mean(dataset, row, tokens, metric), bca_interval(values)
                printed = paper.benchmark(dataset, *row, metric, tokens)
                theirs = printed or paper.Interval(math.nan, math.nan, math.nan)
                records.append(
                    {
                        "dataset": dataset,
                        "model": row[0],
                        "encoding": row[1],
                        "metric": metric,
                        "tokens": tokens,
                        "runs": len(values),
                        "mean": mean,
                        "low": low,
                        "high": high,
                        "paper_mean": theirs.mean,
                        "paper_low": theirs.low,
                        "paper_high": theirs.high,
                        "place": place(mean, theirs.low, theirs.high) if printed else "",
                    }
                )
    for metric in METRICS:
        of = [r for r in records if r["metric"] == metric]
        for record, mark in zip(of, marks([r["mean"] for r in of]), strict=True):
            record["mark"] = mark
    beside = any(not math.isnan(r["paper_mean"]) for r in records)
    header = ["model", "metric"]
    for tokens in budgets:
        header += [str(tokens), f"paper {tokens}"] if beside else [str(tokens)]
    cells: list[list[Cell]] = []
    for k in range(0, len(records), len(budgets) or 1):
        first = records[k]
        name = label(first["model"], first["encoding"]) if first["metric"] == METRICS[0] else ""
        line = [Cell(name), Cell(first["metric"].upper())]
        for r in records[k : k + len(budgets)]:
            line.append(Cell(_interval(r["mean"], r["low"], r["high"]), r["mark"]))
            if beside:
                where = f" {r['place']}" if r["place"] else ""
                line.append(Cell(_interval(r["paper_mean"], r["paper_low"], r["paper_high"]) + where))
        cells.append(line)
    rules = _rules(rows, len(METRICS))
    for name, own in (naive or {}).items():
        rules |= {len(cells)}
        for metric in METRICS:
            texts = [_printed("{:.3f}", own[metric]), *([EMPTY] if beside else [])] * len(budgets)
            cells.append([Cell(name if metric == METRICS[0] else ""), Cell(metric.upper()), *map(Cell, texts)])
            same = {"dataset": dataset, "model": name, "encoding": "", "metric": metric, "runs": 0, "mean": own[metric]}
            records += [{**same, "tokens": tokens} for tokens in budgets]
    notes = scores.notes(rows, [(dataset, tokens) for tokens in budgets])
    notes.append(
        f"Mean (95 % BCa interval, {RESAMPLES:,} resamples). Best bold, second underlined, per metric over all models "
        f"and budgets{'; naive forecasts take no part' if naive else ''}."
    )
    if beside:
        notes.append("Paper: what it prints, and whether our mean lies inside its interval, or how far beyond its end.")
    return Table(
        f"benchmark-{dataset}",
        f"Full benchmark on {dataset}",
        tuple(header),
        cells,
        _frame(records, scores.protocol),
        notes,
        rules,
        words=2,
    )


def _interval(mean: float, low: float, high: float) -> str:
    if math.isnan(mean):
        return EMPTY
    return f"{mean:.3f} ({low:.3f}/{high:.3f})" if not math.isnan(low) else f"{mean:.3f} ({EMPTY})"


def ablation_table(scores: Scores, dataset: str) -> Table:
    """RMSE, mean ± standard deviation, over encodings and tokenizers; best and second of each budget."""
    rows, budgets = scores.rows(dataset=dataset), scores.budgets(dataset)
    records: list[dict[str, Any]] = []
    for tokens in budgets:
        some: list[dict[str, Any]] = []
        for row in rows:
            mean, deviation = scores.mean(dataset, row, tokens), scores.deviation(dataset, row, tokens)
            printed = paper.ablation(dataset, *row, tokens)
            theirs = printed or paper.Spread(math.nan, math.nan)
            some.append(
                {
                    "dataset": dataset,
                    "model": row[0],
                    "encoding": row[1],
                    "tokens": tokens,
                    "runs": len(scores.values(dataset, row, tokens)),
                    "mean": mean,
                    "deviation": deviation,
                    "paper_mean": theirs.mean,
                    "paper_deviation": theirs.deviation,
                    "place": place(mean, theirs.mean - theirs.deviation, theirs.mean + theirs.deviation)
                    if printed
                    else "",
                }
            )
        for record, mark in zip(some, marks([r["mean"] for r in some]), strict=True):
            record["mark"] = mark
        records += some
    beside = any(not math.isnan(r["paper_mean"]) for r in records)
    header = ["model"]
    for tokens in budgets:
        header += [str(tokens), f"paper {tokens}"] if beside else [str(tokens)]
    cells = []
    for k, row in enumerate(rows):
        line = [Cell(label(*row))]
        for r in records[k :: len(rows)]:
            line.append(Cell(_spread(r["mean"], r["deviation"]), r["mark"]))
            if beside:
                where = f" {r['place']}" if r["place"] else ""
                line.append(Cell(_spread(r["paper_mean"], r["paper_deviation"]) + where))
        cells.append(line)
    notes = scores.notes(rows, [(dataset, tokens) for tokens in budgets])
    notes.append("RMSE, mean ± standard deviation (n - 1). Best bold, second underlined, per budget.")
    if beside:
        notes.append(
            "Paper: what it prints, and whether our mean lies inside its mean ± deviation, or how far below or above."
        )
    title = f"Ablation on {dataset}"
    frame = _frame(records, scores.protocol)
    return Table(f"ablation-{dataset}", title, tuple(header), cells, frame, notes, _rules(rows))


def _spread(mean: float, deviation: float) -> str:
    if math.isnan(mean):
        return EMPTY
    return f"{mean:.3f}±{deviation:.3f}" if not math.isnan(deviation) else f"{mean:.3f}±{EMPTY}"


def variation_table(scores: Scores) -> Table:
    """Coefficient of variation of the RMSE, standard deviation / mean, of all tasks.

    An average is over all tasks of the table; a model that lacks one has none.
    """
    rows, tasks = scores.rows(), scores.tasks()
    whole = set(tasks) == {(d, t) for d in PAPER_DATASETS for t in BUDGETS}
    records: list[dict[str, Any]] = []
    for row in rows:
        found, shared = [], {"model": row[0], "encoding": row[1]}
        for dataset, tokens in tasks:
            cv = scores.deviation(dataset, row, tokens) / scores.mean(dataset, row, tokens)
            found.append(cv)
            theirs = paper.variation(*row, dataset, tokens)
            runs = len(scores.values(dataset, row, tokens))
            records.append({**shared, "dataset": dataset, "tokens": tokens, "runs": runs, "cv": cv, "paper_cv": theirs})
        average = sum(found) / len(found)
        theirs = paper.average_variation(*row) if whole else None
        records.append(
            {**shared, "dataset": "average", "tokens": None, "runs": None, "cv": average, "paper_cv": theirs}
        )
    averages = [r for r in records if r["dataset"] == "average"]
    for record in records:
        record["mark"] = ""
    for record, mark in zip(averages, marks([r["cv"] for r in averages]), strict=True):
        record["mark"] = mark
    cells = []
    for k, row in enumerate(rows):
        line = [Cell(label(*row))]
        for r in records[k * (len(tasks) + 1) : (k + 1) * (len(tasks) + 1)]:
            beside = "" if r["paper_cv"] is None else f" ({100 * r['paper_cv']:.1f}%)"
            ours = _printed("{:.1f}%", None if r["cv"] is None else 100 * r["cv"])
            line.append(Cell(ours + beside, r["mark"]))
        cells.append(line)
    header = ("model", *(f"{dataset} {tokens}" for dataset, tokens in tasks), "average")
    frame = _frame(records, scores.protocol)
    if len(frame):
        frame = frame.astype({"tokens": "Int64", "runs": "Int64", "paper_cv": "float64"})
    notes = [
        *scores.notes(rows, tasks),
        "Standard deviation (n - 1) / mean of the RMSE; lower is more stable. In brackets what the paper prints.",
    ]
    return Table("variation", "Coefficient of variation", header, cells, frame, notes, _rules(rows))


def help_table(scores: Scores) -> Table | None:
    """How often adaptive tokens needed help: shares of test windows with a ridge fallback, and with a coefficient at
    its bound; means over the selected runs. None if no run tells."""
    rows, tasks = [row for row in scores.rows() if MODELS[row[0]].adaptive], scores.tasks()
    records: list[dict[str, Any]] = []
    for row in rows:
        for dataset, tokens in tasks:
            group = scores.group(dataset, row, tokens)
            rates = dict.fromkeys(("fallback", "clipped"), math.nan)
            if group is not None:
                rates = {n: float(group[f"test_{n}"].mean()) if f"test_{n}" in group else math.nan for n in rates}
            records.append({"model": row[0], "encoding": row[1], "dataset": dataset, "tokens": tokens, **rates})
    if all(math.isnan(r["fallback"]) for r in records):
        return None
    each = len(tasks)
    cells = [
        [Cell(label(*row))]
        + [Cell(_printed("{:.1%} / {:.1%}", r["fallback"], r["clipped"])) for r in records[k * each : (k + 1) * each]]
        for k, row in enumerate(rows)
    ]
    notes = [
        *scores.notes(rows, tasks),
        "Shares of test windows whose fit fell back on the ridge / with a coefficient clipped at its bound.",
    ]
    header = ("model", *(f"{dataset} {tokens}" for dataset, tokens in tasks))
    frame = _frame(records, scores.protocol)
    return Table("help", "Fallbacks and clipped coefficients", header, cells, frame, notes, _rules(rows))


def effort_table(runs: pd.DataFrame, protocol: Protocol) -> Table:
    """What it took: trials by how they ended, and minutes of training on whatever trained them; why trials failed."""
    records: list[dict[str, Any]] = []
    for cell, of in [*runs.groupby(["dataset", "tokens"]), (("all", None), runs)]:
        dataset, tokens = cast("tuple[str, int | None]", cell)
        counts = {status: int((of["status"] == status).sum()) for status in STATUSES}
        minutes = float(of["seconds"].sum()) / 60
        devices = ", ".join(sorted(set(of["device"]) - {""}))
        records.append(
            {"dataset": dataset, "tokens": tokens, "trials": len(of), **counts, "minutes": minutes, "devices": devices}
        )
    cells = [
        [Cell("" if v is None else f"{v:.1f}" if isinstance(v, float) else str(v)) for v in r.values()] for r in records
    ]
    failed = runs[runs["status"] == "failed"]
    reasons = [f"{reason} ({count})" for reason, count in sorted(failed["reason"].value_counts().items())]
    engines = runs["engine"][runs["engine"] != ""].value_counts().sort_index()
    notes = [
        f"Protocol `{protocol.short}`. Minutes are those of training alone; a trial that trained in a pack counts its "
        "share, and processes that shared a device count what they waited for each other.",
        f"Engines: {'; '.join(f'{name} ({count:,} trials)' for name, count in engines.items()) or 'not known'}.",
        f"Failed: {'; '.join(reasons) or 'none'}.",
    ]
    frame = _frame(records, protocol).astype({"tokens": "Int64"})
    return Table("effort", "What it took", tuple(records[0]), cells, frame, notes, frozenset({len(records) - 1}))


SHAPED = ("learning_rate", "n_layers", "d_model")
"""What a run's spread of bases and its error both hang on."""


def spread_table(runs: pd.DataFrame, protocol: Protocol) -> Table | None:
    """Whether runs whose learned bases spread wider have smaller errors (appendix, Learned RoPE Base Heatmap).

    Spearman's rank correlation of spread and test RMSE over all tested runs of a cell; and the partial one, given what
    both hang on: a larger learning rate moves the bases further and trains better, so that the first alone does not say
    what the spread is good for. None without cells of `LEAST` tested runs.
    """
    records: list[dict[str, Any]] = []
    for cell, of in runs.dropna(subset=["spread", "test_rmse"]).groupby(CELL, sort=False):
        if len(of) < LEAST:
            continue
        given = np.array([[c.get(name, math.nan) for name in SHAPED] for c in of["configuration"]], dtype=np.float64)
        spread, rmse = of["spread"].to_numpy(float), of["test_rmse"].to_numpy(float)
        records.append(
            {
                **_named(cell, of),
                "median": float(np.median(spread)),
                "correlation": rank_correlation(spread, rmse),
                "partial": rank_correlation(spread, rmse, given),
            }
        )
    if not records:
        return None
    cells = _cells_of_runs(records, {"median": "{:,.1f}", "correlation": "{:+.2f}", "partial": "{:+.2f}"})
    header = ("model", "dataset", "tokens", "runs", "median spread", "correlation", "partial")
    notes = [
        f"Protocol `{protocol.short}`. All runs with test scores and heads of more than one pair, which alone would "
        "turn at frequency 1 whatever its base; the spread is the largest less the smallest base at the end of a run.",
        "Correlation: Spearman's, of spread and test RMSE; negative says that wider is better. Partial: the same with "
        "the ranks of learning rate, layers and width taken out of both.",
    ]
    title = "Spread of learned bases and test error"
    return Table("spread", title, header, cells, _frame(records, protocol), notes, words=2)


def selection_table(runs: pd.DataFrame, protocol: Protocol) -> Table | None:
    """What selecting by the validation fold costs: the selected runs beside those that selecting by the test fold would
    have taken, as many of each seed. For cells of which all runs were tested; None without any of `LEAST` runs."""
    records: list[dict[str, Any]] = []
    for cell, of in runs[runs["status"] != "failed"].groupby(CELL, sort=False):
        if len(of) < LEAST or of["test_rmse"].isna().any():
            continue
        best = of.sort_values("test_rmse").groupby("seed").head(protocol.selection)
        third = of.nsmallest(len(of) // 3, "val_rmse")
        records.append(
            {
                **_named(cell, of),
                "correlation": rank_correlation(of["val_rmse"].to_numpy(float), of["test_rmse"].to_numpy(float)),
                "third": rank_correlation(third["val_rmse"].to_numpy(float), third["test_rmse"].to_numpy(float)),
                "selected": float(select(of, protocol.selection)["test_rmse"].mean()),
                "best": float(best["test_rmse"].mean()),
                "median": float(of["test_rmse"].median()),
            }
        )
    if not records:
        return None
    errors = dict.fromkeys(("selected", "best", "median"), "{:.3f}")
    cells = _cells_of_runs(records, {"correlation": "{:+.2f}", "third": "{:+.2f}", **errors})
    header = ("model", "dataset", "tokens", "runs", "correlation", "best third", "selected", "by test", "all")
    notes = [
        f"Protocol `{protocol.short}`. Cells of which every run was scored on the test fold; test RMSE.",
        "Correlation: Spearman's, of validation and test RMSE; best third: the same of the best third by validation.",
        "Selected: mean of the runs that validation selected. By test: mean of the "
        f"{protocol.selection} best of each seed on the test fold itself, which no honest selection "
        "can promise. All: the median run.",
    ]
    return Table(
        "selection", "What selection by validation costs", header, cells, _frame(records, protocol), notes, words=2
    )


def _named(cell: Any, runs: pd.DataFrame) -> dict[str, Any]:
    """What a record of the runs of a cell begins with."""
    dataset, model, tokens, encoding = cell
    return {"dataset": dataset, "model": model, "encoding": encoding, "tokens": tokens, "runs": len(runs)}


def _cells_of_runs(records: list[dict[str, Any]], formats: Mapping[str, str]) -> list[list[Cell]]:
    """A row for each record of the runs of a cell; puts the records into the order of the tables."""
    place = {name: k for k, name in enumerate(MODELS)}
    records.sort(key=lambda r: (r["dataset"], place[r["model"]], ENCODINGS.index(r["encoding"]), r["tokens"]))
    cells = []
    for r in records:
        numbers = [_printed(form, r[name]) for name, form in formats.items()]
        words = (label(r["model"], r["encoding"]), r["dataset"], str(r["tokens"]), str(r["runs"]), *numbers)
        cells.append([Cell(text) for text in words])
    return cells


def rank_correlation(a: np.ndarray, b: np.ndarray, given: np.ndarray | None = None) -> float:
    """Spearman's; with `given` (n, k), after its ranks are taken out of both by least squares. NaN if one is
    constant."""
    rank = _scipy_stats().rankdata
    x, y = rank(a), rank(b)
    basis = np.ones((len(x), 1)) if given is None else np.column_stack([np.ones(len(x)), rank(given, axis=0)])
    x, y = (v - basis @ np.linalg.lstsq(basis, v, rcond=None)[0] for v in (x, y))
    size = math.sqrt(float(x @ x) * float(y @ y))
    return float(x @ y) / size if size > 1e-9 * len(x) ** 3 and np.isfinite(basis).all() else math.nan


def rank_table(scores: Scores, encodings: Iterable[str] = BENCHMARKED) -> Table | None:
    """Ranks by mean RMSE in every task (dataset and budget) of a `full_grid`, and averages; None if it is empty."""
    rows, tasks = full_grid(scores.rows(encodings), scores.tasks(), lambda row, task: _has(scores, row, task))
    if not rows:
        return None
    ranks = [_ranks([scores.mean(dataset, row, tokens) for row in rows]) for dataset, tokens in tasks]
    averages = _averages(ranks, len(rows))
    tops = marks(averages)
    records, cells = [], []
    for k, row in enumerate(rows):
        own = [some[k] for some in ranks]
        cells.append([Cell(label(*row)), *(Cell(f"{r:g}") for r in own), Cell(f"{averages[k]:.2f}", tops[k])])
        for (dataset, tokens), r in zip(tasks, own, strict=True):
            of = {"model": row[0], "encoding": row[1], "dataset": dataset, "tokens": tokens}
            records.append({**of, "rank": r, "average": averages[k], "mark": tops[k]})
    notes = [
        *scores.notes(rows, tasks),
        f"Rank by mean RMSE among these {len(rows)}; equals share a rank. Tasks that lack one of them, or models that "
        "lack a task, are left out where that leaves more to compare.",
    ]
    header = ("model", *(f"{dataset} {tokens}" for dataset, tokens in tasks), "average")
    return Table("ranks", "Ranks", header, cells, _frame(records, scores.protocol), notes, _rules(rows))


def paper_rank_table(scores: Scores) -> Table | None:
    """Our ranks beside those of the paper's means, among the models that it has; None if no task has two of them.

    The paper chooses by ranks but does not print them. A dataset that stands for one of the paper's is compared with
    that one, in ranks alone.
    """

    def printed(row: Row, task: tuple[str, int]) -> float:
        found = paper.benchmark(_original(task[0]), *row, "rmse", task[1])
        return math.nan if found is None else found.mean

    def both(row: Row, task: tuple[str, int]) -> bool:
        return _has(scores, row, task) and not math.isnan(printed(row, task))

    rows, tasks = full_grid(scores.rows(BENCHMARKED), scores.tasks(), both)
    if not rows:
        return None
    ours = [_ranks([scores.mean(dataset, row, tokens) for row in rows]) for dataset, tokens in tasks]
    theirs = [_ranks([printed(row, task) for row in rows]) for task in tasks]
    average, paper_average = _averages(ours, len(rows)), _averages(theirs, len(rows))
    records, cells = [], []
    for k, row in enumerate(rows):
        own = [(a[k], b[k]) for a, b in zip(ours, theirs, strict=True)]
        last = f"{average[k]:.2f} ({paper_average[k]:.2f})"
        cells.append([Cell(label(*row)), *(Cell(f"{a:g} ({b:g})") for a, b in own), Cell(last)])
        for (dataset, tokens), (a, b) in zip(tasks, own, strict=True):
            of = {"model": row[0], "encoding": row[1], "dataset": dataset, "tokens": tokens}
            records.append({**of, "rank": a, "paper_rank": b, "average": average[k], "paper_average": paper_average[k]})
    notes = [
        *scores.notes(rows, tasks),
        f"Rank by mean RMSE among these {len(rows)}; in brackets that of the means which the paper prints.",
    ]
    others = [f"{d} for its {_original(d)}" for d in dict(tasks) if _original(d) != d]
    if others:
        notes.append(f"Another series stands for the paper's: {', '.join(others)}.")
    header = ("model", *(f"{dataset} {tokens}" for dataset, tokens in tasks), "average")
    frame = _frame(records, scores.protocol)
    return Table("ranks-paper", "Ranks beside the paper's", header, cells, frame, notes, _rules(rows))


def full_grid(
    rows: Sequence[Row], tasks: Sequence[tuple[str, int]], has: Callable[[Row, tuple[str, int]], bool]
) -> tuple[list[Row], list[tuple[str, int]]]:
    """Rows, at least two, and tasks of which all pairs are there: as many pairs as can be had by taking the rows that
    one task has, or that two have in common; of as many, the one with more tasks."""
    of_task = {task: frozenset(row for row in rows if has(row, task)) for task in tasks}
    best: tuple[list[Row], list[tuple[str, int]]] = [], []
    for some in dict.fromkeys(a & b for a in of_task.values() for b in of_task.values() if len(a & b) > 1):
        chosen = [task for task in tasks if some <= of_task[task]]
        if (len(some) * len(chosen), len(chosen)) > (len(best[0]) * len(best[1]), len(best[1])):
            best = [row for row in rows if row in some], chosen
    return best


def _has(scores: Scores, row: Row, task: tuple[str, int]) -> bool:
    return len(scores.values(task[0], row, task[1])) > 0


def _original(dataset: str) -> str:
    """Which of the paper's a dataset stands for, or itself."""
    found = CATALOG.get(dataset)
    return (found and found.stands_for) or dataset


def _ranks(means: Sequence[float]) -> list[float]:
    """From 1, the least; equals share theirs."""
    return [1 + sum(other < m for other in means) + (list(means).count(m) - 1) / 2 for m in means]


def _averages(ranks: Sequence[Sequence[float]], count: int) -> list[float]:
    return [sum(some[k] for some in ranks) / len(ranks) for k in range(count)]


def wilcoxon_table(scores: Scores, dataset: str, encodings: Iterable[str] = BENCHMARKED) -> Table:
    """Paired tests between all models of a dataset, at each budget; the paper has none."""
    rivals = list(combinations(scores.rows(encodings, dataset), 2))
    return _paired_table(scores, dataset, rivals, f"wilcoxon-{dataset}", f"Paired tests on {dataset}")


def encoding_wilcoxon_table(scores: Scores, dataset: str) -> Table:
    """The same between the encodings of each model."""
    rivals = [(a, b) for a, b in combinations(scores.rows(dataset=dataset), 2) if a[0] == b[0]]
    title = f"Paired tests of encodings on {dataset}"
    return _paired_table(scores, dataset, rivals, f"wilcoxon-encodings-{dataset}", title)


def _paired_table(scores: Scores, dataset: str, rivals: Sequence[tuple[Row, Row]], name: str, title: str) -> Table:
    """A pair are the runs of a seed with the same rank by validation RMSE; Holm's correction is over the table."""
    import pandas as pd

    rows, budgets = list(dict.fromkeys(row for pair in rivals for row in pair)), scores.budgets(dataset)
    records: list[dict[str, Any]] = []
    sums: list[float] = []
    for tokens in budgets:
        for a, b in rivals:
            left, right = scores.group(dataset, a, tokens), scores.group(dataset, b, tokens)
            if left is None or right is None:
                continue
            pairs = pd.merge(left, right, on=["seed", "rank"], suffixes=("_a", "_b"))
            x, y = pairs["test_rmse_a"].to_numpy(float), pairs["test_rmse_b"].to_numpy(float)
            sums.append(rank_sum(x, y))
            records.append(
                {
                    "dataset": dataset,
                    "tokens": tokens,
                    "model_a": a[0],
                    "encoding_a": a[1],
                    "model_b": b[0],
                    "encoding_b": b[1],
                    "pairs": len(pairs),
                    "difference": float(np.median(x - y)) if len(pairs) else math.nan,
                    "p": wilcoxon(x, y),
                }
            )
    for record, corrected in zip(records, holm([r["p"] for r in records]), strict=True):
        record["p_holm"] = corrected
    cells, rules = [], set()
    for k, r in enumerate(records):
        if k and r["tokens"] != records[k - 1]["tokens"]:
            rules.add(k)
        first, second = label(r["model_a"], r["encoding_a"]), label(r["model_b"], r["encoding_b"])
        better = (first if sums[k] < 0 else second) if r["p_holm"] < 0.05 else EMPTY
        numbers = [str(r["pairs"]), _printed("{:+.3f}", r["difference"]), _p(r["p"]), _p(r["p_holm"]), better]
        cells.append([Cell(text) for text in (first, second, str(r["tokens"]), *numbers)])
    header = ("A", "B", "tokens", "pairs", "median A - B", "p", "p (Holm)", "better at 5 %")
    notes = [
        *scores.notes(rows, [(dataset, tokens) for tokens in budgets]),
        "Wilcoxon's signed-rank test on the RMSE, two-sided; pairs are runs of the same seed and rank by validation "
        f"RMSE. Holm's correction over the {sum(not math.isnan(r['p']) for r in records)} tests of this table. Runs of "
        "a seed come from one search, and searches share their random points, so that p is rather too small.",
    ]
    frame = _frame(records, scores.protocol)
    return Table(name, title, header, cells, frame, notes, frozenset(rules), words=2)


def _p(p: float) -> str:
    return EMPTY if math.isnan(p) else "<0.0001" if p < 1e-4 else f"{p:.4f}"


def make_tables(
    runs: pd.DataFrame, protocol: Protocol, naive: Mapping[str, Mapping[str, Mapping[str, float]]] | None = None
) -> list[Table]:
    """All that the runs are enough for; `naive` is what `runs.read_naive` finds."""
    scores = Scores(runs, protocol)
    if not len(scores.selected):
        waiting = len(scores.waiting)
        raise ValueError(
            f"tables need runs with test scores; got {len(runs)} runs, {waiting} of them selected, none tested. "
            "`bsat lab run` scores what it selects when its search has ended."
        )
    tables = []
    for dataset in scores.datasets():
        rows = scores.rows(BENCHMARKED, dataset)
        if rows:
            tables.append(benchmark_table(scores, dataset, naive=(naive or {}).get(dataset)))
        encodings = {encoding for _, encoding in scores.rows(dataset=dataset)}
        if len(encodings) > 1:
            tables.append(ablation_table(scores, dataset))
        if len(rows) > 1:
            tables.append(wilcoxon_table(scores, dataset))
        if encodings - set(BENCHMARKED):
            tables.append(encoding_wilcoxon_table(scores, dataset))
    tables.append(variation_table(scores))
    more = help_table(scores), selection_table(runs, protocol), spread_table(runs, protocol)
    tables += [table for table in more if table is not None]
    tables.append(effort_table(runs, protocol))
    tables += [table for table in (rank_table(scores), paper_rank_table(scores)) if table is not None]
    return tables


def write_tables(
    store: os.PathLike[str] | str, out: os.PathLike[str] | str, formats: Sequence[str] = FORMATS
) -> list[Path]:
    """Make the tables of a store and write each as NAME.md, NAME.tex and NAME.csv; returns the paths."""
    wrong = [f for f in formats if f not in FORMATS]
    if wrong or not formats:
        raise ValueError(f"`formats` must be some of {', '.join(FORMATS)}; got {list(formats)}.")
    tables = make_tables(read(store, curves=False), read_protocol(store), read_naive(store))
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    paths = []
    for table in tables:
        texts = {"md": table.to_markdown, "tex": table.to_latex, "csv": table.to_csv}
        for form in formats:
            path = out / f"{table.name}.{form}"
            with replacing(path) as temporary:
                temporary.write_text(texts[form](), encoding="utf-8", newline="\n")
            paths.append(path)
    return paths
