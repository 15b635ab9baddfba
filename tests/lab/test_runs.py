"""The store of runs, and what may happen to it."""

import errno
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from bsat.lab import Experiment, Protocol, Run, Store, StoreError, read, read_protocol, runs, select
from bsat.lab.runs import KEY, decode, encode, pack, write_naive
from bsat.train.settings import Epoch, History

PROTOCOL = Protocol(max_epochs=4, seeds=(2025, 2026))
EXPERIMENT = Experiment("etth1", protocol=PROTOCOL)
TEST = {"rmse": 3.0, "mae": 2.0, "mse": 9.0, "smape": 30.0}


def make_run(trial=0, **changes):
    words = {
        "experiment": EXPERIMENT,
        "seed": 2025,
        "trial": trial,
        "configuration": {"d_model": 16, "learning_rate": 1e-3},
        "status": "finished",
        "reason": "patience",
        "val": {"rmse": 2.0 + trial},
        "curve": {"loss": [1.0, 0.5], "val_rmse": [3.0, 2.0 + trial]},
        "bases": [[10_000.0, 10_000.0], [9_000.5, 11_000.25]],
        "seconds": 1.5,
        "memory": None,
    }
    return Run(**{**words, **changes})


def run_python(code, *args, **rest):
    return subprocess.Popen([sys.executable, "-c", code, *map(str, args)], stdout=subprocess.PIPE, text=True, **rest)


HEAD = """
import sys
from bsat.lab import Experiment, Protocol, Run, Store, StoreError
protocol = Protocol(max_epochs=4, seeds=(2025, 2026))
def make_run(trial, size=60, seed=2025):
    return Run(experiment=Experiment("etth1", protocol=protocol), seed=seed, trial=trial, configuration={"x": trial},
               status="finished", val={"rmse": 1.0 + trial}, curve={"loss": [0.123456789] * size})
"""


# ---- what goes in comes out ------------------------------------------------------------------------------------------


def test_there_and_back(tmp_path):
    with Store(tmp_path / "a" / "store", PROTOCOL) as store:
        store.add(make_run(1, memory=np.int64(5), val={"rmse": np.float32(2.5), "mae": float("nan")}))
        store.add(make_run(0, status="halved", reason="rung 20"))
        store.add(make_run(2, status="failed", reason="diverged", val={}))
        store.add_test(EXPERIMENT, 2025, 0, TEST)
    frame = read(tmp_path / "a" / "store", PROTOCOL)
    assert frame[KEY].to_numpy().tolist() == [["etth1", "bsat", 45, "l-rope+lpe", 2025, t] for t in (0, 1, 2)]
    assert frame["status"].tolist() == ["halved", "finished", "failed"]
    assert frame["reason"].tolist() == ["rung 20", "patience", "diverged"]
    np.testing.assert_equal(frame["val_rmse"].to_numpy(), [2.0, 2.5, np.nan])
    np.testing.assert_equal(frame["val_mae"].to_numpy(), [np.nan] * 3)
    np.testing.assert_equal(frame["test_smape"].to_numpy(), [30.0, np.nan, np.nan])
    np.testing.assert_equal(frame["memory"].to_numpy(), [np.nan, 5.0, np.nan])
    assert frame["configuration"][0] == {"d_model": 16, "learning_rate": 1e-3}
    assert frame["bases"][1] == [[10_000.0, 10_000.0], [9_000.5, 11_000.25]]
    assert frame["curve"][0]["val_rmse"] == [3.0, 2.0]
    assert set(frame["versions"][0]) == {"bsat", "python", "numpy", "torch"}
    assert set(frame["protocol"]) == {PROTOCOL.hash}
    short = read(tmp_path / "a" / "store", curves=False)
    pd.testing.assert_frame_equal(short, frame.drop(columns=["curve", "bases"]))
    assert set(frame["experiment"]) == {EXPERIMENT.hash}


