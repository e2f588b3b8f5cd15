"""Pairs of row and expert grouped by expert, without atomics: the first launch beyond 16 rows."""

# Triton's decorators and constexprs are outside what pyright can follow.
# pyright: reportGeneralTypeIssues=false, reportCallIssue=false
# pyright: reportAttributeAccessIssue=false, reportAssignmentType=false

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from hybridspec.kernels.compilation import CompileCase
from hybridspec.kernels.small_moe.tiles import MAX_ROWS, GroupedTiles, grouped_tiles_for

# An item is one word, so that a program fetches the first 8 of them with one latency: the expert
# above 12 bits of the first pair's position above 4 bits of the number of pairs less 1.
MOST_ITEM_ROWS = 16
MOST_PAIRS = 4096
MOST_EXPERTS = 2**31 // (MOST_PAIRS * MOST_ITEM_ROWS)


@dataclass(frozen=True)
class Groups:
    """Pairs that count, in the order of experts, and rows within one; cut into items.

    A pair `row * top_k + slot` counts if its id is an expert and its weight is not 0. The position
    of a pair is its place in that order. An item is at most `item_rows` consecutive pairs of one
    expert.

    Attributes:
        num_items: int32 [1].
        items_X: int32 [most pairs + 1]: expert, position of the first pair and number of pairs.
        pairs_XR: int32, flat: the pairs of item x are at `x * item_rows`.
        positions_N: int32 [most pairs]: position of every pair, -1 where it does not count.
    """

    num_items: torch.Tensor
    items_X: torch.Tensor
    pairs_XR: torch.Tensor
    positions_N: torch.Tensor


def allocate_groups(most_pairs: int, device: torch.device | str) -> Groups:
    """Scratch for at most `most_pairs` pairs."""

    def integers(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device=device)

    return Groups(
        integers(1),
        integers(most_pairs + 1),
        integers(most_pairs * MOST_ITEM_ROWS),
        integers(most_pairs),
    )


POSITIONS = tl.constexpr(MOST_PAIRS)
LENGTHS = tl.constexpr(MOST_ITEM_ROWS)


@triton.jit
def fields_of(item):
    """Expert, position of the first pair and number of pairs of an item."""
    place = item // LENGTHS
    return place // POSITIONS, place % POSITIONS, item % LENGTHS + 1


@triton.jit(do_not_specialize=["num_pairs"])
def group_kernel(
    p_ids,
    p_weights,
    p_num_items,
    p_items,
    p_pairs,
    p_positions,
    num_pairs,
    NUM_EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    PAIRS: tl.constexpr,
    ITEM_ROWS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One program an expert, and one for what does not belong to any. See `group_pairs`."""
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
    i_expert = tl.program_id(0)
    o_pair = tl.arange(0, PAIRS)
    m_pair = o_pair < num_pairs
    id_pair = tl.load(p_ids + o_pair, mask=m_pair, other=-1)
    weight = tl.load(p_weights + o_pair, mask=m_pair, other=0.0)
    counts = (id_pair >= 0) & (id_pair < NUM_EXPERTS) & (weight != 0.0)
    mine = counts & (id_pair == i_expert)
    num_mine = tl.sum(mine.to(tl.int32), 0)
    if (num_mine == 0) & (i_expert < NUM_EXPERTS):
        return

    o_bin = tl.arange(0, BINS)
    pairs_of = tl.histogram(tl.where(counts, id_pair, 0), BINS, mask=counts)
    items_of = (pairs_of + ITEM_ROWS - 1) // ITEM_ROWS
    first_item = tl.sum(tl.where(o_bin < i_expert, items_of, 0), 0)
    if i_expert == NUM_EXPERTS:
        tl.store(p_num_items, first_item)
        tl.store(p_positions + o_pair, -1, mask=m_pair & (counts == 0))
    else:
        start = tl.sum((counts & (id_pair < i_expert)).to(tl.int32), 0)
        rank = tl.cumsum(mine.to(tl.int32), 0) - 1
        tl.store(p_positions + o_pair, start + rank, mask=mine)
        tl.store(p_pairs + first_item * ITEM_ROWS + rank, o_pair, mask=mine)
        o_first = tl.arange(0, PAIRS // ITEM_ROWS) * ITEM_ROWS
        m_item = o_first < num_mine
        last_row = tl.minimum(num_mine - o_first, ITEM_ROWS) - 1
        item = (i_expert * POSITIONS + start + o_first) * LENGTHS + last_row
        tl.store(p_items + first_item + o_first // ITEM_ROWS, item, mask=m_item)


def group_pairs(
    ids_TK: torch.Tensor,
    weights_TK: torch.Tensor,
    groups: Groups,
    num_experts: int,
    tiles: GroupedTiles,
) -> None:
    """Fill `groups`. Launches one kernel; every program reads all ids, so none waits for another.

    Args:
        ids_TK: int32 [rows, top_k], contiguous.
        weights_TK: fp32 [rows, top_k], contiguous.
    """
    num_pairs = ids_TK.numel()
    group_kernel[(num_experts + 1,)](
        ids_TK,
        weights_TK,
        groups.num_items,
        groups.items_X,
        groups.pairs_XR,
        groups.positions_N,
        num_pairs,
        NUM_EXPERTS=num_experts,
        BINS=triton.next_power_of_2(num_experts),
        PAIRS=max(128, triton.next_power_of_2(num_pairs)),
        ITEM_ROWS=tiles.item_rows,
        DEPENDENT=tiles.dependent,
        num_warps=4,
    )


def compile_cases() -> list[CompileCase]:
    """Qwen3.5-35B-A3B: 256 experts, top-8."""
    cases = []
    tensors = ("p_ids", "p_weights", "p_num_items", "p_items", "p_pairs", "p_positions")
    kinds = ("*i32", "*fp32", "*i32", "*i32", "*i32", "*i32")
    for rows in (32, 64, MAX_ROWS):
        for architecture in (80, 90):
            tiles = grouped_tiles_for(architecture)
            constexprs = {
                "NUM_EXPERTS": 256,
                "BINS": 256,
                "PAIRS": rows * 8,
                "ITEM_ROWS": tiles.item_rows,
                "DEPENDENT": tiles.dependent,
            }
            cases.append(
                CompileCase(
                    f"group rows={rows}",
                    group_kernel,
                    {
                        **dict(zip(tensors, kinds, strict=True)),
                        "num_pairs": "i32",
                        **dict.fromkeys(constexprs, "constexpr"),
                    },
                    constexprs,
                    architectures=(architecture,),
                )
            )
    return cases
