"""How the client's greedy answers are judged at their first difference from plain decoding."""

# Modules of benchmarks are found by the path that the kit adds.
# pyright: reportMissingImports=false

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from sglang_client_kit import TARGET, stream

# isort: split

from serving.client_report import chosen_lengths, retractions
from serving.decoding import Looping
from serving.judged import Judge, Reference
from serving.load import Prompt
from serving.texts import scored

TEXT = "def main() -> int:\n    return 0\n"


@pytest.fixture(scope="module")
def looping() -> Looping:
    return Looping(TARGET / "tokenizer.json")


def judge_of(
    looping: Looping,
    *,
    second: str | None = "x",
    margin: float = 0.125,
    lead: float | None = None,
    at: int = 3,
    has_margins: bool = True,
    third: float | None = None,
) -> tuple[Judge, str]:
    """A judge of TEXT, and the text that has `second` where plain decoding has token `at`."""
    ids = looping.ids(TEXT)
    (other,) = looping.ids(second) if second else (ids[at],)

    def exact(prefix: Sequence[int]) -> torch.Tensor:
        assert lead is not None, "float64 was asked"
        assert list(prefix) == [5, 6, *ids[:at]]
        logits_V = torch.full((1 + max(*ids, other),), -9.0, dtype=torch.float64)
        logits_V[ids[at]] = 1.0
        logits_V[other] = 1.0 + lead
        if third is not None:
            logits_V[0] = third
        return logits_V

    reference = Reference()
    entry = {
        "prompt": 7,
        "ids": ids,
        "margins_nats": [margin] * len(ids),
        "runner_up": [other if place == at else ids[place] for place in range(len(ids))],
        "near": [{ids[k]: 0.0} | ({other: margin} if k == at else {}) for k in range(len(ids))],
    }
    reference.add([Prompt(7, "code", [5, 6])], [stream(TEXT)], [entry] if has_margins else [])
    changed = looping.decode([*ids[:at], other, *ids[at + 1 :]])
    assert looping.ids(changed)[at] == other
    return Judge(reference, looping, exact), changed


def test_an_equal_answer_and_the_beginning_of_one_are_plain_decodings(looping: Looping) -> None:
    judge, _ = judge_of(looping)
    found = judge.judge([stream(TEXT), stream(TEXT[:9], tokens=3)])
    assert (found.compared, found.rows) == (2, ())
    assert found.told() == "2 of 2 as plain decoding"


def test_the_runner_up_within_a_tie_is_one(looping: Looping) -> None:
    judge, changed = judge_of(looping)
    found = judge.judge([stream(changed), stream(TEXT), stream(changed[:-3], tokens=7)])
    assert [row["verdict"] for row in found.rows] == ["tie", "tie"]
    assert found.rows[0]["margin_nats"] == 0.125
    assert found.rows[0]["token"] == 3
    assert not found.faults
    assert found.told() == "1 of 3 as plain decoding, 2 by a tie of at most 0.125 nats"


@pytest.mark.parametrize(
    ("margin", "lead", "verdict"),
    [
        (0.3, 0.2, "float64"),
        (0.3, -0.2, "fault"),
        (0.3, 0.0, "fault"),
        (0.25001, -0.2, "fault"),
        (0.3, float("nan"), "fault"),
        (float("nan"), -0.2, "fault"),
        (float("nan"), float("nan"), "fault"),
    ],
)
def test_beyond_a_tie_the_target_decides(
    looping: Looping, margin: float, lead: float, verdict: str
) -> None:
    judge, changed = judge_of(looping, margin=margin, lead=lead)
    found = judge.judge([stream(changed)])
    assert [row["verdict"] for row in found.rows] == [verdict]
    assert len(found.faults) == (verdict == "fault")
    assert ("BEYOND A TIE" in found.told()) == (verdict == "fault")


def test_the_third_of_three_equal_tokens_is_a_tie(looping: Looping) -> None:
    judge, changed = judge_of(looping, margin=0.0)
    judge.reference.scored[7] = {**judge.reference.scored[7], "runner_up": [0] * 30}
    (row,) = judge.judge([stream(changed)]).rows
    assert (row["verdict"], row["margin_nats"], row["is_runner_up"]) == ("tie", 0.0, False)


