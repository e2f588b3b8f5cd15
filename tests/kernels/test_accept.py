"""Acceptance against its naive twin, the reference engine's rule, and the target's distribution."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridspec.acceptance import accept_greedy as engine_greedy
from hybridspec.artifacts import tables
from hybridspec.errors import UsageError
from hybridspec.kernels.accept import naive, outcome
from hybridspec.kernels.accept.greedy import accept_greedy
from hybridspec.kernels.accept.outcome import BLOCK_SIZE, NUM_DRAFTS, Cursors, Outcome
from hybridspec.kernels.accept.sampled import SamplingWorkspace, accept_sampled

# NaN and infinite probabilities are what some tests are about.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

ALL_LENGTHS = torch.arange(BLOCK_SIZE + 1, dtype=torch.int32)


def poisoned(batch: int, device: torch.device) -> Outcome:
    out = Outcome.empty(batch, device)
    for values in vars(out).values():
        values.fill_(-77)
    return out


def fresh_cursors(batch: int, device: torch.device) -> Cursors:
    lengths = torch.arange(100, 100 + batch, dtype=torch.int32, device=device)
    return Cursors(lengths, torch.full((batch,), 9, dtype=torch.int64, device=device))


def same(found: Outcome | Cursors, expected: Outcome | Cursors) -> None:
    for name, values in vars(found).items():
        assert torch.equal(values, vars(expected)[name]), name


def agreeing_block(batch: int, seed: int, vocab: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Drafts, and target tokens that follow them for a random while."""
    generator = torch.Generator().manual_seed(seed)
    tokens_BT = torch.randint(vocab, (batch, BLOCK_SIZE), generator=generator)
    drafts_BD = tokens_BT[:, :-1].clone()
    wrong = torch.rand(batch, NUM_DRAFTS, generator=generator) < 0.12
    drafts_BD[wrong] = (drafts_BD[wrong] + 1) % vocab
    return drafts_BD, tokens_BT


def peaked(batch: int, vocab: int, seed: int, *, peak: float = 0.7) -> tuple[torch.Tensor, ...]:
    """Drafts, distributions that give each about `peak`, and coins; a third of the mass is zero."""
    generator = torch.Generator().manual_seed(seed)
    drafts_BD = torch.randint(vocab, (batch, NUM_DRAFTS), generator=generator)
    weights = torch.rand(batch, BLOCK_SIZE, vocab, generator=generator)
    weights[weights < 0.33] = 0.0
    weights[..., 0] += 0.05
    weights = weights / weights.sum(-1, keepdim=True) * (1 - peak)
    weights[:, :-1].scatter_add_(-1, drafts_BD[..., None], torch.full((*drafts_BD.shape, 1), peak))
    weights[:, -1] /= 1 - peak
    coins_BC = torch.rand(batch, BLOCK_SIZE, generator=generator, dtype=torch.float64)
    return drafts_BD, weights, coins_BC


def test_block_is_the_policys() -> None:
    assert (BLOCK_SIZE, NUM_DRAFTS) == (tables.BLOCK_SIZE, tables.NUM_DRAFTS)
    assert outcome.NO_TOKEN == -1


@pytest.mark.parametrize("token_dtype", [torch.int32, torch.int64], ids=str)
def test_greedy_every_length(device: torch.device, token_dtype: torch.dtype) -> None:
    """All lengths, ragged, and drafts as a strided view of a block."""
    for seed in range(3):
        drafts_BD, tokens_BT = agreeing_block(17, seed, 40)
        block = torch.cat([torch.full((17, 1), 5), drafts_BD], 1).to(token_dtype).to(device)
        arguments = (block[:, 1:], ALL_LENGTHS.to(device), tokens_BT.to(token_dtype).to(device))
        cursors, expected_cursors = (fresh_cursors(17, device) for _ in range(2))
        found = accept_greedy(*arguments, cursors=cursors, out=poisoned(17, device))
        same(found, naive.accept_greedy(*arguments, cursors=expected_cursors))
        same(cursors, expected_cursors)
        assert cursors.sequence_lengths_B[0] == 100
        assert cursors.anchors_B[0] == 9
        for b in range(1, 17):
            verdict = engine_greedy(drafts_BD[b, : b - 1].tolist(), tokens_BT[b, :b].tolist())
            assert (found.accepted_B[b], found.bonus_B[b]) == (verdict.accepted, verdict.bonus)


