"""The tables, and that every cell can be computed again."""

import builtins
import csv
import math
import os
import re
import shutil
import subprocess
from io import StringIO
from itertools import combinations, product
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from bsat.lab import Experiment, Protocol, Run, Store, make_tables, paper, read, write_tables
from bsat.lab.runs import METRICS
from bsat.lab.tables import (
    Cell,
    Scores,
    Table,
    bca_interval,
    benchmark_table,
    full_grid,
    holm,
    marks,
    paper_rank_table,
    place,
    rank_correlation,
    rank_sum,
    selection_table,
    wilcoxon,
    wilcoxon_table,
)

PROTOCOL = Protocol()
LEVEL = {"etth1": 3.0, "alabama-pv": 4.4, "solar": 40.0}
ENCODINGS = {
    "etth1": ("lpe", "f-rope", "l-rope", "f-rope+lpe", "l-rope+lpe"),
    "alabama-pv": ("lpe", "l-rope+lpe"),
    "solar": ("l-rope+lpe",),
}
MODELS = ("bsat", "uds", "patchtst")


def fill(folder, reverse=False):
    """Seven trials a seed; the five best by validation are tested, and one more for the spread."""
    rng = np.random.default_rng(5)
    cells = [(d, m, t, e) for d in LEVEL for m in MODELS for t in (45, 90, 180) for e in ENCODINGS[d]]
    jobs = []
    for dataset, model, tokens, encoding in cells:
        e = Experiment(dataset, model, tokens, encoding, 7, PROTOCOL)
        level = LEVEL[dataset] * rng.uniform(0.97, 1.03)
        for seed in PROTOCOL.seeds:
            val = level * rng.uniform(0.9, 1.1, 7)
            for trial in range(7):
                jobs.append((e, seed, trial, val[trial], level * rng.uniform(0.95, 1.05), np.argsort(val)[:6]))
    for e, seed, trial, val, test, best in jobs[::-1] if reverse else jobs:
        with_status = {"status": "failed", "reason": "diverged"} if trial == 6 else {"status": "finished"}
        yield Run(experiment=e, seed=seed, trial=trial, configuration={"x": trial}, val={"rmse": val}, **with_status)
        if trial in best and trial != 6:
            yield e, seed, trial, {"rmse": test, "mae": 0.8 * test, "mse": test**2, "smape": 10 * test}


def make_store(folder, reverse=False, skip=lambda run: False):
    with Store(folder, PROTOCOL) as store:
        for what in fill(folder, reverse):
            if isinstance(what, Run):
                store.add(what)
            elif not skip(what):
                store.add_test(*what)
    return folder


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    patch = pytest.MonkeyPatch()
    patch.setattr(os, "fsync", lambda handle: None)
    yield make_store(tmp_path_factory.mktemp("store"))
    patch.undo()


@pytest.fixture(scope="module")
def tables(store):
    return {table.name: table for table in make_tables(read(store), PROTOCOL)}


@pytest.fixture(scope="module")
def chosen(store):
    """By the ten lines of pandas in the docs, from the files as they stand."""
    page = (Path(__file__).parents[2] / "docs" / "lab.md").read_text(encoding="utf-8")
    _, script = re.findall(r"```python\n(.*?)```", page, re.S)
    names = {"folder": store}
    exec(script, names)
    chosen = names["chosen"]
    assert (names["cells"].xs("count", axis=1, level=1) == 15).all(axis=None)
    return chosen.assign(rank=chosen.groupby(["dataset", "model", "tokens", "encoding", "seed"]).cumcount() + 1)


def test_the_example_of_the_docs_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[2] / "docs" / "lab.md").read_text(encoding="utf-8")
    exec(re.findall(r"```python\n(.*?)```", page, re.S)[0], {})
    assert "2.950" in (tmp_path / "tables" / "benchmark-etth1.md").read_text(encoding="utf-8")


# ---- statistics ------------------------------------------------------------------------------------------------------


def test_bca_is_scipys():
    x = np.random.default_rng(1).gamma(2.0, size=15)
    rng = np.random.default_rng(2025)
    want = stats.bootstrap((x,), np.mean, n_resamples=10_000, confidence_level=0.95, method="BCa", rng=rng)
    assert bca_interval(x) == tuple(want.confidence_interval)
    assert bca_interval(x) == bca_interval(list(x))


