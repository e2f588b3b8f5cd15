"""Merging parts of a row inside a kernel: online log-sum-exp with the two best logits."""

from __future__ import annotations

import triton
import triton.language as tl

# exp of anything below this is 0 beside a term of 1; keeps 0 x inf out of the weighted sums.
NEGLIGIBLE = tl.constexpr(-100.0)
_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def exp(x):
    """e^x. `tl.exp` spends three more instructions on results that are not normal numbers."""
    return tl.exp2(x * _LOG2_E)


@triton.jit
def two_best(a_best, a_second, a_token, b_best, b_second, b_token):
    """Best and second best of two pairs; the lower token on ties."""
    first = (a_best > b_best) | ((a_best == b_best) & (a_token < b_token))
    best = tl.where(first, a_best, b_best)
    token = tl.where(first, a_token, b_token)
    second = tl.maximum(tl.minimum(a_best, b_best), tl.maximum(a_second, b_second))
    return best, second, token


@triton.jit
def _add_pairs(a_sum, a_weighted, b_sum, b_weighted):
    return a_sum + b_sum, a_weighted + b_weighted


@triton.jit
def or_zero(b_max):
    """A shift that is safe to subtract: 0 where there is no finite logit."""
    return tl.where(b_max == -float("inf"), 0.0, b_max)


@triton.jit
def merge(b_best, b_second, b_token, b_sum, b_weighted):
    """Merge parts [N] along their axis into scalars, always in the same order.

    A NaN in `b_sum` stays; parts without a finite logit add nothing.
    """
    best, second, token = tl.reduce((b_best, b_second, b_token), 0, two_best)
    b_gap = b_best - or_zero(best)
    b_scale = exp(b_gap)
    b_rebased = b_scale * (b_weighted + tl.maximum(b_gap, NEGLIGIBLE) * b_sum)
    total, weighted = tl.reduce((b_scale * b_sum, b_rebased), 0, _add_pairs)
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
