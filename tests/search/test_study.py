"""A search finds something, and nothing that happens to its process makes it lose, repeat or hide a trial."""

import json
import math
import multiprocessing
import os
import random
import signal
import subprocess
import sys
from dataclasses import replace
from unittest.mock import Mock

import numpy as np
import optuna
import pytest
import torch
from tiny_search import ENGINES, HALVING, SAMPLER, SPACE, TRAIN, make_data, search, search_to_be_killed

import bsat
from bsat.search import Categorical, Failed, Local, Population, Real, Sampler, Space, Whole, engines, read_records
from bsat.search.contract import Rungs
from bsat.search.engines import _work, pack_up, train_alone
from bsat.train import population
from bsat.train.bank import Bank
from bsat.train.population import Halving, Trained, Trial, train_population
from small import wait_until

pytestmark = pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
KILLS = 4


@pytest.fixture(scope="module")
def data():
    return make_data()


def load(folder, name="tiny"):
    return optuna.load_study(study_name=name, storage=f"sqlite:///{folder / 'study.db'}")


def key(point):
    return json.dumps(point, sort_keys=True)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_search_finds_better_points_than_its_first(tmp_path, data, engine):
    seen = []
    outcome = search(tmp_path, engine=engine, data=data, trials=12, report=seen.append)
    assert len(outcome.finished) == len(outcome.records) == 12
    first, best = outcome.records[0], outcome.best()[0]
    assert best.value < first.value
    study = load(tmp_path)
    assert (best.number, best.value) == (study.best_trial.number, study.best_value)
    assert {r.state for r in outcome.records} >= {"complete", "pruned"}
    assert len({key(r.point) for r in outcome.records}) == 12
    for r in outcome.records:
        SPACE.check(r.point)
        assert r.engine == engine
        assert r.value == min(e.val_scaled_rmse for e in r.history.epochs)
        assert study.trials[r.number].value == r.value  # of pruned ones, too
        assert (r.state == "pruned") == (r.history.stopped == "halved")
        if r.state == "pruned":
            assert len(r.history.epochs) in HALVING.rungs(TRAIN.max_epochs)
    last = seen[-1]
    assert (last.trials, last.done, last.running, last.failed) == (12, 12, 0, 0)
    assert last.pruned == sum(r.state == "pruned" for r in outcome.records)
    assert last.best == best.rmse
    assert last.best_number == best.number
    assert last.left == 0
    assert seen[0].left is None
    assert [p.done for p in seen] == sorted(p.done for p in seen)


def test_both_engines_train_the_same_networks(data):
    trial = SPACE.to_trial(SPACE.draw(3), bsat.BSplineTokenizer(8), train=TRAIN)
    alone = train_alone(0, trial, data, Mock(epoch=lambda *_: False))
    (packed,) = train_population([trial], data.train, data.val, deviation=data.deviation)
    assert alone.rmse == pytest.approx(packed.rmse, rel=1e-4)
    assert len(alone.history.epochs) == len(packed.history.epochs)
    assert set(packed.state) <= set(alone.state)


def test_the_random_phase_depends_on_the_seed_alone(tmp_path, data):
    def points(engine, **choices):
        outcome = search(tmp_path, engine=engine, data=data, trials=4, name=f"{engine}{choices}", **choices)
        return [r.point for r in outcome.records]

    assert points("optuna") == points("population")
    assert points("optuna", seed=2) == points("population", seed=2) != points("optuna")


def test_a_repeated_search_is_the_same_search(tmp_path, data):
    first, second = (search(tmp_path, data=data, name=n, trials=7) for n in ("one", "two"))
    assert [(r.point, r.value) for r in first.records] == [(r.point, r.value) for r in second.records]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_search_that_goes_on_is_the_search_that_never_stopped(tmp_path, data, engine):
    whole = search(tmp_path, engine=engine, data=data, name="whole", trials=7)
    for trials in (4, 7, 7):
        parts = search(tmp_path, engine=engine, data=data, name="parts", trials=trials)
    assert [(r.point, r.value) for r in parts.records] == [(r.point, r.value) for r in whole.records]
    assert parts.interrupted == []


