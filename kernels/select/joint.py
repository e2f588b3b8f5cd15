"""Verify lengths of a batch chosen together: the round's time depends on all of them.

Maximises `sum_i E_i(L_i) - (sum_i lam_i) T(R / n)` over all lengths of the n active requests, where
R is the sum of the lengths and T is the measured time at R / n rows a request, linear between whole
lengths. Survivals do not rise along a request, so for every R the best allocation is the R largest
survivals: they are sorted once and every R is scored. One launch, one program a round. Why the sums
are integers: README.md beside this file.
"""

# Launch options and static ranges are not in triton's annotations.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hybridspec.errors import UsageError
from hybridspec.kernels.compilation import CompileCase
from hybridspec.kernels.route_mask.route_mask import next_power_of_2
from hybridspec.kernels.select.scoring import (
    TIE_TOKENS,
    batch_row,
    context_rows,
    is_finite,
    request_survival,
)
from hybridspec.kernels.select.select import signature
from hybridspec.kernels.select.selection import (
    Selection,
    check_selection,
    check_signals,
    require_column,
)
from hybridspec.kernels.select.tables import DeviceTables

MAX_REQUESTS = 64
# Fixed point of survivals and of lam: sums of 64 requests are exact in int64, in any order.
GAIN_SCALE_VALUE = float(2**40)
LAM_SCALE_VALUE = float(2**50)
LARGEST_LAM_VALUE = 64.0
GAIN_SCALE = tl.constexpr(GAIN_SCALE_VALUE)
GAIN_UNIT = tl.constexpr(1.0 / GAIN_SCALE_VALUE)
LAM_SCALE = tl.constexpr(LAM_SCALE_VALUE)
LAM_UNIT = tl.constexpr(1.0 / LAM_SCALE_VALUE)
LARGEST_LAM = tl.constexpr(LARGEST_LAM_VALUE)


@triton.jit
def sort_descending(keys, SIZE: tl.constexpr, LOG_SIZE: tl.constexpr):
    """Bitonic sort of int64 [SIZE], largest first."""
    o_key = tl.arange(0, SIZE)
    for stage in tl.static_range(1, LOG_SIZE + 1):
        for step in tl.static_range(stage):
            distance = 1 << (stage - 1 - step)
            partner = tl.gather(keys, o_key ^ distance, axis=0)
            keeps_larger = ((o_key & distance) == 0) == ((o_key & (1 << stage)) == 0)
            keys = tl.where((keys > partner) == keeps_larger, keys, partner)
    return keys


@triton.jit
def mean_row_latency(p_latency, rows, num_active, left, right, share):
    """T at rows / num_active rows a request in us, linear between whole lengths, flat beyond 16."""
    whole = rows // num_active
    part = (rows - whole * num_active).to(tl.float64) / num_active.to(tl.float64)
    whole = tl.where(whole < 1, 1, whole)
    whole = tl.where(whole > 16, 16, whole)
    after = tl.where(whole < 16, whole + 1, 16)
    here = tl.load(p_latency + left * 17 + whole) * (1.0 - share)
    here = here + tl.load(p_latency + right * 17 + whole) * share
    there = tl.load(p_latency + left * 17 + after) * (1.0 - share)
    there = there + tl.load(p_latency + right * 17 + after) * share
    return here * (1.0 - part) + there * part