def test_bca_as_the_paper_writes_it():
    """z0, a and the two end-points by hand, from the same resamples."""
    x = np.random.default_rng(2).gamma(2.0, size=15)
    n = len(x)
    theta = x[np.random.default_rng(2025).integers(0, n, (10_000, n))].mean(1)
    z0 = stats.norm.ppf((theta < x.mean()).mean())
    jack = np.array([np.delete(x, k).mean() for k in range(n)])
    d = jack.mean() - jack
    a = (d**3).sum() / (6 * (d**2).sum() ** 1.5)
    ends = [stats.norm.cdf(z0 + (z0 + z) / (1 - a * (z0 + z))) for z in stats.norm.ppf([0.025, 0.975])]
    np.testing.assert_allclose(bca_interval(x), np.quantile(theta, ends), rtol=2e-3)


@pytest.mark.parametrize("x", [[2.5] * 15, [1.0, 1.0 + 2**-52, 1.0]])
def test_constant_data(x):
    assert bca_interval(x) == (min(x), max(x))


def test_one_value_or_none_has_no_interval():
    assert all(math.isnan(end) for x in ([], [1.0]) for end in bca_interval(x))


def test_two_values():
    low, high = bca_interval([1.0, 2.0])
    assert 1.0 <= low < high <= 2.0


