"""Dense projections of 16, 32 and 64 rows: the kernel against cuBLAS, as captured passes run them.

Every call of a graph reads another copy of the weights, more of them than the L2 holds, and waits
for a small launch that makes its rows, as a norm does in a model; that launch's own time is taken
off. in_proj_ba runs on a second stream in cuBLAS's column, as SGLang runs it. Results are checked
against float64 first. Prints the table of tiles to paste into
`hybridspec/kernels/skinny_linear/table.py`.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from moe.graphs import capture, compiling_ahead, medians_us
from results_file import gpu, machine, write_results
from skinny.candidates import ENGINES, TURNS, Projection, candidates

from hybridspec.errors import QualityGate
from hybridspec.kernels.skinny_linear.linear import (
    Workspace,
    skinny_linear,
    skinny_linear_kernel,
    skinny_linear_pair,
)
from hybridspec.kernels.skinny_linear.tiles import Tiles

SEED = 20260801
ROWS = (16, 32, 64)
CALLS = 40
# More than five times the L2 of an H200.
ROTATED_BYTES = 300 << 20
# Of the norm: one rounding to bf16 is 1.7e-3.
TOLERANCE = 3e-3
COMPILERS = 12
WIN = 1.03
# Of a pause: about the clock of an H200 under load.
SM_CYCLES_PER_US = 1700


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Dense projections of few rows.")
    parser.add_argument("--quick", action="store_true", help="fewer repeats, 16 rows only")
    parser.add_argument(
        "--limit", type=float, default=85.0, help="seconds; what is left is skipped"
    )
    parser.add_argument(
        "--dependent", action="store_true", help="dependent launches may enter the printed table"
    )
    parser.add_argument(
        "--engine",
        choices=tuple(ENGINES),
        default="sglang",
        help="whose projections; `captured`: what the captured engine alone has",
    )
    parser.add_argument("--out", type=Path, default=None, help="folder of the result file")
    return parser.parse_args()


@dataclass
class Weights:
    """Copies of the weights of one projection, `second` without outputs where there is none."""

    first: torch.Tensor
    second: torch.Tensor

    @classmethod
    def create(cls, projection: Projection) -> Weights:
        copies = max(CALLS, math.ceil(ROTATED_BYTES / projection.weight_bytes))
        made = [
            torch.empty(copies, n, projection.inputs, dtype=torch.bfloat16, device="cuda").normal_(
                std=projection.inputs**-0.5
            )
            for n in (projection.outputs, projection.beside)
        ]
        return cls(made[0], made[1])


# Rows, copy of the weights; outputs of both.
Call = Callable[[torch.Tensor, int], tuple[torch.Tensor, torch.Tensor | None]]


def cublas(projection: Projection, weights: Weights) -> Call:
    second = torch.cuda.Stream()

    def call(x: torch.Tensor, copy: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        if not projection.beside:
            return F.linear(x, weights.first[copy]), None
        current = torch.cuda.current_stream()
        second.wait_stream(current)
        out = F.linear(x, weights.first[copy])
        with torch.cuda.stream(second):
            out2 = F.linear(x, weights.second[copy])
        current.wait_stream(second)
        return out, out2

    return call


def ours(
    projection: Projection,
    weights: Weights,
    tiles: Tiles,
    rows: int,
    later: torch.Tensor | None = None,
) -> Call:
    """`later`: copies of a weight, of which each call asks one into L2."""
    workspace = Workspace.create(tiles, rows, projection.outputs + projection.beside, "cuda")

    def call(x: torch.Tensor, copy: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        weight = weights.first[copy]
        next_weight = None if later is None else later[copy]
        if not projection.beside:
            out = skinny_linear(x, weight, tiles, workspace=workspace, next_weight=next_weight)
            return out, None
        pair = weight, weights.second[copy]
        return skinny_linear_pair(x, *pair, tiles, workspace=workspace, next_weight=next_weight)

    return call


def compile_share(engine: str, number: int) -> None:
    """Compile every `COMPILERS`-th configuration into Triton's cache, in a process of its own."""
    wanted = [
        (projection, rows, tiles)
        for projection in ENGINES[engine]
        for rows in ROWS
        for tiles in candidates(projection, rows)
    ]
    with torch.inference_mode(), compiling_ahead([skinny_linear_kernel]):
        for projection, rows, tiles in wanted[number::COMPILERS]:
            shapes = (projection.outputs, projection.inputs), (projection.beside, projection.inputs)
            one, two = (torch.empty(1, *s, dtype=torch.bfloat16, device="cuda") for s in shapes)
            x = torch.empty(rows, projection.inputs, dtype=torch.bfloat16, device="cuda")
            ours(projection, Weights(one, two), tiles, rows)(x, 0)


