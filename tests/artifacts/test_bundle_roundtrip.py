"""What is written is what is loaded, exactly; parts do not disturb each other."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from bundle_kit import (
    COST_IDENTITY,
    calibration_arguments,
    cost_arguments,
    make_throughput,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from hybridspec.artifacts.bundle import (
    load_bundle,
    write_calibration,
    write_cost,
    write_throughput,
)
from hybridspec.artifacts.identity import CalibrationIdentity, check_identity
from hybridspec.artifacts.schemas import SAMPLES_SCHEMA, table_from
from hybridspec.artifacts.tables import HazardTable, RoutingTable, StepCostTable, ThroughputTable
from hybridspec.errors import BundleError


def assert_same(left: Any, right: Any) -> None:
    """Same bits in every field."""
    assert type(left) is type(right)
    for field in fields(left):
        one, other = getattr(left, field.name), getattr(right, field.name)
        if isinstance(one, np.ndarray):
            assert one.dtype == other.dtype
            assert one.shape == other.shape
            assert one.tobytes() == other.tobytes()
        else:
            assert one == other


finite = st.floats(allow_nan=False, allow_infinity=False, width=64)
positive = st.floats(1e-3, 1e9)


def vector(size: int, elements: st.SearchStrategy[float]) -> st.SearchStrategy[Any]:
    return hnp.arrays(np.float64, size, elements=elements)


@st.composite
def hazards(draw: st.DrawFn) -> HazardTable:
    unit = st.floats(0.0, 1.0)
    knots_x = np.array(sorted(draw(st.sets(unit, min_size=2, max_size=9))))
    knots_y = np.sort(draw(vector(knots_x.size, unit)))
    method = draw(st.text(max_size=8))
    return HazardTable(method, draw(vector(5, finite)), draw(vector(15, finite)), knots_x, knots_y)


@st.composite
def routings(draw: st.DrawFn) -> RoutingTable:
    arrays = [draw(vector(16, finite)) for _ in range(3)]
    return RoutingTable(draw(st.integers(1, 90)), *arrays)


@st.composite
def steps(draw: st.DrawFn) -> StepCostTable:
    grid = st.sets(st.integers(1, 2**31 - 1), min_size=1, max_size=3)
    batches, contexts = (np.array(sorted(draw(grid))) for _ in range(2))
    shape = (batches.size, contexts.size, 17)
    middle, low, high = (draw(hnp.arrays(np.float64, shape, elements=positive)) for _ in range(3))
    draft_us = draw(hnp.arrays(np.float64, shape[:2], elements=positive))
    low, middle, high = np.sort(np.stack([low, middle, high]), axis=0)
    return StepCostTable(batches, contexts, middle, low, high, draft_us, draw(finite), draw(finite))


@st.composite
def throughputs(draw: st.DrawFn) -> ThroughputTable:
    batches = np.array(sorted(draw(st.sets(st.integers(1, 999), min_size=1, max_size=4))))
    lengths = draw(hnp.arrays(np.int64, batches.size, elements=st.integers(0, 16)))
    return ThroughputTable(batches, draw(vector(batches.size, positive)), lengths)


@settings(max_examples=12, deadline=None)
@given(
    hazards(),
    st.none() | routings(),
    steps(),
    st.none() | throughputs(),
    st.floats(0, 2),
    st.booleans(),
)
def test_round_trip_is_exact_in_either_order(
    hazard: HazardTable,
    routing: RoutingTable | None,
    step: StepCostTable,
    throughput: ThroughputTable | None,
    temperature: float,
    cost_first: bool,
) -> None:
    identity = CalibrationIdentity("t", "d", "float32", temperature=temperature)
    calibration = calibration_arguments(hazard=hazard, routing=routing, identity=identity)
    cost = cost_arguments(step=step, throughput=None)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "b"
        if cost_first:
            write_cost(folder, **cost)
        calibration_id = write_calibration(folder, **calibration)
        if not cost_first:
            write_cost(folder, **cost)
        if throughput is not None:
            write_throughput(folder, throughput)
        bundle = load_bundle(folder)
    assert bundle.calibration is not None
    assert bundle.cost is not None
    assert bundle.warnings == ()
    assert bundle.calibration.content_id == calibration_id
    assert bundle.calibration.identity == identity
    assert_same(bundle.calibration.hazard, hazard)
    assert_same(bundle.cost.step, step)
    for loaded, written in (
        (bundle.calibration.routing, routing),
        (bundle.cost.throughput, throughput),
    ):
        if written is None:
            assert loaded is None
        else:
            assert_same(loaded, written)
    assert bundle.calibration.metrics.equals(calibration["metrics"])
    assert bundle.calibration.reliability.equals(calibration["reliability"])
    assert bundle.cost.samples.equals(cost["samples"])
    assert bundle.cost.experts.equals(cost["experts"])


def test_content_id_ignores_provenance_and_follows_content(tmp_path: Path) -> None:
    first = write_calibration(tmp_path / "a", **calibration_arguments())
    again = write_calibration(tmp_path / "b", **calibration_arguments(provenance={"host": "x"}))
    other = write_calibration(tmp_path / "c", **calibration_arguments(1.5))
    assert first == again != other
    assert load_bundle(tmp_path / "a").content_id == load_bundle(tmp_path / "b").content_id
    assert load_bundle(tmp_path / "a").content_id != load_bundle(tmp_path / "c").content_id


@pytest.mark.parametrize("part", ["calibration", "cost"])
def test_either_part_may_be_absent(tmp_path: Path, part: str) -> None:
    if part == "calibration":
        write_calibration(tmp_path, **calibration_arguments())
    else:
        write_cost(tmp_path, **cost_arguments(throughput=None))
    bundle = load_bundle(tmp_path)
    assert (bundle.calibration is None, bundle.cost is None) == (part == "cost", part != "cost")


def test_replacing_a_part_keeps_the_other_and_drops_old_files(bundle: Path) -> None:
    before = load_bundle(bundle)
    count = len(list(bundle.rglob("*.parquet")))
    write_calibration(bundle, **calibration_arguments(2.0, routing=None))
    after = load_bundle(bundle)
    assert before.cost is not None
    assert after.cost is not None
    assert after.calibration is not None
    assert after.calibration.routing is None
    assert after.cost.content_id == before.cost.content_id
    assert_same(after.cost.step, before.cost.step)
    assert len(list(bundle.rglob("*.parquet"))) == count - 1


def test_throughput_of_other_parts_is_left_out_until_fitted_again(bundle: Path) -> None:
    loaded = load_bundle(bundle)
    assert loaded.cost is not None
    assert_same(loaded.cost.throughput, make_throughput())
    write_calibration(bundle, **calibration_arguments(2.0))
    stale = load_bundle(bundle)
    assert stale.cost is not None
    assert stale.cost.throughput is None
    assert "fit it again" in stale.warnings[0]
    write_throughput(bundle, make_throughput())
    fresh = load_bundle(bundle)
    assert fresh.cost is not None
    assert_same(fresh.cost.throughput, make_throughput())
    assert fresh.warnings == ()


def test_throughput_needs_a_cost_part(tmp_path: Path) -> None:
    write_calibration(tmp_path, **calibration_arguments())
    with pytest.raises(BundleError, match="has no cost part"):
        write_throughput(tmp_path, make_throughput())


def test_writer_refuses_bad_tables_before_touching_the_folder(tmp_path: Path) -> None:
    samples = cost_arguments()["samples"].drop_columns(["repeat"])
    with pytest.raises(BundleError, match="samples table: column 'repeat' is missing"):
        write_cost(tmp_path, **cost_arguments(samples=samples))
    assert list(tmp_path.iterdir()) == []


def test_writer_does_not_replace_a_damaged_or_newer_bundle(bundle: Path) -> None:
    manifest = bundle / "manifest.json"
    text = manifest.read_text()
    manifest.write_text(text.replace('"1.2"', '"1.7"'))
    with pytest.raises(BundleError, match=r"reads 1.0 to 1.2: use hybridspec .*, which wrote it"):
        write_cost(bundle, **cost_arguments())
    manifest.write_text(text[:-9])
    with pytest.raises(BundleError, match="not valid JSON"):
        write_cost(bundle, **cost_arguments())


@pytest.mark.parametrize("writer", [None, "0.9.2", 7, "; rm"])
def test_future_schema_is_refused_with_the_version_that_reads_it(
    bundle: Path, writer: object
) -> None:
    manifest = bundle / "manifest.json"
    raw = json.loads(manifest.read_text())
    raw |= {"schema_version": "1.4", "writer": writer}
    raw["parts"]["calibration"]["identity"]["novelty"] = 1
    manifest.write_text(json.dumps(raw))
    named = "use hybridspec 0.9.2, which wrote it" if writer == "0.9.2" else "upgrade hybridspec"
    with pytest.raises(
        BundleError, match=rf"schema_version 1.4; this .* reads 1.0 to 1.2: {named}"
    ):
        load_bundle(bundle)


def test_bundle_of_the_first_schema_is_read_with_its_ids(bundle: Path) -> None:
    manifest = bundle / "manifest.json"
    raw = json.loads(manifest.read_text())
    raw["schema_version"] = "1.0"
    for name in ("tp_size", "backends", "graph_tiers"):
        del raw["parts"]["cost"]["identity"][name]
    for name in ("writer",):
        del raw[name]
    del raw["parts"]["cost"]["transfer"]
    expected = load_bundle(bundle).content_id
    manifest.write_text(json.dumps(raw))
    loaded = load_bundle(bundle)
    assert loaded.content_id == expected
    assert loaded.cost is not None
    assert loaded.cost.identity == COST_IDENTITY
    write_cost(bundle, **cost_arguments())
    assert json.loads(manifest.read_text())["schema_version"] == "1.2"


def test_bundle_written_by_the_first_release_is_read() -> None:
    kept = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "cpu_demo_bundle"
    if not kept.is_dir():
        pytest.skip("no demonstration bundle (an sdist)")
    assert json.loads((kept / "manifest.json").read_text())["schema_version"] == "1.0"
    assert load_bundle(kept).content_id.startswith("a74d4b2b")


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_content_id_ignores_the_order_of_rows_that_have_none(
    tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    samples = table_from(
        {
            "part": ["total", "draft"] * 20,
            "batch_size": rng.integers(1, 3, 40),
            "context_tokens": [0] * 40,
            "verify_length": rng.integers(0, 17, 40),
            "repeat": rng.integers(0, 3, 40),
            "latency_us": rng.uniform(1, 9, 40),
        },
        SAMPLES_SCHEMA,
    )
    shuffled = samples.take(rng.permutation(40))
    folder = tmp_path_factory.mktemp("order")
    first = write_cost(folder / "a", **cost_arguments(samples=samples))
    assert write_cost(folder / "b", **cost_arguments(samples=shuffled)) == first
    assert load_bundle(folder / "a").content_id == load_bundle(folder / "b").content_id
    changed = samples.set_column(
        5, samples.schema.field(5), [pa.array(np.nextafter(samples["latency_us"].to_numpy(), 10))]
    )
    assert write_cost(folder / "c", **cost_arguments(samples=changed)) != first


@pytest.mark.parametrize(
    "change", [{"tp_size": 2}, {"quantization": "fp8"}, {"backends": "moe=cutlass"}]
)
def test_variants_have_their_own_ids(tmp_path: Path, change: dict[str, Any]) -> None:
    plain = write_cost(tmp_path / "a", **cost_arguments())
    identity = dataclasses.replace(COST_IDENTITY, **change)
    other = write_cost(tmp_path / "b", **cost_arguments(identity=identity))
    assert other != plain
    loaded = load_bundle(tmp_path / "b").cost
    assert loaded is not None
    assert loaded.identity == identity
    with pytest.raises(BundleError, match=f"{next(iter(change))}: the bundle was made for"):
        check_identity(COST_IDENTITY, identity)


def test_manifest_holds_no_time_or_host(bundle: Path) -> None:
    entries = load_bundle(bundle).manifest.entries()
    assert {entry.name for entry in entries} >= {"map", "knots", "routing", "step", "throughput"}
    assert all((bundle / entry.path).stat().st_size == entry.num_bytes for entry in entries)
