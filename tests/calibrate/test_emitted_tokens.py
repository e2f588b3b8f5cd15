"""Survival, E(L) and the intervals around scores, against brute force."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridspec.calibrate.bootstrap import forecast_scores, mean_score, prompt_draws
from hybridspec.calibrate.metrics import expected_emitted, survival

# Every outcome of 15 drafts.
OUTCOMES = np.array(list(itertools.product([False, True], repeat=15)))
ACCEPTED = np.cumprod(OUTCOMES, axis=1).sum(axis=1)


@settings(max_examples=15, deadline=None)
@given(st.lists(st.floats(0.0, 1.0), min_size=15, max_size=15))
def test_expectations_equal_a_sum_over_all_outcomes(hazards: list[float]) -> None:
    h = np.array(hazards)
    weight = np.where(OUTCOMES, h, 1.0 - h).prod(axis=1)
    found, emitted = survival(h[None])[0], expected_emitted(h[None])[0]
    for k in range(1, 16):
        assert found[k - 1] == pytest.approx(weight[k <= ACCEPTED].sum(), abs=1e-12)
    for length in range(1, 17):
        tokens = np.minimum(ACCEPTED + 1, length)
        assert emitted[length - 1] == pytest.approx((weight * tokens).sum(), abs=1e-12)
    assert (np.diff(found) <= 1e-15).all()
    assert (np.diff(emitted, n=2) <= 1e-12).all()


def clustered(seed: int, prompts: int = 50, rows: int = 12) -> tuple[np.ndarray, ...]:
    """Calibrated forecasts whose outcomes share a bias within a prompt."""
    rng = np.random.default_rng(seed)
    prompt = np.repeat(np.arange(prompts), rows)
    logits = rng.normal(size=prompt.size)
    shared = rng.normal(size=prompts)[prompt]
    observed = rng.uniform(size=prompt.size) < 1 / (1 + np.exp(-logits - shared))
    return 1 / (1 + np.exp(-logits)), observed, prompt


def test_intervals_of_clustered_scores_cover_and_row_intervals_do_not() -> None:
    truth: dict[str, list[float]] = {"log_loss": [], "brier": [], "auc": []}
    for seed in range(40):
        predicted, observed, prompt = clustered(9000 + seed, prompts=600)
        scores = forecast_scores(
            predicted, observed, prompt, prompt_draws(600, resamples=2, seed=0)
        )
        for name, values in truth.items():
            values.append(scores[name].value)
    target = {name: float(np.mean(values)) for name, values in truth.items()}
    covered = dict.fromkeys(target, 0)
    by_prompt = by_row = 0
    for seed in range(120):
        predicted, observed, prompt = clustered(seed)
        scores = forecast_scores(
            predicted, observed, prompt, prompt_draws(50, resamples=250, seed=seed)
        )
        for name, value in target.items():
            covered[name] += scores[name].lo <= value <= scores[name].hi
        residual, rows = observed - predicted, np.arange(prompt.size)
        by_prompt += _holds(residual, prompt, 50, seed)
        by_row += _holds(residual, rows, prompt.size, seed)
    for name, count in covered.items():
        assert 0.86 <= count / 120 <= 1.0, name
    assert by_prompt / 120 >= 0.86
    # Rows that share a prompt are no independent evidence: their intervals are too short.
    assert by_row / 120 <= 0.8


def _holds(values: np.ndarray, cluster: np.ndarray, clusters: int, seed: int) -> bool:
    """Whether the interval of the mean holds 0, the mean over prompts' shared biases."""
    score = mean_score(values, cluster, prompt_draws(clusters, resamples=250, seed=seed))
    return score.lo <= 0.0 <= score.hi
