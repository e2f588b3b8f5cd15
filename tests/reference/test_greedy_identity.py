"""Greedy text of every rule equals plain decoding token by token.

Sums of another order may turn a tie of the target: at a first difference the margin between the
two best logits must be below `MAX_TIE_MARGIN`, and it is recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from engine_kit import (
    BUNDLED_PAIR,
    SHAPES,
    assert_same_text,
    decode,
    prompts_of,
    random_engine,
    random_tokens,
    spread,
    trained_pair,
)
from script_kit import Script, script_drafts

from hybridspec.policy import Policy
from hybridspec.reference.engine import Engine
from hybridspec.reference.loading import load_pair
from hybridspec.request import LengthRule

MakePolicy = Callable[..., Policy]
RULES = [*(LengthRule("fixed", length) for length in range(1, 17)), LengthRule("policy")]
# `test_all_test_prompts`, the long form, takes them all.
SHORT_RULES = [rule for rule in RULES if rule.kind == "policy" or rule.length in (1, 2, 3, 8, 16)]
CORRECTIONS = ("select", "paper", "off")


def rule_name(rule: LengthRule) -> str:
    return f"{rule.kind}-{rule.length}"


def routed_policy(make_policy: MakePolicy, correction: str = "select") -> Policy:
    """A policy that corrects at the first router, with prices that move its choice."""
    means = [1.0 + 1.5 * row for row in range(16)]
    return make_policy(first_mean=means, slope=[4.0] * 16, expert_us=40.0, correction=correction)


def compare(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    plain: Sequence[Sequence[int]],
    rule: LengthRule,
    record_property: Callable[[str, object], None],
) -> int:
    """Decode a batch with `rule` and compare; returns how many drafts stood."""
    requests = [engine.add(prompt, length_rule=rule) for prompt in prompts]
    accepted, wanted = 0, max(len(text) for text in plain)
    while live := [r for r in requests if not r.finished and r.num_emitted < wanted]:
        accepted += sum(outcome.accepted for outcome in engine.step(live))
    for prompt, text, request in zip(prompts, plain, requests, strict=True):
        ours = request.tokens[len(prompt) :][: len(text)]
        margin = assert_same_text(engine, prompt, text, ours)
        if margin is not None:
            record_property(f"tie at {rule_name(rule)}", margin)
        engine.remove(request)
    return accepted


@pytest.fixture(scope="module")
def trained() -> tuple[Engine, list[list[int]], list[list[int]]]:
    """The bundled pair, a few test prompts of several lengths, and plain decoding behind them."""
    folder = trained_pair("bundled" if BUNDLED_PAIR.is_dir() else "micro")
    engine = load_pair(folder / "target", folder / "drafter", max_context=1024, max_batch=4)
    chosen = spread(prompts_of(folder), 3)
    prompts = [prompt[: len(prompt) - 9 * n] for n, prompt in enumerate(chosen)]
    return engine, prompts, decode(engine, prompts, LengthRule("none"), 48)


@pytest.mark.parametrize("rule", SHORT_RULES, ids=rule_name)
def test_trained_pair(
    rule: LengthRule,
    trained: tuple[Engine, list[list[int]], list[list[int]]],
    make_policy: MakePolicy,
    record_property: Callable[[str, object], None],
) -> None:
    engine, prompts, plain = trained
    engine.policy = routed_policy(make_policy)
    accepted = compare(engine, prompts, plain, rule, record_property)
    assert (accepted > 0) == (rule.length > 1)


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_policy_with_every_correction(
    correction: str,
    trained: tuple[Engine, list[list[int]], list[list[int]]],
    make_policy: MakePolicy,
    record_property: Callable[[str, object], None],
) -> None:
    engine, prompts, plain = trained
    engine.policy = routed_policy(make_policy, correction)
    for cap in (16, 3):
        compare(engine, prompts, plain, LengthRule("policy", cap), record_property)


@pytest.mark.parametrize("name", list(SHAPES))
def test_random_pairs_whose_drafts_stand(
    name: str,
    pairs_folder: Path,
    make_policy: MakePolicy,
    record_property: Callable[[str, object], None],
) -> None:
    """Random drafters guess nothing, so scripts propose right tokens in changing numbers."""
    shape = SHAPES[name]
    engine = random_engine(pairs_folder / name, shape)
    engine.policy = routed_policy(make_policy)
    prompt = random_tokens(shape.vocab_size, 33, seed=21)
    [plain] = decode(engine, [prompt], LengthRule("none"), 60)
    truth, scripted, rounds = [*prompt, *plain], script_drafts(engine), 0
    for rule in RULES:
        request = engine.add(prompt, length_rule=rule)
        same = request.tokens[33:] == plain[:1]
        while request.num_emitted < 40 and same:
            rounds += 1
            script = Script(truth, right=rounds * 7 % 16, certain=rounds * 5 % 16)
            scripted.scripts[id(request.draft_cache)] = script
            [outcome] = engine.step([request])
            assert outcome.accepted == min(script.right, max(outcome.verify_length, 1) - 1) or (
                request.tokens[33:] != plain[: request.num_emitted]
            )
            same = request.tokens[33:] == plain[: request.num_emitted]
        ours = request.tokens[33:]
        margin = assert_same_text(engine, prompt, plain[: len(ours)], ours)
        if margin is not None:
            record_property(f"tie at {rule_name(rule)}", margin)
        engine.remove(request)


def test_real_drafts_of_random_pairs(
    pairs_folder: Path, make_policy: MakePolicy, record_property: Callable[[str, object], None]
) -> None:
    for name in ("plain", "grouped", "odd"):
        engine = random_engine(pairs_folder / name, SHAPES[name])
        engine.policy = routed_policy(make_policy)
        vocab = SHAPES[name].vocab_size
        prompts = [random_tokens(vocab, n, seed=n) for n in (1, 40, 70)]
        plain = decode(engine, prompts, LengthRule("none"), 16)
        for rule in (LengthRule("fixed", 2), LengthRule("fixed", 16), LengthRule("policy")):
            compare(engine, prompts, plain, rule, record_property)


@pytest.fixture(scope="module", params=["bundled", "micro"])
def whole(request: pytest.FixtureRequest) -> tuple[Engine, list[list[int]], list[list[int]]]:
    """A pair, all its test prompts, and 128 tokens of plain decoding behind each."""
    folder = trained_pair(request.param)
    engine = load_pair(folder / "target", folder / "drafter", max_context=1024, max_batch=4)
    prompts = prompts_of(folder)
    assert prompts
    plain = []
    for start in range(0, len(prompts), 4):
        plain += decode(engine, prompts[start : start + 4], LengthRule("none"), 128)
    return engine, prompts, plain


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("rule", RULES, ids=rule_name)
def test_all_test_prompts(
    rule: LengthRule,
    whole: tuple[Engine, list[list[int]], list[list[int]]],
    make_policy: MakePolicy,
    record_property: Callable[[str, object], None],
) -> None:
    """Every rule behind a third of the prompts, by turns, so that rules cover all of them."""
    engine, prompts, plain = whole
    engine.policy = routed_policy(make_policy)
    accepted = 0
    for start in range(4 * (RULES.index(rule) % 3), len(prompts), 12):
        group = slice(start, start + 4)
        accepted += compare(engine, prompts[group], plain[group], rule, record_property)
    assert (accepted > 0) == (rule.length > 1)