@triton.jit(do_not_specialize=["num_requests", "stride_p1", "stride_p2", "stride_entropy"])
def joint_kernel(
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
    LOG_SIZE: tl.constexpr,
):
    """One program takes a round of up to REQUESTS requests; see `select_jointly`."""
    i_round = tl.program_id(0)
    i_local = tl.arange(0, REQUESTS)[:, None]
    o_position = tl.arange(0, 16)[None, :]
    present = i_local < num_requests
    i_request = i_round * num_requests + i_local
    p_mine = p_tables + i_round.to(tl.int64) * stride_tables
    p_batches = p_mine + 56 + 3 * KNOTS
    p_contexts = p_batches + 3 * BATCHES
    context = tl.load(p_context + i_request, mask=present, other=0)
    context = tl.where(context > 0, context, 0)
    cap = tl.load(p_caps + i_request, mask=present, other=0)
    cap = tl.where(cap > 0, cap, 0)
    cap = tl.where(cap < 16, cap, 16)
    batch_size = tl.load(p_batch_size + i_round + tl.zeros([1, 1], tl.int32))
    active = cap > 0
    num_active = tl.sum(active.to(tl.int32), axis=0, keep_dims=True)
    divisor = tl.where(num_active > 1, num_active, 1)
    total_context = tl.sum(tl.where(active, context, 0).to(tl.int64), axis=0, keep_dims=True)
    mean_context = (total_context // divisor).to(tl.int32)

    batch = batch_row(p_batches, batch_size, BATCHES)
    left, right, share = context_rows(p_contexts, mean_context, CONTEXTS)
    p_latency = p_contexts + CONTEXTS + batch * (CONTEXTS * 17)
    if LAM_GIVEN:
        lam = tl.load(p_lam + i_request, mask=present, other=0.0).to(tl.float64)
    else:
        lam = tl.load(p_batches + BATCHES + batch + i_local * 0)
    fixed = tl.load(p_batches + 2 * BATCHES + batch).to(tl.int32)
    static = tl.load(p_mine + 5) != 0.0
    survival, expected, broken = request_survival(
        p_hazards,
        p_p1,
        p_p2,
        p_entropy,
        p_mine + i_local * 0,
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
    lam = tl.where(is_finite(lam) & active & (lam > 0.0), lam, 0.0)
    lam = tl.where(lam < LARGEST_LAM, lam, LARGEST_LAM)
    lam_units = tl.sum(tl.floor(lam * LAM_SCALE).to(tl.int64), axis=0, keep_dims=True)
    total_lam = lam_units.to(tl.float64) * LAM_UNIT
    fallback = tl.where(active, tl.where(static, 2, broken.to(tl.int32)), 0)
    fixed = tl.where(fixed > 1, fixed, 1)
    fixed = tl.where(fixed < cap, fixed, cap)
    least = tl.where(fallback != 0, fixed, active.to(tl.int32))
    least_rows = tl.sum(least, axis=0, keep_dims=True)

    # Larger gain first, then the earlier position, then the earlier request: keys are unique.
    candidate = (o_position > 0) & (o_position < cap) & (fallback == 0)
    gain = tl.floor(survival * GAIN_SCALE).to(tl.int64)
    keys = gain * 1024 + (1023 - (o_position * 64 + i_local)).to(tl.int64)
    keys = tl.where(candidate, keys, -1)
    ranked = sort_descending(tl.reshape(keys, [REQUESTS * 16]), REQUESTS * 16, LOG_SIZE)
    ranked_gain = tl.where(ranked >= 0, ranked >> 10, 0)
    before = tl.reshape(tl.cumsum(ranked_gain, axis=0) - ranked_gain, [REQUESTS, 16])
    candidates = tl.sum(candidate.to(tl.int32), axis=1, keep_dims=True)
    candidates = tl.sum(candidates, axis=0, keep_dims=True)
    extra = i_local * 16 + o_position
    emitted = num_active.to(tl.float64) + before.to(tl.float64) * GAIN_UNIT
    rows = least_rows + extra
    objective = emitted - total_lam * mean_row_latency(p_latency, rows, divisor, left, right, share)
    allowed = extra <= candidates
    objective = tl.where(allowed, objective, float("-inf"))
    best = tl.max(tl.max(objective, axis=1, keep_dims=True), axis=0, keep_dims=True)
    near_best = tl.where(allowed & (objective >= best - TIE_TOKENS), extra, REQUESTS * 16)
    chosen = tl.min(tl.min(near_best, axis=1, keep_dims=True), axis=0, keep_dims=True)

    at_last = tl.reshape(ranked, [REQUESTS, 16])
    at_last = tl.where(extra == chosen - 1, at_last, 0)
    last_key = tl.sum(tl.sum(at_last, axis=1, keep_dims=True), axis=0, keep_dims=True)
    taken = candidate & (chosen > 0) & (keys >= last_key)
    length = least + tl.sum(taken.to(tl.int32), axis=1, keep_dims=True)

    others = least_rows + chosen - length
    score = expected - total_lam * mean_row_latency(
        p_latency, others + 1 + o_position, divisor, left, right, share
    )
    o_tile = i_request.to(tl.int64) * 16 + o_position
    tl.store(p_lengths + i_request, length, mask=present)
    tl.store(p_fallback + i_request, fallback, mask=present)
    tl.store(p_price + i_request, total_lam + lam * 0.0, mask=present)
    tl.store(p_expected + o_tile, expected, mask=present)
    tl.store(p_score + o_tile, score, mask=present)
    tl.store(p_survival + o_tile, survival, mask=present)


def select_jointly(
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
) -> Selection:
    """Verify lengths of one round's requests that maximise its objective; ties to fewer rows.

    Arguments are those of `select`, for at most 64 requests. `batch_size` may hold several numbers:
    the requests are then as many equal runs of independent rounds, and the tables one row for all
    or one a round.

    The score of a request is that of its length with all other lengths as chosen, and the price the
    sum of lam over the round, so `correct` goes on from here as from `select`. A request that falls
    back keeps its fixed rows, and the others are chosen around them. lam is taken within [0, 64].

    Raises:
        UsageError: shapes, dtypes or devices that do not fit, or more than 64 requests.
    """
    total, rounds = p1_BD.shape[0], batch_size.shape[0]
    require_column("batch size", batch_size, rounds, (torch.int32,))
    check_signals(
        p1_BD, p2_BD, entropy_BD, context_tokens_B, caps_B, batch_size[:1], lam_B, hazards_BD
    )
    if total % max(rounds, 1) or not 0 < total // max(rounds, 1) <= MAX_REQUESTS:
        raise UsageError(
            f"{total} requests in {rounds} rounds; expected 1..{MAX_REQUESTS} in each: split the "
            "batch or choose lengths with select"
        )
    out = out or Selection.allocate(total, p1_BD.device)
    check_selection(out, total)
    requests = next_power_of_2(total // rounds)
    joint_kernel[(rounds,)](
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
        total // rounds,
        p1_BD.stride(0),
        p2_BD.stride(0),
        entropy_BD.stride(0),
        tables.row_stride(rounds),
        KNOTS=tables.knots,
        LOG_KNOTS=tables.knots.bit_length() - 1,
        BATCHES=tables.batches,
        CONTEXTS=tables.contexts,
        LAM_GIVEN=lam_B is not None,
        HAZARDS_GIVEN=hazards_BD is not None,
        REQUESTS=requests,
        LOG_SIZE=requests.bit_length() + 3,
        num_warps=warps_for(requests),
        enable_fp_fusion=False,
    )
    return out


def warps_for(requests: int) -> int:
    """Warps of a round of so many requests: four positions a lane, at most eight warps."""
    return max(1, min(8, requests // 8))


def compile_cases() -> list[CompileCase]:
    """Shipped configurations: rounds of 4, 8, 32 and 64 requests."""
    cases = []
    for requests in (4, 8, 32, 64):
        constexprs = {
            "KNOTS": 64,
            "LOG_KNOTS": 6,
            "BATCHES": 4,
            "CONTEXTS": 6,
            "LAM_GIVEN": True,
            "HAZARDS_GIVEN": False,
            "REQUESTS": requests,
            "LOG_SIZE": requests.bit_length() + 3,
        }
        kinds = signature(lam="*fp64") | dict.fromkeys(constexprs, "constexpr")
        cases.append(
            CompileCase(
                f"joint-{requests}", joint_kernel, kinds, constexprs, num_warps=warps_for(requests)
            )
        )
    return cases
