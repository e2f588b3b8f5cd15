"""Writing one request's verdict and moving its cursors, inside a kernel."""

from __future__ import annotations

import triton
import triton.language as tl

from hybridspec.kernels.accept.outcome import BLOCK_SIZE

ROWS = tl.constexpr(BLOCK_SIZE)


@triton.jit
def sequence_length_of(i_request, p_sequence_lengths, ADVANCE: tl.constexpr):
    """For `emit`, asked for at the start of a kernel: nothing waits for this load then."""
    if ADVANCE:
        return tl.load(p_sequence_lengths + i_request)
    else:
        return 0


@triton.jit
def emit(
    i_request,
    b_draft,
    accepted,
    bonus,
    live,
    valid,
    sequence_length,
    p_accepted,
    p_bonus,
    p_emitted,
    p_commit_rows,
    p_valid,
    p_sequence_lengths,
    p_anchors,
    ADVANCE: tl.constexpr,
):
    """`live`: the request emits `accepted` of `b_draft` [16] and `bonus`; else nothing moves."""
    o_row = tl.arange(0, ROWS)
    emitted = tl.where(live, accepted + 1, 0)
    bonus = tl.where(live, bonus, -1)
    b_token = tl.where(o_row < emitted - 1, b_draft, -1)
    b_token = tl.where(o_row == emitted - 1, bonus, b_token)
    tl.store(p_emitted + i_request * ROWS + o_row, b_token)
    tl.store(p_accepted + i_request, tl.where(live, accepted, 0))
    tl.store(p_bonus + i_request, bonus)
    tl.store(p_commit_rows + i_request, emitted)
    tl.store(p_valid + i_request, valid.to(tl.int32))
    if ADVANCE:
        tl.store(p_sequence_lengths + i_request, sequence_length + emitted, mask=live)
        tl.store(p_anchors + i_request, bonus, mask=live)
