"""Every figure of docs/losslessness.md is that of a committed result file."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from pages_kit import cells, result

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "losslessness.md"
if not PAGE.is_file():
    pytest.skip("no docs in this tree (an sdist)", allow_module_level=True)
TEXT = PAGE.read_text(encoding="utf-8")
# Sentences go over line ends.
FLAT = " ".join(TEXT.split())


def table_rows(heading: str) -> list[list[str]]:
    """Cells of the table under a heading, without its head."""
    part = TEXT.split(heading, 1)[1].split("\n##", 1)[0]
    lines = [line for line in part.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_clean_run_of_the_fuzzer() -> None:
    content = result("fuzz_cpu")
    clean, summary = content["rows"][0], content["summary"]
    assert summary["violations"] == 0
    for sentence in (
        f"{clean['rounds']:,} rounds in {clean['histories']} histories, {clean['seconds']:.0f} s",
        f"{clean['tokens']:,} emitted tokens",
        f"{clean['request_rounds_without_drafts']} of {clean['request_rounds']:,} requests' rounds",
        f"{clean['request_rounds_cut_at_first_router']} were cut at the first router",
        f"{clean['leaves']} left and {clean['aborts']} were aborted",
        f"{clean['crossings_of_64']} times 64 tokens and {clean['crossings_of_256']} times 256",
        f"no violation; the largest difference was {summary['largest_difference']:.1e}",
    ):
        assert sentence in FLAT, sentence


def test_table_of_planted_faults() -> None:
    content = result("fuzz_cpu")
    planted = content["rows"][1:]
    want = [
        [
            row["planted"],
            f"{row['rounds']}",
            f"{row['found_s']:.1f}",
            f"{row['found_and_shrunk_s']:.1f}",
            row["kind"].replace("_", " "),
            f"{row['operations']}",
        ]
        for row in planted
    ]
    assert table_rows("### Planted faults") == want
    assert content["summary"]["planted_faults_found"] == len(planted)
    assert content["summary"]["slowest_found_and_shrunk_s"] < 120


def test_figures_of_prefixes() -> None:
    rows = [row for row in result("losslessness_cpu")["rows"] if row["what"] == "prefix of a block"]
    want = [
        [
            row["dtype"],
            *(
                f"{row[key]} of {row['blocks']}"
                for key in (
                    "first_router_same_bits",
                    "given_routes_same_bits",
                    "own_routes_same_bits",
                    "other_length_same_bits",
                )
            ),
            f"{row['other_tokens_largest_difference_logits']:.1e}",
            f"{row['other_length_largest_difference_logits']:.1e}",
        ]
        for row in rows
    ]
    assert table_rows("### Prefixes, bit by bit") == want


def test_figures_of_the_joint_law() -> None:
    summary = result("losslessness_cpu")["summary"]
    for sentence in (
        f"{summary['law_combinations']} combinations, {summary['law_samples_each']:,} texts each",
        f"smallest p-value {summary['law_smallest_p_value']:.3g}",
        f"{summary['law_beyond_total_variation_limit']} of them beyond the limit",
        f"{summary['law_planted_caught']} of {summary['law_planted_combinations']} times",
        f"largest p-value {summary['law_planted_largest_p_value']:.1e}",
        f"at least {summary['law_least_power_against_planted_bias']:.4f}",
    ):
        assert sentence in FLAT, sentence


def test_figures_of_ties() -> None:
    content = result("cpu_demo")
    ours = [r for r in content["rows"] if r["category"] == "all"]
    compared = len(ours) - 1
    summary = content["summary"]
    assert f"{compared} ways of choosing lengths" in FLAT
    assert f"{summary['different_outputs']} texts that differ" in FLAT
    assert f"{summary['largest_margin_at_difference']:.1e}" in FLAT


def test_figures_of_the_certificate() -> None:
    content = result("certificate_cpu")
    gate = {row["gate"]: row for row in content["rows"] if row["what"] == "gate"}
    greedy, law, state = gate["greedy"], gate["law"], gate["state"]
    loops, quality = gate["degenerate"], gate["quality"]
    assert content["summary"]["verdict"] == "passed"
    for sentence in (
        f"{greedy['texts']:.0f} texts, {greedy['different_texts']:.0f} of them different from",
        f"{gate['control']['different_texts']:.0f} between two runs of plain decoding",
        f"{law['prompts']:.0f} prompts with {law['samples_each']:,.0f} samples each",
        f"smallest p-value {law['smallest_p_value']:.2g}; {state['rounds']:.0f} rounds",
        f"largest difference {state['largest_difference']:.1e};",
        f"{loops['loops_hybridspec']:.0f} texts in loops, {loops['loops_plain']:.0f} of plain",
        f"Of {quality['questions']:.0f} questions",
        f"{quality['right_hybridspec']:.0f} are right, {quality['right_plain']:.0f} by plain",
        f"interval {100 * quality['interval_low']:+.2f} to {100 * quality['interval_high']:+.2f} ",
        f"{content['summary']['seconds']:.0f} s in all",
    ):
        assert sentence in FLAT, sentence


def test_table_of_faults_under_the_gates() -> None:
    content = result("certificate_cpu")
    planted = [row for row in content["rows"] if row["what"] == "planted"]
    names = ("control", "greedy", "law", "state")
    shown = {"passed": "-", "failed": "**failed**"}
    assert table_rows("### Faults under the gates") == [
        [row["planted"], *(shown.get(row[name], "refused") for name in names)] for row in planted
    ]
    found = {name: sum(row[name] != "passed" for row in planted) for name in names}
    passed = content["summary"]["planted_faults_certified"]
    sentence = (
        f"greedy finds {found['greedy']} of {len(planted)}, law {found['law']}, state "
        f"{found['state']}; {passed} pass all four"
    )
    assert sentence in FLAT


def test_figures_of_robustness() -> None:
    summary = result("robustness_cpu")["summary"]
    assert summary["unexpected"] == summary["half_bundles"] == 0
    for sentence in (
        f"{summary['requests']:,} requests (greedy",
        f"of which {summary['aborted']:,} were torn out",
        f"{summary['greedy_right']:,} greedy answers, all of them plain decoding's text",
        f"Memory was {summary['memory_start_mib']:.0f} MiB before, "
        f"{summary['memory_after_a_fifth_mib']:.0f} after a fifth and at most "
        f"{summary['memory_most_later_mib']:.0f} later",
        f"killed {summary['kills']} times at random moments left {summary['half_bundles']} half",
    ):
        assert sentence in FLAT, sentence


def between(start: str, end: str) -> str:
    return TEXT.split(start, 1)[1].split(end, 1)[0]


def test_figures_of_the_fuzzer_on_a_gpu() -> None:
    row = result("fuzz_gpu")["rows"][0]
    counts, noise, worst = row["counts"], row["noise"], row["largest_difference"]
    assert row["violations"] == 0
    for sentence in (
        f"{row['rounds']:,} rounds in {row['histories']} histories, {row['seconds']:.0f} s in "
        f"{len(row['processes'])} processes (`--processes {len(row['processes'])}`",
        f"{counts['request_rounds']:,} requests' rounds, "
        f"{counts['request_rounds_without_drafts']:,} of them without drafts and "
        f"{counts['request_rounds_cut_at_first_router']:,} cut at the first router",
        f"{counts['tokens']:,} emitted tokens",
        f"{counts['leaves']:,} requests left and {counts['aborts']:,} were aborted",
        f"{counts['joins_behind_earlier_text']} prompts went on from earlier text",
        f"text crossed {counts['crossings_of_64']:,} times 64 tokens",
        f"{row['planted_faults_found']} of {row['planted_faults']} were found within "
        f"{max(fault['rounds'] for fault in row['planted'])} rounds",
    ):
        assert sentence in FLAT, sentence
    differences, planted = cells(between("**The captured engine on an H200**", "**SGLang on an"))
    parts = ("conv_window", "recurrent_state", "logits", "kv_keys", "kv_values")
    assert differences == [
        [
            part.replace("_", " "),
            *(f"{of[part]:.3f}" for of in (noise["control"], worst, noise["tolerance"])),
            f"{noise['signal'][part]:.2f}" if part in noise["signal"] else "",
        ]
        for part in parts
    ]
    assert planted == [
        [
            fault["fault"],
            f"{fault['rounds']}",
            fault["violation"]["kind"].replace("_", " "),
            f"{len(json.loads(fault['history'])['operations'])}",
        ]
        for fault in row["planted"]
    ]


def test_figures_of_the_fuzzer_in_sglang() -> None:
    row = result("fuzz_gpu_sglang")["rows"][0]
    beyond = row["beyond_tie"]
    places = sorted({(e["gap_of_plain_decoding"], e["float64_gap_of_found"]) for e in beyond})
    for sentence in (
        f"{row['request_rounds']:,} requests' rounds of the {row['wanted_request_rounds']:,} "
        f"wanted, in {row['sessions']} sessions: {row['requests']} requests, {row['aborted']} of "
        f"them aborted, {row['requests_with_varied_lengths']} with another length in every round, "
        f"{row['tokens']:,} tokens. {row['states_compared']:,} states were compared, "
        f"{row['state_faults']} faults",
        f"{row['texts_that_differ']} of the {row['requests']} texts part from plain decoding's, "
        f"{row['texts_that_differ'] - len(beyond)} of them at gaps of at most "
        f"{row['largest_gap_of_a_tie']} logits (a tie is {row['tie_logits']}). The other "
        f"{len(beyond)} are one prompt at one place",
        f"token is {places[0][0]} ahead in its own logits",
        f"the token found leads by {places[0][1]:.2f}",
        f"{row['text_faults']} faults of texts",
    ):
        assert sentence in FLAT, sentence
    assert all(entry["float64_prefers_found"] for entry in beyond)
    assert len({entry["message"] for entry in beyond}) == len(places) == 1
    (table,) = cells(between("**SGLang on an H200**", "**With a prefix cache**"))
    engines = row["processes"]

    def most(kind: str, key: str) -> float:
        return max(states[kind][key] for states in engines)

    assert table == [
        [
            name,
            f"{most('control', key):.3f}",
            f"{most('largest', key):.3f}",
            f"{min(states['allowed'][key] for states in engines):.3f}",
            f"{min(states['signal'][key] for states in engines):.2f}",
        ]
        for name, key in (("conv window", "conv_window_0"), ("recurrent state", "recurrent_state"))
    ]
    assert not any(states["blind"] for states in engines)
    factors = [s["allowed"]["recurrent_state"] / s["control"]["recurrent_state"] for s in engines]
    assert f"{min(factors):.1f} times the control" in FLAT
    ratios = [s["largest"][key] / s["control"][key] for s in engines for key in s["largest"]]
    assert f"at most {max(ratios):.2f} times what the same engine's control does" in FLAT


def test_figures_of_the_fuzzer_with_a_prefix_cache() -> None:
    row = result("fuzz_gpu_sglang_radix")["rows"][0]
    states = row["states"]
    largest, allowed = states["largest"], states["allowed"]
    for sentence in (
        f"{row['request_rounds']:,} requests' rounds in {row['sessions']} sessions, "
        f"{row['requests']} requests. {row['followed_with_a_hit']} of the {row['followed']} that "
        f"go on found a prefix, {row['hits_that_end_inside_an_answer']} of them one",
        f"{row['cached_tokens']:,} tokens came from the cache. {row['states_compared']:,} states "
        f"were compared, {row['state_faults']} faults",
        f"conv windows differ by at most {largest['conv_window_0']:.3f} (allowed "
        f"{allowed['conv_window_0']:.3f}), recurrent states by {largest['recurrent_state']:.3f} "
        f"(allowed {allowed['recurrent_state']:.3f})",
        f"{row['texts_that_differ']} of the {row['requests']} texts part from those of plain "
        f"decoding without a cache, at gaps of at most {row['largest_gap_of_a_tie']} logits",
    ):
        assert sentence in FLAT, sentence
    assert not row["texts_beyond_tie"]
    assert not row["text_faults"]
    assert not states["blind"]


def test_figures_of_texts_in_sglang() -> None:
    rows = [row for row in result("sglang_decode")["rows"] if row["kind"] == "texts"]
    groups: dict[tuple[str, tuple[int, ...]], tuple[str, ...]] = {
        ("plain decoding", (2, 4)): ("ar",),
        ("plain decoding", (8,)): ("ar",),
        ("stock DFLASH, blocks of 16", (1, 2, 4, 8)): ("dflash16",),
        ("stock DFLASH, blocks of 8", (1, 2, 4, 8)): ("dflash8",),
        ("stock DFLASH, blocks of 5", (1, 2, 4, 8)): ("dflash5",),
        ("HYBRIDSPEC, fixed 4, 5, 8, 12 and 16", (1, 4)): (
            "fixed4", "fixed5", "fixed8", "fixed12", "fixed16",
        ),
        ("HYBRIDSPEC, lengths by the policy", (1, 2, 4, 8)): ("hybridspec",),
    }  # fmt: skip
    want, seen = [], 0
    for (name, clients), arms in groups.items():
        of = [row for row in rows if row["arm"] in arms and row["clients"] in clients]
        assert len(of) == len(arms) * len(clients)
        seen += len(of)
        compared = sum(row["compared"] for row in of)
        margin = max(row["largest_margin_nats"] for row in of)
        parts = f"{compared - sum(row['equal'] for row in of)} of {compared}"
        want.append([name, ", ".join(map(str, clients)), parts, f"{margin:g}"])
    assert seen == len(rows)
    assert cells(between("## Up to ties", "## Statistical")) == [want]
    assert not any(row["differences_beyond_tie"] or row["margins_unknown"] for row in rows)
    found = [difference for row in rows for difference in row["differences"]]
    (other,) = (d for row in rows for d in row["differences"] if not d["is_runner_up"])
    assert other in [d for row in rows if row["arm"] == "ar" for d in row["differences"]]
    wide = [difference for difference in found if difference["margin_nats"] > 0]
    places = {(difference["prompt"], difference["token"]) for difference in found}
    prompts = {prompt for prompt, _ in places}
    for sentence in (
        f"Of the {len(found)} differences {len(wide)} have a margin above 0, and in "
        f"{len(found) - len(wide)} the two best are exactly equal. In {len(found) - 1} the",
        f"plain decoding's own with 8 clients, where the two best are {other['margin_nats']} nats",
        f"They lie at {len(places)} places in {len(prompts)} of 28 prompts",
    ):
        assert sentence in FLAT, sentence


def test_figures_of_texts_on_two_gpus() -> None:
    kept = result("sglang_decode_tp2")
    found = kept["summary"]["all_differences"]
    assert found["by_runner_up"] == found["differences"]
    assert not found["margins_unknown"]
    texts = [row for row in kept["rows"] if row["kind"] == "texts"]
    ours = sum(row["compared"] for row in texts if row["arm"] != "ar")
    (plain,) = (row for row in texts if row["arm"] == "ar")
    assert plain["equal"] == plain["compared"]
    for sentence in (
        f"{found['differences']} of {ours} answers of HYBRIDSPEC part",
        f"none of plain decoding's {plain['compared']} with four",
        f"at {found['places']} places, all of them with its second best token, at most "
        f"{found['largest_margin_nats']} nats behind and in {found['exact_ties']} exactly equal",
    ):
        assert sentence in FLAT, sentence


def test_figures_of_texts_in_the_captured_engine() -> None:
    rows = [
        row
        for row in result("gpu_decode")["rows"]
        if row["kind"] == "arm" and row["category"] == "all" and row["arm"] != "ar"
    ]
    counts = sorted({row["texts_differing"] for row in rows})
    margin = max(row["margin_at_difference_max"] for row in rows)
    assert f"{counts[0]} to {counts[-1]} texts of an arm part" in FLAT
    assert f"margins of up to {margin:g} nats" in FLAT
    places = [row for row in result("gpu_decode")["rows"] if row["kind"] == "difference"]
    gaps = [place["float64_gap_of_found"] for place in places]
    others = [p for p in places if p["float64_gap_of_found"] < 0]
    stock = [p for p in others if p["arms"] == ["dflash16-sglang-gdn"]]
    ours = [p for p in others if p not in stock]
    assert not any("dflash16-sglang-gdn" in place["arms"] for place in ours)
    least = (min(p["float64_gap_of_found"] for p in group) for group in (ours, stock))
    in_ours, in_stock = (f"{-gap:.2f}" for gap in least)
    for sentence in (
        f"All arms together part at {len(places)} places",
        f"token found at {len(places) - len(others)} of them, by up to {max(gaps):.2f} nats",
        f"plain decoding's at {len(others)}, by up to {in_ours} nats in arms with our GDN kernels",
        f"and {in_stock} in the one with SGLang's",
    ):
        assert sentence in FLAT, sentence


def test_page_names_what_is_missing() -> None:
    missing = TEXT.split("## Not there yet", 1)[1]
    for word in ("GSM8K", "CUDA", "SGLang", "prefix cache", "Tensor parallelism"):
        assert word in missing


def test_times_of_the_short_and_the_long_form() -> None:
    log = (ROOT / "benchmarks" / "results" / "losslessness_tests.txt").read_text()
    short, long = re.findall(r"^real\t(\d+)m(\d+)\.\d+s$", log, re.MULTILINE)
    # The bar for the short form, in minutes.
    assert int(short[0]) < 4
    assert f"the short form took {short[0]}:{short[1]:0>2} minutes" in FLAT
    assert f"the long one {long[0]}:{long[1]:0>2}, beside other work" in FLAT
    assert "failed" not in log
