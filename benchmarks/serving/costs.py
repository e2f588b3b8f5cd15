"""A bundle's cost part from streams of forced lengths, in the run that will use it.

Every length is decoded with 1, 2, 4, ... clients; a round's time is the time between two chunks of
a stream. Plain decoding is the server without a drafter. What a draft pass costs is taken as a
drafted round of one row less a plain one, which holds the round's other overheads too.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from serving.decoding import Rounds

from hybridspec.artifacts.bundle import load_bundle, write_cost
from hybridspec.artifacts.identity import CostIdentity
from hybridspec.artifacts.tables import BLOCK_SIZE, RoutingTable, StepCostTable
from hybridspec.costmodels.export import bundle_experts, bundle_samples
from hybridspec.costmodels.probe import rows_expected
from hybridspec.costmodels.rounds import RoundSet
from hybridspec.costmodels.step import fit_step_costs
from hybridspec.costmodels.sweep import EXPERT_SAMPLES_SCHEMA, STEP_SAMPLES_SCHEMA
from hybridspec.costmodels.throughput import fit_throughput
from hybridspec.errors import NotEnoughData, QualityGate
from hybridspec.provenance import provenance

_FEWEST_ROUNDS = 8
_MOST_ROUNDS = 400


def step_samples(cells: Mapping[tuple[int, int], Rounds], *, context_tokens: int) -> pa.Table:
    """Round times as a table of step samples.

    Args:
        cells: rounds by (clients, verify length); length 0 is plain decoding.
        context_tokens: middle context of the rounds.

    Raises:
        NotEnoughData: a cell with fewer than 8 rounds.
    """
    times: dict[tuple[int, int], np.ndarray] = {}
    for cell, rounds in cells.items():
        # Loops cost what other rounds of their length cost, and last chunks took a whole round.
        seconds = rounds.seconds[rounds.crowded][:_MOST_ROUNDS]
        if seconds.size < _FEWEST_ROUNDS:
            raise NotEnoughData(
                f"{seconds.size} rounds with {cell[0]} clients at length {cell[1]}; at least "
                f"{_FEWEST_ROUNDS} are needed: decode more tokens"
            )
        times[cell] = 1e6 * seconds
    columns: dict[str, list[Any]] = {name: [] for name in STEP_SAMPLES_SCHEMA.names}
    for (batch, length), us in sorted(times.items()):
        draft = 0.0
        if length > 0:
            one_row, plain = np.median(times[batch, 1]), np.median(times[batch, 0])
            draft = max(float(one_row - plain), 1.0)
        for repeat, total in enumerate(us.tolist()):
            for name, value in (
                ("batch", batch),
                ("context_tokens", context_tokens),
                ("verify_length", length),
                ("repeat", repeat),
                ("total_us", total),
                ("draft_us", draft),
                ("verify_us", None),
                ("commit_us", None),
                ("rows_run", rows_expected(batch=batch, verify_length=length)),
            ):
                columns[name].append(value)
    return pa.table(columns, schema=STEP_SAMPLES_SCHEMA)


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
    samples = step_samples(cells, context_tokens=context_tokens)
    step, remarks = fit_costs(samples)
    part = load_bundle(source).calibration
    if part is not None and part.routing is not None:
        step = with_expert_slope(step, part.routing)
    throughput = fit_throughput(rounds, step)
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
        "fewest_readings": min(rounds.seconds.size for rounds in cells.values()),
        "warnings": [*remarks, *loaded.warnings],
        "content_id": loaded.content_id,
    }


def fit_costs(samples: pa.Table) -> tuple[StepCostTable, list[str]]:
    """The table of the project's own fit; where that refuses, medians that rise with the length.

    A short run beside a load generator may miss the gates of a profile; the lengths that it prices
    are compared by what they decode in the same run, and the refusal is kept.

    Returns:
        the table and what is to be known of it.
    """
    try:
        fit = fit_step_costs(samples)
    except QualityGate as error:
        return _medians(samples), [f"medians of all rounds; as a profile it was refused: {error}"]
    return fit.table, list(fit.warnings)


def with_expert_slope(step: StepCostTable, routing: RoutingTable) -> StepCostTable:
    """Price distinct experts by the line of round times on their mean number, batch 1.

    Rows that add experts also add other work, so the slope is an upper bound; only the first
    router's correction reads it.
    """
    experts, us = routing.total_mean_L, step.latency_us[0, 0, 1:]
    slope, start = np.polyfit(experts, us, 1)
    residual = us - (slope * experts + start)
    return dataclasses.replace(
        step,
        expert_slope_us=max(float(slope), 0.0),
        expert_slope_r2=float(1.0 - residual.var() / us.var()),
    )


def _medians(samples: pa.Table) -> StepCostTable:
    columns = {
        name: samples.column(name).to_numpy(zero_copy_only=False)
        for name in ("batch", "verify_length", "total_us", "draft_us", "context_tokens")
    }
    sizes = np.unique(columns["batch"])
    quantiles = np.empty((3, sizes.size, 1, BLOCK_SIZE + 1))
    draft = np.empty((sizes.size, 1))
    for row, size in enumerate(sizes):
        here = columns["batch"] == size
        for length in range(BLOCK_SIZE + 1):
            us = columns["total_us"][here & (columns["verify_length"] == length)]
            quantiles[:, row, 0, length] = np.quantile(us, [0.1, 0.5, 0.9])
        draft[row, 0] = columns["draft_us"][here].max()
    quantiles[1, ..., 1:] = np.maximum.accumulate(quantiles[1, ..., 1:], axis=-1)
    return StepCostTable(
        batch_sizes=sizes.astype(np.int64),
        context_tokens=np.unique(columns["context_tokens"]).astype(np.int64),
        latency_us=quantiles[1],
        latency_p10_us=np.minimum(quantiles[0], quantiles[1]),
        latency_p90_us=np.maximum(quantiles[2], quantiles[1]),
        draft_us=draft,
        expert_slope_us=0.0,
        expert_slope_r2=0.0,
    )
