"""Mixture-of-experts layer, plain: the oracle of the kernels."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def small_moe_naive(
    x_TH: torch.Tensor,
    gate_up_EFH: torch.Tensor,
    down_EHI: torch.Tensor,
    ids_TK: torch.Tensor,
    weights_TK: torch.Tensor,
) -> torch.Tensor:
    """`out[t] = sum_k weights[t, k] * down[e] @ (silu(gate[e] @ x[t]) * (up[e] @ x[t]))`.

    e is ids[t, k]. A slot whose id is outside 0..E-1 or whose weight is 0 adds nothing, whatever
    its row holds.

    Args:
        x_TH: hidden states [rows, hidden], any float dtype; all arithmetic is done in it.
        gate_up_EFH: [experts, 2 * width, hidden]; rows 0..width-1 are the gate, the rest is up.
        down_EHI: [experts, hidden, width].
        ids_TK: expert of each slot [rows, top_k].
        weights_TK: routing weights [rows, top_k], already renormalised.

    Returns:
        [rows, hidden] in the dtype of `x_TH`.
    """
    num_experts, _, width = down_EHI.shape
    out_TH = torch.zeros_like(x_TH)
    for row, ids_K in enumerate(ids_TK.tolist()):
        for slot, expert in enumerate(ids_K):
            weight = weights_TK[row, slot].to(x_TH.dtype)
            if not 0 <= expert < num_experts or weight == 0:
                continue
            gate_up_F = gate_up_EFH[expert].to(x_TH.dtype) @ x_TH[row]
            hidden_I = F.silu(gate_up_F[:width]) * gate_up_F[width:]
            out_TH[row] += weight * (down_EHI[expert].to(x_TH.dtype) @ hidden_I)
    return out_TH
