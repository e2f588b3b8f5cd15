"""Features of draft logits in one pass over them: one launch, a row split over programs.

Each program reduces one chunk of one row to a part; the program of a row that starts last waits for
the parts of the others and merges them, always in the order of the chunks. Derivation and numbers:
README.md.
"""

# A jit function seems to return nothing and to take no launch options.
# pyright: reportGeneralTypeIssues=false, reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hybridspec.errors import UsageError
from hybridspec.kernels.compilation import CompileCase
from hybridspec.kernels.draft_features.parts import (
    NEGLIGIBLE,
    add_pairs,
    exp,
    merge,
    or_zero,
    probabilities,
    rebase,
    two_best,
    widen,
)
from hybridspec.kernels.draft_features.rows import (
    MAX_VOCAB,
    NUM_FIELDS,
    DraftFeatures,
    next_power_of_2,
)
from hybridspec.kernels.draft_features.split import TILING, UNWRITTEN, Tiling, Workspace

_DTYPES = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}
_FIELDS = tl.constexpr(NUM_FIELDS)
_UNWRITTEN = tl.constexpr(UNWRITTEN)


@triton.jit
def _chunk_part(
    b_x, ticket, p_row, start, vocab, VECTORS: tl.constexpr, LANES: tl.constexpr, W: tl.constexpr
):
    """Part of logits [start, start + VECTORS x LANES x W) of a row; those from `vocab` on are none.

    `b_x` holds them, [VECTORS x LANES, W]. A thread keeps VECTORS vectors of W neighbours. Each is
    summed with its own maximum as the shift, so that its exponentials wait for no other vector.
    """
    # Loaded flat: only so does Triton spread the lanes, not the vectors, over the threads.
    b_x = widen(b_x, ticket).reshape(VECTORS, LANES, W)
    b_peak = tl.max(b_x, 2)
    b_gap = b_x - or_zero(b_peak)[:, :, None]
    b_exp = exp(b_gap)
    b_sum = tl.sum(b_exp, 2)
    b_weighted = tl.sum(tl.maximum(b_gap, NEGLIGIBLE) * b_exp, 2)

    b_peak = tl.where(b_peak == b_peak, b_peak, -float("inf"))
    b_none = tl.full((VECTORS, LANES), -float("inf"), tl.float32)
    o_vector = tl.arange(0, VECTORS * LANES).reshape(VECTORS, LANES)
    best, second, vector = tl.reduce((b_peak, b_none, o_vector), 0, two_best)
    best, second, vector = tl.reduce((best, second, vector), 0, two_best)
    # Where in its vector the best logit is, only the winning one is asked, again (it is in L1).
    o_x = start + vector * W + tl.arange(0, W)
    b_again = tl.load(p_row + o_x, mask=o_x < vocab, other=-float("inf")).to(tl.float32)
    b_again = tl.where(b_again == b_again, b_again, -float("inf"))
    _, beside, token = tl.reduce(
        (b_again, tl.full((W,), -float("inf"), tl.float32), o_x), 0, two_best
    )

    total, weighted = rebase(b_peak, b_sum, b_weighted, best)
    total, weighted = tl.reduce(tl.reduce((total, weighted), 0, add_pairs), 0, add_pairs)
    return best, tl.maximum(second, beside), token, total, weighted


@triton.jit
def _bits(x):
    """As an integer that is never `UNWRITTEN`: there is one NaN."""
    return tl.where(x == x, x, float("nan")).to(tl.int32, bitcast=True)


@triton.jit
def _words(p_all, mask, STRIDE: tl.constexpr):
    """The five fields of all parts of a row, read past L1, which may hold an earlier launch's."""
    return (
        tl.load(p_all, mask, other=0, volatile=True),
        tl.load(p_all + STRIDE, mask, other=0, volatile=True),
        tl.load(p_all + 2 * STRIDE, mask, other=0, volatile=True),
        tl.load(p_all + 3 * STRIDE, mask, other=0, volatile=True),
        tl.load(p_all + 4 * STRIDE, mask, other=0, volatile=True),
    )


@triton.jit
def _missing(a, b, c, d, e):
    """Whether any word is not written yet, as 0 or 1."""
    b_missing = (a == _UNWRITTEN) | (b == _UNWRITTEN) | (c == _UNWRITTEN)
    return tl.max((b_missing | (d == _UNWRITTEN) | (e == _UNWRITTEN)).to(tl.int32), 0)


