"""Distinct experts in recorded rounds, and what the first router says about all of them.

Shape suffixes: R rounds, Y layers, L = 16 verify lengths (index L - 1).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hybridspec.artifacts.tables import BLOCK_SIZE, FloatArray, IntArray, RoutingTable
from hybridspec.calibrate.features import BoolArray, list_column
from hybridspec.calibrate.rounds import TraceIdentity, trace_identity
from hybridspec.errors import BundleError

_CHUNK_ROUNDS = 1024


@dataclass(frozen=True)
class RoutingReport:
    """How well simple signals explain the total of distinct experts, at each verify length.

    Attributes:
        table: the fitted line a length.
        first_router_r2_L: float64 [16], R2 of the distinct experts of layer 0 alone, held out.
        distinct_tokens_r2_L: float64 [16], R2 of the distinct token ids in the block, held out: the
            baseline that costs nothing.
        other_layers_r2_L: float64 [16], R2 of layer 0 on the total of the *other* layers, held out.
    """

    table: RoutingTable
    first_router_r2_L: FloatArray
    distinct_tokens_r2_L: FloatArray
    other_layers_r2_L: FloatArray


def distinct_experts(table: pa.Table) -> IntArray | None:
    """Distinct experts of each layer among the first L rows of every round.

    Args:
        table: a checked trace with its identity.

    Returns:
        int64 [R, Y, 16], or None if routes were not recorded.

    Raises:
        BundleError: an expert id out of range.
    """
    identity = trace_identity(table, path="trace")
    if table.num_rows == 0 or identity.route_bytes() == 0:
        return None
    routes = table.column("routes").to_pylist()
    if not routes[0]:
        return None
    counts = np.empty((len(routes), identity.layers, BLOCK_SIZE), dtype=np.int64)
    for start in range(0, len(routes), _CHUNK_ROUNDS):
        chunk = routes[start : start + _CHUNK_ROUNDS]
        counts[start : start + len(chunk)] = _count(b"".join(chunk), len(chunk), identity)
    return counts


def _count(data: bytes, rounds: int, identity: TraceIdentity) -> IntArray:
    kind = np.uint8 if identity.bytes_per_expert() == 1 else np.dtype("<u2")
    shape = (rounds * identity.layers, BLOCK_SIZE, identity.topk)
    experts = np.frombuffer(data, dtype=kind).reshape(shape).astype(np.int64)
    if int(experts.max()) >= identity.experts:
        raise BundleError(
            f"routes name expert {int(experts.max())}; the target has {identity.experts}: record "
            "again"
        )
    # An entry is new where no entry before it names its expert. Written one after the other from
    # the last entry on, a place keeps the earliest; only places that were written are read.
    entries = BLOCK_SIZE * identity.topk
    order = np.arange(entries, dtype=np.int32)
    places = experts.reshape(-1, entries) + (np.arange(shape[0]) * identity.experts)[:, None]
    earliest = np.empty(shape[0] * identity.experts, dtype=np.int32)
    earliest[places.ravel()[::-1].copy()] = np.tile(order, shape[0])[::-1].copy()
    new = (earliest[places] == order).reshape(shape).sum(axis=2, dtype=np.int64)
    counts: IntArray = new.cumsum(axis=1).reshape(rounds, identity.layers, BLOCK_SIZE)
    return counts


def distinct_tokens(table: pa.Table) -> IntArray:
    """Distinct token ids among the first L rows (anchor, then drafts): int64 [R, 16]."""
    anchor = table.column("anchor").to_numpy()[:, None]
    block = np.concatenate([anchor, list_column(table, "draft_tokens")], axis=1)
    new = np.ones(block.shape, dtype=np.int64)
    for row in range(1, BLOCK_SIZE):
        new[:, row] = ~(block[:, :row] == block[:, row : row + 1]).any(axis=1)
    return new.cumsum(axis=1)


def fit_routing(
    counts_RYL: IntArray, tokens_RL: IntArray, *, fit_rows: BoolArray, held_out: BoolArray
) -> RoutingReport:
    """Fit the line from layer 0 to all layers at each length, and score it on held-out rounds.

    Args:
        counts_RYL: of `distinct_experts`.
        tokens_RL: of `distinct_tokens`.
        fit_rows: bool [R], rounds to fit on.
        held_out: bool [R], rounds to score on; those of `fit_rows` if there is none.
    """
    first = counts_RYL[:, 0, :].astype(np.float64)
    total = counts_RYL.sum(axis=1).astype(np.float64)
    tokens = tokens_RL.astype(np.float64)
    score_rows = held_out if held_out.any() else fit_rows
    slope, first_mean, total_mean = _lines(first[fit_rows], total[fit_rows])
    others = total - first
    return RoutingReport(
        table=RoutingTable(
            num_layers=counts_RYL.shape[1],
            first_mean_L=first_mean,
            total_mean_L=total_mean,
            slope_L=slope,
        ),
        first_router_r2_L=_held_out_r2(first, total, fit_rows, score_rows),
        distinct_tokens_r2_L=_held_out_r2(tokens, total, fit_rows, score_rows),
        other_layers_r2_L=_held_out_r2(first, others, fit_rows, score_rows),
    )


def _lines(x_RL: FloatArray, y_RL: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Least-squares slope, mean of x and mean of y at each length; slope 0 where x is constant."""
    x_mean, y_mean = x_RL.mean(axis=0), y_RL.mean(axis=0)
    spread = ((x_RL - x_mean) ** 2).sum(axis=0)
    product = ((x_RL - x_mean) * (y_RL - y_mean)).sum(axis=0)
    slope = np.divide(product, spread, out=np.zeros_like(spread), where=spread > 0)
    return slope, x_mean, y_mean


def _held_out_r2(
    x_RL: FloatArray, y_RL: FloatArray, fit_rows: BoolArray, score_rows: BoolArray
) -> FloatArray:
    slope, x_mean, y_mean = _lines(x_RL[fit_rows], y_RL[fit_rows])
    x, y = x_RL[score_rows], y_RL[score_rows]
    residual = ((y - y_mean - slope * (x - x_mean)) ** 2).sum(axis=0)
    spread = ((y - y.mean(axis=0)) ** 2).sum(axis=0)
    result: npt.NDArray[np.float64] = 1.0 - np.divide(
        residual, spread, out=np.ones_like(spread), where=spread > 0
    )
    return result