def check(name: str, call: Call, weights: Weights, x: torch.Tensor) -> float:
    """Error of one call against float64; refuses wrong results."""
    found = torch.cat([part for part in call(x, 1) if part is not None], 1).double()
    both = torch.cat([weights.first[1], weights.second[1]]).double()
    wanted = x.double() @ both.T
    error = float((found - wanted).norm() / wanted.norm())
    if not error < TOLERANCE:
        raise QualityGate(f"{name} is off by {error:.2e}")
    return error


def time_projection(
    projection: Projection, weights: Weights, rows: int, order: tuple[int, int] | None, repeats: int
) -> list[dict[str, Any]]:
    """One row for cuBLAS and one for each configuration, `order` of summation alone if given."""
    source = torch.randn(rows, projection.inputs, device="cuda").bfloat16()
    x = source.clone()
    copies = weights.first.shape[0]

    def chain(call: Call | None) -> Callable[[], None]:
        def work() -> None:
            for copy in range(copies):
                torch.mul(source, 1.0, out=x)
                if call is not None:
                    call(x, copy)

        return work

    calls: dict[str, Call] = {"cuBLAS": cublas(projection, weights)}
    tiles_of: dict[str, Tiles] = {}
    errors: dict[str, float] = {}
    for tiles in candidates(projection, rows):
        if order in (None, tiles.order):
            calls[str(tiles)] = ours(projection, weights, tiles, rows)
            tiles_of[str(tiles)] = tiles
    graphs = {"producer": capture(chain(None))}
    for name in list(calls):
        try:
            errors[name] = check(f"{name} at {rows} rows", calls[name], weights, x)
            graphs[name] = capture(chain(calls[name]))
        except QualityGate:
            raise
        except Exception as error:  # more shared memory than there is
            print(f"{projection.name} {rows}: {type(error).__name__} {name}", flush=True)
            del calls[name]

    def refill() -> None:
        source.normal_()

    times = medians_us(graphs, copies, repeats, lambda: None, refill)
    return [
        {
            "projection": projection.name,
            "outputs": projection.outputs,
            "beside": projection.beside,
            "inputs": projection.inputs,
            "layers_a_round": projection.layers,
            "rows": rows,
            "kernel": "cuBLAS" if name == "cuBLAS" else "ours",
            "tiles": asdict(tiles_of[name]) if name in tiles_of else None,
            "us": (spent := times[name] - times["producer"]),
            "tb_per_s": 1e-6 * projection.weight_bytes / spent,
            "error": errors[name],
        }
        for name in calls
    ]


def time_turns(table: dict[Any, dict[int, Tiles]], repeats: int) -> list[dict[str, Any]]:
    """Two projections with a pause between them, without and with the second's weight asked for."""
    by_name = {projection.name: projection for projection in ENGINES["sglang"]}
    rows = []
    for first_name, later_name, pause_us in TURNS:
        first, later = by_name[first_name], by_name[later_name]
        tiles = [table.get(projection.shape, {}).get(ROWS[0]) for projection in (first, later)]
        if tiles[0] is None:
            continue
        weights, later_weights = Weights.create(first), Weights.create(later)
        copies = min(len(weights.first), len(later_weights.first))
        xs = [torch.randn(ROWS[0], p.inputs, device="cuda").bfloat16() for p in (first, later)]
        second = (
            cublas(later, later_weights)
            if tiles[1] is None
            else ours(later, later_weights, tiles[1], ROWS[0])
        )
        graphs = {}
        for name, asked in (("alone", None), ("ahead", later_weights.first)):
            call = ours(first, weights, tiles[0], ROWS[0], asked)

            def work(call: Call = call, copies: int = copies, second: Call = second) -> None:
                for copy in range(copies):
                    call(xs[0], copy)  # noqa: B023
                    torch.cuda._sleep(pause_us * SM_CYCLES_PER_US)  # noqa: B023
                    second(xs[1], copy)  # noqa: B023

            graphs[name] = capture(work)
        times = medians_us(graphs, copies, repeats, lambda: None, lambda: None)
        rows.append(
            {
                "projection": first_name,
                "then": later_name,
                "pause_us": pause_us,
                "both_us": times["alone"],
                "both_ahead_us": times["ahead"],
            }
        )
        gain = times["alone"] - times["ahead"]
        print(f"{first_name}, then {later_name}: asked ahead gains {gain:5.2f} us", flush=True)
    return rows


def best_of(rows: list[dict[str, Any]], *, dependent: bool) -> dict[str, Any] | None:
    found = [r for r in rows if r["tiles"] and (dependent or not r["tiles"]["dependent"])]
    return min(found, key=lambda row: row["us"], default=None)


