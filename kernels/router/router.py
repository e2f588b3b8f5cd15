"""Softmax router with the mask of rows past the length, in one launch of one warp a row.

Ids and weights are those of SGLang's router, bit for bit: ranked by logit, the lowest id on ties, a
weight the probability among all experts over the sum of the chosen ones.
"""

# Launch options and static ranges are not in triton's annotations.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from functools import lru_cache
from itertools import product

import torch
import triton
import triton.language as tl

from hybridspec.errors import UsageError
from hybridspec.kernels.compilation import CompileCase
from hybridspec.kernels.route_mask.route_mask import (
    MODES,
    MaskMode,
    check_routes,
    first_active,
    next_power_of_2,
)

MAX_EXPERTS = 512
MAX_TOP_K = 16
MAX_SPLITS = 16
LOGIT_DTYPES = (torch.bfloat16, torch.float32)
# Compute capability from which a launch may begin while the one ahead ends.
FIRST_WITH_DEPENDENT_LAUNCH = 90


@triton.jit
def order_of(x, o_n, NARROW: tl.constexpr):
    """int32 that orders like the floats `x`; NARROW (bf16 values) also by id, lower ids higher.

    Integers because a warp reduces them in one instruction.
    """
    # -0 equals +0, so both must get one key.
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    if NARROW:
        # The low half of a bf16 value is empty: the id goes there, and one reduction finds both.
        key = (key & -65536) | (65535 - o_n)
    return key


@triton.jit
def value_of(key, NARROW: tl.constexpr):
    """The float that `order_of` was given."""
    if NARROW:
        key = key & -65536
        return (key ^ ((key >> 31) & 0x7FFF0000)).to(tl.float32, bitcast=True)
    else:
        return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def rounded_to_bf16(x):
    """fp32 `x` rounded to the nearest bf16 value, ties to even; the interpreter's cast cuts off."""
    bits = x.to(tl.int32, bitcast=True)
    bits = (bits + 32767 + ((bits >> 16) & 1)) & -65536
    return tl.where(x == x, bits.to(tl.float32, bitcast=True), x)


@triton.jit
def top_k_of(
    x,
    o_n,
    NUM_EXPERTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    NARROW: tl.constexpr,
):
    """ids and weights [M, BLOCK_K] of logits `x` [M, BLOCK_N] fp32; padding after TOP_K is 0."""
    nothing = tl.full(x.shape, float("-inf"), tl.float32)
    x = tl.where(o_n < NUM_EXPERTS, x, nothing)
    # A NaN ranks below every real logit; the sum below makes all weights of its row NaN.
    key = order_of(tl.where(x == x, x, -1e30), o_n, NARROW)
    # A taken expert ranks as one of probability 0 does, so that ids stay valid in every case.
    taken = order_of(nothing, o_n, NARROW)
    o_k = tl.arange(0, BLOCK_K)[None, :]
    ids = tl.zeros([x.shape[0], BLOCK_K], tl.int32)
    values = tl.zeros([x.shape[0], BLOCK_K], tl.float32)
    best = tl.max(key, axis=1)[:, None]
    largest = value_of(best, NARROW)
    for k in tl.static_range(TOP_K):
        if k > 0:
            best = tl.max(key, axis=1)[:, None]
        if NARROW:
            winner = 65535 - (best & 65535)
        else:
            winner = tl.min(tl.where(key == best, o_n, BLOCK_N), axis=1)[:, None]
        ids = tl.where(o_k == k, winner, ids)
        values = tl.where(o_k == k, value_of(best, NARROW), values)
        key = tl.where(o_n == winner, taken, key)

    total = tl.sum(tl.where(o_n < NUM_EXPERTS, tl.exp(x - largest), 0.0), axis=1)[:, None]
    weights = tl.where(o_k < TOP_K, tl.exp(values - largest) / total, 0.0)
    if RENORMALIZE:
        chosen = tl.sum(weights, axis=1)[:, None]
        weights = weights / tl.where(chosen > 0.0, chosen, 1.0)
    return ids, weights