def test_holm_by_hand():
    # 0.01 x 4; 0.02 x 3; 0.03 x 2 = 0.06; 0.04 x 1, but not below the one before
    assert holm([0.03, 0.01, 0.04, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert holm([0.5, 0.6]) == [1.0, 1.0]
    got = holm([0.01, math.nan, 0.04])
    assert got[::2] == pytest.approx([0.02, 0.04])
    assert math.isnan(got[1])
    assert holm([]) == []


def test_wilcoxon_by_hand():
    # five differences, all of one sign: 2 of 2^5 signs are as extreme
    assert wilcoxon([1, 2, 3, 4, 5], [0, 0, 0, 0, 0]) == 2 / 32
    # signed ranks 1, 2, -3: W = 3, and of the 8 signs 0, 1, 2, 3, 3, 4, 5, 6 five are at most 3; doubled and cut at 1
    assert wilcoxon([1, 2, -3], [0, 0, 0]) == 1.0
    assert wilcoxon([1, 2, 3, 4, 5, 7], [0, 0, 0, 0, 0, 7]) == 2 / 32, "equal pairs are dropped"
    assert wilcoxon([1, 1], [1, 1]) == 1.0
    assert math.isnan(wilcoxon([], []))
    tied = np.array([1.0, 1.0, -1.0, 2.0, 3.0, 4.0])
    assert wilcoxon(tied, 0 * tied) == stats.wilcoxon(tied, method="asymptotic").pvalue


def test_marks():
    assert marks([3.0, 1.0, 2.0, math.nan]) == ["", "best", "second", ""]
    assert marks([1.0, 1.0, 2.0]) == ["best", "best", "second"]
    assert marks([]) == []


def test_place():
    assert place(2.9, 2.91, 2.99) == "below by 0.3 %"
    assert place(2.95, 2.91, 2.99) == "inside"
    assert place(2.9904, 2.91, 2.99) == "inside", "as printed, 2.990"
    assert place(2.9906, 2.91, 2.99) == "above by 0.0 %"
    assert place(3.1, 2.91, 2.99) == "above by 3.7 %"


# ---- cells -----------------------------------------------------------------------------------------------------------


def test_rank_correlation():
    rng = np.random.default_rng(0)
    cause = rng.normal(size=200)
    a, b = cause + 0.3 * rng.normal(size=200), -cause + 0.3 * rng.normal(size=200)
    assert rank_correlation(a, b) == pytest.approx(stats.spearmanr(a, b).statistic)
    assert rank_correlation(a, b) < -0.8
    assert abs(rank_correlation(a, b, cause[:, None])) < 0.2, "all of it came from their common cause"
    direct = a + 0.1 * rng.normal(size=200)
    assert rank_correlation(a, direct, cause[:, None]) > 0.7
    # With one given, the partial correlation has a formula.
    r = [[stats.spearmanr(u, v).statistic for v in (a, direct, cause)] for u in (a, direct, cause)]
    formula = (r[0][1] - r[0][2] * r[1][2]) / math.sqrt((1 - r[0][2] ** 2) * (1 - r[1][2] ** 2))
    assert rank_correlation(a, direct, cause[:, None]) == pytest.approx(formula)
    assert math.isnan(rank_correlation(a, np.ones(200)))


def test_the_table_of_spreads(tmp_path):
    rng = np.random.default_rng(1)
    e = Experiment("etth1", trials=12, protocol=PROTOCOL)
    seen = []
    with Store(tmp_path, PROTOCOL) as store:
        for trial in range(12):
            shape = {"learning_rate": rng.uniform(), "n_layers": 2, "d_model": 16 * (1 + trial % 3)}
            bases = [[1e4, 1e4], [1e4 - 3, 1e4 + rng.uniform(0, 100)]]
            rest = {"configuration": shape, "status": "finished", "val": {"rmse": 3.0}, "bases": bases}
            store.add(Run(experiment=e, seed=2025, trial=trial, **rest))
            rmse = rng.uniform(2, 3)
            store.add_test(e, 2025, trial, {"rmse": rmse, "mae": 1, "mse": 1, "smape": 1}, "spread")
            seen.append((bases[1][1] - bases[1][0], rmse))
    (table,) = [t for t in make_tables(read(tmp_path, curves=False), PROTOCOL) if t.name == "spread"]
    (row,) = table.frame.to_dict("records")
    spread, rmse = np.array(seen).T
    assert row["median"] == pytest.approx(np.median(spread))
    assert row["correlation"] == pytest.approx(stats.spearmanr(spread, rmse).statistic)
    assert row["runs"] == 12
    assert -1 <= row["partial"] <= 1


def test_the_table_of_selections(tmp_path):
    """A validation fold that says the opposite of the test fold."""
    protocol = Protocol(seeds=(1, 2), selection=2)
    e = Experiment("etth1", trials=8, protocol=protocol)
    partly = Experiment("etth1", "uds", trials=8, protocol=protocol)
    with Store(tmp_path, protocol) as store:
        for experiment, tested in ((e, 8), (partly, 7)):
            for seed in (1, 2):
                for trial in range(8):
                    val = {"rmse": 3.0 + trial}
                    rest = {"configuration": {}, "status": "finished", "val": val}
                    store.add(Run(experiment=experiment, seed=seed, trial=trial, **rest))
                    scores = {"rmse": 20.0 - trial + seed / 10, "mae": 1, "mse": 1, "smape": 1}
                    if trial < tested:
                        store.add_test(experiment, seed, trial, scores, "selected" if trial < 2 else "spread")
    (row,) = selection_table(read(tmp_path, curves=False), protocol).frame.to_dict("records")
    assert (row["model"], row["runs"]) == ("bsat", 16)
    assert row["correlation"] < -0.9
    assert row["third"] < -0.5
    assert row["selected"] == pytest.approx(19.65)
    assert row["best"] == pytest.approx(13.65)
    assert row["median"] == pytest.approx(16.65)
    further = Experiment("etth1", trials=9, protocol=protocol)
    with Store(tmp_path, protocol) as store:
        for seed in (1, 2):
            rest = {"configuration": {}, "status": "finished", "val": {"rmse": 2.0}}
            store.add(Run(experiment=further, seed=seed, trial=8, **rest))
            store.add_test(further, seed, 8, {"rmse": 9.0, "mae": 1, "mse": 1, "smape": 1})
    runs = read(tmp_path, curves=False)
    (row,) = selection_table(runs, protocol).frame.to_dict("records")
    assert row["selected"] == pytest.approx(14.575), "trial 1 is selected no more"
    assert row["selected"] == pytest.approx(Scores(runs, protocol).mean("etth1", ("bsat", "l-rope+lpe"), 45))


def test_the_number_of_trials_is_counted(store):
    runs = read(store, curves=False)
    rows, tasks = [("bsat", "lpe")], [("etth1", 45), ("etth1", 180)]
    assert "7 trials a seed" in Scores(runs, PROTOCOL).notes(rows, tasks)[0]
    large = (runs["tokens"] == 180) & (runs["trial"] > 3)
    assert "7 (45 tokens) and 4 (180 tokens) trials a seed" in Scores(runs[~large], PROTOCOL).notes(rows, tasks)[0]
    one = large & (runs["seed"] == 2025)
    assert "7 (45 tokens) and 4 to 7 (180 tokens)" in Scores(runs[~one], PROTOCOL).notes(rows, tasks)[0]


def test_which_tables_there_are(tables):
    assert list(tables) == [
        "benchmark-etth1",
        "ablation-etth1",
        "wilcoxon-etth1",
        "wilcoxon-encodings-etth1",
        "benchmark-alabama-pv",
        "ablation-alabama-pv",
        "wilcoxon-alabama-pv",
        "benchmark-solar",
        "wilcoxon-solar",
        "variation",
        "effort",
        "ranks",
        "ranks-paper",
    ]


def test_effort(tables, store):
    frame, runs = tables["effort"].frame, read(store)
    assert frame["trials"].iloc[-1] == len(runs) == frame["trials"].iloc[:-1].sum()
    assert (frame["finished"] + frame["halved"] + frame["failed"] == frame["trials"]).all()
    assert f"Failed: diverged ({(runs['status'] == 'failed').sum()})." in tables["effort"].notes


@pytest.mark.parametrize("dataset", LEVEL)
def test_every_cell_of_the_benchmark(tables, chosen, dataset):
    frame = tables[f"benchmark-{dataset}"].frame
    rows = 3 * len([e for e in ENCODINGS[dataset] if e in ("lpe", "l-rope+lpe")])
    assert len(frame) == rows * 4 * 3
    for r in frame.itertuples():
        key = {"dataset": dataset, "model": r.model, "tokens": r.tokens, "encoding": r.encoding}
        x = chosen[(chosen[list(key)] == list(key.values())).all(axis=1)][f"test_{r.metric}"].to_numpy()
        assert len(x) == r.runs == 15
        rng = np.random.default_rng(2025)
        ends = stats.bootstrap((x,), np.mean, n_resamples=10_000, method="BCa", rng=rng).confidence_interval
        np.testing.assert_allclose([r.mean, r.low, r.high], [x.mean(), *ends], rtol=1e-12)
        printed = paper.benchmark(dataset, r.model, r.encoding, r.metric, r.tokens)
        if printed is None:
            assert r.place == ""
            assert math.isnan(r.paper_mean)
        else:
            assert (r.paper_mean, r.paper_low, r.paper_high) == printed
            assert (r.place == "inside") == (printed.low <= round(x.mean(), 3) <= printed.high)
    for metric in METRICS:
        of = frame[frame["metric"] == metric].sort_values("mean")
        assert of["mark"].tolist() == ["best", "second", *[""] * (len(of) - 2)]


def test_what_the_benchmark_prints(tables):
    table = tables["benchmark-etth1"]
    assert table.header == ("model", "metric", "45", "paper 45", "90", "paper 90", "180", "paper 180")
    r = table.frame.iloc[0]
    first = table.rows[0]
    assert [c.text for c in first[:2]] == ["BSAT LPE", "RMSE"]
    assert first[2].text == f"{r['mean']:.3f} ({r['low']:.3f}/{r['high']:.3f})"
    assert first[3].text == f"2.944 (2.910/3.031) {r['place']}"
    assert [row[1].text for row in table.rows] == ["RMSE", "MAE", "MSE", "SMAPE"] * 6
    assert tables["benchmark-solar"].header == ("model", "metric", "45", "90", "180"), "no paper, no column"


@pytest.mark.parametrize("dataset", ["etth1", "alabama-pv"])
def test_every_cell_of_the_ablation(tables, chosen, dataset):
    table = tables[f"ablation-{dataset}"]
    want = (
        chosen[chosen["dataset"] == dataset].groupby(["model", "encoding", "tokens"])["test_rmse"].agg(["mean", "std"])
    )
    got = table.frame.set_index(["model", "encoding", "tokens"])[["mean", "deviation"]]
    assert len(got) == len(want) == 9 * len(ENCODINGS[dataset])
    np.testing.assert_allclose(got.loc[want.index].to_numpy(), want.to_numpy(), rtol=1e-12)
    for tokens, of in table.frame.groupby("tokens"):
        assert of.sort_values("mean")["mark"].tolist()[:3] == ["best", "second", ""], tokens
    if dataset == "etth1":
        r = table.frame[(table.frame["model"] == "uds") & (table.frame["encoding"] == "f-rope")].iloc[0]
        assert (r["paper_mean"], r["paper_deviation"]) == (3.077, 0.045)
        name, ours, theirs = (c.text for c in table.rows[6][:3])
        assert name == "UDS F-RoPE"
        assert ours == f"{r['mean']:.3f}±{r['deviation']:.3f}"
        assert theirs == f"3.077±0.045 {r['place']}"


def test_every_cell_of_the_variation(tables, chosen):
    frame = tables["variation"].frame
    by = chosen.groupby(["model", "encoding", "dataset", "tokens"])["test_rmse"]
    want = by.std() / by.mean()
    tasks = frame[frame["dataset"] != "average"].dropna(subset="cv")
    got = tasks.set_index(["model", "encoding", "dataset", "tokens"])["cv"]
    assert len(got) == len(want)
    np.testing.assert_allclose(got.loc[want.index].to_numpy(), want.to_numpy(), rtol=1e-12)
    averages = frame[frame["dataset"] == "average"].set_index(["model", "encoding"])["cv"]
    wide = want.unstack(["dataset", "tokens"])
    whole = wide.dropna()
    assert len(whole) == 3, "only l-rope+lpe ran on all three"
    np.testing.assert_allclose(averages.loc[whole.index].to_numpy(), whole.mean(axis=1).to_numpy(), rtol=1e-12)
    assert averages.drop(whole.index).isna().all()
    assert sorted(m for m in frame["mark"] if m) == ["best", "second"]


def test_every_rank(tables, chosen):
    some = chosen[chosen["encoding"].isin(["lpe", "l-rope+lpe"]) & (chosen["dataset"] != "solar")]
    means = some.groupby(["model", "encoding", "dataset", "tokens"])["test_rmse"].mean().unstack(["dataset", "tokens"])
    want = means.rank()
    paper_means = pd.DataFrame(
        {
            (d, t): {(m, e): paper.benchmark(d, m, e, "rmse", t).mean for m, e in want.index}
            for d, t in product(("etth1", "alabama-pv"), (45, 90, 180))
        }
    )
    theirs = paper_means.rank()
    for name in ("ranks", "ranks-paper"):
        frame = tables[name].frame
        assert len(frame) == want.size, "solar has one encoding, and is not everyone's"
        for r in frame.itertuples():
            assert r.rank == want.loc[(r.model, r.encoding), (r.dataset, r.tokens)]
            assert r.average == pytest.approx(want.loc[(r.model, r.encoding)].mean())
            if name == "ranks-paper":
                assert r.paper_rank == theirs.loc[(r.model, r.encoding), (r.dataset, r.tokens)]
                assert r.paper_average == pytest.approx(theirs.loc[(r.model, r.encoding)].mean())
    first = frame[(frame["model"] == "bsat") & (frame["encoding"] == "lpe")]
    cells = [f"{r.rank:g} ({r.paper_rank:g})" for r in first.itertuples()]
    assert [cell.text for cell in tables["ranks-paper"].rows[0][1:-1]] == cells


def test_ranks_beside_the_dataset_that_one_stands_for(store):
    runs = read(store)
    runs = runs[runs["dataset"] == "alabama-pv"].assign(dataset="alabama-pv-34.05")
    scores = Scores(runs, PROTOCOL)
    made = paper_rank_table(scores)
    assert "alabama-pv-34.05 for its alabama-pv" in " ".join(made.notes)
    row = made.frame.set_index(["model", "encoding", "tokens"]).loc[("uds", "lpe", 45)]
    means = [paper.benchmark("alabama-pv", m, e, "rmse", 45).mean for m in MODELS for e in ("lpe", "l-rope+lpe")]
    assert row["paper_rank"] == 1 + sum(m < means[2] for m in means)
    header = benchmark_table(scores, "alabama-pv-34.05").header
    assert not any("paper" in name for name in header), "nothing absolute beside it"


def test_ranks_among_those_that_can_be_compared():
    a, b, c = ("bsat", "lpe"), ("uds", "lpe"), ("patchtst", "lpe")
    there = {("x", 45): {a, b, c}, ("x", 90): {a, b}, ("y", 45): {a, b}, ("z", 45): {c}}

    def has(row, task):
        return row in there[task]

    assert full_grid([a, b, c], list(there), has) == ([a, b], [("x", 45), ("x", 90), ("y", 45)])
    assert full_grid([a, b, c], [("x", 45), ("x", 90)], has) == ([a, b], [("x", 45), ("x", 90)])
    assert full_grid([a, b, c], [("x", 45)], has) == ([a, b, c], [("x", 45)])
    assert full_grid([a, b, c], [("x", 90), ("z", 45)], has) == ([a, b], [("x", 90)])
    assert full_grid([a], [("z", 45)], has) == ([], [])
    there |= {("z", t): {c} for t in range(10)}
    assert full_grid([a, b, c], list(there), has) == ([a, b], [("x", 45), ("x", 90), ("y", 45)]), (
        "one alone has no rank"
    )


@pytest.mark.parametrize("dataset", LEVEL)
def test_every_paired_test(tables, chosen, dataset):
    frame = tables[f"wilcoxon-{dataset}"].frame
    names = [(m, e) for m in MODELS for e in ("lpe", "l-rope+lpe") if e in ENCODINGS[dataset]]
    assert len(frame) == 3 * len(list(combinations(names, 2)))
    some = chosen[chosen["dataset"] == dataset]
    wide = some.pivot(index=["tokens", "seed", "rank"], columns=["model", "encoding"], values="test_rmse")
    for r in frame.itertuples():
        x, y = wide.loc[r.tokens, (r.model_a, r.encoding_a)], wide.loc[r.tokens, (r.model_b, r.encoding_b)]
        assert r.pairs == 15
        assert r.p == pytest.approx(stats.wilcoxon(x, y).pvalue, rel=1e-12)
        assert r.difference == pytest.approx(np.median(x - y), rel=1e-12)
    order = frame.sort_values("p")
    want = (order["p"] * np.arange(len(order), 0, -1)).cummax().clip(upper=1)
    np.testing.assert_allclose(frame["p_holm"].loc[order.index], want, rtol=1e-12)


def test_who_is_better_goes_by_ranks_not_by_the_median(tmp_path, monkeypatch):
    """Of 40 pairs, the first model is a little better in 21 and much worse in 19."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    protocol = Protocol(seeds=tuple(range(8)))
    first, second = (Experiment("etth1", model, 45, "lpe", 5, protocol) for model in ("bsat", "uds"))
    difference = np.array([-0.001 * k for k in range(1, 22)] + [1 + 0.01 * k for k in range(19)]).reshape(8, 5)
    with Store(tmp_path, protocol) as store:
        for seed, trial in np.ndindex(8, 5):
            for e, rmse in ((first, 10 + difference[seed, trial]), (second, 10.0)):
                val = {"rmse": 1.0 + trial}
                store.add(Run(experiment=e, seed=seed, trial=trial, configuration={}, status="finished", val=val))
                store.add_test(e, seed, trial, {"rmse": rmse, "mae": 1, "mse": 1, "smape": 1})
    table = wilcoxon_table(Scores(read(tmp_path), protocol), "etth1")
    (row,) = table.frame.to_dict("records")
    assert row["difference"] < 0
    assert row["p_holm"] < 0.05
    assert table.rows[0][-1].text == "UDS LPE"
    assert rank_sum([1, 2, 0, 5], [0, 0, 3, 5]) == 1 + 2 - 3


def test_paired_tests_of_encodings(tables, chosen):
    frame = tables["wilcoxon-encodings-etth1"].frame
    assert (frame["model_a"] == frame["model_b"]).all()
    assert len(frame) == 3 * 3 * 10, "budgets, models, pairs of five encodings"
    r = frame[(frame["model_a"] == "uds") & (frame["tokens"] == 90) & (frame["encoding_b"] == "l-rope")].iloc[-1]
    some = chosen[(chosen["dataset"] == "etth1") & (chosen["model"] == "uds") & (chosen["tokens"] == 90)]
    wide = some.pivot(index=["seed", "rank"], columns="encoding", values="test_rmse")
    assert r["encoding_a"] == "f-rope"
    assert r["p"] == pytest.approx(stats.wilcoxon(wide["f-rope"], wide["l-rope"]).pvalue, rel=1e-12)
    assert "Holm's correction over the 90 tests" in " ".join(tables["wilcoxon-encodings-etth1"].notes)


def test_the_spread_does_not_enter(tables):
    """A sixth run of every seed has test scores; the tables are about five."""
    assert set(tables["benchmark-etth1"].frame["runs"]) == {15}


def test_naive_forecasts_stand_below(store):
    own = {"rmse": 3.75, "mae": 2.9, "mse": 14.0625, "smape": 31.0}
    table = benchmark_table(Scores(read(store), PROTOCOL), "etth1", naive={"last value": own})
    assert [cell.text for cell in table.rows[-4]] == ["last value", "RMSE", *["3.750", "–"] * 3]
    assert [cell.text for cell in table.rows[-1]][1:4] == ["SMAPE", "31.000", "–"]
    assert len(table.rows) - 4 in table.rules
    below = table.frame[table.frame["model"] == "last value"]
    assert below[below["metric"] == "mse"]["mean"].tolist() == [14.0625] * 3
    assert not any(cell.mark for row in table.rows[-4:] for cell in row), "they take no part"
    assert "naive" in " ".join(table.notes)


# ---- text ------------------------------------------------------------------------------------------------------------


def test_latex_is_well_formed(tables):
    for table in tables.values():
        first, *rest = table.to_latex().splitlines()
        assert first == r"% \usepackage{booktabs, adjustbox}"
        open_ = []
        for line in rest:
            for way, name in re.findall(r"\\(begin|end)\{([a-z*]+)\}", line):
                assert way == "begin" or open_.pop() == name
                open_ += [name] * (way == "begin")
        assert not open_
        ends = {line.count(" & ") for line in rest if line.endswith(r"\\")}
        assert ends == {len(table.header) - 1}, "a line has as many cells as another"


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="needs pdflatex, with booktabs and adjustbox")
def test_latex_compiles_and_fits_the_page(store, tmp_path):
    paths = write_tables(store, tmp_path, ["tex"])
    lines = [r"\documentclass[twocolumn]{article}", r"\usepackage{booktabs, adjustbox}", r"\begin{document}"]
    lines += [rf"\input{{{path.name}}}" for path in paths] + [r"\end{document}"]
    (tmp_path / "all.tex").write_text("\n".join(lines))
    made = subprocess.run(["pdflatex", "-halt-on-error", "all.tex"], cwd=tmp_path, capture_output=True, text=True)
    assert made.returncode == 0, made.stdout[-2000:]
    assert "Overfull" not in made.stdout
    assert "too large for page" not in made.stdout


def test_made_twice_they_are_the_same_bytes(store, tmp_path):
    one, two = write_tables(store, tmp_path / "one"), write_tables(store, tmp_path / "two")
    assert [p.name for p in one] == [p.name for p in two]
    assert len(one) == 13 * 3
    for a, b in zip(one, two, strict=True):
        assert a.read_bytes() == b.read_bytes()


def test_they_do_not_depend_on_the_order_of_writing(store, tables, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    other = make_store(tmp_path / "other", reverse=True)
    for table in make_tables(read(other), PROTOCOL):
        same = tables[table.name]
        assert (table.to_markdown(), table.to_latex(), table.to_csv()) == (
            same.to_markdown(),
            same.to_latex(),
            same.to_csv(),
        )


def test_the_hash_is_on_every_table(tables):
    for table in tables.values():
        assert f"`{PROTOCOL.short}`" in table.to_markdown()
        assert PROTOCOL.short in table.to_latex()
        assert PROTOCOL.hash in table.to_csv()


def test_csv_has_every_digit(tables):
    for table in tables.values():
        lines = list(csv.DictReader(StringIO(table.to_csv())))
        assert len(lines) == len(table.frame)
        for name in table.frame.select_dtypes("float64"):
            got = [float(line[name] or "nan") for line in lines]
            np.testing.assert_array_equal(got, table.frame[name].to_numpy())


def test_markdown_and_latex():
    cells = [[Cell("BSAT_1"), Cell("1.0±0.1", "best"), Cell("50 %", "second")], [Cell("UDS"), Cell("–"), Cell("")]]
    table = Table("a-b", "A & B", ("model", "45", "90"), cells, pd.DataFrame(), ["Protocol `abc`."], frozenset({1}))
    assert table.to_markdown() == (
        "### A & B\n\n| model | 45 | 90 |\n| --- | ---: | ---: |\n"
        "| BSAT_1 | **1.0±0.1** | <u>50 %</u> |\n| UDS | – |  |\n\n- Protocol `abc`.\n"
    )
    latex = table.to_latex()
    rows = [r"BSAT\_1 & \textbf{1.0$\pm$0.1} & \underline{50 \%} \\", r"\midrule", r"UDS & -- &  \\"]
    assert "\n".join(rows) in latex
    assert r"\caption{A \& B. Protocol abc.}" in latex
    assert r"\label{tab:bsat_a_b}" in latex
    assert r"\begin{tabular}{lcc}" in latex


def test_latex_is_balanced(tables):
    for table in tables.values():
        text = table.to_latex()
        assert text.count("{") == text.count("}")
        assert text.isascii(), [c for c in text if not c.isascii()]
        rows = [line for line in text.splitlines() if line.endswith(r"\\")]
        assert {line.replace(r"\&", "").count("&") for line in rows} == {len(table.header) - 1}


# ---- what is missing -------------------------------------------------------------------------------------------------


def test_runs_not_yet_tested_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda handle: None)

    def skip(test):
        e, seed, _, _ = test
        return (e.dataset, e.model, e.tokens, e.encoding, seed) == ("etth1", "bsat", 45, "lpe", 2027)

    make_store(tmp_path, skip=skip)
    tables = {t.name: t for t in make_tables(read(tmp_path), PROTOCOL)}
    frame = tables["benchmark-etth1"].frame
    assert sorted(set(frame["runs"])) == [10, 15]
    assert "Fewer than 15 runs: BSAT LPE etth1 45 (10, 5 not yet tested)." in tables["benchmark-etth1"].to_markdown()
    assert set(tables["wilcoxon-etth1"].frame["pairs"]) == {10, 15}


def test_one_run(tmp_path):
    """The smallest store makes tables, with dashes for what one run does not tell."""
    e = Experiment("etth1", protocol=PROTOCOL)
    with Store(tmp_path, PROTOCOL) as store:
        store.add(Run(experiment=e, seed=2025, trial=0, configuration={}, status="finished", val={"rmse": 3.0}))
        with pytest.raises(ValueError, match="got 1 runs, 1 of them selected, none tested"):
            make_tables(read(tmp_path), PROTOCOL)
        store.add_test(e, 2025, 0, {"rmse": 2.95, "mae": 2.0, "mse": 8.7, "smape": 29.0})
    benchmark, variation, effort = make_tables(read(tmp_path), PROTOCOL)
    assert effort.frame["trials"].tolist() == [1, 1]
    assert benchmark.rows[0][2] == Cell("2.950 (–)", "best")
    assert benchmark.rows[0][3] == Cell("2.942 (2.910/2.990) inside")
    assert variation.rows[0][1].text == "– (2.7%)"
    assert write_tables(tmp_path, tmp_path / "out", ["md"]) == [
        tmp_path / "out" / "benchmark-etth1.md",
        tmp_path / "out" / "variation.md",
        tmp_path / "out" / "effort.md",
    ]


def test_unknown_formats(store, tmp_path):
    with pytest.raises(ValueError, match="`formats` must be some of md, tex, csv; got \\['html'\\]"):
        write_tables(store, tmp_path, ["html"])


def test_without_scipy(monkeypatch):
    real = builtins.__import__

    def lacking(name, *rest, **words):
        if name.startswith("scipy"):
            raise ImportError(name)
        return real(name, *rest, **words)

    monkeypatch.setattr(builtins, "__import__", lacking)
    with pytest.raises(ImportError, match=r"need scipy: pip install 'bsat\[lab\]'"):
        bca_interval([1.0, 2.0])


def test_the_laboratory_imports_without_scipy_and_torch():
    import subprocess
    import sys

    code = "import bsat.lab, sys; print([m for m in ('scipy', 'torch', 'numba') if m in sys.modules])"
    got = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert got.stdout.strip() == "[]"
