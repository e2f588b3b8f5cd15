"""Texts of live sessions: what float64 decides, and what stays a fault."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from hybridspec.fuzz import sessions

ROOT = Path(__file__).resolve().parents[2]
if not (ROOT / "benchmarks" / "fuzzing").is_dir():
    pytest.skip("no benchmarks (an sdist)", allow_module_level=True)
sys.path.insert(0, str(ROOT / "benchmarks"))

from fuzzing.exact import exact_logits, plain_text  # noqa: E402  # pyright: ignore[reportMissingImports]
from fuzzing.judge import judge_texts  # noqa: E402  # pyright: ignore[reportMissingImports]

TIE = 0.25


def lines(tokens: list[int]) -> list[dict[str, Any]]:
    visit = sessions.Visit("fuzz-0-000000-000", (5, 6), len(tokens), 4)
    rounds = -(-len(tokens) // 4)
    heard = sessions.Heard(tokens, "length", rounds, {4: rounds})
    return [{"number": 0, "visits": [sessions.as_json(visit, heard)]}]


def judged(gap: float | None, leads_by: float | None) -> dict[str, Any]:
    """One text that says 8 where plain decoding says 9, at its second token."""
    asked = []

    def exact(prefix: Sequence[int], pair: tuple[int, int]) -> tuple[float, float]:
        asked.append((list(prefix), pair))
        assert leads_by is not None
        return 1.0, 1.0 + leads_by

    found = judge_texts(
        lines([7, 8, 3]),
        lambda prompts, tokens: [[7, 9, 3]],
        lambda prefixes, pairs: [gap],
        tie=TIE,
        exact=None if leads_by is None else exact,
    )
    assert asked in ([], [([5, 6, 7], (9, 8))])
    return found


@pytest.mark.parametrize(
    ("gap", "leads_by", "faults"),
    [
        (0.2, -1.0, 0),
        (0.3, 0.1, 0),
        (0.3, -0.1, 1),
        (0.3, 0.0, 1),
        (None, 0.1, 0),
        (None, -0.1, 1),
        (0.3, None, 1),
        (float("nan"), -0.1, 1),
        (0.3, float("nan"), 1),
    ],
)
def test_only_float64_excuses_what_is_no_tie(
    gap: float | None, leads_by: float | None, faults: int
) -> None:
    found = judged(gap, leads_by)
    assert len(found["faults"]) == faults
    beyond = leads_by is not None and not (gap is not None and gap <= TIE)
    assert found["texts_beyond_tie"] == int(beyond)
    assert found["texts_beyond_tie_as_float64"] == int(beyond and not faults)


def test_exact_logits_are_those_of_plain_decoding() -> None:
    from hybridspec.demo import assets

    target = assets.require()[0]
    prompt = list(range(40, 60))
    text = plain_text(target, prompt, 4, torch.float64)
    logits = exact_logits(target, max_context=64)
    for place, token in enumerate(text):
        mine, other = logits([*prompt, *text[:place]], (token, (token + 1) % 500))
        assert mine >= other
