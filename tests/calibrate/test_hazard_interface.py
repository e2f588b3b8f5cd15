"""Every model behind one interface: what holds for all of them, and what each one promises."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from recorded_rounds import recording
from scipy.special import expit
from synthetic_rounds import synthetic_trace, true_hazards

from hybridspec.calibrate.boosted import BoostedHazard
from hybridspec.calibrate.bootstrap import area_under_curve, log_losses
from hybridspec.calibrate.context import CONTEXT_NAMES, MONOTONE, context_features
from hybridspec.calibrate.distilled import DistilledCells, DistilledTable, soft_logistic
from hybridspec.calibrate.features import TraceArrays, accepted_labels, at_risk, trace_arrays
from hybridspec.calibrate.held_out import (
    ALL,
    LOOPS,
    calibration_rounds,
    held_out_rounds,
    held_out_scores,
    leave_one_category_out,
)
from hybridspec.calibrate.metrics import metrics_table
from hybridspec.calibrate.model import HazardModel
from hybridspec.calibrate.models import MODELS, fit_model, make_model
from hybridspec.calibrate.platt import PlattHazard, top1_logits
from hybridspec.calibrate.temperature import TemperatureHazard
from hybridspec.errors import NotEnoughData, UsageError

NAMES = sorted(MODELS)


@pytest.fixture(scope="module")
def arrays() -> TraceArrays:
    return trace_arrays(synthetic_trace(prompts=90, rounds=25, loops=True))


@pytest.fixture(scope="module")
def fitted(arrays: TraceArrays) -> dict[str, HazardModel]:
    return {name: fit_model(name, calibration_rounds(arrays)) for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_hazards_are_probabilities_of_every_draft(
    name: str, fitted: dict[str, HazardModel], arrays: TraceArrays
) -> None:
    hazards = fitted[name].predict(arrays)
    assert hazards.shape == (len(arrays), 15)
    assert hazards.dtype == np.float64
    assert ((hazards >= 0) & (hazards <= 1)).all()
    described = fitted[name].describe()
    assert json.loads(json.dumps(described))["name"] == name == fitted[name].name


@pytest.mark.parametrize("name", NAMES)
def test_a_rounds_own_outcome_does_not_enter(
    name: str, fitted: dict[str, HazardModel], arrays: TraceArrays
) -> None:
    changed = replace(arrays, accepted=15 - arrays.accepted)
    np.testing.assert_array_equal(
        fitted[name].predict(changed), fitted[name].predict(arrays), strict=True
    )


@pytest.mark.parametrize("name", NAMES)
def test_hazards_do_not_depend_on_the_other_rounds_asked_for(
    name: str, fitted: dict[str, HazardModel], arrays: TraceArrays
) -> None:
    some = np.random.default_rng(1).permutation(len(arrays))[:50]
    np.testing.assert_allclose(
        fitted[name].predict(arrays.select(some)),
        fitted[name].predict(arrays)[some],
        rtol=0,
        atol=1e-14,
    )


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"raw", "temperature"}))
def test_fits_come_nearer_to_the_truth_than_the_raw_probability(
    name: str, fitted: dict[str, HazardModel], arrays: TraceArrays
) -> None:
    test = held_out_rounds(arrays)
    mask, truth = at_risk(test.accepted), true_hazards(test.features_RDF)
    errors = {key: np.abs(fitted[key].predict(test) - truth)[mask].mean() for key in ("raw", name)}
    assert errors[name] < 0.6 * errors["raw"]


def test_unknown_models_are_refused() -> None:
    with pytest.raises(UsageError, match="'forest': choose raw, temperature, platt"):
        make_model("forest")


def test_trees_are_scikit_learns_and_monotone_where_due(arrays: TraceArrays) -> None:
    fit = calibration_rounds(arrays)
    model = BoostedHazard(num_trees=12, depth=4).fit(fit)
    assert model.trees_.num_trees == 12
    assert model.trees_.depth <= 4
    # The equality with scikit-learn is checked at each fit, here that the check can fail.
    wrong = replace(model.trees_, baseline=model.trees_.baseline + 1e-9)
    rows = context_features(fit)[at_risk(fit.accepted)]
    assert np.abs(wrong.predict(rows) - model.trees_.predict(rows)).max() > 1e-12
    for name, sign in MONOTONE.items():
        column = CONTEXT_NAMES.index(name)
        higher = rows.copy()
        higher[:, column] += np.float32(0.3)
        change = sign * (model.trees_.logits(higher) - model.trees_.logits(rows))
        assert change.min() >= -1e-12, name
        if name == "p1":
            assert change.max() > 0.0


def test_trees_on_fewer_features_compare_no_other() -> None:
    fit = calibration_rounds(trace_arrays(synthetic_trace(prompts=60, rounds=12)))
    model = BoostedHazard(features=("p1", "successor"), num_trees=4).fit(fit)
    compared = {CONTEXT_NAMES[i] for i in model.trees_.feature_K if i >= 0}
    assert compared <= {"p1", "successor"}


def test_rare_positions_are_pooled_and_predicted_like_the_last_common_one(
    arrays: TraceArrays,
) -> None:
    short = calibration_rounds(replace(arrays, accepted=np.minimum(arrays.accepted, 3)))
    model = BoostedHazard().fit(short)
    assert model.position_group_.tolist() == [0, 1, 2, 3] + [3] * 11
    position = CONTEXT_NAMES.index("position")
    rows = np.repeat(context_features(short)[:20, 3], 2, axis=0)
    rows[::2, position], rows[1::2, position] = 3, 14
    found = model.trees_.predict(rows)
    np.testing.assert_array_equal(found[::2], found[1::2])
    temperatures = TemperatureHazard().fit(short).table_.temperatures_D
    assert np.unique(temperatures[3:]).size == 1


def test_temperatures_are_recovered(arrays: TraceArrays) -> None:
    """Outcomes drawn at known temperatures, sharp at first and flat later."""
    rng = np.random.default_rng(3)
    truth = np.where(np.arange(15) < 4, 0.5, 2.0)
    logits = top1_logits(arrays)
    hits = rng.uniform(size=logits.shape) < expit(logits / truth)
    drawn = replace(arrays, accepted=np.cumprod(hits, axis=1).sum(axis=1))
    model = TemperatureHazard().fit(drawn)
    # Where there are hundreds of rows: within noise and the grid's step.
    assert (np.abs(np.log(model.table_.temperatures_D[:4] / 0.5)) < np.log(1.3)).all()
    assert (model.table_.temperatures_D[4:6] > 1.2).all()
    described = model.describe()
    assert len(described["temperatures"]) == 15
    assert np.mean(described["ece_after"]) < np.mean(described["ece_before"])


def test_platt_recovers_its_line(arrays: TraceArrays) -> None:
    logits = top1_logits(arrays)
    hits = np.random.default_rng(4).uniform(size=logits.shape) < expit(0.6 * logits + 0.4)
    drawn = replace(arrays, accepted=np.cumprod(hits, axis=1).sum(axis=1))
    model = PlattHazard().fit(drawn)
    assert model.slope_ == pytest.approx(0.6, abs=0.06)
    assert model.intercept_ == pytest.approx(0.4, abs=0.1)


def test_soft_logistic_recovers_the_probabilities_it_is_given() -> None:
    rng = np.random.default_rng(0)
    design = rng.normal(size=(4000, 3)) * [1.0, 5.0, 0.2]
    truth = np.array([0.8, -0.1, 2.0, 0.3])
    found = soft_logistic(design, expit(design @ truth[:3] + truth[3]))
    np.testing.assert_allclose(found, truth, atol=0.03)


def test_distillation_takes_the_teacher_it_is_given(arrays: TraceArrays) -> None:
    fit = calibration_rounds(arrays)
    teacher = BoostedHazard(num_trees=2, depth=1).fit(fit)
    near = fit_model("cells", fit).predict(fit)
    coarse = DistilledCells(teacher=teacher).fit(fit).predict(fit)
    assert np.abs(near - coarse).max() > 0.05
    assert DistilledTable(teacher=teacher).fit(fit).table_.method == "boosted-distilled"


def test_held_out_sets_and_what_is_left_out_of_a_fit(arrays: TraceArrays) -> None:
    model = fit_model("platt", calibration_rounds(arrays))
    found = {scored.category: scored for scored in held_out_scores(model, arrays, resamples=20)}
    assert set(found) == {ALL, LOOPS, "code", "prose", "chat"}
    test = held_out_rounds(arrays)
    assert found[ALL].num_rounds == len(test)
    assert sum(found[name].num_rounds for name in ("code", "prose", "chat")) == len(test)
    assert found[LOOPS].num_rounds == ((arrays.split == "test") & (arrays.loop_period > 0)).sum()

    seen: list[set[str]] = []

    class Watched(PlattHazard):
        def fit(self, rounds: TraceArrays) -> Watched:
            seen.append(set(rounds.category.tolist()))
            assert set(rounds.split.tolist()) == {"calibration"}
            return super().fit(rounds)

    left_out = list(leave_one_category_out(Watched, arrays, resamples=20))
    assert [scored.category for scored in left_out] == ["chat", "code", "prose"]
    assert seen == [{"code", "prose"}, {"chat", "prose"}, {"chat", "code"}]
    assert all(scored.left_out for scored in left_out)
    one_category = replace(arrays, category=np.full(len(arrays), "code"))
    with pytest.raises(NotEnoughData):
        list(leave_one_category_out(PlattHazard, one_category, resamples=20))


def test_prompts_without_a_category_are_scored_once(arrays: TraceArrays) -> None:
    words = np.where(arrays.category == "code", ALL, arrays.category)
    some = replace(arrays, category=words)
    model = fit_model("platt", calibration_rounds(some))
    found = [scored.category for scored in held_out_scores(model, some, resamples=20)]
    assert sorted(found) == sorted([ALL, LOOPS, "prose", "chat"])
    rows = metrics_table(some, {"platt": model}, resamples=20).to_pylist()
    keys = [(row["split"], row["category"], row["metric"]) for row in rows]
    assert len(set(keys)) == len(keys)
    assert {category for _, category, _ in keys} == {ALL, "prose", "chat"}


def test_lab_rounds_reach_the_bar() -> None:
    rounds = trace_arrays(recording("lab"))
    model = fit_model("boosted", calibration_rounds(rounds))
    test = held_out_rounds(rounds)
    mask = at_risk(test.accepted)
    predicted, observed = model.predict(test)[mask], accepted_labels(test.accepted)[mask]
    area = area_under_curve(predicted, observed)
    assert area is not None
    assert area >= 0.94
    assert log_losses(predicted, observed).mean() <= 0.27
