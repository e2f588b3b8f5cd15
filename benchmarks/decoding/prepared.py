"""What `gpu_decode.py` takes from recorded rounds, as plain arrays: hazards, routing, rounds.

Made where the trace and scikit-learn are; read on the machine with the GPU, which needs numpy only.
Hazards and routing are fitted on the calibration prompts; the held-out rounds are for predictions.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hybridspec.artifacts.tables import HazardTable, RoutingTable, StepCostTable, ThroughputTable
from hybridspec.costmodels.rounds import RoundSet

HAZARD, ROUTING, CALIBRATION, TEST = "hazard.", "routing.", "calibration.", "test."
_TEXT_FIELDS = ("method",)


@dataclass(frozen=True)
class Prepared:
    """Fitted tables and the rounds behind them.

    Attributes:
        calibration, test: recorded rounds of each split, loops included; hazards are the table's.
    """

    hazard: HazardTable
    routing: RoutingTable
    calibration: RoundSet
    test: RoundSet


def prepare(trace: Path, out: Path, *, model: str, layers: int) -> None:
    """Fit on a trace and write the arrays.

    Args:
        trace: recorded rounds with routes.
        model: hazard model whose table is kept.
        layers: of the target that decodes, each with the router of a recorded layer.
    """
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
    for prefix, part in ((HAZARD, result.hazard), (ROUTING, routing)):
        arrays |= {prefix + field.name: getattr(part, field.name) for field in _fields(part)}
    for prefix, split in ((CALIBRATION, "calibration"), (TEST, "test")):
        rounds = round_set(
            of_split(whole, split),
            lambda found: predict_hazards(result.hazard, found.features_RDF),
            layer_scale=scale,
        )
        for field in _fields(rounds):
            value = getattr(rounds, field.name)
            if value is not None:
                wide = value.dtype == np.float64
                arrays[prefix + field.name] = value.astype(np.float32) if wide else value
    out.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(out, **arrays)


def _fields(part: Any) -> tuple[Any, ...]:
    return dataclasses.fields(part)


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

    return Prepared(
        HazardTable(**part(HAZARD)),
        RoutingTable(**part(ROUTING)),
        RoundSet(**part(CALIBRATION)),
        RoundSet(**part(TEST)),
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
