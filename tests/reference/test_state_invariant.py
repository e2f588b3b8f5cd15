"""Whatever was drafted, verified, accepted, shortened or paused: the target remembers the emitted
tokens and nothing else.

After every operation KV, conv window and recurrent state of all layers are compared, in float64,
with those of plain decoding of the same tokens; plain decoding is compared with a prefill.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from engine_kit import SHAPES, random_engine, random_tokens
from hypothesis import given, settings
from hypothesis import strategies as st
from script_kit import Script, ScriptedDrafter, script_drafts
from state_kit import State, draft_context_of, state_of

from hybridspec.policy import Policy
from hybridspec.reference.engine import PREFILL_CHUNK_TOKENS, Engine, Request
from hybridspec.reference.gdn_layer import PREFILL_BLOCK_ROWS
from hybridspec.reference.state import PAGE_TOKENS
from hybridspec.request import LengthRule, SamplingParams

F64 = torch.float64
TOLERANCE = 1e-9
SHAPE = SHAPES["grouped"]
MAX_BATCH = 3
NEW_TOKENS = 130
# Around the delta rule's blocks of 64, and so that decoding crosses the page of 256.
PROMPT_LENGTHS = (1, 2, 63, 65, 180, 250, 255, 256, 257, 300)


@dataclass(repr=False)
class Story:
    """A prompt and what plain decoding makes of it.

    Attributes:
        tokens: prompt and continuation.
        states: by number of processed tokens.
    """

    prompt: list[int]
    tokens: list[int]
    states: dict[int, State]


@dataclass(repr=False)
class Bench:
    """A float64 engine with scripted drafts and the stories that it may tell."""

    engine: Engine
    scripted: ScriptedDrafter
    stories: list[Story]
    policies: dict[int, Policy]


def tell(engine: Engine, prompt: list[int]) -> Story:
    request = engine.add(prompt, length_rule=LengthRule("none"))
    states = {}
    while True:
        states[request.context_tokens] = state_of(engine, request)
        if request.num_emitted > NEW_TOKENS:
            break
        engine.step([request])
    engine.remove(request)
    return Story(prompt, list(request.tokens), states)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory, make_policy: Callable[..., Policy]) -> Bench:
    folder = tmp_path_factory.mktemp("grouped")
    engine = random_engine(folder, SHAPE, dtype=F64, max_batch=MAX_BATCH)
    prompts = [random_tokens(SHAPE.vocab_size, n, seed=40 + n) for n in PROMPT_LENGTHS]
    stories = [tell(engine, prompt) for prompt in prompts]
    # Rows past the limit cost more than anything could bring, once the first router was seen.
    policies = {
        limit: make_policy(
            first_mean=[0.0] * 16, slope=[0.0] * limit + [1e5] * (16 - limit), expert_us=1.0
        )
        for limit in range(1, 17)
    }
    engine.policy = policies[16]
    return Bench(engine, script_drafts(engine), stories, policies)


@dataclass(frozen=True)
class Plan:
    """What one request does in one round.

    Attributes:
        takes_part: the others of the batch go on without it.
        rule: none, fixed or policy, and its length or cap.
        right: drafts that the target agrees with. certain: drafts that the policy trusts.
    """

    takes_part: bool
    rule: LengthRule
    right: int
    certain: int


@dataclass(frozen=True)
class Operation:
    """Join, leave, or a round; `limit` is where the correction cuts policy rounds."""

    kind: str
    story: int
    plans: tuple[Plan, ...]
    limit: int


plans = st.builds(
    Plan,
    st.sampled_from([True, True, True, False]),
    st.builds(
        LengthRule,
        st.sampled_from(["none", "fixed", "fixed", "policy", "policy"]),
        st.integers(1, 16),
    ),
    st.integers(0, 15),
    st.integers(0, 15),
)
operations = st.lists(
    st.builds(
        Operation,
        st.sampled_from(["join", "round", "round", "round", "round", "leave"]),
        st.integers(0, len(PROMPT_LENGTHS) - 1),
        st.tuples(*[plans] * MAX_BATCH),
        st.integers(1, 16),
    ),
    min_size=5,
    max_size=16,
)


def join(bench: Bench, live: list[tuple[Request, Story]], story: Story) -> None:
    # Fixed, so that hidden states are kept for drafting even while a rule without drafts is on.
    request = bench.engine.add(story.prompt, length_rule=LengthRule("fixed"))
    live.append((request, story))


def play_round(bench: Bench, live: list[tuple[Request, Story]], operation: Operation) -> None:
    engine = bench.engine
    engine.policy = bench.policies[operation.limit]
    members, chosen = [], []
    for (request, story), plan in zip(live, operation.plans, strict=False):
        if plan.takes_part and request.context_tokens + 40 < len(story.tokens):
            request.rule = plan.rule
            script = Script(story.tokens, right=plan.right, certain=plan.certain)
            bench.scripted.scripts[id(request.draft_cache)] = script
            members.append(request)
            chosen.append(plan)
    if not members:
        return
    before = [request.context_tokens for request in members]
    rounds = engine.step(members)
    for request, plan, outcome, start in zip(members, chosen, rounds, before, strict=True):
        rows = max(outcome.verify_length, 1)
        assert outcome.accepted == min(plan.right, rows - 1)
        assert len(outcome.emitted) == outcome.accepted + 1 == request.context_tokens - start
        if plan.rule.kind == "none":
            assert not outcome.drafted
        elif plan.rule.kind == "fixed":
            assert outcome.verify_length == plan.rule.length
        elif outcome.drafted:
            selected = min(plan.certain + 1, plan.rule.length)
            assert outcome.selected_length == selected
            assert outcome.verify_length == min(selected, operation.limit)


def check_all(bench: Bench, live: list[tuple[Request, Story]]) -> None:
    for request, story in live:
        assert request.tokens == story.tokens[: len(request.tokens)]
        assert len(request.tokens) == request.context_tokens + 1
        distance = state_of(bench.engine, request).distance(story.states[request.context_tokens])
        assert distance < TOLERANCE


@settings(max_examples=40, deadline=None)
@given(operations)
def test_any_history_leaves_the_state_of_plain_decoding(
    bench: Bench, history: list[Operation]
) -> None:
    check_history(bench, history)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@settings(max_examples=2000, deadline=None)
@given(operations)
def test_many_histories_leave_the_state_of_plain_decoding(
    bench: Bench, history: list[Operation]
) -> None:
    check_history(bench, history)


def check_history(bench: Bench, history: list[Operation]) -> None:
    live: list[tuple[Request, Story]] = []
    try:
        for operation in history:
            story = bench.stories[operation.story]
            if not live or (operation.kind == "join" and bench.engine.free_slots):
                join(bench, live, story)
            elif operation.kind == "leave":
                request, _ = live.pop(operation.story % len(live))
                bench.engine.remove(request)
            else:
                play_round(bench, live, operation)
            check_all(bench, live)
        for request, _ in live:
            tokens = request.tokens[: request.context_tokens]
            fresh_context = fresh_draft_context(bench, tokens)
            torch.testing.assert_close(
                draft_context_of(bench.engine, request), fresh_context, atol=TOLERANCE, rtol=0.0
            )
    finally:
        for request, _ in live:
            bench.engine.remove(request)
    assert bench.engine.free_slots == MAX_BATCH


def fresh_draft_context(bench: Bench, tokens: list[int]) -> torch.Tensor:
    """The drafter's context after a prefill on an engine state of its own."""
    solo = Engine(bench.engine.target, bench.scripted.real, max_batch=1, max_context=1024)
    return draft_context_of(solo, solo.add(tokens, length_rule=LengthRule("fixed")))


