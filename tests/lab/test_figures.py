"""The figures: what is in them, that nothing is cut off, and that they are the same each time."""

import os
from itertools import chain, combinations

import numpy as np
import pandas as pd
import pytest
from matplotlib.text import Text

from bsat.lab import Experiment, Protocol, Run, Store, read, select
from bsat.lab import figures as lab
from bsat.lab.figures import FigureError, best_bases, rescaled, spread_changes, write_figures

PROTOCOL = Protocol(seeds=(2025, 2026), selection=2)


def made_up(dataset, model, tokens, encoding, trials, rng, memory=None):
    """Runs of a cell; the two best of a seed are tested, and with L-RoPE all of them."""
    e = Experiment(dataset, model, tokens, encoding, protocol=PROTOCOL)
    for seed in PROTOCOL.seeds:
        val = rng.uniform(2.8, 3.3, trials)
        for trial in range(trials):
            epochs, layers = rng.integers(3, 9), rng.integers(2, 5)
            learned = 10_000 * np.exp(rng.normal(0, 0.1, (epochs, layers))) if "l-rope" in encoding else []
            yield Run(
                experiment=e,
                seed=seed,
                trial=trial,
                configuration={},
                status="finished",
                val={"rmse": val[trial]},
                curve={"val_rmse": np.append(rng.uniform(3.3, 4, epochs - 1), val[trial])},
                bases=learned,
                memory=memory,
            )
            if trial in np.argsort(val)[:2] or len(learned):
                rmse = val[trial] * rng.uniform(0.95, 1.05)
                yield e, seed, trial, {"rmse": rmse, "mae": 2.0, "mse": rmse**2, "smape": 30.0}


def make_store(folder, cells, trials=4, memory=None):
    rng = np.random.default_rng(3)
    with pytest.MonkeyPatch.context() as patch, Store(folder, PROTOCOL) as store:
        patch.setattr(os, "fsync", lambda handle: None)
        for cell in cells:
            for what in made_up(*cell, trials, rng, memory):
                store.add(what) if isinstance(what, Run) else store.add_test(*what)
    return folder


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    tasks = [("uds", 45), ("bsat", 90), ("bsat", 45)]
    cells = [("etth1", *task, encoding) for task in tasks for encoding in ("lpe", "l-rope+lpe")]
    cells += [("etth1", "bsat", 45, "l-rope"), ("alabama-pv-34.05", "patchtst", 45, "l-rope+lpe")]
    return make_store(tmp_path_factory.mktemp("store"), cells, memory=300 * 2**20)


@pytest.fixture(scope="module")
def runs(store):
    return read(store)


@pytest.fixture(scope="module")
def written(store, tmp_path_factory):
    """Paths, notes, and of every drawing the texts: words, size, place and canvas."""
    notes, drawings, draw = [], {}, Text.draw

    def watched(self, renderer, *rest):
        draw(self, renderer, *rest)
        if self.get_text().strip() and self.get_visible():
            place, canvas = self.get_window_extent(renderer), self.get_figure().bbox.frozen()
            found = self.get_text(), self.get_fontsize(), place, canvas
            drawings.setdefault(renderer, {})[self] = found  # the last time counts: the first may be a rehearsal

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Text, "draw", watched)
        paths = write_figures(store, tmp_path_factory.mktemp("out"), note=notes.append)
    return paths, notes, [list(texts.values()) for texts in drawings.values()]


def test_all_of_them_in_both_formats(written):
    paths, notes, _ = written
    names = [f"{kind}-{dataset}" for kind in ("errors", "bases") for dataset in ("etth1", "alabama-pv-34.05")]
    names = ["pipeline", "boxes", *names, "spread", "memory"]
    assert [p.name for p in paths] == [f"{name}.{form}" for name in names for form in ("png", "svg")]
    for path in paths:
        assert path.read_bytes().startswith(b"\x89PNG" if path.suffix == ".png" else b"<?xml")
    assert notes == []


