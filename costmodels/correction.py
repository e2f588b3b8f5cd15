"""Length rules that look at experts: after the first router, by distinct tokens, or by truth.

A table's latency holds for the mean number of distinct experts. Rounds that activate more or fewer
cost `us an expert` times the difference; a line from an early signal to the total predicts it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from hybridspec.artifacts.tables import BLOCK_SIZE, FloatArray, IntArray
from hybridspec.costmodels.rounds import RoundSet, expected_emitted
from hybridspec.costmodels.throughput import TIE_TOKENS, choose_lengths
from hybridspec.errors import UsageError

Signal = Literal["first-router", "distinct-tokens", "true-experts"]
Rule = Literal["paper", "select"]


@dataclass(frozen=True)
class ExpertLine:
    """Least-squares line, at each length, from a count known early to distinct experts over layers.

    Attributes:
        signal: which count of the rounds it reads.
        mean_L: float64 [16], mean of the count at L = 1..16.
        slope_L: float64 [16], distinct experts over all priced layers per unit of the count.
    """

    signal: Signal
    mean_L: FloatArray
    slope_L: FloatArray

    @classmethod
    def fit(cls, rounds: RoundSet, signal: Signal) -> ExpertLine:
        """Returns the line on calibration rounds; slope 0 where the count does not vary.

        Raises:
            UsageError: the rounds hold no routes, or not the count.
        """
        counts, total = counts_of(rounds, signal), rounds.distinct_total_NL
        if counts is None or total is None:
            raise UsageError(
                f"policies by {signal} need recorded routes, which these rounds lack: record with "
                "--record-routes, or leave them out"
            )
        spread = ((counts - counts.mean(axis=0)) ** 2).sum(axis=0)
        product = ((counts - counts.mean(axis=0)) * (total - total.mean(axis=0))).sum(axis=0)
        slope = np.divide(product, spread, out=np.zeros_like(spread), where=spread > 0)
        return cls(signal, counts.mean(axis=0), slope)

    def surplus(self, rounds: RoundSet) -> FloatArray | None:
        """Returns predicted distinct experts above their mean, float64 [n, 16]; None if unknown."""
        counts = counts_of(rounds, self.signal)
        return None if counts is None else (counts - self.mean_L) * self.slope_L


def counts_of(rounds: RoundSet, signal: Signal) -> FloatArray | None:
    """Returns the count that a signal reads, float64 [n, 16], or None where it was not recorded."""
    return {
        "first-router": rounds.first_distinct_NL,
        "distinct-tokens": rounds.distinct_tokens_NL,
        "true-experts": rounds.distinct_total_NL,
    }[signal]


@dataclass(frozen=True)
class RouterCorrected:
    """HybridSpec's rule, corrected once the first router saw `L + lookahead` rows (DESIGN 6).

    Scores `E(k) - lam (T(k) + us an expert * predicted surplus(k))` again. `paper` decides between
    L and L + 1 only; `select` takes the best k up to the rows at hand. A length of 1 does not look
    ahead, as that round is plain decoding. Rounds without routes keep L. The same arithmetic as
    the runtime's `Policy.correct`.

    Attributes:
        tokens_per_us: `lam`.
        line: from the first router's distinct experts to all layers'.
        expert_slope_us: us a distinct expert of one layer.
        rule: `paper` or `select`.
        lookahead: rows beyond L that run up to the first router.
    """

    tokens_per_us: float
    line: ExpertLine
    expert_slope_us: float
    rule: Rule = "select"
    lookahead: int = 1
    label: str = ""

    @property
    def name(self) -> str:
        """The label given, else the rule."""
        return self.label or f"router-{self.rule}"

    def lengths(self, rounds: RoundSet, latency_NL: FloatArray) -> IntArray:
        """Returns the corrected length in 1..16; ties go shorter."""
        emitted = expected_emitted(rounds.hazards_ND)
        first = choose_lengths(emitted, latency_NL, self.tokens_per_us)
        surplus = self.line.surplus(rounds)
        if surplus is None:
            return first
        cost = latency_NL[:, 1:] + self.expert_slope_us * surplus
        score = emitted[:, 1:] - self.tokens_per_us * cost
        length = np.arange(1, BLOCK_SIZE + 1)
        allowed = length <= (first + self.lookahead)[:, None]
        if self.rule == "paper":
            allowed &= length >= first[:, None]
        score = np.where(allowed, score, -np.inf)
        near_best = score >= score.max(axis=1, keepdims=True) - TIE_TOKENS
        corrected: IntArray = near_best.argmax(axis=1) + 1
        return np.where(first > 1, corrected, first)


@dataclass(frozen=True)
class ExpertPriced:
    """HybridSpec's rule with each round's own predicted experts priced before the target runs.

    With the line of distinct tokens it is the baseline that costs nothing; with that of the true
    experts it is what perfect knowledge of them would bring (`oracle-cost`): an upper bound of any
    correction, at unchanged knowledge of acceptance.

    Attributes:
        tokens_per_us: `lam`.
        line: from the signal to distinct experts over all layers.
        expert_slope_us: us a distinct expert of one layer.
    """

    tokens_per_us: float
    line: ExpertLine
    expert_slope_us: float
    name: str

    def lengths(self, rounds: RoundSet, latency_NL: FloatArray) -> IntArray:
        """Returns the best length in 1..16; ties go shorter."""
        surplus = self.line.surplus(rounds)
        cost = np.array(latency_NL)
        if surplus is not None:
            cost[:, 1:] += self.expert_slope_us * surplus
        return choose_lengths(expected_emitted(rounds.hazards_ND), cost, self.tokens_per_us)
