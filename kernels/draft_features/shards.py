"""Merging the parts of vocabulary shards that ranks gathered: one launch, one warp a row."""

# pyright: reportGeneralTypeIssues=false, reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hybridspec.errors import UsageError
from hybridspec.kernels.compilation import CompileCase
from hybridspec.kernels.draft_features.parts import merge, probabilities
from hybridspec.kernels.draft_features.rows import NUM_FIELDS, DraftFeatures, next_power_of_2


@triton.jit
def merge_kernel(
    p_parts,
    p_tokens,
    p_p1,
    p_p2,
    p_entropy,
    stride_shard,
    SHARDS: tl.constexpr,
    SHARDS_PADDED: tl.constexpr,
    FIELDS: tl.constexpr,
):
    """Grid (rows,)."""
    i_row = tl.program_id(0).to(tl.int64)
    o_shard = tl.arange(0, SHARDS_PADDED)
    mask = o_shard < SHARDS
    p_all = p_parts + o_shard.to(tl.int64) * stride_shard + i_row * FIELDS
    none = -float("inf")
    b_best = tl.load(p_all, mask, other=none)
    b_second = tl.load(p_all + 1, mask, other=none)
    b_token = tl.load(p_all + 2, mask, other=float("inf"))
    b_sum = tl.load(p_all + 3, mask, other=0.0)
    b_weighted = tl.load(p_all + 4, mask, other=0.0)
    best, second, token, total, weighted = merge(b_best, b_second, b_token, b_sum, b_weighted)
    p1, p2, entropy = probabilities(best, second, total, weighted)
    tl.store(p_tokens + i_row, token.to(tl.int32))
    tl.store(p_p1 + i_row, p1)
    tl.store(p_p2 + i_row, p2)
    tl.store(p_entropy + i_row, entropy)


def merge_shards(parts_SRF: torch.Tensor, *, out: DraftFeatures | None = None) -> DraftFeatures:
    """Features of R rows from the parts of S vocabulary shards, the same bits on every rank.

    Args:
        parts_SRF: fp32 [S, R, 5] from `row_parts`, gathered in the order of the ranks.
        out: where to write; None allocates.

    Raises:
        UsageError: a shape, dtype or stride that the kernel does not take.
    """
    if (
        parts_SRF.ndim != 3
        or parts_SRF.shape[2] != NUM_FIELDS
        or parts_SRF.dtype != torch.float32
        or not parts_SRF.is_contiguous()
        or parts_SRF.shape[0] == 0
    ):
        raise UsageError(
            f"parts are {tuple(parts_SRF.shape)} {parts_SRF.dtype}: "
            f"pass dense fp32 [shards, rows, {NUM_FIELDS}]"
        )
    shards, rows, _ = parts_SRF.shape
    if out is None:
        out = DraftFeatures.empty(rows, parts_SRF.device)
    out.check(rows)
    if rows == 0:
        return out
    merge_kernel[(rows,)](
        parts_SRF,
        out.tokens_R,
        out.p1_R,
        out.p2_R,
        out.entropy_R,
        parts_SRF.stride(0),
        SHARDS=shards,
        SHARDS_PADDED=next_power_of_2(shards),
        FIELDS=NUM_FIELDS,
        num_warps=1,
    )
    return out


def compile_cases() -> list[CompileCase]:
    """Shipped configurations: 2, 4 and 8 ranks."""
    cases = []
    for shards in (2, 4, 8):
        constexprs = {"SHARDS": shards, "SHARDS_PADDED": shards, "FIELDS": NUM_FIELDS}
        signature = {
            "p_parts": "*fp32",
            "p_tokens": "*i64",
            **dict.fromkeys(("p_p1", "p_p2", "p_entropy"), "*fp32"),
            "stride_shard": "i32",
            **dict.fromkeys(constexprs, "constexpr"),
        }
        cases.append(
            CompileCase(f"merge-{shards}-shards", merge_kernel, signature, constexprs, num_warps=1)
        )
    return cases
