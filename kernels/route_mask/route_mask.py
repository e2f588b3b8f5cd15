"""Rewriting routes so that rows past a request's length load no expert.

In place by default, one launch, one program of one warp a request. `mask_rows` is also called from
the correction kernel, which then needs no launch of its own for layer 0.
"""

# Launch options and static ranges are not in triton's annotations.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl

from hybridspec.errors import UsageError
from hybridspec.kernels.compilation import CompileCase

MaskMode = Literal["alias", "drop"]
MODES: dict[str, int] = {"alias": 1, "drop": 2}


@triton.jit
def first_active(p_lengths, num_requests, BLOCK_REQUESTS: tl.constexpr):
    """Index of the first request with a length above 0, `num_requests` where there is none."""
    o_request = tl.arange(0, BLOCK_REQUESTS)
    lengths = tl.load(p_lengths + o_request, mask=o_request < num_requests, other=0)
    return tl.min(tl.where(lengths > 0, o_request, num_requests), axis=0)


@triton.jit
def mask_rows(
    p_ids,
    p_weights,
    p_out_ids,
    p_out_weights,
    i_request,
    i_row,
    length,
    present,
    i_first_active,
    num_requests,
    stride_ids,
    stride_weights,
    stride_out_ids,
    stride_out_weights,
    ROWS: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    MODE: tl.constexpr,
    COPY: tl.constexpr,
):
    """Write the routes of rows at or past `length`; with COPY the other rows too.

    Args:
        i_request, i_row, length, present: [R, 1]; present says whether the row exists.
        i_first_active: scalar, from `first_active`.
    """
    o_k = tl.arange(0, BLOCK_K)[None, :]
    in_row = present & (o_k < TOP_K)
    i_flat = i_request.to(tl.int64) * ROWS + i_row
    masked = in_row & (i_row >= length)
    if MODE == 1:
        # A live request's own anchor is row 0, which is never rewritten, so other programs may
        # read it at any time.
        p_own = p_ids + i_request.to(tl.int64) * (ROWS * stride_ids) + o_k
        own = tl.load(p_own + i_row * 0, mask=in_row, other=0)
        borrows = in_row & (length <= 0) & (i_first_active < num_requests)
        p_other = p_ids + i_first_active.to(tl.int64) * (ROWS * stride_ids) + o_k
        other = tl.load(p_other + i_row * 0, mask=borrows, other=0)
        replacement = tl.where(length > 0, own, other)
    else:
        replacement = tl.zeros_like(i_flat + o_k).to(p_ids.dtype.element_ty) - 1
    if COPY:
        ids = tl.load(p_ids + i_flat * stride_ids + o_k, mask=in_row, other=0)
        weights = tl.load(p_weights + i_flat * stride_weights + o_k, mask=in_row, other=0.0)
        ids = tl.where(masked, replacement, ids)
        weights = tl.where(masked, 0.0, weights)
        tl.store(p_out_ids + i_flat * stride_out_ids + o_k, ids, mask=in_row)
        tl.store(p_out_weights + i_flat * stride_out_weights + o_k, weights, mask=in_row)
    else:
        nothing = tl.zeros_like(replacement).to(p_weights.dtype.element_ty)
        tl.store(p_out_ids + i_flat * stride_out_ids + o_k, replacement, mask=masked)
        tl.store(p_out_weights + i_flat * stride_out_weights + o_k, nothing, mask=masked)


@triton.jit(do_not_specialize=["num_requests"])
def route_mask_kernel(
    p_ids,
    p_weights,
    p_lengths,
    p_out_ids,
    p_out_weights,
    num_requests,
    stride_ids,
    stride_weights,
    stride_out_ids,
    stride_out_weights,
    ROWS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    MODE: tl.constexpr,
    COPY: tl.constexpr,
    BLOCK_REQUESTS: tl.constexpr,
):
    """One program takes the rows of one request; see `route_mask` for the arguments."""
    i_row = tl.arange(0, BLOCK_ROWS)[:, None]
    i_request = tl.program_id(0) + tl.zeros_like(i_row)
    length = tl.load(p_lengths + i_request)
    i_first = tl.program_id(0) * 0 + num_requests
    if MODE == 1:
        i_first = first_active(p_lengths, num_requests, BLOCK_REQUESTS)
    mask_rows(
        p_ids,
        p_weights,
        p_out_ids,
        p_out_weights,
        i_request,
        i_row,
        length,
        i_row < ROWS,
        i_first,
        num_requests,
        stride_ids,
        stride_weights,
        stride_out_ids,
        stride_out_weights,
        ROWS,
        TOP_K,
        BLOCK_K,
        MODE,
        COPY,
    )


