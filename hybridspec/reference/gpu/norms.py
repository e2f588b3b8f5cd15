"""Embedding, residual sums and RMS norms of a captured forward pass, one launch each.

Norms are taken in fp32 of the rounded residual, as `reference/layers.Norm` takes them.
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
def _normed(v, b_weight, eps, HIDDEN: tl.constexpr):
    return v * (1.0 / tl.sqrt(tl.sum(v * v, 0) / HIDDEN + eps)) * b_weight


@triton.jit
def embed_kernel(
    p_table,
    p_anchors,
    p_drafts,
    p_weight,
    p_residual,
    p_hidden,
    eps,
    fill,
    ROWS: tl.constexpr,
    DRAFTS: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    FILL: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid (B x ROWS,): row 0 of a request is its anchor, the others its drafts or `fill`."""
    i_row = tl.program_id(0).to(tl.int64)
    i_request, i_t = i_row // ROWS, i_row % ROWS
    o_h = tl.arange(0, BLOCK)
    mask = o_h < HIDDEN
    b_weight = tl.load(p_weight + o_h, mask=mask, other=0.0)
    wait_for_inputs(DEPENDENT)
    if FILL:
        token = tl.where(i_t == 0, tl.load(p_anchors + i_request), fill)
    else:
        draft = tl.load(p_drafts + i_request * DRAFTS + tl.maximum(i_t - 1, 0))
        token = tl.where(i_t == 0, tl.load(p_anchors + i_request), draft)
    b_row = tl.load(
        p_table + tl.maximum(token, 0).to(tl.int64) * HIDDEN + o_h, mask=mask, other=0.0
    )
    tl.store(p_residual + i_row * HIDDEN + o_h, b_row, mask=mask)
    out = _normed(b_row.to(tl.float32), b_weight, eps, HIDDEN)
    tl.store(p_hidden + i_row * HIDDEN + o_h, narrow(out, p_hidden.dtype.element_ty), mask=mask)


@triton.jit
def add_norm_kernel(
    p_residual,
    p_delta,
    p_shared,
    p_switch,
    p_weight,
    p_hidden,
    p_feature,
    eps,
    stride_switch,
    stride_feature,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    SHARED: tl.constexpr,
    FEATURE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid (rows,): residual += delta (+ sigmoid(switch) shared), hidden = norm(residual)."""
    i_row = tl.program_id(0).to(tl.int64)
    o_h = tl.arange(0, BLOCK)
    mask = o_h < HIDDEN
    b_weight = tl.load(p_weight + o_h, mask=mask, other=0.0)
    wait_for_inputs(DEPENDENT)
    o_row = i_row * HIDDEN + o_h
    v = tl.load(p_residual + o_row, mask=mask, other=0.0).to(tl.float32)
    delta = tl.load(p_delta + o_row, mask=mask, other=0.0).to(tl.float32)
    if SHARED:
        switch = tl.load(p_switch + i_row * stride_switch).to(tl.float32)
        shared = tl.load(p_shared + o_row, mask=mask, other=0.0).to(tl.float32)
        delta = delta + shared / (1.0 + tl.exp(-switch))
        delta = narrow(delta, p_residual.dtype.element_ty).to(tl.float32)
    b_sum = narrow(v + delta, p_residual.dtype.element_ty)
    tl.store(p_residual + o_row, b_sum, mask=mask)
    if FEATURE:
        tl.store(p_feature + i_row * stride_feature + o_h, b_sum, mask=mask)
    out = _normed(b_sum.to(tl.float32), b_weight, eps, HIDDEN)
    tl.store(p_hidden + o_row, narrow(out, p_hidden.dtype.element_ty), mask=mask)


@triton.jit
def norm_kernel(
    p_x,
    p_weight,
    p_out,
    eps,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid (rows,): an RMS norm alone."""
    i_row = tl.program_id(0).to(tl.int64)
    o_h = tl.arange(0, BLOCK)
    mask = o_h < HIDDEN
    b_weight = tl.load(p_weight + o_h, mask=mask, other=0.0)
    wait_for_inputs(DEPENDENT)
    v = tl.load(p_x + i_row * HIDDEN + o_h, mask=mask, other=0.0).to(tl.float32)
    out = _normed(v, b_weight, eps, HIDDEN)
    tl.store(p_out + i_row * HIDDEN + o_h, narrow(out, p_out.dtype.element_ty), mask=mask)


@triton.jit
def gated_norm_kernel(
    p_x,
    p_z,
    p_weight,
    p_out,
    eps,
    stride_z,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PART: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid (rows, HEADS / PART): norm of each head of GDN's output, times silu(z)."""
    i_row = tl.program_id(0).to(tl.int64)
    o_head = tl.program_id(1) * PART + tl.arange(0, PART)
    o_d = tl.arange(0, DIM)
    b_weight = tl.load(p_weight + o_d)
    wait_for_inputs(DEPENDENT)
    o_x = o_head[:, None] * DIM + o_d[None, :]
    x = tl.load(p_x + i_row * (HEADS * DIM) + o_x).to(tl.float32)
    z = tl.load(p_z + i_row * stride_z + o_x).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 1) / DIM + eps)
    out = x * scale[:, None] * b_weight[None, :] * (z / (1.0 + tl.exp(-z)))
    tl.store(p_out + i_row * (HEADS * DIM) + o_x, narrow(out, p_out.dtype.element_ty))


