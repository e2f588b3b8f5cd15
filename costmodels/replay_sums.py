"""Sums of a replay by prompt, and the table of rates and intervals that they give.

A resample draws whole prompts, so sums a prompt are all it needs: memory grows with prompts, not
with rounds. Shape suffixes: P prompts, C cells, G groups, J policies (references first), S
resamples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from hybridspec.artifacts.tables import FloatArray, IntArray
from hybridspec.costmodels.rounds import RoundSet
from hybridspec.errors import UsageError

ALL_CATEGORIES = "all"
OUTSIDE, INSIDE = "outside", "inside"
_RESAMPLES_AT_ONCE = 8

REPLAY_SCHEMA = pa.schema(
    [
        pa.field("policy", pa.string(), nullable=False),
        pa.field("category", pa.string(), nullable=False),
        pa.field("loops", pa.string(), nullable=False),
        pa.field("batch", pa.int64(), nullable=False),
        pa.field("rounds", pa.int64(), nullable=False),
        pa.field("prompts", pa.int64(), nullable=False),
        pa.field("tokens_per_s", pa.float64(), nullable=False, metadata={"unit": "1/s a request"}),
        pa.field("tokens_per_s_low", pa.float64(), nullable=False),
        pa.field("tokens_per_s_high", pa.float64(), nullable=False),
        pa.field("tokens_a_round", pa.float64(), nullable=False),
        pa.field("mean_length", pa.float64(), nullable=False),
        pa.field("over_ar", pa.float64(), nullable=False),
        pa.field("over_ar_low", pa.float64(), nullable=False),
        pa.field("over_ar_high", pa.float64(), nullable=False),
        pa.field("over_stock", pa.float64(), nullable=False),
        pa.field("of_oracle", pa.float64(), nullable=False),
        pa.field("of_oracle_low", pa.float64(), nullable=False),
        pa.field("of_oracle_high", pa.float64(), nullable=False),
        pa.field("regret_tokens_per_s", pa.float64(), nullable=False),
        pa.field("resimulated_tokens_per_s", pa.float64()),
        pa.field("recorded_anchor_share", pa.float64()),
    ],
    metadata={"schema_id": "hybridspec.replay/2", "interval": "95 %, resampled by prompt"},
)

# Sums of which only the total of a category is wanted; a resample needs tokens and time.
_TOTALS = ("length", "walk_us", "walk_rounds", "walk_unrecorded")


class Chunk:
    """Sums of the prompts of one call; a cell is a prompt outside, or inside repetition loops."""

    def __init__(self, rounds: RoundSet, policies: int) -> None:
        inside = (rounds.loop_period > 0).astype(np.int64)
        _, first, self._cell = np.unique(
            2 * rounds.prompt_index + inside, return_index=True, return_inverse=True
        )
        self.inside_C = inside[first] > 0
        names, code = np.unique(rounds.category, return_inverse=True)
        self.category_C = code[first]
        self.categories: list[str] = names.tolist()
        # Groups are categories outside loops, then the same inside.
        self._group = code + len(names) * inside
        self._groups = 2 * len(names)
        self.rounds_C = np.bincount(self._cell).astype(np.int32)
        # The text is the same for every policy that is walked to its end.
        self.text_G = self._by_group(rounds.accepted + 1)
        self.tokens_JC = np.zeros((policies, first.size), dtype=np.int32)
        self.time_us_JC = np.zeros((policies, first.size))
        self.totals = {name: np.full((policies, self._groups), np.nan) for name in _TOTALS}

    def add(self, policy: int, *, tokens: IntArray, time_us: FloatArray, length: IntArray) -> None:
        """Set the sums of one policy from values a round."""
        cells = self.rounds_C.size
        self.tokens_JC[policy] = np.bincount(self._cell, weights=tokens, minlength=cells)
        self.time_us_JC[policy] = np.bincount(self._cell, weights=time_us, minlength=cells)
        self.totals["length"][policy] = self._by_group(length)

    def add_walk(
        self, policy: int, time_us: FloatArray, rounds: IntArray, unrecorded: IntArray
    ) -> None:
        """Set the totals of one policy's walk from values a recorded round."""
        for name, values in (
            ("walk_us", time_us),
            ("walk_rounds", rounds),
            ("walk_unrecorded", unrecorded),
        ):
            self.totals[name][policy] = self._by_group(values)

    def finish(self) -> None:
        """Drop what only filling needs: one number a round."""
        self._cell = self._group = np.empty(0, dtype=np.int64)

    def group(self, category: str, *, inside: bool) -> int | None:
        """Index of a group in the totals, None where the category does not occur."""
        if category not in self.categories:
            return None
        return self.categories.index(category) + inside * len(self.categories)

    def _by_group(self, values: IntArray | FloatArray) -> FloatArray:
        summed = np.bincount(self._group, weights=values, minlength=self._groups)
        return summed.astype(np.float64)


