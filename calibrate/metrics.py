"""How good hazards are on recorded rounds: the metrics table of a bundle.

Two views of the same hazards: `hazard_*` scores single drafts at risk, `survival_*` scores the
cumulative product `S_k` against "at least k drafts accepted" in every round, which is what the
choice of a verify length rests on. `*_log_loss_gain` is the first model's log loss minus this one's
on the same rows: its interval says whether the difference is more than chance. `emitted_bias_L` is
predicted minus observed tokens emitted by a round of length L.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from hybridspec.artifacts.schemas import METRICS_SCHEMA, table_from
from hybridspec.artifacts.tables import FloatArray
from hybridspec.calibrate.bootstrap import (
    Score,
    forecast_scores,
    log_losses,
    mean_score,
    prompt_draws,
)
from hybridspec.calibrate.features import TraceArrays, accepted_labels, at_risk
from hybridspec.calibrate.model import HazardModel

EMITTED_LENGTHS = (4, 8, 16)
DEFAULT_RESAMPLES = 500
MIN_ROUNDS = 20
LOOP_SUFFIX = "-loops"


def survival(hazards_RD: FloatArray) -> FloatArray:
    """`S_1..S_15`: probability that at least k drafts are accepted, float64 [R, 15]."""
    products: FloatArray = np.cumprod(hazards_RD, axis=-1, dtype=np.float64)
    return products


def _same(hazards_RD: FloatArray) -> FloatArray:
    return hazards_RD


def expected_emitted(hazards_RD: FloatArray) -> FloatArray:
    """`E(1)..E(16)`: expected tokens emitted by a round of verify length L, float64 [R, 16]."""
    ones = np.ones((*hazards_RD.shape[:-1], 1))
    emitted: FloatArray = np.cumsum(
        np.concatenate([ones, survival(hazards_RD)], axis=-1), axis=-1, dtype=np.float64
    )
    return emitted


def round_scores(
    hazards_RD: FloatArray,
    rounds: TraceArrays,
    *,
    baseline_RD: FloatArray | None = None,
    resamples: int,
    seed: int,
) -> tuple[dict[str, Score], dict[str, int]]:
    """Every metric of one model on a set of rounds, and the rows behind each.

    Args:
        hazards_RD: float64 [R, 15] of the model.
        rounds: what happened.
        baseline_RD: hazards of the model to compare with; None leaves the gains out.
        resamples: of the bootstrap over prompts.
        seed: of the bootstrap.
    """
    _, prompt = np.unique(rounds.prompt, return_inverse=True)
    prompt = prompt.astype(np.int64)
    draws = prompt_draws(int(prompt.max()) + 1, resamples=resamples, seed=seed)
    mask, labels = at_risk(rounds.accepted), accepted_labels(rounds.accepted)
    prompt_RD = np.broadcast_to(prompt[:, None], mask.shape)
    scores: dict[str, Score] = {}
    rows: dict[str, int] = {}
    all_rows = np.ones_like(mask)
    for view, chosen, forecast in (("hazard", mask, _same), ("survival", all_rows, survival)):
        predicted, observed = forecast(hazards_RD)[chosen], labels[chosen]
        found = forecast_scores(predicted, observed, prompt_RD[chosen], draws)
        if baseline_RD is not None:
            gain = log_losses(forecast(baseline_RD)[chosen], observed)
            gain = gain - log_losses(predicted, observed)
            found["log_loss_gain"] = mean_score(gain, prompt_RD[chosen], draws)
        for name, score in found.items():
            scores[f"{view}_{name}"] = score
            rows[f"{view}_{name}"] = predicted.size
    emitted = expected_emitted(hazards_RD)
    for length in EMITTED_LENGTHS:
        observed_tokens = np.minimum(rounds.accepted + 1, length)
        bias = emitted[:, length - 1] - observed_tokens
        scores[f"emitted_bias_{length}"] = mean_score(bias, prompt, draws)
        rows[f"emitted_bias_{length}"] = len(rounds)
    scores["emitted_tokens"] = mean_score(rounds.accepted.astype(np.float64) + 1.0, prompt, draws)
    rows["emitted_tokens"] = len(rounds)
    return scores, rows


def metrics_table(
    trace: TraceArrays,
    models: Mapping[str, HazardModel],
    *,
    resamples: int = DEFAULT_RESAMPLES,
    seed: int = 0,
) -> pa.Table:
    """Metrics of every model on every split, over all categories and one by one.

    The first model is the baseline of the gains of the others. A key is the name in the table.

    Rounds in repetition loops are a split of their own (`test-loops`). Categories are scored on the
    test split only. A set of fewer than 20 rounds is left out.

    Returns:
        a table of `METRICS_SCHEMA`; `lo` and `hi` bound the middle 95 % of a bootstrap over
        prompts.
    """
    columns: dict[str, list[Any]] = {name: [] for name in METRICS_SCHEMA.names}
    for split, category, rounds in _sets(trace):
        if len(rounds) < MIN_ROUNDS:
            continue
        baseline = None
        for model, fitted in models.items():
            hazards = fitted.predict(rounds)
            scores, rows = round_scores(
                hazards, rounds, baseline_RD=baseline, resamples=resamples, seed=seed
            )
            baseline = hazards if baseline is None else baseline
            for metric, score in scores.items():
                line = (split, category, model, metric, score.value, score.lo, score.hi)
                for name, value in zip(METRICS_SCHEMA.names, (*line, rows[metric]), strict=True):
                    columns[name].append(value)
    return table_from(columns, METRICS_SCHEMA)


def _sets(trace: TraceArrays) -> Iterator[tuple[str, str, TraceArrays]]:
    for split in ("calibration", "test"):
        inside = trace.split == split
        outside_loops = inside & (trace.loop_period == 0)
        yield split, "all", trace.select(outside_loops)
        yield split + LOOP_SUFFIX, "all", trace.select(inside & (trace.loop_period > 0))
        if split == "test":
            # Prompts without a category are called "all" too, and have been scored above.
            for category in sorted(set(trace.category[inside].tolist()) - {"all"}):
                yield split, category, trace.select(outside_loops & (trace.category == category))


def metric_value(table: pa.Table, *, split: str, category: str, model: str, metric: str) -> Score:
    """One row of a metrics table.

    Raises:
        KeyError: no such row.
    """
    for row in table.to_pylist():
        if (row["split"], row["category"], row["model"], row["metric"]) == (
            split,
            category,
            model,
            metric,
        ):
            return Score(row["value"], row["lo"], row["hi"])
    raise KeyError((split, category, model, metric))
