"""The tables of docs/padded-pair.md, from the committed result file.

python benchmarks/inflate_tables.py
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

RESULT = Path(__file__).parent / "results" / "inflate_proof.json"


def mass(value: float) -> str:
    """A probability; what double precision rounds to nothing is 0."""
    return "0" if value < 1e-300 else f"{value:.0e}"


def proof_table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """One line a case, engine and type."""
    lines = [
        "| case | engine | type | prompts | largest logit difference | routes that differ | greedy "
        "tokens that differ | drafts that differ | values changed by added layers | mass of padded "
        "vocabulary, target / drafter |",
        "|---|---|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        if "engine" not in row:
            continue
        drafts = "–"
        if "drafts" in row:
            drafts = f"{row['draft_differences']} of {row['drafts']}"
        drafter_mass = mass(row["draft_padded_mass"]) if "draft_padded_mass" in row else "–"
        lines.append(
            f"| {row['case']} | {row['engine']} | {row['dtype']} | {row['prompts']} "
            f"| {row['logit_difference']:.1e} | {row['route_differences']} of {row['routes']} "
            f"| {row['token_differences']} of {row['tokens']} | {drafts} "
            f"| {row.get('pass_through_changes', '–')} "
            f"| {mass(row['padded_mass'])} / {drafter_mass} |"
        )
    return lines


def routes_table(rows: Sequence[Mapping[str, Any]], case: str = "lab_deep") -> list[str]:
    """Distinct experts a layer by verify length, live against added layers."""
    lines = [
        "| L | live layers (lowest to highest layer) | added layers (lowest to highest layer) "
        "| added / live | correlation with layer 0: live, added |",
        "|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        if row["case"] != case or "verify_length" not in row:
            continue
        spans = [
            f"{row[f'{kind}_mean_distinct_experts']:.1f} "
            f"({row[f'{kind}_min_layer_mean']:.1f}–{row[f'{kind}_max_layer_mean']:.1f})"
            for kind in ("live", "added")
        ]
        lines.append(
            f"| {row['verify_length']} | {spans[0]} | {spans[1]} | {row['added_over_live']:.3f} "
            f"| {row['live_correlation_with_layer_0']:.2f}, "
            f"{row['added_correlation_with_layer_0']:.2f} |"
        )
    return lines


def main() -> None:
    """Print both tables."""
    rows = json.loads(RESULT.read_text(encoding="utf-8"))["rows"]
    print("\n".join([*proof_table(rows), "", *routes_table(rows)]))


if __name__ == "__main__":
    main()
