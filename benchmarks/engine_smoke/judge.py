"""What the answers of two engines say about each other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Difference:
    """First place where two greedy texts differ.

    Attributes:
        prompt: index of the prompt.
        place: tokens before it.
        expected, found: the two tokens; None where a text ended.
    """

    prompt: int
    place: int
    expected: int | None
    found: int | None


def differences(
    expected: Sequence[Sequence[int]], found: Sequence[Sequence[int]]
) -> list[Difference]:
    """The first difference of every pair of texts that differ."""
    result = []
    for prompt, (a, b) in enumerate(zip(expected, found, strict=True)):
        if list(a) == list(b):
            continue
        shorter = min(len(a), len(b))
        place = next((i for i in range(shorter) if a[i] != b[i]), shorter)
        result.append(
            Difference(
                prompt,
                place,
                a[place] if place < len(a) else None,
                b[place] if place < len(b) else None,
            )
        )
    return result


def speed(result: dict[str, Any]) -> dict[str, float | None]:
    """Tokens a second and a round over the rows of a task, one request at a time or not."""
    rows = result["rows"]
    tokens = sum(len(row["ids"]) for row in rows)
    rounds = sum(row["rounds"] or 0 for row in rows)
    return {
        "tokens": tokens,
        "tokens_per_s": round(tokens / result["seconds"], 1),
        "tokens_per_round": round(tokens / rounds, 3) if rounds else None,
        "mean_length": mean_length(rows),
    }


def mean_length(rows: Sequence[dict[str, Any]]) -> float | None:
    """Mean rows verified a round, from the histograms that SGLang hands out."""
    total = weight = 0
    for row in rows:
        for length, count in enumerate(row["lengths"] or ()):
            total += length * count
            weight += count
    return round(total / weight, 3) if weight else None


def lengths_seen(rows: Sequence[dict[str, Any]]) -> set[int]:
    """All lengths that any round had."""
    return {length for row in rows for length, count in enumerate(row["lengths"] or ()) if count}


def surprise(scores: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Mean negative log probability of a token over texts, and its standard error over texts."""
    means = [-sum(row) / len(row) for row in scores if row]
    mean = sum(means) / len(means)
    spread = math.sqrt(sum((m - mean) ** 2 for m in means) / max(1, len(means) - 1))
    return mean, spread / math.sqrt(len(means))
