"""History against a plain reading of the text, and what it must not know."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridspec.calibrate.context import CONTEXT_NAMES, context_features, repeat_distance
from hybridspec.calibrate.features import trace_arrays
from hybridspec.calibrate.history import (
    HISTORY_NAMES,
    MOVING_WEIGHT,
    History,
    expected_accepted,
    request_history,
)


def random_requests(seed: int, *, prompts: int = 3, rounds: int = 5, vocab: int = 4) -> Any:
    g = np.random.default_rng(seed)
    total = prompts * rounds
    accepted = g.integers(0, 16, total)
    return {
        "prompt": np.repeat(np.arange(prompts), rounds),
        "round_index": np.tile(np.arange(rounds), prompts),
        "generated_tokens": g.integers(0, 90, total),
        "accepted": accepted,
        "p1_RD": g.uniform(0.1, 1.0, (total, 15)).astype(np.float32),
        "anchor": g.integers(0, vocab, total),
        "draft_tokens_RD": g.integers(0, vocab, (total, 15)),
        "verified_drafts": np.maximum(accepted, g.integers(0, 16, total)),
    }


def text_before(data: Any, row: int) -> list[int]:
    """Emitted tokens of the request when a round starts, its anchor the last of them."""
    first = row - int(data["round_index"][row])
    text: list[int] = []
    for other in range(first, row):
        text += [data["anchor"][other], *data["draft_tokens_RD"][other][: data["accepted"][other]]]
    return [int(token) for token in [*text, data["anchor"][row]]]


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 30))
def test_lookups_equal_a_search_through_the_text(seed: int, vocab: int) -> None:
    data = random_requests(seed, vocab=vocab)
    history = request_history(**data)
    for row in range(len(data["anchor"])):
        text = text_before(data, row)
        block = [int(token) for token in data["draft_tokens_RD"][row]]
        for draft in range(15):
            whole = [*text, *block[: draft + 1]]
            seen = 0
            for length in (1, 2, 3):
                gram = whole[-length:]
                found = any(text[i : i + length] == gram for i in range(len(text) - length + 1))
                if not found or len(whole) < length:
                    break
                seen = length
            assert history.seen_length_RD[row, draft] == seen
            pair = whole[-3:-1]
            followers = [text[i + 2] for i in range(len(text) - 2) if text[i : i + 2] == pair]
            verdict = 0 if not followers else (1 if followers[-1] == whole[-1] else -1)
            assert history.successor_RD[row, draft] == verdict


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_surprises_follow_from_their_definition(seed: int) -> None:
    data = random_requests(seed)
    columns = request_history(**data).columns_RH
    for row, number in enumerate(data["round_index"]):
        mean = last = 0.0
        for other in range(row - number, row):
            p1 = data["p1_RD"][other].astype(np.float64)
            expected = np.cumprod(p1)[: data["verified_drafts"][other]].sum()
            last = data["accepted"][other] - expected
            mean += float(MOVING_WEIGHT) * (last - mean)
        expected_row = [last, mean, number, data["generated_tokens"][row] - 1]
        np.testing.assert_allclose(columns[row], expected_row, rtol=1e-5, atol=1e-5)
    assert HISTORY_NAMES[:2] == ("last_surprise", "mean_surprise")


def columns(history: History) -> list[np.ndarray]:
    return [history.columns_RH, history.seen_length_RD, history.successor_RD]


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(0, 4))
def test_a_round_knows_nothing_of_itself_or_later(seed: int, now: int) -> None:
    data, other = random_requests(seed), random_requests(seed + 1)
    later = data["round_index"] >= now
    changed = {**data}
    for name in ("accepted", "verified_drafts"):
        changed[name] = np.where(later, other[name], data[name])
    after = data["round_index"] > now
    for name in ("anchor", "generated_tokens"):
        changed[name] = np.where(after, other[name], data[name])
    for name in ("p1_RD", "draft_tokens_RD"):
        changed[name] = np.where(after[:, None], other[name], data[name])
    rows = data["round_index"] <= now
    before = columns(request_history(**data))
    for one, two in zip(before, columns(request_history(**changed)), strict=True):
        np.testing.assert_array_equal(one[rows], two[rows])


@given(st.integers(0, 999))
def test_row_order_does_not_matter(seed: int) -> None:
    data = random_requests(seed)
    order = np.random.default_rng(seed).permutation(len(data["anchor"]))
    shuffled = request_history(**{name: values[order] for name, values in data.items()})
    for one, two in zip(columns(request_history(**data)), columns(shuffled), strict=True):
        np.testing.assert_array_equal(one[order], two)


def test_cutting_a_round_short_does_not_bias_its_surprise() -> None:
    """Outcomes drawn from the drafter's own probabilities: no surprise at any verify length."""
    g = np.random.default_rng(0)
    rounds = 40_000
    p1 = g.uniform(0.5, 1.0, (rounds, 15)).astype(np.float32)
    accepted = np.cumprod(g.uniform(size=p1.shape) < p1, axis=1).sum(axis=1)
    expected = expected_accepted(p1)
    for verified in (1, 3, 7, 15):
        surprise = np.minimum(accepted, verified) - expected[:, verified]
        assert abs(surprise.mean()) < 4 * surprise.std() / np.sqrt(rounds)


@given(st.integers(0, 999), st.integers(1, 20))
def test_repeat_distance_equals_a_search(seed: int, vocab: int) -> None:
    g = np.random.default_rng(seed)
    anchor, drafts = g.integers(0, vocab, 4), g.integers(0, vocab, (4, 15))
    found = repeat_distance(anchor, drafts)
    for row in range(4):
        tokens = [anchor[row], *drafts[row]]
        for draft in range(15):
            back = [d for d in range(1, draft + 2) if tokens[draft + 1 - d] == tokens[draft + 1]]
            assert found[row, draft] == min(back, default=16)


def test_context_features_are_named_finite_float32() -> None:
    from synthetic_rounds import synthetic_trace

    rounds = trace_arrays(synthetic_trace(prompts=4, rounds=5))
    features = context_features(rounds)
    assert features.shape == (20, 15, len(CONTEXT_NAMES))
    assert features.dtype == np.float32
    assert np.isfinite(features).all()
    named = {name: features[..., index] for index, name in enumerate(CONTEXT_NAMES)}
    p1 = rounds.p1_RD.astype(np.float32)
    np.testing.assert_array_equal(named["min_p1"][:, 4], p1[:, :5].min(axis=1))
    np.testing.assert_allclose(named["product_p1"][:, 4], p1[:, :5].prod(axis=1), rtol=1e-6)
    np.testing.assert_array_equal(named["previous_p1"][:, 5], p1[:, 4])
    np.testing.assert_array_equal(named["next_p1"][:, 5], p1[:, 6])
    assert (named["seen_length"] >= named["min_seen_length"]).all()
