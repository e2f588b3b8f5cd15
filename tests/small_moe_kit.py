"""Weights, rows and the float64 reference that tests of the small-batch MoE share."""

from __future__ import annotations

import torch

from hybridspec.kernels.small_moe.naive import small_moe_naive
from hybridspec.kernels.small_moe.tiles import Tiles

HIDDEN, WIDTH, EXPERTS, TOP_K = 64, 64, 12, 4
# The interpreter's time goes with the number of programs: few tiles.
TILES = Tiles(
    gate_up_n=32,
    gate_up_k=32,
    gate_up_stages=2,
    down_n=32,
    down_parts=4,
    down_stages=2,
    dependent=False,
)


def make_weights(
    device: torch.device, experts: int = EXPERTS, hidden: int = HIDDEN, width: int = WIDTH
) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    gate_up = torch.randn(experts, 2 * width, hidden, generator=generator) / hidden**0.5
    down = torch.randn(experts, hidden, width, generator=generator) / width**0.5
    return gate_up.bfloat16().to(device), down.bfloat16().to(device)


def make_rows(
    device: torch.device, rows: int, seed: int, top_k: int = TOP_K, experts: int = EXPERTS
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, ids, weights; experts of a row are distinct, weights sum to 1."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, HIDDEN, generator=generator).bfloat16()
    scores = torch.rand(rows, experts, generator=generator)
    weights, ids = scores.softmax(-1).topk(top_k)
    weights = weights / weights.sum(-1, keepdim=True)
    return x.to(device), ids.int().to(device), weights.to(device)


def expected(
    x: torch.Tensor,
    experts: tuple[torch.Tensor, torch.Tensor],
    ids: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    gate_up, down = experts
    return small_moe_naive(x.double(), gate_up, down, ids, weights)


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Of the norm of `wanted`."""
    return float((found.double() - wanted).norm() / wanted.norm().clamp_min(1e-30))


# Hidden values and outputs are bf16. Triton's interpreter cuts fp32 to bf16 off, which doubles the
# error of rounding.
TOLERANCE = 4e-3 if torch.cuda.is_available() else 8e-3