@triton.jit(do_not_specialize=["vocab_offset"])
def features_kernel(
    p_logits,
    p_parts,
    p_tickets,
    p_tokens,
    p_p1,
    p_p2,
    p_entropy,
    p_row_parts,
    stride_row,
    vocab,
    vocab_offset,
    SPLITS: tl.constexpr,
    SPLITS_PADDED: tl.constexpr,
    VECTORS: tl.constexpr,
    LANES: tl.constexpr,
    W: tl.constexpr,
    KEEP_PARTS: tl.constexpr,
):
    """Grid (SPLITS, rows). `KEEP_PARTS`: write the merged part of a row, not its features."""
    i_split = tl.program_id(0)
    i_row = tl.program_id(1).to(tl.int64)
    p_row = p_logits + i_row * stride_row
    start = i_split * (VECTORS * LANES * W)
    o_x = start + tl.arange(0, VECTORS * LANES)[:, None] * W + tl.arange(0, W)[None, :]
    b_x = tl.load(p_row + o_x, mask=o_x < vocab, other=-float("inf"))
    # Behind the loads, whose latency hides it.
    ticket = tl.atomic_add(p_tickets + i_row, 1, sem="relaxed")
    best, second, token, total, weighted = _chunk_part(
        b_x, ticket, p_row, start, vocab, VECTORS, LANES, W
    )
    p_scratch = p_parts + i_row * (_FIELDS * SPLITS_PADDED)
    p_own = p_scratch + i_split
    tl.store(p_own, _bits(best))
    tl.store(p_own + SPLITS_PADDED, _bits(second))
    tl.store(p_own + 2 * SPLITS_PADDED, _bits(token.to(tl.float32)))
    tl.store(p_own + 3 * SPLITS_PADDED, _bits(total))
    tl.store(p_own + 4 * SPLITS_PADDED, _bits(weighted))
    # All programs of the row run by then, so that waiting for their words comes to an end.
    if ticket == SPLITS - 1:
        o_split = tl.arange(0, SPLITS_PADDED)
        mask = o_split < SPLITS
        p_all = p_scratch + o_split
        b_best, b_second, b_token, b_sum, b_weighted = _words(p_all, mask, SPLITS_PADDED)
        while _missing(b_best, b_second, b_token, b_sum, b_weighted) > 0:
            b_best, b_second, b_token, b_sum, b_weighted = _words(p_all, mask, SPLITS_PADDED)
        if SPLITS_PADDED > 32 and LANES > SPLITS_PADDED:
            # A word has several readers then and only one was asked: the others may be behind it.
            b_best, b_second, b_token, b_sum, b_weighted = _words(p_all, mask, SPLITS_PADDED)
        # Every warp reads all words: none may be taken away before all have them.
        tl.debug_barrier()
        for i_field in tl.static_range(_FIELDS):
            tl.store(p_all + i_field * SPLITS_PADDED, _UNWRITTEN, mask=mask)
        tl.store(p_tickets + i_row, 0)
        none = -float("inf")
        # A padding split must not win the tie of a row without a finite logit.
        best, second, winner, total, weighted = merge(
            tl.where(mask, b_best.to(tl.float32, bitcast=True), none),
            tl.where(mask, b_second.to(tl.float32, bitcast=True), none),
            tl.where(mask, b_token.to(tl.float32, bitcast=True), float("inf")),
            b_sum.to(tl.float32, bitcast=True),
            b_weighted.to(tl.float32, bitcast=True),
        )
        if KEEP_PARTS:
            p_out = p_row_parts + i_row * _FIELDS
            tl.store(p_out, best)
            tl.store(p_out + 1, second)
            tl.store(p_out + 2, winner + vocab_offset)
            tl.store(p_out + 3, total)
            tl.store(p_out + 4, weighted)
        else:
            p1, p2, entropy = probabilities(best, second, total, weighted)
            tl.store(p_tokens + i_row, winner.to(tl.int32))
            tl.store(p_p1 + i_row, p1)
            tl.store(p_p2 + i_row, p2)
            tl.store(p_entropy + i_row, entropy)


def draft_features(
    logits_RV: torch.Tensor,
    *,
    vocab: int | None = None,
    out: DraftFeatures | None = None,
    workspace: Workspace | None = None,
    tiling: Tiling = TILING,
) -> DraftFeatures:
    """Top token, its probability, the runner-up's and the entropy of each row, in one launch.

    Args:
        logits_RV: bf16, fp16 or fp32 [R, >= vocab], last dimension dense; rows may be strided.
            Loads are 16 bytes wide where the row stride and `vocab` are multiples of 16.
        vocab: columns that are real, at least 2; None: all.
        out: where to write; None allocates.
        workspace: scratch of at least R rows, made with the same tiling; None allocates.

    Raises:
        UsageError: a shape, dtype or stride that the kernel does not take.
    """
    vocab = _check(logits_RV, vocab, fewest=2)
    rows = logits_RV.shape[0]
    if out is None:
        out = DraftFeatures.empty(rows, logits_RV.device)
    out.check(rows)
    _launch(logits_RV, vocab, 0, out, None, workspace, tiling)
    return out


