"""Platt scaling: a line on the logit of the drafter's top-1 probability."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

import numpy as np
from sklearn.linear_model import LogisticRegression

from hybridspec.artifacts.tables import FEATURE_NAMES, NUM_DRAFTS, FloatArray, HazardTable
from hybridspec.calibrate.features import TraceArrays
from hybridspec.calibrate.hazard import predict_hazards
from hybridspec.calibrate.model import HazardModel, rows_at_risk

METHOD = "platt"
# logit p = ln p - ln(1 - p)
LOGIT_WEIGHTS = np.array(
    [float(name in ("log_p1", "neg_log_1m_p1")) for name in FEATURE_NAMES], dtype=np.float64
)


def top1_logits(rounds: TraceArrays) -> FloatArray:
    """Logit of the top-1 probability, clipped as in `position_features`, float64 [R, 15]."""
    logits: FloatArray = rounds.features_RDF @ LOGIT_WEIGHTS
    return logits


class PlattHazard(HazardModel):
    """`sigmoid(slope logit p1 + intercept)`, the same for all positions (Platt 1999).

    Attributes:
        table_: as a hazard table.
    """

    name: ClassVar[str] = "platt"
    table_: HazardTable

    def fit(self, rounds: TraceArrays) -> Self:
        """Fit on all rounds given; `NotEnoughData` as for every model."""
        rows = rows_at_risk(rounds)
        logits = top1_logits(rounds)[rows.round, rows.position]
        line = LogisticRegression(C=np.inf, max_iter=500, tol=1e-8).fit(
            logits[:, None], rows.labels
        )
        self.slope_, self.intercept_ = float(line.coef_[0, 0]), float(line.intercept_[0])
        self.table_ = HazardTable(
            method=METHOD,
            weights_F=self.slope_ * LOGIT_WEIGHTS,
            position_bias_D=np.full(NUM_DRAFTS, self.intercept_),
            knots_x=np.array([0.0, 1.0]),
            knots_y=np.array([0.0, 1.0]),
        )
        return self

    def predict(self, rounds: TraceArrays) -> FloatArray:
        """Hazards, float64 [R, 15]."""
        return predict_hazards(self.table_, rounds.features_RDF)

    def describe(self) -> Mapping[str, Any]:
        """Slope and intercept."""
        return {"name": self.name, "slope": self.slope_, "intercept": self.intercept_}
