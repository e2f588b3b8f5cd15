"""Inputs of the GDN kernels in several gate regimes, and what float64 says about them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from hybridspec.kernels.gdn.factors import Factors
from hybridspec.kernels.gdn.naive import naive_states

REGIMES = ("normal", "nodecay", "strong", "mixed", "repeat")


@dataclass
class Inputs:
    """One layer's inputs of a round, strided as in an engine: slices of wider projections."""

    mixed_BTC: torch.Tensor
    a_BTH: torch.Tensor
    b_BTH: torch.Tensor
    A_log_H: torch.Tensor
    dt_bias_H: torch.Tensor
    key_heads: int

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.mixed_BTC, self.a_BTH, self.b_BTH, self.A_log_H, self.dt_bias_H

    def reference(
        self, request: int, rows: int, state_HVK: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs and states of a request's first rows in float64."""
        return naive_states(
            self.mixed_BTC[request, :rows],
            self.a_BTH[request, :rows],
            self.b_BTH[request, :rows],
            self.A_log_H,
            self.dt_bias_H,
            state_HVK.double(),
            key_heads=self.key_heads,
        )

    def plain_states(self, request: int, rows: int, state_HVK: torch.Tensor) -> torch.Tensor:
        """States of a request's first rows in the dtype of `state_HVK`, one after the other."""
        return naive_states(
            self.mixed_BTC[request, :rows],
            self.a_BTH[request, :rows],
            self.b_BTH[request, :rows],
            self.A_log_H,
            self.dt_bias_H,
            state_HVK,
            key_heads=self.key_heads,
        )[1]


def make_inputs(
    generator: torch.Generator,
    batch: int,
    rows: int,
    key_heads: int,
    value_heads: int,
    key_dim: int,
    value_dim: int,
    regime: str = "normal",
    device: torch.device | str = "cpu",
) -> Inputs:
    """Random rows of a regime.

    `nodecay`: gates near 0; `strong`: states forgotten within rows; `mixed`: strong gates in front
    of gentle ones; `repeat`: nearly the same key in every row, write strength near 1.
    """

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    keys = key_heads * key_dim
    width = 2 * keys + value_heads * value_dim
    wide = normal(batch, rows, width + 64)
    if regime == "repeat":
        wide[..., keys : 2 * keys] = normal(batch, 1, keys) + 1e-3 * normal(batch, rows, keys)
    else:
        wide = F.silu(wide)
    gates = normal(batch, rows, 2 * value_heads + 8)
    A_log = torch.empty(value_heads).uniform_(0.01, 16.0, generator=generator).log()
    dt = torch.empty(value_heads).uniform_(-6.9, -2.3, generator=generator).exp()
    dt_bias = dt + torch.log(-torch.expm1(-dt))
    if regime == "nodecay":
        dt_bias -= 12.0
    elif regime == "strong":
        gates[..., :value_heads] *= 6.0
        dt_bias += 3.0
    elif regime == "repeat":
        dt_bias -= 12.0
        gates[..., value_heads:] = 9.0
    elif regime == "mixed":
        dt_bias -= 8.0
        gates[:, ::3, :value_heads] += 60.0
    wide = wide.to(torch.bfloat16).to(device)
    gates = gates.to(torch.bfloat16).to(device)
    return Inputs(
        wide[..., :width],
        gates[..., :value_heads],
        gates[..., value_heads : 2 * value_heads],
        A_log.to(device),
        dt_bias.to(device),
        key_heads,
    )


def poisoned_factors(
    layers: int,
    rows: int,
    key_heads: int,
    value_heads: int,
    key_dim: int,
    value_dim: int,
    device: torch.device | str,
) -> Factors:
    """Factors full of NaN."""
    factors = Factors.allocate(
        layers, rows, key_heads, value_heads, key_dim, value_dim, device=device
    )
    for tensor in (factors.key_XRHTK, factors.update_XRHTV, factors.decay_XRHT):
        tensor.fill_(float("nan"))
    return factors


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Frobenius norm of the difference over that of what is expected; NaN never passes."""
    found, expected = found.double(), expected.double()
    return float((found - expected).norm() / expected.norm().clamp_min(1e-30))
