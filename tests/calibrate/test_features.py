"""Features and the at-risk mask against their definitions."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic_rounds import synthetic_trace

from hybridspec.artifacts.tables import FEATURE_NAMES
from hybridspec.calibrate.features import (
    accepted_labels,
    at_risk,
    position_features,
    trace_arrays,
)

probability = st.floats(0.0, 1.0)


@given(probability, probability, st.floats(0, 12), st.integers(0, 10**6))
def test_features_follow_their_names(p1: float, p2: float, entropy: float, context: int) -> None:
    rows = position_features([[p1] * 15], [[p2] * 15], [[entropy] * 15], [context])
    assert rows.shape == (1, 15, len(FEATURE_NAMES))
    assert np.isfinite(rows).all()
    clipped = min(max(p1, 1e-6), 1 - 1e-6)
    expected = {
        "log_p1": math.log(clipped),
        "neg_log_1m_p1": -math.log(1 - clipped),
        "entropy": entropy,
        "margin": clipped - max(p2, 1e-9),
        "log_context": math.log(1 + context),
    }
    found = dict(zip(FEATURE_NAMES, rows[0, 7], strict=True))
    assert found == pytest.approx(expected, rel=1e-9)


@given(st.lists(st.integers(0, 15), min_size=1, max_size=20))
def test_at_risk_rows_and_labels(accepted: list[int]) -> None:
    mask, labels = at_risk(accepted), accepted_labels(accepted)
    for row, count in enumerate(accepted):
        # The accepted drafts and the first rejected one are observed, no later one.
        assert mask[row].sum() == min(count + 1, 15)
        assert labels[row].sum() == count
        assert labels[row, mask[row]].tolist() == [True] * count + [False] * (count < 15)


def test_trace_arrays_number_prompts_and_keep_rows() -> None:
    table = synthetic_trace(prompts=5, rounds=4)
    arrays = trace_arrays(table)
    assert len(arrays) == 20
    assert arrays.prompt_ids == tuple(f"p{i:03d}" for i in range(5))
    assert arrays.prompt.tolist() == sorted(list(range(5)) * 4)
    some = arrays.select(arrays.split == "test")
    assert some.num_prompts == 2
    assert some.p1_RD.shape == (8, 15)
    assert arrays.features_RDF.dtype == np.float64
    np.testing.assert_allclose(np.exp(arrays.features_RDF[..., 0]), arrays.p1_RD, rtol=1e-6)


def test_empty_trace_has_empty_arrays() -> None:
    arrays = trace_arrays(synthetic_trace(prompts=2, rounds=2).slice(0, 0))
    assert len(arrays) == 0
    assert arrays.features_RDF.shape == (0, 15, 5)
