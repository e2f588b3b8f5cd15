from __future__ import annotations

import logging

import numpy as np
import pytest

from hybridspec.artifacts.tables import HazardTable, StepCostTable, ThroughputTable
from hybridspec.policy import Policy
from hybridspec.request import Round
from hybridspec.server.round_times import DRIFTED, RoundTimes
from hybridspec.telemetry import DriftMonitor, Telemetry

STEPS = 10


@pytest.fixture
def policy() -> Policy:
    """Measured for batches 1 and 4, and contexts up to 512; every round takes 100 us."""
    times = np.full((2, 1, 17), 100.0)
    return Policy(
        HazardTable("raw", np.zeros(5), np.zeros(15), np.array([0.0, 1.0]), np.array([0.0, 1.0])),
        StepCostTable(
            np.array([1, 4]), np.array([512]), times, times, times, np.ones((2, 1)), 0.0, 1.0
        ),
        ThroughputTable(np.array([1, 4]), np.array([0.02, 0.02]), np.array([3, 3])),
    )


def step(
    lengths: list[int], *, observed_us: float, predicted_us: float | None = 100.0
) -> list[Round]:
    return [Round([1], length, length, 0, predicted_us, observed_us) for length in lengths]


def run(policy: Policy, rounds: list[Round], *, longest_context: int = 100) -> Telemetry:
    telemetry = Telemetry()
    times = RoundTimes(policy, telemetry, DriftMonitor(steps=STEPS))
    for _ in range(10 * STEPS):
        times.observe(rounds, longest_context=longest_context)
    return telemetry


@pytest.mark.parametrize("lengths", [[5], [16, 16, 16, 16], [0]])
def test_drift_makes_the_policy_static_and_is_logged_once(
    policy: Policy, lengths: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        telemetry = run(policy, step(lengths, observed_us=400.0))
    assert policy.static_reason == DRIFTED
    assert b"hybridspec_bundle_drift_total 1.0" in telemetry.render()
    assert len(caplog.records) == 1
    assert "profile-latency" in caplog.text


@pytest.mark.parametrize(
    ("lengths", "longest_context"),
    [
        ([5, 5], 100),  # batch 2 is priced as 4, the next one measured
        ([5] * 8, 100),  # beyond the grid
        ([3, 16, 2, 0], 100),  # mixed lengths are estimated
        ([5], 513),  # context beyond the grid
    ],
)
def test_estimates_are_reported_but_are_no_drift(
    policy: Policy, lengths: list[int], longest_context: int
) -> None:
    telemetry = run(policy, step(lengths, observed_us=200.0), longest_context=longest_context)
    assert policy.static_reason is None
    assert b'hybridspec_round_time_ratio_bucket{le="2.0"} 100.0' in telemetry.render()


def test_steps_without_predictions_or_policy_are_only_timed(policy: Policy) -> None:
    telemetry = run(policy, step([5], observed_us=200.0, predicted_us=None))
    assert policy.static_reason is None
    assert b"hybridspec_round_time_ratio_count 0.0" in telemetry.render()
    assert b"hybridspec_round_seconds_count 100.0" in telemetry.render()
    RoundTimes(None, telemetry, DriftMonitor(steps=1)).observe(
        step([5], observed_us=900.0), longest_context=1
    )


def test_mixed_step_is_predicted_by_the_mean(policy: Policy) -> None:
    rounds = [Round([1], 2, 2, 0, 100.0, 150.0), Round([1], 9, 9, 0, 200.0, 150.0)]
    assert b"hybridspec_predicted_round_seconds_total 0.015" in run(policy, rounds).render()
