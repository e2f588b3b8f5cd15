"""Writes the tables of `docs/policies.md` from the result files, between their markers.

`--check` writes nothing and exits with 1 where the page differs from the results.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "policies.md"
RESULTS = ROOT / "benchmarks" / "results"
BEST = "boosted"
Row = dict[str, Any]
LABELS = {
    "ar": "plain decoding",
    "fixed-16": "stock DFlash, 16 rows",
    "best-fixed": "best fixed length",
    "best-fixed-category": "best fixed length by category",
    "ema": "EMA of accepted drafts",
    "evict": "EVICT (D-Cut for one request)",
    "dspark": "DSpark's planner, two rounds late",
    "dspark-no-lag": "the same without the lag",
    "round-ratio": "ratio of the round",
    "hybridspec": "**HybridSpec** (Dinkelbach)",
    "router-paper": "and the paper's router correction",
    "router-select": "and our router correction",
    "router-all": "and 16 rows up to the first router",
    "token-priced": "and distinct tokens priced",
    "oracle-cost": "and all experts known in advance",
    "oracle": "oracle length",
}


def main() -> None:
    """Write or check the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="only compare")
    arguments = parser.parse_args()
    before = PAGE.read_text(encoding="utf-8")
    after = filled(before)
    if arguments.check:
        sys.exit(int(before != after))
    PAGE.write_text(after, encoding="utf-8")


def filled(page: str) -> str:
    """The page with every table made anew."""
    lab = json.loads((RESULTS / "replay_lab.json").read_text(encoding="utf-8"))
    scale = json.loads((RESULTS / "replay_scale.json").read_text(encoding="utf-8"))
    makers: dict[str, Callable[[], str]] = {
        "overall": lambda: overall(lab["rows"]),
        "categories": lambda: categories(lab["rows"]),
        "corrections": lambda: corrections(lab["rows"]),
        "hazards": lambda: hazards(lab["rows"]),
        "bias": lambda: biases(lab["rows"]),
        "scale": lambda: sizes(scale["rows"]),
    }

    def replaced(match: re.Match[str]) -> str:
        return f"<!-- table: {match[1]} -->\n{makers[match[1]]()}\n<!-- end -->"

    return re.sub(r"<!-- table: (\w+) -->\n.*?<!-- end -->", replaced, page, flags=re.DOTALL)


def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A Markdown table; the first column is text, the others line up right."""
    rule = ["---", *["--:"] * (len(head) - 1)]
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, rule, *lines))


def overall(rows: Sequence[Row]) -> str:
    """All policies of the best hazard model on all held-out rounds outside loops."""
    kept = [row for row in totals(rows, BEST) if row["policy"] in LABELS]
    head = ("policy", "tokens/s", "95 %", "walked", "tokens a round", "mean L", "over AR",
            "over 16", "of oracle")  # fmt: skip
    return table(
        head,
        [
            (
                LABELS[row["policy"]],
                f"{row['tokens_per_s']:.1f}",
                f"{row['tokens_per_s_low']:.0f}-{row['tokens_per_s_high']:.0f}",
                walked(row),
                f"{row['tokens_a_round']:.2f}",
                f"{row['mean_length']:.2f}",
                f"{row['over_ar']:.2f}",
                f"{row['over_stock']:.2f}",
                f"{row['of_oracle']:.1%}",
            )
            for row in kept
        ],
    )


def walked(row: Row) -> str:
    """Tokens/s of the walk and the share of rounds at recorded anchors."""
    if row["resimulated_tokens_per_s"] is None:
        return "-"
    return f"{row['resimulated_tokens_per_s']:.1f} ({row['recorded_anchor_share']:.0%})"


def totals(rows: Sequence[Row], hazard: str, *, loops: str = "outside") -> list[Row]:
    """Rows of one hazard model over all categories."""
    return [
        row
        for row in rows
        if (row["kind"], row.get("hazard"), row.get("category"), row.get("loops"))
        == ("policy", hazard, "all", loops)
    ]


def categories(rows: Sequence[Row]) -> str:
    """Tokens/s by category, with the interval of HybridSpec's gain over plain decoding."""
    kept = [row for row in rows if row["kind"] == "policy" and row["hazard"] == BEST]
    names = sorted({row["category"] for row in kept} - {"all"})
    shown = ("fixed-16", "best-fixed-category", "evict", "dspark", "round-ratio", "hybridspec",
             "oracle")  # fmt: skip
    by = {(r["policy"], r["category"], r["loops"]): r for r in kept}
    lines = []
    for name, loops in (*((n, "outside") for n in names), ("all", "inside")):
        ours = by["hybridspec", name, loops]
        lines.append(
            (
                "(in loops)" if loops == "inside" else name,
                str(ours["rounds"]),
                *(f"{by[policy, name, loops]['tokens_per_s']:.0f}" for policy in shown),
                f"{ours['over_ar']:.2f} ({ours['over_ar_low']:.2f}-{ours['over_ar_high']:.2f})",
                f"{ours['of_oracle']:.1%}",
            )
        )
    short = ("16 rows", "best fixed", "EVICT", "DSpark", "ratio", "HybridSpec", "oracle")
    return table(("category", "rounds", *short, "HybridSpec over AR", "of oracle"), lines)


