"""Replay of recorded rounds under length policies and a cost table.

Every recorded round was verified in full, so the tokens that a shorter length would have emitted in
*that* round are known exactly. The rounds that would have followed are not: a round that is cut
short goes on from an anchor that was never recorded. Two readings are given:

* `tokens_per_s`: the replay takes the next recorded round instead. A cut leaves the rest of an easy
  run to the next round, so this is, if anything, hard on short lengths in tokens a round; but the
  rounds keep the mix of anchors that full verification visits.
* `resimulated_tokens_per_s`: the text is walked through to its end. Where a round is cut, the next
  one starts inside the old block, whose remaining drafts stand in for the draft pass that was never
  recorded (`RoundSet.after_cut`): every policy then emits the same recorded text. Plain decoding,
  stock DFlash and the oracle length never leave what was recorded and are exact;
  `recorded_anchor_share` says how much of a policy's rounds are. Policies that remember earlier
  rounds are not walked, as their memory of rounds that never ran would be invented.

Treat both as predictions to compare policies with, not as measurements.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from hybridspec.artifacts.tables import BLOCK_SIZE, FloatArray, IntArray, StepCostTable
from hybridspec.costmodels.lookup import latency_by_round
from hybridspec.costmodels.policies import FixedLength, LengthPolicy, OracleLength
from hybridspec.costmodels.replay_sums import ALL_CATEGORIES, REPLAY_SCHEMA, PromptSums
from hybridspec.costmodels.rounds import RoundSet, realised_emitted
from hybridspec.errors import NotEnoughData, UsageError

__all__ = ["ALL_CATEGORIES", "REPLAY_SCHEMA", "Replay", "replay", "resimulate", "round_costs"]


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


def keeps_history(policy: LengthPolicy) -> bool:
    """Whether a policy's choice depends on rounds before."""
    return bool(getattr(policy, "keeps_history", False))


class Replay:
    """A replay that takes rounds piece by piece and keeps sums a prompt only.

    Args:
        policies: rules to compare; names must differ.
        table: what the policies look latencies up in, and what rounds without routes cost.
        batch: requests decoded together.
        mean_distinct_L: as in `round_costs`; None takes the mean of each piece, so give it whenever
            there are several.
    """

    def __init__(
        self,
        policies: Sequence[LengthPolicy],
        table: StepCostTable,
        *,
        batch: int = 1,
        mean_distinct_L: FloatArray | None = None,
    ) -> None:
        names = [policy.name for policy in policies]
        if len(set(names)) != len(names):
            raise UsageError(f"policies {names} must have different names to be told apart")
        self._table, self._batch, self._mean_distinct_L = table, batch, mean_distinct_L
        references: list[LengthPolicy] = [FixedLength(0), FixedLength(BLOCK_SIZE), OracleLength()]
        self._policies = [*references, *policies]
        self._sums = PromptSums(names, references=len(references))

    def add(self, rounds: RoundSet, *, cost_NL: FloatArray | None = None) -> None:
        """Count rounds; all rounds of a prompt must come in one call.

        Args:
            rounds: whole prompts, with numbers that no other call uses.
            cost_NL: float64 [n, 17] in us, default `round_costs`.
        """
        if len(rounds) == 0:
            return
        latency_NL = latency_by_round(
            self._table, batch=self._batch, context_tokens=rounds.context_tokens
        )
        if cost_NL is None:
            cost_NL = round_costs(
                rounds, self._table, batch=self._batch, mean_distinct_L=self._mean_distinct_L
            )
        prompts = self._sums.start(rounds)
        row = np.arange(len(rounds))
        for index, policy in enumerate(self._policies):
            lengths = policy.lengths(rounds, latency_NL)
            prompts.add(
                index,
                tokens=realised_emitted(rounds.accepted, lengths),
                time_us=cost_NL[row, lengths],
                length=lengths,
            )
            if not keeps_history(policy):
                prompts.add_walk(index, *resimulate(rounds, policy, lengths, latency_NL, cost_NL))
        prompts.finish()

    def result(
        self, *, resamples: int = 400, seed: int = 0, inside_loops: bool = False
    ) -> pa.Table:
        """Returns a table of `REPLAY_SCHEMA`; category `all` first, rounds in loops last.

        Args:
            resamples: bootstrap resamples of whole prompts for the intervals.
            seed: of the resampling.
            inside_loops: whether rounds inside repetition loops follow as rows of their own.

        Raises:
            NotEnoughData: no round outside repetition loops.
        """
        if not self._sums.rounds_outside_loops:
            raise NotEnoughData("no round outside repetition loops to replay: record more prompts")
        return self._sums.table(
            batch=self._batch, resamples=resamples, seed=seed, inside_loops=inside_loops
        )

    def gain(
        self, policy: str, over: str, *, resamples: int = 400, seed: int = 0
    ) -> tuple[float, float, float]:
        """Returns the gain in tokens/s of one policy over another, outside repetition loops.

        Args:
            policy, over: names; both are resampled together, so that what prompts have in common
                cancels.
            resamples: of whole prompts.
            seed: of the resampling.

        Returns:
            `rate / rate - 1`, and the 2.5 and 97.5 % quantiles of it.

        Raises:
            UsageError: a name that is not in this replay.
        """
        return self._sums.gain(policy, over, resamples=resamples, seed=seed)


