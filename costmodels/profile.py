"""Whether speculation pays, from an acceptance profile alone: no recorded round, no signal.

A profile says how often each draft is accepted, given that those before it were. It knows nothing
of single rounds, so only fixed lengths can be judged with it; what choosing the length by round
would add takes a trace.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hybridspec.artifacts.tables import NUM_DRAFTS, FloatArray, StepCostTable
from hybridspec.costmodels.lookup import batch_row
from hybridspec.costmodels.rounds import expected_emitted
from hybridspec.costmodels.throughput import TIE_TOKENS
from hybridspec.errors import UsageError


@dataclass(frozen=True)
class ProfileGain:
    """Gain of the best fixed length at one batch and context.

    Attributes:
        batch, context_tokens: the cell of the table.
        length: best fixed length, 0 where plain decoding is.
        tokens_a_round: expected at that length.
        tokens_per_s: of one request at that length.
        over_ar: against plain decoding; the middle of the measured times.
        over_ar_low, over_ar_high: with drafted rounds at their 90 % and plain ones at their 10 %
            quantile, and the other way round: how far the spread of the times alone reaches.
    """

    batch: int
    context_tokens: int
    length: int
    tokens_a_round: float
    tokens_per_s: float
    over_ar: float
    over_ar_low: float
    over_ar_high: float


def read_profile(text: str) -> FloatArray:
    """Returns hazards of all 15 positions, float64 [15], from numbers with commas.

    The last number holds for all positions behind it.

    Raises:
        UsageError: no numbers, more than 15, or values that are no probabilities.
    """
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(
            f"acceptance {text!r} is not a list of numbers: write one a draft position, such as "
            "0.8,0.75,0.7"
        ) from None
    if len(values) > NUM_DRAFTS:
        raise UsageError(
            f"acceptance has {len(values)} values; a block has {NUM_DRAFTS} drafts: give at most "
            "one a draft"
        )
    wrong = [value for value in values if not 0.0 <= value <= 1.0]
    if wrong:
        raise UsageError(
            f"acceptance {wrong[0]:g} must lie in 0..1: give the share of drafts accepted at each "
            "position, given that those before were"
        )
    return np.asarray(values + [values[-1]] * (NUM_DRAFTS - len(values)))


def profile_gains(hazards_D: FloatArray, table: StepCostTable, *, batch: int) -> list[ProfileGain]:
    """Returns the gain of the best fixed length at each context of the table.

    Args:
        hazards_D: float64 [15].
        table: the machine's cost.
        batch: requests decoded together.
    """
    row = batch_row(table, batch)
    emitted = expected_emitted(hazards_D[None])[0]
    gains = []
    for column, context in enumerate(table.context_tokens.tolist()):
        latency = table.latency_us[row, column]
        low, high = table.latency_p10_us[row, column], table.latency_p90_us[row, column]
        rate = emitted / latency
        length = int(np.argmax(rate >= rate.max() * (1.0 - TIE_TOKENS)))
        plain = (latency[0], low[0], high[0])
        drafted = (latency[length], high[length], low[length])
        over = [float(emitted[length] * p / d) for p, d in zip(plain, drafted, strict=True)]
        if length == 0:
            over = [1.0, 1.0, 1.0]
        gains.append(
            ProfileGain(
                batch=int(table.batch_sizes[row]),
                context_tokens=context,
                length=length,
                tokens_a_round=float(emitted[length]),
                tokens_per_s=float(rate[length] * 1e6),
                over_ar=over[0],
                over_ar_low=over[1],
                over_ar_high=over[2],
            )
        )
    return gains


def verdict(low: float, high: float) -> str:
    """`yes`, `no` or `unclear`, from the interval of the gain over plain decoding."""
    if low > 1.0:
        return "yes"
    return "no" if high <= 1.0 else "unclear"
