"""Acceptance at the full vocabulary, and cursors that move once a graph replay."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="kernels need triton")

from hybridspec.kernels.accept import naive
from hybridspec.kernels.accept.greedy import accept_greedy
from hybridspec.kernels.accept.outcome import BLOCK_SIZE, NUM_DRAFTS, Cursors, Outcome
from hybridspec.kernels.accept.sampled import SamplingWorkspace, accept_sampled

pytestmark = pytest.mark.gpu

VOCAB = 248320


def sampled_round(
    batch: int, seed: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Drafts that the target gives about 0.8 each, ragged lengths, distributions, coins."""
    generator = torch.Generator(device).manual_seed(seed)
    drafts = torch.randint(VOCAB, (batch, NUM_DRAFTS), device=device, generator=generator)
    lengths = torch.randint(0, 17, (batch,), device=device, generator=generator)
    x = torch.randn(batch, BLOCK_SIZE, VOCAB, device=device, generator=generator) * 3
    p = x.softmax(-1)
    # A nucleus: most of the vocabulary has no mass.
    p[x < 2.0] = 0.0
    p *= 0.2 / p.sum(-1, keepdim=True)
    p[:, :-1].scatter_add_(
        -1, drafts[..., None], torch.full_like(drafts, 0.8, dtype=p.dtype)[..., None]
    )
    coins = torch.rand(batch, BLOCK_SIZE, device=device, generator=generator, dtype=torch.float64)
    return drafts, lengths.int(), p, coins


@pytest.mark.parametrize("batch", [1, 4, 17])
def test_sampled_full_vocabulary(cuda: torch.device, batch: int) -> None:
    for seed in range(6):
        arguments = sampled_round(batch, seed, cuda)
        found, expected = accept_sampled(*arguments), naive.accept_sampled(*arguments)
        for name, values in vars(found).items():
            assert torch.equal(values, getattr(expected, name)), name


def test_graph_replays_move_the_cursors(cuda: torch.device) -> None:
    batch = 8
    drafts, lengths, p, coins = sampled_round(batch, 1, cuda)
    lengths[0] = 0
    tokens = torch.cat([drafts, drafts[:, :1]], 1)
    tokens[:, 5] = 1
    cursors = [
        Cursors(
            torch.zeros(batch, dtype=torch.int32, device=cuda),
            torch.full((batch,), 3, dtype=torch.int64, device=cuda),
        )
        for _ in range(2)
    ]
    outcomes = [Outcome.empty(batch, cuda) for _ in range(2)]
    workspace = SamplingWorkspace.create(batch, VOCAB, cuda)

    def work() -> None:
        accept_greedy(drafts, lengths, tokens, cursors=cursors[0], out=outcomes[0])
        accept_sampled(
            drafts, lengths, p, coins, cursors=cursors[1], out=outcomes[1], workspace=workspace
        )

    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    for replay in range(2, 12):
        graph.replay()
        for moved, outcome in zip(cursors, outcomes, strict=True):
            assert torch.equal(moved.sequence_lengths_B, replay * outcome.commit_rows_B)
            assert torch.equal(
                moved.anchors_B[1:][lengths[1:] > 0], outcome.bonus_B[1:][lengths[1:] > 0]
            )
            assert moved.anchors_B[0] == 3
    assert not workspace.arrivals_B.any()
