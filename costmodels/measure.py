"""Measuring many cases so that drift of the machine hits all of them alike.

A sweep runs every case once, in a new random order. Clocks, temperature and neighbours change from
sweep to sweep, not from case to case, so differences between cases survive them.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from hybridspec.errors import HybridSpecError, QualityGate, UsageError

CaseKey = TypeVar("CaseKey", bound=Hashable)
Reading = TypeVar("Reading")

MIN_SWEEPS = 5


@dataclass(frozen=True)
class Measured(Generic[CaseKey, Reading]):
    """Readings of whole sweeps.

    Attributes:
        readings: for each case one reading a sweep, in the order of the sweeps.
        sweeps: whole sweeps that were kept.
        elapsed_s: time spent, warm-up included.
        stopped_by: why measuring ended.
    """

    readings: Mapping[CaseKey, tuple[Reading, ...]]
    sweeps: int
    elapsed_s: float
    stopped_by: Literal["repeats", "budget", "interrupt"]


class Interrupted(HybridSpecError):
    """The user stopped a measurement; `measured` holds the sweeps that had finished."""

    exit_code = 130

    def __init__(self, message: str, measured: Measured[Any, Any]) -> None:
        super().__init__(message)
        self.measured = measured


class BudgetEnded(QualityGate):
    """The budget ended before there were enough sweeps; `needed_s` would about be enough."""

    def __init__(self, message: str, needed_s: float) -> None:
        super().__init__(message)
        self.needed_s = needed_s


def measure_interleaved(
    cases: Mapping[CaseKey, Callable[[], Reading]],
    *,
    repeats: int,
    budget_s: float,
    seed: int = 0,
    warmup: int = 1,
    group_of: Callable[[CaseKey], Hashable] | None = None,
    progress: Callable[[int, int], None] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Measured[CaseKey, Reading]:
    """Runs every case `repeats` times in interleaved, shuffled sweeps.

    Args:
        cases: each callable runs one round and returns its reading; it prepares what it needs
            outside its own clock.
        repeats: sweeps wanted, at least 5.
        budget_s: measuring stops after the first whole sweep that ends past this time.
        seed: of the order of cases.
        warmup: runs of each case before the first sweep, not kept.
        group_of: cases of one group follow each other within a sweep (both groups and their cases
            are shuffled). For cases that share an expensive preparation.
        progress: called with (rounds done, rounds planned) after every round, warm-up included.
        clock: seconds, monotonic.

    Raises:
        BudgetEnded: before 5 sweeps.
        Interrupted: Ctrl-C; carries the whole sweeps.
    """
    if not cases:
        raise UsageError("no case to measure; name at least one batch, context and length")
    if repeats < MIN_SWEEPS:
        raise UsageError(f"{repeats} repeats are too few for a median; ask for >= {MIN_SWEEPS}")
    if warmup < 0 or not budget_s > 0:
        raise UsageError(f"warm-up {warmup} must be >= 0 and the budget {budget_s:g} s above 0")
    rng = random.Random(seed)
    kept: dict[CaseKey, list[Reading]] = {key: [] for key in cases}
    planned = len(cases) * (warmup + repeats)
    start, done, sweeps = clock(), 0, 0
    stopped_by: Literal["repeats", "budget"] = "repeats"

    def run_sweep() -> dict[CaseKey, Reading]:
        nonlocal done
        readings: dict[CaseKey, Reading] = {}
        for key in _shuffled(list(cases), group_of, rng):
            readings[key] = cases[key]()
            done += 1
            if progress is not None:
                progress(done, planned)
        return readings

    def result(why: Literal["repeats", "budget", "interrupt"]) -> Measured[CaseKey, Reading]:
        readings = {key: tuple(values[:sweeps]) for key, values in kept.items()}
        return Measured(readings, sweeps=sweeps, elapsed_s=clock() - start, stopped_by=why)

    try:
        for _ in range(warmup):
            run_sweep()
        measuring_from = clock()
        while sweeps < repeats:
            for key, reading in run_sweep().items():
                kept[key].append(reading)
            sweeps += 1
            if clock() - start >= budget_s and sweeps < repeats:
                stopped_by = "budget"
                break
    except KeyboardInterrupt:
        raise Interrupted(
            f"interrupted after {sweeps} of {repeats} sweeps; {MIN_SWEEPS} are needed for a table: "
            + ("the whole sweeps can be used" if sweeps >= MIN_SWEEPS else "measure again"),
            result("interrupt"),
        ) from None
    if sweeps < MIN_SWEEPS:
        warmup_s = measuring_from - start
        needed_s = warmup_s + MIN_SWEEPS * (clock() - measuring_from) / sweeps
        raise BudgetEnded(
            f"{budget_s:.3g} s ended after {sweeps} sweeps of {len(cases)} cases, and at least "
            f"{MIN_SWEEPS} are needed, in about {needed_s:.0f} s",
            needed_s,
        )
    return result(stopped_by)


def _shuffled(
    keys: list[CaseKey], group_of: Callable[[CaseKey], Hashable] | None, rng: random.Random
) -> list[CaseKey]:
    """Returns the keys in random order, with the cases of one group kept together."""
    rng.shuffle(keys)
    if group_of is None:
        return keys
    groups: dict[Hashable, list[CaseKey]] = {}
    for key in keys:
        groups.setdefault(group_of(key), []).append(key)
    order = list(groups.values())
    rng.shuffle(order)
    return [key for group in order for key in group]
