from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from hybridspec.artifacts.tables import StepCostTable
from hybridspec.costmodels.rounds import RoundSet, expected_emitted, realised_emitted
from hybridspec.costmodels.throughput import (
    best_fixed_length,
    choose_lengths,
    fit_lengths,
    fit_throughput,
    throughput_of,
)
from hybridspec.errors import NotEnoughData

LINEAR_US = np.concatenate([[4000.0], 4800.0 + 300.0 * np.arange(16)])


def certain_hazards(accepted: np.ndarray) -> np.ndarray:
    """Hazards of a drafter that knows exactly which drafts will be accepted."""
    return (np.arange(15) < accepted[:, None]).astype(np.float64)


def rounds_of(accepted: np.ndarray, hazards: np.ndarray, **columns: np.ndarray) -> RoundSet:
    n = accepted.size
    base = {
        "prompt_index": np.arange(n),
        "category": np.full(n, "code"),
        "loop_period": np.zeros(n, dtype=np.int64),
        "context_tokens": np.full(n, 100),
    }
    return RoundSet(accepted=accepted, hazards_ND=hazards, **(base | columns))


def cost_table(latency_us: np.ndarray) -> StepCostTable:
    """latency_us [B, C, 17] with contexts 100, 200, ... and batches 1, 2, 4."""
    batches, contexts = latency_us.shape[:2]
    return StepCostTable(
        batch_sizes=2 ** np.arange(batches),
        context_tokens=100 * (1 + np.arange(contexts)),
        latency_us=latency_us,
        latency_p10_us=latency_us,
        latency_p90_us=latency_us,
        draft_us=np.full(latency_us.shape[:2], 800.0),
        expert_slope_us=0.0,
        expert_slope_r2=0.0,
    )


def latency_curves(min_step: float = 0.0) -> st.SearchStrategy[np.ndarray]:
    steps = arrays(np.float64, 17, elements=st.floats(min_step, 3.0))
    return st.builds(lambda base, step: base + np.cumsum(step), st.floats(0.1, 10.0), steps)


def brute_force_rate(accepted: np.ndarray, latency: np.ndarray) -> float:
    """Best ratio of sums over every assignment of lengths 1..16 to rounds, or plain decoding."""
    best = 1.0 / latency[0]
    for lengths in itertools.product(range(1, 17), repeat=accepted.size):
        emitted = sum(min(a, k - 1) + 1 for a, k in zip(accepted, lengths, strict=True))
        best = max(best, emitted / sum(latency[k] for k in lengths))
    return best


@settings(max_examples=20, deadline=None)
@given(arrays(np.int64, 3, elements=st.integers(0, 15)), latency_curves())
def test_perfect_hazards_give_the_brute_force_optimum(
    accepted: np.ndarray, latency: np.ndarray
) -> None:
    fit = fit_lengths(accepted, certain_hazards(accepted), latency)
    assert fit.tokens_per_us == pytest.approx(brute_force_rate(accepted, latency), rel=1e-6)


@settings(max_examples=60, deadline=None)
@given(arrays(np.int64, 12, elements=st.integers(0, 15)), latency_curves())
def test_iteration_rises_to_a_fixed_point_when_hazards_are_right(
    accepted: np.ndarray, latency: np.ndarray
) -> None:
    hazards = certain_hazards(accepted)
    fit = fit_lengths(accepted, hazards, latency)
    iterates = np.asarray(fit.iterates)
    assert np.all(np.diff(iterates) >= -1e-6 * iterates[:-1])
    lengths = choose_lengths(expected_emitted(hazards), latency, iterates[-1])
    full = np.broadcast_to(latency, (12, 17))
    assert throughput_of(accepted, lengths, full) == pytest.approx(iterates[-1], rel=1e-6)
    assert fit.tokens_per_us == pytest.approx(fit.expected_tokens_per_us, rel=1e-6)


@settings(max_examples=80, deadline=None)
@given(
    arrays(np.int64, 12, elements=st.integers(0, 15)),
    arrays(np.float64, (12, 15), elements=st.floats(0.0, 1.0)),
    latency_curves(),
)
def test_wrong_hazards_still_give_a_rate_that_is_delivered(
    accepted: np.ndarray, hazards: np.ndarray, latency: np.ndarray
) -> None:
    fit = fit_lengths(accepted, hazards, latency)
    full = np.broadcast_to(latency, (12, 17))
    lengths = choose_lengths(expected_emitted(hazards), latency, fit.tokens_per_us)
    if fit.drafting_pays:
        assert throughput_of(accepted, lengths, full) >= fit.tokens_per_us * (1 - 1e-6)
    else:
        assert fit.tokens_per_us == pytest.approx(1.0 / latency[0])
    assert fit.tokens_per_us * latency[0] >= 1.0 - 1e-12


@settings(max_examples=60, deadline=None)
@given(
    arrays(np.float64, (6, 15), elements=st.floats(0.0, 1.0)),
    latency_curves(),
    st.floats(1e-3, 5.0),
    st.floats(1.0, 3.0),
)
def test_chosen_length_is_best_and_never_grows_with_lam(
    hazards: np.ndarray, latency: np.ndarray, lam: float, factor: float
) -> None:
    emitted = expected_emitted(hazards)
    lengths = choose_lengths(emitted, latency, lam)
    score = emitted - lam * latency
    chosen = np.take_along_axis(score, lengths[:, None], axis=1)[:, 0]
    assert np.all(chosen >= score[:, 1:].max(axis=1) - 1e-8)
    dearer = choose_lengths(emitted, latency, lam * factor)
    assert np.all(latency[dearer] <= latency[lengths] + 1e-8 / lam)


