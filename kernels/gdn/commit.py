"""Committed state of all GDN layers and requests from compact factors, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hybridspec.errors import UsageError
from hybridspec.kernels.gdn.arithmetic import split
from hybridspec.kernels.gdn.factors import Factors
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
    b_state = b_state * tl.exp(tl.sum(g, axis=0))
    return dot(high, b_key, dot(middle, b_key, dot(low, b_key, b_state)))


@triton.jit
def commit_kernel(
    p_state,
    p_slots,
    p_accepted,
    p_key,
    p_update,
    p_decay,
    s_state_x,
    s_state_slot,
    s_state_h,
    s_key_x,
    s_key_b,
    s_key_h,
    s_update_x,
    s_update_b,
    s_update_h,
    s_decay_x,
    s_decay_b,
    s_decay_h,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    i_tile = tl.program_id(0)
    i_b = tl.program_id(1).to(tl.int64)
    i_x = tl.program_id(2).to(tl.int64)
    i_v = i_tile % (V // BV)
    i_hv = i_tile // (V // BV)
    i_h = i_hv // (HV // H)
    o_v = i_v * BV + tl.arange(0, BV)
    o_k = tl.arange(0, K)
    slot = tl.load(p_slots + i_b).to(tl.int64)
    p_s = p_state + i_x * s_state_x + tl.maximum(slot, 0) * s_state_slot + i_hv * s_state_h
    p_s = p_s + o_v[:, None] * K + o_k[None, :]
    if DEPENDENT:
        b_state = tl.load(p_s)
        tl.extra.cuda.gdc_wait()
        count = tl.load(p_accepted + i_b).to(tl.int32)
        if (slot < 0) | (count <= 0):
            return
    else:
        count = tl.load(p_accepted + i_b).to(tl.int32)
        if (slot < 0) | (count <= 0):
            return
        b_state = tl.load(p_s)
    b_state = fold(
        b_state.to(tl.float32),
        p_key + i_x * s_key_x + i_b * s_key_b + i_h * s_key_h,
        p_update + i_x * s_update_x + i_b * s_update_b + i_hv * s_update_h,
        p_decay + i_x * s_decay_x + i_b * s_decay_b + i_hv * s_decay_h,
        o_v,
        o_k,
        count,
        V,
        K,
    )
    tl.store(p_s, b_state.to(p_state.dtype.element_ty))


def commit(
    state_XSHVK: torch.Tensor,
    slots_B: torch.Tensor,
    accepted_B: torch.Tensor,
    factors: Factors,
    *,
    value_block: int = 16,
    warps: int = 2,
    dependent_launch: bool = False,
) -> None:
    """Advance the states of all layers by each request's accepted rows, in place. One launch.

    Args:
        state_XSHVK: state pools of all layers, fp32 or bf16 [X, slots, HV, V, K].
        slots_B: int32 pool slot of each request, -1 is padding.
        accepted_B: int32 rows to commit, on the device; 0 leaves the state bit-identical.
        factors: of the last verification.
        dependent_launch: the state is read before the previous kernel has finished; right where
            that kernel only reads states, as `verify` does.

    Raises:
        UsageError: shapes, dtypes or strides that do not fit.
    """
    layers, _, value_heads, value_dim, key_dim = state_XSHVK.shape
    if layers != factors.layers or state_XSHVK.stride()[3:] != (key_dim, 1):
        raise UsageError(
            f"state pool of {layers} layers with strides {state_XSHVK.stride()}; factors are of "
            f"{factors.layers} layers, and [V, K] tiles must be contiguous"
        )
    for name, tensor in (("slots", slots_B), ("accepted", accepted_B)):
        if tensor.dtype != torch.int32 or tensor.shape != slots_B.shape:
            raise UsageError(f"{name} is {tensor.dtype} {tuple(tensor.shape)}; expected int32 [B]")
    launch = {"launch_pdl": True} if dependent_launch else {}
    commit_kernel[(value_dim // value_block * value_heads, slots_B.shape[0], layers)](
        state_XSHVK,
        slots_B,
        accepted_B,
        factors.key_XRHTK,
        factors.update_XRHTV,
        factors.decay_XRHT,
        *state_XSHVK.stride()[:3],
        *factors.key_XRHTK.stride()[:3],
        *factors.update_XRHTV.stride()[:3],
        *factors.decay_XRHT.stride()[:3],
        H=factors.key_XRHTK.shape[2],
        HV=value_heads,
        K=key_dim,
        V=value_dim,
        BV=value_block,
        DEPENDENT=dependent_launch,
        num_warps=warps,
        **launch,
    )
