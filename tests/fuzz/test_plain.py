"""The plain text that engines are judged by: against a prefill of the same tokens."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from hybridspec.fuzz.plain import ReferencePlainText
from hybridspec.reference.loading import load_pair
from hybridspec.reference.target import Target

TOLERANCE = 1e-11
MAX_CONTEXT = 320


@pytest.fixture(scope="module")
def target(random_folders: tuple[Path, Path]) -> Target:
    return load_pair(*random_folders, dtype=torch.float64, max_context=MAX_CONTEXT).target


def tokens(count: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(320) for _ in range(count)]


def assert_same(text: ReferencePlainText, target: Target, processed: Sequence[int]) -> None:
    fresh = ReferencePlainText(target, processed, max_context=MAX_CONTEXT)
    count = len(processed)
    torch.testing.assert_close(text.logits(count), fresh.logits(count), atol=TOLERANCE, rtol=0)
    memory, want = text.memory(count), fresh.memory(count)
    assert set(memory) == set(want) == {"kv_keys", "kv_values", "conv_window", "recurrent_state"}
    for part, value in want.items():
        torch.testing.assert_close(memory[part], value, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("length", [1, 63, 97, 98, 256])
def test_one_token_at_a_time_is_a_prefill(target: Target, length: int) -> None:
    given = tokens(length + 20, seed=length)
    text = ReferencePlainText(target, given[:length], max_context=MAX_CONTEXT)
    for count in range(length + 1, len(given) + 1):
        text.follow(given[:count])
    assert_same(text, target, given[:-1])


def test_continuation_is_greedy_and_does_not_move_the_text(target: Target) -> None:
    given = tokens(30, seed=2)
    text = ReferencePlainText(target, given, max_context=MAX_CONTEXT)
    ahead = text.continuation(15)
    assert len(ahead) == 15
    for place, token in enumerate(ahead):
        assert token == int(text.logits(30 + place).argmax())
    assert text.continuation(15) == ahead
    assert text.continuation(3) == ahead[:3]
    text.follow([*given, *ahead[:4]])
    assert_same(text, target, [*given, *ahead[:3]])
    assert text.continuation(11) == ahead[4:]


@pytest.mark.parametrize("agreed", [0, 1, 5, 14])
def test_text_that_takes_another_turn_is_followed(target: Target, agreed: int) -> None:
    """What was looked ahead is taken back, however far it agreed."""
    given = tokens(30, seed=3)
    text = ReferencePlainText(target, given, max_context=MAX_CONTEXT)
    ahead = text.continuation(15)
    turned = [*given, *ahead[:agreed], (ahead[agreed] + 1) % 320, 7]
    text.follow(turned)
    assert_same(text, target, turned[:-1])


def test_continuation_ends_with_the_context(target: Target) -> None:
    text = ReferencePlainText(target, tokens(MAX_CONTEXT - 4, seed=4), max_context=MAX_CONTEXT)
    assert len(text.continuation(15)) == 4
