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

from hybridspec.artifacts.tables import HazardTable, RoutingTable
from hybridspec.calibrate.bootstrap import Score
from hybridspec.calibrate.features import TraceArrays, trace_arrays
from hybridspec.calibrate.hazard import BETA_METHOD, RAW_METHOD, BetaPositionHazard, RawTop1Hazard
from hybridspec.calibrate.metrics import DEFAULT_RESAMPLES, metrics_table
from hybridspec.calibrate.reliability import reliability_table
from hybridspec.calibrate.routing import (
    RoutingReport,
    distinct_experts,
    distinct_tokens,
    fit_routing,
)
from hybridspec.errors import NotEnoughData

HELD_OUT_FRACTION = 0.3


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
        before: metric name to score of the raw top-1 probability.
        after: metric name to score of the fitted hazards.
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
    before: Mapping[str, Score]
    after: Mapping[str, Score]
    routing: RoutingReport | None

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        value: dict[str, Any] = {
            name: getattr(self, name)
            for name in self.__dataclass_fields__
            if name not in ("before", "after", "routing", "position_rows")
        }
        value["position_rows"] = list(self.position_rows)
        for name, scores in (("before", self.before), ("after", self.after)):
            value[name] = {
                metric: {"value": score.value, "lo": score.lo, "hi": score.hi}
                for metric, score in scores.items()
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
    """What `write_calibration` takes, and the baseline and summary beside it."""

    hazard: HazardTable
    baseline: HazardTable
    routing: RoutingTable | None
    reliability: pa.Table
    metrics: pa.Table
    summary: CalibrationSummary


def fit_calibration(
    trace: pa.Table, *, resamples: int = DEFAULT_RESAMPLES, seed: int = 0
) -> CalibrationResult:
    """Fit hazards and routing on the calibration split outside loops; score on the test split.

    Args:
        trace: a checked trace (`read_trace`).
        resamples: of the bootstrap over prompts.
        seed: of folds and bootstrap.

    Raises:
        NotEnoughData: too few observed drafts or prompts to fit, or nothing held out.
    """
    rounds, split_source = _with_test_split(trace_arrays(trace))
    fit_rows = (rounds.split == "calibration") & (rounds.loop_period == 0)
    test_rows = (rounds.split == "test") & (rounds.loop_period == 0)
    model = BetaPositionHazard(seed=seed).fit(rounds.select(fit_rows))
    models = {RAW_METHOD: RawTop1Hazard().fit().table_, BETA_METHOD: model.table_}
    routing = _routing(trace, fit_rows, test_rows)
    metrics = metrics_table(rounds, models, resamples=resamples, seed=seed)
    before, after = (_held_out_scores(metrics, name) for name in models)
    return CalibrationResult(
        hazard=model.table_,
        baseline=models[RAW_METHOD],
        routing=routing.table if routing else None,
        reliability=reliability_table(rounds, models),
        metrics=metrics,
        summary=CalibrationSummary(
            num_rounds=len(rounds),
            num_prompts=rounds.num_prompts,
            num_loop_rounds=int((rounds.loop_period > 0).sum()),
            num_fit_rounds=int(fit_rows.sum()),
            num_fit_rows=model.num_rows_,
            num_test_rounds=int(test_rows.sum()),
            split_source=split_source,
            position_rows=tuple(int(rows) for rows in model.position_rows_),
            before=before,
            after=after,
            routing=routing,
        ),
    )


def _with_test_split(rounds: TraceArrays) -> tuple[TraceArrays, str]:
    """Hold out 30 % of the prompts by hash if the trace has no test rounds."""
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
