"""From recorded rounds to the arrays that hazards are fitted on.

Shape suffixes: R rounds, D = 15 draft positions, F = 5 features, P prompts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hybridspec.artifacts.tables import FEATURE_NAMES, NUM_DRAFTS, FloatArray, IntArray
from hybridspec.calibrate.history import History, request_history

BoolArray = npt.NDArray[np.bool_]
MIN_P1, MAX_P1 = 1e-6, 1.0 - 1e-6
MIN_P2 = 1e-9


def position_features(
    p1: npt.ArrayLike, p2: npt.ArrayLike, entropy_nats: npt.ArrayLike, context_tokens: npt.ArrayLike
) -> FloatArray:
    """Features of draft positions, in the order of `FEATURE_NAMES`.

    Args:
        p1: top-1 probability of each draft, [..., D]; clipped to [1e-6, 1 - 1e-6].
        p2: top-2 probability, [..., D]; clipped to [1e-9, 1].
        entropy_nats: [..., D].
        context_tokens: tokens that the target processed before the round, [...].

    Returns:
        float64 [..., D, F].
    """
    top1 = np.clip(np.asarray(p1, dtype=np.float64), MIN_P1, MAX_P1)
    top2 = np.clip(np.asarray(p2, dtype=np.float64), MIN_P2, 1.0)
    log_context = np.log1p(np.asarray(context_tokens, dtype=np.float64))[..., None]
    features = {
        "log_p1": np.log(top1),
        "neg_log_1m_p1": -np.log1p(-top1),
        "entropy": np.asarray(entropy_nats, dtype=np.float64),
        "margin": top1 - top2,
        "log_context": np.broadcast_to(log_context, top1.shape),
    }
    return np.stack([features[name] for name in FEATURE_NAMES], axis=-1)


def at_risk(accepted: npt.ArrayLike) -> BoolArray:
    """Where a hazard is observed: draft i counts only if all drafts before it were accepted.

    Args:
        accepted: drafts accepted by full verification, [R].

    Returns:
        bool [R, D], true where `accepted >= i`.
    """
    return np.asarray(accepted)[:, None] >= np.arange(NUM_DRAFTS)


def accepted_labels(accepted: npt.ArrayLike) -> BoolArray:
    """Whether draft i and all before it were accepted: bool [R, D], true where `accepted > i`."""
    return np.asarray(accepted)[:, None] > np.arange(NUM_DRAFTS)


@dataclass(frozen=True)
class TraceArrays:
    """A trace as arrays.

    Attributes:
        features_RDF: float64 [R, 15, 5].
        p1_RD, p2_RD, entropy_RD: float64 [R, 15], as recorded.
        anchor: int64 [R], token ids.
        draft_tokens_RD: int64 [R, 15], token ids.
        history_of: gives the history of each round, with all rounds of its request before it,
            whether or not they are among these. Looking drafts up in the text takes longer than
            all else, so it waits until a model asks.
        accepted: int64 [R].
        prompt: int64 [R], prompts numbered in order of first appearance.
        category: str [R].
        split: str [R].
        loop_period: int64 [R].
        context_tokens: int64 [R].
        prompt_ids: one a prompt number.
    """

    features_RDF: FloatArray
    p1_RD: FloatArray
    p2_RD: FloatArray
    entropy_RD: FloatArray
    anchor: IntArray
    draft_tokens_RD: IntArray
    history_of: Callable[[], History]
    accepted: IntArray
    prompt: IntArray
    category: npt.NDArray[Any]
    split: npt.NDArray[Any]
    loop_period: IntArray
    context_tokens: IntArray
    prompt_ids: tuple[str, ...]

    def __len__(self) -> int:
        return int(self.accepted.size)

    @property
    def history(self) -> History:
        """History of each round."""
        return self.history_of()

    def with_history(self, history: History) -> TraceArrays:
        """The same rounds with another history."""
        return replace(self, history_of=lambda: history)

    @property
    def num_prompts(self) -> int:
        """Distinct prompts among these rounds."""
        return int(np.unique(self.prompt).size)

    def select(self, rows: BoolArray | IntArray) -> TraceArrays:
        """The rounds where `rows` is true, or of these indices; prompts keep their numbers."""
        return TraceArrays(
            features_RDF=self.features_RDF[rows],
            p1_RD=self.p1_RD[rows],
            p2_RD=self.p2_RD[rows],
            entropy_RD=self.entropy_RD[rows],
            anchor=self.anchor[rows],
            draft_tokens_RD=self.draft_tokens_RD[rows],
            history_of=cache(lambda: self.history.select(rows)),
            accepted=self.accepted[rows],
            prompt=self.prompt[rows],
            category=self.category[rows],
            split=self.split[rows],
            loop_period=self.loop_period[rows],
            context_tokens=self.context_tokens[rows],
            prompt_ids=self.prompt_ids,
        )


def list_column(table: pa.Table, name: str) -> npt.NDArray[Any]:
    """A column of equal-length lists as an array [R, length]."""
    column = table.column(name)
    return np.asarray(column.combine_chunks().flatten()).reshape(-1, column.type.list_size)


def trace_arrays(table: pa.Table) -> TraceArrays:
    """Arrays of a checked trace table."""
    encoded = table.column("prompt_id").combine_chunks().dictionary_encode()
    if isinstance(encoded, pa.ChunkedArray):
        encoded = encoded.combine_chunks()
    shape = (table.num_rows, NUM_DRAFTS)
    p1, p2, entropy = (
        list_column(table, name).astype(np.float64).reshape(shape)
        for name in ("p1", "p2", "entropy_nats")
    )
    context_tokens, accepted, anchor, round_index, generated_tokens = (
        table.column(name).to_numpy().astype(np.int64)
        for name in ("context_tokens", "accepted", "anchor", "round", "generated_tokens")
    )
    draft_tokens = list_column(table, "draft_tokens").astype(np.int64).reshape(shape)
    prompt = np.asarray(encoded.indices).astype(np.int64)
    return TraceArrays(
        features_RDF=position_features(p1, p2, entropy, context_tokens),
        p1_RD=p1,
        p2_RD=p2,
        entropy_RD=entropy,
        anchor=anchor,
        draft_tokens_RD=draft_tokens,
        history_of=cache(
            lambda: request_history(
                prompt=prompt,
                round_index=round_index,
                generated_tokens=generated_tokens,
                accepted=accepted,
                p1_RD=p1,
                anchor=anchor,
                draft_tokens_RD=draft_tokens,
            )
        ),
        accepted=accepted,
        prompt=prompt,
        category=np.asarray(table.column("category").to_pylist(), dtype=str),
        split=np.asarray(table.column("split").to_pylist(), dtype=str),
        loop_period=table.column("loop_period").to_numpy().astype(np.int64),
        context_tokens=context_tokens,
        prompt_ids=tuple(encoded.dictionary.to_pylist()),
    )
