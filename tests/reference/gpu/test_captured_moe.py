"""Routed experts of whole batches by kernels, against gathered weights in float64."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="kernels need triton")

from captured_kit import DEVICE, make_pair

from hybridspec.reference.config import load_target_config
from hybridspec.reference.gpu.moe import MoeKernels, MoePlain
from hybridspec.reference.gpu.weights import MoeWeights

ROWS = 16


@pytest.mark.parametrize("batch", [1, 3, 9])
def test_batches_of_masked_blocks(tmp_path: Path, batch: int) -> None:
    """Blocks of 16 rows, of which 1 to 3 have experts; 9 blocks are two calls."""
    config = load_target_config(make_pair(tmp_path).target)
    generator = torch.Generator().manual_seed(batch)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(DEVICE)

    experts, hidden, width = config.num_experts, config.hidden_size, config.expert_width
    weights = MoeWeights(
        random(1, hidden).bfloat16(),
        random(hidden, 1).bfloat16(),
        (random(experts, 2 * width, hidden) / hidden**0.5).bfloat16(),
        (random(experts, hidden, width) / width**0.5).bfloat16(),
    )
    count = batch * ROWS
    hidden_RH = random(count, hidden).bfloat16()
    scores_RK, ids_RK = random(count, experts).softmax(-1).topk(config.experts_per_token)
    row = torch.arange(count, device=DEVICE)
    live = row % ROWS < 1 + row // ROWS % 3
    ids_RK = torch.where(live[:, None], ids_RK.int(), -1)
    scores_RK = torch.where(live[:, None], scores_RK, 0.0)

    found = torch.full_like(hidden_RH, float("nan"))
    MoeKernels(config, DEVICE)(weights, hidden_RH, ids_RK, scores_RK, found, rows=ROWS)
    wide = MoeWeights(*(tensor.double() for tensor in vars(weights).values()))
    wanted = torch.empty_like(hidden_RH, dtype=torch.float64)
    MoePlain()(wide, hidden_RH.double(), ids_RK, scores_RK, wanted, rows=ROWS)
    error = float((found.double() - wanted).norm() / wanted.norm())
    assert error < 1e-2
    assert not found[~live].any()
