"""Whether a new trace still looks like the one that hazards were fitted on.

Two questions, asked apart: did the inputs move (each feature's distribution), and did the
calibration move (observed acceptance less predicted hazard)? Inputs may move without harm; a
calibration that moved misprices every length. Tests permute whole prompts between the traces, as
the rows of a prompt depend on each other, and Holm's rule keeps the chance of any false alarm at
the level asked for.

Shape suffixes: P prompts, B bins, S permutations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from hybridspec.artifacts.tables import FloatArray, IntArray
from hybridspec.calibrate.context import CONTEXT_NAMES, context_features
from hybridspec.calibrate.features import TraceArrays, accepted_labels, at_risk
from hybridspec.calibrate.model import MIN_AT_RISK_ROWS, MIN_PROMPTS
from hybridspec.calibrate.served import HazardFunction
from hybridspec.errors import NotEnoughData

Verdict = Literal["no drift found", "inputs moved, calibration holds", "calibration moved"]
LEVEL = 0.01
PERMUTATIONS = 2000
NUM_BINS = 32
NUM_HAZARD_BINS = 10
CALIBRATION_TESTS = ("residual_mean", "residual_by_hazard")
# The same for every draft of a block, or given by the block: nothing that data could move.
_CONSTANT = ("position",)


@dataclass(frozen=True)
class DriftTest:
    """One comparison.

    Attributes:
        name: a feature, or one of `CALIBRATION_TESTS`.
        statistic: largest gap between the two distribution functions; for residuals, the gap of
            their means, and the mean gap over bins of the hazard.
        p_value: share of permutations with a statistic at least as large, at least 1 / (S + 1).
        adjusted_p_value: Holm's, over all comparisons.
    """

    name: str
    statistic: float
    p_value: float
    adjusted_p_value: float


@dataclass(frozen=True)
class DriftReport:
    """What was compared and what follows.

    Attributes:
        level: chance of any false alarm that was allowed.
        reference_residual, current_residual: mean of observed acceptance less hazard.
        reference_prompts, current_prompts: compared.
    """

    verdict: Verdict
    tests: tuple[DriftTest, ...]
    level: float
    reference_residual: float
    current_residual: float
    reference_prompts: int
    current_prompts: int

    @property
    def moved(self) -> tuple[str, ...]:
        """Names of the comparisons that are significant."""
        return tuple(test.name for test in self.tests if test.adjusted_p_value <= self.level)

    def sentence(self) -> str:
        """The verdict, why, and what to do."""
        what = ", ".join(self.moved)
        if self.verdict == "calibration moved":
            return (
                f"calibration moved ({what}): acceptance was {self.reference_residual:+.3f} off "
                f"the hazards and is {self.current_residual:+.3f}: calibrate again"
            )
        if self.verdict == "inputs moved, calibration holds":
            return f"inputs moved ({what}), but acceptance is as predicted: the bundle may stay"
        return (
            f"no drift found in {len(self.tests)} comparisons of {self.reference_prompts} and "
            f"{self.current_prompts} prompts"
        )


class Predictor(Protocol):
    """A fitted model, or the hazards of a bundle (`calibrate.served`)."""

    @property
    def predict(self) -> HazardFunction:
        """Gives float64 [R, 15] for rounds."""
        ...


def drift(
    model: Predictor,
    reference: TraceArrays,
    current: TraceArrays,
    *,
    level: float = LEVEL,
    permutations: int = PERMUTATIONS,
    seed: int = 0,
) -> DriftReport:
    """Compare two sets of rounds by the drafts at risk in them.

    Args:
        model: a fitted model.
        reference: rounds like those it was fitted on but not fitted on: the test split.
        current: rounds recorded later, or of other prompts.
        level: chance of any false alarm.
        permutations: of prompts between the two sets.

    Raises:
        NotEnoughData: fewer than 200 drafts at risk or 10 prompts in either, or too few
            permutations for the level.
    """
    for name, rounds in (("reference", reference), ("current", current)):
        rows = int(at_risk(rounds.accepted).sum()) if len(rounds) else 0
        if rows < MIN_AT_RISK_ROWS or rounds.num_prompts < MIN_PROMPTS:
            raise NotEnoughData(
                f"the {name} rounds have {rows} observed drafts of {rounds.num_prompts} prompts; a "
                f"drift test needs {MIN_AT_RISK_ROWS} of {MIN_PROMPTS}: record more prompts"
            )
    names = [name for name in CONTEXT_NAMES if name not in _CONSTANT]
    num_tests = len(names) + len(CALIBRATION_TESTS)
    if (permutations + 1) * level < num_tests:
        raise NotEnoughData(
            f"{permutations} permutations cannot show {num_tests} comparisons at level {level:g}: "
            f"use at least {int(np.ceil(num_tests / level))}"
        )
    sample = _Sample.of(model, reference, current)
    rng = np.random.default_rng(seed)
    # One permutation of the prompts serves all comparisons.
    groups_SP = np.stack(
        [sample.group_P, *(rng.permutation(sample.group_P) for _ in range(permutations))]
    )
    statistics = {name: sample.feature_gap(index, groups_SP) for index, name in enumerate(names)}
    statistics["residual_mean"] = sample.residual_gap(groups_SP, bins=1)
    statistics["residual_by_hazard"] = sample.residual_gap(groups_SP, bins=NUM_HAZARD_BINS)
    p_values = np.array(
        [float((found >= found[0] - 1e-12).mean()) for found in statistics.values()]
    )
    tests = tuple(
        DriftTest(name, float(found[0]), float(p), float(adjusted))
        for (name, found), p, adjusted in zip(
            statistics.items(), p_values, holm(p_values), strict=True
        )
    )
    moved = {test.name for test in tests if test.adjusted_p_value <= level}
    verdict: Verdict = "no drift found"
    if moved & set(CALIBRATION_TESTS):
        verdict = "calibration moved"
    elif moved:
        verdict = "inputs moved, calibration holds"
    current_row = sample.group_P[sample.prompt_N]
    return DriftReport(
        verdict=verdict,
        tests=tests,
        level=level,
        reference_residual=float(sample.residual_N[~current_row].mean()),
        current_residual=float(sample.residual_N[current_row].mean()),
        reference_prompts=reference.num_prompts,
        current_prompts=current.num_prompts,
    )


def holm(p_values: FloatArray) -> FloatArray:
    """p-values adjusted for their number by Holm's step-down rule."""
    order = np.argsort(p_values, kind="stable")
    steps = p_values[order] * (p_values.size - np.arange(p_values.size))
    adjusted = np.empty_like(p_values)
    adjusted[order] = np.minimum(np.maximum.accumulate(steps), 1.0)
    return adjusted


