"""A killed recording resumes to the rows of an unbroken one; anything else is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic_rounds import make_identity, synthetic_trace

from hybridspec.artifacts.schemas import TRACE_SCHEMA
from hybridspec.calibrate.rounds import RoundRow, TraceIdentity, rows_to_table
from hybridspec.calibrate.trace import TraceWriter, read_trace
from hybridspec.errors import BundleError, EnvironmentMissing, HybridSpecError, UsageError

GROUPS = 6


def group_rows(group: int, rounds: int = 4) -> list[RoundRow]:
    """Rounds of two prompts in turn, each going on where its last one ended."""
    rng = np.random.default_rng(group)
    rows: list[RoundRow] = []
    for index in range(rounds):
        before = rows[index - 2] if index >= 2 else None
        start = 0 if before is None else before.generated_tokens + before.accepted + 1
        anchor = int(rng.integers(0, 99))
        if before is not None:
            anchor = before.target_tokens[before.accepted]
        drafts = rng.integers(0, 99, 15).tolist()
        accepted = int(rng.integers(0, 16))
        # The target agrees with the accepted drafts and not with the one after them.
        targets = [*drafts[:accepted], *((rng.integers(0, 99, 16) + 99).tolist())][:16]
        p1 = rng.uniform(0.5, 0.9, 15).astype(np.float32)
        rows.append(
            RoundRow(
                prompt_id=f"p{group}-{index % 2}",
                category="code",
                split="calibration",
                round=index // 2,
                generated_tokens=start,
                context_tokens=10 + start,
                accepted=accepted,
                anchor=anchor,
                draft_tokens=drafts,
                target_tokens=targets,
                p1=p1.tolist(),
                p2=(p1 / 2).tolist(),
                entropy_nats=rng.uniform(0.1, 0.9, 15).astype(np.float32).tolist(),
                target_p1=rng.uniform(0.1, 0.9, 16).astype(np.float32).tolist(),
            )
        )
    return rows


def record(folder: Path, groups: Sequence[int], *, resume: bool = False) -> None:
    with TraceWriter.open(folder, make_identity(), num_groups=GROUPS, resume=resume) as writer:
        for group in groups:
            if group not in writer.completed:
                writer.write_group(group, group_rows(group, rounds=group))


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    folder = tmp_path / "trace"
    record(folder, range(GROUPS))
    return folder


def test_trace_reads_back_rows_and_identity(trace: Path) -> None:
    table = read_trace(trace)
    expected = [row for group in range(GROUPS) for row in group_rows(group, rounds=group)]
    assert table.select(TRACE_SCHEMA.names).equals(rows_to_table(expected, make_identity()))
    assert table.num_rows == 15
    assert json.loads(table.schema.metadata[b"identity"]) == make_identity().to_json()


def test_one_file_is_a_trace_too(trace: Path, tmp_path: Path) -> None:
    table = read_trace(trace)
    pq.write_table(table, tmp_path / "all.parquet")
    assert read_trace(tmp_path / "all.parquet").equals(table, check_metadata=True)


@settings(max_examples=8, deadline=None)
@given(order=st.permutations(range(GROUPS)), cut=st.integers(0, GROUPS))
def test_any_order_and_break_gives_the_same_rows(
    order: list[int], cut: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    base = tmp_path_factory.mktemp("order")
    record(base / "whole", range(GROUPS))
    record(base / "broken", order[:cut])
    record(base / "broken", order[cut:], resume=True)
    assert read_trace(base / "broken").equals(read_trace(base / "whole"), check_metadata=True)


@pytest.mark.parametrize("call", [1, 3, 8])
def test_killed_recording_resumes_to_the_same_rows(trace: Path, tmp_path: Path, call: int) -> None:
    folder = tmp_path / "killed"
    code = f"""
import os, pathlib, signal, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
calls = 0
real = os.fsync
def fsync(descriptor):
    global calls
    calls += 1
    if calls == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)
    real(descriptor)
