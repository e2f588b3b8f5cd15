"""The long-run throughput that a length policy maximises against (Dinkelbach's method).

Emitted tokens over decoding time is a ratio of sums. Its best value `lam*` is the fixed point of
`lam -> throughput of the policy argmax_L E(L) - lam T(L)`, and that policy attains it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from hybridspec.artifacts.tables import (
    BLOCK_SIZE,
    FloatArray,
    IntArray,
    StepCostTable,
    ThroughputTable,
)
from hybridspec.costmodels.lookup import latency_by_round
from hybridspec.costmodels.rounds import RoundSet, expected_emitted, realised_emitted
from hybridspec.errors import NotEnoughData

MIN_ROUNDS = 50
TIE_TOKENS = 1e-9
"""Scores closer than this are ties; far below any gain that matters, far above rounding error."""
_REL_TOLERANCE = 1e-9
_MAX_ITERATIONS = 200


@dataclass(frozen=True)
class ThroughputFit:
    """Fixed point of one batch size, in tokens a microsecond and request.

    Attributes:
        tokens_per_us: `lam*`, never below plain decoding.
        expected_tokens_per_us: what the hazards promise for the same lengths. A gap to
            `tokens_per_us` is miscalibration.
        best_fixed_length: best single verify length, 0 = plain decoding.
        best_fixed_tokens_per_us: its throughput.
        drafting_pays: whether the policy beats plain decoding.
        iterates: the values of `lam` on the way, first to last.
    """

    tokens_per_us: float
    expected_tokens_per_us: float
    best_fixed_length: int
    best_fixed_tokens_per_us: float
    drafting_pays: bool
    iterates: tuple[float, ...]


def choose_lengths(
    emitted_NL: FloatArray, latency_us: FloatArray, tokens_per_us: float
) -> IntArray:
    """Returns the length in 1..16 that maximises `E(L) - lam T(L)` in each round, int64 [n].

    Length 0 is no candidate: hazards exist only once the draft pass is paid for. Ties go to the
    shorter length.

    Args:
        emitted_NL: float64 [n, 17] expected emitted tokens.
        latency_us: float64 [17] or [n, 17].
        tokens_per_us: `lam`.
    """
    score = emitted_NL[:, 1:] - tokens_per_us * np.atleast_2d(latency_us)[:, 1:]
    near_best = score >= score.max(axis=1, keepdims=True) - TIE_TOKENS
    lengths: IntArray = near_best.argmax(axis=1) + 1
    return lengths


def throughput_of(accepted: IntArray, lengths: IntArray | int, latency_NL: FloatArray) -> float:
    """Returns realised tokens a microsecond of rounds cut to `lengths`.

    Args:
        accepted: int64 [n].
        lengths: int64 [n] or one length for all, 0..16.
        latency_NL: float64 [n, 17] in us.
    """
    rows = np.arange(accepted.size)
    time_us = latency_NL[rows, lengths]
    return float(realised_emitted(accepted, lengths).sum() / time_us.sum())


def best_fixed_length(accepted: IntArray, latency_NL: FloatArray) -> tuple[int, float]:
    """Returns the best single length in 0..16 and its tokens a microsecond; ties go shorter."""
    rates = [throughput_of(accepted, length, latency_NL) for length in range(BLOCK_SIZE + 1)]
    best = int(np.argmax(rates))
    return best, rates[best]


def fit_lengths(
    accepted: IntArray, hazards_ND: FloatArray, latency_us: FloatArray
) -> ThroughputFit:
    """Finds `lam*`: lengths chosen on hazards, throughput counted on realised tokens.

    With calibrated hazards this is Dinkelbach's iteration and rises monotonically. Realised tokens
    of a biased hazard may make it jump over the fixed point; then the crossing is bisected, so the
    result is always a `lam` that the policy run with it delivers.

    Args:
        accepted: int64 [n].
        hazards_ND: float64 [n, 15].
        latency_us: float64 [17] or [n, 17], what the policy will look up.
    """
    latency_NL = np.broadcast_to(latency_us, (accepted.size, BLOCK_SIZE + 1))
    emitted_NL = expected_emitted(hazards_ND)

    def realised(lam: float) -> float:
        return throughput_of(accepted, choose_lengths(emitted_NL, latency_us, lam), latency_NL)

    plain = throughput_of(accepted, 0, latency_NL)
    fixed, fixed_rate = best_fixed_length(accepted, latency_NL)
    lam, iterates = _fixed_point(realised, start=realised(0.0))
    lengths = choose_lengths(emitted_NL, latency_us, lam)
    rows = np.arange(accepted.size)
    expected = float(emitted_NL[rows, lengths].sum() / latency_NL[rows, lengths].sum())
    pays = lam > plain
    return ThroughputFit(
        tokens_per_us=lam if pays else plain,
        expected_tokens_per_us=expected if pays else plain,
        best_fixed_length=fixed,
        best_fixed_tokens_per_us=fixed_rate,
        drafting_pays=pays,
        iterates=iterates,
    )


def _fixed_point(
    realised: Callable[[float], float], *, start: float
) -> tuple[float, tuple[float, ...]]:
    """Returns the crossing `lam = realised(lam)` and the iterates that led there.

    Args:
        realised: throughput of the policy run with `lam`; a step function.
        start: `realised(0)`, from where Dinkelbach's iteration rises.
    """
    low, lam = 0.0, start
    iterates = [start]
    for _ in range(_MAX_ITERATIONS):
        reached = realised(lam)
        iterates.append(reached)
        if abs(reached - lam) <= _REL_TOLERANCE * lam:
            return lam, tuple(iterates)
        if reached < lam:
            break
        low, lam = lam, reached
    high = lam
    while high - low > _REL_TOLERANCE * high:
        middle = 0.5 * (low + high)
        if realised(middle) >= middle:
            low = middle
        else:
            high = middle
    return low, (*iterates, low)


def fit_batch(rounds: RoundSet, table: StepCostTable, *, batch: int) -> ThroughputFit:
    """Finds `lam*` of one batch size on the rounds outside repetition loops.

    The cost of each round is looked up at its own context. A batch larger than one is priced as
    if all its requests chose the same length.

    Raises:
        NotEnoughData: with fewer than 50 rounds outside loops.
    """
    usable = rounds.outside_loops()
    if len(usable) < MIN_ROUNDS:
        raise NotEnoughData(
            f"{len(usable)} rounds outside repetition loops; fitting the throughput needs at least "
            f"{MIN_ROUNDS}: record more prompts or longer outputs"
        )
    latency_NL = latency_by_round(table, batch=batch, context_tokens=usable.context_tokens)
    return fit_lengths(usable.accepted, usable.hazards_ND, latency_NL)


def fit_throughput(rounds: RoundSet, table: StepCostTable) -> ThroughputTable:
    """Returns `lam*` a request and the best fixed length for each batch size of the cost table.

    Args:
        rounds: rounds of the calibration split; those inside repetition loops are left out.
        table: the machine's cost table.
    """
    fits = [fit_batch(rounds, table, batch=int(batch)) for batch in table.batch_sizes]
    return ThroughputTable(
        batch_sizes=table.batch_sizes,
        tokens_per_us=np.asarray([fit.tokens_per_us for fit in fits], dtype=np.float64),
        best_fixed_length=np.asarray([fit.best_fixed_length for fit in fits], dtype=np.int64),
    )
