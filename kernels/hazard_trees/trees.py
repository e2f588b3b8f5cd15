"""Hazards of every draft from boosted trees over its block and its request, in one launch.

A program takes a request: it takes in what the round before emitted, computes the features of its
15 drafts, and walks all trees for all of them side by side. Derivation: README.md beside this file.
"""

# Launch options and static ranges are not in triton's annotations.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from hybridspec.errors import UsageError
from hybridspec.kernels.compilation import CompileCase
from hybridspec.kernels.hazard_trees.ensemble import FEATURE_STRIDE, VALUE_SCALE, DeviceTrees
from hybridspec.kernels.hazard_trees.state import (
    BLOCK_SIZE,
    MOVING_WEIGHT,
    NUM_DRAFTS,
    HistoryState,
)
from hybridspec.kernels.hazard_trees.text import look_up, shifted, take_in
from hybridspec.kernels.select.elementary import exp

_TOKENS = (torch.int64, torch.int32)
_UNIT = tl.constexpr(1.0 / VALUE_SCALE)
_WEIGHT = tl.constexpr(MOVING_WEIGHT)
_STRIDE = tl.constexpr(FEATURE_STRIDE)


@triton.jit
def _least(a, b):
    return tl.minimum(a, b)


@triton.jit
def _request(p_numbers, p_expected, count, length):
    """Mean surprise, drafted rounds and emitted tokens after the round before."""
    mean = tl.load(p_numbers)
    rounds = tl.load(p_numbers + 1)
    text = tl.load(p_numbers + 2)
    drafted = (length > 0) & (count > 0)
    expected = tl.load(p_expected + tl.where(drafted, length - 1, 0))
    surprise = (count - 1).to(tl.float32) - expected
    mean = tl.where(drafted, mean + _WEIGHT * (surprise - mean), mean)
    rounds = rounds + drafted.to(tl.float32)
    return mean, rounds, text + tl.where(count > 0, count, 0).to(tl.float32)


@triton.jit
def _walk(p_words, p_values, p_roots, p_features, TREES: tl.constexpr, DEPTH: tl.constexpr):
    """Logits of 16 rows of features, fp64 [16]."""
    p_x = p_features + (tl.arange(0, 16) * _STRIDE)[:, None]
    node = tl.load(p_roots + tl.arange(0, TREES))[None, :] + tl.zeros([16, TREES], tl.int32)
    for _ in tl.static_range(DEPTH):
        word = tl.load(p_words + node)
        threshold = (word & 0xFFFFFFFF).to(tl.int32).to(tl.float32, bitcast=True)
        x = tl.load(p_x + ((word >> 32) & 0xFF).to(tl.int32))
        node = (word >> 40).to(tl.int32) + (x > threshold).to(tl.int32)
    return tl.sum(tl.load(p_values + node), 1).to(tl.float64) * _UNIT


