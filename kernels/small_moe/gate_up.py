"""First launch of the small-batch MoE: gate, up, SiLU, routing weight, and the list of experts."""

# Triton's decorators and constexprs are outside what pyright can follow.
# pyright: reportGeneralTypeIssues=false, reportCallIssue=false
# pyright: reportAttributeAccessIssue=false, reportAssignmentType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hybridspec.kernels.compilation import CompileCase
from hybridspec.kernels.interpreter import dot
from hybridspec.kernels.small_moe.tiles import NARROW_ROWS, Tiles, padded_rows, tiles_for


@triton.jit
def list_experts(p_ids, p_experts, num_pairs, NUM_EXPERTS: tl.constexpr, PAIRS: tl.constexpr):
    """Distinct experts in the order of their first slots; their number is the last element."""
    CHUNK: tl.constexpr = 32
    o_pair = tl.arange(0, PAIRS)
    id_pair = tl.load(p_ids + o_pair, mask=o_pair < num_pairs, other=-1)
    earlier = tl.zeros([PAIRS], tl.int32)
    for start in tl.static_range(0, PAIRS, CHUNK):
        o_other = start + tl.arange(0, CHUNK)
        id_other = tl.load(p_ids + o_other, mask=o_other < num_pairs, other=-1)
        same = (id_other[None, :] == id_pair[:, None]) & (o_other[None, :] < o_pair[:, None])
        earlier += tl.sum(same.to(tl.int32), 1)
    first = (id_pair >= 0) & (id_pair < NUM_EXPERTS) & (earlier == 0)
    count = tl.sum(first.to(tl.int32), 0)
    rank = tl.cumsum(first.to(tl.int32), 0) - 1
    tl.store(p_experts + rank, id_pair, mask=first)
    tl.store(p_experts + PAIRS, count)


