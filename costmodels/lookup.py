"""Reading a step cost table between its grid points."""

from __future__ import annotations

import numpy as np

from hybridspec.artifacts.tables import BLOCK_SIZE, FloatArray, IntArray, StepCostTable
from hybridspec.errors import BundleError, UsageError


def batch_row(table: StepCostTable, batch: int) -> int:
    """Returns the index of the smallest measured batch that holds `batch` requests.

    A step of a batch between two measured sizes costs at most what the larger one does (engines
    pad to it), so the larger one is used and never an average.

    Raises:
        UsageError: if `batch < 1`.
        BundleError: if `batch` is beyond the largest measured one; nothing is extrapolated.
    """
    if batch < 1:
        raise UsageError(f"batch {batch} is not a batch; it must be at least 1")
    row = int(np.searchsorted(table.batch_sizes, batch))
    if row == table.batch_sizes.size:
        raise BundleError(
            f"batch {batch} is beyond the largest measured batch {int(table.batch_sizes[-1])} and "
            "costs are never extrapolated: profile again with that batch size"
        )
    return row


def latency_by_round(
    table: StepCostTable, *, batch: int, context_tokens: IntArray | FloatArray
) -> FloatArray:
    """Returns the round latency at the context of each round, float64 [n, 17] in us.

    Linear in the context between grid points. Outside the grid the end point is used: a request
    that outgrows the profiled contexts must still be served, the verify length depends on
    differences between lengths, and those change far less with the context than the latency does.
    """
    curve_CL = table.latency_us[batch_row(table, batch)]
    context = np.asarray(context_tokens, dtype=np.float64)
    if np.any(context < 0):
        raise UsageError(f"context of {float(context.min()):g} tokens; it must be at least 0")
    grid = table.context_tokens.astype(np.float64)
    latency = np.empty((context.size, BLOCK_SIZE + 1))
    for length in range(BLOCK_SIZE + 1):
        latency[:, length] = np.interp(context, grid, curve_CL[:, length])
    return latency


def interpolate_latency(table: StepCostTable, *, batch: int, context_tokens: float) -> FloatArray:
    """Returns the round latency of every verify length 0..16, float64 [17] in us.

    See `latency_by_round` for what happens between and outside the grid points.
    """
    context = np.asarray([context_tokens], dtype=np.float64)
    row: FloatArray = latency_by_round(table, batch=batch, context_tokens=context)[0]
    return row
