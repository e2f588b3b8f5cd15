"""Explicit Arrow schemas of every Parquet file we write, and the check each one passes on reading.

A schema's identifier is `hybridspec.<name>/<major>[.<minor>]` in the schema metadata. A minor
version only adds columns, so a newer minor is read with a warning; another major is refused. Units
are in the column names and repeated in the field metadata, so that a stray file explains itself.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hybridspec.artifacts.tables import BLOCK_SIZE, NUM_DRAFTS
from hybridspec.errors import BundleError

SCHEMA_ID_KEY = b"schema_id"
_SCHEMA_ID = re.compile(r"(hybridspec\.[a-z.]+)/([0-9]{1,6})(?:\.([0-9]{1,6}))?")


def _field(name: str, kind: pa.DataType, unit: str = "") -> pa.Field:
    return pa.field(name, kind, nullable=False, metadata={"unit": unit} if unit else None)


def _row(kind: pa.DataType, length: int) -> pa.DataType:
    return pa.list_(pa.field("element", kind, nullable=False), length)


def _schema(schema_id: str, *fields: pa.Field) -> pa.Schema:
    return pa.schema(list(fields), metadata={SCHEMA_ID_KEY: schema_id.encode()})


TRACE_SCHEMA = _schema(
    "hybridspec.trace/1",
    _field("prompt_id", pa.string()),
    _field("category", pa.string()),
    _field("split", pa.string()),
    _field("round", pa.int32()),
    _field("generated_tokens", pa.int32(), "tokens"),
    _field("context_tokens", pa.int32(), "tokens"),
    _field("loop_period", pa.int32(), "tokens"),
    _field("accepted", pa.int32(), "drafts"),
    _field("anchor", pa.int32(), "token id"),
    _field("draft_tokens", _row(pa.int32(), NUM_DRAFTS), "token id"),
    _field("target_tokens", _row(pa.int32(), BLOCK_SIZE), "token id"),
    _field("p1", _row(pa.float32(), NUM_DRAFTS), "probability"),
    _field("p2", _row(pa.float32(), NUM_DRAFTS), "probability"),
    _field("entropy_nats", _row(pa.float32(), NUM_DRAFTS), "nats"),
    _field("target_p1", _row(pa.float32(), BLOCK_SIZE), "probability"),
    _field("routes", pa.binary(), "expert id, little-endian [layers, 16, topk]"),
)

MAP_SCHEMA = _schema(
    "hybridspec.calibration.map/1",
    _field("method", pa.string()),
    _field("term", pa.string()),
    _field("position", pa.int32(), "draft position, -1 for a feature"),
    _field("coefficient", pa.float64(), "logit"),
)
KNOTS_SCHEMA = _schema(
    "hybridspec.calibration.knots/1",
    _field("knot_x", pa.float64(), "probability"),
    _field("knot_y", pa.float64(), "probability"),
)
TREES_SCHEMA = _schema(
    "hybridspec.calibration.trees/1",
    _field("tree", pa.int32()),
    _field("feature", pa.string(), "name of the feature compared, empty in a leaf"),
    _field("threshold", pa.float64(), "unit of the feature; at most this goes left"),
    _field("left", pa.int32(), "row of the left child, the right one is the next; -1 in a leaf"),
    _field("value", pa.float64(), "logit, 0 in a node"),
    _field("baseline", pa.float64(), "logit that all rows share"),
)
TEMPERATURES_SCHEMA = _schema(
    "hybridspec.calibration.temperatures/1",
    _field("position", pa.int32(), "draft position"),
    _field("temperature", pa.float64(), "of the logit of the top-1 probability"),
    _field("ece_before", pa.float64(), "calibration error of the survival at temperature 1"),
    _field("ece_after", pa.float64(), "calibration error of the survival as fitted"),
    _field("rounds", pa.int64(), "rounds fitted on"),
)
ROUTING_SCHEMA = _schema(
    "hybridspec.calibration.routing/1",
    _field("verify_length", pa.int32(), "rows"),
    _field("num_layers", pa.int32(), "layers"),
    _field("first_mean", pa.float64(), "distinct experts of layer 0"),
    _field("total_mean", pa.float64(), "distinct experts summed over layers"),
    _field("slope", pa.float64(), "distinct experts per distinct expert of layer 0"),
)
RELIABILITY_SCHEMA = _schema(
    "hybridspec.calibration.reliability/1",
    _field("split", pa.string()),
    _field("model", pa.string()),
    _field("position", pa.int32(), "draft position, -1 for all"),
    _field("bin", pa.int32()),
    _field("mean_predicted", pa.float64(), "probability"),
    _field("mean_observed", pa.float64(), "probability"),
    _field("n", pa.int64(), "rows"),
)
METRICS_SCHEMA = _schema(
    "hybridspec.calibration.metrics/1",
    _field("split", pa.string()),
    _field("category", pa.string()),
    _field("model", pa.string()),
    _field("metric", pa.string()),
    _field("value", pa.float64()),
    _field("lo", pa.float64(), "2.5 % of a bootstrap over prompts"),
    _field("hi", pa.float64(), "97.5 % of a bootstrap over prompts"),
    _field("n", pa.int64(), "rows"),
)
STEP_SCHEMA = _schema(
    "hybridspec.cost.step/1",
    _field("batch_size", pa.int32(), "requests"),
    _field("context_tokens", pa.int32(), "tokens"),
    _field("verify_length", pa.int32(), "rows"),
    _field("latency_us", pa.float64(), "us"),
    _field("latency_p10_us", pa.float64(), "us"),
    _field("latency_p90_us", pa.float64(), "us"),
    _field("draft_us", pa.float64(), "us"),
    _field("expert_slope_us", pa.float64(), "us per distinct expert"),
    _field("expert_slope_r2", pa.float64()),
)
ANCHORS_SCHEMA = _schema(
    "hybridspec.cost.anchors/1",
    _field("batch_size", pa.int32(), "requests"),
    _field("context_tokens", pa.int32(), "tokens"),
    _field("verify_length", pa.int32(), "rows"),
    _field("latency_us", pa.float64(), "us"),
    _field("latency_p10_us", pa.float64(), "us"),
    _field("latency_p90_us", pa.float64(), "us"),
    _field("draft_us", pa.float64(), "us, of the draft pass at this batch and context"),
)
SAMPLES_SCHEMA = _schema(
    "hybridspec.cost.samples/1",
    _field("part", pa.string()),
    _field("batch_size", pa.int32(), "requests"),
    _field("context_tokens", pa.int32(), "tokens"),
    _field("verify_length", pa.int32(), "rows"),
    _field("repeat", pa.int32()),
    _field("latency_us", pa.float64(), "us"),
)
EXPERTS_SCHEMA = _schema(
    "hybridspec.cost.experts/1",
    _field("batch_size", pa.int32(), "requests"),
    _field("verify_length", pa.int32(), "rows"),
    _field("distinct_experts", pa.int32(), "distinct experts summed over layers"),
    _field("repeat", pa.int32()),
    _field("latency_us", pa.float64(), "us"),
)
THROUGHPUT_SCHEMA = _schema(
    "hybridspec.cost.throughput/1",
    _field("batch_size", pa.int32(), "requests"),
    _field("tokens_per_us", pa.float64(), "tokens per us per request"),
    _field("best_fixed_length", pa.int32(), "rows"),
)


def schema_id(schema: pa.Schema) -> str:
    """The identifier a schema carries, or an empty string."""
    return bytes((schema.metadata or {}).get(SCHEMA_ID_KEY, b"")).decode("utf-8", "replace")


def table_from(columns: Mapping[str, Any], schema: pa.Schema) -> pa.Table:
    """Build a table of exactly this schema, in its column order.

    Args:
        columns: one array-like a column: lists or numpy arrays, [rows, n] for lists of n.
        schema: one of the schemas of this module.

    Raises:
        BundleError: a value that does not fit its column's type.
    """
    arrays = []
    for field in schema:
        try:
            arrays.append(_array(columns[field.name], field.type))
        except (pa.ArrowException, OverflowError, ValueError) as error:
            raise BundleError(
                f"{schema_id(schema)}: column {field.name!r} cannot hold its values ({error}); it "
                f"is {field.type}: record or measure it again"
            ) from error
    return pa.Table.from_arrays(arrays, schema=schema)


def _array(values: Any, kind: pa.DataType) -> pa.Array:
    if not pa.types.is_fixed_size_list(kind):
        return pa.array(values, type=kind)
    rows = np.asarray(values).reshape(-1, kind.list_size)
    return pa.FixedSizeListArray.from_arrays(pa.array(rows.ravel(), kind.value_type), type=kind)


def check_table(table: pa.Table, schema: pa.Schema, *, path: object) -> pa.Table:
    """Return `table` in the schema's column order, or refuse it.

    Args:
        table: as read from a file, or as handed to a writer.
        schema: what it must be; its metadata names the schema identifier.
        path: named in every refusal.

    Raises:
        BundleError: another schema or major version, a missing or differently typed column, a
            column too many, a null, or a NaN or infinity.
    """
    try:
        table.validate(full=True)
        names = table.column_names
    # A damaged name or string is no UTF-8.
    except (pa.ArrowException, UnicodeDecodeError) as error:
        raise BundleError(f"{path}: damaged Arrow data ({error}): write the file again") from error
    newer_minor = _check_schema_id(schema_id(table.schema), schema_id(schema), path)
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise BundleError(f"{path}: column {repeated[0]!r} occurs more than once; write it again")
    missing = [name for name in schema.names if name not in names]
    if missing:
        raise BundleError(
            f"{path}: column {missing[0]!r} is missing; {schema_id(schema)} needs "
            f"{', '.join(schema.names)}: write the file again with this version"
        )
    extra = [name for name in names if name not in schema.names]
    if extra and not newer_minor:
        raise BundleError(
            f"{path}: column {extra[0]!r} does not belong to {schema_id(schema)}: "
            "drop it or write the file again with this version"
        )
    columns = [_check_column(table.column(field.name), field, path) for field in schema]
    metadata = {**(table.schema.metadata or {}), SCHEMA_ID_KEY: schema_id(schema).encode()}
    return pa.Table.from_arrays(columns, schema=schema.with_metadata(metadata))


def _check_schema_id(found: str, expected: str, path: object) -> bool:
    """True when `found` is a newer minor version of `expected`."""
    have, want = _SCHEMA_ID.fullmatch(found), _SCHEMA_ID.fullmatch(expected)
    assert want is not None
    if have is None or have[1] != want[1]:
        shown = repr(found) if found else "no schema id"
        raise BundleError(
            f"{path}: it carries {shown}; expected {expected!r}: this is another kind of file"
        )
    if int(have[2]) != int(want[2]):
        remedy = "upgrade hybridspec" if int(have[2]) > int(want[2]) else "make the file again"
        raise BundleError(
            f"{path}: its schema is {found!r}; this version reads {expected!r} and no other major "
            f"version: {remedy}"
        )
    if int(have[3] or 0) > int(want[3] or 0):
        warnings.warn(
            f"{path}: its schema {found!r} is newer than {expected!r}; columns that this version "
            "does not know are left out: upgrade hybridspec to use them",
            stacklevel=4,
        )
        return True
    return False


def _check_column(column: pa.ChunkedArray, field: pa.Field, path: object) -> pa.ChunkedArray:
    nested = pa.types.is_fixed_size_list(field.type)
    same = column.type == field.type or (
        nested
        and pa.types.is_fixed_size_list(column.type)
        and column.type.list_size == field.type.list_size
        and column.type.value_type == field.type.value_type
    )
    if not same:
        raise BundleError(
            f"{path}: column {field.name!r} has type {column.type}; expected {field.type}: "
            "write the file again with this version"
        )
    nulls = column.null_count
    leaves = pc.call_function("list_flatten", [column]) if nested else column
    nulls += leaves.null_count if nested else 0
    if nulls:
        raise BundleError(
            f"{path}: column {field.name!r} has {nulls} null value(s); none is allowed: "
            "record or measure it again"
        )
    if pa.types.is_floating(leaves.type):
        values = leaves.to_numpy()
        bad = int(values.size - np.count_nonzero(np.isfinite(values)))
        if bad:
            raise BundleError(
                f"{path}: column {field.name!r} has {bad} NaN or infinite value(s); every value "
                "must be finite: record or measure it again"
            )
    return column if column.type == field.type else column.cast(field.type)
