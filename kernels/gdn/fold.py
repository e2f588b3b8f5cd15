"""Folding accepted rows into a tile of the state: the device function of commit and lazy commit."""

from __future__ import annotations

import triton
import triton.language as tl

from hybridspec.kernels.gdn.arithmetic import split
from hybridspec.kernels.interpreter import dot


@triton.jit
def fold(b_state, p_key, p_update, p_decay, o_v, o_k, count, V: tl.constexpr, K: tl.constexpr):
    """`e^{G_n} S + sum_{i <= n} e^{G_n - G_i} u_i k_i^T` of a [BV, K] tile, fp32.

    Pointers are those of one layer, request and head; `count` rows are folded.
    """
    o_t = tl.arange(0, 16)
    m_t = o_t < count
    b_update = tl.load(p_update + o_t[None, :] * V + o_v[:, None], mask=m_t[None, :], other=0.0)
    b_key = tl.load(p_key + o_t[:, None] * K + o_k[None, :], mask=m_t[:, None], other=0.0)
    g = tl.load(p_decay + o_t, mask=m_t, other=0.0)
    # Sums from behind: a difference of running sums loses the digits of a gentle tail.
    g_l = tl.load(p_decay + o_t[:, None] + 0 * o_t[None, :], mask=m_t[:, None], other=0.0)
    behind = tl.sum(tl.where(o_t[:, None] > o_t[None, :], g_l, 0.0), axis=0)
    weight = tl.where(m_t, tl.exp(behind), 0.0)
    high, middle, low = split(b_update * weight[None, :])
    zero = tl.zeros(b_state.shape, tl.float32)
    update = dot(high, b_key, dot(middle, b_key, dot(low, b_key, zero)))
    # Tensor cores truncate when they add: a state taken in as their accumulator shrinks a little
    # every round, and nothing takes that back where there is no decay. One rounded step does not.
    decay = tl.zeros(b_state.shape, tl.float32) + tl.exp(tl.sum(g, axis=0))
    return tl.fma(b_state, decay, update)
