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
PARTS = ("moe", "dense", "draft", "lm_head", "gdn", "attention", "control", "draft_context")


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


def engine_page() -> str:
    """The captured engine's page, each sentence on one line."""
    return " ".join(ENGINE_PAGE.read_text(encoding="utf-8").split())


def round_times() -> tuple[dict[int, float], dict[int, float], float]:
    """Microseconds of graphs of L rows, of the masked graph at L, and of plain decoding."""
    rows = result("gpu_round")["rows"]
    own, masked = (
        {row["length"]: row["median_us"] for row in rows if row["kind"] == kind}
        for kind in ("per_length", "masked")
    )
    (plain,) = (row["median_us"] for row in rows if row["kind"] == "plain")
    return own, masked, plain


def round_parts(kind: str) -> dict[tuple[str, int], float]:
    """Microseconds of a part at a length, in the masked graph or (`part_of_own_rows`) its own."""
    rows = result("gpu_round")["rows"]
    return {(r["part"], r["length"]): r["median_us"] for r in rows if r["kind"] == kind}


def test_commits_of_the_captured_engine_are_those_of_the_result_files() -> None:
    files = ("gpu_round", "gpu_decode")
    said = ", ".join(f"`{name}.json` at {result(name)['commit']}" for name in files)
    assert f"One run of each file: {said}." in engine_page()
    machine = result("gpu_round")["machine"]
    load = f"{machine['load_average_1min_at_start']:.0f} on {machine['cores']} cores"
    assert f"The host had a load of {load} when it started." in engine_page()


def test_rounds_of_the_captured_engine_are_those_of_the_result_file() -> None:
    text, found = ENGINE_PAGE.read_text(encoding="utf-8"), result("gpu_round")
    rows, summary = found["rows"], found["summary"]
    assert summary["complete"]
    assert not summary["failed"]
    assert not summary["left_out"]
    own, masked, _ = round_times()
    assert line("graphs of L rows each", *(f"{own[n]:.0f}" for n in LENGTHS)) in text
    assert line("one masked graph", *(f"{masked[n]:.0f}" for n in LENGTHS)) in text
    ratios = {n: masked[n] / own[n] for n in own}
    assert line("masked over graphs of L rows", *(f"{ratios[n]:.3f}" for n in LENGTHS)) in text
    assert f"({', '.join(f'{ratios[n]:.3f}' for n in (1, 2, 3))},\n  {ratios[4]:.3f})" in text
    assert all(ratios[n] > 1.02 for n in range(1, 5))
    most = max(range(5, 17), key=lambda n: ratios[n])
    assert f"from 5 rows on it is {ratios[most]:.4f} at most, at {most}." in text
    assert ratios[most] < 1.0063
    distinct = {
        row["length"]: row["distinct_experts_a_layer"]
        for row in rows
        if row["kind"] == "per_length"
    }
    assert line("distinct experts a layer", *(f"{distinct[n]:.1f}" for n in LENGTHS)) in text
    for key, label in CONTROLS.items():
        mixes = (f"{summary[f'{mix}_mix_{key}_us']:.0f}" for mix in ("short", "uniform"))
        assert line(label, *mixes) in text
    of_kind = round_parts("part")
    for n in (4, 16):
        parts = [of_kind[part, n] for part in PARTS]
        whole = [*parts, sum(parts), masked[n]]
        assert line(f"{n} live rows", *(f"{part:.0f}" for part in whole)) in text
    for kind, key, labels in (
        (
            "context",
            "context_tokens",
            {
                1024: "1 request, context 1024",
                4096: "context 4096",
                16384: "context 16384",
                32768: "context 32768",
            },
        ),
        ("batch", "batch", {2: "2 requests, context 1024", 4: "4 requests", 8: "8 requests"}),
    ):
        for value, label in labels.items():
            times = [r["median_us"] for r in rows if r["kind"] == kind and r[key] == value]
            assert line(label, *(f"{time:.0f}" for time in times)) in text


