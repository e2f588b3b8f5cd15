"""Acceptance by the point-mass rule with coins drawn before: one launch over a split vocabulary.

Every program judges the drafts anew (15 probabilities), so that all of them know which row to draw
from, and sums one chunk of that row in fp64; the program of a request that finishes last finds the
chunk and then the token. Derivation and numbers: README.md.
"""

# A jit function seems to return nothing and to take no launch options.
# pyright: reportGeneralTypeIssues=false, reportCallIssue=false

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from hybridspec.errors import UsageError
from hybridspec.kernels.accept.emit import ROWS, emit, sequence_length_of
from hybridspec.kernels.accept.outcome import (
    BLOCK_SIZE,
    Cursors,
    Outcome,
    check_block,
    outcome_types,
    require,
)
from hybridspec.kernels.compilation import CompileCase

CHUNK = 2048
_NUM_WARPS = 4
_NONE = tl.constexpr(2**31 - 1)
_FLOATS = (torch.float32, torch.float64)


@dataclass(frozen=True)
class SamplingWorkspace:
    """Scratch of one launch at a time: launches that may overlap need one each.

    Attributes:
        sums: fp64, mass of every chunk of every request's row.
        arrivals_B: int32, zero between launches: each launch leaves it as it found it.
    """

    sums: torch.Tensor
    arrivals_B: torch.Tensor

    @classmethod
    def create(
        cls, batch: int, vocab: int, device: torch.device | str, *, chunk: int = CHUNK
    ) -> SamplingWorkspace:
        """For at most `batch` requests of at most `vocab` tokens."""
        sums = torch.empty(batch * _padded(vocab, chunk), dtype=torch.float64, device=device)
        return cls(sums, torch.zeros(batch, dtype=torch.int32, device=device))


@triton.jit
def _weights(p_row, start, vocab, live, removed, CHUNK: tl.constexpr):
    """Ids and fp64 weights of one chunk; the removed token has none, a negative one is NaN."""
    o_token = start + tl.arange(0, CHUNK)
    b_p = tl.load(p_row + o_token, mask=(o_token < vocab) & live, other=0.0)
    b_p = tl.where(o_token == removed, 0.0, b_p)
    return o_token, tl.where(b_p >= 0.0, b_p, float("nan")).to(tl.float64)


@triton.jit
def _first_beyond(o_item, b_cumulative, b_weight, threshold):
    """First item with weight whose cumulative weight exceeds the threshold.

    Where rounding leaves none, the last one with weight; 0 where nothing has any.
    """
    b_weighty = b_weight > 0.0
    first = tl.min(tl.where(b_weighty & (b_cumulative > threshold), o_item, _NONE), 0)
    last = tl.max(tl.where(b_weighty, o_item, 0), 0)
    return tl.where(first == _NONE, last, first)


