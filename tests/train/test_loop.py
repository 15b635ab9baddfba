"""Scores, schedule, loop and checkpoint: a training repeats bitwise, stops when it should and keeps the best."""

import copy
import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny_training import H, L, N, make_case, make_network
from torch import nn

import bsat
from bsat.train import (
    History,
    Scores,
    TrainConfig,
    evaluate,
    evaluate_beside_naive,
    learning_rate_factor,
    loop,
    naive_forecasts,
    predict,
    train,
)
from bsat.train.checkpoint import Checkpoint, clear_checkpoint
from bsat.train.loop import make_optimizer, mse
from bsat.train.metrics import Tally
from bsat.train.settings import epoch_seed, epoch_steps

FAST = {"batch_size": 32, "max_epochs": 4, "learning_rate": 1e-2}


def fit(case, report=None, checkpoint=None, **choices):
    config = TrainConfig(**{**FAST, **choices})
    train_set, val_set = case.batches(0, keep=True), case.batches(1, keep=True)
    return train(case.network, train_set, val_set, config, **case.scaling, report=report, checkpoint=checkpoint)


def weights(network):
    return {name: a.clone() for name, a in network.state_dict().items()}


def same(one, two):
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def record(history):
    """All but the time that it took."""
    return [replace(e, seconds=0.0) for e in history.epochs], history.best_epoch, history.stopped


def ends_epoch(epoch, last):
    """Whether a report is the one at the end of an epoch rather than of one of its steps."""
    return last is not None and last.epoch == epoch


def snapshots(case):
    """A report that keeps the weights at the end of every epoch, and the list that it fills."""
    kept = []

    def report(epoch, step, loss, last):
        if ends_epoch(epoch, last):
            kept.append(weights(case.network))

    return report, kept


# ---- schedule --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("epoch", "factor"), [(0, 0.05), (5, 0.525), (10, 1.0), (30, 0.505), (50, 0.01), (100, 0.01)])
def test_the_papers_schedule(epoch, factor):
    """5 % to 100 % over 10 epochs, a cosine to 1 % over 40, and 1 % from there on."""
    assert learning_rate_factor(epoch) == pytest.approx(factor, rel=1e-12)


def test_the_schedule_has_no_jumps():
    factors = np.array([learning_rate_factor(e) for e in np.linspace(0, 60, 6001)])
    assert np.abs(np.diff(factors)).max() < 1e-3
    assert (np.diff(factors[:1001]) > 0).all()
    assert (np.diff(factors[1000:5001]) < 0).all()
    assert learning_rate_factor(10, decay=0) == 0.01


def test_the_optimizer_gets_the_rate_of_the_epoch(monkeypatch):
    made, seen = [], {}
    monkeypatch.setattr(loop, "make_optimizer", lambda *args: made.append(make_optimizer(*args)) or made[0])

    def report(epoch, step, loss, last):
        seen.setdefault(epoch, set()).update(group["lr"] for group in made[0].param_groups)

    history = fit(make_case(encoding="l-rope"), report, learning_rate=3e-3, max_epochs=13, grace=100)
    assert len(made[0].param_groups) == 2
    for i, epoch in enumerate(history.epochs):
        assert epoch.epoch == i
        assert epoch.learning_rate == pytest.approx(3e-3 * learning_rate_factor(i), rel=1e-12)
        assert seen[i] == {epoch.learning_rate}
    assert len(history.epochs) == 13


# ---- loss and optimizer ----------------------------------------------------------------------------------------------


def test_mse_is_over_what_was_observed():
    g = torch.Generator().manual_seed(0)
    forecast, truth = torch.randn(2, 7, H, generator=g, dtype=torch.float64)
    assert mse(forecast, truth, gaps=False) == nn.functional.mse_loss(forecast, truth)
    assert float(mse(forecast, truth, gaps=True)) == pytest.approx(float(nn.functional.mse_loss(forecast, truth)))
    seen = torch.rand(7, H, generator=g) < 0.6
    holes = torch.where(seen, truth, torch.nan)
    forecast.requires_grad_()
    loss = mse(forecast, holes, gaps=True)
    expected = nn.functional.mse_loss(forecast[seen], truth[seen])
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-12)
    (gradient,) = torch.autograd.grad(loss, forecast)
    (wanted,) = torch.autograd.grad(expected, forecast)
    torch.testing.assert_close(gradient, wanted, rtol=1e-12, atol=0)
    assert (gradient[~seen] == 0).all()


