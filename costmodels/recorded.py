"""From a trace to the rounds that a replay takes: hazards, and counts of experts and tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa

from hybridspec.artifacts.tables import BLOCK_SIZE, FloatArray
from hybridspec.calibrate.features import TraceArrays, trace_arrays
from hybridspec.calibrate.routing import distinct_experts, distinct_tokens
from hybridspec.calibrate.served import HazardFunction
from hybridspec.costmodels.rounds import RoundSet
from hybridspec.costmodels.trace_stream import TraceStream
from hybridspec.errors import NotEnoughData

MAX_FIT_ROUNDS = 50_000
"""Rounds of a split that are held in memory to fit on; whole prompts, the first ones of it."""
_ROUTE_ROWS = 1024


@dataclass(frozen=True)
class FitRounds:
    """What policies and hazards are fitted on.

    Attributes:
        table: rounds of the calibration split, loops included, rows by prompt.
        truncated: whether the split holds more rounds than are used.
    """

    table: pa.Table
    truncated: bool

    @cached_property
    def all_arrays(self) -> TraceArrays:
        """Arrays of all rounds."""
        return trace_arrays(self.table)

    @property
    def arrays(self) -> TraceArrays:
        """Arrays of the rounds outside repetition loops, for a fit."""
        return self.all_arrays.select(self.all_arrays.loop_period == 0)

    def rounds(self, hazards: HazardFunction) -> RoundSet:
        """The rounds outside repetition loops with their hazards."""
        return round_set(self.table, hazards, arrays=self.all_arrays).outside_loops()


def fit_rounds(stream: TraceStream, *, max_rounds: int = MAX_FIT_ROUNDS) -> FitRounds:
    """Returns the calibration split, up to `max_rounds` rounds.

    Raises:
        NotEnoughData: no round is in the calibration split.
    """
    kept: list[pa.Table] = []
    rows = 0
    for piece in stream.pieces():
        if rows >= max_rounds:
            return FitRounds(pa.concat_tables(kept), truncated=True)
        part = of_split(piece, "calibration")
        if part.num_rows:
            kept.append(part)
            rows += part.num_rows
    if not kept:
        raise NotEnoughData(
            f"{stream.path} has no round in the calibration split; policies are fitted on it: "
            "record both splits with `hybridspec calibrate`"
        )
    return FitRounds(pa.concat_tables(kept), truncated=False)


def of_split(table: pa.Table, split: str) -> pa.Table:
    """Returns the rounds of a split; all of them for `all`."""
    if split == "all":
        return table
    return table.filter(pa.array(np.asarray(table.column("split").to_pylist()) == split))


def round_set(
    table: pa.Table,
    hazards: HazardFunction,
    *,
    arrays: TraceArrays | None = None,
    layer_scale: float = 1.0,
    first_prompt: int = 0,
) -> RoundSet:
    """Returns the rounds of a trace table.

    Args:
        table: a checked trace table, whole prompts.
        hazards: gives float64 [n, 15] for the rounds.
        arrays: of the table, if they are at hand.
        layer_scale: priced layers over recorded layers, where the cost is of a deeper target whose
            layers are taken to route as the recorded ones do.
        first_prompt: number of the first prompt.
    """
    arrays = trace_arrays(table) if arrays is None else arrays
    first, total = expert_counts(table)
    return RoundSet(
        prompt_index=arrays.prompt + first_prompt,
        category=arrays.category,
        loop_period=arrays.loop_period,
        accepted=arrays.accepted,
        hazards_ND=hazards(arrays),
        context_tokens=arrays.context_tokens,
        distinct_total_NL=None if total is None else total * layer_scale,
        first_distinct_NL=first,
        distinct_tokens_NL=distinct_tokens(table).astype(np.float64),
        top1_ND=np.clip(arrays.p1_RD, 0.0, 1.0),
    )


def round_sets(
    stream: TraceStream, hazards: HazardFunction, *, split: str, layer_scale: float = 1.0
) -> Iterator[RoundSet]:
    """Yields the rounds of a split piece by piece, prompts numbered through."""
    first_prompt = 0
    for piece in stream.pieces():
        part = of_split(piece, split)
        if part.num_rows:
            rounds = round_set(part, hazards, layer_scale=layer_scale, first_prompt=first_prompt)
            first_prompt = int(rounds.prompt_index.max()) + 1
            yield rounds


def expert_counts(table: pa.Table) -> tuple[FloatArray | None, FloatArray | None]:
    """Returns distinct experts of the first L rows, of layer 0 and summed over layers.

    Both float64 [n, 16], or None without recorded routes.
    """
    first = np.empty((table.num_rows, BLOCK_SIZE))
    total = np.empty((table.num_rows, BLOCK_SIZE))
    for start in range(0, table.num_rows, _ROUTE_ROWS):
        counts = distinct_experts(table.slice(start, _ROUTE_ROWS))
        if counts is None:
            return None, None
        first[start : start + len(counts)] = counts[:, 0]
        total[start : start + len(counts)] = counts.sum(axis=1)
    return first, total