def test_a_file_is_plain_json_lines(tmp_path):
    with Store(tmp_path, PROTOCOL) as store:
        store.add(make_run(0))
        store.add_test(EXPERIMENT, 2025, 0, TEST)
    (path,) = tmp_path.glob("runs-*.jsonl")
    assert str(os.getpid()) in path.name
    frame = pd.read_json(path, lines=True)
    assert frame["kind"].tolist() == ["trial", "test"]
    assert frame["test_rmse"][1] == 3.0


def test_an_empty_store(tmp_path):
    Store(tmp_path, PROTOCOL).close()
    assert read_protocol(tmp_path) == PROTOCOL
    assert len(read(tmp_path)) == 0
    assert list(read(tmp_path)["val_rmse"]) == []
    assert not list(tmp_path.glob("runs-*")), "a file that stayed empty goes"
    assert len(select(read(tmp_path), 5)) == 0


def test_a_file_that_goes_while_others_read(tmp_path, monkeypatch):
    """A writer that wrote nothing takes its file along."""
    with Store(tmp_path, PROTOCOL) as store:
        store.add(make_run())
        idle = Store(tmp_path, PROTOCOL)
        whole = Path.read_bytes

        def read_bytes(path):
            idle.close()
            return whole(path)

        monkeypatch.setattr(Path, "read_bytes", read_bytes)
        assert idle.path.exists()
        assert len(read(tmp_path)) == 1
        assert not idle.path.exists()


def test_rows_do_not_depend_on_who_wrote_them(tmp_path):
    runs = [make_run(t, seed=s) for s in PROTOCOL.seeds for t in range(4)]
    random.Random(3).shuffle(runs)
    for k, name in enumerate(("one", "two")):
        for some in (runs[: 3 + k], runs[3 + k :]):
            with Store(tmp_path / name, PROTOCOL) as store:
                for run in some:
                    store.add(run)
    one, two = (read(tmp_path / name).drop(columns="written") for name in ("one", "two"))
    pd.testing.assert_frame_equal(one, two)


def test_from_history():
    epochs = [Epoch(k, 1e-3, 1.0 / (k + 1), 3.0 - k, 0.5, [1e4, 2e4 + k], 0.1) for k in range(3)]
    words = {"experiment": EXPERIMENT, "seed": 2025, "trial": 0, "configuration": {}}
    run = Run.from_history(History(epochs, 2, "max_epochs"), **words)
    assert (run.status, run.reason, run.val["rmse"]) == ("finished", "max_epochs after 3 epochs", 1.0)
    assert run.bases == [[1e4, 2e4], [1e4, 2e4 + 1], [1e4, 2e4 + 2]]
    assert run.curve == {"loss": [1.0, 0.5, 0.333333], "val_rmse": [3.0, 2.0, 1.0]}
    assert Run.from_history(History(epochs, 2, "halved"), **words).status == "halved"
    late = Run.from_history(History(epochs, 2, "diverged"), **words)
    assert (late.status, late.reason) == ("finished", "diverged after 3 epochs"), "its best weights are good"
    never = Run.from_history(History([], -1, "diverged"), **words)
    assert (never.status, never.val) == ("failed", {})
    with pytest.raises(ValueError, match="interrupted"):
        Run.from_history(History(epochs, 2, "interrupted"), **words)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"seed": 1}, ValueError, "one of the protocol's, 2025, 2026; got 1"),
        ({"trial": -1}, ValueError, "`trial` must be at least 0"),
        ({"status": "done"}, ValueError, "`status` must be one of 'finished', 'halved', 'failed'; got 'done'"),
        ({"status": "failed", "reason": ""}, ValueError, "must say why"),
        ({"val": {}}, ValueError, "must hold a finite rmse"),
        ({"val": {"rmse": float("inf")}}, ValueError, "must hold a finite rmse"),
    ],
)
def test_runs_that_cannot_be(changes, error, message):
    with pytest.raises(error, match=message):
        make_run(**changes)


