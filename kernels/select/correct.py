"""Final lengths of a round from the experts that the first router chose, in one launch.

Counts the distinct experts of every prefix of a request's rows, prices what is unusual about them
and scores the lengths at hand again. May also mask layer 0's routes past the final length, which
saves a launch. One program of one warp a request; integers only until the score, so that the counts
do not depend on an order. Derivation: README.md beside this file.
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
from hybridspec.kernels.route_mask.route_mask import (
    MODES,
    MaskMode,
    check_routes,
    first_active,
    mask_rows,
    next_power_of_2,
)
from hybridspec.kernels.select.scoring import shortest_best
from hybridspec.kernels.select.selection import Selection, require_column
from hybridspec.kernels.select.tables import BLOCK_SIZE, DeviceTables

Rule = Literal["select", "paper", "off"]
RULES: dict[str, int] = {"off": 0, "select": 1, "paper": 2}
MAX_EXPERTS = 512


@triton.jit
def popcount(word):
    """Set bits of uint32 words, as int32."""
    word = word - ((word >> 1) & 0x55555555)
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    word = (word + (word >> 4)) & 0x0F0F0F0F
    word = word + (word >> 8)
    return ((word + (word >> 16)) & 0x3F).to(tl.int32)


@triton.jit
def distinct_of_prefixes(
    p_ids,
    i_request,
    i_row,
    rows_at_hand,
    present,
    num_experts,
    stride_request,
    stride_row,
    TOP_K: tl.constexpr,
    WORDS: tl.constexpr,
    REQUESTS: tl.constexpr,
):
    """Distinct experts of rows 0..row of each request, int32 [REQUESTS x 16].

    A row's experts are a bit mask of WORDS x 32 experts; the masks of a prefix are joined in four
    steps of doubling reach. Arguments are [REQUESTS x 16].
    """
    o_word = tl.arange(0, WORDS)[None, :]
    seen = tl.zeros([REQUESTS * 16, WORDS], tl.uint32)
    p_row = p_ids + i_request.to(tl.int64) * stride_request + i_row * stride_row
    for k in tl.static_range(TOP_K):
        expert = tl.load(p_row + k, mask=present, other=-1).to(tl.int32)
        known = (expert >= 0) & (expert < num_experts) & (i_row < rows_at_hand)
        bit = tl.full([REQUESTS * 16], 1, tl.uint32) << (expert & 31).to(tl.uint32)
        here = known[:, None] & ((expert >> 5)[:, None] == o_word)
        seen |= tl.where(here, bit[:, None], tl.zeros_like(seen))
    first_row = tl.arange(0, REQUESTS * 16) - i_row
    for step in tl.static_range(4):
        earlier = i_row - (1 << step)
        # Row 0 belongs to every prefix, so it may stand in for rows before it.
        earlier = first_row + tl.where(earlier > 0, earlier, 0)
        index = earlier[:, None] + tl.zeros([REQUESTS * 16, WORDS], tl.int32)
        seen |= tl.gather(seen, index, axis=0)
    return tl.sum(popcount(seen), axis=1)


@triton.jit(do_not_specialize=["num_requests", "num_experts", "lookahead"])
def correct_kernel(
    p_ids,
    p_weights,
    p_lengths,
    p_score,
    p_price,
    p_fallback,
    p_caps,
    p_tables,
    p_final,
    p_distinct,
    num_requests,
    num_experts,
    lookahead,
    stride_request,
    stride_row,
    stride_weights,
    stride_tables,
    TOP_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WORDS: tl.constexpr,
    RULE: tl.constexpr,
    MASK: tl.constexpr,
    REQUESTS: tl.constexpr,
    BLOCK_REQUESTS: tl.constexpr,
):
    """One program takes REQUESTS requests; see `correct` for the arguments."""
    o_flat = tl.arange(0, REQUESTS * 16)
    i_row = o_flat % 16
    i_request = tl.program_id(0) * REQUESTS + o_flat // 16
    present = i_request < num_requests
    length = tl.load(p_lengths + i_request, mask=present, other=0)
    cap = tl.load(p_caps + i_request, mask=present, other=0)
    fallback = tl.load(p_fallback + i_request, mask=present, other=0)
    price = tl.load(p_price + i_request, mask=present, other=0.0)
    o_tile = i_request.to(tl.int64) * 16 + i_row
    selected = tl.load(p_score + o_tile, mask=present, other=0.0)
    p_mine = p_tables + i_request.to(tl.int64) * stride_tables + i_row
    mean = tl.load(p_mine + 24, mask=present, other=0.0)
    expert_price = tl.load(p_mine + 40, mask=present, other=0.0)

    cap = tl.where(cap < 16, cap, 16)
    rows = length
    if RULE != 0:
        ahead = length + lookahead
        ahead = tl.where(ahead < cap, ahead, cap)
        rows = tl.where((length > 1) & (length < cap) & (fallback == 0), ahead, length)
    distinct = distinct_of_prefixes(
        p_ids,
        i_request,
        i_row,
        rows,
        present,
        num_experts,
        stride_request,
        stride_row,
        TOP_K,
        WORDS,
        REQUESTS,
    )
    distinct = tl.where(i_row < rows, distinct, 0)
    tl.store(p_distinct + o_tile, distinct, mask=present)

    final = tl.reshape(length, [REQUESTS, 16])
    if RULE != 0:
        surplus = (distinct.to(tl.float64) - mean) * expert_price
        score = selected - price * surplus
        allowed = i_row < rows
        if RULE == 2:
            allowed = allowed & (i_row >= length - 1)
        best = shortest_best(
            tl.reshape(score, [REQUESTS, 16]), tl.reshape(allowed.to(tl.int32), [REQUESTS, 16]) != 0
        )
        keeps = tl.reshape(((length <= 1) | (fallback != 0)).to(tl.int32), [REQUESTS, 16]) != 0
        final = tl.where(keeps, final, best + 1)
    final = tl.reshape(final, [REQUESTS * 16])
    tl.store(p_final + i_request, final, mask=present & (i_row == 0))

    if MASK != 0:
        i_first = tl.program_id(0) * 0 + num_requests
        if MASK == 1:
            i_first = first_active(p_lengths, num_requests, BLOCK_REQUESTS)
        mask_rows(
            p_ids,
            p_weights,
            p_ids,
            p_weights,
            i_request[:, None],
            i_row[:, None],
            final[:, None],
            present[:, None],
            i_first,
            num_requests,
            stride_row,
            stride_weights,
            stride_row,
            stride_weights,
            16,
            TOP_K,
            BLOCK_K,
            MASK,
            False,
        )


def correct(
    experts_BRK: torch.Tensor,
    selection: Selection,
    caps_B: torch.Tensor,
    tables: DeviceTables,
    *,
    num_experts: int,
    rule: Rule = "select",
    lookahead: int = 1,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
    mask: tuple[MaskMode, torch.Tensor] | None = None,
    requests_per_program: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Lengths after the first router saw rows 0..L + lookahead - 1; ties to the shorter one.

    Scores `E(k) - lam (T(k) + c_k (distinct_k - mean_k))` for every k up to the rows at hand, which
    are L + lookahead but never more than the cap, and L alone where L is 1, the cap or a fallback.

    Args:
        experts_BRK: int32 or int64 [B, >= 16, K], the first router's experts; entries of a row side
            by side, rows past those at hand may hold anything. Ids outside [0, num_experts) are
            ignored.
        selection: what select wrote for this round.
        caps_B: int32 [B], as given to select.
        tables: as given to select.
        num_experts: of a layer, at most 512.
        rule: `select` scores all lengths at hand, `paper` L and L + lookahead and those between,
            `off` keeps L and only counts.
        lookahead: rows beyond L that the router saw.
        out: int32 [B] final lengths and int32 [B, 16] distinct experts of every prefix at hand (0
            past it).
        mask: a mode of `route_mask` and the weights [B, 16, K] in place: routes past the final
            length are then masked in `experts_BRK` and there.
        requests_per_program: a power of two.

    Returns:
        Final lengths and distinct counts.

    Raises:
        UsageError: shapes, dtypes, strides or rules that do not fit.
    """
    num_requests, rows, top_k = experts_BRK.shape
    if rule not in RULES or not 1 <= num_experts <= MAX_EXPERTS or lookahead < 0:
        raise UsageError(
            f"rule {rule!r} with {num_experts} experts and lookahead {lookahead}; expected one of "
            f"{', '.join(RULES)}, 1..{MAX_EXPERTS} experts and a lookahead of at least 0"
        )
    if rows < BLOCK_SIZE or experts_BRK.stride(2) != 1:
        raise UsageError(f"routes have {rows} rows a request; expected at least {BLOCK_SIZE}")
    if experts_BRK.dtype not in (torch.int32, torch.int64):
        raise UsageError(f"expert ids are {experts_BRK.dtype}; expected int32 or int64")
    require_column("lengths", selection.lengths_B, num_requests, (torch.int32,))
    require_column("caps", caps_B, num_requests, (torch.int32,))
    if out is None:
        final = torch.empty_like(selection.lengths_B)
        out = final, final.new_empty(num_requests, BLOCK_SIZE)
    final_B, distinct_BL = out
    require_column("final lengths", final_B, num_requests, (torch.int32,))
    if distinct_BL.shape != (num_requests, BLOCK_SIZE) or not distinct_BL.is_contiguous():
        raise UsageError(f"counts are {tuple(distinct_BL.shape)}; expected contiguous [B, 16]")
    weights, stride_weights, mode = experts_BRK, 0, 0
    if mask is not None:
        weights, mode = mask[1], MODES[mask[0]]
        if rows != BLOCK_SIZE or experts_BRK.stride(0) != rows * experts_BRK.stride(1):
            raise UsageError("masking in the same launch takes exactly 16 evenly spaced rows")
        check_routes(
            experts_BRK.view(-1, top_k), weights.view(-1, top_k), selection.lengths_B, rows
        )
        stride_weights = weights.stride(1)
    if num_requests == 0:
        return out
    correct_kernel[(triton.cdiv(num_requests, requests_per_program),)](
        experts_BRK,
        weights,
        selection.lengths_B,
        selection.score_BL,
        selection.price_B,
        selection.fallback_B,
        caps_B,
        tables.values_TP,
        final_B,
        distinct_BL,
        num_requests,
        num_experts,
        lookahead,
        experts_BRK.stride(0),
        experts_BRK.stride(1),
        stride_weights,
        tables.row_stride(num_requests),
        TOP_K=top_k,
        BLOCK_K=next_power_of_2(top_k),
        WORDS=next_power_of_2(-(-num_experts // 32)),
        RULE=RULES[rule],
        MASK=mode,
        REQUESTS=requests_per_program,
        BLOCK_REQUESTS=next_power_of_2(num_requests),
        num_warps=1,
        enable_fp_fusion=False,
    )
    return out


def compile_cases() -> list[CompileCase]:
    """Shipped configurations: top-8 of 256 and of 512 experts, with and without the mask."""
    names = (
        "p_ids p_weights p_lengths p_score p_price p_fallback p_caps p_tables p_final p_distinct"
    )
    numbers = "num_requests num_experts lookahead stride_request stride_row stride_weights"
    cases = []
    for words, rule, mode in ((8, "select", 0), (8, "paper", 1), (16, "select", 1), (8, "off", 2)):
        kinds = dict.fromkeys((*names.split(), "p_distinct"), "*i32") | {"p_weights": "*fp32"}
        kinds |= dict.fromkeys(("p_score", "p_price", "p_tables"), "*fp64")
        kinds |= dict.fromkeys((*numbers.split(), "stride_tables"), "i32")
        constexprs = {
            "TOP_K": 8,
            "BLOCK_K": 8,
            "WORDS": words,
            "RULE": RULES[rule],
            "MASK": mode,
            "REQUESTS": 1,
            "BLOCK_REQUESTS": 32,
        }
        kinds |= dict.fromkeys(constexprs, "constexpr")
        name = f"correct-{rule}-{words * 32}-mask{mode}"
        cases.append(CompileCase(name, correct_kernel, kinds, constexprs, num_warps=1))
    return cases
