"""Gate, up, SiLU and routing weight of grouped pairs: the second launch beyond 16 rows."""

# Triton's decorators and constexprs are outside what pyright can follow.
# pyright: reportGeneralTypeIssues=false, reportCallIssue=false
# pyright: reportAttributeAccessIssue=false, reportAssignmentType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hybridspec.kernels.compilation import CompileCase
from hybridspec.kernels.interpreter import dot
from hybridspec.kernels.small_moe.grouping import Groups, fields_of
from hybridspec.kernels.small_moe.tiles import GroupedTiles, grouped_tiles_for


@triton.jit
def item_at(p_items, p_pairs, i_item, exists, ROWS: tl.constexpr):
    """An item and its pairs, garbage past its end: a mask would cost a second latency."""
    o_pair = i_item * ROWS + tl.arange(0, ROWS)
    return tl.load(p_items + i_item, mask=exists, other=0), tl.load(
        p_pairs + o_pair, mask=exists, other=0
    )


@triton.jit(do_not_specialize=["k_blocks"])
def grouped_gate_up_kernel(
    p_x,
    p_gate_up,
    p_weights,
    p_num_items,
    p_items,
    p_pairs,
    p_hidden,
    k_blocks,
    HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr,
    TOP_K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    FUSED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Programs that stay, each with (item, `BLOCK_N` columns) at a fixed stride.

    See `grouped_gate_up` for shapes.
    """
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    NUM_TILES: tl.constexpr = WIDTH // BLOCK_N
    num_work = tl.load(p_num_items) * NUM_TILES
    num_programs = tl.num_programs(0)
    first = tl.program_id(0)
    o_row = tl.arange(0, ROWS)
    o_k = tl.arange(0, BLOCK_K)
    item, pair = item_at(p_items, p_pairs, first // NUM_TILES, first < num_work, ROWS)
    # Tiles of an item run side by side, and items of an expert follow each other: what a second
    # item of an expert reads is in the L2 cache.
    for i_work in tl.range(first, num_work, num_programs, flatten=FUSED):
        # Asked for now, so that it has come by the time its turn does.
        following = i_work + num_programs
        next_item, next_pair = item_at(
            p_items, p_pairs, following // NUM_TILES, following < num_work, ROWS
        )
        i_expert, start, rows = fields_of(item)
        i_tile = i_work % NUM_TILES
        routed = o_row < rows
        weight = tl.load(p_weights + pair, mask=routed, other=0.0)
        o_x = tl.where(routed, pair // TOP_K, 0) * HIDDEN
        # One product of 2 * BLOCK_N weight rows, gate rows above up rows: a wgmma of 64 where items
        # have 16 rows, mma.sync where they have 8.
        o_n = i_tile * BLOCK_N + tl.arange(0, BLOCK_N)
        o_f = tl.arange(0, 2 * BLOCK_N)
        o_f = i_tile * BLOCK_N + tl.where(o_f < BLOCK_N, o_f, o_f - BLOCK_N + WIDTH)
        p_w = p_gate_up + i_expert.to(tl.int64) * (2 * WIDTH * HIDDEN)
        p_w = p_w + o_f[:, None] * HIDDEN + o_k[None, :]
        p_xk = p_x + o_x[None, :] + o_k[:, None]
        acc = tl.zeros([2 * BLOCK_N, ROWS], tl.float32)
        for i_block in tl.range(0, k_blocks, num_stages=STAGES):
            b_w = tl.load(p_w + i_block * BLOCK_K)
            b_x = tl.load(p_xk + i_block * BLOCK_K, mask=routed[None, :], other=0.0)
            acc = dot(b_w, b_x, acc)

        gate, up = tl.split(tl.permute(tl.reshape(acc, [2, BLOCK_N, ROWS]), [1, 2, 0]))
        # The down projection is linear: weighting here rounds to bf16 once.
        value = gate / (1.0 + tl.exp(-gate)) * up * weight[None, :]
        p_out = p_hidden + (start + o_row)[None, :] * WIDTH + o_n[:, None]
        tl.store(p_out, value.to(p_hidden.dtype.element_ty), mask=routed[None, :])
        item = next_item
        pair = next_pair


def grouped_gate_up(
    x_TH: torch.Tensor,
    gate_up_EFH: torch.Tensor,
    weights_TK: torch.Tensor,
    groups: Groups,
    hidden_NI: torch.Tensor,
    tiles: GroupedTiles,
    num_programs: int,
) -> None:
    """`hidden[position] = weight * silu(gate @ x[row]) * (up @ x[row])` of every pair that counts.

    Launches one kernel, dependent on `group_pairs`, which filled `groups`.

    Args:
        hidden_NI: scratch [pairs, width] bf16, written at the positions that exist.
        num_programs: a fixed number, whatever the routes are.
    """
    hidden = x_TH.shape[1]
    width = hidden_NI.shape[1]
    most = weights_TK.numel() * (width // tiles.gate_up_n)
    grouped_gate_up_kernel[(min(num_programs, most),)](
        x_TH,
        gate_up_EFH,
        weights_TK,
        groups.num_items,
        groups.items_X,
        groups.pairs_XR,
        hidden_NI,
        hidden // tiles.gate_up_k,
        HIDDEN=hidden,
        WIDTH=width,
        TOP_K=weights_TK.shape[1],
        ROWS=tiles.item_rows,
        BLOCK_N=tiles.gate_up_n,
        BLOCK_K=tiles.gate_up_k,
        STAGES=tiles.gate_up_stages,
        FUSED=tiles.gate_up_fused,
        DEPENDENT=tiles.dependent,
        num_warps=4,
        num_stages=tiles.gate_up_stages,
        **({"launch_pdl": True} if tiles.dependent else {}),
    )


def compile_cases() -> list[CompileCase]:
    """Qwen3.5-35B-A3B: top-8, hidden 2048, width 512."""
    cases = []
    tensors = ("p_x", "p_gate_up", "p_weights", "p_num_items", "p_items", "p_pairs", "p_hidden")
    kinds = ("*bf16", "*bf16", "*fp32", "*i32", "*i32", "*i32", "*bf16")
    for architecture, fused in ((80, False), (90, False), (90, True)):
        tiles = grouped_tiles_for(architecture)
        constexprs = {
            "HIDDEN": 2048,
            "WIDTH": 512,
            "TOP_K": 8,
            "ROWS": tiles.item_rows,
            "BLOCK_N": tiles.gate_up_n,
            "BLOCK_K": tiles.gate_up_k,
            "STAGES": tiles.gate_up_stages,
            "FUSED": fused,
            "DEPENDENT": tiles.dependent,
        }
        cases.append(
            CompileCase(
                "grouped_gate_up" + (" fused" if fused else ""),
                grouped_gate_up_kernel,
                {
                    **dict(zip(tensors, kinds, strict=True)),
                    "k_blocks": "i32",
                    **dict.fromkeys(constexprs, "constexpr"),
                },
                constexprs,
                num_stages=tiles.gate_up_stages,
                dependent_launch=tiles.dependent,
                architectures=(architecture,),
            )
        )
    return cases
