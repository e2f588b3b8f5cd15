"""A trace four times as long takes about four times as long, and no more memory to speak of."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from trace_kit import make_trace, write_curve, write_trace

MEASURE = r"""
import json, re, sys, time
from pathlib import Path
from hybridspec.costmodels.catalog import DEFAULT_POLICIES
from hybridspec.costmodels.prediction import load_price, predict
from hybridspec.costmodels.trace_stream import open_trace
stream = open_trace(Path(sys.argv[1]))
start = time.process_time()
predict(stream, [load_price(Path(sys.argv[2]))], DEFAULT_POLICIES, hazards="raw", split="test")
print(json.dumps({
    "seconds": time.process_time() - start,
    # Not ru_maxrss: across exec it remembers the parent.
    "peak_mib": int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1]) / 1024,
}))
"""


def measured(folder: Path, prompts: int, *, runs: int = 1) -> dict[str, float]:
    """Processor seconds, the best of some runs, and the largest peak of memory."""
    rounds = make_trace(prompts=prompts, rounds=20)
    trace = write_trace(folder / f"{prompts}.parquet", rounds, row_group=20_000)
    curve = write_curve(folder / "curve.json")
    found: list[dict[str, float]] = []
    for _ in range(runs):
        done = subprocess.run(
            [sys.executable, "-c", MEASURE, str(trace), str(curve)],
            check=True,
            capture_output=True,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )
        found.append(json.loads(done.stdout))
    return {
        "seconds": min(run["seconds"] for run in found),
        "peak_mib": max(run["peak_mib"] for run in found),
    }


@pytest.mark.slow
def test_time_is_linear_and_memory_bounded(tmp_path: Path) -> None:
    # Both fill the 50,000 rounds that policies are fitted on at most.
    small, large = (measured(tmp_path, size, runs=2) for size in (4_000, 16_000))
    assert large["seconds"] < 5.5 * small["seconds"]
    assert large["peak_mib"] < small["peak_mib"] + 100
    assert large["peak_mib"] < 1024


def test_twenty_thousand_rounds_take_seconds(tmp_path: Path) -> None:
    found = measured(tmp_path, 1_000)
    assert found["seconds"] < 10.0
    assert found["peak_mib"] < 1024