@pytest.mark.parametrize("length", [1, 63, 64, 65, 127, 128, 255, 256, 257, 700])
def test_prefill_equals_one_token_at_a_time(bench: Bench, length: int) -> None:
    """Over the blocks of the delta rule, the chunks of a prefill and the pages of the cache."""
    assert (PREFILL_BLOCK_ROWS, PREFILL_CHUNK_TOKENS, PAGE_TOKENS) == (64, 256, 256)
    engine = bench.engine
    tokens = random_tokens(SHAPE.vocab_size, length, seed=length)
    whole = engine.add(tokens, length_rule=LengthRule("none"))
    single = engine.add(tokens[:1], length_rule=LengthRule("none"))
    for token in tokens[1:]:
        single.tokens[-1] = token  # What was drawn is replaced: the text is given.
        engine.step([single])
    assert single.context_tokens == whole.context_tokens == length
    assert single.tokens[-1] == whole.tokens[-1]
    assert state_of(engine, single).distance(state_of(engine, whole)) < TOLERANCE
    for request in (whole, single):
        engine.remove(request)


def test_long_story_over_two_pages(bench: Bench) -> None:
    """Every length, accepted count and kind of round in one request, across 256 and 512 tokens."""
    engine, prompt = bench.engine, random_tokens(SHAPE.vocab_size, 230, seed=77)
    request = engine.add(prompt, length_rule=LengthRule("none"))
    while request.num_emitted < 360:
        engine.step([request])
    truth = list(request.tokens)
    engine.remove(request)
    drafted = engine.add(prompt, length_rule=LengthRule("fixed"))
    kinds = ("fixed", "none", "fixed", "policy", "fixed")
    number = 0
    while drafted.context_tokens < 540:
        drafted.rule = LengthRule(kinds[number % 5], 1 + number * 7 % 16)
        engine.policy = bench.policies[1 + number * 5 % 16]
        script = Script(truth, right=number * 11 % 16, certain=number * 3 % 16)
        bench.scripted.scripts[id(drafted.draft_cache)] = script
        engine.step([drafted])
        number += 1
        if number % 6 == 0 or drafted.context_tokens in (256, 512):
            fresh = engine.add(truth[: drafted.context_tokens], length_rule=LengthRule("none"))
            assert state_of(engine, drafted).distance(state_of(engine, fresh)) < TOLERANCE
            engine.remove(fresh)
    assert drafted.tokens == truth[: len(drafted.tokens)]
    engine.remove(drafted)


