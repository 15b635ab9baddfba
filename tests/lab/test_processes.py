"""Experiments side by side, each in a process of its own."""

import multiprocessing
import os
from functools import partial
from pathlib import Path

import pytest
from tiny_lab import POPULATION, experiment, make_tiny, run_or_not, run_tiny, watch_forever

from bsat.lab import read, runner
from bsat.lab.processes import run_side_by_side
from bsat.lab.runner import Watcher, run_experiments
from bsat.search import Local
from small import wait_until


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    make_tiny(monkeypatch.setitem, monkeypatch.setattr)


def test_the_same_runs_as_one_after_another(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "run_experiments", run_tiny)  # by which name the processes get it
    heard = []
    watcher = Watcher(
        begin=lambda searches: heard.append(("begin", len(searches))),
        step=lambda step: heard.append(("step", step.experiment.model)),
        scored=lambda e, count: heard.append(("scored", e.model, count)),
    )
    cells = [experiment("uds", trials=2), experiment("patchtst", trials=2), experiment("uds", "lpe", trials=2)]
    choices = {"engine": POPULATION, "device": "cpu"}
    run_experiments(cells, tmp_path / "beside", processes=2, watcher=watcher, **choices)
    run_experiments(cells, tmp_path / "after", **choices)
    keys = ["model", "encoding", "seed", "trial"]
    beside, after = (read(tmp_path / name).sort_values(keys, ignore_index=True) for name in ("beside", "after"))
    assert len(beside) == 12
    for name in [*keys, "configuration", "val_rmse", "test_rmse"]:
        assert beside[name].equals(after[name]), name
    assert len({path.name.split("-")[-2] for path in (tmp_path / "beside").glob("runs-*.jsonl")}) == 2, "two processes"
    assert heard.count(("begin", 2)) == 3
    assert {word[1] for word in heard if word[0] == "step"} == {"uds", "patchtst"}
    assert sorted(word for word in heard if word[0] == "scored") == [("scored", "patchtst", 4)] + 2 * [
        ("scored", "uds", 4)
    ]
    run_experiments(cells, tmp_path / "beside", processes=2, watcher=watcher, **choices)
    assert heard[-3:].count(("scored", "uds", 0)) == 2, "all of it was there"


@pytest.mark.parametrize(("processes", "share"), [(2, 525), (3, 350), (8, 350)])
def test_processes_share_the_memory(tmp_path, monkeypatch, processes, share):
    """Of eight, three have something to do."""
    engines = []
    monkeypatch.setattr(runner, "free_memory", lambda device: 1500)
    monkeypatch.setattr(runner, "run_side_by_side", lambda *words: engines.append(words[-1].keywords["engine"]))
    cells = [experiment("uds", encoding) for encoding in ("lpe", "f-rope", "l-rope")]
    run_experiments(cells, tmp_path, engine=POPULATION, device="cpu", processes=processes)
    assert [engine.memory for engine in engines] == [share]


def test_no_more_processes_than_asked_for_and_all_that_is_said_is_heard(tmp_path):
    groups = [[experiment("uds", "lpe", trials=n)] for n in range(1, 6)]
    heard = []
    with pytest.warns(RuntimeWarning, match="take care") as warned:
        run_side_by_side(
            groups,
            2,
            Watcher(scored=lambda e, pid: heard.append((e.trials, pid))),
            partial(run_or_not, folder=tmp_path),
        )
    assert len(warned) == 2, "a process says it once"
    assert sorted(n for n, _ in heard) == [1, 2, 3, 4, 5]
    assert len({pid for _, pid in heard}) == 2
    assert os.getpid() not in {pid for _, pid in heard}


def test_an_error_is_that_of_the_process(tmp_path):
    groups = [[experiment("uds", "f-rope")], [experiment("uds", "f-rope+lpe")]]
    with pytest.raises(Exception, match="there is no room"):
        run_side_by_side(groups, 2, Watcher(), partial(run_or_not, folder=tmp_path))


def test_a_process_that_dies_is_named(tmp_path):
    with pytest.raises(RuntimeError, match=r"ran solar uds 6 l-rope ended with exit code 3\. .* run the same again"):
        run_side_by_side([[experiment("uds", "l-rope")]], 2, Watcher(), partial(run_or_not, folder=tmp_path))


def test_processes_end_with_the_one_that_began_them(tmp_path):
    process = multiprocessing.get_context("spawn").Process(target=watch_forever, args=(tmp_path,))
    alive = tmp_path / "alive"
    process.start()
    try:
        wait_until(lambda: not process.is_alive() or (alive.exists() and alive.read_text()))
        assert process.is_alive()
    finally:
        process.kill()
        process.join()
    child = int(alive.read_text())
    wait_until(lambda: not _is_running(child))


def _is_running(pid):
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rsplit(")", 1)[1].split()[0] != "Z"  # one that nobody has waited for is still listed


def test_with_a_population_only(tmp_path):
    with pytest.raises(ValueError, match=r"`processes` must be 1 with engine 'optuna'.*; got 2\. Use engine 'popul"):
        run_experiments([experiment()], tmp_path, engine=Local(), device="cpu", processes=2)
    with pytest.raises(ValueError, match="`processes` must be at least 1; got 0"):
        run_experiments([experiment()], tmp_path, engine=POPULATION, device="cpu", processes=0)
