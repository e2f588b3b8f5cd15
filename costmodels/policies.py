"""Rules that choose a verify length for recorded rounds, for comparison in a replay.

Each rule sees what an engine would see at that moment: hazards of the drafts and the latency table,
never the acceptance; only the oracle looks at it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from hybridspec.artifacts.tables import BLOCK_SIZE, FloatArray, IntArray
from hybridspec.costmodels.rounds import RoundSet, expected_emitted
from hybridspec.costmodels.throughput import TIE_TOKENS, choose_lengths
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
            rounds: what was recorded.
            latency_NL: float64 [n, 17] in us, the latency that the policy believes in.
        """
        ...


@dataclass(frozen=True)
class FixedLength:
    """The same length every round: 0 is plain decoding, 16 is stock DFlash."""

    length: int

    def __post_init__(self) -> None:
        if not 0 <= self.length <= BLOCK_SIZE:
            raise UsageError(f"fixed length {self.length} must lie in 0..{BLOCK_SIZE}")

    @property
    def name(self) -> str:
        """`ar` for length 0, else `fixed-L`."""
        return "ar" if self.length == 0 else f"fixed-{self.length}"

    def lengths(self, rounds: RoundSet, latency_NL: FloatArray) -> IntArray:
        """Returns `length` for every round."""
        return np.full(len(rounds), self.length, dtype=np.int64)


@dataclass(frozen=True)
class RoundRatio:
    """The length with the best ratio `E(L) / T(L)` of the round alone; myopic, kept to compare."""

    name: str = "round-ratio"

    def lengths(self, rounds: RoundSet, latency_NL: FloatArray) -> IntArray:
        """Returns the best ratio's length in 1..16; ties go shorter."""
        emitted = expected_emitted(rounds.hazards_ND)[:, 1:]
        ratio = emitted / latency_NL[:, 1:]
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
