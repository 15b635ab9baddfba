"""The paper's figures, transcribed: they must agree with each other as only the right ones do."""

from itertools import product
from math import sqrt
from pathlib import Path

import pytest

from bsat.lab import paper

DATASETS, BUDGETS, METRICS = ("etth1", "alabama-pv", "ecl"), (45, 90, 180), ("rmse", "mae", "mse", "smape")
ROWS = tuple(product(("bsat", "uds", "patchtst"), ("lpe", "l-rope+lpe")))
CELLS = tuple(product(DATASETS, ROWS, BUDGETS))
TEX = [p / "shared" / "paper" / "bsat-paper.tex" for p in Path(__file__).resolve().parents]


def test_picked_figures():
    assert paper.benchmark("etth1", "bsat", "l-rope+lpe", "rmse", 45) == (2.942, 2.910, 2.990)
    assert paper.benchmark("alabama-pv", "uds", "lpe", "smape", 180) == (148.098, 148.066, 148.138)
    assert paper.benchmark("ecl", "patchtst", "l-rope+lpe", "mae", 180) == (6.577, 6.573, 6.583)
    assert paper.ablation("etth1", "bsat", "l-rope", 90) == (3.128, 0.341)
    assert paper.variation("patchtst", "lpe", "alabama-pv", 45) == pytest.approx(0.191)
    assert paper.average_variation("bsat", "l-rope+lpe") == pytest.approx(0.022)


def test_nothing_where_the_paper_has_nothing():
    assert paper.benchmark("solar", "bsat", "lpe", "rmse", 45) is None
    assert paper.benchmark("etth1", "bsat", "f-rope", "rmse", 45) is None
    assert paper.benchmark("etth1", "bsat", "lpe", "rmse", 60) is None
    assert paper.ablation("ecl", "bsat", "lpe", 45) is None
    assert paper.variation("uds", "l-rope", "etth1", 45) is None
    assert paper.average_variation("uds", "l-rope") is None


@pytest.mark.parametrize(("dataset", "row", "tokens"), CELLS)
def test_means_lie_inside_their_intervals(dataset, row, tokens):
    for metric in METRICS:
        mean, low, high = paper.benchmark(dataset, *row, metric, tokens)
        assert low < mean < high


def variation_agrees(dataset, row, tokens, denominator):
    """MSE - RMSE² is the variance over the 15 runs; is it, up to rounding, the variation that the paper prints?"""
    rmse, mse = (paper.benchmark(dataset, *row, metric, tokens).mean for metric in ("rmse", "mse"))
    slack = 0.0005 * (1 + 2 * rmse) * 1.001  # both are rounded to three digits
    low, high = (sqrt(max(0.0, mse - rmse**2 + s) * 15 / denominator) / rmse for s in (-slack, slack))
    return low - 0.00051 <= paper.variation(*row, dataset, tokens) <= high + 0.00051


def test_deviations_are_those_of_a_sample_of_fifteen():
    """14 in the denominator agrees with all 54 cells, 15 does not with nine. A wrong digit would show here as well."""
    assert [sum(variation_agrees(*cell, denominator) for cell in CELLS) for denominator in (14, 15)] == [54, 45]


@pytest.mark.parametrize("tokens", BUDGETS)
def test_the_ablation_agrees_with_the_benchmark(tokens):
    for row in ROWS:
        mean, deviation = paper.ablation("etth1", *row, tokens)
        assert mean == paper.benchmark("etth1", *row, "rmse", tokens).mean
        assert deviation / mean == pytest.approx(paper.variation(*row, "etth1", tokens), abs=0.00071)


def test_average_variation():
    for name, row in paper.figures()["cv"].items():
        nine = [row[d][str(t)] for d in DATASETS for t in BUDGETS]
        assert row["average"] == pytest.approx(sum(nine) / 9, abs=0.1001), name
