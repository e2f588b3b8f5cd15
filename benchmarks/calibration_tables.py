"""Fill the tables of docs/calibration.md from the result files.

    python benchmarks/calibration_tables.py [--check]

`--check` writes nothing and exits 1 where the page differs from the results.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "calibration.md"
RESULTS = ROOT / "benchmarks" / "results"
_TABLE = re.compile(r"<!-- table: ([a-z_]+) -->\n.*?<!-- end -->", re.DOTALL)
_MODELS = ["raw", "temperature", "platt", "isotonic", "beta", "boosted", "distilled", "cells"]

Rows = list[dict[str, Any]]


def results(name: str) -> dict[str, Any]:
    """A result file."""
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return found


def with_interval(row: dict[str, Any], name: str, digits: int = 3) -> str:
    """`value (lo to hi)`."""
    value, lo, hi = (f"{row[name + end]:.{digits}f}" for end in ("", "_lo", "_hi"))
    return f"{value} ({lo} to {hi})"


def table(columns: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A Markdown table; the first column is text, the others are right-aligned."""
    head = ["| " + " | ".join(columns) + " |", "|---" + "|---:" * (len(columns) - 1) + "|"]
    return "\n".join([*head, *("| " + " | ".join(line) + " |" for line in lines)])


def pick(rows: Rows, **wanted: Any) -> dict[str, Any]:
    """The one row with these values."""
    (found,) = [row for row in rows if all(row.get(k) == v for k, v in wanted.items())]
    return found


def models(rows: Rows) -> str:
    lines = []
    for name in _MODELS:
        row = pick(rows, kind="model", model=name, category="all")
        measures = [with_interval(row, measure) for measure in ("auc", "log_loss_nats")]
        others = ("brier", "ece", "survival_log_loss_nats", "survival_ece")
        lines.append(
            [
                f"`{name}`",
                *measures,
                *(f"{row[other]:.4f}" for other in others),
                with_interval(row, "emitted_bias_16_tokens", 2),
            ]
        )
    columns = ("model", "AUC", "log loss, nats", "Brier", "ECE", "survival log loss, nats")
    return table((*columns, "survival ECE", "E(16) bias, tokens"), lines)


def categories(rows: Rows) -> str:
    names = [
        row["category"] for row in rows if row["kind"] == "left_out" and row["model"] == "beta"
    ]
    lines = []
    for category in [*names, "loops"]:
        line = [category, str(pick(rows, kind="model", model="beta", category=category)["rounds"])]
        for model in ("beta", "boosted"):
            line.append(
                with_interval(
                    pick(rows, kind="model", model=model, category=category), "log_loss_nats"
                )
            )
            left_out = "-"
            if category != "loops":
                found = pick(rows, kind="left_out", model=model, category=category)
                left_out = with_interval(found, "log_loss_nats")
            line.append(left_out)
        lines.append(line)
    columns = ("category", "rounds", "`beta`", "`beta`, left out", "`boosted`")
    return table((*columns, "`boosted`, left out"), lines)


def sizes(rows: Rows) -> str:
    measures = ("folds_log_loss_nats", "log_loss_nats", "auc", "ece")
    lines = [
        [
            f"{row['trees']} x {row['depth']}",
            str(row["nodes"]),
            *(f"{row[name]:.4f}" for name in measures),
        ]
        for row in rows
        if row["kind"] == "size"
    ]
    columns = ("trees x depth", "nodes", "log loss, folds of calibration prompts")
    return table((*columns, "log loss, test prompts", "AUC", "ECE"), lines)


def features(rows: Rows) -> str:
    lines = [
        [row["features"], with_interval(row, "auc"), with_interval(row, "log_loss_nats")]
        for row in rows
        if row["kind"] == "features"
    ]
    return table(("features", "AUC", "log loss, nats"), lines)


def successors(rows: Rows) -> str:
    lines = [
        [
            row["successor"],
            str(row["drafts"]),
            *(f"{row[name]:.3f}" for name in ("accepted_share", "mean_p1")),
        ]
        for row in rows
        if row["kind"] == "successor"
    ]
    columns = ("the text's own continuation ... the draft", "drafts", "accepted", "mean p1")
    return table(columns, lines)


def cut_history(rows: Rows) -> str:
    lengths = [2, 4, 8, 16]
    lines = []
    for name in ("surprise", "accepted counts"):
        found = [
            pick(rows, kind="cut_history", history=name, verify_length=length) for length in lengths
        ]
        lines.append([name, *(f"{r['log_loss_nats']:.4f} / {r['ece']:.4f}" for r in found)])
    return table(("history", *(f"earlier rounds verified to {n}" for n in lengths)), lines)


def drifts(rows: Rows) -> str:
    lines = [
        [
            row["current"],
            f"`{row['model']}`",
            row["verdict"],
            *(f"{row[name]:+.3f}" for name in ("reference_residual", "current_residual")),
        ]
        for row in rows
        if row["kind"] == "drift"
    ]
    return table(("compared with the rest", "model", "verdict", "residual, rest", "there"), lines)


def served(rows: Rows) -> str:
    lines = [
        [
            row["model"],
            str(row["requests"]),
            f"{row['select_us']:.0f}",
            f"{row['select_p90_us']:.0f}",
            f"{row['observe_us']:.1f}",
        ]
        for row in rows
    ]
    head = ("hazards", "requests", "median, us", "90 % quantile, us", "taking in a round, us")
    return table(head, lines)


def filled(text: str) -> str:
    """The page with every table as the results have it."""
    lab, small = results("hazard_models")["rows"], results("hazard_models_small")["rows"]
    made = {
        "models": models(lab),
        "models_small": models(small),
        "categories": categories(lab),
        "sizes": sizes(lab),
        "features": features(lab),
        "successors": successors(lab),
        "cut_history": cut_history(lab),
        "drift": drifts(lab),
        "served": served(results("served_hazards")["rows"]),
    }

    def replace(match: re.Match[str]) -> str:
        return f"<!-- table: {match[1]} -->\n{made[match[1]]}\n<!-- end -->"

    return _TABLE.sub(replace, text)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing, compare")
    options = parser.parse_args()
    old = PAGE.read_text(encoding="utf-8")
    new = filled(old)
    if options.check:
        if new != old:
            print(f"error: {PAGE.name} differs from the results: run this script", file=sys.stderr)
        return int(new != old)
    PAGE.write_text(new, encoding="utf-8")
    print(f"wrote {PAGE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
