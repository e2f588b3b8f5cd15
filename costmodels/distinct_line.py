"""Round times as a line on the distinct experts that a length is expected to load.

In a masked graph every length runs the same launches; what grows with it is the experts that are
read (DESIGN section 5). Two numbers a batch size then describe sixteen lengths, so that a short
recording, whose lengths were decoded on different texts, still gives a curve that does not
jump with the texts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from hybridspec.artifacts.tables import BLOCK_SIZE
from hybridspec.errors import NotEnoughData, QualityGate

FEWEST_ROUNDS = 100
FEWEST_LENGTHS = 4


@dataclass(frozen=True)
class DistinctLine:
    """`T(L) = start + slope U(L)` of one batch size.

    Attributes:
        start_us: of a round that would load no expert.
        slope_us: a distinct expert in every layer.
        distinct_L: experts of a layer that L = 1..16 rows of each request load together.
        latency_us_L: the line at L = 1..16.
        median_us_L: measured medians, NaN where a length was not decoded.
        rounds_L: rounds behind them.
        r2: share of the medians' variance that the line explains, weighted by rounds.
        worst_residual: largest |median / line - 1| of lengths with at least 100 rounds.
    """

    start_us: float
    slope_us: float
    distinct_L: np.ndarray
    latency_us_L: np.ndarray
    median_us_L: np.ndarray
    rounds_L: np.ndarray
    r2: float
    worst_residual: float


def distinct_of_batch(distinct_L: np.ndarray, batch: int, num_experts: int) -> np.ndarray:
    """Distinct experts of a layer when `batch` requests verify L rows each.

    Args:
        distinct_L: of one request, L = 1..16.

    Requests are taken to choose independently: `N (1 - (1 - U / N)^B)`.
    """
    share = np.asarray(distinct_L, dtype=np.float64) / num_experts
    return num_experts * (1.0 - (1.0 - share) ** batch)


def fit_distinct_line(
    times_us: Mapping[int, np.ndarray], distinct_L: np.ndarray, *, batch: int, num_experts: int
) -> DistinctLine:
    """Least squares on the medians of each length, weighted by their rounds.

    Args:
        times_us: round times by length 1..16; lengths may be missing.
        distinct_L: experts of a layer that L = 1..16 rows of one request load, on average.
        batch: requests in a round.
        num_experts: of a layer.

    Raises:
        NotEnoughData: fewer than 100 rounds or 4 lengths.
        QualityGate: times that are not positive and finite, or do not rise with the experts.
    """
    distinct = distinct_of_batch(distinct_L, batch, num_experts)
    lengths = sorted(length for length, values in times_us.items() if values.size)
    total = sum(times_us[length].size for length in lengths)
    if total < FEWEST_ROUNDS or len(lengths) < FEWEST_LENGTHS:
        raise NotEnoughData(
            f"batch {batch}: {total} rounds of {len(lengths)} lengths; a line needs at least "
            f"{FEWEST_ROUNDS} rounds of {FEWEST_LENGTHS} lengths: decode more tokens"
        )
    median, rounds = np.full(BLOCK_SIZE, np.nan), np.zeros(BLOCK_SIZE, dtype=np.int64)
    for length in lengths:
        values = np.asarray(times_us[length], dtype=np.float64)
        if not (np.isfinite(values).all() and (values > 0.0).all()):
            raise QualityGate(
                f"batch {batch}, length {length}: round times that are not positive and finite: "
                "measure again"
            )
        median[length - 1], rounds[length - 1] = np.median(values), values.size
    here = rounds > 0
    # The weight of a median's error is the square root of its rounds.
    slope, start = np.polyfit(distinct[here], median[here], 1, w=np.sqrt(rounds[here]))
    if slope <= 0.0 or start <= 0.0:
        raise QualityGate(
            f"batch {batch}: {start:.0f} us + {slope:.2f} us an expert; times must rise with the "
            "experts from above zero: measure again on an idle machine"
        )
    line = start + slope * distinct
    weight = rounds[here] / rounds[here].sum()
    spread = (weight * (median[here] - (weight * median[here]).sum()) ** 2).sum()
    left = (weight * (median[here] - line[here]) ** 2).sum()
    well = rounds >= FEWEST_ROUNDS
    worst = np.abs(median[well] / line[well] - 1.0).max() if well.any() else float("nan")
    return DistinctLine(
        start_us=float(start),
        slope_us=float(slope),
        distinct_L=distinct,
        latency_us_L=line,
        median_us_L=median,
        rounds_L=rounds,
        r2=float(1.0 - left / spread),
        worst_residual=float(worst),
    )
