"""Requests that go on from answers: what is asked, what their states are compared with."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridspec.fuzz import sessions
from hybridspec.fuzz.sglang_adapter import Alone, follow_pairing, heard_of

ROOT = Path(__file__).resolve().parents[2]
if not (ROOT / "benchmarks" / "fuzzing").is_dir():
    pytest.skip("no benchmarks (an sdist)", allow_module_level=True)
sys.path.insert(0, str(ROOT / "benchmarks"))

from fuzzing.judge import judge_states, judge_texts, prefix_hits  # noqa: E402  # pyright: ignore[reportMissingImports]

FACTS = sessions.LiveFacts(500, 256, 32, (64,))


@given(seed=st.integers(0, 50), number=st.integers(0, 50), said=st.integers(0, 40))
def test_they_begin_with_a_prompt_and_a_piece_of_its_answer(
    seed: int, number: int, said: int
) -> None:
    session = sessions.random_session(FACTS, seed=seed, number=number)
    heard = [sessions.Heard(list(range(said if i else 0))) for i in range(len(session))]
    after = sessions.follow_ups(session, heard, seed=seed, number=number, tokens=5)
    assert len(after) == (len(session) - 1 if said else 0)
    by_index = {visit.name[-10:]: visit for visit in session}
    for visit in after:
        before = by_index[visit.name[-10:]]
        taken = visit.prompt[len(before.prompt) :]
        assert visit.prompt[: len(before.prompt)] == before.prompt
        assert 1 <= len(taken) <= said
        assert list(taken) == list(range(len(taken)))
        assert (visit.max_new_tokens, visit.behind, visit.abort_after) == (5, None, None)
    assert len({visit.name for visit in (*session, *after)}) == len(session) + len(after)


def test_a_pair_shares_what_both_say() -> None:
    alone = Alone("alone", (1, 2), (3, 4, 5, 6))
    found = follow_pairing("after", (1, 2, 3, 4), (5, 9), alone)
    assert (found.prompt_tokens, found.shared_tokens) == (4, 5)
    # That run went another way before the prompt's end: there is nothing to compare.
    found = follow_pairing("after", (1, 2, 3, 7), (5, 6), alone)
    assert not range(found.prompt_tokens, found.shared_tokens + 1)


def test_cached_tokens_are_those_of_the_last_chunk_that_tells() -> None:
    said = heard_of({"output_ids": [1], "meta_info": {"cached_tokens": 64}}, sessions.Heard())
    assert said.cached == 64
    assert heard_of({"output_ids": [1, 2], "meta_info": {}}, said).cached == 64


def line(after_state: float) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A session of one visit, one request behind it, and digests of all."""
    prompt, answer = (1, 2), [3, 4, 5, 6, 7, 8]
    visit = sessions.Visit("fuzz-0-000000-000", prompt, 6, 4)
    after = sessions.Visit("fuzz-after-0-000000-000", (*prompt, *answer[:3]), 2, 1)
    alone = sessions.Visit("fuzz-alone-000000-000", prompt, 6, 1)
    together = sessions.Visit("fuzz-rows-000000-000", prompt, 6, 1)

    def told(one: sessions.Visit, tokens: list[int], cached: int = 0) -> dict[str, Any]:
        heard = sessions.Heard(tokens, "length", len(tokens), {}, cached)
        return json.loads(json.dumps(sessions.as_json(one, heard)))

    rows = []
    for name, contexts in (
        (visit.name, (2, 6)), (alone.name, range(2, 8)), (together.name, range(2, 8)),
        (after.name, (5, 6)),
    ):  # fmt: skip
        for context in contexts:
            value = float(context) + (after_state if name == after.name else 0.0)
            sums = [value * (k + 1) for k in range(16)]
            norm = sum(entry**2 for entry in sums) ** 0.5
            state = {"norm": [norm], "sums": [sums]}
            rows.append({"name": name, "context_tokens": context, "recurrent_state": state})
    session = {
        "number": 0,
        "visits": [told(visit, answer)],
        "after": [told(after, answer[3:5], cached=4)],
        "alone": [told(alone, answer)],
        "together": [told(together, answer)],
    }
    return session, rows


@pytest.mark.parametrize(("off", "faults"), [(0.0, 0), (0.001, 0), (2.5, 2)])
def test_states_behind_a_hit_are_compared_with_one_row_a_round(
    tmp_path: Path, off: float, faults: int
) -> None:
    session, rows = line(off)
    path = tmp_path / "digests.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    found = judge_states([session], path, layers=1)
    assert found["compared"] == 4
    assert [fault["name"] for fault in found["faults"]] == ["fuzz-after-0-000000-000"] * faults


def test_texts_behind_a_hit_are_judged_and_hits_counted() -> None:
    session, _ = line(0.0)
    asked = []

    def plain(prompts: list[list[int]], tokens: list[int]) -> list[list[int]]:
        asked.extend(prompts)
        return [[3, 4, 5, 6, 7, 8], [6, 9]]

    found = judge_texts([session], plain, lambda prefixes, pairs: [1.0] * len(pairs), tie=0.25)
    assert asked == [[1, 2], [1, 2, 3, 4, 5]]
    assert [fault["name"] for fault in found["faults"]] == ["fuzz-after-0-000000-000"]
    assert prefix_hits([session]) == {
        "followed": 1, "followed_with_a_hit": 1, "hits_that_end_inside_an_answer": 1,
        "cached_tokens": 4,
    }  # fmt: skip
    session["after"][0]["cached"] = 2
    assert prefix_hits([session])["hits_that_end_inside_an_answer"] == 0
