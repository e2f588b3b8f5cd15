"""What a request's earlier rounds say about this one, known before its draft is verified.

Everything here is a function of emitted tokens and of accepted counts, and of no token of the
prompt: a trace does not record prompts. Values are float32 in a written-out order of operations, so
that a kernel gives the same bits and takes the same branch of every tree.

Shape suffixes: R rounds, D = 15 draft positions, H = 4 columns of history.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hybridspec.artifacts.tables import NUM_DRAFTS, IntArray

Float32Array = npt.NDArray[np.float32]
HISTORY_NAMES = ("last_surprise", "mean_surprise", "rounds_before", "generated_tokens")
# Weight of the newest round in the moving average: about the last seven rounds count.
MOVING_WEIGHT = np.float32(0.25)


@dataclass(frozen=True)
class History:
    """History of rounds, in the order of the trace's rows.

    Attributes:
        columns_RH: float32 [R, 4], in the order of `HISTORY_NAMES`.
        seen_length_RD: float32 [R, 15] in 0..3: length of the longest n-gram that ends with the
            draft and occurs in the text emitted before the round.
        successor_RD: float32 [R, 15]: 1 where the token that last followed the two tokens before
            the draft, in the text emitted before the round, is the draft; -1 where it is another;
            0 where those two tokens did not follow each other yet.
    """

    columns_RH: Float32Array
    seen_length_RD: Float32Array
    successor_RD: Float32Array

    def select(self, rows: npt.NDArray[Any]) -> History:
        """The rounds where `rows` is true, or of these indices."""
        return History(self.columns_RH[rows], self.seen_length_RD[rows], self.successor_RD[rows])


class EmittedText:
    """The text that a request emitted, to look its next drafts up in; about 0.5 KiB a token.

    Attributes:
        num_tokens: emitted so far.
    """

    def __init__(self) -> None:
        self.num_tokens = 0
        self._tail = (-1, -1)
        self._grams: set[tuple[int, ...]] = set()
        self._followers: dict[tuple[int, int], int] = {}

    @property
    def newest(self) -> int:
        """The last token, -1 before there is any."""
        return self._tail[1]

    def emit(self, token: int) -> None:
        """Append a token."""
        second, first = self._tail
        self._grams.add((token,))
        if first >= 0:
            self._grams.add((first, token))
        if second >= 0:
            self._grams.add((second, first, token))
            self._followers[second, first] = token
        self._tail = (first, token)
        self.num_tokens += 1

    def look_up(self, block: Sequence[int]) -> tuple[list[float], list[float]]:
        """`seen_length` and `successor` of each draft of a block that would follow the text."""
        grams, followers = self._grams, self._followers
        second, first = self._tail
        seen, successor = [], []
        for token in block:
            length = 0.0
            if (token,) in grams:
                length = 1.0
                if (first, token) in grams:
                    length = 3.0 if (second, first, token) in grams else 2.0
            follower = followers.get((second, first))
            seen.append(length)
            successor.append(0.0 if follower is None else 1.0 if follower == token else -1.0)
            second, first = first, token
        return seen, successor


def expected_accepted(p1_RD: npt.ArrayLike) -> Float32Array:
    """Accepted drafts that the drafter itself expects of the first k drafts, float32 [R, 16].

    `sum of p1_0 .. p1_j` products for j < k, accumulated in float32 from the first draft on.
    """
    p1 = np.asarray(p1_RD, dtype=np.float32)
    expected = np.zeros((len(p1), NUM_DRAFTS + 1), dtype=np.float32)
    product = np.ones(len(p1), dtype=np.float32)
    for draft in range(NUM_DRAFTS):
        product = product * p1[:, draft]
        expected[:, draft + 1] = expected[:, draft] + product
    return expected


def request_history(
    *,
    prompt: IntArray,
    round_index: IntArray,
    generated_tokens: IntArray,
    accepted: IntArray,
    p1_RD: npt.ArrayLike,
    anchor: IntArray,
    draft_tokens_RD: IntArray,
    verified_drafts: IntArray | None = None,
) -> History:
    """History of every round of a trace, whatever the order of its rows.

    A round's surprise is its accepted drafts less those that the drafter expected among the
    verified ones. Cutting a round short cuts both, so that rounds of any verify length are
    comparable: an accepted count alone would read a short round as a bad one.

    Args:
        prompt, round_index, accepted, anchor: int64 [R].
        generated_tokens: int64 [R], emitted before the round, its anchor among them; the column of
            history counts those before the anchor.
        p1_RD: [R, 15].
        draft_tokens_RD: int64 [R, 15].
        verified_drafts: int64 [R], drafts of each round that were verified; all 15 by default.
    """
    order = np.lexsort((round_index, prompt))
    first = np.diff(prompt[order], prepend=-1) != 0
    expected = expected_accepted(p1_RD)[order]
    verified = np.full(len(order), NUM_DRAFTS) if verified_drafts is None else verified_drafts
    verified = verified[order]
    taken = np.minimum(accepted[order], verified)
    surprise = taken.astype(np.float32) - expected[np.arange(len(order)), verified]
    columns = np.zeros((len(order), len(HISTORY_NAMES)), dtype=np.float32)
    last = mean = np.float32(0.0)
    rounds = 0
    for row in range(len(order)):
        if first[row]:
            last = mean = np.float32(0.0)
            rounds = 0
        columns[row, :3] = last, mean, rounds
        last = surprise[row]
        mean = mean + MOVING_WEIGHT * (last - mean)
        rounds += 1
    columns[:, 3] = generated_tokens[order] - 1
    seen, successor = _lookups(
        first,
        anchor=anchor[order],
        accepted=accepted[order],
        drafts=draft_tokens_RD[order],
    )
    back = np.empty_like(order)
    back[order] = np.arange(len(order))
    return History(columns[back], seen[back], successor[back])


def _lookups(
    first: npt.NDArray[np.bool_],
    *,
    anchor: IntArray,
    accepted: IntArray,
    drafts: IntArray,
) -> tuple[Float32Array, Float32Array]:
    seen_length = np.zeros(drafts.shape, dtype=np.float32)
    successor = np.zeros(drafts.shape, dtype=np.float32)
    text = EmittedText()
    accepted_before: list[int] = []
    for row, block in enumerate(drafts.tolist()):
        if first[row]:
            text, accepted_before = EmittedText(), []
        # A round ends with the token that the next one starts from, sampled or not.
        for token in [*accepted_before, int(anchor[row])]:
            text.emit(token)
        accepted_before = block[: accepted[row]]
        seen_length[row], successor[row] = text.look_up(block)
    return seen_length, successor
