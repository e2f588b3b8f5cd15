"""Scores against scikit-learn and plain loops; intervals against resampling by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import brier_score_loss, log_loss, roc_auc_score

from hybridspec.calibrate.bootstrap import (
    NUM_ECE_BINS,
    area_under_curve,
    equal_mass_bins,
    forecast_scores,
    mean_score,
    prompt_draws,
)


def forecasts(seed: int, rows: int, prompts: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    predicted = np.round(rng.uniform(0.01, 0.99, rows), 2)
    observed = rng.uniform(size=rows) < predicted
    return predicted, observed, rng.integers(0, prompts, rows)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 999), st.integers(20, 400), st.integers(1, 12))
def test_scores_equal_those_of_scikit_learn(seed: int, rows: int, prompts: int) -> None:
    predicted, observed, prompt = forecasts(seed, rows, prompts)
    draws = prompt_draws(prompts, resamples=20, seed=0)
    scores = forecast_scores(predicted, observed, prompt, draws)
    assert scores["log_loss"].value == pytest.approx(log_loss(observed, predicted, labels=[0, 1]))
    assert scores["brier"].value == pytest.approx(brier_score_loss(observed, predicted))
    if 0 < observed.sum() < rows:
        assert scores["auc"].value == pytest.approx(roc_auc_score(observed, predicted))
    for score in scores.values():
        assert score.lo <= score.value <= score.hi


def test_area_needs_both_outcomes() -> None:
    assert area_under_curve(np.array([0.1, 0.2]), np.array([True, True])) is None
    assert area_under_curve(np.array([0.5, 0.5]), np.array([True, False])) == 0.5


@settings(max_examples=50, deadline=None)
@given(st.lists(st.sampled_from([0.1, 0.2, 0.3, 0.7]), min_size=1, max_size=60), st.integers(1, 9))
def test_bins_are_monotone_and_keep_ties_together(values: list[float], bins: int) -> None:
    predicted = np.array(values)
    found = equal_mass_bins(predicted, bins)
    assert found.min() >= 0
    assert found.max() < bins
    for one, other in zip(predicted, found, strict=True):
        assert (found[predicted == one] == other).all()
        assert (found[predicted < one] <= other).all()


def test_bins_hold_equally_many_distinct_rows() -> None:
    bins = equal_mass_bins(np.random.default_rng(0).permutation(600) / 600, 15)
    assert np.bincount(bins).tolist() == [40] * 15


def test_ece_equals_the_definition() -> None:
    predicted, observed, prompt = forecasts(4, 3000, 30)
    scores = forecast_scores(predicted, observed, prompt, prompt_draws(30, resamples=10, seed=0))
    bins = equal_mass_bins(predicted, NUM_ECE_BINS)
    expected = sum(
        (bins == b).mean() * abs(predicted[bins == b].mean() - observed[bins == b].mean())
        for b in range(NUM_ECE_BINS)
    )
    assert scores["ece"].value == pytest.approx(expected)


def test_resamples_equal_repeating_the_rows_of_the_drawn_prompts() -> None:
    predicted, observed, prompt = forecasts(5, 900, 8)
    draws = prompt_draws(8, resamples=60, seed=1)
    scores = forecast_scores(predicted, observed, prompt, draws)
    losses, areas = [], []
    for counts in draws:
        rows = np.repeat(np.arange(900), counts[prompt])
        losses.append(log_loss(observed[rows], predicted[rows]))
        areas.append(roc_auc_score(observed[rows], predicted[rows]))
    for score, values, tolerance in (
        (scores["log_loss"], losses, 1e-9),
        (scores["auc"], areas, 2e-3),
    ):
        lo, hi = np.quantile(values, [0.025, 0.975])
        assert score.lo == pytest.approx(lo, abs=tolerance)
        assert score.hi == pytest.approx(hi, abs=tolerance)


def test_intervals_are_wider_when_prompts_differ() -> None:
    rng = np.random.default_rng(2)
    prompt = np.repeat(np.arange(20), 50)
    draws = prompt_draws(20, resamples=400, seed=0)
    noise = rng.normal(size=1000)
    alike = mean_score(noise, prompt, draws)
    apart = mean_score(noise + rng.normal(size=20)[prompt], prompt, draws)
    assert apart.hi - apart.lo > 3 * (alike.hi - alike.lo)


def test_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    covered = 0
    for seed in range(120):
        rng = np.random.default_rng(seed)
        prompt = np.repeat(np.arange(40), 5)
        values = rng.normal(size=40)[prompt] + rng.normal(size=200)
        score = mean_score(values, prompt, prompt_draws(40, resamples=300, seed=seed))
        covered += score.lo <= 0.0 <= score.hi
    assert 0.86 <= covered / 120 <= 1.0


def test_draws_are_seeded_and_sum_to_the_prompts() -> None:
    draws = prompt_draws(7, resamples=5, seed=3)
    assert draws.sum(axis=1).tolist() == [7] * 5
    assert draws.tolist() == prompt_draws(7, resamples=5, seed=3).tolist()