def test_processes_of_a_search_that_is_killed(tmp_path):
    """kill -9 at random moments, each followed by a resume; the other engines are killed in `lab/test_runner.py`."""
    trials, engine = 10 + KILLS, "few"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "optuna", "bsat.search", "bsat.train.population"])
    rng, notes, known, kills = random.Random(engine), tmp_path / "notes.jsonl", {}, 0

    def count(moment):
        return notes.read_text().count(moment) if notes.exists() else 0

    def has_come(moment, process, before):
        return not process.is_alive() or count(moment) > before

    while True:
        process = context.Process(target=search_to_be_killed, args=(tmp_path, engine, trials))
        moment = "begin" if kills % 4 == 0 else "working"  # while the study is opened, or while trials train
        before = count(moment)
        process.start()
        try:
            wait_until(has_come, moment, process, before)
            process.join(rng.uniform(0, 4) if kills < KILLS else 600)
            if process.is_alive():
                assert kills < KILLS, "the search hangs"
                kills += 1
        finally:  # pytest would wait for it
            process.kill()
            process.join()
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL
        if (tmp_path / "study.db").exists():
            try:
                records = read_records(tmp_path / "study.db", "tiny")
            except ValueError:
                continue  # killed before there was a study
            finished = {r.number: (r.point, r.value, r.state) for r in records if r.finished}
            assert known.items() <= finished.items()  # nothing that had finished is lost or changed
            known = finished
    assert kills >= KILLS / 2

    records = read_records(tmp_path / "study.db", "tiny")
    finished = [r for r in records if r.finished]
    assert len(finished) == trials
    assert {r.state for r in records} <= {"complete", "pruned", "failed", "interrupted"}
    assert len({key(r.point) for r in finished}) == trials  # none twice
    lines = [json.loads(line) for line in notes.read_text().splitlines()]
    kept = [line["number"] for line in lines if "number" in line]
    assert len(kept) == len(set(kept))
    assert {r.number for r in finished} <= set(kept)
    interrupted = [r for r in records if r.state == "interrupted"]
    assert sorted(n for line in lines for n in line.get("lost", [])) == [r.number for r in interrupted]
    assert interrupted
    for r in interrupted:
        assert "interrupted: its process ended" in r.reason
        if set(r.point) == set(SPACE.ranges):
            assert sum(other.repeats == r.number for other in records) == 1
            assert sum(key(f.point) == key(r.point) for f in finished) == 1  # its point came to its end
    study = load(tmp_path)
    best = min((r for r in finished if r.state == "complete"), key=lambda r: r.value)
    assert (study.best_trial.number, study.best_value) == (best.number, best.value)
    # The random points are those of a search that nobody disturbed.
    undisturbed = search(tmp_path, engine=engine, name="quiet", trials=4)
    assert {key(r.point) for r in undisturbed.records} <= {key(r.point) for r in finished}


@pytest.mark.parametrize(("engine", "words"), [("optuna", "in flight (1 epochs done);"), ("population", "in flight;")])
def test_epochs_that_are_lost_are_told_where_they_are_known(tmp_path, data, engine, words):
    def stop(progress):
        if progress.epoch == 2:  # which is told next
            raise KeyboardInterrupt

    lost = []
    with pytest.raises(KeyboardInterrupt):
        search(tmp_path, engine=engine, data=data, trials=2, report=stop, lost=lost.extend)
    assert words in str(lost[0])


def test_what_was_lost_in_flight_is_told(tmp_path, data):
    def stop(progress):
        if progress.done == 2 and progress.epoch == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        search(tmp_path, data=data, trials=4, report=stop)
    records = read_records(tmp_path / "study.db", "tiny")
    assert [r.state for r in records][2:] == ["interrupted", "waiting"]
    assert "KeyboardInterrupt" in records[2].reason
    assert records[3].repeats == 2
    outcome = search(tmp_path, data=data, trials=4)
    assert outcome.interrupted == []  # it was set right at once
    assert outcome.records[3].point == records[2].point
    assert [r.state == "interrupted" for r in outcome.records] == [False, False, True, False, False]


