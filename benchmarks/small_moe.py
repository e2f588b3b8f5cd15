"""Small-batch MoE against SGLang's fused MoE tuned for this card: checked first, timed second.

E=256, top-8, hidden 2048, width 512, bf16. Calls of 8 layers in turn inside CUDA graphs, fresh
routes and hidden states every repeat, replays of both interleaved. Beyond 16 rows, which ours does
not take, SGLang's time alone.

    python benchmarks/small_moe.py [--quick] [--sweep] [--rows 1,4,8,16] [--out DIR]

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
from moe.workload import (
    EXPERT_BYTES,
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
from hybridspec.kernels.small_moe.moe import allocate_scratch, small_moe
from hybridspec.kernels.small_moe.naive import small_moe_naive
from hybridspec.kernels.small_moe.tiles import MAX_ROWS, Tiles, tiles_for

ROWS = (1, 2, 4, 8, 16, 32, 64)
NUM_CALLS = 40
CHECKED_ROWS = (1, 2, 3, 8, 16)
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
    parser.add_argument("--no-sglang", action="store_true", help="ours only")
    parser.add_argument("--compile", action="store_true", help="compile everything, then leave")
    return parser.parse_args()


def ours(tiles: Tiles | None, scratch: Any) -> Call:
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


def variants(num_rows: int) -> list[Tiles]:
    """Tiles around the shipped ones, one thing changed at a time."""
    base = tiles_for(num_rows, 90)
    changes: list[dict[str, Any]] = [{}]
    changes += [
        {"gate_up_n": n, "gate_up_k": k, "gate_up_stages": stages}
        for n, k, stages in (
            (16, 256, 4),
            (32, 64, 6),
            (32, 64, 10),
            (32, 128, 3),
            (32, 128, 4),
            (32, 128, 5),
            (32, 128, 6),
            (32, 128, 8),
            (32, 256, 3),
            (32, 256, 4),
            (64, 64, 5),
            (64, 128, 3),
            (64, 128, 4),
            (64, 128, 6),
        )
        if (num_rows > 2 or n < 64)
    ]
    changes += [{"down_stages": stages} for stages in (3, 4, 5, 6, 7)]
    changes += [{"dependent": False}]
    found = [dataclasses.replace(base, **change) for change in changes]
    return list(dict.fromkeys(found))


def sweep(
    layers: list[Layer], row_counts: list[int], scratch: Any, repeats: int
) -> dict[int, Tiles]:
    """Best tiles for each row count: those of gate-up and of down chosen apart."""
    best: dict[int, Tiles] = {}
    print("rows  us/call  tiles of ours", flush=True)
    for num_rows in row_counts:
        calls = Calls(NUM_CALLS, num_rows, "independent")
        times: dict[Tiles, float] = {}
        for tiles in variants(num_rows):
            try:
                graph = capture(work_of(ours(tiles, scratch), calls, layers))
            except Exception as error:  # more shared memory than there is
                print(f"{num_rows:4d}  {type(error).__name__} {tiles}", flush=True)
                continue
            times[tiles] = medians_us(
                {"it": graph}, NUM_CALLS, repeats, calls.refill, calls.refill_x
            )["it"]
            print(f"{num_rows:4d}  {times[tiles]:7.2f}  {short(tiles)}", flush=True)
        base = tiles_for(num_rows, 90)
        chosen = base
        for fields in (
            ("gate_up_n", "gate_up_k", "gate_up_stages"),
            ("down_n", "down_parts", "down_stages"),
        ):
            rest = [f.name for f in dataclasses.fields(Tiles) if f.name not in fields]
            same = [t for t in times if all(getattr(t, f) == getattr(base, f) for f in rest)]
            if same:
                winner = min(same, key=times.__getitem__)
                chosen = dataclasses.replace(chosen, **{f: getattr(winner, f) for f in fields})
        best[num_rows] = chosen
    return best


def short(tiles: Tiles) -> str:
    return (
        f"gate_up {tiles.gate_up_n}x{tiles.gate_up_k} s{tiles.gate_up_stages}, down "
        f"{tiles.down_n}x{tiles.down_parts} s{tiles.down_stages}"
        + ("" if tiles.dependent else ", no dependent launch")
    )


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


def check_masked(call: Call, layer: Layer) -> None:
    """Masked rows of ours are exactly 0 and change nothing, also where x holds NaN."""
    calls = Calls(1, 16, "masked")
    call(layer, calls.x[0], calls.ids[0], calls.weights[0], calls.out[0])
    first = calls.out.clone()
    calls.x[:, MASKED_LIVE_ROWS:] = float("nan")
    calls.ids[:, MASKED_LIVE_ROWS + 1 :] = -1
    call(layer, calls.x[0], calls.ids[0], calls.weights[0], calls.out[0])
    if first[:, MASKED_LIVE_ROWS:].any() or not torch.equal(first, calls.out):
        raise QualityGate("masked rows are not 0, or change live rows")


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
    scratch = allocate_scratch(MAX_ROWS, TOP_K, WIDTH, "cuda")
    our_rows = [rows for rows in row_counts if rows <= MAX_ROWS]
    with compiling_ahead([gate_up_kernel, down_kernel]):
        for num_rows in sorted({*our_rows, *CHECKED_ROWS}):
            calls = Calls(1, num_rows, "independent")
            for tiles in variants(num_rows) if options.sweep else [tiles_for(num_rows, 90)]:
                work_of(ours(tiles, scratch), calls, layers)()
    progress("compiled ours")
    if options.compile:
        if not options.no_sglang:
            compiled_sglang(layers, row_counts, progress)
        return
    errors = {rows: check("ours", ours(None, scratch), layers[0], rows) for rows in CHECKED_ROWS}
    check_masked(ours(None, scratch), layers[0])
    progress("ours against float64: " + ", ".join(f"{r} {e:.1e}" for r, e in errors.items()))
    best: dict[int, Tiles] = {rows: tiles_for(rows, 90) for rows in our_rows}
    if options.sweep:
        best = sweep(layers, our_rows, scratch, 5)
        for num_rows, tiles in best.items():
            errors[num_rows] = check("ours", ours(tiles, scratch), layers[0], num_rows)
        progress("swept ours")

    sglang = None if options.no_sglang else start_sglang(layers, row_counts, progress)
    rows = []
    for num_rows in row_counts:
        kinds = ["independent", "text-like"] if num_rows > 1 else ["independent"]
        for kind in [*kinds, "masked"] if num_rows == 16 else kinds:
            calls = Calls(NUM_CALLS, num_rows, kind)
            graphs = {}
            if num_rows in best:
                tiles = best[num_rows]
                graphs["ours"] = capture(work_of(ours(tiles, scratch), calls, layers))
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
            if num_rows in best:
                rows[-1]["tiles"] = dataclasses.asdict(best[num_rows])
            if sglang:
                rows[-1]["sglang_configs"] = sglang.in_use(num_rows)
    progress("timed")
    summary = summary_of(rows, errors)
    path = write_results(
        "small_moe",
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
        found = {rows: check("SGLang", sglang, layers[0], rows) for rows in (1, 16)}
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
    """`rows16`: SGLang's time over ours, independent routes; `rows16_text_like` likewise."""
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
    summary["largest_error"] = max(errors.values())
    return summary


def print_table(rows: list[dict[str, Any]]) -> None:
    print("rows routes       distinct   ours us  SGLang us  ours GB/s  SGLang GB/s  ratio")
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
        print(f"{row['rows']:4d} {row['routes']:12s} {' '.join(cells)}")


if __name__ == "__main__":
    main()
