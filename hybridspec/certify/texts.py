"""Texts decoded one way or another: where they differ, and where they go round in circles."""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from hybridspec.calibrate.loops import token_periods

PLAIN, AGAIN, HYBRID = "plain", "plain-again", "hybridspec"
QUESTIONS = "-questions"
# Runs of word characters in pieces of four, so that a loop inside one long word is seen too.
_PIECES = re.compile(r"\w{1,4}|[^\w\s]|\n")


@dataclass(frozen=True)
class Task:
    """A prompt to decode.

    Attributes:
        token_ids: of the prompt; empty where only a server will know them.
    """

    prompt_id: str
    category: str
    text: str
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Text:
    """What one arm generated for one prompt.

    Attributes:
        token_ids: generated; empty where a server does not tell them.
        num_tokens: generated tokens, as counted by the engine.
        decode_us: time of the rounds that the request took part in; over HTTP the whole answer.
        top: over HTTP, for every generated token its text and the best tokens' log-probabilities.
    """

    arm: str
    prompt_id: str
    category: str
    text: str
    token_ids: tuple[int, ...]
    num_tokens: int
    decode_us: float
    top: tuple[tuple[str, dict[str, float]], ...] = ()

    @property
    def loop_at(self) -> int:
        """First token (or piece of text) inside a repetition loop, -1 where there is none."""
        periods = token_periods(self.token_ids or pieces(self.text))
        inside = periods.nonzero()[0]
        return int(inside[0]) if inside.size else -1


@dataclass(frozen=True)
class Difference:
    """The first difference of a text from plain decoding.

    Attributes:
        position: generated tokens before it.
        plain, other: what the two say there, for people.
        gap_logits: how far below plain decoding's best logit the worse of both tokens lies; None
            where it is not known, infinite where one text ends and the other goes on.
        bound_logits: rounding of the data type there.
    """

    prompt_id: str
    position: int
    plain: str
    other: str
    gap_logits: float | None
    bound_logits: float


def pieces(text: str) -> list[int]:
    """Pieces of a text as numbers, for texts whose tokens are not known."""
    return [zlib.crc32(piece.encode("utf-8", "replace")) for piece in _PIECES.findall(text)]


def first_difference(one: Sequence[object], two: Sequence[object]) -> int | None:
    """Index of the first place where two sequences differ, None where they are the same."""
    for index, (a, b) in enumerate(zip(one, two, strict=False)):
        if a != b:
            return index
    return None if len(one) == len(two) else min(len(one), len(two))


@dataclass(frozen=True)
class Speed:
    """Tokens a second of two arms over prompts without a repetition loop in either.

    Attributes:
        looping: prompts left out. ratio: second over first, None where no prompt is left.
    """

    looping: int
    compared: int
    ratio: float | None


def speed(first: Sequence[Text], second: Sequence[Text]) -> Speed:
    """Compare two arms over the same prompts; loops are counted, not timed."""
    kept = [(a, b) for a, b in zip(first, second, strict=True) if max(a.loop_at, b.loop_at) < 0]
    ratio = None
    times = [sum(text.decode_us for text in arm) for arm in zip(*kept, strict=True)]
    if kept and min(times) > 0.0:
        tokens = [sum(text.num_tokens for text in arm) for arm in zip(*kept, strict=True)]
        ratio = (tokens[1] / times[1]) / (tokens[0] / times[0]) if tokens[0] else None
    return Speed(len(first) - len(kept), len(kept), ratio)