def test_the_spread_is_that_of_the_end(tmp_path):
    with Store(tmp_path, PROTOCOL) as store:
        store.add(make_run(trial=0, bases=[[9_000.0, 12_345.0], [10_000.0, 10_025.5]]))
        store.add(make_run(trial=1, bases=[]))
    for curves in (True, False):
        spread = read(tmp_path, curves=curves)["spread"].tolist()
        assert spread[0] == 25.5
        assert np.isnan(spread[1])


@pytest.mark.parametrize(("width", "learns"), [(16, False), (32, True)])
def test_heads_of_a_single_pair_have_no_spread(tmp_path, width, learns):
    """It turns at frequency 1, whatever the base."""
    configuration = {"d_model": width, "n_heads": 8}
    with Store(tmp_path, PROTOCOL) as store:
        store.add(make_run(configuration=configuration, bases=[[1e4, 1e4]]))
    assert read(tmp_path)["spread"].notna().tolist() == [learns]


def test_what_json_does_not_know(tmp_path):
    with Store(tmp_path, PROTOCOL) as store:
        with pytest.raises(TypeError, match="`x` must hold numbers, words, lists and dicts; got <object"):
            store.add(make_run(configuration={"x": object()}))
        with pytest.raises(TypeError, match="names as keys; got 1"):
            store.add(make_run(configuration={1: 2}))
        with pytest.raises(ValueError, match="finite rmse, mae, mse, smape; mse is nan"):
            store.add_test(EXPERIMENT, 2025, 0, {**TEST, "mse": float("nan")})
        with pytest.raises(ValueError, match="`why` must be one of"):
            store.add_test(EXPERIMENT, 2025, 0, TEST, "curiosity")
    assert len(read(tmp_path)) == 0


# ---- torn and damaged lines ------------------------------------------------------------------------------------------


def test_a_line_torn_anywhere_is_passed_over(tmp_path, monkeypatch):
    monkeypatch.setattr(runs.time, "sleep", lambda seconds: None)
    with Store(tmp_path, PROTOCOL) as store:
        store.add(make_run(0))
        store.add(make_run(1))
    (path,) = tmp_path.glob("runs-*.jsonl")
    content = path.read_bytes()
    start = content.index(b"\n") + 1
    for end in {*range(start + 1, len(content), 9), *range(len(content) - 30, len(content))}:
        path.write_bytes(content[:end])
        with pytest.warns(RuntimeWarning, match="the last line of .* is torn"):
            assert read(tmp_path)["trial"].tolist() == [0]
    path.write_bytes(content)
    assert read(tmp_path)["trial"].tolist() == [0, 1]


def test_a_line_that_is_being_written_is_waited_for(tmp_path, monkeypatch):
    with Store(tmp_path, PROTOCOL) as store:
        store.add(make_run(0))
        store.add(make_run(1))
    (path,) = tmp_path.glob("runs-*.jsonl")
    content = path.read_bytes()
    path.write_bytes(content[:-20])
    monkeypatch.setattr(runs.time, "sleep", lambda seconds: path.write_bytes(content))
    assert read(tmp_path)["trial"].tolist() == [0, 1]  # and no warning


def test_no_changed_byte_goes_unseen():
    line = encode({"a": 1.5, "b": [1, 2], "c": "x"}).rstrip(b"\n")
    assert decode(line) == {"a": 1.5, "b": [1, 2], "c": "x"}
    for k in range(len(line)):
        for byte in (b"0", b"}", b"\x00"):
            if line[k : k + 1] != byte:
                assert decode(line[:k] + byte + line[k + 1 :]) is None


def test_a_damaged_line_in_the_middle(tmp_path):
    with Store(tmp_path, PROTOCOL) as store:
        for trial in range(3):
            store.add(make_run(trial))
    (path,) = tmp_path.glob("runs-*.jsonl")
    path.write_bytes(path.read_bytes().replace(b'"trial":1', b'"trial":7'))
    with pytest.warns(RuntimeWarning, match=r"line 2 of .* is damaged"):
        assert read(tmp_path)["trial"].tolist() == [0, 2]