def test_made_twice_they_are_the_same_bytes(store, written, tmp_path):
    again = write_figures(store, tmp_path, note=str)
    assert [p.name for p in again] == [p.name for p in written[0]]
    for one, two in zip(written[0], again, strict=True):
        assert one.read_bytes() == two.read_bytes(), one.name


def test_no_text_is_cut_off_or_too_small(written):
    paths, _, drawings = written
    assert len(drawings) >= len(paths)
    for words, size, box, canvas in chain(*drawings):
        assert size >= 8, words
        assert canvas.x0 <= box.x0 < box.x1 <= canvas.x1, words
        assert canvas.y0 <= box.y0 < box.y1 <= canvas.y1, words


def test_no_text_is_on_top_of_another(written):
    for texts in written[2]:
        for (one, _, a, _), (two, _, b, _) in combinations(texts, 2):
            assert min(a.x1, b.x1) <= max(a.x0, b.x0) or min(a.y1, b.y1) <= max(a.y0, b.y0), (one, two)


def test_the_hash_and_the_labels_are_printed(written):
    words = {text[0] for text in chain(*written[2])}
    for start in ("4 runs a box", "mean of 4 selected runs", "64 runs: median"):
        assert any(w.startswith(f"protocol {PROTOCOL.short} · {start}") for w in words), start
    assert {"BSAT", "UDS", "PatchTST", "BSAT L-RoPE LPE", "etth1, 45 tokens", "UDS 45", "the paper"} <= words


def test_boxes_are_scaled_inside_each_dataset_and_budget(runs):
    chosen = select(runs, 2)
    scaled = rescaled(chosen)
    for _, of in chosen.groupby(["dataset", "tokens"]):
        x = of["test_rmse"].to_numpy()
        np.testing.assert_allclose(scaled[of.index], (x - x.min()) / (x.max() - x.min()), rtol=1e-12)
    assert rescaled(chosen[:1]).tolist() == [0.0], "a run alone"


def test_the_best_run_shows_its_bases(runs):
    best = best_bases(runs, "etth1")
    assert len(best) == 3
    for run in best.itertuples():
        of = runs[(runs["dataset"] == "etth1") & (runs["model"] == run.model) & (runs["tokens"] == run.tokens)]
        assert run.val_rmse == of.loc[of["encoding"] != "lpe", "val_rmse"].min()
    panel = lab.bases(runs, PROTOCOL, "etth1").axes[0]
    first = best[(best["model"] == "bsat") & (best["tokens"] == 45)].iloc[0]
    want = np.array(first["bases"])
    lines = [line.get_ydata() for line in panel.lines if len(line.get_ydata()) == len(want)]
    np.testing.assert_array_equal(np.transpose([y for y in lines if y[0] in want[0]]), want)


def spreads(spread, rmse):
    """A frame of one cell, with runs that ended with these spreads."""
    cell = {"dataset": "etth1", "model": "bsat", "tokens": 45, "encoding": "l-rope"}
    return pd.DataFrame({"spread": spread, "test_rmse": rmse}).assign(**cell)


def test_quartiles_by_hand():
    rng = np.random.default_rng(0)
    spread, rmse = rng.permutation(np.arange(1.0, 12.0)), rng.uniform(2, 4, 11)
    (row,) = spread_changes(spreads(spread, rmse)).itertuples()
    edges = np.quantile(spread, [0.25, 0.5, 0.75])
    np.testing.assert_array_equal(edges, [3.5, 6, 8.5])
    q1, q2, q3, q4 = (
        rmse[(spread > low) & (spread <= high)].mean() for low, high in ((0, 3.5), (3.5, 6), (6, 8.5), (8.5, 11))
    )
    np.testing.assert_allclose([row.Q2, row.Q3, row.Q4], [100 * (q / q1 - 1) for q in (q2, q3, q4)], rtol=1e-9)
    assert (row.median, row.runs, row.tested) == (6.0, 11, 11)


