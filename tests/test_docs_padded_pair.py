"""Figures of docs/padded-pair.md and the captured engine's page are those of the result files."""

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
ENGINE_PAGE = ROOT / "hybridspec" / "reference" / "gpu" / "README.md"
ARMS = {
    "ar": "plain decoding",
    "dflash16-sglang-gdn": "DFlash-16, SGLang's GDN kernels",
    "dflash16": "DFlash-16, ours",
    "fixed-4": "4 rows",
    "fixed-6": "6 rows",
    "fixed-7": "7 rows, the length that costs and hazards name",
    "fixed-8": "8 rows",
    "fixed-12": "12 rows",
    "evict": "EVICT's rule",
    "ours": "**ours**",
    "paper": "ours with the paper's correction",
}
CONTROLS = {
    "per_length": "mean of the graphs of L rows",
    "switch16": "SWITCH node, 16 bodies",
    "switch": "SWITCH node, bodies 1, 2, 4, 8, 16",
    "host": "host reads the length",
    "masked": "one masked graph",
}
LENGTHS = (1, 2, 4, 8, 16)


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


def result(name: str) -> dict[str, Any]:
    path = ROOT / "benchmarks" / "results" / f"{name}.json"
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def test_rounds_of_the_captured_engine_are_those_of_the_result_file() -> None:
    text, found = ENGINE_PAGE.read_text(encoding="utf-8"), result("gpu_round")
    rows, summary = found["rows"], found["summary"]
    assert summary["complete"]
    own, masked = (
        {row["length"]: row for row in rows if row["kind"] == kind}
        for kind in ("per_length", "masked")
    )
    us = {kind: {n: r[n]["median_us"] for n in r} for kind, r in (("own", own), ("all", masked))}
    assert line("graphs of L rows each", *(f"{us['own'][n]:.0f}" for n in LENGTHS)) in text
    assert line("one masked graph", *(f"{us['all'][n]:.0f}" for n in LENGTHS)) in text
    ratios = {n: us["all"][n] / us["own"][n] for n in own}
    assert line("masked over graphs of L rows", *(f"{ratios[n]:.3f}" for n in LENGTHS)) in text
    assert f"({', '.join(f'{ratios[n]:.3f}' for n in (1, 2, 3))},\n  {ratios[4]:.3f})" in text
    assert max(ratios[n] for n in range(5, 17)) < 1.006
    distinct = (f"{own[n]['distinct_experts_a_layer']:.1f}" for n in LENGTHS)
    assert line("distinct experts a layer", *distinct) in text
    for key, label in CONTROLS.items():
        mixes = (f"{summary[f'{mix}_mix_{key}_us']:.0f}" for mix in ("short", "uniform"))
        assert line(label, *mixes) in text
    order = ["moe", "dense", "draft", "lm_head", "gdn", "attention", "control", "draft_context"]
    for n in (4, 16):
        parts = [summary[f"parts_{n}_us"][part] for part in order]
        whole = [*parts, sum(parts), us["all"][n]]
        assert line(f"{n} live rows", *(f"{part:.0f}" for part in whole)) in text
    for kind, key, labels in (
        ("context", "context_tokens", {1024: "1 request, context 1024", 32768: "context 32768"}),
        ("batch", "batch", {2: "2 requests, context 1024", 8: "8 requests"}),
    ):
        for value, label in labels.items():
            times = [r["median_us"] for r in rows if r["kind"] == kind and r[key] == value]
            assert line(label, *(f"{time:.0f}" for time in times)) in text


def test_decoding_of_the_captured_engine_is_that_of_the_result_file() -> None:
    text, found = ENGINE_PAGE.read_text(encoding="utf-8"), result("gpu_decode")
    arms = {(row["arm"], row["category"]): row for row in found["rows"] if row["kind"] == "arm"}
    assert {arm for arm, _ in arms} == set(ARMS)
    for arm, label in ARMS.items():
        row = arms[arm, "all"]
        assert row["fallback_rounds"] == 0
        margins = [row[f"margin_at_difference_{name}"] for name in ("median", "max")]
        assert (
            line(
                label,
                f"{row['tokens_per_s']:.0f}",
                f"{row['over_ar']:.2f}x",
                f"{row['tokens_a_round']:.2f}",
                f"{row['ms_a_round']:.3f}",
                f"{row['mean_length']:.2f}",
                str(row["texts_differing"]),
                "-" if None in margins else " / ".join(f"{margin:.4f}" for margin in margins),
            )
            in text
        ), arm
    categories = ("chat", "code", "config", "legal", "markdown", "prose", "tables")
    for arm in ("ours", "evict", "fixed-6", "dflash16-sglang-gdn"):
        ratios = (f"{arms[arm, category]['over_ar']:.2f}" for category in categories)
        assert line(ARMS[arm], *ratios) in text
    speeds = (f"{name} {arms['ours', name]['tokens_per_s']:.0f}" for name in categories)
    assert f"Ours in tokens/s: {', '.join(speeds)}." in text
    summary = found["summary"]
    for label, aim, key in (
        ("over plain decoding", 2.1, "over_ar"),
        ("over DFlash-16 with SGLang's GDN kernels", 1.4, "over_dflash16"),
        ("over the best fixed length, 6 rows", 1.2, "over_best_fixed"),
        ("slowest category over plain, config", 0.98, "min_category_over_ar"),
    ):
        verdict = "met" if summary[key] >= aim else "missed"
        assert line(label, str(aim), f"{summary[key]:.2f}", verdict) in text
    assert f"| {summary['prediction_error']:.1%} |".replace("%", " %") in text