@pytest.mark.parametrize("encoding", ["l-rope+lpe", "l-rope", "f-rope", "lpe"])
def test_weight_decay_spares_the_bases(encoding):
    network = make_network(bsat.BSplineTokenizer(N), encoding=encoding, n_layers=3)
    groups = make_optimizer(network, TrainConfig(weight_decay=0.3)).param_groups
    held = [id(p) for group in groups for p in group["params"]]
    assert sorted(held) == sorted(id(p) for p in network.parameters())  # every one, once
    bases = {id(b) for b in network.log_bases()}
    assert len(bases) == (3 if "l-rope" in encoding else 0)
    for group in groups:
        assert group["params"]
        inside = {id(p) for p in group["params"]}
        assert group["weight_decay"] == (0.0 if inside & bases else 0.3)
        assert inside == bases or not inside & bases


def test_a_base_without_gradient_stays_where_it_is():
    """With heads of width 2 nothing but the decay could move it."""
    case = make_case(n_heads=4, encoding="l-rope")
    before = [float(b.detach()) for b in case.network.log_bases()]
    history = fit(case, weight_decay=10.0)
    assert [float(b.detach()) for b in case.network.log_bases()] == before
    assert history.epochs[-1].bases == pytest.approx([10_000], rel=1e-5)


def test_bases_are_recorded_as_they_are_learned():
    case = make_case(n_layers=2, encoding="l-rope")
    history = fit(case, learning_rate=0.05)
    assert len({tuple(e.bases) for e in history.epochs}) == len(history.epochs)
    assert history.best.bases == [float(b.detach().exp()) for b in case.network.log_bases()]
    assert fit(make_case(encoding="lpe"), max_epochs=1).epochs[0].bases == []


# ---- scores ----------------------------------------------------------------------------------------------------------


def score_by_hand(forecast, truth, mean, deviation):
    """numpy, in the data's unit."""
    error, seen = forecast - truth, ~np.isnan(truth)
    f, y = (a * deviation[:, None] + mean[:, None] for a in (forecast, truth))
    squares = ((f - y)[seen] ** 2).mean()
    return {
        "rmse": math.sqrt(squares),
        "mae": np.abs(f - y)[seen].mean(),
        "mse": squares,
        "smape": (200 * np.abs(f - y) / (np.abs(f) + np.abs(y)))[seen].mean(),
        "windows": len(truth),
        "scaled_rmse": math.sqrt((error[seen] ** 2).mean()),
    }


@pytest.mark.parametrize("gaps", [False, True])
def test_scores_are_numpys_whatever_the_batch_size(gaps):
    case = make_case(rows=3, gaps=gaps)
    batches, windows = case.batches(1), case.windows[1]
    rows = windows.rows.numpy()
    assert set(rows) == {0, 1, 2}
    truth = windows.future(slice(None)).double().numpy()
    assert np.isnan(truth).any() == gaps
    scaling = case.mean, case.deviation
    for batch_size in (1, 128, 4096):
        parts = list(predict(case.network, batches, batch_size))
        assert sum(part.stop - part.start for part, _ in parts) == len(windows)
        forecast = torch.cat([f for _, f in parts]).double().numpy()
        expected = score_by_hand(forecast, truth, case.mean.numpy()[rows], case.deviation.numpy()[rows])
        scores = evaluate(case.network, batches, *scaling, batch_size).to_dict()
        assert scores == pytest.approx(expected, rel=1e-9)
        assert scores == pytest.approx(evaluate(case.network, batches, *scaling).to_dict(), rel=1e-6)
    # The rows' units differ, so that each must be scored in its own.
    assert case.deviation.max() > 20 * case.deviation.min()


def test_scores_of_the_truth_in_the_datas_unit():
    """What is scored are the samples of the frame: their size is theirs, not that of the scaled series."""
    case = make_case(rows=2)
    case.network.head.project.weight.data.zero_()  # forecasts the mean of the coefficients
    batches, windows = case.batches(2), case.windows[2]
    y = np.stack([case.values.ravel()[s + L : s + L + H] for s in windows.starts.tolist()])
    rows = windows.rows.numpy()
    forecast = torch.cat([f for _, f in predict(case.network, batches)]).double().numpy()
    f = forecast * case.deviation.numpy()[rows, None] + case.mean.numpy()[rows, None]
    scores = evaluate(case.network, batches, case.mean, case.deviation)
    assert scores.rmse == pytest.approx(np.sqrt(((f - y) ** 2).mean()), rel=1e-5)
    assert scores.smape == pytest.approx((200 * np.abs(f - y) / (np.abs(f) + np.abs(y))).mean(), rel=1e-4)