def replay(
    rounds: RoundSet,
    policies: Sequence[LengthPolicy],
    table: StepCostTable,
    *,
    batch: int = 1,
    cost_NL: FloatArray | None = None,
    resamples: int = 400,
    seed: int = 0,
    inside_loops: bool = False,
) -> pa.Table:
    """Returns predicted throughput of each policy, over all rounds and by category.

    Rounds inside repetition loops are left out unless asked for, but policies that remember them
    do. Policies choose on the table's latency; rounds are charged `cost_NL`. Rates are tokens a
    second and request; ratios are against plain decoding, stock DFlash (16 rows) and the oracle
    length on the same rounds.

    Args:
        rounds: rounds of the split to report on, not the one that anything was fitted on.
        policies: rules to compare; names must differ.
        table: what the policies look latencies up in.
        batch: requests decoded together.
        cost_NL: float64 [n, 17] in us for the given rounds, default `round_costs`.
        resamples: bootstrap resamples of whole prompts for the interval.
        seed: of the resampling.
        inside_loops: see `Replay.result`.

    Returns:
        A table of `REPLAY_SCHEMA`; category `all` first.
    """
    run = Replay(policies, table, batch=batch)
    run.add(rounds, cost_NL=cost_NL)
    return run.result(resamples=resamples, seed=seed, inside_loops=inside_loops)


def resimulate(
    rounds: RoundSet,
    policy: LengthPolicy,
    lengths: IntArray,
    latency_NL: FloatArray,
    cost_NL: FloatArray,
) -> tuple[FloatArray, IntArray, IntArray]:
    """Walks each recorded round to its end, however often the policy cuts it.

    Continued rounds cost the table's latency: which experts their rows share is not recorded.

    Args:
        rounds: recorded rounds.
        policy: one that keeps no history.
        lengths: int64 [n], its choices at the recorded anchors.
        latency_NL: float64 [n, 17] in us, the policy's table at each round's context.
        cost_NL: float64 [n, 17] in us, what the recorded rounds cost.

    Returns:
        time in us until the recorded text of each round is out, float64 [n]; rounds that took,
        int64 [n]; and how many of them drafted at anchors that were not recorded, int64 [n].
    """
    time_us = cost_NL[np.arange(len(rounds)), lengths]
    walked = np.ones(len(rounds), dtype=np.int64)
    unrecorded = np.zeros(len(rounds), dtype=np.int64)
    emitted = realised_emitted(rounds.accepted, lengths)
    origin = np.flatnonzero(emitted <= rounds.accepted)
    left, emitted = rounds.select(origin), emitted[origin]
    while origin.size:
        left = left.after_cut(emitted)
        latency = latency_NL[origin]
        chosen = policy.lengths(left, latency)
        time_us[origin] += latency[np.arange(origin.size), chosen]
        walked[origin] += 1
        unrecorded[origin] += chosen > 0
        emitted = realised_emitted(left.accepted, chosen)
        cut = emitted <= left.accepted
        origin, left, emitted = origin[cut], left.select(cut), emitted[cut]
    return time_us, walked, unrecorded
