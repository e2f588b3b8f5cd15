"""A bundle's cost part from streams of forced lengths, in the run that will use it.

Every length is decoded with 1, 2, 4, ... clients; a round's time is the time between two chunks of
a stream. Plain decoding is the server without a drafter. What a draft pass costs is taken as a
drafted round of one row less a plain one, which holds the round's other overheads too.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from serving.decoding import Rounds

from hybridspec.artifacts.bundle import load_bundle, write_cost
from hybridspec.artifacts.identity import CostIdentity
from hybridspec.artifacts.tables import BLOCK_SIZE
from hybridspec.costmodels.export import bundle_experts, bundle_samples
from hybridspec.costmodels.probe import rows_expected
from hybridspec.costmodels.rounds import RoundSet
from hybridspec.costmodels.step import StepFit, fit_step_costs
from hybridspec.costmodels.sweep import EXPERT_SAMPLES_SCHEMA, STEP_SAMPLES_SCHEMA
from hybridspec.costmodels.throughput import fit_throughput
from hybridspec.errors import NotEnoughData
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
) -> tuple[StepFit, dict[str, Any]]:
    """Copy the calibration of `source` and add this run's costs and the throughput fitted on them.

    Returns:
        the fit, and plain numbers for the result file.
    """
    samples = step_samples(cells, context_tokens=context_tokens)
    fit = fit_step_costs(samples)
    throughput = fit_throughput(rounds, fit.table)
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(source, out)
    write_cost(
        out,
        identity=identity,
        step=fit.table,
        samples=bundle_samples(samples),
        experts=bundle_experts(EXPERT_SAMPLES_SCHEMA.empty_table(), num_layers=1),
        throughput=throughput,
        provenance=provenance("profile-latency", settings),
    )
    loaded = load_bundle(out)
    assert loaded.cost is not None
    assert loaded.cost.throughput is not None
    curve = {
        f"batch{int(batch)}": [round(float(us), 1) for us in fit.table.latency_us[row, 0]]
        for row, batch in enumerate(fit.table.batch_sizes)
    }
    return fit, {
        "latency_us_by_length_from_0": curve,
        "tokens_per_us_by_batch": throughput.tokens_per_us.tolist(),
        "best_fixed_length_by_batch": throughput.best_fixed_length.tolist(),
        "batch_sizes": throughput.batch_sizes.tolist(),
        "readings_per_case": fit.readings_per_case,
        "worst_drift": fit.worst_drift,
        "smoothed_cells": fit.smoothed,
        "warnings": [*fit.warnings, *loaded.warnings],
        "content_id": loaded.content_id,
        "lengths": BLOCK_SIZE,
    }
