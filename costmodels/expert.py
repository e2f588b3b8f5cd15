"""What one further distinct expert of one layer adds to a round.

Rounds of one verify length run the same dense, GDN and attention work; with routes forced to a
chosen overlap only the expert weights read differ. So the slope is a within-length effect: one
intercept a length, one slope for all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from hybridspec.artifacts.tables import FloatArray, IntArray
from hybridspec.errors import NotEnoughData, UsageError

MIN_READINGS = 5
_USABLE_R2 = 0.5


@dataclass(frozen=True)
class ExpertSlope:
    """Cost of a distinct expert, with the evidence for it.

    Attributes:
        num_layers: layers with routed experts.
        slope_us: microseconds a distinct expert of one layer. Multiply by the distinct experts
            summed over all layers.
        slope_low_us, slope_high_us: 95 % interval, readings resampled within each case.
        r2: share of the variance *within* lengths that the line explains.
        intercept_us: for each (batch, verify length) the time that no expert explains.
        residual_by_length: for each verify length the largest deviation of a case's median from
            the line, as a share of the median. A trend here says that the slope is no constant.
        warnings: what a reader of the number should know.
    """

    num_layers: int
    slope_us: float
    slope_low_us: float
    slope_high_us: float
    r2: float
    intercept_us: Mapping[tuple[int, int], float]
    residual_by_length: Mapping[int, float]
    warnings: tuple[str, ...]

    @property
    def usable(self) -> bool:
        """Whether a policy may price experts: surely above zero, and most of the variation."""
        return self.slope_low_us > 0.0 and self.r2 >= _USABLE_R2

    def line(self) -> str:
        """One line for a report."""
        return (
            f"a distinct expert of one layer costs {self.slope_us:.3g} us "
            f"({self.slope_low_us:.3g} to {self.slope_high_us:.3g}; "
            f"{self.slope_us * self.num_layers:.3g} us over {self.num_layers} layers), "
            f"R2 {self.r2:.3f}" + ("" if self.usable else "; not usable, so not priced")
        )


def fit_expert_slope(
    samples: pa.Table, *, num_layers: int, resamples: int = 400, seed: int = 0
) -> ExpertSlope:
    """Fits the slope on medians of forced-route rounds.

    Args:
        samples: columns batch, verify_length, distinct_experts (of each layer), total_us.
        num_layers: layers with routed experts.
        resamples: bootstrap resamples for the interval.
        seed: of the resampling.

    Raises:
        NotEnoughData: fewer than 5 readings of a case, or no length with two expert counts.
    """
    if num_layers < 1:
        raise UsageError(f"{num_layers} layers with routed experts; there must be at least 1")
    keys, readings = _cases(samples)
    few = min((values.size for values in readings), default=0)
    if few < MIN_READINGS:
        raise NotEnoughData(
            f"a forced-route case has {few} readings; at least {MIN_READINGS} are needed: "
            "measure more repeats"
        )
    distinct = keys[:, 2].astype(np.float64)
    groups, group = np.unique(keys[:, :2], axis=0, return_inverse=True)
    if len(keys) - len(groups) < 2:
        raise NotEnoughData(
            f"{len(keys)} forced-route cases over {len(groups)} lengths leave no line to check; "
            "measure at least three expert counts of one length"
        )
    medians = np.asarray([np.median(values) for values in readings], dtype=np.float64)
    slope_layers, r2 = _within_slope(distinct, medians, group)
    low, high = _bootstrap(distinct, readings, group, resamples=resamples, seed=seed)

    intercepts: dict[tuple[int, int], float] = {}
    residuals: dict[int, float] = {}
    for index, (batch, length) in enumerate(groups.tolist()):
        rows = group == index
        intercept = float(np.mean(medians[rows] - slope_layers * distinct[rows]))
        fitted = intercept + slope_layers * distinct[rows]
        worst = float(np.max(np.abs(medians[rows] - fitted) / medians[rows]))
        intercepts[(batch, length)] = intercept
        residuals[length] = max(residuals.get(length, 0.0), worst)
    return ExpertSlope(
        num_layers=num_layers,
        slope_us=slope_layers / num_layers,
        slope_low_us=low / num_layers,
        slope_high_us=high / num_layers,
        r2=r2,
        intercept_us=intercepts,
        residual_by_length=residuals,
        warnings=_warnings(low=low, r2=r2, residuals=residuals),
    )


def _cases(samples: pa.Table) -> tuple[IntArray, list[FloatArray]]:
    """Returns the cases, int64 [cases, 3] (batch, length, distinct), and the readings of each."""
    columns = [
        samples.column(name).to_numpy() for name in ("batch", "verify_length", "distinct_experts")
    ]
    total = samples.column("total_us").to_numpy().astype(np.float64)
    if not np.all(np.isfinite(total) & (total > 0)):
        raise NotEnoughData("a forced-route reading is not a time above 0 us: measure again")
    keys, case = np.unique(np.stack(columns, axis=1), axis=0, return_inverse=True)
    return keys.astype(np.int64), [total[case == index] for index in range(len(keys))]


def _demean(values: FloatArray, group: IntArray) -> FloatArray:
    """Subtracts each group's mean along the last axis."""
    out = np.array(values, dtype=np.float64)
    for index in np.unique(group):
        rows = group == index
        out[..., rows] -= out[..., rows].mean(axis=-1, keepdims=True)
    return out


def _within_slope(x: FloatArray, y: FloatArray, group: IntArray) -> tuple[float, float]:
    x_within, y_within = _demean(x, group), _demean(y, group)
    slope = float(x_within @ y_within / (x_within @ x_within))
    total = float(y_within @ y_within)
    error = float(np.sum((y_within - slope * x_within) ** 2))
    return slope, 1.0 - error / total if total > 0.0 else 0.0


def _bootstrap(
    x: FloatArray, readings: list[FloatArray], group: IntArray, *, resamples: int, seed: int
) -> tuple[float, float]:
    """Returns the 95 % interval of the slope over resampled readings of each case."""
    rng = np.random.default_rng(seed)
    medians = np.stack(
        [
            np.median(values[rng.integers(0, values.size, (resamples, values.size))], axis=1)
            for values in readings
        ],
        axis=1,
    )
    x_within = _demean(x, group)
    slopes = _demean(medians, group) @ x_within / (x_within @ x_within)
    low, high = np.quantile(slopes, [0.025, 0.975])
    return float(low), float(high)


def _warnings(*, low: float, r2: float, residuals: Mapping[int, float]) -> tuple[str, ...]:
    found: list[str] = []
    if low <= 0.0 or r2 < _USABLE_R2:
        found.append(
            f"expert slope not resolved (interval from {low:.3g} us a layer stack, R2 {r2:.2f}): "
            "rounds are priced without it; measure more repeats on a quiet machine"
        )
    bent = [length for length, share in residuals.items() if share > 0.1]
    if bent:
        found.append(
            f"expert cost is not linear at lengths {bent} (over 10 % off the line): "
            "treat the slope as an average"
        )
    return tuple(found)