def test_smape_runs_from_0_to_200():
    one, zero = torch.ones(1, 1).double(), torch.zeros(1, 1).double()

    def smape(forecast, truth):
        t = Tally()
        t.add(forecast, truth, zero, one)
        return t.scores().smape

    assert smape(one, one) == 0
    assert smape(-one, one) == 200
    assert smape(zero, zero) == 0  # 0 for 0 is right
    assert smape(zero, one) == 200
    assert math.isnan(smape(torch.nan * one, one))
    nothing = Tally().scores()
    assert nothing.windows == 0
    assert math.isnan(nothing.rmse)


def test_evaluation_leaves_the_mode_and_draws_nothing():
    case = make_case()
    for mode in (True, False):
        case.network.train(mode)
        state = torch.get_rng_state()
        before = weights(case.network)
        one, two = (evaluate(case.network, case.batches(1), case.mean, case.deviation) for _ in range(2))
        assert one == two  # dropout is off
        assert case.network.training == mode
        assert torch.equal(torch.get_rng_state(), state)
        assert same(weights(case.network), before)  # batch norm learns nothing


def naive_by_hand(past, horizon, season):
    """One window at a time, one sample at a time."""
    last, seasonal = np.empty((len(past), horizon)), np.empty((len(past), horizon))
    for i, window in enumerate(past):
        filled = window.copy()
        for j in range(len(filled)):
            if np.isnan(filled[j]):
                filled[j] = filled[j - 1] if j else np.nanmean(window)
        last[i] = filled[-1]
        for j in range(horizon):
            seasonal[i, j] = filled[len(filled) - season + j % season]
    return {"last value": last, "seasonal naive": seasonal}


@pytest.mark.parametrize("missing", [0.0, 0.4])
@pytest.mark.parametrize("season", [1, 4, 7, 20])
def test_naive_forecasts(missing, season):
    rng = np.random.default_rng(0)
    past = rng.normal(size=(30, 20))
    past[rng.random(past.shape) < missing] = np.nan
    got, expected = naive_forecasts(torch.from_numpy(past), 9, season), naive_by_hand(past, 9, season)
    assert got.keys() == expected.keys()
    for name, forecast in expected.items():
        np.testing.assert_allclose(got[name], forecast, rtol=1e-12)


def test_naive_forecasts_without_a_season():
    past = torch.randn(3, 20)
    assert set(naive_forecasts(past, 5, 0)) == {"last value"}
    assert set(naive_forecasts(past, 5, 21)) == {"last value"}  # longer than the lookback


@pytest.mark.parametrize("gaps", [False, True])
def test_naive_scores_beside_the_models(gaps):
    case = make_case(rows=3, gaps=gaps)
    batches, windows, scaling = case.batches(2), case.windows[2], (case.mean, case.deviation)
    beside = evaluate_beside_naive(case.network, batches, *scaling, 24, batch_size=7)
    assert list(beside) == ["model", "last value", "seasonal naive"]
    assert beside["model"] == evaluate(case.network, batches, *scaling, batch_size=7)
    rows, truth = windows.rows.numpy(), windows.future(slice(None)).double().numpy()
    naive = naive_by_hand(windows.past(slice(None)).double().numpy(), H, 24)
    for name, forecast in naive.items():
        expected = score_by_hand(forecast, truth, case.mean.numpy()[rows], case.deviation.numpy()[rows])
        assert beside[name].to_dict() == pytest.approx(expected, rel=1e-6)
    assert list(evaluate_beside_naive(case.network, batches, *scaling, 0)) == ["model", "last value"]
    assert list(evaluate_beside_naive(case.network, batches, *scaling, None)) == ["model"]


# ---- repeatability ---------------------------------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_training():
    runs = [(case, fit(case, seed=seed)) for seed in (1, 1, 2) for case in [make_case()]]
    (one, first), (two, second), (other, third) = runs
    assert same(weights(one.network), weights(two.network))
    assert record(first) == record(second)
    assert not torch.equal(one.network.head.project.weight, other.network.head.project.weight)
    assert record(first) != record(third)


