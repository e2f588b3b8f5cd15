"""The hazards that a bundle is served with, as a function of recorded rounds.

`hybridspec/hazards.py` evaluates the same round by round.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hybridspec.artifacts.bundle import CalibrationPart
from hybridspec.artifacts.tables import TABLE, TREES, FloatArray, HazardKind
from hybridspec.calibrate.context import context_features
from hybridspec.calibrate.features import TraceArrays
from hybridspec.calibrate.hazard import predict_hazards

HazardFunction = Callable[[TraceArrays], FloatArray]


@dataclass(frozen=True)
class PartHazards:
    """The best hazards of a calibration part.

    Attributes:
        kind: trees where the part holds some, else its table.
        name: of the model.
        predict: gives float64 [R, 15].
    """

    kind: HazardKind
    name: str
    predict: HazardFunction


def part_hazards(part: CalibrationPart) -> PartHazards:
    """The best hazards that a calibration part holds."""
    table, trees = part.hazard, part.trees
    if trees is None:
        return PartHazards(
            TABLE, table.method, lambda rounds: predict_hazards(table, rounds.features_RDF)
        )

    def predict(rounds: TraceArrays) -> FloatArray:
        features = context_features(rounds)
        return trees.predict(features.reshape(-1, features.shape[-1])).reshape(len(rounds), -1)

    return PartHazards(TREES, f"boosted trees ({trees.num_trees})", predict)
