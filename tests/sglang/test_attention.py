"""Attention of blocks on SGLang's own Triton backend: passes, replays, and what is left alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture(scope="module")
def facts(found_by: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
    return found_by("attention_facts.py")


@pytest.mark.parametrize(("name", "causal"), [("target", True), ("drafter", False)])
def test_a_pass_sees_the_prefix_and_its_own_block(
    facts: dict[str, Any], name: str, causal: bool
) -> None:
    """The table has the slots of the block, and its keys and values are saved ahead."""
    assert facts[name]["layers"] == {"0": causal, "1": causal}
    assert facts[name]["error"] < 2e-2


@pytest.mark.parametrize("name", ["target", "drafter"])
def test_replays_of_graphs_that_read_no_metadata_do_not_fill_it(
    facts: dict[str, Any], name: str
) -> None:
    after_served, after_other, after_left = facts[name]["refilled"]
    assert after_served == [2]  # the capture's
    assert after_other == [2, 3]
    assert after_left == [2, 3, 2]


def test_classes_are_not_patched(facts: dict[str, Any]) -> None:
    assert facts["target"]["classes_untouched"]
    assert facts["reasons"]["disabled"]
    assert facts["reasons"]["untouched"]


def test_what_fits(facts: dict[str, Any]) -> None:
    assert facts["reasons"]["plain"] is True
    assert facts["reasons"]["backend"] is None


@pytest.mark.parametrize(
    ("case", "word"),
    [
        ("window", "sliding window"),
        ("cap", "logit cap"),
        ("cross", "cross attention"),
        ("fp8", "float8_e5m2"),
        ("scale", "scaled keys"),
        ("use_mla", "latent"),
        ("dcp_size", "ranks"),
        ("enable_deterministic", "deterministic"),
        ("num_draft_tokens", "8 rows"),
        ("topk", "trees"),
        ("_translate_kv_loc", "virtual"),
        ("use_sliding_window_kv_pool", "windows"),
        ("other", "object, not TritonAttnBackend"),
    ],
)
def test_what_does_not_fit_stays_with_sglang(facts: dict[str, Any], case: str, word: str) -> None:
    assert word in str(facts["reasons"][case])


@pytest.mark.parametrize(
    "name", ["forward_extend", "out_graph", "refilled", "metadata", "write", "static_buffers"]
)
def test_names_are_those_that_are_built_on(facts: dict[str, Any], name: str) -> None:
    assert facts["names"][name]
