from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from hybridspec.artifacts.tables import StepCostTable
from hybridspec.costmodels.policies import (
    Dinkelbach,
    FixedLength,
    LengthPolicy,
    OracleLength,
    RoundRatio,
    standard_policies,
)
from hybridspec.costmodels.replay import REPLAY_SCHEMA, replay, round_costs
from hybridspec.costmodels.rounds import RoundSet, expected_emitted, realised_emitted
from hybridspec.costmodels.throughput import fit_batch
from hybridspec.errors import BundleError, NotEnoughData, UsageError

CURVE_US = np.concatenate([[4000.0], 4800.0 + 300.0 * np.arange(16)])


def table_of(curve_us: np.ndarray = CURVE_US, *, slope_us: float = 0.0) -> StepCostTable:
    latency = np.stack([curve_us, 2.0 * curve_us])[None]
    return StepCostTable(
        batch_sizes=np.array([1]),
        context_tokens=np.array([0, 1000]),
        latency_us=latency,
        latency_p10_us=latency,
        latency_p90_us=latency,
        draft_us=np.full((1, 2), 800.0),
        expert_slope_us=slope_us,
        expert_slope_r2=1.0 if slope_us else 0.0,
    )


def synthetic(n: int = 600, *, seed: int = 0, distinct: bool = False) -> RoundSet:
    """Rounds drawn from their own hazards: calibrated exactly, easy or hard by prompt."""
    rng = np.random.default_rng(seed)
    prompt = rng.integers(0, 40, n)
    ease = np.where(prompt % 2 == 0, 4.0, 1.0)[:, None]
    hazards = rng.beta(ease, 1.0, (n, 15))
    accepted = np.cumprod(rng.random((n, 15)) < hazards, axis=1).sum(axis=1)
    grown = np.cumsum(rng.integers(1, 9, (n, 16)), axis=1).astype(np.float64)
    return RoundSet(
        prompt_index=prompt,
        category=np.where(prompt % 2 == 0, "code", "prose"),
        loop_period=np.where(rng.random(n) < 0.2, 2, 0),
        accepted=accepted.astype(np.int64),
        hazards_ND=hazards,
        context_tokens=rng.integers(0, 1001, n),
        distinct_total_NL=grown if distinct else None,
    )


def row_of(table: object, policy: str, category: str = "all") -> dict[str, float]:
    rows = [r for r in table.to_pylist() if r["policy"] == policy and r["category"] == category]  # type: ignore[attr-defined]
    assert len(rows) == 1
    return rows[0]


def test_every_number_of_a_tiny_replay_by_hand() -> None:
    rounds = RoundSet(
        prompt_index=np.array([0, 0, 1]),
        category=np.array(["code", "code", "prose"]),
        loop_period=np.zeros(3, dtype=np.int64),
        accepted=np.array([0, 3, 15]),
        hazards_ND=np.full((3, 15), 0.5),
        context_tokens=np.zeros(3, dtype=np.int64),
    )
    result = replay(rounds, [FixedLength(0), FixedLength(4), OracleLength()], table_of())
    assert result.schema.equals(REPLAY_SCHEMA, check_metadata=True)
    # Length 4 costs 5700 us and emits 1 + 4 + 4 tokens.
    fixed = row_of(result, "fixed-4")
    assert fixed["tokens_per_s"] == pytest.approx(9 / (3 * 5700.0) * 1e6)
    assert fixed["tokens_a_round"] == 3.0
    assert fixed["over_ar"] == pytest.approx(9 / (3 * 5700.0) * 4000.0)
    assert fixed["over_stock"] == pytest.approx((9 / (3 * 5700.0)) / (21 / (3 * 9300.0)))
    oracle = row_of(result, "oracle")
    assert oracle["mean_length"] == pytest.approx((1 + 4 + 16) / 3)
    assert oracle["tokens_per_s"] == pytest.approx(21 / (4800.0 + 5700.0 + 9300.0) * 1e6)
    assert oracle["of_oracle"] == 1.0
    assert row_of(result, "ar", "prose")["tokens_per_s"] == pytest.approx(250.0)
    assert row_of(result, "fixed-4", "code")["rounds"] == 2
    assert row_of(result, "fixed-4", "code")["prompts"] == 1


