"""The tables of a bundle as one fp64 vector on the device, which select and correct read.

One vector, so that a launch passes one pointer and the first loads bring neighbouring lines:

| entries | content |
|---|---|
| 0..4 | weights of ln p1, -ln(1 - p1), entropy, margin, log context |
| 5 | 1 where the policy is static: every length is the best fixed one |
| 6, 7 | first and last knot |
| 8..23 | bias of draft positions 0..14, 0 |
| 24..39 | mean distinct experts of the first router for the first 1..16 rows |
| 40..55 | price of an expert there, us |
| 3 x K | inner knots (infinity behind the last), then offset and slope of each piece |
| 3 x N | batch sizes, lam (tokens/us a request), best fixed lengths |
| M | contexts, tokens |
| N x M x 17 | latency, us |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from hybridspec.errors import UsageError

BLOCK_SIZE = 16
NUM_DRAFTS = 15
STATIC, KNOT_RANGE, BIAS, FIRST_MEAN, EXPERT_PRICE, KNOTS = 5, 6, 8, 24, 40, 56
MAX_KNOTS = 64

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class DeviceTables:
    """Packed tables and what is needed to find one's way in them.

    Attributes:
        values_TP: fp64 [T, P]; T = 1 where all requests share the tables, else one row a request.
        knots: slots for pieces of the isotonic map, a power of two.
        batches: measured batch sizes.
        contexts: measured contexts.
    """

    values_TP: torch.Tensor
    knots: int
    batches: int
    contexts: int

    def __post_init__(self) -> None:
        size = table_size(self.knots, self.batches, self.contexts)
        values = self.values_TP
        if values.ndim != 2 or values.shape[1] != size or values.stride(1) != 1:
            raise UsageError(
                f"tables have shape {tuple(values.shape)}; expected [T, {size}] with rows in one "
                "piece: pack them with pack_tables"
            )
        if values.dtype != torch.float64:
            raise UsageError(f"tables are {values.dtype}; expected float64")

    def row_stride(self, num_requests: int) -> int:
        """Elements between the tables of two requests, 0 where they share them."""
        rows = self.values_TP.shape[0]
        if rows == 1:
            return 0
        if rows != num_requests:
            raise UsageError(f"{rows} tables for {num_requests} requests; expected 1 or as many")
        return self.values_TP.stride(0)

    def set_static(self, static: bool = True) -> None:
        """Make every round take the best fixed length, or stop that; in place, so that captured
        graphs see it.
        """
        self.values_TP[:, STATIC] = float(static)


def table_size(knots: int, batches: int, contexts: int) -> int:
    """fp64 entries of one packed table."""
    return KNOTS + 3 * knots + 3 * batches + contexts + batches * contexts * (BLOCK_SIZE + 1)


def pack_tables(
    *,
    weights_F: Array,
    position_bias_D: Array,
    knots_x: Array,
    knots_y: Array,
    batch_sizes: Sequence[int] | npt.NDArray[np.int64],
    context_tokens: Sequence[int] | npt.NDArray[np.int64],
    latency_us: Array,
    tokens_per_us: Array,
    best_fixed_length: Sequence[int] | npt.NDArray[np.int64],
    first_mean_L: Array | None = None,
    slope_L: Array | None = None,
    expert_slope_us: float = 0.0,
    device: torch.device | str = "cpu",
    slots: int | None = None,
) -> DeviceTables:
    """Pack the columns of a bundle's hazard, cost, throughput and routing tables.

    Args:
        weights_F, position_bias_D, knots_x, knots_y: of the hazards, [5], [15], [K], [K].
        batch_sizes, context_tokens, latency_us: of the costs, [N], [M], [N, M, 17].
        tokens_per_us, best_fixed_length: of the throughput, [N].
        first_mean_L, slope_L: of the routing, [16]; None prices no expert.
        expert_slope_us: of the costs.
        slots: slots for pieces, a power of two; by default the fewest that hold the knots.

    Raises:
        UsageError: more than 64 knots, or columns that do not fit together.
    """
    pieces = len(knots_x) - 1
    if not 1 <= pieces < MAX_KNOTS or len(knots_y) != len(knots_x):
        raise UsageError(f"{len(knots_x)} knots; kernels take 2..{MAX_KNOTS}: fit fewer")
    slots = slots or max(8, 1 << (pieces - 1).bit_length())
    batches, contexts = len(batch_sizes), len(context_tokens)
    if np.shape(latency_us) != (batches, contexts, BLOCK_SIZE + 1) or slots < pieces:
        raise UsageError(
            f"latency has shape {np.shape(latency_us)} for {batches} batch sizes and {contexts} "
            f"contexts, {pieces} pieces for {slots} slots"
        )
    slope = np.diff(knots_y) / np.diff(knots_x)
    inner, offset, slopes = np.full(slots, np.inf), np.zeros(slots), np.zeros(slots)
    inner[: pieces - 1] = knots_x[1:-1]
    offset[:pieces], slopes[:pieces] = knots_y[:-1] - slope * knots_x[:-1], slope
    zeros = np.zeros(BLOCK_SIZE)
    parts = (
        weights_F,
        [0.0],
        [knots_x[0], knots_x[-1]],
        position_bias_D,
        [0.0],
        zeros if first_mean_L is None else first_mean_L,
        zeros if slope_L is None else np.asarray(slope_L) * expert_slope_us,
        inner,
        offset,
        slopes,
        batch_sizes,
        tokens_per_us,
        best_fixed_length,
        context_tokens,
        np.ravel(latency_us),
    )
    values = np.concatenate([np.asarray(part, dtype=np.float64) for part in parts])
    if len(values) != table_size(slots, batches, contexts):
        raise UsageError("columns of the tables have the wrong lengths")
    return DeviceTables(torch.as_tensor(values, device=device)[None], slots, batches, contexts)
