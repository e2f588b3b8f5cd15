"""What `sglang_decode.py` needs beside the pair, made where the recorded rounds are.

    python benchmarks/sglang_prepare.py --pair PAIR --trace lab-rounds.parquet --out DIR

DIR gets `bundle/` (hazards and routing of the padded pair, fitted on the calibration prompts) and
`rounds.npz` (those prompts' rounds with their hazards, to fit the price of time on the run's own
costs). Nothing of the held-out prompts is in them.
"""

from __future__ import annotations

import argparse
import dataclasses
import shutil
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

from hybridspec.artifacts.bundle import write_calibration
from hybridspec.artifacts.identity import CalibrationIdentity
from hybridspec.artifacts.tables import RoutingTable
from hybridspec.calibrate.fit import fit_calibration
from hybridspec.calibrate.models import fit_model
from hybridspec.costmodels.recorded import fit_rounds
from hybridspec.costmodels.trace_stream import open_trace
from hybridspec.pair import PairFolders, calibration_identity
from hybridspec.provenance import provenance


def main() -> None:
    """Write the folder."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pair", type=Path, required=True, help="lab pair with target/, drafter/")
    parser.add_argument("--trace", type=Path, required=True, help="its recorded rounds")
    parser.add_argument("--model", default="boosted", help="hazard model (boosted)")
    parser.add_argument("--set", action="append", default=[], help="as of hybridspec.demo.inflate")
    parser.add_argument("--layers", type=int, default=40, help="of the padded target (40)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    began = time.monotonic()
    options.out.mkdir(parents=True, exist_ok=True)
    stream = open_trace(options.trace)
    fitted_on = fit_rounds(stream)
    model = fit_model(options.model, fitted_on.arrays)
    rounds = fitted_on.rounds(model.predict)
    kept = {
        field.name: value
        for field in dataclasses.fields(rounds)
        if (value := getattr(rounds, field.name)) is not None
    }
    np.savez_compressed(options.out / "rounds.npz", **kept)
    print(f"{len(rounds)} rounds, {time.monotonic() - began:.0f} s", flush=True)

    (whole,) = list(stream.pieces())
    result = fit_calibration(whole, model=options.model, seed=options.seed)
    bundle = options.out / "bundle"
    shutil.rmtree(bundle, ignore_errors=True)
    content = write_calibration(
        bundle,
        identity=identity_of(options.pair, options.set, stream.identity.prompts_digest),
        hazard=result.hazard,
        routing=deepened(result.routing, options.layers),
        reliability=result.reliability,
        metrics=result.metrics,
        trees=result.trees,
        provenance=provenance("calibrate", {"model": options.model, "seed": options.seed}),
    )
    print(f"{bundle.name}: {content}, {time.monotonic() - began:.0f} s", flush=True)
    print(result.summary.to_json())


def deepened(routing: RoutingTable | None, layers: int) -> RoutingTable | None:
    """Routing of a target with more layers, each with the router of a recorded one."""
    if routing is None:
        return None
    scale = layers / routing.num_layers
    return dataclasses.replace(
        routing,
        num_layers=layers,
        total_mean_L=routing.total_mean_L * scale,
        slope_L=routing.slope_L * scale,
    )


def identity_of(pair: Path, changes: list[str], prompts_digest: str) -> CalibrationIdentity:
    """Identity of the padded pair, whose folder need not be there yet."""
    from hybridspec.demo.inflate import inflate, parse

    with tempfile.TemporaryDirectory() as folder:
        padded = Path(folder) / "padded"
        flags = [value for change in changes for value in ("--set", change)]
        inflate(parse([str(pair), "--out", str(padded), "--no-weights", *flags]))
        folders = PairFolders(padded / "target", padded / "drafter", None, "padded")
        return calibration_identity(
            folders, dtype="bfloat16", temperature=0.0, top_p=1.0, prompts_digest=prompts_digest
        )


if __name__ == "__main__":
    main()
