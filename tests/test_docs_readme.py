"""Figures of the README's tables for CPU and SGLang are those of the result files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "README.md"
if not (ROOT / "docs").is_dir():
    pytest.skip("no docs in this tree (an sdist)", allow_module_level=True)
PART = PAGE.read_text(encoding="utf-8").split("## What it brings on CPU")[1].split("\n## ")[0]
FLAT = " ".join(PART.split())
WAYS = {
    "AR": "plain decoding",
    "DFlash-16": "stock DFlash, 16 rows a round",
    "fixed-6": "best fixed length, 6 rows",
    "HybridSpec": "**HybridSpec**",
    "HybridSpec+router": "HybridSpec with `--router-correction select`",
}


def result(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / "benchmarks" / "results" / name).read_text())
    return found


def test_table_is_that_of_the_result_file() -> None:
    found = result("cpu_demo.json")
    ways = {row["way"]: row for row in found["rows"] if row["category"] == "all"}
    assert found["summary"]["best_fixed_way"] == "fixed-6"
    for way, label in WAYS.items():
        row = ways[way]
        cells = (
            label,
            f"{row['tokens_per_s']:.0f}",
            f"{row['tokens_per_s'] / ways['AR']['tokens_per_s']:.2f}x",
            f"{row['tokens'] / row['rounds']:.2f}",
            f"{row['rows'] / row['rounds']:.2f}",
        )
        assert f"| {' | '.join(cells)} |" in PART, way


def test_sentences_are_those_of_the_result_files() -> None:
    summary = result("cpu_demo.json")["summary"]
    earlier = result("cpu_demo_earlier.json")["summary"]
    ratios = sorted(summary["category_over_ar"].items(), key=lambda item: -item[1])
    for sentence in (
        f"{summary['over_ar']:.2f}x plain decoding, {summary['over_dflash16']:.2f}x stock "
        f"DFlash-16, {summary['over_best_fixed']:.2f}x the best fixed length",
        ", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios),
        f"({summary['loop_prompts']} prompts enter one",
        f"{summary['different_outputs']} outputs differ",
        f"margins up to {summary['largest_margin_at_difference']:.1e}",
        f"runs at {earlier['tokens_per_s_ar']:.0f} tokens/s, an earlier version had "
        f"{earlier['tokens_per_s']:.0f}, {earlier['over_ar']:.2f}x",
    ):
        assert sentence in FLAT, sentence


def test_table_of_sglang_is_that_of_the_result_file() -> None:
    summary = result("sglang_decode.json")["summary"]
    speeds = summary["speeds"]
    part = PAGE.read_text(encoding="utf-8").split("## In SGLang on an H200")[1].split("\n## ")[0]
    names = {
        "plain decoding": "ar", "stock DFLASH, block 16": "dflash16",
        "stock DFLASH, block 8": "dflash8", "stock DFLASH, block 5": "dflash5",
        "HYBRIDSPEC, 5 rows always": "fixed5", "**HYBRIDSPEC**": "hybridspec",
    }  # fmt: skip
    rows = {
        cells[0]: [cell.strip("*") for cell in cells[1:]]
        for line in part.splitlines()
        if line.startswith("|")
        and len(cells := [cell.strip() for cell in line.strip("|").split("|")]) == 5
    }
    for name, arm in names.items():
        found = [speeds.get(f"{arm}, {clients} clients") for clients in (1, 2, 4, 8)]
        assert rows[name] == ["-" if value is None else f"{value:.0f}" for value in found], name
    for name, key in (("plain decoding", "over_ar"), ("stock DFLASH-16", "over_dflash16")):
        ratios = [summary[key], *(summary[f"clients{clients}_{key}"] for clients in (2, 4, 8))]
        assert rows[f"over {name}"] == [f"{ratio:.2f}x" for ratio in ratios]
    whole = [summary[f"whole_run_over_ar_clients{clients}"] for clients in (1, 2, 4, 8)]
    assert rows["over plain decoding, whole run with prefills"] == [f"{r:.2f}x" for r in whole]
    flat = " ".join(part.split())
    assert f"slowest category (markdown) is {summary['min_category_over_ar']:.2f}x" in flat
    assert summary["category_over_ar"]["markdown"] == summary["min_category_over_ar"]
    assert f"worth {summary['over_best_fixed_length_ours']:.2f}x over the best length" in flat
    best = summary["best_fixed_length_ours"]
    told = f"({best.removeprefix('fixed')} rows, {speeds[f'{best}, 1 clients']:.0f} tokens/s)"
    assert told in flat
    two = result("sglang_decode_tp2.json")["summary"]
    beside = [two["beside"][f"hybridspec, {clients} clients"] for clients in (1, 4)]
    assert f"21 prompts one has {beside[0]:.0f} and {beside[1]:.0f}" in flat
    one, four = (two["speeds"][f"hybridspec, {clients} clients"] for clients in (1, 4))
    assert f"{one:.0f} tokens/s with one client, {two['over_ar']:.2f}x plain" in flat
    assert f"and {four:.0f} with four, {two['clients4_over_ar']:.2f}x" in flat
