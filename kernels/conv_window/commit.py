"""Moving conv windows past the accepted rows: all layers and requests in one launch.

A window of three columns is the end of the sequence of raw rows so far, so after n more rows it is
the last three columns of window ++ rows[:n]. Columns are copied, never computed.
"""

# ruff: noqa: RUF005
# Triton does not compile starred tuples, and its types are what its compiler makes of them.
# pyright: reportGeneralTypeIssues=false, reportCallIssue=false
# pyright: reportAttributeAccessIssue=false
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from hybridspec.kernels.compilation import CompileCase
from hybridspec.kernels.conv_window.shapes import (
    check_indices,
    check_pool,
    check_rows,
    require,
)
from hybridspec.kernels.conv_window.taps import narrow

BLOCK_CHANNELS = 256
# One warp: its loads and stores are ordered without a barrier between warps.
NUM_WARPS = 1


@triton.jit
def commit_window(
    p_window,
    p_rows,
    num_accepted,
    o_c,
    mask_c,
    stride_row,
    STRIDE_CHANNEL: tl.constexpr,
    STRIDE_COLUMN: tl.constexpr,
):
    """Move one request's window past its accepted rows, for a block of channels.

    For a program of any kernel: every warp of it must come here (there is a barrier inside), and
    no other program may handle the same channels of the same window in that launch.

    Args:
        p_window: scalar pointer to the window [C, 3] of this layer and slot; rewritten.
        p_rows: scalar pointer to raw row 0 [T, C] of this layer and request, channels adjacent.
        num_accepted: scalar n, 0..T; with 0 nothing is written.
        o_c: channels [BLOCK] of this program, any order.
        mask_c: which of them exist.
        stride_row: elements between raw rows.
        STRIDE_CHANNEL: elements between channels of the window.
        STRIDE_COLUMN: elements between its columns.
    """
    if num_accepted > 0:
        p_columns = p_window + o_c * STRIDE_CHANNEL
        b_columns = ()
        for j in tl.static_range(3):
            # Column j comes from place n + j of window ++ rows; the window is places 0..2.
            place = num_accepted + j
            b_old = tl.load(p_columns + place * STRIDE_COLUMN, mask=mask_c & (place < 3), other=0.0)
            b_new = tl.load(
                p_rows + (place - 3) * stride_row + o_c, mask=mask_c & (place >= 3), other=0.0
            )
            if b_new.dtype != b_old.dtype:
                b_new = narrow(b_new.to(tl.float32), b_old.dtype)
            b_columns = b_columns + (tl.where(place < 3, b_old, b_new),)
        # Loads and stores need not give a channel to the same thread.
        tl.debug_barrier()
        for j in tl.static_range(3):
            tl.store(p_columns + j * STRIDE_COLUMN, b_columns[j], mask=mask_c)


