"""What `gpu_decode.py` takes from recorded rounds, as plain arrays: hazards, routing, rounds.

Made where the trace and scikit-learn are; read on the machine with the GPU, which has neither.
Hazards and routing are fitted on the calibration prompts; the held-out rounds are for predictions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hybridspec.artifacts.tables import (
    TABLE,
    TREES,
    FloatArray,
    HazardKind,
    HazardTable,
    RoutingTable,
    StepCostTable,
    ThroughputTable,
)
from hybridspec.artifacts.trees import TreeTable
from hybridspec.costmodels.rounds import RoundSet
from hybridspec.costmodels.throughput import fit_throughput
from hybridspec.errors import UsageError

HAZARD, ROUTING, CALIBRATION, TEST = "hazard.", "routing.", "calibration.", "test."
TREE, BY_TREES = "trees.", "by_trees."


@dataclass(frozen=True)
class Prepared:
    """Fitted tables and the rounds behind them.

    Attributes:
        hazard: the fitted table; with trees the one distilled from them.
        calibration, test: recorded rounds of each split, loops included; hazards are the table's.
        trees: boosted trees, or None.
        by_trees: their hazards of the rounds of each split, by its name.
    """

    hazard: HazardTable
    routing: RoutingTable
    calibration: RoundSet
    test: RoundSet
    trees: TreeTable | None = None
    by_trees: Mapping[str, FloatArray] = field(default_factory=dict)

    def kind(self, wanted: str) -> HazardKind:
        """`auto`: trees where there are some; `table` or `trees` as asked for.

        Raises:
            UsageError: trees that were not prepared.
        """
        if wanted == TREES and self.trees is None:
            raise UsageError("the prepared arrays hold no trees: prepare with --model boosted")
        return TREES if wanted != TABLE and self.trees is not None else TABLE

    def rounds(self, split: str, kind: HazardKind) -> RoundSet:
        """Rounds of a split (`calibration` or `test`) with hazards of one kind."""
        found: RoundSet = getattr(self, split)
        if kind == TABLE:
            return found
        return dataclasses.replace(found, hazards_ND=self.by_trees[split])

    def price(self, cost: StepCostTable, kind: HazardKind) -> ThroughputTable:
        """The price of time under the hazards that lengths will be chosen with."""
        fitted = fit_throughput(self.rounds("calibration", kind), cost)
        return dataclasses.replace(fitted, hazard=kind)


def prepare(trace: Path, out: Path, *, model: str, layers: int) -> None:
    """Fit on a trace and write the arrays.

    Args:
        trace: recorded rounds with routes.
        model: hazard model whose table is kept.
        layers: of the target that decodes, each with the router of a recorded layer.
    """
    from hybridspec.calibrate.context import context_features
    from hybridspec.calibrate.features import trace_arrays
    from hybridspec.calibrate.fit import fit_calibration
    from hybridspec.calibrate.hazard import predict_hazards
    from hybridspec.costmodels.recorded import of_split, round_set
    from hybridspec.costmodels.trace_stream import open_trace

    stream = open_trace(trace)
    pieces = list(stream.pieces())
    (whole,) = pieces
    result = fit_calibration(whole, model=model)
    assert result.routing is not None
    scale = layers / result.routing.num_layers
    routing = dataclasses.replace(
        result.routing,
        num_layers=layers,
        total_mean_L=result.routing.total_mean_L * scale,
        slope_L=result.routing.slope_L * scale,
    )
    arrays: dict[str, Any] = {}
    for prefix, part in ((HAZARD, result.hazard), (ROUTING, routing), (TREE, result.trees)):
        if part is not None:
            arrays |= {prefix + f.name: getattr(part, f.name) for f in dataclasses.fields(part)}
    for prefix, split in ((CALIBRATION, "calibration"), (TEST, "test")):
        table = of_split(whole, split)
        found = trace_arrays(table)
        rounds = round_set(
            table,
            lambda found: predict_hazards(result.hazard, found.features_RDF),
            arrays=found,
            layer_scale=scale,
        )
        for f in dataclasses.fields(rounds):
            value = getattr(rounds, f.name)
            if value is not None:
                wide = value.dtype == np.float64
                arrays[prefix + f.name] = value.astype(np.float32) if wide else value
        if result.trees is not None:
            features = context_features(found)
            by_trees = result.trees.predict(features.reshape(-1, features.shape[-1]))
            # fp32 rounds a hazard next to 1 to 1; it stays a probability.
            arrays[BY_TREES + split] = by_trees.reshape(len(found), -1).astype(np.float32)
    out.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(out, **arrays)


def load_prepared(path: Path) -> Prepared:
    """Read what `prepare` wrote."""
    with np.load(path) as stored:
        arrays = {name: stored[name] for name in stored.files}

    def part(prefix: str) -> dict[str, Any]:
        found = {n.removeprefix(prefix): v for n, v in arrays.items() if n.startswith(prefix)}
        for name, value in found.items():
            if value.dtype == np.float32:
                found[name] = value.astype(np.float64)
            elif value.ndim == 0:
                found[name] = value.item()
        return found

    trees = part(TREE)
    if trees:
        trees["feature_names"] = tuple(trees["feature_names"].tolist())
        # Leaves and thresholds as they were fitted: numpy and the kernel walk the same trees.
        trees["baseline"] = float(trees["baseline"])
    return Prepared(
        HazardTable(**part(HAZARD)),
        RoutingTable(**part(ROUTING)),
        RoundSet(**part(CALIBRATION)),
        RoundSet(**part(TEST)),
        TreeTable(**trees) if trees else None,
        part(BY_TREES),
    )


def step_table(
    latency_us_L: np.ndarray,
    spread_us_2L: np.ndarray,
    draft_us: float,
    slope_us: float,
    context: int,
) -> StepCostTable:
    """A cost table of one batch and one context.

    Args:
        latency_us_L: [17]. spread_us_2L: 10th and 90th percentiles [2, 17].
        slope_us: of a distinct expert of one layer.
    """
    shape = (1, 1, 17)
    low = np.minimum(spread_us_2L[0], latency_us_L).reshape(shape)
    high = np.maximum(spread_us_2L[1], latency_us_L).reshape(shape)
    return StepCostTable(
        np.ones(1, dtype=np.int64),
        np.array([context], dtype=np.int64),
        latency_us_L.reshape(shape),
        low,
        high,
        np.full((1, 1), draft_us),
        slope_us,
        1.0,
    )


def device_trees(trees: TreeTable, device: Any) -> Any:
    """The trees as the kernel walks them."""
    from hybridspec.kernels.hazard_trees.ensemble import pack_trees

    return pack_trees(
        baseline=trees.baseline,
        root_T=trees.root_T,
        feature_K=trees.feature_K,
        threshold_K=trees.threshold_K,
        left_K=trees.left_K,
        value_K=trees.value_K,
        depth=trees.depth,
        device=device,
    )


def device_tables(
    prepared: Prepared, cost: StepCostTable, throughput: ThroughputTable, device: Any
) -> Any:
    """The tables as the select kernels read them."""
    from hybridspec.kernels.select.tables import pack_tables

    hazard, routing = prepared.hazard, prepared.routing
    return pack_tables(
        weights_F=hazard.weights_F,
        position_bias_D=hazard.position_bias_D,
        knots_x=hazard.knots_x,
        knots_y=hazard.knots_y,
        batch_sizes=cost.batch_sizes,
        context_tokens=cost.context_tokens,
        latency_us=cost.latency_us,
        tokens_per_us=throughput.tokens_per_us,
        best_fixed_length=throughput.best_fixed_length,
        first_mean_L=routing.first_mean_L,
        slope_L=routing.slope_L,
        expert_slope_us=cost.expert_slope_us,
        device=device,
    )
