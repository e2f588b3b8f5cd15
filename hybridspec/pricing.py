"""Fitting a bundle's throughput once it has both parts: hazards of recorded rounds, priced."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa

from hybridspec.artifacts.bundle import CalibrationPart, CostPart, load_bundle, write_throughput
from hybridspec.calibrate.features import trace_arrays
from hybridspec.calibrate.rounds import TraceIdentity, trace_identity
from hybridspec.calibrate.routing import distinct_experts
from hybridspec.calibrate.served import HazardFunction, part_hazards
from hybridspec.calibrate.trace import read_trace
from hybridspec.costmodels.policies import Dinkelbach, FixedLength, OracleLength
from hybridspec.costmodels.replay import ALL_CATEGORIES, replay, round_costs
from hybridspec.costmodels.rounds import RoundSet
from hybridspec.costmodels.throughput import fit_throughput
from hybridspec.errors import BundleError

TRACE_KEY = "trace"


def rounds_of(trace: pa.Table, hazards: HazardFunction, *, split: str) -> RoundSet:
    """Rounds of one split with the hazards that a policy would have seen.

    Args:
        trace: a checked trace (`read_trace`).
        hazards: gives float64 [R, 15] for the rounds.
        split: `calibration` or `test`.
    """
    arrays = trace_arrays(trace)
    distinct = distinct_experts(trace)
    rounds = RoundSet(
        prompt_index=arrays.prompt,
        category=arrays.category,
        loop_period=arrays.loop_period,
        accepted=arrays.accepted,
        hazards_ND=hazards(arrays),
        context_tokens=arrays.context_tokens,
        distinct_total_NL=None if distinct is None else distinct.sum(axis=1).astype(np.float64),
    )
    return rounds.select(arrays.split == split)


def fit_bundle_throughput(folder: Path, trace: pa.Table) -> pa.Table | None:
    """Fit and store the throughput of a bundle that has both parts, with the hazards it serves.

    Args:
        folder: of the bundle.
        trace: the one that its calibration part was fitted on.

    Returns:
        predicted tokens/s of plain decoding, stock DFlash, the best fixed length, the policy and
        the oracle on held-out rounds of single requests (`REPLAY_SCHEMA`); None where the trace
        has no held-out rounds.

    Raises:
        BundleError: a part is missing, or the trace is another pair's.
        NotEnoughData: too few rounds outside repetition loops.
    """
    bundle = load_bundle(folder)
    if bundle.calibration is None or bundle.cost is None:
        raise BundleError(f"{folder} has one part only; a throughput needs both: make the other")
    check_same_recording(bundle.calibration, trace_identity(trace, path="trace"))
    model = part_hazards(bundle.calibration)
    fitted = fit_throughput(rounds_of(trace, model.predict, split="calibration"), bundle.cost.step)
    throughput = replace(fitted, hazard=model.kind)
    write_throughput(folder, throughput)
    return predicted_rates(
        trace, bundle.calibration, bundle.cost, float(throughput.tokens_per_us[0])
    )


def predicted_rates(
    trace: pa.Table, calibration: CalibrationPart, cost: CostPart, tokens_per_us: float
) -> pa.Table | None:
    """Replay of held-out rounds at the smallest measured batch; see `fit_bundle_throughput`."""
    held_out = rounds_of(trace, part_hazards(calibration).predict, split="test")
    outside = held_out.outside_loops()
    if len(outside) == 0:
        return None
    batch = int(cost.step.batch_sizes[0])
    fixed = [FixedLength(length) for length in range(17)]
    policies = [*fixed, Dinkelbach(tokens_per_us), OracleLength()]
    costs = round_costs(held_out, cost.step, batch=batch)
    return replay(held_out, policies, cost.step, batch=batch, cost_NL=costs)


def overall(rates: pa.Table) -> dict[str, float]:
    """Tokens a second of each policy over all categories, in the order of the replay."""
    return {
        row["policy"]: row["tokens_per_s"]
        for row in rates.to_pylist()
        if row["category"] == ALL_CATEGORIES
    }


def check_same_recording(part: CalibrationPart, identity: TraceIdentity) -> None:
    """Refuse a trace that the calibration part cannot have been fitted on.

    Raises:
        BundleError: naming the field that differs.
    """
    for name in ("target_digest", "drafter_digest", "prompts_digest", "temperature", "top_p"):
        saved, found = getattr(part.identity, name), getattr(identity, name)
        if saved != found:
            raise BundleError(
                f"the trace has {name} = {found!r}, the calibration part was fitted with "
                f"{saved!r}: use the trace of this bundle, or calibrate again"
            )


def trace_reference(trace: Path, bundle: Path) -> str:
    """How a bundle remembers its trace: a path from the bundle, the same when both are moved."""
    return os.path.relpath(trace.resolve(), bundle.resolve())


def remembered_trace(folder: Path, part: CalibrationPart) -> pa.Table | None:
    """The trace that a calibration part was fitted on, if it still lies where it did."""
    reference = part.provenance.get(TRACE_KEY)
    if not isinstance(reference, str):
        return None
    path = folder / reference
    if not path.exists():
        return None
    return read_trace(path)
