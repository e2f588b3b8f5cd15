"""What `hybridspec bundle transfer` does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa

from hybridspec.artifacts.bundle import CalibrationPart, load_bundle, write_cost
from hybridspec.artifacts.schemas import EXPERTS_SCHEMA, SAMPLES_SCHEMA, table_from
from hybridspec.artifacts.store import MANIFEST_NAME
from hybridspec.artifacts.tables import TransferRecord
from hybridspec.artifacts.transport import copy_calibration
from hybridspec.cli._bundle_folder import check_bundle_folder
from hybridspec.cli._output import Output
from hybridspec.costmodels.anchors import read_anchors
from hybridspec.costmodels.transfer import check_transferable, transfer_table
from hybridspec.errors import BundleError, EnvironmentMissing, NotEnoughData
from hybridspec.pricing import (
    TRACE_KEY,
    fit_bundle_throughput,
    overall,
    remembered_trace,
    trace_reference,
)
from hybridspec.provenance import provenance


def transfer(source: Path, anchors_at: Path, out: Path, dry_run: bool, output: Output) -> None:
    """Transfer costs, write them beside the source's calibration, price them if the trace is there.

    Raises:
        BundleError: no measured costs in the source, machines that cannot be compared, or measured
            costs in `out` that would be lost.
        NotEnoughData, QualityGate: see `transfer_table`.
    """
    if not anchors_at.exists():
        raise EnvironmentMissing(
            f"--anchors {anchors_at} does not exist: profile some cells on this machine first"
        )
    bundle = load_bundle(source)
    if bundle.cost is None:
        raise BundleError(f"{source} has no cost part to transfer: give a profiled bundle")
    if bundle.cost.transfer is not None:
        raise BundleError(
            f"{source} holds transferred costs; errors of two transfers would add up unseen: "
            f"transfer from the measured part {bundle.cost.transfer.source[:12]}"
        )
    check_bundle_folder(out)
    _check_out(out)
    anchors = read_anchors(anchors_at)
    check_transferable(bundle.cost.identity, anchors.identity)
    moved = transfer_table(bundle.cost.step, anchors)
    record = TransferRecord(
        source=bundle.cost.content_id,
        source_device=bundle.cost.identity.device,
        source_engine_version=bundle.cost.identity.engine_version,
        anchors=len(anchors),
        error_median=float(np.median(moved.errors)),
        error_p90=float(np.quantile(moved.errors, 0.9)),
        interval_share=float(np.expm1(moved.half_width)),
    )
    for sentence in moved.dropped:
        output.warn(sentence)
    if anchors.expert_slope_us == 0.0:
        output.warn(
            "the anchors measured no cost of a distinct expert, so experts are not priced here"
        )
    facts = {
        "source": source.resolve().name,
        "source_device": record.source_device,
        "device": anchors.identity.device,
        "anchors": record.anchors,
        "cells": int(moved.measured.size),
        "cells_transferred": int(np.count_nonzero(~moved.measured)),
        "error_median": record.error_median,
        "error_p90": record.error_p90,
        "interval_share": record.interval_share,
        "dropped": list(moved.dropped),
    }
    words = (
        f"{facts['cells_transferred']} of {facts['cells']} cells from {record.source_device} to "
        f"{anchors.identity.device} with {record.anchors} anchors; anchors left out are missed by "
        f"{record.error_median:.1%} (median), {record.error_p90:.1%} (90 %), interval +-"
        f"{record.interval_share:.1%}"
    )
    if dry_run:
        output.result(f"would transfer {words}", {"dry_run": True, **facts})
        return
    if bundle.calibration is not None and not _has_calibration(out):
        _copy_calibration(source, bundle.calibration, out)
    content_id = write_cost(
        out,
        identity=replace(anchors.identity, max_batch=int(moved.table.batch_sizes[-1])),
        step=moved.table,
        samples=_no_samples(),
        experts=table_from({name: [] for name in EXPERTS_SCHEMA.names}, EXPERTS_SCHEMA),
        throughput=None,
        provenance=provenance("bundle transfer", {"anchors": record.anchors}),
        transfer=record,
        anchors=anchors.table(),
    )
    rates = _price(out, output)
    output.result(
        f"{out}: transferred {words}",
        {"out": str(out), "content_id": content_id, "tokens_per_s": rates, **facts},
    )


def _check_out(out: Path) -> None:
    if not (out / MANIFEST_NAME).exists():
        return
    cost = load_bundle(out).cost
    if cost is not None and cost.transfer is None:
        raise BundleError(
            f"--out {out} holds measured costs, which transferred ones would replace: choose "
            "another folder"
        )


def _has_calibration(out: Path) -> bool:
    return (out / MANIFEST_NAME).exists() and load_bundle(out).calibration is not None


def _copy_calibration(source: Path, part: CalibrationPart, out: Path) -> None:
    facts = dict(part.provenance)
    if isinstance(facts.get(TRACE_KEY), str):
        facts[TRACE_KEY] = trace_reference(source / facts[TRACE_KEY], out)
    copy_calibration(source, out, provenance=facts)


def _no_samples() -> pa.Table:
    """The source's samples belong to its machine; the anchors are kept as a table of their own."""
    return table_from({name: [] for name in SAMPLES_SCHEMA.names}, SAMPLES_SCHEMA)


def _price(out: Path, output: Output) -> dict[str, float]:
    """Predicted tokens/s of each policy, where the calibration's trace is at hand."""
    calibration = load_bundle(out).calibration
    if calibration is None:
        output.note("there is no calibration part yet: run `hybridspec calibrate` into this folder")
        return {}
    remedy = f"run `hybridspec calibrate --from-trace DIR --out {out}` with the pair's trace"
    try:
        trace = remembered_trace(out, calibration)
        if trace is None:
            output.warn(f"the throughput is not fitted, because the trace is not there: {remedy}")
            return {}
        rates = fit_bundle_throughput(out, trace)
    except (NotEnoughData, BundleError) as error:
        output.warn(f"the throughput is not fitted ({error}): {remedy}")
        return {}
    return {} if rates is None else overall(rates)
