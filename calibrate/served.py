"""The hazards that a bundle is served with, as a function of recorded rounds.

`hybridspec/hazards.py` evaluates the same round by round.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hybridspec.artifacts.bundle import CalibrationPart
from hybridspec.artifacts.tables import TABLE, TREES, FloatArray, HazardKind
from hybridspec.calibrate.context import context_features
from hybridspec.calibrate.features import TraceArrays
from hybridspec.calibrate.hazard import predict_hazards
from hybridspec.calibrate.recording import UNRECORDED
from hybridspec.calibrate.rounds import TraceIdentity
from hybridspec.errors import BundleError

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


def check_pair(part: CalibrationPart, identity: TraceIdentity, *, folder: Path) -> list[str]:
    """Refuse a trace of another pair than the bundle's.

    Returns:
        a warning where the trace does not name its models.

    Raises:
        BundleError: naming the field that differs.
    """
    for field in ("target_digest", "drafter_digest"):
        saved, found = getattr(part.identity, field), getattr(identity, field)
        if found not in (saved, UNRECORDED):
            raise BundleError(
                f"the trace has {field} = {found!r}, the hazards of {folder} were fitted with "
                f"{saved!r}: use that pair's trace, or name a model to fit on this one"
            )
    if identity.target_digest != UNRECORDED:
        return []
    return [
        f"the trace does not name its models, so nothing says that the hazards of {folder} belong "
        "to it"
    ]


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
