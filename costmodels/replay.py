"""Replay of recorded rounds under length policies and a cost table.

What it can and cannot say: every recorded round was verified in full, so the tokens that a shorter
length would have emitted in *that* round are known exactly. The rounds that would have followed are
not: a round that is cut short continues from an anchor that was never recorded, and the replay
takes the next recorded round instead. As a cut leaves the rest of an easy run to the next round,
the replay is, if anything, hard on short lengths. Treat results as predictions to compare policies
with, not as measurements.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from hybridspec.artifacts.tables import BLOCK_SIZE, FloatArray, IntArray, StepCostTable
from hybridspec.costmodels.lookup import latency_by_round
from hybridspec.costmodels.policies import FixedLength, LengthPolicy, OracleLength
from hybridspec.costmodels.rounds import RoundSet, realised_emitted
from hybridspec.errors import NotEnoughData, UsageError

ALL_CATEGORIES = "all"

REPLAY_SCHEMA = pa.schema(
    [
        pa.field("policy", pa.string(), nullable=False),
        pa.field("category", pa.string(), nullable=False),
        pa.field("batch", pa.int64(), nullable=False),
        pa.field("rounds", pa.int64(), nullable=False),
        pa.field("prompts", pa.int64(), nullable=False),
        pa.field("tokens_per_s", pa.float64(), nullable=False, metadata={"unit": "1/s a request"}),
        pa.field("tokens_per_s_low", pa.float64(), nullable=False),
        pa.field("tokens_per_s_high", pa.float64(), nullable=False),
        pa.field("tokens_a_round", pa.float64(), nullable=False),
        pa.field("mean_length", pa.float64(), nullable=False),
        pa.field("over_ar", pa.float64(), nullable=False),
        pa.field("over_stock", pa.float64(), nullable=False),
        pa.field("of_oracle", pa.float64(), nullable=False),
    ],
    metadata={"schema_id": "hybridspec.replay/1", "interval": "95 %, resampled by prompt"},
)


def round_costs(
    rounds: RoundSet,
    table: StepCostTable,
    *,
    batch: int = 1,
    mean_distinct_L: FloatArray | None = None,
) -> FloatArray:
    """Returns what each round would have cost at every length, float64 [n, 17] in us.

    Rounds with recorded routes are priced by their own distinct experts: the table's latency plus
    `expert_slope_us * (distinct - mean)`. Without routes it is the table's latency.

    Args:
        rounds: recorded rounds.
        table: the machine's cost table.
        batch: requests decoded together. Routes of one request say nothing about the union of a
            batch, so above 1 they are not used.
        mean_distinct_L: float64 [16], mean distinct experts over all layers at which the table was
            measured; by default the mean of `rounds`.
    """
    latency = latency_by_round(table, batch=batch, context_tokens=rounds.context_tokens)
    distinct = rounds.distinct_total_NL
    if distinct is None or batch > 1 or table.expert_slope_us == 0.0:
        return latency
    mean = distinct.mean(axis=0) if mean_distinct_L is None else mean_distinct_L
    latency[:, 1:] += table.expert_slope_us * (distinct - mean)
    if not np.all(latency > 0):
        raise UsageError(
            f"routes priced at {table.expert_slope_us:g} us an expert make a round cost "
            f"{float(latency.min()):g} us; costs must be above 0: the routes were recorded on "
            "another target than the table was measured with"
        )
    return latency


def replay(
    rounds: RoundSet,
    policies: Sequence[LengthPolicy],
    table: StepCostTable,
    *,
    batch: int = 1,
    cost_NL: FloatArray | None = None,
    resamples: int = 400,
    seed: int = 0,
) -> pa.Table:
    """Returns predicted throughput of each policy, over all rounds and by category.

    Rounds inside repetition loops are left out. Policies choose on the table's latency; rounds are
    charged `cost_NL`. Rates are tokens a second and request; ratios are against plain decoding,
    stock DFlash (16 rows) and the oracle length on the same rounds.

    Args:
        rounds: rounds of the split to report on, not the one that anything was fitted on.
        policies: rules to compare; names must differ.
        table: what the policies look latencies up in.
        batch: requests decoded together.
        cost_NL: float64 [n, 17] in us for the given rounds, default `round_costs`.
        resamples: bootstrap resamples of whole prompts for the interval.
        seed: of the resampling.

    Returns:
        A table of `REPLAY_SCHEMA`; category `all` first.
    """
    names = [policy.name for policy in policies]
    if len(set(names)) != len(names):
        raise UsageError(f"policies {names} must have different names to be told apart")
    if cost_NL is None:
        cost_NL = round_costs(rounds, table, batch=batch)
    outside = rounds.loop_period == 0
    rounds, cost_NL = rounds.select(outside), cost_NL[outside]
    if len(rounds) == 0:
        raise NotEnoughData("no round outside repetition loops to replay: record more prompts")
    latency_NL = latency_by_round(table, batch=batch, context_tokens=rounds.context_tokens)
    references: list[LengthPolicy] = [FixedLength(0), FixedLength(BLOCK_SIZE), OracleLength()]
    chosen = [policy.lengths(rounds, latency_NL) for policy in (*references, *policies)]

    rows: list[dict[str, object]] = []
    for category in (ALL_CATEGORIES, *sorted(set(rounds.category.tolist()))):
        mask = (
            np.ones(len(rounds), dtype=np.bool_)
            if category == ALL_CATEGORIES
            else rounds.category == category
        )
        part, cost = rounds.select(mask), cost_NL[mask]
        plain, stock, oracle = (_rate(part, lengths[mask], cost) for lengths in chosen[:3])
        weights = _resample_weights(part.prompt_index, resamples=resamples, seed=seed)
        for name, lengths in zip(names, chosen[3:], strict=True):
            length = lengths[mask]
            rate = _rate(part, length, cost)
            low, high = _interval(part, length, cost, weights)
            rows.append(
                {
                    "policy": name,
                    "category": category,
                    "batch": batch,
                    "rounds": len(part),
                    "prompts": weights.shape[1],
                    "tokens_per_s": rate,
                    "tokens_per_s_low": low,
                    "tokens_per_s_high": high,
                    "tokens_a_round": float(realised_emitted(part.accepted, length).mean()),
                    "mean_length": float(length.mean()),
                    "over_ar": rate / plain,
                    "over_stock": rate / stock,
                    "of_oracle": rate / oracle,
                }
            )
    return pa.Table.from_pylist(rows, schema=REPLAY_SCHEMA)


def _tokens_and_us(
    rounds: RoundSet, lengths: IntArray, cost_NL: FloatArray
) -> tuple[FloatArray, FloatArray]:
    tokens = realised_emitted(rounds.accepted, lengths).astype(np.float64)
    return tokens, cost_NL[np.arange(len(rounds)), lengths]


def _rate(rounds: RoundSet, lengths: IntArray, cost_NL: FloatArray) -> float:
    tokens, time_us = _tokens_and_us(rounds, lengths, cost_NL)
    return float(tokens.sum() / time_us.sum() * 1e6)


def _resample_weights(prompt_index: IntArray, *, resamples: int, seed: int) -> FloatArray:
    """Returns how often each prompt is drawn in each resample, float64 [resamples, prompts]."""
    prompts = np.unique(prompt_index).size
    rng = np.random.default_rng(seed)
    even = np.full(prompts, 1.0 / prompts)
    return rng.multinomial(prompts, even, size=resamples).astype(np.float64)


def _interval(
    rounds: RoundSet, lengths: IntArray, cost_NL: FloatArray, weights: FloatArray
) -> tuple[float, float]:
    """Returns the 2.5 and 97.5 % quantiles of the rate over resampled prompts."""
    _, prompt = np.unique(rounds.prompt_index, return_inverse=True)
    tokens, time_us = _tokens_and_us(rounds, lengths, cost_NL)
    tokens_P = np.bincount(prompt, weights=tokens)
    time_P = np.bincount(prompt, weights=time_us)
    rates = (weights @ tokens_P) / (weights @ time_P) * 1e6
    low, high = np.quantile(rates, [0.025, 0.975])
    return float(low), float(high)
