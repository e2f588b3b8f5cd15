from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from formula_machine import DRAFT_US, FormulaMachine, true_latency_us
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from hybridspec.artifacts.bundle import load_bundle, write_cost
from hybridspec.artifacts.identity import CostIdentity
from hybridspec.artifacts.schemas import SAMPLES_SCHEMA, check_table
from hybridspec.costmodels.breakeven import break_even
from hybridspec.costmodels.expert import fit_expert_slope
from hybridspec.costmodels.export import bundle_experts, bundle_samples
from hybridspec.costmodels.lookup import interpolate_latency, latency_by_round
from hybridspec.costmodels.measure import Interrupted
from hybridspec.costmodels.step import fit_step_costs, pool_within_noise
from hybridspec.costmodels.sweep import measure_experts, measure_steps, step_samples
from hybridspec.errors import BundleError, NotEnoughData, QualityGate, UsageError

BATCHES, CONTEXTS = [1, 4], [512, 2048, 8192]
TRUTH = np.asarray(
    [
        [[true_latency_us(batch=b, context=c, length=k) for k in range(17)] for c in CONTEXTS]
        for b in BATCHES
    ]
)


def samples_of(machine: FormulaMachine, *, repeats: int = 9) -> pa.Table:
    return measure_steps(
        machine, batch_sizes=BATCHES, context_tokens=CONTEXTS, repeats=repeats, budget_s=1e9
    )


def replaced(samples: pa.Table, name: str, values: np.ndarray) -> pa.Table:
    index = samples.column_names.index(name)
    return samples.set_column(index, samples.schema.field(name), pa.array(values))


def scaled_total(samples: pa.Table, factor: np.ndarray) -> pa.Table:
    return replaced(samples, "total_us", samples.column("total_us").to_numpy() * factor)


def test_noiseless_machine_is_measured_exactly_tier_step_included() -> None:
    fit = fit_step_costs(samples_of(FormulaMachine()))
    assert fit.table.latency_us == pytest.approx(TRUTH, rel=1e-12)
    assert fit.table.latency_p10_us == pytest.approx(TRUTH, rel=1e-12)
    assert fit.table.draft_us == pytest.approx(np.full((2, 3), DRAFT_US))
    assert fit.table.batch_sizes.tolist() == BATCHES
    assert fit.table.context_tokens.tolist() == CONTEXTS
    assert fit.warnings == ()
    assert fit.smoothed == 0
    assert fit.readings_per_case == 9


def test_noisy_machine_is_measured_within_its_noise_and_without_falls() -> None:
    fit = fit_step_costs(samples_of(FormulaMachine(noise=0.05), repeats=25))
    assert fit.table.latency_us == pytest.approx(TRUTH, rel=0.05)
    assert np.all(np.diff(fit.table.latency_us[..., 1:], axis=-1) >= 0)
    assert np.all(fit.table.latency_p10_us < fit.table.latency_us)
    assert np.all(fit.table.latency_us < fit.table.latency_p90_us)


def test_one_preparation_a_batch_and_context_and_sweep() -> None:
    machine = FormulaMachine()
    samples_of(machine, repeats=5)
    cells = len(BATCHES) * len(CONTEXTS)
    # A sweep may begin with the cell that the last one ended with.
    assert cells <= len(machine.prepared) <= 6 * cells
    assert set(machine.prepared) == {(b, c) for b in BATCHES for c in CONTEXTS}


def test_padded_rows_are_refused_while_measuring_and_while_fitting() -> None:
    with pytest.raises(QualityGate, match="target rows ran where"):
        samples_of(FormulaMachine(pad_rows_to=4))
    samples = samples_of(FormulaMachine())
    rows_run = samples.column("rows_run").to_numpy().copy()
    rows_run[3] += 1
    with pytest.raises(QualityGate, match="target rows ran where"):
        fit_step_costs(replaced(samples, "rows_run", rows_run))


def test_missing_cells_and_columns_are_refused() -> None:
    samples = samples_of(FormulaMachine())
    length = samples.column("verify_length").to_numpy()
    batch = samples.column("batch").to_numpy()
    context = samples.column("context_tokens").to_numpy()
    hole = ~((length == 7) & (batch == 4) & (context == 2048))
    with pytest.raises(NotEnoughData, match=r"1 of 102 cells.*batch=4.*2048.*verify_length=7"):
        fit_step_costs(samples.filter(pa.array(hole)))
    few = samples.filter(pa.array(samples.column("repeat").to_numpy() < 4))
    with pytest.raises(NotEnoughData, match="102 of 102 cells have fewer than 5"):
        fit_step_costs(few)
    with pytest.raises(NotEnoughData):
        fit_step_costs(samples.slice(0, 0))
    with pytest.raises(BundleError, match="rows_run"):
        fit_step_costs(samples.drop_columns(["rows_run"]))


