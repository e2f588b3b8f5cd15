"""What sessions say: texts against plain decoding in another engine, states against one row."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hybridspec.fuzz import sessions
from hybridspec.fuzz.sglang_adapter import Pairing, compare_states, read_digests, shared_tokens

# Prompts, tokens of each; gives texts. Prefixes, pairs of tokens; gives gaps.
Plain = Callable[[list[list[int]], list[int]], list[list[int]]]
Gaps = Callable[[list[list[int]], list[tuple[int, int]]], list[float | None]]


def visit_of(row: dict[str, Any]) -> tuple[sessions.Visit, sessions.Heard]:
    """A visit and what it was told, as `sessions.as_json` wrote them."""
    behind = None if row["behind"] is None else (row["behind"][0], row["behind"][1])
    visit = sessions.Visit(
        row["name"], tuple(row["prompt"]), row["max_new_tokens"], row["verify_length"],
        row["varied"], behind, row["abort_after"],
    )  # fmt: skip
    lengths = {int(rows): count for rows, count in row["lengths"].items()}
    return visit, sessions.Heard(row["tokens"], row["finish"], row["rounds"], lengths)


def read_sessions(path: Path) -> list[dict[str, Any]]:
    """Lines that are whole."""
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            lines.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return lines


def judge_texts(
    lines: Sequence[dict[str, Any]], plain: Plain, gaps: Gaps, *, tie: float
) -> dict[str, Any]:
    """Ends, lengths and texts of all sessions."""
    heard = [visit_of(row) for line in lines for row in line.get("visits", ())]
    visits, said = [v for v, _ in heard], [h for _, h in heard]
    faults = sessions.check_ends(visits, said)
    texts = plain([list(v.prompt) for v in visits], [v.max_new_tokens for v in visits])
    places = sessions.first_differences(visits, said, texts)
    told = dict(zip((v.name for v in visits), said, strict=True))
    found = gaps(
        [place.prefix(told[place.visit.name].tokens) for place in places],
        [(place.expected, place.found) for place in places],
    )
    faults += sessions.judge_places(places, found, tie=tie)
    return {
        "sessions": len(lines),
        "requests": len(visits),
        "request_rounds": sum(h.rounds for h in said),
        "tokens": sum(len(h.tokens) for h in said),
        "aborted": sum(h.finish == "abort" for h in said),
        "requests_with_varied_lengths": sum(v.varied for v in visits),
        "texts_that_differ": len(places),
        "largest_gap_of_a_tie": max((g for g in found if g is not None and g <= tie), default=0.0),
        "tie_logits": tie,
        "faults": [vars(fault) for fault in faults],
        "errors": [line["error"] for line in lines if "error" in line],
    }


def judge_states(lines: Sequence[dict[str, Any]], digests: Path, *, layers: int) -> dict[str, Any]:
    """States of all sessions; says so where nothing was written."""
    if not digests.exists():
        return {"compared": 0, "why": "no digests: the worker does not call state_probe.watch"}
    checks, controls = [], []
    for line in lines:
        for kind, pairings in (("visits", checks), ("together", controls)):
            for row, alone in zip(line.get(kind, ()), line.get("alone", ()), strict=False):
                prompt = row["prompt"]
                shared = shared_tokens(prompt, row["tokens"], alone["tokens"])
                pairings.append(Pairing(row["name"], alone["name"], len(prompt), shared))
    report = compare_states(read_digests(digests), checks, controls, layers=layers)
    return {**vars(report), "faults": [vars(fault) for fault in report.faults]}
