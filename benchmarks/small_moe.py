"""Small-batch MoE against SGLang's fused MoE tuned for this card: checked first, timed second.

E=256, top-8, hidden 2048, width 512, bf16. Calls of 8 layers in turn inside CUDA graphs, fresh
routes and hidden states every repeat, replays of both interleaved. Beyond 16 rows a call holds
blocks of 16 rows, a request each: all rows live, or 4 of each block and the rest masked.

    python benchmarks/small_moe.py [--quick] [--sweep] [--rows 1,2,4,8,16] [--out DIR]
    python benchmarks/small_moe.py --rows 32,64,128 [--limit 55]

Row counts beyond 16 alone are written to a file of their own, `small_moe_batches.json`.

With `--compile` it fills Triton's cache and leaves; a later run then spends its time measuring. The
card has to be quiet in that later run only.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

# Before torch: one compile worker is enough for SGLang's one compiled sum.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# torch.compile picks that sum's launch by timing and remembers it: a pick made while something else
# ran must not come back.
os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="inductor-")

import torch
from moe.graphs import capture, compiling_ahead, medians_us
from moe.sglang_moe import SglangMoe
from moe.sweep import AnyTiles, default_tiles, short, sweep, variants
from moe.workload import (
    BLOCK_ROWS,
    EXPERT_BYTES,
    HIDDEN,
    MASKED_LIVE_ROWS,
    TOP_K,
    WIDTH,
    Call,
    Calls,
    Layer,
    make_layers,
    work_of,
)
from results_file import gpu, machine, write_results

from hybridspec.errors import QualityGate
from hybridspec.kernels.small_moe.down import down_kernel
from hybridspec.kernels.small_moe.gate_up import gate_up_kernel
from hybridspec.kernels.small_moe.grouped_down import grouped_down_kernel
from hybridspec.kernels.small_moe.grouped_gate_up import grouped_gate_up_kernel
from hybridspec.kernels.small_moe.grouping import group_kernel
from hybridspec.kernels.small_moe.moe import allocate_scratch, small_moe
from hybridspec.kernels.small_moe.naive import small_moe_naive
from hybridspec.kernels.small_moe.tiles import MAX_ROWS, NARROW_ROWS

ROWS = (1, 2, 4, 8, 16)
KERNELS = (
    gate_up_kernel,
    down_kernel,
    group_kernel,
    grouped_gate_up_kernel,
    grouped_down_kernel,
)
NUM_CALLS = 40
CHECKED_ROWS = (1, 2, 3, 8, 16, 17, 64, 128)
MASKED_ROWS = (16, 32, 64, 128)
# bf16 hidden values and outputs; SGLang also rounds gate, up and every expert's output.
TOLERANCE = {"ours": 5e-3, "SGLang": 1e-2}
SEED = 0


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="folder for the result file")
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    parser.add_argument(
        "--sweep", action="store_true", help="try other tiles of ours, use the best"
    )
    parser.add_argument("--rows", default=",".join(map(str, ROWS)))
    parser.add_argument(
        "--limit", type=float, default=55.0, metavar="S", help="seconds for beginning cases"
    )
    parser.add_argument("--no-sglang", action="store_true", help="ours only")
    parser.add_argument("--compile", action="store_true", help="compile everything, then leave")
    return parser.parse_args()


def ours(tiles: AnyTiles | None, scratch: Any) -> Call:
    def call(
        layer: Layer,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        weights_of_layer = (layer.gate_up, layer.down)
        small_moe(x, *weights_of_layer, ids, weights, scratch, out=out, tiles=tiles)

    return call


def check(name: str, call: Call, layer: Layer, num_rows: int) -> float:
    """Error of one call against float64, over all rows; refuses wrong results."""
    calls = Calls(1, num_rows, "independent")
    wanted = small_moe_naive(
        calls.x[0].double(), layer.gate_up, layer.down, calls.ids[0], calls.weights[0]
    )
    call(layer, calls.x[0], calls.ids[0], calls.weights[0], calls.out[0])
    found = calls.x[0] if name == "SGLang" else calls.out[0]
    error = float((found.double() - wanted).norm() / wanted.norm())
    if not error < TOLERANCE[name]:
        raise QualityGate(f"{name} at {num_rows} rows is off by {error:.2e}")
    return error


def check_masked(call: Call, layer: Layer, num_rows: int) -> None:
    """Masked rows of ours are exactly 0 and change nothing, also where x holds NaN."""
    calls = Calls(1, num_rows, "masked")
    masked = torch.arange(num_rows, device="cuda") % BLOCK_ROWS >= MASKED_LIVE_ROWS
    call(layer, calls.x[0], calls.ids[0], calls.weights[0], calls.out[0])
    first = calls.out.clone()
    calls.x[:, masked] = float("nan")
    calls.ids[:, masked & masked.roll(1)] = -1
    call(layer, calls.x[0], calls.ids[0], calls.weights[0], calls.out[0])
    if first[:, masked].any() or not torch.equal(first, calls.out):
        raise QualityGate(f"masked rows of {num_rows} are not 0, or change live rows")


def main() -> None:
    options = parse_options()
    if not torch.cuda.is_available():
        print("error: this benchmark needs a CUDA device", file=sys.stderr)
        raise SystemExit(4)
    torch.manual_seed(SEED)
    where = {**machine(), **gpu()}
    row_counts = [int(rows) for rows in options.rows.split(",")]
    repeats = 7 if options.quick else 21
    begin = time.perf_counter()

    def progress(text: str) -> None:
        print(f"[{time.perf_counter() - begin:5.1f} s] {text}", flush=True)

    with torch.inference_mode():
        run(options, row_counts, repeats, where, progress)


def run(
    options: argparse.Namespace, row_counts: list[int], repeats: int, where: dict, progress: Any
) -> None:
    layers = make_layers()
    begin = time.perf_counter()
    scratch = allocate_scratch(MAX_ROWS, TOP_K, WIDTH, "cuda", hidden=HIDDEN)
    with compiling_ahead(KERNELS):
        for num_rows in sorted({*row_counts, *CHECKED_ROWS}):
            calls = Calls(1, num_rows, "independent")
            for tiles in variants(num_rows) if options.sweep else [default_tiles(num_rows)]:
                work_of(ours(tiles, scratch), calls, layers)()
    progress("compiled ours")
    if options.compile:
        if not options.no_sglang:
            compiled_sglang(layers, row_counts, progress)
        return
    errors = {rows: check("ours", ours(None, scratch), layers[0], rows) for rows in CHECKED_ROWS}
    for num_rows in MASKED_ROWS:
        check_masked(ours(None, scratch), layers[0], num_rows)
    progress("ours against float64: " + ", ".join(f"{r} {e:.1e}" for r, e in errors.items()))
    best: dict[int, AnyTiles] = {rows: default_tiles(rows) for rows in row_counts}
    if options.sweep:
        best = sweep(lambda tiles: ours(tiles, scratch), layers, row_counts, NUM_CALLS, 5)
        for num_rows, tiles in best.items():
            errors[num_rows] = check("ours", ours(tiles, scratch), layers[0], num_rows)
        progress("swept ours")

    sglang = None if options.no_sglang else start_sglang(layers, row_counts, progress)
    rows: list[dict[str, Any]] = []
    left_out: list[str] = []
    for num_rows, kind in cases(row_counts):
        if time.perf_counter() - begin > options.limit:
            left_out.append(f"{num_rows} {kind}")
            continue
        calls = Calls(NUM_CALLS, num_rows, kind)
        tiles = best[num_rows]
        graphs = {"ours": capture(work_of(ours(tiles, scratch), calls, layers))}
        if sglang:
            graphs["sglang"] = capture(work_of(sglang, calls, layers))
        distinct: list[float] = []
        times = medians_us(
            graphs,
            NUM_CALLS,
            repeats,
            calls.refill,
            calls.refill_x,
            lambda: distinct.append(calls.mean_distinct()),  # noqa: B023
        )
        rows.append(row_of(num_rows, kind, sum(distinct) / len(distinct), times))
        rows[-1]["tiles"] = dataclasses.asdict(tiles)
        if sglang:
            rows[-1]["sglang_configs"] = sglang.in_use(num_rows)
    progress("timed")
    summary = summary_of(rows, errors)
    if left_out:
        summary["left_out_at_limit"] = left_out
    path = write_results(
        "small_moe_batches" if min(row_counts) > NARROW_ROWS else "small_moe",
        rows=rows,
        summary=summary,
        seed=SEED,
        where=where,
        packages=("torch", "triton", "sglang"),
        out=options.out,
    )
    for num_rows, tiles in best.items():
        print(f"tiles {num_rows:2d} rows: {short(tiles)}")
    for num_rows in row_counts if sglang else ():
        print(f"SGLang {num_rows:2d} rows: {sglang.in_use(num_rows) if sglang else None}")
    print_table(rows)
    print(f"summary {summary}\nwrote {path}")


def cases(row_counts: list[int]) -> list[tuple[int, str]]:
    """Row counts with their kinds of routes, most telling first: the time may run out."""
    found = []
    for num_rows in row_counts:
        kinds = ["independent", "text-like"] if num_rows > 1 else ["independent"]
        if num_rows == BLOCK_ROWS:
            kinds.append("masked")
        elif num_rows > BLOCK_ROWS:
            kinds = ["masked", "masked-text-like", *kinds]
        found += [(num_rows, kind) for kind in kinds]
    return found


def compiled_sglang(layers: list[Layer], row_counts: list[int], progress: Any) -> SglangMoe:
    sglang = SglangMoe()
    progress("imported SGLang")
    sglang.compile_ahead(layers[0], row_counts)
    progress("compiled SGLang's candidates")
    return sglang


def start_sglang(layers: list[Layer], row_counts: list[int], progress: Any) -> SglangMoe | None:
    """Imported, compiled, tuned and checked; None, with the reason printed, where that fails."""
    try:
        sglang = compiled_sglang(layers, row_counts, progress)
        sglang.tune(layers, row_counts, 3)
        progress("tuned SGLang")
        found = {rows: check("SGLang", sglang, layers[0], rows) for rows in {*row_counts}}
        progress("SGLang against float64: " + ", ".join(f"{r} {e:.1e}" for r, e in found.items()))
    except Exception:
        traceback.print_exc()
        return None
    return sglang


def row_of(num_rows: int, kind: str, distinct: float, times: dict[str, float]) -> dict[str, Any]:
    size = distinct * EXPERT_BYTES
    row: dict[str, Any] = {"rows": num_rows, "routes": kind, "distinct_experts": distinct}
    for name, microseconds in times.items():
        row[f"{name}_us"] = microseconds
        row[f"{name}_gb_per_s"] = 1e-3 * size / microseconds
    if "sglang" in times and "ours" in times:
        row["over_sglang"] = times["sglang"] / times["ours"]
    return row


def summary_of(rows: list[dict[str, Any]], errors: dict[int, float]) -> dict[str, Any]:
    """`rows16`: SGLang's time over ours, independent routes; `rows16_text_like` likewise.

    5 % count as won at a row count where every kind of routes measured at it reaches them;
    `wins_by_5_percent_masked_at_rows` looks at masked kinds alone.
    """
    summary: dict[str, Any] = {
        f"rows{row['rows']}" + ("" if row["routes"] == "independent" else f"_{row['routes']}"): row[
            "over_sglang"
        ]
        for row in rows
        if "over_sglang" in row
    }
    summary = {key.replace("-", "_"): value for key, value in summary.items()}
    counts = sorted({row["rows"] for row in rows if "over_sglang" in row})
    summary["wins_by_5_percent_at_rows"] = [
        count
        for count in counts
        if all(row["over_sglang"] >= 1.05 for row in rows if row["rows"] == count)
    ]
    summary["wins_by_5_percent_masked_at_rows"] = [
        count
        for count in counts
        if (masked := [r for r in rows if r["rows"] == count and r["routes"].startswith("masked")])
        and all(row["over_sglang"] >= 1.05 for row in masked)
    ]
    summary["largest_error"] = max(errors.values())
    return summary


def print_table(rows: list[dict[str, Any]]) -> None:
    print("rows routes           distinct   ours us  SGLang us  ours GB/s  SGLang GB/s  ratio")
    for row in rows:
        cells = [
            f"{row[key]:{width}.{digits}f}" if key in row else " " * (width - 1) + "-"
            for key, width, digits in (
                ("distinct_experts", 8, 1),
                ("ours_us", 10, 2),
                ("sglang_us", 10, 2),
                ("ours_gb_per_s", 10, 0),
                ("sglang_gb_per_s", 12, 0),
                ("over_sglang", 7, 3),
            )
        ]
        print(f"{row['rows']:4d} {row['routes']:16s} {' '.join(cells)}")


if __name__ == "__main__":
    main()
