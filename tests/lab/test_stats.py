"""The paper's table of datasets, measured again."""

import json
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from bsat.data import CATALOG, curvature_norm, load_shipped, permutation_entropy, total_variation
from bsat.data.catalog import File
from bsat.lab import PAPER, dataset_table, format_statistics, measure


@pytest.fixture(autouse=True)
def folders(tmp_path, monkeypatch):
    """A tiny ETTh1 at hand, and nothing else."""
    monkeypatch.setenv("BSAT_DATA", str(tmp_path))
    monkeypatch.setenv("BSAT_DATASETS", str(tmp_path / "cache"))
    table = pd.DataFrame({"date": pd.date_range("2016-07-01", periods=30, freq="h"), "OT": np.arange(30.0) % 4})
    table.to_csv(tmp_path / "ETTh1.csv", index=False, date_format="%Y-%m-%d %H:%M:%S")
    monkeypatch.setitem(CATALOG, "etth1", replace(CATALOG["etth1"], length=30, file=File("ETTh1.csv")))


@pytest.mark.parametrize("name", ["alabama-pv", "ecl"])
def test_folds_are_those_of_the_paper(name):
    assert tuple(samples for samples, _ in CATALOG[name].folds().values()) == PAPER[name].folds
    assert CATALOG[name].length == PAPER[name].length == sum(PAPER[name].folds)


def test_folds_of_the_real_etth1():
    real = replace(CATALOG["etth1"], length=17_420)
    assert tuple(samples for samples, _ in real.folds().values()) == PAPER["etth1"].folds


def test_measure():
    y = load_shipped("solar")["y"].to_numpy()
    got = measure("solar")
    assert got.length == len(y) == sum(got.folds)
    assert got.total_variation == total_variation(y)
    assert got.curvature_norm == curvature_norm(y)
    assert got.entropy == permutation_entropy(y, order=3)


def test_what_is_at_hand_and_what_is_not():
    table = dataset_table()
    assert [row["name"] for row in table["datasets"]] == ["etth1", "solar", "household"]
    assert {m["name"]: m["command"] for m in table["missing"]} == {
        "alabama-pv": "bsat data get alabama-pv",
        "ecl": "bsat data get ecl",
        "alabama-pv-34.05": "bsat data get alabama-pv-34.05",
        "ecl-mt200-hourly": None,
    }
    assert all("BSAT_DATA" in m["offline"] for m in table["missing"])


def test_tables_fit_a_terminal():
    table = dataset_table()
    longest = {**table["datasets"][2], "name": "ecl-mt200-hourly"}  # the widest of everything
    full = {"folds": [42_106, 14_035, 14_035], "windows": [41_195, 13_124, 13_124]}
    paper = {**table["datasets"][0]["paper"], "folds": full["folds"], "total_variation": 51_268}
    table["datasets"].append({**longest, **full, "paper": paper})
    lines = format_statistics(table).splitlines()
    assert max(map(len, lines)) <= 80
    assert any("(10,699)" in line and "(172)" in line and "(0.92)" in line for line in lines)
    assert any("(same)" in line for line in lines)
    assert "The paper's folds of etth1: 10,452 / 3,484 / 3,484." in lines  # the tiny one has others


def test_lab_stats(bsat):
    code, out, _ = bsat("lab", "stats", "ETTh1", "solar")
    assert code == 0
    assert "Not at hand" not in out
    assert "household" not in out
    code, out, _ = bsat("lab", "stats")
    assert "Not at hand:" in out
    assert "ecl: bsat data get ecl" in out
    code, out, _ = bsat("lab", "stats", "etth1", "--json")
    (row,) = json.loads(out)["datasets"]
    assert row["total_variation"] == 43.0
    assert row["paper"]["total_variation"] == 10_699
    code, out, _ = bsat("lab", "stats", "--markdown")
    assert "| etth1 | 30 | 43 (10,699) |" in out
    assert "| --- | ---: |" in out


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (["ecl"], "ecl is not at hand. `bsat data get ecl` downloads it"),
        (["solr"], "Did you mean solar?"),
        (["--json", "--markdown"], "cannot both be given"),
    ],
)
def test_mistakes(bsat, words, match):
    code, out, err = bsat("lab", "stats", *words)
    assert (code, out) == (2, "")
    assert match in err
    assert err.count("\n") == 1
