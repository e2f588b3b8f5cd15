"""From decoded texts to rows and the summary, and what a replay of recorded rounds predicted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from decoding.arms import AR, EVICT, FULL, OURS, PAPER, STOCK, Comparison, Text, totals_of
from decoding.prepared import Prepared

from hybridspec.artifacts.tables import BLOCK_SIZE, StepCostTable
from hybridspec.costmodels.correction import ExpertLine, RouterCorrected
from hybridspec.costmodels.lookup import latency_by_round
from hybridspec.costmodels.peers import Evict
from hybridspec.costmodels.policies import Dinkelbach, FixedLength, LengthPolicy
from hybridspec.costmodels.rounds import RoundSet, realised_emitted


def predictions(
    prepared: Prepared, cost: StepCostTable, lam: float, fixed: Mapping[str, int]
) -> dict[tuple[str, str], float]:
    """Tokens/s of each arm by category on the recorded held-out rounds, outside loops.

    The arithmetic of `hybridspec replay`: rounds cost the table's time and the experts of their
    own routes beyond the mean.

    Args:
        fixed: length of each fixed arm.
    """
    rounds = prepared.test.outside_loops()
    latency_NL = latency_by_round(cost, batch=1, context_tokens=rounds.context_tokens)
    charged = np.array(latency_NL)
    if rounds.distinct_total_NL is not None:
        surplus = rounds.distinct_total_NL - prepared.routing.total_mean_L
        charged[:, 1:] += cost.expert_slope_us * surplus
    policies: dict[str, LengthPolicy] = {
        name: FixedLength(length) for name, length in fixed.items()
    }
    policies[OURS] = Dinkelbach(lam)
    policies[EVICT] = Evict(float(cost.draft_us[0, 0]))
    line = ExpertLine.fit(prepared.calibration.outside_loops(), "first-router")
    policies[PAPER] = RouterCorrected(lam, line, cost.expert_slope_us, rule="paper")
    found = {}
    for name, policy in policies.items():
        lengths = policy.lengths(rounds, latency_NL)
        tokens = realised_emitted(rounds.accepted, lengths)
        time_us = charged[np.arange(len(rounds)), lengths]
        for category in ("all", *np.unique(rounds.category)):
            kept = _of(rounds, str(category))
            found[name, str(category)] = float(tokens[kept].sum() / time_us[kept].sum() * 1e6)
    return found


def _of(rounds: RoundSet, category: str) -> np.ndarray:
    if category == "all":
        return np.ones(len(rounds), dtype=bool)
    return np.asarray(rounds.category) == category


def rows_and_summary(
    texts: Sequence[Text],
    predicted: Mapping[tuple[str, str], float],
    fixed: Mapping[str, int],
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Rows by arm and category, and the plain numbers that people look for."""
    sums = totals_of(texts)
    plain = {text.prompt: text for text in texts if text.arm == AR}
    rates = {key: total.row()["tokens_per_s"] for key, total in sums.items()}
    rows = []
    for (arm, category), total in sorted(sums.items()):
        row: dict[str, Any] = {"kind": "arm", "arm": arm, "category": category, **total.row()}
        if (AR, category) in rates:
            row["over_ar"] = round(rates[arm, category] / rates[AR, category], 4)
        if (arm, category) in predicted:
            row["predicted_tokens_per_s"] = round(predicted[arm, category], 2)
        if category == "all":
            compared = Comparison()
            mine = [text for text in texts if text.arm == arm]
            for text in mine:
                if text.prompt in plain:
                    compared.add(text, plain[text.prompt])
            row |= compared.row()
            row["wall_tokens_per_s"] = round(
                sum(sum(t.emitted) for t in mine) / sum(t.wall_us for t in mine) * 1e6, 2
            )
        rows.append(row)
    return rows, summary_of(rates, predicted, fixed)


def summary_of(
    rates: Mapping[tuple[str, str], float],
    predicted: Mapping[tuple[str, str], float],
    fixed: Mapping[str, int],
) -> dict[str, Any]:
    """Ratios of our arm; keys whose arms did not run are left out."""
    summary: dict[str, Any] = {}
    ours = rates.get((OURS, "all"))
    if ours is None:
        return summary
    summary["tokens_per_s"] = ours

    def ratio(key: str, arm: str) -> None:
        if (arm, "all") in rates:
            summary[key] = round(ours / rates[arm, "all"], 4)

    ratio("over_ar", AR)
    ratio("over_dflash16", STOCK if (STOCK, "all") in rates else FULL)
    ratio("over_dflash16_own_kernels", FULL)
    ratio("over_evict", EVICT)
    ratio("over_paper", PAPER)
    lengths = {n: rates[n, "all"] for n in fixed if (n, "all") in rates and fixed[n] >= 1}
    if lengths:
        best = max(lengths, key=lambda name: lengths[name])
        summary["best_fixed_arm"] = best
        summary["best_fixed_length"] = fixed[best]
        summary["over_best_fixed"] = round(ours / lengths[best], 4)
    by_category = {
        category: rate / rates[AR, category]
        for (arm, category), rate in rates.items()
        if arm == OURS and category != "all" and (AR, category) in rates
    }
    if by_category:
        worst = min(by_category, key=lambda name: by_category[name])
        summary["min_category_over_ar"] = round(by_category[worst], 4)
        summary["min_category"] = worst
    if (OURS, "all") in predicted:
        summary["predicted_tokens_per_s"] = round(predicted[OURS, "all"], 2)
        summary["prediction_error"] = round(ours / predicted[OURS, "all"] - 1.0, 4)
        if (AR, "all") in rates and (AR, "all") in predicted:
            told = predicted[OURS, "all"] / predicted[AR, "all"]
            summary["predicted_over_ar"] = round(told, 4)
    summary["block_size"] = BLOCK_SIZE
    return summary