def test_greedy_all_accepted(device: torch.device) -> None:
    drafts_BD = torch.arange(NUM_DRAFTS).repeat(17, 1)
    tokens_BT = torch.arange(BLOCK_SIZE).repeat(17, 1)
    found = accept_greedy(drafts_BD.to(device), ALL_LENGTHS.to(device), tokens_BT.to(device))
    assert found.accepted_B.tolist() == [0, *range(16)]
    assert found.bonus_B.tolist() == [-1, *range(16)]
    assert found.commit_rows_B.tolist() == list(range(17))
    assert found.emitted_BT[16].tolist() == list(range(16))
    assert found.valid_B.all()


def test_greedy_refuses_a_missing_target_token(device: torch.device) -> None:
    drafts_BD = torch.arange(NUM_DRAFTS).repeat(4, 1)
    tokens_BT = torch.arange(BLOCK_SIZE).repeat(4, 1)
    tokens_BT[0, 5] = -1  # the bonus's row
    tokens_BT[1, 3] = drafts_BD[1, 3] = -1  # agrees with a missing draft
    tokens_BT[2, 8] = -1  # past the length
    lengths_B = torch.tensor([6, 6, 6, 16], dtype=torch.int32)
    cursors = fresh_cursors(4, device)
    found = accept_greedy(
        drafts_BD.to(device), lengths_B.to(device), tokens_BT.to(device), cursors=cursors
    )
    assert found.valid_B.tolist() == [0, 0, 1, 1]
    assert found.commit_rows_B.tolist() == [0, 0, 6, 16]
    assert cursors.sequence_lengths_B.tolist() == [100, 101, 108, 119]
    assert cursors.anchors_B.tolist() == [9, 9, 5, 15]
    assert (found.emitted_BT[:2] == -1).all()


def test_lengths_outside_the_block(device: torch.device) -> None:
    drafts_BD, tokens_BT = agreeing_block(2, 4, 3)
    lengths_B = torch.tensor([40, -3], dtype=torch.int32)
    arguments = (drafts_BD.to(device), lengths_B.to(device), tokens_BT.to(device))
    same(accept_greedy(*arguments, out=poisoned(2, device)), naive.accept_greedy(*arguments))


