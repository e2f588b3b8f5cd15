"""Attention of blocks over a paged cache: float64, poisoned slots, bits that are a row's own."""

from __future__ import annotations

import pytest
import torch
from block_attention_kit import BF16, NAN, Case, assert_near

from hybridspec.errors import UsageError
from hybridspec.kernels.block_attention.attention import (
    Scratch,
    Tiling,
    attend,
    num_splits,
)

SMALL = Tiling(query_rows=16, block_keys=16, chunk=4)
PROGRAMS = "hybridspec.kernels.block_attention.attention.PROGRAMS"


@pytest.fixture(autouse=True)
def few_programs(device, monkeypatch):
    """The interpreter runs programs one by one, those with nothing to do as well."""
    if device.type == "cpu":
        monkeypatch.setattr(PROGRAMS, 8)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both ways"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(2, 2, 64), (4, 2, 128), (8, 1, 256)], ids=["1", "2", "8"]
)
def test_ragged_batch(device, heads, kv_heads, dim, causal):
    case = Case(device, [0, 1, 65], heads=heads, kv_heads=kv_heads, dim=dim, seed=heads)
    assert_near(case.run(causal=causal), case.exact(causal=causal))


@pytest.mark.parametrize("context", [0, 1, 63, 64, 65, 700])
def test_contexts(device, context):
    case = Case(device, [context], heads=4, kv_heads=1, dim=64, seed=context)
    for causal in (True, False):
        case.poison_scratch()
        assert_near(case.run(causal=causal), case.exact(causal=causal))


def test_pieces_of_several_steps_and_more_pieces_than_a_chunk(device):
    # 1100 positions in 64 pieces at most: pieces of 32 keys, two steps of 16; 35 pieces.
    case = Case(device, [1084], heads=1, kv_heads=1, dim=64)
    assert_near(case.run(causal=True, tiling=SMALL), case.exact(causal=True))


@pytest.fixture(scope="module")
def whole_block(device):
    # Rows 8 .. 15 lie in the second piece.
    case = Case(device, [56], heads=2, kv_heads=1, dim=64)
    return case.run(causal=True, lengths_B=case.lengths(16))


@pytest.mark.parametrize("length", range(17))
def test_lengths_and_bits_of_a_row(device, whole_block, length):
    """Rows past the length are zeros, the others as in a whole block; NaN rows are not read."""
    whole = whole_block
    case = Case(device, [56], heads=2, kv_heads=1, dim=64)
    case.q_RHD[length:] = NAN
    behind = case.slots_of(0, 56 + length, 56 + 16)
    case.keys_SGD[behind], case.values_SGD[behind] = NAN, NAN
    found = case.run(causal=True, lengths_B=case.lengths(length))
    assert torch.equal(found[:length], whole[:length])
    assert found[length:].eq(0).all()
    if length == 7:
        assert_near(found, case.exact(causal=True, lengths_B=case.lengths(7)))


def test_pieces_do_not_follow_the_length(device):
    """1020 positions fit 64 pieces of one step of 16, the 1032 of the whole block do not."""
    case = Case(device, [1016], heads=1, kv_heads=1, dim=64)
    whole = case.run(causal=True, lengths_B=case.lengths(16), tiling=SMALL)
    case.poison_scratch()
    found = case.run(causal=True, lengths_B=case.lengths(4), tiling=SMALL)
    assert torch.equal(found[:4], whole[:4])


def test_lengths_without_causality_see_the_whole_block(device):
    case = Case(device, [5, 30], heads=2, kv_heads=1, dim=64)
    lengths_B = case.lengths(3, 16)
    found = case.run(causal=False, lengths_B=lengths_B)
    assert_near(found, case.exact(causal=False, lengths_B=lengths_B))
    assert found[3:16].eq(0).all()


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both ways"])
def test_bits_do_not_depend_on_the_batch(device, causal):
    """Alone, and between others of other contexts and lengths."""
    case = Case(device, [40, 130, 0], heads=2, kv_heads=1, dim=64)
    lengths_B = case.lengths(4, 9, 0)
    whole = case.run(causal=causal, lengths_B=lengths_B)
    for b in range(3):
        out = torch.full_like(case.q_RHD[:16], NAN)
        rows = slice(b * 16, b * 16 + 16)
        case.poison_scratch()
        attend(
            case.q_RHD[rows],
            case.keys_SGD,
            case.values_SGD,
            case.table_XP,
            case.requests_B[b : b + 1],
            case.starts_B[b : b + 1],
            case.scratch,
            out,
            scale=case.scale,
            causal=causal,
            lengths_B=lengths_B[b : b + 1],
        )
        assert torch.equal(out, whole[rows])


