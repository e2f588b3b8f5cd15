"""Scores of probability forecasts with intervals from resampling whole prompts.

The rows of one prompt depend on each other, so the bootstrap draws prompts, not rows. Every score
is a function of sums over prompts: a resample is a matrix product of prompt counts with those sums.

Shape suffixes: N rows, P prompts, S resamples, B bins.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hybridspec.artifacts.tables import FloatArray, IntArray
from hybridspec.calibrate.features import BoolArray

NUM_ECE_BINS = 15
# Fine enough that the area under the curve moves by less than its interval.
NUM_AUC_BINS = 512
_TINY = 1e-12


@dataclass(frozen=True)
class Score:
    """A value and the middle 95 % of its bootstrap distribution."""

    value: float
    lo: float
    hi: float


def prompt_draws(num_prompts: int, *, resamples: int, seed: int) -> IntArray:
    """How often each prompt occurs in each resample: int64 [S, P], rows sum to P."""
    rng = np.random.default_rng(seed)
    return rng.multinomial(num_prompts, np.full(num_prompts, 1.0 / num_prompts), size=resamples)


def equal_mass_bins(predicted: FloatArray, num_bins: int) -> IntArray:
    """Bin of each row, 0..num_bins-1; bins hold equally many rows and equal predictions share "
    "one."""
    order = np.argsort(predicted, kind="stable")
    ranks = np.empty(predicted.size, dtype=np.int64)
    ranks[order] = np.arange(predicted.size)
    ordered = predicted[order]
    # Every row takes the rank of the first row of equal prediction.
    first = np.searchsorted(ordered, predicted, side="left")
    return first * num_bins // max(predicted.size, 1)


def area_under_curve(predicted: FloatArray, observed: BoolArray) -> float | None:
    """Area under the ROC curve, ties counted half; None if only one outcome occurs."""
    positives = int(observed.sum())
    negatives = observed.size - positives
    if positives == 0 or negatives == 0:
        return None
    ordered = np.sort(predicted)
    ranks = 0.5 * (
        np.searchsorted(ordered, predicted, side="left")
        + np.searchsorted(ordered, predicted, side="right")
        + 1
    )
    return float(
        (ranks[observed].sum() - positives * (positives + 1) / 2) / (positives * negatives)
    )


def log_losses(predicted: FloatArray, observed: BoolArray) -> FloatArray:
    """Log loss of each row in nats, float64 [N]; a forecast of 0 or 1 counts as 1e-12 off."""
    clipped = np.clip(predicted, _TINY, 1.0 - _TINY)
    losses: FloatArray = -np.where(observed, np.log(clipped), np.log1p(-clipped))
    return losses


def forecast_scores(
    predicted: FloatArray, observed: BoolArray, prompt: IntArray, draws: IntArray
) -> dict[str, Score]:
    """Log loss, Brier score, ECE and AUC of forecasts, each with its interval.

    Args:
        predicted: float64 [N] in [0, 1].
        observed: bool [N].
        prompt: int64 [N], 0..P-1.
        draws: int64 [S, P] of `prompt_draws`.

    Returns:
        `log_loss` (nats), `brier`, `ece` (15 bins of equal mass) and, if both outcomes occur,
        `auc`.
    """
    num_prompts = draws.shape[1]
    rows = _sums(prompt, np.ones(predicted.size), num_prompts)
    scores = {
        "log_loss": mean_score(log_losses(predicted, observed), prompt, draws),
        "brier": mean_score((predicted - observed) ** 2, prompt, draws),
        "ece": _ece(predicted, observed, prompt, draws, rows),
    }
    area = area_under_curve(predicted, observed)
    if area is not None:
        scores["auc"] = _auc(area, predicted, observed, prompt, draws)
    return scores


def mean_score(values: FloatArray, prompt: IntArray, draws: IntArray) -> Score:
    """Mean of a per-row quantity, with its interval."""
    num_prompts = draws.shape[1]
    rows = _sums(prompt, np.ones(values.size), num_prompts)
    sums = _sums(prompt, values, num_prompts)
    return _interval(float(values.mean()), _ratio(draws @ sums, draws @ rows))


def _ece(
    predicted: FloatArray,
    observed: BoolArray,
    prompt: IntArray,
    draws: IntArray,
    rows_P: FloatArray,
) -> Score:
    bins = equal_mass_bins(predicted, NUM_ECE_BINS)
    cell = prompt * NUM_ECE_BINS + bins
    shape = (draws.shape[1], NUM_ECE_BINS)
    gaps_PB = _sums(cell, predicted - observed, shape[0] * shape[1]).reshape(shape)
    value = float(np.abs(gaps_PB.sum(axis=0)).sum() / predicted.size)
    return _interval(value, _ratio(np.abs(draws @ gaps_PB).sum(axis=1), draws @ rows_P))


def _auc(
    area: float, predicted: FloatArray, observed: BoolArray, prompt: IntArray, draws: IntArray
) -> Score:
    cell = prompt * NUM_AUC_BINS + equal_mass_bins(predicted, NUM_AUC_BINS)
    shape = (draws.shape[1], NUM_AUC_BINS)
    positives_PB = _sums(cell[observed], None, shape[0] * shape[1]).reshape(shape)
    negatives_PB = _sums(cell[~observed], None, shape[0] * shape[1]).reshape(shape)

    def binned(counts: IntArray) -> FloatArray:
        positives, negatives = counts @ positives_PB, counts @ negatives_PB
        below = negatives.cumsum(axis=1) - 0.5 * negatives
        pairs = positives.sum(axis=1) * negatives.sum(axis=1)
        return _ratio((positives * below).sum(axis=1), pairs)

    # Binning biases all areas alike: take it out of the resamples.
    bias = area - float(binned(np.ones((1, shape[0]), dtype=np.int64))[0])
    return _interval(area, np.clip(binned(draws) + bias, 0.0, 1.0))


def _sums(index: IntArray, values: FloatArray | None, size: int) -> FloatArray:
    return np.bincount(index, weights=values, minlength=size).astype(np.float64)


def _ratio(numerator: FloatArray, denominator: FloatArray) -> FloatArray:
    """Quotients; resamples with nothing to divide by are left out."""
    valid = denominator > 0
    return numerator[valid] / denominator[valid]


def _interval(value: float, resampled: FloatArray) -> Score:
    if resampled.size == 0:
        return Score(value, value, value)
    lo, hi = np.quantile(resampled, [0.025, 0.975])
    # A resample only adds noise to an ECE, so all of its distribution may lie above the value.
    return Score(value, min(float(lo), value), max(float(hi), value))