@pytest.mark.parametrize("left", ["nothing", "half a point", "a point", "a result", "a queued point"])
def test_recovery_from_every_half_written_state(tmp_path, data, left):
    """What a process that was killed between two lines leaves behind."""
    whole = search(tmp_path, data=data, name="whole", trials=3)
    search(tmp_path, data=data, trials=1)
    study = load(tmp_path)
    study.sampler = SAMPLER.make(1, 1)
    trial = study.ask()
    if left == "half a point":
        trial.suggest_int("n_layers", 1, 1)
    elif left != "nothing":
        point = SPACE.suggest(trial)
    if left == "a result":
        done = load(tmp_path, "whole").trials[1].user_attrs["result"]
        trial.set_user_attr("result", done)
    if left == "a queued point":
        study.enqueue_trial(point, user_attrs={"repeats": trial.number, "point": point})
    seen = []
    outcome = search(tmp_path, data=data, trials=3, lost=seen.extend)
    assert [r.point for r in outcome.finished] == [r.point for r in whole.records]
    assert [r.value for r in outcome.finished] == [r.value for r in whole.records]
    if left == "a result":
        assert seen == outcome.interrupted == []
    else:
        assert seen == outcome.interrupted
        assert [item.number for item in seen] == [1]
        assert bool(seen[0].point) == (left in ("a point", "a queued point"))
        assert "trial 1" in str(seen[0])


@pytest.mark.parametrize("engine", ENGINES)
def test_a_trial_that_diverges_is_recorded_and_the_search_goes_on(tmp_path, data, engine):
    wild = replace(SPACE, learning_rate=Real(1e-4, 1e38, log=True))
    outcome = search(tmp_path, engine=engine, data=data, space=wild, trials=8, seed=5)
    failed = [r for r in outcome.records if r.state == "failed"]
    assert 0 < len(failed) < 8
    assert len(outcome.finished) == 8
    for r in failed:
        assert r.reason.startswith("diverged in its first epoch, at learning_rate = ")
        assert r.value is None
        assert load(tmp_path).trials[r.number].user_attrs["reason"] == r.reason
    assert math.isfinite(outcome.best()[0].value)


class Broken:
    """Trials of degree 2 break whoever trains them."""

    def __init__(self, degree=2):
        self.degree = degree

    def __call__(self, trial):
        if trial.tokenizer.degree == self.degree:
            raise MemoryError("no memory for\n degree 2")


@pytest.mark.parametrize("engine", ENGINES)
def test_a_trial_that_breaks_does_not_take_others_along(tmp_path, data, engine, monkeypatch):
    broken = Broken()
    alone, together = engines.train_alone, engines.train_population

    def train_alone(index, trial, *rest):
        broken(trial)
        return alone(index, trial, *rest)

    def population(trials, *rest, **choices):
        for trial in trials:
            broken(trial)
        yield from together(trials, *rest, **choices)

    monkeypatch.setattr(engines, "train_alone", train_alone)
    monkeypatch.setattr(engines, "train_population", population)
    outcome = search(tmp_path, engine=engine, data=data, trials=8)
    assert len(outcome.finished) == 8
    assert 0 < sum(r.state == "failed" for r in outcome.records) < 8
    for r in outcome.records:
        assert (r.state == "failed") == (r.point["degree"] == 2)
        assert r.reason == ("MemoryError: no memory for degree 2" if r.state == "failed" else "")


def test_tokens_that_break_do_not_take_others_along(tmp_path, data, monkeypatch):
    """Packs share them."""
    broken, fill = Broken(), Bank.fill

    def fill_or_not(self, source, index):
        broken(Mock(tokenizer=self.sources[source][0]))
        fill(self, source, index)

    monkeypatch.setattr(Bank, "fill", fill_or_not)
    outcome = search(tmp_path, engine="population", data=data, trials=8)
    assert {"failed", "complete", "pruned"} == {r.state for r in outcome.records}
    assert all((r.state == "failed") == (r.point["degree"] == 2) for r in outcome.records)


