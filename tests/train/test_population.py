"""A network trained beside others is the network that it would have been alone, whoever does the arithmetic."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny_training import SMALL, H, L, N, make_case, make_network
from torch import nn

import bsat
import cuda_on_cpu
from bsat import nvrtc
from bsat.data.windows import Windows
from bsat.model import NetworkConfig, build_network
from bsat.model.stacked import describe
from bsat.train import TokenBatches, TrainConfig, evaluate, learning_rate_factor, loop, population, train
from bsat.train import pack as pack_module
from bsat.train.bank import Bank, highest_degree
from bsat.train.checkpoint import Checkpoint
from bsat.train.pack import Pack, training_bytes
from bsat.train.population import Halving, Progress, Trial, train_population
from bsat.train.settings import draw_order

NO_DROPOUT = {"dropout": 0.0, "ff_dropout": 0.0, "attention_dropout": 0.0}
DROPOUT = {"dropout": 0.2, "ff_dropout": 0.1, "attention_dropout": 0.3}
FAST = {"batch_size": 64, "max_epochs": 2, "learning_rate": 3e-3}


@pytest.fixture(scope="module")
def case():
    return make_case()


def trial(tokenizer=None, *, network=None, **choices):
    return Trial(
        tokenizer or bsat.BSplineTokenizer(N),
        NetworkConfig(**{**SMALL, **(network or {})}),
        TrainConfig(**{**FAST, **choices}),
    )


def three(network=None, **choices):
    """Different degrees, norms, widths, rates, decays and seeds, that fit into one pack."""
    network = network or {}
    return [
        trial(bsat.BSplineTokenizer(N, 3), network={**network}, seed=5, **choices),
        trial(bsat.BSplineTokenizer(N, 2), network={**network, "ff_factor": 4}, seed=6, weight_decay=0.1, **choices),
        trial(
            bsat.BSplineTokenizer(N, 1),
            network={**network, "norm": "window", "ff_factor": 1},
            seed=7,
            **{**choices, "learning_rate": 1e-2},
        ),
    ]


def populate(trials, case, **choices):
    """By index."""
    train_windows, val_windows, _ = case.windows
    found = list(train_population(trials, train_windows, val_windows, deviation=case.deviation, **choices))
    assert sorted(t.index for t in found) == list(range(len(trials)))
    assert all(t.trial is trials[t.index] for t in found)
    return sorted(found, key=lambda t: t.index)


def build(one):
    with torch.random.fork_rng([]):
        torch.manual_seed(one.train.seed)
        return build_network(one.network, one.tokenizer, lookback=L, horizon=H)


def batches(one, network, windows):
    return TokenBatches(windows, one.tokenizer, network, keep=True)


def solo(one, case, **choices):
    """`train` as a user calls it."""
    network = build(one)
    train_windows, val_windows = case.windows[0], case.windows[1].some(one.train.epoch_windows)
    sets = batches(one, network, train_windows), batches(one, network, val_windows)
    return train(network, *sets, one.train, **case.scaling, **choices), network


def restored(trained):
    network = build(trained.trial)
    missing, unexpected = network.load_state_dict(trained.state, strict=False)
    assert unexpected == []
    assert all(name.endswith("num_batches_tracked") for name in missing)
    return network.eval()


def check_best(trained, case):
    """Its best weights give its best score."""
    network, windows = restored(trained), case.windows[1].some(trained.trial.train.epoch_windows)
    scores = evaluate(network, batches(trained.trial, network, windows), case.mean, case.deviation)
    best = trained.history.best
    assert scores.rmse == pytest.approx(best.val_rmse, rel=1e-5)
    assert scores.scaled_rmse == pytest.approx(best.val_scaled_rmse, rel=1e-5)
    assert trained.rmse == best.val_rmse
    assert best.val_scaled_rmse == min(e.val_scaled_rmse for e in trained.history.epochs)
    assert [float(b.detach().exp()) for b in network.log_bases()] == pytest.approx(best.bases, rel=1e-5)


def curves(history, *names):
    names = names or ("epoch", "learning_rate", "loss", "val_rmse", "val_scaled_rmse")
    return [getattr(e, name) for e in history.epochs for name in names]


def check_same(one, two, rel=1e-5):
    """All that was recorded, and the best weights."""
    assert (one.history.best_epoch, one.history.stopped) == (two.history.best_epoch, two.history.stopped)
    assert curves(one.history) == pytest.approx(curves(two.history), rel=rel)
    assert [e.bases for e in one.history.epochs] == [pytest.approx(e.bases, rel=rel) for e in two.history.epochs]
    assert one.state.keys() == two.state.keys()
    for name, a in one.state.items():
        b = two.state[name]
        if name.endswith("to_qkv.bias") and one.trial.network.encoding == "lpe":
            # Without RoPE the keys' bias adds the same to all scores of a query: a gradient of rounding alone, which
            # AdamW makes steps of.
            a, b = (torch.cat([c.chunk(3)[0], c.chunk(3)[2]]) for c in (a, b))
        torch.testing.assert_close(a, b, rtol=rel, atol=rel, msg=lambda m, name=name: f"{name}: {m}")


# ---- as alone --------------------------------------------------------------------------------------------------------

KINDS = {
    "l-rope+lpe": {},
    "spline head": {"network": {"head": "spline"}},
    "two layers, f-rope": {"network": {"encoding": "f-rope", "n_layers": 2}},
    "odd heads": {"network": {"encoding": "lpe", "d_model": 6}},
    "drawn windows": {"epoch_windows": 70},
    "one batch": {"batch_size": 1000, "epoch_windows": None},
}


@pytest.mark.parametrize("choices", KINDS.values(), ids=KINDS)
def test_members_learn_what_train_teaches(case, choices):
    """Without dropout, whose masks `train` draws in another way on a CPU. The biases before a batch norm have no
    gradient but rounding, which AdamW makes steps of; the loss does not feel them, but the running means do, so the
    scores agree to fewer digits."""
    trials = three(**{**choices, "network": {**NO_DROPOUT, **choices.get("network", {})}})
    found = populate(trials, case)
    assert [t.pack for t in found] == [3, 3, 3]
    for t, one in zip(found, trials, strict=True):
        history, _ = solo(one, case)
        assert curves(t.history, "epoch", "learning_rate", "loss") == pytest.approx(
            curves(history, "epoch", "learning_rate", "loss"), rel=1e-4
        )
        assert curves(t.history, "val_rmse") == pytest.approx(curves(history, "val_rmse"), rel=0.02)
        assert t.history.stopped == history.stopped == "max_epochs"
        assert [e.bases for e in t.history.epochs] == [pytest.approx(e.bases, rel=1e-4) for e in history.epochs]
    assert len({t.history.epochs[0].loss for t in found}) == 3


@pytest.mark.parametrize("choices", KINDS.values(), ids=KINDS)
def test_a_member_does_not_depend_on_who_is_beside(case, choices):
    trials = three(**{**choices, "network": {**DROPOUT, **choices.get("network", {})}})
    for t in populate(trials, case):
        (alone,) = populate([replace(t.trial)], case)
        assert (t.pack, alone.pack) == (3, 1)
        check_same(t, alone)
        check_best(t, case)


def test_the_order_of_trials_does_not_matter(case):
    trials = three(DROPOUT)
    for one, two in zip(populate(trials, case), reversed(populate(trials[::-1], case)), strict=True):
        check_same(one, two)


def test_dropout_has_an_effect_of_its_seed(case):
    one, two = (trial(network=DROPOUT, seed=seed) for seed in (1, 2))
    losses = [t.history.epochs[0].loss for t in populate([one, one, two], case)]
    assert losses[0] == losses[1] != losses[2]
    quiet = populate([trial(network=NO_DROPOUT, seed=1)], case)[0].history.epochs[0].loss
    assert abs(quiet - losses[0]) > 1e-3


@pytest.mark.parametrize(
    "tokenizer", [bsat.PatchTokenizer(N), bsat.DownsampleTokenizer(N)], ids=["patch", "downsample"]
)
def test_packs_of_other_tokens(case, tokenizer):
    trials = [trial(tokenizer, network={**NO_DROPOUT, "norm": norm}, seed=3) for norm in ("coefficients", "window")]
    found = populate(trials, case)
    assert [t.pack for t in found] == [2, 2]
    for t, one in zip(found, trials, strict=True):
        assert curves(t.history, "loss") == pytest.approx(curves(solo(one, case)[0], "loss"), rel=1e-4)
        check_best(t, case)


def test_tokenizers_that_found_different_clip_factors_are_told_apart(case):
    """They were made alike, but fitted to different series."""
    i = np.arange(600)
    series = np.sin(i / 9), np.random.default_rng(0).normal(size=600).cumsum()
    fitted = [bsat.BSplineTokenizer(N, clip_factor="auto").fit(y, lookback=L) for y in series]
    assert repr(fitted[0]) == repr(fitted[1])
    assert fitted[0].clip_factor_ != fitted[1].clip_factor_
    found = populate([trial(tokenizer, seed=1) for tokenizer in fitted], case)
    assert [t.pack for t in found] == [2, 2]
    assert found[0].history.epochs[0].loss != found[1].history.epochs[0].loss
    for t in found:
        check_best(t, case)


def test_different_shapes_are_trained_apart(case):
    trials = [
        trial(),
        trial(network={"n_layers": 2}),
        trial(batch_size=32),
        trial(epoch_windows=50),
        trial(bsat.PatchTokenizer(N)),
        trial(bsat.BSplineTokenizer(N + 2)),
        trial(network={"ff_factor": 4}, weight_decay=0.0, seed=3, patience=1),
        trial(bsat.BSplineTokenizer(N, feature="slope")),
    ]
    found = populate(trials, case)
    assert [t.pack for t in found] == [3, 1, 1, 1, 1, 1, 3, 3]
    for t in found:
        check_best(t, case)


@pytest.mark.parametrize("network", [{}, {"head": "spline"}, {"norm": "window"}], ids=["plain", "spline", "window"])
def test_gaps(network):
    """Missing samples in the past and in the future, of the train and the validation fold."""
    case = make_case(rows=3, gaps=True)
    for fold in (0, 1):
        assert all(
            torch.isnan(part(slice(None))).any() for part in (case.windows[fold].past, case.windows[fold].future)
        )
    trials = three({**NO_DROPOUT, **network})
    for t, one in zip(populate(trials, case), trials, strict=True):
        history, _ = solo(one, case)
        assert curves(t.history, "loss") == pytest.approx(curves(history, "loss"), rel=1e-4)
        check_best(t, case)


def test_scores_are_in_the_unit_of_each_series(case):
    """Their deviations differ tenfold."""
    assert case.deviation.max() > 5 * case.deviation.min()
    for t in populate(three(DROPOUT), case):
        check_best(t, case)
        assert t.history.best.val_rmse > 2 * t.history.best.val_scaled_rmse


def test_a_base_without_gradient_does_not_decay(case):
    """With heads of width 2 nothing but the decay could move it."""
    for t in populate([trial(network={"n_heads": 4}, weight_decay=10.0), trial(network={"n_heads": 4}, seed=1)], case):
        assert [e.bases for e in t.history.epochs] == [pytest.approx([1e4], rel=1e-5)] * 2


def test_weight_decay_and_rate_are_each_trials_own(case):
    choices = {"seed": 1, "network": NO_DROPOUT, "max_epochs": 1}
    plain, decayed, slow = populate(
        [
            trial(**choices),
            trial(**choices, weight_decay=30.0),
            trial(**{**choices, "learning_rate": 1e-9}),
        ],
        case,
    )
    name = "head.project.weight"
    steps = math.ceil(len(case.windows[0]) / 64)
    shrunk = float(decayed.state[name].norm() / plain.state[name].norm())
    assert shrunk == pytest.approx((1 - 30 * 3e-3 * learning_rate_factor(0)) ** steps, rel=1e-3)
    torch.testing.assert_close(slow.state[name], build(slow.trial).state_dict()[name], rtol=0, atol=1e-6)
    rates = [t.history.epochs[0].learning_rate for t in (plain, slow)]
    assert rates == pytest.approx([3e-3 * learning_rate_factor(0), 1e-9 * learning_rate_factor(0)])


def test_the_callers_random_state_is_left_alone(case):
    torch.manual_seed(99)
    before = torch.get_rng_state()
    populate(three(DROPOUT), case)
    assert torch.equal(torch.get_rng_state(), before)


# ---- the end of a training -------------------------------------------------------------------------------------------


def test_each_stops_when_its_own_patience_ends(case):
    """One learns on, one has a rate that leads nowhere; the pack shrinks, and those that go on do not notice."""
    common = {"max_epochs": 12, "network": DROPOUT}
    trials = [
        trial(**common, seed=1, grace=0, patience=1, learning_rate=0.5),
        trial(**{**common, "max_epochs": 5}, seed=2),
        trial(**common, seed=3),
        trial(**common, seed=4, grace=3, patience=2, learning_rate=0.5),
    ]
    found = populate(trials, case)
    lengths = [len(t.history.epochs) for t in found]
    assert [t.history.stopped for t in found] == ["patience", "max_epochs", "max_epochs", "patience"]
    assert lengths[1:3] == [5, 12]
    assert lengths[0] < 12
    assert 3 < lengths[3] < 12
    for t in found:
        config, best = t.trial.train, t.history.best_epoch
        if t.history.stopped == "patience":
            assert len(t.history.epochs) == max(best + 1 + config.patience, config.grace + 1)
        check_best(t, case)
        (alone,) = populate([t.trial], case)
        check_same(t, alone, rel=1e-4)


def test_the_best_weights_are_not_the_last(case):
    """Neither of a member that goes on, nor after the pack has shrunk."""
    trials = [trial(seed=s, max_epochs=3 + 4 * s, learning_rate=0.3, network=DROPOUT) for s in range(3)]
    found = populate(trials, case)
    assert any(t.history.best_epoch < len(t.history.epochs) - 1 for t in found)
    for t in found:
        check_best(t, case)


def test_a_member_that_diverges_takes_nobody_along(case):
    wild = trial(seed=5, learning_rate=1e38, network=DROPOUT, max_epochs=3)
    calm = [trial(seed=s, network=DROPOUT, max_epochs=3) for s in (1, 2, 3, 4)]
    found = populate([calm[0], wild, *calm[1:]], case)  # one of five: the pack does not shrink for it
    gone = found.pop(1)
    assert gone.history.stopped == "diverged"
    assert gone.history.best_epoch == -1
    assert gone.rmse == math.inf
    assert all(torch.isfinite(a).all() for a in gone.state.values())
    for t, one in zip(found, calm, strict=True):
        assert t.history.stopped == "max_epochs"
        check_same(t, populate([one], case)[0])


def test_results_come_as_they_finish(case):
    trials = [trial(seed=e, max_epochs=e) for e in (3, 1, 2, 3)]
    noted, order = [], []

    def report(progress):
        assert isinstance(progress, Progress)
        noted.append((progress.epoch, progress.finished, progress.members))

    train_windows, val_windows, _ = case.windows
    for t in train_population(trials, train_windows, val_windows, deviation=case.deviation, report=report):
        order.append((t.index, len(noted)))
    assert order == [(1, 0), (2, 1), (0, 2), (3, 2)]
    assert noted == [(0, 1, 4), (1, 2, 3), (2, 4, 2)]


def test_progress_knows_the_best(case):
    bests = []
    found = populate(three(), case, report=lambda progress: bests.append(progress.best))
    assert bests == sorted(bests, reverse=True)
    assert bests[-1] == min(t.rmse for t in found)


def test_what_a_training_took(case):
    for t in populate(three(), case):
        assert t.memory is None  # there is no device
        assert t.seconds == pytest.approx(sum(e.seconds for e in t.history.epochs))
        assert t.seconds > 0


# ---- halving ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("grace", "reduction", "epochs", "rungs"),
    [(20, 3, 100, [20, 60]), (1, 2, 9, [1, 2, 4, 8]), (5, 3, 5, []), (4, 3, 12, [4]), (4, 3, 13, [4, 12])],
)
def test_rungs(grace, reduction, epochs, rungs):
    assert Halving(grace, reduction).rungs(epochs) == rungs


def test_survivors():
    marks = {i: float(abs(i - 4)) for i in range(9)}
    assert Halving(1, 3).survivors(marks) == {3, 4, 5}
    assert Halving(1, 9).survivors(marks) == Halving(1, 100).survivors(marks) == {4}
    assert Halving(1, 2).survivors({0: math.nan, 1: 3.0, 2: math.inf, 3: 2.0, 4: 1.0, 5: 4.0}) == {3, 4}
    assert Halving(1, 2).survivors({0: 1.0}) == {0}
    assert Halving(1, 2).survivors({0: math.nan}) == Halving(1, 2).survivors({}) == set()


@pytest.mark.parametrize(
    ("grace", "reduction", "message"),
    [
        (0, 3, "`grace` must be at least 1; got 0"),
        (1, 1, "`reduction` must be at least 2; got 1"),
        (1.5, 2, "`grace` must be a whole number; got 1.5"),
        (1, True, "`reduction` must be a whole number; got True"),
    ],
)
def test_bad_halvings_are_refused(grace, reduction, message):
    with pytest.raises((ValueError, TypeError), match=message):
        Halving(grace, reduction)


def test_halving_ends_the_worse_ones(case):
    """Across packs; and those that survive are none the worse for it."""
    trials = [trial(seed=s, max_epochs=5, learning_rate=3e-3 * (1 + s), network=DROPOUT) for s in range(5)]
    trials += [trial(seed=s, max_epochs=5, network={**DROPOUT, "n_layers": 2}) for s in range(4)]
    whole, found = populate(trials, case), populate(trials, case, halving=Halving(2, 2))
    lengths = [len(t.history.epochs) for t in found]
    assert sorted(lengths) == [2] * 5 + [4] * 2 + [5] * 2  # 9 come to the rung at 2, 4 to that at 4, and 2 to the end

    def marks(epochs, some):
        return {i: min(e.val_scaled_rmse for e in whole[i].history.epochs[:epochs]) for i in some}

    first = marks(2, range(9))
    survivors = sorted(first, key=first.get)[:4]
    second = marks(4, survivors)
    last = sorted(second, key=second.get)[:2]
    assert {i for i in range(9) if lengths[i] > 2} == set(survivors)
    assert {i for i in range(9) if lengths[i] == 5} == set(last)
    for t, full in zip(found, whole, strict=True):
        assert t.history.stopped == ("max_epochs" if t.index in last else "halved")
        count = len(t.history.epochs)
        assert curves(t.history) == pytest.approx(curves(full.history)[: 5 * count], rel=1e-4)
        check_best(t, case)


def test_halving_with_drawn_windows(case):
    """A pack that shrinks draws for those that are left."""
    trials = [trial(seed=s, max_epochs=3, epoch_windows=40, network=DROPOUT) for s in range(4)]
    whole, found = populate(trials, case), populate(trials, case, halving=Halving(1, 2))
    assert sorted(len(t.history.epochs) for t in found) == [1, 1, 2, 3]
    for t, full in zip(found, whole, strict=True):
        assert curves(t.history) == pytest.approx(curves(full.history)[: 5 * len(t.history.epochs)], rel=1e-4)


def test_halving_after_some_have_stopped(case):
    """Those that came to their end before a rung are not compared, and not marked."""
    trials = [trial(seed=1, max_epochs=1), *(trial(seed=s, max_epochs=3) for s in (2, 3))]
    found = populate(trials, case, halving=Halving(2, 2))
    assert [t.history.stopped for t in found[:1]] == ["max_epochs"]
    assert sorted(t.history.stopped for t in found[1:]) == ["halved", "max_epochs"]
    everyone_done = populate(
        [trial(seed=s, max_epochs=2) for s in (1, 2)] + [trial(max_epochs=1)], case, halving=Halving(1, 2)
    )
    assert sorted(t.history.stopped for t in everyone_done) == ["halved", "max_epochs", "max_epochs"]


# ---- memory ----------------------------------------------------------------------------------------------------------


def test_packs_are_no_larger_than_memory_allows(case):
    trials = [trial(seed=s, network={**DROPOUT, "ff_factor": 1 + s % 2}, max_epochs=1) for s in range(5)]
    each = training_bytes(pack_module.stacked.describe(build(trials[1])), 64)
    source = trials[0].tokenizer, build(trials[0])
    tokens = sum(Bank.size(len(windows), source, L) for windows in case.windows[:2])
    together = populate(trials, case)
    for memory, sizes in [(tokens + 3 * each - 1, [1, 2]), (tokens, [1]), (1, [1]), (tokens + 100 * each, [5])]:
        found = populate(trials, case, memory=memory)
        assert sorted({t.pack for t in found}) == sizes
        for one, two in zip(together, found, strict=True):
            check_same(one, two)
    assert [t.pack for t in together] == [5] * 5


def seven(**choices):
    return [trial(seed=s, network=DROPOUT, max_epochs=3, learning_rate=3.0**-s, **choices) for s in range(1, 8)]


@pytest.mark.parametrize("epoch", [0, 1])
@pytest.mark.parametrize("most", [1, 2])
def test_a_pack_that_breaks_is_split_and_nothing_else_changes(case, monkeypatch, epoch, most):
    """Before the first rung, or behind it: all trials still meet there."""
    together = populate(seven(), case, halving=Halving(1, 2))
    run_epoch = Pack.run_epoch

    def run(self, at):
        if at == epoch and len(self) > most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        run_epoch(self, at)

    monkeypatch.setattr(Pack, "run_epoch", run)
    split = populate(seven(), case, halving=Halving(1, 2))
    assert sorted(t.history.stopped for t in split) == ["halved"] * 6 + ["max_epochs"]
    assert max(t.pack for t in split if len(t.history.epochs) > epoch) <= most
    for one, two in zip(together, split, strict=True):
        check_same(one, two)


@pytest.mark.parametrize("epoch_windows", [None, 70])
def test_a_trial_that_breaks_alone_fails_and_others_meet_at_the_rung(case, monkeypatch, epoch_windows):
    trials = seven(epoch_windows=epoch_windows)
    begin = population._Run._begin

    def broken(self):
        if any(m.index == 3 for m in self.members):
            raise MemoryError("no room")
        begin(self)

    monkeypatch.setattr(population._Run, "_begin", broken)
    failed, last = [], []
    windows = case.windows[:2]
    choices = {"deviation": case.deviation, "halving": Halving(1, 2)}
    found = list(
        train_population(
            trials,
            *windows,
            **choices,
            failed=lambda index, error: failed.append((index, str(error))),
            report=lambda progress: last.append(progress.finished),
        )
    )
    assert failed == [(3, "no room")]
    assert sorted(t.index for t in found) == [0, 1, 2, 4, 5, 6]
    assert sorted(t.history.stopped for t in found) == ["halved"] * 5 + ["max_epochs"]
    assert last[-1] == 7
    with pytest.raises(MemoryError, match="no room"):
        list(train_population(trials, *windows, **choices))


def test_errors_of_who_listens_split_nothing(case):
    def report(progress):
        raise OSError("the terminal is gone")

    with pytest.raises(OSError, match="the terminal is gone"):
        populate(seven(), case, report=report)


@pytest.mark.parametrize("encodings", [("lpe", "l-rope"), ("f-rope", "lpe")])
def test_packs_of_other_encodings_read_positions_of_their_own(case, encodings):
    network = {**NO_DROPOUT, "rotary_unit": "tokens"}
    trials = [trial(network={**network, "encoding": encoding}) for encoding in encodings]
    for k, mixed in enumerate(populate(trials, case)):
        (alone,) = populate([trials[k]], case)
        check_same(mixed, alone)


def test_larger_networks_take_more_memory():
    shape = pack_module.stacked.describe(build(trial()))
    size = training_bytes(shape, 64)
    assert training_bytes(shape, 128) > 1.5 * size
    for name in ("tokens", "width", "layers", "feed", "horizon"):
        assert training_bytes(replace(shape, **{name: 2 * getattr(shape, name)}), 64) > size
    assert training_bytes(replace(shape, spline=True), 64) > size
    wide = replace(shape, tokens=180, width=128, heads=4, feed=512, layers=3)
    assert 0.5 < training_bytes(wide, 128, brief=True) / training_bytes(wide, 128) < 1
    narrow = replace(wide, width=16, heads=8, feed=32)
    assert training_bytes(narrow, 128, brief=True) < training_bytes(narrow, 128)
    long = replace(narrow, tokens=200)  # where the slopes of scores are kept, and are most of it
    assert training_bytes(long, 128, brief=True) / training_bytes(long, 128) > 1.5


# ---- the banks -------------------------------------------------------------------------------------------------------


SOURCES = {
    "bspline": (bsat.BSplineTokenizer(N, 3), bsat.BSplineTokenizer(N, 1)),
    "bspline, gaps": (bsat.BSplineTokenizer(N, 2), bsat.BSplineTokenizer(N, 3)),
    "patch": (bsat.PatchTokenizer(N), bsat.PatchTokenizer(N)),
    "downsample": (bsat.DownsampleTokenizer(N), bsat.DownsampleTokenizer(N)),
}


@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize("network", [{}, {"head": "spline"}, {"norm": "window"}], ids=["plain", "spline", "window"])
def test_a_bank_holds_what_networks_read(kind, network):
    """The network on a bank's tokens forecasts what it forecasts on the windows, and the targets are theirs."""
    case = make_case(rows=3, gaps="gaps" in kind)
    windows = case.windows[0]
    trials = [trial(tokenizer, network=network, seed=s) for s, tokenizer in enumerate(SOURCES[kind])]
    networks = [build(one).eval() for one in trials]
    sources = [(one.tokenizer, own) for one, own in zip(trials, networks, strict=True)]
    bank = Bank(windows, sources)
    assert len(bank) == len(windows)
    index = torch.stack([torch.arange(0, 12), torch.arange(len(windows) - 12, len(windows)), torch.arange(40, 52)])
    whose = torch.tensor([1, 0, 1], dtype=torch.int32)
    batch, levels, targets = bank.take(index, whose)
    assert batch.values.shape[:3] == (3, 12, N)
    stack = pack_module.Stack([networks[w] for w in whose], pack_module.stacked.describe(networks[0]))
    forecast = pack_module.stacked.forward(stack, stack.views(), batch, None) * levels[..., 1:] + levels[..., :1]
    for m, w in enumerate(whose.tolist()):
        own = batches(trials[w], networks[w], windows)
        with torch.no_grad():
            wanted = loop.run(networks[w], own.inputs(index[m]))
        torch.testing.assert_close(forecast[m], wanted, rtol=1e-4, atol=1e-4)
        truth = targets[m] * levels[m, :, 1:] + levels[m, :, :1]
        torch.testing.assert_close(truth, own.targets(index[m]), rtol=1e-4, atol=1e-4, equal_nan=True)


