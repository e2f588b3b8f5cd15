"""What `hybridspec profile-latency` tells: its plan before, its figures after."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hybridspec.artifacts.tables import StepCostTable
from hybridspec.cli._output import Output, format_seconds
from hybridspec.cli._rates import tell_rates
from hybridspec.costmodels.anchors import Anchors
from hybridspec.costmodels.breakeven import break_even
from hybridspec.costmodels.expert import ExpertSlope
from hybridspec.costmodels.step import StepFit

if TYPE_CHECKING:
    from hybridspec.cli._profile_plan import Plan

_SHOWN_LENGTHS = (0, 1, 2, 4, 8, 16)


def tell_plan(plan: Plan, out: Path, output: Output) -> None:
    """Say what would be measured."""
    contexts = ", ".join(map(str, plan.contexts))
    batches = ", ".join(map(str, plan.batch_sizes))
    data = {
        "pair": plan.folders.name,
        "device": plan.placement.device,
        "dtype": plan.placement.dtype,
        "threads": plan.placement.threads,
        "contexts": list(plan.contexts),
        "batch_sizes": list(plan.batch_sizes),
        "repeats": plan.repeats,
        "step_rounds": plan.step_rounds,
        "expert_rounds": plan.expert_rounds,
        "lengths": list(plan.lengths),
        "graph_control": plan.control,
        "budget_s": plan.budget_s,
        "bundle": str(out),
    }
    output.result(
        f"would measure {plan.folders.target} on {plan.placement.device} "
        f"({plan.placement.dtype}, {plan.placement.threads} threads, {_graphs(plan)}): lengths "
        f"{_named(plan.lengths)} at contexts "
        f"{contexts} and batch sizes {batches}, {plan.repeats} repeats after a warm-up, "
        f"{plan.step_rounds} rounds, and {plan.expert_rounds} rounds with forced experts, in at "
        f"most about {format_seconds(plan.budget_s)}, then write {out}; nothing was done",
        data,
    )


def tell_anchors(path: Path, anchors: Anchors, output: Output) -> None:
    """Show measured anchors and write their file's path as the result."""
    rows = [
        (f"{batch}, {context}", _length_name(length), f"{us / 1e3:.2f}")
        for batch, context, length, us in zip(
            anchors.batch_sizes.tolist(),
            anchors.context_tokens.tolist(),
            anchors.lengths.tolist(),
            anchors.latency_us.tolist(),
            strict=True,
        )
    ]
    output.table("Anchors", ("batch, context", "length", "ms a round"), rows)
    output.result(str(path), {"anchors": str(path), "cells": len(anchors)})


def _graphs(plan: Plan) -> str:
    return f"{plan.control} graphs" if plan.captured else "no graphs"


def _named(lengths: tuple[int, ...]) -> str:
    if lengths == tuple(range(lengths[0], lengths[-1] + 1)):
        return f"{lengths[0]} to {lengths[-1]}"
    return ", ".join(map(str, lengths))


def tell_result(
    out: Path,
    fit: StepFit,
    slope: ExpertSlope | None,
    *,
    content_id: str,
    rates: Mapping[str, float],
    output: Output,
) -> None:
    """Show the figures of the fit and write the bundle's path as the result."""
    table = fit.table
    output.table(
        f"Time of a round in ms by verify length (median of {fit.readings_per_case} or more)",
        ("batch, context", *(_length_name(length) for length in _SHOWN_LENGTHS)),
        _cost_rows(table),
    )
    verdicts = break_even(table)
    if output.decorated:
        for verdict in verdicts:
            output.note(verdict.line())
    tell_rates(rates, output)
    output.result(
        str(out),
        {
            "bundle": str(out),
            "content_id": content_id,
            "readings_per_case": fit.readings_per_case,
            "worst_drift": fit.worst_drift,
            "latency_us": table.latency_us.tolist(),
            "batch_sizes": table.batch_sizes.tolist(),
            "contexts": table.context_tokens.tolist(),
            "expert_slope_us": table.expert_slope_us,
            "expert_slope_r2": table.expert_slope_r2,
            "expert_slope_usable": slope is not None and slope.usable,
            "break_even": [
                {
                    "batch": verdict.batch,
                    "context_tokens": verdict.context_tokens,
                    "acceptance": verdict.acceptance,
                    "length": verdict.length,
                }
                for verdict in verdicts
            ],
            "warnings": list(fit.warnings),
            "predicted_tokens_per_s": dict(rates),
        },
    )


def _length_name(length: int) -> str:
    return "plain" if length == 0 else f"L={length}"


def _cost_rows(table: StepCostTable) -> list[tuple[str, ...]]:
    rows = []
    for row, column in np.ndindex(table.batch_sizes.size, table.context_tokens.size):
        name = f"{table.batch_sizes[row]}, {table.context_tokens[column]}"
        cells = (f"{table.latency_us[row, column, n] / 1e3:.2f}" for n in _SHOWN_LENGTHS)
        rows.append((name, *cells))
    return rows
