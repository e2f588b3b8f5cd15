"""SGLang's own classes read what `hybridspec bundle export --format sglang` writes.

`HYBRIDSPEC_SGLANG_PYTHON` names the Python of an environment with SGLang 0.5.16. The two modules
are loaded from its files and not through its packages, which import what only a GPU machine has:
SGLang without its dependencies beside msgspec and any PyTorch is enough.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hybridspec.artifacts.bundle import load_bundle, write_calibration
from hybridspec.artifacts.dspark import sps_export
from hybridspec.artifacts.tables import StepCostTable, TemperatureTable

ROOT = Path(__file__).resolve().parents[2]
BUNDLE = ROOT / "benchmarks" / "results" / "cpu_demo_bundle"

pytestmark = pytest.mark.skipif(not BUNDLE.is_dir(), reason="no demonstration bundle (an sdist)")

VERSION = "0.5.16"
COMMAND = (sys.executable, "-m", "hybridspec.cli.main", "bundle", "export")

READER = """
import json, sys
from importlib.metadata import distribution, version
from importlib.util import module_from_spec, spec_from_file_location


def load(name):
    path = f"sglang/srt/speculative/dspark_components/{name}.py"
    spec = spec_from_file_location(name, distribution("sglang").locate_file(path))
    sys.modules[name] = module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


dspark_sps, dspark_sts = load("dspark_sps"), load("dspark_sts")
tables = [dspark_sps.load_sps_table_from_path(path) for path in sys.argv[1:3]]
sts = dspark_sts.load_sts_calibration_from_path(sys.argv[3])
single, several = tables
print(json.dumps({
    "version": version("sglang"),
    "kinds": [type(table).__name__ for table in tables] + [type(sts).__name__],
    "uninitialised": [dspark_sps.is_uninitialized_sps_table(table) for table in tables],
    "lookup": [1e6 / single.lookup(rows) for rows in range(1, 17)],
    "step_us": [[1e6 * several.step_time(num_reqs=n, budget=n * (rows - 1))
                 for rows in range(1, 17)] for n in several.bs_probes],
    "temperatures": sts.temperatures,
    "again": dspark_sts.DSparkStsCalibration.from_json(sts.to_json()) == sts,
}))
"""


@pytest.fixture(scope="module")
def python() -> str:
    path = os.environ.get("HYBRIDSPEC_SGLANG_PYTHON")
    if not path:
        pytest.skip(f"HYBRIDSPEC_SGLANG_PYTHON names no Python with SGLang {VERSION}")
    return path


def two_batches(step: StepCostTable) -> StepCostTable:
    """The measured curve and a made one of 4 requests that costs more a row."""

    def widen(values: Any) -> Any:
        return np.concatenate([values, 1.3 * values + 40.0 * np.arange(17)], axis=0)

    return StepCostTable(
        batch_sizes=np.array([1, 4]),
        context_tokens=step.context_tokens,
        latency_us=widen(step.latency_us),
        latency_p10_us=widen(step.latency_p10_us),
        latency_p90_us=widen(step.latency_p90_us),
        draft_us=np.concatenate([step.draft_us, step.draft_us]),
        expert_slope_us=step.expert_slope_us,
        expert_slope_r2=step.expert_slope_r2,
    )


def test_real_classes_read_both_files(python: str, tmp_path: Path) -> None:
    made = tmp_path / "bundle"
    shutil.copytree(BUNDLE, made)
    part = load_bundle(BUNDLE).calibration
    assert part is not None
    kept = ("identity", "hazard", "routing", "reliability", "metrics", "provenance")
    temperatures = np.linspace(0.5, 2.0, 15)
    write_calibration(
        made,
        **{name: getattr(part, name) for name in kept},
        temperatures=TemperatureTable(temperatures, np.zeros(15), np.zeros(15), num_rounds=400),
    )
    done = subprocess.run(
        [*COMMAND, str(made), "--format", "sglang", "-o", str(tmp_path), "--context", "96"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    cost = load_bundle(BUNDLE).cost
    assert cost is not None
    several = sps_export(two_batches(cost.step), context_tokens=96)
    (tmp_path / "several.json").write_text(json.dumps(several.content))
    names = ("dspark_sps.json", "several.json", "dspark_sts.json")
    read = subprocess.run(
        [python, "-c", READER, *(str(tmp_path / name) for name in names)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert read.returncode == 0, read.stderr[-2000:]
    found = json.loads(read.stdout.splitlines()[-1])
    assert found["version"] == VERSION
    assert found["kinds"] == ["SpsCostTable", "SpsAdditiveCostTable", "DSparkStsCalibration"]
    assert found["uninitialised"] == [False, False]
    measured = cost.step.latency_us[0, 0, 1:]
    assert found["lookup"] == pytest.approx(measured.tolist(), rel=1e-12)
    wanted = two_batches(cost.step).latency_us[:, 0, 1:]
    for row, expected in zip(found["step_us"], wanted.tolist(), strict=True):
        assert row == pytest.approx(expected, rel=several.largest_error + 1e-9)
    assert several.largest_error < 0.12
    assert found["temperatures"] == temperatures.tolist()
    assert found["again"]
