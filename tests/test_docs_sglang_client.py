"""What the pages say of the client in SGLang is what its result files and tables hold."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from pages_kit import RESULTS, cells, result

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
if not DOCS.is_dir() or not RESULTS.is_dir():
    pytest.skip("no docs or results in this tree (an sdist)", allow_module_level=True)
PAGE = (DOCS / "losslessness.md").read_text(encoding="utf-8")
SECTION = PAGE.split("### SGLang with the plugin", 1)[1].split("## Not there yet", 1)[0]
# Sentences go over line ends.
LOSSLESS = " ".join(SECTION.split())
SGLANG = " ".join((DOCS / "sglang.md").read_text(encoding="utf-8").split())


CLIENTS = ("sglang_client", "sglang_client_padded", "sglang_client_policy", "sglang_client_tp2")


def stages(found: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """Rows of one stage, one a server that has it."""
    return [row for row in found["rows"] if row.get("name") == name and row["state"] == "ok"]


def test_tables_of_the_client_in_sglang() -> None:
    found = [result(name) for name in CLIENTS]
    table, laws = cells(SECTION)
    for row, of in zip(table, found, strict=True):
        kept = of["summary"]
        rows = [entry for entry in of["rows"] if entry["kind"] == "stage"]
        servers = list(dict.fromkeys(entry["server"] for entry in rows))
        assert row[1:] == [
            ", ".join(servers), f"{kept['stages_ok']} of {kept['stages']}",
            str(kept["greedy_answers"]), str(kept["differences"]), str(kept["places"]),
            str(kept["largest_tie_nats"]), str(kept["differences"] - kept["ties"]),
            str(kept["faults"]),
        ]  # fmt: skip
        judged = [d for entry in rows for d in entry["differences"]]
        assert len(judged) == kept["differences"]
        assert all(d["verdict"] == "tie" and d["margin_nats"] <= 0.25 for d in judged)
        again = stages(of, "after abort")
        assert len(again) == kept["servers"] == len(servers)
        assert all(entry["told"].startswith("14 of 14 as at first") for entry in again)
    told = [
        (of, row) for of in found for row in of["rows"] if row["kind"] == "stage" and row["laws"]
    ]
    for cell, (of, row) in zip(laws, told, strict=True):
        of_row = row["laws"]
        shows = sorted(round(100 * law["detectable"]) for law in of_row)
        assert cell[0].endswith("two GPUs") == (of["summary"]["tp_size"] == 2)
        assert cell[1:] == [
            row["server"], str(of_row[0]["samples"][0]),
            *(f"{law['texts']} / {law['bins']}, {law['p_value']:.2f}" for law in of_row),
            f"{shows[0]} to {shows[1]} points",
        ]  # fmt: skip
        assert row["state"] == "ok"
    values = [law["p_value"] for _, row in told for law in row["laws"]]
    assert len(values) == 10
    assert f"The least p of ten comparisons is {min(values):.2f}" in LOSSLESS


def test_figures_of_the_client_in_sglang() -> None:
    small, padded, policy, two = found = [result(name) for name in CLIENTS]
    controls = [row for of in found for row in of["rows"] if row["kind"] == "control"]
    margin = controls[0]["differences"][0]["margin_nats"]
    assert len(controls[0]["differences"]) == 1
    assert not any(row["differences"] for row in controls[1:])
    changes = [row["lead_change_largest_nats"] for row in controls]
    assert len(set(changes[1:])) == 1
    assert {row["lead_change_p99_nats"] for row in controls} == {0.375}
    hits = [row for of in found for row in stages(of, "prefix hits")]
    assert {row["server"] for row in hits} == {"radix", "paged"}
    for row in hits:
        assert row["told"].startswith("3200 of 3808 prompt tokens cached, 11 of 14 prefixes end")
    radix = [row for row in hits if row["server"] == "radix"]
    (evicted,) = stages(small, "evictions")
    cached = re.findall(
        r"of 4 prompts (\d+) tokens were cached, with others between (\d+);", evicted["told"]
    )
    assert cached == [("768", "0")]
    taken = [row["told"].split()[0] for of in (small, padded) for row in stages(of, "retractions")]
    chosen = [row["told"] for row in stages(policy, "chosen lengths")]
    counts = [int(text.split()[0]) for text in chosen]
    assert all("0 not finite, 0 by a fixed length" in text for text in chosen)
    # Forced rounds count too, so 1, 5 and 16 rows show nothing.
    assert all(f"rounds of {list(range(1, 17))} rows" in text for text in chosen)
    log = (ROOT / "benchmarks" / "results" / "sglang_client_policy.txt").read_text()
    for name, correction in (("policy", "off"), ("select", "select")):
        assert re.search(rf"^{name} .*router correction {correction},", log, re.MULTILINE)
    skipped = [row["name"] for row in two["rows"] if row.get("state") == "skipped"]
    assert skipped == ["refused", "healthy", "retractions"]
    for sentence in (
        f"in 1 of {controls[0]['compared']} answers of the small pair ({margin} nats) and in 0 of "
        f"{controls[1]['compared']} of the padded one, on one GPU and on two",
        f"up to {changes[0]:.2f} nats in the small pair and {changes[1]:.2f} in the padded one, by "
        "at most 0.375 in 99 of 100 places",
        f"{len(radix[0]['differences'])} of {radix[0]['compared']} answers of the small pair and "
        f"{len(radix[1]['differences'])} of the padded one part",
        "3,200 of 3,808 prompt tokens came from the cache, and 11 of the 14 prefixes end inside an",
        "found 768 of their tokens in the cache",
        f"{len(evicted['differences'])} of {evicted['compared']} answers part, all by ties",
        f"{taken[0]} and {taken[1]} times a request was taken back",
        f"The policy chose {counts[0]:,} times, with `correction: select` {counts[1]:,} times",
        f"commit {padded['commit']}",
    ):
        assert sentence in LOSSLESS, sentence


def test_stages_of_the_client() -> None:
    found = {name: result(name) for name in CLIENTS}
    for name, of in found.items():
        kept = of["summary"]
        stages = [row for row in of["rows"] if row["kind"] == "stage"]
        assert {row["state"] for row in stages if row["state"] != "ok"} <= {"skipped"}
        assert kept["ties"] == kept["differences"]
        assert kept["faults"] == kept["float64_has_found"] == 0
        # The table beside it is of the same run.
        text = (RESULTS / f"{name}.txt").read_text(encoding="utf-8")
        assert f"commit: {of['commit']}" in text
        assert json.dumps(kept, indent=1) in text
    small, padded, policy, two = (found[name]["summary"] for name in CLIENTS)
    for one_gpu in (small, padded, policy):
        assert one_gpu["stages"] == one_gpu["stages_ok"]
        assert one_gpu["tp_size"] == 1
    assert two["tp_size"] == 2
    both = {key: padded[key] + policy[key] for key in ("stages", "greedy_answers", "differences")}
    largest = max(padded["largest_tie_nats"], policy["largest_tie_nats"])
    taken = [
        row["told"].split()[0]
        for name in CLIENTS[:2]
        for row in found[name]["rows"]
        if row.get("name") == "retractions"
    ]
    for sentence in (
        f"{taken[0]} and {taken[1]} times, in stages with several clients",
        f"all {small['stages']} stages of the small and {both['stages']} of the padded pair are "
        f"ok, on two GPUs {two['stages_ok']}, and the last {two['stages'] - two['stages_ok']} had",
        f"of {small['greedy_answers']} of the small pair {small['differences']} part, of "
        f"{both['greedy_answers']} of the padded one {both['differences']}, of "
        f"{two['greedy_answers']} on two GPUs {two['differences']}, all by ties, at most "
        f"{small['largest_tie_nats']}, {largest} and {two['largest_tie_nats']} nats",
    ):
        assert sentence in SGLANG, sentence
