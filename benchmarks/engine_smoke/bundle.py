"""A bundle for the smoke test of the policy: hazards of recorded rounds, costs of a straight line.

    python benchmarks/engine_smoke/bundle.py --pair PAIR --trace ROUNDS.parquet --out BUNDLE \
        (--line BASE_US ROW_US | --from-smoke smoke.json)

The line is either stated, or laid through the forced lengths of an earlier smoke test (single
clients; prefill counted in). Either is enough to see the policy choose; neither is a measurement of
costs, which `hybridspec profile-latency` makes. Read it with `sglang_smoke.py --any-bundle`.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa

from hybridspec.artifacts.bundle import load_bundle, write_calibration, write_cost
from hybridspec.artifacts.digest import config_digest
from hybridspec.artifacts.identity import CalibrationIdentity, CostIdentity
from hybridspec.artifacts.schemas import EXPERTS_SCHEMA, SAMPLES_SCHEMA
from hybridspec.artifacts.tables import BLOCK_SIZE, StepCostTable
from hybridspec.calibrate.fit import fit_calibration
from hybridspec.calibrate.served import part_hazards
from hybridspec.costmodels.throughput import fit_throughput
from hybridspec.costmodels.trace_stream import open_trace
from hybridspec.pricing import rounds_of
from hybridspec.provenance import provenance


def line_through(smoke: Path, arm: str) -> tuple[float, float]:
    """Base and slope in us of round times over the forced lengths of a smoke test."""
    rates = json.loads(smoke.read_text())["stages"][f"every length {arm}"]
    lengths = np.array([int(length) for length in rates], dtype=np.float64)
    us = [1e6 * rate["tokens_per_round"] / rate["tokens_per_s"] for rate in rates.values()]
    slope, base = np.polyfit(lengths, us, 1)
    return float(base), float(slope)


def main() -> None:
    """Write the bundle."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pair", type=Path, required=True)
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--model", default="boosted", help="hazard model")
    parser.add_argument("--line", type=float, nargs=2, metavar=("BASE_US", "ROW_US"))
    parser.add_argument("--from-smoke", type=Path)
    parser.add_argument("--arm", default="hybridspec")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    if options.from_smoke is not None:
        base, row = line_through(options.from_smoke, options.arm)
    elif options.line is not None:
        base, row = options.line
    else:
        parser.error("name --line or --from-smoke")
    print(f"T(L) = {base:.0f} us + {row:.1f} us a row", flush=True)

    trace = pa.concat_tables(list(open_trace(options.trace).pieces()))
    result = fit_calibration(trace, model=options.model)
    settings = {"base_us": base, "row_us": row, "stated": options.line is not None}
    write_calibration(
        options.out,
        identity=CalibrationIdentity(
            target_digest=config_digest(options.pair / "target"),
            drafter_digest=config_digest(options.pair / "drafter"),
            dtype="bfloat16",
        ),
        hazard=result.hazard,
        routing=result.routing,
        reliability=result.reliability,
        metrics=result.metrics,
        provenance=provenance("smoke-bundle", settings),
        trees=result.trees,
    )
    latency_us = base + row * np.arange(BLOCK_SIZE + 1, dtype=np.float64)
    latency_us = np.broadcast_to(latency_us, (4, 1, BLOCK_SIZE + 1)).copy()
    step = StepCostTable(
        batch_sizes=np.array([1, 2, 4, 8]),
        context_tokens=np.array([0]),
        latency_us=latency_us,
        latency_p10_us=latency_us,
        latency_p90_us=latency_us,
        draft_us=np.full((4, 1), base / 4),
        expert_slope_us=0.0,
        expert_slope_r2=0.0,
    )
    part = load_bundle(options.out).calibration
    assert part is not None
    model = part_hazards(part)
    fitted = fit_throughput(rounds_of(trace, model.predict, split="calibration"), step)
    throughput = replace(fitted, hazard=model.kind)
    write_cost(
        options.out,
        identity=CostIdentity(
            device="stated",
            memory_class="unknown",
            cores=1,
            threads=1,
            engine="sglang",
            engine_version="0.5.16",
            dtype="bfloat16",
            architecture_digest=config_digest(options.pair / "target"),
            max_batch=8,
            torch_version="2.11",
        ),
        step=step,
        samples=SAMPLES_SCHEMA.empty_table(),
        experts=EXPERTS_SCHEMA.empty_table(),
        throughput=throughput,
        provenance=provenance("smoke-bundle", settings),
    )
    print(
        f"lam {throughput.tokens_per_us.tolist()}, best fixed "
        f"{throughput.best_fixed_length.tolist()}, trees {result.trees is not None}"
    )


if __name__ == "__main__":
    main()
