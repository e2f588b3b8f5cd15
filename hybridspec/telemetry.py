"""What a running server counts: Prometheus metrics, and the watch on the cost table's predictions.

Importing this module imports no torch. All metrics start with `hybridspec_` and live in a registry
of their own, so that several servers (or tests) in one process do not collide.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)

from hybridspec.artifacts.tables import BLOCK_SIZE

if TYPE_CHECKING:
    from hybridspec.request import Round

DRIFT_LIMIT = 0.15
DRIFT_SCALE_LIMIT = 1.0
DRIFT_STEPS = 200
COMMON_OVER_SMOOTHING = 5.0
_RATIO_BUCKETS = (0.25, 0.5, 0.7, 0.8, 0.85, 0.9, 0.95, 1.0, 1.05, 1.1, 1.15, 1.3, 1.5, 2.0, 4.0)
_SECONDS_BUCKETS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)


@dataclass
class DriftMonitor:
    """Notices that rounds no longer take the time that the cost table says.

    Only the shape of the table decides: the policy weighs E(L) against lam T(L) with lam fitted on
    the same table, so one factor on all times changes no length. Drift is therefore declared, once,
    when for `steps` steps in a row some verify length is more than `limit` away from what the
    lengths have in common, or when that common factor itself is beyond `scale_limit`, as on another
    machine. Distances are exponentially weighted means of ln(observed / predicted), in which one
    outlier counts little and "twice as slow" is as far off as "twice as fast".

    What lengths have in common follows each step five times as fast as a length's own distance from
    it: a machine that slows down moves the former, and a length that was not used meanwhile is not
    left behind with distances of before.

    Attributes:
        limit: relative distance between lengths that still counts as agreement, 0.15 = 15 %.
        scale_limit: relative distance of all lengths together that still does, 1.0 = a factor of 2.
        steps: steps in a row beyond a limit before drift is declared.
        smoothing: weight of the newest step, in (0, 1]; of the common factor behind distances
            `COMMON_OVER_SMOOTHING` times that.
        least_steps: steps of a length before its mean is compared with the others'.
    """

    limit: float = DRIFT_LIMIT
    scale_limit: float = DRIFT_SCALE_LIMIT
    steps: int = DRIFT_STEPS
    smoothing: float = 0.02
    least_steps: int = 100
    declared: bool = field(default=False, init=False)
    _log_ratio: float = field(default=0.0, init=False)
    _common: float = field(default=0.0, init=False)
    _distance_by_length: dict[int, float] = field(default_factory=dict, init=False)
    _seen: dict[int, int] = field(default_factory=dict, init=False)
    _beyond: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        if not (
            self.limit > 0
            and self.scale_limit > 0
            and self.steps >= 1
            and 0 < self.smoothing <= 1
            and self.least_steps >= 1
        ):
            raise ValueError(
                f"limit={self.limit}, scale_limit={self.scale_limit}, steps={self.steps}, "
                f"smoothing={self.smoothing}, least_steps={self.least_steps}; need limit > 0, "
                "scale_limit > 0, steps >= 1, 0 < smoothing <= 1 and least_steps >= 1"
            )

    @property
    def ratio(self) -> float:
        """Smoothed observed / predicted round time; 1.0 until steps are seen."""
        return math.exp(self._log_ratio)

    @property
    def shape_ratio(self) -> float:
        """How far the length that is furthest off is from the middle of all, a factor >= 1."""
        known = [
            self._distance_by_length[length]
            for length, seen in self._seen.items()
            if seen >= self.least_steps
        ]
        return math.exp((max(known) - min(known)) / 2) if len(known) > 1 else 1.0

    def update(self, *, predicted_us: float, observed_us: float, verify_length: int = 0) -> bool:
        """Add one step; return True exactly once, when drift is declared.

        Steps without a positive, finite pair of times are ignored.
        """
        times = (predicted_us, observed_us)
        if not all(math.isfinite(time_us) and time_us > 0 for time_us in times):
            return False
        newest = math.log(observed_us / predicted_us)
        self._log_ratio += self.smoothing * (newest - self._log_ratio)
        seen = self._seen[verify_length] = self._seen.get(verify_length, 0) + 1
        distance = self._distance_by_length.get(verify_length, 0.0)
        surprise = newest - self._common - distance
        self._common += min(1.0, COMMON_OVER_SMOOTHING * self.smoothing) * surprise
        # Twice as much at first, so that a length's early value is soon its own.
        weight = self.smoothing * (2.0 if seen <= self.least_steps else 1.0)
        self._distance_by_length[verify_length] = distance + min(1.0, weight) * surprise
        if (
            abs(self._log_ratio) > math.log1p(self.scale_limit)
            or self.shape_ratio > 1.0 + self.limit
        ):
            self._beyond += 1
        else:
            self._beyond = 0
        if self.declared or self._beyond < self.steps:
            return False
        self.declared = True
        return True


class Telemetry:
    """All metrics of one server, in their own registry."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._token_metrics()
        self._round_metrics()
        self._request_metrics()

    def _token_metrics(self) -> None:
        self.tokens = Counter(
            "hybridspec_tokens",
            "Tokens prefilled (prompt) and tokens delivered to clients (generated)",
            ["kind"],
            registry=self.registry,
        )
        for kind in ("prompt", "generated"):
            self.tokens.labels(kind)
        self.drafts_verified = Counter(
            "hybridspec_drafts_verified",
            "Draft tokens that the target verified",
            registry=self.registry,
        )
        self.drafts_accepted = Counter(
            "hybridspec_drafts_accepted",
            "Draft tokens that the target accepted",
            registry=self.registry,
        )

    def _round_metrics(self) -> None:
        self.rounds = Counter(
            "hybridspec_rounds",
            "Rounds of single requests, by how the verify length is chosen",
            ["mode"],
            registry=self.registry,
        )
        for mode in ("none", "fixed", "policy"):
            self.rounds.labels(mode)
        self.steps = Counter(
            "hybridspec_steps",
            "Engine steps; one step is a round of every active request",
            registry=self.registry,
        )
        self.verify_length = Histogram(
            "hybridspec_verify_length",
            "Rows verified in a round, anchor included; 0 = round without a draft pass",
            buckets=tuple(range(BLOCK_SIZE + 1)),
            registry=self.registry,
        )
        self.corrections = Counter(
            "hybridspec_length_corrections",
            "Rounds whose length the first router's experts changed after selection",
            registry=self.registry,
        )
        self.emitted_per_round = Histogram(
            "hybridspec_emitted_per_round",
            "Tokens that one round emitted for one request",
            buckets=tuple(range(1, BLOCK_SIZE + 1)),
            registry=self.registry,
        )
        self.round_time_ratio = Histogram(
            "hybridspec_round_time_ratio",
            "Observed over predicted time of a step, where the cost table predicts it",
            buckets=_RATIO_BUCKETS,
            registry=self.registry,
        )
        self.predicted_seconds = Counter(
            "hybridspec_predicted_round_seconds",
            "Predicted time of the steps that have a prediction, summed",
            registry=self.registry,
        )
        self.observed_seconds = Counter(
            "hybridspec_observed_round_seconds",
            "Observed time of the same steps, summed",
            registry=self.registry,
        )
        self.round_seconds = Histogram(
            "hybridspec_round_seconds",
            "Observed time of every step",
            buckets=_SECONDS_BUCKETS,
            registry=self.registry,
        )
        self.fallbacks = Counter(
            "hybridspec_fallback",
            "Rounds in which a request fell back from the policy's choice",
            ["reason"],
            registry=self.registry,
        )
        self.drift_ratio = Gauge(
            "hybridspec_round_time_drift_ratio",
            "Smoothed observed over predicted step time",
            registry=self.registry,
        )
        self.drift_ratio.set(1.0)
        self.bundle_drift = Counter(
            "hybridspec_bundle_drift",
            "Times that round times left the cost table for good and lengths became static",
            registry=self.registry,
        )
        self.policy_active = Gauge(
            "hybridspec_policy_active",
            "1 while a bundle's policy chooses lengths by default, else 0",
            registry=self.registry,
        )

    def _request_metrics(self) -> None:
        self.requests = Counter(
            "hybridspec_requests",
            "Finished requests by HTTP status and finish reason (- = none)",
            ["status", "finish_reason"],
            registry=self.registry,
        )
        self.queue_depth = Gauge(
            "hybridspec_queue_depth", "Requests that wait for a slot", registry=self.registry
        )
        self.active_slots = Gauge(
            "hybridspec_active_slots", "Requests that hold a slot", registry=self.registry
        )
        self.slots = Gauge("hybridspec_slots", "Slots of the engine", registry=self.registry)
        self.healthy = Gauge(
            "hybridspec_healthy",
            "1 while the engine works, 0 after it failed",
            registry=self.registry,
        )
        self.queue_seconds = Histogram(
            "hybridspec_queue_seconds",
            "Time from arrival of a request to the start of its prefill",
            buckets=_SECONDS_BUCKETS,
            registry=self.registry,
        )
        self.prefill_seconds = Histogram(
            "hybridspec_prefill_seconds",
            "Time of prefill, first token included",
            buckets=_SECONDS_BUCKETS,
            registry=self.registry,
        )

    def observe_round(self, round_: Round, *, mode: str) -> None:
        """Count one request's part of a step; `mode` is the kind of its length rule."""
        self.rounds.labels(mode).inc()
        self.verify_length.observe(round_.verify_length)
        self.emitted_per_round.observe(len(round_.emitted))
        self.drafts_verified.inc(max(round_.verify_length - 1, 0))
        self.drafts_accepted.inc(round_.accepted)
        if round_.selected_length != round_.verify_length:
            self.corrections.inc()
        if round_.fallback is not None:
            self.fallbacks.labels(round_.fallback).inc()

    def observe_step(self, *, observed_us: float, predicted_us: float | None) -> None:
        """Count one engine step and compare its time with the prediction, if there is one."""
        self.steps.inc()
        self.round_seconds.observe(observed_us * 1e-6)
        if predicted_us is not None and predicted_us > 0:
            self.round_time_ratio.observe(observed_us / predicted_us)
            self.predicted_seconds.inc(predicted_us * 1e-6)
            self.observed_seconds.inc(observed_us * 1e-6)

    def count_request(self, *, status: int, finish_reason: str | None = None) -> None:
        """Count a request that ended with this HTTP status."""
        self.requests.labels(str(status), finish_reason or "-").inc()

    def render(self) -> bytes:
        """Return all metrics in Prometheus text format."""
        return generate_latest(self.registry)