@pytest.mark.parametrize(
    ("column", "length", "value"),
    [
        ("total_us", 5, 0.0),
        ("total_us", 5, float("nan")),
        ("draft_us", 0, 3.0),
        ("draft_us", 5, 0.0),
        ("draft_us", 5, float("nan")),
    ],
)
def test_rounds_that_cannot_be_what_was_asked_for_are_refused(
    column: str, length: int, value: float
) -> None:
    samples = samples_of(FormulaMachine())
    values = samples.column(column).to_numpy().copy()
    values[np.flatnonzero(samples.column("verify_length").to_numpy() == length)[0]] = value
    with pytest.raises(QualityGate):
        fit_step_costs(replaced(samples, column, values))


def test_drift_of_the_machine_is_warned_about_then_refused() -> None:
    samples = samples_of(FormulaMachine(), repeats=10)
    late = samples.column("repeat").to_numpy() >= 5
    fit = fit_step_costs(scaled_total(samples, np.where(late, 1.15, 1.0)))
    assert len(fit.warnings) == len(BATCHES) * len(CONTEXTS)
    assert fit.worst_drift == pytest.approx(0.14, abs=0.01)
    with pytest.raises(QualityGate, match="close other programs") as refused:
        fit_step_costs(scaled_total(samples, np.where(late, 1.4, 1.0)))
    assert "differ by 33% or more at half of the lengths (at most 25%)" in str(refused.value)
    assert "--repeats" in str(refused.value)
    assert "--threads 1" in str(refused.value)


def test_one_outlier_moves_nothing_but_one_broken_cell_is_refused() -> None:
    samples = samples_of(FormulaMachine(), repeats=5)
    cell = samples.column("verify_length").to_numpy() == 6
    repeat = samples.column("repeat").to_numpy()
    outlier = fit_step_costs(scaled_total(samples, np.where(cell & (repeat == 1), 9.0, 1.0)))
    assert outlier.table.latency_us == pytest.approx(TRUTH, rel=1e-12)
    assert outlier.worst_drift == 0.0
    assert any("spread" in warning for warning in outlier.warnings)
    with pytest.raises(QualityGate, match=r"differ by \d\d% at the worst length 6 \(at most 50%"):
        fit_step_costs(scaled_total(samples, np.where(cell & (repeat >= 3), 1.8, 1.0)))


def test_a_real_fall_between_tiers_stays_and_is_reported() -> None:
    samples = samples_of(FormulaMachine(noise=0.002), repeats=9)
    faster = samples.column("verify_length").to_numpy() > 12
    fit = fit_step_costs(scaled_total(samples, np.where(faster, 0.8, 1.0)))
    for curve in fit.table.latency_us.reshape(-1, 17):
        assert curve[13] < 0.9 * curve[12]
    assert sum("length 13" in warning for warning in fit.warnings) == 6


@settings(max_examples=100, deadline=None)
@given(
    arrays(np.float64, 16, elements=st.floats(100.0, 110.0)),
    arrays(np.float64, 16, elements=st.floats(0.1, 30.0)),
)
def test_pooling_stays_within_noise_and_leaves_monotone_curves_alone(
    median: np.ndarray, noise: np.ndarray
) -> None:
    pooled, falls = pool_within_noise(median, noise)
    assert np.all(np.abs(pooled - median) <= noise + 1e-9)
    assert {length for length, _ in falls} == {
        i + 1 for i in range(15) if pooled[i + 1] < pooled[i] * (1 - 1e-12)
    }
    assert np.array_equal(pool_within_noise(np.sort(median), noise)[0], np.sort(median))
    if noise.min() > 10.0:
        assert falls == []


def test_parts_that_cannot_be_timed_apart_are_fine() -> None:
    samples = samples_of(FormulaMachine())
    unknown = pa.nulls(samples.num_rows, pa.float64())
    for name in ("verify_us", "commit_us"):
        index = samples.column_names.index(name)
        samples = samples.set_column(index, samples.schema.field(name), unknown)
    assert fit_step_costs(samples).warnings == ()
    kept = bundle_samples(samples)
    assert set(kept.column("part").to_pylist()) == {"total", "draft"}


def test_parts_longer_than_their_whole_are_reported() -> None:
    samples = samples_of(FormulaMachine())
    fit = fit_step_costs(scaled_total(samples, np.full(samples.num_rows, 0.5)))
    assert any("sum to more than their whole" in warning for warning in fit.warnings)


def test_bundle_keeps_every_sample() -> None:
    samples = samples_of(FormulaMachine(noise=0.01))
    kept = check_table(bundle_samples(samples), SAMPLES_SCHEMA, path="samples.parquet")
    undrafted = samples.num_rows // 17
    assert kept.num_rows == 4 * samples.num_rows - undrafted
    total = [r["latency_us"] for r in kept.to_pylist() if r["part"] == "total"]
    assert total == samples.column("total_us").to_pylist()


