"""Lengths are chosen before coins are drawn, and a coin decides one thing of one request.

Both are assumptions of the proof that sampled text is the target's own. The faults that they
exclude are planted and must fail the same checks.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from engine_kit import NINE_TOKENS, random_engine

import hybridspec.acceptance as acceptance_module
import hybridspec.reference.engine as engine_module
from hybridspec.acceptance import Coins, Verdict, accept_sampled
from hybridspec.artifacts.tables import BLOCK_SIZE
from hybridspec.policy import Policy, Selection
from hybridspec.reference.drafter import DraftSignals
from hybridspec.reference.engine import Engine, Request
from hybridspec.request import LengthRule, SamplingParams

PROMPT = [1, 7, 3]
BATCH = 64


@pytest.fixture
def engine(pairs_folder: Path, make_policy: Callable[..., Policy]) -> Engine:
    engine = random_engine(
        pairs_folder / "nine", NINE_TOKENS, seed=5, max_batch=BATCH, max_context=64
    )
    engine.target.lm_head_VH.mul_(0.4)  # No token is sure.
    engine.policy = make_policy(
        first_mean=[2.0] * 16, slope=[3.0] * 16, expert_us=30.0, row_us=60.0, lam=1.2e-3
    )
    return engine


def join(engine: Engine, count: int, rule: LengthRule | None = None) -> list[Request]:
    rules = [LengthRule("policy"), LengthRule("fixed", 4), LengthRule("none")]
    return [
        engine.add(
            PROMPT,
            sampling=SamplingParams(1.0, seed=seed),
            length_rule=rule or rules[seed % 3],
        )
        for seed in range(count)
    ]


# ---------------------------------------------------------------------------- length before coins


def check_lengths_know_no_coin(engine: Engine) -> None:
    """Requests that differ in their coins alone verify the same rows in the round that follows."""
    requests = join(engine, BATCH, LengthRule("policy"))
    before = [tuple(request.tokens) for request in requests]
    lengths, accepted = defaultdict(set), defaultdict(set)
    for text, outcome in zip(before, engine.step(requests), strict=True):
        lengths[text].add(outcome.verify_length)
        accepted[text].add(outcome.accepted)
    # Power: coins decided differently within a text, and lengths differ between texts.
    assert any(len(counts) > 1 for counts in accepted.values())
    assert len(set().union(*lengths.values())) > 1
    assert all(len(chosen) == 1 for chosen in lengths.values()), "lengths follow coins"


def check_order(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every round all lengths are final before the first coin is drawn."""
    events: list[str] = []

    def logged(owner: type, name: str, event: str) -> None:
        real = getattr(owner, name)

        def wrapper(*args: object, **kwargs: object) -> object:
            result = real(*args, **kwargs)
            events.append(event)
            return result

        monkeypatch.setattr(owner, name, wrapper)

    logged(Engine, "_draft_and_select", "length")
    logged(Engine, "_correct", "length")
    logged(Coins, "next_round", "coins")
    requests = join(engine, 6)
    for _ in range(4):
        events.clear()
        engine.step(requests)
        first_coins = events.index("coins")
        # Selected, then corrected at the first router.
        assert events[:first_coins] == ["length"] * 2, "two choices come before the first coin"
        assert events[first_coins:] == ["coins"] * len(requests)


def test_lengths_know_no_coin(engine: Engine) -> None:
    check_lengths_know_no_coin(engine)