def test_fewer_programs_than_pieces_give_the_same_bits(device, monkeypatch):
    case = Case(device, [200], heads=2, kv_heads=1, dim=64)
    monkeypatch.setattr(PROGRAMS, 512)
    whole = case.run(causal=True, tiling=SMALL)
    for programs in (3, 13):
        case.poison_scratch()
        monkeypatch.setattr(PROGRAMS, programs)
        assert torch.equal(case.run(causal=True, tiling=SMALL), whole)


def test_large_scores_and_fp32(device):
    case = Case(device, [90], heads=4, kv_heads=1, dim=64, dtype=torch.float32)
    case.q_RHD *= 40
    assert_near(case.run(causal=True), case.exact(causal=True))


def test_a_pool_of_wider_slots(device):
    """Keys and values of one slot next to each other, as some pools keep them."""
    case = Case(device, [33], heads=4, kv_heads=2, dim=64)
    both = torch.full((len(case.keys_SGD), 2, 2, 64), NAN, device=device, dtype=BF16)
    both[:, 0], both[:, 1] = case.keys_SGD, case.values_SGD
    exact = case.exact(causal=True)
    case.keys_SGD, case.values_SGD = both[:, 0], both[:, 1]
    assert_near(case.run(causal=True), exact)


@pytest.mark.parametrize(
    ("batch", "splits"), [(1, 64), (4, 64), (5, 32), (8, 32), (32, 8), (48, 4), (500, 4)]
)
def test_splits_of_a_batch(batch, splits):
    assert num_splits(batch) == splits


def test_scratch_serves_every_smaller_batch():
    scratch = Scratch.allocate(5, 16, 2, 64, "cpu")
    assert scratch.sums.numel() == 16 * 2 * 4 * 64
    assert scratch.num_bytes == scratch.sums.numel() * 4 * (64 + 2)


@pytest.mark.parametrize(("context", "inside"), [(20, 7), (60, 2)], ids=["a piece", "two pieces"])
def test_a_block_that_ends_behind_the_table_reads_no_other_row_of_it(device, context, inside):
    """Rows whose keys the table has are right; the others see what there is of theirs."""
    case = Case(device, [context], heads=2, kv_heads=1, dim=64)
    exact = case.exact(causal=True)
    width = context + inside
    # Behind the last entry of this table lie, in memory, slots that are none.
    wide = torch.full((int(case.requests_B[0]) + 1, width + 9), 1 << 30, device=device).int()
    wide.flatten()[: wide.shape[0] * width].view(-1, width)[:] = case.table_XP[: len(wide), :width]
    case.table_XP = wide.flatten()[: wide.shape[0] * width].view(-1, width)
    out = case.run(causal=True)
    assert_near(out[:inside], exact[:inside])
    assert torch.isfinite(out).all()


def test_refusals(device):
    case = Case(device, [3, 4], heads=4, kv_heads=2, dim=64)
    case.scratch = Scratch.allocate(1, 16, 4, 64, device)
    with pytest.raises(UsageError, match="scratch for 1 requests"):
        case.run(causal=True)
    case.table_XP = case.table_XP.long()
    with pytest.raises(UsageError, match="int32"):
        case.run(causal=True)
    case.values_SGD = case.values_SGD.float()
    with pytest.raises(UsageError, match="one dtype"):
        case.run(causal=True)
    case.keys_SGD = case.keys_SGD[..., :32]
    with pytest.raises(UsageError, match=r"\[slots, kv heads, D\]"):
        case.run(causal=True)