def test_a_bank_of_drawn_windows():
    case = make_case()
    windows, tokenizers = case.windows[0], (bsat.BSplineTokenizer(N, 3), bsat.BSplineTokenizer(N, 2))
    sources = [(tokenizer, make_network(tokenizer, head="spline")) for tokenizer in tokenizers]
    whole, drawn = Bank(windows, sources), Bank(windows, sources, 20)
    assert (len(whole), len(drawn)) == (len(windows), 20)
    generator = torch.Generator().manual_seed(0)
    banks, rows = torch.tensor([0, 1], dtype=torch.int32), torch.arange(20).expand(2, -1)
    for _ in range(2):  # what was there is overwritten
        orders = torch.stack([torch.randperm(len(windows), generator=generator)[:20] for _ in sources])
        for source, order in enumerate(orders):
            drawn.fill(source, order)
        one, two = drawn.take(rows, banks), whole.take(orders, banks)
        for a, b in zip([*vars(one[0]).values(), *one[1:]], [*vars(two[0]).values(), *two[1:]], strict=True):
            assert torch.equal(a, b)


def test_the_size_of_a_bank_is_what_it_takes():
    case = make_case()
    splines = [bsat.BSplineTokenizer(N, degree) for degree in (1, 5, 3)]
    for tokenizers in (splines, [bsat.PatchTokenizer(N)]):
        for head in ("flatten", "spline"):
            sources = [(tokenizer, make_network(tokenizer, head=head)) for tokenizer in tokenizers]
            bank = Bank(case.windows[0], sources)
            held = [a for name, a in vars(bank).items() if isinstance(a, torch.Tensor) and name != "series"]
            taken = sum(a.numel() * a.element_size() for a in held)
            degree = highest_degree(sources)
            assert taken == sum(Bank.size(len(bank), source, L, degree) for source in sources)


