"""Sums of a replay by prompt, and the table of rates and intervals that they give.

A resample draws whole prompts, so sums a prompt are all it needs: memory grows with prompts, not
with rounds. Shape suffixes: P prompts, J policies (references first), S resamples.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from hybridspec.artifacts.tables import FloatArray, IntArray
from hybridspec.costmodels.rounds import RoundSet
from hybridspec.errors import UsageError

ALL_CATEGORIES = "all"
OUTSIDE, INSIDE = "outside", "inside"
_RESAMPLES_AT_ONCE = 16

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

# Sums a prompt and policy; the walk is that of `replay.resimulate`.
_QUANTITIES = ("tokens", "time_us", "length", "walk_us", "walk_rounds", "walk_unrecorded")


class _Chunk:
    """Sums of the prompts of one call, outside and inside repetition loops."""

    def __init__(self, rounds: RoundSet, policies: int) -> None:
        _, first, prompt = np.unique(rounds.prompt_index, return_index=True, return_inverse=True)
        self.category = rounds.category[first]
        self._size = first.size
        self._cell = prompt + self._size * (rounds.loop_period > 0)
        self.rounds = self._sum(np.ones(len(rounds)))
        # The text is the same for every policy that is walked to its end.
        self.text = self._sum(rounds.accepted + 1)
        shape = (policies, 2, self._size)
        self.sums = {name: np.full(shape, np.nan) for name in _QUANTITIES}

    def add(self, policy: int, **rows: IntArray | FloatArray) -> None:
        """Set the sums of one policy from values a round."""
        for name, values in rows.items():
            self.sums[name][policy] = self._sum(values)

    def add_walk(
        self, policy: int, time_us: FloatArray, rounds: IntArray, unrecorded: IntArray
    ) -> None:
        """Set the sums of one policy's walk from values a recorded round."""
        self.add(policy, walk_us=time_us, walk_rounds=rounds, walk_unrecorded=unrecorded)

    def _sum(self, values: IntArray | FloatArray) -> FloatArray:
        summed = np.bincount(self._cell, weights=values, minlength=2 * self._size)
        return summed.astype(np.float64).reshape(2, self._size)


class PromptSums:
    """What a replay keeps of the rounds it has seen.

    Args:
        names: of the policies that are reported.
        references: policies in front of them: plain decoding, stock DFlash, the oracle length.
    """

    def __init__(self, names: Sequence[str], *, references: int) -> None:
        self._names, self._references = list(names), references
        self._chunks: list[_Chunk] = []

    def start(self, rounds: RoundSet) -> _Chunk:
        """Returns the sums to fill for these rounds."""
        chunk = _Chunk(rounds, self._references + len(self._names))
        self._chunks.append(chunk)
        return chunk

    @property
    def rounds_outside_loops(self) -> int:
        """Rounds outside repetition loops so far."""
        return int(sum(chunk.rounds[0].sum() for chunk in self._chunks))

    def table(self, *, batch: int, resamples: int, seed: int, inside_loops: bool) -> pa.Table:
        """Returns a table of `REPLAY_SCHEMA`."""
        category = np.concatenate([chunk.category for chunk in self._chunks])
        rows: list[dict[str, object]] = []
        for loops, where in ((OUTSIDE, 0), (INSIDE, 1))[: 2 if inside_loops else 1]:
            rounds = np.concatenate([chunk.rounds[where] for chunk in self._chunks])
            text = np.concatenate([chunk.text[where] for chunk in self._chunks])
            sums = {
                name: np.concatenate([chunk.sums[name][:, where] for chunk in self._chunks], axis=1)
                for name in _QUANTITIES
            }
            present = rounds > 0
            for name in (ALL_CATEGORIES, *sorted(set(category[present].tolist()))):
                mask = present & ((category == name) | (name == ALL_CATEGORIES))
                if mask.any():
                    part = {key: values[:, mask] for key, values in sums.items()}
                    facts: dict[str, object] = {"category": name, "loops": loops, "batch": batch}
                    rows += self._rows(part, rounds[mask], text[mask], facts, resamples, seed)
        return pa.Table.from_pylist(rows, schema=REPLAY_SCHEMA)

    def gain(
        self, policy: str, over: str, *, resamples: int, seed: int
    ) -> tuple[float, float, float]:
        """Gain in tokens/s of one policy over another with its interval; see `Replay.gain`."""
        for name in (policy, over):
            if name not in self._names:
                raise UsageError(f"policy {name!r} was not replayed: it has {self._names}")
        rows = [self._references + self._names.index(name) for name in (policy, over)]
        tokens, time_us = (
            np.concatenate([chunk.sums[key][rows, 0] for chunk in self._chunks], axis=1)
            for key in ("tokens", "time_us")
        )
        present = np.concatenate([chunk.rounds[0] for chunk in self._chunks]) > 0
        tokens, time_us = tokens[:, present], time_us[:, present]
        rate = tokens.sum(axis=1) / time_us.sum(axis=1)
        rate_SJ = _resampled_rates(tokens, time_us, resamples=resamples, seed=seed)
        low, high = _interval(rate_SJ[:, 0] / rate_SJ[:, 1] - 1.0)
        return float(rate[0] / rate[1] - 1.0), low, high

    def _rows(
        self,
        sums: dict[str, FloatArray],
        rounds_P: FloatArray,
        text_P: FloatArray,
        facts: dict[str, object],
        resamples: int,
        seed: int,
    ) -> list[dict[str, object]]:
        tokens, time_us = sums["tokens"], sums["time_us"]
        rate = tokens.sum(axis=1) / time_us.sum(axis=1) * 1e6
        rate_SJ = _resampled_rates(tokens, time_us, resamples=resamples, seed=seed)
        count = rounds_P.sum()
        rows = []
        for index, name in enumerate(self._names, start=self._references):
            walk_us = float(sums["walk_us"][index].sum())
            walked = np.isfinite(walk_us)
            share = 1.0 - sums["walk_unrecorded"][index].sum() / sums["walk_rounds"][index].sum()
            low, high = _interval(rate_SJ[:, index])
            ar_low, ar_high = _interval(rate_SJ[:, index] / rate_SJ[:, 0])
            oracle_low, oracle_high = _interval(rate_SJ[:, index] / rate_SJ[:, 2])
            row = {
                "policy": name,
                "rounds": int(count),
                "prompts": rounds_P.size,
                "tokens_per_s": float(rate[index]),
                "tokens_per_s_low": low,
                "tokens_per_s_high": high,
                "tokens_a_round": float(tokens[index].sum() / count),
                "mean_length": float(sums["length"][index].sum() / count),
                "over_ar": float(rate[index] / rate[0]),
                "over_ar_low": ar_low,
                "over_ar_high": ar_high,
                "over_stock": float(rate[index] / rate[1]),
                "of_oracle": float(rate[index] / rate[2]),
                "of_oracle_low": oracle_low,
                "of_oracle_high": oracle_high,
                "regret_tokens_per_s": float(rate[2] - rate[index]),
                "resimulated_tokens_per_s": float(text_P.sum() / walk_us * 1e6) if walked else None,
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
