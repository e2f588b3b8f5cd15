from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridspec.costmodels.measure import Interrupted, measure_interleaved
from hybridspec.errors import QualityGate, UsageError


class Clock:
    """Seconds that pass only when a case spends them."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def spends(self, seconds: float) -> Callable[[], float]:
        def case() -> float:
            self.now_s += seconds
            return seconds

        return case


def test_each_sweep_runs_every_case_once_in_its_own_order() -> None:
    order: list[int] = []
    cases = {key: (lambda key=key: order.append(key) or float(key)) for key in range(8)}
    measured = measure_interleaved(cases, repeats=6, budget_s=1e9, warmup=0, seed=3)
    sweeps = [order[i : i + 8] for i in range(0, len(order), 8)]
    assert len(sweeps) == measured.sweeps == 6
    assert all(sorted(sweep) == list(range(8)) for sweep in sweeps)
    assert len({tuple(sweep) for sweep in sweeps}) > 1
    assert measured.readings == {key: (float(key),) * 6 for key in range(8)}
    assert measured.stopped_by == "repeats"


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 1000), st.integers(1, 4), st.integers(1, 5))
def test_groups_stay_together_and_seed_fixes_the_order(
    seed: int, groups: int, members: int
) -> None:
    keys = [(g, m) for g in range(groups) for m in range(members)]

    def run() -> list[tuple[int, int]]:
        order: list[tuple[int, int]] = []
        cases = {key: (lambda key=key: order.append(key) or 1.0) for key in keys}
        measure_interleaved(
            cases, repeats=5, budget_s=1e9, warmup=0, seed=seed, group_of=lambda key: key[0]
        )
        return order

    order = run()
    assert order == run()
    for start in range(0, len(order), len(keys)):
        seen = [key[0] for key in order[start : start + len(keys)]]
        switches = sum(a != b for a, b in itertools.pairwise(seen))
        assert switches == groups - 1


def test_drift_hits_all_cases_alike() -> None:
    """A machine that slows down by half must not change the ratio of two cases' medians."""
    ran = 0

    def slowing(cost_us: float) -> Callable[[], float]:
        def case() -> float:
            nonlocal ran
            ran += 1
            return cost_us * (1.0 + 0.5 * ran / 800)

        return case

    cases = {key: slowing(100.0 * (1 + key)) for key in range(20)}
    measured = measure_interleaved(cases, repeats=40, budget_s=1e9, warmup=0)
    medians = np.asarray([np.median(measured.readings[key]) for key in range(20)])
    assert medians / medians[0] == pytest.approx(1.0 + np.arange(20), rel=0.02)


def test_warmup_is_run_but_not_kept_and_progress_counts_everything() -> None:
    calls = 0

    def cold_then_warm() -> float:
        nonlocal calls
        calls += 1
        return 900.0 if calls <= 2 else 1.0

    seen: list[tuple[int, int]] = []
    measured = measure_interleaved(
        {"a": cold_then_warm},
        repeats=5,
        budget_s=1e9,
        warmup=2,
        progress=lambda done, planned: seen.append((done, planned)),
    )
    assert measured.readings["a"] == (1.0,) * 5
    assert seen == [(i, 7) for i in range(1, 8)]


def test_budget_ends_after_a_whole_sweep() -> None:
    clock = Clock()
    cases = {key: clock.spends(1.0) for key in "abc"}
    measured = measure_interleaved(cases, repeats=100, budget_s=20.0, warmup=0, clock=clock)
    assert measured.sweeps == 7  # 18 s are inside the budget, the seventh sweep ends at 21 s
    assert {len(values) for values in measured.readings.values()} == {7}
    assert measured.stopped_by == "budget"
    assert measured.elapsed_s == 21.0


def test_budget_too_short_is_refused_with_the_time_it_would_take() -> None:
    clock = Clock()
    cases = {key: clock.spends(2.0) for key in "abc"}
    # One warm-up sweep and five kept ones take 36 s.
    with pytest.raises(QualityGate, match=r"after 1 sweeps of 3 cases.*about 36 s"):
        measure_interleaved(cases, repeats=10, budget_s=10.0, warmup=1, clock=clock)
    done = measure_interleaved(cases, repeats=5, budget_s=36.0, warmup=1, clock=Clock())
    assert done.sweeps == 5


@pytest.mark.parametrize("stop_at", [1, 4, 13, 30, 31])
def test_interrupt_keeps_whole_sweeps(stop_at: int) -> None:
    ran = 0

    def case() -> float:
        nonlocal ran
        ran += 1
        if ran == stop_at:
            raise KeyboardInterrupt
        return float(ran)

    with pytest.raises(Interrupted) as caught:
        measure_interleaved({k: case for k in "abc"}, repeats=50, budget_s=1e9, warmup=1)
    whole = max(0, (stop_at - 1) // 3 - 1)
    measured = caught.value.measured
    assert measured.sweeps == whole
    assert {len(values) for values in measured.readings.values()} == {whole}
    assert all(v <= 3 * (whole + 1) for values in measured.readings.values() for v in values)
    assert caught.value.exit_code == 130
    assert ("can be used" in str(caught.value)) == (whole >= 5)


def test_a_failing_case_is_not_swallowed() -> None:
    with pytest.raises(ZeroDivisionError):
        measure_interleaved({"a": lambda: 1 / 0}, repeats=5, budget_s=1.0)


@pytest.mark.parametrize(
    ("cases", "options"),
    [
        ({}, {}),
        ({"a": lambda: 1.0}, {"repeats": 4}),
        ({"a": lambda: 1.0}, {"budget_s": 0.0}),
        ({"a": lambda: 1.0}, {"budget_s": float("nan")}),
        ({"a": lambda: 1.0}, {"warmup": -1}),
    ],
    ids=["no cases", "few repeats", "no budget", "nan budget", "negative warm-up"],
)
def test_impossible_requests_are_refused(
    cases: dict[str, Callable[[], float]], options: dict[str, float]
) -> None:
    with pytest.raises(UsageError):
        measure_interleaved(cases, **({"repeats": 5, "budget_s": 1.0} | options))  # type: ignore[arg-type]
