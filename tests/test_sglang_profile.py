"""Where a round's GPU time goes, read from a trace whose answer is known."""

# Modules of benchmarks are found by the path that this test adds.
# pyright: reportMissingImports=false

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
if not BENCHMARKS.is_dir():
    pytest.skip("no benchmarks in this tree (an sdist)", allow_module_level=True)
sys.path.insert(0, str(BENCHMARKS))

from serving.kineto import (  # noqa: E402
    DRAFTER,
    EAGER,
    TARGET,
    NoRounds,
    analyse,
    covered,
    read_events,
    short_name,
)

ROUND_US = 1000.0


def kernel(name: str, at: float, us: float, correlation: int, cat: str = "kernel") -> dict:
    args = {"correlation": correlation, "stream": 7}
    return {"ph": "X", "cat": cat, "name": name, "ts": at, "dur": us, "pid": 0, "tid": 7,
            "args": args}  # fmt: skip


def round_events(number: int, *, drafter: bool = True) -> list[dict]:
    """Drafter 4 x 20 us with gaps of 5, eager 30 us, target 20 x 25 us without a gap, a copy."""
    began, ids = 5000.0 + number * ROUND_US, 100 * number
    events: list[dict[str, Any]] = []

    def launched(correlation: int) -> None:
        events.append(
            {"ph": "X", "cat": "cuda_runtime", "name": "cudaGraphLaunch", "ts": began - 50,
             "dur": 9, "pid": 1, "tid": 1, "args": {"correlation": correlation, "cbid": 311}}
        )  # fmt: skip

    if drafter:
        launched(ids)
        events += [kernel("gemm", began + 25 * n, 20, ids) for n in range(4)]
    events.append(kernel("void at::native::copy<int>(int)", began + 150, 30, ids + 1))
    launched(ids + 2)
    events += [kernel("gdn_verify", began + 200 + 25 * n, 25, ids + 2) for n in range(20)]
    # On another stream, beside a kernel of the target.
    events.append(kernel("shared", began + 200, 20, ids + 2))
    events.append(kernel("Memcpy DtoH", began + 720, 10, ids + 3, cat="gpu_memcpy"))
    events.append({"ph": "i", "name": "marker", "ts": began})
    return events


def trace(rounds: int, **options: bool) -> list[dict]:
    return [event for number in range(rounds) for event in round_events(number, **options)]


def test_groups_spans_and_idle_time() -> None:
    profile = analyse(trace(9))
    assert profile.rounds == 5
    assert profile.round_us == pytest.approx(ROUND_US)
    assert profile.busy_us == pytest.approx({DRAFTER: 80.0, TARGET: 500.0, EAGER: 40.0})
    assert profile.span_us == pytest.approx({DRAFTER: 95.0, TARGET: 500.0})
    assert profile.idle_us[f"in the {DRAFTER}"] == pytest.approx(15.0)
    assert profile.idle_us[f"in the {TARGET}"] == pytest.approx(0.0)
    assert profile.idle_us[EAGER] == pytest.approx(ROUND_US - 95.0 - 500.0 - 40.0)
    rows = {(row.group, row.name): (row.count, row.us) for row in profile.rows}
    assert rows[TARGET, "gdn_verify"] == (20, pytest.approx(500.0))
    assert rows[TARGET, "shared"] == (1, pytest.approx(20.0)), "sums may overlap, busy time not"
    assert rows[EAGER, "copy"] == (1, pytest.approx(30.0))
    assert rows[EAGER, "Memcpy DtoH"] == (1, pytest.approx(10.0))
    total = sum(profile.busy_us.values()) + sum(profile.idle_us.values())
    assert total == pytest.approx(ROUND_US)


def test_plain_decoding_has_one_graph() -> None:
    profile = analyse(trace(8, drafter=False))
    assert profile.busy_us[DRAFTER] == 0
    assert profile.busy_us[TARGET] == pytest.approx(500.0)
    assert profile.round_us == pytest.approx(ROUND_US)


def test_graphs_are_found_without_their_calls() -> None:
    events = [event for event in trace(9) if event.get("name") != "cudaGraphLaunch"]
    # The drafter's 4 kernels are then too few to tell; the target's are not.
    assert analyse(events).busy_us[TARGET] == pytest.approx(500.0)


def test_a_trace_without_rounds_is_refused() -> None:
    with pytest.raises(NoRounds, match="profile more steps"):
        analyse(trace(3))
    with pytest.raises(NoRounds):
        analyse([])


def test_union_of_intervals() -> None:
    assert covered([(0, 2), (1, 3), (5, 6)]) == 4
    assert covered([(0, 2), (1, 3), (5, 9)], 1, 6) == 3
    assert covered([]) == 0


def test_names() -> None:
    name = "void at::native::elementwise_kernel<128, 2, at::native::gpu_kernel_impl_nocast<Add>>(x)"
    assert short_name(name) == "elementwise_kernel"
    assert short_name("fused_moe_kernel") == "fused_moe_kernel"


def test_command_prints_the_table(tmp_path: Path) -> None:
    path = tmp_path / "a.trace.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": trace(8)}).encode()))
    assert len(read_events(path)) == len(trace(8))
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "sglang_profile.py"), "analyse", str(path)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "4 rounds of 1000 us" in done.stdout
    assert f"{TARGET}: busy 500 us, first to last kernel 500" in done.stdout
