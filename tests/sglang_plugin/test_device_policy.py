"""A bundle as the worker loads it: packed where it fits, else a fixed length and the reason."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "artifacts"))

import bundle_kit  # pyright: ignore[reportMissingImports]
import hazard_trees_kit

from hybridspec.artifacts.bundle import Bundle, load_bundle, write_calibration, write_cost
from hybridspec.artifacts.tables import TREES
from hybridspec.errors import ModelError
from hybridspec.sglang_plugin.policy import DevicePolicy, load_policy

pytest.importorskip("triton", reason="the packed form lives beside the kernels")


def as_saved(bundle: Bundle) -> Any:
    assert bundle.calibration is not None
    assert bundle.cost is not None
    return bundle.calibration.identity, bundle.cost.identity


def load(folder: Path, current: Any = as_saved, **changes: Any) -> DevicePolicy:
    arguments: dict[str, Any] = {
        "device": "cpu",
        "fixed_length": 7,
        "correction": "select",
        "lookahead": 2,
        **changes,
    }
    return load_policy(folder, current=current, **arguments)


def test_a_bundle_that_fits(tmp_path: Path) -> None:
    policy = load(bundle_kit.make_bundle(tmp_path / "b"))
    assert policy.tables is not None
    assert policy.tables.values_TP[0, 5] == 0.0  # not static
    assert (policy.correction, policy.lookahead) == ("select", 2)
    assert [policy.price(n) for n in (1, 2, 4, 9)] == [2.5e-3, 1.5e-3, 1.5e-3, 1.5e-3]
    assert policy.warnings == ()


def test_without_a_correction_nothing_looks_ahead(tmp_path: Path) -> None:
    policy = load(bundle_kit.make_bundle(tmp_path / "b"), correction="off")
    assert policy.lookahead == 0


def test_another_machine_takes_the_best_fixed_length(tmp_path: Path) -> None:
    def elsewhere(bundle: Bundle) -> Any:
        calibration, cost = as_saved(bundle)
        return calibration, replace(cost, device="another-gpu")

    folder = bundle_kit.make_bundle(tmp_path / "b")
    policy = load(folder, elsewhere)
    assert policy.tables is not None
    assert policy.tables.values_TP[0, 5] == 1.0  # static
    assert (policy.correction, policy.lookahead) == ("off", 0)
    assert "another-gpu" in policy.warnings[-1]
    allowed = load(folder, elsewhere, allow=("device",))
    assert allowed.tables is not None
    assert allowed.tables.values_TP[0, 5] == 0.0
    assert "another-gpu" in allowed.warnings[-1]


def test_a_model_that_is_no_folder_counts_as_another_one(tmp_path: Path) -> None:
    def unknown(bundle: Bundle) -> Any:
        raise ModelError("model_path 'org/name' is no local model folder")

    policy = load(bundle_kit.make_bundle(tmp_path / "b"), unknown)
    assert policy.tables is not None
    assert policy.tables.values_TP[0, 5] == 1.0
    assert "org/name" in policy.warnings[-1]


def test_a_bundle_that_is_missing_or_half(tmp_path: Path) -> None:
    missing = load(tmp_path / "none")
    assert missing.tables is None
    assert missing.fixed_length == 7
    assert missing.warnings
    write_cost(tmp_path / "half", **bundle_kit.cost_arguments())
    half = load(tmp_path / "half")
    assert half.tables is None
    assert "lacks its calibration part" in half.warnings[0]


def test_trees_are_served_where_the_price_is_theirs(tmp_path: Path) -> None:
    trees = hazard_trees_kit.random_trees(5)
    for name, throughput in (
        ("table", bundle_kit.make_throughput()),
        ("trees", replace(bundle_kit.make_throughput(), hazard=TREES)),
    ):
        folder = tmp_path / name
        write_calibration(folder, **bundle_kit.calibration_arguments(trees=trees))
        write_cost(folder, **bundle_kit.cost_arguments(throughput=throughput))
        assert load_bundle(folder).calibration is not None
        policy = load(folder)
        assert (policy.trees is not None) == (name == "trees"), policy.warnings
        assert ("boosted trees" in " ".join(policy.warnings)) == (name == "table")
        assert load(folder, use_trees=False).trees is None
