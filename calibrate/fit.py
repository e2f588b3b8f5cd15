"""From a trace to the calibration part of a bundle: fit on one set of prompts, score on the "
"other."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hybridspec.artifacts.tables import HazardTable, RoutingTable, TemperatureTable
from hybridspec.artifacts.trees import TreeTable
from hybridspec.calibrate.boosted import BoostedHazard
from hybridspec.calibrate.bootstrap import Score
from hybridspec.calibrate.distilled import DistilledTable
from hybridspec.calibrate.features import TraceArrays, trace_arrays
from hybridspec.calibrate.hazard import RAW_METHOD, BetaPositionHazard, RawTop1Hazard
from hybridspec.calibrate.isotonic_top1 import IsotonicHazard
from hybridspec.calibrate.metrics import DEFAULT_RESAMPLES, metrics_table
from hybridspec.calibrate.model import HazardModel, rows_at_risk
from hybridspec.calibrate.platt import PlattHazard
from hybridspec.calibrate.reliability import reliability_table
from hybridspec.calibrate.routing import (
    RoutingReport,
    distinct_experts,
    distinct_tokens,
    fit_routing,
)
from hybridspec.calibrate.temperature import TemperatureHazard
from hybridspec.errors import NotEnoughData, UsageError

HELD_OUT_FRACTION = 0.3
# Models that a bundle can hold: as a hazard table, and the boosted one as trees beside it.
BUNDLE_MODELS = ("beta", "boosted", "isotonic", "platt")
DEFAULT_MODEL = "beta"


@dataclass(frozen=True)
class CalibrationSummary:
    """Figures of a fit in a few numbers; scores are of held-out prompts outside loops.

    Attributes:
        num_rounds: rounds in the trace, loops included.
        num_prompts: prompts in the trace.
        num_loop_rounds: rounds inside repetition loops: not fitted on, scored apart.
        num_fit_rounds: rounds the hazards were fitted on.
        num_fit_rows: observed drafts in them.
        num_test_rounds: held-out rounds outside loops.
        split_source: `trace`, or `hash` if the trace had no test rounds and 30 % were held out
            here.
        position_rows: observed drafts of each position in the fit.
        model: name of the fitted model in `metrics` and `reliability`.
        before: metric name to score of the raw top-1 probability.
        after: metric name to score of the fitted hazards.
        distilled: the same of the hazard table that stands in for boosted trees; empty for others.
        routing: fit of the routing line, None without recorded routes.
    """

    num_rounds: int
    num_prompts: int
    num_loop_rounds: int
    num_fit_rounds: int
    num_fit_rows: int
    num_test_rounds: int
    split_source: str
    position_rows: tuple[int, ...]
    model: str
    before: Mapping[str, Score]
    after: Mapping[str, Score]
    distilled: Mapping[str, Score]
    routing: RoutingReport | None

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        value: dict[str, Any] = {
            name: getattr(self, name)
            for name in self.__dataclass_fields__
            if name not in ("before", "after", "distilled", "routing", "position_rows")
        }
        value["position_rows"] = list(self.position_rows)
        for name in ("before", "after", "distilled"):
            value[name] = {
                metric: {"value": score.value, "lo": score.lo, "hi": score.hi}
                for metric, score in getattr(self, name).items()
            }
        value["routing"] = None
        if self.routing is not None:
            value["routing"] = {
                "first_router_r2": self.routing.first_router_r2_L.tolist(),
                "distinct_tokens_r2": self.routing.distinct_tokens_r2_L.tolist(),
                "other_layers_r2": self.routing.other_layers_r2_L.tolist(),
            }
        return value


@dataclass(frozen=True)
class CalibrationResult:
    """What `write_calibration` takes, and the baseline and summary beside it.

    Of boosted trees, `hazard` is the table distilled from them.
    """

    hazard: HazardTable
    trees: TreeTable | None
    temperatures: TemperatureTable
    baseline: HazardTable
    routing: RoutingTable | None
    reliability: pa.Table
    metrics: pa.Table
    summary: CalibrationSummary


def fit_calibration(
    trace: pa.Table,
    *,
    model: str = DEFAULT_MODEL,
    resamples: int = DEFAULT_RESAMPLES,
    seed: int = 0,
) -> CalibrationResult:
    """Fit hazards and routing on the calibration split outside loops; score on the test split.

    Args:
        trace: a checked trace (`read_trace`).
        model: one of `BUNDLE_MODELS`.
        resamples: of the bootstrap over prompts.
        seed: of folds and bootstrap.

    Raises:
        UsageError: no such model.
        NotEnoughData: too few observed drafts or prompts to fit, or nothing held out.
    """
    if model not in BUNDLE_MODELS:
        raise UsageError(
            f"a bundle holds no hazard model {model!r}: choose {', '.join(BUNDLE_MODELS)}"
        )
    rounds, split_source = with_test_split(trace_arrays(trace))
    fit_rows = (rounds.split == "calibration") & (rounds.loop_period == 0)
    test_rows = (rounds.split == "test") & (rounds.loop_period == 0)
    fitted = _fit(model, rounds.select(fit_rows), seed)
    baseline = RawTop1Hazard().fit()
    models: dict[str, HazardModel] = {RAW_METHOD: baseline, fitted.name: fitted.model}
    if fitted.trees is not None:
        models[fitted.table.method] = fitted.stand_in
    routing = _routing(trace, fit_rows, test_rows)
    metrics = metrics_table(rounds, models, resamples=resamples, seed=seed)
    before, after = (_held_out_scores(metrics, name) for name in (RAW_METHOD, fitted.name))
    distilled = {} if fitted.trees is None else _held_out_scores(metrics, fitted.table.method)
    at_risk = rows_at_risk(rounds.select(fit_rows))
    return CalibrationResult(
        hazard=fitted.table,
        trees=fitted.trees,
        temperatures=TemperatureHazard().fit(rounds.select(fit_rows)).table_,
        baseline=baseline.table_,
        routing=routing.table if routing else None,
        reliability=reliability_table(rounds, models),
        metrics=metrics,
        summary=CalibrationSummary(
            num_rounds=len(rounds),
            num_prompts=rounds.num_prompts,
            num_loop_rounds=int((rounds.loop_period > 0).sum()),
            num_fit_rounds=int(fit_rows.sum()),
            num_fit_rows=int(at_risk.labels.size),
            num_test_rounds=int(test_rows.sum()),
            split_source=split_source,
            position_rows=tuple(int(rows) for rows in at_risk.position_rows),
            model=fitted.name,
            before=before,
            after=after,
            distilled=distilled,
            routing=routing,
        ),
    )


@dataclass(frozen=True)
class _Fitted:
    """A fitted model, the hazard table that a bundle holds for it, and which model that table is.

    `name` is the table's method where the table is the model.
    """

    name: str
    model: HazardModel
    stand_in: HazardModel
    table: HazardTable
    trees: TreeTable | None = None


def _fit(name: str, rounds: TraceArrays, seed: int) -> _Fitted:
    if name == BoostedHazard.name:
        boosted = BoostedHazard(seed=seed).fit(rounds)
        distilled = DistilledTable(teacher=boosted, seed=seed).fit(rounds)
        return _Fitted(name, boosted, distilled, distilled.table_, boosted.trees_)
    model: BetaPositionHazard | PlattHazard | IsotonicHazard
    if name == BetaPositionHazard.name:
        model = BetaPositionHazard(seed=seed).fit(rounds)
    else:
        model = (PlattHazard() if name == PlattHazard.name else IsotonicHazard()).fit(rounds)
    return _Fitted(model.table_.method, model, model, model.table_)


def with_test_split(rounds: TraceArrays) -> tuple[TraceArrays, str]:
    """Hold out 30 % of the prompts by hash if the trace has no test rounds.

    Returns:
        the rounds, and whether the split is the `trace`'s own or by `hash`.

    Raises:
        NotEnoughData: a trace without rounds.
    """
    if len(rounds) == 0:
        raise NotEnoughData("the trace has no rounds; calibration needs some: record it again")
    if (rounds.split == "test").any():
        return rounds, "trace"
    hashes = [hashlib.sha256(prompt_id.encode()).hexdigest() for prompt_id in rounds.prompt_ids]
    num_test = round(len(hashes) * HELD_OUT_FRACTION)
    held_out = np.zeros(len(hashes), dtype=bool)
    held_out[np.argsort(hashes)[:num_test]] = True
    split: npt.NDArray[Any] = np.where(held_out[rounds.prompt], "test", "calibration")
    return replace(rounds, split=split), "hash"


def _routing(
    trace: pa.Table, fit_rows: npt.NDArray[np.bool_], test_rows: npt.NDArray[np.bool_]
) -> RoutingReport | None:
    counts = distinct_experts(trace)
    if counts is None:
        return None
    return fit_routing(counts, distinct_tokens(trace), fit_rows=fit_rows, held_out=test_rows)


def _held_out_scores(metrics: pa.Table, model: str) -> dict[str, Score]:
    return {
        row["metric"]: Score(row["value"], row["lo"], row["hi"])
        for row in metrics.to_pylist()
        if (row["split"], row["category"], row["model"]) == ("test", "all", model)
    }