@triton.jit(do_not_specialize=["stride_drafts", "stride_coins"])
def sampled_kernel(
    p_drafts,
    p_lengths,
    p_probabilities,
    p_coins,
    p_sums,
    p_arrivals,
    p_accepted,
    p_bonus,
    p_emitted,
    p_commit_rows,
    p_valid,
    p_sequence_lengths,
    p_anchors,
    stride_drafts,
    stride_request,
    stride_row,
    stride_coins,
    vocab,
    ADVANCE: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLITS_PADDED: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Grid (SPLITS, B)."""
    i_split = tl.program_id(0)
    i_request = tl.program_id(1).to(tl.int64)
    o_row = tl.arange(0, ROWS)
    length = tl.minimum(tl.load(p_lengths + i_request), ROWS)
    sequence_length = sequence_length_of(i_request, p_sequence_lengths, ADVANCE)
    b_draft = tl.load(p_drafts + i_request * stride_drafts + o_row, mask=o_row < ROWS - 1, other=-1)
    b_coin = tl.load(p_coins + i_request * stride_coins + o_row).to(tl.float64)
    p_target = p_probabilities + i_request * stride_request
    b_judged = o_row < length - 1
    b_known = b_judged & (b_draft >= 0) & (b_draft < vocab)
    b_chance = tl.load(
        p_target + o_row.to(tl.int64) * stride_row + b_draft, mask=b_known, other=0.0
    ).to(tl.float64)
    b_stands = b_coin < b_chance
    accepted = tl.min(tl.where(b_judged & ~b_stands, o_row, tl.maximum(length - 1, 0)), 0)
    b_rejected = b_judged & (o_row == accepted)
    removed = tl.sum(tl.where(b_rejected & b_known, b_draft.to(tl.int32) + 1, 0), 0) - 1

    p_row = p_target + accepted.to(tl.int64) * stride_row
    _, b_weight = _weights(p_row, i_split * CHUNK, vocab, length > 0, removed, CHUNK)
    tl.store(p_sums + i_request * SPLITS_PADDED + i_split, tl.sum(b_weight, 0))
    # One thread stored the sum, and the same one releases it here.
    arrived = tl.atomic_add(p_arrivals + i_request, 1, sem="acq_rel")
    if arrived == SPLITS - 1:
        tl.store(p_arrivals + i_request, 0)
        o_split = tl.arange(0, SPLITS_PADDED)
        # Past L1: it may hold what an earlier launch wrote.
        b_sum = tl.load(
            p_sums + i_request * SPLITS_PADDED + o_split,
            mask=o_split < SPLITS,
            other=0.0,
            cache_modifier=".cg",
        )
        total = tl.sum(b_sum, 0)
        threshold = total * tl.sum(tl.where(o_row == ROWS - 1, b_coin, 0.0), 0)
        chunk = _first_beyond(o_split, tl.cumsum(b_sum, 0), b_sum, threshold)
        before = tl.sum(tl.where(o_split < chunk, b_sum, 0.0), 0)
        o_token, b_weight = _weights(p_row, chunk * CHUNK, vocab, length > 0, removed, CHUNK)
        b_cumulative = before + tl.cumsum(b_weight, 0)
        bonus = _first_beyond(o_token, b_cumulative, b_weight, threshold)

        b_broken = b_judged & (o_row <= accepted) & ~((b_chance >= 0.0) & (b_chance < float("inf")))
        whole = tl.sum(b_broken.to(tl.int32), 0) == 0
        drawn = (total > 0.0) & (total < float("inf")) & (threshold >= 0.0)
        # Rounding kept p(x) below one and x was rejected: it has all the mass.
        alone = (total == 0.0) & (tl.sum(tl.where(b_rejected, b_chance, 0.0), 0) > 0.0)
        valid = (whole & (drawn | alone)) | (length <= 0)
        emit(
            i_request,
            b_draft,
            accepted,
            tl.where(alone, removed, bonus),
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


def accept_sampled(
    drafts_BD: torch.Tensor,
    lengths_B: torch.Tensor,
    probabilities_BTV: torch.Tensor,
    coins_BC: torch.Tensor,
    *,
    cursors: Cursors | None = None,
    out: Outcome | None = None,
    workspace: SamplingWorkspace | None = None,
    chunk: int = CHUNK,
) -> Outcome:
    """Accept draft x with the target's p(x); on rejection draw from p without x, in one launch.

    The drafter proposes one token, a point mass, so min(1, p / q) is p(x) and the residual is p
    with x removed (DESIGN section 6). Exact for every length that was fixed before the coins; the
    draw inverts sums in fp64, where rounding moves no boundary by more than 1e-13 of the mass.

    Only the probabilities of judged drafts and the row drawn from are read. A NaN, an infinite or a
    negative value among them, or no mass, makes the request invalid: it emits nothing.

    Args:
        drafts_BD: int32 or int64 [B, 15]; requests may be strided. Ids outside the vocabulary are
            rejected.
        lengths_B: int32, rows verified, 0..16; 0 leaves the request as it is. Longer ones count as
            16, negative ones as 0.
        probabilities_BTV: fp32 or fp64 [B, 16, V] after temperature and nucleus, each row summing
            to one, last dimension dense.
        coins_BC: fp32 or fp64 [B, 16], fresh uniforms in [0, 1): coin i judges draft i, the last
            draws the token behind.
        cursors: moved in place by the same launch.
        out: where to write; None allocates.
        workspace: scratch of at least B requests, made with the same chunk; None allocates.
        chunk: tokens of one program, a power of two.

    Raises:
        UsageError: a shape, dtype or stride that the kernel does not take.
    """
    batch = check_block(drafts_BD, lengths_B)
    vocab = probabilities_BTV.shape[-1]
    require("probabilities_BTV", probabilities_BTV, (batch, BLOCK_SIZE, vocab), _FLOATS)
    require("coins_BC", coins_BC, (batch, BLOCK_SIZE), _FLOATS)
    for name, values in {"probabilities_BTV": probabilities_BTV, "coins_BC": coins_BC}.items():
        if values.stride(-1) != 1:
            raise UsageError(f"{name} has last stride {values.stride(-1)}: make it 1")
    if out is None:
        out = Outcome.empty(batch, lengths_B.device)
    out.check(batch)
    if cursors is not None:
        cursors.check(batch)
    if batch == 0:
        return out
    if workspace is None:
        workspace = SamplingWorkspace.create(batch, vocab, lengths_B.device, chunk=chunk)
    padded = _padded(vocab, chunk)
    if workspace.sums.numel() < batch * padded or workspace.arrivals_B.shape[0] < batch:
        raise UsageError(f"the workspace is too small for {batch} x {vocab}: create a larger one")
    splits = -(-vocab // chunk)
    sampled_kernel[(splits, batch)](
        drafts_BD,
        lengths_B,
        probabilities_BTV,
        coins_BC,
        workspace.sums,
        workspace.arrivals_B,
        out.accepted_B,
        out.bonus_B,
        out.emitted_BT,
        out.commit_rows_B,
        out.valid_B,
        # Without cursors nothing is read or written there.
        lengths_B if cursors is None else cursors.sequence_lengths_B,
        lengths_B if cursors is None else cursors.anchors_B,
        drafts_BD.stride(0),
        probabilities_BTV.stride(0),
        probabilities_BTV.stride(1),
        coins_BC.stride(0),
        vocab,
        ADVANCE=cursors is not None,
        SPLITS=splits,
        SPLITS_PADDED=padded,
        CHUNK=chunk,
        num_warps=_NUM_WARPS,
    )
    return out


def _padded(vocab: int, chunk: int) -> int:
    """Chunks of a row, rounded up to a power of two."""
    return 1 << (-(-vocab // chunk) - 1).bit_length()


def compile_cases() -> list[CompileCase]:
    """Shipped configurations: both widths of token ids at 248,320 tokens."""
    cases = []
    for token in ("*i32", "*i64"):
        constexprs = {
            "ADVANCE": True,
            "SPLITS": -(-248320 // CHUNK),
            "SPLITS_PADDED": _padded(248320, CHUNK),
            "CHUNK": CHUNK,
        }
        strides = ("stride_drafts", "stride_request", "stride_row", "stride_coins", "vocab")
        signature = {
            "p_drafts": token,
            "p_lengths": "*i32",
            "p_probabilities": "*fp32",
            "p_coins": "*fp64",
            "p_sums": "*fp64",
            "p_arrivals": "*i32",
            **outcome_types(token),
            **dict.fromkeys(strides, "i32"),
            **dict.fromkeys(constexprs, "constexpr"),
        }
        cases.append(
            CompileCase(
                f"sampled-{token[1:]}",
                sampled_kernel,
                signature,
                constexprs,
                divisible_by_16=frozenset({"stride_request", "stride_row", "vocab"}),
                num_warps=_NUM_WARPS,
            )
        )
    return cases
