"""The figures that the paper prints, as data: `paper.json`, transcribed from the tables of its appendix.

Reinwardt, M., Eichelbeck, M., Althoff, M.: BSAT: B-Spline Adaptive Tokenizer for Long-Term Time Series Forecasting.
"Full benchmark results" on ETTh1, Alabama PV and ECL (mean and 95 % BCa interval), "Ablation results for RMSE on
ETTh1" (mean ± standard deviation), "Coefficient of Variation". It prints no average ranks; ours of its figures are
computed from the benchmark.

The paper does not say which standard deviation it takes. Its own figures do: MSE - RMSE² of the benchmark is the
variance over the 15 runs, and the ablation's deviations are those of a sample, with 14 in the denominator.
"""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple


class Interval(NamedTuple):
    """A mean with the ends of its interval."""

    mean: float
    low: float
    high: float


class Spread(NamedTuple):
    """A mean with the standard deviation."""

    mean: float
    deviation: float


@cache
def figures() -> dict[str, Any]:
    """All of them, as in the file."""
    content: dict[str, Any] = json.loads(files(__package__).joinpath("paper.json").read_text(encoding="utf-8"))
    return content


def benchmark(dataset: str, model: str, encoding: str, metric: str, tokens: int) -> Interval | None:
    """Of the full benchmark; None where the paper has nothing."""
    row = figures()["benchmark"].get(dataset, {}).get(f"{model} {encoding}", {})
    found = row.get(metric, {}).get(str(tokens))
    return None if found is None else Interval(*found)


def ablation(dataset: str, model: str, encoding: str, tokens: int) -> Spread | None:
    """RMSE of the ablation, which the paper has for ETTh1."""
    found = figures()["ablation"].get(dataset, {}).get(f"{model} {encoding}", {}).get(str(tokens))
    return None if found is None else Spread(*found)


def variation(model: str, encoding: str, dataset: str, tokens: int) -> float | None:
    """Coefficient of variation of the RMSE, as a fraction."""
    found = figures()["cv"].get(f"{model} {encoding}", {}).get(dataset, {}).get(str(tokens))
    return None if found is None else found / 100


def average_variation(model: str, encoding: str) -> float | None:
    """Of the nine tasks (three datasets, three budgets), as a fraction."""
    found = figures()["cv"].get(f"{model} {encoding}", {}).get("average")
    return None if found is None else found / 100