# ---- refusals --------------------------------------------------------------------------------------------------------


def test_no_trials_are_refused(case):
    with pytest.raises(ValueError, match="`trials` must hold at least one trial; got none"):
        populate([], case)


def test_determinism_is_not_promised(case):
    with pytest.raises(ValueError, match="`deterministic` must be False in a population"):
        populate([trial(), trial(deterministic=True)], case)


def make_pack(case, networks, configs=None, count=None, banks=None, **choices):
    sources = [(case.tokenizer, network) for network in networks]
    configs = configs or [TrainConfig(**FAST)] * len(networks)
    train_bank, val_bank = Bank(case.windows[0], sources, count), Bank(case.windows[1], sources)
    banks = list(range(len(networks))) if banks is None else banks
    return Pack(networks, configs, train_bank, val_bank, banks, deviation=case.deviation, **choices)


def test_a_pack_takes_networks_of_one_shape_and_of_the_usual_parts(case):
    tokenizer = case.tokenizer
    usual = make_network(tokenizer)
    with pytest.raises(ValueError, match="may differ in their feed-forward width alone"):
        make_pack(case, [usual, make_network(tokenizer, n_layers=2)])
    other = make_network(tokenizer)
    other.encoder.layers[0].feed_forward[1] = nn.ReLU()
    with pytest.raises(ValueError, match="made by `build_network`"):
        make_pack(case, [usual, other])


