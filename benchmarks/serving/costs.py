"""A bundle's cost part from streams of forced lengths, in the run that will use it.

Every length is decoded with 1, 2, 4, ... clients; a round's time is the time between two chunks of
a stream. Plain decoding is the server without a drafter. What a draft pass costs is taken as a
drafted round of one row less a plain one, which holds the round's other overheads too.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from serving.decoding import Looping, Rounds, joined, rounds_of
from serving.load import Stream

from hybridspec.artifacts.bundle import load_bundle, write_cost
from hybridspec.artifacts.identity import CostIdentity
from hybridspec.artifacts.tables import BLOCK_SIZE, TREES, RoutingTable, StepCostTable
from hybridspec.costmodels.distinct_line import fit_distinct_line
from hybridspec.costmodels.export import bundle_experts, bundle_samples
from hybridspec.costmodels.probe import rows_expected
from hybridspec.costmodels.rounds import RoundSet
from hybridspec.costmodels.sweep import EXPERT_SAMPLES_SCHEMA, STEP_SAMPLES_SCHEMA
from hybridspec.costmodels.throughput import fit_throughput
from hybridspec.errors import NotEnoughData
from hybridspec.provenance import provenance

NUM_EXPERTS = 256
_MOST_ROUNDS = 400


def line_costs(
    cells: Mapping[tuple[int, int], Rounds], routing: RoutingTable, *, context_tokens: int
) -> tuple[StepCostTable, pa.Table, dict[str, Any]]:
    """Round times as a line on distinct experts for each batch size (`costmodels.distinct_line`).

    Args:
        cells: rounds by (clients, verify length); length 0 is plain decoding.
        routing: mean distinct experts of all layers by length.
        context_tokens: middle context of the rounds.

    Returns:
        the table, the readings behind it, and how well the lines fit.

    Raises:
        NotEnoughData, QualityGate: see `fit_distinct_line`.
    """
    sizes = sorted({batch for batch, _ in cells})
    distinct_L = routing.total_mean_L / routing.num_layers
    latency = np.empty((3, len(sizes), 1, BLOCK_SIZE + 1))
    draft = np.empty((len(sizes), 1))
    columns: dict[str, list[Any]] = {name: [] for name in STEP_SAMPLES_SCHEMA.names}
    fits: dict[str, Any] = {}
    for row, batch in enumerate(sizes):
        # Loops cost what other rounds of their length cost, and last chunks took a whole round.
        times = {
            length: 1e6 * rounds.seconds[rounds.crowded]
            for (count, length), rounds in cells.items()
            if count == batch
        }
        plain = times.pop(0)
        line = fit_distinct_line(times, distinct_L, batch=batch, num_experts=NUM_EXPERTS)
        around = np.concatenate([v / line.latency_us_L[n - 1] for n, v in times.items()])
        low, high = np.quantile(around, [0.1, 0.9])
        latency[1, row, 0] = [np.median(plain), *line.latency_us_L]
        latency[0, row, 0] = [np.quantile(plain, 0.1), *(min(low, 1.0) * line.latency_us_L)]
        latency[2, row, 0] = [np.quantile(plain, 0.9), *(max(high, 1.0) * line.latency_us_L)]
        draft[row, 0] = max(float(line.latency_us_L[0] - np.median(plain)), 1.0)
        fits[f"batch{batch}"] = {
            "start_us": round(line.start_us, 1),
            "us_a_distinct_expert_of_every_layer": round(line.slope_us, 2),
            "r2": round(line.r2, 4),
            "worst_residual": _number(line.worst_residual),
            "median_us_by_length_from_1": [_number(v) for v in line.median_us_L],
            "rounds_by_length_from_1": line.rounds_L.tolist(),
        }
        for length, values in sorted({0: plain, **times}.items()):
            for repeat, total in enumerate(values[:_MOST_ROUNDS].tolist()):
                for name, value in (
                    ("batch", batch),
                    ("context_tokens", context_tokens),
                    ("verify_length", length),
                    ("repeat", repeat),
                    ("total_us", total),
                    ("draft_us", draft[row, 0] if length else 0.0),
                    ("verify_us", None),
                    ("commit_us", None),
                    ("rows_run", rows_expected(batch=batch, verify_length=length)),
                ):
                    columns[name].append(value)
    slope = float(fits[f"batch{sizes[0]}"]["us_a_distinct_expert_of_every_layer"])
    table = StepCostTable(
        batch_sizes=np.array(sizes, dtype=np.int64),
        context_tokens=np.array([context_tokens], dtype=np.int64),
        latency_us=latency[1],
        latency_p10_us=latency[0],
        latency_p90_us=latency[2],
        draft_us=draft,
        # Of one expert of one layer; rows add other work too, so it is an upper bound.
        expert_slope_us=slope / routing.num_layers,
        expert_slope_r2=float(fits[f"batch{sizes[0]}"]["r2"]),
    )
    return table, pa.table(columns, schema=STEP_SAMPLES_SCHEMA), fits


def recorded_costs(
    raw: Mapping[str, Any], looping: Looping, clients: Sequence[int]
) -> dict[tuple[int, int], Rounds]:
    """Rounds by (clients, verify length) of a recording: its cost streams, its arms of fixed
    lengths, and plain decoding as length 0.

    Raises:
        NotEnoughData: it has no plain decoding or no cost streams.
    """
    arms = raw["arms"]
    if "ar" not in arms or "cost_streams" not in raw:
        raise NotEnoughData("costs need a recording of the arms ar and hybridspec-fixed")
    parts: dict[tuple[int, int], list[Rounds]] = {}

    def add(count: int, length: int, streams: Sequence[Mapping[str, Any]]) -> None:
        found = rounds_of([Stream(**s) for s in streams], looping, clients=count)
        parts.setdefault((count, length), []).append(found)

    for name, streams in raw["cost_streams"].items():
        count, _, length, _ = name.split()
        add(int(count), int(length), streams)
    for name, arm in arms.items():
        length = "0" if name == "ar" else name.removeprefix("fixed")
        if not length.isdigit():
            continue
        for count, streams in arm["runs"].items():
            add(int(count), int(length), streams)
    return {cell: joined(found) for cell, found in parts.items() if cell[0] in clients}


def _number(value: float) -> float | None:
    return round(float(value), 4) if np.isfinite(value) else None


def load_rounds(path: Path) -> RoundSet:
    """Rounds of the calibration split with their hazards, as `sglang_prepare` wrote them."""
    with np.load(path) as saved:
        return RoundSet(**{name: saved[name] for name in saved.files})


def write_bundle(
    source: Path,
    out: Path,
    cells: Mapping[tuple[int, int], Rounds],
    rounds: RoundSet,
    identity: CostIdentity,
    *,
    context_tokens: int,
    settings: Mapping[str, Any],
) -> dict[str, Any]:
    """Copy the calibration of `source` and add this run's costs and the throughput fitted on them.

    Returns:
        plain numbers for the result file.
    """
    part = load_bundle(source).calibration
    if part is None or part.routing is None:
        raise NotEnoughData(f"{source} has no routing: make it with sglang_prepare.py")
    step, samples, fits = line_costs(cells, part.routing, context_tokens=context_tokens)
    throughput = fit_throughput(rounds, step)
    if part.trees is not None:
        # The rounds' hazards are the trees', so the price is theirs.
        throughput = dataclasses.replace(throughput, hazard=TREES)
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(source, out)
    write_cost(
        out,
        identity=identity,
        step=step,
        samples=bundle_samples(samples),
        experts=bundle_experts(EXPERT_SAMPLES_SCHEMA.empty_table(), num_layers=1),
        throughput=throughput,
        provenance=provenance("profile-latency", settings),
    )
    loaded = load_bundle(out)
    assert loaded.cost is not None
    assert loaded.cost.throughput is not None
    curve = {
        f"batch{int(batch)}": [round(float(us), 1) for us in step.latency_us[row, 0]]
        for row, batch in enumerate(step.batch_sizes)
    }
    return {
        "latency_us_by_length_from_0": curve,
        "tokens_per_us_by_batch": throughput.tokens_per_us.tolist(),
        "best_fixed_length_by_batch": throughput.best_fixed_length.tolist(),
        "batch_sizes": throughput.batch_sizes.tolist(),
        "us_a_distinct_expert": step.expert_slope_us,
        "us_a_distinct_expert_r2": step.expert_slope_r2,
        "lines": fits,
        "warnings": list(loaded.warnings),
        "content_id": loaded.content_id,
    }
