"""Recording and the self-check beside the real SGLang's requests."""

from __future__ import annotations

from typing import Any

TAG = {"prompt_id": "a", "category": "b", "split": "test"}


def test_requests_end_as_the_recorder_reads_them(facts: dict[str, Any]) -> None:
    found = facts["recording"]
    assert found["running"] is None
    assert found["ended"] == {"prompt_tokens": 3, "tokens": [5, 6, 7], "aborted": False}
    assert found["aborted"]


def test_sampling_and_tags_come_through(facts: dict[str, Any]) -> None:
    found = facts["recording"]
    assert found["greedy"] == [0.0, 1.0]
    assert found["sampled"] == [0.7, 0.9]
    assert found["members"] == [[1, "r0", TAG]]


def test_a_server_that_records_nothing_refuses_to_be_asked(facts: dict[str, Any]) -> None:
    found = facts["recording"]
    assert "this server records nothing" in found["refused_False"]
    assert found["refused_True"] is None
    assert found["unreachable"] == "20", "a request for experts is seen where it arrives"


def test_what_the_self_check_and_the_profile_rely_on(facts: dict[str, Any]) -> None:
    found = facts["recording"]
    assert found["rid"] == "check-1"
    assert found["fields"] == []
    assert found["profile"] == 3
