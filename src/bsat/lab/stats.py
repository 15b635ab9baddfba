"""The paper's tables of datasets, measured again: length, folds, and how hard each series is for splines."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ..data.catalog import CATALOG, HORIZON, LOOKBACK, Dataset, find_dataset, how_to_get, load, whereabouts
from ..data.statistics import curvature_norm, permutation_entropy, total_variation


@dataclass(frozen=True)
class Statistics:
    """A row of the table.

    Args:
        length: samples after preparation.
        folds: samples of train, val and test.
        total_variation: see `data.statistics`.
        curvature_norm: the L2 norm of the second differences.
        entropy: permutation entropy, order 3, delay 1.
    """

    length: int
    folds: tuple[int, int, int]
    total_variation: float
    curvature_norm: float
    entropy: float


PAPER = {
    "etth1": Statistics(17_420, (10_452, 3_484, 3_484), 10_699, 172, 0.92),
    "alabama-pv": Statistics(35_040, (21_024, 7_008, 7_008), 21_696, 223, 0.51),
    "ecl": Statistics(70_176, (42_106, 14_035, 14_035), 51_268, 713, 0.83),
}
"""As the paper prints them: "Full dataset specifications" (length, folds) and "Comparison of total variation, L2 norm
of second derivative, and permutation entropy for all datasets", both in its appendix. It does not give the order of the
permutation entropy."""


def measure(name: str, *, download: bool = False) -> Statistics:
    """The statistics of a dataset of the catalog."""
    y = load(name, download=download)["y"].to_numpy()
    train, val, test = (samples for samples, _ in find_dataset(name).folds().values())
    return Statistics(
        len(y), (train, val, test), total_variation(y), curvature_norm(y), permutation_entropy(y, order=3)
    )


def dataset_table(names: Sequence[str] = ()) -> dict[str, Any]:
    """Rows of what is at hand, with the paper's figures where it has some, and what is not at hand.

    With names, all of them must be at hand; without, it is whatever of the catalog is.
    """
    wanted = [find_dataset(name) for name in names] or list(CATALOG.values())
    rows, missing = [], []
    for dataset in dict.fromkeys(wanted):
        if not names and not whereabouts(dataset):
            missing.append({"name": dataset.name, "command": _command(dataset), "offline": how_to_get(dataset)})
            continue
        ours, paper = measure(dataset.name), PAPER.get(dataset.name)
        rows.append(
            {
                "name": dataset.name,
                "role": dataset.role,
                **_to_dict(ours),
                "windows": [windows for _, windows in dataset.folds().values()],
                "paper": None if paper is None else _to_dict(paper),
            }
        )
    return {"lookback": LOOKBACK, "horizon": HORIZON, "datasets": rows, "missing": missing}


def _command(dataset: Dataset) -> str | None:
    return f"bsat data get {dataset.name}" if dataset.addresses else None


def _to_dict(row: Statistics) -> dict[str, Any]:
    return {
        "length": row.length,
        "folds": list(row.folds),
        "total_variation": row.total_variation,
        "curvature_norm": row.curvature_norm,
        "permutation_entropy": row.entropy,
    }


# ---- as text ---------------------------------------------------------------------------------------------------------

NOTES = (
    "In brackets what the paper prints (appendix, tables of dataset specifications and of dataset analysis).",
    "Curvature: L2 norm of the second differences. Entropy: of permutations, order 3, delay 1.",
    f"Windows: lookback {LOOKBACK} and horizon {HORIZON} inside the fold, stride 1.",
)


def format_statistics(table: dict[str, Any], *, markdown: bool = False) -> str:
    """Two tables of at most 80 columns, or Markdown: the statistics, and the folds with their windows."""
    first = [("dataset", "samples", "total variation", "curvature", "entropy")]
    second = [("dataset", "train / val / test", "windows")]
    notes = list(NOTES)
    for row in table["datasets"]:
        paper = row["paper"] or {}
        first.append(
            (
                row["name"],
                f"{row['length']:,}",
                _beside(row, paper, "total_variation", "{:,.0f}"),
                _beside(row, paper, "curvature_norm", "{:,.0f}"),
                _beside(row, paper, "permutation_entropy", "{:.2f}"),
            )
        )
        folds, printed = row["folds"], paper.get("folds")
        agree = "" if printed is None else " (same)" if folds == printed else " (other)"
        second.append((row["name"], _slashed(folds) + agree, _slashed(row["windows"])))
        if printed is not None and folds != printed:
            notes.append(f"The paper's folds of {row['name']}: {_slashed(printed)}.")
    lay = _to_markdown if markdown else _to_text
    parts = [lay(first), lay(second), "\n".join(f"- {n}" if markdown else n for n in _wrap(notes, markdown))]
    if table["missing"]:
        mark = "`" if markdown else ""
        lines = [
            f"{'- ' if markdown else '  '}{m['name']}: {mark}{m['command']}{mark}"
            if m["command"]
            else f"{'- ' if markdown else '  '}{m['name']}: only by way of BSAT_DATA"
            for m in table["missing"]
        ]
        end = "" if markdown else "\n`bsat data list NAME` says how without a network."
        parts.append("Not at hand:" + ("\n\n" if markdown else "\n") + "\n".join(lines) + end)
    return "\n\n".join(parts)


def _beside(row: dict[str, Any], paper: dict[str, Any], key: str, form: str) -> str:
    return form.format(row[key]) + (f" ({form.format(paper[key])})" if key in paper else "")


def _slashed(numbers: Iterable[int]) -> str:
    return " / ".join(f"{n:,}" for n in numbers)


def _wrap(notes: Iterable[str], markdown: bool) -> list[str]:
    import textwrap

    return list(notes) if markdown else [line for note in notes for line in textwrap.wrap(note, 79)]


def _to_text(rows: Sequence[Sequence[str]]) -> str:
    """Names to the left, figures to the right, where those with brackets stand under those without."""
    columns = []
    for k, cells in enumerate(zip(*rows, strict=True)):
        if k:
            bare = [len(cell.partition(" (")[0]) for cell in cells]
            tail = max(len(cell) - b for cell, b in zip(cells, bare, strict=True))
            cells = (cells[0], *(c.ljust(b + tail) for c, b in zip(cells[1:], bare[1:], strict=True)))
        width = max(map(len, cells))
        columns.append([cell.rjust(width) if k else cell.ljust(width) for cell in cells])
    return "\n".join("  ".join(line).rstrip() for line in zip(*columns, strict=True))


def _to_markdown(rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], "| --- |" + " ---: |" * (len(rows[0]) - 1), *lines[1:]])
