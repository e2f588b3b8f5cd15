"""Sampled text of the whole engine follows the target alone, whatever lengths are verified.

The joint law of the first three tokens is enumerated from the target's own probabilities and
compared with a chi-square test. Seeds are fixed, so the outcome is.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import cast

import numpy as np
import pytest
import torch
from engine_kit import NINE_TOKENS, random_engine, random_tokens, teacher_forced
from scipy import stats

import hybridspec.reference.engine as engine_module
from hybridspec.acceptance import Verdict, accept_sampled, distribution, draw
from hybridspec.artifacts.tables import BLOCK_SIZE
from hybridspec.policy import Policy
from hybridspec.reference.drafter import Drafter, DraftSignals
from hybridspec.reference.engine import Engine, Request
from hybridspec.reference.state import KVCache
from hybridspec.request import LengthRule, SamplingParams

PROMPT = [1, 7, 3]
DEPTH = 3
BATCH = 200
LEAST_P = 1e-3


@dataclass
class GuessingDrafter:
    """A drafter with other weights, as it were: behind the prompt it guesses likely text.

    Attributes:
        guesses: 15 drafts by the first token behind the prompt; later rounds keep the real ones.
    """

    real: Drafter
    guesses: dict[int, list[int]]

    def __getattr__(self, name: str) -> object:
        return getattr(self.real, name)

    def draft(
        self, anchors: Sequence[int], starts: Sequence[int], caches: Sequence[KVCache]
    ) -> DraftSignals:
        signals = self.real.draft(anchors, starts, caches)
        tokens = signals.tokens_BD.clone()
        for row, (anchor, start) in enumerate(zip(anchors, starts, strict=True)):
            if start == len(PROMPT):
                tokens[row] = torch.tensor(self.guesses[anchor])
        return replace(signals, tokens_BD=tokens)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder = tmp_path_factory.mktemp("tiny")
    engine = random_engine(folder, NINE_TOKENS, seed=5, max_batch=BATCH, max_context=64)
    engine.target.lm_head_VH.mul_(0.4)  # No token is sure.
    guesses = {}
    for first in range(NINE_TOKENS.vocab_size):
        text = [first]
        while len(text) <= BLOCK_SIZE:
            logits = teacher_forced(engine, [*PROMPT, *text], [0]).logits[-1]
            # By turns the best and the second best token, so that some drafts fall.
            text.append(int(logits.topk(2).indices[len(text) % 2]))
        guesses[first] = text[1:BLOCK_SIZE]
    assert engine.drafter is not None
    engine.drafter = cast(Drafter, GuessingDrafter(engine.drafter, guesses))
    return engine


def shaped(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Temperature and nucleus, written apart from the engine's own."""
    p = np.exp((logits - logits.max()) / params.temperature)
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    size = int(np.searchsorted(np.cumsum(p[order]), params.top_p)) + 1
    kept = np.zeros_like(p)
    kept[order[:size]] = p[order[:size]]
    return kept / kept.sum()


@cache
def enumerate_law(engine: Engine, params: SamplingParams) -> dict[tuple[int, ...], float]:
    """Probability of every text of `DEPTH` tokens behind the prompt."""
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(DEPTH):
        longer = {}
        for text, p in law.items():
            logits = teacher_forced(engine, [*PROMPT, *text], [0]).logits[-1].double().numpy()
            for token, chance in enumerate(shaped(logits, params)):
                if chance > 0:
                    longer[*text, token] = p * chance
        law = longer
    return law


@dataclass
class Sample:
    """Counts of texts of `DEPTH` tokens; drafts judged and accepted on the way."""

    counts: Counter[tuple[int, ...]]
    judged: int
    accepted: int


