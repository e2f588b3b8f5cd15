"""The target's choice in every verified row: argmax over the vocabulary, a row split over programs.

Rows at or past the length are not read. A program reduces one chunk to a key of 64 bits, the value
above and the complement of its index below, so that the largest key is the first largest value.
Programs of a row meet in an atomic maximum, whose result does not depend on their order; the one
that arrives last writes the index and leaves the scratch as it was.
"""

# A jit function seems to return nothing and to take no launch options.
# pyright: reportGeneralTypeIssues=false, reportCallIssue=false

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from hybridspec.errors import UsageError
from hybridspec.kernels.accept.outcome import BLOCK_SIZE
from hybridspec.kernels.compilation import CompileCase
from hybridspec.kernels.select.selection import require_column

# Neighbours of a thread, loads of a thread, threads of a program: 8 loads of 16 bytes in flight.
LANE, VECTORS, WARPS = 4, 8, 4
CHUNK = LANE * VECTORS * WARPS * 32
# Below the key of every logit, minus infinity included.
_NOTHING = -(1 << 63)
_DTYPES = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16"}


@triton.jit
def ordered_bits(x):
    """fp32 as int32 in the same order: zeros of both signs alike, every NaN above infinity."""
    bits = x.to(tl.int32, bitcast=True)
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    bits = tl.where(x == 0.0, 0, bits)
    return tl.where(x != x, 0x7FFFFFFF, bits)