def test_ties_go_to_the_shorter_length() -> None:
    flat = np.full(17, 5.0)
    never = expected_emitted(np.zeros((1, 15)))
    assert choose_lengths(never, flat, 0.1).tolist() == [1]
    # The second draft adds 0.5 tokens and exactly 0.5 tokens' worth of time.
    hazards = np.zeros((1, 15))
    hazards[0, 0] = 0.5
    latency = np.arange(1.0, 18.0, dtype=np.float64)
    assert choose_lengths(expected_emitted(hazards), latency, 0.5).tolist() == [1]
    assert choose_lengths(expected_emitted(hazards), latency, 0.499).tolist() == [2]


def test_known_answer_of_two_kinds_of_rounds() -> None:
    # T = 1 + L: rounds that accept everything want 16 rows (16 tokens in 17 us), the others 1 row
    # (1 token in 2 us). lam* = (16 + 1) / (17 + 2); a 16-row round gains 16 - lam 17 > 0 there.
    accepted = np.array([15, 0] * 10)
    latency = np.arange(1.0, 18.0, dtype=np.float64)
    latency[0] = 1.5
    fit = fit_lengths(accepted, certain_hazards(accepted), latency)
    assert fit.tokens_per_us == pytest.approx(17 / 19)
    assert fit.drafting_pays
    # All fixed lengths lose to plain decoding or tie with less: 16 rows give 17 tokens in 34 us.
    assert fit.best_fixed_length == 0
    assert fit.best_fixed_tokens_per_us == pytest.approx(1 / 1.5)


def test_hazards_that_promise_too_little_are_bisected_to_where_the_policy_switches() -> None:
    # The second row costs 0.1 us and always emits a token, but its hazard promises only 0.14: it is
    # verified while lam < 1.4. Long rounds reach 2 / 1.1 = 1.82 tokens/us, where the policy would
    # fall back to 1 token/us: plain iteration would swing between the two for ever.
    accepted = np.ones(30, dtype=np.int64)
    hazards = np.zeros((30, 15))
    hazards[:, 0] = 0.14
    latency = np.concatenate([[2.0, 1.0, 1.1], np.full(14, 50.0)])
    fit = fit_lengths(accepted, hazards, latency)
    assert fit.tokens_per_us == pytest.approx(1.4, rel=1e-6)
    assert fit.iterates == pytest.approx((2 / 1.1, 1.0, 1.4), rel=1e-6)
    full = np.broadcast_to(latency, (30, 17))
    lengths = choose_lengths(expected_emitted(hazards), latency, fit.tokens_per_us)
    assert throughput_of(accepted, lengths, full) == pytest.approx(2 / 1.1)
    assert fit.expected_tokens_per_us == pytest.approx(1.14 / 1.1)


def test_plain_decoding_wins_when_drafts_are_never_accepted() -> None:
    accepted = np.zeros(20, dtype=np.int64)
    fit = fit_lengths(accepted, np.full((20, 15), 0.9), LINEAR_US)
    assert not fit.drafting_pays
    assert fit.best_fixed_length == 0
    assert fit.tokens_per_us == pytest.approx(1 / 4000.0)


def test_best_fixed_length_by_enumeration() -> None:
    accepted = np.random.default_rng(0).integers(0, 16, size=200)
    full = np.broadcast_to(LINEAR_US, (200, 17))
    length, rate = best_fixed_length(accepted, full)
    rates = [realised_emitted(accepted, k).sum() / (200 * LINEAR_US[k]) for k in range(17)]
    assert length == int(np.argmax(rates))
    assert rate == pytest.approx(max(rates))


def test_throughput_table_prices_each_batch_and_context_and_skips_loops() -> None:
    rng = np.random.default_rng(1)
    accepted = rng.integers(0, 16, size=400)
    hazards = certain_hazards(accepted)
    base = np.stack([np.stack([LINEAR_US, 2 * LINEAR_US])])
    table = cost_table(np.concatenate([base, 1.5 * base]))
    context = np.where(np.arange(400) % 2 == 0, 100, 200)
    loops = np.where(np.arange(400) < 100, 3, 0)
    rounds = rounds_of(accepted, hazards, context_tokens=context, loop_period=loops)
    fitted = fit_throughput(rounds, table)
    latency = np.where(context[100:, None] == 100, LINEAR_US, 2 * LINEAR_US)
    expected = fit_lengths(accepted[100:], hazards[100:], latency).tokens_per_us
    assert fitted.batch_sizes.tolist() == [1, 2]
    assert fitted.tokens_per_us == pytest.approx([expected, expected / 1.5])


def test_too_few_rounds_are_refused() -> None:
    accepted = np.full(60, 3)
    rounds = rounds_of(accepted, certain_hazards(accepted), loop_period=np.arange(60) // 30)
    with pytest.raises(NotEnoughData, match="30 rounds outside repetition loops"):
        fit_throughput(rounds, cost_table(LINEAR_US[None, None]))
