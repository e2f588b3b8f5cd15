"""Conv and silu over a block of rows of each request; the window pool is only read.

Formula: out[t] = silu(bias + sum_{j=0..3} weight[:, j] x[t - 3 + j]), x = window ++ rows.
"""

# Triton's types are what its compiler makes of them.
# pyright: reportGeneralTypeIssues=false, reportCallIssue=false
# pyright: reportAttributeAccessIssue=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybridspec.kernels.compilation import CompileCase
from hybridspec.kernels.conv_window.shapes import (
    check_indices,
    check_like,
    check_pool,
    check_rows,
    check_weight,
)
from hybridspec.kernels.conv_window.taps import convolve, load_taps, load_weights, narrow

BLOCK_CHANNELS = 64
ROWS_PER_PROGRAM = 4


# Scalars of a request: any alignment will do, and a view of a few ids must not compile anew.
@triton.jit(do_not_specialize_on_alignment=["p_slots", "p_lengths"])
def _verify_kernel(
    p_rows,
    p_pool,
    p_weight,
    p_bias,
    p_slots,
    p_lengths,
    p_out,
    p_raw,
    stride_rows_batch,
    stride_rows_row,
    stride_pool_slot,
    stride_out_batch,
    stride_out_row,
    stride_raw_batch,
    stride_raw_row,
    NUM_CHANNELS: tl.constexpr,
    NUM_ROWS: tl.constexpr,
    STRIDE_POOL_CHANNEL: tl.constexpr,
    STRIDE_POOL_COLUMN: tl.constexpr,
    STRIDE_WEIGHT_CHANNEL: tl.constexpr,
    STRIDE_WEIGHT_TAP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    KEEP_RAW: tl.constexpr,
    BLOCK_C: tl.constexpr,
    ROWS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    i_c, i_group, i_b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    o_c = i_c * BLOCK_C + tl.arange(0, BLOCK_C)
    mask_c = o_c < NUM_CHANNELS
    first_row = i_group * ROWS
    # Parameters are never written on the stream, so they may be read before the launch ahead ends.
    b_weights = load_weights(p_weight, o_c, mask_c, STRIDE_WEIGHT_CHANNEL, STRIDE_WEIGHT_TAP)
    if HAS_BIAS:
        b_bias = tl.load(p_bias + o_c, mask=mask_c, other=0.0).to(tl.float32)
    else:
        b_bias = tl.zeros([BLOCK_C], dtype=tl.float32)
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    slot = tl.load(p_slots + i_b).to(tl.int64)
    length = tl.load(p_lengths + i_b)
    has_window = slot >= 0
    # Rows are read whatever the length is: waiting for it first would cost a trip to memory, and
    # what lies past it reaches no output.
    b_taps = load_taps(
        p_rows + i_b * stride_rows_batch + o_c,
        p_pool + slot * stride_pool_slot + o_c * STRIDE_POOL_CHANNEL,
        first_row,
        mask_c,
        has_window,
        stride_rows_row,
        STRIDE_POOL_COLUMN,
        NUM_ROWS,
        ROWS,
    )
    for t in tl.static_range(ROWS):
        row = first_row + t
        live = has_window & (row < length)
        b_out = tl.where(live, convolve(b_taps, b_weights, b_bias, t), 0.0)
        tl.store(
            p_out + i_b * stride_out_batch + row * stride_out_row + o_c,
            narrow(b_out, p_out.dtype.element_ty),
            mask=mask_c & (row < NUM_ROWS),
        )
        if KEEP_RAW:
            b_row = tl.where(live, b_taps[t + 3], tl.zeros_like(b_taps[t + 3]))
            tl.store(
                p_raw + i_b * stride_raw_batch + row * stride_raw_row + o_c,
                b_row,
                mask=mask_c & (has_window & (row < NUM_ROWS)),
            )


def verify(
    rows_BTC: Tensor,
    pool_SCW: Tensor,
    weight_CW: Tensor,
    slots_B: Tensor,
    lengths_B: Tensor,
    *,
    bias_C: Tensor | None = None,
    out: Tensor | None = None,
    raw_out: Tensor | None = None,
    dependent_launch: bool = False,
) -> Tensor:
    """Conv and silu of each request's first `lengths_B` rows. One launch.

    Args:
        rows_BTC: rows before the conv [B, T <= 16, C], bf16 or fp32; any batch and row stride.
        pool_SCW: conv windows [slots, C, 3], bf16 or fp32 and no narrower than the rows, any
            strides; only read.
        weight_CW: [C, 4] in the dtype of the rows, any strides.
        slots_B: int32 or int64 slot of each request; negative is padding, whose outputs are zeros.
        lengths_B: int32 or int64 rows of each request that count, 0..T, read on the device.
        bias_C: [C] or none.
        out: [B, T, C] in the dtype of the rows; zeros past each length, whatever the rows hold.
        raw_out: [B, T, C] in the dtype of the rows: a copy of the rows that count, zeros past
            them, for `commit` where the engine does not keep the rows themselves. Requests that
            are padding leave it as it is.
        dependent_launch: start before the launch ahead on the stream ends (Hopper and later).

    Returns:
        `out`.

    Raises:
        UsageError: a shape, dtype or stride that is not handled, a conv width other than 4 among
            them.
    """
    check_rows("rows", rows_BTC, dimensions=3)
    batch, num_rows, channels = rows_BTC.shape
    check_weight(weight_CW, bias_C, rows_BTC)
    check_pool(pool_SCW, rows_BTC, dimensions=3)
    check_indices("slots", slots_B, batch)
    check_indices("lengths", lengths_B, batch)
    if out is None:
        out = torch.empty_like(rows_BTC, memory_format=torch.contiguous_format)
    check_like("out", out, (batch, num_rows, channels), rows_BTC.dtype)
    if raw_out is not None:
        check_like("raw_out", raw_out, (batch, num_rows, channels), rows_BTC.dtype)
    raw = out if raw_out is None else raw_out
    if batch == 0:
        return out
    _verify_kernel[
        (triton.cdiv(channels, BLOCK_CHANNELS), triton.cdiv(num_rows, ROWS_PER_PROGRAM), batch)
    ](
        rows_BTC,
        pool_SCW,
        weight_CW,
        weight_CW if bias_C is None else bias_C,
        slots_B,
        lengths_B,
        out,
        raw,
        rows_BTC.stride(0),
        rows_BTC.stride(1),
        pool_SCW.stride(0),
        out.stride(0),
        out.stride(1),
        raw.stride(0),
        raw.stride(1),
        NUM_CHANNELS=channels,
        NUM_ROWS=num_rows,
        STRIDE_POOL_CHANNEL=pool_SCW.stride(1),
        STRIDE_POOL_COLUMN=pool_SCW.stride(2),
        STRIDE_WEIGHT_CHANNEL=weight_CW.stride(0),
        STRIDE_WEIGHT_TAP=weight_CW.stride(1),
        HAS_BIAS=bias_C is not None,
        KEEP_RAW=raw_out is not None,
        BLOCK_C=BLOCK_CHANNELS,
        ROWS=ROWS_PER_PROGRAM,
        DEPENDENT=dependent_launch,
        num_warps=1,
        **({"launch_pdl": True} if dependent_launch else {}),
    )
    return out


def compile_cases() -> list[CompileCase]:
    """Shipped configurations: with and without bias, copy of rows and dependent launch."""
    cases = []
    for num_rows in (4, 8, 16):
        for dependent in (False, True):
            strides = {
                f"stride_{name}": "i64" if name == "pool_slot" else "i32"
                for name in (
                    [
                        "rows_batch",
                        "rows_row",
                        "pool_slot",
                        "out_batch",
                        "out_row",
                        "raw_batch",
                        "raw_row",
                    ]
                )
            }
            constexprs = {
                "NUM_CHANNELS": 8192,
                "NUM_ROWS": num_rows,
                "STRIDE_POOL_CHANNEL": 3,
                "STRIDE_POOL_COLUMN": 1,
                "STRIDE_WEIGHT_CHANNEL": 4,
                "STRIDE_WEIGHT_TAP": 1,
                "HAS_BIAS": dependent,
                "KEEP_RAW": True,
                "BLOCK_C": BLOCK_CHANNELS,
                "ROWS": ROWS_PER_PROGRAM,
                "DEPENDENT": dependent,
            }
            pointers = {
                f"p_{name}": "*bf16" for name in ("rows", "pool", "weight", "bias", "out", "raw")
            }
            pointers |= {"p_slots": "*i32", "p_lengths": "*i32"}
            kinds = {**pointers, **strides}
            cases.append(
                CompileCase(
                    name=f"conv_verify T={num_rows}{' dependent' if dependent else ''}",
                    kernel=_verify_kernel,
                    signature={
                        name: kinds.get(name, "constexpr") for name in _verify_kernel.arg_names
                    },
                    constexprs=constexprs,
                    divisible_by_16=frozenset(strides),
                    num_warps=1,
                    dependent_launch=dependent,
                    architectures=(90,) if dependent else (80, 90),
                )
            )
    return cases
