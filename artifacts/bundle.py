"""Read and write a bundle folder: two parts, either may be absent, each with its own identity.

A file's name holds the digest of its bytes and the manifest is replaced last, so a bundle is at
every moment the old one or the new one, whatever is killed and however many write.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from hybridspec.artifacts import codec
from hybridspec.artifacts.identity import CalibrationIdentity, CostIdentity
from hybridspec.artifacts.manifest import (
    CalibrationEntry,
    CostEntry,
    Manifest,
    Parts,
    ThroughputEntry,
    parse_manifest,
    part_content_id,
)
from hybridspec.artifacts.schemas import (
    ANCHORS_SCHEMA,
    EXPERTS_SCHEMA,
    KNOTS_SCHEMA,
    MAP_SCHEMA,
    METRICS_SCHEMA,
    RELIABILITY_SCHEMA,
    ROUTING_SCHEMA,
    SAMPLES_SCHEMA,
    STEP_SCHEMA,
    TEMPERATURES_SCHEMA,
    THROUGHPUT_SCHEMA,
    TREES_SCHEMA,
    check_table,
)
from hybridspec.artifacts.store import (
    MANIFEST_NAME,
    Payload,
    encode,
    read_manifest,
    read_table,
    replace_bundle,
)
from hybridspec.artifacts.tables import (
    HazardTable,
    RoutingTable,
    StepCostTable,
    TemperatureTable,
    ThroughputTable,
    TransferRecord,
)
from hybridspec.artifacts.trees import TreeTable
from hybridspec.errors import BundleError

_READ_ATTEMPTS = 5


@dataclass(frozen=True)
class CalibrationPart:
    """What calibration found: hazards, routing (None if no routes were recorded), evidence.

    `trees` is None unless the boosted model was fitted; `hazard` is then distilled from them.
    `temperatures` are of the raw top-1 probability; None in bundles of before schema 1.2.
    """

    identity: CalibrationIdentity
    content_id: str
    hazard: HazardTable
    routing: RoutingTable | None
    reliability: pa.Table
    metrics: pa.Table
    provenance: Mapping[str, Any]
    trees: TreeTable | None = None
    temperatures: TemperatureTable | None = None


@dataclass(frozen=True)
class CostPart:
    """What the profiler measured; `throughput` is None until fitted for both present parts.

    Costs that were transferred from another machine carry `transfer` and the `anchors`
    (`ANCHORS_SCHEMA`) that were measured on this one; both are None where all was measured.
    """

    identity: CostIdentity
    content_id: str
    step: StepCostTable
    samples: pa.Table
    experts: pa.Table
    throughput: ThroughputTable | None
    provenance: Mapping[str, Any]
    transfer: TransferRecord | None = None
    anchors: pa.Table | None = None


@dataclass(frozen=True)
class Bundle:
    """A bundle as loaded and checked; `warnings` says what was left out and why."""

    folder: Path
    content_id: str
    calibration: CalibrationPart | None
    cost: CostPart | None
    manifest: Manifest
    warnings: tuple[str, ...]


def write_calibration(
    folder: Path,
    *,
    identity: CalibrationIdentity,
    hazard: HazardTable,
    routing: RoutingTable | None,
    reliability: pa.Table,
    metrics: pa.Table,
    provenance: Mapping[str, Any],
    trees: TreeTable | None = None,
    temperatures: TemperatureTable | None = None,
) -> str:
    """Write or replace the calibration part; a cost part stays, its throughput counts as stale.

    Returns:
        the part's content id.

    Raises:
        BundleError: a table against its schema, or a damaged bundle in the way.
        EnvironmentMissing: full disk or a folder that cannot be written; the old bundle is kept.
    """
    map_table, knots = codec.hazard_tables(hazard)
    tables = {
        "map": check_table(map_table, MAP_SCHEMA, path="hazard map"),
        "knots": check_table(knots, KNOTS_SCHEMA, path="hazard knots"),
        "reliability": _checked_report(reliability, RELIABILITY_SCHEMA, "reliability table"),
        "metrics": _checked_report(metrics, METRICS_SCHEMA, "metrics table"),
    }
    if routing is not None:
        tables["routing"] = codec.routing_table(routing)
    if trees is not None:
        tables["trees"] = codec.trees_table(trees)
    if temperatures is not None:
        tables["temperatures"] = codec.temperatures_table(temperatures)
    payloads = [encode("calibration", name, table) for name, table in sorted(tables.items())]
    files = [payload.entry for payload in payloads]
    content_id = part_content_id(identity, files)
    entry = CalibrationEntry(
        content_id=content_id, files=files, provenance=dict(provenance), identity=identity
    )

    def replace(old: Manifest | None) -> Manifest:
        parts = Parts(calibration=entry, cost=old.parts.cost if old else None)
        return Manifest.build(parts=parts, throughput=old.throughput if old else None)

    replace_bundle(Path(folder), payloads, replace)
    return content_id


def write_cost(
    folder: Path,
    *,
    identity: CostIdentity,
    step: StepCostTable,
    samples: pa.Table,
    experts: pa.Table,
    throughput: ThroughputTable | None,
    provenance: Mapping[str, Any],
    transfer: TransferRecord | None = None,
    anchors: pa.Table | None = None,
) -> str:
    """Write or replace the cost part; a calibration part stays.

    Args:
        samples: every timed sample (`SAMPLES_SCHEMA`).
        experts: samples behind the expert slope (`EXPERTS_SCHEMA`), possibly without rows.
        throughput: fitted with this cost and the calibration part now in the folder, or None.
        transfer: where transferred costs come from; None where all were measured.
        anchors: cells measured on this machine (`ANCHORS_SCHEMA`), together with `transfer`.

    Returns:
        the part's content id.

    Raises:
        BundleError: a table against its schema, or a damaged bundle in the way.
        EnvironmentMissing: full disk or a folder that cannot be written; the old bundle is kept.
    """
    tables = {
        "step": codec.step_table(step),
        "samples": _checked_report(samples, SAMPLES_SCHEMA, "samples table"),
        "experts": _checked_report(experts, EXPERTS_SCHEMA, "experts table"),
    }
    if (transfer is None) != (anchors is None):
        raise BundleError("transferred costs need both their record and their anchors")
    if anchors is not None:
        tables["anchors"] = _checked_report(anchors, ANCHORS_SCHEMA, "anchors table")
    payloads = [encode("cost", name, table) for name, table in sorted(tables.items())]
    files = [payload.entry for payload in payloads]
    content_id = part_content_id(identity, files, transfer)
    entry = CostEntry(
        content_id=content_id,
        files=files,
        provenance=dict(provenance),
        identity=identity,
        transfer=transfer,
    )
    fitted = (
        encode("cost", "throughput", codec.throughput_table(throughput)) if throughput else None
    )

    def replace(old: Manifest | None) -> Manifest:
        parts = Parts(calibration=old.parts.calibration if old else None, cost=entry)
        return Manifest.build(parts=parts, throughput=_throughput_entry(fitted, parts, throughput))

    replace_bundle(Path(folder), payloads + ([fitted] if fitted else []), replace)
    return content_id


def write_throughput(folder: Path, throughput: ThroughputTable) -> None:
    """Add or replace the throughput fitted for the parts that the folder now holds.

    Raises:
        BundleError: the folder has no cost part, or is damaged.
        EnvironmentMissing: full disk or a folder that cannot be written; the old bundle is kept.
    """
    fitted = encode("cost", "throughput", codec.throughput_table(throughput))

    def replace(old: Manifest | None) -> Manifest:
        if old is None or old.parts.cost is None:
            raise BundleError(
                f"{folder} has no cost part; a throughput needs one: run `hybridspec "
                "profile-latency` first"
            )
        return Manifest.build(
            parts=old.parts, throughput=_throughput_entry(fitted, old.parts, throughput)
        )

    replace_bundle(Path(folder), [fitted], replace)


def load_bundle(folder: Path) -> Bundle:
    """Load a bundle and check everything in it: digests, schemas, values.

    Raises:
        BundleError: whatever is missing, damaged, of another version or impossible.
    """
    folder = Path(folder)
    path = folder / MANIFEST_NAME
    data = read_manifest(folder)
    for _ in range(_READ_ATTEMPTS - 1):
        try:
            return _load(folder, parse_manifest(data, path=path))
        except BundleError:
            # A writer may have replaced the bundle between our reads; then its manifest changed.
            newer = read_manifest(folder)
            if newer == data:
                raise
            data = newer
    return _load(folder, parse_manifest(data, path=path))


def _load(folder: Path, manifest: Manifest) -> Bundle:
    warnings: list[str] = []
    entry, cost_entry = manifest.parts.calibration, manifest.parts.cost
    calibration = cost = None
    if entry is not None:
        calibration = CalibrationPart(
            identity=entry.identity,
            content_id=entry.content_id,
            hazard=codec.hazard_from(
                _required(folder, entry, "map", MAP_SCHEMA),
                _required(folder, entry, "knots", KNOTS_SCHEMA),
                path=folder / "calibration",
            ),
            routing=codec.routing_from(
                read_table(folder, routing, ROUTING_SCHEMA), path=folder / routing.path
            )
            if (routing := entry.file("routing"))
            else None,
            reliability=_required(folder, entry, "reliability", RELIABILITY_SCHEMA),
            metrics=_required(folder, entry, "metrics", METRICS_SCHEMA),
            provenance=entry.provenance,
            trees=codec.trees_from(
                read_table(folder, trees, TREES_SCHEMA), path=folder / trees.path
            )
            if (trees := entry.file("trees"))
            else None,
            temperatures=codec.temperatures_from(
                read_table(folder, fitted, TEMPERATURES_SCHEMA), path=folder / fitted.path
            )
            if (fitted := entry.file("temperatures"))
            else None,
        )
    if cost_entry is not None:
        throughput, warnings = _load_throughput(folder, manifest)
        if (record := cost_entry.transfer) is not None:
            warnings.append(
                f"costs are transferred from {record.source_device} with {record.anchors} anchors "
                f"(off by {record.error_p90:.1%} at the 90 % quantile): profile this machine in "
                "full for better ones"
            )
        cost = CostPart(
            identity=cost_entry.identity,
            content_id=cost_entry.content_id,
            step=codec.step_from(
                _required(folder, cost_entry, "step", STEP_SCHEMA), path=folder / "cost"
            ),
            samples=_required(folder, cost_entry, "samples", SAMPLES_SCHEMA),
            experts=_required(folder, cost_entry, "experts", EXPERTS_SCHEMA),
            throughput=throughput,
            provenance=cost_entry.provenance,
            transfer=cost_entry.transfer,
            anchors=_optional(folder, cost_entry, "anchors", ANCHORS_SCHEMA),
        )
    return Bundle(
        folder=folder,
        content_id=manifest.content_id,
        calibration=calibration,
        cost=cost,
        manifest=manifest,
        warnings=tuple(warnings),
    )


def _load_throughput(folder: Path, manifest: Manifest) -> tuple[ThroughputTable | None, list[str]]:
    entry = manifest.throughput
    if entry is None:
        return None, []
    calibration, cost = manifest.parts.calibration, manifest.parts.cost
    if entry.calibration != (calibration.content_id if calibration else None) or entry.cost != (
        cost.content_id if cost else None
    ):
        return None, [
            "the stored throughput was fitted for other parts than the bundle now holds and is "
            "left out: fit it again"
        ]
    table = read_table(folder, entry.file, THROUGHPUT_SCHEMA)
    fitted = codec.throughput_from(table, path=folder / entry.file.path)
    return dataclasses.replace(fitted, hazard=entry.hazard), []


def _throughput_entry(
    fitted: Payload | None, parts: Parts, throughput: ThroughputTable | None
) -> ThroughputEntry | None:
    if fitted is None or throughput is None or parts.cost is None:
        return None
    return ThroughputEntry(
        file=fitted.entry,
        calibration=parts.calibration.content_id if parts.calibration else None,
        cost=parts.cost.content_id,
        hazard=throughput.hazard,
    )


def _optional(
    folder: Path, part: CalibrationEntry | CostEntry, name: str, schema: pa.Schema
) -> pa.Table | None:
    return None if part.file(name) is None else _required(folder, part, name, schema)


def _required(
    folder: Path, part: CalibrationEntry | CostEntry, name: str, schema: pa.Schema
) -> pa.Table:
    entry = part.file(name)
    if entry is None:
        raise BundleError(
            f"{folder / MANIFEST_NAME} lists no file {name!r}, which its part needs: the bundle is "
            "incomplete; make that part again"
        )
    table = read_table(folder, entry, schema)
    return codec.check_reports(table, path=folder / entry.path)


def _checked_report(table: pa.Table, schema: pa.Schema, name: str) -> pa.Table:
    """The checked table with sorted rows, as their order says nothing and must not count."""
    checked = codec.check_reports(check_table(table, schema, path=name), path=name)
    return checked.sort_by([(column, "ascending") for column in checked.column_names])
