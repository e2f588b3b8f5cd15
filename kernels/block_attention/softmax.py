"""One step of a softmax over keys that come block by block."""

# Triton's types are what its compiler makes of them.
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from hybridspec.kernels.conv_window.taps import narrow
from hybridspec.kernels.interpreter import dot


@triton.jit
def softmax_step(score, b_v, peak, total_weight, acc):
    """Take one block of keys in: the new peak, sum of weights and weighted values, all fp32.

    `score` [M, N] is in powers of two, minus infinity where a key is not seen; `b_v` [N, D];
    `peak` and `total_weight` [M], `acc` [M, D]. A row that has seen no key keeps a peak of minus
    infinity and weights of zero.
    """
    highest = tl.maximum(peak, tl.max(score, 1))
    shift = tl.where(highest == float("-inf"), 0.0, highest)
    weight = tl.exp2(score - shift[:, None])
    fade = tl.exp2(peak - shift)
    total_weight = total_weight * fade + tl.sum(weight, 1)
    acc = dot(narrow(weight, b_v.dtype), b_v, acc * fade[:, None])
    return highest, total_weight, acc
