"""A forecaster in, a better one out."""

import json

import numpy as np
import pytest

from bsat.search import Space, Watch, read_records, tune
from small import SPACE, make_forecaster, make_long

SHORT = "--lookback 48 --horizon 12 --device cpu --at-once 1"


@pytest.fixture(autouse=True)
def small_space(monkeypatch):
    monkeypatch.setattr(Space, "for_tokenizer", classmethod(lambda cls, tokenizer: SPACE))


@pytest.fixture(scope="module")
def frame():
    return make_long(a=400, b=360)


def test_the_best_of_the_trials_fits_to_the_same_score(tmp_path, frame):
    forecaster = make_forecaster(max_epochs=3, verbose=False, device="cpu")
    best, outcome = tune(forecaster, frame, tmp_path, trials=4)
    assert len(outcome.finished) == 4
    first = outcome.best()[0]
    assert first.value == min(r.value for r in outcome.finished)
    assert best.get_params()["learning_rate"] == first.point["learning_rate"]
    assert best.tokenizer.degree == first.point["degree"]
    assert (best.horizon, best.network_config.encoding) == (forecaster.horizon, forecaster.network_config.encoding)
    best.fit(frame)
    assert best.history_.best.val_scaled_rmse == first.value


def test_it_goes_on_and_another_search_does_not_take_its_place(tmp_path, frame):
    forecaster = make_forecaster(max_epochs=2, verbose=False, device="cpu")
    _, outcome = tune(forecaster, frame, tmp_path, trials=2)
    told = []
    _, again = tune(forecaster, frame, tmp_path, trials=3, watch=Watch(done=told.append))
    assert [r.point for r in again.records[:2]] == [r.point for r in outcome.records]
    assert len(told) == 3
    assert len(read_records(tmp_path / "search.db", outcome.name)) == 3
    with pytest.raises(ValueError, match=r"holds another search .*Name another folder"):
        tune(forecaster, frame.iloc[:-1], tmp_path, trials=1)


def test_the_test_fold_is_not_part_of_it(tmp_path, frame):
    """Whatever stands there, the search is the same."""
    forecaster = make_forecaster(max_epochs=2, verbose=False, device="cpu")
    changed = frame.copy()
    late = frame.groupby("unique_id")["ds"].rank(pct=True) > 0.81
    changed.loc[late, "y"] = np.linspace(-5, 5, late.sum())
    folders = tmp_path / "a", tmp_path / "b"
    first, second = (
        tune(forecaster, f, d, trials=2)[1].records for f, d in zip((frame, changed), folders, strict=True)
    )
    assert [r.value for r in first] == [r.value for r in second]


def test_a_search_without_any_network_says_why(tmp_path, frame, monkeypatch):
    from bsat.search import engines

    def broken(*_):
        raise MemoryError("no room")

    monkeypatch.setattr(engines, "train_alone", broken)
    with pytest.raises(RuntimeError, match=r"none of 2 trials gave a network.*no room"):
        tune(make_forecaster(verbose=False), frame, tmp_path, trials=2)


def test_bsat_tune(tmp_path, frame, bsat):
    frame.to_csv(tmp_path / "two.csv", index=False)
    words = [
        "tune",
        "two.csv",
        "--out",
        "best",
        "--trials",
        "3",
        "--epochs",
        "2",
        "--lookback",
        "48",
        "--horizon",
        "12",
        "--tokens",
        "10",
        "--device",
        "cpu",
    ]
    code, out, err = bsat(*words)
    assert code == 0, err
    assert "3 complete" in out or "pruned" in out
    assert "test fold" in out
    assert all(len(line) <= 80 for line in out.splitlines())
    code, out, _ = bsat(*words, "--json")
    found = json.loads(out)
    assert sum(found["trials"].values()) == 3
    assert found["best"][0]["val_rmse"] == pytest.approx(found["scores"]["val"]["rmse"], rel=1e-6)
    assert bsat("predict", "best", "--json")[0] == 0


def test_mistakes_of_bsat_tune(tmp_path, frame, bsat):
    for words, message in (
        (("tune", "nowhere.csv", "--out", "x"), "nowhere.csv"),
        (("tune", "etth", "--out", "x"), "Did you mean etth1"),
        (("tune", "solar", "--out", "x", "--engine", "slurm"), "--engine must be one of optuna, population, ray"),
        (
            ("tune", "solar", "--out", "x", "--trials", "0", "--lookback", "48", "--horizon", "12"),
            "--trials must be at least 1",
        ),
    ):
        code, _, err = bsat(*words)
        assert code == 2
        assert message in err
