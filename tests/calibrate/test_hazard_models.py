"""Hazard fits: truth recovered, invariants kept, little data refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic_rounds import synthetic_trace, true_hazards

from hybridspec.calibrate.features import TraceArrays, at_risk, position_features, trace_arrays
from hybridspec.calibrate.hazard import (
    BetaPositionHazard,
    RawTop1Hazard,
    linear_scores,
    predict_hazards,
)
from hybridspec.calibrate.isotonic import MAX_KNOTS, isotonic_knots
from hybridspec.calibrate.model import MIN_POSITION_ROWS
from hybridspec.errors import NotEnoughData


@pytest.fixture(scope="module")
def arrays() -> TraceArrays:
    return trace_arrays(synthetic_trace(prompts=120, rounds=40))


@pytest.fixture(scope="module")
def model(arrays: TraceArrays) -> BetaPositionHazard:
    return BetaPositionHazard().fit(arrays)


def test_known_hazards_are_recovered(arrays: TraceArrays, model: BetaPositionHazard) -> None:
    fresh = trace_arrays(synthetic_trace(prompts=40, rounds=20, seed=9))
    mask = at_risk(fresh.accepted)
    truth = true_hazards(fresh.features_RDF)[mask]
    fitted = predict_hazards(model.table_, fresh.features_RDF)[mask]
    raw = predict_hazards(RawTop1Hazard().fit().table_, fresh.features_RDF)[mask]
    assert np.abs(fitted - truth).mean() < 0.02
    assert np.abs(raw - truth).mean() > 0.06
    # Before the knots too: the weights are those of raw features, not of standardised ones.
    linear = linear_scores(model.table_, fresh.features_RDF)[mask]
    assert np.abs(linear - truth).mean() < 0.02


def test_fitted_attributes(arrays: TraceArrays, model: BetaPositionHazard) -> None:
    mask = at_risk(arrays.accepted)
    assert model.num_rows_ == mask.sum()
    assert model.num_prompts_ == 120
    assert model.position_rows_.tolist() == mask.sum(axis=0).tolist()
    assert model.table_.knots_x.size <= MAX_KNOTS


def test_fit_is_deterministic_and_ignores_row_order(
    arrays: TraceArrays, model: BetaPositionHazard
) -> None:
    order = np.random.default_rng(0).permutation(len(arrays))
    shuffled = BetaPositionHazard().fit(arrays.select(order))
    np.testing.assert_allclose(shuffled.table_.weights_F, model.table_.weights_F, atol=1e-3)
    again = BetaPositionHazard().fit(arrays)
    assert again.table_.weights_F.tobytes() == model.table_.weights_F.tobytes()
    assert again.table_.knots_y.tobytes() == model.table_.knots_y.tobytes()


def test_rare_positions_share_the_bias_of_the_nearest_lower_one() -> None:
    arrays = trace_arrays(synthetic_trace(prompts=40, rounds=10))
    short = TraceArrays(**{**vars(arrays), "accepted": np.minimum(arrays.accepted, 4)})
    model = BetaPositionHazard().fit(short)
    assert (model.position_rows_ >= MIN_POSITION_ROWS).tolist() == [True] * 5 + [False] * 10
    assert model.position_group_.tolist() == [0, 1, 2, 3] + [4] * 11
    assert np.unique(model.table_.position_bias_D[4:]).size == 1
    assert np.unique(model.table_.position_bias_D).size == 5


@given(st.floats(0.0, 1.0), st.floats(0.0, 1.0))
def test_raw_model_is_the_top1_probability(p1: float, p2: float) -> None:
    features = position_features([[p1] * 15], [[p2] * 15], [[1.0] * 15], [7])
    hazards = predict_hazards(RawTop1Hazard().fit().table_, features)
    np.testing.assert_allclose(hazards, min(max(p1, 1e-6), 1 - 1e-6), rtol=1e-6)


def test_little_data_is_refused_with_the_counts() -> None:
    few_rows = trace_arrays(synthetic_trace(prompts=12, rounds=2))
    with pytest.raises(
        NotEnoughData, match=r"have \d+ observed drafts of 12 prompts; at least 200"
    ):
        BetaPositionHazard().fit(few_rows)
    few_prompts = trace_arrays(synthetic_trace(prompts=9, rounds=90))
    with pytest.raises(NotEnoughData, match="of 9 prompts; at least 200 of 10 prompts"):
        BetaPositionHazard().fit(few_prompts)


@pytest.mark.parametrize(("accepted", "word"), [(0, "rejected"), (15, "accepted")])
def test_one_outcome_is_refused(accepted: int, word: str) -> None:
    arrays = trace_arrays(synthetic_trace(prompts=30, rounds=10))
    same = TraceArrays(**{**vars(arrays), "accepted": np.full(len(arrays), accepted)})
    with pytest.raises(NotEnoughData, match=f"were {word}"):
        BetaPositionHazard().fit(same)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 400),
    st.integers(0, 2**32 - 1),
    st.sampled_from([0, 1, 6]),
    st.integers(2, 64),
    st.integers(1, 40),
)
def test_knots_are_valid_whatever_the_data(
    rows: int, seed: int, digits: int, max_knots: int, min_rows: int
) -> None:
    rng = np.random.default_rng(seed)
    scores = np.round(rng.uniform(size=rows), digits)
    labels = rng.uniform(size=rows) < rng.choice([0.0, 0.5, 1.0]) * np.ones(rows)
    x, y = isotonic_knots(scores, labels, max_knots=max_knots, min_rows=min_rows)
    assert 2 <= x.size == y.size <= max(max_knots, 2)
    assert (np.diff(x) > 0).all()
    assert (np.diff(y) >= 0).all()
    assert x[0] >= 0.0
    assert x[-1] <= 1.0
    # No finite sample claims certainty.
    assert y[0] > 0.0
    assert y[-1] < 1.0


def test_knots_correct_a_distorted_score() -> None:
    rng = np.random.default_rng(3)
    truth = rng.uniform(size=40_000)
    labels = rng.uniform(size=truth.size) < truth
    x, y = isotonic_knots(truth**2, labels)
    probe = np.linspace(0.05, 0.95, 19)
    np.testing.assert_allclose(np.interp(probe**2, x, y), probe, atol=0.03)
