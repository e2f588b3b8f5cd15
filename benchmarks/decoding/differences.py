"""Where texts leave plain decoding's, and what the target says there in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from decoding.arms import AR, Text, first_difference
from fuzzing.exact import Exact


def places_of_differences(texts: Sequence[Text]) -> list[dict[str, Any]]:
    """Where texts leave plain decoding's, one object a place and other token.

    Returns:
        `prompt`, `place` among the answer's tokens, `plain_token`, `found_token`, `margin_nats` of
        plain decoding there (None at the prefill's token), `answer` ahead of it, `arms`.
    """
    plain = {text.prompt: text for text in texts if text.arm == AR}
    found: dict[tuple[int, int, int], dict[str, Any]] = {}
    for text in texts:
        other = plain.get(text.prompt)
        place = None if other is None else first_difference(text, other)
        if other is None or place is None:
            continue
        entry = found.setdefault(
            (text.prompt, place, text.tokens[place]),
            {
                "prompt": text.prompt,
                "category": text.category,
                "place": place,
                "plain_token": other.tokens[place],
                "found_token": text.tokens[place],
                "margin_nats": other.margins[place - 1] if place else None,
                "answer": other.tokens[:place],
                "arms": [],
            },
        )
        entry["arms"].append(text.arm)
    return list(found.values())


def judged_places(
    texts: Sequence[Text],
    prompts: Sequence[Sequence[int]],
    exact: Exact,
    *,
    allows: Callable[[], bool],
) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """A row for every place, and how many the target in float64 decides for the token found.

    Args:
        prompts: token ids by the texts' prompt numbers.
        allows: whether there is time to judge one more place; others have no float64 gap.
    """
    rows = []
    for entry in places_of_differences(texts):
        answer = entry.pop("answer")
        if allows():
            pair = entry["plain_token"], entry["found_token"]
            plain, found = exact([*prompts[entry["prompt"]], *answer], pair)
            entry["float64_gap_of_found"] = round(found - plain, 5)
        rows.append({"kind": "difference", **entry})
    gaps = [row["float64_gap_of_found"] for row in rows if "float64_gap_of_found" in row]
    return rows, {
        "difference_places": len(rows),
        "differences_judged_in_float64": len(gaps),
        "differences_that_float64_prefers": sum(gap > 0 for gap in gaps),
    }
