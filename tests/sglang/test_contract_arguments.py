"""What the real `ServerArgs` of SGLang says with our algorithm, and what is refused in it."""

from __future__ import annotations

from typing import Any

import pytest

from hybridspec.sglang_plugin.refusals import RULES


def test_accepted_arguments_are_settled_as_for_dflash(facts: dict[str, Any]) -> None:
    assert "error" not in facts["accepted"], facts["accepted"]
    fields = facts["accepted"]["fields"]
    assert fields["speculative_algorithm"] == "HYBRIDSPEC"
    assert fields["speculative_num_draft_tokens"] == 16
    assert (fields["speculative_num_steps"], fields["speculative_eagle_topk"]) == (1, 1)
    assert not fields["disable_overlap_schedule"]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.flag[:40])
def test_rule_refuses_its_example(rule: Any, facts: dict[str, Any]) -> None:
    found = facts["refusals"][rule.flag]
    assert found.get("error") == "EngineRefusal", found
    assert "is refused with HYBRIDSPEC" in found["message"]
    assert f"{rule.reason}; {rule.remedy}" in found["message"]
    assert "\n" not in found["message"]


def test_drafter_of_short_blocks_is_refused_without_any_flag(facts: dict[str, Any]) -> None:
    found = facts["short_drafter"]
    assert found.get("error") == "EngineRefusal", found
    assert "a drafter with block_size 8" in found["message"]


def test_command_line_of_serve_is_understood(facts: dict[str, Any]) -> None:
    found = facts["command_line"]
    assert found["algorithm"] == "HYBRIDSPEC"
    assert (found["port"], found["served_model_name"]) == (8123, "mine")
    assert found["max_running_requests"] == 8
    assert found["disable_radix_cache"]


def test_identity_is_the_same_from_the_server_and_from_the_worker(facts: dict[str, Any]) -> None:
    found = facts["identities"]
    assert found["backends"] == ["attention=triton,linear=triton,moe=auto"] * 2
    assert found["tiers"] == ["masked:1,2,3,4,5,6,7,8"] * 2


def test_plain_server_has_no_drafter(facts: dict[str, Any]) -> None:
    assert facts["plain_command_line"] == {"algorithm": None, "drafter": None, "port": 8124}


def test_requests_that_force_lengths_are_understood(facts: dict[str, Any]) -> None:
    found = facts["request"]
    assert (found["batch_size"], found["stream"]) == (2, True)
    assert found["custom_params"] == {"hybridspec": {"verify_length": 5}}
    assert (found["max_new_tokens"], found["ignore_eos"]) == (9, True)
    assert found["abort_all"]


def test_counts_of_rounds_come_with_the_last_chunk_alone(facts: dict[str, Any]) -> None:
    """So rounds on the way are counted by chunks; with counts in each chunk they need not be."""
    assert facts["request"]["counts_only_where"] == [
        "state.finished",
        "self.server_args.speculative_algorithm",
    ]


def test_counts_of_rounds_are_answered(facts: dict[str, Any]) -> None:
    assert set(facts["request"]["counts"]) == {
        "spec_verify_ct",
        "spec_cap_lens_histogram",
        "spec_cap_length",
        "spec_accept_length",
    }
