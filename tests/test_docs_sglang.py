"""docs/sglang.md says what the plugin does: its refusals, keys and counters are the code's own."""

from __future__ import annotations

import json
import lzma
import re
from pathlib import Path

import pytest
from pages_kit import RESULTS, result

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
FLAT = " ".join(TEXT.split())
measured = pytest.mark.skipif(not RESULTS.is_dir(), reason="no results in this tree (an sdist)")


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


def number(cell: str) -> float | None:
    """The number in a cell, None for a dash."""
    found = cell.strip("*x ")
    return None if found == "-" else float(found)


@measured
def test_speeds_are_those_of_the_result_file() -> None:
    speeds = result("sglang_decode")["summary"]["speeds"]
    names = {
        "plain decoding": "ar", "stock DFLASH, block 16": "dflash16",
        "stock DFLASH, block 8": "dflash8", "stock DFLASH, block 5": "dflash5",
        "**HYBRIDSPEC, chosen**": "hybridspec",
    }  # fmt: skip
    rows = {row[0]: row[1:] for row in table("## Measured on an H200")}
    for name, arm in names.items():
        told = [speeds[f"{arm}, {clients} clients"] for clients in (1, 2, 4, 8)]
        assert [number(cell) for cell in rows[name]] == told, name
    for lengths in ((4, 5, 8), (12, 16)):
        cells = rows[f"HYBRIDSPEC, {' / '.join(map(str, lengths))} rows always"]
        for cell, clients in ((cells[0], 1), (cells[2], 4)):
            told = [round(speeds[f"fixed{length}, {clients} clients"]) for length in lengths]
            assert cell == " / ".join(map(str, told))
        assert cells[1] == cells[3] == "-"