def test_a_bundle_takes_and_returns_what_was_measured(tmp_path: Path) -> None:
    machine = FormulaMachine(noise=0.01)
    forced = measure_experts(machine, context_tokens=512, repeats=7, budget_s=1e9)
    samples = samples_of(machine)
    fit = fit_step_costs(samples, expert=fit_expert_slope(forced, num_layers=40))
    identity = CostIdentity(
        device="formula",
        memory_class="unknown",
        cores=1,
        threads=1,
        engine="reference",
        engine_version="0.1.0",
        dtype="float32",
        architecture_digest="0" * 64,
        max_batch=4,
        torch_version="2.11",
    )
    write_cost(
        tmp_path / "bundle",
        identity=identity,
        step=fit.table,
        samples=bundle_samples(samples),
        experts=bundle_experts(forced, num_layers=40),
        throughput=None,
        provenance={},
    )
    cost = load_bundle(tmp_path / "bundle").cost
    assert cost is not None
    assert np.array_equal(cost.step.latency_us, fit.table.latency_us)
    assert cost.step.expert_slope_us == fit.table.expert_slope_us > 0


def test_interrupt_hands_back_a_table_that_can_be_fitted() -> None:
    class Stopped(FormulaMachine):
        ran = 0

        def run_round(self, verify_length: int):  # type: ignore[no-untyped-def]
            self.ran += 1
            if self.ran == 17 * 8:
                raise KeyboardInterrupt
            return super().run_round(verify_length)

    with pytest.raises(Interrupted) as caught:
        measure_steps(Stopped(), batch_sizes=[1], context_tokens=[64], repeats=50, budget_s=1e9)
    fit = fit_step_costs(step_samples(caught.value.measured))
    assert fit.readings_per_case == 6


@pytest.mark.parametrize(
    ("batches", "contexts"), [([0], [64]), ([16], [64]), ([1], [65536]), ([], [64]), ([1, 1], [64])]
)
def test_grids_beyond_the_engine_are_refused(batches: list[int], contexts: list[int]) -> None:
    with pytest.raises(UsageError):
        measure_steps(
            FormulaMachine(), batch_sizes=batches, context_tokens=contexts, repeats=5, budget_s=1.0
        )


class TestLookup:
    table = fit_step_costs(samples_of(FormulaMachine(noise=0.01))).table

    @pytest.mark.parametrize("batch", BATCHES)
    @pytest.mark.parametrize("context", CONTEXTS)
    def test_grid_points_are_exact(self, batch: int, context: int) -> None:
        row, column = BATCHES.index(batch), CONTEXTS.index(context)
        curve = interpolate_latency(self.table, batch=batch, context_tokens=context)
        assert curve.dtype == np.float64
        assert np.array_equal(curve, self.table.latency_us[row, column])

    @settings(max_examples=60, deadline=None)
    @given(st.floats(0, 20000), st.integers(1, 4))
    def test_between_points_linear_outside_clamped(self, context: float, batch: int) -> None:
        curve = interpolate_latency(self.table, batch=batch, context_tokens=context)
        grid = self.table.latency_us[0 if batch == 1 else 1]
        inside = float(np.clip(context, CONTEXTS[0], CONTEXTS[-1]))
        left = max(i for i in range(3) if CONTEXTS[i] <= inside)
        right = min(i for i in range(3) if CONTEXTS[i] >= inside)
        span = CONTEXTS[right] - CONTEXTS[left]
        share = (inside - CONTEXTS[left]) / span if span else 0.0
        expected = (1 - share) * grid[left] + share * grid[right]
        assert curve == pytest.approx(expected, rel=1e-9)

    def test_many_rounds_at_once_equal_one_by_one(self) -> None:
        contexts = np.array([0, 512, 700, 5000, 99999])
        many = latency_by_round(self.table, batch=3, context_tokens=contexts)
        for row, context in enumerate(contexts.tolist()):
            single = interpolate_latency(self.table, batch=3, context_tokens=context)
            assert np.array_equal(many[row], single)

    def test_batches_are_never_extrapolated(self) -> None:
        with pytest.raises(BundleError, match="batch 5 is beyond the largest measured batch 4"):
            interpolate_latency(self.table, batch=5, context_tokens=512)
        with pytest.raises(UsageError):
            interpolate_latency(self.table, batch=0, context_tokens=512)
        with pytest.raises(UsageError):
            interpolate_latency(self.table, batch=1, context_tokens=-1)


class TestBreakEven:
    table = fit_step_costs(samples_of(FormulaMachine())).table

    def test_acceptance_is_the_root_and_no_length_pays_below_it(self) -> None:
        for verdict in break_even(self.table):
            assert verdict.acceptance is not None
            powers = verdict.acceptance ** np.arange(16)
            margin = np.cumsum(powers) - verdict.tokens_by_length
            assert margin[verdict.length - 1] == pytest.approx(0.0, abs=1e-9)
            assert np.all(margin <= 1e-9)

    def test_verdict_says_when_drafting_pays_and_when_it_cannot(self) -> None:
        first = break_even(self.table)[0]
        assert (first.batch, first.context_tokens) == (1, 512)
        stock = TRUTH[0, 0, 16] / TRUTH[0, 0, 0]
        assert f"from {stock:.2f} tokens at stock length 16" in first.line()
        dear = self.table.latency_us * (1.0 + np.arange(17.0))
        verdict = break_even(
            type(self.table)(
                self.table.batch_sizes,
                self.table.context_tokens,
                dear,
                dear,
                dear,
                self.table.draft_us,
                0.0,
                0.0,
            )
        )[0]
        assert verdict.acceptance is None
        assert "cannot pay" in verdict.line()