def test_lengths_are_final_before_the_first_coin(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_order(engine, monkeypatch)


def draw_coins_early(monkeypatch: pytest.MonkeyPatch, *, cut: bool) -> None:
    """Reorder the engine's draws: the round's coins first, then the lengths.

    Args:
        cut: shorten each block at the first high coin, "because its draft will fall anyway".
    """
    drawn: dict[int, list[float]] = {}
    fresh, choose = Coins.next_round, Engine._draft_and_select

    def next_round(self: Coins) -> list[float]:
        return drawn.pop(id(self), None) or fresh(self)

    def draft_and_select(
        self: Engine, requests: Sequence[Request], drafting: Sequence[bool]
    ) -> tuple[DraftSignals | None, Selection | None, list[int]]:
        for request in requests:
            assert request.coins is not None
            drawn[id(request.coins)] = Coins.next_round(request.coins)
        signals, selection, lengths = choose(self, requests, drafting)
        if cut:
            for i, request in enumerate(requests):
                coins = drawn[id(request.coins)]
                high = next((j for j, coin in enumerate(coins) if coin >= 0.5), BLOCK_SIZE)
                lengths[i] = min(lengths[i], high + 1)
        return signals, selection, lengths

    monkeypatch.setattr(Coins, "next_round", next_round)
    monkeypatch.setattr(Engine, "_draft_and_select", draft_and_select)


def test_lengths_from_early_coins_fail(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    draw_coins_early(monkeypatch, cut=True)
    with pytest.raises(AssertionError, match="lengths follow coins"):
        check_lengths_know_no_coin(engine)


@pytest.mark.parametrize("cut", [True, False])
def test_early_coins_fail(engine: Engine, monkeypatch: pytest.MonkeyPatch, cut: bool) -> None:
    """Also where nothing is made of them yet."""
    draw_coins_early(monkeypatch, cut=cut)
    with pytest.raises(AssertionError, match="before the first coin"):
        check_order(engine, monkeypatch)


# ---------------------------------------------------------------------------- one use a coin


class TracedCoin(float):
    """A coin that knows whose it is and where it was used."""

    owner: int
    used: Counter[tuple[int, float]]

    def __ge__(self, chance: float) -> bool:
        self.used[self.owner, float(self)] += 1
        return float(self) >= chance


def trace_coins(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[int, float]]:
    """Count what every coin decides, by its owner and value."""
    used: Counter[tuple[int, float]] = Counter()
    owners: dict[int, int] = {}
    fresh, draw = Coins.next_round, acceptance_module.draw

    def next_round(self: Coins) -> list[float]:
        coins = []
        for value in fresh(self):
            coin = TracedCoin(value)
            coin.owner, coin.used = owners.setdefault(id(self), len(owners)), used
            coins.append(coin)
        return coins

    def traced_draw(weights_V: torch.Tensor, coin: float) -> int:
        assert isinstance(coin, TracedCoin)
        used[coin.owner, float(coin)] += 1
        return draw(weights_V, float(coin))

    monkeypatch.setattr(Coins, "next_round", next_round)
    monkeypatch.setattr(acceptance_module, "draw", traced_draw)
    monkeypatch.setattr(engine_module, "draw", traced_draw)
    return used


def check_uses(engine: Engine, used: Counter[tuple[int, float]]) -> None:
    requests = join(engine, 9)
    for _ in range(5):
        live = [request for request in requests if not request.finished]
        engine.step(live)
    emitted = sum(request.num_emitted for request in requests)
    assert {owner for owner, _ in used} == set(range(9))
    # Each round draws one token; each emitted draft was judged once.
    assert emitted <= sum(used.values())
    assert set(used.values()) == {1}, "a coin decided twice"
    values = [value for _, value in used]
    assert len(set(values)) == len(values), "two requests used the same coin"


def test_a_coin_decides_once_and_for_one_request(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_uses(engine, trace_coins(monkeypatch))


def accept_with_one_coin_twice(
    drafts: list[int], logits_LV: torch.Tensor, params: SamplingParams, coins: list[float]
) -> Verdict:
    return accept_sampled(drafts, logits_LV, params, [*coins[: BLOCK_SIZE - 1], coins[0]])


def test_a_coin_used_twice_fails(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "accept_sampled", accept_with_one_coin_twice)
    with pytest.raises(AssertionError, match="decided twice"):
        check_uses(engine, trace_coins(monkeypatch))


def test_coins_shared_by_a_batch_fail(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every request starts the same stream, as one seed for all of them would."""
    real = Coins.__init__
    monkeypatch.setattr(Coins, "__init__", lambda self, _seed: real(self, 3))
    with pytest.raises(AssertionError, match="same coin"):
        check_uses(engine, trace_coins(monkeypatch))