def sample(engine: Engine, params: SamplingParams, rule: LengthRule, size: int) -> Sample:
    counts: Counter[tuple[int, ...]] = Counter()
    judged = accepted = 0
    for first in range(0, size, BATCH):
        requests = [
            engine.add(
                PROMPT,
                sampling=SamplingParams(params.temperature, params.top_p, seed=first + i),
                length_rule=rule,
            )
            for i in range(min(BATCH, size - first))
        ]
        while live := [r for r in requests if r.num_emitted < DEPTH]:
            for outcome in engine.step(live):
                judged += outcome.accepted < outcome.verify_length - 1
                judged += outcome.accepted
                accepted += outcome.accepted
        for request in requests:
            counts[tuple(request.tokens[len(PROMPT) :][:DEPTH])] += 1
            engine.remove(request)
    return Sample(counts, judged, accepted)


def chi_square_p(counts: Counter[tuple[int, ...]], law: dict[tuple[int, ...], float]) -> float:
    """p-value; cells that expect fewer than 8 are joined into one."""
    assert set(counts) <= set(law), "a text came out that the target cannot produce"
    size = sum(counts.values())
    expected, observed, rest_expected, rest_observed = [], [], 0.0, 0
    for text, chance in law.items():
        if chance * size < 8:
            rest_expected += chance * size
            rest_observed += counts[text]
        else:
            expected.append(chance * size)
            observed.append(counts[text])
    if rest_expected > 0:
        expected.append(rest_expected)
        observed.append(rest_observed)
    assert len(expected) >= 8
    return float(stats.chisquare(observed, np.asarray(expected) * size / sum(expected)).pvalue)


def check(engine: Engine, params: SamplingParams, rule: LengthRule, size: int) -> Sample:
    result = sample(engine, params, rule, size)
    p = chi_square_p(result.counts, enumerate_law(engine, params))
    assert p > LEAST_P
    return result


CASES = [
    (temperature, top_p, length)
    for temperature, top_p in itertools.product((1.0, 0.7), (1.0, 0.8))
    for length in (2, 4, 16)
]


# Every length plain, and every shape of the law once.
SHORT_CASES = [case for case in CASES if case[:2] == (1.0, 1.0)]
SHORT_CASES += [(0.7, 1.0, 16), (1.0, 0.8, 2), (0.7, 0.8, 4)]


@pytest.mark.parametrize(("temperature", "top_p", "length"), SHORT_CASES)
def test_fixed_lengths(tiny: Engine, temperature: float, top_p: float, length: int) -> None:
    params = SamplingParams(temperature, top_p)
    result = check(tiny, params, LengthRule("fixed", length), 1200)
    assert 0.05 < result.accepted / result.judged < 0.95


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("temperature", "top_p", "length"), CASES)
def test_fixed_lengths_with_many_samples(
    tiny: Engine, temperature: float, top_p: float, length: int
) -> None:
    check(tiny, SamplingParams(temperature, top_p), LengthRule("fixed", length), 20_000)


def test_plain_decoding(tiny: Engine) -> None:
    check(tiny, SamplingParams(1.0), LengthRule("none"), 1200)


def test_lengths_chosen_by_the_policy(tiny: Engine, make_policy: Callable[..., Policy]) -> None:
    """Lengths depend on signals and on the first router, never on a coin."""
    tiny.policy = make_policy(
        first_mean=[2.0] * 16, slope=[3.0] * 16, expert_us=30.0, row_us=60.0, lam=1.2e-3
    )
    try:
        result = check(tiny, SamplingParams(1.0), LengthRule("policy"), 1200)
    finally:
        tiny.policy = None
    assert result.accepted > 0


def accept_keeping_the_rejected(
    drafts: list[int], logits_LV: torch.Tensor, sampling: SamplingParams, coins: list[float]
) -> Verdict:
    """A wrong rule: the rejected draft may still be drawn."""
    verdict = accept_sampled(drafts, logits_LV, sampling, coins)
    if verdict.accepted == len(drafts):
        return verdict
    row = distribution(logits_LV, sampling)[verdict.accepted]
    return Verdict(verdict.accepted, draw(row, coins[BLOCK_SIZE - 1]))


