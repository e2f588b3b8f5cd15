"""SGLang's two tables: exact where the format can say it, with the error where it cannot."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bundle_kit import calibration_arguments, forge, make_step, make_temperatures
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridspec.artifacts.bundle import load_bundle, write_calibration
from hybridspec.artifacts.dspark import sps_export, sts_export
from hybridspec.artifacts.tables import StepCostTable
from hybridspec.errors import BundleError


def step_of(latency_us: np.ndarray, batches: list[int]) -> StepCostTable:
    return StepCostTable(
        batch_sizes=np.array(batches),
        context_tokens=np.array([64]),
        latency_us=latency_us,
        latency_p10_us=latency_us,
        latency_p90_us=latency_us,
        draft_us=np.full((len(batches), 1), 9.0),
        expert_slope_us=0.0,
        expert_slope_r2=0.0,
    )


def test_one_batch_is_exact_at_each_context() -> None:
    step = make_step()
    one = dataclasses.replace(
        step,
        batch_sizes=step.batch_sizes[1:],
        latency_us=step.latency_us[1:],
        latency_p10_us=step.latency_p10_us[1:],
        latency_p90_us=step.latency_p90_us[1:],
        draft_us=step.draft_us[1:],
    )
    for place, context in enumerate((0, 128, 512)):
        export = sps_export(one, context_tokens=context)
        assert export.content["sample_batch_tokens"] == [4 * length for length in range(1, 17)]
        assert export.content["max_batch_tokens"] == 64
        steps = np.array(export.content["sample_steps_per_sec"])
        np.testing.assert_allclose(1e6 / steps, one.latency_us[0, place, 1:], rtol=1e-12)
        assert export.largest_error == 0.0
    assert sps_export(one).context_tokens == 128
    with pytest.raises(BundleError, match="context 7 was not measured"):
        sps_export(one, context_tokens=7)


@settings(max_examples=30, deadline=None)
@given(
    bias=st.floats(10, 1e4),
    rises=st.lists(st.floats(0, 500), min_size=2, max_size=2),
    slope=st.floats(0, 50),
)
def test_a_sum_is_found_again(bias: float, rises: list[float], slope: float) -> None:
    batches = [1, 2, 4]
    alpha = np.concatenate([[0.0], np.cumsum(rises)])
    tokens = np.array(batches)[:, None] * np.arange(17)
    latency_us = (bias + alpha[:, None] + slope * np.sqrt(tokens))[:, None, :]
    export = sps_export(step_of(latency_us, batches))
    assert export.largest_error < 1e-4
    assert export.content["bias_seconds"] > 0
    assert np.all(np.diff(export.content["theta_seconds"]) >= -1e-15)


def test_what_a_sum_cannot_say_is_reported() -> None:
    tokens = np.array([1, 8])[:, None] * np.arange(17)
    latency_us = (100.0 + 0.05 * np.arange(17) ** 2.5 * np.array([[1.0], [3.0]]))[:, None, :]
    assert tokens.shape == latency_us[:, 0].shape
    export = sps_export(step_of(latency_us, [1, 8]))
    read = {
        length: export.content["bias_seconds"]
        + export.content["alpha_seconds"][0]
        + export.content["theta_seconds"][export.content["m_probes"].index(length)]
        for length in range(1, 17)
    }
    worst = max(abs(1e6 * read[length] / latency_us[0, 0, length] - 1) for length in read)
    assert 0.0 < worst <= export.largest_error + 1e-12


def test_temperatures_are_those_of_the_bundle(tmp_path: Path) -> None:
    arguments = calibration_arguments(temperatures=make_temperatures())
    write_calibration(tmp_path, **arguments)
    part = load_bundle(tmp_path).calibration
    assert part is not None
    assert part.temperatures is not None
    sts = sts_export(part.temperatures, dataset="d")
    assert sts == {
        "temperatures": np.linspace(0.6, 2.4, 15).tolist(),
        "dataset": "d",
        "num_samples": 400,
        "ece_before": [0.05] * 15,
        "ece_after": [0.01] * 15,
    }


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"temperatures_D": np.zeros(15)}, "temperatures must be > 0"),
        ({"temperatures_D": np.ones(14)}, r"shape \(14,\)"),
        ({"ece_after_D": np.full(15, np.nan)}, "NaN"),
        ({"ece_before_D": np.full(15, 1.5)}, "calibration errors in 0..1"),
        ({"num_rounds": 0}, "of no rounds"),
    ],
)
def test_impossible_temperatures_are_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(BundleError, match=says):
        replace(make_temperatures(), **changes)


def test_forged_positions_are_refused(tmp_path: Path) -> None:
    write_calibration(tmp_path, **calibration_arguments(temperatures=make_temperatures()))
    forge(tmp_path, "calibration", "temperatures", lambda table: table.slice(1))
    with pytest.raises(BundleError, match="positions must count 0 to 14 in order"):
        load_bundle(tmp_path)
