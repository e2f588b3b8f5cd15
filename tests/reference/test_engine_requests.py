"""Requests from prompt to end: refusals, slots, end of sequence, context limit, fall-backs."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
from engine_kit import SHAPES, decode, random_engine, random_tokens, teacher_forced
from script_kit import Script, script_drafts

from hybridspec.errors import EnvironmentMissing, PromptError, UsageError
from hybridspec.policy import Policy
from hybridspec.reference.drafter import Drafter, DraftSignals
from hybridspec.reference.engine import Engine
from hybridspec.reference.loading import load_pair
from hybridspec.reference.random_pair import write_random_pair
from hybridspec.reference.state import KVCache
from hybridspec.request import LengthRule, SamplingParams

MakePolicy = Callable[..., Policy]
SHAPE = SHAPES["grouped"]
VOCAB = SHAPE.vocab_size
NONE = LengthRule("none")


@pytest.fixture
def engine(pairs_folder: Path) -> Engine:
    return random_engine(pairs_folder / "grouped", SHAPE, max_batch=3, max_context=128)


# ---------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("prompt", "word"),
    [
        ([], "no tokens"),
        ([1, VOCAB], f"{VOCAB} lies outside the vocabulary 0..{VOCAB - 1}"),
        ([1, -1], "-1"),
        ([1] * 128, "128 tokens; the context holds 128"),
        ([1] * 500, "500 tokens"),
    ],
)
def test_prompts_that_cannot_be_decoded_from(engine: Engine, prompt: list[int], word: str) -> None:
    with pytest.raises(PromptError) as caught:
        engine.add(prompt, length_rule=NONE)
    assert word in str(caught.value)
    assert caught.value.exit_code == 2
    assert engine.free_slots == 3


def test_rules_that_the_engine_cannot_follow(engine: Engine, pairs_folder: Path) -> None:
    with pytest.raises(UsageError, match="no policy"):
        engine.add([1], length_rule=LengthRule("policy"))
    alone = load_pair(pairs_folder / "grouped" / "target", None, max_context=64)
    for kind in ("fixed", "policy"):
        with pytest.raises(UsageError, match="no drafter"):
            alone.add([1], length_rule=LengthRule(kind))
    assert alone.add([1]).rule == NONE
    for length in (0, 17, -1):
        with pytest.raises(UsageError, match=str(length)):
            LengthRule("fixed", length)
    assert engine.free_slots == 3


def test_default_rules(engine: Engine, make_policy: MakePolicy) -> None:
    assert engine.add([1]).rule == LengthRule("fixed", 16)
    engine.policy = make_policy()
    assert engine.add([1]).rule == LengthRule("policy", 16)


def test_slots_run_out_and_come_back(engine: Engine) -> None:
    requests = [engine.add([1 + i], length_rule=NONE) for i in range(3)]
    assert len({r.slot for r in requests}) == 3
    with pytest.raises(EnvironmentMissing, match="all 3 slots"):
        engine.add([9], length_rule=NONE)
    engine.remove(requests[1])
    engine.remove(requests[1])
    assert engine.free_slots == 1
    engine.add([9], length_rule=NONE)
    assert engine.free_slots == 0


def test_finished_and_removed_requests_are_refused(engine: Engine) -> None:
    full = engine.add([1] * 127, length_rule=NONE)
    assert full.finished
    assert full.finish_reason == "length"
    gone = engine.add([1], length_rule=NONE)
    engine.remove(gone)
    live = engine.add([2], length_rule=NONE)
    before = list(live.tokens)
    for bad in (full, gone):
        with pytest.raises(UsageError, match="finished or removed"):
            engine.step([live, bad])
    with pytest.raises(UsageError, match="once"):
        engine.step([live, live])
    assert live.tokens == before
    assert engine.step([]) == []


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_p": math.nan},
        {"seed": 2**63},
    ],
)
def test_sampling_that_cannot_be_right(params: dict[str, float]) -> None:
    with pytest.raises(UsageError):
        SamplingParams(**params)  # type: ignore[arg-type]


# ---------------------------------------------------------------------------- the end of a text


@pytest.mark.parametrize("rule", [NONE, *(LengthRule("fixed", n) for n in (1, 2, 5, 16))])
@pytest.mark.parametrize("prompt_length", [1, 100, 111, 112, 120, 126, 127])
def test_context_limit_is_the_same_for_every_rule(
    engine: Engine, rule: LengthRule, prompt_length: int
) -> None:
    """Text fills the context to the last token, never past it, drafts right or not."""
    prompt = random_tokens(VOCAB, prompt_length, seed=3)
    request = engine.add(prompt, length_rule=NONE)
    while not request.finished:
        engine.step([request])
    plain = request.tokens
    assert len(plain) == engine.max_context
    engine.remove(request)
    scripted = script_drafts(engine)
    for right in (0, 7, 15):
        request = engine.add(prompt, length_rule=rule)
        while not request.finished:
            script = Script([*plain, *[0] * 16], right=right)
            scripted.scripts[id(request.draft_cache)] = script
            engine.step([request])
        assert request.tokens == plain
        assert request.finish_reason == "length"
        engine.remove(request)


@pytest.mark.parametrize("place", [0, 1, 4, 9])
@pytest.mark.parametrize("length", [1, 4, 16])
def test_text_ends_at_the_first_end_of_sequence(tmp_path: Path, place: int, length: int) -> None:
    """Also where it lies inside an accepted block: what is behind it is not emitted."""
    folders = write_random_pair(tmp_path, SHAPE, seed=3)
    engine = load_pair(*folders, max_context=128)
    prompt = random_tokens(VOCAB, 20, seed=4)
    [plain] = decode(engine, [prompt], NONE, 40)
    # The first token that has not occurred before it, from `place` on.
    end = next(i for i in range(place, 40) if plain[i] not in plain[:i])
    (folders[0] / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [plain[end]]}), encoding="utf-8"
    )
    engine = load_pair(*folders, max_context=128)
    scripted = script_drafts(engine)
    request = engine.add(prompt, length_rule=LengthRule("fixed", length))
    emitted = list(request.tokens[20:])
    while not request.finished:
        scripted.scripts[id(request.draft_cache)] = Script([*prompt, *plain], right=15)
        [outcome] = engine.step([request])
        emitted += outcome.emitted
    assert request.tokens[20:] == emitted == plain[: end + 1]
    assert request.finish_reason == "stop"
    with pytest.raises(UsageError):
        engine.step([request])
    engine.remove(request)
    assert engine.free_slots == engine.max_batch


# ---------------------------------------------------------------------------- batches


def test_text_does_not_depend_on_neighbours_that_come_and_go(
    pairs_folder: Path, make_policy: MakePolicy
) -> None:
    engine = random_engine(
        pairs_folder / "grouped", SHAPE, dtype=torch.float64, max_batch=3, max_context=400
    )
    engine.policy = make_policy(first_mean=[3.0] * 16, slope=[1.0] * 16)
    prompts = [random_tokens(VOCAB, n, seed=n) for n in (1, 60, 257, 13)]
    plain = [decode(engine, [prompt], NONE, 30)[0] for prompt in prompts]
    rules = [LengthRule("fixed", 3), LengthRule("policy"), NONE, LengthRule("fixed", 16)]
    first, second = (engine.add(prompts[i], length_rule=rules[i]) for i in (0, 1))
    engine.step([first, second])
    third = engine.add(prompts[2], length_rule=rules[2])
    engine.step([third, first, second])
    slot = second.slot
    engine.remove(second)
    fourth = engine.add(prompts[3], length_rule=rules[3])
    assert fourth.slot == slot
    for _ in range(8):
        engine.step([fourth, third, first])
    for i, request in enumerate((first, second, third, fourth)):
        assert request.tokens == [*prompts[i], *plain[i]][: len(request.tokens)]
        assert request.num_emitted >= 3


# ---------------------------------------------------------------------------- fall-backs


@dataclass
class BrokenDrafter:
    """A drafter whose probabilities are NaN, as damaged activations would make them."""

    real: Drafter

    def __getattr__(self, name: str) -> object:
        return getattr(self.real, name)

    def draft(
        self, anchors: Sequence[int], starts: Sequence[int], caches: Sequence[KVCache]
    ) -> DraftSignals:
        signals = self.real.draft(anchors, starts, caches)
        return replace(signals, p1_BD=torch.full_like(signals.p1_BD, math.nan))


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("cap", [16, 3])
def test_rounds_that_cannot_be_decided_take_the_fixed_length(
    engine: Engine, make_policy: MakePolicy, static: bool, cap: int
) -> None:
    prompt = random_tokens(VOCAB, 10, seed=5)
    [plain] = decode(engine, [prompt], NONE, 30)
    engine.policy = make_policy(
        first_mean=[1.0] * 16, slope=[1.0] * 16, fixed_length=6, plain_us=1.0
    )
    assert engine.drafter is not None
    if static:
        engine.policy.set_static("measured times drifted")
    else:
        engine.drafter = cast(Drafter, BrokenDrafter(engine.drafter))
    request = engine.add(prompt, length_rule=LengthRule("policy", cap))
    for _ in range(12):
        [outcome] = engine.step([request])
        assert outcome.verify_length == outcome.selected_length == min(6, cap)
        assert outcome.fallback == (
            "measured times drifted" if static else "draft signals are not finite"
        )
        assert outcome.predicted_us == 1200.0 + 100.0 * min(6, cap)
    assert request.tokens[10:] == plain[: request.num_emitted]


def test_policy_pauses_a_request_that_drafting_slows_down(
    engine: Engine, make_policy: MakePolicy
) -> None:
    engine.policy = make_policy(plain_us=1000.0, drafted_us=1900.0, row_us=100.0, lam=2e-3)
    prompt = random_tokens(VOCAB, 10, seed=6)
    [plain] = decode(engine, [prompt], NONE, 110)
    scripted = script_drafts(engine)
    request = engine.add(prompt, length_rule=LengthRule("policy"))
    rounds = []
    while request.num_emitted < 90:
        # Believed, and always wrong.
        script = Script([*prompt, *plain], right=0, certain=15)
        scripted.scripts[id(request.draft_cache)] = script
        rounds += engine.step([request])
    drafted = [r for r in rounds if r.drafted]
    paused = [r for r in rounds if not r.drafted]
    assert 1 <= len(drafted) <= 4
    assert all("does not pay" in str(r.fallback) and r.predicted_us == 1000.0 for r in paused)
    assert request.tokens[10:] == plain[: request.num_emitted]
    # Hidden states of the pause were kept: drafts go on from the whole text.
    assert request.drafter_tokens + sum(len(f[0]) for f in request.pending_features) == (
        request.context_tokens
    )


# ---------------------------------------------------------------------------- records


def test_recorded_round_is_what_the_target_and_drafter_said(engine: Engine) -> None:
    prompts = [random_tokens(VOCAB, n, seed=n) for n in (12, 30)]
    requests = [engine.add(p, length_rule=LengthRule("fixed", 16)) for p in prompts]
    rounds = engine.step(requests, record=True, record_routes=True)
    for prompt, request, outcome in zip(prompts, requests, rounds, strict=True):
        record = outcome.record
        assert record is not None
        assert record.anchor == request.tokens[len(prompt)]
        assert record.context_tokens == len(prompt)
        block = [record.anchor, *record.draft_tokens]
        forced = teacher_forced(engine, [*prompt, *block], [0])
        top = forced.logits[-16:].softmax(-1).max(-1)
        assert record.target_tokens == top.indices.tolist()
        np.testing.assert_allclose(record.target_p1, top.values, atol=1e-5)
        routes = np.frombuffer(record.routes, np.uint8).reshape(
            SHAPE.num_layers, 16, SHAPE.experts_per_token
        )
        want = torch.stack([layer[-16:] for layer in forced.routes]).numpy()
        assert (np.sort(routes, -1) == np.sort(want, -1)).all()
        assert all(a >= b for a, b in zip(record.p1, record.p2, strict=True))
    plain = engine.add(prompts[0], length_rule=NONE)
    [outcome] = engine.step([plain], record=True)
    assert outcome.record is None
    assert not outcome.drafted
