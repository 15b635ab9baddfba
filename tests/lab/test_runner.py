"""Experiments, run: what is searched, selected, scored and stored."""

import errno
import json
import math
import multiprocessing
import os
import random
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_lab import POPULATION, PROTOCOL, experiment, make_tiny, run_to_be_killed

from bsat import nvrtc
from bsat.data import catalog
from bsat.data.season import season_of
from bsat.lab import Experiment, Protocol, StoreError, read, runner, select
from bsat.lab.models import MODELS
from bsat.lab.runner import Watcher, make_engine, run_experiments
from bsat.lab.runs import naive_path, pack, read_naive
from bsat.search import Local, Population, Ray, read_records
from bsat.train.device import count_cores
from bsat.train.population import Halving
from small import wait_until

LOCAL = Local(halving=Halving(1, 2))


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    make_tiny(monkeypatch.setitem, monkeypatch.setattr)


def run(folder, experiments=None, engine=POPULATION, **choices):
    return run_experiments(experiments or [experiment()], folder, engine=engine, device="cpu", **choices)


@pytest.mark.parametrize("engine", [LOCAL, POPULATION], ids=["optuna", "population"])
def test_a_cell_from_search_to_score(tmp_path, engine):
    run(tmp_path, engine=engine)
    runs = read(tmp_path)
    assert len(runs) == 8
    assert set(runs["status"]) == {"finished", "halved"}
    assert set(runs["engine"]) == {engine.name}
    tested = runs[runs["test_rmse"].notna()]
    chosen = select(runs, 2)
    keys = ["seed", "trial"]
    assert sorted(map(tuple, tested[keys].to_numpy())) == sorted(map(tuple, chosen[keys].to_numpy()))
    assert set(tested["why"]) == {"selected"}
    assert len(tested) == 4
    assert np.allclose(tested["test_mse"], tested["test_rmse"] ** 2)
    assert (tested["test_fallback"] >= 0).all()
    for row in runs.to_dict("records"):
        assert row["val_rmse"] == pytest.approx(min(row["curve"]["val_rmse"]), rel=1e-5)
        assert len(row["bases"]) == len(row["curve"]["loss"])
        assert len(row["bases"][0]) == row["configuration"]["n_layers"]
    assert not (tmp_path / "weights").exists()


def test_every_model_and_encoding_in_one_store(tmp_path):
    one = replace(PROTOCOL, seeds=(1,))
    cells = [experiment(m, "lpe", 2, protocol=one) for m in MODELS]
    cells += [experiment("bsat", e, 2, protocol=one) for e in ("f-rope", "l-rope", "f-rope+lpe")]
    run(tmp_path, cells)
    runs = read(tmp_path)
    assert len(runs) == 2 * len(cells)
    assert runs["test_rmse"].notna().all()
    spline = runs[runs["model"] == "bsat-spline"]
    assert all({"feature", "norm", "degree"} <= set(c) for c in spline["configuration"])
    assert not any("degree" in c for c in runs[runs["model"] == "uds"]["configuration"])


def test_engines_agree_on_the_test_score_of_a_network(tmp_path):
    """The first points are the same; of the same point comes the same network, and it is scored alike."""
    whole = replace(PROTOCOL, seeds=(1,), grace=None, selection=4)
    for name, engine in (("a", Local(halving=None)), ("b", Population(startup=4, halving=None))):
        run(tmp_path / name, [experiment(trials=3, protocol=whole)], engine)
    a, b = (read(tmp_path / name) for name in "ab")
    assert list(a["configuration"]) == list(b["configuration"])
    assert np.allclose(a["test_rmse"], b["test_rmse"], rtol=0.02)
    assert np.allclose(a["val_rmse"], b["val_rmse"], rtol=0.02)