def test_neighbouring_seeds_share_no_epoch():
    seeds = {epoch_seed(seed, epoch) for seed in range(50) for epoch in range(200)}
    assert len(seeds) == 50 * 200
    assert 0 <= epoch_seed(2**64 - 1, 5) < 2**63


@pytest.mark.parametrize("gaps", [False, True])
def test_training_does_not_depend_on_whether_tokens_are_kept(gaps):
    results = []
    for keep in (False, True):
        case = make_case(gaps=gaps, head="spline")
        history = train(
            case.network,
            case.batches(0, keep=keep),
            case.batches(1, keep=keep),
            TrainConfig(**FAST),
            **case.scaling,
        )
        results.append((weights(case.network), record(history)))
    assert same(results[0][0], results[1][0])
    assert results[0][1] == results[1][1]


def test_the_callers_random_state_is_left_alone():
    torch.manual_seed(99)
    before = torch.get_rng_state()
    fit(make_case())
    assert torch.equal(torch.get_rng_state(), before)
    one = make_case()
    torch.manual_seed(1)
    fit(one)
    two = make_case()
    torch.manual_seed(2)
    fit(two)
    assert same(weights(one.network), weights(two.network))  # nor does it matter


def test_a_training_learns():
    """The naive forecasts of a daily swing are beaten within a few epochs."""
    case = make_case(bsat.DownsampleTokenizer(24), rows=1, length=600)
    history = fit(case, max_epochs=8, learning_rate=2e-2)
    assert history.best.val_rmse < 0.8 * history.epochs[0].val_rmse
    beside = evaluate_beside_naive(case.network, case.batches(2), case.mean, case.deviation, 24)
    assert beside["model"].rmse < beside["last value"].rmse


# ---- epochs ----------------------------------------------------------------------------------------------------------


class Watched:
    """Batches that remember which windows were asked for."""

    def __init__(self, batches):
        self.batches, self.asked = batches, []

    def __getattr__(self, name):
        return getattr(self.batches, name)

    def __len__(self):
        return len(self.batches)

    def inputs(self, index):
        self.asked.append(index.tolist())
        return self.batches.inputs(index)


@pytest.mark.parametrize(("most", "batch_size"), [(50, 16), (None, 32), (10_000, 64), (5, 128)])
def test_which_windows_an_epoch_sees(most, batch_size):
    case = make_case()
    watched, config = Watched(case.batches(0)), TrainConfig(**{**FAST, "batch_size": batch_size}, epoch_windows=most)
    steps = []
    train(
        case.network,
        watched,
        case.batches(1),
        config,
        **case.scaling,
        report=lambda epoch, step, loss, last: steps.append((epoch, step)),
    )
    W = len(watched)
    size = min(W, most or W)
    per_epoch = math.ceil(size / batch_size)
    assert epoch_steps(W, config) == per_epoch
    assert len(watched.asked) == 4 * per_epoch
    epochs = [watched.asked[e * per_epoch : (e + 1) * per_epoch] for e in range(4)]
    for epoch in epochs:
        assert [len(batch) for batch in epoch[:-1]] == [batch_size] * (per_epoch - 1)
        seen = [i for batch in epoch for i in batch]
        assert len(seen) == len(set(seen)) == size  # the last batch is not dropped, and none comes twice
        assert min(seen) >= 0
        assert max(seen) < W
    assert len({str(epoch) for epoch in epochs}) == 4  # another order, and other windows, in every epoch
    expected = [(e, s) for e in range(4) for s in [*range(1, per_epoch + 1), per_epoch]]
    assert steps == expected  # after each step, and once more with the epoch's scores


def test_the_loss_is_the_mean_over_windows():
    """Weights that do not move: the mean loss is that of one pass over all windows."""
    case = make_case(dropout=0.0, ff_dropout=0.0, attention_dropout=0.0)
    reported = []
    # A rate so small that no weight changes; all windows in one batch, so that batch norm sees them all.
    history = fit(
        case,
        lambda epoch, step, loss, last: reported.append(loss),
        learning_rate=1e-30,
        weight_decay=0.0,
        batch_size=10_000,
        max_epochs=1,
    )
    network = make_case(dropout=0.0, ff_dropout=0.0, attention_dropout=0.0).network.train()
    inputs, truth = case.batches(0).inputs(slice(None)), case.windows[0].future(slice(None))
    with torch.no_grad():
        expected = nn.functional.mse_loss(network(inputs.values, inputs.positions), truth)
    assert history.epochs[0].loss == pytest.approx(float(expected), rel=1e-5)
    assert reported == pytest.approx([float(expected)] * 2, rel=1e-5)


