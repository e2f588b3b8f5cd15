"""Decode rates from streams: rounds between chunks, outside loops, all clients decoding.

A chunk is a round: its tokens came in the time since the chunk before. Left out, for all arms
alike, are each answer's last chunk (cut by the length limit), chunks whose text touches a
repetition loop, and chunks during which fewer clients decoded than should or a prompt was read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from serving.load import Stream

from hybridspec.calibrate.loops import token_periods


@dataclass(frozen=True)
class Rounds:
    """Rounds of one run, one entry a chunk after each stream's first.

    Attributes:
        prompt: int64 [n].
        category: str [n].
        seconds: float64 [n], since the stream's chunk before.
        tokens: int64 [n].
        looping: bool [n], its text touches a repetition loop.
        last: bool [n], the last chunk of its stream.
        crowded: bool [n], all clients decoded and none waited for its first token.
    """

    prompt: np.ndarray
    category: np.ndarray
    seconds: np.ndarray
    tokens: np.ndarray
    looping: np.ndarray
    last: np.ndarray
    crowded: np.ndarray

    @property
    def counted(self) -> np.ndarray:
        """Rounds that rates are taken from."""
        return ~self.looping & ~self.last & self.crowded

    def of(self, category: str) -> np.ndarray:
        """Counted rounds of a category, or of all."""
        return self.counted if category == "all" else self.counted & (self.category == category)


def joined(parts: Sequence[Rounds]) -> Rounds:
    """Rounds of several runs behind one another."""
    return Rounds(
        **{
            field.name: np.concatenate([getattr(part, field.name) for part in parts])
            for field in dataclasses.fields(Rounds)
        }
    )


class Looping:
    """Finds characters of an answer that lie in repetition loops, by its tokens.

    Args:
        tokenizer: `tokenizer.json` of the target.
    """

    def __init__(self, tokenizer: Path) -> None:
        from tokenizers import Tokenizer

        self._tokenizer: Any = Tokenizer.from_file(str(tokenizer))
        self._known: dict[str, np.ndarray] = {}

    def ids(self, text: str) -> list[int]:
        """Tokens of a text."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of tokens."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def shows(self, token: int) -> bool:
        """Whether a token has text where special tokens are left out, as servers leave them out."""
        return bool(self._tokenizer.decode([token], skip_special_tokens=True))

    def characters(self, text: str) -> np.ndarray:
        """bool [characters], whether each lies in a loop."""
        if text not in self._known:
            marked = np.zeros(len(text), dtype=bool)
            encoded = self._tokenizer.encode(text, add_special_tokens=False)
            periods = token_periods(encoded.ids)
            for (start, stop), period in zip(encoded.offsets, periods, strict=True):
                marked[start:stop] |= period > 0
            self._known[text] = marked
        return self._known[text]


def rounds_of(streams: Sequence[Stream], looping: Looping, *, clients: int) -> Rounds:
    """The rounds of one run."""
    good = [stream for stream in streams if not stream.error and len(stream.tokens) > 1]
    reading = [(s.submitted_s, s.arrived_s[0]) for s in streams if s.arrived_s]
    decoding = [(s.arrived_s[0], s.arrived_s[-1]) for s in good]
    columns: list[tuple[Any, ...]] = []
    for stream in good:
        loop = looping.characters(stream.text)
        for index in range(1, len(stream.tokens)):
            start, stop = stream.arrived_s[index - 1], stream.arrived_s[index]
            before, after = stream.characters[index - 1], stream.characters[index]
            columns.append(
                (
                    stream.prompt,
                    stream.category,
                    stop - start,
                    stream.tokens[index] - stream.tokens[index - 1],
                    bool(loop[before : max(after, before + 1)].any()),
                    index == len(stream.tokens) - 1,
                    sum(a <= start and stop <= b for a, b in decoding) == clients
                    and not any(a < stop and start < b for a, b in reading),
                )
            )
    types = (np.int64, np.str_, np.float64, np.int64, np.bool_, np.bool_, np.bool_)
    arrays = [
        np.array([row[column] for row in columns], dtype=kind) for column, kind in enumerate(types)
    ]
    return Rounds(*arrays)


def rates(rounds: Rounds, streams: Sequence[Stream], *, clients: int) -> dict[str, dict[str, Any]]:
    """Rates by category and over all of them.

    `tokens_per_s` is of all clients: a client's rate over the counted rounds times their number.
    """
    found: dict[str, dict[str, Any]] = {}
    for category in ["all", *sorted(set(rounds.category.tolist()))]:
        rows = rounds.of(category)
        if not rows.any():
            continue
        tokens, seconds = rounds.tokens[rows], rounds.seconds[rows]
        found[category] = {
            "tokens_per_s": clients * float(tokens.sum() / seconds.sum()),
            "tokens_a_round": float(tokens.mean()),
            "ms_a_round": 1e3 * float(seconds.mean()),
            "ms_a_round_median": 1e3 * float(np.median(seconds)),
            "rounds": int(rows.sum()),
            "tokens": int(tokens.sum()),
        }
    if "all" in found:
        ended = [s.arrived_s[-1] for s in streams if s.arrived_s]
        wall = max(ended) - min(s.submitted_s for s in streams)
        everything = sum(s.tokens[-1] for s in streams if s.tokens)
        found["all"] |= {
            "wall_tokens_per_s": everything / wall,
            "loop_token_share": float(
                rounds.tokens[rounds.looping].sum() / max(rounds.tokens.sum(), 1)
            ),
            "first_token_ms_median": 1e3
            * float(np.median([s.arrived_s[0] - s.submitted_s for s in streams if s.arrived_s])),
            "failed_requests": sum(bool(s.error) for s in streams),
        }
    return found


def paired_ratio(
    ours: Rounds, theirs: Rounds, *, resamples: int = 2000, seed: int = 0
) -> tuple[float, float, float]:
    """Throughput of `ours` over `theirs` with a 95 % interval, bootstrapped over prompts."""
    numbers = np.intersect1d(ours.prompt[ours.counted], theirs.prompt[theirs.counted])
    sums = np.array(
        [
            [
                column[rounds.counted & (rounds.prompt == number)].sum()
                for rounds in (ours, theirs)
                for column in (rounds.tokens, rounds.seconds)
            ]
            for number in numbers
        ],
        dtype=np.float64,
    )
    draws = np.random.default_rng(seed).integers(0, len(numbers), (resamples, len(numbers)))
    drawn = sums[draws].sum(axis=1)

    def ratio(s: np.ndarray) -> np.ndarray:
        return (s[..., 0] / s[..., 1]) / (s[..., 2] / s[..., 3])

    low, high = np.quantile(ratio(drawn), [0.025, 0.975])
    return float(ratio(sums.sum(axis=0))), float(low), float(high)