def test_drawn_windows_cannot_be_shared(case):
    networks = [make_network(case.tokenizer, seed=s) for s in range(2)]
    configs = [TrainConfig(**FAST, epoch_windows=20)] * 2
    with pytest.raises(ValueError, match="needs a source for each network"):
        make_pack(case, networks, configs, 20, [0, 0])


def test_a_pack_sees_the_windows_that_train_would_see(case):
    """Every window once an epoch, in the order of its own seed."""
    networks = [make_network(case.tokenizer, seed=s) for s in range(2)]
    configs = [TrainConfig(**FAST, seed=s) for s in (4, 5)]
    pack = make_pack(case, networks, configs)
    seen = []
    take = pack.train.take
    pack.train.take = lambda index, banks: seen.append(index) or take(index, banks)
    for epoch in range(2):
        seen.clear()
        pack.run_epoch(epoch)
        orders = torch.cat(seen, 1)
        assert [i.shape[1] for i in seen] == [len(part) for part in orders[0].split(64)]
        for order, config in zip(orders, configs, strict=True):
            assert torch.equal(order, draw_order(len(case.windows[0]), config, epoch))
            assert order.sort().values.tolist() == list(range(len(case.windows[0])))


# ---- by kernels ------------------------------------------------------------------------------------------------------