def row_parts(
    logits_RV: torch.Tensor,
    *,
    vocab: int | None = None,
    vocab_offset: int = 0,
    out: torch.Tensor | None = None,
    workspace: Workspace | None = None,
    tiling: Tiling = TILING,
) -> torch.Tensor:
    """One part a row of a shard of the vocabulary, fp32 [R, 5]: what ranks gather and then merge.

    Args:
        logits_RV: as `draft_features`, columns of this shard only.
        vocab: columns of the shard that are real, none at all included; None: all.
        vocab_offset: token id of the first column.
        out: fp32 [R, 5] to write; None allocates.
        workspace: as `draft_features`.

    Raises:
        UsageError: a shape, dtype or stride that the kernel does not take.
    """
    vocab = _check(logits_RV, vocab, fewest=0)
    if vocab_offset < 0 or vocab_offset + vocab > MAX_VOCAB:
        raise UsageError(
            f"token ids {vocab_offset}..{vocab_offset + vocab} leave 0..{MAX_VOCAB}: parts hold "
            "ids as fp32"
        )
    rows = logits_RV.shape[0]
    if out is None:
        out = torch.empty(rows, NUM_FIELDS, device=logits_RV.device)
    if out.shape != (rows, NUM_FIELDS) or not out.is_contiguous() or out.dtype != torch.float32:
        raise UsageError(f"out is {tuple(out.shape)} {out.dtype}: pass fp32 [{rows}, {NUM_FIELDS}]")
    _launch(logits_RV, vocab, vocab_offset, None, out, workspace, tiling)
    return out


def _check(logits_RV: torch.Tensor, vocab: int | None, *, fewest: int) -> int:
    if logits_RV.ndim != 2 or logits_RV.dtype not in _DTYPES:
        raise UsageError(
            f"logits are {tuple(logits_RV.shape)} {logits_RV.dtype}: pass bf16, fp16 or fp32 [R, V]"
        )
    width = logits_RV.shape[1]
    if width > 1 and logits_RV.stride(1) != 1:
        raise UsageError(f"logits have column stride {logits_RV.stride(1)}: make it 1")
    vocab = width if vocab is None else vocab
    if not fewest <= vocab <= min(width, MAX_VOCAB):
        raise UsageError(f"vocab={vocab} of {width} columns: pass {fewest}..{width}")
    return vocab


def _launch(
    logits_RV: torch.Tensor,
    vocab: int,
    vocab_offset: int,
    features: DraftFeatures | None,
    parts_RF: torch.Tensor | None,
    workspace: Workspace | None,
    tiling: Tiling,
) -> None:
    rows, element_bytes = logits_RV.shape[0], logits_RV.dtype.itemsize
    if rows == 0:
        return
    splits = tiling.splits(vocab, element_bytes)
    padded = next_power_of_2(splits)
    if workspace is None:
        workspace = Workspace.create(rows, vocab, logits_RV.dtype, logits_RV.device, tiling=tiling)
    workspace.check(rows, padded)
    # What the other form would write is never touched.
    spare = workspace.tickets_R
    outputs = (
        (spare, spare, spare, spare)
        if features is None
        else (features.tokens_R, features.p1_R, features.p2_R, features.entropy_R)
    )
    features_kernel[(splits, rows)](
        logits_RV,
        workspace.parts,
        workspace.tickets_R,
        *outputs,
        spare if parts_RF is None else parts_RF,
        logits_RV.stride(0),
        vocab,
        vocab_offset,
        SPLITS=splits,
        SPLITS_PADDED=padded,
        VECTORS=tiling.vectors,
        LANES=32 * tiling.num_warps,
        W=16 // element_bytes,
        KEEP_PARTS=parts_RF is not None,
        num_warps=tiling.num_warps,
    )


def compile_cases() -> list[CompileCase]:
    """Shipped configurations: the three dtypes at 248,320 tokens, features and parts."""
    return [_compile_case(dtype, keep_parts) for dtype in _DTYPES for keep_parts in (False, True)]


def _compile_case(dtype: torch.dtype, keep_parts: bool) -> CompileCase:
    splits = TILING.splits(248320, dtype.itemsize)
    constexprs = {
        "SPLITS": splits,
        "SPLITS_PADDED": next_power_of_2(splits),
        "VECTORS": TILING.vectors,
        "LANES": 32 * TILING.num_warps,
        "W": 16 // dtype.itemsize,
        "KEEP_PARTS": keep_parts,
    }
    signature = {
        "p_logits": _DTYPES[dtype],
        "p_parts": "*i32",
        "p_tickets": "*i32",
        "p_tokens": "*i32" if keep_parts else "*i64",
        **dict.fromkeys(("p_p1", "p_p2", "p_entropy"), "*i32" if keep_parts else "*fp32"),
        "p_row_parts": "*fp32" if keep_parts else "*i32",
        **dict.fromkeys(("stride_row", "vocab", "vocab_offset"), "i32"),
        **dict.fromkeys(constexprs, "constexpr"),
    }
    return CompileCase(
        f"{'parts' if keep_parts else 'features'}-{_DTYPES[dtype][1:]}",
        features_kernel,
        signature,
        constexprs,
        divisible_by_16=frozenset({"stride_row", "vocab"}),
        num_warps=TILING.num_warps,
    )
