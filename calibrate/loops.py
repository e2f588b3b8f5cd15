"""Repetition loops: stretches of output that repeat with a short period.

A drafter predicts a loop almost perfectly, so its rounds would make acceptance look better than it
is on real text. They are kept in the trace, left out of the fit, and reported apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

MAX_PERIOD = 12
MIN_LOOP_TOKENS = 24
MIN_REPEATS = 4


def token_periods(tokens: Sequence[int] | npt.NDArray[Any]) -> npt.NDArray[np.int32]:
    """Loop period of every token, 0 outside loops.

    A stretch is a loop of period `p <= 12` if each of its tokens equals the one `p` before it,
    counted from the stretch's second period on, and it is at least `max(4 p, 24)` tokens long.
    Every token of the stretch is marked, its first period included, so the rule reads the same
    forwards and backwards. A token in several loops gets the shortest period.

    Args:
        tokens: emitted token ids of one request, length N.

    Returns:
        int32 [N].
    """
    ids = np.asarray(tokens, dtype=np.int64)
    periods = np.zeros(ids.size, dtype=np.int32)
    for period in range(MAX_PERIOD, 0, -1):
        if ids.size <= period:
            continue
        repeats = np.concatenate([[False], ids[period:] == ids[:-period], [False]])
        edges = np.flatnonzero(repeats[1:] != repeats[:-1])
        # `start` counts from the second period: the stretch itself is [start, stop + period).
        starts, stops = edges[::2], edges[1::2] + period
        long = stops - starts >= max(MIN_REPEATS * period, MIN_LOOP_TOKENS)
        for start, stop in zip(starts[long], stops[long], strict=True):
            periods[start:stop] = period
    return periods


def round_loop_periods(
    tokens: Sequence[int], *, starts: Sequence[int], stops: Sequence[int]
) -> npt.NDArray[np.int32]:
    """Loop period of every round of one request, 0 outside loops.

    A round is in a loop if any token it emitted is: the rounds that enter and leave a loop count
    too.

    Args:
        tokens: emitted token ids of the request, the one that prefill gives included.
        starts: index into `tokens` of the first token that each round emitted.
        stops: index after the last one.

    Returns:
        int32, one a round: the shortest period among its tokens in a loop.
    """
    periods = token_periods(tokens)
    result = np.zeros(len(starts), dtype=np.int32)
    for index, (start, stop) in enumerate(zip(starts, stops, strict=True)):
        inside = periods[start:stop]
        inside = inside[inside > 0]
        result[index] = inside.min() if inside.size else 0
    return result


def text_loop_periods(
    *,
    first_R: npt.NDArray[np.bool_],
    anchor_R: npt.NDArray[Any],
    accepted_R: npt.NDArray[Any],
    target_tokens_RL: npt.NDArray[Any],
) -> npt.NDArray[np.int32]:
    """`round_loop_periods` of many requests at once, from recorded rounds verified in full.

    Args:
        first_R: bool [R], true at the first round of a request; the rounds of one follow each
            other.
        anchor_R, accepted_R: integers [R].
        target_tokens_RL: integers [R, 16]; a round emits the first `accepted + 1` of them.

    Returns:
        int32 [R].
    """
    rounds = len(first_R)
    if rounds == 0:
        return np.zeros(0, dtype=np.int32)
    # In front of a request's first round stand the token of its prefill and one that equals no
    # other. The latter breaks every repetition at both of its ends, and what is left between them
    # is shorter than two periods, so no loop reaches from one request into the next.
    width = target_tokens_RL.shape[1]
    tokens = np.concatenate(
        [-1 - np.arange(rounds)[:, None], np.asarray(anchor_R)[:, None], target_tokens_RL], axis=1
    )
    emitted = np.arange(width) <= np.asarray(accepted_R)[:, None]
    kept = np.concatenate([first_R[:, None], first_R[:, None], emitted], axis=1)
    periods = token_periods(tokens[kept])
    by_round = np.zeros(tokens.shape, dtype=np.int32)
    by_round[kept] = periods
    own = by_round[:, 2:]
    shortest = np.where(own > 0, own, MAX_PERIOD + 1).min(axis=1)
    found: npt.NDArray[np.int32] = np.where(shortest > MAX_PERIOD, 0, shortest).astype(np.int32)
    return found
