"""What the first router says about the experts of the later layers, beside two free baselines.

Recorded rounds of the lab pair (256 experts, top 8). For each verify length a least-squares line
is fitted on the calibration prompts and scored on the test prompts, both outside repetition loops:
from the distinct experts of layer 0, from the distinct token ids of the block, and from both.

    python benchmarks/routing_regression.py
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from recordings import recorded_trace
from results_file import machine, write_results

from hybridspec.artifacts.tables import BLOCK_SIZE
from hybridspec.calibrate.rounds import trace_identity
from hybridspec.calibrate.routing import distinct_experts, distinct_tokens, fit_routing

SHOWN_LENGTHS = (2, 4, 8, 12, 16)


def held_out_r2(
    features_RF: np.ndarray, y_R: np.ndarray, fit: np.ndarray, score: np.ndarray
) -> tuple[float, float]:
    """R2 and root mean square residual on held-out rounds of a linear fit with intercept."""
    design = np.column_stack([np.ones(len(y_R)), features_RF]).astype(np.float64)
    weights = np.linalg.lstsq(design[fit], y_R[fit], rcond=None)[0]
    residual = y_R[score] - design[score] @ weights
    spread = float(np.var(y_R[score]))
    mean_square = float(np.mean(residual**2))
    return (1.0 - mean_square / spread if spread > 0 else 0.0), float(np.sqrt(mean_square))


def independent_distinct(length: int, *, experts: int, topk: int) -> float:
    """Mean distinct experts of a layer if each row chose `topk` of `experts` on its own."""
    return experts * (1.0 - (1.0 - topk / experts) ** length)


def main() -> None:
    """Fit, score, write the result file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pair", default="lab", help="which recording")
    parser.add_argument("--out", type=Path, default=None)
    arguments = parser.parse_args()
    where = machine()
    trace = recorded_trace(arguments.pair)
    identity = trace_identity(trace, path=arguments.pair)
    counts_RYL, tokens_RL = distinct_experts(trace), distinct_tokens(trace)
    assert counts_RYL is not None
    outside = trace.column("loop_period").to_numpy() == 0
    test = np.array(trace.column("split").to_pylist()) == "test"
    fit, score = outside & ~test, outside & test
    report = fit_routing(counts_RYL, tokens_RL, fit_rows=fit, held_out=score)
    first, total = counts_RYL[:, 0, :], counts_RYL.sum(axis=1)
    others = (total - first).astype(np.float64)
    rows: list[dict[str, Any]] = []
    for length in range(1, BLOCK_SIZE + 1):
        at = length - 1
        signals = {
            "first_router": first[:, at : at + 1],
            "distinct_tokens": tokens_RL[:, at : at + 1],
            "both": np.stack([first[:, at], tokens_RL[:, at]], axis=1),
        }
        row: dict[str, Any] = {
            "verify_length": length,
            "mean_distinct_tokens": float(tokens_RL[score, at].mean()),
            "mean_first_layer_experts": float(first[score, at].mean()),
            "mean_total_experts": float(total[score, at].mean()),
            "of_independent": float(
                total[score, at].mean()
                / identity.layers
                / independent_distinct(length, experts=identity.experts, topk=identity.topk)
            ),
            "slope_total_per_first_expert": float(report.table.slope_L[at]),
        }
        for name, features in signals.items():
            r2, rms = held_out_r2(features, others[:, at], fit, score)
            row |= {f"{name}_other_layers_r2": r2, f"{name}_other_layers_rms_experts": rms}
        row |= {
            "first_router_total_r2": float(report.first_router_r2_L[at]),
            "distinct_tokens_total_r2": float(report.distinct_tokens_r2_L[at]),
            "mean_experts_by_layer": [
                round(float(value), 3) for value in counts_RYL[score, :, at].mean(axis=0)
            ],
        }
        # The product's own line must say what this script's least squares says.
        expected = float(report.other_layers_r2_L[at])
        assert abs(row["first_router_other_layers_r2"] - expected) < 1e-6 or length == 1
        rows.append(row)
        if length in SHOWN_LENGTHS:
            print(
                f"L={length:2}: other layers from the first router R2 "
                f"{row['first_router_other_layers_r2']:.3f}, from distinct tokens "
                f"{row['distinct_tokens_other_layers_r2']:.3f}, from both "
                f"{row['both_other_layers_r2']:.3f}; {row['of_independent']:.2f} of independent"
            )
    last = rows[-1]
    summary = {
        "rounds_fit": int(fit.sum()),
        "rounds_scored": int(score.sum()),
        "layers": identity.layers,
        "first_router_other_layers_r2_16": last["first_router_other_layers_r2"],
        "distinct_tokens_other_layers_r2_16": last["distinct_tokens_other_layers_r2"],
        "both_other_layers_r2_16": last["both_other_layers_r2"],
        "of_independent_16": last["of_independent"],
        "lengths_where_tokens_beat_router": sum(
            row["distinct_tokens_other_layers_r2"] > row["first_router_other_layers_r2"]
            for row in rows[1:]
        ),
    }
    path = write_results(
        "routing_regression",
        rows=rows,
        summary=summary,
        seed=0,
        where=where,
        packages=("numpy", "pyarrow"),
        out=arguments.out,
    )
    print(path, summary)


if __name__ == "__main__":
    main()
