"""Device functions of select, joint select and correct: survivals, latency, the best length.

Tiles are [requests, 16] with one warp's lanes along the positions; columns are [requests, 1]. The
order of every sum is written out, because naive.py must reproduce it.
"""

# What Triton's compiler takes and makes is not in its annotations.
# pyright: reportGeneralTypeIssues=false, reportCallIssue=false
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from hybridspec.kernels.select.elementary import exp, log

TIE_TOKENS = tl.constexpr(1e-9)
CONTEXT_BUCKET = tl.constexpr(64)


@triton.jit
def is_finite(x):
    """Whether a floating-point number is neither infinite nor NaN."""
    return tl.abs(x) < float("inf")


@triton.jit
def table_hazards(
    p_p1,
    p_p2,
    p_entropy,
    p_tables,
    i_request,
    context,
    present,
    stride_p1,
    stride_p2,
    stride_entropy,
    KNOTS: tl.constexpr,
    LOG_KNOTS: tl.constexpr,
    REQUESTS: tl.constexpr,
):
    """Hazards of each draft from its signals, fp64 [REQUESTS, 16]; broken [REQUESTS, 1]."""
    o_position = tl.arange(0, 16)[None, :]
    live = present & (o_position < 15)
    i_row = i_request.to(tl.int64)
    p1_signal = tl.load(p_p1 + i_row * stride_p1 + o_position, mask=live, other=0.5)
    p2_signal = tl.load(p_p2 + i_row * stride_p2 + o_position, mask=live, other=0.5)
    entropy = tl.load(p_entropy + i_row * stride_entropy + o_position, mask=live, other=0.0)
    w_log_p1 = tl.load(p_tables)
    w_log_1m_p1 = tl.load(p_tables + 1)
    w_entropy = tl.load(p_tables + 2)
    w_margin = tl.load(p_tables + 3)
    w_context = tl.load(p_tables + 4)
    low = tl.load(p_tables + 6)
    high = tl.load(p_tables + 7)
    bias = tl.load(p_tables + 8 + o_position)
    # A warp of one request holds its tables in registers; several requests search them in memory.
    p_knots = p_tables + 56
    if REQUESTS == 1:
        o_knot = tl.arange(0, KNOTS)[None, :]
        knots = tl.load(p_knots + o_knot)
        offsets = tl.load(p_knots + KNOTS + o_knot)
        slopes = tl.load(p_knots + 2 * KNOTS + o_knot)

    finite = is_finite(p1_signal) & is_finite(p2_signal) & is_finite(entropy)
    p1 = tl.where(finite, p1_signal, 0.5).to(tl.float64)
    p2 = tl.where(finite, p2_signal, 0.5).to(tl.float64)
    p1 = tl.where(p1 < 1e-6, 1e-6, p1)
    p1 = tl.where(p1 > 1.0 - 1e-6, 1.0 - 1e-6, p1)
    p2 = tl.where(p2 < 1e-9, 1e-9, p2)
    p2 = tl.where(p2 > 1.0, 1.0, p2)

    # One logarithm for p1, 1 - p1 and, in the place of the draft that does not exist, the context.
    i_side = tl.arange(0, 2)[None, :, None]
    is_context = o_position[:, None, :] == 15
    argument = tl.where(i_side == 0, p1[:, None, :], (1.0 - p1)[:, None, :])
    tokens = tl.where(i_side == 0, (context + 1)[:, :, None], 1).to(tl.float64)
    weight = tl.where(i_side == 0, w_log_p1[:, :, None], (0.0 - w_log_1m_p1)[:, :, None])
    weight = tl.where(is_context, w_context[:, :, None], weight)
    terms = tl.sum(weight * log(tl.where(is_context, tokens, argument)), axis=1)
    last = tl.full([REQUESTS, 16], 15, tl.int32)
    linear = (bias + tl.gather(terms, last, axis=1)) + terms
    linear = linear + w_entropy * entropy.to(tl.float64)
    linear = linear + w_margin * (p1 - p2)
    finite = (finite & is_finite(linear)) | (o_position == 15)
    broken = tl.max((~finite).to(tl.int32), axis=1, keep_dims=True) != 0
    linear = tl.where(finite, linear, 0.0)
    linear = tl.where(linear < -700.0, -700.0, linear)
    linear = tl.where(linear > 700.0, 700.0, linear)
    x = 1.0 / (1.0 + exp(0.0 - linear))
    x = tl.where(x < low, low, x)
    x = tl.where(x > high, high, x)

    # The last slot of the knots is infinity, so the search ends below KNOTS.
    piece = tl.zeros([REQUESTS, 16], tl.int32)
    for step in tl.static_range(LOG_KNOTS):
        reach = piece + (1 << (LOG_KNOTS - 1 - step))
        if REQUESTS == 1:
            knot = tl.gather(knots, reach - 1, axis=1)
        else:
            knot = tl.load(p_knots + reach - 1)
        piece = tl.where(knot <= x, reach, piece)
    if REQUESTS == 1:
        offset = tl.gather(offsets, piece, axis=1)
        slope = tl.gather(slopes, piece, axis=1)
    else:
        offset = tl.load(p_knots + KNOTS + piece)
        slope = tl.load(p_knots + 2 * KNOTS + piece)
    hazard = offset + slope * x
    # Rounding may leave [0, 1], and survivals must not rise.
    hazard = tl.where(hazard > 1.0, 1.0, hazard)
    hazard = tl.where((hazard < 0.0) | broken, 0.0, hazard)
    return hazard, broken