@triton.jit(do_not_specialize=["stride_p1", "stride_p2", "stride_entropy", "stride_drafts"])
def hazard_trees_kernel(
    p_p1,
    p_p2,
    p_entropy,
    p_drafts,
    p_emitted,
    p_counts,
    p_lengths,
    p_slots,
    p_tables,
    p_tail,
    p_numbers,
    p_expected,
    p_words,
    p_values,
    p_roots,
    p_features,
    p_hazards,
    stride_p1,
    stride_p2,
    stride_entropy,
    stride_drafts,
    ENTRIES: tl.constexpr,
    TREES: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """One program a request; see `hazard_trees` for the arguments."""
    i_request = tl.program_id(0).to(tl.int64)
    i_slot = tl.load(p_slots + i_request).to(tl.int64)
    count = tl.load(p_counts + i_request)
    length = tl.load(p_lengths + i_request)
    o_draft = tl.arange(0, 16)
    live = o_draft < 15
    p_p1 += i_request * stride_p1
    p1 = tl.load(p_p1 + o_draft, mask=live, other=0.0)
    p2 = tl.load(p_p2 + i_request * stride_p2 + o_draft, mask=live, other=0.0)
    entropy = tl.load(p_entropy + i_request * stride_entropy + o_draft, mask=live, other=0.0)
    previous_p1 = tl.load(p_p1 + tl.where(o_draft > 0, o_draft - 1, 0))
    next_p1 = tl.load(p_p1 + tl.where(o_draft < 14, o_draft + 1, 14))
    p_drafts += i_request * stride_drafts
    draft = tl.load(p_drafts + o_draft, mask=live, other=0).to(tl.int64)

    p_tables += i_slot * (4 * ENTRIES)
    p_tail += i_slot * 2
    p_numbers += i_slot * 4
    p_expected += i_slot * 16
    p_emitted += i_request * 16
    newest = tl.load(p_tail + 1)
    second = tl.load(p_tail)
    take_in(p_tables, p_emitted, count, newest, second, ENTRIES)
    mean, rounds, text = _request(p_numbers, p_expected, count, length)
    last = tl.load(p_emitted + count - 1, mask=count > 0, other=0).to(tl.int64)
    last_but_one = tl.load(p_emitted + count - 2, mask=count > 1, other=0).to(tl.int64)
    second = tl.where(count > 1, last_but_one, tl.where(count > 0, newest, second))
    newest = tl.where(count > 0, last, newest)
    # Every warp has read the old state, and the tables are written, when any goes on.
    tl.debug_barrier()
    tl.store(p_tail, second)
    tl.store(p_tail + 1, newest)
    tl.store(p_numbers, mean)
    tl.store(p_numbers + 1, rounds)
    tl.store(p_numbers + 2, text)

    first = shifted(p_drafts, o_draft, 1, live, newest, second)
    before = shifted(p_drafts, o_draft, 2, live, newest, second)
    seen, successor = look_up(p_tables, draft, first, before, live, ENTRIES)
    # In this order, because numpy's float32 products and sums are in this order.
    product, total = 1.0, 0.0
    products = tl.zeros([16], tl.float32)
    expected = tl.zeros([16], tl.float32)
    for k in tl.static_range(15):
        product = product * tl.load(p_p1 + k)
        total = total + product
        products = tl.where(o_draft == k, product, products)
        expected = tl.where(o_draft == k + 1, total, expected)
    tl.store(p_expected + o_draft, expected)

    o_back = o_draft[:, None] + 1 - o_draft[None, :]
    column = tl.load(p_drafts + o_draft[:, None], mask=live[:, None], other=0).to(tl.int64)
    row = tl.load(p_drafts + o_draft[None, :] - 1, mask=o_draft[None, :] > 0, other=0).to(tl.int64)
    row = tl.where(o_draft[None, :] == 0, newest, row)
    distance = tl.min(tl.where((column == row) & (o_back > 0), o_back, 16), 1)

    p_features += i_request * (16 * _STRIDE)
    p_row = p_features + o_draft * _STRIDE
    tl.store(p_row, p1)
    tl.store(p_row + 1, p1 - p2)
    tl.store(p_row + 2, entropy)
    tl.store(p_row + 3, o_draft.to(tl.float32))
    tl.store(p_row + 4, tl.associative_scan(tl.where(live, p1, float("inf")), 0, _least))
    tl.store(p_row + 5, products)
    tl.store(p_row + 6, previous_p1)
    tl.store(p_row + 7, next_p1)
    tl.store(p_row + 8, distance.to(tl.float32))
    tl.store(p_row + 9, seen)
    tl.store(p_row + 10, tl.associative_scan(seen, 0, _least))
    tl.store(p_row + 11, successor)
    tl.store(p_row + 12, mean)
    tl.store(p_row + 13, rounds)
    tl.store(p_row + 14, text - 1.0)
    tl.store(p_row + 15, 0.0)
    tl.debug_barrier()

    logit = _walk(p_words, p_values, p_roots, p_features, TREES, DEPTH)
    hazard = 1.0 / (1.0 + exp(-logit))
    finite = (tl.abs(p1) < float("inf")) & (tl.abs(p2) < float("inf"))
    finite = finite & (tl.abs(entropy) < float("inf"))
    hazard = tl.where(finite, hazard, float("nan"))
    tl.store(p_hazards + i_request * 15 + o_draft, hazard, mask=live)


@dataclass(frozen=True)
class Hazards:
    """What the kernel writes, one row a request.

    Attributes:
        hazards_BD: fp64 [B, 15] in (0, 1); NaN where a signal of the draft is not finite.
        features_BLF: fp32 [B, 16, 16], scratch that stays readable: the features of the drafts in
            the order of `ensemble.FEATURES`, padded with a row and a column.
    """

    hazards_BD: torch.Tensor
    features_BLF: torch.Tensor

    @classmethod
    def allocate(cls, num_requests: int, device: torch.device | str) -> Hazards:
        """Buffers for so many requests."""
        return cls(
            torch.empty(num_requests, NUM_DRAFTS, dtype=torch.float64, device=device),
            torch.empty(num_requests, BLOCK_SIZE, FEATURE_STRIDE, device=device),
        )


def hazard_trees(
    p1_BD: torch.Tensor,
    p2_BD: torch.Tensor,
    entropy_BD: torch.Tensor,
    drafts_BD: torch.Tensor,
    emitted_BT: torch.Tensor,
    commit_rows_B: torch.Tensor,
    lengths_B: torch.Tensor,
    slots_B: torch.Tensor,
    state: HistoryState,
    trees: DeviceTrees,
    *,
    out: Hazards | None = None,
) -> Hazards:
    """Hazards of every draft of a round; takes in the round before, so it runs once a round.

    In a request's first round, after `state.reset`, `emitted_BT` starts with the token that prefill
    gave, its `commit_rows_B` is 1 and its `lengths_B` 0. A padding request has 0 in both.

    Args:
        p1_BD, p2_BD, entropy_BD: draft signals, fp32 [B, 15], rows in one piece.
        drafts_BD: draft tokens, int64 or int32 [B, 15], rows in one piece.
        emitted_BT: tokens that the round before emitted, int64 or int32 [B, 16], contiguous.
        commit_rows_B: how many they are, int32 [B].
        lengths_B: verify length of the round before, int32 [B], 0 where it drafted nothing.
        slots_B: slot of `state` of each request, int32 [B], all different.
        state: of all slots; moved.
        trees: packed ensemble.
        out: buffers to write; all of them are overwritten.

    Raises:
        UsageError: shapes, dtypes or strides that do not fit.
    """
    requests = p1_BD.shape[0]
    block = (requests, NUM_DRAFTS)
    for name, tensor in {"p1": p1_BD, "p2": p2_BD, "entropy": entropy_BD}.items():
        _require(name, tensor, block, torch.float32, dense=False)
    _require("drafts", drafts_BD, block, *_TOKENS, dense=False)
    _require("emitted", emitted_BT, (requests, BLOCK_SIZE), *_TOKENS)
    columns = {"commit rows": commit_rows_B, "lengths": lengths_B, "slots": slots_B}
    for name, tensor in columns.items():
        _require(name, tensor, (requests,), torch.int32)
    out = out or Hazards.allocate(requests, p1_BD.device)
    _require("hazards", out.hazards_BD, block, torch.float64)
    shape = (requests, BLOCK_SIZE, FEATURE_STRIDE)
    _require("features", out.features_BLF, shape, torch.float32)
    if requests == 0:
        return out
    hazard_trees_kernel[(requests,)](
        p1_BD,
        p2_BD,
        entropy_BD,
        drafts_BD,
        emitted_BT,
        commit_rows_B,
        lengths_B,
        slots_B,
        state.tables_SGN,
        state.tail_S2,
        state.numbers_SF,
        state.expected_SL,
        trees.words_K,
        trees.values_K,
        trees.roots_T,
        out.features_BLF,
        out.hazards_BD,
        p1_BD.stride(0),
        p2_BD.stride(0),
        entropy_BD.stride(0),
        drafts_BD.stride(0),
        ENTRIES=state.entries,
        TREES=trees.roots_T.shape[0],
        DEPTH=trees.depth,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return out


def _require(
    name: str,
    tensor: torch.Tensor,
    shape: tuple[int, ...],
    *dtypes: torch.dtype,
    dense: bool = True,
) -> None:
    laid_out = tensor.is_contiguous() if dense else tensor.stride(-1) == 1
    if tensor.shape != shape or tensor.dtype not in dtypes or not laid_out:
        raise UsageError(
            f"{name} is {tensor.dtype} {tuple(tensor.shape)} with strides {tensor.stride()}; "
            f"expected {' or '.join(map(str, dtypes))} {shape}, "
            f"{'contiguous' if dense else 'rows in one piece'}"
        )


def compile_cases() -> list[CompileCase]:
    """Shipped configurations: small, default and largest ensembles."""
    signature: dict[str, str] = {
        **dict.fromkeys(("p_p1", "p_p2", "p_entropy"), "*fp32"),
        **dict.fromkeys(("p_drafts", "p_emitted"), "*i64"),
        **dict.fromkeys(("p_counts", "p_lengths", "p_slots"), "*i32"),
        **dict.fromkeys(("p_tables", "p_tail"), "*i64"),
        **dict.fromkeys(("p_numbers", "p_expected"), "*fp32"),
        **dict.fromkeys(("p_words", "p_values"), "*i64"),
        "p_roots": "*i32",
        "p_features": "*fp32",
        "p_hazards": "*fp64",
        **dict.fromkeys(("stride_p1", "stride_p2", "stride_entropy", "stride_drafts"), "i32"),
    }
    cases = []
    for trees, depth, token in ((16, 4, "i64"), (32, 5, "i64"), (64, 6, "i64"), (64, 6, "i32")):
        constexprs = {"ENTRIES": 4096, "TREES": trees, "DEPTH": depth}
        kinds = signature | dict.fromkeys(constexprs, "constexpr")
        kinds |= dict.fromkeys(("p_drafts", "p_emitted"), f"*{token}")
        name = f"hazard-trees-{trees}x{depth}-{token}"
        cases.append(CompileCase(name, hazard_trees_kernel, kinds, constexprs))
    return cases
