from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from hybridspec.request import Round
from hybridspec.telemetry import (
    DRIFT_LIMIT,
    DRIFT_SCALE_LIMIT,
    DRIFT_STEPS,
    DriftMonitor,
    Telemetry,
)


def feed(monitor: DriftMonitor, ratios: list[float]) -> list[int]:
    """Steps (counted from 1) at which drift was declared."""
    return [
        step
        for step, ratio in enumerate(ratios, 1)
        if monitor.update(predicted_us=800.0, observed_us=800.0 * ratio)
    ]


def samples(telemetry: Telemetry) -> dict[str, float]:
    found = {}
    for family in text_string_to_metric_families(telemetry.render().decode()):
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}"] = sample.value
    return found


def test_limits_are_those_of_the_design() -> None:
    assert (DRIFT_LIMIT, DRIFT_SCALE_LIMIT, DRIFT_STEPS) == (0.15, 1.0, 200)


@given(st.lists(st.floats(1 / 1.999, 1.999), max_size=600))
def test_agreement_is_never_drift(ratios: list[float]) -> None:
    assert feed(DriftMonitor(steps=20), ratios) == []


@given(
    ratio=st.one_of(st.floats(2.2, 50.0), st.floats(0.02, 1 / 2.2)),
    steps=st.integers(1, 200),
    smoothing=st.floats(0.02, 1.0),
)
def test_lasting_drift_is_declared_once_and_not_early(
    ratio: float, steps: int, smoothing: float
) -> None:
    declared = feed(DriftMonitor(steps=steps, smoothing=smoothing), [ratio] * 900)
    assert len(declared) == 1
    # The mean crosses the limit after at most this many steps, then `steps` must follow.
    share = math.log1p(DRIFT_SCALE_LIMIT) / abs(math.log(ratio))
    crossing = 1 if smoothing == 1.0 else 1 + math.log(1 - share) / math.log(1 - smoothing)
    assert steps <= declared[0] <= steps + crossing + 1


def feed_lengths(monitor: DriftMonitor, factors: dict[int, float], steps: int) -> int:
    """How often drift is declared when each length takes its factor of the predicted time."""
    return sum(
        monitor.update(predicted_us=500.0, observed_us=500.0 * factor, verify_length=length)
        for _ in range(steps)
        for length, factor in factors.items()
    )


def test_common_factor_changes_no_length_and_is_no_drift() -> None:
    monitor = DriftMonitor()
    assert feed_lengths(monitor, {0: 1.6, 4: 1.6, 16: 1.65}, 1000) == 0
    assert monitor.ratio == pytest.approx(1.617, rel=0.01)
    assert monitor.shape_ratio < 1.02


def test_lengths_that_part_are_drift() -> None:
    monitor = DriftMonitor()
    # The middle is right, the ends are not: long rounds cost more than the policy believes.
    assert feed_lengths(monitor, {1: 0.85, 16: 1.18}, 1000) == 1
    assert monitor.ratio == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize("factor", [0.55, 0.7, 1.4, 1.8])
@pytest.mark.parametrize("in_turns", [False, True], ids=["mixed", "in turns"])
def test_a_machine_that_changes_its_speed_is_no_change_of_shape(
    factor: float, in_turns: bool
) -> None:
    """Lengths that are used now and then must not keep times of before the change."""
    rng = random.Random(f"{factor}/{in_turns}")
    monitor = DriftMonitor()
    lengths = [0, 1, 2, 3, 8, 16]
    for step in range(6000):
        if in_turns and step % 150 == 0:
            lengths = rng.choice([[0, 1, 2], [2, 3], [8, 16]])
        length = rng.choices(lengths, [1.0 / (1 + n) for n in range(len(lengths))])[0]
        ratio = math.exp(rng.gauss(0.0, 0.08)) * (factor if step >= 2500 else 1.0)
        assert not monitor.update(
            predicted_us=700.0, observed_us=700.0 * ratio, verify_length=length
        )
    assert monitor.shape_ratio < 1.05
    assert monitor.ratio == pytest.approx(factor, rel=0.1)