@triton.jit(do_not_specialize=["num_rows", "num_requests"])
def router_kernel(
    p_logits,
    p_lengths,
    p_ids,
    p_weights,
    p_kept,
    num_rows,
    num_requests,
    stride_split,
    stride_row,
    NUM_EXPERTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    NARROW: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    ROWS: tl.constexpr,
    MODE: tl.constexpr,
    KEEP: tl.constexpr,
    BLOCK_REQUESTS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One program BLOCK_M rows; with KEEP a second program for the same rows, unmasked."""
    i_block = tl.program_id(0)
    keeps = i_block < 0
    if KEEP:
        num_blocks = tl.cdiv(num_rows, BLOCK_M)
        keeps = i_block >= num_blocks
        i_block = i_block % num_blocks
    o_row = i_block * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    o_n = tl.arange(0, BLOCK_N)[None, :]
    o_k = tl.arange(0, BLOCK_K)[None, :]
    present = o_row < num_rows
    masked = o_row < 0
    nowhere = masked
    source = o_row
    if MODE != 0:
        # Lengths are older than the launch ahead, so they may be read before the wait.
        i_request = o_row // ROWS
        length = tl.load(p_lengths + i_request, mask=present, other=0)
        masked = (o_row % ROWS >= length) & (keeps == 0)
        if MODE == 1:
            # A masked row routes what its anchor routes: nothing is exchanged between programs.
            i_first = first_active(p_lengths, num_requests, BLOCK_REQUESTS)
            anchor = tl.where(length > 0, i_request, i_first)
            nowhere = masked & (anchor >= num_requests)
            source = tl.where(masked & (anchor < num_requests), anchor * ROWS, o_row)
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    p_x = p_logits + source.to(tl.int64) * stride_row + o_n
    there = present & (o_n < NUM_EXPERTS)
    x = tl.load(p_x, mask=there, other=0.0).to(tl.float32)
    if SPLITS > 1:
        for i_split in tl.static_range(1, SPLITS):
            x += tl.load(p_x + i_split * stride_split, mask=there, other=0.0)
    if SPLITS > 0:
        x = rounded_to_bf16(x)
    ids, weights = top_k_of(x, o_n, NUM_EXPERTS, BLOCK_N, TOP_K, BLOCK_K, RENORMALIZE, NARROW)
    if MODE == 1:
        ids = tl.where(nowhere, 0, ids)
    if MODE == 2:
        ids = tl.where(masked, -1, ids)
    if MODE != 0:
        weights = tl.where(masked, 0.0, weights)
    o_out = o_row * TOP_K + o_k
    written = present & (o_k < TOP_K)
    if KEEP:
        tl.store(p_kept + o_out, ids, mask=written & keeps)
        written = written & (keeps == 0)
    tl.store(p_ids + o_out, ids, mask=written)
    tl.store(p_weights + o_out, weights, mask=written)


def router(
    logits_RE: torch.Tensor,
    top_k: int,
    *,
    renormalize: bool = True,
    lengths_B: torch.Tensor | None = None,
    mode: MaskMode = "alias",
    rows_per_request: int = 16,
    kept_RK: torch.Tensor | None = None,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
    dependent: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts of every row and their weights, rows past their request's length masked.

    One launch; reads nothing on the host and is safe to capture. A row with NaN or +inf among its
    logits gets valid ids and NaN weights, as in SGLang; masked, it gets weight 0. With fewer than K
    logits above -inf an id repeats, with weight 0.

    Args:
        logits_RE: bf16 or fp32 [R, E], entries of a row side by side; at most 512 experts. Or fp32
            [1..16, R, E], partial sums: added in order and rounded to bf16.
        top_k: at most 16 and at most E.
        renormalize: divide by the sum of the chosen probabilities.
        lengths_B: int32 [B] with B x rows_per_request = R, read on the device; None masks nothing.
            With `dependent`, the launch right ahead must not be what writes them.
        mode: of masked rows, see `route_mask`.
        kept_RK: int32 [R, K] for the ids without the mask.
        out: int32 and fp32 [R, K], allocated if None; contiguous like `kept_RK`.
        dependent: begin while the launch ahead ends; None: on sm_90 and later.

    Returns:
        Ids, int32, and weights, fp32, in descending order of logits.

    Raises:
        UsageError: shapes, dtypes, strides or a mode that do not fit.
    """
    if not fits(logits_RE, top_k):
        raise UsageError(
            f"top {top_k} of logits {logits_RE.dtype} {tuple(logits_RE.shape)} with strides "
            f"{logits_RE.stride()}; the router takes up to {MAX_TOP_K} of bfloat16 or float32 "
            f"[rows, up to {MAX_EXPERTS} experts], entries of a row side by side, or float32 "
            f"[up to {MAX_SPLITS} partial sums, rows, experts]"
        )
    num_rows, num_experts = logits_RE.shape[-2:]
    splits = len(logits_RE) if logits_RE.ndim == 3 else 0
    if mode not in MODES:
        raise UsageError(f"mask mode {mode!r} is unknown; take one of {', '.join(MODES)}")
    if out is None:
        ids_RK = torch.empty(num_rows, top_k, dtype=torch.int32, device=logits_RE.device)
        weights_RK = torch.empty(num_rows, top_k, dtype=torch.float32, device=logits_RE.device)
    else:
        ids_RK, weights_RK = out
    _check_output("ids", ids_RK, (num_rows, top_k), torch.int32)
    _check_output("weights", weights_RK, (num_rows, top_k), torch.float32)
    if kept_RK is not None:
        _check_output("kept ids", kept_RK, (num_rows, top_k), torch.int32)
    num_requests = 0
    if lengths_B is not None:
        check_routes(ids_RK, weights_RK, lengths_B, rows_per_request)
        num_requests = lengths_B.shape[0]
    if num_rows == 0:
        return ids_RK, weights_RK
    block_n = next_power_of_2(num_experts)
    block_m = rows_of_program(block_n)
    if dependent is None:
        dependent = dependent_on(logits_RE.device)
    extra = {"launch_pdl": True} if dependent else {}
    programs = -(-num_rows // block_m) * (1 if kept_RK is None else 2)
    router_kernel[(programs,)](
        logits_RE,
        ids_RK if lengths_B is None else lengths_B,
        ids_RK,
        weights_RK,
        ids_RK if kept_RK is None else kept_RK,
        num_rows,
        num_requests,
        logits_RE.stride(0) if splits else 0,
        logits_RE.stride(-2),
        NUM_EXPERTS=num_experts,
        BLOCK_N=block_n,
        TOP_K=top_k,
        BLOCK_K=next_power_of_2(top_k),
        RENORMALIZE=renormalize,
        NARROW=splits > 0 or logits_RE.dtype == torch.bfloat16,
        SPLITS=splits,
        BLOCK_M=block_m,
        ROWS=rows_per_request,
        MODE=0 if lengths_B is None else MODES[mode],
        KEEP=kept_RK is not None,
        BLOCK_REQUESTS=next_power_of_2(num_requests),
        DEPENDENT=dependent,
        num_warps=1,
        **extra,
    )
    return ids_RK, weights_RK


def fits(logits_RE: torch.Tensor, top_k: int) -> bool:
    """Whether `router` takes these logits."""
    if logits_RE.ndim not in (2, 3) or logits_RE.dtype not in LOGIT_DTYPES:
        return False
    if logits_RE.ndim == 3 and not (
        logits_RE.dtype == torch.float32 and 1 <= len(logits_RE) <= MAX_SPLITS
    ):
        return False
    num_experts = logits_RE.shape[-1]
    return (
        logits_RE.stride(-1) == 1
        and num_experts <= MAX_EXPERTS
        and 1 <= top_k <= min(MAX_TOP_K, num_experts)
    )


def rows_of_program(block_n: int) -> int:
    """Rows of a program as SGLang's router has them.

    The order in which a row is summed, and with it the last bit of a weight, depends on this.
    """
    return max(1, min(4, 256 // block_n))


@lru_cache(maxsize=8)
def dependent_on(device: torch.device) -> bool:
    """Whether launches on this device may begin while the one ahead ends."""
    if device.type != "cuda":
        return False
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor >= FIRST_WITH_DEPENDENT_LAUNCH


def _check_output(
    name: str, tensor: torch.Tensor, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    if tuple(tensor.shape) != shape or tensor.dtype != dtype or not tensor.is_contiguous():
        raise UsageError(
            f"{name} are {tensor.dtype} {tuple(tensor.shape)} with strides {tensor.stride()}; pass "
            f"contiguous {dtype} {shape}"
        )


def compile_cases() -> list[CompileCase]:
    """Top 8 of 256 experts and top 10 of 512, masked and plain, for requests of 16 rows."""
    cases = []
    kinds_of_logits = {"bf16": 0, "fp32": 0, "partial": 8}
    for experts, top_k in ((256, 8), (512, 10), (128, 8)):
        modes = ((0, False), (1, False), (1, True)) if experts == 256 else ((1, False),)
        for (kind, splits), (mode, keep), architecture in product(
            kinds_of_logits.items(), modes, (80, 90)
        ):
            dependent = architecture >= FIRST_WITH_DEPENDENT_LAUNCH
            block_n = next_power_of_2(experts)
            constexprs = {
                "NUM_EXPERTS": experts,
                "BLOCK_N": block_n,
                "TOP_K": top_k,
                "BLOCK_K": next_power_of_2(top_k),
                "RENORMALIZE": True,
                "NARROW": kind != "fp32",
                "SPLITS": splits,
                "BLOCK_M": rows_of_program(block_n),
                "ROWS": 16,
                "MODE": mode,
                "KEEP": keep,
                "BLOCK_REQUESTS": 1,
                "DEPENDENT": dependent,
            }
            kinds = {
                "p_logits": "*bf16" if kind == "bf16" else "*fp32",
                "p_lengths": "*i32",
                "p_ids": "*i32",
                "p_weights": "*fp32",
                "p_kept": "*i32",
            }
            numbers = ("num_rows", "num_requests", "stride_split", "stride_row")
            kinds |= dict.fromkeys(numbers, "i32")
            kinds |= dict.fromkeys(constexprs, "constexpr")
            cases.append(
                CompileCase(
                    f"router-{top_k}-of-{experts}-{kind}-mode{mode}-keep{int(keep)}",
                    router_kernel,
                    kinds,
                    constexprs,
                    divisible_by_16=frozenset({"stride_split", "stride_row"}),
                    num_warps=1,
                    dependent_launch=dependent,
                    architectures=(architecture,),
                )
            )
    return cases