def test_a_failed_trial_leaves_no_generation_to_chance(tmp_path, data, monkeypatch):
    """Optuna's startup is of trials with a value: without a fourth one, all of the next generation would be random."""
    together, batches = engines.train_population, []

    def first_fails(trials, *rest, **choices):
        batches.append(len(trials))
        for trained in together(trials, *rest, **choices):
            if len(batches) == 1 and trained.index == 2:
                trained.history.epochs, trained.history.best_epoch = [], -1  # as one that diverged
            yield trained

    monkeypatch.setattr(engines, "train_population", first_fails)
    search(tmp_path, engine="population", data=data, trials=8)
    assert batches == [4, 1, 3]
    learned = [any("relative" in name for name in trial.system_attrs) for trial in load(tmp_path).trials]
    assert learned == [False] * 5 + [True] * 3


def test_an_interrupt_while_a_process_is_told_its_data_ends_that_process(data, monkeypatch):
    """A notebook keeps the error, and with it whatever knows of the process."""

    def press(self, word):
        raise KeyboardInterrupt

    before = set(multiprocessing.active_children())
    monkeypatch.setattr(engines._Worker, "answer", press)
    with pytest.raises(KeyboardInterrupt) as kept:
        engines._Worker(multiprocessing.get_context("spawn"), data, 1)
    wait_until(lambda: not set(multiprocessing.active_children()) - before)
    assert kept


def test_a_few_at_a_time(tmp_path, data):
    """Two processes share the work, and one that is killed takes only its own trial along."""
    killed = []

    def kill_one(progress):
        if progress.done == 4 and not killed:
            child = multiprocessing.active_children()[0]
            os.kill(child.pid, signal.SIGKILL)
            killed.append(child.pid)

    before, states = set(multiprocessing.active_children()), []
    outcome = search(
        tmp_path,
        engine=Local(at_once=2, halving=HALVING),
        data=data,
        trials=10,
        report=kill_one,
        keep=lambda _, trained: states.append(trained.state),
    )
    assert all(isinstance(a, torch.Tensor) for state in states for a in state.values())
    assert len(outcome.finished) == len({key(r.point) for r in outcome.finished}) == 10
    failed = [r for r in outcome.finished if r.state == "failed"]
    assert len(failed) <= 1
    assert all(r.reason == "its process ended with exit code -9" for r in failed)
    assert "pruned" in {r.state for r in outcome.finished}
    assert set(multiprocessing.active_children()) <= before
    one = search(tmp_path, data=data, trials=4, name="one")
    # The random points are those of one after another; of the same points come the same networks.
    alike = {key(r.point): r.history.epochs[0].val_rmse for r in outcome.finished if r.history}
    shared = [r for r in one.records if key(r.point) in alike]
    assert len(shared) >= 3
    assert all(alike[key(r.point)] == r.history.epochs[0].val_rmse for r in shared)


def test_a_pack_that_does_not_fit_is_halved_as_one_that_does(tmp_path, data, monkeypatch):
    """And a trial that does not fit even alone takes no other along."""
    begin, most, never = population._Run._begin, math.inf, None

    def run_out(self):
        if len(self.members) > most or never in [m.index for m in self.members]:
            raise RuntimeError("CUDA out of memory")
        begin(self)

    monkeypatch.setattr(population._Run, "_begin", run_out)
    engine = Population(startup=8, halving=HALVING)
    ends = []
    for most, never in [(math.inf, None), (2, None), (1, None), (math.inf, 5)]:
        outcome = search(tmp_path, engine=engine, data=data, name=f"{most} {never}")
        ends.append([(r.state, r.value, len(r.history.epochs) if r.history else 0) for r in outcome.records])
    assert "pruned" in {state for state, *_ in ends[0]}
    for other in ends[1:3]:
        assert [(state, epochs) for state, _, epochs in ends[0]] == [(state, epochs) for state, _, epochs in other]
        assert [value for _, value, _ in ends[0]] == pytest.approx([value for _, value, _ in other], rel=1e-5)
    assert [number for number, (state, *_) in enumerate(ends[3]) if state == "failed"] == [5]
    assert "pruned" in {state for state, *_ in ends[3]}