def test_sentences_on_rounds_are_those_of_the_result_file() -> None:
    text, found = engine_page(), result("gpu_round")
    rows, summary = found["rows"], found["summary"]
    own, masked, plain = round_times()
    part = round_parts("part")
    ratios = {n: masked[n] / own[n] for n in own}
    most = max(ratios, key=lambda n: ratios[n])
    without_draft = (own[16] - part["draft", 4]) / (own[4] - part["draft", 4])
    slope = {
        row["length"]: row["median_us"] - masked[row["length"]]
        for row in rows
        if row["kind"] == "experts" and row["reuse"] == 0.3
    }
    faster = [
        summary[f"{mix}_mix_masked_us"] / summary[f"{mix}_mix_switch_us"] - 1
        for mix in ("short", "uniform")
    ]
    tiles = {
        (row["length"], row["query_rows"]): row["median_us"]
        for row in rows
        if row["kind"] == "attention" and row["context_tokens"] == 32768
    }
    nodes = summary["masked_graph_nodes"]
    sums = {n: sum(part[name, n] for name in PARTS) for n in (4, 16)}
    for sentence in (
        f"has {nodes['kernel']} kernels and {nodes['memset']} memsets",
        f"so {nodes['kernel'] - 40 * 12 - 8 * 10} kernels are all the rest",
        f"is {own[16] / own[4]:.2f} over graphs of L rows, {masked[16] / masked[4]:.2f} in the "
        f"masked graph, {without_draft:.2f} without the draft pass. Plain decoding takes "
        f"{plain:.0f} us; a distinct expert of all layers "
        f"{summary['us_per_distinct_expert_all_layers']:.1f} us (R2 "
        f"{summary['expert_slope_r2']:.4f}), {summary['expert_tb_per_s']:.2f} TB/s.",
        f"takes {slope[4] + masked[4]:.0f} us at 4 rows, with the same share of repeated experts: "
        f"{slope[4]:.0f} more than above, as it does at 8 ({slope[8]:.0f}) and at 16 "
        f"({slope[16]:.0f}).",
        f"takes {summary['control_us']:.1f} us at 4 rows. The bar of 0.15 ms is met.",
        f"is {ratios[most]:.3f} at most, at {most} rows.",
        f"SWITCH with five bodies is {100 * faster[0]:.1f} % faster than the masked graph on the "
        f"short mix, where the prototype had seen the masked graph ahead, and "
        f"{100 * faster[1]:.1f} % on the uniform one.",
        f"The parts make {100 * sums[4] / masked[4]:.0f} % of the masked round at 4 rows, "
        f"{masked[4] - sums[4]:.0f} us short of it, and {100 * sums[16] / masked[16]:.0f} % at 16 "
        f"rows, {masked[16] - sums[16]:.0f} us short.",
        f"fp32 the masked graph is off by {summary['error_to_fp32_masked']:.3f} at 16 rows",
        f"tiles of 16 would take {tiles[4, 16]:.0f} us instead of {tiles[4, 32]:.0f} at 4 rows, "
        f"but {tiles[16, 16]:.0f} instead of {tiles[16, 32]:.0f} at 16.",
        f"`gpu_round.json` has {summary['gdn_factors_mib_a_request']}, "
        f"{summary['gdn_conv_rows_mib_a_request']} and "
        f"{summary['gdn_snapshots_mib_a_request']:.0f}.",
    ):
        assert sentence in text, sentence
    assert summary["error_to_fp32_bodies_max"] <= summary["error_to_fp32_masked"]
    assert summary["masked_bitwise_lengths"] == 16
    assert summary["mechanisms_bitwise"]