@dataclass(frozen=True)
class _Sample:
    """Drafts at risk of both sets of rounds, prompts numbered over both.

    Attributes:
        group_P: bool, true for prompts of the current set.
        features_NF: float64, all but the constant features.
        hazard_N, residual_N: float64, predicted, and accepted less predicted.
        prompt_N: int64.
    """

    group_P: np.ndarray[tuple[int], np.dtype[np.bool_]]
    features_NF: FloatArray
    hazard_N: FloatArray
    residual_N: FloatArray
    prompt_N: IntArray

    @classmethod
    def of(cls, model: Predictor, reference: TraceArrays, current: TraceArrays) -> _Sample:
        columns = [i for i, name in enumerate(CONTEXT_NAMES) if name not in _CONSTANT]
        features, hazards, residuals, prompts = [], [], [], []
        first = 0
        for rounds in (reference, current):
            mask = at_risk(rounds.accepted)
            predicted = model.predict(rounds)[mask]
            features.append(context_features(rounds)[mask][:, columns].astype(np.float64))
            hazards.append(predicted)
            residuals.append(accepted_labels(rounds.accepted)[mask] - predicted)
            _, number = np.unique(rounds.prompt, return_inverse=True)
            prompts.append(first + np.broadcast_to(number[:, None], mask.shape)[mask])
            first += rounds.num_prompts
        group = np.arange(first) >= reference.num_prompts
        return cls(
            group,
            np.concatenate(features),
            np.concatenate(hazards),
            np.concatenate(residuals),
            np.concatenate(prompts).astype(np.int64),
        )

    def feature_gap(
        self, index: int, groups_SP: np.ndarray[tuple[int, int], np.dtype[np.bool_]]
    ) -> FloatArray:
        """Largest gap between the distribution functions, of each grouping, float64 [S]."""
        values = self.features_NF[:, index]
        edges = np.unique(np.quantile(values, np.linspace(0.0, 1.0, NUM_BINS + 1)[1:-1]))
        counts_PB = self._sums(np.searchsorted(edges, values, side="left"), edges.size + 1, None)
        share = [_shares(groups @ counts_PB) for groups in (groups_SP, ~groups_SP)]
        gap: FloatArray = np.abs(np.cumsum(share[0] - share[1], axis=1)).max(axis=1)
        return gap

    def residual_gap(
        self, groups_SP: np.ndarray[tuple[int, int], np.dtype[np.bool_]], *, bins: int
    ) -> FloatArray:
        """Mean over bins of the hazard of the gap between mean residuals, float64 [S]."""
        edges = np.unique(np.quantile(self.hazard_N, np.linspace(0.0, 1.0, bins + 1)[1:-1]))
        cell = np.searchsorted(edges, self.hazard_N, side="left")
        rows_PB = self._sums(cell, edges.size + 1, None)
        sums_PB = self._sums(cell, edges.size + 1, self.residual_N)
        means = []
        for groups in (groups_SP, ~groups_SP):
            rows = groups @ rows_PB
            means.append(np.divide(groups @ sums_PB, rows, out=np.zeros_like(rows), where=rows > 0))
        weight = rows_PB.sum(axis=0) / rows_PB.sum()
        gap: FloatArray = np.abs(means[0] - means[1]) @ weight
        return gap

    def _sums(self, cell: IntArray, cells: int, values: FloatArray | None) -> FloatArray:
        """Sums by prompt and cell, float64 [P, cells]."""
        size = self.group_P.size * cells
        flat = np.bincount(self.prompt_N * cells + cell, weights=values, minlength=size)
        return flat.astype(np.float64).reshape(self.group_P.size, cells)


def _shares(counts_SB: FloatArray) -> FloatArray:
    totals = counts_SB.sum(axis=1, keepdims=True)
    shares: FloatArray = counts_SB / np.maximum(totals, 1.0)
    return shares
