"""What `verify` finds beyond loading, and what `diff` tells apart."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from bundle_kit import COST_IDENTITY, calibration_arguments, cost_arguments, make_bundle, make_step

from hybridspec.artifacts.bundle import load_bundle, write_calibration, write_cost
from hybridspec.artifacts.diff import diff_bundles
from hybridspec.artifacts.tables import StepCostTable
from hybridspec.artifacts.verify import FALLING_COST, check_costs, verify_folder
from hybridspec.errors import BundleError, QualityGate


def test_good_bundle_has_no_warnings(bundle: Path) -> None:
    verified = verify_folder(bundle)
    assert verified.warnings == ()
    assert verified.bundle.content_id == load_bundle(bundle).content_id
    assert any("9 files" in check for check in verified.checks)


@pytest.mark.parametrize("name", ["README.md", "cost/x.parquet", "plots"])
def test_links_anywhere_are_refused(bundle: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "target").mkdir()
    (bundle / name).symlink_to(tmp_path / "target")
    with pytest.raises(BundleError, match=r"is a link; a bundle holds plain files"):
        verify_folder(bundle)


def test_files_that_nothing_names_are_told(bundle: Path) -> None:
    (bundle / "cost" / "notes.txt").write_text("x")
    (warning,) = verify_folder(bundle).warnings
    assert "cost/notes.txt" in warning


def test_a_missing_part_is_told(tmp_path: Path) -> None:
    write_cost(tmp_path, **cost_arguments(throughput=None))
    (warning,) = verify_folder(tmp_path).warnings
    assert "no calibration part" in warning


def bent(length: int, factor: float, *, spread: float = 0.02) -> StepCostTable:
    step = make_step()
    latency_us = step.latency_us.copy()
    latency_us[1, 2, length] = factor * latency_us[1, 2, length - 1]
    return dataclasses.replace(
        step,
        latency_us=latency_us,
        latency_p10_us=(1 - spread) * latency_us,
        latency_p90_us=(1 + spread) * latency_us,
    )


def test_costs_that_fall_beyond_their_spread_are_refused(tmp_path: Path) -> None:
    write_cost(tmp_path, **cost_arguments(step=bent(9, 0.9), throughput=None))
    with pytest.raises(QualityGate, match=r"batch 4, context 512: length 9 costs .* length 8"):
        verify_folder(tmp_path)
    warnings = verify_folder(tmp_path, allow=[FALLING_COST]).warnings
    assert any("length 9 costs" in warning for warning in warnings)


def test_falls_inside_the_spread_are_told() -> None:
    (warning,) = check_costs(bent(9, 0.98))
    assert "length 9 is 2.0% faster than length 8, inside the spread" in warning
    assert check_costs(bent(9, 0.995)) == []


def test_slow_plain_decoding_is_told() -> None:
    step = make_step()
    latency_us = step.latency_us.copy()
    latency_us[0, 0, 0] = 1.1 * latency_us[0, 0, 1]
    slow = dataclasses.replace(
        step, latency_us=latency_us, latency_p90_us=1.3 * step.latency_p90_us
    )
    assert any("plain decoding is slower" in warning for warning in check_costs(slow))


def test_a_bundle_does_not_differ_from_itself(bundle: Path) -> None:
    loaded = load_bundle(bundle)
    for part in diff_bundles(loaded, loaded):
        assert part.same
        assert not part.identity
        assert not part.files


def test_differences_are_named_and_the_largest_is_found(bundle: Path, tmp_path: Path) -> None:
    other = make_bundle(tmp_path / "other")
    write_calibration(other, **calibration_arguments(scale=1.5))
    step = make_step()
    latency_us = step.latency_us.copy()
    latency_us[1, 0, 7] *= 1.15
    changed = StepCostTable(
        batch_sizes=step.batch_sizes,
        context_tokens=np.array([0, 128, 1024]),
        latency_us=latency_us,
        latency_p10_us=step.latency_p10_us,
        latency_p90_us=step.latency_p90_us,
        draft_us=step.draft_us,
        expert_slope_us=2.0,
        expert_slope_r2=0.9,
    )
    identity = dataclasses.replace(COST_IDENTITY, device="nvidia-h200", tp_size=2)
    write_cost(other, **cost_arguments(step=changed, identity=identity, throughput=None))
    calibration, cost = diff_bundles(load_bundle(bundle), load_bundle(other))
    assert not calibration.same
    assert calibration.files == ("map",)
    assert calibration.numbers["largest_weight_logit"] == pytest.approx(0.55)
    assert cost.identity == {"device": ("some-cpu", "nvidia-h200"), "tp_size": (1, 2)}
    assert cost.cost is not None
    assert cost.cost.cells == 2 * 2 * 17
    assert cost.cost.only_in_a == cost.cost.only_in_b == 2 * 17
    assert cost.cost.largest_at == {"batch_size": 4, "context_tokens": 0, "verify_length": 7}
    assert cost.cost.signed_share == pytest.approx(0.15)
    assert cost.cost.median_share == 0.0


def test_a_part_in_one_alone(bundle: Path, tmp_path: Path) -> None:
    write_cost(tmp_path / "cost", **cost_arguments(throughput=None))
    calibration, cost = diff_bundles(load_bundle(bundle), load_bundle(tmp_path / "cost"))
    assert calibration.present == (True, False)
    assert not calibration.same
    assert cost.same
