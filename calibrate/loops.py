"""Repetition loops: stretches of output that repeat with a short period.

A drafter predicts a loop almost perfectly, so its rounds would make acceptance look better than it
is on real text. They are kept in the trace, left out of the fit, and reported apart.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

MAX_PERIOD = 12
MIN_LOOP_TOKENS = 24
MIN_REPEATS = 4


def token_periods(tokens: Sequence[int]) -> npt.NDArray[np.int32]:
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
        for start, stop in zip(edges[::2], edges[1::2], strict=True):
            # `start` counts from the second period: the stretch itself is [start, stop + period).
            if stop + period - start >= max(MIN_REPEATS * period, MIN_LOOP_TOKENS):
                periods[start : stop + period] = period
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
