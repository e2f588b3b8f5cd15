"""Routed experts of a captured round.

`MoeKernels` runs `kernels/small_moe` on all rows of a batch at once, up to 128: blocks of up to 8
requests, which read an expert that they share once. Requests beyond are further calls.
`MoePlain` gathers the weights of every slot, in any dtype, for tests.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F

from hybridspec.kernels.small_moe.moe import allocate_scratch, small_moe
from hybridspec.kernels.small_moe.tiles import MAX_ROWS
from hybridspec.reference.config import TargetConfig
from hybridspec.reference.gpu.weights import MoeWeights


class RoutedExperts(Protocol):
    """Runs the routed experts of rows whose routes are known."""

    def __call__(
        self,
        weights: MoeWeights,
        hidden_RH: torch.Tensor,
        ids_RK: torch.Tensor,
        weights_RK: torch.Tensor,
        out_RH: torch.Tensor,
        *,
        rows: int,
    ) -> None:
        """Weighted sum of the experts of each row; ids of -1 add nothing.

        Args:
            rows: rows of one request.
            out_RH: written, all rows.
        """
        ...


class MoeKernels:
    """See the module's docstring."""

    def __init__(self, config: TargetConfig, device: torch.device) -> None:
        self._scratch = allocate_scratch(
            MAX_ROWS,
            config.experts_per_token,
            config.expert_width,
            device,
            hidden=config.hidden_size,
        )

    def __call__(
        self,
        weights: MoeWeights,
        hidden_RH: torch.Tensor,
        ids_RK: torch.Tensor,
        weights_RK: torch.Tensor,
        out_RH: torch.Tensor,
        *,
        rows: int,
    ) -> None:
        """See `RoutedExperts`."""
        step = MAX_ROWS // rows * rows
        for start in range(0, hidden_RH.shape[0], step):
            span = slice(start, min(start + step, hidden_RH.shape[0]))
            small_moe(
                hidden_RH[span],
                weights.gate_up_EFH,
                weights.down_EHI,
                ids_RK[span],
                weights_RK[span],
                self._scratch,
                out=out_RH[span],
            )


class MoePlain:
    """See the module's docstring."""

    def __call__(
        self,
        weights: MoeWeights,
        hidden_RH: torch.Tensor,
        ids_RK: torch.Tensor,
        weights_RK: torch.Tensor,
        out_RH: torch.Tensor,
        *,
        rows: int,
    ) -> None:
        """See `RoutedExperts`."""
        out_RH.zero_()
        width = weights.gate_up_EFH.shape[1] // 2
        for slot in range(ids_RK.shape[1]):
            experts = ids_RK[:, slot].clamp(min=0).long()
            gate_up = torch.bmm(weights.gate_up_EFH[experts], hidden_RH[:, :, None])[..., 0]
            inner = F.silu(gate_up[:, :width]) * gate_up[:, width:]
            down = torch.bmm(weights.down_EHI[experts], inner[:, :, None])[..., 0]
            out_RH += down * weights_RK[:, slot, None].to(down.dtype)