def test_quartiles_need_eight_tested_runs():
    rmse = [3.0, np.nan] * 8
    assert spread_changes(spreads(np.arange(16.0), rmse))[["runs", "tested"]].values.tolist() == [[16, 8]]
    rmse[0] = np.nan
    assert not len(spread_changes(spreads(np.arange(16.0), rmse)))


def test_quartiles_that_ties_leave_empty():
    """Six of eight runs did not spread at all: they are the first quartile, and the second and third are empty."""
    frame = spreads([0.0] * 6 + [50.0, 60.0], [4.0] * 6 + [3.0] * 2)
    (row,) = spread_changes(frame).itertuples()
    assert np.isnan([row.Q2, row.Q3]).all()
    assert (row.Q4, row.median) == (-25.0, 0.0)
    words = [text.get_text() for text in lab.spread(frame, PROTOCOL).findobj(Text)]
    assert words.count("–") == 2
    assert words.count("-25.0") == 1


def test_no_panel_of_what_was_not_run():
    """A dataset of one encoding, another of the other: two panels of four, each with names beside it."""
    one = spreads(np.arange(8.0), np.ones(8))
    other = one.assign(dataset="solar", model="uds", encoding="l-rope+lpe")
    drawn = [axes for axes in lab.spread(pd.concat([one, other]), PROTOCOL).axes if axes.axison and axes.get_title()]
    assert [axes.get_title() for axes in drawn] == ["etth1, L-RoPE", "solar, L-RoPE LPE"]
    assert [[text.get_text() for text in axes.get_yticklabels()] for axes in drawn] == [["BSAT 45"], ["UDS 45"]]


def test_every_row_of_boxes_has_numbers(tmp_path):
    """Also if its first dataset has no runs of that budget."""
    cells = [("etth1", "uds", 45, "lpe"), ("solar", "uds", 45, "lpe"), ("solar", "uds", 90, "lpe")]
    figure = lab.boxes(read(make_store(tmp_path, cells)), PROTOCOL)
    numbered = [
        axes.get_title() for axes in figure.axes if axes.get_visible() and axes.yaxis.get_tick_params()["labelleft"]
    ]
    assert numbered == ["etth1, 45 tokens", "solar, 90 tokens"]


def test_memory_is_the_median_in_mib(runs):
    axes = lab.memory(runs, PROTOCOL).axes[0]
    assert {y for line in axes.lines for y in line.get_ydata()} == {300.0}


def test_a_small_store_says_what_it_lacks(tmp_path):
    """One budget, no GPU, no test scores but those of the selected."""
    cells = [("etth1", model, 45, "lpe") for model in ("bsat", "uds", "patchtst")]
    make_store(tmp_path / "store", cells)
    notes = []
    paths = write_figures(tmp_path / "store", tmp_path / "out", ["svg"], notes.append)
    assert [p.stem for p in paths] == ["pipeline", "boxes", "errors-etth1"]
    assert [note.split(" is not drawn: ")[0] for note in notes] == ["bases-etth1", "spread", "memory"]
    assert "at least 8 runs" in notes[1]
    assert "Runs on a GPU have it" in notes[2]
    with pytest.warns(UserWarning, match="is not drawn") as caught:
        write_figures(tmp_path / "store", tmp_path / "out", ["svg"])
    assert [str(w.message) for w in caught] == notes


def test_runs_without_test_scores(runs):
    waiting = runs.assign(test_rmse=np.nan)
    for draw in (lab.boxes, lambda *given: lab.errors(*given, "etth1")):
        with pytest.raises(FigureError, match=r"none tested\. `bsat lab run` scores what it selects"):
            draw(waiting, PROTOCOL)


def test_an_empty_store(tmp_path):
    Store(tmp_path / "store", PROTOCOL).close()
    with pytest.raises(ValueError, match=r"figures need runs; .*store has none yet\. Run `bsat lab run` into it first"):
        write_figures(tmp_path / "store", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_unknown_formats(store, tmp_path):
    with pytest.raises(ValueError, match="`formats` must be some of png, svg; got \\['gif'\\]"):
        write_figures(store, tmp_path, ["gif"])