# ---- stopping --------------------------------------------------------------------------------------------------------


def scripted(monkeypatch, scaled, unit=None):
    """Let the validation RMSE of the epochs be these; then the last one on and on."""
    unit = unit or scaled
    calls = iter(range(10_000))

    def evaluate(*args):
        i = min(next(calls), len(scaled) - 1)
        return Scores(unit[i], 1.0, 1.0, 1.0, 1, scaled[i])

    monkeypatch.setattr(loop, "evaluate", evaluate)


@pytest.mark.parametrize(
    ("scores", "patience", "grace", "best", "epochs"),
    [
        ([3, 2, 1, 5], 3, 0, 2, 2 + 1 + 3),
        ([3, 2, 1, 5], 1, 0, 2, 2 + 1 + 1),
        ([1, 2], 1, 0, 0, 0 + 1 + 1),
        ([3, 2, 1, 5], 3, 5, 2, 6),
        ([3, 2, 1, 5], 3, 6, 2, 7),  # the grace is over after 6 epochs, so the 7th may be the last
        ([3, 2, 1, 5], 3, 10, 2, 11),
        ([3, 2, 1, 5, 5, 0.5, 9], 3, 0, 5, 5 + 1 + 3),  # better just in time
        ([3, 2, 1, 5, 5, 5, 0.5], 3, 0, 2, 6),  # too late
        ([3, 2, 1, 5, 5, 5, 0.5], 3, 6, 6, 6 + 1 + 3),  # but for the grace
        ([3, 2, 2, 2], 2, 0, 1, 1 + 1 + 2),  # as good is not better
    ],
)
def test_patience_and_grace(monkeypatch, scores, patience, grace, best, epochs):
    scripted(monkeypatch, scores)
    case = make_case(rows=1)
    report, kept = snapshots(case)
    history = fit(case, report, max_epochs=100, patience=patience, grace=grace, epoch_windows=8)
    assert history.best_epoch == best
    assert len(history.epochs) == epochs == max(best + 1 + patience, grace + 1)
    assert history.stopped == "patience"
    assert history.best.val_scaled_rmse == min(e.val_scaled_rmse for e in history.epochs)
    assert same(weights(case.network), kept[best])
    assert not same(weights(case.network), kept[-1])
    assert not case.network.training


@pytest.mark.parametrize("max_epochs", [1, 3])
def test_max_epochs(monkeypatch, max_epochs):
    scripted(monkeypatch, [3, 2, 1])
    history = fit(make_case(rows=1), max_epochs=max_epochs, patience=1, grace=0)
    assert len(history.epochs) == max_epochs
    assert history.best_epoch == max_epochs - 1
    assert history.stopped == "max_epochs"


def test_the_scaled_rmse_decides(monkeypatch):
    """In the data's unit one large series would outvote all others."""
    scripted(monkeypatch, scaled=[3.0, 1.0, 2.0], unit=[3.0, 2.0, 1.0])
    history = fit(make_case(), max_epochs=3)
    assert history.best_epoch == 1
    assert history.best.val_rmse == 2.0


@pytest.mark.parametrize("rate", [1e-2, 3.0])
def test_the_best_weights_are_restored(rate):
    case = make_case()
    report, kept = snapshots(case)
    history = fit(case, report, learning_rate=rate, max_epochs=6, patience=2, grace=0)
    assert history.best_epoch == int(np.argmin([e.val_scaled_rmse for e in history.epochs]))
    assert same(weights(case.network), kept[history.best_epoch])
    scores = evaluate(case.network, case.batches(1), case.mean, case.deviation)
    assert scores.rmse == history.best.val_rmse
    assert scores.scaled_rmse == history.best.val_scaled_rmse


# ---- interruption ----------------------------------------------------------------------------------------------------


def interrupt(at, step=None):
    """Ctrl-C in an epoch, after a step, or at its end."""

    def report(epoch, done, loss, last):
        if epoch == at and (ends_epoch(epoch, last) if step is None else done == step):
            raise KeyboardInterrupt

    return report


