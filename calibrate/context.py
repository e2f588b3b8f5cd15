"""Features of a draft in its block and its request: what boosted trees see.

All are float32 and need only comparisons, subtractions and one product chain in float32, so numpy
and the kernel agree in every bit. Trees do not care for monotone maps, which is why there are no
logarithms here.

Shape suffixes: R rounds, D = 15 draft positions, C = 15 features.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from hybridspec.artifacts.tables import BLOCK_SIZE, NUM_DRAFTS, IntArray
from hybridspec.artifacts.trees import CONTEXT_FEATURES
from hybridspec.calibrate.features import TraceArrays
from hybridspec.calibrate.history import HISTORY_NAMES, Float32Array, History

CONTEXT_NAMES = CONTEXT_FEATURES
# Groups of them, for fits on fewer.
SIGNAL_NAMES = CONTEXT_NAMES[:4]
BLOCK_NAMES = CONTEXT_NAMES[4:9]
TEXT_NAMES = CONTEXT_NAMES[9:12]
REQUEST_NAMES = CONTEXT_NAMES[12:]
# Where more of a feature can only mean more acceptance (1) or less (-1): the drafter's own
# confidence here and before, and how far it was right in earlier rounds. Whether a token occurred
# before is left free: a token seen alone in a new place is accepted less often than a new one.
MONOTONE = {
    "p1": 1,
    "margin": 1,
    "entropy": -1,
    "min_p1": 1,
    "product_p1": 1,
    "mean_surprise": 1,
}


def context_features(rounds: TraceArrays) -> Float32Array:
    """Features of every draft, float32 [R, 15, 15], in the order of `CONTEXT_NAMES`."""
    return block_features(
        p1_RD=rounds.p1_RD,
        p2_RD=rounds.p2_RD,
        entropy_RD=rounds.entropy_RD,
        anchor=rounds.anchor,
        draft_tokens_RD=rounds.draft_tokens_RD,
        history=rounds.history,
    )


def block_features(
    *,
    p1_RD: npt.NDArray[Any],
    p2_RD: npt.NDArray[Any],
    entropy_RD: npt.NDArray[Any],
    anchor: IntArray,
    draft_tokens_RD: IntArray,
    history: History,
) -> Float32Array:
    """`context_features` of blocks whatever they come from: a trace, or a round that runs now.

    Args:
        p1_RD, p2_RD, entropy_RD: [R, 15], taken as float32.
        anchor: int64 [R]; draft_tokens_RD: int64 [R, 15].
        history: of these rounds.
    """
    p1, p2, entropy = (
        np.asarray(values, dtype=np.float32) for values in (p1_RD, p2_RD, entropy_RD)
    )
    features = np.empty((*p1.shape, len(CONTEXT_NAMES)), dtype=np.float32)
    columns = {name: features[..., index] for index, name in enumerate(CONTEXT_NAMES)}
    columns["p1"][:] = p1
    columns["margin"][:] = p1 - p2
    columns["entropy"][:] = entropy
    columns["position"][:] = np.arange(NUM_DRAFTS, dtype=np.float32)
    columns["min_p1"][:] = np.minimum.accumulate(p1, axis=1)
    columns["product_p1"][:] = np.multiply.accumulate(p1, axis=1, dtype=np.float32)
    columns["previous_p1"][:, 0], columns["previous_p1"][:, 1:] = p1[:, 0], p1[:, :-1]
    columns["next_p1"][:, -1], columns["next_p1"][:, :-1] = p1[:, -1], p1[:, 1:]
    columns["repeat_distance"][:] = repeat_distance(anchor, draft_tokens_RD)
    columns["seen_length"][:] = history.seen_length_RD
    columns["min_seen_length"][:] = np.minimum.accumulate(history.seen_length_RD, axis=1)
    columns["successor"][:] = history.successor_RD
    for name in REQUEST_NAMES:
        columns[name][:] = history.columns_RH[:, HISTORY_NAMES.index(name), None]
    return features


def repeat_distance(anchor: IntArray, draft_tokens_RD: IntArray) -> npt.NDArray[np.float32]:
    """Positions back to the nearest equal token of the block, float32 [R, 15]; 16 if there is none.

    The anchor is the token before draft 0.
    """
    tokens = np.concatenate([anchor[:, None], draft_tokens_RD], axis=1)
    distance = np.full(draft_tokens_RD.shape, BLOCK_SIZE, dtype=np.float32)
    for back in range(NUM_DRAFTS, 0, -1):
        equal = tokens[:, back:] == tokens[:, :-back]
        distance[:, back - 1 :] = np.where(equal, back, distance[:, back - 1 :])
    return distance
