"""Small valid tables and bundles, and damage to them that a digest does not see."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from hybridspec.artifacts.atomic import write_json
from hybridspec.artifacts.bundle import write_calibration, write_cost
from hybridspec.artifacts.identity import CalibrationIdentity, CostIdentity
from hybridspec.artifacts.manifest import (
    CalibrationEntry,
    CostEntry,
    Manifest,
    Parts,
    part_content_id,
)
from hybridspec.artifacts.schemas import (
    EXPERTS_SCHEMA,
    METRICS_SCHEMA,
    RELIABILITY_SCHEMA,
    SAMPLES_SCHEMA,
    table_from,
)
from hybridspec.artifacts.store import decode_table, encode
from hybridspec.artifacts.tables import (
    HazardTable,
    RoutingTable,
    StepCostTable,
    TemperatureTable,
    ThroughputTable,
)


def make_hazard(scale: float = 1.0) -> HazardTable:
    return HazardTable(
        method="beta-position-isotonic",
        weights_F=scale * np.array([0.9, 1.1, -0.2, 0.3, 0.05]),
        position_bias_D=scale * np.linspace(-0.5, 0.9, 15),
        knots_x=np.array([0.0, 0.3, 1.0]),
        knots_y=np.array([0.05, 0.4, 0.97]),
    )


def make_routing() -> RoutingTable:
    growth = np.arange(1, 17, dtype=np.float64) ** np.float64(0.7)
    return RoutingTable(8, 8.0 * growth, 64.0 * growth, np.linspace(0.0, 6.0, 16))


def make_step(factor: float = 1.0) -> StepCostTable:
    latency_us = factor * (900.0 + 100.0 * np.arange(2 * 3 * 17, dtype=float).reshape(2, 3, 17))
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


def calibration_arguments(scale: float = 1.0, **changes: Any) -> dict[str, Any]:
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
        **changes,
    }


def make_temperatures() -> TemperatureTable:
    return TemperatureTable(
        np.linspace(0.6, 2.4, 15), np.full(15, 0.05), np.full(15, 0.01), num_rounds=400
    )


def cost_arguments(**changes: Any) -> dict[str, Any]:
    samples = {
        "part": ["draft", "round"],
        "batch_size": [1, 1],
        "context_tokens": [0, 0],
        "verify_length": [0, 16],
        "repeat": [0, 0],
        "latency_us": [300.0, 1000.0],
    }
    experts: dict[str, Any] = {name: [] for name in EXPERTS_SCHEMA.names}
    return {
        "identity": COST_IDENTITY,
        "step": make_step(),
        "samples": table_from(samples, SAMPLES_SCHEMA),
        "experts": table_from(experts, EXPERTS_SCHEMA),
        "throughput": make_throughput(),
        "provenance": {"seed": 0},
        **changes,
    }


def make_bundle(folder: Path) -> Path:
    """A complete bundle, both parts and a throughput that belongs to them."""
    write_calibration(folder, **calibration_arguments())
    write_cost(folder, **cost_arguments())
    return folder


def forge(folder: Path, part: str, name: str, change: Callable[[pa.Table], pa.Table]) -> None:
    """Change a table and sign it again, so that only the check of its values can see the change."""
    raw = json.loads((folder / "manifest.json").read_text())
    files = raw["parts"][part]["files"]
    index = next(i for i, entry in enumerate(files) if entry["name"] == name)
    table = change(decode_table((folder / files[index]["path"]).read_bytes(), path="forged"))
    payload = encode(part, name, table)
    (folder / payload.entry.path).write_bytes(payload.data)
    files[index] = payload.entry.model_dump()
    sign(folder, raw)


def sign(folder: Path, raw: dict[str, Any]) -> None:
    """Write a manifest with content ids that fit it."""
    manifest = Manifest.model_validate_json(json.dumps(raw))
    entries: dict[str, Any] = {}
    kinds = {"calibration": CalibrationEntry, "cost": CostEntry}
    for part, kind in kinds.items():
        entry = getattr(manifest.parts, part)
        if entry is not None:
            content_id = part_content_id(entry.identity, entry.files)
            entries[part] = kind.model_validate(dict(entry) | {"content_id": content_id})
    built = Manifest.build(parts=Parts(**entries), throughput=manifest.throughput)
    write_json(folder / "manifest.json", built.to_json())


def trace_columns(rows: int) -> dict[str, Any]:
    """Columns of a trace of random values."""
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
