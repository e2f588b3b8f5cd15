"""Verify lengths of a round from draft signals, chosen on the device in one launch.

`argmax_L E(L) - lam T(L)` for every request, ties to the shorter length. A request is a
program of one warp: a lane is a draft position and one of its two logarithms, so that nothing waits
for another warp.
Derivation and order of the operations: README.md beside this file.
"""

# Launch options and static ranges are not in triton's annotations.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hybridspec.kernels.compilation import CompileCase
from hybridspec.kernels.select.scoring import (
    batch_row,
    context_rows,
    is_finite,
    request_survival,
    shortest_best,
)
from hybridspec.kernels.select.selection import Selection, check_selection, check_signals
from hybridspec.kernels.select.tables import DeviceTables


@triton.jit(do_not_specialize=["num_requests", "stride_p1", "stride_p2", "stride_entropy"])
def select_kernel(
    p_p1,
    p_p2,
    p_entropy,
    p_context,
    p_caps,
    p_lam,
    p_batch_size,
    p_tables,
    p_hazards,
    p_lengths,
    p_expected,
    p_score,
    p_survival,
    p_price,
    p_fallback,
    num_requests,
    stride_p1,
    stride_p2,
    stride_entropy,
    stride_tables,
    KNOTS: tl.constexpr,
    LOG_KNOTS: tl.constexpr,
    BATCHES: tl.constexpr,
    CONTEXTS: tl.constexpr,
    LAM_GIVEN: tl.constexpr,
    HAZARDS_GIVEN: tl.constexpr,
    REQUESTS: tl.constexpr,
):
    """One program takes REQUESTS requests; see `select` for the arguments."""
    i_request = tl.program_id(0) * REQUESTS + tl.arange(0, REQUESTS)[:, None]
    o_position = tl.arange(0, 16)[None, :]
    present = i_request < num_requests
    p_mine = p_tables + i_request.to(tl.int64) * stride_tables
    p_mine = tl.where(present, p_mine, p_tables)
    p_batches = p_mine + 56 + 3 * KNOTS
    p_contexts = p_batches + 3 * BATCHES
    p_latency = p_contexts + CONTEXTS
    context = tl.load(p_context + i_request, mask=present, other=0)
    cap = tl.load(p_caps + i_request, mask=present, other=0)
    batch_size = tl.load(p_batch_size + tl.zeros_like(i_request))
    context = tl.where(context > 0, context, 0)

    batch = batch_row(p_batches, batch_size, BATCHES)
    left, right, share = context_rows(p_contexts, context, CONTEXTS)
    p_row = p_latency + batch * (CONTEXTS * 17) + 1 + o_position
    at_left = tl.load(p_row + left * 17)
    at_right = tl.load(p_row + right * 17)
    if LAM_GIVEN:
        lam = tl.load(p_lam + i_request, mask=present, other=0.0).to(tl.float64)
    else:
        lam = tl.load(p_batches + BATCHES + batch)
    fixed = tl.load(p_batches + 2 * BATCHES + batch).to(tl.int32)
    static = tl.load(p_mine + 5) != 0.0

    survival, expected, broken = request_survival(
        p_hazards,
        p_p1,
        p_p2,
        p_entropy,
        p_mine,
        i_request,
        context,
        present,
        stride_p1,
        stride_p2,
        stride_entropy,
        KNOTS,
        LOG_KNOTS,
        HAZARDS_GIVEN,
        REQUESTS,
    )
    broken = broken | ~is_finite(lam)
    lam = tl.where(is_finite(lam), lam, 0.0)
    latency = at_left * (1.0 - share) + at_right * share
    score = expected - lam * latency

    length = shortest_best(score, (o_position < cap) | (o_position == 0)) + 1
    fixed = tl.where(fixed > 1, fixed, 1)
    fixed = tl.where(fixed < cap, fixed, cap)
    active = cap > 0
    fallback = tl.where(static, 2, broken.to(tl.int32))
    fallback = tl.where(active, fallback, 0)
    length = tl.where(fallback != 0, fixed, length)
    length = tl.where(active, length, 0)

    o_tile = i_request.to(tl.int64) * 16 + o_position
    tl.store(p_lengths + i_request, length, mask=present)
    tl.store(p_fallback + i_request, fallback, mask=present)
    tl.store(p_price + i_request, lam, mask=present)
    tl.store(p_expected + o_tile, expected, mask=present)
    tl.store(p_score + o_tile, score, mask=present)
    tl.store(p_survival + o_tile, survival, mask=present)