def route_mask(
    topk_ids_RK: torch.Tensor,
    topk_weights_RK: torch.Tensor,
    lengths_B: torch.Tensor,
    *,
    mode: MaskMode = "alias",
    rows_per_request: int = 16,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Make rows at or past their request's length load no expert and weigh nothing.

    Row `r` belongs to request `r // rows_per_request`. Masked rows get weight 0 whatever stood
    there, NaN included, and these ids:

    * `alias`: those of the request's own row 0, which are loaded anyway. An inactive request
      (length 0) takes row 0 of the first active one; where none is active, all ids are 0.
    * `drop`: -1, for a runner that filters it.

    Args:
        topk_ids_RK: int32 or int64 [B x rows, K], entries of a row side by side.
        topk_weights_RK: floating point [B x rows, K], likewise.
        lengths_B: int32 [B], read on the device.
        out: ids and weights to write instead of the inputs, of the same shapes and dtypes.

    Returns:
        The ids and weights written: the inputs themselves without `out`.

    Raises:
        UsageError: shapes, dtypes, strides or a mode that do not fit.
    """
    check_routes(topk_ids_RK, topk_weights_RK, lengths_B, rows_per_request)
    if mode not in MODES:
        raise UsageError(f"mask mode {mode!r} is unknown; take one of {', '.join(MODES)}")
    ids_out, weights_out = out or (topk_ids_RK, topk_weights_RK)
    if out is not None:
        check_routes(ids_out, weights_out, lengths_B, rows_per_request)
        if ids_out.shape != topk_ids_RK.shape or ids_out.dtype != topk_ids_RK.dtype:
            raise UsageError("masked ids need the shape and dtype of the ids")
    num_requests, top_k = lengths_B.shape[0], topk_ids_RK.shape[1]
    if num_requests == 0:
        return ids_out, weights_out
    route_mask_kernel[(num_requests,)](
        topk_ids_RK,
        topk_weights_RK,
        lengths_B,
        ids_out,
        weights_out,
        num_requests,
        topk_ids_RK.stride(0),
        topk_weights_RK.stride(0),
        ids_out.stride(0),
        weights_out.stride(0),
        ROWS=rows_per_request,
        BLOCK_ROWS=next_power_of_2(rows_per_request),
        TOP_K=top_k,
        BLOCK_K=next_power_of_2(top_k),
        MODE=MODES[mode],
        COPY=out is not None,
        BLOCK_REQUESTS=next_power_of_2(num_requests),
        num_warps=1,
    )
    return ids_out, weights_out


def next_power_of_2(number: int) -> int:
    """The smallest power of two that is not below `number`."""
    return 1 << max(number - 1, 0).bit_length()


def check_routes(
    ids_RK: torch.Tensor, weights_RK: torch.Tensor, lengths_B: torch.Tensor, rows: int
) -> None:
    """Refuse routes whose shapes, dtypes or strides do not fit the requests."""
    if ids_RK.ndim != 2 or ids_RK.shape != weights_RK.shape:
        raise UsageError(
            f"ids {tuple(ids_RK.shape)} and weights {tuple(weights_RK.shape)} must be [rows, K]"
        )
    if lengths_B.ndim != 1 or ids_RK.shape[0] != lengths_B.shape[0] * rows:
        raise UsageError(
            f"{ids_RK.shape[0]} rows for lengths {tuple(lengths_B.shape)}; expected {rows} each"
        )
    if ids_RK.dtype not in (torch.int32, torch.int64) or not weights_RK.is_floating_point():
        raise UsageError(
            f"ids are {ids_RK.dtype}, weights {weights_RK.dtype}; expected int32/int64 and floats"
        )
    if ids_RK.stride(1) != 1 or weights_RK.stride(1) != 1:
        raise UsageError("entries of a row must lie side by side")
    if lengths_B.dtype != torch.int32 or not lengths_B.is_contiguous():
        raise UsageError(f"lengths are {lengths_B.dtype}; expected contiguous int32")


def compile_cases() -> list[CompileCase]:
    """Shipped configurations, top-8 routes of up to 32 requests."""
    pointers = ("p_ids", "p_weights", "p_lengths", "p_out_ids", "p_out_weights")
    numbers = ("num_requests", "stride_ids", "stride_weights", "stride_out_ids")
    cases = []
    for mode, number in MODES.items():
        for ids in ("*i32", "*i64"):
            kinds = dict(zip(pointers, (ids, "*fp32", "*i32", ids, "*fp32"), strict=True))
            kinds |= dict.fromkeys((*numbers, "stride_out_weights"), "i32")
            constexprs = {
                "ROWS": 16,
                "BLOCK_ROWS": 16,
                "TOP_K": 8,
                "BLOCK_K": 8,
                "MODE": number,
                "COPY": False,
                "BLOCK_REQUESTS": 32,
            }
            kinds |= dict.fromkeys(constexprs, "constexpr")
            cases.append(
                CompileCase(
                    f"route-mask-{mode}-{ids[1:]}",
                    route_mask_kernel,
                    kinds,
                    constexprs,
                    num_warps=1,
                )
            )
    return cases