@pytest.mark.parametrize(("at", "step", "epochs"), [(1, None, 2), (2, 1, 2), (3, 2, 3), (0, None, 1)])
def test_an_interruption_keeps_the_best_so_far(at, step, epochs):
    whole, case = make_case(), make_case()
    report, kept = snapshots(whole)
    reference = fit(whole, report)
    history = fit(case, interrupt(at, step))
    assert history.stopped == "interrupted"
    assert len(history.epochs) == epochs
    assert record(history)[0] == record(reference)[0][:epochs]
    assert history.best_epoch == int(np.argmin([e.val_scaled_rmse for e in history.epochs]))
    assert same(weights(case.network), kept[history.best_epoch])
    assert not case.network.training
    scores = evaluate(case.network, case.batches(1), case.mean, case.deviation)
    assert scores.rmse == history.best.val_rmse


def test_an_interruption_of_the_first_epoch_is_one():
    before = torch.get_rng_state()
    with pytest.raises(KeyboardInterrupt):
        fit(make_case(), interrupt(0, 1))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(("at", "step"), [(2, None), (2, 1), (1, None)])
def test_resumed_is_as_if_never_interrupted(tmp_path, at, step):
    whole = make_case(encoding="l-rope+lpe")
    reference = fit(whole, max_epochs=5)
    first = make_case(encoding="l-rope+lpe")
    assert fit(first, interrupt(at, step), Checkpoint(tmp_path, "same", resume=False), max_epochs=5).stopped
    assert [p.name for p in tmp_path.iterdir()] == ["training.safetensors"]
    again = make_case(encoding="l-rope+lpe", seed=77)  # other first weights: the checkpoint has them all
    before = weights(again.network)
    history = fit(again, checkpoint=Checkpoint(tmp_path, "same", resume=True), max_epochs=5)
    assert record(history) == record(reference)
    assert same(weights(again.network), weights(whole.network))
    assert not same(before, weights(again.network))


def test_a_finished_training_resumes_into_itself_or_goes_on(tmp_path):
    one = make_case()
    first = fit(one, checkpoint=Checkpoint(tmp_path, "same", resume=True), max_epochs=2)  # nothing there: starts anew
    two = make_case(seed=5)
    second = fit(two, checkpoint=Checkpoint(tmp_path, "same", resume=True), max_epochs=2)
    assert [e.seconds for e in second.epochs] == [e.seconds for e in first.epochs]  # no epoch was run again
    assert record(second) == record(first)
    assert same(weights(two.network), weights(one.network))
    longer, whole = make_case(seed=6), make_case()
    history = fit(longer, checkpoint=Checkpoint(tmp_path, "same", resume=True), max_epochs=4)
    assert record(history) == record(fit(whole, max_epochs=4))
    assert same(weights(longer.network), weights(whole.network))


def test_a_checkpoint_holds_the_best_weights_beside_the_last(tmp_path, monkeypatch):
    scripted(monkeypatch, [1, 2, 3])
    one, two = make_case(), make_case(seed=5)
    report, kept = snapshots(one)
    fit(one, report, Checkpoint(tmp_path, "same", resume=False), max_epochs=3)
    report, later = snapshots(two)
    history = fit(two, report, Checkpoint(tmp_path, "same", resume=True), max_epochs=4)
    assert history.best_epoch == 0
    assert same(weights(two.network), kept[0])
    assert len(later) == 1
    whole = make_case()
    report, kept = snapshots(whole)
    fit(whole, report, max_epochs=4)
    assert same(later[0], kept[3])  # it went on from the last ones


def test_without_resume_a_checkpoint_is_overwritten(tmp_path):
    fit(make_case(seed=3), checkpoint=Checkpoint(tmp_path, "other", resume=False), max_epochs=1)
    case, whole = make_case(), make_case()
    history = fit(case, checkpoint=Checkpoint(tmp_path, "same", resume=False), max_epochs=2)
    assert record(history) == record(fit(whole, max_epochs=2))
    state = Checkpoint(tmp_path, "same", resume=True)
    assert state.load(case.network, make_optimizer(case.network, TrainConfig())) is not None
    clear_checkpoint(tmp_path)
    assert list(tmp_path.iterdir()) == []
    clear_checkpoint(tmp_path)  # also where there is none


def test_a_checkpoint_of_another_training_is_refused(tmp_path):
    fit(make_case(), checkpoint=Checkpoint(tmp_path, "one", resume=False), max_epochs=1)
    case = make_case()
    before = weights(case.network)
    match = r"training\.safetensors belongs to a training on other data or with other settings\. Train with the same"
    with pytest.raises(ValueError, match=match):
        fit(case, checkpoint=Checkpoint(tmp_path, "two", resume=True))
    assert same(weights(case.network), before)


