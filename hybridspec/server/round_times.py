"""Compares times of steps with the cost table, and gives the policy up when they part for good."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from statistics import fmean
from typing import TYPE_CHECKING

from hybridspec.telemetry import DriftMonitor, Telemetry

if TYPE_CHECKING:
    from hybridspec.policy import Policy
    from hybridspec.request import Round

logger = logging.getLogger(__name__)

# Becomes the value of a metric label, so it holds no numbers.
DRIFTED = "round times left the bundle's cost table"


class RoundTimes:
    """Watches every step of an engine.

    Args:
        policy: whose cost table predicts; made static once when drift is declared.
        drift: decides what drift is.
    """

    def __init__(self, policy: Policy | None, telemetry: Telemetry, drift: DriftMonitor) -> None:
        self._policy = policy
        self._telemetry = telemetry
        self._drift = drift

    def observe(self, rounds: Sequence[Round], *, longest_context: int) -> None:
        """Add one step.

        Args:
            rounds: its rounds, one a request, at least one.
            longest_context: most tokens that one of its requests had processed.
        """
        observed_us = rounds[0].observed_us
        predictions = [round_.predicted_us for round_ in rounds if round_.predicted_us is not None]
        # Each is the time of a step in which all requests verify that length. Rows cost about the
        # same whoever owns them, so a mixed step takes about their mean.
        predicted_us = fmean(predictions) if len(predictions) == len(rounds) else None
        self._telemetry.observe_step(observed_us=observed_us, predicted_us=predicted_us)
        if predicted_us is None or not self._measured(rounds, longest_context):
            return
        declared = self._drift.update(
            predicted_us=predicted_us,
            observed_us=observed_us,
            verify_length=rounds[0].verify_length,
        )
        self._telemetry.drift_ratio.set(self._drift.ratio)
        if declared:
            self._give_up()

    def _measured(self, rounds: Sequence[Round], longest_context: int) -> bool:
        """Whether the table holds such steps: else a difference is the estimate's, not a drift."""
        if self._policy is None:
            return False
        cost = self._policy.cost
        same_length = len({round_.verify_length for round_ in rounds}) == 1
        known_batch = len(rounds) in cost.batch_sizes.tolist()
        return same_length and known_batch and longest_context <= int(cost.context_tokens[-1])

    def _give_up(self) -> None:
        if self._policy is None:
            return
        self._policy.set_static(DRIFTED)
        self._telemetry.bundle_drift.inc()
        self._telemetry.policy_active.set(0)
        logger.warning(
            "for %d steps rounds took %.2f times what the bundle's cost table says, and lengths "
            "differ by a factor of %.3f from one another; at most %.2f and %.2f keep it usable: "
            "lengths are static from now on; run `hybridspec profile-latency` again",
            self._drift.steps,
            self._drift.ratio,
            self._drift.shape_ratio,
            1.0 + self._drift.scale_limit,
            1.0 + self._drift.limit,
        )