def test_loops_are_left_out_and_categories_add_up() -> None:
    rounds = synthetic()
    result = replay(rounds, standard_policies(5e-4), table_of())
    outside = int(np.count_nonzero(rounds.loop_period == 0))
    by_category = [row_of(result, "hybridspec", c)["rounds"] for c in ("code", "prose")]
    assert row_of(result, "hybridspec")["rounds"] == outside == sum(by_category)
    kept = replay(rounds.outside_loops(), standard_policies(5e-4), table_of())
    assert kept.equals(result)
    looping = rounds.select(rounds.loop_period > 0)
    with pytest.raises(NotEnoughData):
        replay(looping, [FixedLength(4)], table_of())


def test_calibrated_policy_beats_all_fixed_lengths_and_the_ratio_but_not_the_oracle() -> None:
    calibration, test = synthetic(6000, seed=1), synthetic(6000, seed=2)
    fit = fit_batch(calibration, table_of(), batch=1)
    assert fit.expected_tokens_per_us == pytest.approx(fit.tokens_per_us, rel=0.02)
    result = replay(test, standard_policies(fit.tokens_per_us), table_of())
    ours = row_of(result, "hybridspec")
    assert ours["tokens_per_s"] == pytest.approx(fit.tokens_per_us * 1e6, rel=0.03)
    assert ours["tokens_per_s"] >= row_of(result, "round-ratio")["tokens_per_s"]
    for length in range(17):
        name = FixedLength(length).name
        assert ours["tokens_per_s"] > row_of(result, name)["tokens_per_s"]
    assert ours["of_oracle"] < 1.0
    assert ours["tokens_per_s_low"] < ours["tokens_per_s"] < ours["tokens_per_s_high"]


def test_interval_is_as_wide_as_the_standard_error_over_prompts() -> None:
    n = 400
    rng = np.random.default_rng(5)
    of_prompt = rng.integers(0, 16, n)
    rounds = RoundSet(
        prompt_index=np.repeat(np.arange(n), 3),  # repeats within a prompt add no information
        category=np.full(3 * n, "a"),
        loop_period=np.zeros(3 * n, dtype=np.int64),
        accepted=np.repeat(of_prompt, 3),
        hazards_ND=np.full((3 * n, 15), 0.5),
        context_tokens=np.zeros(3 * n, dtype=np.int64),
    )
    row = row_of(replay(rounds, [FixedLength(16)], table_of(), resamples=2000), "fixed-16")
    half_width = 1.96 * of_prompt.std() / np.sqrt(n) / CURVE_US[16] * 1e6
    width = row["tokens_per_s_high"] - row["tokens_per_s_low"]
    assert width == pytest.approx(2 * half_width, rel=0.1)


@settings(max_examples=80, deadline=None)
@given(
    arrays(np.float64, (5, 15), elements=st.floats(0, 1)),
    arrays(np.int64, 5, elements=st.integers(0, 15)),
    arrays(np.int64, 5, elements=st.integers(0, 16)),
)
def test_emitted_tokens(hazards: np.ndarray, accepted: np.ndarray, lengths: np.ndarray) -> None:
    expected = expected_emitted(hazards)
    assert expected.shape == (5, 17)
    for i in range(5):
        total, survival = 0.0, 1.0
        for k in range(16):
            total += survival
            assert expected[i, k + 1] == pytest.approx(total)
            survival *= hazards[i, k] if k < 15 else 0.0
    assert np.array_equal(expected[:, 0], np.ones(5))
    realised = realised_emitted(accepted, lengths)
    assert np.all((realised >= 1) & (realised <= np.maximum(lengths, 1)))
    assert np.array_equal(realised_emitted(accepted, 16), accepted + 1)
    assert np.array_equal(realised_emitted(accepted, 0), np.ones(5))
    certain = (np.arange(15) < accepted[:, None]).astype(np.float64)
    exact = np.take_along_axis(expected_emitted(certain), lengths[:, None], axis=1)[:, 0]
    assert np.array_equal(exact, realised)


