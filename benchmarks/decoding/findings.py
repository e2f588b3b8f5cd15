"""From decoded texts to rows and the summary, and what a replay of recorded rounds predicted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from decoding.arms import AR, EVICT, FULL, OURS, PAPER, STOCK, Comparison, Text, totals_of
from decoding.prepared import Prepared

from hybridspec.artifacts.tables import StepCostTable
from hybridspec.costmodels.correction import ExpertLine, RouterCorrected
from hybridspec.costmodels.peers import Evict
from hybridspec.costmodels.policies import Dinkelbach, FixedLength, LengthPolicy
from hybridspec.costmodels.replay import replay, round_costs


@dataclass(frozen=True)
class Told:
    """What a replay says of one arm and category, tokens/s.

    Attributes:
        rate: rounds at recorded anchors only, as `hybridspec replay` reports them.
        walked: with the rounds that follow a cut walked as well; None where a rule keeps history.
    """

    rate: float
    walked: float | None


def predictions(
    prepared: Prepared, cost: StepCostTable, lam: float, fixed: Mapping[str, int]
) -> dict[tuple[str, str], Told]:
    """`hybridspec replay` of the recorded held-out rounds, outside loops, by arm and category.

    Rounds cost the table's time and the experts of their own routes beyond the mean of the prompts
    that the table was measured on.

    Args:
        fixed: length of each fixed arm.
    """
    policies: list[LengthPolicy] = [FixedLength(n, label=name) for name, n in fixed.items()]
    line = ExpertLine.fit(prepared.calibration.outside_loops(), "first-router")
    policies += [
        Dinkelbach(lam, name=OURS),
        Evict(float(cost.draft_us[0, 0]), name=EVICT),
        RouterCorrected(lam, line, cost.expert_slope_us, rule="paper", label=PAPER),
    ]
    charged = round_costs(prepared.test, cost, mean_distinct_L=prepared.routing.total_mean_L)
    table = replay(prepared.test, policies, cost, cost_NL=charged, resamples=20)
    return {
        (row["policy"], row["category"]): Told(row["tokens_per_s"], row["resimulated_tokens_per_s"])
        for row in table.to_pylist()
    }


def rows_and_summary(
    texts: Sequence[Text],
    predicted: Mapping[tuple[str, str], Told],
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
            told = predicted[arm, category]
            row["predicted_tokens_per_s"] = round(told.rate, 2)
            if told.walked is not None:
                row["predicted_walked_tokens_per_s"] = round(told.walked, 2)
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
    if told is not None:
        summary["predicted_tokens_per_s"] = round(told.rate, 2)
        summary["prediction_error"] = round(ours / told.rate - 1.0, 4)
        if told.walked is not None:
            summary["prediction_error_walked"] = round(ours / told.walked - 1.0, 4)
        plain = predicted.get((AR, "all"))
        if plain is not None:
            summary["predicted_over_ar"] = round(told.rate / plain.rate, 4)
    return summary
