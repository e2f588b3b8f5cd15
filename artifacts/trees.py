"""Boosted trees as plain arrays: what a bundle stores, numpy evaluates and a kernel walks.

Shape suffixes: N rows, F features, K nodes, T trees.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hybridspec.artifacts.tables import FloatArray, IntArray
from hybridspec.errors import BundleError

# Features of a draft that trees may compare; `calibrate/context.py` computes them.
CONTEXT_FEATURES = (
    "p1",
    "margin",
    "entropy",
    "position",
    "min_p1",
    "product_p1",
    "previous_p1",
    "next_p1",
    "repeat_distance",
    "seen_length",
    "min_seen_length",
    "successor",
    "mean_surprise",
    "rounds_before",
    "generated_tokens",
)
# Method of the hazard table that was distilled from trees and lies beside them.
DISTILLED_METHOD = "boosted-distilled"
MAX_TREES = 256
MAX_DEPTH = 8
LEAF = -1


@dataclass(frozen=True)
class TreeTable:
    """An ensemble of binary trees whose leaves add up to the logit of a hazard.

    `hazard = 1 / (1 + exp(-(baseline + sum of one leaf a tree)))`. A row goes left at a node where
    its feature is at most the threshold. Nodes of a tree lie together, the root first, and a right
    child is the node after the left one: one index a node leads on.

    Thresholds are float32 values: features are float32, so rounding a threshold down to the next
    float32 leaves every decision as it was, and a kernel compares in float32 what numpy compares.

    Attributes:
        feature_names: of the F features, in their order.
        baseline: logit that all rows share.
        root_T: int64 [T], index of each tree's root, increasing from 0.
        feature_K: int64 [K], feature that a node compares, -1 in a leaf.
        threshold_K: float64 [K], float32 values; 0 in a leaf.
        left_K: int64 [K], index of the left child, -1 in a leaf; the right child is the next one.
        value_K: float64 [K], a leaf's part of the logit; 0 in a node.
    """

    feature_names: tuple[str, ...]
    baseline: float
    root_T: IntArray
    feature_K: IntArray
    threshold_K: FloatArray
    left_K: IntArray
    value_K: FloatArray

    def __post_init__(self) -> None:
        nodes = self.feature_K.size
        for name in ("threshold_K", "left_K", "value_K"):
            if getattr(self, name).shape != (nodes,):
                raise _wrong(f"{name} has shape {getattr(self, name).shape}; expected ({nodes},)")
        numbers = np.concatenate([self.threshold_K, self.value_K, [self.baseline]])
        if not np.isfinite(numbers).all():
            raise _wrong("a threshold, a leaf or the baseline is NaN or infinite")
        trees = self.root_T.size
        if not 1 <= trees <= MAX_TREES or self.root_T[0] != 0 or np.any(np.diff(self.root_T) < 1):
            raise _wrong(f"roots of {trees} trees must rise from 0, and be 1 to {MAX_TREES}")
        if self.root_T[-1] >= nodes:
            raise _wrong(f"root {int(self.root_T[-1])} is not among {nodes} nodes")
        inner = self.feature_K != LEAF
        if np.any((self.feature_K < LEAF) | (self.feature_K >= len(self.feature_names))):
            raise _wrong(f"a node compares a feature that is not 0..{len(self.feature_names) - 1}")
        if np.any(self.left_K[~inner] != LEAF):
            raise _wrong("a leaf has children")
        if np.any(self.threshold_K.astype(np.float32) != self.threshold_K):
            raise _wrong("a threshold is no float32 value")
        self._check_shape(inner)

    def _check_shape(self, inner: npt.NDArray[np.bool_]) -> None:
        """Every node but the roots is the child of exactly one earlier node of its tree."""
        nodes = self.feature_K.size
        index = np.flatnonzero(inner)
        stop = np.append(self.root_T[1:], nodes)[
            np.searchsorted(self.root_T, index, side="right") - 1
        ]
        left = self.left_K[index]
        if np.any((left <= index) | (left + 1 >= stop)):
            raise _wrong("a child lies before its parent or outside its tree")
        parents = np.zeros(nodes, dtype=np.int64)
        np.add.at(parents, np.concatenate([left, left + 1, self.root_T]), 1)
        if np.any(parents != 1):
            raise _wrong(f"node {int(np.flatnonzero(parents != 1)[0])} has no single parent")
        if self.depth > MAX_DEPTH:
            raise _wrong(f"a tree is {self.depth} deep; at most {MAX_DEPTH} are walked")

    @property
    def num_trees(self) -> int:
        """Trees, T."""
        return int(self.root_T.size)

    @property
    def depth(self) -> int:
        """Comparisons on the longest way from a root to a leaf."""
        depth = np.zeros(self.feature_K.size, dtype=np.int64)
        for node in np.flatnonzero(self.feature_K != LEAF):
            # Children lie behind their parent, so one pass in order reaches every depth.
            depth[self.left_K[node] : self.left_K[node] + 2] = depth[node] + 1
        return int(depth.max())

    def logits(self, features_NF: npt.NDArray[Any]) -> FloatArray:
        """Sum of baseline and leaves, added in the order of the trees, float64 [N]."""
        features = np.asarray(features_NF, dtype=np.float64)
        if features.ndim != 2 or features.shape[1] != len(self.feature_names):
            raise _wrong(
                f"features have shape {features.shape}; expected [N, {len(self.feature_names)}]"
            )
        rows = np.arange(len(features))
        total: FloatArray = np.full(len(features), self.baseline)
        for root in self.root_T:
            node = np.full(len(features), root)
            for _ in range(self.depth):
                feature = self.feature_K[node]
                right = features[rows, np.maximum(feature, 0)] > self.threshold_K[node]
                node = np.where(feature == LEAF, node, self.left_K[node] + right)
            total = total + self.value_K[node]
        return total

    def predict(self, features_NF: npt.NDArray[Any]) -> FloatArray:
        """Hazards, float64 [N] in (0, 1)."""
        hazards: FloatArray = 1.0 / (1.0 + np.exp(-self.logits(features_NF)))
        return hazards


def float32_below(thresholds: FloatArray) -> FloatArray:
    """The largest float32 values that are not above `thresholds`, as float64."""
    rounded = thresholds.astype(np.float32)
    below = np.nextafter(rounded, np.float32(-np.inf))
    kept: FloatArray = np.where(rounded.astype(np.float64) > thresholds, below, rounded).astype(
        np.float64
    )
    return kept


def _wrong(what: str) -> BundleError:
    return BundleError(f"tree table: {what}: calibrate again")