@triton.jit
def request_survival(
    p_hazards,
    p_p1,
    p_p2,
    p_entropy,
    p_tables,
    i_request,
    context,
    present,
    stride_p1,
    stride_p2,
    stride_entropy,
    KNOTS: tl.constexpr,
    LOG_KNOTS: tl.constexpr,
    HAZARDS_GIVEN: tl.constexpr,
    REQUESTS: tl.constexpr,
):
    """Survivals and expected tokens of each request, and whether its signals are broken.

    Args:
        p_hazards: fp64 [B, 15] of another model, read in place of the signals if HAZARDS_GIVEN.
        p_tables: pointers [REQUESTS, 1] to each request's tables.
        i_request, context, present: [REQUESTS, 1] index, tokens (int32) and whether it exists.

    Returns:
        survival S_0 .. S_15 and expected E(1) .. E(16), its running sum, fp64 [REQUESTS, 16];
        broken [REQUESTS, 1]. A broken request survives nothing.
    """
    o_position = tl.arange(0, 16)[None, :]
    if HAZARDS_GIVEN:
        live = present & (o_position < 15)
        p_hazard = p_hazards + i_request.to(tl.int64) * 15 + o_position
        hazard = tl.load(p_hazard, mask=live, other=0.0)
        # NaN is in no interval.
        outside = ~((hazard >= 0.0) & (hazard <= 1.0))
        broken = tl.max(outside.to(tl.int32), axis=1, keep_dims=True) != 0
        hazard = tl.where(broken, 0.0, hazard)
    else:
        hazard, broken = table_hazards(
            p_p1,
            p_p2,
            p_entropy,
            p_tables,
            i_request,
            context,
            present,
            stride_p1,
            stride_p2,
            stride_entropy,
            KNOTS,
            LOG_KNOTS,
            REQUESTS,
        )

    running = tl.full([REQUESTS, 16], 1.0, tl.float64)
    survival = running
    total = running
    expected = running
    for d in tl.static_range(15):
        index = tl.full([REQUESTS, 16], d, tl.int32)
        running = running * tl.gather(hazard, index, axis=1)
        total = total + running
        survival = tl.where(o_position > d, running, survival)
        expected = tl.where(o_position > d, total, expected)
    return survival, expected, broken


@triton.jit
def batch_row(p_batches, batch_size, BATCHES: tl.constexpr):
    """Row of the batch tables: the next measured size, the largest beyond the grid."""
    row = tl.zeros_like(batch_size)
    for j in tl.static_range(BATCHES - 1):
        row += (tl.load(p_batches + j) < batch_size.to(tl.float64)).to(tl.int32)
    return row


@triton.jit
def context_rows(p_contexts, context, CONTEXTS: tl.constexpr):
    """Rows of the grid around the middle of a context's bucket, and the share of the right one."""
    centre = ((context // CONTEXT_BUCKET) * CONTEXT_BUCKET + CONTEXT_BUCKET // 2).to(tl.float64)
    first = tl.load(p_contexts)
    last = tl.load(p_contexts + CONTEXTS - 1)
    centre = tl.where(centre < first, first, centre)
    centre = tl.where(centre > last, last, centre)
    right = tl.zeros_like(context)
    for j in tl.static_range(CONTEXTS - 1):
        right += (tl.load(p_contexts + j) < centre).to(tl.int32)
    left = tl.where(right > 0, right - 1, 0)
    at_left = tl.load(p_contexts + left)
    span = tl.load(p_contexts + right) - at_left
    share = (centre - at_left) / tl.where(span > 0.0, span, 1.0)
    return left, right, share


@triton.jit
def shortest_best(score, allowed):
    """Index along axis 1 of the first allowed score that is the best but for rounding; [B, 1]."""
    o_position = tl.arange(0, 16)[None, :]
    score = tl.where(allowed, score, float("-inf"))
    best = tl.max(score, axis=1, keep_dims=True)
    near_best = allowed & (score >= best - TIE_TOKENS)
    return tl.min(tl.where(near_best, o_position, 16), axis=1, keep_dims=True)
