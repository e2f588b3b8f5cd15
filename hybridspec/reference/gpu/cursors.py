"""Where each request stands at the start of a round, and the rules of length that need no tables.

`begin` turns limits and contexts into caps; `fixed` lengths, EVICT's quotient and prefill's advance
are one small launch each, so that every mode of a round is a captured graph.
"""

# Launch options and jit functions are outside what pyright can follow.
# pyright: reportGeneralTypeIssues=false, reportCallIssue=false, reportArgumentType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def begin_kernel(
    p_limits, p_starts, p_fixed, p_caps, p_lengths, p_fallback, max_context, FIXED: tl.constexpr
):
    """Grid (B,)."""
    i_b = tl.program_id(0)
    room = max_context - tl.load(p_starts + i_b) - 1
    cap = tl.maximum(tl.minimum(tl.load(p_limits + i_b), room), 0)
    tl.store(p_caps + i_b, cap)
    tl.store(p_fallback + i_b, 0)
    if FIXED:
        tl.store(p_lengths + i_b, tl.minimum(tl.load(p_fixed + i_b), cap))


@triton.jit
def quotient_kernel(p_p1, p_verify_us, p_caps, p_lengths, stride_p1, DRAFTS: tl.constexpr):
    """Grid (B,): the first length with the best expected tokens over verification time."""
    i_b = tl.program_id(0)
    cap = tl.load(p_caps + i_b)
    survival = tl.load(p_verify_us).to(tl.float64) * 0.0 + 1.0
    expected = survival
    best = expected / tl.load(p_verify_us)
    length = tl.minimum(cap, 1)
    for i_d in tl.static_range(DRAFTS):
        p1 = tl.load(p_p1 + i_b * stride_p1 + i_d).to(tl.float64)
        survival = survival * tl.where((p1 >= 0.0) & (p1 <= 1.0), p1, 0.0)
        expected = expected + survival
        quotient = expected / tl.load(p_verify_us + i_d + 1)
        better = (quotient > best * (1.0 + 1e-12)) & (i_d + 2 <= cap)
        length = tl.where(better, i_d + 2, length)
        best = tl.where(better, quotient, best)
    tl.store(p_lengths + i_b, length)


@triton.jit
def advance_kernel(p_tokens, p_lengths, p_starts, p_anchors, p_commit_rows, ROWS: tl.constexpr):
    """Grid (B,): all rows of a block of known tokens become real."""
    i_b = tl.program_id(0)
    length = tl.minimum(tl.load(p_lengths + i_b), ROWS)
    token = tl.load(p_tokens + i_b * ROWS + tl.maximum(length - 1, 0))
    tl.store(p_commit_rows + i_b, length)
    tl.store(p_starts + i_b, tl.load(p_starts + i_b) + length)
    tl.store(p_anchors + i_b, token, mask=length > 0)


def begin(
    limits_B: torch.Tensor,
    starts_B: torch.Tensor,
    caps_B: torch.Tensor,
    *,
    max_context: int,
    fixed_B: torch.Tensor | None = None,
    lengths_B: torch.Tensor,
    fallback_B: torch.Tensor,
) -> None:
    """`caps = min(limit, max_context - start - 1)`, at least 0; with `fixed_B` lengths as well.

    Args:
        limits_B: int32, longest block of each request; 0 where it takes no part.
        starts_B: int32, position of each anchor.
        caps_B: int32, written. lengths_B: int32, written where `fixed_B` is given.
        fallback_B: int32, zeroed: only a policy's choice can fall back.
    """
    begin_kernel[(limits_B.shape[0],)](
        limits_B,
        starts_B,
        limits_B if fixed_B is None else fixed_B,
        caps_B,
        lengths_B,
        fallback_B,
        max_context,
        FIXED=fixed_B is not None,
        num_warps=1,
    )


def best_quotient(
    p1_BD: torch.Tensor, verify_us_L: torch.Tensor, caps_B: torch.Tensor, lengths_B: torch.Tensor
) -> None:
    """EVICT's rule on a chain: argmax E(L) / T_v(L), E from raw top-1 probabilities, ties short.

    Args:
        p1_BD: fp32 [B, 15].
        verify_us_L: fp64 [16], time of L = 1..16 without the draft pass.
        caps_B, lengths_B: int32; the lengths are written.
    """
    quotient_kernel[(caps_B.shape[0],)](
        p1_BD,
        verify_us_L,
        caps_B,
        lengths_B,
        p1_BD.stride(0),
        DRAFTS=p1_BD.shape[1],
        num_warps=1,
    )


def advance(
    tokens_BT: torch.Tensor,
    lengths_B: torch.Tensor,
    starts_B: torch.Tensor,
    anchors_B: torch.Tensor,
    commit_rows_B: torch.Tensor,
) -> None:
    """After a block of known tokens: all of it is committed, the last row's token is the anchor.

    Args:
        tokens_BT: int32 [B, rows], the target's choice behind each row.
        lengths_B: int32, known tokens of each request.
        starts_B, anchors_B: int32, moved. commit_rows_B: int32, written.
    """
    advance_kernel[(lengths_B.shape[0],)](
        tokens_BT,
        lengths_B,
        starts_B,
        anchors_B,
        commit_rows_B,
        ROWS=tokens_BT.shape[1],
        num_warps=1,
    )
