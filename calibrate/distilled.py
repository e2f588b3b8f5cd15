"""Boosted trees distilled to tables: a plain hazard table, and one with cells of context.

The trees' hazards are the targets; fitting them instead of outcomes keeps the noise of single
outcomes out. What the tables lose is measured on outcomes of held-out prompts, like every model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt
from scipy.special import expit
from sklearn.linear_model import LogisticRegression

from hybridspec.artifacts.tables import FEATURE_NAMES, NUM_DRAFTS, FloatArray, HazardTable
from hybridspec.artifacts.trees import DISTILLED_METHOD
from hybridspec.calibrate.boosted import BoostedHazard
from hybridspec.calibrate.context import CONTEXT_NAMES, context_features
from hybridspec.calibrate.features import TraceArrays
from hybridspec.calibrate.hazard import predict_hazards
from hybridspec.calibrate.isotonic import isotonic_knots
from hybridspec.calibrate.model import HazardModel, prompt_folds, rows_at_risk

# seen_length and min_seen_length 0..3, successor -1..1
SEEN_CELLS = 4 * 4 * 3
# First distance of the second and later buckets; the last bucket is "not in the block".
REPEAT_BUCKETS = (2, 4, 8, 16)
REQUEST_TERMS = ("mean_surprise", "log_rounds")


class DistilledTable(HazardModel):
    """The trees as a `HazardTable`: logistic features, a bias a position, isotonic knots.

    It sees none of the context, so it is only as good as the features of a hazard table allow.

    Parameters:
        teacher: trees already fitted on the same rounds; None fits them.

    Attributes:
        table_: what today's select kernel reads.
    """

    name: ClassVar[str] = "distilled"
    table_: HazardTable

    def __init__(self, *, teacher: BoostedHazard | None = None, seed: int = 0) -> None:
        self.teacher = teacher
        self.seed = seed

    def fit(self, rounds: TraceArrays) -> Self:
        """Fit on all rounds given; `NotEnoughData` as for every model."""
        rows = rows_at_risk(rounds)
        teacher = self.teacher or BoostedHazard(seed=self.seed).fit(rounds)
        targets = teacher.predict(rounds)[rows.round, rows.position]
        features = rounds.features_RDF[rows.round, rows.position]
        design = np.concatenate([features, np.eye(NUM_DRAFTS)[rows.group]], axis=1)
        scores = np.empty(len(targets))
        for held_out in prompt_folds(rows.prompt, self.seed):
            fold = soft_logistic(design[~held_out], targets[~held_out])
            scores[held_out] = expit(design[held_out] @ fold[:-1] + fold[-1])
        coefficients = soft_logistic(design, targets)
        knots_x, knots_y = isotonic_knots(scores, rows.labels)
        bias = coefficients[len(FEATURE_NAMES) : -1] + coefficients[-1]
        self.table_ = HazardTable(
            method=DISTILLED_METHOD,
            weights_F=coefficients[: len(FEATURE_NAMES)],
            position_bias_D=bias[rows.position_group],
            knots_x=knots_x,
            knots_y=knots_y,
        )
        return self

    def predict(self, rounds: TraceArrays) -> FloatArray:
        """Hazards, float64 [R, 15]."""
        return predict_hazards(self.table_, rounds.features_RDF)

    def describe(self) -> Mapping[str, Any]:
        """Weights by feature."""
        weights = dict(zip(FEATURE_NAMES, self.table_.weights_F.tolist(), strict=True))
        return {"name": self.name, "weights": weights, "knots": int(self.table_.knots_x.size)}


class DistilledCells(HazardModel):
    """The trees as one logistic sum with a term for each cell of context: 75 numbers.

    `logit = w . (5 features, mean surprise, ln(1 + rounds before)) + bias of the position
    + bias of (seen_length, min_seen_length, successor) + bias of the repeat distance's bucket`.

    Parameters:
        teacher: trees already fitted on the same rounds; None fits them.

    Attributes:
        coefficients_: float64 [76], the last one the intercept.
    """

    name: ClassVar[str] = "cells"

    def __init__(self, *, teacher: BoostedHazard | None = None, seed: int = 0) -> None:
        self.teacher = teacher
        self.seed = seed

    def fit(self, rounds: TraceArrays) -> Self:
        """Fit on all rounds given; `NotEnoughData` as for every model."""
        rows = rows_at_risk(rounds)
        self.position_group_ = rows.position_group
        teacher = self.teacher or BoostedHazard(seed=self.seed).fit(rounds)
        targets = teacher.predict(rounds)[rows.round, rows.position]
        design = self._design(rounds)[rows.round, rows.position]
        self.coefficients_ = soft_logistic(design, targets)
        return self

    def predict(self, rounds: TraceArrays) -> FloatArray:
        """Hazards, float64 [R, 15]."""
        logits = self._design(rounds) @ self.coefficients_[:-1] + self.coefficients_[-1]
        hazards: FloatArray = expit(logits)
        return hazards

    def describe(self) -> Mapping[str, Any]:
        """Number of coefficients, and those of the features."""
        names = (*FEATURE_NAMES, *REQUEST_TERMS)
        weights = dict(zip(names, self.coefficients_[: len(names)].tolist(), strict=True))
        return {"name": self.name, "parameters": self.coefficients_.size, "weights": weights}

    def _design(self, rounds: TraceArrays) -> FloatArray:
        """float64 [R, 15, 75]."""
        context = context_features(rounds).astype(np.float64)
        column = {name: context[..., index] for index, name in enumerate(CONTEXT_NAMES)}
        seen = column["seen_length"] * 4 + column["min_seen_length"]
        repeat = np.searchsorted(REPEAT_BUCKETS, column["repeat_distance"], side="right")
        parts = [
            rounds.features_RDF,
            column["mean_surprise"][..., None],
            np.log1p(column["rounds_before"])[..., None],
            np.broadcast_to(
                np.eye(NUM_DRAFTS)[self.position_group_], (len(rounds), NUM_DRAFTS, NUM_DRAFTS)
            ),
            _one_hot(seen * 3 + column["successor"] + 1, SEEN_CELLS),
            _one_hot(repeat, len(REPEAT_BUCKETS) + 1),
        ]
        return np.concatenate(parts, axis=-1)


def soft_logistic(design_NP: FloatArray, targets: FloatArray) -> FloatArray:
    """Logistic regression on probabilities: coefficients and, last, the intercept, [P + 1].

    Each row counts as accepted with weight `target` and as rejected with the rest.
    """
    mean, scale = design_NP.mean(axis=0), design_NP.std(axis=0)
    scale = np.where(scale > 1e-12, scale, np.inf)
    scaled = (design_NP - mean) / scale
    model = LogisticRegression(max_iter=500, tol=1e-6).fit(
        np.concatenate([scaled, scaled]),
        np.repeat([True, False], len(targets)),
        sample_weight=np.concatenate([targets, 1.0 - targets]),
    )
    weights = model.coef_[0] / scale
    return np.append(weights, model.intercept_[0] - weights @ mean)


def _one_hot(index: npt.NDArray[Any], size: int) -> FloatArray:
    return np.eye(size)[index.astype(np.int64)]
