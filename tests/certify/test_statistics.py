"""Intervals and tests against their definitions, closed forms and simulations."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from hybridspec.certify.statistics import (
    Paired,
    fit_to_law,
    mcnemar_exact,
    paired,
    pairs_needed,
    smallest_effect,
    tango_interval,
    tango_score,
)

Z = float(stats.norm.isf(0.025))
counts = st.builds(Paired, *[st.integers(0, 60)] * 4).filter(lambda c: c.n > 0)


def test_pairs_are_counted() -> None:
    found = paired([True, True, False, False, True], [True, False, True, False, True])
    assert found == Paired(both=2, only_first=1, only_second=1, neither=1)


@settings(max_examples=60, deadline=None)
@given(counts)
def test_limits_are_where_the_score_is_the_quantile(table: Paired) -> None:
    lower, upper = tango_interval(table)
    assert -1.0 <= lower <= table.difference <= upper <= 1.0
    if -0.999 < lower < table.difference:
        assert tango_score(table, lower) == pytest.approx(Z, abs=1e-4)
    if table.difference < upper < 0.999:
        assert tango_score(table, upper) == pytest.approx(-Z, abs=1e-4)


@settings(max_examples=60, deadline=None)
@given(counts)
def test_interval_is_mirrored_and_ignores_who_agrees(table: Paired) -> None:
    lower, upper = tango_interval(table)
    other = Paired(table.neither, table.only_second, table.only_first, table.both)
    assert tango_interval(other) == pytest.approx((-upper, -lower), abs=1e-7)


@settings(max_examples=60, deadline=None)
@given(counts)
def test_score_of_no_difference_is_mcnemar(table: Paired) -> None:
    b, c = table.only_second, table.only_first
    if b + c:
        assert tango_score(table, 0.0) == pytest.approx((b - c) / math.sqrt(b + c))


@pytest.mark.parametrize("n", [10, 381, 1319])
def test_complete_agreement_has_a_closed_form(n: int) -> None:
    edge = Z**2 / (n + Z**2)
    assert tango_interval(Paired(n, 0, 0, 0)) == pytest.approx((-edge, edge), abs=1e-6)


@pytest.mark.parametrize("margin", [0.005, 0.01, 0.05])
def test_pairs_needed_is_the_first_count_that_can_pass(margin: float) -> None:
    n = pairs_needed(margin)
    assert tango_interval(Paired(n, 0, 0, 0))[0] > -margin
    assert tango_interval(Paired(n - 1, 0, 0, 0))[0] <= -margin


def test_interval_covers_as_often_as_it_says() -> None:
    rng = np.random.default_rng(1)
    shares = np.array([0.6, 0.05, 0.03, 0.32])
    hits = 0
    for row in rng.multinomial(400, shares, size=400):
        lower, upper = tango_interval(Paired(*row.tolist()))
        hits += lower <= shares[2] - shares[1] <= upper
    assert stats.binomtest(hits, 400, 0.95).pvalue > 1e-3


def test_mcnemar_by_hand() -> None:
    assert mcnemar_exact(Paired(5, 0, 0, 5)) == 1.0
    # 1 of 8 discordant pairs: two tails of (1 + 8) / 256.
    assert mcnemar_exact(Paired(50, 1, 7, 50)) == pytest.approx(2 * 9 / 256)


def test_fit_holds_its_level_and_sees_a_bias() -> None:
    rng = np.random.default_rng(2)
    law = np.array([0.4, 0.3, 0.2, 0.0999, 0.0001])
    level = 0.01
    fits = [fit_to_law(rng.multinomial(2000, law), law, level=level, seed=s) for s in range(200)]
    false = sum(fit.p_value < level for fit in fits)
    assert stats.binomtest(false, 200, level, alternative="greater").pvalue > 1e-3
    assert fits[0].bins == 4  # the rare one is joined
    other = law + np.array([0.1, -0.1, 0.0, 0.0, 0.0])
    fit = fit_to_law(rng.multinomial(2000, other), law, level=level, seed=0)
    assert fit.p_value < 1e-6
    assert fit.total_variation > fit.limit


def test_what_the_law_cannot_produce_is_no_fit() -> None:
    fit = fit_to_law(np.array([99, 1]), np.array([1.0, 0.0]), level=0.01, seed=0)
    assert fit.p_value == 0.0
    assert fit.total_variation > fit.limit


def test_effect_is_found_as_often_as_stated() -> None:
    law = np.full(5, 0.2)
    w = smallest_effect(4, 1000, level=0.01)
    # sum (q - p)^2 / p = w^2
    shift = w * math.sqrt(0.2 / 2)
    other = law + np.array([shift, -shift, 0.0, 0.0, 0.0])
    rng = np.random.default_rng(3)
    found = sum(
        stats.chisquare(rng.multinomial(1000, other), 1000 * law).pvalue < 0.01 for _ in range(1000)
    )
    assert stats.binomtest(found, 1000, 0.9).pvalue > 1e-3
