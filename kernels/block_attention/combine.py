"""Second launch: joins the pieces of every head of every row."""

# Triton's types are what its compiler makes of them.
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from hybridspec.kernels.block_attention.pieces import piece_keys
from hybridspec.kernels.conv_window.taps import narrow
from hybridspec.kernels.dependent import wait_for_inputs


@triton.jit
def combine_kernel(
    p_sums,
    p_peaks,
    p_parts,
    p_starts,
    p_lengths,
    p_out,
    stride_out,
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr,
    CHUNK: tl.constexpr,
    CAUSAL: tl.constexpr,
    MASKED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid (HEADS, B x ROWS). Reads the pieces that the row sees a key of, `CHUNK` at a time."""
    i_head = tl.program_id(0)
    i_row = tl.program_id(1).to(tl.int64)
    row = tl.program_id(1) % ROWS
    start = tl.load(p_starts + i_row // ROWS).to(tl.int32)
    length = ROWS
    if MASKED:
        length = tl.load(p_lengths + i_row // ROWS).to(tl.int32)
    wait_for_inputs(DEPENDENT)
    o_d = tl.arange(0, D)
    p_mine = p_out + i_row * stride_out + i_head * D + o_d
    if row >= length:
        tl.store(p_mine, tl.zeros([D], p_out.dtype.element_ty))
        return
    seen = start + ROWS
    if CAUSAL:
        seen = start + row + 1
    pieces = tl.cdiv(seen, piece_keys(start + ROWS, SPLITS, BLOCK_N))
    o_first = (i_row * HEADS + i_head) * SPLITS
    o_split = tl.arange(0, SPLITS)
    b_peak = tl.load(p_peaks + o_first + o_split, mask=o_split < pieces, other=float("-inf"))
    b_sum = tl.load(p_sums + o_first + o_split, mask=o_split < pieces, other=0.0)
    # The row sees a key of each of these pieces, so every peak is finite.
    peak = tl.max(b_peak, 0)
    total = tl.sum(b_sum * tl.exp2(b_peak - peak), 0)
    acc = tl.zeros([D], tl.float32)
    for i_chunk in range(0, pieces, CHUNK):
        o_piece = i_chunk + tl.arange(0, CHUNK)
        there = o_piece < pieces
        b_share = tl.exp2(
            tl.load(p_peaks + o_first + o_piece, mask=there, other=float("-inf")) - peak
        )
        b_part = tl.load(
            p_parts + (o_first + o_piece)[:, None] * D + o_d[None, :],
            mask=there[:, None],
            other=0.0,
        )
        acc += tl.sum(b_part * b_share[:, None], 0)
    tl.store(p_mine, narrow(acc / total, p_out.dtype.element_ty))
