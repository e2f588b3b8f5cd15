"""Device functions of the conv: the four inputs of every row of a group, and their sum.

A group is `ROWS` neighbouring rows of one request and one block of channels. Row t needs the
inputs t-3..t; those before row 0 are the columns of the request's window. All of them are loaded
into registers before the first is used: a loop that loads a row, computes and stores before it
loads the next waits for memory once a row.
"""

# ruff: noqa: RUF005
# Triton does not compile starred tuples, and its types are what its compiler makes of them.
# pyright: reportGeneralTypeIssues=false
from __future__ import annotations

import triton
import triton.language as tl

from hybridspec.kernels.interpreter import INTERPRETED


@triton.jit
def load_weights(p_weight, o_c, mask_c, STRIDE_CHANNEL: tl.constexpr, STRIDE_TAP: tl.constexpr):
    """Weights of a block of channels, a tuple of four vectors, oldest tap first."""
    p_block = p_weight + o_c * STRIDE_CHANNEL
    b_weights = ()
    for j in tl.static_range(4):
        b_weights = b_weights + (tl.load(p_block + j * STRIDE_TAP, mask=mask_c, other=0.0),)
    return b_weights


@triton.jit
def load_taps(
    p_rows,
    p_window,
    first_row,
    mask_c,
    has_window,
    stride_row,
    STRIDE_COLUMN: tl.constexpr,
    NUM_ROWS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Inputs of rows first_row - 3 .. first_row + ROWS - 1, a tuple of vectors over channels.

    Args:
        p_rows: pointers to row 0 of the request, one a channel.
        p_window: pointers to column 0 of its window, one a channel.
        has_window: whether the request has a slot; without one its window reads as zeros.

    Rows past `NUM_ROWS` read as zeros. A window of a wider dtype is narrowed to the dtype of the
    rows, which loses nothing because its columns are copies of rows.
    """
    # A later group finds all rows before it among the rows: only the first reaches into the window.
    tl.static_assert((ROWS >= 3) | (ROWS >= NUM_ROWS))
    starts = first_row == 0
    # Rows ahead of the window: its address waits for the slot, theirs do not. The barriers cost one
    # warp next to nothing and hold that order, and the loads ahead of the arithmetic: without them
    # the assembler sinks some.
    b_own = ()
    for t in tl.static_range(ROWS):
        b_row = tl.load(
            p_rows + (first_row + t) * stride_row,
            mask=mask_c & (first_row + t < NUM_ROWS),
            other=0.0,
        )
        b_own = b_own + (b_row,)
    b_before = ()
    for j in tl.static_range(3):
        if ROWS < NUM_ROWS:
            b_row = tl.load(
                p_rows + (first_row + (j - 3)) * stride_row,
                mask=mask_c & (first_row > 0),
                other=0.0,
            )
            b_before = b_before + (b_row,)
    tl.debug_barrier()
    b_taps = ()
    for j in tl.static_range(3):
        b_tap = tl.load(
            p_window + j * STRIDE_COLUMN, mask=mask_c & (starts & has_window), other=0.0
        )
        if b_tap.dtype != p_rows.dtype.element_ty:
            b_tap = narrow(b_tap.to(tl.float32), p_rows.dtype.element_ty)
        if ROWS < NUM_ROWS:
            b_tap = tl.where(starts, b_tap, b_before[j])
        b_taps = b_taps + (b_tap,)
    tl.debug_barrier()
    return b_taps + b_own


@triton.jit
def narrow(b_x, DTYPE: tl.constexpr):
    """fp32 to `DTYPE`, to nearest, ties to even.

    The interpreter truncates on the way to bf16, so it is done on the bits there.
    """
    if INTERPRETED and tl.bfloat16 == DTYPE:
        bits = b_x.to(tl.uint32, bitcast=True)
        bits += 0x7FFF + ((bits >> 16) & 1)
        return (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return b_x.to(DTYPE)


@triton.jit
def tap_product(b_x, b_w):
    """`x * w`, rounded to their dtype and then widened to fp32, as the engine's kernel does.

    The interpreter multiplies raw bits of bf16; the product of two bf16 is exact in fp32, so one
    rounding from there gives the same bits.
    """
    if INTERPRETED:
        return narrow(b_x.to(tl.float32) * b_w.to(tl.float32), b_x.dtype).to(tl.float32)
    else:
        return (b_x * b_w).to(tl.float32)


@triton.jit
def convolve(b_taps, b_weights, b_bias, t: tl.constexpr):
    """silu(conv) of row t of a group in fp32: bias first, then the oldest tap to the newest."""
    b_sum = b_bias
    for j in tl.static_range(4):
        b_sum += tap_product(b_taps[t + j], b_weights[j])
    return b_sum / (1 + tl.exp(-b_sum))