@dataclass(frozen=True)
class _Part:
    """All prompts of one category, outside or inside repetition loops."""

    rounds: int
    tokens_JP: FloatArray
    time_us_JP: FloatArray
    text: float
    totals: dict[str, FloatArray]


class PromptSums:
    """What a replay keeps of the rounds it has seen.

    Args:
        names: of the policies that are reported.
        references: policies in front of them: plain decoding, stock DFlash, the oracle length.
    """

    def __init__(self, names: Sequence[str], *, references: int) -> None:
        self._names, self._references = list(names), references
        self._chunks: list[Chunk] = []

    def start(self, rounds: RoundSet) -> Chunk:
        """Returns the sums to fill for these rounds."""
        chunk = Chunk(rounds, self._references + len(self._names))
        self._chunks.append(chunk)
        return chunk

    @property
    def rounds_outside_loops(self) -> int:
        """Rounds outside repetition loops so far."""
        return int(sum(chunk.rounds_C[~chunk.inside_C].sum() for chunk in self._chunks))

    def table(self, *, batch: int, resamples: int, seed: int, inside_loops: bool) -> pa.Table:
        """Returns a table of `REPLAY_SCHEMA`."""
        # Prompts without a category carry the word for all of them: no row of their own.
        named = {name for chunk in self._chunks for name in chunk.categories} - {ALL_CATEGORIES}
        categories = sorted(named)
        rows: list[dict[str, object]] = []
        for loops in (OUTSIDE, INSIDE)[: 2 if inside_loops else 1]:
            for name in (ALL_CATEGORIES, *categories):
                part = self._part(name, inside=loops == INSIDE)
                if part.rounds:
                    facts: dict[str, object] = {"category": name, "loops": loops, "batch": batch}
                    rows += self._rows(part, facts, resamples, seed)
        return pa.Table.from_pylist(rows, schema=REPLAY_SCHEMA)

    def gain(
        self, policy: str, over: str, *, resamples: int, seed: int
    ) -> tuple[float, float, float]:
        """Gain in tokens/s of one policy over another with its interval; see `Replay.gain`."""
        for name in (policy, over):
            if name not in self._names:
                raise UsageError(f"policy {name!r} was not replayed: it has {self._names}")
        rows = [self._references + self._names.index(name) for name in (policy, over)]
        part = self._part(ALL_CATEGORIES, inside=False)
        tokens, time_us = part.tokens_JP[rows], part.time_us_JP[rows]
        rate = tokens.sum(axis=1) / time_us.sum(axis=1)
        rate_SJ = _resampled_rates(tokens, time_us, resamples=resamples, seed=seed)
        low, high = _interval(rate_SJ[:, 0] / rate_SJ[:, 1] - 1.0)
        return float(rate[0] / rate[1] - 1.0), low, high

    def _part(self, category: str, *, inside: bool) -> _Part:
        rounds, text = 0, 0.0
        tokens, time_us = [], []
        policies = self._references + len(self._names)
        totals = {name: np.zeros(policies) for name in _TOTALS}
        for chunk in self._chunks:
            cells = chunk.inside_C == inside
            names = chunk.categories if category == ALL_CATEGORIES else [category]
            groups = [g for n in names if (g := chunk.group(n, inside=inside)) is not None]
            if category != ALL_CATEGORIES:
                code = chunk.categories.index(category) if groups else -1
                cells = cells & (chunk.category_C == code)
            rounds += int(chunk.rounds_C[cells].sum())
            text += float(chunk.text_G[groups].sum())
            tokens.append(chunk.tokens_JC[:, cells])
            time_us.append(chunk.time_us_JC[:, cells])
            for name in _TOTALS:
                totals[name] += chunk.totals[name][:, groups].sum(axis=1)
        tokens_JP = np.concatenate(tokens, axis=1).astype(np.float64)
        return _Part(rounds, tokens_JP, np.concatenate(time_us, axis=1), text, totals)

    def _rows(
        self, part: _Part, facts: dict[str, object], resamples: int, seed: int
    ) -> list[dict[str, object]]:
        tokens, time_us, totals = part.tokens_JP, part.time_us_JP, part.totals
        rate = tokens.sum(axis=1) / time_us.sum(axis=1) * 1e6
        rate_SJ = _resampled_rates(tokens, time_us, resamples=resamples, seed=seed)
        rows = []
        for index, name in enumerate(self._names, start=self._references):
            walk_us = float(totals["walk_us"][index])
            walked = np.isfinite(walk_us)
            share = 1.0 - totals["walk_unrecorded"][index] / totals["walk_rounds"][index]
            low, high = _interval(rate_SJ[:, index])
            ar_low, ar_high = _interval(rate_SJ[:, index] / rate_SJ[:, 0])
            oracle_low, oracle_high = _interval(rate_SJ[:, index] / rate_SJ[:, 2])
            row = {
                "policy": name,
                "rounds": part.rounds,
                "prompts": tokens.shape[1],
                "tokens_per_s": float(rate[index]),
                "tokens_per_s_low": low,
                "tokens_per_s_high": high,
                "tokens_a_round": float(tokens[index].sum() / part.rounds),
                "mean_length": float(totals["length"][index] / part.rounds),
                "over_ar": float(rate[index] / rate[0]),
                "over_ar_low": ar_low,
                "over_ar_high": ar_high,
                "over_stock": float(rate[index] / rate[1]),
                "of_oracle": float(rate[index] / rate[2]),
                "of_oracle_low": oracle_low,
                "of_oracle_high": oracle_high,
                "regret_tokens_per_s": float(rate[2] - rate[index]),
                "resimulated_tokens_per_s": part.text / walk_us * 1e6 if walked else None,
                "recorded_anchor_share": float(share) if walked else None,
            }
            rows.append(facts | row)
        return rows


def _resampled_rates(
    tokens_JP: FloatArray, time_JP: FloatArray, *, resamples: int, seed: int
) -> FloatArray:
    """Returns tokens a second in each resample of whole prompts, float64 [S, J]."""
    prompts = tokens_JP.shape[1]
    rng = np.random.default_rng(seed)
    even = np.full(prompts, 1.0 / prompts)
    rates = []
    for start in range(0, resamples, _RESAMPLES_AT_ONCE):
        size = min(_RESAMPLES_AT_ONCE, resamples - start)
        weights = rng.multinomial(prompts, even, size=size).astype(np.float64)
        rates.append((weights @ tokens_JP.T) / (weights @ time_JP.T) * 1e6)
    return np.concatenate(rates)


def _interval(values: FloatArray) -> tuple[float, float]:
    low, high = np.quantile(values, [0.025, 0.975])
    return float(low), float(high)