@triton.jit
def argmax_kernel(
    p_logits,
    p_lengths,
    p_keys,
    p_tickets,
    p_tokens,
    p_candidates,
    stride,
    vocab,
    SPLITS: tl.constexpr,
    VECTORS: tl.constexpr,
    WIDTH: tl.constexpr,
    LIMITS: tl.constexpr,
):
    """Grid (splits, rows of all blocks); WIDTH logits are one load of a program."""
    i_split = tl.program_id(0)
    i_row = tl.program_id(1).to(tl.int64)
    length = tl.maximum(tl.load(p_lengths + i_row // 16), 1)
    if i_row % 16 < length:
        # Every load is on its way before the first is looked at.
        o_x = i_split * (VECTORS * WIDTH) + (
            tl.arange(0, VECTORS)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
        )
        b_x = tl.load(p_logits + i_row * stride + o_x, mask=o_x < vocab, other=-float("inf"))
        # Past the vocabulary even minus infinity, in a row of nothing else, is larger.
        b_bits = tl.where(o_x < vocab, ordered_bits(b_x.to(tl.float32)), -0x80000000)
        b_best = tl.max(b_bits, 0)
        b_place = tl.min(tl.where(b_bits == b_best[None, :], o_x, 0x7FFFFFFF), 0)
        b_key = (b_best.to(tl.int64) << 32) | (0x7FFFFFFF - b_place).to(tl.int64)
        tl.atomic_max(p_keys + i_row, tl.max(b_key, 0), sem="relaxed")
        # Releases the maximum above to whoever comes last, and acquires those of the others.
        if tl.atomic_add(p_tickets + i_row, 1, sem="acq_rel") == SPLITS - 1:
            key = tl.atomic_xchg(p_keys + i_row, -0x8000000000000000, sem="relaxed")
            tl.store(p_tickets + i_row, 0)
            tl.store(p_tokens + i_row, 0x7FFFFFFF - (key & 0x7FFFFFFF))
    elif i_split == 0:
        tl.store(p_tokens + i_row, tl.full((), 0, tl.int64))
        if LIMITS:
            tl.store(p_candidates + i_row, tl.full((), -1, tl.int64))


@dataclass(frozen=True)
class ArgmaxScratch:
    """Scratch of one launch at a time; each leaves it as it found it.

    Attributes:
        keys_R, tickets_R: int64 and int32, one a row.
    """

    keys_R: torch.Tensor
    tickets_R: torch.Tensor

    @classmethod
    def create(cls, requests: int, device: torch.device | str) -> ArgmaxScratch:
        """For at most `requests` blocks."""
        rows = requests * BLOCK_SIZE
        return cls(
            torch.full((rows,), _NOTHING, dtype=torch.int64, device=device),
            torch.zeros(rows, dtype=torch.int32, device=device),
        )


def argmax_of_blocks(
    logits_RV: torch.Tensor,
    lengths_B: torch.Tensor,
    scratch: ArgmaxScratch,
    *,
    candidates_BT: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Index of the first largest logit of each row below the length, as `torch.argmax` on CUDA.

    A NaN counts as larger than everything else, zeros of both signs as equal.

    Args:
        logits_RV: fp32, bf16 or fp16 [B * 16, V], rows of whole blocks; a row is contiguous.
        lengths_B: int32 [B], rows verified; at least one counts as verified.
        scratch: for at least B blocks.
        candidates_BT: int64 [B, 16], anchor and drafts; rows from the length on become -1, as
            `round_control.limit` does it in a launch of its own.
        out: int64 [B * 16]; None allocates. Rows from the length on become 0.

    Raises:
        UsageError: shapes, dtypes or strides that do not fit.
    """
    if (
        logits_RV.ndim != 2
        or logits_RV.dtype not in _DTYPES
        or logits_RV.shape[0] % BLOCK_SIZE
        or not 0 < logits_RV.shape[1] < 1 << 31
        or logits_RV.stride(1) != 1
    ):
        raise UsageError(
            f"logits are {logits_RV.dtype} {tuple(logits_RV.shape)} with strides "
            f"{logits_RV.stride()}; expected fp32, bf16 or fp16 [B * {BLOCK_SIZE}, V] with "
            "contiguous rows"
        )
    rows, vocab = logits_RV.shape
    require_column("lengths", lengths_B, rows // BLOCK_SIZE, (torch.int32,))
    if scratch.keys_R.shape[0] < rows:
        raise UsageError(
            f"the scratch is for {scratch.keys_R.shape[0]} rows, the batch has {rows}: create it "
            "for the largest batch"
        )
    if out is None:
        out = torch.empty(rows, dtype=torch.int64, device=logits_RV.device)
    require_column("tokens", out, rows, (torch.int64,))
    if candidates_BT is not None and not (
        candidates_BT.shape == (rows // BLOCK_SIZE, BLOCK_SIZE)
        and candidates_BT.dtype == torch.int64
        and candidates_BT.is_contiguous()
    ):
        raise UsageError(
            f"candidates are {candidates_BT.dtype} {tuple(candidates_BT.shape)}; expected "
            f"contiguous int64 [B, {BLOCK_SIZE}]"
        )
    if rows == 0:
        return out
    splits = triton.cdiv(vocab, CHUNK)
    argmax_kernel[(splits, rows)](
        logits_RV,
        lengths_B,
        scratch.keys_R,
        scratch.tickets_R,
        out,
        out if candidates_BT is None else candidates_BT,
        logits_RV.stride(0),
        vocab,
        SPLITS=splits,
        VECTORS=VECTORS,
        WIDTH=CHUNK // VECTORS,
        LIMITS=candidates_BT is not None,
        num_warps=WARPS,
    )
    return out


def compile_cases() -> list[CompileCase]:
    """Every dtype of logits at the vocabulary of Qwen3.6."""
    cases = []
    for dtype, kind in _DTYPES.items():
        kinds = {"p_logits": kind, "p_lengths": "*i32", "p_keys": "*i64", "p_tickets": "*i32"}
        kinds |= {"p_tokens": "*i64", "p_candidates": "*i64", "stride": "i32", "vocab": "i32"}
        constexprs = {
            "SPLITS": triton.cdiv(248320, CHUNK),
            "VECTORS": VECTORS,
            "WIDTH": CHUNK // VECTORS,
            "LIMITS": dtype == torch.float32,
        }
        kinds |= dict.fromkeys(constexprs, "constexpr")
        name = f"argmax-{str(dtype).removeprefix('torch.')}"
        aligned = frozenset({"stride", "vocab"})
        cases.append(CompileCase(name, argmax_kernel, kinds, constexprs, aligned, num_warps=WARPS))
    return cases
