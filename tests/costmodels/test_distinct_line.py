"""A line on distinct experts: what it finds, and what it refuses."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridspec.costmodels.distinct_line import distinct_of_batch, fit_distinct_line
from hybridspec.errors import NotEnoughData, QualityGate

ROWS = np.arange(1, 17)
DISTINCT = 256 * (1 - (1 - 8 / 256) ** ROWS)


@given(st.floats(500.0, 9000.0), st.floats(5.0, 200.0), st.integers(1, 8), st.integers(0, 9))
def test_a_line_is_found_again(start: float, slope: float, batch: int, seed: int) -> None:
    g = np.random.default_rng(seed)
    true = start + slope * distinct_of_batch(DISTINCT, batch, 256)
    lengths = g.choice(ROWS, 8, replace=False)
    times = {int(n): true[n - 1] * (1 + 1e-3 * g.standard_normal(60)) for n in lengths}
    line = fit_distinct_line(times, DISTINCT, batch=batch, num_experts=256)
    np.testing.assert_allclose(line.latency_us_L, true, rtol=3e-3)
    assert (np.diff(line.latency_us_L) > 0).all()
    assert np.isnan(line.median_us_L).sum() == 8


def test_experts_of_a_batch_against_drawing() -> None:
    g = np.random.default_rng(0)
    drawn = [
        len({int(e) for _ in range(4) for e in g.choice(64, 20, replace=False)}) for _ in range(400)
    ]
    found = distinct_of_batch(np.array([20.0]), 4, 64)[0]
    assert abs(found - np.mean(drawn)) < 0.5


def test_few_rounds_few_lengths_and_falling_times_are_refused() -> None:
    with pytest.raises(NotEnoughData, match="40 rounds of 4 lengths"):
        fit_distinct_line(
            {n: np.full(10, 5000.0 + n) for n in (1, 4, 8, 16)}, DISTINCT, batch=1, num_experts=256
        )
    with pytest.raises(NotEnoughData, match="300 rounds of 3 lengths"):
        fit_distinct_line(
            {n: np.full(100, 5000.0 + n) for n in (1, 4, 8)}, DISTINCT, batch=1, num_experts=256
        )
    falling = {n: np.full(100, 9000.0 - 100 * n) for n in (1, 4, 8, 16)}
    with pytest.raises(QualityGate, match="must rise"):
        fit_distinct_line(falling, DISTINCT, batch=1, num_experts=256)
    with pytest.raises(QualityGate, match="length 4: round times"):
        fit_distinct_line({**falling, 4: np.full(100, np.nan)}, DISTINCT, batch=1, num_experts=256)
