"""One description of what may vary, for everyone who searches."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import bsat
from bsat.model import NetworkConfig
from bsat.search import Categorical, Real, Space, Whole
from bsat.train import TrainConfig

PAPER = {
    "n_layers": {2, 3, 4},
    "d_model": {16, 32, 64, 128},
    "n_heads": {4, 8},
    "ff_factor": {2, 4, 6, 8},
    "dropout": (0, 0.4),
    "ff_dropout": (0, 0.2),
    "attention_dropout": (0, 0.4),
    "learning_rate": (1e-6, 1e-3),
    "weight_decay": (1e-6, 1e-2),
    "degree": {1, 2, 3, 4, 5, 6},
}


def test_random_points_fill_the_papers_space_and_never_leave_it():
    points = [Space().draw(7, i) for i in range(600)]
    assert all(set(p) == set(PAPER) for p in points)
    for name, bounds in PAPER.items():
        seen = [p[name] for p in points]
        if isinstance(bounds, set):
            assert set(seen) == bounds
        else:
            low, high = bounds
            assert low <= min(seen) <= max(seen) <= high
    rates = sorted(p["learning_rate"] for p in points)
    assert 2e-5 < rates[300] < 5e-5  # the middle of the decades


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32), st.integers(0, 10_000))
def test_a_point_survives_the_way_to_a_trial_and_back(seed, index):
    space = Space()
    point = space.draw(seed, index)
    space.check(point)
    trial = space.to_trial(point, bsat.BSplineTokenizer(45), NetworkConfig(encoding="lpe"), TrainConfig(seed=5))
    assert space.to_point(trial) == point
    assert trial.network.encoding == "lpe"
    assert trial.train.seed == 5
    assert trial.tokenizer.n_tokens == 45
    assert json.loads(json.dumps(point)) == point


def test_same_seed_same_points():
    assert [Space().draw(3, i) for i in range(5)] == [Space().draw(3, i) for i in range(5)]
    assert len({json.dumps(Space().draw(seed, i)) for seed in range(5) for i in range(5)}) == 25


def test_the_description_goes_through_json():
    for space in (Space(), Space(degree=None, d_model=Categorical((8,)), dropout=Real(0.1, 0.1))):
        described = json.loads(json.dumps(space.to_dict()))
        assert list(described) == list(space.ranges)
    assert described["d_model"] == {"kind": "Categorical", "values": [8]}
    assert described["dropout"] == {"kind": "Real", "low": 0.1, "high": 0.1, "log": False}


@pytest.mark.parametrize("tokenizer", [bsat.PatchTokenizer(45), bsat.DownsampleTokenizer(45)])
def test_only_bsat_has_a_degree(tokenizer):
    space = Space.for_tokenizer(tokenizer)
    assert "degree" not in space.draw(1)
    trial = space.to_trial(space.draw(1), tokenizer)
    assert trial.tokenizer is tokenizer
    assert space.to_point(trial) == space.draw(1)
    with pytest.raises(ValueError, match="for_tokenizer"):
        Space().to_trial(Space().draw(1), tokenizer)


def test_a_searched_clip_factor_stays():
    tokenizer = bsat.BSplineTokenizer(45, clip_factor="auto")
    tokenizer.clip_factor_ = 0.5
    trial = Space().to_trial({**Space().draw(1), "degree": 5}, tokenizer)
    assert trial.tokenizer.spec.clip_factor == 0.5
    assert trial.tokenizer.degree == 5
    assert tokenizer.degree == 3


def test_all_that_is_wrong_with_a_point_is_named():
    point = {**Space().draw(1), "n_heads": 3, "dropout": 0.5, "width": 1, "n_layers": True}
    del point["degree"]
    with pytest.raises(ValueError, match=r"degree is missing.*width is unknown.*n_layers must be.*n_heads.*dropout"):
        Space().check(point)


@pytest.mark.parametrize(
    "bad", [lambda: Real(1, 0), lambda: Real(0, 1, log=True), lambda: Whole(3, 1), lambda: Categorical(())]
)
def test_ranges_are_checked(bad):
    with pytest.raises(ValueError, match="must"):
        bad()


def test_an_optuna_trial_suggests_within_the_space():
    import optuna

    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=1))
    for _ in range(20):
        trial = study.ask()
        point = Space().suggest(trial)
        Space().check(point)
        assert trial.params == point
        study.tell(trial, 0.0)
