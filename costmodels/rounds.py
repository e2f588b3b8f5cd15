"""Recorded rounds as plain arrays, and what a verify length makes of them.

Shape suffixes: N rounds, D = 15 drafts, L = verify lengths. An array `[n, 17]` is indexed by the
verify length itself (0 = plain decoding without a draft pass); an array `[n, 16]` by `L - 1`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hybridspec.artifacts.tables import BLOCK_SIZE, NUM_DRAFTS, FloatArray, IntArray
from hybridspec.errors import BundleError

BoolArray = npt.NDArray[np.bool_]
StrArray = npt.NDArray[np.str_]


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise BundleError(message)


@dataclass(frozen=True)
class RoundSet:
    """Rounds that were verified in full, with the hazards that a policy would have seen.

    Attributes:
        prompt_index: int64 [n], rounds of one prompt share a number.
        category: str [n].
        loop_period: int64 [n], 0 outside repetition loops.
        accepted: int64 [n], drafts accepted by the full verification, 0..15.
        hazards_ND: float64 [n, 15], P(draft accepted given the drafts before it were).
        context_tokens: int64 [n], tokens processed before the round.
        distinct_total_NL: float64 [n, 16] or None, distinct experts of the first L rows, summed
            over all layers of the target whose cost table prices them.
    """

    prompt_index: IntArray
    category: StrArray
    loop_period: IntArray
    accepted: IntArray
    hazards_ND: FloatArray
    context_tokens: IntArray
    distinct_total_NL: FloatArray | None = None

    def __post_init__(self) -> None:
        n = self.accepted.size
        for name in ("prompt_index", "category", "loop_period", "accepted", "context_tokens"):
            shape = getattr(self, name).shape
            _require(
                shape == (n,), f"rounds: {name} has shape {shape}; expected ({n},): record again"
            )
        _require(
            bool(np.all((self.accepted >= 0) & (self.accepted <= NUM_DRAFTS))),
            f"rounds: accepted counts must lie in 0..{NUM_DRAFTS}: record the trace again",
        )
        _require(
            self.hazards_ND.shape == (n, NUM_DRAFTS),
            f"rounds: hazards have shape {self.hazards_ND.shape}; expected ({n}, {NUM_DRAFTS}): "
            "apply the hazard table to every draft position",
        )
        _require(
            bool(np.all((self.hazards_ND >= 0.0) & (self.hazards_ND <= 1.0))),
            "rounds: hazards must be probabilities without NaN: calibrate again",
        )
        if self.distinct_total_NL is not None:
            shape = self.distinct_total_NL.shape
            _require(
                shape == (n, BLOCK_SIZE) and bool(np.all(np.isfinite(self.distinct_total_NL))),
                f"rounds: distinct experts have shape {shape}; expected finite ({n}, "
                f"{BLOCK_SIZE}): count them from the recorded routes",
            )

    def __len__(self) -> int:
        return int(self.accepted.size)

    def select(self, rows: BoolArray | IntArray) -> RoundSet:
        """Returns the rounds that a boolean mask or an index array picks."""
        distinct = self.distinct_total_NL
        return RoundSet(
            prompt_index=self.prompt_index[rows],
            category=self.category[rows],
            loop_period=self.loop_period[rows],
            accepted=self.accepted[rows],
            hazards_ND=self.hazards_ND[rows],
            context_tokens=self.context_tokens[rows],
            distinct_total_NL=None if distinct is None else distinct[rows],
        )

    def outside_loops(self) -> RoundSet:
        """Returns the rounds outside repetition loops, where acceptance means something."""
        return self.select(self.loop_period == 0)


def expected_emitted(hazards_ND: FloatArray) -> FloatArray:
    """Returns the expected emitted tokens `E(L)`, float64 [n, 17].

    `E(L) = S_0 + ... + S_(L-1)` for L >= 1; a round without drafts (`L = 0`) emits one token.
    """
    survival_NL = np.cumprod(hazards_ND, axis=1)
    emitted = np.ones((hazards_ND.shape[0], BLOCK_SIZE + 1))
    emitted[:, 2:] += np.cumsum(survival_NL, axis=1)
    return emitted


def realised_emitted(accepted: IntArray, lengths: IntArray | int) -> IntArray:
    """Returns the tokens that rounds emit when `lengths` rows are verified, int64 [n].

    Args:
        accepted: int64 [n], drafts accepted by the full verification.
        lengths: int64 [n] or one length for all, 0..16.
    """
    emitted: IntArray = np.minimum(accepted, np.maximum(lengths, 1) - 1) + 1
    return emitted
