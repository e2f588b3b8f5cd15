"""Second launch of the small-batch MoE: down projection, summed over experts without atomics."""

# Triton's decorators and constexprs are outside what pyright can follow.
# pyright: reportGeneralTypeIssues=false, reportCallIssue=false
# pyright: reportAttributeAccessIssue=false, reportAssignmentType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hybridspec.kernels.compilation import CompileCase
from hybridspec.kernels.interpreter import dot
from hybridspec.kernels.small_moe.tiles import Tiles, padded_rows, tiles_for


@triton.jit(do_not_specialize=["num_rows"])
def down_kernel(
    p_hidden,
    p_down,
    p_ids,
    p_experts,
    p_out,
    num_rows,
    HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr,
    TOP_K: tl.constexpr,
    ROWS: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PARTS: tl.constexpr,
    STAGES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One program `BLOCK_N` hidden columns of all rows, over all experts. See `down` for shapes."""
    BLOCK_K: tl.constexpr = WIDTH // PARTS
    i_n = tl.program_id(0) * BLOCK_N
    # A weight row cut into PARTS pieces is PARTS rows of [BLOCK_N * PARTS, BLOCK_K] (the same
    # bytes), and so is a hidden row. Their product holds what is wanted where both pieces are the
    # same; the rest is thrown away: a wgmma wants 64 rows.
    o_np = tl.arange(0, BLOCK_N * PARTS)
    o_tp = tl.arange(0, ROWS * PARTS)
    o_k = tl.arange(0, BLOCK_K)
    row = o_tp // PARTS
    p_w = p_down + i_n * WIDTH + o_np[:, None] * BLOCK_K + o_k[None, :]
    p_h = p_hidden + (o_tp % PARTS)[None, :] * BLOCK_K + o_k[:, None]
    # Ids are older than the first launch, which waited for them: they may be read before the wait.
    ids = ()
    for i_slot in tl.static_range(TOP_K):
        p_id = p_ids + row * TOP_K + i_slot
        ids = ids + (tl.load(p_id, mask=row < num_rows, other=-1),)  # noqa: RUF005
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    num_distinct = tl.load(p_experts + PAIRS)
    # Carried from one iteration to the next: the pipeliner would halve its depth for a weight load
    # whose address is loaded in the same iteration.
    i_expert = tl.load(p_experts)
    acc = tl.zeros([BLOCK_N * PARTS, ROWS * PARTS], tl.float32)
    for i_distinct in tl.range(0, num_distinct, num_stages=STAGES):
        slot = tl.full([ROWS * PARTS], -1, tl.int32)
        for i_slot in tl.static_range(TOP_K - 1, -1, -1):
            slot = tl.where(ids[i_slot] == i_expert, i_slot, slot)
        b_w = tl.load(p_w + i_expert.to(tl.int64) * (HIDDEN * WIDTH))
        p_row = p_h + ((row * TOP_K + slot) * WIDTH)[None, :]
        b_h = tl.load(p_row, mask=(slot >= 0)[None, :], other=0.0)
        acc = dot(b_w, b_h, acc)
        i_expert = tl.load(p_experts + i_distinct + 1)

    o_part = tl.arange(0, PARTS)
    same_part = o_part[None, :, None, None] == o_part[None, None, None, :]
    acc = tl.where(same_part, tl.reshape(acc, [BLOCK_N, PARTS, ROWS, PARTS]), 0.0)
    value = tl.sum(tl.sum(acc, 3), 1)
    o_row = tl.arange(0, ROWS)
    o_n = i_n + tl.arange(0, BLOCK_N)
    p_to = p_out + o_row[None, :].to(tl.int64) * HIDDEN + o_n[:, None]
    tl.store(p_to, value.to(p_out.dtype.element_ty), mask=(o_row < num_rows)[None, :])


def down(
    hidden_TKI: torch.Tensor,
    down_EHI: torch.Tensor,
    ids_TK: torch.Tensor,
    experts: torch.Tensor,
    out_TH: torch.Tensor,
    tiles: Tiles,
) -> None:
    """`out[t] = sum over experts of down[e] @ hidden[t, first slot of e in row t]`, all of `out`.

    Launches one kernel, dependent on `gate_up`, which wrote `hidden_TKI` and `experts`. The sum
    runs in one order, so equal inputs give equal bits. Rows without an expert are 0.
    """
    num_rows, top_k, width = hidden_TKI.shape
    hidden = down_EHI.shape[1]
    down_kernel[(hidden // tiles.down_n,)](
        hidden_TKI,
        down_EHI,
        ids_TK,
        experts,
        out_TH,
        num_rows,
        HIDDEN=hidden,
        WIDTH=width,
        TOP_K=top_k,
        ROWS=padded_rows(num_rows),
        PAIRS=experts.shape[0] - 1,
        BLOCK_N=tiles.down_n,
        PARTS=tiles.down_parts,
        STAGES=tiles.down_stages,
        DEPENDENT=tiles.dependent,
        num_warps=4,
        num_stages=tiles.down_stages,
        **({"launch_pdl": True} if tiles.dependent else {}),
    )


def compile_cases() -> list[CompileCase]:
    """Qwen3.5-35B-A3B: 256 experts, top-8, hidden 2048, width 512."""
    cases = []
    for rows in (1, 2, 4, 8, 16):
        for architecture in (80, 90):
            tiles = tiles_for(rows, architecture)
            constexprs = {
                "HIDDEN": 2048,
                "WIDTH": 512,
                "TOP_K": 8,
                "ROWS": padded_rows(rows),
                "PAIRS": padded_rows(rows) * 8,
                "BLOCK_N": tiles.down_n,
                "PARTS": tiles.down_parts,
                "STAGES": tiles.down_stages,
                "DEPENDENT": tiles.dependent,
            }
            signature = {
                "p_hidden": "*bf16",
                "p_down": "*bf16",
                "p_ids": "*i32",
                "p_experts": "*i32",
                "p_out": "*bf16",
                "num_rows": "i32",
                **dict.fromkeys(constexprs, "constexpr"),
            }
            cases.append(
                CompileCase(
                    f"down rows={rows}",
                    down_kernel,
                    signature,
                    constexprs,
                    num_stages=tiles.down_stages,
                    dependent_launch=tiles.dependent,
                    architectures=(architecture,),
                )
            )
    return cases
