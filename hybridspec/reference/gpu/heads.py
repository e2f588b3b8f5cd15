"""Attention heads of new rows: norms, rotary positions, and their place in the KV cache.

A rotated head is `y * cos + partner(y) * sin`, halves of the rotary part paired (NeoX form), all in
fp32 and rounded once. The softmax scale rides on the queries' norm weights.
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
def _rotated(p_x, p_weight, p_cos, p_sin, position, eps, D: tl.constexpr, HALF: tl.constexpr):
    """One normed and rotated head [D] in fp32."""
    o_d = tl.arange(0, D)
    rotary = o_d < 2 * HALF
    partner = tl.where(rotary, tl.where(o_d < HALF, o_d + HALF, o_d - HALF), o_d)
    x = tl.load(p_x + o_d).to(tl.float32)
    beside = tl.load(p_x + partner).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / D + eps)
    x = x * scale * tl.load(p_weight + o_d)
    beside = beside * scale * tl.load(p_weight + partner)
    o_angle = position * HALF + o_d % HALF
    cos = tl.load(p_cos + o_angle, mask=rotary, other=1.0)
    sin = tl.load(p_sin + o_angle, mask=rotary, other=0.0)
    return x * cos + tl.where(o_d < HALF, -beside, beside) * sin


@triton.jit
def heads_kernel(
    p_front,
    p_weight,
    p_cos,
    p_sin,
    p_starts,
    p_q,
    p_keys,
    p_values,
    eps,
    stride_front,
    stride_cache,
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid (B x ROWS, HEADS + 2 KV_HEADS): a head of queries, keys or values of a row."""
    wait_for_inputs(DEPENDENT)
    i_row = tl.program_id(0).to(tl.int64)
    i_head = tl.program_id(1)
    i_request = i_row // ROWS
    position = (tl.load(p_starts + i_request) + i_row % ROWS).to(tl.int64)
    o_d = tl.arange(0, D)
    p_x = p_front + i_row * stride_front + i_head * D
    p_here = i_request * stride_cache + position * (KV_HEADS * D)
    if i_head < HEADS:
        out = _rotated(p_x, p_weight, p_cos, p_sin, position, eps, D, HALF)
        tl.store(p_q + (i_row * HEADS + i_head) * D + o_d, narrow(out, p_q.dtype.element_ty))
    elif i_head < HEADS + KV_HEADS:
        out = _rotated(p_x, p_weight + D, p_cos, p_sin, position, eps, D, HALF)
        p_to = p_keys + p_here + (i_head - HEADS) * D
        tl.store(p_to + o_d, narrow(out, p_keys.dtype.element_ty))
    else:
        p_to = p_values + p_here + (i_head - HEADS - KV_HEADS) * D
        tl.store(p_to + o_d, tl.load(p_x + o_d))


@triton.jit
def inject_kernel(
    p_kv,
    p_weight,
    p_cos,
    p_sin,
    p_starts,
    p_keys,
    p_values,
    eps,
    stride_layer,
    stride_cache,
    ROWS: tl.constexpr,
    LAYERS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid (B x ROWS, LAYERS x KV_HEADS): keys and values of one drafter head from a target row."""
    wait_for_inputs(DEPENDENT)
    i_row = tl.program_id(0).to(tl.int64)
    i_layer = (tl.program_id(1) // KV_HEADS).to(tl.int64)
    i_head = tl.program_id(1) % KV_HEADS
    i_request = i_row // ROWS
    position = (tl.load(p_starts + i_request) + i_row % ROWS).to(tl.int64)
    o_d = tl.arange(0, D)
    p_x = p_kv + ((i_row * LAYERS + i_layer) * 2 * KV_HEADS + i_head) * D
    o_to = i_layer * stride_layer + i_request * stride_cache
    o_to += position * (KV_HEADS * D) + i_head * D
    out = _rotated(p_x, p_weight + i_layer * D, p_cos, p_sin, position, eps, D, HALF)
    tl.store(p_keys + o_to + o_d, narrow(out, p_keys.dtype.element_ty))
    tl.store(p_values + o_to + o_d, tl.load(p_x + KV_HEADS * D + o_d))


def rotary_halves(
    positions: int, rotary_dim: int, theta: float, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines fp32 [positions, rotary_dim / 2]."""
    exponent = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device=device) / rotary_dim
    angles = torch.arange(positions, dtype=torch.float32, device=device)[:, None] * (
        1.0 / theta**exponent
    )
    return angles.cos(), angles.sin()


def place_heads(
    front_RF: torch.Tensor,
    weight_2D: torch.Tensor,
    rotary: tuple[torch.Tensor, torch.Tensor],
    starts_B: torch.Tensor,
    eps: float,
    *,
    rows: int,
    q_RHD: torch.Tensor,
    keys_BCGD: torch.Tensor,
    values_BCGD: torch.Tensor,
) -> None:
    """Queries of new rows to `q_RHD`, their keys and values to the cache. One launch.

    Args:
        front_RF: projections, heads of queries, then keys, then values; any row stride.
        weight_2D: fp32 norm weights of queries (softmax scale included) and keys.
        rotary: from `rotary_halves`.
        starts_B: int32, position of each request's row 0; positions up to start + rows - 1 are
            written whether or not their rows are verified.
        keys_BCGD, values_BCGD: caches of one layer [B, capacity, KV heads, D].
    """
    _, heads, dim = q_RHD.shape
    kv_heads = keys_BCGD.shape[2]
    heads_kernel[(starts_B.shape[0] * rows, heads + 2 * kv_heads)](
        front_RF,
        weight_2D,
        *rotary,
        starts_B,
        q_RHD,
        keys_BCGD,
        values_BCGD,
        eps,
        front_RF.stride(0),
        keys_BCGD.stride(0),
        ROWS=rows,
        HEADS=heads,
        KV_HEADS=kv_heads,
        D=dim,
        HALF=rotary[0].shape[1],
        num_warps=1,
        **launch_options(starts_B.device),
    )


def inject_heads(
    kv_RX: torch.Tensor,
    weight_LD: torch.Tensor,
    rotary: tuple[torch.Tensor, torch.Tensor],
    starts_B: torch.Tensor,
    eps: float,
    *,
    rows: int,
    keys_LBCGD: torch.Tensor,
    values_LBCGD: torch.Tensor,
) -> None:
    """Keys and values of all drafter layers from projected target rows. One launch.

    Args:
        kv_RX: [R, layers x 2 x KV heads x D], keys before values in each layer.
        weight_LD: fp32 norm weights of the keys.
        keys_LBCGD, values_LBCGD: the drafter's caches.
    """
    layers, _, _, kv_heads, dim = keys_LBCGD.shape
    inject_kernel[(starts_B.shape[0] * rows, layers * kv_heads)](
        kv_RX,
        weight_LD,
        *rotary,
        starts_B,
        keys_LBCGD,
        values_LBCGD,
        eps,
        keys_LBCGD.stride(0),
        keys_LBCGD.stride(1),
        ROWS=rows,
        LAYERS=layers,
        KV_HEADS=kv_heads,
        D=dim,
        HALF=rotary[0].shape[1],
        num_warps=1,
        **launch_options(starts_B.device),
    )
