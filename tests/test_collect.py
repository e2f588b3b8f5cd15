"""Recording: groups, seeds, room for whole rounds, and slots that are given back."""

from __future__ import annotations

import pytest

from hybridspec import collect
from hybridspec.calibrate.prompts import Prompt, load_prompts
from hybridspec.calibrate.rounds import TraceIdentity, rows_to_table
from hybridspec.collect import TokenPrompt
from hybridspec.demo import assets
from hybridspec.errors import ModelError, PromptError
from hybridspec.reference.engine import Engine
from hybridspec.reference.loading import load_pair
from hybridspec.reference.tokenizer import Tokenizer
from hybridspec.request import LengthRule

NEW_TOKENS = 24


class Counted:
    def __init__(self) -> None:
        self.total = 0.0

    def advance(self, amount: float = 1.0) -> None:
        assert amount >= 0
        self.total += amount


@pytest.fixture(scope="module")
def prompts() -> list[TokenPrompt]:
    tokenizer = Tokenizer.load(assets.TARGET)
    return collect.encode_prompts(
        load_prompts(assets.PROMPTS, limit=5),
        tokenizer,
        max_new_tokens=NEW_TOKENS,
        context_limit=1024,
    )


@pytest.fixture
def engine(prompts: list[TokenPrompt]) -> Engine:
    longest = max(len(prompt.token_ids) for prompt in prompts)
    return load_pair(
        assets.TARGET,
        assets.DRAFTER,
        max_batch=3,
        max_context=collect.context_tokens(longest, NEW_TOKENS),
    )


def identity(engine: Engine, **changes: object) -> TraceIdentity:
    config = engine.target_config
    fields = {
        "target_digest": "t",
        "drafter_digest": "d",
        "layers": config.num_layers,
        "topk": config.experts_per_token,
        "experts": config.num_experts,
        "vocab_size": config.vocab_size,
        "temperature": 0.0,
        "max_new_tokens": NEW_TOKENS,
        "prompts_digest": "p",
        "group_size": 3,
    }
    return TraceIdentity(**(fields | changes))  # type: ignore[arg-type]


def test_groups_keep_order_and_size(prompts: list[TokenPrompt]) -> None:
    groups = collect.group_prompts(prompts, 2)
    assert [len(group) for group in groups] == [2, 2, 1]
    assert [prompt for group in groups for prompt in group] == prompts


def test_seed_belongs_to_the_prompt() -> None:
    seeds = {(seed, name): collect.prompt_seed(seed, name) for seed in (0, 1) for name in "ab"}
    assert len(set(seeds.values())) == 4
    assert all(0 <= seed < 2**63 for seed in seeds.values())
    assert collect.prompt_seed(0, "a") == seeds[0, "a"]


def test_recorded_rounds_are_those_of_plain_decoding(
    engine: Engine, prompts: list[TokenPrompt]
) -> None:
    counted = Counted()
    group = prompts[:3]
    rows, emitted = collect.record_group(
        engine, group, identity(engine), record_routes=True, progress=counted
    )
    assert counted.total == 3 * NEW_TOKENS
    assert engine.free_slots == 3
    total = 0
    for member in group:
        story = [row for row in rows if row.prompt_id == member.prompt.prompt_id]
        tokens = [story[0].anchor]
        for row in story:
            tokens += [*row.draft_tokens[: row.accepted], row.target_tokens[row.accepted]]
        request = engine.add(member.token_ids, length_rule=LengthRule("none"))
        while request.num_emitted < len(tokens) and not request.finished:
            engine.step([request])
        plain = request.tokens[request.num_prompt_tokens :]
        engine.remove(request)
        # A round may look past the end-of-sequence token that ends the text.
        assert tokens[: len(plain)] == plain
        total += len(plain)
    assert emitted == total
    assert rows_to_table(rows, identity(engine)).num_rows == len(rows)


def test_sampled_rounds_repeat_with_the_seed(engine: Engine, prompts: list[TokenPrompt]) -> None:
    def record(seed: int) -> list[int]:
        sampled = identity(engine, temperature=0.8, seed=seed)
        rows, _ = collect.record_group(
            engine, prompts[:2], sampled, record_routes=False, progress=Counted()
        )
        assert all(row.routes == b"" for row in rows)
        return [row.anchor for row in rows]

    assert record(1) == record(1)
    assert record(1) != record(2)


def test_interrupt_gives_slots_back(engine: Engine, prompts: list[TokenPrompt]) -> None:
    class Stop(Counted):
        def advance(self, amount: float = 1.0) -> None:
            super().advance(amount)
            if self.total > NEW_TOKENS:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        collect.record_group(
            engine, prompts[:3], identity(engine), record_routes=False, progress=Stop()
        )
    assert engine.free_slots == 3


def test_short_context_is_no_silent_cut(prompts: list[TokenPrompt]) -> None:
    longest = max(len(prompt.token_ids) for prompt in prompts)
    engine = load_pair(assets.TARGET, assets.DRAFTER, max_batch=3, max_context=longest + 12)
    with pytest.raises(ModelError, match="recording needs 16"):
        collect.record_group(
            engine, prompts[:3], identity(engine), record_routes=False, progress=Counted()
        )


def test_prompts_that_do_not_fit_are_named() -> None:
    tokenizer = Tokenizer.load(assets.TARGET)
    prompt = Prompt("long-one", "all", "test", "word " * 100)
    with pytest.raises(PromptError, match="long-one"):
        collect.encode_prompts([prompt], tokenizer, max_new_tokens=8, context_limit=64)


def test_no_rounds_make_an_empty_table(engine: Engine) -> None:
    assert rows_to_table([], identity(engine)).num_rows == 0
