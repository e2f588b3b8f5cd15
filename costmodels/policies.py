"""Rules that choose a verify length for recorded rounds, for comparison in a replay.

Each rule sees what an engine would see at that moment: signals of the drafts, the latency table and
what earlier rounds of the same request brought, never the acceptance of the round itself; only the
oracles look at it. Ties go to the shorter length. Rules of other projects are in `peers`, those
that look at experts in `correction`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from hybridspec.artifacts.tables import BLOCK_SIZE, FloatArray, IntArray
from hybridspec.costmodels.rounds import RoundSet, expected_emitted
from hybridspec.costmodels.throughput import TIE_TOKENS, best_fixed_length, choose_lengths
from hybridspec.errors import UsageError


class LengthPolicy(Protocol):
    """A rule from rounds to verify lengths."""

    @property
    def name(self) -> str:
        """Label of the policy in tables."""
        ...

    def lengths(self, rounds: RoundSet, latency_NL: FloatArray) -> IntArray:
        """Returns the verify length 0..16 of each round, int64 [n].

        Args:
            rounds: what was recorded, all rounds of a prompt in their order.
            latency_NL: float64 [n, 17] in us, the latency that the policy believes in.
        """
        ...


@dataclass(frozen=True)
class FixedLength:
    """The same length every round: 0 is plain decoding, 16 is stock DFlash."""

    length: int
    label: str = ""

    def __post_init__(self) -> None:
        if not 0 <= self.length <= BLOCK_SIZE:
            raise UsageError(f"fixed length {self.length} must lie in 0..{BLOCK_SIZE}")

    @property
    def name(self) -> str:
        """The label given, else `ar` for length 0 and `fixed-L` otherwise."""
        return self.label or ("ar" if self.length == 0 else f"fixed-{self.length}")

    def lengths(self, rounds: RoundSet, latency_NL: FloatArray) -> IntArray:
        """Returns `length` for every round."""
        return np.full(len(rounds), self.length, dtype=np.int64)


@dataclass(frozen=True)
class FixedByCategory:
    """The best fixed length of each category; what hand-tuning per workload can reach.

    Attributes:
        by_category: length 0..16 of each category seen in the calibration rounds.
        otherwise: length of categories that are not listed.
    """

    by_category: Mapping[str, int]
    otherwise: int
    name: str = "best-fixed-category"

    def __post_init__(self) -> None:
        for length in (*self.by_category.values(), self.otherwise):
            if not 0 <= length <= BLOCK_SIZE:
                raise UsageError(f"fixed length {length} must lie in 0..{BLOCK_SIZE}")

    @classmethod
    def fit(cls, rounds: RoundSet, latency_NL: FloatArray) -> FixedByCategory:
        """Returns the best lengths on calibration rounds.

        Args:
            rounds: calibration rounds outside repetition loops.
            latency_NL: float64 [n, 17] in us.
        """
        best = {}
        for category in sorted(set(rounds.category.tolist())):
            mask = rounds.category == category
            best[category], _ = best_fixed_length(rounds.accepted[mask], latency_NL[mask])
        overall, _ = best_fixed_length(rounds.accepted, latency_NL)
        return cls(best, overall)

    def lengths(self, rounds: RoundSet, latency_NL: FloatArray) -> IntArray:
        """Returns the length of each round's category."""
        categories, code = np.unique(rounds.category, return_inverse=True)
        by_code = [self.by_category.get(str(name), self.otherwise) for name in categories]
        lengths: IntArray = np.asarray(by_code, dtype=np.int64)[code]
        return lengths


@dataclass(frozen=True)
class RoundRatio:
    """The length with the best ratio `E(L) / T(L)` of the round alone; myopic, kept to compare."""

    name: str = "round-ratio"

    def lengths(self, rounds: RoundSet, latency_NL: FloatArray) -> IntArray:
        """Returns the best ratio's length in 1..16; ties go shorter."""
        return best_ratio(expected_emitted(rounds.hazards_ND), latency_NL)


def best_ratio(emitted_NL: FloatArray, latency_NL: FloatArray) -> IntArray:
    """Returns the shortest length in 1..16 whose `E(L) / T(L)` is the best, int64 [n].

    Args:
        emitted_NL: float64 [n, 17].
        latency_NL: float64 [n, 17], above 0.
    """
    ratio = emitted_NL[:, 1:] / latency_NL[:, 1:]
    near_best = ratio >= ratio.max(axis=1, keepdims=True) * (1.0 - TIE_TOKENS)
    lengths: IntArray = near_best.argmax(axis=1) + 1
    return lengths


@dataclass(frozen=True)
class Dinkelbach:
    """The length that maximises `E(L) - lam T(L)`: HybridSpec's rule without router correction.

    Attributes:
        tokens_per_us: `lam`, fitted on the calibration split.
        max_length: cap on the length, 1..16.
    """

    tokens_per_us: float
    max_length: int = BLOCK_SIZE
    name: str = "hybridspec"

    def __post_init__(self) -> None:
        if not self.tokens_per_us > 0:
            raise UsageError(f"lam of {self.tokens_per_us:g} tokens/us must be above 0: fit it")
        if not 1 <= self.max_length <= BLOCK_SIZE:
            raise UsageError(f"max length {self.max_length} must lie in 1..{BLOCK_SIZE}")

    def lengths(self, rounds: RoundSet, latency_NL: FloatArray) -> IntArray:
        """Returns the best length in 1..max_length; ties go shorter."""
        emitted = expected_emitted(rounds.hazards_ND)
        end = self.max_length + 1
        return choose_lengths(emitted[:, :end], latency_NL[:, :end], self.tokens_per_us)


@dataclass(frozen=True)
class OracleLength:
    """Exactly the rows that emit something: accepted drafts and the target's own token."""

    name: str = "oracle"

    def lengths(self, rounds: RoundSet, latency_NL: FloatArray) -> IntArray:
        """Returns `accepted + 1`."""
        return np.minimum(rounds.accepted + 1, BLOCK_SIZE).astype(np.int64)


def standard_policies(tokens_per_us: float) -> Sequence[LengthPolicy]:
    """Returns the policies that every report compares: all fixed lengths, ratio, ours, oracle."""
    fixed = [FixedLength(length) for length in range(BLOCK_SIZE + 1)]
    return (*fixed, RoundRatio(), Dinkelbach(tokens_per_us), OracleLength())