@pytest.mark.parametrize("cut", ["empty", "short", "header", "half", "almost", "noise"])
def test_a_damaged_checkpoint_is_refused(tmp_path, cut):
    fit(make_case(), checkpoint=Checkpoint(tmp_path, "same", resume=False), max_epochs=1)
    path = tmp_path / "training.safetensors"
    whole = path.read_bytes()
    sizes = {"empty": 0, "short": 4, "header": 300, "half": len(whole) // 2, "almost": len(whole) - 1}
    path.write_bytes(whole[: sizes[cut]] if cut in sizes else b"\x07" * len(whole))
    case = make_case()
    before = weights(case.network)
    with pytest.raises(ValueError, match=r"training\.safetensors is not a whole checkpoint .*Delete it and train"):
        fit(case, checkpoint=Checkpoint(tmp_path, "same", resume=True))
    assert same(weights(case.network), before)


def test_history_survives_json():
    history = fit(make_case(encoding="l-rope"), max_epochs=2)
    assert History.from_dict(json.loads(json.dumps(history.to_dict()))) == history


# ---- divergence ------------------------------------------------------------------------------------------------------


def test_a_loss_that_is_no_number_at_once_is_an_error():
    before = torch.get_rng_state()
    with pytest.raises(FloatingPointError, match=r"no longer a number in epoch 0, at learning_rate = 5e\+28\. Lower"):
        fit(make_case(), learning_rate=1e30)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("at", [1, 2])
@pytest.mark.parametrize("resume", [False, True])
def test_a_loss_that_is_no_number_later_keeps_the_best(tmp_path, at, resume):
    whole, case = make_case(), make_case()
    reference = fit(whole, max_epochs=at)

    def poison(epoch, step, loss, last):
        if epoch == at and step == 1:
            case.network.head.project.bias.data.fill_(torch.nan)

    state = Checkpoint(tmp_path, "same", resume=resume)
    with pytest.warns(RuntimeWarning, match=rf"in epoch {at}, .*Lower `learning_rate`\. The best weights so far"):
        history = fit(case, poison, state)
    assert history.stopped == "diverged"
    assert record(history)[:2] == record(reference)[:2]
    assert same(weights(case.network), weights(whole.network))
    assert not case.network.training


# ---- choices ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("choice", "error", "match"),
    [
        ({"learning_rate": 0}, ValueError, r"`learning_rate` must be positive and finite; got 0"),
        ({"learning_rate": -1e-3}, ValueError, r"`learning_rate` must be positive and finite; got -0\.001"),
        ({"learning_rate": float("inf")}, ValueError, r"`learning_rate` must be positive and finite; got inf"),
        ({"learning_rate": "1e-3"}, TypeError, r"`learning_rate` must be a number; got '1e-3'"),
        ({"weight_decay": -1.0}, ValueError, r"`weight_decay` must be at least 0 and finite; got -1\.0"),
        ({"weight_decay": True}, TypeError, r"`weight_decay` must be a number; got True"),
        ({"batch_size": 0}, ValueError, r"`batch_size` must be at least 1; got 0"),
        ({"max_epochs": 0}, ValueError, r"`max_epochs` must be at least 1; got 0"),
        ({"patience": 0}, ValueError, r"`patience` must be at least 1; got 0"),
        ({"grace": -1}, ValueError, r"`grace` must be at least 0; got -1"),
        ({"seed": -1}, ValueError, r"`seed` must be at least 0; got -1"),
        ({"seed": 2**63}, ValueError, r"`seed` must be less than 2\^63; got 9223372036854775808"),
        ({"seed": 1.5}, TypeError, r"`seed` must be a whole number; got 1\.5"),
        ({"epoch_windows": 0}, ValueError, r"`epoch_windows` must be at least 1; got 0"),
    ],
)
def test_bad_choices(choice, error, match):
    with pytest.raises(error, match=match):
        TrainConfig(**choice)


def test_the_papers_training_is_the_default():
    c = TrainConfig()
    assert (c.batch_size, c.max_epochs, c.patience, c.grace, c.seed) == (128, 100, 10, 10, 2025)
    assert TrainConfig(weight_decay=0.0, epoch_windows=None) != c
    assert copy.deepcopy(c) == c
