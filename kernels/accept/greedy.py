"""Greedy acceptance and cursor advance: one launch, one warp a request."""

# A jit function seems to return nothing and to take no launch options.
# pyright: reportGeneralTypeIssues=false, reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hybridspec.errors import UsageError
from hybridspec.kernels.accept.emit import ROWS, emit, sequence_length_of
from hybridspec.kernels.accept.outcome import (
    BLOCK_SIZE,
    INTEGERS,
    Cursors,
    Outcome,
    check_block,
    outcome_types,
    require,
)
from hybridspec.kernels.compilation import CompileCase


@triton.jit(do_not_specialize=["stride_drafts", "stride_tokens"])
def greedy_kernel(
    p_drafts,
    p_lengths,
    p_tokens,
    p_accepted,
    p_bonus,
    p_emitted,
    p_commit_rows,
    p_valid,
    p_sequence_lengths,
    p_anchors,
    stride_drafts,
    stride_tokens,
    ADVANCE: tl.constexpr,
):
    """Grid (B,)."""
    i_request = tl.program_id(0).to(tl.int64)
    o_row = tl.arange(0, ROWS)
    length = tl.minimum(tl.load(p_lengths + i_request), ROWS)
    sequence_length = sequence_length_of(i_request, p_sequence_lengths, ADVANCE)
    b_draft = tl.load(p_drafts + i_request * stride_drafts + o_row, mask=o_row < ROWS - 1, other=-1)
    b_token = tl.load(p_tokens + i_request * stride_tokens + o_row)
    b_wrong = (o_row < length - 1) & (b_draft != b_token)
    accepted = tl.min(tl.where(b_wrong, o_row, tl.maximum(length - 1, 0)), 0)
    bonus = tl.sum(tl.where(o_row == accepted, b_token, 0), 0)
    valid = (tl.min(tl.where(o_row <= accepted, b_token, 0), 0) >= 0) | (length <= 0)
    emit(
        i_request,
        b_draft,
        accepted,
        bonus,
        valid & (length > 0),
        valid,
        sequence_length,
        p_accepted,
        p_bonus,
        p_emitted,
        p_commit_rows,
        p_valid,
        p_sequence_lengths,
        p_anchors,
        ADVANCE,
    )


def accept_greedy(
    drafts_BD: torch.Tensor,
    lengths_B: torch.Tensor,
    tokens_BT: torch.Tensor,
    *,
    cursors: Cursors | None = None,
    out: Outcome | None = None,
) -> Outcome:
    """Longest prefix of the verified drafts that equals the target's choices, in one launch.

    Args:
        drafts_BD: int32 or int64 [B, 15]; requests may be strided (column 1 on of a block).
        lengths_B: int32, rows verified, 0..16; 0 leaves the request as it is. Longer ones count as
            16, negative ones as 0.
        tokens_BT: int32 or int64 [B, 16], the target's argmax of each row, negative where it has
            none. Rows from the length on are not looked at. `draft_features` makes these ids from
            logits and takes the lowest on ties.
        cursors: moved in place by the same launch.
        out: where to write; None allocates.

    Raises:
        UsageError: a shape, dtype or stride that the kernel does not take.
    """
    batch = check_block(drafts_BD, lengths_B)
    require("tokens_BT", tokens_BT, (batch, BLOCK_SIZE), INTEGERS)
    if tokens_BT.stride(1) != 1:
        raise UsageError(f"tokens_BT has last stride {tokens_BT.stride(1)}: make it 1")
    if out is None:
        out = Outcome.empty(batch, lengths_B.device)
    out.check(batch)
    if cursors is not None:
        cursors.check(batch)
    if batch == 0:
        return out
    greedy_kernel[(batch,)](
        drafts_BD,
        lengths_B,
        tokens_BT,
        out.accepted_B,
        out.bonus_B,
        out.emitted_BT,
        out.commit_rows_B,
        out.valid_B,
        # Without cursors nothing is read or written there.
        lengths_B if cursors is None else cursors.sequence_lengths_B,
        lengths_B if cursors is None else cursors.anchors_B,
        drafts_BD.stride(0),
        tokens_BT.stride(0),
        ADVANCE=cursors is not None,
        num_warps=1,
    )
    return out


def compile_cases() -> list[CompileCase]:
    """Shipped configurations: both widths of token ids."""
    cases = []
    for token in ("*i32", "*i64"):
        signature = {
            "p_drafts": token,
            "p_lengths": "*i32",
            "p_tokens": token,
            **outcome_types(token),
            **dict.fromkeys(("stride_drafts", "stride_tokens"), "i32"),
            "ADVANCE": "constexpr",
        }
        name = f"greedy-{token[1:]}"
        cases.append(CompileCase(name, greedy_kernel, signature, {"ADVANCE": True}, num_warps=1))
    return cases
