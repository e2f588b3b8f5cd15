"""The target half on SGLang's own pools, backend and blocks: memory, patches, refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

GIB = 1 << 30


@pytest.fixture(scope="module")
def facts(found_by: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
    return found_by("target_facts.py")


@pytest.mark.parametrize(("case", "requests"), [("requests", 48), ("slots", 20)])
def test_accounting_counts_factors_in_place_of_snapshots(
    facts: dict[str, Any], case: str, requests: int
) -> None:
    one = facts["per_request"]
    own = one["factor_bytes_per_request"] + one["row_bytes_per_request"]
    gained = facts["budget"][case] - facts["stock_budget"][case]
    expected = requests * one["snapshot_bytes_per_request"] - (requests + 1) * own
    assert gained * GIB == pytest.approx(expected, rel=1e-9)
    assert gained / requests > 0.93  # GiB a request


def test_pool_keeps_no_snapshots(facts: dict[str, Any]) -> None:
    pool = facts["pool"]
    assert pool["subclass"]
    assert pool["speculative"]
    assert pool["layer_cache"]
    assert not pool["snapshots"]
    assert pool["gib"] == pytest.approx(pool["expected_gib"])
    assert pool["layer_ids"] == [0, 1, 2]


def test_instances_are_patched_and_classes_are_not(facts: dict[str, Any]) -> None:
    installed = facts["installed"]
    assert installed["forward_extend"]
    assert installed["commit"]
    assert installed["forward"]
    assert installed["experts"] == [True, True]
    assert installed["first_router_layer"] == 0
    assert installed["classes_untouched"]
    assert installed["small_moe_weights"] == [[16, 128, 128], [16, 128, 64]]
    assert facts["measured_experts"] == [False, True, False, False]


def test_signatures_are_those_that_are_replaced(facts: dict[str, Any]) -> None:
    assert facts["forward_extend_parameters"]
    assert facts["commit_parameters"]


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("no memory patch", "EngineRefusal install_memory_patch before"),
        ("small round", "EngineRefusal RoundState 3"),
        ("no tables", "UsageError bundle"),
        ("other backend", "EngineRefusal --linear-attn-backend triton"),
        ("extra buffer", "EngineRefusal track_interval --mamba-radix-cache-strategy"),
        ("ring", "EngineRefusal enable_gdn_replayssm_spec"),
    ],
)
def test_what_does_not_fit_is_refused(facts: dict[str, Any], case: str, words: str) -> None:
    missing = [word for word in words.split() if word not in facts["refusals"][case]]
    assert not missing, facts["refusals"][case]


def test_a_refusal_leaves_everything_as_it_was(facts: dict[str, Any]) -> None:
    assert facts["untouched"]