@pytest.fixture
def kernels(monkeypatch):
    """From the call on, the CUDA kernels do the work, on the CPU."""
    return lambda: cuda_on_cpu.install(monkeypatch)


@pytest.fixture(scope="module")
def short():
    return make_case(rows=3, length=150, gaps=True)


@pytest.fixture(scope="module")
def shorter():
    return make_case(rows=2, length=140)


def ran_on(monkeypatch):
    """Which kind of step every epoch of a pack takes."""
    found = []
    run_epoch = Pack.run_epoch
    monkeypatch.setattr(Pack, "run_epoch", lambda self, e: found.append(self.fused is not None) or run_epoch(self, e))
    return found


KERNEL_KINDS = {
    "spline head": {"network": {"head": "spline"}},
    "drawn windows, two layers": {"epoch_windows": 40, "network": {"encoding": "l-rope", "n_layers": 2}},
    "lpe": {"network": {"encoding": "lpe"}},
    "positions in tokens": {"network": {"rotary_unit": "tokens"}},
}


@pytest.mark.parametrize("choices", KERNEL_KINDS.values(), ids=KERNEL_KINDS)
def test_kernels_do_what_plain_torch_does(short, kernels, monkeypatch, choices):
    """With dropout, gaps, several series, and a last batch that is smaller."""
    trials = three(**{**choices, "network": {**DROPOUT, **choices.get("network", {})}})
    plain, by = populate(trials, short), ran_on(monkeypatch)
    kernels()
    for one, two in zip(plain, populate(trials, short), strict=True):
        check_same(one, two)
    assert by == [True, True]


