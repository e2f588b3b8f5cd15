"""Acceptance rules against enumeration: every combination of coins, so nothing is left to luck."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridspec.acceptance import Coins, accept_greedy, accept_sampled, distribution, draw
from hybridspec.artifacts.tables import BLOCK_SIZE
from hybridspec.request import SamplingParams

PLAIN = SamplingParams(temperature=1.0)


# ---------------------------------------------------------------------------- greedy


@given(
    st.integers(1, 16).flatmap(
        lambda rows: st.tuples(
            st.lists(st.integers(0, 2), min_size=rows - 1, max_size=rows - 1),
            st.lists(st.integers(0, 2), min_size=rows, max_size=rows),
        )
    )
)
def test_greedy_emits_what_plain_decoding_would(case: tuple[list[int], list[int]]) -> None:
    drafts, best = case
    verdict = accept_greedy(drafts, best)
    emitted = [*drafts[: verdict.accepted], verdict.bonus]
    assert emitted == best[: len(emitted)]
    if verdict.accepted < len(drafts):
        assert drafts[verdict.accepted] != best[verdict.accepted]
    else:
        assert len(emitted) == len(best)


# ---------------------------------------------------------------------------- point-mass rule

# Target distributions in tenths, so that ten levels of a judging coin give their exact law.
TENTHS = ((5, 2, 2, 1), (2, 5, 0, 3), (0, 2, 8, 0))
LEVELS = 10


def tenths_logits() -> torch.Tensor:
    return (torch.tensor(TENTHS, dtype=torch.float64) / 10).log()


def all_coins(drafts: list[int]) -> Iterator[tuple[list[float], Fraction]]:
    """Midpoints of every level of every coin that matters, and the weight of each combination.

    The drawing coin has levels enough for what is left of each row without its draft.
    """
    left = [LEVELS - TENTHS[row][draft] for row, draft in enumerate(drafts)]
    draw_levels = math.lcm(LEVELS, *left)
    weight = Fraction(1, LEVELS ** len(drafts) * draw_levels)
    for places in itertools.product(range(LEVELS), repeat=len(drafts)):
        for last in range(draw_levels):
            coins = [0.5] * BLOCK_SIZE
            coins[: len(drafts)] = [(place + 0.5) / LEVELS for place in places]
            coins[-1] = (last + 0.5) / draw_levels
            yield coins, weight


@pytest.mark.parametrize("drafts", [[0, 3], [0, 1], [1, 1], [2, 0], [1, 2], [0], []])
def test_emitted_tokens_follow_the_target_exactly(drafts: list[int]) -> None:
    """P(sequence) is the product of the target's probabilities, for every length of block."""
    rows = len(drafts) + 1
    law: dict[tuple[int, ...], Fraction] = defaultdict(Fraction)
    for coins, weight in all_coins(drafts):
        verdict = accept_sampled(drafts, tenths_logits()[:rows], PLAIN, coins)
        law[(*drafts[: verdict.accepted], verdict.bonus)] += weight
    assert sum(law.values()) == 1
    for depth in range(rows):
        # Row `depth` speaks only where all drafts before it stood.
        reach = Fraction(1)
        for row in range(depth):
            reach *= Fraction(TENTHS[row][drafts[row]], 10)
        for token in range(4):
            prefix = (*drafts[:depth], token)
            have = sum(w for emitted, w in law.items() if emitted[: depth + 1] == prefix)
            assert have == reach * Fraction(TENTHS[depth][token], 10), prefix


def test_enumeration_finds_a_wrong_rule() -> None:
    """Power: drawing from p with the rejected draft still in it gives another law."""
    logits, drafts = tenths_logits()[:2], [0]
    law: dict[int, Fraction] = defaultdict(Fraction)
    for coins, weight in all_coins(drafts):
        verdict = accept_sampled(drafts, logits, PLAIN, coins)
        if verdict.accepted:
            law[0] += weight
        else:
            law[draw(distribution(logits, PLAIN)[0], coins[-1])] += weight
    assert law[0] == Fraction(5, 10) + Fraction(5, 10) * Fraction(5, 10)


def test_only_its_own_coin_decides_a_draft() -> None:
    logits = tenths_logits()
    coins = [0.99] * BLOCK_SIZE
    assert accept_sampled([0, 1], logits, PLAIN, coins).accepted == 0
    coins[0] = 0.0
    assert accept_sampled([0, 1], logits, PLAIN, coins).accepted == 1
    coins[1] = 0.0
    assert accept_sampled([0, 1], logits, PLAIN, coins).accepted == 2


def test_sure_draft_stands_and_impossible_draft_falls() -> None:
    logits = torch.tensor([[0.0, float("-inf"), float("-inf")], [0.0, 0.0, float("-inf")]])
    high = [1.0 - 2**-53] * BLOCK_SIZE
    assert accept_sampled([0], logits, PLAIN, high).accepted == 1
    low = [0.0] * BLOCK_SIZE
    verdict = accept_sampled([1], logits, PLAIN, low)
    assert (verdict.accepted, verdict.bonus) == (0, 0)