@pytest.mark.parametrize("room", [True, False])
def test_networks_come_from_their_processes_as_arrays(data, room):
    """Tensors would go through /dev/shm. What cannot be sent is told."""
    trial = SPACE.to_trial(SPACE.draw(3), bsat.BSplineTokenizer(8), train=replace(TRAIN, max_epochs=1))
    heard, sent = [pack_up(data), (7, trial), False], []

    def send(word):
        if isinstance(word, Trained) and not room:
            raise RuntimeError("no room")
        sent.append(word)

    def recv():
        if not heard:
            raise EOFError
        return heard.pop(0)

    _work(Mock(send=send, recv=recv), threads=1)
    epoch, result = sent
    assert epoch[0] == 7
    if room:
        assert result.state
        assert all(isinstance(a, np.ndarray) for a in result.state.values())
    else:
        assert result == Failed(7, "RuntimeError: no room")


def test_a_search_in_which_all_fails_gives_up(tmp_path, data):
    class Never(Local):
        def run(self, data, desks):
            while drawn := desks[0].draw(1):
                yield 0, Failed(drawn[0][0], "no disk")

    with pytest.raises(RuntimeError, match=r"10 trials in a row failed.*no disk.*start again"):
        search(tmp_path, engine=Never(), data=data, trials=50)
    assert len(read_records(tmp_path / "study.db", "tiny")) == 10


def test_rungs_are_those_of_optunas_pruner():
    """On values that nobody interrupted."""
    rng = np.random.default_rng(3)
    rungs = Rungs(Halving(2, 3), max_epochs=20)
    study = optuna.create_study(pruner=optuna.pruners.SuccessiveHalvingPruner(2, 3, 0))
    ended = []
    for _ in range(60):
        trial, best, ours, theirs = study.ask(), np.inf, None, None
        for epoch in range(1, 21):
            best = min(best, rng.uniform())
            trial.report(best, epoch)
            if rungs.ends(epoch, best):
                ours = epoch
            if trial.should_prune():
                theirs = epoch
            if ours or theirs:
                break
        assert ours == theirs
        ended.append(ours)
        study.tell(trial, best)
    assert {2, 6} <= set(ended)


def test_an_interruption_changes_nothing_about_halving(tmp_path, data):
    whole = search(tmp_path, data=data, name="whole", trials=8)

    def stop(progress):
        if progress.done >= 2 and progress.epoch == 3:  # behind the first rung
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        search(tmp_path, data=data, name="stopped", trials=8, report=stop)
    again = search(tmp_path, data=data, name="stopped", trials=8)
    ends = [[(r.state, r.value, len(r.history.epochs)) for r in o.finished] for o in (whole, again)]
    assert ends[0] == ends[1]
    assert len(again.records) > 8, "one was in flight"


@pytest.mark.parametrize("engine", ["optuna", "population", "few"])
def test_errors_of_who_listens_are_not_the_trials(tmp_path, data, engine):
    def broken(progress):
        if progress.epoch:
            raise OSError("the terminal is gone")

    with pytest.raises(OSError, match="the terminal is gone"):
        search(tmp_path, engine=engine, data=data, report=broken)
    assert not [r for r in read_records(tmp_path / "study.db", "tiny") if r.state == "failed"]


def test_a_damaged_file_is_told_as_one(tmp_path, data):
    (tmp_path / "study.db").write_bytes(b"garbage" * 1000)
    with pytest.raises(OSError, match=r"study.db cannot be used as the file of a study.*move the file away"):
        search(tmp_path, data=data)


