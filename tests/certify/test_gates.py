"""Verdicts from texts and differences."""

from __future__ import annotations

import math

import pytest

from hybridspec.artifacts.certificate import Gate
from hybridspec.certify import gates
from hybridspec.certify.questions import Question
from hybridspec.certify.statistics import Fit
from hybridspec.certify.texts import Difference, Text, pieces, speed


def text(ids: list[int], *, us: float = 1000.0, words: str = "", arm: str = "plain") -> Text:
    return Text(arm, str(ids[:1]), "all", words, tuple(ids), len(ids), us)


def difference(gap: float | None, bound: float = 1e-5) -> Difference:
    return Difference("p", 7, "token 1", "token 2", gap, bound)


@pytest.mark.parametrize(
    ("gap", "control", "verdict"),
    [
        (9e-6, 0.0, "passed"),  # within rounding
        (1.1e-5, 0.0, "failed"),
        (1.1e-5, 2e-5, "passed"),  # plain decoding does the same
        (0.5, 2e-5, "failed"),
        (None, 1.0, "failed"),  # an unknown gap is no tie
        (math.inf, 1.0, "failed"),  # one text ends
        (math.nan, 1.0, "failed"),
    ],
)
def test_greedy_judges_by_gap(gap: float | None, control: float, verdict: str) -> None:
    gate = gates.greedy(3, [difference(gap)], control_gap=control)
    assert gate.verdict == verdict
    assert gate.figures["faults"] == (verdict == "failed")
    assert all(math.isfinite(value) for value in gate.figures.values())


def test_greedy_names_the_first_fault() -> None:
    gate = gates.greedy(3, [difference(1e-6), difference(0.25)], control_gap=0.0)
    assert "1 of 3 texts" in gate.message
    assert "prompt p at token 7: token 2 instead of token 1, 0.25 logits" in gate.message


def test_control_is_a_yardstick_only_within_bounds() -> None:
    assert gates.control(4, []).verdict == "passed"
    assert gates.control(4, [difference(5e-5)]).figures["largest_gap_logits"] == 5e-5
    assert gates.control(4, [difference(2e-4)]).verdict == "failed"
    assert gates.control(4, [difference(math.inf)]).verdict == "failed"
    assert gates.control(4, [difference(None)]).figures["unknown_gaps"] == 1


def test_law_needs_every_prompt_to_fit() -> None:
    good = Fit(10, 0.4, 0.01, 0.05, 0.1)
    assert gates.law([good, good], samples=9, level=1e-3).verdict == "passed"
    for bad in (Fit(10, 1e-4, 0.01, 0.05, 0.1), Fit(10, 0.4, 0.06, 0.05, 0.1)):
        assert gates.law([good, bad], samples=9, level=1e-3).verdict == "failed"


LOOP = [5, 6, 7] * 20
FINE = list(range(60))


def test_loops_are_counted_and_not_timed() -> None:
    plain = [text(FINE, us=2000.0), text(LOOP, us=2000.0)]
    hybrid = [text(FINE, us=1000.0), text(LOOP, us=1.0)]
    gate = gates.degenerate(plain, hybrid, plain)
    assert gate.verdict == "passed"
    assert gate.figures["loops_hybridspec"] == gate.figures["loops_plain"] == 1
    assert gate.figures["speedup_outside_loops"] == pytest.approx(2.0)
    assert speed([text(LOOP)], [text(LOOP)]).ratio is None


def test_drafts_that_make_loops_fail() -> None:
    plain, hybrid = [text(FINE)] * 20, [text(LOOP)] * 8 + [text(FINE)] * 12
    gate = gates.degenerate(plain, hybrid, plain)
    assert gate.verdict == "failed"
    assert gate.figures["loops_only_hybridspec"] == 8
    # And fewer loops are no fault.
    assert gates.degenerate(hybrid, plain, hybrid).verdict == "passed"


@pytest.mark.parametrize("words", ["ab " * 30, "x" * 200, "no, " * 30, "a\n" * 40])
def test_loops_are_seen_without_token_ids(words: str) -> None:
    assert Text("a", "p", "c", words, (), 9, 1.0).loop_at >= 0


def test_plain_prose_is_no_loop() -> None:
    prose = " ".join(f"word{i} follows {i * i}" for i in range(60))
    assert Text("a", "p", "c", prose, (), 9, 1.0).loop_at == -1
    assert len(pieces(prose)) > 60


def quality(plain_right: int, only_plain: int, only_hybrid: int, n: int) -> Gate:
    questions = [Question(str(i), "c", "?", "1", "number") for i in range(n)]
    first = [i < plain_right for i in range(n)]
    second = [value and i >= only_plain for i, value in enumerate(first)]
    for i in range(plain_right, plain_right + only_hybrid):
        second[i] = True
    arms = [[text([1], words="1" if right else "2") for right in arm] for arm in (first, second)]
    return gates.quality(questions, arms[0], arms[1], margin=0.01)


def test_quality_is_noninferiority() -> None:
    assert quality(300, 0, 0, gates.least_questions(0.01)).verdict == "passed"
    assert quality(300, 0, 0, gates.least_questions(0.01) - 1).verdict == "failed"
    worse = quality(900, 40, 5, 1300)
    assert worse.verdict == "failed"
    assert worse.figures["difference"] == pytest.approx(-35 / 1300)
    assert worse.figures["mcnemar_p_value"] < 1e-6
    # Not significantly worse is not yet "not worse".
    unclear = quality(900, 14, 8, 1300)
    assert unclear.figures["mcnemar_p_value"] > 0.05
    assert unclear.verdict == "failed"
    assert quality(900, 8, 14, 1300).verdict == "passed"
