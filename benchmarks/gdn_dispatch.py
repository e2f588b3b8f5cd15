"""GDN verify of 30 layers in every form and tile: what the dispatcher's table is made of.

Each variant is compared with float64, then captured in a CUDA graph that rotates through slots and
inputs, so that the state comes from memory; replays of all variants take turns. Dependent launch is
on, as it is shipped.

    python benchmarks/gdn_dispatch.py [--quick]          measure, write gdn_dispatch.json
    python benchmarks/gdn_dispatch.py --write-table      make the table module from that file
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from results_file import RESULTS, gpu, machine, write_results

ROWS = (1, 2, 3, 4, 6, 8, 12, 16)
BATCHES = (1, 2, 4, 8)
DTYPES = ("float32", "bfloat16")
# Slot sets that a graph rotates through: 63 MB of fp32 state a request and set, past the L2.
SETS = {1: 6, 2: 4, 4: 3, 8: 2}
CHECK_LAYERS = 2
# Form, value block, warps, lanes along K; of two as fast the earlier is chosen.
Tile = tuple[str, int, int, int]
TILES: tuple[Tile, ...] = (
    ("block", 16, 1, 8),
    ("block", 32, 2, 8),
    ("sequential", 8, 1, 8),
    ("sequential", 4, 1, 8),
    ("sequential", 16, 1, 8),
    ("sequential", 16, 2, 8),
    ("sequential", 8, 1, 16),
)
# Apart by less than this, two tiles are as fast: repeats scatter by about as much.
AS_FAST = 1.01
SEED = 0


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result file")
    parser.add_argument("--quick", action="store_true", help="half the repeats")
    parser.add_argument("--repeats", type=int, default=10, help="replays a graph")
    parser.add_argument("--rows", default=",".join(map(str, ROWS)))
    parser.add_argument("--batches", default=",".join(map(str, BATCHES)))
    parser.add_argument("--state", default="both", help="float32, bfloat16 or both")
    parser.add_argument(
        "--limit", type=float, default=85.0, help="seconds after which no further case is begun"
    )
    parser.add_argument(
        "--write-table",
        action="store_true",
        help="measure nothing; write the table module from the result file",
    )
    parser.add_argument("--table", type=Path, help="table module (default: in kernels/gdn)")
    return parser.parse_args()


def fits(tile: Tile, rows: int, batch: int) -> bool:
    """Whether a tile is worth trying: wide ones for many programs, narrow ones for few."""
    form, value_block, warps, lanes = tile
    if form == "block":
        return rows > 2 or value_block == 16
    if lanes == 16:
        return batch <= 2
    return value_block < 16 or batch >= 2 or (warps == 1 and rows <= 2)


def name_of(tile: Tile) -> str:
    form, value_block, warps, lanes = tile
    tail = f"/{lanes}" if form == "sequential" else ""
    return f"{form} {value_block}x{warps}{tail}"


def fastest(rows: Iterable[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The fastest right one of a case; the earlier of `TILES` where two are as fast."""
    right = [row for row in rows if not row["problem"] and row["verify_us"] is not None]
    if not right:
        return None
    best = min(row["verify_us"] for row in right)
    return next(row for row in right if row["verify_us"] <= best * AS_FAST)


def cases_of(rows: Sequence[Mapping[str, Any]]) -> dict[tuple[str, int, int], list]:
    """Rows by state dtype, batch and T."""
    found: dict[tuple[str, int, int], list] = {}
    for row in rows:
        found.setdefault((row["state_dtype"], row["batch"], row["tokens"]), []).append(row)
    return found