def test_the_test_fold_is_not_read_before_the_search_has_ended(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(runner, "evaluate", lambda *a: seen.append("test") or pytest.fail("too early"))
    monkeypatch.setattr(runner._Laboratory, "_score", lambda self, e: None)
    run(tmp_path)
    assert not seen
    assert read(tmp_path)["test_rmse"].isna().all()


def test_again_nothing_is_trained_or_scored(tmp_path, monkeypatch):
    run(tmp_path)
    before = {p: p.read_bytes() for p in tmp_path.glob("*.jsonl")}
    monkeypatch.setattr(runner, "run_searches", lambda *a, **k: pytest.fail("it searched again"))
    run(tmp_path)
    (tmp_path / "studies.db").unlink()  # the store is enough
    run(tmp_path)
    assert {p: p.read_bytes() for p in tmp_path.glob("*.jsonl")} == before


def test_a_search_taken_further_keeps_what_it_has(tmp_path):
    run(tmp_path, [experiment(trials=3)])
    first = read(tmp_path)
    run(tmp_path, [experiment(trials=6)])
    runs = read(tmp_path)
    assert len(runs) == 12
    again = runs.merge(first, on=["seed", "trial"], suffixes=("", "_first"))
    assert len(again) == 6
    assert list(again["written"]) == list(again["written_first"])
    assert select(runs, 2)["test_rmse"].notna().all()


def test_naive_forecasts_are_scored_beside(tmp_path, monkeypatch):
    wide = replace(PROTOCOL, lookback=100)
    one = [experiment("uds", "lpe", protocol=wide)]
    run(tmp_path, one)
    found, split = read_naive(tmp_path)["solar"], runner.Material(wide, "cpu").split("solar")
    past, future = (some(slice(None)).double() for some in (split.test.past, split.test.future))
    season = season_of(catalog.find_dataset("solar").freq)
    day = past[:, 100 - season :][:, np.arange(future.shape[1]) % season]
    for name, forecast in (("last value", past[:, -1:]), ("seasonal naive", day)):
        error = (forecast - future) * float(split.deviation[0])
        assert found[name]["rmse"] == pytest.approx(float(error.square().mean().sqrt()), rel=1e-5)
        assert found[name]["mae"] == pytest.approx(float(error.abs().mean()), rel=1e-5)
    monkeypatch.setattr(runner, "evaluate_naive", None)
    run(tmp_path, one)  # once is enough
    pack(tmp_path, tmp_path / "small")
    assert read_naive(tmp_path / "small") == read_naive(tmp_path)
    naive_path(tmp_path, "solar").write_text("{}")
    with pytest.raises(StoreError, match="must hold scores of naive forecasts"):
        read_naive(tmp_path)


def test_spread_scores_all_after_the_selected(tmp_path):
    run(tmp_path, spread=True)
    runs = read(tmp_path)
    assert runs["test_rmse"].notna().all()
    assert dict(runs["why"].value_counts()) == {"selected": 4, "spread": 4}
    chosen = select(runs, 2)
    assert set(chosen["why"]) == {"selected"}


def test_what_the_study_has_and_the_store_lacks_is_written_later(tmp_path, monkeypatch):
    """A process that ends between the two."""
    add, count = runner.Store.add, 0

    def once(self, run):
        nonlocal count
        count += 1
        if count == 3:
            raise KeyboardInterrupt
        add(self, run)

    monkeypatch.setattr(runner.Store, "add", once)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path)
    monkeypatch.setattr(runner.Store, "add", add)
    assert len(read(tmp_path)) == 2
    run(tmp_path)
    runs = read(tmp_path)
    assert len(runs) == 8
    assert select(runs, 2)["test_rmse"].notna().all()


@pytest.mark.parametrize("left", [None, b"", b"half", slice(-100)], ids=["nothing", "empty", "other", "cut"])
def test_weights_that_are_gone_are_told(tmp_path, monkeypatch, left):
    """Or damaged, by a power cut say; once, and never again."""
    monkeypatch.setattr(runner._Laboratory, "_score", lambda self, e: None)
    run(tmp_path, [experiment(trials=3)])
    monkeypatch.undo()
    make_tiny(monkeypatch.setitem, monkeypatch.setattr)
    kept = sorted(tmp_path.glob("weights/*.safetensors"))
    assert len(kept) == 4, "of each seed the two that may be selected"
    if left is None:
        kept[0].unlink()
    else:
        kept[0].write_bytes(kept[0].read_bytes()[left] if isinstance(left, slice) else left)
    with pytest.warns(RuntimeWarning, match=r"1 runs of solar-bsat-6.* cannot be scored.*weights are no longer"):
        run(tmp_path, [experiment(trials=3)])
    assert select(read(tmp_path), 2)["test_rmse"].notna().sum() == 3
    assert not (tmp_path / "weights").exists()