def corrections(rows: Sequence[Row]) -> str:
    """Gain of each correction over HybridSpec without one, by hazard model."""
    kept = [row for row in rows if row["kind"] == "correction"]
    by = {(row["policy"], row["hazard"]): row for row in kept}
    models = ("raw", "beta", "cells", "boosted")
    policies = ("router-paper", "router-select", "router-all", "token-priced", "oracle-cost")

    def cell(row: Row) -> str:
        value, low, high = (row[k] for k in ("gain_over_hybridspec", "gain_low", "gain_high"))
        return f"{value:+.2%} ({low:+.2%} to {high:+.2%})"

    return table(
        ("correction", *models),
        [
            (LABELS[policy].removeprefix("and "), *(cell(by[policy, model]) for model in models))
            for policy in policies
        ],
    )


def hazards(rows: Sequence[Row]) -> str:
    """Every hazard model: its scores and what HybridSpec's rule makes of it."""
    lines = []
    for row in (row for row in rows if row["kind"] == "hazard"):
        ours = {r["policy"]: r for r in totals(rows, row["hazard"])}["hybridspec"]
        lines.append(
            (
                row["hazard"],
                f"{row['auc']:.3f}",
                f"{row['log_loss']:.3f}",
                f"{ours['tokens_per_s']:.1f}",
                f"{ours['over_ar']:.2f}",
                f"{ours['of_oracle']:.1%} ({ours['of_oracle_low']:.1%}-"
                f"{ours['of_oracle_high']:.1%})",
            )
        )
    return table(("hazard", "AUC", "log loss", "tokens/s", "over AR", "of oracle"), lines)


def biases(rows: Sequence[Row]) -> str:
    """Emitted less expected tokens of 8 rows, by quarters of distinct experts."""
    kept = [row for row in rows if row["kind"] == "bias"]
    lines = []
    for quarter in range(1, 5):
        of = {r["hazard"]: r for r in kept if r["quarter_of_distinct_experts"] == quarter}
        lines.append(
            (
                f"{quarter}",
                f"{of[BEST]['mean_distinct_experts_8_layers'] / 8:.1f}",
                *(f"{of[m]['emitted_less_expected_tokens']:+.2f}" for m in ("raw", "beta", BEST)),
            )
        )
    return table(("quarter", "distinct experts a layer", "raw", "beta", BEST), lines)


def sizes(rows: Sequence[Row]) -> str:
    """Time and memory of replays of growing traces."""
    return table(
        ("rounds", "file, MiB", "policies", "seconds", "peak memory, MiB"),
        [
            (
                f"{row['rounds']:,}",
                str(row["file_mib"]),
                str(row["policies"]),
                f"{row['replay_s']:.1f}",
                f"{row['peak_mib']:.0f}",
            )
            for row in rows
        ],
    )


if __name__ == "__main__":
    main()