def select(
    p1_BD: torch.Tensor,
    p2_BD: torch.Tensor,
    entropy_BD: torch.Tensor,
    context_tokens_B: torch.Tensor,
    caps_B: torch.Tensor,
    batch_size: torch.Tensor,
    tables: DeviceTables,
    *,
    lam_B: torch.Tensor | None = None,
    hazards_BD: torch.Tensor | None = None,
    out: Selection | None = None,
    requests_per_program: int = 1,
) -> Selection:
    """Verify lengths that maximise E(L) - lam T(L) for each request; ties go to the shorter one.

    Args:
        p1_BD, p2_BD, entropy_BD: draft signals, fp32 [B, 15], rows in one piece.
        context_tokens_B: int32 [B], position of each anchor.
        caps_B: int32 [B], longest allowed length; 0 or less marks an inactive request.
        batch_size: int32 [1], requests that the round is priced for.
        tables: packed tables.
        lam_B: price of time of each request in tokens/us, fp32 or fp64; by default the table's.
        hazards_BD: fp64 [B, 15] of another model (`kernels/hazard_trees`), taken in place of the
            tables' own; the draft signals are not read then. NaN, or a hazard outside [0, 1], is a
            broken signal.
        out: buffers to write; all of them are overwritten.
        requests_per_program: a power of two.

    Raises:
        UsageError: shapes, dtypes or devices that do not fit.
    """
    check_signals(p1_BD, p2_BD, entropy_BD, context_tokens_B, caps_B, batch_size, lam_B, hazards_BD)
    num_requests = p1_BD.shape[0]
    stride_tables = tables.row_stride(num_requests)
    out = out or Selection.allocate(num_requests, p1_BD.device)
    check_selection(out, num_requests)
    if num_requests == 0:
        return out
    select_kernel[(triton.cdiv(num_requests, requests_per_program),)](
        p1_BD,
        p2_BD,
        entropy_BD,
        context_tokens_B,
        caps_B,
        out.price_B if lam_B is None else lam_B,
        batch_size,
        tables.values_TP,
        out.price_B if hazards_BD is None else hazards_BD,
        out.lengths_B,
        out.expected_BL,
        out.score_BL,
        out.survival_BL,
        out.price_B,
        out.fallback_B,
        num_requests,
        p1_BD.stride(0),
        p2_BD.stride(0),
        entropy_BD.stride(0),
        stride_tables,
        KNOTS=tables.knots,
        LOG_KNOTS=tables.knots.bit_length() - 1,
        BATCHES=tables.batches,
        CONTEXTS=tables.contexts,
        LAM_GIVEN=lam_B is not None,
        HAZARDS_GIVEN=hazards_BD is not None,
        REQUESTS=requests_per_program,
        num_warps=1,
        enable_fp_fusion=False,
    )
    return out


def signature(*, lam: str, tables: str = "*fp64") -> dict[str, str]:
    """Types of the arguments of `select_kernel` and its joint form."""
    pointers = {
        "p_p1": "*fp32",
        "p_p2": "*fp32",
        "p_entropy": "*fp32",
        "p_context": "*i32",
        "p_caps": "*i32",
        "p_lam": lam,
        "p_batch_size": "*i32",
        "p_tables": tables,
        "p_hazards": "*fp64",
        "p_lengths": "*i32",
        "p_expected": "*fp64",
        "p_score": "*fp64",
        "p_survival": "*fp64",
        "p_price": "*fp64",
        "p_fallback": "*i32",
    }
    numbers = ("num_requests", "stride_p1", "stride_p2", "stride_entropy", "stride_tables")
    return {**pointers, **dict.fromkeys(numbers, "i32")}


def compile_cases() -> list[CompileCase]:
    """Shipped configurations of the per-request form."""
    cases = []
    for lam, knots, given in (
        ("*fp32", 8, False),
        ("*fp32", 64, False),
        ("*fp64", 8, False),
        ("*fp64", 64, False),
        ("*fp64", 64, True),
    ):
        constexprs = {
            "KNOTS": knots,
            "LOG_KNOTS": knots.bit_length() - 1,
            "BATCHES": 4,
            "CONTEXTS": 6,
            "LAM_GIVEN": True,
            "HAZARDS_GIVEN": given,
            "REQUESTS": 1,
        }
        kinds = signature(lam=lam) | dict.fromkeys(constexprs, "constexpr")
        cases.append(
            CompileCase(
                f"select-{lam[1:]}-{knots}-{given}", select_kernel, kinds, constexprs, num_warps=1
            )
        )
    return cases
