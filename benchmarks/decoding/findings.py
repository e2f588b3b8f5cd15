"""From decoded texts to rows and the summary, and what was predicted for them.

A prediction walks this run's own prompts over rounds recorded at every anchor (`walk.py`). Beside
it stands `hybridspec replay` of the pair's recorded trace, whose prompts are others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from decoding.arms import (
    AR,
    EVICT,
    FULL,
    OURS,
    PAPER,
    STOCK,
    Comparison,
    Text,
    totals_of,
)
from decoding.prepared import Prepared
from decoding.walk import AnchorTexts, walk_arms

from hybridspec.artifacts.tables import HazardKind, StepCostTable
from hybridspec.costmodels.correction import ExpertLine, RouterCorrected
from hybridspec.costmodels.peers import Evict
from hybridspec.costmodels.policies import Dinkelbach, FixedLength, LengthPolicy
from hybridspec.costmodels.replay import replay, round_costs

# Arms whose lengths a policy of ours chooses, and what of their rounds may fall back.
POLICY_ARMS = (OURS, PAPER)
MAX_FALLBACK_SHARE = 0.01


@dataclass(frozen=True)
class Told:
    """What is predicted of one arm and category.

    Attributes:
        rate: tokens/s of this run's own prompts, walked from their start; None where they were not
            recorded.
        tokens_a_round, mean_length: of the same walk.
        replayed: tokens/s of the trace's held-out prompts, rounds at recorded anchors only, as
            `hybridspec replay` reports them.
        replayed_walked: with the rounds that follow a cut walked as well; None where a rule keeps
            history.
    """

    rate: float | None = None
    tokens_a_round: float | None = None
    mean_length: float | None = None
    replayed: float | None = None
    replayed_walked: float | None = None


def rules_of(
    prepared: Prepared, cost: StepCostTable, lam: float, fixed: Mapping[str, int]
) -> list[LengthPolicy]:
    """The rule of every arm, by its name.

    Args:
        fixed: length of each fixed arm.
    """
    # Nothing here knows what a round with other GDN kernels costs.
    policies: list[LengthPolicy] = [
        FixedLength(n, label=name) for name, n in fixed.items() if name != STOCK
    ]
    line = ExpertLine.fit(prepared.calibration.outside_loops(), "first-router")
    policies += [
        Dinkelbach(lam, name=OURS),
        Evict(float(cost.draft_us[0, 0]), name=EVICT),
        RouterCorrected(lam, line, cost.expert_slope_us, rule="paper", label=PAPER),
    ]
    return policies


def predictions(
    prepared: Prepared,
    cost: StepCostTable,
    lam: float,
    fixed: Mapping[str, int],
    kind: HazardKind,
    texts: AnchorTexts | None,
) -> dict[tuple[str, str], Told]:
    """What every arm should reach outside loops, by arm and category.

    Rounds cost the table's time and the experts of their own routes beyond the mean of the prompts
    that the table was measured on.

    Args:
        fixed: length of each fixed arm.
        kind: hazards of the policy arms.
        texts: this run's own prompts, recorded at every anchor; None where they were not.
    """
    policies = rules_of(prepared, cost, lam, fixed)
    held_out = prepared.rounds("test", kind)
    charged = round_costs(held_out, cost, mean_distinct_L=prepared.routing.total_mean_L)
    table = replay(held_out, policies, cost, cost_NL=charged, resamples=20)
    told = {
        (row["policy"], row["category"]): Told(
            replayed=row["tokens_per_s"], replayed_walked=row["resimulated_tokens_per_s"]
        )
        for row in table.to_pylist()
    }
    if texts is not None:
        walked = walk_arms(texts, policies, prepared, kind, by_hazards=POLICY_ARMS.__contains__)
        for key, found in walked.items():
            told[key] = replace(
                told.get(key, Told()),
                rate=found.rate,
                tokens_a_round=found.tokens / found.rounds,
                mean_length=found.rows / found.rounds,
            )
    return told


def failed_arms(texts: Sequence[Text]) -> dict[str, str]:
    """Policy arms whose lengths were the fallback's more often than may be, and the reason."""
    found = {}
    for (arm, category), total in totals_of(texts).items():
        if arm in POLICY_ARMS and category == "all" and total.all_rounds:
            share = total.fallback_rounds / total.all_rounds
            if share > MAX_FALLBACK_SHARE:
                found[arm] = (
                    f"{total.fallback_rounds} of {total.all_rounds} rounds took the fallback "
                    f"length; at most {MAX_FALLBACK_SHARE:.0%} may"
                )
    return found


def rows_and_summary(
    texts: Sequence[Text],
    predicted: Mapping[tuple[str, str], Told],
    fixed: Mapping[str, int],
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Rows by arm and category, and the plain numbers that people look for."""
    sums = totals_of(texts)
    failed = failed_arms(texts)
    plain = {text.prompt: text for text in texts if text.arm == AR}
    rates = {k: total.row()["tokens_per_s"] for k, total in sums.items() if k[0] not in failed}
    rows = []
    for (arm, category), total in sorted(sums.items()):
        if arm in failed:
            rows.append(
                {
                    "kind": "failed_arm",
                    "arm": arm,
                    "category": category,
                    "rounds": total.rounds,
                    "fallback_rounds": total.fallback_rounds,
                    "reason": failed[arm],
                }
            )
            continue
        row: dict[str, Any] = {"kind": "arm", "arm": arm, "category": category, **total.row()}
        if (AR, category) in rates:
            row["over_ar"] = round(rates[arm, category] / rates[AR, category], 4)
        if (arm, category) in predicted:
            told = predicted[arm, category]
            row |= {
                name: round(value, 3)
                for name, value in (
                    ("predicted_tokens_per_s", told.rate),
                    ("predicted_tokens_a_round", told.tokens_a_round),
                    ("predicted_mean_length", told.mean_length),
                    ("replayed_tokens_per_s", told.replayed),
                    ("replayed_walked_tokens_per_s", told.replayed_walked),
                )
                if value is not None
            }
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
    summary = summary_of(rates, predicted, fixed)
    if failed:
        summary["failed_arms"] = failed
    return rows, summary


def summary_of(
    rates: Mapping[tuple[str, str], float],
    predicted: Mapping[tuple[str, str], Told],
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
    told = predicted.get((OURS, "all"))
    plain = predicted.get((AR, "all"))
    if told is not None and told.rate is not None:
        summary["predicted_tokens_per_s"] = round(told.rate, 2)
        summary["prediction_error"] = round(ours / told.rate - 1.0, 4)
        if plain is not None and plain.rate is not None:
            summary["predicted_over_ar"] = round(told.rate / plain.rate, 4)
        errors = {
            arm: round(rates[arm, "all"] / value.rate - 1.0, 4)
            for (arm, category), value in predicted.items()
            if category == "all" and value.rate is not None and (arm, "all") in rates
        }
        summary["prediction_errors"] = errors
    # Of other prompts: what it is off by is also how these prompts differ from those.
    if told is not None and told.replayed is not None:
        summary["replayed_tokens_per_s"] = round(told.replayed, 2)
        summary["replay_error_other_prompts"] = round(ours / told.replayed - 1.0, 4)
    return summary
