"""Traces whose rounds do not belong together are refused with the round and the reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from recorded_rounds import recording
from synthetic_rounds import make_identity, synthetic_trace

from hybridspec.calibrate.consistency import check_consistency
from hybridspec.calibrate.features import trace_arrays
from hybridspec.calibrate.models import MODELS, fit_model
from hybridspec.calibrate.rounds import with_identity
from hybridspec.calibrate.trace import read_trace
from hybridspec.errors import BundleError, NotEnoughData


@pytest.fixture(scope="module")
def trace() -> pa.Table:
    return synthetic_trace(prompts=9, rounds=6)


def edited(table: pa.Table, name: str, change: Callable[[list[Any]], None]) -> pa.Table:
    values = table.column(name).to_pylist()
    change(values)
    position = table.schema.get_field_index(name)
    field = table.schema.field(name)
    return table.set_column(position, field, pa.array(values, type=field.type))


def put(row: int, value: object) -> Callable[[list[Any]], None]:
    def change(values: list[Any]) -> None:
        values[row] = value

    return change


def test_whole_traces_pass_in_any_order(trace: pa.Table) -> None:
    assert check_consistency(trace, path="t") is trace
    order = np.random.default_rng(0).permutation(trace.num_rows)
    check_consistency(trace.take(order), path="t")
    check_consistency(trace.slice(0, 0), path="t")
    # Rounds may be left out: what is there still tells one story.
    check_consistency(trace.take(np.arange(0, trace.num_rows, 2)), path="t")


@pytest.mark.parametrize("name", ["lab", "small"])
def test_recordings_pass(name: str) -> None:
    check_consistency(recording(name), path=name)


@pytest.mark.parametrize(
    ("column", "change", "message"),
    [
        ("round", put(8, 1), "round 1 of prompt 'p001' occurs twice"),
        ("split", put(8, "test"), "round 2 of prompt 'p001' has another split"),
        ("category", put(8, "sonnets"), "has another category than the round before it"),
        ("anchor", put(0, 5000), r"has a token outside 0\.\.4095 \(1 such round"),
        ("draft_tokens", put(3, [-1] * 15), "token outside"),
        ("p2", put(2, [0.9995] * 15), "round 2 of prompt 'p000' has a p2 above its p1"),
        ("accepted", lambda values: values.reverse(), "another accepted count than its"),
        ("generated_tokens", put(4, 77), "generated_tokens that do not continue"),
        ("context_tokens", put(4, 77), "context_tokens that do not continue"),
        ("anchor", put(4, 98), "starts at another token than the round before it ended with"),
    ],
)
def test_broken_stories_are_refused(
    trace: pa.Table, column: str, change: Callable[[list[Any]], None], message: str
) -> None:
    with pytest.raises(BundleError, match=f"^t: .*{message}"):
        check_consistency(edited(trace, column, change), path="t")


def test_sampled_rounds_may_leave_the_top_token(trace: pa.Table) -> None:
    sampled = with_identity(
        edited(trace, "anchor", put(4, 98)), make_identity(temperature=0.7, seed=1)
    )
    check_consistency(sampled, path="t")


def test_two_runs_in_one_file_are_refused(trace: pa.Table, tmp_path: Path) -> None:
    other = synthetic_trace(prompts=9, rounds=6, seed=5)
    pq.write_table(pa.concat_tables([trace, other]), tmp_path / "both.parquet")
    with pytest.raises(BundleError, match=r"both\.parquet: .*occurs twice .*each its own file"):
        read_trace(tmp_path / "both.parquet")


def without_p1(table: pa.Table) -> pa.Table:
    return table.drop_columns(["p1"])


def foreign(table: pa.Table) -> pa.Table:
    return pa.table({"prompt": ["a"], "answer": ["b"]})


def floats_for_ints(table: pa.Table) -> pa.Table:
    position = table.schema.get_field_index("accepted")
    return table.set_column(position, "accepted", table.column("accepted").cast(pa.float64()))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without_p1, "column 'p1' is missing"),
        (foreign, "no schema id.*another kind of file"),
        (floats_for_ints, "'accepted' has type double; expected int32"),
        (
            lambda t: edited(t, "p1", put(0, [float("nan")] * 15)),
            "'p1' has 15 NaN or infinite",
        ),
        (lambda t: t.replace_schema_metadata({b"schema_id": b"hybridspec.trace/1"}), "no identity"),
    ],
)
def test_foreign_files_are_refused(
    change: Callable[[pa.Table], pa.Table], message: str, trace: pa.Table, tmp_path: Path
) -> None:
    pq.write_table(change(trace), tmp_path / "t.parquet")
    with pytest.raises(BundleError, match=rf"t\.parquet.*{message}"):
        read_trace(tmp_path / "t.parquet")


@pytest.mark.parametrize("share", [0.0, 0.3, 0.999])
def test_truncated_files_are_refused(share: float, trace: pa.Table, tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    pq.write_table(trace, path)
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])
    with pytest.raises(BundleError, match=r"t\.parquet"):
        read_trace(path)


@pytest.mark.parametrize("name", sorted(set(MODELS) - {"raw"}))
def test_every_fit_refuses_thirty_rows_and_one_outcome(name: str) -> None:
    few = trace_arrays(synthetic_trace(prompts=10, rounds=1))
    with pytest.raises(NotEnoughData, match="at least 200"):
        fit_model(name, few)
    many = trace_arrays(synthetic_trace(prompts=30, rounds=10))
    with pytest.raises(NotEnoughData, match="were rejected"):
        fit_model(name, replace(many, accepted=np.zeros(len(many), dtype=np.int64)))