@pytest.mark.parametrize(("vocab", "chunk"), [(3, 16), (100, 16), (1000, 128), (1025, 256)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_sampled_every_length(
    device: torch.device, vocab: int, chunk: int, dtype: torch.dtype
) -> None:
    drafts_BD, probabilities, coins_BC = peaked(17, vocab, vocab)
    # Strided requests and rows, coins of the probabilities' width.
    wide = torch.full((17, BLOCK_SIZE, vocab + 5), float("nan"), dtype=dtype)
    wide[..., :vocab] = probabilities
    arguments = (
        drafts_BD.to(device),
        ALL_LENGTHS.to(device),
        wide.to(device)[..., :vocab],
        coins_BC.to(dtype).to(device),
    )
    cursors, expected_cursors = (fresh_cursors(17, device) for _ in range(2))
    workspace = SamplingWorkspace.create(17, vocab, device, chunk=chunk)
    workspace.sums.fill_(float("nan"))
    found = poisoned(17, device)
    for _ in range(2):
        accept_sampled(*arguments, cursors=cursors, out=found, workspace=workspace, chunk=chunk)
        expected = naive.accept_sampled(*arguments, cursors=expected_cursors)
        same(found, expected)
        same(cursors, expected_cursors)
        assert not workspace.arrivals_B.any()
    assert len(set(found.accepted_B.tolist())) > 2


def test_sampled_picks_differ_only_at_a_boundary(device: torch.device) -> None:
    """Summing by chunks moves a boundary by rounding only, measured in exact integers."""
    vocab, batch = 4000, 40
    _, probabilities, coins_BC = peaked(batch, vocab, 11, peak=0.0)
    one = torch.ones(batch, dtype=torch.int32)
    drafts_BD = torch.zeros(batch, NUM_DRAFTS, dtype=torch.int64)
    found = accept_sampled(
        drafts_BD.to(device), one.to(device), probabilities.to(device), coins_BC.to(device)
    )
    for b, token in enumerate(found.bonus_B.tolist()):
        # fp32 values are multiples of 2^-149: their sums are exact integers.
        weights = [int(p * 2.0**149) for p in probabilities[b, 0].double().tolist()]
        total, below = sum(weights), sum(weights[:token])
        slack = 1e-13 * total
        target = float(coins_BC[b, -1]) * total
        assert below - slack <= target <= below + weights[token] + slack
        assert weights[token] > 0


def test_coins_at_the_ends(device: torch.device) -> None:
    """Tokens without mass are never drawn, whatever the coin."""
    p = torch.zeros(4, BLOCK_SIZE, 40)
    p[:, :, 3], p[:, :, 20] = 0.25, 0.75
    coins_BC = torch.zeros(4, BLOCK_SIZE, dtype=torch.float64)
    coins_BC[:, -1] = torch.tensor([0.0, 0.25, 1.0 - 2**-53, 1.0])
    found = accept_sampled(
        torch.zeros(4, NUM_DRAFTS, dtype=torch.int64, device=device),
        torch.ones(4, dtype=torch.int32, device=device),
        p.to(device),
        coins_BC.to(device),
        chunk=16,
    )
    assert found.bonus_B.tolist() == [3, 20, 20, 20]


def test_a_draft_without_mass_is_rejected_and_one_with_all_of_it_stands(
    device: torch.device,
) -> None:
    p = torch.zeros(4, BLOCK_SIZE, 40)
    p[:, :, 7] = 1.0
    # Rounding: the only token of the nucleus has a little less than one.
    p[2, :, 7] = 1.0 - 2**-24
    drafts_BD = torch.full((4, NUM_DRAFTS), 7)
    drafts_BD[1, 2] = 8
    drafts_BD[3, 1] = 4000
    coins_BC = torch.full((4, BLOCK_SIZE), 1.0 - 2**-53, dtype=torch.float64)
    coins_BC[1, 2] = 0.0  # no coin is below no chance
    lengths_B = torch.full((4,), BLOCK_SIZE, dtype=torch.int32)
    arguments = tuple(x.to(device) for x in (drafts_BD, lengths_B, p, coins_BC))
    found = accept_sampled(*arguments, chunk=16)
    same(found, naive.accept_sampled(*arguments))
    assert found.accepted_B.tolist() == [15, 2, 0, 1]
    assert found.bonus_B.tolist() == [7, 7, 7, 7]
    assert found.valid_B.all()


def test_coins_are_used_once(device: torch.device) -> None:
    """Coin i judges draft i alone, the last one draws alone, the others do nothing."""
    drafts_BD, probabilities, coins_BC = peaked(1, 50, 21, peak=0.8)
    coins_BC[0, 4] = 0.999
    coins_BC[0, :4] = 0.1
    lengths_B = torch.tensor([9], dtype=torch.int32)

    def run(coins: torch.Tensor) -> Outcome:
        arguments = (drafts_BD, lengths_B, probabilities, coins)
        return accept_sampled(*(x.to(device) for x in arguments), chunk=32)

    base = run(coins_BC)
    assert base.accepted_B[0] == 4
    for i in range(5, NUM_DRAFTS):
        for value in (0.0, 0.9999):
            coins = coins_BC.clone()
            coins[0, i] = value
            same(run(coins), base)
    drawn = set()
    for value in torch.linspace(0, 0.99, 12):
        coins = coins_BC.clone()
        coins[0, -1] = value
        other = run(coins)
        assert other.accepted_B[0] == 4
        drawn.add(int(other.bonus_B[0]))
    assert len(drawn) > 5


def test_unusable_probabilities_emit_nothing(device: torch.device) -> None:
    batch, vocab = 7, 90
    drafts_BD, p, coins_BC = peaked(batch, vocab, 31, peak=0.5)
    coins_BC[:, :3], coins_BC[:, 3] = 0.0, 0.9999
    p[0, 3, 80] = float("nan")  # the row drawn from
    p[1, 1, drafts_BD[1, 1]] = float("nan")  # a judged draft
    p[2, 3, 5] = float("inf")
    p[3, 3, 6] = -1e-3
    p[4, 3] = 0.0
    p[5, 9] = float("nan")  # past the first rejection: nobody looks
    drafts_BD[2, 3], drafts_BD[3, 3] = 70, 71
    lengths_B = torch.full((batch,), 12, dtype=torch.int32)
    arguments = tuple(x.to(device) for x in (drafts_BD, lengths_B, p, coins_BC))
    cursors, expected_cursors = (fresh_cursors(batch, device) for _ in range(2))
    found = accept_sampled(*arguments, cursors=cursors, out=poisoned(batch, device), chunk=32)
    same(found, naive.accept_sampled(*arguments, cursors=expected_cursors))
    same(cursors, expected_cursors)
    assert found.valid_B.tolist() == [0, 0, 0, 0, 0, 1, 1]
    assert found.commit_rows_B.tolist() == [0, 0, 0, 0, 0, 4, 4]
    assert cursors.sequence_lengths_B.tolist()[:5] == list(range(100, 105))


def test_every_pair_of_coins_once_gives_the_distribution_exactly(device: torch.device) -> None:
    """4 x 12 coins at the middles of a grid that every boundary lies on: counts are exact."""
    p = torch.tensor([2, 6, 4, 4, 0]).repeat(BLOCK_SIZE, 1) / 16
    p[1] = torch.tensor([0, 0, 0, 4, 12]) / 16
    draws, draft = 48, 2
    coins_BC = torch.full((draws, BLOCK_SIZE), 0.5)
    coins_BC[:, 0] = (torch.arange(draws) % 4 + 0.5) / 4
    coins_BC[:, -1] = (torch.arange(draws) // 4 + 0.5) / 12
    found = accept_sampled(
        torch.full((draws, NUM_DRAFTS), draft, device=device),
        torch.full((draws,), 2, dtype=torch.int32, device=device),
        p.expand(draws, -1, -1).to(device),
        coins_BC.to(device),
        chunk=4,
    )
    first, second = found.emitted_BT[:, 0].cpu(), found.emitted_BT[:, 1].cpu()
    assert torch.bincount(first, minlength=5).tolist() == [6, 18, 12, 12, 0]
    # Behind the draft that stood: row 1.
    assert torch.bincount(second[first == draft], minlength=5).tolist() == [0, 0, 0, 3, 9]
    assert (second[first != draft] == -1).all()


def test_emitted_tokens_follow_the_target(device: torch.device) -> None:
    """Chi-square of the first two tokens against direct sampling's p(x) and p(y | x).

    A draft's row is only used where the draft was emitted, so what follows it must follow the row
    behind it. The interpreter is too slow for many draws: there the naive twin stands in, to which
    the other tests hold the kernel bit for bit.
    """
    vocab, draft = 5, 2
    accept = accept_sampled if device.type == "cuda" else naive.accept_sampled
    draws = 20000 if device.type == "cuda" else 3000
    generator = torch.Generator().manual_seed(41)
    p = torch.rand(BLOCK_SIZE, vocab, generator=generator, dtype=torch.float64)
    p[0, 4] = 0.0
    p /= p.sum(-1, keepdim=True)
    coins_BC = torch.rand(draws, BLOCK_SIZE, generator=generator, dtype=torch.float64)
    for length in (1, 3):
        found = accept(
            torch.full((draws, NUM_DRAFTS), draft, device=device),
            torch.full((draws,), length, dtype=torch.int32, device=device),
            p.expand(draws, -1, -1).to(device),
            coins_BC.to(device),
        )
        emitted = found.emitted_BT.cpu()
        pairs = [(emitted[:, 0], p[0])]
        if length > 1:
            pairs.append((emitted[emitted[:, 0] == draft, 1], p[1]))
        for tokens, row in pairs:
            counts, expected = torch.bincount(tokens, minlength=vocab), row * len(tokens)
            assert (counts[expected == 0] == 0).all()
            real = expected > 0
            # 99.9 % quantile of chi-square with four degrees of freedom.
            assert ((counts - expected)[real] ** 2 / expected[real]).sum() < 18.5


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**20), vocab=st.integers(2, 70), peak=st.floats(0.0, 0.99))
def test_sampled_invariants(device: torch.device, seed: int, vocab: int, peak: float) -> None:
    drafts_BD, p, coins_BC = peaked(3, vocab, seed, peak=peak)
    generator = torch.Generator().manual_seed(seed)
    lengths_B = torch.randint(0, 17, (3,), generator=generator, dtype=torch.int32)
    arguments = tuple(x.to(device) for x in (drafts_BD, lengths_B, p, coins_BC))
    found = accept_sampled(*arguments, out=poisoned(3, device), chunk=32)
    same(found, naive.accept_sampled(*arguments))
    for b, length in enumerate(lengths_B.tolist()):
        accepted, rows = int(found.accepted_B[b]), int(found.commit_rows_B[b])
        assert rows == (accepted + 1 if length else 0)
        assert accepted <= max(length - 1, 0)
        emitted = found.emitted_BT[b].tolist()
        assert emitted[:accepted] == drafts_BD[b, :accepted].tolist()
        assert emitted[rows:] == [-1] * (BLOCK_SIZE - rows)
        if length:
            assert emitted[accepted] == int(found.bonus_B[b])
            assert p[b, accepted, emitted[accepted]] > 0


def test_empty_batch(device: torch.device) -> None:
    drafts_BD = torch.empty(0, NUM_DRAFTS, dtype=torch.int64, device=device)
    lengths_B = torch.empty(0, dtype=torch.int32, device=device)
    tokens_BT = torch.empty(0, BLOCK_SIZE, dtype=torch.int64, device=device)
    assert accept_greedy(drafts_BD, lengths_B, tokens_BT).bonus_B.shape == (0,)


def test_refusals(device: torch.device) -> None:
    drafts = torch.zeros(2, NUM_DRAFTS, dtype=torch.int64, device=device)
    lengths = torch.ones(2, dtype=torch.int32, device=device)
    tokens = torch.zeros(2, BLOCK_SIZE, dtype=torch.int64, device=device)
    p = torch.ones(2, BLOCK_SIZE, 4, device=device)
    coins = torch.zeros(2, BLOCK_SIZE, device=device)
    greedy: list[tuple[tuple[Any, ...], str]] = [
        ((drafts[:, :14], lengths, tokens), "drafts_BD"),
        ((drafts.float(), lengths, tokens), "drafts_BD"),
        ((drafts, lengths.long(), tokens), "lengths_B"),
        ((drafts, lengths[:1], tokens), "drafts_BD"),
        ((drafts, lengths, tokens[:, :15]), "tokens_BT"),
        ((drafts, lengths, tokens.T.contiguous().T), "last stride"),
    ]
    for arguments, message in greedy:
        with pytest.raises(UsageError, match=message):
            accept_greedy(*arguments)
    with pytest.raises(UsageError, match="accepted_B"):
        accept_greedy(drafts, lengths, tokens, out=Outcome.empty(3, device))
    with pytest.raises(UsageError, match="sequence_lengths_B"):
        accept_greedy(drafts, lengths, tokens, cursors=fresh_cursors(3, device))
    for arguments, message in (
        ((drafts, lengths, p.half(), coins), "probabilities_BTV"),
        ((drafts, lengths, p[:, :15], coins), "probabilities_BTV"),
        ((drafts, lengths, p, coins[:, :15]), "coins_BC"),
    ):
        with pytest.raises(UsageError, match=message):
            accept_sampled(*arguments)
    with pytest.raises(UsageError, match="too small"):
        accept_sampled(drafts, lengths, p, coins, workspace=SamplingWorkspace.create(1, 4, device))
