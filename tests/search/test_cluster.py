"""Ray Tune on a real cluster of two nodes on this machine: whoever dies, driver or node, the search goes on."""

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
from tiny_search import HALVING, SPACE, make_data, make_search, search

from bsat.atomic import replacing
from bsat.search import Categorical, Local, Real, Watch
from bsat.search import cluster as cluster_module
from bsat.search.cluster import MAX_FAILURES, Paused, Ray, _Desk, _Ledger, _train_on_node, read_trials, run_on_ray
from bsat.search.engines import pack_up, train_alone
from bsat.train import TrainConfig
from bsat.train.population import Halving
from conftest import full_disk
from small import wait_until

LONG = TrainConfig(batch_size=16, max_epochs=40, patience=40, grace=2)
"""Trials of a second or two."""
SLOW = Halving(grace=10, reduction=2)
HERE = Path(__file__).parent
QUICK_DEATH = {"RAY_health_check_initial_delay_ms": "1000", "RAY_health_check_period_ms": "500"}
SLOW_START = {"RAY_NUM_REDIS_GET_RETRIES": "120"}
"""How often, once a second, a node looks for the head, which may come up late."""


class Cluster:
    """A head and another node, each with what it started a family of processes; and drivers, in processes of their own,
    since Ray takes its settings from the environment once. The token is theirs alone: ports are open to all."""

    def __init__(self, folder):
        self.folder, self.nodes = folder, []
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.address = f"127.0.0.1:{port}"
        auth = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        quiet = {"RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}
        self.env = {**os.environ, **QUICK_DEATH, **SLOW_START, **auth, **quiet}
        self.words = ["--head", f"--port={port}", "--include-dashboard=false", f"--temp-dir={folder}"]

    def start(self, *words):
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--num-cpus=1", "--num-gpus=0"]
        command += ["--node-ip-address=127.0.0.1", f"--object-store-memory={80 * 2**20}", *words]
        with (self.folder / f"node{len(self.nodes)}.log").open("wb") as log:
            self.nodes.append(subprocess.Popen(command, env=self.env, stdout=log, stderr=log, start_new_session=True))

    def drive(self, folder, listen=None, **choices):
        """Search, and hand every word to `listen(process, words)`; returns exit code, words and errors."""
        paths = [str(HERE), str(HERE.parent / "train"), str(HERE.parent)]
        given = {"paths": paths, "address": self.address, "folder": str(folder), "trials": 7, "nodes": 0, **choices}
        with (self.folder / "driver.log").open("w+b") as errors:
            process = subprocess.Popen(
                [sys.executable, "-c", DRIVER, json.dumps(given)],
                env=self.env, stdout=subprocess.PIPE, stderr=errors, text=True,
            )  # fmt: skip
            late = threading.Timer(600, process.kill)
            late.start()
            try:
                words = []
                for line in process.stdout:
                    words.append(json.loads(line))
                    if listen is not None:
                        listen(process, words)
                process.wait()
                assert late.is_alive(), f"the driver did not end; its last word was {words[-1:]}; {self.logs()}"
            finally:
                late.cancel()
                kill([process])
            errors.seek(0)
            return process.returncode, words, errors.read().decode()

    def logs(self):
        return {path.name: path.read_text(errors="replace")[-3000:] for path in self.folder.glob("*.log")}


DRIVER = """
import json, os, sys, time
words = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # whatever Ray prints is not for us
given = json.loads(sys.argv[1])
sys.path[:0] = given["paths"]
import ray
from test_cluster import LONG, SLOW
from tiny_search import make_data, make_search
from bsat.search import Watch
from bsat.search.cluster import Ray, run_on_ray

def note(**content):
    print(json.dumps(content), file=words, flush=True)

if given["nodes"]:
    ray.init(address=given["address"], log_to_driver=False, logging_level="error")
    end = time.monotonic() + 300
    while len(alive := [n for n in ray.nodes() if n["Alive"]]) < given["nodes"]:
        if time.monotonic() > end:
            sys.exit(f"{given['nodes']} nodes must come up; these did: {alive}")
        time.sleep(0.1)
    note(nodes=sorted([n["NodeID"] for n in alive], key=lambda i: [
        "node:__internal_head__" not in n["Resources"] for n in alive if n["NodeID"] == i
    ]))
watch = Watch(
    report=lambda p: note(report=vars(p)),
    lost=lambda items: note(lost=[[i.number, i.saved, str(i)] for i in items]),
    keep=lambda number, trained: note(kept=number, rmse=trained.rmse, weights=len(trained.state)),
    done=lambda record: note(done=record.number),
)
search = make_search(train=LONG, trials=given["trials"])
outcome = run_on_ray(
    make_data(), search, Ray(given["address"], at_once=2, halving=SLOW), given["folder"], watch=watch
)
note(end=[r.number for r in outcome.records])
"""


def said(words, kind):
    return [word[kind] for word in words if kind in word]


def family(pids):
    """The living processes that come of these, by their parents."""
    children, states = {}, {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            pid, rest = path.read_text().split(" (", 1)
        except OSError:
            continue
        state, parent = rest.rsplit(") ", 1)[1].split()[:2]
        children.setdefault(int(parent), []).append(int(pid))
        states[int(pid)] = state
    found, ahead = set(), list(pids)
    while ahead:
        pid = ahead.pop()
        if states.get(pid, "Z") != "Z":
            found.add(pid)
        ahead += children.get(pid, [])
    return found


def kill(processes):
    """With all that they started."""
    pids = family([p.pid for p in processes])
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for process in processes:
        process.wait()
    wait_until(lambda: not pids & family(pids))


@pytest.fixture(scope="module")
def cluster():
    folder = Path(tempfile.mkdtemp(prefix="bsat-ray-", dir="/tmp"))  # a socket's path must be short
    both = Cluster(folder)
    try:
        both.start(*both.words)
        both.start(f"--address={both.address}")
        yield both
    finally:
        kill(both.nodes)
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def data():
    return make_data()


def contents(folder, name="tiny"):
    """What is written of each trial; others may be on their way to the disk."""
    paths = sorted((folder / name / "trials").glob("[0-9]*.json"))
    return {int(path.stem): json.loads(path.read_text()) for path in paths}


@contextmanager
def standing(process):
    """Meanwhile it does nothing. Its trials wait for it, too, after an epoch or two: they are told to go on."""
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
    try:
        yield
    finally:
        process.send_signal(signal.SIGCONT)


def flying(folder):
    """The trials in the middle of their training, some epochs before the first rung."""
    ledger = _Ledger(folder / "tiny")
    running = {n: trial for n, trial in contents(folder).items() if trial["state"] == "running"}
    return {n: trial for n, trial in running.items() if 2 < ledger.saved(n) < SLOW.grace - 2}


def test_a_node_dies_and_the_search_ends_with_all_its_trials(tmp_path, cluster, data):
    killed = []

    def listen(process, words):
        if killed or len(said(words, "done")) < 3:
            return
        (_, other), *_ = said(words, "nodes")
        with standing(process):
            killed.extend(n for n, trial in flying(tmp_path).items() if trial.get("nodes") == [other])
            if killed:
                kill([cluster.nodes[1]])

    code, words, errors = cluster.drive(tmp_path, listen, trials=8, nodes=2)
    assert code == 0, errors
    assert len(killed) == 1
    assert said(words, "end") == [list(range(8))]
    assert sorted(said(words, "done")) == sorted(said(words, "kept")) == list(range(8))
    assert said(words, "lost") == []
    records, trials = read_trials(tmp_path, "tiny"), contents(tmp_path)
    assert {r.state for r in records} <= {"complete", "pruned"}
    assert len({json.dumps(r.point) for r in records}) == 8
    ((head, other),) = said(words, "nodes")
    assert {node for trial in trials.values() for node in trial["nodes"]} == {head, other}
    assert [n for n, trial in trials.items() if trial["nodes"] == [other, head]] == killed
    kept = {word["kept"]: word for word in words if "kept" in word}
    for r in records:
        assert r.value == min(e.val_scaled_rmse for e in r.history.epochs)
        assert r.rmse == kept[r.number]["rmse"]
        assert kept[r.number]["weights"]
        assert (r.state == "pruned") == (r.history.stopped == "halved")
        assert len(r.history.epochs) in (SLOW.rungs(40) if r.state == "pruned" else [40])
    # The trial that moved is the one that it would have been, bit by bit.
    moved = records[killed[0]]
    alone = train_alone(0, make_search(train=LONG).build(moved.point), data, Mock(epoch=lambda *_: False))
    curve = [e.val_rmse for e in moved.history.epochs]
    assert curve == [e.val_rmse for e in alone.history.epochs][: len(curve)]
    assert [p for p in (tmp_path / "tiny" / "trials").iterdir() if p.is_dir()] == []  # no training is left
    seen = said(words, "report")
    last = seen[-1]
    assert [last[k] for k in ("trials", "done", "running", "failed", "left")] == [8, 8, 0, 0, 0]
    assert last["best"] == min(r.rmse for r in records)
    assert [p["done"] for p in seen] == sorted(p["done"] for p in seen)


def test_a_driver_dies_and_nothing_is_lost_or_repeated(tmp_path, cluster):
    def end_by(signal, done):
        """In the middle of a training, when so many trials have finished; once."""
        sent = []

        def listen(process, words):
            if sent or len(said(words, "done")) < done:
                return
            with standing(process):
                if flying(tmp_path):
                    process.send_signal(signal)
                    sent.append(signal)

        return listen

    code, first, _ = cluster.drive(tmp_path, end_by(signal.SIGKILL, 2))
    assert code == -signal.SIGKILL
    early = {n: c for n, c in contents(tmp_path).items() if c["state"] != "running"}
    assert len(early) >= 2
    late = sorted(set(contents(tmp_path)) - set(early))
    assert said(first, "lost") == []

    code, second, errors = cluster.drive(tmp_path, end_by(signal.SIGINT, len(early) + 1))
    assert code != 0
    assert "KeyboardInterrupt" in errors
    (lost,) = said(second, "lost")
    assert [number for number, _, _ in lost] == late
    assert any(saved > 0 and f"after {saved} whole epochs, which are kept" in text for _, saved, text in lost)
    assert said(second, "done")[: len(early)] == sorted(early)

    code, third, errors = cluster.drive(tmp_path)
    assert code == 0, errors
    assert errors == ""  # Ray and Optuna are quiet
    assert said(third, "end") == [list(range(7))]
    assert sorted(said(third, "done")) == list(range(7))
    end = contents(tmp_path)
    assert {n: end[n] for n in early} == early
    assert all(c["state"] in ("complete", "pruned") for c in end.values())
    assert len({json.dumps(c["point"]) for c in end.values()}) == 7
    kept = [number for words in (first, second, third) for number in said(words, "kept")]
    assert set(kept) == set(range(7))
    assert all(kept.count(n) == 1 for n in early)
    for begun in ("0002", "0003"):  # Tune never saw them again
        assert not {f"{n:04d}" for n in early} & {p.name[:4] for p in (tmp_path / "tiny" / "tune" / begun).iterdir()}
    # The random points are those of any engine that nobody disturbed.
    local = search(tmp_path, engine=Local(halving=HALVING), trials=4, name="local")
    assert [end[n]["point"] for n in range(4)] == [r.point for r in local.records]


def test_a_trial_that_fails_says_why_and_is_not_tried_again(tmp_path, data, monkeypatch, capfd):
    """On a Ray of its own, that leaves nothing behind."""
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    before, handler = dict(os.environ), signal.getsignal(signal.SIGINT)
    odd = replace(SPACE, n_heads=Categorical((2, 3)), learning_rate=Real(1e-4, 1e38, log=True))
    chosen = make_search(space=odd, trials=4, seed=14)  # among its random points are all three kinds
    outcome = run_on_ray(data, chosen, Ray(at_once=2, halving=HALVING), tmp_path)
    for r in outcome.records:
        if r.point["n_heads"] == 3:
            assert "multiple of n_heads" in r.reason
        elif r.point["learning_rate"] > 1e25:
            assert r.reason == f"diverged in its first epoch, at learning_rate = {r.point['learning_rate']:g}"
        else:
            assert r.reason == ""
        assert (r.state == "failed") == bool(r.reason)
        assert (r.value is r.rmse is r.history is None) == bool(r.reason)
    assert [r.number for r in outcome.records] == [0, 1, 2, 3]
    assert len({r.reason.split()[0] for r in outcome.records if r.reason}) == 2
    assert outcome.best()[0].number == 2
    assert list(home.iterdir()) == []
    assert dict(os.environ) == {**before, "RAY_CLIENT_MODE": "0"}  # which comes with the import of Ray
    assert signal.getsignal(signal.SIGINT) is handler
    assert capfd.readouterr() == ("", "")

    # It is whole: going on needs no Ray, and tells of all.
    told = []
    again = run_on_ray(data, chosen, Ray("127.0.0.1:1", halving=HALVING), tmp_path, watch=Watch(done=told.append))
    assert again.records == told == outcome.records


def test_a_trial_whose_worker_dies_comes_again_but_not_for_ever(tmp_path):
    """Tune may hear of one death twice, and give up a trial that the death of a node hit."""
    ledger = _Ledger(tmp_path, {})
    desk = _Desk(ledger, make_search(trials=2), Ray(), Watch())
    desk.open()
    point = SPACE.draw(1)
    assert desk.draw() == (0, None)
    ledger.draw(0, point)
    assert desk.draw() == (1, None)
    assert desk.draw() is None
    for _ in range(MAX_FAILURES):
        desk.give_up(0, point, "error.txt")
        assert desk.draw() == (0, point)
        assert desk.draw() is None
    desk.give_up(0, point, "error.txt")
    assert desk.draw() is None
    (record,) = ledger.records()
    assert (record.state, record.reason) == ("failed", "its worker died 4 times; Ray's account is in error.txt")
    assert desk.done == 1


def test_a_trial_half_written_is_none_and_goes_with_the_next_search(tmp_path):
    """Of a driver that is writing, or was killed while it wrote."""
    ledger = _Ledger(tmp_path, {})
    ledger.draw(0, SPACE.draw(1))
    with replacing(ledger.path(1)) as temporary:
        temporary.write_text('{"number": 1, "sta')
        half = shutil.copy(temporary, f"{temporary.with_suffix('')}-killed.json")
        assert [r.number for r in _Ledger(tmp_path).records()] == [0]
    ledger.path(1).unlink()
    assert [r.number for r in _Ledger(tmp_path).records()] == [0]
    assert [r.number for r in _Ledger(tmp_path, {}).records()] == [0]
    assert Path(half).exists(), "it may be someone's work"
    os.utime(half, (0, 0))
    assert [r.number for r in _Ledger(tmp_path, {}).records()] == [0]
    assert [path.name for path in ledger.trials.iterdir()] == ["0000.json"]


def test_a_full_disk_on_a_node_ends_the_search_and_no_trial_has_failed(tmp_path, data, monkeypatch):
    told, tune, ray = [], Mock(), Mock()
    tune.report = told.append
    ray.get_runtime_context().get_node_id.return_value = "node"
    monkeypatch.setattr(cluster_module, "import_ray", lambda part="": tune if part else ray)
    ledger, chosen, point = _Ledger(tmp_path, {"all": 1}), make_search(), SPACE.draw(1)
    ledger.draw(0, point)
    packed = pack_up(data)
    with full_disk(2000):
        _train_on_node({**point, "number": 0}, packed=packed, search=chosen, ledger=ledger, threads=1)
    (last,) = told
    assert last["reason"] == ""
    with pytest.raises(RuntimeError, match=r"training\.safetensors cannot be written: .*Make room, and go on"):
        _Desk(ledger, chosen, Ray(), Watch()).finish(0, point, last)
    assert [(r.state, r.finished) for r in ledger.records()] == [("running", False)]


def test_a_search_goes_on_only_as_it_began(tmp_path, data):
    def fail(record):
        raise RuntimeError("no further")

    home = tmp_path / "tiny"
    (home / "trials").mkdir(parents=True)
    done = {"number": 0, "state": "failed", "point": SPACE.draw(1), "reason": "no memory"}
    (home / "trials" / "0000.json").write_text(json.dumps(done))
    engine = Ray(halving=HALVING)
    with pytest.raises(RuntimeError, match="no further"):
        run_on_ray(data, make_search(), engine, tmp_path, watch=Watch(done=fail))
    for change in (
        {"seed": 2},
        {"space": replace(SPACE, dropout=Real(0, 0.3))},
        {"sampler": replace(make_search().sampler, startup=5)},
        {"train": LONG},
    ):
        (name,) = change
        with pytest.raises(ValueError, match=rf"must go on as it began, with {name} = .*another name"):
            run_on_ray(data, make_search(**change), engine, tmp_path)
    with pytest.raises(ValueError, match="with halving = "):
        run_on_ray(data, make_search(), Ray(), tmp_path)
    other = replace(data, mean=data.mean + 1)
    with pytest.raises(ValueError, match="with data = "):
        run_on_ray(other, make_search(), engine, tmp_path)
    assert [r.reason for r in read_trials(tmp_path, "tiny")] == ["no memory"]
    with pytest.raises(ValueError, match=r"must be a search in .*It holds: tiny\."):
        read_trials(tmp_path, "other")
    with pytest.raises(ValueError, match="name of a folder"):
        run_on_ray(data, make_search(name="a/b"), engine, tmp_path)


def test_settings_are_checked():
    with pytest.raises(ValueError, match="at_once"):
        Ray(at_once=0)
    with pytest.raises(ValueError, match="`gpus` must be"):
        Ray(gpus=-1)
    with pytest.raises(ValueError, match=r"Ray's client.*auto"):
        Ray("ray://head:10001")
    assert (Ray().at_once, Ray().halving, Ray().name) == (5, Halving(20, 3), "ray")


def test_what_was_lost_is_said():
    assert str(Paused(3, {}, 0, 0)) == "trial 3 was interrupted before its first epoch was whole; it begins again"
    assert str(Paused(3, {}, 0, 4)) == "trial 3 was interrupted after 4 whole epochs, which are kept; it goes on"


def test_without_ray_everything_imports_and_a_search_says_what_it_needs():
    code = """
    import sys
    sys.modules["ray"] = sys.modules["optuna"] = None
    from bsat.search.cluster import Ray, run_on_ray
    try:
        run_on_ray(None, None, Ray(), "nowhere")
    except ImportError as error:
        print(error)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True)
    assert "pip install 'bsat[cluster]'" in done.stdout
