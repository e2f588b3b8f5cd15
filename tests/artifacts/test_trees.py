"""Tree tables: evaluation against plain recursion, refusals, and the way through a bundle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridspec.artifacts.bundle import load_bundle, write_calibration
from hybridspec.artifacts.codec import trees_from, trees_table
from hybridspec.artifacts.identity import CalibrationIdentity
from hybridspec.artifacts.schemas import METRICS_SCHEMA, RELIABILITY_SCHEMA, TREES_SCHEMA
from hybridspec.artifacts.tables import FEATURE_NAMES, HazardTable
from hybridspec.artifacts.trees import CONTEXT_FEATURES, LEAF, TreeTable, float32_below
from hybridspec.errors import BundleError

FEATURES = len(CONTEXT_FEATURES)


def random_trees(seed: int, *, trees: int = 5, depth: int = 4) -> TreeTable:
    """Trees of random shape, children side by side and breadth first."""
    rng = np.random.default_rng(seed)
    roots, feature, threshold, left, value = [], [], [], [], []
    for _ in range(trees):
        roots.append(len(feature))
        levels = [0]
        child = len(feature) + 1
        for level in levels:
            if level == depth or (level and rng.uniform() < 0.3):
                feature.append(LEAF)
                threshold.append(0.0)
                left.append(LEAF)
                value.append(rng.normal())
                continue
            feature.append(int(rng.integers(FEATURES)))
            threshold.append(float(np.float32(rng.normal())))
            left.append(child)
            value.append(0.0)
            levels += [level + 1] * 2
            child += 2
    return TreeTable(
        feature_names=CONTEXT_FEATURES,
        baseline=float(rng.normal()),
        root_T=np.array(roots),
        feature_K=np.array(feature),
        threshold_K=np.array(threshold),
        left_K=np.array(left),
        value_K=np.array(value),
    )


def by_recursion(trees: TreeTable, row: np.ndarray) -> float:
    def leaf(node: int) -> float:
        if trees.feature_K[node] == LEAF:
            return float(trees.value_K[node])
        right = row[trees.feature_K[node]] > trees.threshold_K[node]
        return leaf(int(trees.left_K[node]) + int(right))

    return trees.baseline + sum(leaf(int(root)) for root in trees.root_T)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 8), st.integers(1, 6))
def test_logits_equal_those_of_plain_recursion(seed: int, trees: int, depth: int) -> None:
    table = random_trees(seed, trees=trees, depth=depth)
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(20, FEATURES)).astype(np.float32)
    # On a threshold a row goes left.
    rows[0] = table.threshold_K[0]
    expected = [by_recursion(table, row) for row in rows]
    np.testing.assert_allclose(table.logits(rows), expected, rtol=0, atol=1e-12)
    np.testing.assert_allclose(table.predict(rows), 1 / (1 + np.exp(-np.array(expected))))


@given(st.floats(-(2.0**99), 2.0**99), st.floats(-(2.0**99), 2.0**99, width=32))
def test_rounding_a_threshold_down_changes_no_decision(threshold: float, value: float) -> None:
    below = float32_below(np.array([threshold]))[0]
    assert np.float32(below) == below
    assert (value <= threshold) == (value <= below)


def changed(**changes: Any) -> None:
    table = random_trees(0)
    fields = {name: getattr(table, name) for name in table.__dataclass_fields__}
    TreeTable(**(fields | changes))


def edited(name: str, index: int, value: float) -> dict[str, Any]:
    values = getattr(random_trees(0), name).copy()
    values[index] = value
    return {name: values}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"baseline": float("nan")}, "NaN or infinite"),
        (edited("value_K", 3, float("inf")), "NaN or infinite"),
        (edited("threshold_K", 0, 0.1), "no float32 value"),
        (edited("feature_K", 0, FEATURES), "compares a feature"),
        (edited("left_K", 0, 0), "before its parent"),
        (edited("left_K", 0, 5), "single parent"),
        (edited("left_K", 0, 10_000), "outside its tree"),
        (edited("root_T", 0, 1), "rise from 0"),
        ({"root_T": np.arange(400)}, "1 to 256"),
        ({"root_T": np.zeros(0, dtype=np.int64)}, "1 to 256"),
        ({"value_K": np.zeros(3)}, "value_K has shape"),
    ],
)
def test_impossible_trees_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BundleError, match=f"tree table: .*{message}.*: calibrate again"):
        changed(**changes)


def test_deep_trees_are_refused() -> None:
    random_trees(1, depth=8)
    with pytest.raises(BundleError, match="9 deep; at most 8"):
        random_trees(0, depth=9)


def test_features_of_another_width_are_refused() -> None:
    with pytest.raises(BundleError, match=r"shape \(3, 4\); expected \[N, 15\]"):
        random_trees(0).logits(np.zeros((3, 4)))


def equal(one: TreeTable, other: TreeTable) -> bool:
    return one.feature_names == other.feature_names and all(
        np.asarray(getattr(one, name)).tobytes() == np.asarray(getattr(other, name)).tobytes()
        for name in one.__dataclass_fields__
        if name != "feature_names"
    )


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 12))
def test_arrow_and_back_is_exact(seed: int, trees: int) -> None:
    table = random_trees(seed, trees=trees)
    assert equal(trees_from(trees_table(table), path="trees"), table)


def test_a_feature_of_a_later_version_is_refused() -> None:
    table = trees_table(random_trees(0))
    names = [name or "" for name in table.column("feature").to_pylist()]
    names[0] = "moon_phase"
    position = table.schema.get_field_index("feature")
    later = table.set_column(position, TREES_SCHEMA.field("feature"), pa.array(names))
    with pytest.raises(BundleError, match="compare a feature 'moon_phase'; this version computes"):
        trees_from(later, path="trees")


def test_a_bundle_keeps_trees_and_one_without_has_none(tmp_path: Path) -> None:
    hazard = HazardTable(
        "boosted-distilled",
        np.zeros(len(FEATURE_NAMES)),
        np.zeros(15),
        np.array([0.0, 1.0]),
        np.array([0.0, 1.0]),
    )
    trees = random_trees(4)

    def write(folder: Path, **more: Any) -> str:
        return write_calibration(
            folder,
            identity=CalibrationIdentity("t", "d", "float32"),
            hazard=hazard,
            routing=None,
            reliability=RELIABILITY_SCHEMA.empty_table(),
            metrics=METRICS_SCHEMA.empty_table(),
            provenance={},
            **more,
        )

    ids = {write(tmp_path / "with", trees=trees), write(tmp_path / "without")}
    assert len(ids) == 2
    part = load_bundle(tmp_path / "with").calibration
    assert part is not None
    assert part.trees is not None
    assert equal(part.trees, trees)
    plain = load_bundle(tmp_path / "without").calibration
    assert plain is not None
    assert plain.trees is None