@triton.jit(do_not_specialize=["num_rows", "k_blocks"])
def gate_up_kernel(
    p_x,
    p_gate_up,
    p_ids,
    p_weights,
    p_hidden,
    p_experts,
    num_rows,
    k_blocks,
    NUM_EXPERTS: tl.constexpr,
    HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr,
    TOP_K: tl.constexpr,
    ROWS: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One program a (slot, `BLOCK_N` columns); it leaves unless its slot is an expert's first.

    Program 0 lists the experts instead. See `gate_up` for shapes.
    """
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
    NUM_TILES: tl.constexpr = WIDTH // BLOCK_N
    num_pairs = num_rows * TOP_K
    if tl.program_id(0) == 0:
        list_experts(p_ids, p_experts, num_pairs, NUM_EXPERTS, PAIRS)
        return
    i_tile = (tl.program_id(0) - 1) % NUM_TILES
    i_pair = (tl.program_id(0) - 1) // NUM_TILES
    i_expert = tl.load(p_ids + i_pair)
    # All ids and weights are asked for at once, so that their latency is paid once.
    o_row = tl.arange(0, ROWS)
    ids = ()
    weights = ()
    for i_slot in tl.static_range(TOP_K):
        o_slot = o_row * TOP_K + i_slot
        ids = ids + (tl.load(p_ids + o_slot, mask=o_row < num_rows, other=-1),)  # noqa: RUF005
        weights = weights + (  # noqa: RUF005
            tl.load(p_weights + o_slot, mask=o_row < num_rows, other=0.0),
        )
    slot = tl.full([ROWS], -1, tl.int32)
    weight = tl.zeros([ROWS], tl.float32)
    earlier = tl.zeros([ROWS], tl.int32)
    for i_slot in tl.static_range(TOP_K - 1, -1, -1):
        matches = ids[i_slot] == i_expert
        slot = tl.where(matches, i_slot, slot)
        weight += tl.where(matches, weights[i_slot], 0.0)
        earlier += (matches & (o_row * TOP_K + i_slot < i_pair)).to(tl.int32)
    routed = slot >= 0
    if (i_expert < 0) | (i_expert >= NUM_EXPERTS) | (tl.sum(earlier, 0) > 0):
        return

    # One product of 2 * BLOCK_N weight rows, gate rows above up rows: 64 of them fill a wgmma.
    o_n = i_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    o_f = tl.arange(0, 2 * BLOCK_N)
    o_f = i_tile * BLOCK_N + tl.where(o_f < BLOCK_N, o_f, o_f - BLOCK_N + WIDTH)
    o_k = tl.arange(0, BLOCK_K)
    p_w = p_gate_up + i_expert.to(tl.int64) * (2 * WIDTH * HIDDEN)
    p_w = p_w + o_f[:, None] * HIDDEN + o_k[None, :]
    p_xk = p_x + o_row[None, :] * HIDDEN + o_k[:, None]
    acc = tl.zeros([2 * BLOCK_N, ROWS], tl.float32)
    for i_block in tl.range(0, k_blocks, num_stages=STAGES):
        b_w = tl.load(p_w + i_block * BLOCK_K)
        # Rows routed elsewhere are neither read nor kept.
        b_x = tl.load(p_xk + i_block * BLOCK_K, mask=routed[None, :], other=0.0)
        acc = dot(b_w, b_x, acc)

    gate, up = tl.split(tl.permute(tl.reshape(acc, [2, BLOCK_N, ROWS]), [1, 2, 0]))
    # The down projection is linear: weighting here spares the second launch all weights, and rounds
    # to bf16 once. A weight of 0 wins over NaN, for rows past a device length.
    value = gate / (1.0 + tl.exp(-gate)) * up * weight[None, :]
    value = tl.where((weight == 0.0)[None, :], 0.0, value)
    p_out = p_hidden + (o_row * TOP_K + slot)[None, :] * WIDTH + o_n[:, None]
    tl.store(p_out, value.to(p_hidden.dtype.element_ty), mask=routed[None, :])


def gate_up(
    x_TH: torch.Tensor,
    gate_up_EFH: torch.Tensor,
    ids_TK: torch.Tensor,
    weights_TK: torch.Tensor,
    hidden_TKI: torch.Tensor,
    experts: torch.Tensor,
    tiles: Tiles,
) -> None:
    """`hidden[t, k] = weights[t, k] * silu(gate @ x[t]) * (up @ x[t])`, and the expert list.

    Launches one kernel. Arguments were checked by `small_moe`.

    Args:
        hidden_TKI: scratch [rows, top_k, width] bf16. Only the first slot of an expert in a row is
            written (with the sum of its weights); slots without an expert are left as they are.
        experts: scratch int32 [padded slots + 1]: distinct experts, their number in the last
            element.
    """
    num_rows, hidden = x_TH.shape
    num_experts = gate_up_EFH.shape[0]
    _, top_k, width = hidden_TKI.shape
    gate_up_kernel[(num_rows * top_k * (width // tiles.gate_up_n) + 1,)](
        x_TH,
        gate_up_EFH,
        ids_TK,
        weights_TK,
        hidden_TKI,
        experts,
        num_rows,
        hidden // tiles.gate_up_k,
        NUM_EXPERTS=num_experts,
        HIDDEN=hidden,
        WIDTH=width,
        TOP_K=top_k,
        ROWS=NARROW_ROWS,
        PAIRS=experts.shape[0] - 1,
        BLOCK_N=tiles.gate_up_n,
        BLOCK_K=tiles.gate_up_k,
        STAGES=tiles.gate_up_stages,
        DEPENDENT=tiles.dependent,
        num_warps=4,
        num_stages=tiles.gate_up_stages,
    )


def compile_cases() -> list[CompileCase]:
    """Qwen3.5-35B-A3B: 256 experts, top-8, hidden 2048, width 512."""
    cases = []
    for rows in (1, 2, 4, 8, 16):
        for architecture in (80, 90):
            tiles = tiles_for(rows, architecture)
            pairs = padded_rows(rows) * 8
            constexprs = {
                "NUM_EXPERTS": 256,
                "HIDDEN": 2048,
                "WIDTH": 512,
                "TOP_K": 8,
                "ROWS": NARROW_ROWS,
                "PAIRS": pairs,
                "BLOCK_N": tiles.gate_up_n,
                "BLOCK_K": tiles.gate_up_k,
                "STAGES": tiles.gate_up_stages,
                "DEPENDENT": tiles.dependent,
            }
            tensors = ("p_x", "p_gate_up", "p_ids", "p_weights", "p_hidden", "p_experts")
            kinds = ("*bf16", "*bf16", "*i32", "*fp32", "*bf16", "*i32")
            signature = dict(zip(tensors, kinds, strict=True))
            signature |= {"num_rows": "i32", "k_blocks": "i32"}
            signature |= dict.fromkeys(constexprs, "constexpr")
            cases.append(
                CompileCase(
                    f"gate_up rows={rows}",
                    gate_up_kernel,
                    signature,
                    constexprs,
                    num_stages=tiles.gate_up_stages,
                    dependent_launch=tiles.dependent,
                    architectures=(architecture,),
                )
            )
    return cases