os.fsync = fsync
from test_trace import GROUPS, record
record(pathlib.Path(sys.argv[1]), range(GROUPS))
"""
    command = [sys.executable, "-c", code, str(folder), str(call)]
    assert subprocess.run(command).returncode == -9
    # The first two calls are those of run.json; each part makes two, the rename between them.
    done = max(0, (call - 2) // 2)
    with TraceWriter.open(folder, make_identity(), num_groups=GROUPS, resume=True) as writer:
        assert writer.completed == frozenset(range(done))
        assert not [path for path in folder.iterdir() if path.name.endswith("-tmp")]
    record(folder, range(GROUPS), resume=True)
    assert read_trace(folder).equals(read_trace(trace), check_metadata=True)


def test_content_without_resume_is_refused(trace: Path) -> None:
    with pytest.raises(UsageError, match=r"is not empty.*--resume"):
        record(trace, [0])


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"temperature": 0.7}, "temperature"),
        ({"group_size": 3}, "group_size"),
    ],
)
def test_resuming_with_something_else_is_refused(
    trace: Path, change: dict[str, Any], name: str
) -> None:
    with pytest.raises(BundleError, match=f"recorded with {name} = .*now it is"):
        TraceWriter.open(trace, make_identity(**change), num_groups=GROUPS, resume=True)
    with pytest.raises(BundleError, match="num_groups = 6, now it is 7"):
        TraceWriter.open(trace, make_identity(), num_groups=7, resume=True)


def test_other_prompts_are_told_without_their_digest(trace: Path) -> None:
    other = make_identity(prompts_digest="d" * 64)
    with pytest.raises(BundleError) as refusal:
        TraceWriter.open(trace, other, num_groups=GROUPS + 1, resume=True)
    size = other.group_size
    said = str(refusal.value)
    assert f"({GROUPS} groups, at most {GROUPS * size} prompts then, " in said
    assert f"{GROUPS + 1} groups, at most {(GROUPS + 1) * size} prompts now)" in said
    assert "--prompts, --max-prompts, --test-fraction and --chat" in said
    assert "dddd" not in said


def test_other_folders_are_not_resumed(tmp_path: Path) -> None:
    (tmp_path / "holiday.jpg").write_bytes(b"x")
    with pytest.raises(BundleError, match="no trace to resume"):
        TraceWriter.open(tmp_path, make_identity(), num_groups=1, resume=True)


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    with (
        TraceWriter.open(tmp_path, make_identity(), num_groups=2),
        pytest.raises(EnvironmentMissing, match="another process"),
    ):
        TraceWriter.open(tmp_path, make_identity(), num_groups=2, resume=True)
    TraceWriter.open(tmp_path, make_identity(), num_groups=2, resume=True).close()


def test_groups_are_written_once_and_in_range(tmp_path: Path) -> None:
    with TraceWriter.open(tmp_path, make_identity(), num_groups=2) as writer:
        writer.write_group(0, group_rows(0))
        with pytest.raises(UsageError, match="already written"):
            writer.write_group(0, group_rows(0))
        with pytest.raises(UsageError, match=r"not in 0\.\.1"):
            writer.write_group(2, group_rows(2))
    with pytest.raises(UsageError, match="at least one group"):
        TraceWriter.open(tmp_path, make_identity(), num_groups=0)


def test_incomplete_trace_is_read_only_on_request(tmp_path: Path) -> None:
    record(tmp_path, [0, 3])
    with pytest.raises(BundleError, match=r"has 2 of 6 groups.*--resume"):
        read_trace(tmp_path)
    assert read_trace(tmp_path, allow_partial=True).num_rows == 3
    with pytest.raises(BundleError, match="does not exist"):
        read_trace(tmp_path / "nowhere")


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_damage_is_refused(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.getbasetemp() / "damaged-trace"
    if not folder.exists():
        record(folder, range(GROUPS))
    intact = read_trace(folder)
    path = data.draw(st.sampled_from([folder / "run.json", folder / "part-00003.parquet"]))
    original = path.read_bytes()
    damaged = bytearray(original)
    at = data.draw(st.integers(0, len(damaged) - 1))
    if data.draw(st.booleans()):
        damaged[at] ^= data.draw(st.integers(1, 255))
    else:
        del damaged[at:]
    path.write_bytes(damaged)
    try:
        outcome = read_trace(folder)
    except BundleError:
        outcome = None
    finally:
        path.write_bytes(original)
    assert outcome is None or outcome.equals(intact)


def test_foreign_part_is_refused(trace: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    with TraceWriter.open(other, make_identity(seed=9), num_groups=GROUPS) as writer:
        writer.write_group(2, group_rows(2))
    (other / "part-00002.parquet").replace(trace / "part-00002.parquet")
    with pytest.raises(BundleError, match=r"part-00002.*recorded with something else"):
        read_trace(trace)
    (trace / "part-00009.parquet").write_bytes(b"")
    with pytest.raises(BundleError, match="has a part 9, but"):
        read_trace(trace)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"accepted": 16}, "'accepted' has 1 value"),
        ({"accepted": -1}, "'accepted' has 1 value"),
        ({"p1": [1.5] * 15}, "'p1' has 15 value"),
        ({"p1": [float("nan")] * 15}, "NaN"),
        ({"split": "train"}, "'split' has 'train'"),
        ({"routes": b"abc"}, r"routes have \[3\] bytes; a round has 0"),
        ({"context_tokens": -1}, "'context_tokens' has 1"),
        ({"anchor": 2**40}, "anchor"),
    ],
)
def test_impossible_rows_are_refused(change: dict[str, Any], message: str) -> None:
    row = replace(group_rows(1)[0], **change)
    with pytest.raises(HybridSpecError, match=message):
        rows_to_table([row], make_identity())


def test_rows_of_other_lengths_are_refused() -> None:
    with pytest.raises(BundleError, match="draft_tokens has 14 values; expected 15"):
        replace(group_rows(1)[0], draft_tokens=[1] * 14)


def test_routes_are_all_or_none() -> None:
    identity = make_identity(layers=2, topk=3, experts=300)
    assert identity.route_bytes() == 2 * 16 * 3 * 2
    rows = group_rows(1, rounds=2)
    with_routes = [replace(row, routes=bytes(identity.route_bytes())) for row in rows]
    assert rows_to_table(with_routes, identity).num_rows == 2
    with pytest.raises(BundleError, match=r"routes have \[0, 192\] bytes"):
        rows_to_table([rows[0], with_routes[1]], identity)


def test_identity_round_trips_and_refuses_other_types() -> None:
    identity = make_identity(top_p=1)
    assert TraceIdentity.from_json(identity.to_json(), path="x") == identity
    raw = identity.to_json()
    for bad in ({**raw, "layers": "8"}, {**raw, "more": 1}, [1], {**raw, "layers": True}):
        with pytest.raises(BundleError, match="identity"):
            TraceIdentity.from_json(bad, path="x")


def test_synthetic_trace_is_a_trace() -> None:
    assert synthetic_trace(prompts=3, rounds=2).num_rows == 6
