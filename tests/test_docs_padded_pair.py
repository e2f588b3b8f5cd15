"""The figures of docs/padded-pair.md are those of the result file, which meets its bars."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "padded-pair.md"
if not PAGE.is_file():
    pytest.skip("no docs in this tree (an sdist)", allow_module_level=True)
TEXT = PAGE.read_text(encoding="utf-8")
RESULT: dict[str, Any] = json.loads(
    (ROOT / "benchmarks" / "results" / "inflate_proof.json").read_text(encoding="utf-8")
)


def tables() -> ModuleType:
    path = ROOT / "benchmarks" / "inflate_tables.py"
    spec = importlib.util.spec_from_file_location("inflate_tables", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_tables_are_those_of_the_result_file() -> None:
    assert "\n".join(tables().proof_table(RESULT["rows"])) in TEXT
    assert "\n".join(tables().routes_table(RESULT["rows"])) in TEXT


def test_sizes_are_those_of_the_plan() -> None:
    (plan,) = (row for row in RESULT["rows"] if row["case"] == "full_shape_plan")
    for part in ("target", "drafter"):
        assert f"{plan[part]['parameters'] / 1e9:.3f} B" in TEXT
    together = sum(plan[part]["file_bytes"] for part in ("target", "drafter"))
    assert f"{together / 1e9:.1f} GB" in TEXT
    assert f"{plan['target']['largest_tensor_bytes'] / 1e9:.2f} GB" in TEXT


def test_the_proof_meets_its_bars() -> None:
    summary = RESULT["summary"]
    assert summary["fp32_logit_difference_max"] < 1e-4
    assert summary["fp64_logit_difference_max"] < 1e-8
    assert summary["oracle_logit_difference_max"] < 1e-4
    for kind in ("token", "draft"):
        assert summary[f"{kind}_differences"] == 0
    # Routes differ at ties alone: experts whose fp64 router logits are as good as equal.
    assert summary["route_differences"] <= 5
    assert summary["route_tie_margin_max"] < 1e-5
    assert summary["pass_through_changes"] == 0
    assert max(summary["padded_mass_max"], summary["draft_padded_mass_max"]) < 1e-4
    assert summary["padded_margin_max"] < 0
