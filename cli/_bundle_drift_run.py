"""What `hybridspec bundle drift` does."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from hybridspec.artifacts.bundle import CalibrationPart, load_bundle
from hybridspec.calibrate.drift import DriftReport, drift
from hybridspec.calibrate.features import TraceArrays, trace_arrays
from hybridspec.calibrate.fit import with_test_split
from hybridspec.calibrate.held_out import held_out_rounds
from hybridspec.calibrate.rounds import trace_identity
from hybridspec.calibrate.served import check_pair, part_hazards
from hybridspec.cli._output import Output
from hybridspec.costmodels.trace_stream import open_trace
from hybridspec.errors import BundleError, QualityGate
from hybridspec.pricing import check_same_recording, remembered_trace

# Compared at most: more prompts than this only make the smallest difference significant.
MAX_ROUNDS = 50_000


def run(bundle: Path, trace: Path, reference: Path | None, seed: int, output: Output) -> None:
    """Compare a new trace with the held-out rounds of the bundle's own; exit code 5 if its hazards
    do not hold.
    """
    part = load_bundle(bundle).calibration
    if part is None:
        raise BundleError(
            f"{bundle} has no calibration part, so no hazards that could drift: run `hybridspec "
            f"calibrate --out {bundle}`"
        )
    now = _read(trace, output)
    _check(part, now, bundle, trace, output)
    before = _reference(part, bundle, reference, output)
    source = f"the trace that {bundle} was calibrated on" if reference is None else str(reference)
    same = _all_among(now, before)
    if same:
        output.warn(
            f"all rounds of {trace} are from {source}, so they cannot show drift: give rounds "
            "that were recorded later, or of other prompts"
        )
    model = part_hazards(part)
    output.note(f"comparing {now.num_rows} rounds of {trace} by {model.name}")
    current = trace_arrays(now)
    report = drift(
        model,
        _held_out(before),
        current.select(current.loop_period == 0),
        seed=seed,
    )
    _tell(report, trace, source, output)
    result = _as_json(report, model.name, bundle, trace) | {"rounds_of_the_reference": same}
    output.result(f"{trace}: {report.sentence()}", result)
    if report.verdict == "calibration moved":
        raise QualityGate(f"the hazards of {bundle} do not hold on {trace}: {report.sentence()}")
    if report.moved:
        output.warn(f"{report.sentence()}; record again if they move further")


def _read(path: Path, output: Output) -> pa.Table:
    kept: list[pa.Table] = []
    rows = 0
    stream = open_trace(path)
    for piece in stream.pieces():
        kept.append(piece)
        rows += piece.num_rows
        if rows >= MAX_ROUNDS:
            break
    if rows < stream.num_rounds:
        output.warn(f"the first {rows} of {stream.num_rounds} rounds of {path} are compared")
    return pa.concat_tables(kept)


def _check(
    part: CalibrationPart, trace: pa.Table, bundle: Path, path: Path, output: Output
) -> None:
    identity = trace_identity(trace, path=path)
    for warning in check_pair(part, identity, folder=bundle):
        output.warn(warning)
    for name in ("temperature", "top_p"):
        saved, found = getattr(part.identity, name), getattr(identity, name)
        if saved != found:
            raise BundleError(
                f"{path} was recorded with {name} = {found!r}, the hazards of {bundle} were fitted "
                f"with {saved!r}: record it with the same sampling"
            )


def _reference(
    part: CalibrationPart, bundle: Path, reference: Path | None, output: Output
) -> pa.Table:
    if reference is not None:
        table = _read(reference, output)
        _check(part, table, bundle, reference, output)
        return table
    found = remembered_trace(bundle, part)
    if found is None:
        raise BundleError(
            f"the trace that {bundle} was calibrated on is not where it was; its held-out rounds "
            "are what to compare with: pass --reference TRACE"
        )
    check_same_recording(part, trace_identity(found, path=bundle))
    return found


def _all_among(now: pa.Table, before: pa.Table) -> bool:
    """Whether the prompts of `now` have the same rounds in `before`, in whatever order."""
    order = [("prompt_id", "ascending"), ("round", "ascending")]
    known = np.isin(before["prompt_id"].to_numpy(), now["prompt_id"].unique().to_numpy(False))
    found: bool = now.sort_by(order).equals(before.filter(pa.array(known)).sort_by(order))
    return found


def _held_out(table: pa.Table) -> TraceArrays:
    rounds, _ = with_test_split(trace_arrays(table))
    return held_out_rounds(rounds)


def _tell(report: DriftReport, trace: Path, source: str, output: Output) -> None:
    output.table(
        f"{report.current_prompts} prompts of {trace} and {report.reference_prompts} held-out ones "
        f"of {source}; significant below {report.level:g}",
        ("compared", "gap", "p", "adjusted p"),
        [
            (
                test.name,
                f"{test.statistic:.3f}",
                f"{test.p_value:.4f}",
                f"{test.adjusted_p_value:.4f}" + (" *" if test.name in report.moved else ""),
            )
            for test in report.tests
        ],
    )


def _as_json(report: DriftReport, name: str, bundle: Path, trace: Path) -> dict[str, Any]:
    return {
        "bundle": str(bundle),
        "trace": str(trace),
        "hazard": name,
        "moved": list(report.moved),
        **asdict(report),
    }