def test_weights_are_on_the_disk_before_they_have_their_name(tmp_path, monkeypatch):
    weights, seen, fsync = runner._Weights(tmp_path), [], os.fsync
    path = weights.path(experiment(), 1, 0)
    monkeypatch.setattr(os, "fsync", lambda handle: seen.append(path.exists()) or fsync(handle))
    weights.save(experiment(), 1, 0, {}, {"a": torch.zeros(3)})
    assert seen == [False]
    assert torch.equal(weights.load(experiment(), 1, 0, {})["a"], torch.zeros(3))


def test_weights_find_their_folder_though_another_search_takes_it_away(tmp_path, monkeypatch):
    mkdir, times = Path.mkdir, 3

    def taken_away(self, *words, **choices):
        nonlocal times
        mkdir(self, *words, **choices)
        if times:
            times -= 1
            runner._Weights(self).clear(experiment("uds"), 1)

    monkeypatch.setattr(Path, "mkdir", taken_away)
    weights = runner._Weights(tmp_path / "weights")
    weights.save(experiment(), 1, 0, {}, {"a": torch.zeros(3)})
    assert times == 0
    assert weights.load(experiment(), 1, 0, {}) is not None
    times = 1000
    with pytest.raises(OSError, match="could not be written"):
        runner._Weights(tmp_path / "other").save(experiment(), 1, 0, {}, {"a": torch.zeros(3)})


def test_a_full_disk_loses_nothing(tmp_path, monkeypatch):
    write, full = os.write, False

    def limited(handle, line):
        if full and b'"kind":"trial"' in line:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(handle, line)

    monkeypatch.setattr(os, "write", limited)
    run(tmp_path, [experiment("uds", trials=2)])
    full = True
    with pytest.raises(StoreError, match=r"could not be written.*No space left.*What was there before is whole"):
        run(tmp_path, [experiment("bsat", trials=2)])
    full = False
    assert len(read(tmp_path)) == 4
    run(tmp_path, [experiment("bsat", trials=2)])
    runs = read(tmp_path)
    assert len(runs) == 8
    assert select(runs, 2)["test_rmse"].notna().all()


def test_a_failed_trial_is_stored_with_its_reason(tmp_path, monkeypatch):
    from bsat.search import engines

    alone = engines.train_alone

    def sometimes(number, *rest):
        if number == 1:
            raise MemoryError("no room")
        return alone(number, *rest)

    monkeypatch.setattr(engines, "train_alone", sometimes)
    run(tmp_path, [experiment(trials=3)], LOCAL)
    runs = read(tmp_path)
    failed = runs[runs["status"] == "failed"]
    assert list(failed["reason"]) == ["MemoryError: no room"] * 2
    assert failed["test_rmse"].isna().all()


def test_a_store_of_another_protocol_is_refused_before_anything_runs(tmp_path, monkeypatch):
    run(tmp_path, [experiment(trials=2)])
    monkeypatch.setattr(runner, "run_searches", lambda *a, **k: pytest.fail("it searched"))
    other = experiment(protocol=replace(PROTOCOL, horizon=7))
    with pytest.raises(StoreError, match="horizon 6 instead of 7"):
        run(tmp_path, [other])
    with pytest.raises(StoreError, match="must share its protocol"):
        run(tmp_path / "new", [experiment(), other])
    assert len(read(tmp_path)) == 4


def test_engines_by_name(monkeypatch):
    protocol = Protocol()
    assert make_engine("optuna", protocol, device="cpu") == Local(min(count_cores(), 8))
    assert make_engine("optuna", protocol, at_once=1) == Local()
    assert make_engine("population", protocol) == Population()
    assert make_engine("ray", protocol, address="auto") == Ray("auto", 5)
    assert make_engine("optuna", replace(protocol, grace=None), at_once=3) == Local(3, None)
    with pytest.raises(ValueError, match="must be 'float32' without an NVIDIA GPU that has tensor cores"):
        make_engine("population", protocol, precision="bfloat16", device="cpu")
    monkeypatch.setattr(nvrtc, "tensor_cores", lambda device: True)
    assert make_engine("population", protocol, precision="bfloat16").name == "population, bfloat16"
    with pytest.raises(ValueError, match="`precision` must be one of"):
        make_engine("optuna", protocol, precision="bf16")
    with pytest.raises(ValueError, match="`precision` must be 'float32' with engine 'optuna'; got 'bfloat16'"):
        make_engine("optuna", protocol, precision="bfloat16")
    with pytest.raises(ValueError, match="`engine` must be one of optuna, population, ray; got 'slurm'"):
        make_engine("slurm", protocol)