def test_kernels_on_tokens_that_do_not_move(shorter, kernels, monkeypatch):
    trials = [trial(bsat.PatchTokenizer(N), network={**DROPOUT, "norm": n}, seed=3) for n in ("coefficients", "window")]
    plain, by = populate(trials, shorter), ran_on(monkeypatch)
    kernels()
    for one, two in zip(plain, populate(trials, shorter), strict=True):
        check_same(one, two)
    assert by == [True, True]


def test_kernels_where_the_pack_shrinks(shorter, kernels):
    """At a rung, and when members stop or diverge; some with windows of their own."""
    common = {"network": DROPOUT, "max_epochs": 3, "epoch_windows": 40}
    trials = [trial(seed=s, **common) for s in range(4)] + [trial(seed=4, **{**common, "learning_rate": 1e38})]
    plain = populate(trials, shorter, halving=Halving(1, 2))
    assert sorted(t.history.stopped for t in plain) == ["diverged", "halved", "halved", "halved", "max_epochs"]
    kernels()
    for one, two in zip(plain, populate(trials, shorter, halving=Halving(1, 2)), strict=True):
        check_same(one, two, rel=1e-4)


def test_shapes_that_the_kernels_do_not_take_are_trained_by_plain_torch(shorter, kernels, monkeypatch):
    odd = [trial(seed=1, network={**DROPOUT, "encoding": "lpe", "d_model": 9, "n_heads": 3}, max_epochs=1)]
    plain, by = populate(odd, shorter), ran_on(monkeypatch)
    kernels()
    check_same(plain[0], populate(odd, shorter)[0])
    assert by == [False]


# ---- `train` by kernels ----------------------------------------------------------------------------------------------


class StoppedError(Exception):
    """By the test."""


@pytest.fixture
def engines(monkeypatch):
    """Which engine every training takes."""
    found = []
    for kind in (loop._Plain, loop._Captured):
        name = kind.__name__

        def make(*args, kind=kind, name=name):
            found.append(name)
            return kind(*args)

        monkeypatch.setattr(loop, name, make)
    return found


def stop_after(epochs):
    def report(epoch, step, loss, last):
        if last is not None and last.epoch == epochs:
            raise StoppedError

    return report


def record(history):
    return [replace(e, seconds=0.0) for e in history.epochs], history.best_epoch, history.stopped