@measured
def test_ratios_are_those_of_the_result_file() -> None:
    found = result("sglang_decode")
    kept = found["summary"]
    ahead = "## Measured on an H200" + TEXT.split("| ratios |")[1].join(("\n\n| ratios |", ""))
    lines = ahead.split("\n|", 1)[1].split("\n\n", 1)[0].splitlines()[2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    rows = {row[0]: row[1:] for row in cells}

    def told(*values: float | None) -> list[str]:
        return ["-" if value is None else f"{value:.2f}x" for value in values]

    def by_clients(key: str) -> list[float]:
        return [kept[f"clients{clients}_{key}"] for clients in (2, 4, 8)]

    assert rows["over plain decoding"] == told(kept["over_ar"], *by_clients("over_ar"))
    sixteen = told(kept["over_dflash16"], *by_clients("over_dflash16"))
    assert rows["over stock DFLASH-16"] == sixteen
    best = told(kept["over_best_fixed"], *by_clients("over_best"))
    assert rows["over the best other arm of stock SGLang"] == best
    assert rows["over the best fixed length of our own"] == told(
        kept["over_best_fixed_length_ours"], None, kept["clients4_over_best_fixed_ours"], None
    )
    whole = told(*(kept[f"whole_run_over_ar_clients{clients}"] for clients in (1, 2, 4, 8)))
    assert rows["over plain decoding, whole run with prefills"] == whole
    stock = {
        row["clients"]: row["whole_run_over_ar"]
        for row in found["rows"]
        if row["kind"] == "reading" and row["arm"] == "dflash16"
    }
    assert rows["stock DFLASH-16 over plain decoding, whole run"] == told(
        *(stock[clients] for clients in (1, 2, 4, 8))
    )
    for key, name in (
        ("over_ar", "plain decoding"), ("over_dflash16", "DFLASH-16"),
        ("over_best_fixed", "block 5"),
    ):  # fmt: skip
        _, low, high = kept[f"{key}_paired"]
        assert f"{low:.2f}-{high:.2f}x {name}" in FLAT
    assert kept["best_fixed_block"] == "dflash5"
    for category, ratio in kept["category_over_ar"].items():
        assert f"{category} {ratio:.2f}x" in FLAT
    boots = kept["boot_s"]
    later = [boots[name] for name in ("dflash16", "dflash5", "dflash8")]
    assert f"{boots['hybridspec']} s with a bundle, {boots['hybridspec-fixed']} without" in FLAT
    assert (
        f"stock DFLASH {later[0]}, {later[1]} and {later[2]} s with blocks of 16, 5 and 8" in FLAT
    )
    with lzma.open(RESULTS / "sglang_decode" / "one_gpu.json.xz") as file:
        first = {name: boot["boot_s"] for name, boot in json.load(file)["boots"].items()}
    more = first["hybridspec-fixed"] - first["dflash16"]
    assert f"(no bundle) took {first['hybridspec-fixed']} s, {more:.0f} s more than DFLASH" in FLAT


@measured
def test_speeds_on_two_gpus() -> None:
    kept = result("sglang_decode_tp2")["summary"]
    part = "\n## two\n" + TEXT.split("**Two GPUs**")[1]
    lines = part.split("\n|", 1)[1].split("\n\n", 1)[0].splitlines()[2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    both = kept["speeds"], kept["beside"]
    speeds = {
        name: [of[f"{arm}, {clients} clients"] for of in both for clients in (1, 4)]
        for name, arm in (
            ("plain decoding", "ar"), ("HYBRIDSPEC, 5 rows always", "fixed5"),
            ("HYBRIDSPEC, 16 rows always", "fixed16"), ("HYBRIDSPEC, chosen", "hybridspec"),
        )
    }  # fmt: skip
    chosen, plain = speeds["HYBRIDSPEC, chosen"], speeds["plain decoding"]
    ratios = [round(ours / ar, 2) for ours, ar in zip(chosen, plain, strict=True)]
    assert ratios[:2] == [round(kept["over_ar"], 2), round(kept["clients4_over_ar"], 2)]
    told = {row[0].strip("*"): [number(cell) for cell in row[1:]] for row in cells}
    assert told == {**speeds, "chosen over plain decoding": ratios}
    assert plain[0] <= plain[2]
    assert (
        f"makes chosen lengths {1.0 - chosen[0] / chosen[2]:.0%} slower".replace("%", " %") in FLAT
    )
    assert f"slowest category is {kept['min_category_over_ar']:.2f}x" in FLAT
    found = kept["all_differences"]
    assert found["by_runner_up"] == found["differences"]
    compared = drafted("sglang_decode_tp2")
    assert f"{found['differences']} of {compared} answers of HYBRIDSPEC and none of plain" in FLAT
    assert f"plain decoding's {found['answers'] - compared} with four clients" in FLAT
    assert "dflash16" in kept["not_measured"]


@measured
def test_speeds_of_the_run_with_the_papers_rule() -> None:
    kept = result("sglang_decode_paper")["summary"]
    speeds = kept["speeds"]
    part = "\n## later\n" + TEXT.split("**The paper's rule and ReplaySSM**")[1]
    lines = part.split("\n|", 1)[1].split("\n\n", 1)[0].splitlines()[2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    rows = {row[0].strip("*"): [number(cell) for cell in row[1:]] for row in cells}
    assert rows == {
        "plain decoding": [speeds["ar, 1 clients"], speeds["ar, 4 clients"]],
        "HYBRIDSPEC, 5 rows always": [speeds["again5, 1 clients"], None],
        "HYBRIDSPEC, 16 rows always": [speeds["again16, 1 clients"], None],
        "HYBRIDSPEC, chosen": [speeds["hybridspec, 1 clients"], speeds["hybridspec, 4 clients"]],
        "HYBRIDSPEC, chosen, `correction: paper`": [
            speeds["hybridspec-paper, 1 clients"], speeds["hybridspec-paper, 4 clients"],
        ],
        "chosen over plain decoding": [
            round(kept["over_ar"], 2), round(kept["clients4_over_ar"], 2),
        ],
        "chosen over the paper's rule": [
            round(kept["over_paper_rule"], 3), round(kept["clients4_over_paper_rule"], 3),
        ],
    }  # fmt: skip
    _, low, high = kept["over_paper_rule_paired"]
    assert f"over prompts is {low:.3f}-{high:.3f}x" in FLAT
    assert "'NoneType' object has no attribute 'device'" in kept["not_measured"]["replayssm"]
    assert "dflash8" in kept["not_measured"]


def drafted(name: str) -> int:
    """Answers that are compared, without plain decoding's, of which none parts."""
    texts = [row for row in result(name)["rows"] if row["kind"] == "texts"]
    assert all(row["equal"] == row["compared"] for row in texts if row["arm"] == "ar")
    return sum(row["compared"] for row in texts if row["arm"] != "ar")


@measured
def test_differences_of_texts() -> None:
    both = {}
    for name in ("sglang_decode", "sglang_decode_paper"):
        both[name] = found = result(name)["summary"]["all_differences"]
        # A third token may come out on top too: it did for plain decoding alone, with 8 clients.
        others = [
            (row["arm"], row["clients"])
            for row in result(name)["rows"]
            if row["kind"] == "texts"
            for difference in row["differences"]
            if not difference["is_runner_up"]
        ]
        assert others == ([("ar", 8)] if name == "sglang_decode" else [])
        assert found["by_runner_up"] == found["differences"] - len(others)
        assert found["largest_margin_nats"] == 0.125
        assert found["margins_unknown"] == 0
    first, later = both["sglang_decode"], both["sglang_decode_paper"]
    prompts = {
        difference["prompt"]
        for row in result("sglang_decode")["rows"]
        if row["kind"] == "texts"
        for difference in row["differences"]
    }
    where = f"at {first['places']} places in {len(prompts)} prompts"
    assert f"have {first['differences']} differences, {where}" in FLAT
    assert f"in {first['exact_ties']} the two are exactly equal" in FLAT
    assert f"In {first['by_runner_up']} of them, all of HYBRIDSPEC's and DFLASH's" in FLAT
    assert (
        f"{later['differences']} of {drafted('sglang_decode_paper')} answers of HYBRIDSPEC" in FLAT
    )
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert f"({first['differences']} differences, all arms)" in readme
    assert f"in {first['exact_ties']} the two are equal" in readme


def test_figures_of_the_commands_are_those_of_their_log() -> None:
    log = (ROOT / "benchmarks" / "results" / "sglang_commands.txt").read_text(encoding="utf-8")
    part = " ".join(TEXT.split("**On an H200** ([log]")[1].split("\n\n")[0].split())
    stages = {
        found[0]: found[1]
        for found in re.findall(r"^(\w+, (?:small|padded) pair.*)\n((?: .*\n)+)", log, re.MULTILINE)
    }

    def stage(name: str) -> str:
        (text,) = (text for head, text in stages.items() if head.startswith(name))
        return text

    rounds, prompts = re.findall(r"(\d+) rounds of (\d+) prompts", stage("calibrate"))[0]
    assert f"recorded {rounds} rounds of {prompts} prompts" in part
    small = stage("profile, small pair, its card")
    changed = max(map(int, re.findall(r"changed by up to (\d+)%", small)))
    assert f"up to {changed} % between the halves" in part
    assert "no price of an expert" in small
    padded = stage("profile, padded pair")
    us = re.findall(r"1 request: (.*)", padded)[0].split()
    assert f"1, 8 and 16 rows take {us[1]}, {us[8]} and {us[16]} us, plain ones {us[0]}" in part
    price, total, fit = re.findall(r"costs ([\d.]+) us .*; ([\d.]+) us over.*R2 ([\d.]+)", padded)[
        0
    ]
    assert f"costs {price} us (R2 {fit}), {total} us over 40 layers" in part
    (took,) = re.findall(r"^profile, padded pair.*, (\d+) s with", log, re.MULTILINE)
    assert f"took {took} s with its three servers" in part

    def off(name: str) -> list[float]:
        return [abs(float(found)) for found in re.findall(r"rows ([+-][\d.]+) %", stage(name))]

    assert f"within {max(off('checked, padded pair')):.1f} % at the first attempt" in part
    assert "at attempt" not in stage("checked, padded pair")
    assert f"within {max(off('checked, small pair, at once')):.1f} % at the second attempt" in part
    assert "at attempt 2" in stage("checked, small pair, at once")
    first, again = (
        off("checked, small pair, earlier, at once"),
        off("checked, small pair, earlier, ag"),
    )
    assert f"took {min(first):.0f} % to {max(first):.0f} % more" in part
    assert f"within {max(again):.0f} %" in part
