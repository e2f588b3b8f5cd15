"""The whole fit: what it uses, what it reports, and that it beats the raw probability."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pyarrow as pa
import pytest
from recorded_rounds import recording
from synthetic_rounds import CATEGORIES, synthetic_trace

from hybridspec.artifacts.bundle import load_bundle, write_calibration
from hybridspec.artifacts.identity import CalibrationIdentity
from hybridspec.artifacts.schemas import METRICS_SCHEMA, RELIABILITY_SCHEMA, check_table
from hybridspec.calibrate.features import trace_arrays
from hybridspec.calibrate.fit import CalibrationResult, fit_calibration
from hybridspec.calibrate.hazard import BETA_METHOD, RAW_METHOD, BetaPositionHazard
from hybridspec.calibrate.metrics import expected_emitted, survival
from hybridspec.calibrate.plots import plot_reliability
from hybridspec.errors import NotEnoughData


@pytest.fixture(scope="module")
def trace() -> pa.Table:
    return synthetic_trace(prompts=90, rounds=28, loops=True)


@pytest.fixture(scope="module")
def result(trace: pa.Table) -> CalibrationResult:
    return fit_calibration(trace, resamples=100)


def test_fit_uses_calibration_rounds_outside_loops_only(
    trace: pa.Table, result: CalibrationResult
) -> None:
    arrays = trace_arrays(trace)
    used = arrays.select((arrays.split == "calibration") & (arrays.loop_period == 0))
    expected = BetaPositionHazard().fit(used).table_
    assert result.hazard.weights_F.tobytes() == expected.weights_F.tobytes()
    assert result.summary.num_fit_rounds == len(used) == 60 * 24
    assert result.summary.num_test_rounds == 30 * 24
    assert result.summary.num_loop_rounds == 90 * 4
    assert result.summary.split_source == "trace"
    assert result.routing is None


def test_fit_beats_the_raw_probability_on_held_out_prompts(result: CalibrationResult) -> None:
    before, after = result.summary.before, result.summary.after
    for metric in ("hazard_log_loss", "hazard_brier", "hazard_ece", "survival_ece"):
        assert after[metric].value < before[metric].value
    assert after["hazard_ece"].value < 0.25 * before["hazard_ece"].value
    gain = before["hazard_log_loss"].value - after["hazard_log_loss"].value
    assert after["hazard_log_loss_gain"].value == pytest.approx(gain)
    assert "hazard_log_loss_gain" not in before
    assert abs(after["emitted_bias_16"].value) < 0.3 * abs(before["emitted_bias_16"].value)


def test_tables_have_every_set_once(result: CalibrationResult) -> None:
    metrics = check_table(result.metrics, METRICS_SCHEMA, path="m")
    rows = metrics.to_pylist()
    keys = [(r["split"], r["category"], r["model"], r["metric"]) for r in rows]
    assert len(set(keys)) == len(keys)
    sets = {(r["split"], r["category"]) for r in rows}
    tests = {("test", category) for category in ("all", *CATEGORIES)}
    assert sets == tests | {
        ("calibration", "all"),
        ("calibration-loops", "all"),
        ("test-loops", "all"),
    }
    assert {r["model"] for r in rows} == {RAW_METHOD, BETA_METHOD}
    reliability = check_table(result.reliability, RELIABILITY_SCHEMA, path="r").to_pylist()
    pooled = [r for r in reliability if r["position"] == -1 and r["model"] == RAW_METHOD]
    by_position = [r for r in reliability if r["position"] >= 0 and r["model"] == RAW_METHOD]
    for split in ("calibration", "test"):
        counts = [sum(r["n"] for r in rs if r["split"] == split) for rs in (pooled, by_position)]
        assert counts[0] == counts[1] > 0


def test_survival_and_emitted_tokens_follow_from_hazards() -> None:
    hazards = np.random.default_rng(0).uniform(size=(5, 15))
    emitted = expected_emitted(hazards)
    assert emitted.shape == (5, 16)
    for row, length in itertools.product(range(5), range(1, 17)):
        total = sum(np.prod(hazards[row, :k]) for k in range(length))
        assert emitted[row, length - 1] == pytest.approx(total)
    np.testing.assert_allclose(survival(hazards), np.diff(emitted, axis=1))


def test_without_test_rounds_a_share_of_prompts_is_held_out() -> None:
    table = synthetic_trace(prompts=60, rounds=20, splits=False)
    first = fit_calibration(table, resamples=20)
    assert first.summary.split_source == "hash"
    assert first.summary.num_test_rounds == 18 * 20
    assert first.summary.num_fit_rounds == 42 * 20


def test_fit_is_reproducible(trace: pa.Table, result: CalibrationResult) -> None:
    again = fit_calibration(trace, resamples=100)
    assert again.metrics.equals(result.metrics)
    assert again.reliability.equals(result.reliability)


def test_small_traces_are_refused() -> None:
    with pytest.raises(NotEnoughData, match="observed drafts of"):
        fit_calibration(synthetic_trace(prompts=6, rounds=4))
    with pytest.raises(NotEnoughData, match="no rounds"):
        fit_calibration(synthetic_trace(prompts=6, rounds=4).slice(0, 0))


def test_result_goes_into_a_bundle_and_summary_into_json(
    result: CalibrationResult, tmp_path: Path
) -> None:
    write_calibration(
        tmp_path,
        identity=CalibrationIdentity("t", "d", "float32"),
        hazard=result.hazard,
        routing=result.routing,
        reliability=result.reliability,
        metrics=result.metrics,
        provenance={"summary": result.summary.to_json()},
    )
    part = load_bundle(tmp_path).calibration
    assert part is not None
    assert part.hazard.knots_y.tobytes() == result.hazard.knots_y.tobytes()
    order = [(name, "ascending") for name in result.metrics.column_names]
    assert part.metrics.equals(result.metrics.sort_by(order))
    summary = json.loads(json.dumps(part.provenance["summary"]))
    assert summary["after"]["hazard_auc"]["value"] == result.summary.after["hazard_auc"].value


def test_plot_is_drawn_the_same_twice(result: CalibrationResult, tmp_path: Path) -> None:
    svg, png = plot_reliability(result.reliability, result.metrics, tmp_path / "a", title="pair")
    again, _ = plot_reliability(result.reliability, result.metrics, tmp_path / "b", title="pair")
    assert svg.read_bytes() == again.read_bytes()
    assert png.read_bytes().startswith(b"\x89PNG")
    root = ElementTree.parse(svg).getroot()
    words = " ".join("".join(node.itertext()) for node in root.iter() if "text" in str(node.tag))
    assert "before: the drafter's top-1 probability" in words
    assert f"ECE {result.summary.after['hazard_ece'].value:.3f}" in words
    with pytest.raises(NotEnoughData, match="no other rounds"):
        plot_reliability(result.reliability, result.metrics, tmp_path, split="other")


@pytest.mark.parametrize("name", ["lab", "small"])
def test_recorded_pairs(name: str) -> None:
    result = fit_calibration(recording(name), resamples=200)
    before, after = result.summary.before, result.summary.after
    assert after["hazard_log_loss"].value < before["hazard_log_loss"].value
    assert after["survival_log_loss"].value < before["survival_log_loss"].value
    assert after["hazard_ece"].value < 0.5 * before["hazard_ece"].value
    assert after["hazard_auc"].value >= 0.86
    # Paired on the same prompts, the gain is more than chance.
    assert after["hazard_log_loss_gain"].lo > 0.0
    assert result.routing is not None
    assert result.routing.num_layers == 8
    # Adjacent tokens share experts: 16 rows activate far fewer than 16 times top-k.
    per_layer = result.routing.total_mean_L[15] / 8
    assert per_layer < 8 * result.routing.total_mean_L[0] / 8
    report = result.summary.routing
    assert report is not None
    assert (report.first_router_r2_L[3:] > report.distinct_tokens_r2_L[3:]).all()
