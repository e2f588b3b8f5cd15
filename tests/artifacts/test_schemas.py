"""Every schema refuses what does not match it, and says which column."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from bundle_kit import trace_columns

from hybridspec.artifacts import schemas
from hybridspec.artifacts.schemas import (
    METRICS_SCHEMA,
    SCHEMA_ID_KEY,
    TRACE_SCHEMA,
    check_table,
    schema_id,
    table_from,
)
from hybridspec.errors import BundleError

ALL_SCHEMAS = {name: value for name, value in vars(schemas).items() if isinstance(value, pa.Schema)}


def with_schema_id(table: pa.Table, value: str) -> pa.Table:
    return table.replace_schema_metadata({SCHEMA_ID_KEY: value.encode()})


@pytest.fixture
def trace() -> pa.Table:
    return table_from(trace_columns(6), TRACE_SCHEMA)


@pytest.mark.parametrize("schema", ALL_SCHEMAS.values(), ids=ALL_SCHEMAS.keys())
def test_schemas_have_an_id_and_no_nullable_column(schema: pa.Schema) -> None:
    assert re.fullmatch(r"hybridspec\.[a-z.]+/1", schema_id(schema))
    assert not any(field.nullable for field in schema)


def test_schema_ids_are_distinct() -> None:
    ids = [schema_id(schema) for schema in ALL_SCHEMAS.values()]
    assert len(ALL_SCHEMAS) == 13
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize("rows", [0, 1, 7])
def test_trace_survives_parquet(rows: int, tmp_path: Path) -> None:
    table = table_from(trace_columns(rows), TRACE_SCHEMA)
    pq.write_table(table, tmp_path / "t.parquet")
    read = check_table(pq.read_table(tmp_path / "t.parquet"), TRACE_SCHEMA, path="t")
    assert read.equals(table)
    assert read.schema.field("p1").metadata == {b"unit": b"probability"}


def test_columns_are_returned_in_schema_order(trace: pa.Table) -> None:
    assert check_table(trace.select(trace.column_names[::-1]), TRACE_SCHEMA, path="t").equals(trace)


@pytest.mark.parametrize("name", TRACE_SCHEMA.names)
def test_missing_column_is_named(trace: pa.Table, name: str) -> None:
    with pytest.raises(BundleError, match=f"t: column '{name}' is missing"):
        check_table(trace.drop_columns([name]), TRACE_SCHEMA, path="t")


def test_extra_and_repeated_columns_are_refused(trace: pa.Table) -> None:
    more = trace.append_column("surprise", pa.array([1] * 6))
    with pytest.raises(BundleError, match="'surprise' does not belong"):
        check_table(more, TRACE_SCHEMA, path="t")
    twice = trace.append_column(TRACE_SCHEMA.field("round"), trace.column("round"))
    with pytest.raises(BundleError, match="'round' occurs more than once"):
        check_table(twice, TRACE_SCHEMA, path="t")


@pytest.mark.parametrize(
    ("name", "column"),
    [
        ("round", pa.array([1] * 6, pa.int64())),
        ("anchor", pa.array(["1"] * 6)),
        ("p1", pa.array([[0.5] * 15] * 6, pa.list_(pa.float32()))),
        ("p1", pa.array([[0.5] * 14] * 6, pa.list_(pa.float32(), 14))),
        ("p1", pa.array([[0.5] * 15] * 6, pa.list_(pa.float64(), 15))),
    ],
    ids=["int64", "string", "ragged", "14", "double"],
)
def test_other_type_is_refused(trace: pa.Table, name: str, column: pa.Array) -> None:
    position = trace.column_names.index(name)
    wrong = trace.set_column(position, name, column)
    with pytest.raises(BundleError, match=f"column '{name}' has type .*expected"):
        check_table(wrong, TRACE_SCHEMA, path="t")


def test_nulls_are_refused_inside_lists_too(trace: pa.Table) -> None:
    flat = trace.set_column(0, "prompt_id", pa.array(["a", None, "b", "c", "d", "e"]))
    with pytest.raises(BundleError, match="'prompt_id' has 1 null"):
        check_table(flat, TRACE_SCHEMA, path="t")
    inner = pa.array([[None] + [0.5] * 14] * 6, pa.list_(pa.float32(), 15))
    nested = trace.set_column(trace.column_names.index("p1"), "p1", inner)
    with pytest.raises(BundleError, match="'p1' has 6 null"):
        check_table(nested, TRACE_SCHEMA, path="t")


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_non_finite_values_are_refused(bad: float) -> None:
    columns = trace_columns(6)
    columns["entropy_nats"][2, 3] = bad
    with pytest.raises(BundleError, match="'entropy_nats' has 1 NaN or infinite"):
        check_table(table_from(columns, TRACE_SCHEMA), TRACE_SCHEMA, path="t")


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ("", "carries no schema id; expected 'hybridspec.trace/1'"),
        ("hybridspec.cost.step/1", "another kind of file"),
        ("hybridspec.trace/2", "its schema is 'hybridspec.trace/2'.*upgrade hybridspec"),
        ("hybridspec.trace/0", "make the file again"),
        ("hybridspec.trace/1.0.0", "another kind of file"),
        ("\ud800".encode("utf-8", "surrogatepass").decode("latin-1"), "another kind of file"),
    ],
)
def test_other_schema_is_refused(trace: pa.Table, found: str, message: str) -> None:
    with pytest.raises(BundleError, match=message):
        check_table(with_schema_id(trace, found), TRACE_SCHEMA, path="t")


def test_newer_minor_is_read_with_a_warning_that_says_which(trace: pa.Table) -> None:
    newer = with_schema_id(
        trace.append_column("surprise", pa.array([1] * 6)), "hybridspec.trace/1.3"
    )
    with pytest.warns(UserWarning, match=r"'hybridspec.trace/1.3' is newer"):
        read = check_table(newer, TRACE_SCHEMA, path="t")
    assert read.equals(trace)


def test_metrics_need_every_row_to_be_a_number() -> None:
    columns: dict[str, Any] = {name: ["x"] for name in METRICS_SCHEMA.names[:4]}
    columns |= {"value": [0.1], "lo": [0.0], "hi": [None], "n": [3]}
    with pytest.raises(BundleError, match="'hi' has 1 null"):
        check_table(table_from(columns, METRICS_SCHEMA), METRICS_SCHEMA, path="m")