def test_kin_are_searched_together_and_others_are_not(tmp_path):
    begun = []
    one = replace(PROTOCOL, seeds=(1,))
    cells = [experiment(m, "lpe", 1, protocol=one) for m in ("bsat", "bsat-safe", "uds")]
    run(tmp_path, cells, watcher=Watcher(begin=lambda some: begun.append([e.model for e, _ in some])))
    assert begun == [["bsat", "bsat-safe"], ["uds"]]


def test_a_search_whose_study_is_gone_is_refused(tmp_path):
    """Its numbers would come to mean other trials, and their weights be scored for them."""
    run(tmp_path, [experiment(trials=3)])
    before = len(read(tmp_path))
    (tmp_path / "studies.db").unlink()
    with pytest.raises(StoreError, match=r"has trial 0 of solar-bsat-6.*another engine, or its files"):
        run(tmp_path, [experiment(trials=4)])
    with pytest.raises(StoreError, match="by engine 'ray' does not know it"):
        run(tmp_path, [experiment(trials=4)], Ray())
    assert len(read(tmp_path)) == before


def test_names_keep_their_meaning(tmp_path, monkeypatch):
    run(tmp_path, [experiment(trials=2)])
    changed = replace(MODELS["bsat"], tokens={**MODELS["bsat"].tokens, "recency": 2.0})
    monkeypatch.setitem(MODELS, "bsat", changed)
    with pytest.raises(StoreError, match="made by another version of bsat, for which 'bsat'"):
        run(tmp_path, [experiment(trials=2)])


def test_weights_of_another_configuration_are_not_scored(tmp_path, monkeypatch):
    monkeypatch.setattr(runner._Laboratory, "_score", lambda self, e: None)
    run(tmp_path, [experiment(trials=3)])
    monkeypatch.undo()
    make_tiny(monkeypatch.setitem, monkeypatch.setattr)
    one, two, *_ = sorted(tmp_path.glob("weights/*.safetensors"))
    two.write_bytes(one.read_bytes())
    with pytest.warns(RuntimeWarning, match="1 runs of solar-bsat-6"):
        run(tmp_path, [experiment(trials=3)])


@pytest.fixture
def start():
    """Starts processes, which find their modules loaded, and end with the test: pytest would wait for them."""
    context, processes = multiprocessing.get_context("forkserver"), []
    context.set_forkserver_preload(["torch", "optuna", "bsat.lab.runner", "bsat.search.study", "bsat.train.population"])

    def start(target, *args):
        processes.append(context.Process(target=target, args=args))
        processes[-1].start()
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.join()


def test_processes_share_a_new_store(tmp_path, start):
    """Different cells at once; the same cell is refused while another process is at it."""
    folder = tmp_path / "runs"
    processes = [start(run_to_be_killed, folder, "optuna", 3, model) for model in ("bsat", "uds", "patchtst")]
    for process in processes:
        process.join(600)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert len(read(folder)) == 3 * len(PROTOCOL.seeds) * 3
    assert not list(folder.glob(".*.lock"))
    cell = runner.alone(folder / "run", "solar-uds-6-l-rope+lpe")
    with cell, pytest.raises(BlockingIOError, match="Wait for it"):
        run(folder, [experiment("uds", trials=3)])


def test_a_cell_on_ray(tmp_path):
    run(tmp_path, [experiment("uds", trials=2, protocol=replace(PROTOCOL, seeds=(1,)))], Ray(at_once=2, halving=None))
    runs = read(tmp_path)
    assert runs["engine"].tolist() == ["ray", "ray"]
    assert runs["test_rmse"].notna().all()
    assert not list(tmp_path.glob("weights/*"))


