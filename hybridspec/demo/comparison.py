"""Comparing ways to decode the same prompts: speed outside repetition loops, and equal outputs."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hybridspec.calibrate.loops import token_periods


@dataclass(frozen=True)
class Decoded:
    """One prompt decoded one way.

    Attributes:
        token_ids: generated tokens, the one that prefill gives first.
        round_tokens, round_us, round_lengths: tokens emitted by each round (a last round may emit
            beyond the end of the output), its wall time and its verified rows (0: no draft pass).
        fallbacks: reason of each round whose length was not the policy's own choice.
    """

    prompt_id: str
    category: str
    token_ids: tuple[int, ...]
    round_tokens: tuple[int, ...]
    round_us: tuple[float, ...]
    round_lengths: tuple[int, ...]
    fallbacks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Tally:
    """Rounds of one prompt or many, outside loops."""

    tokens: int = 0
    time_us: float = 0.0
    rounds: int = 0
    rows: int = 0

    def __add__(self, other: Tally) -> Tally:
        return Tally(
            self.tokens + other.tokens,
            self.time_us + other.time_us,
            self.rounds + other.rounds,
            self.rows + other.rows,
        )

    @property
    def tokens_per_s(self) -> float:
        """Decoded tokens a second."""
        return 1e6 * self.tokens / self.time_us

    @property
    def tokens_per_round(self) -> float:
        """Emitted tokens a round."""
        return self.tokens / self.rounds

    @property
    def mean_verify_length(self) -> float:
        """Verified rows a round; a round without a draft pass counts one."""
        return self.rows / self.rounds

    @property
    def round_ms(self) -> float:
        """Mean wall time of a round, milliseconds."""
        return self.time_us / self.rounds / 1e3


def loop_start(token_ids: Sequence[int]) -> int:
    """Index of the first token inside a repetition loop, the length where there is none."""
    inside = token_periods(token_ids).nonzero()[0]
    return int(inside[0]) if inside.size else len(token_ids)


def tally(decoded: Sequence[Decoded], *, stop_at: int) -> Tally:
    """Rounds that end before token `stop_at`, timed by the median of the repeats.

    Args:
        decoded: repeats of the same prompt and way, which took the same rounds.
        stop_at: tokens from here on are in a loop.
    """
    first = decoded[0]
    if any(d.round_tokens != first.round_tokens for d in decoded):
        raise ValueError(f"repeats of prompt {first.prompt_id} took different rounds")
    position = 1
    total = Tally()
    for i, tokens in enumerate(first.round_tokens):
        position += tokens
        if position > stop_at and stop_at < len(first.token_ids):
            break
        total += Tally(
            tokens,
            statistics.median(d.round_us[i] for d in decoded),
            1,
            max(first.round_lengths[i], 1),
        )
    return total


@dataclass(frozen=True)
class Comparison:
    """All ways side by side.

    Attributes:
        by_category: way -> category -> tally outside loops.
        loop_prompts: prompts whose output enters a loop.
        different: (way, prompt id, index of the first different token) where outputs differ.
    """

    by_category: Mapping[str, Mapping[str, Tally]]
    loop_prompts: int
    different: tuple[tuple[str, str, int], ...]

    def total(self, way: str) -> Tally:
        """Tally of one way over all categories."""
        total = Tally()
        for part in self.by_category[way].values():
            total += part
        return total

    def over(self, way: str, base: str) -> float:
        """Ratio of tokens/s."""
        return self.total(way).tokens_per_s / self.total(base).tokens_per_s

    def category_over(self, way: str, base: str) -> dict[str, float]:
        """Ratio of tokens/s in each category that has rounds outside loops."""
        return {
            category: part.tokens_per_s / self.by_category[base][category].tokens_per_s
            for category, part in self.by_category[way].items()
            if part.rounds and self.by_category[base][category].rounds
        }


def compare(runs: Mapping[str, Sequence[Sequence[Decoded]]], *, reference: str) -> Comparison:
    """Tally every way and check its outputs against the reference's.

    Args:
        runs: way -> prompts in the same order -> repeats.
        reference: the way whose text is the truth (plain decoding); its loops end the tally of a
            prompt for every way, so all ways are judged on the same stretch of text.
    """
    truth = {repeats[0].prompt_id: repeats[0].token_ids for repeats in runs[reference]}
    stops = {prompt: loop_start(tokens) for prompt, tokens in truth.items()}
    tallies: dict[str, dict[str, Tally]] = {}
    different = []
    for way, prompts in runs.items():
        categories: dict[str, Tally] = {}
        for repeats in prompts:
            prompt, category = repeats[0].prompt_id, repeats[0].category
            part = tally(repeats, stop_at=stops[prompt])
            categories[category] = categories.get(category, Tally()) + part
            for decoded in repeats:
                index = first_difference(decoded.token_ids, truth[prompt])
                if index is not None:
                    different.append((way, prompt, index))
                    break
        tallies[way] = categories
    loops = sum(stops[prompt] < len(tokens) for prompt, tokens in truth.items())
    return Comparison(tallies, loops, tuple(different))


def first_difference(tokens: Sequence[int], truth: Sequence[int]) -> int | None:
    """Index of the first token that differs, None where the outputs are the same."""
    for i, (have, want) in enumerate(zip(tokens, truth, strict=False)):
        if have != want:
            return i
    return None if len(tokens) == len(truth) else min(len(tokens), len(truth))
