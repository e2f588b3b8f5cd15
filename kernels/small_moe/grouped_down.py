"""Down projection of grouped pairs, and their sum by row: the third launch beyond 16 rows."""

# Triton's decorators and constexprs are outside what pyright can follow.
# pyright: reportGeneralTypeIssues=false, reportCallIssue=false
# pyright: reportAttributeAccessIssue=false, reportAssignmentType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hybridspec.kernels.compilation import CompileCase
from hybridspec.kernels.interpreter import INTERPRETED, dot
from hybridspec.kernels.small_moe.grouping import Groups, fields_of
from hybridspec.kernels.small_moe.tiles import GroupedTiles, grouped_tiles_for


@triton.jit(do_not_specialize=["num_rows"])
def grouped_down_kernel(
    p_hidden,
    p_down,
    p_num_items,
    p_items,
    p_positions,
    p_partial,
    p_out,
    num_rows,
    HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr,
    TOP_K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PARTS: tl.constexpr,
    STAGES: tl.constexpr,
    SUM_ROWS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One program `BLOCK_N` hidden columns of all items, then of all rows. See `grouped_down`."""
    BLOCK_K: tl.constexpr = WIDTH // PARTS
    i_n = tl.program_id(0) * BLOCK_N
    # A weight row cut into PARTS pieces is PARTS rows of [BLOCK_N * PARTS, BLOCK_K] (the same
    # bytes), and so is a hidden row. Of their product, entries of equal pieces are wanted.
    o_np = tl.arange(0, BLOCK_N * PARTS)
    o_rp = tl.arange(0, ROWS * PARTS)
    o_k = tl.arange(0, BLOCK_K)
    o_n = i_n + tl.arange(0, BLOCK_N)
    o_row = tl.arange(0, ROWS)
    o_part = tl.arange(0, PARTS)
    same_part = o_part[None, :, None, None] == o_part[None, None, None, :]
    p_w = p_down + i_n * WIDTH + o_np[:, None] * BLOCK_K + o_k[None, :]
    p_h = p_hidden + o_rp[None, :] * BLOCK_K + o_k[:, None]
    p_to = p_partial + o_row[None, :] * HIDDEN + o_n[:, None]
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    num_items = tl.load(p_num_items)
    # Carried from one iteration to the next: the pipeliner would halve its depth for a weight load
    # whose address is loaded in the same iteration.
    item = tl.load(p_items)
    for i_item in tl.range(0, num_items, num_stages=STAGES):
        i_expert, start, rows = fields_of(item)
        b_w = tl.load(p_w + i_expert.to(tl.int64) * (HIDDEN * WIDTH))
        b_h = tl.load(p_h + start * WIDTH, mask=(o_rp // PARTS < rows)[None, :], other=0.0)
        acc = dot(b_w, b_h, tl.zeros([BLOCK_N * PARTS, ROWS * PARTS], tl.float32))
        acc = tl.where(same_part, tl.reshape(acc, [BLOCK_N, PARTS, ROWS, PARTS]), 0.0)
        value = tl.sum(tl.sum(acc, 3), 1)
        tl.store(p_to + start.to(tl.int64) * HIDDEN, value, mask=(o_row < rows)[None, :])
        item = tl.load(p_items + i_item + 1)

    # This program alone wrote these columns: after a barrier it sums them itself, in the order of
    # slots, which no other row changes.
    if not INTERPRETED:
        tl.debug_barrier()
    o_sum = tl.arange(0, SUM_ROWS)
    for first in tl.range(0, num_rows, SUM_ROWS, num_stages=1):
        row = first + o_sum
        total = tl.zeros([SUM_ROWS, BLOCK_N], tl.float32)
        for i_slot in tl.static_range(TOP_K):
            position = tl.load(p_positions + row * TOP_K + i_slot, mask=row < num_rows, other=-1)
            p_from = p_partial + position.to(tl.int64)[:, None] * HIDDEN + o_n[None, :]
            total += tl.load(p_from, mask=(position >= 0)[:, None], other=0.0)
        p_row = p_out + row.to(tl.int64)[:, None] * HIDDEN + o_n[None, :]
        tl.store(p_row, total.to(p_out.dtype.element_ty), mask=(row < num_rows)[:, None])


def grouped_down(
    hidden_NI: torch.Tensor,
    down_EHI: torch.Tensor,
    groups: Groups,
    partial_NH: torch.Tensor,
    out_TH: torch.Tensor,
    top_k: int,
    tiles: GroupedTiles,
) -> None:
    """`out[t] = sum over slots of down[e] @ hidden[position of the slot]`, all of `out`.

    Launches one kernel, dependent on `grouped_gate_up`, which wrote `hidden_NI`. Rows without a
    pair that counts are 0.

    Args:
        partial_NH: scratch fp32 [pairs, hidden]: what each pair adds to its row.
    """
    num_rows, hidden = out_TH.shape
    width = hidden_NI.shape[1]
    grouped_down_kernel[(hidden // tiles.down_n,)](
        hidden_NI,
        down_EHI,
        groups.num_items,
        groups.items_X,
        groups.positions_N,
        partial_NH,
        out_TH,
        num_rows,
        HIDDEN=hidden,
        WIDTH=width,
        TOP_K=top_k,
        ROWS=tiles.item_rows,
        BLOCK_N=tiles.down_n,
        PARTS=tiles.down_parts,
        STAGES=tiles.down_stages,
        SUM_ROWS=32,
        DEPENDENT=tiles.dependent,
        num_warps=4,
        num_stages=tiles.down_stages,
        **({"launch_pdl": True} if tiles.dependent else {}),
    )


def compile_cases() -> list[CompileCase]:
    """Qwen3.5-35B-A3B: top-8, hidden 2048, width 512."""
    cases = []
    tensors = ("p_hidden", "p_down", "p_num_items", "p_items", "p_positions", "p_partial", "p_out")
    kinds = ("*bf16", "*bf16", "*i32", "*i32", "*i32", "*fp32", "*bf16")
    for architecture in (80, 90):
        tiles = grouped_tiles_for(architecture)
        constexprs = {
            "HIDDEN": 2048,
            "WIDTH": 512,
            "TOP_K": 8,
            "ROWS": tiles.item_rows,
            "BLOCK_N": tiles.down_n,
            "PARTS": tiles.down_parts,
            "STAGES": tiles.down_stages,
            "SUM_ROWS": 32,
            "DEPENDENT": tiles.dependent,
        }
        cases.append(
            CompileCase(
                "grouped_down",
                grouped_down_kernel,
                {
                    **dict(zip(tensors, kinds, strict=True)),
                    "num_rows": "i32",
                    **dict.fromkeys(constexprs, "constexpr"),
                },
                constexprs,
                num_stages=tiles.down_stages,
                dependent_launch=tiles.dependent,
                architectures=(architecture,),
            )
        )
    return cases
