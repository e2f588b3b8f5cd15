"""How much is asked at each client count: which prompts, and how long each answer is.

Answers of one length end in the same step where every round emits one token, so plain decoding
reads its next prompts together, and arms that draft read them one by one. With lengths that differ
from prompt to prompt, the same for all arms, every arm reads them as clients come free.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serving.load import Prompt

_GOLDEN = 0.5 * (5**0.5 - 1)
SHORTEST, LONGEST = 2 / 3, 4 / 3
"""Of the mean length of answers."""


def spread_length(number: int, tokens: int) -> int:
    """Length of the answer to prompt `number`: between 2/3 and 4/3 of `tokens`.

    Multiples of the golden ratio fill an interval evenly, so any run of numbers has about `tokens`
    in the mean.
    """
    return round(tokens * (SHORTEST + (LONGEST - SHORTEST) * (number * _GOLDEN % 1.0)))


@dataclass(frozen=True)
class Size:
    """What is asked at one client count.

    Attributes:
        per_category: prompts of each category.
        tokens: of each answer, in the mean.
        spread: whether lengths of answers differ from prompt to prompt.
    """

    clients: int
    per_category: int
    tokens: int
    spread: bool

    def __post_init__(self) -> None:
        if min(self.clients, self.per_category, self.tokens) < 1:
            raise SystemExit(f"{self} asks for nothing: all counts are at least 1")

    def prompts(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """The first of each category, in the order given."""
        taken: dict[str, int] = {}
        found = []
        for prompt in prompts:
            taken[prompt.category] = taken.get(prompt.category, 0) + 1
            if taken[prompt.category] <= self.per_category:
                found.append(prompt)
        return found

    def lengths(self, prompts: Sequence[Prompt]) -> dict[int, int] | None:
        """Tokens of each answer by prompt number, None where all are alike."""
        if not self.spread:
            return None
        return {prompt.number: spread_length(prompt.number, self.tokens) for prompt in prompts}

    def described(self, prompts: Sequence[Prompt]) -> dict[str, Any]:
        """For the recording."""
        chosen = self.prompts(prompts)
        lengths = list((self.lengths(chosen) or {}).values()) or [self.tokens]
        return {
            "prompts": len(chosen),
            "tokens_mean": self.tokens,
            "tokens_shortest": min(lengths),
            "tokens_longest": max(lengths),
        }


def read_prompts(path: Path, per_category: int) -> list[Prompt]:
    """Held-out prompts, the categories in turn."""
    by: dict[str, list[Prompt]] = {}
    for number, entry in enumerate(json.loads(path.read_text(encoding="utf-8"))):
        if entry["split"] == "test":
            by.setdefault(entry["cat"], []).append(Prompt(number, entry["cat"], entry["ids"]))
    return [
        prompts[turn]
        for turn in range(per_category)
        for prompts in by.values()
        if turn < len(prompts)
    ]


def sizes_of(
    clients: Sequence[int], *, per_category: int, tokens: int, at: str, spread: bool
) -> dict[int, Size]:
    """Sizes by client count.

    Args:
        at: exceptions as CLIENTS:PER_CATEGORY:TOKENS, separated by commas; empty for none.
        spread: with more than one client; one client's prompts are read one by one anyway.

    Raises:
        SystemExit: `at` is not of that form.
    """
    exceptions: dict[int, tuple[int, int]] = {}
    for entry in filter(None, at.split(",")):
        parts = entry.split(":")
        if len(parts) != 3 or not all(part.isdigit() for part in parts):
            raise SystemExit(f"--at {entry!r}: write CLIENTS:PER_CATEGORY:TOKENS, like 8:3:192")
        exceptions[int(parts[0])] = (int(parts[1]), int(parts[2]))
    return {
        count: Size(
            count, *exceptions.get(count, (per_category, tokens)), spread=spread and count > 1
        )
        for count in clients
    }
