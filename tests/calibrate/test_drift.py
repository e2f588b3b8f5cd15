"""The drift test: quiet on the same process, loud on a moved one, and right about which moved."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from recorded_rounds import recording
from synthetic_rounds import synthetic_trace

from hybridspec.calibrate.drift import CALIBRATION_TESTS, drift, holm
from hybridspec.calibrate.features import TraceArrays, trace_arrays
from hybridspec.calibrate.held_out import calibration_rounds, held_out_rounds
from hybridspec.calibrate.model import HazardModel
from hybridspec.calibrate.models import fit_model
from hybridspec.errors import NotEnoughData


@pytest.fixture(scope="module")
def model() -> HazardModel:
    return fit_model("beta", calibration_rounds(trace_arrays(synthetic_trace(prompts=120))))


def rounds(seed: int) -> TraceArrays:
    return trace_arrays(synthetic_trace(prompts=30, rounds=15, seed=seed))


def test_the_same_process_rarely_alarms(model: HazardModel) -> None:
    alarms = sum(
        bool(drift(model, rounds(100 + seed), rounds(200 + seed), permutations=1700).moved)
        for seed in range(12)
    )
    assert alarms <= 1


def test_moved_inputs_are_told_from_a_moved_calibration(model: HazardModel) -> None:
    # Prompts of three categories, all of them alike: keep the rounds of confident drafts only.
    current = rounds(2)
    confident = current.p1_RD[:, 0] > 0.7
    report = drift(model, rounds(1), current.select(confident), permutations=1700)
    assert report.verdict == "inputs moved, calibration holds"
    assert "p1" in report.moved
    assert not set(report.moved) & set(CALIBRATION_TESTS)
    assert "the bundle may stay" in report.sentence()


def test_a_worse_drafter_moves_the_calibration(model: HazardModel) -> None:
    current = rounds(2)
    rng = np.random.default_rng(0)
    cut = rng.binomial(current.accepted, 0.7)
    report = drift(model, rounds(1), replace(current, accepted=cut), permutations=1700)
    assert report.verdict == "calibration moved"
    assert "residual_mean" in report.moved
    assert report.current_residual < -0.05 < report.reference_residual
    assert report.sentence().endswith("calibrate again")


def test_a_distortion_without_a_mean_shows_by_hazard(model: HazardModel) -> None:
    """Sure drafts are accepted less and unsure ones more: only the bins can tell."""
    current = trace_arrays(synthetic_trace(prompts=90, rounds=25, seed=3))
    hazards = model.predict(current)
    flat = 0.5 * hazards + 0.5 * hazards.mean()
    hits = np.random.default_rng(1).uniform(size=flat.shape) < flat
    drawn = replace(current, accepted=np.cumprod(hits, axis=1).sum(axis=1))
    reference = trace_arrays(synthetic_trace(prompts=90, rounds=25, seed=4))
    report = drift(model, reference, drawn, permutations=1700)
    assert report.verdict == "calibration moved"
    assert "residual_by_hazard" in report.moved


def test_few_data_and_few_permutations_are_refused(model: HazardModel) -> None:
    few = trace_arrays(synthetic_trace(prompts=10, rounds=1))
    with pytest.raises(NotEnoughData, match=r"the current rounds have \d+ observed drafts"):
        drift(model, rounds(1), few)
    with pytest.raises(NotEnoughData, match="the reference rounds have 0 observed drafts"):
        drift(model, few.select(np.zeros(len(few), dtype=bool)), rounds(1))
    with pytest.raises(NotEnoughData, match="use at least 1600"):
        drift(model, rounds(1), rounds(2), permutations=200)


@given(st.lists(st.floats(0.0, 1.0), min_size=1, max_size=12))
def test_holm_is_between_the_value_and_bonferroni(values: list[float]) -> None:
    p = np.array(values)
    adjusted = holm(p)
    assert (adjusted >= p - 1e-15).all()
    assert (adjusted <= np.minimum(p * p.size, 1.0) + 1e-15).all()
    assert (np.diff(adjusted[np.argsort(p, kind="stable")]) >= 0).all()


def test_halves_of_the_lab_prompts_do_not_drift() -> None:
    lab = trace_arrays(recording("lab"))
    fitted = fit_model("boosted", calibration_rounds(lab))
    test = held_out_rounds(lab)
    odd = np.isin(test.prompt, np.unique(test.prompt)[1::2])
    assert drift(fitted, test.select(~odd), test.select(odd)).verdict == "no drift found"