# ---------------------------------------------------------------------------- distribution, draw

# Eighths: equal logits are ties, others are apart by far more than exp may be rounded.
logit_rows = st.lists(st.integers(-240, 240).map(lambda n: n / 8), min_size=1, max_size=12)


def brute_force(logits: list[float], temperature: float, top_p: float) -> np.ndarray:
    """Temperature and nucleus token by token."""
    scaled = np.asarray(logits, dtype=np.float64) / temperature
    p = np.exp(scaled - scaled.max())
    p /= p.sum()
    kept, mass = np.zeros_like(p), 0.0
    for token in sorted(range(len(p)), key=lambda t: (-p[t], t)):
        if mass >= top_p:
            break
        kept[token] = p[token]
        mass += p[token]
    return kept / kept.sum()


@settings(max_examples=200, deadline=None)
@given(logit_rows, st.floats(0.05, 5.0), st.sampled_from([0.01, 0.3, 0.5, 0.8, 0.95, 0.999, 1.0]))
def test_distribution_equals_brute_force(
    logits: list[float], temperature: float, top_p: float
) -> None:
    params = SamplingParams(temperature=temperature, top_p=top_p)
    [have] = distribution(torch.tensor([logits], dtype=torch.float64), params).numpy()
    want = brute_force(logits, temperature, top_p)
    boundary = abs(np.sort(want)[::-1].cumsum() - top_p).min() < 1e-9
    if not boundary or top_p == 1.0:
        np.testing.assert_allclose(have, want, atol=1e-12)
    assert have.sum() == pytest.approx(1.0, abs=1e-12)
    assert have[int(np.argmax(want))] > 0


def test_nucleus_is_the_smallest_set_and_prefers_low_ids_on_ties() -> None:
    logits = torch.tensor([[0.25, 0.25, 0.25, 0.25]]).log()
    for top_p, count in ((0.2, 1), (0.25, 1), (0.3, 2), (0.5, 2), (0.75, 3), (0.76, 4)):
        [p] = distribution(logits, SamplingParams(temperature=1.0, top_p=top_p)).tolist()
        assert p == pytest.approx([1 / count] * count + [0.0] * (4 - count)), top_p


def test_rows_are_independent() -> None:
    logits = torch.randn(5, 7, generator=torch.Generator().manual_seed(1))
    params = SamplingParams(temperature=0.7, top_p=0.8)
    together = distribution(logits, params)
    alone = torch.cat([distribution(row[None], params) for row in logits])
    torch.testing.assert_close(together, alone, atol=1e-15, rtol=0.0)


@given(
    st.lists(st.one_of(st.just(0.0), st.floats(1e-12, 1e3)), min_size=1, max_size=10).filter(any),
    st.one_of(st.floats(0, 1, exclude_max=True), st.sampled_from([0.0, 0.5, 1 - 2**-53])),
)
def test_draw_is_inversion_and_never_takes_a_token_without_weight(
    weights: list[float], coin: float
) -> None:
    token = draw(torch.tensor(weights, dtype=torch.float64), coin)
    assert weights[token] > 0
    # cumsum adds in its own order: allow for its last digits.
    slack = 1e-12 * sum(weights)
    assert sum(weights[:token]) <= coin * sum(weights) + slack
    assert coin * sum(weights) <= sum(weights[: token + 1]) + slack


# ---------------------------------------------------------------------------- coins


def test_coins_are_fresh_uniform_and_reproducible() -> None:
    mine, again, other = Coins(7), Coins(7), Coins(8)
    rounds = [mine.next_round() for _ in range(400)]
    assert rounds == [again.next_round() for _ in range(400)]
    flat = [coin for coins in rounds for coin in coins]
    assert all(len(coins) == BLOCK_SIZE for coins in rounds)
    assert len(set(flat)) == len(flat)
    assert 0.0 <= min(flat) < 0.01 < 0.99 < max(flat) < 1.0
    assert not set(flat) & {coin for _ in range(400) for coin in other.next_round()}
    # Neighbours within a round and across rounds are not related.
    x = np.asarray(flat)
    assert abs(np.corrcoef(x[:-1], x[1:])[0, 1]) < 0.05
    assert abs(np.corrcoef(x[:-BLOCK_SIZE], x[BLOCK_SIZE:])[0, 1]) < 0.05


def test_coins_without_a_seed_differ() -> None:
    assert Coins(None).next_round() != Coins(None).next_round()


def test_coins_leave_the_global_generator_alone() -> None:
    torch.manual_seed(3)
    want = torch.rand(4)
    torch.manual_seed(3)
    Coins(5).next_round()
    Coins(None).next_round()
    assert torch.equal(torch.rand(4), want)
