"""Routers: top-k experts of every row, rows past the length masked, and the shared expert's SwiGLU.

One launch. Behind it `small_moe` runs the routed experts; a masked row has ids -1 and weights 0 and
loads none (what `kernels/route_mask` calls `drop`, without a launch of its own).
"""

# Launch options and jit functions are outside what pyright can follow.
# pyright: reportGeneralTypeIssues=false, reportCallIssue=false, reportArgumentType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hybridspec.kernels.conv_window.taps import narrow
from hybridspec.kernels.dependent import wait_for_inputs
from hybridspec.reference.gpu.launching import launch_options


@triton.jit
def route_kernel(
    p_front,
    p_lengths,
    p_forced,
    p_ids,
    p_weights,
    p_shared,
    stride_front,
    ROWS: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SHARED: tl.constexpr,
    BLOCK_S: tl.constexpr,
    NORMALISE: tl.constexpr,
    MASKED: tl.constexpr,
    FORCED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid (B x ROWS, 2): program 0 of a row routes it, program 1 is for the shared expert."""
    wait_for_inputs(DEPENDENT)
    i_row = tl.program_id(0).to(tl.int64)
    p_row = p_front + i_row * stride_front
    if tl.program_id(1) == 1:
        o_s = tl.arange(0, BLOCK_S)
        m_s = o_s < SHARED
        gate = tl.load(p_row + EXPERTS + o_s, mask=m_s, other=0.0).to(tl.float32)
        up = tl.load(p_row + EXPERTS + SHARED + o_s, mask=m_s, other=0.0).to(tl.float32)
        inner = gate / (1.0 + tl.exp(-gate)) * up
        tl.store(p_shared + i_row * SHARED + o_s, narrow(inner, p_shared.dtype.element_ty), m_s)
    else:
        o_e = tl.arange(0, BLOCK_E)
        m_e = o_e < EXPERTS
        logit = tl.load(p_row + o_e, mask=m_e, other=float("-inf")).to(tl.float32)
        # Order of floats as integers, the lower expert first among equals: one reduction a choice.
        bits = logit.to(tl.int32, bitcast=True)
        order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
        key = (order.to(tl.int64) << 16) + (EXPERTS - 1 - o_e)
        key = tl.where(m_e, key, -9223372036854775807)
        o_k = tl.arange(0, BLOCK_K)
        ids = tl.full([BLOCK_K], -1, tl.int32)
        chosen = tl.full([BLOCK_K], float("-inf"), tl.float32)
        for i_k in tl.static_range(TOP_K):
            best = tl.max(key, 0)
            taken = key == best
            expert = EXPERTS - 1 - (best & 0xFFFF).to(tl.int32)
            value = tl.sum(tl.where(taken, logit, 0.0), 0)
            ids = tl.where(o_k == i_k, expert, ids)
            chosen = tl.where(o_k == i_k, value, chosen)
            key = tl.where(taken, -9223372036854775807, key)
        peak = tl.max(chosen, 0)
        weight = tl.exp(chosen - peak)
        if NORMALISE:
            weight = weight / tl.sum(weight, 0)
        else:
            weight = weight / tl.sum(tl.exp(logit - peak), 0)
        if FORCED:
            ids = tl.load(p_forced + i_row * TOP_K + o_k, mask=o_k < TOP_K, other=-1)
        if MASKED:
            live = i_row % ROWS < tl.load(p_lengths + i_row // ROWS)
            ids = tl.where(live, ids, -1)
            weight = tl.where(live, weight, 0.0)
        m_k = o_k < TOP_K
        tl.store(p_ids + i_row * TOP_K + o_k, ids, mask=m_k)
        tl.store(p_weights + i_row * TOP_K + o_k, weight, mask=m_k)


def route(
    front_RF: torch.Tensor,
    lengths_B: torch.Tensor | None,
    ids_RK: torch.Tensor,
    weights_RK: torch.Tensor,
    shared_RS: torch.Tensor,
    *,
    rows: int,
    experts: int,
    normalise: bool,
    forced_RK: torch.Tensor | None = None,
) -> None:
    """Experts and weights of every row, and silu(gate) * up of the shared expert. One launch.

    Args:
        front_RF: [B x rows, >= experts + 2 x shared]: router logits, then the shared expert's
            gate and up; what follows is not read.
        lengths_B: int32, rows of each request that load experts; None: all of them.
        ids_RK, weights_RK: int32 and fp32 [B x rows, top-k], written; -1 and 0 past the length.
        shared_RS: [B x rows, shared], written.
        normalise: weights are a softmax over the chosen logits, else over all of them.
        forced_RK: int32 experts to take instead, for measuring; weights stay the router's.
    """
    total, top_k = ids_RK.shape
    shared = shared_RS.shape[1]
    route_kernel[(total, 2)](
        front_RF,
        ids_RK if lengths_B is None else lengths_B,
        ids_RK if forced_RK is None else forced_RK,
        ids_RK,
        weights_RK,
        shared_RS,
        front_RF.stride(0),
        ROWS=rows,
        EXPERTS=experts,
        BLOCK_E=triton.next_power_of_2(experts),
        TOP_K=top_k,
        BLOCK_K=triton.next_power_of_2(top_k),
        SHARED=shared,
        BLOCK_S=triton.next_power_of_2(shared),
        NORMALISE=normalise,
        MASKED=lengths_B is not None,
        FORCED=forced_RK is not None,
        num_warps=1,
        **launch_options(front_RF.device),
    )
