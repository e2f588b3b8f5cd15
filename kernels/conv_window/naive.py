"""The conv in front of Gated DeltaNet over one block of rows, in plain torch: the oracle.

Everything is computed in the dtype it is given, so that a test can ask for float64. Like the
engine's own kernel, products of one tap are rounded to the dtype of the rows (bf16 keeps eight
bits) and summed in fp32 or wider, oldest tap first, after the bias.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

WIDTH = 4
COLUMNS = WIDTH - 1
NORM_EPSILON = 1e-6
SOFTPLUS_THRESHOLD = 20.0


class Prepared(NamedTuple):
    """What the GDN block verify reads, zero past each request's length.

    Attributes:
        q_BTHD: queries after conv and silu, not normalised.
        k_BTHD: keys, likewise.
        v_BTHD: values, with `num_value_heads` heads.
        g_BHT: log decay of each value head, fp32.
        beta_BHT: write strength of each value head, fp32.
        rq_BHT: 1 / ||q|| of each key head, fp32.
        rk_BHT: 1 / ||k||, likewise.
    """

    q_BTHD: Tensor
    k_BTHD: Tensor
    v_BTHD: Tensor
    g_BHT: Tensor
    beta_BHT: Tensor
    rq_BHT: Tensor
    rk_BHT: Tensor


def conv_row(window_CW: Tensor, row_C: Tensor, weight_CW: Tensor, bias_C: Tensor | None) -> Tensor:
    """silu(bias + sum_j taps[:, j] weight[:, j]) [C] of one row, taps = window ++ row."""
    taps_CW = torch.cat([window_CW.to(row_C.dtype), row_C[:, None]], dim=1)
    wide = torch.float64 if row_C.dtype == torch.float64 else torch.float32
    total_C = torch.zeros_like(row_C, dtype=wide) if bias_C is None else bias_C.to(wide)
    for tap in range(WIDTH):
        total_C = total_C + (taps_CW[:, tap] * weight_CW[:, tap]).to(wide)
    return (total_C / (1 + torch.exp(-total_C))).to(row_C.dtype)


def next_window(window_CW: Tensor, rows_TC: Tensor) -> Tensor:
    """Window [C, 3] after the rows [n, C]: the last three columns of window ++ rows."""
    columns = torch.cat([window_CW, rows_TC.T.to(window_CW.dtype)], dim=1)
    return columns[:, -COLUMNS:]


def verify(
    rows_BTC: Tensor,
    pool_SCW: Tensor,
    weight_CW: Tensor,
    slots_B: Tensor,
    lengths_B: Tensor,
    *,
    bias_C: Tensor | None = None,
) -> Tensor:
    """Conv of each request's first rows, row by row as plain decoding would; zeros past them."""
    out_BTC = torch.zeros_like(rows_BTC)
    for request, (slot, length) in enumerate(
        zip(slots_B.tolist(), lengths_B.tolist(), strict=True)
    ):
        if slot < 0:
            continue
        window_CW = pool_SCW[slot]
        for t in range(length):
            row_C = rows_BTC[request, t]
            out_BTC[request, t] = conv_row(window_CW, row_C, weight_CW, bias_C)
            window_CW = next_window(window_CW, row_C[None])
    return out_BTC


def commit(pool_LSCW: Tensor, raw_LBTC: Tensor, slots_B: Tensor, num_accepted_B: Tensor) -> Tensor:
    """A copy of the pool in which each request has moved past its accepted rows, in all layers."""
    after_LSCW = pool_LSCW.clone()
    for request, (slot, accepted) in enumerate(
        zip(slots_B.tolist(), num_accepted_B.tolist(), strict=True)
    ):
        if slot < 0:
            continue
        for layer in range(pool_LSCW.shape[0]):
            rows_TC = raw_LBTC[layer, request, :accepted]
            after_LSCW[layer, slot] = next_window(pool_LSCW[layer, slot], rows_TC)
    return after_LSCW


def prepare(
    rows_BTC: Tensor,
    pool_SCW: Tensor,
    weight_CW: Tensor,
    slots_B: Tensor,
    lengths_B: Tensor,
    a_BTH: Tensor,
    b_BTH: Tensor,
    a_log_H: Tensor,
    dt_bias_H: Tensor,
    *,
    num_key_heads: int,
    head_dim: int,
    bias_C: Tensor | None = None,
) -> Prepared:
    """Conv, split into heads, gates and inverse norms.

    g = -exp(A_log) softplus(a + dt_bias) with softplus(x) = x above 20; beta = sigmoid(b);
    r = 1 / sqrt(sum x^2 + 1e-6) of the rounded outputs of the conv.
    """
    batch, num_rows, _ = rows_BTC.shape
    mixed_BTC = verify(rows_BTC, pool_SCW, weight_CW, slots_B, lengths_B, bias_C=bias_C)
    width = num_key_heads * head_dim
    q_BTHD, k_BTHD, v_BTHD = (
        part.reshape(batch, num_rows, -1, head_dim)
        for part in (
            mixed_BTC[..., :width],
            mixed_BTC[..., width : 2 * width],
            mixed_BTC[..., 2 * width :],
        )
    )
    wide = torch.float64 if rows_BTC.dtype == torch.float64 else torch.float32
    rows_T = torch.arange(num_rows, device=rows_BTC.device)
    live_BT1 = ((rows_T < lengths_B[:, None]) & (slots_B[:, None] >= 0))[..., None]

    def masked(values_BTH: Tensor) -> Tensor:
        return torch.where(live_BT1, values_BTH, 0.0).transpose(1, 2).contiguous()

    x_BTH = a_BTH.to(wide) + dt_bias_H.to(wide)
    softplus_BTH = torch.where(x_BTH <= SOFTPLUS_THRESHOLD, torch.log1p(torch.exp(x_BTH)), x_BTH)
    return Prepared(
        q_BTHD.contiguous(),
        k_BTHD.contiguous(),
        v_BTHD.contiguous(),
        masked(-torch.exp(a_log_H.to(wide)) * softplus_BTH),
        masked(torch.sigmoid(b_BTH.to(wide))),
        masked((q_BTHD.to(wide).square().sum(-1) + NORM_EPSILON).rsqrt()),
        masked((k_BTHD.to(wide).square().sum(-1) + NORM_EPSILON).rsqrt()),
    )
