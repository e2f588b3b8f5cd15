"""Verify lengths of a batch chosen together, as the time of a round depends on all of them.

Two prices: a round time by total rows (the objective of the device kernel in `kernels/select`), and
one by the union of distinct experts that all verified rows of the batch activate together.

Shape suffixes: B requests, D = 15 drafts, R total rows, Y layers, K experts a token.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hybridspec.artifacts.tables import BLOCK_SIZE, NUM_DRAFTS, FloatArray, IntArray
from hybridspec.costmodels.throughput import TIE_TOKENS
from hybridspec.errors import UsageError

WordArray = npt.NDArray[np.uint64]
MAX_EXACT = 3
"""Requests up to which `choose_by_union` looks at every combination: 16^3 of them."""


def choose_by_rows(
    hazards_BD: FloatArray,
    latency_us: FloatArray,
    tokens_per_us: FloatArray,
    *,
    caps: IntArray | None = None,
) -> IntArray:
    """Returns lengths that maximise `sum E_i(L_i) - sum lam_i T(sum L_i / B)`, int64 [B].

    T is measured with equal lengths and taken as linear between them. Survivals do not rise along
    a request, so the best allocation of R rows takes the largest ones, and every R is scored: T
    need not be convex. Ties go to fewer rows, equal gains to the earlier position, then request.

    Args:
        hazards_BD: float64 [B, 15].
        latency_us: float64 [17] at this batch size.
        tokens_per_us: float64 [B], `lam` of each request.
        caps: int64 [B], longest length of each request, 1..16.

    Raises:
        UsageError: no request, or shapes and caps that do not fit.
    """
    caps = _checked_caps(hazards_BD, caps)
    requests = hazards_BD.shape[0]
    gain = np.cumprod(hazards_BD, axis=1)
    position = np.broadcast_to(np.arange(NUM_DRAFTS), gain.shape)
    request = np.broadcast_to(np.arange(requests)[:, None], gain.shape)
    open_ = position < caps[:, None] - 1
    gain, position, request = gain[open_], position[open_], request[open_]
    order = np.lexsort((request, position, -gain))
    emitted = requests + np.concatenate([[0.0], np.cumsum(gain[order])])
    rows = requests + np.arange(emitted.size)
    time_us = np.interp(rows / requests, np.arange(1, BLOCK_SIZE + 1), latency_us[1:])
    score = emitted - float(np.sum(tokens_per_us)) * time_us
    chosen = int(np.argmax(score >= score.max() - TIE_TOKENS))
    taken = request[order[:chosen]]
    return 1 + np.bincount(taken, minlength=requests).astype(np.int64)


@dataclass(frozen=True)
class UnionCost:
    """Round time by total rows and by the union of distinct experts.

    Attributes:
        row_us: float64 [rows], time of a round with R total rows at index R, experts not counted.
        expert_us: one more distinct expert in one layer.
    """

    row_us: FloatArray
    expert_us: float

    def __post_init__(self) -> None:
        if self.row_us.ndim != 1 or not np.all(np.isfinite(self.row_us) & (self.row_us >= 0)):
            raise UsageError("round times by rows must be a list of finite numbers of at least 0")
        if not (np.isfinite(self.expert_us) and self.expert_us >= 0):
            raise UsageError(f"{self.expert_us:g} us an expert must be finite and at least 0")

    def time_us(self, rows: int, experts: int) -> float:
        """Time of a round of `rows` rows that activate `experts` distinct experts over layers."""
        return float(self.row_us[rows]) + self.expert_us * experts


def choose_by_union(
    hazards_BD: FloatArray,
    experts_BRYK: IntArray,
    num_experts: int,
    cost: UnionCost,
    tokens_per_us: float,
    *,
    caps: IntArray | None = None,
) -> IntArray:
    """Returns lengths for `sum E_i(L_i) - lam T(rows, union of experts)`, int64 [B].

    Up to 3 requests the best of all combinations. Beyond, greedy: from the anchors, whose experts
    are paid for anyway, take the extension of one request with the most expected tokens per
    microsecond of new rows and experts not yet in the union, until all are full, and keep the best
    state on the way. Experts shared between requests make this objective supermodular in places,
    so greedy may fall short of the best (`tests` bound by how much).

    Args:
        hazards_BD: float64 [B, 15].
        experts_BRYK: int64 [B, 16, Y, K], experts of each row and layer, as predicted or seen.
        num_experts: experts a layer.
        cost: times; `row_us` must reach `16 B` rows.
        tokens_per_us: `lam` summed over the batch.
        caps: int64 [B], longest length of each request, 1..16.

    Raises:
        UsageError: shapes, ids or caps that do not fit.
    """
    caps = _checked_caps(hazards_BD, caps)
    masks = _prefix_masks(experts_BRYK, num_experts, requests=hazards_BD.shape[0])
    if cost.row_us.size <= int(caps.sum()):
        raise UsageError(
            f"round times reach {cost.row_us.size - 1} rows; {int(caps.sum())} are needed"
        )
    emitted: FloatArray = np.ones((len(caps), BLOCK_SIZE))
    emitted[:, 1:] += np.cumsum(np.cumprod(hazards_BD, axis=1), axis=1)
    if len(caps) <= MAX_EXACT:
        return _every_combination(emitted, masks, cost, tokens_per_us, caps)
    return _greedy(emitted, masks, cost, tokens_per_us, caps)


def _every_combination(
    emitted_BL: FloatArray,
    masks_BRW: WordArray,
    cost: UnionCost,
    tokens_per_us: float,
    caps: IntArray,
) -> IntArray:
    best, best_rows, chosen = -np.inf, 0, np.ones(len(caps), dtype=np.int64)
    for lengths in itertools.product(*(range(1, cap + 1) for cap in caps.tolist())):
        rows = sum(lengths)
        union = np.bitwise_or.reduce([masks_BRW[i, n - 1] for i, n in enumerate(lengths)])
        gain = float(sum(emitted_BL[i, n - 1] for i, n in enumerate(lengths)))
        score = gain - tokens_per_us * cost.time_us(rows, _count(union))
        tie = abs(score - best) <= TIE_TOKENS
        if (tie and rows < best_rows) or (not tie and score > best):
            best, best_rows, chosen = score, rows, np.asarray(lengths, dtype=np.int64)
    return chosen


def _greedy(
    emitted_BL: FloatArray,
    masks_BRW: WordArray,
    cost: UnionCost,
    tokens_per_us: float,
    caps: IntArray,
) -> IntArray:
    requests = len(caps)
    lengths = np.ones(requests, dtype=np.int64)
    union = np.bitwise_or.reduce(masks_BRW[:, 0], axis=0)
    experts = _count(union)
    position = np.arange(1, BLOCK_SIZE + 1)
    every = np.arange(requests)

    def score() -> float:
        gain = float(emitted_BL[every, lengths - 1].sum())
        return gain - tokens_per_us * cost.time_us(int(lengths.sum()), experts)

    best, chosen = score(), lengths.copy()
    while np.any(lengths < caps):
        rows = int(lengths.sum())
        new = np.bitwise_count(masks_BRW & ~union).sum(axis=2, dtype=np.int64)
        added = position - lengths[:, None]
        open_ = (added > 0) & (position <= caps[:, None])
        gain = emitted_BL - emitted_BL[every, lengths - 1][:, None]
        extra_us = cost.row_us[np.where(open_, rows + added, rows)] - cost.row_us[rows]
        extra_us = np.maximum(extra_us + cost.expert_us * new, 1e-9)
        density = np.where(open_, gain / extra_us, -np.inf)
        request, row = np.unravel_index(int(density.argmax()), density.shape)
        lengths[request] = row + 1
        union = union | masks_BRW[request, row]
        experts = _count(union)
        now = score()
        if now > best + TIE_TOKENS:
            best, chosen = now, lengths.copy()
    return chosen


def _prefix_masks(experts_BRYK: IntArray, num_experts: int, *, requests: int) -> WordArray:
    """Returns the experts of each prefix as bits, uint64 [B, 16, words]."""
    shape = experts_BRYK.shape
    if len(shape) != 4 or shape[:2] != (requests, BLOCK_SIZE):
        raise UsageError(f"experts have shape {shape}; expected ({requests}, {BLOCK_SIZE}, Y, K)")
    if experts_BRYK.size and not (experts_BRYK.min() >= 0 and experts_BRYK.max() < num_experts):
        raise UsageError(f"expert ids must lie in 0..{num_experts - 1}")
    layers = shape[2]
    width = -(-layers * num_experts // 64) * 64
    seen = np.zeros((requests, BLOCK_SIZE, width), dtype=np.bool_)
    flat = experts_BRYK + num_experts * np.arange(layers)[:, None]
    np.put_along_axis(seen, flat.reshape(requests, BLOCK_SIZE, -1), True, axis=2)
    np.logical_or.accumulate(seen, axis=1, out=seen)
    return np.packbits(seen, axis=2).view(np.uint64)


def _count(words: WordArray) -> int:
    return int(np.bitwise_count(words).sum())


def _checked_caps(hazards_BD: FloatArray, caps: IntArray | None) -> IntArray:
    if hazards_BD.ndim != 2 or hazards_BD.shape[0] < 1 or hazards_BD.shape[1] != NUM_DRAFTS:
        raise UsageError(f"hazards have shape {hazards_BD.shape}; expected (B >= 1, {NUM_DRAFTS})")
    if not np.all((hazards_BD >= 0) & (hazards_BD <= 1)):
        raise UsageError("hazards must be probabilities without NaN")
    if caps is None:
        return np.full(hazards_BD.shape[0], BLOCK_SIZE, dtype=np.int64)
    if caps.shape != hazards_BD.shape[:1] or not np.all((caps >= 1) & (caps <= BLOCK_SIZE)):
        raise UsageError(f"caps {caps.tolist()} must be one in 1..{BLOCK_SIZE} for each request")
    return caps.astype(np.int64)
