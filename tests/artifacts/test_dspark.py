"""SGLang's two tables: exact where the format can say it, with the error where it cannot."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from bundle_kit import make_step
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridspec.artifacts.dspark import sps_export, sts_export
from hybridspec.artifacts.schemas import RELIABILITY_SCHEMA, table_from
from hybridspec.artifacts.tables import StepCostTable
from hybridspec.errors import BundleError, NotEnoughData


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


def bins(temperatures: list[float], *, n: int = 400, split: str = "calibration") -> dict[str, list]:
    predicted = np.linspace(0.05, 0.95, 19)
    logit = np.log(predicted / (1 - predicted))
    rows: dict[str, list] = {name: [] for name in RELIABILITY_SCHEMA.names}
    for position, temperature in enumerate(temperatures, start=-1):
        for index, value in enumerate(1 / (1 + np.exp(-logit / temperature))):
            row = (split, "raw-top1", position, index, predicted[index], value, n)
            for name, cell in zip(RELIABILITY_SCHEMA.names, row, strict=True):
                rows[name].append(cell)
    return rows


def test_temperatures_are_found_again() -> None:
    wanted = np.linspace(0.6, 2.4, 16).tolist()
    table = table_from(bins(wanted), RELIABILITY_SCHEMA)
    sts = sts_export(table, dataset="d")
    np.testing.assert_allclose(sts["temperatures"], wanted[1:], rtol=1e-3)
    assert sts["num_samples"] == 19 * 400
    assert max(sts["ece_after"]) < 1e-3 < max(sts["ece_before"])
    assert sts["dataset"] == "d"


def test_positions_with_few_rows_take_the_common_temperature() -> None:
    columns = bins([1.7, *np.linspace(0.6, 2.4, 15)])
    columns["n"] = [
        n if position in (-1, 0) else 1
        for n, position in zip(columns["n"], columns["position"], strict=True)
    ]
    sts = sts_export(table_from(columns, RELIABILITY_SCHEMA), dataset="d")
    assert sts["temperatures"][0] == pytest.approx(0.6, rel=1e-3)
    np.testing.assert_allclose(sts["temperatures"][1:], 1.7, rtol=1e-3)


def test_too_few_rows_are_refused() -> None:
    few = table_from(bins([1.0] * 16, n=5), RELIABILITY_SCHEMA)
    with pytest.raises(NotEnoughData, match="95 calibration rows"):
        sts_export(few, dataset="d")
    other = table_from(bins([1.0] * 16, split="test"), RELIABILITY_SCHEMA)
    with pytest.raises(NotEnoughData, match="0 calibration rows"):
        sts_export(other, dataset="d")
