"""Merging parts of a row inside a kernel: online log-sum-exp with the two best logits."""

# A jit function seems to return nothing.
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from hybridspec.kernels.interpreter import INTERPRETED

# exp of anything below this is 0 beside a term of 1; keeps 0 x inf out of the weighted sums.
NEGLIGIBLE = tl.constexpr(-100.0)
_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def exp(x):
    """e^x. `tl.exp` spends three more instructions on results that are not normal numbers."""
    return tl.exp2(x * _LOG2_E)


@triton.jit
def widen(x, ticket):
    """`x` (bf16, fp16, fp32) as fp32, not before `ticket` (>= 0) is there.

    The assembler would move arithmetic, and with it the wait for `x`, ahead of the ticket and of
    later loads; so bits pass through an operation whose other operand it only knows by then. For
    bf16 that is the conversion itself, and one instruction each, not the compiler's two for every
    other one.
    """
    if INTERPRETED:
        return x.to(tl.float32)
    elif x.dtype == tl.bfloat16:
        sixteen = tl.where(ticket < 0, 17, 16)
        return tl.inline_asm_elementwise(
            "{ .reg .b32 mask; shl.b32 $0, $2, $3; shl.b32 mask, -1, $3; and.b32 $1, $2, mask; }",
            "=r,=r,r,r,r",
            [x, sixteen],
            dtype=tl.float32,
            is_pure=True,
            pack=2,
        )
    elif x.dtype == tl.float16:
        nothing = tl.where(ticket < 0, 1, 0)
        same = tl.inline_asm_elementwise(
            "xor.b32 $0, $1, $2;", "=r,r,r,r", [x, nothing], dtype=tl.float16, is_pure=True, pack=2
        )
        return same.to(tl.float32)
    else:
        nothing = tl.where(ticket < 0, 1, 0)
        return tl.inline_asm_elementwise(
            "xor.b32 $0, $1, $2;", "=r,r,r", [x, nothing], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def two_best(a_best, a_second, a_token, b_best, b_second, b_token):
    """Best and second best of two pairs; the lower token on ties."""
    first = (a_best > b_best) | ((a_best == b_best) & (a_token < b_token))
    best = tl.where(first, a_best, b_best)
    token = tl.where(first, a_token, b_token)
    second = tl.maximum(tl.minimum(a_best, b_best), tl.maximum(a_second, b_second))
    return best, second, token


@triton.jit
def add_pairs(a_sum, a_weighted, b_sum, b_weighted):
    """Sums of two pairs."""
    return a_sum + b_sum, a_weighted + b_weighted


@triton.jit
def or_zero(b_max):
    """A shift that is safe to subtract: 0 where there is no finite logit."""
    return tl.where(b_max == -float("inf"), 0.0, b_max)


@triton.jit
def rebase(b_best, b_sum, b_weighted, best):
    """Sums of parts whose shift was `b_best`, with `best` as the shift."""
    b_gap = b_best - or_zero(best)
    b_scale = exp(b_gap)
    return b_scale * b_sum, b_scale * (b_weighted + tl.maximum(b_gap, NEGLIGIBLE) * b_sum)


@triton.jit
def merge(b_best, b_second, b_token, b_sum, b_weighted):
    """Merge parts [N] along their axis into scalars, always in the same order.

    A NaN in `b_sum` stays; parts without a finite logit add nothing.
    """
    best, second, token = tl.reduce((b_best, b_second, b_token), 0, two_best)
    b_sum, b_weighted = rebase(b_best, b_sum, b_weighted, best)
    total, weighted = tl.reduce((b_sum, b_weighted), 0, add_pairs)
    return best, second, token, total, weighted


@triton.jit
def probabilities(best, second, total, weighted):
    """p1, p2 and entropy of a merged row; NaN where the row has no distribution."""
    sane = (best > -float("inf")) & (total == total)
    p1 = 1.0 / total
    p2 = exp(second - best) / total
    entropy = tl.log(total) - weighted / total
    nan = float("nan")
    return tl.where(sane, p1, nan), tl.where(sane, p2, nan), tl.where(sane, entropy, nan)