def test_a_packed_store(tmp_path):
    """Pandas reads its file as it stands; a changed byte, or an end that is missing, does not go unseen."""
    with Store(tmp_path / "whole", PROTOCOL) as store:
        for trial in range(3):
            store.add(make_run(trial))
        store.add_test(EXPERIMENT, 2025, 0, TEST)
    path = pack(tmp_path / "whole", tmp_path / "small")
    assert pd.read_json(path, lines=True)["kind"].tolist() == ["trial", "test", "trial", "trial"]
    assert read(tmp_path / "small")["val_rmse"].tolist() == read(tmp_path / "whole")["val_rmse"].tolist()
    content = path.read_bytes()
    middle = len(content) // 2
    for damaged in (content[:middle], content[:middle] + b"#" + content[middle + 1 :], b"no archive"):
        path.write_bytes(damaged)
        with pytest.raises(StoreError, match=r"runs-packed.jsonl.xz cannot be read: "):
            read(tmp_path / "small")


@pytest.mark.parametrize("renamed", [0, 1, 2])
def test_packing_that_was_killed_can_be_done_again(tmp_path, monkeypatch, renamed):
    """After so many files."""
    with Store(tmp_path / "whole", PROTOCOL) as store:
        store.add(make_run(0))
    write_naive(tmp_path / "whole", PROTOCOL, "etth1", {"last value": TEST})
    rename, count = Path.replace, itertools.count()

    def be_killed(self, target):
        if next(count) == renamed:
            shutil.copy(self, self.with_name(f"{self.name}-killed"))
            raise SystemExit
        return rename(self, target)

    monkeypatch.setattr(Path, "replace", be_killed)
    with pytest.raises(SystemExit):
        pack(tmp_path / "whole", tmp_path / "small")
    monkeypatch.undo()
    assert len(list((tmp_path / "small").iterdir())) == renamed + 1
    pack(tmp_path / "whole", tmp_path / "small")
    assert sorted(path.name.split("-")[0] for path in (tmp_path / "small").iterdir()) == [
        "naive",
        "protocol.json",
        "runs",
    ]
    assert len(read(tmp_path / "small")) == 1
    with pytest.raises(StoreError, match="must be a new or empty folder"):
        pack(tmp_path / "whole", tmp_path / "small")


def test_after_a_torn_line_others_go_on(tmp_path):
    with Store(tmp_path, PROTOCOL) as store:
        store.add(make_run(0))
    (path,) = tmp_path.glob("runs-*.jsonl")
    with path.open("ab") as file:
        file.write(encode(make_run(1).to_dict())[:50])
    with Store(tmp_path, PROTOCOL) as store:
        store.add(make_run(1))
    with pytest.warns(RuntimeWarning, match="torn"):
        assert read(tmp_path)["trial"].tolist() == [0, 1]


# ---- many writers ----------------------------------------------------------------------------------------------------


def test_two_processes_write_at_once(tmp_path):
    code = HEAD + (
        "import time\n"
        "with Store(sys.argv[1], protocol) as store:\n"
        "    print('ready', flush=True); sys.stdin.readline()\n"
        "    for k in range(500): store.add(make_run(k, size=50 + k, seed=int(sys.argv[2])))\n"
    )
    writers = [run_python(code, tmp_path, seed, stdin=subprocess.PIPE) for seed in PROTOCOL.seeds]
    for writer in writers:
        assert writer.stdout.readline() == "ready\n"
    for writer in writers:
        writer.stdin.write("go\n")
        writer.stdin.flush()
    assert [writer.wait(600) for writer in writers] == [0, 0]
    for writer in writers:
        writer.stdin.close()
        writer.stdout.close()
    frame = read(tmp_path)
    assert frame.groupby("seed")["trial"].apply(list).to_dict() == {s: list(range(500)) for s in PROTOCOL.seeds}
    assert [len(c["loss"]) for c in frame["curve"]] == [50 + k for k in range(500)] * 2
    assert len(list(tmp_path.glob("runs-*.jsonl"))) == 2


