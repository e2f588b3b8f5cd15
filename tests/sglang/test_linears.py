"""Projections of SGLang's own layers in kernels of ours: which, when, what SGLang sees."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture(scope="module")
def facts(found_by: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
    return found_by("linears_facts.py")


def test_outside_of_verification_nothing_changes(facts: dict[str, Any]) -> None:
    assert facts["outside the scope"] == {"taken": [], "equal": True}


def test_two_projections_of_one_input_take_one_launch(facts: dict[str, Any]) -> None:
    """in_proj_qkvz of 768 outputs and in_proj_ba of 8, as SGLang calls them."""
    assert facts["pair"] == {"taken": [[776, 16]], "both are ours": True}


def test_a_kept_output_serves_its_own_input_only(facts: dict[str, Any]) -> None:
    assert facts["second alone is the engine's"]
    assert facts["second of another input is the engine's"]


def test_layers_with_tiles_take_the_kernel(facts: dict[str, Any]) -> None:
    assert facts["gate"]
    assert facts["out_proj"]
    assert facts["without tiles"] == []
    assert facts["replaced"] == [True, True, False]
    assert "1 x [768 + 8, 128]" in facts["sentence"]
    assert "1 x [16, 128]" in facts["sentence"]


def test_sglang_still_tells_plain_weights(facts: dict[str, Any]) -> None:
    assert facts["classes"]
    assert facts["conv is left alone"]
    assert facts["drafter"]["still plain for SGLang"]


def test_a_drafter_takes_it_in_blocks_and_for_features(facts: dict[str, Any]) -> None:
    drafter = facts["drafter"]
    assert drafter["watched"]
    assert drafter["fc is what features go through"]
    assert drafter["outside"] == [[128, 16]]
    assert drafter["inside"] == [[128, 16], [256, 16], [384, 16]]


def test_other_methods_and_dtypes_are_left_alone(facts: dict[str, Any]) -> None:
    """A quantised out_proj, and an in_proj_ba in fp32 that leaves in_proj_qkvz by itself."""
    assert facts["others"] == "1 x [768, 128]"
