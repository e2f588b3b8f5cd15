"""What the client found: of a server's log and telemetry, counts over all servers, tables."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from serving.conversation import FORCED_LENGTHS


def retractions(log: Path) -> str:
    """How many requests were taken back, by the server's log, where ranks say the same.

    Raises:
        AssertionError: none.
    """
    lines = log.read_text(errors="replace").splitlines()
    # Of the first rank; alone it is not named.
    lines = [line for line in lines if not re.match(r"\[[^]]* TP[1-9]\d*]", line)]
    counts = [int(n) for n in re.findall(r"#retracted_reqs: (\d+)", "\n".join(lines))]
    if not sum(counts):
        raise AssertionError("no request was retracted")
    return f"{sum(counts)} requests were taken back and read again"


def chosen_lengths(telemetry: Path, correction: str) -> str:
    """How lengths came about, by the server's telemetry.

    Args:
        correction: of the first router, that the server must say it runs with.

    Raises:
        AssertionError: the policy chose none or always the same, signals were not finite, or the
            server runs with another correction.
    """
    told = json.loads(telemetry.read_text(encoding="utf-8"))
    by, counts = told["lengths_by"], told["length_histogram"]
    used = [length for length, count in enumerate(counts) if count]
    said = f"{by['chosen']} chosen, {by['forced']} forced, {by['not_finite']} not finite, "
    said += f"{by['static_policy']} by a fixed length; rounds of {used} rows, "
    said += f"router correction {correction}"
    others = set(used) - set(FORCED_LENGTHS)
    if not by["chosen"] or by["static_policy"] or by["not_finite"] or len(others) < 2:
        raise AssertionError(said)
    if f"router correction {correction}" not in told["lengths"]:
        raise AssertionError(f"{said} was asked for; the server says: {told['lengths']}")
    return said


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Counts over all servers with the plugin, and what plain decoding does to itself."""
    stages = [row for row in rows if row["kind"] == "stage"]
    found = [difference for row in stages for difference in row["differences"]]

    def margins(verdict: str) -> list[float]:
        chosen = (d["margin_nats"] for d in found if d["verdict"] == verdict)
        return [margin for margin in chosen if margin is not None]

    told: dict[str, Any] = {
        "servers": len({row["server"] for row in stages}),
        "stages": len(stages),
        "stages_ok": sum(row["state"] == "ok" for row in stages),
        "greedy_answers": sum(row["compared"] for row in stages),
        "differences": len(found),
        "places": len({(d["prompt"], d["token"]) for d in found}),
        "ties": len(margins("tie")),
        "largest_tie_nats": max(margins("tie"), default=0.0),
        "float64_has_found": sum(d["verdict"] == "float64" for d in found),
        "largest_margin_beyond_tie_nats": max(margins("float64"), default=0.0),
        "faults": sum(d["verdict"] == "fault" for d in found),
        "laws": sum(law["bins"] > 1 or law["texts"] == 1 for row in stages for law in row["laws"]),
        "least_p_value_of_a_law": min(
            (law["p_value"] for r in stages for law in r["laws"]), default=1.0
        ),
    }
    for row in rows:
        if row["kind"] == "control":
            told |= {
                "tp_size": row["tp_size"],
                "control_answers": row["compared"],
                "control_differences": len(row["differences"]),
                "control_lead_change_largest_nats": row["lead_change_largest_nats"],
                "control_lead_change_p99_nats": row["lead_change_p99_nats"],
            }
    return told


def tables(rows: Sequence[dict[str, Any]]) -> str:
    """Stages, then every difference."""
    stages = [row for row in rows if row["kind"] == "stage"]
    lines = ["", f"{'server':9s}{'stage':21s}{'state':8s}answers against plain decoding, and more"]
    lines += [f"{r['server']:9s}{r['name']:21s}{r['state']:8s}{r['told']}" for r in stages]
    lines += [
        "", f"{'server':9s}{'stage':21s}{'prompt':>7s}{'token':>6s}{'margin':>8s}{'second':>7s}"
        f"{'float64':>9s}  verdict",
    ]  # fmt: skip
    for row in rows:
        name = row.get("name", f"{row.get('clients')} clients")
        for d in row["differences"]:
            margin, lead = d["margin_nats"], d.get("float64_lead_of_found_nats")
            lines.append(
                f"{row['server']:9s}{name:21s}{d['prompt']:7d}{d['token']:6d}"
                f"{'?' if margin is None else f'{margin:.4f}':>8s}"
                f"{'yes' if d['is_runner_up'] else 'no':>7s}"
                f"{'' if lead is None else f'{lead:+.3f}':>9s}  {d['verdict']}"
            )
    return "\n".join(lines)