def accept_with_shared_coins(
    drafts: list[int], logits_LV: torch.Tensor, sampling: SamplingParams, coins: list[float]
) -> Verdict:
    """A wrong rule: the coin that judged the first draft draws the last token."""
    return accept_sampled(drafts, logits_LV, sampling, [*coins[: BLOCK_SIZE - 1], coins[0]])


@pytest.mark.parametrize("wrong", [accept_keeping_the_rejected, accept_with_shared_coins])
@pytest.mark.parametrize("length", [2, 16])
def test_wrong_rules_fail_the_same_test(
    tiny: Engine,
    wrong: Callable[..., Verdict],
    length: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_module, "accept_sampled", wrong)
    params = SamplingParams(1.0)
    result = sample(tiny, params, LengthRule("fixed", length), 1200)
    assert chi_square_p(result.counts, enumerate_law(tiny, params)) < LEAST_P / 100


# ---------------------------------------------------------------------------- coins of requests


def coins_used(engine: Engine, rules: list[LengthRule], rounds: int) -> list[list[list[float]]]:
    """Coins of each request, round by round, when all are decoded in one batch."""
    requests = [
        engine.add(PROMPT, sampling=SamplingParams(1.0, seed=50 + i), length_rule=rule)
        for i, rule in enumerate(rules)
    ]
    used: list[list[list[float]]] = [[] for _ in rules]
    for place, request in enumerate(requests):
        record_coins(request, used[place])
    for _ in range(rounds):
        engine.step(requests)
    for request in requests:
        engine.remove(request)
    return used


def record_coins(request: Request, used: list[list[float]]) -> None:
    coins = request.coins
    assert coins is not None
    fresh = coins.next_round

    def next_round() -> list[float]:
        used.append(fresh())
        return used[-1]

    coins.next_round = next_round


def test_coins_do_not_depend_on_lengths_and_are_never_used_twice(tiny: Engine) -> None:
    rules = [LengthRule("fixed", 2), LengthRule("fixed", 3), LengthRule("none")]
    used = coins_used(tiny, rules, 3)
    assert used == coins_used(tiny, [LengthRule("none"), *rules[:2]], 3)
    flat = [coin for request in used for coins in request for coin in coins]
    assert len(set(flat)) == len(flat) == 3 * 3 * BLOCK_SIZE


def test_seeded_text_does_not_depend_on_the_batch(tiny: Engine) -> None:
    def texts(batches: list[list[int]]) -> dict[int, list[int]]:
        found = {}
        for seeds in batches:
            requests = [
                tiny.add(
                    random_tokens(NINE_TOKENS.vocab_size, 2 + seed, seed),
                    sampling=SamplingParams(0.9, 0.95, seed=seed),
                    length_rule=LengthRule("fixed", 2 + seed),
                )
                for seed in seeds
            ]
            for _ in range(3):
                tiny.step(requests)
            for seed, request in zip(seeds, requests, strict=True):
                found[seed] = list(request.tokens)
                tiny.remove(request)
        return found

    together = texts([[1, 2, 3, 4]])
    assert together == texts([[1], [3, 2], [4]])
    assert together == texts([[4, 3, 2, 1]])


def test_sampled_and_greedy_requests_share_a_batch(tiny: Engine) -> None:
    greedy = tiny.add(PROMPT, length_rule=LengthRule("fixed", 4))
    alone = tiny.add(PROMPT, length_rule=LengthRule("fixed", 4))
    sampled = tiny.add(
        PROMPT, sampling=SamplingParams(1.0, seed=3), length_rule=LengthRule("fixed", 9)
    )
    for _ in range(4):
        tiny.step([sampled, greedy])
        tiny.step([alone])
    assert greedy.tokens == alone.tokens
    for request in (greedy, alone, sampled):
        tiny.remove(request)
