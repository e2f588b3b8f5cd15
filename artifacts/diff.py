"""What differs between two bundles: identities, tables and the largest differences in numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from hybridspec.artifacts.bundle import Bundle, CalibrationPart, CostPart
from hybridspec.artifacts.identity import identity_fields
from hybridspec.artifacts.tables import BLOCK_SIZE, FloatArray

_PARTS = ("calibration", "cost")


@dataclass(frozen=True)
class CostDifference:
    """Latencies of the cells that both tables have.

    Attributes:
        cells: how many there are; the rest is 0 and empty without any.
        median_share, largest_share: of `|B / A - 1|`.
        largest_at: batch, context and length of the largest.
        signed_share: the difference there with its sign.
        only_in_a, only_in_b: cells that the other lacks.
    """

    cells: int
    median_share: float
    largest_share: float
    largest_at: Mapping[str, int]
    signed_share: float
    only_in_a: int
    only_in_b: int


@dataclass(frozen=True)
class PartDifference:
    """One part of two bundles.

    Attributes:
        name: `calibration` or `cost`.
        same: both are absent, or have one content id.
        present: whether A and B have it.
        identity: field to (A's value, B's value), differing ones alone.
        files: names whose content differs or that one lacks.
        numbers: the largest differences, units in the names.
        cost: of cost parts that both have.
    """

    name: str
    same: bool
    present: tuple[bool, bool]
    identity: Mapping[str, tuple[Any, Any]]
    files: tuple[str, ...]
    numbers: Mapping[str, float]
    cost: CostDifference | None


def diff_bundles(a: Bundle, b: Bundle) -> tuple[PartDifference, PartDifference]:
    """Compares the calibration and the cost part of two bundles."""
    calibration, cost = (_part(name, a, b) for name in _PARTS)
    return calibration, cost


def _part(name: str, a: Bundle, b: Bundle) -> PartDifference:
    one, other = getattr(a, name), getattr(b, name)
    present = (one is not None, other is not None)
    if one is None or other is None:
        return PartDifference(name, present[0] == present[1], present, {}, (), {}, None)
    before, now = identity_fields(one.identity), identity_fields(other.identity)
    identity = {key: (before[key], now[key]) for key in before if before[key] != now[key]}
    files = {
        side: {entry.name: entry.digest for entry in getattr(bundle.manifest.parts, name).files}
        for side, bundle in (("a", a), ("b", b))
    }
    names = sorted(files["a"].keys() | files["b"].keys())
    changed = tuple(key for key in names if files["a"].get(key) != files["b"].get(key))
    cost = cost_difference(one, other) if isinstance(one, CostPart) else None
    numbers = _cost_numbers(one, other) if isinstance(one, CostPart) else _hazards(one, other)
    return PartDifference(
        name, one.content_id == other.content_id, present, identity, changed, numbers, cost
    )


def cost_difference(a: CostPart, b: CostPart) -> CostDifference:
    """Compares the latencies of two cost parts where their grids meet."""
    batches, batch_a, batch_b = np.intersect1d(
        a.step.batch_sizes, b.step.batch_sizes, return_indices=True
    )
    contexts, context_a, context_b = np.intersect1d(
        a.step.context_tokens, b.step.context_tokens, return_indices=True
    )
    cells = batches.size * contexts.size * (BLOCK_SIZE + 1)
    only = (a.step.latency_us.size - cells, b.step.latency_us.size - cells)
    if cells == 0:
        return CostDifference(0, 0.0, 0.0, {}, 0.0, *only)
    before = a.step.latency_us[np.ix_(batch_a, context_a)]
    share: FloatArray = b.step.latency_us[np.ix_(batch_b, context_b)] / before - 1.0
    at = np.unravel_index(int(np.abs(share).argmax()), share.shape)
    return CostDifference(
        cells=cells,
        median_share=float(np.median(np.abs(share))),
        largest_share=float(np.abs(share[at])),
        largest_at={
            "batch_size": int(batches[at[0]]),
            "context_tokens": int(contexts[at[1]]),
            "verify_length": int(at[2]),
        },
        signed_share=float(share[at]),
        only_in_a=only[0],
        only_in_b=only[1],
    )


def _cost_numbers(a: CostPart, b: CostPart) -> dict[str, float]:
    numbers = {
        "expert_slope_us_a": a.step.expert_slope_us,
        "expert_slope_us_b": b.step.expert_slope_us,
    }
    for side, part in (("a", a), ("b", b)):
        if part.throughput is not None:
            numbers[f"tokens_per_s_batch_{int(part.throughput.batch_sizes[0])}_{side}"] = (
                1e6 * float(part.throughput.tokens_per_us[0])
            )
    return numbers


def _hazards(a: CalibrationPart, b: CalibrationPart) -> dict[str, float]:
    grid = np.linspace(0.0, 1.0, 1001)
    maps = [np.interp(grid, part.hazard.knots_x, part.hazard.knots_y) for part in (a, b)]
    return {
        "largest_weight_logit": float(np.abs(a.hazard.weights_F - b.hazard.weights_F).max()),
        "largest_position_bias_logit": float(
            np.abs(a.hazard.position_bias_D - b.hazard.position_bias_D).max()
        ),
        "largest_knots_probability": float(np.abs(maps[0] - maps[1]).max()),
    }