@settings(max_examples=40, deadline=None)
@given(arrays(np.float64, (20, 15), elements=st.floats(0, 1)), st.integers(1, 16))
def test_policies_stay_in_range_and_caps_hold(hazards: np.ndarray, cap: int) -> None:
    rounds = RoundSet(
        prompt_index=np.arange(20),
        category=np.full(20, "a"),
        loop_period=np.zeros(20, dtype=np.int64),
        accepted=np.zeros(20, dtype=np.int64),
        hazards_ND=hazards,
        context_tokens=np.zeros(20, dtype=np.int64),
    )
    latency = np.broadcast_to(CURVE_US, (20, 17))
    policies: list[LengthPolicy] = [Dinkelbach(3e-4, max_length=cap), RoundRatio(), OracleLength()]
    for policy in policies:
        lengths = policy.lengths(rounds, latency)
        assert lengths.dtype == np.int64
        assert np.all((lengths >= 1) & (lengths <= 16))
    assert np.all(policies[0].lengths(rounds, latency) <= cap)
    ratio = expected_emitted(hazards)[:, 1:] / CURVE_US[1:]
    chosen = np.take_along_axis(ratio, policies[1].lengths(rounds, latency)[:, None] - 1, axis=1)
    assert chosen[:, 0] == pytest.approx(ratio.max(axis=1))


class TestRoundCosts:
    def test_own_routes_move_the_cost_by_the_slope_and_average_out(self) -> None:
        rounds = synthetic(distinct=True)
        assert rounds.distinct_total_NL is not None
        plain = round_costs(rounds, table_of())
        own = round_costs(rounds, table_of(slope_us=3.0))
        off = rounds.distinct_total_NL - rounds.distinct_total_NL.mean(axis=0)
        assert own[:, 1:] - plain[:, 1:] == pytest.approx(3.0 * off)
        assert own.mean(axis=0) == pytest.approx(plain.mean(axis=0))
        assert np.array_equal(own[:, 0], plain[:, 0])
        reference = np.full(16, 10.0)
        moved = round_costs(rounds, table_of(slope_us=3.0), mean_distinct_L=reference)
        assert moved[:, 1:] - plain[:, 1:] == pytest.approx(
            3.0 * (rounds.distinct_total_NL - reference)
        )

    def test_without_routes_it_is_the_table_at_the_context(self) -> None:
        rounds = synthetic()
        cost = round_costs(rounds, table_of(slope_us=3.0))
        assert cost == pytest.approx(CURVE_US * (1 + rounds.context_tokens[:, None] / 1000.0))

    def test_routes_of_another_target_are_refused(self) -> None:
        with pytest.raises(UsageError, match="another target"):
            round_costs(synthetic(distinct=True), table_of(slope_us=3e4))


def test_damaged_rounds_are_refused() -> None:
    good = synthetic(60)
    columns = {name: getattr(good, name) for name in good.__dataclass_fields__}
    broken = {
        "accepted": np.full(60, 16),
        "hazards_ND": np.full((60, 15), np.nan),
        "context_tokens": np.zeros(59),
        "distinct_total_NL": np.zeros((60, 15)),
    }
    for name, values in broken.items():
        with pytest.raises(BundleError, match="rounds:"):
            RoundSet(**(columns | {name: values}))
    with pytest.raises(BundleError, match="hazards"):
        RoundSet(**(columns | {"hazards_ND": np.full((60, 16), 0.5)}))


def test_two_policies_of_one_name_are_refused() -> None:
    with pytest.raises(UsageError, match="different names"):
        replay(synthetic(), [Dinkelbach(1e-4), Dinkelbach(2e-4)], table_of())
