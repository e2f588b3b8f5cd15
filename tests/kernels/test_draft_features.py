"""Draft features against float64: any vocabulary, ties, padding, broken rows, shards."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridspec.errors import UsageError
from hybridspec.kernels.draft_features import naive
from hybridspec.kernels.draft_features.features import draft_features, row_parts
from hybridspec.kernels.draft_features.rows import NUM_FIELDS, DraftFeatures
from hybridspec.kernels.draft_features.shards import merge_shards
from hybridspec.kernels.draft_features.split import TILING, UNWRITTEN, Tiling, Workspace
from hybridspec.reference.drafter import signals

# NaN and infinite logits are what some tests are about.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

# 256 logits of 16 bits a program: many splits of a small vocabulary.
SMALL = Tiling(vectors=1, num_warps=1)
MEDIUM = Tiling(vectors=2, num_warps=2)
# exp2 is good to 2 ulp (2^-22) on the GPU; its argument, at most 30 where there is mass, is rounded
# to half an ulp: 30 x 2^-24 = 2e-6 at worst, and averages out over a row.
RELATIVE = 3e-6
# Entropy is log S - T / S, both up to 12.4 nats and as exact as the sums.
ENTROPY_NATS = 1e-5


def poisoned(rows: int, device: torch.device) -> DraftFeatures:
    out = DraftFeatures.empty(rows, device)
    out.tokens_R.fill_(-7)
    for values in (out.p1_R, out.p2_R, out.entropy_R):
        values.fill_(float("nan"))
    return out


def agree(found: DraftFeatures, expected: DraftFeatures) -> None:
    assert torch.equal(found.tokens_R.long(), expected.tokens_R)
    for name in ("p1_R", "p2_R"):
        torch.testing.assert_close(
            getattr(found, name).double(), getattr(expected, name), rtol=RELATIVE, atol=1e-12
        )
    torch.testing.assert_close(
        found.entropy_R.double(), expected.entropy_R, rtol=RELATIVE, atol=ENTROPY_NATS
    )


def logits(rows: int, vocab: int, scale: float, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, vocab, generator=generator) * scale).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("vocab", "scale", "tiling"),
    [(2, 1.0, SMALL), (255, 3.0, SMALL), (1040, 0.0, SMALL), (3001, 6.0, MEDIUM)],
    ids=["two", "odd", "uniform", "chunks"],
)
def test_matches_float64(
    device: torch.device, dtype: torch.dtype, vocab: int, scale: float, tiling: Tiling
) -> None:
    x = logits(3, vocab, scale, dtype, vocab).to(device)
    out = poisoned(3, device)
    assert draft_features(x, out=out, tiling=tiling) is out
    agree(out, naive.draft_features(x.double()))


def test_shipped_tiling(device: torch.device) -> None:
    x = logits(1, 17000, 4.0, torch.bfloat16, 1).to(device)
    agree(draft_features(x), naive.draft_features(x.double()))


def test_naive_is_the_reference_engines(device: torch.device) -> None:
    x = logits(30, 977, 3.0, torch.bfloat16, 2).to(device).view(2, 15, -1)
    engine, ours = signals(x), naive.draft_features(x.flatten(0, 1))
    for name in ("tokens", "p1", "p2", "entropy"):
        found = getattr(ours, f"{name}_R").view(2, 15)
        torch.testing.assert_close(found, getattr(engine, f"{name}_BD"), rtol=1e-6, atol=1e-6)


def test_ties_go_to_the_lowest_id(device: torch.device) -> None:
    vocab = 1500
    x = torch.zeros(6, vocab, dtype=torch.bfloat16)
    # In one vector, in one thread's two vectors, in two programs, signed zeros, all equal.
    for row, winners in enumerate([(9, 8), (700, 3), (1499, 600, 1024), (5, 4), ()]):
        x[row, list(winners)] = 3.0
    x[3] = -1.0
    x[3, 4], x[3, 5] = -0.0, 0.0
    x[5, 1499] = 3.0
    x = x.to(device)
    found = draft_features(x, tiling=SMALL)
    assert found.tokens_R.tolist() == [8, 3, 600, 4, 0, 1499]
    assert found.tokens_R.tolist() == x.argmax(-1).tolist()
    # The maximum occurs twice: the runner-up is as probable.
    assert torch.equal(found.p1_R[:5], found.p2_R[:5])
    assert found.p2_R[5] < found.p1_R[5]


def test_runner_up_wherever_it_is(device: torch.device) -> None:
    """Beside the winner, in its thread, in its program, elsewhere."""
    x = torch.full((4, 1500), -4.0)
    x[:, 8] = 5.0
    for row, place in enumerate((9, 256 + 8, 130, 1400)):
        x[row, place] = 4.5
    x = x.to(device)
    agree(draft_features(x, tiling=MEDIUM), naive.draft_features(x.double()))


def test_strided_rows_and_padded_vocabulary(device: torch.device) -> None:
    wide = torch.full((8, 1100), float("inf"), dtype=torch.bfloat16)
    wide[::2, :1001] = logits(4, 1001, 3.0, torch.bfloat16, 3)
    # Padding: larger than every logit, or NaN.
    wide[::4, 1001:] = float("nan")
    x = wide.to(device)[::2]
    assert x.stride(0) == 2200
    agree(draft_features(x, vocab=1001, tiling=SMALL), naive.draft_features(x.double(), vocab=1001))


def test_masked_logits(device: torch.device) -> None:
    x = logits(3, 1300, 2.0, torch.float32, 4)
    x[0, :1200] = float("-inf")
    x[1, 1:] = float("-inf")
    x[2, ::2] = float("-inf")
    x = x.to(device)
    found = draft_features(x, tiling=SMALL)
    agree(found, naive.draft_features(x.double()))
    assert found.p1_R[1] == 1.0
    assert found.p2_R[1] == 0.0
    assert found.entropy_R[1] == 0.0


@pytest.mark.parametrize("scale", [1e4, 3e38], ids=["large", "huge"])
def test_extreme_logits_stay_finite(device: torch.device, scale: float) -> None:
    x = logits(3, 900, 1.0, torch.float32, 5).clamp(-1, 1) * scale
    x = x.to(device)
    agree(draft_features(x, tiling=SMALL), naive.draft_features(x.double()))


def test_broken_rows_have_nan_features_and_a_valid_token(device: torch.device) -> None:
    x = logits(7, 1030, 2.0, torch.float32, 6)
    x[0, 517] = float("nan")
    x[1, 3] = float("inf")
    x[2] = float("nan")
    x[3] = float("-inf")
    x[4] = float("inf")
    x[5, ::3] = float("nan")
    x = x.to(device)
    found = draft_features(x, out=poisoned(7, device), tiling=SMALL)
    for values in (found.p1_R, found.p2_R, found.entropy_R):
        assert values.isnan().tolist() == [True] * 6 + [False]
    assert ((found.tokens_R >= 0) & (found.tokens_R < 1030)).all()
    assert found.tokens_R[1] == 3
    expected = naive.draft_features(x.double())
    assert expected.p1_R.isnan().tolist() == [True] * 6 + [False]


@pytest.mark.parametrize(
    "cuts", [(0, 512, 1024, 1531), (0, 1, 1531), (0, 800, 1531, 1531)], ids=str
)
def test_shards_merge_to_the_whole(device: torch.device, cuts: tuple[int, ...]) -> None:
    x = logits(6, 1531, 4.0, torch.bfloat16, 7)
    x[1, 100], x[1, 1500] = 40.0, 40.0
    x[2, 1530] = float("nan")
    x[3] = float("-inf")
    x[4, :1500] = float("-inf")
    x = x.to(device)
    shards, references = [], []
    for start, stop in pairwise(cuts):
        # A shard is padded, and what it is padded with must not count.
        shard = torch.full((6, 1600), float("inf"), dtype=x.dtype, device=device)
        shard[:, : stop - start] = x[:, start:stop]
        part = torch.full((6, NUM_FIELDS), float("nan"), device=device)
        row_parts(shard, vocab=stop - start, vocab_offset=start, out=part, tiling=SMALL)
        shards.append(part)
        references.append(naive.row_parts(shard.double(), vocab=stop - start, vocab_offset=start))
    merged = merge_shards(torch.stack(shards), out=poisoned(6, device))
    healthy = [0, 1, 4, 5]
    whole = draft_features(x, tiling=SMALL)
    assert merged.tokens_R[healthy].tolist() == whole.tokens_R[healthy].tolist()
    assert merged.tokens_R[1] == 100
    expected = naive.draft_features(x.double())
    for candidate in (merged, naive.merge_shards(torch.stack(references))):
        rows = [getattr(candidate, name) for name in ("tokens_R", "p1_R", "p2_R", "entropy_R")]
        agree(
            DraftFeatures(*(values[healthy] for values in rows)),
            DraftFeatures(
                expected.tokens_R[healthy],
                expected.p1_R[healthy],
                expected.p2_R[healthy],
                expected.entropy_R[healthy],
            ),
        )
        assert candidate.entropy_R[[2, 3]].isnan().all()
        assert ((candidate.tokens_R >= 0) & (candidate.tokens_R < 1531)).all()


def test_launches_leave_the_workspace_ready(device: torch.device) -> None:
    workspace = Workspace.create(4, 1000, torch.bfloat16, device, tiling=SMALL)
    for seed in range(3):
        rows, vocab = (3, 2, 2)[seed], (1000, 300, 777)[seed]
        x = logits(rows, vocab, 3.0, torch.bfloat16, seed).to(device)
        x[1, 5] = float("nan")
        found = draft_features(x, workspace=workspace, tiling=SMALL)
        assert found.entropy_R.isnan().tolist() == [row == 1 for row in range(rows)]
        x[1] = 0.5 * x[0]
        found = draft_features(x, workspace=workspace, tiling=SMALL)
        agree(found, naive.draft_features(x.double()))
        assert not workspace.tickets_R.any()
        assert (workspace.parts == UNWRITTEN).all()


@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 2**20),
    vocab=st.integers(2, 700),
    shift=st.floats(-50, 50),
    scale=st.floats(0.0, 12.0),
)
def test_invariants(
    device: torch.device, seed: int, vocab: int, shift: float, scale: float
) -> None:
    x = (logits(1, vocab, scale, torch.float32, seed) + shift).to(device)
    found = draft_features(x, tiling=SMALL)
    p1, p2, entropy = (float(v[0]) for v in (found.p1_R, found.p2_R, found.entropy_R))
    assert found.tokens_R[0] == x.argmax(-1)[0]
    assert 0.0 <= p2 <= p1 <= 1.0
    assert p1 + p2 <= 1.0 + 1e-6
    assert -1e-6 <= entropy <= torch.tensor(float(vocab)).log() + 1e-5


def test_int32_tokens(device: torch.device) -> None:
    x = logits(2, 100, 3.0, torch.bfloat16, 8).to(device)
    out = DraftFeatures.empty(2, device, token_dtype=torch.int32)
    assert draft_features(x, out=out, tiling=SMALL).tokens_R.tolist() == x.argmax(-1).tolist()


def test_no_rows(device: torch.device) -> None:
    assert draft_features(torch.empty(0, 64, device=device)).p1_R.shape == (0,)


def test_refusals(device: torch.device) -> None:
    x = torch.zeros(3, 64, device=device)
    small = Workspace.create(1, 64, torch.float32, device)
    refused: list[tuple[dict[str, Any], str]] = [
        ({"logits_RV": x[0]}, "pass bf16, fp16 or fp32"),
        ({"logits_RV": x.double()}, "pass bf16, fp16 or fp32"),
        ({"logits_RV": x.T}, "column stride"),
        ({"logits_RV": x, "vocab": 65}, "vocab=65"),
        ({"logits_RV": x, "vocab": 1}, "vocab=1"),
        ({"logits_RV": x, "out": DraftFeatures.empty(2, device)}, "tokens_R"),
        ({"logits_RV": x, "workspace": small}, "too small"),
    ]
    for arguments, message in refused:
        with pytest.raises(UsageError, match=message):
            draft_features(**arguments)
    with pytest.raises(UsageError, match="leave"):
        row_parts(x, vocab_offset=1 << 24)
    with pytest.raises(UsageError, match="pass fp32"):
        row_parts(x, out=torch.empty(3, 4, device=device))
    with pytest.raises(UsageError, match="pass dense fp32"):
        merge_shards(torch.zeros(2, 3, 4, device=device))


def test_splits_cover_the_vocabulary() -> None:
    assert TILING.splits(248320, 2) * TILING.chunk(2) >= 248320
    assert (TILING.splits(248320, 2) - 1) * TILING.chunk(2) < 248320