def test_threads_share_a_store(tmp_path):
    with Store(tmp_path, PROTOCOL) as store:
        threads = [
            threading.Thread(target=lambda k=k: [store.add(make_run(10 * k + j)) for j in range(10)]) for k in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert read(tmp_path)["trial"].tolist() == list(range(40))
    assert len(list(tmp_path.glob("runs-*.jsonl"))) == 1


def test_a_forked_child_has_a_file_of_its_own(tmp_path):
    code = HEAD + (
        "import os\n"
        "store = Store(sys.argv[1], protocol); store.add(make_run(0)); child = os.fork()\n"
        "store.add(make_run(1 if child else 2)); store.close()\n"
        "if child: os.waitpid(child, 0)\n"
    )
    child = run_python(code, tmp_path)
    assert child.wait(600) == 0
    child.stdout.close()
    assert read(tmp_path)["trial"].tolist() == [0, 1, 2]
    assert len(list(tmp_path.glob("runs-*.jsonl"))) == 2


@pytest.mark.parametrize("where", ["write", "fsync"])
def test_killed_in_the_middle_of_a_write(tmp_path, where):
    """The writer stops with half a line in the file, or with a whole one not yet synced, and is killed there."""
    code = HEAD + (
        "import os, time\n"
        "store = Store(sys.argv[1], protocol); store.add(make_run(0)); write, fsync = os.write, os.fsync\n"
        "def stop(): print('now', flush=True); time.sleep(60)\n"
        "def half(handle, data): write(handle, data[: len(data) // 2]); stop()\n"
        "if sys.argv[2] == 'write': os.write = half\n"
        "else: os.fsync = lambda handle: stop()\n"
        "store.add(make_run(1))\n"
    )
    writer = run_python(code, tmp_path, where)
    assert writer.stdout.readline() == "now\n"
    os.kill(writer.pid, signal.SIGKILL)
    assert writer.wait() == -signal.SIGKILL
    writer.stdout.close()
    if where == "write":
        with pytest.warns(RuntimeWarning, match="the last line of .* is torn"):
            assert read(tmp_path)["trial"].tolist() == [0]
    else:
        assert read(tmp_path)["trial"].tolist() == [0, 1]
    with Store(tmp_path, PROTOCOL) as store:
        store.add(make_run(2))
    assert read_quietly(tmp_path)["trial"].tolist() == ([0, 2] if where == "write" else [0, 1, 2])


def test_killed_at_any_moment(tmp_path):
    """Whatever `add` returned from is there, whenever the writer is killed, and the next one goes on."""
    code = HEAD + (
        "store = Store(sys.argv[1], protocol)\n"
        "for k in range(int(sys.argv[2]), 10**6):\n"
        "    store.add(make_run(k)); print(k, flush=True)\n"
    )
    rng, start = random.Random(11), 0
    for _ in range(6):
        writer = run_python(code, tmp_path, start)
        assert int(writer.stdout.readline()) == start
        time.sleep(rng.uniform(0, 0.15))
        os.kill(writer.pid, signal.SIGKILL)
        said = [start, *(int(line) for line in writer.stdout.read().split("\n")[:-1])]
        assert writer.wait() == -signal.SIGKILL
        writer.stdout.close()
        frame = read_quietly(tmp_path)
        assert frame["trial"].tolist() == list(range(len(frame))), "each once, and none missing"
        assert len(frame) in (said[-1] + 1, said[-1] + 2), "at most one more was written than was told"
        start = len(frame)


def read_quietly(folder):
    import warnings

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the last line of .* is torn", RuntimeWarning)
        return read(folder)


# ---- another protocol ------------------------------------------------------------------------------------------------


def test_a_store_of_another_protocol(tmp_path):
    with Store(tmp_path, PROTOCOL) as store:
        store.add(make_run(0))
        with pytest.raises(StoreError, match=r"must share its protocol .* \(max_epochs 5 instead of 4\)"):
            store.add(make_run(experiment=EXPERIMENT.under(max_epochs=5)))
    other = Protocol(max_epochs=5, seeds=(2025, 2026))
    for attempt in (lambda: Store(tmp_path, other), lambda: read(tmp_path, other)):
        with pytest.raises(
            StoreError, match=rf"{other.short}; it is one of {PROTOCOL.short} \(max_epochs 4 instead of 5"
        ):
            attempt()
    assert len(read(tmp_path, PROTOCOL)) == 1


def test_a_file_of_another_protocol_in_the_folder(tmp_path):
    with Store(tmp_path / "a", PROTOCOL) as store:
        store.add(make_run(0))
    other = EXPERIMENT.under(max_epochs=5)
    with Store(tmp_path / "b", other.protocol) as store:
        store.add(make_run(0, experiment=other))
    (path,) = (tmp_path / "b").glob("runs-*.jsonl")
    path.rename(tmp_path / "a" / path.name)
    with pytest.raises(StoreError, match=rf"line 1 of {path.name} is of {other.protocol.short}"):
        read(tmp_path / "a")


def test_of_two_who_make_a_store_at_once_one_is_refused(tmp_path):
    for k in range(20):
        folder, outcomes, barrier = tmp_path / str(k), [], threading.Barrier(2)

        def attempt(trials, folder=folder, outcomes=outcomes, barrier=barrier):
            barrier.wait()
            try:
                Store(folder, Protocol(max_epochs=trials)).close()
                outcomes.append(trials)
            except StoreError:
                outcomes.append(None)

        threads = [threading.Thread(target=attempt, args=(t,)) for t in (1, 2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert outcomes.count(None) == 1
        assert read_protocol(folder).max_epochs in outcomes
        assert [p.name for p in folder.iterdir()] == ["protocol.json"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text[:30], "must be JSON; it is damaged"),
        (lambda text: text.replace('"max_epochs": 4', '"max_epochs": 5'), "must have the hash of what it says"),
        (lambda text: text.replace('"max_epochs"', '"max_epoch"'), "missing: max_epochs; unknown: max_epoch"),
        (lambda text: text.replace('"format": 1', '"format": 9'), "newer bsat"),
        (lambda text: "[]", "must describe a protocol"),
    ],
)
def test_a_damaged_protocol(tmp_path, change, message):
    Store(tmp_path, PROTOCOL).close()
    path = tmp_path / "protocol.json"
    path.write_text(change(path.read_text()))
    with pytest.raises(StoreError, match=message):
        read(tmp_path)


def test_no_store(tmp_path):
    with pytest.raises(StoreError, match=r"must be a store of runs; it has no protocol\.json"):
        read(tmp_path)


# ---- records that meet -----------------------------------------------------------------------------------------------


def test_two_records_of_one_run(tmp_path):
    with Store(tmp_path, PROTOCOL) as store:
        store.add(make_run(0))
        store.add(make_run(0))
        assert len(read(tmp_path)) == 1, "the same again is nothing new"
        time.sleep(0.002)
        store.add(make_run(0, val={"rmse": 1.0}))
    with pytest.warns(RuntimeWarning, match=r"two different trial records of dataset etth1.* trial 0; the first"):
        assert read(tmp_path)["val_rmse"].tolist() == [2.0]


def test_a_failed_run_that_was_repeated(tmp_path):
    with Store(tmp_path, PROTOCOL) as store:
        store.add(make_run(0, status="failed", reason="out of memory", val={}))
        store.add(make_run(0))
    assert read(tmp_path)["status"].tolist() == ["finished"]


def test_test_scores_without_a_run(tmp_path):
    with Store(tmp_path, PROTOCOL) as store:
        store.add_test(EXPERIMENT, 2026, 3, TEST)
    with pytest.warns(RuntimeWarning, match="test scores of .* seed 2026, trial 3, but not the run"):
        assert len(read(tmp_path)) == 0


def test_selection(tmp_path):
    with Store(tmp_path, PROTOCOL) as store:
        for trial, rmse in enumerate([5.0, 3.0, 3.0, 1.0]):
            store.add(make_run(trial, val={"rmse": rmse}, status="halved" if trial == 2 else "finished"))
        store.add(make_run(4, status="failed", reason="diverged", val={"rmse": 0.5}))
        store.add(make_run(0, seed=2026))
    chosen = select(read(tmp_path), 3)
    assert chosen[["seed", "trial", "rank"]].to_numpy().tolist() == [
        [2025, 3, 1],
        [2025, 1, 2],
        [2025, 2, 3],
        [2026, 0, 1],
    ]


# ---- disks -----------------------------------------------------------------------------------------------------------


def test_a_full_disk_loses_nothing(tmp_path):
    """The system itself cuts the write short: a file may not grow beyond 10,000 bytes."""
    code = HEAD + (
        "import json, resource, signal, pathlib\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "store = Store(sys.argv[1], protocol)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, resource.RLIM_INFINITY))\n"
        "for k in range(100):\n"
        "    try: store.add(make_run(k))\n"
        "    except StoreError as e: error = e; break\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))\n"
        "store.add(make_run(k + 1))\n"
        "print(json.dumps([k, str(error), str(error.rescued), error.line.decode()]))\n"
    )
    child = run_python(code, tmp_path / "store", env={**os.environ, "TMPDIR": str(tmp_path)})
    last, message, rescued, line = json.loads(child.communicate(timeout=600)[0])
    assert last > 3
    assert "could not be written" in message
    assert "bytes could be written" in message
    assert "What was there before is whole" in message
    assert rescued in message
    assert Path(rescued).read_text() == line
    assert read(tmp_path / "store")["trial"].tolist() == [*range(last), last + 1]
    Path(rescued).rename(tmp_path / "store" / Path(rescued).name)
    assert read(tmp_path / "store")["trial"].tolist() == list(range(last + 2))


