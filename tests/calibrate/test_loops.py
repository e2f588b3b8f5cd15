"""Repetition loops are found whole, and reading backwards finds the same."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridspec.calibrate.loops import (
    MIN_LOOP_TOKENS,
    round_loop_periods,
    text_loop_periods,
    token_periods,
)


def naive_periods(tokens: list[int]) -> list[int]:
    """The rule of the docstring, by trying every stretch."""
    result = [0] * len(tokens)
    for period in range(12, 0, -1):
        shortest = max(4 * period, 24)
        for start in range(len(tokens) - shortest + 1):
            stretch = tokens[start : start + shortest]
            if all(stretch[i] == stretch[i - period] for i in range(period, shortest)):
                result[start : start + shortest] = [period] * shortest
    return result


@settings(max_examples=80, deadline=None)
@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 3), min_size=1, max_size=13), st.integers(1, 9)),
        max_size=5,
    )
)
def test_matches_the_rule_and_is_symmetric(pieces: list[tuple[list[int], int]]) -> None:
    tokens = [token for piece, repeats in pieces for token in piece * repeats]
    periods = token_periods(tokens).tolist()
    assert periods == naive_periods(tokens)
    assert token_periods(tokens[::-1]).tolist() == periods[::-1]


def test_text_without_repetition_is_no_loop() -> None:
    assert not token_periods(list(range(200))).any()
    assert token_periods([]).shape == (0,)
    assert not token_periods([7] * (MIN_LOOP_TOKENS - 1)).any()
    assert token_periods([7] * MIN_LOOP_TOKENS).tolist() == [1] * MIN_LOOP_TOKENS


def test_long_period_needs_four_repeats_and_13_is_too_long() -> None:
    block = list(range(12))
    assert token_periods(block * 4).tolist() == [12] * 48
    assert not token_periods((block * 4)[:-1]).any()
    assert not token_periods(list(range(13)) * 9).any()


def test_rounds_that_enter_and_leave_a_loop_are_marked() -> None:
    tokens = [*range(100, 110), *[1, 2, 3] * 10, *range(200, 210)]
    starts, stops = [0, 8, 12, 38, 42], [8, 12, 38, 42, 50]
    found = round_loop_periods(tokens, starts=starts, stops=stops)
    assert found.tolist() == [0, 3, 3, 3, 0]
    assert found.dtype == np.int32


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 6), st.integers(1, 4))
def test_many_requests_at_once_are_those_one_by_one(seed: int, requests: int, words: int) -> None:
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 12, requests)
    total = int(sizes.sum())
    first = np.zeros(total, dtype=bool)
    first[np.cumsum(sizes) - sizes] = True
    accepted = rng.integers(0, 16, total)
    # Few words and much repetition, and all requests alike, so that loops touch their ends.
    target = np.tile(rng.integers(0, words, 16), (total, 1))
    anchor = rng.integers(0, words, total)
    found = text_loop_periods(
        first_R=first, anchor_R=anchor, accepted_R=accepted, target_tokens_RL=target
    )
    expected: list[int] = []
    for rows in np.split(np.arange(total), np.flatnonzero(first)[1:]):
        tokens, starts, stops = [int(anchor[rows[0]])], [], []
        for row in rows:
            starts.append(len(tokens))
            tokens += target[row, : accepted[row] + 1].tolist()
            stops.append(len(tokens))
        expected += round_loop_periods(tokens, starts=starts, stops=stops).tolist()
    assert found.tolist() == expected
