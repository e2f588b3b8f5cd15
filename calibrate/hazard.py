"""Hazard models: the probability that a draft is accepted, given that those before it were.

Estimators in the manner of scikit-learn: `fit` returns self, what it learned ends in `_`. Each
gives a `HazardTable`, which is all that leaves this module; nothing is pickled.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from scipy.special import expit
from sklearn.linear_model import LogisticRegression

from hybridspec.artifacts.tables import (
    FEATURE_NAMES,
    NUM_DRAFTS,
    FloatArray,
    HazardTable,
    IntArray,
)
from hybridspec.calibrate.features import BoolArray, TraceArrays
from hybridspec.calibrate.isotonic import isotonic_knots
from hybridspec.calibrate.model import HazardModel, prompt_folds, rows_at_risk
from hybridspec.errors import NotEnoughData

RAW_METHOD = "raw-top1"
BETA_METHOD = "beta-position-isotonic"


def linear_scores(table: HazardTable, features_RDF: FloatArray) -> FloatArray:
    """The logistic part of a hazard table, before the knots: float64 [..., 15] in [0, 1]."""
    scores: FloatArray = expit(features_RDF @ table.weights_F + table.position_bias_D)
    return scores


def predict_hazards(table: HazardTable, features_RDF: FloatArray) -> FloatArray:
    """Hazards of every draft position; the oracle of the run-time policy.

    Args:
        table: a fitted table.
        features_RDF: float64 [..., 15, 5] of `position_features`.

    Returns:
        float64 [..., 15] in [0, 1].
    """
    hazards: FloatArray = np.interp(
        linear_scores(table, features_RDF), table.knots_x, table.knots_y
    )
    return hazards


class RawTop1Hazard(HazardModel):
    """The drafter's own top-1 probability taken as the hazard: the baseline of every report.

    As a table: logit p1 = ln p1 - ln(1 - p1), no position term, identity knots.

    Attributes:
        table_: the `HazardTable`.
    """

    name: ClassVar[str] = "raw"
    table_: HazardTable

    def fit(self, rounds: TraceArrays | None = None) -> RawTop1Hazard:
        """Nothing to learn; returns self."""
        weights = {"log_p1": 1.0, "neg_log_1m_p1": 1.0}
        self.table_ = HazardTable(
            method=RAW_METHOD,
            weights_F=np.array([weights.get(name, 0.0) for name in FEATURE_NAMES]),
            position_bias_D=np.zeros(NUM_DRAFTS),
            knots_x=np.array([0.0, 1.0]),
            knots_y=np.array([0.0, 1.0]),
        )
        return self

    def predict(self, rounds: TraceArrays) -> FloatArray:
        """Hazards, float64 [R, 15]."""
        return predict_hazards(self.table_, rounds.features_RDF)

    def describe(self) -> Mapping[str, Any]:
        """Nothing was fitted."""
        return {"name": self.name, "parameters": 0}


class BetaPositionHazard(HazardModel):
    """Logistic regression on beta features, entropy, margin, context and position; then isotonic.

    The knots are fitted on out-of-fold predictions, folds by prompt: in-sample ones would look
    better than they are. A position with fewer than 30 at-risk rows shares the bias of the nearest
    lower one.

    Parameters:
        C: inverse strength of the L2 penalty on standardised features and position terms.
        seed: of the assignment of prompts to folds.

    Attributes:
        table_: the `HazardTable`.
        position_rows_: int64 [15], at-risk rows of each position.
        position_group_: int64 [15], the position whose bias each one uses.
        num_rows_: at-risk rows used.
        num_prompts_: prompts used.

    Note:
        Not advised on less than about 1000 at-risk rows: the isotonic part then follows noise.
    """

    name: ClassVar[str] = "beta"
    table_: HazardTable
    position_rows_: IntArray
    position_group_: IntArray
    num_rows_: int
    num_prompts_: int

    def __init__(self, *, C: float = 1.0, seed: int = 0) -> None:
        self.C = C
        self.seed = seed

    def fit(self, rounds: TraceArrays) -> BetaPositionHazard:
        """Fit on all rounds given; select split and leave out loops before.

        Raises:
            NotEnoughData: fewer than 200 at-risk rows or 10 prompts, or all labels equal.
        """
        rows = rows_at_risk(rounds)
        features = rounds.features_RDF[rows.round, rows.position]
        labels, groups = rows.labels, rows.group
        self.num_rows_, self.num_prompts_ = int(labels.size), rounds.num_prompts
        self.position_rows_, self.position_group_ = rows.position_rows, rows.position_group

        weights, bias = self._fit_linear(features, groups, labels)
        scores = np.empty(labels.size)
        for held_out in prompt_folds(rows.prompt, self.seed):
            kept = labels[~held_out]
            if kept.all() or not kept.any():
                raise NotEnoughData(
                    "without one fold of prompts all drafts share one outcome; calibration needs "
                    "accepted and rejected drafts of several prompts: record more prompts"
                )
            fold_weights, fold_bias = self._fit_linear(features[~held_out], groups[~held_out], kept)
            scores[held_out] = expit(
                features[held_out] @ fold_weights + fold_bias[groups[held_out]]
            )
        knots_x, knots_y = isotonic_knots(scores, labels)
        self.table_ = HazardTable(
            method=BETA_METHOD,
            weights_F=weights,
            position_bias_D=bias[self.position_group_],
            knots_x=knots_x,
            knots_y=knots_y,
        )
        return self

    def predict(self, rounds: TraceArrays) -> FloatArray:
        """Hazards, float64 [R, 15]."""
        return predict_hazards(self.table_, rounds.features_RDF)

    def describe(self) -> Mapping[str, Any]:
        """Weights by feature, bias by position, number of knots."""
        return {
            "name": self.name,
            "weights": dict(zip(FEATURE_NAMES, self.table_.weights_F.tolist(), strict=True)),
            "position_bias": self.table_.position_bias_D.tolist(),
            "position_group": self.position_group_.tolist(),
            "knots": int(self.table_.knots_x.size),
        }

    def _fit_linear(
        self, features: FloatArray, groups: IntArray, labels: BoolArray
    ) -> tuple[FloatArray, FloatArray]:
        """Weights of the raw features [5] and a bias for each position [15]."""
        mean, scale = features.mean(axis=0), features.std(axis=0)
        scale = np.where(scale > 1e-12, scale, np.inf)
        design = np.concatenate([(features - mean) / scale, np.eye(NUM_DRAFTS)[groups]], axis=1)
        model = LogisticRegression(C=self.C, max_iter=500, tol=1e-6).fit(design, labels)
        coefficients = model.coef_[0]
        weights = coefficients[: len(FEATURE_NAMES)] / scale
        bias = coefficients[len(FEATURE_NAMES) :] + model.intercept_[0] - weights @ mean
        return weights, bias