def print_best(rows: list[dict[str, Any]]) -> None:
    """Best without and with dependent launch beside cuBLAS."""
    stock = next(row for row in rows if row["kernel"] == "cuBLAS")
    line = f"{stock['projection']:27s} {stock['rows']:3d}  cuBLAS {stock['us']:6.2f}"
    for name, best in (
        ("plain", best_of(rows, dependent=False)),
        ("dependent", best_of([r for r in rows if (r["tiles"] or {}).get("dependent")],
                              dependent=True)),
    ):  # fmt: skip
        if best is not None:
            line += (
                f"  {name} {best['us']:6.2f} us {stock['us'] / best['us']:5.3f}x "
                f"{best['tb_per_s']:4.2f} TB/s {short(Tiles(**best['tiles']))}"
            )
    print(line, flush=True)


def short(tiles: Tiles) -> str:
    """Tiles as an expression, without fields that are as by default."""
    parts = [str(tiles.columns), str(tiles.block_k), str(tiles.stages)]
    for name, default in (("parts", 1), ("splits", 1), ("warps", 4), ("dependent", False),
                          ("prefetch", 0)):  # fmt: skip
        if getattr(tiles, name) != default:
            parts.append(f"{name}={getattr(tiles, name)}")
    return f"Tiles({', '.join(parts)})"


def table_of(
    rows: list[dict[str, Any]], projections: tuple[Projection, ...], *, dependent: bool
) -> dict[Any, dict[int, Tiles]]:
    """What is `WIN` times as fast as cuBLAS, with the fewest rows' order of summation."""
    table: dict[Any, dict[int, Tiles]] = {}
    for projection in projections:
        order = None
        for count in ROWS:
            here = [r for r in rows if r["projection"] == projection.name and r["rows"] == count]
            if not here:
                continue
            stock = next(row for row in here if row["kernel"] == "cuBLAS")
            same = [
                row for row in here if row["tiles"] and order in (None, Tiles(**row["tiles"]).order)
            ]
            best = best_of(same, dependent=dependent)
            if best is not None and stock["us"] >= WIN * best["us"]:
                tiles = Tiles(**best["tiles"])
                order = tiles.order
                table.setdefault(projection.shape, {})[count] = tiles
    return table


def print_table(table: dict[Any, dict[int, Tiles]]) -> None:
    print("SM90: dict[Shape, dict[int, Tiles]] = {")
    for shape, by_rows in table.items():
        print(f"    {shape}: {{")
        for rows, tiles in by_rows.items():
            print(f"        {rows}: {short(tiles)},")
        print("    },")
    print("}")


def summary_of(rows: list[dict[str, Any]], projections: tuple[Projection, ...]) -> dict[str, Any]:
    """Microseconds that a round of 16 rows gains, with plain and with dependent launches."""
    summary: dict[str, Any] = {"largest_error": max(row["error"] for row in rows)}
    for name, dependent in (("plain", False), ("dependent", True)):
        gain = 0.0
        for projection in projections:
            here = [r for r in rows if r["projection"] == projection.name and r["rows"] == 16]
            best = best_of(here, dependent=dependent)
            if best is not None:
                stock = next(row for row in here if row["kernel"] == "cuBLAS")
                gain += projection.layers * max(0.0, stock["us"] - best["us"])
        summary[f"gain_{name}_us_a_round"] = gain
    return summary


def main() -> None:
    options = parse_options()
    if not torch.cuda.is_available():
        print("error: this benchmark needs a CUDA device", file=sys.stderr)
        raise SystemExit(4)
    begin = time.perf_counter()
    torch.manual_seed(SEED)
    where = {**machine(), **gpu()}

    def spent() -> float:
        return time.perf_counter() - begin

    with ProcessPoolExecutor(COMPILERS, multiprocessing.get_context("spawn")) as pool:
        list(pool.map(partial(compile_share, options.engine), range(COMPILERS)))
    print(f"[{spent():5.1f} s] compiled", flush=True)
    rows: list[dict[str, Any]] = []
    with torch.inference_mode():
        for projection in ENGINES[options.engine]:
            weights = None
            for count in ROWS[:1] if options.quick else ROWS:
                if spent() > options.limit:
                    print(f"skipped for the limit: {projection.name}, {count} rows", flush=True)
                    continue
                weights = weights or Weights.create(projection)
                found = time_projection(projection, weights, count, None, 5 if options.quick else 9)
                rows += found
                print_best(found)
            del weights
            torch.cuda.empty_cache()
        projections = ENGINES[options.engine]
        table = table_of(rows, projections, dependent=options.dependent)
        repeats = 5 if options.quick else 9
        turns = time_turns(table, repeats) if options.engine == "sglang" else []
    summary = summary_of(rows, projections)
    path = write_results(
        "skinny_linear" if options.engine == "sglang" else f"skinny_linear_{options.engine}",
        rows=[*rows, *turns],
        summary=summary,
        seed=SEED,
        where=where,
        packages=("torch", "triton"),
        out=options.out,
    )
    print_table(table)
    print(f"[{spent():5.1f} s] summary {summary}\nwrote {path}")


if __name__ == "__main__":
    main()
