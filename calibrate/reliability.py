"""Reliability: predicted against observed frequency in bins of equal mass."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from hybridspec.artifacts.schemas import RELIABILITY_SCHEMA, table_from
from hybridspec.artifacts.tables import NUM_DRAFTS, FloatArray, IntArray
from hybridspec.calibrate.bootstrap import equal_mass_bins
from hybridspec.calibrate.features import BoolArray, TraceArrays, accepted_labels, at_risk
from hybridspec.calibrate.model import HazardModel

ALL_POSITIONS = -1
NUM_BINS = 15
MIN_ROWS_PER_BIN = 20


def reliability_table(trace: TraceArrays, models: Mapping[str, HazardModel]) -> pa.Table:
    """Reliability of hazards by split, model and position, outside repetition loops.

    Returns:
        a table of `RELIABILITY_SCHEMA`; position -1 pools all positions.
    """
    columns: dict[str, list[Any]] = {name: [] for name in RELIABILITY_SCHEMA.names}
    for split in ("calibration", "test"):
        rounds = trace.select((trace.split == split) & (trace.loop_period == 0))
        mask, labels = at_risk(rounds.accepted), accepted_labels(rounds.accepted)
        for model, fitted in models.items():
            hazards = fitted.predict(rounds)
            for position in (ALL_POSITIONS, *range(NUM_DRAFTS)):
                chosen = mask if position == ALL_POSITIONS else _only(mask, position)
                for line in _bins(hazards[chosen], labels[chosen]):
                    values = (split, model, position, *line)
                    for name, value in zip(RELIABILITY_SCHEMA.names, values, strict=True):
                        columns[name].append(value)
    return table_from(columns, RELIABILITY_SCHEMA)


def _only(mask: BoolArray, position: int) -> BoolArray:
    chosen = np.zeros_like(mask)
    chosen[:, position] = mask[:, position]
    return chosen


def _bins(predicted: FloatArray, observed: BoolArray) -> list[tuple[int, float, float, int]]:
    """(bin, mean predicted, mean observed, rows) of every bin that holds rows."""
    if predicted.size == 0:
        return []
    num_bins = min(NUM_BINS, max(1, predicted.size // MIN_ROWS_PER_BIN))
    bins: IntArray = equal_mass_bins(predicted, num_bins)
    lines = []
    for index in range(num_bins):
        inside = bins == index
        if inside.any():
            mean = float(predicted[inside].mean()), float(observed[inside].mean())
            lines.append((index, *mean, int(inside.sum())))
    return lines
