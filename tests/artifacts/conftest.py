"""Small valid tables and bundles for the tests of this folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from hybridspec.artifacts.bundle import write_calibration, write_cost
from hybridspec.artifacts.identity import CalibrationIdentity, CostIdentity
from hybridspec.artifacts.schemas import (
    EXPERTS_SCHEMA,
    METRICS_SCHEMA,
    RELIABILITY_SCHEMA,
    SAMPLES_SCHEMA,
    table_from,
)
from hybridspec.artifacts.tables import HazardTable, RoutingTable, StepCostTable, ThroughputTable


def make_hazard(scale: float = 1.0) -> HazardTable:
    return HazardTable(
        method="beta-position-isotonic",
        weights_F=scale * np.array([0.9, 1.1, -0.2, 0.3, 0.05]),
        position_bias_D=scale * np.linspace(-0.5, 0.9, 15),
        knots_x=np.array([0.0, 0.3, 1.0]),
        knots_y=np.array([0.05, 0.4, 0.97]),
    )


def make_routing() -> RoutingTable:
    lengths = np.arange(1, 17)
    return RoutingTable(8, 8.0 * lengths**0.7, 64.0 * lengths**0.7, 6.0 + lengths / 10)


def make_step() -> StepCostTable:
    latency_us = 900.0 + 100.0 * np.arange(2 * 3 * 17, dtype=float).reshape(2, 3, 17)
    return StepCostTable(
        batch_sizes=np.array([1, 4]),
        context_tokens=np.array([0, 128, 512]),
        latency_us=latency_us,
        latency_p10_us=latency_us * 0.9,
        latency_p90_us=latency_us * 1.2,
        draft_us=np.full((2, 3), 350.0),
        expert_slope_us=1.75,
        expert_slope_r2=0.98,
    )


def make_throughput() -> ThroughputTable:
    return ThroughputTable(np.array([1, 4]), np.array([2.5e-3, 1.5e-3]), np.array([4, 0]))


CALIBRATION_IDENTITY = CalibrationIdentity(
    target_digest="a" * 64, drafter_digest="b" * 64, dtype="float32", prompts_digest="c" * 64
)
COST_IDENTITY = CostIdentity(
    device="some-cpu",
    memory_class="ram",
    cores=2,
    threads=1,
    engine="reference",
    engine_version="0.1.0",
    dtype="float32",
    architecture_digest="d" * 64,
    max_batch=4,
    torch_version="2.11",
)


def calibration_arguments(scale: float = 1.0) -> dict[str, Any]:
    reliability = {
        "split": ["test"] * 2,
        "model": ["raw-top1"] * 2,
        "position": [-1, -1],
        "bin": [0, 1],
        "mean_predicted": [0.2, 0.8],
        "mean_observed": [0.3, 0.9],
        "n": [10, 10],
    }
    metrics: dict[str, Any] = {
        "split": ["test"],
        "category": ["all"],
        "model": ["raw-top1"],
        "metric": ["hazard_log_loss"],
        "value": [0.5],
        "lo": [0.4],
        "hi": [0.6],
        "n": [20],
    }
    return {
        "identity": CALIBRATION_IDENTITY,
        "hazard": make_hazard(scale),
        "routing": make_routing(),
        "reliability": table_from(reliability, RELIABILITY_SCHEMA),
        "metrics": table_from(metrics, METRICS_SCHEMA),
        "provenance": {"command": "test"},
    }


def cost_arguments() -> dict[str, Any]:
    samples = {
        "part": ["round", "draft"],
        "batch_size": [1, 1],
        "context_tokens": [0, 0],
        "verify_length": [16, 0],
        "repeat": [0, 0],
        "latency_us": [1000.0, 300.0],
    }
    experts: dict[str, Any] = {name: [] for name in EXPERTS_SCHEMA.names}
    return {
        "identity": COST_IDENTITY,
        "step": make_step(),
        "samples": table_from(samples, SAMPLES_SCHEMA),
        "experts": table_from(experts, EXPERTS_SCHEMA),
        "throughput": make_throughput(),
        "provenance": {"seed": 0},
    }


@pytest.fixture
def calibration() -> Callable[..., dict[str, Any]]:
    return calibration_arguments


@pytest.fixture
def cost() -> Callable[..., dict[str, Any]]:
    return cost_arguments


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """A complete bundle, both parts and a throughput that belongs to them."""
    folder = tmp_path / "bundle"
    write_calibration(folder, **calibration_arguments())
    write_cost(folder, **cost_arguments())
    return folder


@pytest.fixture
def trace_columns() -> Callable[[int], dict[str, Any]]:
    def build(rows: int) -> dict[str, Any]:
        rng = np.random.default_rng(rows)
        return {
            "prompt_id": [f"p{i // 3}" for i in range(rows)],
            "category": ["code"] * rows,
            "split": ["test"] * rows,
            "round": [i % 3 for i in range(rows)],
            "generated_tokens": [1] * rows,
            "context_tokens": [9] * rows,
            "loop_period": [0] * rows,
            "accepted": rng.integers(0, 16, rows),
            "anchor": [5] * rows,
            "draft_tokens": rng.integers(0, 99, (rows, 15)),
            "target_tokens": rng.integers(0, 99, (rows, 16)),
            "p1": rng.uniform(0.5, 1, (rows, 15)),
            "p2": rng.uniform(0, 0.5, (rows, 15)),
            "entropy_nats": rng.uniform(0, 3, (rows, 15)),
            "target_p1": rng.uniform(0, 1, (rows, 16)),
            "routes": [b""] * rows,
        }

    return build


def rows_equal(left: pa.Table, right: pa.Table) -> bool:
    return left.cast(right.schema).equals(right)