# Scalars of a request: any alignment will do, and a view of a few ids must not compile anew.
@triton.jit(do_not_specialize_on_alignment=["p_slots", "p_accepted"])
def _commit_kernel(
    p_pool,
    p_raw,
    p_slots,
    p_accepted,
    stride_pool_layer,
    stride_pool_slot,
    stride_raw_layer,
    stride_raw_batch,
    stride_raw_row,
    NUM_CHANNELS: tl.constexpr,
    NUM_ROWS: tl.constexpr,
    STRIDE_POOL_CHANNEL: tl.constexpr,
    STRIDE_POOL_COLUMN: tl.constexpr,
    BLOCK_C: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    i_c, i_b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i_layer = tl.program_id(2).to(tl.int64)
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    slot = tl.load(p_slots + i_b).to(tl.int64)
    num_accepted = tl.minimum(tl.load(p_accepted + i_b).to(tl.int32), NUM_ROWS)
    if slot >= 0:
        o_c = i_c * BLOCK_C + tl.arange(0, BLOCK_C)
        commit_window(
            p_pool + i_layer * stride_pool_layer + slot * stride_pool_slot,
            p_raw + i_layer * stride_raw_layer + i_b * stride_raw_batch,
            num_accepted,
            o_c,
            o_c < NUM_CHANNELS,
            stride_raw_row,
            STRIDE_POOL_CHANNEL,
            STRIDE_POOL_COLUMN,
        )


def commit(
    pool_LSCW: Tensor,
    raw_LBTC: Tensor,
    slots_B: Tensor,
    num_accepted_B: Tensor,
    *,
    dependent_launch: bool = False,
) -> None:
    """Move every request's windows past its accepted rows, in all layers. One launch.

    Args:
        pool_LSCW: conv windows [layers, slots, C, 3], bf16 or fp32 and no narrower than the rows,
            any strides; updated in place.
        raw_LBTC: raw rows of the round [layers, B, T <= 16, C], channels adjacent: what `verify`
            or `prepare` wrote to `raw_out`, or the engine's own rows where they are still alive.
        slots_B: int32 or int64 slot of each request, each used once; negative is padding.
        num_accepted_B: int32 or int64 rows to keep, 0..length, read on the device. With 0 the
            window stays as it is, bit for bit; values past T count as T.
        dependent_launch: start before the launch ahead on the stream ends (Hopper and later).

    Raises:
        UsageError: a shape, dtype or stride that is not handled.
    """
    check_rows("raw rows", raw_LBTC, dimensions=4)
    layers, batch, num_rows, channels = raw_LBTC.shape
    check_pool(pool_LSCW, raw_LBTC, dimensions=4)
    require(
        pool_LSCW.shape[0] == layers,
        f"the window pool has {pool_LSCW.shape[0]} layers and the raw rows {layers}: the two must "
        "agree; pass the rows of every layer of the pool",
    )
    check_indices("slots", slots_B, batch)
    check_indices("accepted counts", num_accepted_B, batch)
    if batch == 0 or layers == 0:
        return
    _commit_kernel[(triton.cdiv(channels, BLOCK_CHANNELS), batch, layers)](
        pool_LSCW,
        raw_LBTC,
        slots_B,
        num_accepted_B,
        pool_LSCW.stride(0),
        pool_LSCW.stride(1),
        raw_LBTC.stride(0),
        raw_LBTC.stride(1),
        raw_LBTC.stride(2),
        NUM_CHANNELS=channels,
        NUM_ROWS=num_rows,
        STRIDE_POOL_CHANNEL=pool_LSCW.stride(2),
        STRIDE_POOL_COLUMN=pool_LSCW.stride(3),
        BLOCK_C=BLOCK_CHANNELS,
        DEPENDENT=dependent_launch,
        num_warps=NUM_WARPS,
        **({"launch_pdl": True} if dependent_launch else {}),
    )


def compile_cases() -> list[CompileCase]:
    """Shipped configurations: both pool dtypes, with and without dependent launch."""
    strides = dict.fromkeys(
        ["stride_pool_layer", "stride_pool_slot", "stride_raw_layer", "stride_raw_batch"], "i64"
    ) | {"stride_raw_row": "i32"}
    cases = []
    for pool in ("bf16", "fp32"):
        for dependent in (False, True):
            kinds = {
                "p_pool": f"*{pool}",
                "p_raw": "*bf16",
                "p_slots": "*i32",
                "p_accepted": "*i32",
                **strides,
            }
            cases.append(
                CompileCase(
                    name=f"conv_commit {pool}{' dependent' if dependent else ''}",
                    kernel=_commit_kernel,
                    signature={
                        name: kinds.get(name, "constexpr") for name in _commit_kernel.arg_names
                    },
                    constexprs={
                        "NUM_CHANNELS": 8192,
                        "NUM_ROWS": 16,
                        "STRIDE_POOL_CHANNEL": 3,
                        "STRIDE_POOL_COLUMN": 1,
                        "BLOCK_C": BLOCK_CHANNELS,
                        "DEPENDENT": dependent,
                    },
                    divisible_by_16=frozenset(strides),
                    num_warps=NUM_WARPS,
                    dependent_launch=dependent,
                    architectures=(90,) if dependent else (80, 90),
                )
            )
    return cases