def test_slot_of_a_removed_request_starts_empty(bench: Bench) -> None:
    engine = bench.engine
    first = engine.add(bench.stories[4].prompt, length_rule=LengthRule("none"))
    slot = first.slot
    engine.step([first])
    engine.remove(first)
    engine.remove(first)
    assert engine.free_slots == MAX_BATCH
    story = bench.stories[0]
    second = engine.add(story.prompt, length_rule=LengthRule("none"))
    assert second.slot == slot
    assert state_of(engine, second).distance(story.states[second.context_tokens]) < TOLERANCE
    engine.remove(second)


@pytest.mark.parametrize("length", [2, 7, 16])
def test_sampled_text_leaves_the_state_of_its_tokens(bench: Bench, length: int) -> None:
    """Rejected drafts and residual draws: what was emitted is what is remembered."""
    engine = bench.engine
    drafter, engine.drafter = engine.drafter, bench.scripted.real
    try:
        requests = [
            engine.add(
                story.prompt,
                sampling=SamplingParams(temperature=0.8, top_p=0.9, seed=length),
                length_rule=LengthRule("fixed", max(1, length - place)),
            )
            for place, story in enumerate(bench.stories[3:5])
        ]
        for _ in range(8):
            engine.step(requests)
            for request in requests:
                fresh = engine.add(
                    request.tokens[: request.context_tokens], length_rule=LengthRule("none")
                )
                assert state_of(engine, request).distance(state_of(engine, fresh)) < TOLERANCE
                engine.remove(fresh)
        for request in requests:
            engine.remove(request)
    finally:
        engine.drafter = drafter