def table_module(result: Mapping[str, Any]) -> str:
    """Text of the table module of a result file."""
    architecture = result["machine"]["architecture"]
    source = f"{result['machine']['gpu']}, commit {result['commit']}"
    lines = [
        f'"""Fastest verify by rows, batch and state dtype on sm_{architecture}. Generated; do not '
        "edit.",
        "",
        "Regenerate from a result file: `python benchmarks/gdn_dispatch.py --write-table`.",
        '"""',
        "",
        "from __future__ import annotations",
        "",
        "from hybridspec.kernels.gdn.table import Form",
        "",
        f"SOURCE = {json.dumps(source)}",
        "",
        "# rows, batch, state dtype, form, value block, warps, lanes along K, microseconds of 30 "
        "layers",
        "# (None: expected, not measured).",
        "POINTS: tuple[tuple[int, int, str, Form, int, int, int, float | None], ...] = (",
    ]
    for (dtype, batch, tokens), rows in cases_of(result["rows"]).items():
        best = fastest(rows)
        if best is not None:
            tile = f'"{best["form"]}", {best["value_block"]}, {best["warps"]}, {best["key_lanes"]}'
            lines.append(f'    ({tokens}, {batch}, "{dtype}", {tile}, {best["verify_us"]:.1f}),')
    return "\n".join([*lines, ")", ""])


def write_table(options: argparse.Namespace) -> None:
    path = options.out / "gdn_dispatch.json"
    if not path.exists():
        print(f"no {path}: measure first, without --write-table")
        raise SystemExit(4)
    result = json.loads(path.read_text(encoding="utf-8"))
    name = f"measured_sm{result['machine']['architecture']}.py"
    table = options.table or Path(__file__).resolve().parent.parent / "kernels" / "gdn" / name
    table.write_text(table_module(result), encoding="utf-8")
    print(f"wrote {table}")