def test_a_point_that_cannot_be_built_fails_and_the_search_goes_on(tmp_path, data):
    space = replace(SPACE, n_heads=Categorical((2, 3)), d_model=Categorical((8,)))
    outcome = search(tmp_path, data=data, space=space, trials=6)
    failed = [r for r in outcome.finished if r.state == "failed"]
    assert len(outcome.finished) == 6
    assert 0 < len(failed) < 6
    assert all("d_model" in r.reason for r in failed)
    with pytest.raises(ValueError, match="n_tokens"):
        search(
            tmp_path,
            data=data,
            name="degree",
            space=replace(SPACE, degree=Whole(1, 6)),
            tokenizer=bsat.BSplineTokenizer(6),
        )


def test_a_study_goes_on_only_as_it_began(tmp_path, data):
    search(tmp_path, data=data, trials=1)
    with pytest.raises(ValueError, match=r"must go on as it began, with seed = 1; got 2.*another name"):
        search(tmp_path, data=data, trials=1, seed=2)
    with pytest.raises(ValueError, match="with space = "):
        search(tmp_path, data=data, trials=1, space=replace(SPACE, dropout=Real(0, 0.3)))
    with pytest.raises(ValueError, match="with sampler = "):
        search(tmp_path, data=data, trials=1, sampler=Sampler(startup=5))


def test_one_process_at_a_time(tmp_path, data):
    def again(progress):
        with pytest.raises(BlockingIOError, match="by another process"):
            search(tmp_path, data=data)
        again.called = True

    search(tmp_path, data=data, trials=1, report=again)
    assert again.called


def test_many_studies_in_one_file(tmp_path, data):
    for name in ("a", "b"):
        search(tmp_path, data=data, trials=1, name=name)
    assert len(read_records(tmp_path / "study.db", "a")) == 1
    with pytest.raises(ValueError, match=r"must be a study of .*It holds: a, b\."):
        read_records(tmp_path / "study.db", "c")
    with pytest.raises(FileNotFoundError, match="must be the file of a search"):
        read_records(tmp_path / "nothing.db", "a")


def test_odd_paths(tmp_path, data):
    folder = tmp_path / "a {b} 100% ü"
    assert len(search(folder, data=data, trials=1).records) == 1
    assert (folder / "study.db").is_file()
    with pytest.raises(ValueError, match="question mark"):
        search(tmp_path / "what?", data=data, trials=1)


def test_batches():
    population = Population()
    assert [population.batch(n) for n in (0, 10, 40, 100)] == [40, 30, 32, 32]
    with pytest.raises(ValueError, match="at_once"):
        Local(at_once=0)
    with pytest.raises(ValueError, match="generation"):
        Population(generation=0)
    with pytest.raises(ValueError, match="`precision` must be one of"):
        Population(precision="float16")


def test_the_sampler_is_the_papers():
    sampler = Sampler().make(1, 0)
    assert (sampler._n_startup_trials, sampler._n_ei_candidates) == (40, 500)
    assert sampler._constant_liar
    assert sampler._multivariate
    assert sampler._group


def test_a_point_that_cannot_be_built_is_refused_before_anything_is_written(tmp_path, data):
    with pytest.raises(ValueError, match="multiple of n_heads"):
        search(tmp_path, data=data, space=replace(SPACE, n_heads=type(SPACE.n_heads)((3,))))
    assert list(tmp_path.iterdir()) == []


def test_without_optuna_everything_imports_and_a_search_says_what_it_needs(tmp_path):
    code = """
import sys
sys.modules["optuna"] = None
import bsat, bsat.search
assert len(bsat.search.Space().draw(1)) == 10
try:
    bsat.search.Sampler().make(1, 0)
except ImportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install 'bsat[search]'" in done.stdout


def test_a_default_trial_of_the_papers_space():
    trial = Space().to_trial(Space().draw(1), bsat.BSplineTokenizer())
    assert isinstance(trial, Trial)
