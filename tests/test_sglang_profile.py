"""Where a round's GPU time goes, read from a trace whose answer is known."""

# Modules of benchmarks are found by the path that this test adds.
# pyright: reportMissingImports=false

from __future__ import annotations

import dataclasses
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
from serving.load import Stream  # noqa: E402
from serving.profiles import write_profile  # noqa: E402
from sglang_profile import around_profile  # noqa: E402

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
    assert profile.outside_us_R == pytest.approx([ROUND_US - 95.0 - 500.0] * 5)


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
    name = (
        "void (anonymous namespace)::fused_rope_kernel<true, 128l>((anonymous namespace)::Params)"
    )
    assert short_name(name) == "fused_rope_kernel"


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


def recording(tmp_path: Path, *, with_trace: bool) -> Path:
    name = "a.trace.json.gz"
    folder = tmp_path / "profile-hybridspec-fixed"
    folder.mkdir(parents=True)
    if with_trace:
        events = {"traceEvents": trace(9)}
        (folder / name).write_bytes(gzip.compress(json.dumps(events).encode()))
    about = {
        "commit": "c0ffee",
        "machine": {"gpu": "a GPU"},
        "versions": {"sglang": "0.5.16"},
        "arms": "hybridspec-fixed",
    }
    arm = {
        "verify_length": 4,
        "ms_a_round_unprofiled": 0.98765,
        "trace": name,
        "profile": dataclasses.asdict(analyse(trace(9))),
    }
    path = tmp_path / "sglang_profile_raw.json"
    path.write_text(json.dumps({"about": about, "arms": {"hybridspec-fixed": arm}}))
    return path


@pytest.mark.parametrize("with_trace", [True, False])
def test_result_file_of_a_recording(tmp_path: Path, with_trace: bool) -> None:
    path = recording(tmp_path, with_trace=with_trace)
    content = json.loads(write_profile(path, traces=[], most=1, out=tmp_path / "out").read_text())
    assert content["commit"] == "c0ffee"
    assert content["versions"] == {"sglang": "0.5.16"}
    assert content["summary"]["hybridspec-fixed"] == {
        "rounds": 5, "round_us": 1000.0, "drafter_us": 95.0, "target_us": 500.0,
        "between_us": 405.0, "idle_us": 380.0, "between_least_us": 405.0,
        "ms_a_round_unprofiled": 0.988, "verify_length": 4,
    }  # fmt: skip
    kernels = {
        (row["group"], row["kernel"]): row["us_a_round"]
        for row in content["rows"]
        if row["kind"] == "kernel"
    }
    assert kernels == {
        (DRAFTER, "gemm"): 80.0,
        (TARGET, "gdn_verify"): 500.0,
        (TARGET, "1 others"): 20.0,
        (EAGER, "copy"): 30.0,
        (EAGER, "1 others"): 10.0,
    }
    groups = [row for row in content["rows"] if row["kind"] == "group"]
    assert [row["idle_us"] for row in groups] == [15.0, 0.0, 365.0]


def test_rounds_before_the_profiler() -> None:
    # Rounds of 10 ms from 1 s on, three tokens each; the profiler starts at 2 s.
    arrived = [1.0 + 0.01 * n for n in range(200)]
    stream = Stream(1, "c", 0.9, arrived, [1 + 3 * n for n in range(200)], [1] * 200)
    found = around_profile(stream, 500, 2.0)
    assert found["context_tokens"] == 500 + 1 + 3 * 100
    assert found["ms_a_round_before_profile"] == pytest.approx(10.0)
    assert found["rounds_before_profile"] == 40
    assert around_profile(stream, 500, 0.5) == {}


def test_the_result_file_is_complete() -> None:
    content = json.loads((BENCHMARKS / "results" / "sglang_profile.json").read_text())
    for arm, numbers in content["summary"].items():
        parts = sum(numbers[key] for key in ("drafter_us", "target_us", "between_us"))
        assert parts == pytest.approx(numbers["round_us"], abs=0.5), arm
        assert numbers["ms_a_round_unprofiled"] < numbers["round_us"] / 1000