def summarise(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Fastest of each form at the places that people ask about, and what the table is worth."""
    summary: dict[str, Any] = {"failed_checks": sum(bool(row["problem"]) for row in rows)}
    wins: dict[str, int] = {}
    for (dtype, batch, tokens), found in cases_of(rows).items():
        best = fastest(found)
        if best is None:
            continue
        wins[best["form"]] = wins.get(best["form"], 0) + 1
        key = f"{'fp32' if dtype == 'float32' else 'bf16'}_b{batch}_t{tokens}"
        for form in ("block", "sequential"):
            of_form = fastest(row for row in found if row["form"] == form)
            summary[f"{key}_{form}_us"] = None if of_form is None else of_form["verify_us"]
    return {"cases_won": wins, **summary}


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    names = [name_of(tile) for tile in TILES]
    print(f"{'':22}" + "".join(f"{name:>18}" for name in names) + "   chosen")
    for (dtype, batch, tokens), found in cases_of(rows).items():
        cells = []
        for name in names:
            row = next((row for row in found if row["method"] == name), None)
            time_us = None if row is None else row["verify_us"]
            mark = "!" if row is not None and row["problem"] else ""
            cells.append(f"{('-' if time_us is None else f'{time_us:.0f}') + mark:>18}")
        best = fastest(found)
        chosen = "-" if best is None else best["method"]
        print(f"{dtype:>8} b{batch} T={tokens:<8} {''.join(cells)}   {chosen}")


def measure_all(options: argparse.Namespace) -> None:
    import torch

    if not torch.cuda.is_available():
        print("gdn_dispatch.py needs a CUDA device, but for --write-table")
        raise SystemExit(4)
    from gdn.gate import check, expectations
    from gdn.ours import Ours
    from gdn.precompile import precompile
    from gdn.timing import Graph, measure
    from gdn.timing import summarise as latency_of
    from gdn.workload import Case, Shape, make_workload

    began, where, device = time.monotonic(), {**machine(), **gpu()}, torch.device("cuda", 0)
    major, minor = torch.cuda.get_device_capability(device)
    where["architecture"] = 10 * major + minor
    dependent = where["architecture"] >= 90

    def elapsed() -> float:
        return time.monotonic() - began

    def method(tile: Tile) -> Ours:
        form, value_block, warps, lanes = tile
        tuning = {"value_block": value_block, "warps": warps}
        if form == "sequential":
            tuning["key_lanes"] = lanes
        return Ours(
            name_of(tile), name_of(tile), form, dependent_launch=dependent, verify_tuning=tuning
        )

    methods = {tile: method(tile) for tile in TILES}
    repeats = max(5, options.repeats // 2) if options.quick else options.repeats
    tokens = [int(text) for text in options.rows.split(",")]
    batches = [int(text) for text in options.batches.split(",")]
    dtypes = DTYPES if options.state == "both" else (options.state,)
    # Nothing that a kernel specialises in depends on the batch.
    small = {
        (dtype, t): Case(Shape(), 2, t, 2, getattr(torch, dtype)).smaller(CHECK_LAYERS)
        for dtype in dtypes
        for t in tokens
    }
    tasks = [
        (methods[tile], case)
        for (_, t), case in small.items()
        for tile in TILES
        if any(fits(tile, t, batch) for batch in batches)
    ]
    tasks.sort(key=lambda task: (task[0].form != "block", -task[1].tokens))
    cores = len(os.sched_getaffinity(0))
    broken = precompile(tasks, device=device, processes=min(14, max(1, cores - 2)), limit_s=50)
    print(f"{where['gpu']}, t={elapsed():.0f}s", flush=True)

    # Errors of each tile at each T, on two layers and two requests.
    errors: dict[tuple[str, str, int], tuple[float | None, float | None, str]] = {}
    for (dtype, t), case in small.items():
        workload = make_workload(case, device, SEED + t)
        expected = expectations(workload)
        for tile_method, _ in (task for task in tasks if task[1] == case):
            key = (tile_method.name, dtype, t)
            if (tile_method.name, case) in broken:
                errors[key] = (None, None, broken[tile_method.name, case])
                continue
            found = check(tile_method.prepare(workload), expected)
            errors[key] = (found.output, found.state, found.problem)
    print(f"checked against float64, t={elapsed():.0f}s", flush=True)

    rows: list[dict[str, Any]] = []
    skipped = 0
    for dtype in dtypes:
        for batch in batches:
            for t in tokens:
                if elapsed() > options.limit:
                    skipped += 1
                    continue
                case = Case(Shape(), batch, t, SETS.get(batch, 2), getattr(torch, dtype))
                workload = make_workload(case, device, SEED + t)
                graphs: dict[str, Graph] = {}
                for tile in TILES:
                    name = name_of(tile)
                    if not fits(tile, t, batch) or errors[name, dtype, t][2]:
                        continue
                    round_ = methods[tile].prepare(workload)

                    def verify(round_: Any = round_, sets: int = case.sets) -> None:
                        for index in range(sets):
                            round_.verify(index)

                    round_.verify(0)
                    graphs[name] = Graph(verify, rounds=case.sets)
                samples = measure(graphs, repeats)
                for tile in (tile for tile in TILES if fits(tile, t, batch)):
                    form, value_block, warps, lanes = tile
                    name = name_of(tile)
                    output_error, state_error, problem = errors[name, dtype, t]
                    latency = latency_of(samples[name]) if name in samples else None
                    rows.append(
                        {
                            "method": name,
                            "state_dtype": dtype,
                            "batch": batch,
                            "tokens": t,
                            "form": form,
                            "value_block": value_block,
                            "warps": warps,
                            "key_lanes": lanes,
                            "verify_us": latency.median_us if latency else None,
                            "verify_p10_us": latency.p10_us if latency else None,
                            "verify_p90_us": latency.p90_us if latency else None,
                            "output_error": output_error,
                            "state_error": state_error,
                            "problem": problem,
                        }
                    )
                del workload, graphs
            torch.cuda.empty_cache()
    summary = {**summarise(rows), "cases_left_out_for_time": skipped, "seconds": elapsed()}
    path = write_results(
        "gdn_dispatch",
        rows=rows,
        summary=summary,
        seed=SEED,
        where=where,
        packages=("torch", "triton"),
        out=options.out,
    )
    show(rows)
    print(f"cases won: {summary['cases_won']}, failed checks: {summary['failed_checks']}")
    print(f"wrote {path}, t={elapsed():.0f}s, {skipped} cases left out for time")
    if summary["failed_checks"]:
        sys.exit(5)


def main() -> None:
    # Our kernels are imported when they are needed, from the folder above.
    sys.path.append(str(Path(__file__).resolve().parent.parent))
    options = parse_options()
    if options.write_table:
        write_table(options)
    else:
        measure_all(options)


if __name__ == "__main__":
    main()