def test_an_experiment_named_twice_is_one(tmp_path):
    run(tmp_path, [experiment(trials=2), experiment(trials=2)])
    assert len(read(tmp_path)) == 4


# ---- kill -9 ---------------------------------------------------------------------------------------------------------

KILLS = 10


def be_killed_writing_weights(folder):
    """In a process of its own: the first file of weights stays half written."""

    def write_half(tensors, path, metadata):
        path.write_bytes(b"half")
        os.kill(os.getpid(), signal.SIGKILL)

    runner.save_tensors = write_half
    run_to_be_killed(folder, "population", 4)


def test_killed_while_weights_are_written(tmp_path, start):
    """What was being written goes with the search that wrote it; what others write in the same folder stays."""
    process = start(be_killed_writing_weights, tmp_path)
    process.join(600)
    assert process.exitcode == -signal.SIGKILL
    [half] = tmp_path.glob("weights/*")
    other = half.with_name(half.name.replace(experiment().study, "another"))
    other.write_bytes(b"half")
    run(tmp_path)
    assert list(tmp_path.glob("weights/*")) == [other]
    assert read(tmp_path)["status"].isin(["finished", "halved"]).all()


@pytest.mark.parametrize("engine", ["optuna", "population"])
def test_killed_at_any_moment(tmp_path, engine, start):
    """Ten kills for each engine, twenty in all. Three of four come while trials train."""
    folder, notes, trials = tmp_path / "runs", tmp_path / "notes.jsonl", 12
    rng = random.Random(f"kills of {engine}")

    def heard():
        """The last line may be half written."""
        return [json.loads(line) for line in notes.read_text().split("\n")[:-1]] if notes.exists() else []

    def has_come(moment, process, before):
        return not process.is_alive() or any(moment in note for note in heard()[before:])

    kills = 0
    while kills < KILLS:
        before = len(heard())
        process = start(run_to_be_killed, folder, engine, trials)
        wait_until(has_come, "working" if kills % 4 else "begin", process, before)
        process.join(rng.uniform(0, 0.6))
        if process.is_alive():
            process.kill()
            kills += 1
        process.join()
        if process.exitcode == 0:
            trials += 6  # it was done before its time: more to do
        else:
            assert process.exitcode == -signal.SIGKILL
    process = start(run_to_be_killed, folder, engine, trials)
    process.join(600)
    assert process.exitcode == 0

    runs = read(folder)
    counts = runs.groupby("seed")["trial"].agg(["size", "nunique"])
    assert set(counts["size"]) == set(counts["nunique"]) == {trials}
    said = heard()
    # None ran twice: of every point, one training came to its end, but for those that were killed right then.
    trained = [(n["seed"], json.dumps(n["point"], sort_keys=True)) for n in said if "trained" in n]
    stored = {(s, json.dumps(c, sort_keys=True)) for s, c in zip(runs["seed"], runs["configuration"], strict=True)}
    assert stored <= set(trained)
    assert len(trained) - len(set(trained)) <= kills
    finished = [(n["seed"], n["trained"]) for n in said if "trained" in n]
    assert len(set(finished)) == len(finished)
    lost = [number for n in said for number in n.get("lost", [])]
    assert lost, "no kill hit a trial in flight"
    for seed in PROTOCOL.seeds:
        name = f"solar-bsat-6-l-rope+lpe-{seed}-{experiment(trials=trials).study}"
        study = [r for r in read_records(folder / "studies.db", name) if r.finished]
        mine = runs[runs["seed"] == seed]
        assert {r.number for r in study} == set(mine["trial"])
        best = min((r for r in study if r.value is not None), key=lambda r: (r.value, r.number))
        assert best.number == select(mine, 1)["trial"].item()
        assert math.isclose(best.rmse, mine["val_rmse"].min())
    assert select(runs, 2)["test_rmse"].notna().all()
    assert not list(folder.glob("weights/*"))


def test_unknown_names():
    for words, message in (
        ({"dataset": "etth2"}, "Did you mean etth1"),
        ({"model": "informer"}, "`model` must be one of"),
        ({"encoding": "alibi"}, "`encoding` must be one of"),
        ({"tokens": 9999}, "fewer than the lookback"),
    ):
        with pytest.raises(ValueError, match=message):
            Experiment(**{"dataset": "etth1", **words})