@pytest.mark.parametrize("epoch_windows", [None, 40])
def test_train_by_kernels_is_a_population_of_one(shorter, kernels, engines, epoch_windows):
    one = trial(seed=3, network={**DROPOUT, "head": "spline"}, epoch_windows=epoch_windows)
    kernels()
    reported = []
    history, network = solo(one, shorter, report=lambda *a: reported.append((a[0], a[3].epoch if a[3] else None)))
    assert engines == ["_Captured"]
    assert reported == [(0, 0), (1, 1)]  # a captured step reports nothing
    (member,) = populate([one], shorter)
    assert curves(history) == pytest.approx(curves(member.history), rel=1e-6)
    assert history.best_epoch == member.history.best_epoch
    state = network.state_dict()
    for name, a in member.state.items():
        torch.testing.assert_close(state[name], a, rtol=1e-6, atol=1e-6)
    assert not network.training
    check_best(member, shorter)


def test_train_by_kernels_learns_what_plain_steps_learn(short, kernels, engines):
    one = trial(seed=3, network={**NO_DROPOUT, "encoding": "l-rope"})
    plain, _ = solo(one, short)
    kernels()
    captured, _ = solo(one, short)
    assert engines == ["_Plain", "_Captured"]
    assert curves(captured, "learning_rate", "loss") == pytest.approx(curves(plain, "learning_rate", "loss"), rel=1e-4)
    assert curves(captured, "val_rmse") == pytest.approx(curves(plain, "val_rmse"), rel=0.02)


def test_train_by_kernels_goes_on_where_it_was_stopped(shorter, kernels, engines, tmp_path):
    one = trial(seed=3, network=DROPOUT, max_epochs=3, epoch_windows=24, batch_size=16)
    kernels()
    history, network = solo(one, shorter)
    for epochs in (1, 2):
        checkpoint = Checkpoint(tmp_path, "mine", resume=epochs > 1)
        with pytest.raises(StoppedError):
            solo(one, shorter, checkpoint=checkpoint, report=stop_after(epochs))
    resumed, again = solo(one, shorter, checkpoint=Checkpoint(tmp_path, "mine", resume=True))
    assert set(engines) == {"_Captured"}
    assert len(resumed.epochs) == 3
    assert curves(resumed) == pytest.approx(curves(history), rel=1e-6)
    assert (resumed.best_epoch, resumed.stopped) == (history.best_epoch, history.stopped)
    state = again.state_dict()
    for name, a in network.state_dict().items():
        torch.testing.assert_close(state[name], a, rtol=1e-6, atol=1e-6)
    # A training that has come to its end is not begun again.
    assert record(solo(one, shorter, checkpoint=Checkpoint(tmp_path, "mine", resume=True))[0]) == record(resumed)


@pytest.mark.parametrize("captured_first", [True, False])
def test_a_checkpoint_of_one_engine_serves_the_other(shorter, kernels, engines, tmp_path, captured_first):
    """Weights, statistics and moments are handed on."""
    one = trial(seed=3, network={**NO_DROPOUT, "encoding": "l-rope"}, max_epochs=3)
    whole, _ = solo(one, shorter)
    engines.clear()
    kernels()
    captured, plain = one, replace(one, train=replace(one.train, deterministic=True))
    first, second = (captured, plain) if captured_first else (plain, captured)
    with pytest.raises(StoppedError):
        solo(first, shorter, checkpoint=Checkpoint(tmp_path, "mine", resume=False), report=stop_after(2))
    history, _ = solo(second, shorter, checkpoint=Checkpoint(tmp_path, "mine", resume=True))
    assert engines == (["_Captured", "_Plain"] if captured_first else ["_Plain", "_Captured"])
    assert curves(history, "loss") == pytest.approx(curves(whole, "loss"), rel=1e-4)
    assert [e.bases for e in history.epochs] == [pytest.approx(e.bases, rel=1e-4) for e in whole.epochs]


def test_plain_steps_where_kernels_will_not_do(shorter, kernels, engines, monkeypatch):
    kernels()
    one = trial(max_epochs=1)
    solo(replace(one, train=replace(one.train, deterministic=True)), shorter)
    assert engines == ["_Plain"]  # repeatable steps were asked for
    with monkeypatch.context() as patch:
        patch.setattr(loop, "free_memory", lambda device: 1000)
        solo(one, shorter)
    assert engines == ["_Plain"] * 2  # tokens would not find room
    network = build(one)
    network.encoder.layers[0].feed_forward[1] = nn.ReLU()
    sets = (batches(one, network, windows) for windows in shorter.windows[:2])
    train(network, *sets, one.train, **shorter.scaling)
    assert engines == ["_Plain"] * 3  # it has a part that they do not know
    solo(replace(one, network=replace(one.network, encoding="lpe", d_model=9, n_heads=3)), shorter)
    assert engines == ["_Plain"] * 4  # nor do they take an odd width
    solo(one, shorter)
    assert engines == [*["_Plain"] * 4, "_Captured"]


def test_ctrl_c_leaves_the_best_weights_of_captured_steps(shorter, kernels):
    one = trial(seed=3, network=DROPOUT, max_epochs=9)
    kernels()

    def report(epoch, step, loss, last):
        if epoch == 1:
            raise KeyboardInterrupt

    history, network = solo(one, shorter, report=report)
    assert history.stopped == "interrupted"
    scores = evaluate(network, batches(one, network, shorter.windows[1]), shorter.mean, shorter.deviation)
    assert scores.rmse == pytest.approx(history.best.val_rmse, rel=1e-5)
    assert not network.training


def test_captured_steps_that_diverge_say_so(shorter, kernels):
    kernels()
    with pytest.raises(FloatingPointError, match=r"no longer a number in epoch 0.*Lower `learning_rate`"):
        solo(trial(learning_rate=1e38), shorter)


# ---- what comes in is checked ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernels", [False, True])
def test_a_series_that_is_a_column_of_a_table(case, kernels, monkeypatch):
    """Kernels read numbers one after another, wherever torch has them."""
    if kernels:
        cuda_on_cpu.install(monkeypatch)
    trials = [trial(seed=3, max_epochs=1)]
    (want,) = populate(trials, case)
    table = torch.randn(len(case.windows[0].series), 3)
    table[:, 1] = case.windows[0].series
    windows = [Windows(table[:, 1], w.starts, w.rows, w.lookback, w.horizon, w.gaps) for w in case.windows]
    (got,) = populate(trials, replace(case, windows=windows))
    assert curves(got.history) == curves(want.history)


