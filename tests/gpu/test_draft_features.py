"""Draft features at the full vocabulary, in graphs, and bit for bit the same every time."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="kernels need triton")

from hybridspec.kernels.draft_features import naive
from hybridspec.kernels.draft_features.features import draft_features, row_parts
from hybridspec.kernels.draft_features.rows import NUM_FIELDS, DraftFeatures
from hybridspec.kernels.draft_features.shards import merge_shards
from hybridspec.kernels.draft_features.split import UNWRITTEN, Workspace

pytestmark = pytest.mark.gpu

VOCAB = 248320
NAMES = ("tokens_R", "p1_R", "p2_R", "entropy_R")


def logits(rows: int, dtype: torch.dtype, seed: int, device: torch.device) -> torch.Tensor:
    """Rows from sharp to flat, with a clear winner in some."""
    generator = torch.Generator(device).manual_seed(seed)
    x = torch.randn(rows, VOCAB, device=device, generator=generator)
    x *= torch.linspace(0.5, 5.0, rows, device=device)[:, None]
    winners = torch.randint(VOCAB, (rows,), device=device, generator=generator)
    x[torch.arange(0, rows, 2, device=device), winners[::2]] = 24.0
    return x.to(dtype)


def agree(found: DraftFeatures, expected: DraftFeatures) -> None:
    assert torch.equal(found.tokens_R, expected.tokens_R)
    for name in ("p1_R", "p2_R"):
        torch.testing.assert_close(
            getattr(found, name).double(), getattr(expected, name), rtol=3e-6, atol=1e-12
        )
    torch.testing.assert_close(found.entropy_R.double(), expected.entropy_R, rtol=3e-6, atol=1e-5)


@pytest.mark.parametrize("rows", [15, 60, 960], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_full_vocabulary(cuda: torch.device, dtype: torch.dtype, rows: int) -> None:
    x = logits(rows, dtype, rows, cuda)
    found = draft_features(x)
    for start in range(0, rows, 60):
        part = slice(start, start + 60)
        agree(
            DraftFeatures(*(getattr(found, name)[part] for name in NAMES)),
            naive.draft_features(x[part].double()),
        )
    assert torch.equal(found.tokens_R, x.argmax(-1))


def test_graph_replays_are_right_and_bitwise_the_same(cuda: torch.device) -> None:
    workspace = Workspace.create(15, VOCAB, torch.bfloat16, cuda)
    x, out = logits(15, torch.bfloat16, 0, cuda), DraftFeatures.empty(15, cuda)
    draft_features(x, out=out, workspace=workspace)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        draft_features(x, out=out, workspace=workspace)
    for seed in range(4):
        x.copy_(logits(15, torch.bfloat16, seed, cuda))
        first: list[torch.Tensor] = []
        for _ in range(50):
            for name in NAMES:
                getattr(out, name).fill_(-7)
            graph.replay()
            values = [getattr(out, name).clone() for name in NAMES]
            first = first or values
            assert all(torch.equal(a, b) for a, b in zip(first, values, strict=True))
        agree(out, naive.draft_features(x.double()))
    assert not workspace.tickets_R.any()
    assert (workspace.parts == UNWRITTEN).all()


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_shards_of_the_full_vocabulary(cuda: torch.device, ranks: int) -> None:
    x = logits(15, torch.bfloat16, ranks, cuda)
    width = VOCAB // ranks
    parts = torch.full((ranks, 15, NUM_FIELDS), float("nan"), device=cuda)
    for rank in range(ranks):
        shard = x[:, rank * width : (rank + 1) * width].contiguous()
        row_parts(shard, vocab_offset=rank * width, out=parts[rank])
    merged = merge_shards(parts)
    agree(merged, naive.draft_features(x.double()))
    assert torch.equal(merged.tokens_R, draft_features(x).tokens_R)


def test_broken_rows(cuda: torch.device) -> None:
    x = logits(6, torch.bfloat16, 3, cuda)
    x[0, 200_000] = float("nan")
    x[1, 77_777] = float("inf")
    x[2] = float("nan")
    x[3] = float("-inf")
    x[4, :248_000] = float("-inf")
    found = draft_features(x)
    for values in (found.p1_R, found.p2_R, found.entropy_R):
        assert values.isnan().tolist() == [True] * 4 + [False] * 2
    assert ((found.tokens_R >= 0) & (found.tokens_R < VOCAB)).all()
    assert found.tokens_R[4] == x[4].argmax()
