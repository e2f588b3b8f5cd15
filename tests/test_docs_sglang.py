"""docs/sglang.md says what the plugin does: its refusals, keys and counters are the code's own."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hybridspec.cli._serve_sglang_run import NOT_FOR_SGLANG
from hybridspec.sglang_plugin.config import PluginConfig
from hybridspec.sglang_plugin.controls import _FIELDS as REQUEST_KEYS
from hybridspec.sglang_plugin.refusals import RULES, SUPPORTED_VERSION, VERSION_DIFFERENCES
from hybridspec.sglang_plugin.round_counters import REASONS, RoundCounters

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "sglang.md"
if not PAGE.is_file():
    pytest.skip("no docs in this tree (an sdist)", allow_module_level=True)
TEXT = PAGE.read_text(encoding="utf-8")


def table(heading: str) -> list[list[str]]:
    """Cells of the first table under a heading, without its head."""
    part = TEXT.split(f"\n{heading}\n", 1)[1]
    lines = part.split("\n|", 1)[1].split("\n\n", 1)[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_refused_flags_are_those_of_the_code() -> None:
    assert table("### Refused flags") == [[r.flag, r.reason, r.remedy] for r in RULES]


def test_every_rule_can_be_a_row_and_names_a_flag() -> None:
    for rule in RULES:
        assert "|" not in rule.flag + rule.reason + rule.remedy
        assert re.search(r"--[a-z]", rule.flag), rule.flag


def test_releases() -> None:
    assert table("## Install") == [[name, text] for name, text in VERSION_DIFFERENCES.items()]
    assert f"sglang=={SUPPORTED_VERSION}" in TEXT


def test_configuration_has_every_key_with_its_default() -> None:
    rows = {row[0].strip("`"): row[1].strip("`") for row in table("## Configuration")}
    assert rows.keys() == PluginConfig.model_fields.keys()
    without = (
        "bundle", "force_length", "small_moe", "switches", "telemetry", "record", "allow",
    )  # fmt: skip
    for name, field in PluginConfig.model_fields.items():
        default = "all" if name == "masked_layers" else str(field.default)
        expected = "none" if name in without else default
        assert rows[name] == expected, name


def test_request_keys() -> None:
    rows = table("## What a request can ask for")
    assert {row[0].strip("`") for row in rows} == set(REQUEST_KEYS)


def test_counters() -> None:
    part = TEXT.split("## What a server tells")[1].split("\n## ")[0]
    told = RoundCounters("cpu", max_requests=1).snapshot()
    checks = ("self_check", "self_check_ratios", "runs", "passed", "drifted", "not checked")
    for name in {*told, *REASONS, *checks} - {"uptime_s"}:
        assert f"`{name}`" in part, name


def test_options_that_are_refused() -> None:
    for flag, _ in NOT_FOR_SGLANG.values():
        assert f"`{flag}`" in TEXT