@pytest.mark.parametrize("kernels", [False, True])
def test_a_scaling_in_single_precision(case, kernels, monkeypatch):
    if kernels:
        cuda_on_cpu.install(monkeypatch)
    trials = [trial(seed=3, max_epochs=1)]
    (want,), (got,) = populate(trials, case), populate(trials, replace(case, deviation=case.deviation.float()))
    assert curves(got.history) == pytest.approx(curves(want.history), rel=1e-6)


def test_a_series_in_double_precision_is_refused(case):
    train_windows, val_windows = (
        Windows(w.series.double(), w.starts, w.rows, w.lookback, w.horizon, w.gaps) for w in case.windows[:2]
    )
    with pytest.raises(TypeError, match=r"float32 to train on; got torch\.float64\. Use series\.float\(\)"):
        list(train_population([trial()], train_windows, val_windows, deviation=case.deviation))


@pytest.mark.parametrize("fold", [0, 1])
def test_an_empty_fold_is_refused(case, fold):
    windows = list(case.windows[:2])
    w = windows[fold]
    windows[fold] = Windows(w.series, w.starts[:0], w.rows[:0], w.lookback, w.horizon, w.gaps)
    with pytest.raises(ValueError, match=f"the {('train', 'validation')[fold]} fold must hold at least one window"):
        list(train_population([trial()], *windows, deviation=case.deviation))


def test_validation_windows_do_not_depend_on_the_others(case):
    """A train fold of few windows, and a limit that cuts the validation fold alone."""
    few = case.windows[0].some(4)
    assert len(case.windows[1]) > 5
    cut = replace(case, windows=[few, case.windows[1], case.windows[2]])
    one, other = trial(epoch_windows=5, max_epochs=1), trial(epoch_windows=None, max_epochs=1)
    alone = [populate([t], cut)[0].rmse for t in (one, other)]
    assert alone[0] != alone[1]
    for order in ([one, other], [other, one]):
        beside = [t.rmse for t in populate(order, cut)]
        assert beside == pytest.approx(alone if order[0] is one else alone[::-1], rel=1e-6)


def test_memory_of_shapes_that_the_kernels_do_not_take():
    """Plain torch keeps attention weights; the estimate must say so."""
    network = make_network(bsat.BSplineTokenizer(N))
    shape = describe(network)
    large = replace(shape, tokens=180, layers=5, width=64, heads=4, feed=256)
    assert training_bytes(large, 128) > 1.9e9
    assert training_bytes(replace(large, layers=4), 128) < 0.6e9


def test_units_of_rotary_positions_in_one_pack(shorter):
    """Each network has its own."""
    trials = [trial(seed=3, network={**NO_DROPOUT, "rotary_unit": unit}) for unit in ("samples", "tokens")]
    found = populate(trials, shorter)
    assert [t.pack for t in found] == [2, 2]
    for one in found:
        history, _ = solo(one.trial, shorter)
        assert curves(one.history) == pytest.approx(curves(history), rel=1e-3)
    assert curves(found[0].history) != curves(found[1].history)


# ---- activations of 16 bits ------------------------------------------------------------------------------------------

WIDE = {"d_model": 16, "n_heads": 2, "n_layers": 1, **NO_DROPOUT}


@pytest.mark.parametrize("network", [{}, {"head": "spline"}], ids=["flatten", "spline"])
def test_with_16_bits_curves_are_nearly_those_of_32(network, short, monkeypatch):
    """Also where targets are missing; and the best weights, in float32, score what was said of them."""
    cuda_on_cpu.install(monkeypatch)
    monkeypatch.setattr(nvrtc, "tensor_cores", lambda device: True)
    trials = [
        trial(seed=3, network={**WIDE, **network}),
        trial(seed=4, network={**WIDE, **network, "ff_factor": 1}),
    ]
    exact, brief = (populate(trials, short, precision=precision) for precision in ("float32", "bfloat16"))
    for one, other in zip(exact, brief, strict=True):
        assert curves(one.history) != curves(other.history)
        assert curves(other.history) == pytest.approx(curves(one.history), rel=0.02)
        network = restored(other)
        scores = evaluate(network, batches(other.trial, network, short.windows[1]), short.mean, short.deviation)
        assert scores.rmse == pytest.approx(other.rmse, rel=0.01)
        assert all(a.dtype == torch.float32 for a in other.state.values())


def test_with_16_bits_dropping_others_changes_nothing(shorter, monkeypatch):
    cuda_on_cpu.install(monkeypatch)
    monkeypatch.setattr(nvrtc, "tensor_cores", lambda device: True)
    trials = [trial(seed=seed, network={**WIDE, **DROPOUT}, max_epochs=3) for seed in (3, 4)]
    whole = populate(trials, shorter, precision="bfloat16")
    halved = populate(trials, shorter, precision="bfloat16", halving=Halving(1, 2))
    best = min(range(2), key=lambda i: whole[i].history.epochs[0].val_scaled_rmse)
    assert curves(halved[best].history) == curves(whole[best].history)
    assert halved[1 - best].history.stopped == "halved"


def test_without_tensor_cores_16_bits_are_32(shorter):
    trials = [trial(seed=3, network=WIDE)]
    (exact,) = populate(trials, shorter)
    with pytest.warns(
        RuntimeWarning, match="1 of 1 trials train in float32, not in bfloat16: that needs an NVIDIA GPU"
    ):
        (brief,) = populate(trials, shorter, precision="bfloat16")
    assert curves(exact.history) == curves(brief.history)


def test_an_unknown_precision(shorter):
    with pytest.raises(ValueError, match=r"`precision` must be one of .*float32.*bfloat16.*; got 'float16'"):
        populate([trial()], shorter, precision="float16")
