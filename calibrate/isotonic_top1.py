"""Isotonic regression of acceptance on the drafter's top-1 probability alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Self

from hybridspec.artifacts.tables import FloatArray, HazardTable
from hybridspec.calibrate.features import TraceArrays
from hybridspec.calibrate.hazard import RawTop1Hazard, predict_hazards
from hybridspec.calibrate.isotonic import isotonic_knots
from hybridspec.calibrate.model import HazardModel, rows_at_risk

METHOD = "isotonic-top1"


class IsotonicHazard(HazardModel):
    """A monotone map of the top-1 probability, the same for all positions.

    The map of one score cannot follow its own noise far once its knots are pooled, so it is fitted
    on all rows and needs no folds.

    Attributes:
        table_: as a hazard table.
    """

    name: ClassVar[str] = "isotonic"
    table_: HazardTable

    def fit(self, rounds: TraceArrays) -> Self:
        """Fit on all rounds given; `NotEnoughData` as for every model."""
        rows = rows_at_risk(rounds)
        raw = RawTop1Hazard().fit()
        scores = raw.predict(rounds)[rows.round, rows.position]
        knots_x, knots_y = isotonic_knots(scores, rows.labels)
        self.table_ = replace(raw.table_, method=METHOD, knots_x=knots_x, knots_y=knots_y)
        return self

    def predict(self, rounds: TraceArrays) -> FloatArray:
        """Hazards, float64 [R, 15]."""
        return predict_hazards(self.table_, rounds.features_RDF)

    def describe(self) -> Mapping[str, Any]:
        """The knots."""
        return {
            "name": self.name,
            "knots_x": self.table_.knots_x.tolist(),
            "knots_y": self.table_.knots_y.tolist(),
        }
