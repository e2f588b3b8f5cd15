"""Names, signatures and conditions in SGLang that the fused router and the two streams build on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture(scope="module")
def facts(found_by: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
    return found_by("router_facts.py")


def test_router_of_the_model_is_plain(facts: dict[str, Any]) -> None:
    assert facts["plain"] == {
        "top_k": 4,
        "renormalize": True,
        "routes": ["topk_weights", "topk_ids", "router_logits"],
        "standard": True,
    }
    assert facts["logits"] == "torch.bfloat16"


def test_every_other_router_is_left_to_the_engine(facts: dict[str, Any]) -> None:
    plain = {name for name, found in facts["is_plain"].items() if found}
    assert plain == {"nothing", "captured, but not here", "triton"}
    assert len(facts["is_plain"]) == 18
    assert facts["not_plain_on_cpu"]


def test_gate_is_a_product_with_a_weight(facts: dict[str, Any]) -> None:
    assert facts["gate"] == {
        "shape": [16, 128],
        "dtype": "torch.bfloat16",
        "product": True,
        "with bias": False,
        "quantised": False,
    }


def test_signatures_are_those_that_are_called_or_replaced(facts: dict[str, Any]) -> None:
    found = facts["parameters"]
    assert found["dual_stream"] == ["self", "hidden_states", "use_fused_gate="]
    assert found["shared"] == ["self", "hidden_states", "apply_gate="]
    assert found["experts"] == ["self", "hidden_states"]
    assert found["moe_fused_gate"][:3] == ["scores", "bias", "topk"]
    assert {"scoring_func=", "renormalize="} <= set(found["moe_fused_gate"])


def test_nothing_writes_the_input_of_a_block(facts: dict[str, Any]) -> None:
    assert not facts["experts_in_place"]
    assert facts["shared_expert_keeps_its_input"]
    assert not facts["overlaps_lora"]
    assert facts["no_second_stream_on_cpu"]