def test_extra_of_the_masked_graph_is_that_of_the_result_file() -> None:
    text, (own, masked, plain) = engine_page(), round_times()
    part, alone = round_parts("part"), round_parts("part_of_own_rows")
    extra = {key: part[key] - us for key, us in alone.items()}
    total = {n: sum(us for (_, rows), us in extra.items() if rows == n) for n in (1, 4)}
    more = {n: masked[n] - own[n] for n in (1, 4)}
    share = {name: 100 * part[name, 4] / masked[4] for name in PARTS}
    large = ("moe", "dense", "draft")
    besides = {
        "moe": part["moe", 4] - alone["moe", 1],
        "draft": part["draft", 4],
        "gdn": part["gdn", 4] - alone["gdn", 1],
        "rest": part["draft_context", 4] + part["control", 4],
        "attention": part["attention", 4] - alone["attention", 1],
        "lm_head": part["lm_head", 4] - alone["lm_head", 1],
        "dense": part["dense", 4] - alone["dense", 1],
    }
    of_one_row = sum(alone[name, 1] for name in ("moe", "dense", "gdn", "attention", "lm_head"))
    for sentence in (
        f"costs a masked round {extra['gdn', 1]:.0f} us at one row and {extra['gdn', 4]:.0f} us "
        f"at 4 (below)",
        f"at 4 rows GDN {extra['gdn', 4]:.0f} us, dense {extra['dense', 4]:.0f}, experts "
        f"{extra['moe', 4]:.0f}, attention {extra['attention', 4]:.0f}, LM head "
        f"{extra['lm_head', 4]:.0f}. All parts make {total[4]:.0f} of the {more[4]:.0f} us",
        f"At 1 row GDN {extra['gdn', 1]:.0f}, experts {extra['moe', 1]:.0f}, attention "
        f"{extra['attention', 1]:.0f}, LM head {extra['lm_head', 1]:.0f}, but dense "
        f"{extra['dense', 1]:.0f}: the masked graph has the few-row projections "
        f"({part['dense', 1]:.0f} us), a graph of one row has cuBLAS throughout "
        f"({alone['dense', 1]:.0f} us). All parts make {total[1]:.0f} there, where the masked "
        f"round takes {more[1]:.0f} us more: {more[1] - total[1]:.0f} us are in none of them.",
        f"so {masked[1] / own[1]:.3f} is against cuBLAS",
        f"experts have {share['moe']:.0f} % of the masked round, dense {share['dense']:.0f} %, the "
        f"draft pass {share['draft']:.0f} %, the other parts "
        f"{sum(us for name, us in share.items() if name not in large):.0f} %; "
        f"{100 - sum(share.values()):.0f} % is in no part. Over plain decoding it takes "
        f"{masked[4] - plain:.0f} us more.",
        f"experts {besides['moe']:.0f} (24.3 distinct a layer instead of 8), draft "
        f"{besides['draft']:.0f}, GDN {besides['gdn']:.0f}, drafter context and control "
        f"{besides['rest']:.0f}, attention {besides['attention']:.0f}, LM head "
        f"{besides['lm_head']:.0f}, dense {besides['dense']:.0f} ({part['dense', 4]:.0f} instead "
        f"of {alone['dense', 1]:.0f}:",
        f"These are {sum(besides.values()):.0f} of the {masked[4] - plain:.0f}.",
        f"{plain - of_one_row:.0f} of its {plain:.0f} us are in none of the five parts",
    ):
        assert sentence in text, sentence


def test_why_over_plain_is_that_of_the_result_files() -> None:
    text, (own, masked, _) = engine_page(), round_times()
    here, served = (
        {
            row["arm"]: row
            for row in result(name)["rows"]
            if row["kind"] == kind and row["category"] == "all" and row.get("clients", 1) == 1
        }
        for name, kind in (("gpu_decode", "arm"), ("sglang_decode", "decode"))
    )
    (costs,) = (row for row in result("gpu_decode")["rows"] if row["kind"] == "costs")
    tokens, ms, plain_ms = (
        here[arm][key]
        for arm, key in (("ours", "tokens_a_round"), ("ours", "ms_a_round"), ("ar", "ms_a_round"))
    )
    of, plain_of = served["hybridspec"], served["ar"]["ms_a_round"]
    extra = (masked[4] - own[4]) / 1e3
    for sentence in (
        f"{tokens:.3f} tokens x {plain_ms:.3f} ms / {ms:.3f} ms.",
        f"it is {of['tokens_a_round']:.3f} x {plain_of:.3f} / {of['ms_a_round']:.3f} = "
        f"{of['over_ar']:.2f}: here rounds are {100 * (1 - ms / of['ms_a_round']):.1f} % shorter "
        f"and emit {100 * (tokens / of['tokens_a_round'] - 1):.0f} % more, but plain decoding is "
        f"{100 * (1 - plain_ms / plain_of):.0f} % shorter.",
        f"For 2.1 a round would have to take {tokens * plain_ms / 2.1:.3f} ms,",
        f"With the {extra:.2f} ms that the masked graph costs at 4 rows of `gpu_round.json` taken "
        f"away it would be {tokens * plain_ms / (ms - extra):.2f}.",
        f"It takes {costs['latency_us'][4] / 1e3:.2f} ms on text.",
    ):
        assert sentence in text, sentence


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
