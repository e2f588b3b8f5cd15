"""First launch: all heads of a few rows that share a key-value head, against pieces of the context.

Where pieces lie follows from the context alone, where tiles lie from the shape alone: neither from
how many rows are verified nor from who else is in the batch, so a row's bits are its own.
"""

# The device side of triton is not in its annotations.
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from hybridspec.kernels.block_attention.softmax import softmax_step
from hybridspec.kernels.dependent import wait_for_inputs
from hybridspec.kernels.interpreter import dot


@triton.jit
def piece_keys(total, SPLITS: tl.constexpr, BLOCK_N: tl.constexpr):
    """Positions of a piece: whole blocks of keys, at most `SPLITS` pieces."""
    return tl.cdiv(tl.cdiv(total, SPLITS), BLOCK_N) * BLOCK_N


@triton.jit
def pieces_kernel(
    p_q,
    p_keys,
    p_values,
    p_table,
    p_requests,
    p_starts,
    p_lengths,
    p_sums,
    p_peaks,
    p_parts,
    scale,
    stride_q,
    stride_key,
    stride_value,
    stride_table,
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TILES: tl.constexpr,
    SPLITS: tl.constexpr,
    CAUSAL: tl.constexpr,
    MASKED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid (KV_HEADS x TILES, B, programs): program s takes pieces s, s + programs, ...

    A tile holds all heads of a row before the next row's. `scale` includes log2(e). Programs of
    short contexts come first, those that have no piece end at once behind them.
    """
    i_kv = tl.program_id(0) // TILES
    i_tile = tl.program_id(0) % TILES
    i_b = tl.program_id(1).to(tl.int64)
    i_split = tl.program_id(2)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    # Written before the graph began, or many kernels ahead: read while the kernel ahead ends.
    start = tl.load(p_starts + i_b).to(tl.int32)
    request = tl.load(p_requests + i_b).to(tl.int64)
    length = ROWS
    if MASKED:
        length = tl.minimum(tl.load(p_lengths + i_b).to(tl.int32), ROWS)
    wait_for_inputs(DEPENDENT)
    piece = piece_keys(start + ROWS, SPLITS, BLOCK_N)
    end = start + ROWS
    if CAUSAL:
        # Keys of rows past the length are never seen: they need not even be finite.
        end = start + length
    pieces = tl.cdiv(end, piece)
    if (i_split >= pieces) | (i_tile * BLOCK_M // GROUP >= length):
        return

    o_m = i_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    row = o_m // GROUP
    m_m = row < length
    o_d = tl.arange(0, D)
    o_row = i_b * ROWS + row
    head = i_kv * GROUP + o_m % GROUP
    p_mine = p_q + o_row[:, None] * stride_q + (head * D)[:, None] + o_d[None, :]
    b_q = tl.load(p_mine, mask=m_m[:, None], other=0.0)
    o_part = (o_row * HEADS + head) * SPLITS
    p_slots = p_table + request * stride_table
    p_k = p_keys + i_kv * D
    p_v = p_values + i_kv * D
    zero = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for i_piece in range(i_split, pieces, tl.num_programs(2)):
        # A round that began past a request's limit ends behind the table, where others' slots are.
        last = tl.minimum(tl.minimum((i_piece + 1) * piece, end), stride_table)
        peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total_weight = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, D], tl.float32)
        for i_n in range(i_piece * piece, last, BLOCK_N):
            o_n = i_n + tl.arange(0, BLOCK_N)
            m_n = o_n < last
            slot = tl.load(p_slots + o_n, mask=m_n, other=0).to(tl.int64)
            b_k = tl.load(
                p_k + (slot * stride_key)[None, :] + o_d[:, None], mask=m_n[None, :], other=0.0
            )
            b_v = tl.load(
                p_v + (slot * stride_value)[:, None] + o_d[None, :], mask=m_n[:, None], other=0.0
            )
            score = dot(b_q, b_k, zero) * scale
            seen = m_n[None, :] & m_m[:, None]
            if CAUSAL:
                seen = seen & (o_n[None, :] <= start + row[:, None])
            score = tl.where(seen, score, float("-inf"))
            peak, total_weight, acc = softmax_step(score, b_v, peak, total_weight, acc)
        tl.store(p_peaks + o_part + i_piece, peak, mask=m_m)
        tl.store(p_sums + o_part + i_piece, total_weight, mask=m_m)
        tl.store(p_parts + (o_part + i_piece)[:, None] * D + o_d[None, :], acc, mask=m_m[:, None])