@pytest.mark.parametrize("in_turns", [False, True], ids=["mixed", "in turns"])
def test_a_change_of_shape_is_seen_however_lengths_come(in_turns: bool) -> None:
    rng = random.Random(5)
    monitor = DriftMonitor()
    lengths, declared = [1, 2, 8, 16], []
    for step in range(8000):
        if in_turns and step % 150 == 0:
            lengths = rng.choice([[1, 2], [2, 8], [8, 16]])
        length = rng.choice(lengths)
        slower = 1.6 if step >= 1000 and length >= 8 else 1.0
        ratio = math.exp(rng.gauss(0.0, 0.08)) * slower
        if monitor.update(predicted_us=700.0, observed_us=700.0 * ratio, verify_length=length):
            declared.append(step)
    assert len(declared) == 1
    assert 1000 + DRIFT_STEPS <= declared[0] < 4000


def test_a_rare_length_is_not_judged() -> None:
    monitor = DriftMonitor(least_steps=100)
    feed_lengths(monitor, {4: 1.0}, 500)
    assert feed_lengths(monitor, {16: 3.0}, 99) == 0
    assert monitor.shape_ratio == 1.0


def test_passing_disturbance_is_forgiven() -> None:
    monitor = DriftMonitor()
    assert feed(monitor, [1.0] * 50 + [100.0] + [1.0] * 400) == []
    assert feed(monitor, ([3.0] * 160 + [1.0] * 160) * 4) == []
    assert not monitor.declared


def test_ratio_follows_the_steps() -> None:
    monitor = DriftMonitor()
    assert monitor.ratio == 1.0
    feed(monitor, [1.5] * 600)
    assert monitor.ratio == pytest.approx(1.5, rel=1e-3)


@pytest.mark.parametrize(
    ("predicted_us", "observed_us"),
    [(0.0, 5.0), (5.0, 0.0), (math.nan, 5.0), (5.0, math.nan), (math.inf, 5.0), (-1.0, 5.0)],
)
def test_impossible_times_are_ignored(predicted_us: float, observed_us: float) -> None:
    monitor = DriftMonitor(steps=1, smoothing=1.0)
    assert not monitor.update(predicted_us=predicted_us, observed_us=observed_us)
    assert monitor.ratio == 1.0


@pytest.mark.parametrize("wrong", [{"limit": 0.0}, {"steps": 0}, {"smoothing": 0.0}])
def test_impossible_settings_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="need limit"):
        DriftMonitor(**wrong)  # pyright: ignore[reportArgumentType]


def test_rounds_become_metrics() -> None:
    telemetry = Telemetry()
    telemetry.observe_round(Round([7, 8, 9], 4, 5, 2, 100.0, 120.0), mode="policy")
    telemetry.observe_round(Round([7], 0, 0, 0, 40.0, 120.0, "unpaid"), mode="policy")
    telemetry.observe_step(observed_us=120.0, predicted_us=100.0)
    telemetry.observe_step(observed_us=120.0, predicted_us=None)
    found = samples(telemetry)
    assert found["hybridspec_rounds_total{mode=policy}"] == 2
    assert found["hybridspec_rounds_total{mode=none}"] == 0
    assert found["hybridspec_verify_length_bucket{le=0.0}"] == 1
    assert found["hybridspec_verify_length_bucket{le=3.0}"] == 1
    assert found["hybridspec_verify_length_bucket{le=4.0}"] == 2
    assert found["hybridspec_verify_length_sum{}"] == 4
    assert found["hybridspec_emitted_per_round_sum{}"] == 4
    assert found["hybridspec_drafts_verified_total{}"] == 3
    assert found["hybridspec_drafts_accepted_total{}"] == 2
    assert found["hybridspec_length_corrections_total{}"] == 1
    assert found["hybridspec_fallback_total{reason=unpaid}"] == 1
    assert found["hybridspec_steps_total{}"] == 2
    assert found["hybridspec_round_time_ratio_bucket{le=1.15}"] == 0
    assert found["hybridspec_round_time_ratio_bucket{le=1.3}"] == 1
    assert found["hybridspec_predicted_round_seconds_total{}"] == pytest.approx(100e-6)
    assert found["hybridspec_observed_round_seconds_total{}"] == pytest.approx(120e-6)


def test_registries_are_separate() -> None:
    first, second = Telemetry(), Telemetry()
    first.count_request(status=429)
    assert samples(first)["hybridspec_requests_total{finish_reason=-,status=429}"] == 1
    assert "hybridspec_requests_total{finish_reason=-,status=429}" not in samples(second)