@pytest.mark.parametrize("where", ["write", "fsync"])
@pytest.mark.parametrize("truncates", [True, False])
def test_a_disk_that_fails_and_comes_back(tmp_path, monkeypatch, where, truncates):
    store, fails = Store(tmp_path, PROTOCOL), threading.Event()
    store.add(make_run(0))
    write, fsync, truncate = os.write, os.fsync, os.ftruncate

    def failing_write(handle, data):
        if fails.is_set() and where == "write":
            return write(handle, data[:40])
        return write(handle, data)

    def failing_fsync(handle):
        if fails.is_set() and where == "fsync":
            raise OSError(errno.EIO, "Input/output error")
        return fsync(handle)

    def failing_truncate(handle, size):
        if not truncates:
            raise OSError(errno.EIO, "Input/output error")
        return truncate(handle, size)

    monkeypatch.setattr(os, "write", failing_write)
    monkeypatch.setattr(os, "fsync", failing_fsync)
    monkeypatch.setattr(os, "ftruncate", failing_truncate)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    fails.set()
    with pytest.raises(StoreError, match="no room for it elsewhere") as error:
        store.add(make_run(1))
    assert error.value.rescued is None
    assert decode(error.value.line.rstrip(b"\n"))["trial"] == 1
    fails.clear()
    store.add(make_run(1))
    store.add(make_run(2))
    store.close()
    assert read_quietly(tmp_path)["trial"].tolist() == [0, 1, 2]


def test_a_read_only_folder(tmp_path, monkeypatch):
    """Root may write anywhere, so the system's answer is played."""
    with Store(tmp_path, PROTOCOL) as store:
        store.add(make_run(0))
    real = os.open

    def read_only(path, flags, *rest, **words):
        if flags & os.O_CREAT:
            raise OSError(errno.EROFS, "Read-only file system", str(path))
        return real(path, flags, *rest, **words)

    monkeypatch.setattr(os, "open", read_only)
    for folder in (tmp_path, tmp_path / "new"):
        with pytest.raises(
            StoreError, match=r"must be a folder that can be written to; .*: Read-only.*Nothing was run"
        ):
            Store(folder, PROTOCOL)
    assert len(read(tmp_path)) == 1, "reading needs no leave to write"


def test_a_file_where_the_folder_should_be(tmp_path):
    (tmp_path / "store").write_text("")
    with pytest.raises(StoreError, match="must be a folder"):
        Store(tmp_path / "store", PROTOCOL)
