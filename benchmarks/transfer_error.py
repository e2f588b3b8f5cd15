"""How far a cost curve is off that was transferred from another GPU or engine version.

Public latencies of single operators (AIConfigurator, SGLang, ms by batch or tokens) stand in for
the whole steps that bundles hold: nobody here measured them. Each curve of a source is moved to a
target with anchors spread over its points; all other points are compared with what was measured.

    python benchmarks/transfer_error.py ../shared/data/aiconfigurator
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from results_file import machine, write_results

from hybridspec.costmodels.transfer import (
    MAX_ERROR,
    check_errors,
    transfer_curve,
)
from hybridspec.errors import QualityGate
from hybridspec.pair import memory_class

ANCHORS = (4, 5, 6)
MIN_POINTS = 8
MOE_TOKENS = 256
TARGET_SHAPE = (2048, 512, 8, 256)
NAMES = {
    "a100_sxm": "NVIDIA A100",
    "b200_sxm": "NVIDIA B200",
    "h100_sxm": "NVIDIA H100",
    "h200_sxm": "NVIDIA H200",
    "l40s": "NVIDIA L40S",
}
GDN_PAIRS = (
    (("a100_sxm", "0.5.10"), ("h200_sxm", "0.5.9")),
    (("h100_sxm", "0.5.14"), ("h200_sxm", "0.5.14")),
    (("b200_sxm", "0.5.14"), ("h200_sxm", "0.5.14")),
    (("h200_sxm", "0.5.9"), ("h200_sxm", "0.5.14")),
    (("l40s", "0.5.14"), ("h200_sxm", "0.5.14")),
)
MOE_PAIRS = (
    (("a100_sxm", "0.5.10"), ("h200_sxm", "0.5.10")),
    (("h100_sxm", "0.5.14"), ("h200_sxm", "0.5.14")),
    (("b200_sxm", "0.5.14"), ("h200_sxm", "0.5.14")),
    (("h200_sxm", "0.5.10"), ("h200_sxm", "0.5.14")),
    (("l40s", "0.5.14"), ("h200_sxm", "0.5.14")),
)

Curves = dict[tuple[Any, ...], dict[int, float]]


def gdn_curves(root: Path, gpu: str, version: str) -> Curves:
    """Decode kernel of the gated delta rule: us by batch, one curve a model shape."""
    table = pq.read_table(root / gpu / "linear_attention" / "sglang" / version / "gdn_perf.parquet")
    curves: Curves = defaultdict(dict)
    for row in table.to_pylist():
        if row["phase"] == "generation" and "gated_delta" in row["kernel_source"]:
            shape = tuple(
                row[name] for name in ("d_model", "num_k_heads", "num_v_heads", "head_k_dim")
            )
            curves[shape][row["batch_size"]] = 1e3 * row["latency"]
    return curves


def moe_curves(root: Path, gpu: str, version: str) -> Curves:
    """Fused MoE (Triton): us by tokens up to 256, one curve a shape, type and distribution."""
    columns = ("hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size", "moe_ep_size")
    table = pq.read_table(root / gpu / "moe" / "sglang" / version / "moe_perf.parquet")
    curves: Curves = defaultdict(dict)
    for row in table.to_pylist():
        if row["kernel_source"] == "sglang_fused_moe_triton" and row["num_tokens"] <= MOE_TOKENS:
            shape = (*(row[c] for c in columns), row["moe_dtype"], row["distribution"])
            curves[shape][row["num_tokens"]] = 1e3 * row["latency"]
    return curves


def target_shape(curves: Curves) -> Curves:
    """Curves of the shape of Qwen3.5/3.6-35B-A3B."""
    return {shape: curve for shape, curve in curves.items() if shape[:4] == TARGET_SHAPE}


@dataclass
class Study:
    """Relative errors of held-back points of one pair and number of anchors."""

    errors: list[np.ndarray] = field(default_factory=list)
    covered: list[np.ndarray] = field(default_factory=list)
    accepted: list[bool] = field(default_factory=list)
    as_is: list[np.ndarray] = field(default_factory=list)
    scalar: list[np.ndarray] = field(default_factory=list)
    no_source: list[np.ndarray] = field(default_factory=list)

    def add(self, rows: np.ndarray, source: np.ndarray, target: np.ndarray, anchors: int) -> None:
        """One curve."""
        picked = np.unique(np.linspace(0, rows.size - 1, anchors).round().astype(int))
        held = np.setdiff1d(np.arange(rows.size), picked)
        moved = transfer_curve(rows, source, picked, target[picked])
        off = np.log(moved.latency_us / target)[held]
        try:
            check_errors(moved.inner_errors)
            self.accepted.append(True)
        except QualityGate:
            self.accepted.append(False)
        self.errors.append(np.abs(np.expm1(off)))
        self.covered.append(np.abs(off) <= moved.half_width)
        ratio = np.log(target / source)
        self.as_is.append(np.abs(np.expm1(-ratio[held])))
        self.scalar.append(np.abs(np.expm1(ratio[picked].mean() - ratio[held])))
        place, value = np.log(rows), np.log(target)
        drawn = np.interp(place[held], place[picked], value[picked])
        self.no_source.append(np.abs(np.expm1(drawn - value[held])))

    def row(self) -> dict[str, float | int | None]:
        """Figures over all held-back points; `accepted_*` over curves that pass the 15 % gate."""
        errors, covered = np.concatenate(self.errors), np.concatenate(self.covered)
        passing = np.concatenate(
            [np.full(e.size, ok) for e, ok in zip(self.errors, self.accepted, strict=True)]
        )
        found: dict[str, float | int | None] = {
            "curves": len(self.errors),
            "held_back_points": int(errors.size),
            **_quantiles("error", errors),
            "interval_coverage": float(covered.mean()),
            "accepted_curves_share": float(np.mean(self.accepted)),
        }
        good = errors[passing]
        if good.size:
            found |= _quantiles("accepted_error", good)
            found["accepted_interval_coverage"] = float(covered[passing].mean())
        for name in ("as_is", "scalar", "no_source"):
            found |= _quantiles(f"{name}_error", np.concatenate(getattr(self, name)))
        return found


def _quantiles(name: str, errors: np.ndarray) -> dict[str, float]:
    return {
        f"{name}_median": float(np.median(errors)),
        f"{name}_p90": float(np.quantile(errors, 0.9)),
        f"{name}_max": float(errors.max()),
    }


def study(source: Mapping[Any, Any], target: Mapping[Any, Any], anchors: int) -> Study:
    """All curves that both have, on the points that both have."""
    result = Study()
    for shape in sorted(source.keys() & target.keys(), key=str):
        rows = np.array(sorted(source[shape].keys() & target[shape].keys()), dtype=np.float64)
        if rows.size >= MIN_POINTS:
            values = [
                np.array([curves[shape][int(r)] for r in rows]) for curves in (source, target)
            ]
            result.add(rows, values[0], values[1], anchors)
    return result


def markdown(rows: Sequence[Mapping[str, Any]], *, anchors: int) -> list[str]:
    """The table of `docs/bundles.md`, a line a string.

    Args:
        rows: of the result file.
        anchors: which number of anchors to show.
    """
    lines = [
        "| operator | source → target | curves | transferred | interval holds | accepted | "
        "error of these | as it is | one factor | no source |",
        "|---|---|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        if row["anchors"] != anchors:
            continue
        pairs = {
            name: f"{100 * row[f'{name}_median']:.1f} / {100 * row[f'{name}_p90']:.1f}"
            for name in ("error", "as_is_error", "scalar_error", "no_source_error")
        }
        accepted = "-"
        if "accepted_error_median" in row:
            found = (row["accepted_error_median"], row["accepted_error_p90"])
            accepted = f"{100 * found[0]:.1f} / {100 * found[1]:.1f}"
        across = " (across classes: refused)" if row["refused_across_memory_classes"] else ""
        lines.append(
            f"| {row['operator']} | {row['source']} → {row['target']}{across} | {row['curves']} | "
            f"{pairs['error']} / {100 * row['error_max']:.0f} | "
            f"{100 * row['interval_coverage']:.0f} | "
            f"{100 * row['accepted_curves_share']:.0f} | {accepted} | {pairs['as_is_error']} | "
            f"{pairs['scalar_error']} | {pairs['no_source_error']} |"
        )
    return lines


def main() -> None:
    """Measure, write the result file, show the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path, help="folder with one folder a GPU")
    parser.add_argument("--out", type=Path, default=None)
    arguments = parser.parse_args()
    where = machine()
    rows = []
    for operator, read, pairs in (
        ("gdn_decode", gdn_curves, GDN_PAIRS),
        ("moe", moe_curves, MOE_PAIRS),
    ):
        tables = {place: read(arguments.data, *place) for pair in pairs for place in pair}
        for before, now in pairs:
            classes = [memory_class(NAMES[gpu]) for gpu, _ in (before, now)]
            subsets = {operator: (tables[before], tables[now])}
            if operator == "moe":
                subsets["moe_2048x512_top8_of_256"] = (
                    target_shape(tables[before]),
                    target_shape(tables[now]),
                )
            for name, (source, target) in subsets.items():
                for anchors in ANCHORS:
                    done = study(source, target, anchors)
                    if not done.errors:
                        continue
                    rows.append(
                        {
                            "operator": name,
                            "source": f"{before[0]} {before[1]}",
                            "target": f"{now[0]} {now[1]}",
                            "memory_classes": "-".join(dict.fromkeys(classes)),
                            "refused_across_memory_classes": classes[0] != classes[1],
                            "anchors": anchors,
                            **done.row(),
                        }
                    )
                    row = rows[-1]
                    print(
                        f"{name:26} {row['source']:>16} -> {row['target']:16} {anchors} anchors: "
                        f"{row['error_median']:6.1%} {row['error_p90']:6.1%} "
                        f"{row['error_max']:7.1%}  covered {row['interval_coverage']:.1%}  "
                        f"pass {row['accepted_curves_share']:.0%}"
                    )
    allowed = [r for r in rows if not r["refused_across_memory_classes"]]
    four = [r for r in allowed if r["anchors"] == ANCHORS[0]]
    weights = np.array([r["held_back_points"] for r in allowed], dtype=np.float64)
    coverage = np.array([r["interval_coverage"] for r in allowed])
    summary = {
        "gate_error_p90": MAX_ERROR,
        "median_error_four_anchors_best": min(r["error_median"] for r in four),
        "median_error_four_anchors_worst": max(r["error_median"] for r in four),
        "p90_error_four_anchors_worst": max(r["error_p90"] for r in four),
        "max_error_worst": max(r["error_max"] for r in allowed),
        "accepted_p90_error_worst": max(r.get("accepted_error_p90", 0.0) for r in allowed),
        "interval_coverage_pooled": float(weights @ coverage / weights.sum()),
        "interval_coverage_worst": float(coverage.min()),
        "across_classes_p90_error_worst": max(
            r["error_p90"] for r in rows if r["refused_across_memory_classes"]
        ),
    }
    path = write_results(
        "transfer_error",
        rows=rows,
        summary=summary,
        seed=0,
        where=where,
        packages=("numpy", "pyarrow"),
        out=arguments.out,
    )
    print("\n".join(markdown(rows, anchors=ANCHORS[0])))
    print(path, summary)


if __name__ == "__main__":
    main()
