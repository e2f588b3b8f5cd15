from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from formula_machine import FormulaMachine
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridspec.artifacts.schemas import EXPERTS_SCHEMA, check_table
from hybridspec.costmodels.expert import fit_expert_slope
from hybridspec.costmodels.export import bundle_experts
from hybridspec.costmodels.probe import ForcedRouteTiming
from hybridspec.costmodels.step import fit_step_costs
from hybridspec.costmodels.sweep import (
    EXPERT_SAMPLES_SCHEMA,
    expert_grid,
    measure_experts,
    measure_steps,
)
from hybridspec.errors import ModelError, NotEnoughData, QualityGate


def samples_of(machine: FormulaMachine, *, repeats: int = 9) -> pa.Table:
    return measure_experts(machine, context_tokens=512, repeats=repeats, budget_s=1e9)


def test_known_slope_is_recovered_exactly_without_noise() -> None:
    fit = fit_expert_slope(samples_of(FormulaMachine()), num_layers=40)
    assert fit.slope_us == pytest.approx(2.0)
    assert fit.r2 == pytest.approx(1.0)
    assert fit.intercept_us[(1, 8)] == pytest.approx(3000.0 + 20.0 * 8)
    assert max(fit.residual_by_length.values()) < 1e-9
    assert fit.usable
    assert fit.warnings == ()


def test_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    covered = 0
    for seed in range(30):
        samples = samples_of(FormulaMachine(noise=0.03, seed=seed), repeats=15)
        fit = fit_expert_slope(samples, num_layers=40, resamples=200, seed=seed)
        covered += fit.slope_low_us <= 2.0 <= fit.slope_high_us
        assert fit.slope_us == pytest.approx(2.0, rel=0.15)
    assert covered >= 24


def test_a_slope_inside_the_noise_is_not_priced() -> None:
    machine = FormulaMachine(noise=0.05, expert_us=0.0)
    fit = fit_expert_slope(samples_of(machine), num_layers=40)
    assert not fit.usable
    assert any("not resolved" in warning for warning in fit.warnings)
    steps = measure_steps(machine, batch_sizes=[1], context_tokens=[64], repeats=9, budget_s=1e9)
    stored = fit_step_costs(steps, expert=fit)
    assert stored.table.expert_slope_us == 0.0
    assert stored.table.expert_slope_r2 == fit.r2
    assert fit.warnings[0] in stored.warnings


def test_a_usable_slope_is_stored_in_the_step_table() -> None:
    fit = fit_expert_slope(samples_of(FormulaMachine()), num_layers=40)
    steps = measure_steps(
        FormulaMachine(), batch_sizes=[1], context_tokens=[64], repeats=5, budget_s=1e9
    )
    assert fit_step_costs(steps, expert=fit).table.expert_slope_us == pytest.approx(2.0)


def test_a_bent_cost_is_reported_by_length() -> None:
    class Bent(FormulaMachine):
        def run_forced_routes(self, verify_length: int, distinct_experts: int) -> ForcedRouteTiming:
            straight = super().run_forced_routes(verify_length, distinct_experts)
            extra = 9000.0 if verify_length == 16 and distinct_experts > 90 else 0.0
            return ForcedRouteTiming(
                straight.total_us + extra, straight.rows_run, straight.distinct_experts
            )

    fit = fit_expert_slope(samples_of(Bent()), num_layers=40)
    assert fit.residual_by_length[16] > 0.1
    assert any("not linear" in warning and "16" in warning for warning in fit.warnings)


def test_routes_that_were_not_forced_are_refused() -> None:
    class Unforced(FormulaMachine):
        def run_forced_routes(self, verify_length: int, distinct_experts: int) -> ForcedRouteTiming:
            return super().run_forced_routes(verify_length, min(distinct_experts, 20))

    with pytest.raises(QualityGate, match="20 distinct experts ran"):
        samples_of(Unforced())


def test_dense_targets_and_thin_data_are_refused() -> None:
    with pytest.raises(ModelError, match="no routed experts"):
        samples_of(FormulaMachine(num_experts=0, num_layers=0))
    samples = samples_of(FormulaMachine())
    few = samples.filter(pa.array(samples.column("repeat").to_numpy() < 4))
    with pytest.raises(NotEnoughData, match="4 readings"):
        fit_expert_slope(few, num_layers=40)
    flat = samples.filter(pa.array(samples.column("distinct_experts").to_numpy() == 8))
    with pytest.raises(NotEnoughData, match="leave no line"):
        fit_expert_slope(flat, num_layers=40)
    with pytest.raises(NotEnoughData):
        fit_expert_slope(EXPERT_SAMPLES_SCHEMA.empty_table(), num_layers=40)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.integers(1, 16), min_size=1, max_size=5, unique=True),
    st.integers(1, 10),
    st.integers(0, 300),
    st.integers(1, 6),
)
def test_grid_asks_only_for_routes_that_exist(
    lengths: list[int], top_k: int, more: int, points: int
) -> None:
    experts = top_k + more
    pairs = expert_grid(
        verify_lengths=lengths, experts_per_token=top_k, num_experts=experts, points=points
    )
    assert len(set(pairs)) == len(pairs)
    assert {length for length, _ in pairs} == set(lengths)
    for length, count in pairs:
        assert top_k <= count <= min(experts, length * top_k)


def test_bundle_counts_experts_over_all_layers() -> None:
    samples = samples_of(FormulaMachine())
    kept = check_table(bundle_experts(samples, num_layers=40), EXPERTS_SCHEMA, path="experts")
    distinct = samples.column("distinct_experts").to_numpy()
    assert np.array_equal(kept.column("distinct_experts").to_numpy(), 40 * distinct)
    empty = bundle_experts(EXPERT_SAMPLES_SCHEMA.empty_table(), num_layers=40)
    assert empty.num_rows == 0
