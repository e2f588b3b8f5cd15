"""Recorded rounds as plain arrays, and what a verify length makes of them.

Shape suffixes: N rounds, D = 15 drafts, L = verify lengths. An array `[n, 17]` is indexed by the
verify length itself (0 = plain decoding without a draft pass); an array `[n, 16]` by `L - 1`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

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

    Rounds of one prompt are in the order in which they were decoded; policies that remember the
    rounds before rely on it.

    Attributes:
        prompt_index: int64 [n], rounds of one prompt share a number.
        category: str [n].
        loop_period: int64 [n], 0 outside repetition loops.
        accepted: int64 [n], drafts accepted by the full verification, 0..15.
        hazards_ND: float64 [n, 15], P(draft accepted given the drafts before it were).
        context_tokens: int64 [n], tokens processed before the round.
        distinct_total_NL: float64 [n, 16] or None, distinct experts of the first L rows, summed
            over all layers of the target whose cost table prices them.
        first_distinct_NL: float64 [n, 16] or None, the same of the first router alone.
        distinct_tokens_NL: float64 [n, 16] or None, distinct token ids among the first L rows.
        top1_ND: float64 [n, 15] or None, the drafter's own top-1 probability, not calibrated.
    """

    prompt_index: IntArray
    category: StrArray
    loop_period: IntArray
    accepted: IntArray
    hazards_ND: FloatArray
    context_tokens: IntArray
    distinct_total_NL: FloatArray | None = None
    first_distinct_NL: FloatArray | None = None
    distinct_tokens_NL: FloatArray | None = None
    top1_ND: FloatArray | None = None

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
        for name, values, width in (
            ("distinct experts", self.distinct_total_NL, BLOCK_SIZE),
            ("distinct experts of the first router", self.first_distinct_NL, BLOCK_SIZE),
            ("distinct tokens", self.distinct_tokens_NL, BLOCK_SIZE),
            ("top-1 probabilities", self.top1_ND, NUM_DRAFTS),
        ):
            _require(
                values is None
                or (values.shape == (n, width) and bool(np.all(np.isfinite(values)))),
                f"rounds: {name} are not finite, or not of shape ({n}, {width}): take them from "
                "the recorded rounds again",
            )

    def __len__(self) -> int:
        return int(self.accepted.size)

    def select(self, rows: BoolArray | IntArray) -> RoundSet:
        """Returns the rounds that a boolean mask or an index array picks."""
        picked: dict[str, object] = {}
        for field in fields(self):
            values = getattr(self, field.name)
            picked[field.name] = None if values is None else values[rows]
        return replace(self, **picked)  # type: ignore[arg-type]

    def after_cut(self, emitted: IntArray) -> RoundSet:
        """Returns what the trace knows of the rounds that go on where these were cut.

        The new anchor is draft `emitted - 1` of the old block. Its own draft pass was never
        recorded; what is known is that the rest of the old block would still be accepted as far as
        it was. Drafts beyond the old block are taken as refused, routes as unknown.

        Args:
            emitted: int64 [n], tokens that the cut rounds emitted, 1..accepted.
        """
        columns = np.arange(NUM_DRAFTS) + emitted[:, None]
        known = columns < NUM_DRAFTS
        columns = np.minimum(columns, NUM_DRAFTS - 1)

        def moved(values: FloatArray) -> FloatArray:
            shifted: FloatArray = np.where(known, np.take_along_axis(values, columns, axis=1), 0.0)
            return shifted

        return replace(
            self,
            accepted=self.accepted - emitted,
            hazards_ND=moved(self.hazards_ND),
            top1_ND=None if self.top1_ND is None else moved(self.top1_ND),
            distinct_total_NL=None,
            first_distinct_NL=None,
            distinct_tokens_NL=None,
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
