"""The tables of docs/bundles.md are those of the committed result files."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "bundles.md"
if not PAGE.is_file():
    pytest.skip("no docs in this tree (an sdist)", allow_module_level=True)
TEXT = PAGE.read_text(encoding="utf-8")


def result(name: str) -> dict[str, Any]:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())


def benchmark(name: str) -> ModuleType:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    finally:
        sys.path.pop(0)
    return module


def test_transfer_table_is_that_of_the_result_file() -> None:
    content = result("transfer_error")
    lines = benchmark("transfer_error").markdown(content["rows"], anchors=4)
    assert len(lines) == 14
    assert "\n".join(lines) in TEXT
    summary = content["summary"]
    for name in ("interval_coverage_worst", "max_error_worst", "accepted_p90_error_worst"):
        assert f"{100 * summary[name]:.0f} %" in TEXT


def test_transfer_sentences_hold() -> None:
    content = result("transfer_error")
    (six,) = (
        row
        for row in content["rows"]
        if row["anchors"] == 6 and row["source"] == "b200_sxm 0.5.14" and "gdn" in row["operator"]
    )
    figures = (six["error_median"], six["no_source_error_median"])
    assert "({:.1f} against {:.1f} %)".format(*(100 * value for value in figures)) in TEXT
    assert f"{100 * content['summary']['interval_coverage_pooled']:.1f} % of the points" in TEXT
    for row in content["rows"]:
        if row["refused_across_memory_classes"]:
            assert row["no_source_error_p90"] < row["error_p90"], row
        if row["anchors"] == 4 and not row["refused_across_memory_classes"]:
            assert row["error_median"] < row["no_source_error_median"], row
            assert row["error_median"] < row["scalar_error_median"], row


def test_routing_table_is_that_of_the_result_file() -> None:
    for row in result("routing_regression")["rows"]:
        length = row["verify_length"]
        first, tokens = (
            row[f"{name}_other_layers_r2"] for name in ("first_router", "distinct_tokens")
        )
        if length in (2, 4, 8, 12, 16):
            (line,) = (x for x in TEXT.splitlines() if x.startswith(f"| {length} | "))
            assert f"| {first:.3f} (" in line
            assert f"| {tokens:.3f} (" in line
        assert length == 1 or first > tokens