def test_a_token_beyond_the_candidates_is_a_fault_that_nobody_is_asked_about(
    looping: Looping,
) -> None:
    judge, changed = judge_of(looping, margin=0.0)
    judge.reference.scored[7] = {**judge.reference.scored[7], "near": [{}] * 30}
    (row,) = judge.judge([stream(changed)]).rows
    assert (row["verdict"], row["margin_nats"]) == ("fault", None)


def test_float64_must_have_the_token_found_as_its_best(looping: Looping) -> None:
    judge, changed = judge_of(looping, margin=0.3, lead=0.2, third=1.5)
    (row,) = judge.judge([stream(changed)]).rows
    assert (row["verdict"], row["float64_lead_of_found_nats"]) == ("fault", -0.3)


def test_candidates_are_read_as_sglang_tells_them() -> None:
    places = [
        [(-0.5, 4, None), (-0.5, 9, None), (-0.75, 2, None)],
        [(-0.1, 3, None), (-4.0, 5, None), (-4.5, 1, None)],
    ]
    told = {"output_token_logprobs": [(-0.5, 9, None), (-0.1, 3, None)]}
    answer = {"text": "ab", "meta_info": told | {"output_top_logprobs": places}}
    found = scored(answer)
    assert found["ids"] == [9, 3]
    assert found["runner_up"] == [4, 5]
    assert found["margins_nats"] == [0.0, pytest.approx(3.9)]
    assert found["near"][0] == {4: 0.0, 9: 0.0, 2: 0.25}
    assert found["best_nats"] == [-0.5, -0.1]
    two = scored(
        {"text": "ab", "meta_info": told | {"output_top_logprobs": [p[:2] for p in places]}}
    )
    assert "near" not in two


def test_an_unknown_margin_is_a_fault(looping: Looping) -> None:
    judge, changed = judge_of(looping, has_margins=False)
    (row,) = judge.judge([stream(changed)]).rows
    assert row["verdict"] == "fault"
    assert row["margin_nats"] is None


def test_a_prompt_that_plain_decoding_never_saw_is_an_error(looping: Looping) -> None:
    judge, _ = judge_of(looping)
    with pytest.raises(KeyError):
        judge.judge([stream(TEXT, prompt=8)])


@pytest.mark.parametrize(
    ("chosen", "static", "not_finite", "lengths", "ok"),
    [
        (400, 0, 0, (1, 3, 4, 5, 16), True),
        (0, 0, 0, (1, 3, 4, 5, 16), False),
        (400, 9, 0, (1, 3, 4, 5, 16), False),
        (400, 0, 1, (1, 3, 4, 5, 16), False),
        # Those that requests forced, and one more: a fixed length would look like this.
        (400, 0, 0, (1, 5, 8, 16), False),
    ],
)
def test_lengths_are_chosen_or_the_stage_fails(
    chosen: int, static: int, not_finite: int, lengths: tuple[int, ...], ok: bool, tmp_path: Path
) -> None:
    by = {"chosen": chosen, "forced": 90, "not_finite": not_finite, "static_policy": static}
    counts = [int(length in lengths) for length in range(17)]
    path = tmp_path / "telemetry.json"
    about = "bundle b: 1 to 16 rows a round, router correction select, hazards by trees"
    told = {"lengths": about, "lengths_by": by, "length_histogram": counts}
    path.write_text(json.dumps(told))
    if ok:
        assert chosen_lengths(path, "select").startswith("400 chosen, 90 forced, 0 not finite")
        with pytest.raises(AssertionError, match="correction off was asked for; the server says"):
            chosen_lengths(path, "off")
    else:
        with pytest.raises(AssertionError, match="90 forced"):
            chosen_lengths(path, "select")


def test_retractions_are_counted_in_the_log(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_text("x\nKV cache pool is full. Retract requests. #retracted_reqs: 2, more\n")
    assert retractions(log).startswith("2 requests")
    line = "[2026-01-01 00:00:00 TP{}] Testing retraction. #retracted_reqs: 3, more\n"
    log.write_text("".join(line.format(rank) for rank in (0, 1, 10)))
    assert retractions(log).startswith("3 requests")
    log.write_text("nothing\n")
    with pytest.raises(AssertionError, match="no request was retracted"):
        retractions(log)
