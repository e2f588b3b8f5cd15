"""Anchors from files and bundles: complete, plausible and of a named machine, or refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from formula_machine import DRAFT_US, FormulaMachine, true_latency_us
from test_transfer import H200, LENGTHS, make_table, pick

from hybridspec.artifacts.schemas import SCHEMA_ID_KEY
from hybridspec.costmodels.anchors import (
    IDENTITY_KEY,
    Anchors,
    anchors_of_samples,
    cell,
    read_anchors,
    write_anchors,
)
from hybridspec.costmodels.sweep import measure_steps
from hybridspec.costmodels.transfer import transfer_table
from hybridspec.errors import BundleError, NotEnoughData, UsageError


@pytest.fixture
def anchors() -> Anchors:
    return pick(make_table(), batches=[1, 8], contexts=[128], lengths=LENGTHS)


def test_file_round_trip(anchors: Anchors, tmp_path: Path) -> None:
    path = tmp_path / "anchors.parquet"
    write_anchors(path, anchors)
    read = read_anchors(path)
    assert read.identity == H200
    for name in ("batch_sizes", "context_tokens", "lengths", "latency_us", "draft_us"):
        np.testing.assert_array_equal(getattr(read, name), getattr(anchors, name))
    assert read.expert_slope_us == 0.0


def column(name: str, change: Callable[[np.ndarray], object]) -> Callable[[pa.Table], pa.Table]:
    def apply(table: pa.Table) -> pa.Table:
        index = table.column_names.index(name)
        field = table.schema.field(index)
        values = change(table.column(name).to_numpy().copy())
        return table.set_column(index, field, [pa.array(values, field.type)])

    return apply


def first(value: float) -> Callable[[np.ndarray], object]:
    def change(values: np.ndarray) -> np.ndarray:
        values[0] = value
        return values

    return change


def without(key: bytes) -> Callable[[pa.Table], pa.Table]:
    def apply(table: pa.Table) -> pa.Table:
        kept = {k: v for k, v in table.schema.metadata.items() if k != key}
        return table.replace_schema_metadata(kept)

    return apply


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (column("latency_us", first(float("nan"))), "NaN or infinite"),
        (column("latency_us", first(-1.0)), "allowed are more than 0"),
        (column("latency_us", first(1e9)), "wrong side of its median"),
        (column("draft_us", first(0.0)), "not above 0 us"),
        (column("verify_length", first(17)), "allowed are 0 to 16"),
        (column("batch_size", first(0)), "allowed are 1"),
        (column("verify_length", first(16)), "occurs more than once"),
        (lambda table: table.drop_columns(["draft_us"]), "'draft_us' is missing"),
        (lambda table: table.append_column("x", [pa.array([0] * len(table))]), "does not belong"),
        (
            lambda table: table.set_column(0, "batch_size", table.column(0).cast(pa.int64())),
            "has type int64",
        ),
        (lambda table: table.slice(0, 0), "there are no anchors"),
        (without(IDENTITY_KEY), "does not name the machine"),
        (without(SCHEMA_ID_KEY), "carries no schema id"),
        (
            lambda table: table.replace_schema_metadata(
                {**table.schema.metadata, IDENTITY_KEY: b'{"device": 3}'}
            ),
            "cost_identity is damaged",
        ),
        (
            lambda table: table.replace_schema_metadata(
                {**table.schema.metadata, SCHEMA_ID_KEY: b"hybridspec.cost.anchors/2"}
            ),
            "upgrade hybridspec",
        ),
    ],
)
def test_bad_files_are_refused(
    anchors: Anchors, tmp_path: Path, change: Callable[[pa.Table], pa.Table], message: str
) -> None:
    path = tmp_path / "anchors.parquet"
    write_anchors(path, anchors)
    pq.write_table(change(pq.read_table(path)), path)
    with pytest.raises((BundleError, NotEnoughData), match=message):
        read_anchors(path)


@pytest.mark.parametrize("keep", [0, 100, -9])
def test_truncated_and_foreign_files_are_refused(
    anchors: Anchors, tmp_path: Path, keep: int
) -> None:
    path = tmp_path / "anchors.parquet"
    write_anchors(path, anchors)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(BundleError, match="not a readable Parquet file"):
        read_anchors(path)
    path.unlink()
    path.symlink_to("/etc/hostname")
    with pytest.raises(BundleError, match="no link"):
        read_anchors(path)


def test_costs_that_fall_and_draft_passes_that_differ_are_refused(anchors: Anchors) -> None:
    latency_us = anchors.latency_us.copy()
    at = int(np.flatnonzero((anchors.batch_sizes == 8) & (anchors.lengths == 16))[0])
    latency_us[at] = 1.0
    falling = replace(anchors, latency_us=latency_us, latency_p10_us=0.9 * latency_us)
    falling = replace(falling, latency_p90_us=1.1 * latency_us)
    with pytest.raises(BundleError, match="length 16 is faster than 9 by more than their spread"):
        cell(falling, batch=8, context_tokens=128)
    draft_us = anchors.draft_us.copy()
    draft_us[at] *= 2.0
    with pytest.raises(BundleError, match="does not depend on the length"):
        cell(replace(anchors, draft_us=draft_us), batch=8, context_tokens=128)


def test_anchors_of_measured_rounds_carry_to_another_table() -> None:
    """A few lengths measured on a machine of known costs give back its whole curve."""
    table = make_table()
    machine = FormulaMachine()
    samples = measure_steps(
        machine,
        batch_sizes=[1, 8],
        context_tokens=[128, 1024],
        lengths=(0, 1, 4, 8, 16),
        repeats=5,
        budget_s=1e9,
    )
    found = anchors_of_samples(H200, samples)
    assert len(found) == 2 * 2 * 5
    for batch, context, length, us in zip(
        found.batch_sizes, found.context_tokens, found.lengths, found.latency_us, strict=True
    ):
        true_us = true_latency_us(batch=int(batch), context=int(context), length=int(length))
        assert us == pytest.approx(true_us)
    np.testing.assert_array_equal(found.draft_us, DRAFT_US)
    moved = transfer_table(table, found).table
    here = moved.latency_us[moved.batch_sizes.tolist().index(8)]
    column = moved.context_tokens.tolist().index(1024)
    assert here[column, 16] == pytest.approx(true_latency_us(batch=8, context=1024, length=16))


def test_cells_that_were_not_measured_enough_are_refused() -> None:
    samples = measure_steps(
        FormulaMachine(), batch_sizes=[1], context_tokens=[64], lengths=(0, 1), repeats=5,
        budget_s=1e9,
    )  # fmt: skip
    with pytest.raises(NotEnoughData, match="4 samples"):
        anchors_of_samples(H200, samples.slice(1))
    plain = samples.filter(pa.array(samples["verify_length"].to_numpy() == 0))
    with pytest.raises(NotEnoughData, match="no drafted round"):
        anchors_of_samples(H200, plain)
    with pytest.raises(NotEnoughData, match="0 samples"):
        anchors_of_samples(H200, samples.slice(0, 0))
    with pytest.raises(UsageError, match="verify length"):
        measure_steps(
            FormulaMachine(), batch_sizes=[1], context_tokens=[64], lengths=(0, 17), repeats=5,
            budget_s=1.0,
        )  # fmt: skip
