"""What sessions say: texts against plain decoding in another engine, states against one row."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fuzzing.exact import Exact

from hybridspec.fuzz import sessions
from hybridspec.fuzz.sglang_adapter import (
    Alone,
    Pairing,
    compare_states,
    follow_pairing,
    read_digests,
    shared_tokens,
)

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
    cached = row.get("cached", 0)
    return visit, sessions.Heard(row["tokens"], row["finish"], row["rounds"], lengths, cached)


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
    lines: Sequence[dict[str, Any]],
    plain: Plain,
    gaps: Gaps,
    *,
    tie: float,
    exact: Exact | None = None,
) -> dict[str, Any]:
    """Ends, lengths and texts of all sessions.

    A difference beyond a tie is a fault, unless the target in float64 prefers the token found to
    plain decoding's; all of them are kept in `beyond_tie`.
    """
    heard = [
        visit_of(row)
        for line in lines
        for kind in ("visits", "after")
        for row in line.get(kind, ())
    ]
    visits, said = [v for v, _ in heard], [h for _, h in heard]
    faults = sessions.check_ends(visits, said)
    texts = plain([list(v.prompt) for v in visits], [v.max_new_tokens for v in visits])
    places = sessions.first_differences(visits, said, texts)
    told = dict(zip((v.name for v in visits), said, strict=True))
    found = gaps(
        [place.prefix(told[place.visit.name].tokens) for place in places],
        [(place.expected, place.found) for place in places],
    )
    beyond: list[dict[str, Any]] = []
    for place, gap in zip(places, found, strict=True):
        fault = sessions.judge_places([place], [gap], tie=tie)
        if fault and exact is not None:
            pair = place.expected, place.found
            expected, other = exact(place.prefix(told[place.visit.name].tokens), pair)
            beyond.append(decision(fault[0], pair, (expected, other)))
            fault = [] if beyond[-1]["float64_prefers_found"] else fault
        faults += fault
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
        "beyond_tie": beyond,
        "texts_beyond_tie": len(beyond),
        "texts_beyond_tie_as_float64": sum(entry["float64_prefers_found"] for entry in beyond),
        "faults": [vars(fault) for fault in faults],
        "errors": [line["error"] for line in lines if "error" in line],
    }


def prefix_hits(lines: Sequence[dict[str, Any]]) -> dict[str, int]:
    """What a prefix cache gave to requests that go on from answers."""
    visits = [row for line in lines for row in line.get("visits", ())]
    prompts = {row["name"][-10:]: len(row["prompt"]) for row in visits}
    after = [row for line in lines for row in line.get("after", ())]
    return {
        "followed": len(after),
        "followed_with_a_hit": sum(row["cached"] > 0 for row in after),
        "hits_that_end_inside_an_answer": sum(
            row["cached"] > prompts[row["name"][-10:]] for row in after
        ),
        "cached_tokens": sum(row["cached"] for row in after),
    }


def decision(
    fault: sessions.Fault, pair: tuple[int, int], logits: tuple[float, float]
) -> dict[str, Any]:
    """What float64 says of a difference: plain decoding's token and its logit, then ours."""
    return {
        "name": fault.name,
        "message": fault.message,
        "gap_of_plain_decoding": fault.difference,
        "plain_token": pair[0],
        "found_token": pair[1],
        "float64_gap_of_found": round(logits[1] - logits[0], 4),
        "float64_prefers_found": logits[1] > logits[0],
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
    for line in lines:
        alone = {row["name"][-3:]: row for row in line.get("alone", ())}
        for row in line.get("after", ()):
            told = alone[row["name"][-3:]]
            one = Alone(told["name"], told["prompt"], told["tokens"])
            checks.append(follow_pairing(row["name"], row["prompt"], row["tokens"], one))
    report = compare_states(read_digests(digests), checks, controls, layers=layers)
    return {**vars(report), "faults": [vars(fault) for fault in report.faults]}
