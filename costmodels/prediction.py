"""What a trace predicts on a machine: hazards, fitted policies and a replay against each cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa

from hybridspec.artifacts.bundle import Bundle, CostPart, load_bundle
from hybridspec.artifacts.tables import FloatArray, StepCostTable
from hybridspec.calibrate.fit import BUNDLE_MODELS, DEFAULT_MODEL
from hybridspec.calibrate.models import MODELS, fit_model
from hybridspec.calibrate.rounds import TraceIdentity
from hybridspec.calibrate.served import HazardFunction, check_pair, part_hazards
from hybridspec.costmodels.catalog import NEED_ROUTES, Fitting, check_names, make_policies
from hybridspec.costmodels.curve import CostCurve, read_curve
from hybridspec.costmodels.recorded import fit_rounds, round_sets
from hybridspec.costmodels.replay import Replay, keeps_history
from hybridspec.costmodels.rounds import RoundSet
from hybridspec.costmodels.throughput import ThroughputFit
from hybridspec.costmodels.trace_stream import TraceStream
from hybridspec.errors import BundleError, NotEnoughData, UsageError

SPLITS = ("test", "calibration", "all")
# Models that no bundle holds as they are; `raw` and `distilled` are hazard tables.
_NOT_SERVED = ("cells", "temperature")


@dataclass(frozen=True)
class Price:
    """Where round times come from: a bundle's cost part, or a curve.

    Attributes:
        path: as given.
        bundle, curve: one of them is None.
    """

    path: Path
    bundle: Bundle | None
    curve: CostCurve | None

    @property
    def name(self) -> str:
        """What the times were measured on."""
        if self.curve is not None:
            return self.curve.name
        identity = self._cost.identity
        return f"{identity.device}, {identity.engine} {identity.engine_version}, {identity.dtype}"

    @property
    def prices_experts(self) -> bool:
        """Whether a distinct expert has a price of its own."""
        if self.curve is not None:
            return self.curve.by_experts
        return self._cost.step.expert_slope_us > 0.0

    @property
    def _cost(self) -> CostPart:
        assert self.bundle is not None
        assert self.bundle.cost is not None
        return self.bundle.cost

    def layer_scale(self, identity: TraceIdentity) -> float:
        """Priced layers over recorded layers; 1 for a bundle, which was measured on its target."""
        if self.curve is None or not self.curve.by_experts or identity.layers == 0:
            return 1.0
        return self.curve.layers / identity.layers

    def table(self, mean_distinct_L: FloatArray | None, *, topk: int) -> StepCostTable:
        """The cost, where `mean_distinct_L` (float64 [16] or None) is over all priced layers."""
        if self.curve is None:
            return self._cost.step
        layers = self.curve.layers
        mean = None if mean_distinct_L is None else mean_distinct_L / layers
        return self.curve.table(mean, topk=topk)

    def warnings(self) -> list[str]:
        """Findings that do not forbid the cost."""
        if self.bundle is None or self.bundle.cost is None:
            return []
        found = list(self.bundle.warnings)
        latency = self.bundle.cost.step.latency_us[:, :, 1:]
        falls = np.argwhere(np.diff(latency, axis=2) < 0)
        if falls.size:
            batch, context, length = falls[0]
            step = self.bundle.cost.step
            found.append(
                f"{self.path}: length {length + 2} was measured faster than {length + 1} at batch "
                f"{step.batch_sizes[batch]}, context {step.context_tokens[context]} "
                f"({len(falls)} such steps); taken as measured"
            )
        return found


def load_price(path: Path) -> Price:
    """Returns the cost at a path: a bundle folder with a cost part, or a curve file.

    Raises:
        BundleError: neither, damaged, or a bundle without a cost part.
    """
    path = Path(path)
    if not path.is_dir():
        return Price(path, None, read_curve(path))
    bundle = load_bundle(path)
    if bundle.cost is None:
        raise BundleError(
            f"{path} has no cost part: run `hybridspec profile-latency --out {path}`, or give a "
            "cost curve"
        )
    return Price(path, bundle, None)


@dataclass(frozen=True)
class Hazards:
    """Hazards of a trace's rounds, and where they come from.

    Attributes:
        name: of the model.
        predict: gives float64 [n, 15].
        warnings: what could not be checked.
    """

    name: str
    predict: HazardFunction
    warnings: tuple[str, ...] = ()


def hazards_for(
    source: str | None, prices: Sequence[Price], identity: TraceIdentity
) -> Hazards | str:
    """Returns the hazards of a bundle, or the name of the model to fit on the trace.

    Args:
        source: a bundle folder, the name of a model, or None: the calibration part of the first
            cost, if it has one, else the default model.
        prices: costs of the run.
        identity: of the trace; a bundle must have been fitted on the same pair.

    Raises:
        BundleError: a bundle without hazards, or of another pair.
        UsageError: neither a folder nor the name of a model.
    """
    if source is None:
        bundle = prices[0].bundle if prices else None
        if bundle is None or bundle.calibration is None:
            return DEFAULT_MODEL
    elif Path(source).is_dir():
        bundle = load_bundle(Path(source))
    elif source in MODELS:
        return source
    else:
        raise UsageError(
            f"no hazard model is called {source!r}, and no folder of a bundle either: choose "
            f"{', '.join(MODELS)}, or check the path"
        )
    part = bundle.calibration
    if part is None:
        raise BundleError(
            f"{bundle.folder} has no calibration part: run `hybridspec calibrate --out "
            f"{bundle.folder}`, or name a model to fit on the trace"
        )
    warnings = [
        f"{warning}: --hazard NAME fits a model on the trace itself"
        for warning in check_pair(part, identity, folder=bundle.folder)
    ]
    model = part_hazards(part)
    return Hazards(f"{model.name} of {bundle.folder}", model.predict, tuple(warnings))


def _not_served(name: str) -> str:
    return (
        f"these figures are of model {name!r}, which a bundle does not hold, so `hybridspec serve` "
        f"cannot do the same: --hazard with one of {', '.join(BUNDLE_MODELS)} predicts what it does"
    )


@dataclass(frozen=True)
class Outcome:
    """A replay against one cost.

    Attributes:
        price: the cost.
        table: as the policies saw it.
        fit: `lam*` and the best fixed length of the calibration rounds.
        rows: table of `REPLAY_SCHEMA`.
        replay: the finished replay, for gains of one policy over another.
    """

    price: Price
    table: StepCostTable
    fit: ThroughputFit
    rows: pa.Table
    replay: Replay


@dataclass(frozen=True)
class Prediction:
    """Replays of a trace.

    Attributes:
        outcomes: one a cost, in their order.
        hazards: name of the hazard model.
        has_routes: whether rounds were priced by their own experts.
        not_walked: policies whose text could not be walked to its end.
        warnings: what the person should know before trusting it.
    """

    outcomes: tuple[Outcome, ...]
    hazards: str
    has_routes: bool
    not_walked: tuple[str, ...]
    warnings: tuple[str, ...]


def predict(
    stream: TraceStream,
    prices: Sequence[Price],
    policies: Sequence[str],
    *,
    hazards: str | None = None,
    split: str = "test",
    batch: int = 1,
    resamples: int = 400,
    seed: int = 0,
    drop_unroutable: bool = False,
    progress: Callable[[int], None] = lambda rounds: None,
) -> Prediction:
    """Replays a trace against costs, in one pass over its rounds.

    Args:
        stream: the trace.
        prices: costs; policies are fitted and charged on each by itself.
        policies: names of `catalog.POLICY_NAMES`.
        hazards: see `hazards_for`.
        split: rounds to report on, one of `SPLITS`.
        batch: requests decoded together.
        resamples: of the bootstrap over prompts.
        seed: of the bootstrap.
        drop_unroutable: leave policies by experts out where the trace has no routes, instead of
            refusing them.
        progress: told the rounds of each piece as it is done.

    Raises:
        UsageError: unknown names.
        NotEnoughData: too few rounds to fit on, or none to report on.
        BundleError: a cost or hazards that do not suit the trace.
    """
    check_names(policies)
    if split not in SPLITS:
        raise UsageError(f"split {split!r} is unknown: choose {', '.join(SPLITS)}")
    source = hazards_for(hazards, prices, stream.identity)
    fitted_on = fit_rounds(stream)
    if isinstance(source, str):
        model = fit_model(source, fitted_on.arrays)
        unserved = (_not_served(source),) if source in _NOT_SERVED else ()
        source = Hazards(source, model.predict, unserved)
    calibration = fitted_on.rounds(source.predict)
    warnings = source.warnings
    if fitted_on.truncated:
        warnings += (
            f"the calibration split of {stream.path} is large: policies were fitted on its first "
            f"{len(fitted_on.table)} rounds",
        )
    if split != "test":
        warnings += (
            f"split {split!r} holds the rounds that policies were fitted on, so these figures "
            "flatter: --split test reports on held-out ones",
        )
    del fitted_on  # its routes are the largest thing in memory, and counted by now
    has_routes = calibration.distinct_total_NL is not None
    names = [n for n in policies if has_routes or not drop_unroutable or n not in NEED_ROUTES]
    runs: list[tuple[Price, float, Fitting, Replay]] = []
    not_walked: tuple[str, ...] = ()
    for price in prices:
        scale = price.layer_scale(stream.identity)
        rounds = _scaled(calibration, scale)
        distinct = rounds.distinct_total_NL
        mean = None if distinct is None else distinct.mean(axis=0)
        fitting = Fitting(rounds, price.table(mean, topk=stream.identity.topk), batch)
        made = make_policies(names, fitting)
        not_walked = tuple(policy.name for policy in made if keeps_history(policy))
        run = Replay(made, fitting.table, batch=batch, mean_distinct_L=fitting.mean_distinct_L)
        runs.append((price, scale, fitting, run))
    counted = 0
    for rounds in round_sets(stream, source.predict, split=split):
        for _, scale, _, run in runs:
            run.add(_scaled(rounds, scale))
        counted += len(rounds)
        progress(len(rounds))
    if not counted:
        raise NotEnoughData(
            f"{stream.path} has no round in split {split!r}: choose another --split (figures of "
            "rounds that were fitted on flatter), or record held-out prompts"
        )
    outcomes = tuple(
        Outcome(
            price,
            fitting.table,
            fitting.throughput,
            run.result(resamples=resamples, seed=seed, inside_loops=True),
            run,
        )
        for price, _, fitting, run in runs
    )
    return Prediction(outcomes, source.name, has_routes, not_walked, warnings)


def _scaled(rounds: RoundSet, layer_scale: float) -> RoundSet:
    distinct = rounds.distinct_total_NL
    if distinct is None or layer_scale == 1.0:
        return rounds
    return replace(rounds, distinct_total_NL=distinct * layer_scale)