@triton.jit
def swiglu_kernel(
    p_gate_up, p_out, stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr
):
    """Grid (rows, WIDTH / BLOCK): silu(gate) * up of a fused projection."""
    wait_for_inputs(DEPENDENT)
    i_row = tl.program_id(0).to(tl.int64)
    o_w = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = o_w < WIDTH
    gate = tl.load(p_gate_up + i_row * stride + o_w, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(p_gate_up + i_row * stride + WIDTH + o_w, mask=mask, other=0.0).to(tl.float32)
    out = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(p_out + i_row * WIDTH + o_w, narrow(out, p_out.dtype.element_ty), mask=mask)


def embed(
    table_VH: torch.Tensor,
    anchors_B: torch.Tensor,
    drafts_BD: torch.Tensor,
    weight_H: torch.Tensor,
    eps: float,
    *,
    rows: int,
    residual_RH: torch.Tensor,
    hidden_RH: torch.Tensor,
    fill: int | None = None,
) -> None:
    """Residual and normed rows of blocks of tokens; with `fill` that token instead of the drafts.

    Args:
        anchors_B, drafts_BD: int32 [B] and [B, 15].
        weight_H: fp32 factor of the norm.
        residual_RH, hidden_RH: [B x rows, H], written.
    """
    hidden = table_VH.shape[1]
    embed_kernel[(anchors_B.shape[0] * rows,)](
        table_VH,
        anchors_B,
        drafts_BD,
        weight_H,
        residual_RH,
        hidden_RH,
        eps,
        -1 if fill is None else fill,
        ROWS=rows,
        DRAFTS=drafts_BD.stride(0),
        HIDDEN=hidden,
        BLOCK=triton.next_power_of_2(hidden),
        FILL=fill is not None,
        **launch_options(table_VH.device),
    )


def add_norm(
    residual_RH: torch.Tensor,
    delta_RH: torch.Tensor,
    weight_H: torch.Tensor,
    eps: float,
    hidden_RH: torch.Tensor,
    *,
    shared_RH: torch.Tensor | None = None,
    switch_R: torch.Tensor | None = None,
    feature_RH: torch.Tensor | None = None,
) -> None:
    """`residual += delta`, `hidden = norm(residual)`; both [R, H] in the model's dtype.

    Args:
        shared_RH, switch_R: output of the shared expert and the logit of its gate, added to delta.
        feature_RH: where the new residual is kept as well, any row stride.
    """
    rows, hidden = residual_RH.shape
    shared = residual_RH if shared_RH is None else shared_RH
    switch = residual_RH if switch_R is None else switch_R
    feature = residual_RH if feature_RH is None else feature_RH
    add_norm_kernel[(rows,)](
        residual_RH,
        delta_RH,
        shared,
        switch,
        weight_H,
        hidden_RH,
        feature,
        eps,
        switch.stride(0),
        feature.stride(0),
        HIDDEN=hidden,
        BLOCK=triton.next_power_of_2(hidden),
        SHARED=shared_RH is not None,
        FEATURE=feature_RH is not None,
        **launch_options(residual_RH.device),
    )


def rms_norm(x_RH: torch.Tensor, weight_H: torch.Tensor, eps: float, out_RH: torch.Tensor) -> None:
    """`out = x / sqrt(mean(x^2) + eps) * weight`."""
    rows, hidden = x_RH.shape
    norm_kernel[(rows,)](
        x_RH,
        weight_H,
        out_RH,
        eps,
        HIDDEN=hidden,
        BLOCK=triton.next_power_of_2(hidden),
        **launch_options(x_RH.device),
    )


def gated_norm(
    x_RHV: torch.Tensor,
    z_RX: torch.Tensor,
    weight_V: torch.Tensor,
    eps: float,
    out_RX: torch.Tensor,
) -> None:
    """Norm of each GDN head times silu(z): [R, heads, V] and z [R, heads x V] to [R, heads x V].

    z may be a slice of a wider projection.
    """
    rows, heads, dim = x_RHV.shape
    part = next(p for p in (8, 4, 2, 1) if heads % p == 0)
    gated_norm_kernel[(rows, heads // part)](
        x_RHV,
        z_RX,
        weight_V,
        out_RX,
        eps,
        z_RX.stride(0),
        HEADS=heads,
        DIM=dim,
        PART=part,
        **launch_options(x_RHV.device),
    )


def swiglu(gate_up_RW: torch.Tensor, out_RW: torch.Tensor) -> None:
    """`silu(gate) * up` of [R, 2 x width] into [R, width]."""
    rows, width = out_RW.shape
    block = min(1024, triton.next_power_of_2(width))
    swiglu_kernel[(rows, triton.cdiv(width, block))](
        gate_up_RW,
        out_RW,
        gate_up_RW.stride(0),
        WIDTH=width,
        BLOCK=block,
        **launch_options(out_RW.device),
    )
