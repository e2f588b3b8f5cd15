"""Driving a probe over a grid of cases; every round is checked to be the round that was asked for.

The two tables of samples made here are what the fits of `costmodels.step` and `costmodels.expert`
read; bundles keep them beside the fits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
import pyarrow as pa

from hybridspec.artifacts.tables import BLOCK_SIZE
from hybridspec.costmodels.measure import Measured, measure_interleaved
from hybridspec.costmodels.probe import (
    ForcedRouteTiming,
    RoundProbe,
    RoundTiming,
    rows_expected,
)
from hybridspec.errors import ModelError, QualityGate, UsageError

Progress = Callable[[int, int], None]
ALL_LENGTHS = tuple(range(BLOCK_SIZE + 1))


def _us(name: str, *, nullable: bool = False) -> pa.Field:
    return pa.field(name, pa.float64(), nullable=nullable, metadata={"unit": "us"})


def _count(name: str) -> pa.Field:
    return pa.field(name, pa.int64(), nullable=False)


STEP_SAMPLES_SCHEMA = pa.schema(
    [
        _count("batch"),
        _count("context_tokens"),
        _count("verify_length"),
        _count("repeat"),
        _us("total_us"),
        _us("draft_us"),
        _us("verify_us", nullable=True),
        _us("commit_us", nullable=True),
        _count("rows_run"),
    ],
    metadata={"schema_id": "hybridspec.step-samples/1"},
)

EXPERT_SAMPLES_SCHEMA = pa.schema(
    [
        _count("batch"),
        _count("context_tokens"),
        _count("verify_length"),
        pa.field(
            "distinct_experts",
            pa.int64(),
            nullable=False,
            metadata={"unit": "distinct experts of each layer"},
        ),
        _count("repeat"),
        _us("total_us"),
    ],
    metadata={"schema_id": "hybridspec.expert-samples/1"},
)


@dataclass(frozen=True)
class StepCase:
    """One cell of the step cost table."""

    batch: int
    context_tokens: int
    verify_length: int


@dataclass(frozen=True)
class ExpertCase:
    """One forced-route round; `distinct_experts` counts those of each layer."""

    batch: int
    context_tokens: int
    verify_length: int
    distinct_experts: int


def measure_steps(
    probe: RoundProbe,
    *,
    batch_sizes: Sequence[int],
    context_tokens: Sequence[int],
    repeats: int,
    budget_s: float,
    seed: int = 0,
    warmup: int = 1,
    progress: Progress | None = None,
    lengths: Sequence[int] = ALL_LENGTHS,
) -> pa.Table:
    """Measures every verify length 0..16, or some of them, at each batch and context.

    Returns:
        A table of `STEP_SAMPLES_SCHEMA`.

    Raises:
        UsageError: a batch or context that the engine cannot hold, or no such length.
        QualityGate: a round ran other rows than asked for, or the budget was too short.
        Interrupted: Ctrl-C; `step_samples(error.measured)` is what was finished.
    """
    _check_grid("batch", batch_sizes, limit=probe.max_batch, least=1)
    _check_grid("context", context_tokens, limit=probe.max_context, least=1)
    _check_grid("verify length", lengths, limit=BLOCK_SIZE, least=0)
    prepare = _Preparer(probe)

    def case(key: StepCase) -> Callable[[], RoundTiming]:
        def run() -> RoundTiming:
            prepare(batch=key.batch, context_tokens=key.context_tokens)
            timing = probe.run_round(key.verify_length)
            asked = rows_expected(batch=key.batch, verify_length=key.verify_length)
            check_rows(asked, timing.rows_run, case=key)
            return timing

        return run

    keys = [
        StepCase(batch, context, length)
        for batch in batch_sizes
        for context in context_tokens
        for length in lengths
    ]
    measured = measure_interleaved(
        {key: case(key) for key in keys},
        repeats=repeats,
        budget_s=budget_s,
        seed=seed,
        warmup=warmup,
        group_of=lambda key: (key.batch, key.context_tokens),
        progress=progress,
    )
    return step_samples(measured)


def expert_grid(
    *, verify_lengths: Sequence[int], experts_per_token: int, num_experts: int, points: int = 4
) -> list[tuple[int, int]]:
    """Returns (verify length, distinct experts of a layer) pairs that routing can reach.

    `points` counts a length, evenly spread from full overlap (`experts_per_token`) to none.
    """
    pairs: list[tuple[int, int]] = []
    for length in verify_lengths:
        most = min(num_experts, length * experts_per_token)
        counts = np.unique(np.linspace(experts_per_token, most, points).round().astype(int))
        pairs += [(length, int(count)) for count in counts]
    return pairs


def measure_experts(
    probe: RoundProbe,
    *,
    verify_lengths: Sequence[int] = (2, 4, 8, 16),
    points: int = 4,
    context_tokens: int,
    repeats: int,
    budget_s: float,
    seed: int = 0,
    warmup: int = 1,
    progress: Progress | None = None,
) -> pa.Table:
    """Measures one request's rounds with routes forced to a chosen overlap.

    Returns:
        A table of `EXPERT_SAMPLES_SCHEMA`.

    Raises:
        ModelError: the target has no routed experts.
        QualityGate: a round ran other rows or experts than asked for.
        Interrupted: Ctrl-C; `expert_samples(error.measured)` is what was finished.
    """
    if probe.num_experts == 0 or probe.num_layers == 0:
        raise ModelError(
            "this target has no routed experts, so there is no cost an expert to measure: "
            "leave the expert measurement out"
        )
    _check_grid("verify length", verify_lengths, limit=BLOCK_SIZE, least=1)
    _check_grid("context", [context_tokens], limit=probe.max_context, least=1)
    prepare = _Preparer(probe)

    def case(key: ExpertCase) -> Callable[[], ForcedRouteTiming]:
        def run() -> ForcedRouteTiming:
            prepare(batch=key.batch, context_tokens=key.context_tokens)
            timing = probe.run_forced_routes(key.verify_length, key.distinct_experts)
            check_rows(key.batch * key.verify_length, timing.rows_run, case=key)
            if timing.distinct_experts != key.distinct_experts:
                raise QualityGate(
                    f"{timing.distinct_experts} distinct experts ran, {key.distinct_experts} were "
                    f"asked for ({key}): the engine's forced routing does not reach its experts"
                )
            return timing

        return run

    pairs = expert_grid(
        verify_lengths=verify_lengths,
        experts_per_token=probe.experts_per_token,
        num_experts=probe.num_experts,
        points=points,
    )
    keys = [ExpertCase(1, context_tokens, length, count) for length, count in pairs]
    measured = measure_interleaved(
        {key: case(key) for key in keys},
        repeats=repeats,
        budget_s=budget_s,
        seed=seed,
        warmup=warmup,
        progress=progress,
    )
    return expert_samples(measured)


def step_samples(measured: Measured[StepCase, RoundTiming]) -> pa.Table:
    """Returns readings as a table of `STEP_SAMPLES_SCHEMA`; parts that are NaN become null."""
    rows = [
        {
            "batch": key.batch,
            "context_tokens": key.context_tokens,
            "verify_length": key.verify_length,
            "repeat": repeat,
            "total_us": timing.total_us,
            "draft_us": timing.draft_us,
            "verify_us": None if np.isnan(timing.verify_us) else timing.verify_us,
            "commit_us": None if np.isnan(timing.commit_us) else timing.commit_us,
            "rows_run": timing.rows_run,
        }
        for key, timings in measured.readings.items()
        for repeat, timing in enumerate(timings)
    ]
    return pa.Table.from_pylist(rows, schema=STEP_SAMPLES_SCHEMA)


class Timed(Protocol):
    """A reading of a whole round."""

    @property
    def total_us(self) -> float:
        """Its time."""
        ...


_Timed = TypeVar("_Timed", bound=Timed)


def expert_samples(measured: Measured[ExpertCase, _Timed]) -> pa.Table:
    """Returns readings as a table of `EXPERT_SAMPLES_SCHEMA`."""
    rows = [
        {
            "batch": key.batch,
            "context_tokens": key.context_tokens,
            "verify_length": key.verify_length,
            "distinct_experts": key.distinct_experts,
            "repeat": repeat,
            "total_us": timing.total_us,
        }
        for key, timings in measured.readings.items()
        for repeat, timing in enumerate(timings)
    ]
    return pa.Table.from_pylist(rows, schema=EXPERT_SAMPLES_SCHEMA)


def check_rows(asked: int, ran: int, *, case: object) -> None:
    """Refuses a measurement of other rows than were asked for."""
    if ran != asked:
        raise QualityGate(
            f"{ran} target rows ran where {asked} were asked for ({case}): the engine pads or "
            "ignores the length, so this would be another round's cost; fix its length control"
        )


class _Preparer:
    """Prepares the probe only when the case needs another batch or context."""

    def __init__(self, probe: RoundProbe) -> None:
        self._probe = probe
        self._current: tuple[int, int] | None = None

    def __call__(self, *, batch: int, context_tokens: int) -> None:
        wanted = (batch, context_tokens)
        if wanted != self._current:
            self._current = None
            self._probe.prepare(context_tokens=context_tokens, batch_size=batch)
            self._current = wanted


def _check_grid(name: str, values: Sequence[int], *, limit: int, least: int) -> None:
    if not values or len(set(values)) != len(values):
        raise UsageError(f"{name} grid {list(values)} must be one or more different numbers")
    if min(values) < least or max(values) > limit:
        raise UsageError(
            f"{name} grid {sorted(values)} leaves {least}..{limit}, what this engine can hold: "
            "choose values inside, or start the engine with more room"
        )
