"""History, context features and trees in plain torch, one request and one token at a time.

The oracle of the kernel: the same tables and the same float32 operations in the same order.
"""

from __future__ import annotations

import torch

from hybridspec.kernels.hazard_trees.ensemble import (
    FEATURE_STRIDE,
    FEATURES,
    VALUE_SCALE,
    DeviceTrees,
)
from hybridspec.kernels.hazard_trees.state import (
    BLOCK_SIZE,
    MEAN_SURPRISE,
    MIX,
    MOVING_WEIGHT,
    NUM_DRAFTS,
    ROUNDS,
    TEXT_TOKENS,
    TOKEN_BITS,
    HistoryState,
)
from hybridspec.kernels.select.naive import exp


def place(key: int, entries: int) -> int:
    """Where a key lies in a table: the high bits of a product that wraps at 64 bits."""
    product = (key * MIX) & ((1 << 64) - 1)
    return (product >> 40) & (entries - 1)


def keys(second: int, first: int, token: int) -> list[int | None]:
    """Keys of the n-grams that end with a token, and of the two tokens before it; None if unknown.

    Args:
        second, first: the tokens before it, the nearer one last; -1 where there is none.
    """
    pair = (first << TOKEN_BITS) | token if first >= 0 else None
    known = first >= 0 and second >= 0
    triple = (second << 2 * TOKEN_BITS) | (first << TOKEN_BITS) | token if known else None
    return [token, pair, triple, None if triple is None else triple >> TOKEN_BITS]


def observe(
    state: HistoryState, slot: int, emitted: list[int], *, accepted: int, length: int
) -> None:
    """Take in what the round before emitted.

    Args:
        accepted: drafts accepted in it.
        length: its verify length; 0 if nothing was drafted.
    """
    tables, tail = state.tables_SGN[slot], state.tail_S2[slot]
    for token in emitted:
        found = keys(int(tail[0]), int(tail[1]), token)
        for table, key in enumerate(found):
            if key is not None:
                entry = found[2] if table == 3 else key
                assert entry is not None
                tables[table, place(key, state.entries)] = entry
        tail[0], tail[1] = tail[1].clone(), token
    numbers = state.numbers_SF[slot]
    if length > 0 and emitted:
        surprise = float(accepted) - state.expected_SL[slot, length - 1]
        numbers[MEAN_SURPRISE] += MOVING_WEIGHT * (surprise - numbers[MEAN_SURPRISE])
        numbers[ROUNDS] += 1.0
    numbers[TEXT_TOKENS] += float(len(emitted))


def features(
    state: HistoryState,
    slot: int,
    p1_D: torch.Tensor,
    p2_D: torch.Tensor,
    entropy_D: torch.Tensor,
    drafts: list[int],
) -> torch.Tensor:
    """Features of the drafts of a request, fp32 [15, 16]; the last column is 0.

    Also keeps what the drafter expects of this block, for the next `observe`.
    """
    found = torch.zeros(NUM_DRAFTS, FEATURE_STRIDE)
    column = {name: found[:, index] for index, name in enumerate(FEATURES)}
    column["p1"][:], column["margin"][:] = p1_D, p1_D - p2_D
    column["entropy"][:] = entropy_D
    column["position"][:] = torch.arange(NUM_DRAFTS)
    column["previous_p1"][:] = torch.cat([p1_D[:1], p1_D[:-1]])
    column["next_p1"][:] = torch.cat([p1_D[1:], p1_D[-1:]])
    tail = [int(token) for token in state.tail_S2[slot]]
    text = [*tail, *drafts]
    product, least, least_seen = torch.tensor(1.0), torch.tensor(float("inf")), 3.0
    expected = state.expected_SL[slot]
    expected[0] = 0.0
    for draft, token in enumerate(drafts):
        product = product * p1_D[draft]
        least = torch.minimum(least, p1_D[draft])
        expected[draft + 1] = expected[draft] + product
        column["product_p1"][draft], column["min_p1"][draft] = product, least
        equal = [back for back in range(1, draft + 2) if text[draft + 2 - back] == token]
        column["repeat_distance"][draft] = float(min(equal, default=BLOCK_SIZE))
        seen, successor = _look_up(state, slot, text[draft], text[draft + 1], token)
        least_seen = min(least_seen, seen)
        column["seen_length"][draft], column["min_seen_length"][draft] = seen, least_seen
        column["successor"][draft] = successor
    numbers = state.numbers_SF[slot]
    column["mean_surprise"][:] = numbers[MEAN_SURPRISE]
    column["rounds_before"][:] = numbers[ROUNDS]
    column["generated_tokens"][:] = numbers[TEXT_TOKENS] - 1.0
    return found


def _look_up(
    state: HistoryState, slot: int, second: int, first: int, token: int
) -> tuple[float, float]:
    tables = state.tables_SGN[slot]
    found = keys(second, first, token)
    length = 0
    while length < 3:
        key = found[length]
        if key is None or int(tables[length, place(key, state.entries)]) != key:
            break
        length += 1
    triple, before = found[2], found[3]
    if triple is None or before is None:
        return float(length), 0.0
    follower = int(tables[3, place(before, state.entries)])
    if follower < 0 or follower >> TOKEN_BITS != before:
        return float(length), 0.0
    return float(length), 1.0 if follower == triple else -1.0


def walk(trees: DeviceTrees, features_DF: torch.Tensor) -> torch.Tensor:
    """Hazards of rows of features, fp64 [N]."""
    words, roots = trees.words_K, trees.roots_T.to(torch.int64)
    total = torch.zeros(len(features_DF), dtype=torch.int64)
    for root in roots.tolist():
        node = torch.full((len(features_DF),), root)
        for _ in range(trees.depth):
            word = words[node]
            threshold = (word & 0xFFFFFFFF).to(torch.int32).view(torch.float32)
            value = features_DF.gather(1, ((word >> 32) & 0xFF)[:, None])[:, 0]
            node = (word >> 40) + (value > threshold)
        total += trees.values_K[node]
    logits = total.to(torch.float64) / VALUE_SCALE
    return 1.0 / (1.0 + exp(-logits))
