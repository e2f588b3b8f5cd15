"""Sequential temperature scaling: one temperature a position, as SGLang's `dspark_sts.json` holds.

From the first position on, each temperature minimises the calibration error of the cumulative
survival, those before it fixed (DeepSpec's rule). SGLang applies it to the logits of a confidence
head; DFlash has none, so here the logit of the top-1 probability takes that place.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

import numpy as np
from scipy.special import expit

from hybridspec.artifacts.tables import NUM_DRAFTS, FloatArray, TemperatureTable
from hybridspec.calibrate.bootstrap import NUM_ECE_BINS, equal_mass_bins
from hybridspec.calibrate.features import BoolArray, TraceArrays, accepted_labels
from hybridspec.calibrate.model import HazardModel, rows_at_risk
from hybridspec.calibrate.platt import top1_logits

# Temperatures that are tried, evenly spaced in their logarithm.
TEMPERATURES = np.geomspace(0.1, 10.0, 81)


class TemperatureHazard(HazardModel):
    """`sigmoid(logit p1 / temperature of the position)`.

    A position that fewer than 30 rounds reached takes the temperature of the one before it.

    Attributes:
        table_: what a bundle keeps and `dspark_sts.json` is written from.
    """

    name: ClassVar[str] = "temperature"
    table_: TemperatureTable

    def fit(self, rounds: TraceArrays) -> Self:
        """Fit on all rounds given; `NotEnoughData` as for every model."""
        group = rows_at_risk(rounds).position_group
        logits, labels = top1_logits(rounds), accepted_labels(rounds.accepted)
        temperatures = np.ones(NUM_DRAFTS)
        before, after = np.zeros(NUM_DRAFTS), np.zeros(NUM_DRAFTS)
        raw = np.cumprod(expit(logits), axis=1)
        survival = np.ones(len(rounds))
        for position in range(NUM_DRAFTS):
            observed = labels[:, position]
            before[position] = _ece(raw[:, position], observed)
            if group[position] == position:
                errors = [
                    _ece(survival * expit(logits[:, position] / temperature), observed)
                    for temperature in TEMPERATURES
                ]
                temperatures[position] = TEMPERATURES[int(np.argmin(errors))]
            else:
                temperatures[position] = temperatures[position - 1]
            survival = survival * expit(logits[:, position] / temperatures[position])
            after[position] = _ece(survival, observed)
        self.table_ = TemperatureTable(temperatures, before, after, len(rounds))
        return self

    def predict(self, rounds: TraceArrays) -> FloatArray:
        """Hazards, float64 [R, 15]."""
        hazards: FloatArray = expit(top1_logits(rounds) / self.table_.temperatures_D)
        return hazards

    def describe(self) -> Mapping[str, Any]:
        """Temperatures, and what they do to the calibration error of the survival."""
        return {
            "name": self.name,
            "temperatures": self.table_.temperatures_D.tolist(),
            "rounds": self.table_.num_rounds,
            "ece_before": self.table_.ece_before_D.tolist(),
            "ece_after": self.table_.ece_after_D.tolist(),
        }


def _ece(predicted: FloatArray, observed: BoolArray) -> float:
    bins = equal_mass_bins(predicted, NUM_ECE_BINS)
    gaps = np.bincount(bins, weights=predicted - observed, minlength=NUM_ECE_BINS)
    return float(np.abs(gaps).sum() / predicted.size)
