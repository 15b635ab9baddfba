"""Intervals by split-conformal prediction, against the definition."""

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bsat.conformal import FLOOR, check_levels, half_widths, local_deviation, sorted_scores

# ---- levels ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("level", "levels"),
    [
        ([80, 95], [80, 95]),
        ([95, 80, 95.0], [80, 95]),
        (90, [90]),
        (np.int64(90), [90]),
        ((99.9,), [99.9]),
        ([], []),
        (np.array([50]), [50]),
    ],
)
def test_levels_are_sorted_and_differ(level, levels):
    assert check_levels(level) == levels


@pytest.mark.parametrize("level", [[0], [0.95], [100], [-5], [80, 101], [float("nan")], [float("inf")]])
def test_levels_lie_between_0_and_100(level):
    with pytest.raises(ValueError, match="percentages from 1 to less than 100; got"):
        check_levels(level)


@pytest.mark.parametrize("level", ["80", b"80", True, ["80"], [True], [None], [[80]]])
def test_levels_are_numbers(level):
    with pytest.raises(TypeError, match=r"`level` must .*percentages; got"):
        check_levels(level)


# ---- widths ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("K", "level", "rank"),
    [(9, 90, 9), (19, 95, 19), (10, 90, 10), (99, 90, 90), (100, 90, 91), (4, 80, 4), (3, 50, 2), (999, 99.9, 999)],
)
def test_the_width_is_the_score_of_rank_ceil_of_k_plus_1_times_level(K, level, rank):
    scores = np.stack([np.arange(1.0, K + 1), 10 * np.arange(1.0, K + 1)], 1)  # the score of rank r is r
    np.testing.assert_array_equal(half_widths(scores, [level]), [[rank, 10 * rank]])


def test_widths_of_several_levels_and_of_none():
    scores = np.arange(1.0, 20)[:, None]
    assert half_widths(scores, [50, 80, 95]).tolist() == [[10], [16], [19]]
    assert half_widths(scores, []).shape == (0, 1)


@pytest.mark.parametrize("level", [50, 80, 90, 95, 99, 99.5, 99.9])
def test_a_level_that_needs_more_scores_is_refused_with_how_many(level):
    with pytest.raises(ValueError, match=f"{level:g} % needs .* windows or more, and there are 0") as refused:
        half_widths(np.empty((0, 3)), [level])
    needed = int(re.search(r"needs (\d+)", str(refused.value))[1])
    assert half_widths(np.ones((needed, 3)), [level]).shape == (1, 3)
    with pytest.raises(ValueError, match=f"and there are {needed - 1}"):
        half_widths(np.ones((needed - 1, 3)), [level])


def test_of_several_levels_that_are_too_high_the_highest_is_named():
    with pytest.raises(ValueError, match=r"99 % needs 99 .*there are 10"):
        half_widths(np.ones((10, 3)), [80, 92, 99])


@pytest.mark.parametrize("K", [20, 37, 60])
@pytest.mark.parametrize("level", [50, 80, 95])
def test_exchangeable_truths_are_covered_as_often_as_promised(K, level):
    """Vovk's bounds: level <= P(covered) <= level + 1 / (K + 1), for errors of any distribution."""
    rng = np.random.default_rng(K)
    trials = 20_000
    draws = rng.standard_t(2, size=(K + 1, trials))  # a trial's K calibration errors and the one to be covered
    width = half_widths(sorted_scores(draws[:K], np.ones(K)), [level])[0]
    covered = (np.abs(draws[K]) <= width).mean()
    error = 4 * np.sqrt(0.25 / trials)
    assert level / 100 - error <= covered <= level / 100 + 1 / (K + 1) + error


# ---- scores ----------------------------------------------------------------------------------------------------------


def test_scores_are_absolute_errors_in_deviations_sorted_for_every_step():
    errors = np.array([[-4.0, 1.0], [2.0, -9.0], [6.0, 0.0]])
    scores = sorted_scores(errors, np.array([2.0, 1.0, 3.0]))
    assert scores.tolist() == [[2, 0], [2, 0.5], [2, 9]]


@given(st.integers(30, 60), st.floats(0.1, 0.5), st.integers(0, 2**32 - 1))
@settings(max_examples=60, deadline=None)
def test_missing_truths_never_make_intervals_narrower(W, share, seed):
    rng = np.random.default_rng(seed)
    errors, deviation = rng.normal(size=(W, 4)), rng.uniform(0.5, 2, W)
    errors[rng.random(errors.shape) < share] = np.nan
    levels = [50, 80]
    widths = half_widths(sorted_scores(errors, deviation), levels)
    assert np.isfinite(widths).all()
    for step in range(4):
        seen = ~np.isnan(errors[:, step])
        alone = half_widths(sorted_scores(errors[seen, step : step + 1], deviation[seen]), levels)
        assert (widths[:, step] >= alone[:, 0]).all()


def test_a_step_without_any_truth_takes_the_largest_score_of_all():
    errors = np.array([[1.0, np.nan, 3.0], [2.0, np.nan, np.nan]])
    assert sorted_scores(errors, np.ones(2)).tolist() == [[1, 3, 3], [2, 3, 3]]


def test_the_deviation_is_that_of_what_was_observed_and_never_0():
    windows = np.array([[1.0, 3.0, np.nan, 1.0, 3.0], [5.0, 5.0, 5.0, np.nan, np.nan]])
    np.testing.assert_allclose(local_deviation(windows), np.sqrt([1 + FLOOR**2, FLOOR**2]))


def test_a_window_that_stood_still_does_not_widen_all_others():
    """A machine that is off for days, then runs: its errors count in deviations of the series, not of the stillness."""
    rng = np.random.default_rng(0)
    errors = rng.normal(size=(100, 1))
    windows = rng.normal(size=(100, 48))
    windows[:20] = 0.0
    scores = sorted_scores(errors, local_deviation(windows))
    assert half_widths(scores, [95.0])[0, 0] < 10 / FLOOR
    assert local_deviation(windows).min() == pytest.approx(FLOOR)
