"""Every hazard model by the name it has on the command line and in reports."""

from __future__ import annotations

from collections.abc import Callable

from hybridspec.calibrate.boosted import BoostedHazard
from hybridspec.calibrate.distilled import DistilledCells, DistilledTable
from hybridspec.calibrate.features import TraceArrays
from hybridspec.calibrate.hazard import BetaPositionHazard, RawTop1Hazard
from hybridspec.calibrate.isotonic_top1 import IsotonicHazard
from hybridspec.calibrate.model import HazardModel
from hybridspec.calibrate.platt import PlattHazard
from hybridspec.calibrate.temperature import TemperatureHazard
from hybridspec.errors import UsageError

MODELS: dict[str, Callable[[], HazardModel]] = {
    model.name: model
    for model in (
        RawTop1Hazard,
        TemperatureHazard,
        PlattHazard,
        IsotonicHazard,
        BetaPositionHazard,
        BoostedHazard,
        DistilledTable,
        DistilledCells,
    )
}


def make_model(name: str) -> HazardModel:
    """A model of that name, not fitted.

    Raises:
        UsageError: no model has that name.
    """
    if name not in MODELS:
        raise UsageError(f"no hazard model is called {name!r}: choose {', '.join(MODELS)}")
    return MODELS[name]()


def fit_model(name: str, rounds: TraceArrays) -> HazardModel:
    """Fit a model on the drafts at risk of `rounds`; select split and leave out loops before.

    Args:
        name: one of `MODELS`.
        rounds: of the calibration split, from `trace_arrays`.

    Raises:
        UsageError: no model has that name.
        NotEnoughData: too few rounds or prompts, or only one outcome.
    """
    return make_model(name).fit(rounds)
