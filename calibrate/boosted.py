"""Boosted trees over block context and history, kept as plain arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import numpy as np
from sklearn.ensemble import HistGradientBoostingClassifier

from hybridspec.artifacts.tables import NUM_DRAFTS, FloatArray
from hybridspec.artifacts.trees import LEAF, TreeTable, float32_below
from hybridspec.calibrate.context import CONTEXT_NAMES, MONOTONE, context_features
from hybridspec.calibrate.features import TraceArrays
from hybridspec.calibrate.model import HazardModel, rows_at_risk
from hybridspec.errors import QualityGate

NUM_TREES = 32
TREE_DEPTH = 5
LEARNING_RATE = 0.2
MIN_LEAF_ROWS = 40
POSITION = CONTEXT_NAMES.index("position")


class BoostedHazard(HazardModel):
    """Gradient-boosted trees, small enough that a kernel walks them in the select stage.

    Monotone in the drafter's own confidence. Positions with fewer than 30 rows are fitted and
    predicted as the nearest lower one that has them.

    Parameters:
        num_trees, depth, learning_rate: of the ensemble.
        features: names of `CONTEXT_NAMES` to fit on; all of them by default.
        seed: scikit-learn's; binning of more than 200,000 rows draws from it.

    Attributes:
        trees_: the ensemble; equals scikit-learn's prediction to 1e-12, checked at every fit.
        position_group_: int64 [15], the position that each one is predicted as.
    """

    name: ClassVar[str] = "boosted"
    trees_: TreeTable

    def __init__(
        self,
        *,
        num_trees: int = NUM_TREES,
        depth: int = TREE_DEPTH,
        learning_rate: float = LEARNING_RATE,
        features: Sequence[str] = CONTEXT_NAMES,
        seed: int = 0,
    ) -> None:
        self.num_trees = num_trees
        self.depth = depth
        self.learning_rate = learning_rate
        self.features = tuple(name for name in CONTEXT_NAMES if name in features)
        self.seed = seed

    def fit(self, rounds: TraceArrays) -> Self:
        """Fit on all rounds given; select split and leave out loops before.

        Raises:
            NotEnoughData: fewer than 200 at-risk rows or 10 prompts, or all labels equal.
            QualityGate: the exported trees do not predict what scikit-learn does.
        """
        rows = rows_at_risk(rounds)
        self.position_group_ = rows.position_group
        self.num_rows_ = int(rows.labels.size)
        columns = [CONTEXT_NAMES.index(name) for name in self.features]
        features = context_features(rounds)[rows.round, rows.position]
        features[:, POSITION] = rows.group
        used = features[:, columns].astype(np.float64)
        model = HistGradientBoostingClassifier(
            max_iter=self.num_trees,
            max_depth=self.depth,
            max_leaf_nodes=2**self.depth,
            learning_rate=self.learning_rate,
            min_samples_leaf=MIN_LEAF_ROWS,
            l2_regularization=1.0,
            monotonic_cst=[MONOTONE.get(name, 0) for name in self.features],
            early_stopping=False,  # pyright: ignore[reportArgumentType]
            random_state=self.seed,
        ).fit(used, rows.labels)
        self.trees_ = export_trees(model, columns)
        difference = np.abs(self.trees_.predict(features) - model.predict_proba(used)[:, 1]).max()
        if difference > 1e-12:
            raise QualityGate(
                f"exported trees differ from scikit-learn's prediction by {difference:.1e}; at "
                "most 1e-12 is allowed: this scikit-learn is not supported; use --model beta"
            )
        return self

    def predict(self, rounds: TraceArrays) -> FloatArray:
        """Hazards, float64 [R, 15]."""
        # Rows at risk fall with the position, so pooled positions are the last ones, and no
        # threshold lies beyond the one they were fitted as: they need no pooling here.
        features = context_features(rounds)
        return self.trees_.predict(features.reshape(-1, len(CONTEXT_NAMES))).reshape(-1, NUM_DRAFTS)

    def describe(self) -> Mapping[str, Any]:
        """Size of the ensemble and how often each feature is compared."""
        compared = self.trees_.feature_K[self.trees_.feature_K != LEAF]
        counts = np.bincount(compared, minlength=len(CONTEXT_NAMES)).tolist()
        return {
            "name": self.name,
            "trees": self.trees_.num_trees,
            "depth": self.trees_.depth,
            "nodes": int(self.trees_.feature_K.size),
            "comparisons": dict(zip(CONTEXT_NAMES, counts, strict=True)),
            "position_group": self.position_group_.tolist(),
        }


def export_trees(model: HistGradientBoostingClassifier, columns: Sequence[int]) -> TreeTable:
    """A fitted binary classifier as a tree table over `CONTEXT_NAMES`.

    Args:
        columns: index into `CONTEXT_NAMES` of each feature that the model was fitted on.
    """
    roots: list[int] = []
    feature: list[int] = []
    threshold: list[float] = []
    left: list[int] = []
    value: list[float] = []
    for (predictor,) in model._predictors:
        nodes = predictor.nodes
        roots.append(len(feature))
        # Breadth first, children side by side.
        queue = [0]
        first_child = len(feature) + 1
        for old in queue:
            node = nodes[old]
            if node["is_leaf"]:
                feature.append(LEAF)
                threshold.append(0.0)
                left.append(LEAF)
                value.append(float(node["value"]))
                continue
            feature.append(columns[int(node["feature_idx"])])
            threshold.append(float(node["num_threshold"]))
            left.append(first_child)
            value.append(0.0)
            queue += [int(node["left"]), int(node["right"])]
            first_child += 2
    return TreeTable(
        feature_names=CONTEXT_NAMES,
        baseline=float(np.ravel(model._baseline_prediction)[0]),
        root_T=np.array(roots, dtype=np.int64),
        feature_K=np.array(feature, dtype=np.int64),
        threshold_K=float32_below(np.array(threshold)),
        left_K=np.array(left, dtype=np.int64),
        value_K=np.array(value),
    )
