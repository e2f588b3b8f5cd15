"""GDN verify and commit of 30 layers: SGLang's kernels against ours, checked first, timed second.

Every method is compared with float64, then captured in a CUDA graph of several rounds, each on
other slots and inputs, so that the state comes from memory; replays of all methods take turns. Byte
floors use the copy bandwidth of the same run. Last comes the cost inside a pass of 40 layers.

    python benchmarks/gdn_kernels.py [--quick] [--tokens 4,8,16] [--try block-pdl:warps=2]
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import sys
import time
import traceback
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from gdn import floors, report
from gdn.baselines import baselines
from gdn.gate import GATES_CHECKED, check, expectations
from gdn.method import Method, Round
from gdn.ours import Ours, ours, parse_variant
from gdn.workload import Case, Shape, make_workload
from results_file import machine, write_results

TOKENS = (1, 2, 4, 6, 8, 12, 16)
# Slot sets that a graph rotates through: 63 MB of fp32 state a request and set, past the L2.
SETS = {1: 6, 4: 4}
IN_MODEL_TOKENS = (4, 8, 16)
# Which method stands for us in the summary: the first that runs.
OURS = ("dispatch-pdl", "dispatch", "block-pdl", "block")
IN_MODEL = ("D16", "D23", "block", "dispatch", "dispatch-pdl")
SEED = 0


class Stopped(Exception):
    """The run was asked to end."""


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="folder for the result file")
    parser.add_argument("--quick", action="store_true", help="half the repeats")
    parser.add_argument("--repeats", type=int, default=20, help="replays a graph")
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("--batches", default="1,4")
    parser.add_argument("--state", default="float32", help="float32, bfloat16 or both")
    parser.add_argument("--methods", help="only these, comma-separated")
    parser.add_argument(
        "--try",
        dest="tries",
        action="append",
        default=[],
        metavar="FORM[-pdl][:KEY=VALUE,...][/KEY=VALUE,...]",
        help="one more variant of ours; the commit's arguments follow the slash",
    )
    parser.add_argument(
        "--variants", action="append", default=[], metavar="MODULE:FUNCTION", help="more methods"
    )
    parser.add_argument("--ours", help="method that stands for us in the summary")
    parser.add_argument("--no-model", action="store_true", help="leave the pass of 40 layers out")
    parser.add_argument("--no-compile-pool", action="store_true", help="compile in this process")
    parser.add_argument("--dry-run", action="store_true", help="check small shapes on the host")
    return parser.parse_args()


def choose_methods(options: argparse.Namespace) -> list[Method]:
    methods = [*baselines(), *ours(), *map(parse_variant, options.tries)]
    for text in options.variants:
        module, _, function = text.partition(":")
        methods += getattr(importlib.import_module(module), function)()
    if options.methods:
        wanted = options.methods.split(",")
        methods = [m for m in methods if m.name in wanted or m.name in options.tries]
    usable = []
    for method in methods:
        reason = method.missing()
        if reason:
            print(f"{method.name}: not run: {reason}")
        else:
            usable.append(method)
    return usable


def check_row(method: Method, case: Case) -> dict[str, Any]:
    """What identifies a row; the check fills in the errors."""
    return {
        "kind": "check",
        "method": method.name,
        "description": method.description,
        "ours": isinstance(method, Ours),
        "batch": case.batch,
        "tokens": case.tokens,
        "state_dtype": str(case.state_dtype).removeprefix("torch."),
        "gates": case.gates,
        "output_error": None,
        "state_error": None,
        "problem": "",
    }


def checked(
    methods: list[Method], case: Case, device: torch.device, broken: dict
) -> tuple[Any, dict[str, Round], list[dict[str, Any]]]:
    """Workload, prepared rounds and one row a method."""
    workload = make_workload(case, device, SEED + case.tokens)
    expected = expectations(workload)
    rounds: dict[str, Round] = {}
    rows = []
    for method in (m for m in methods if m.supports(case)):
        row = check_row(method, case)
        rows.append(row)
        if (method.name, case) in broken:
            row["problem"] = broken[method.name, case]
            continue
        try:
            round_ = method.prepare(workload)
            errors = check(round_, expected)
        except Exception as error:
            if "CUDA" in str(error):
                raise
            text = str(error).strip().partition("\n")[0]
            row["problem"] = f"{type(error).__name__}: {text}"
        else:
            rounds[method.name] = round_
            row.update(output_error=errors.output, state_error=errors.state, problem=errors.problem)
        if row["problem"]:
            print(f"  {method.name} b{case.batch} T={case.tokens} {case.gates}: {row['problem']}")
    workload.restore()
    return workload, rounds, rows


def dry_run(options: argparse.Namespace) -> None:
    """Check every method on the host in Triton's interpreter, in small shapes."""
    device = torch.device("cpu")
    shape = Shape(layers=2, key_heads=2, value_heads=4, key_dim=64, value_dim=64)
    failures = 0
    # The interpreter knows no dependent launch.
    methods = [
        method
        for method in choose_methods(options)
        if not (isinstance(method, Ours) and method.dependent_launch)
    ]
    quick = ((1, 4), (3, 4))
    for batch, tokens in quick if options.quick else (*quick, (1, 1), (3, 5), (2, 8), (2, 16)):
        case = Case(shape, batch, tokens, sets=2)
        # SGLang's scatter refuses tensors of the host.
        with mock.patch.object(torch.Tensor, "is_cuda", True):
            _, _, rows = checked(methods, case, device, {})
        failures += sum(bool(row["problem"]) for row in rows)
        for row in rows:
            print(
                f"batch {batch} T={tokens:<2} {row['method']:<16} output {row['output_error']} "
                f"state {row['state_error']} {row['problem'] or 'ok'}"
            )
    raise SystemExit(1 if failures else 0)


def time_case(
    case: Case,
    rounds: dict[str, Round],
    rows: list[dict[str, Any]],
    repeats: int,
    bytes_per_s: float,
) -> None:
    """Fill the rows of one case with times of a round, of verifying only, of committing only."""
    from gdn.timing import Graph, measure, summarise

    graphs: dict[str, Graph] = {}
    for name, round_ in rounds.items():
        round_.begin_timing()
        sets = range(case.sets)

        def whole(round_: Round = round_, sets: range = sets) -> None:
            for index in sets:
                round_.verify(index)
                round_.commit(index)

        def verify(round_: Round = round_, sets: range = sets) -> None:
            for index in sets:
                round_.verify(index)

        def commit(round_: Round = round_, sets: range = sets) -> None:
            for index in sets:
                round_.commit(index)

        for part, work in (("round", whole), ("verify", verify), ("commit", commit)):
            graphs[f"{name}|{part}"] = Graph(work, rounds=len(sets))
    samples = measure(graphs, repeats)
    for row in rows:
        size = case.state_dtype.itemsize
        moved = {
            form: floors.round_bytes(case.shape, case.batch, case.tokens, form, size)
            for form in ("factors", "states")
        }
        row.update(
            kind="round",
            round_us=None,
            launches_per_round=None,
            floor_us=floors.microseconds(moved["factors"], bytes_per_s),
            floor_of_kept_states_us=floors.microseconds(moved["states"], bytes_per_s),
        )
        if row["method"] not in rounds:
            continue
        for part in ("round", "verify", "commit"):
            latency = summarise(samples[f"{row['method']}|{part}"])
            row[f"{part}_us"] = latency.median_us
            row[f"{part}_p10_us"], row[f"{part}_p90_us"] = latency.p10_us, latency.p90_us
        row["over_floor"] = row["round_us"] / row["floor_us"]
        nodes = graphs[f"{row['method']}|round"].nodes
        row["launches_per_round"] = None if nodes is None else nodes // case.sets


def save(rows: list, summary: dict, where: dict, out: Path | None) -> Path:
    """Result file; a bare one where packages do not tell their version, so that no run is lost."""
    try:
        return write_results(
            "gdn_kernels",
            rows=rows,
            summary=summary,
            seed=SEED,
            where=where,
            packages=("torch", "triton"),
            out=out,
        )
    except (PackageNotFoundError, OSError) as error:
        print(f"result file without versions and commit: {error}")
        path = (out or Path()) / "gdn_kernels.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {"machine": where, "seed": SEED, "rows": rows, "summary": summary}
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        return path


def main() -> None:
    # Our kernels are imported when they are needed, from the folder above.
    sys.path.append(str(Path(__file__).resolve().parent.parent))
    options = parse_options()
    if options.dry_run:
        dry_run(options)
    if not torch.cuda.is_available():
        print("gdn_kernels.py needs a CUDA device; --dry-run checks small shapes without one")
        raise SystemExit(4)
    from gdn.model import Traffic, in_model_cost
    from gdn.precompile import precompile
    from gdn.timing import copy_bandwidth, empty_launches

    began, where, device = time.monotonic(), machine(), torch.device("cuda", 0)

    def elapsed() -> str:
        return f"t={time.monotonic() - began:.0f}s"

    where["gpu"] = torch.cuda.get_device_name(device)
    methods = choose_methods(options)
    names = [method.name for method in methods]
    chosen = options.ours or next((name for name in OURS if name in names), OURS[0])
    repeats = max(5, options.repeats // 2) if options.quick else options.repeats
    dtypes = {"both": ("float32", "bfloat16")}.get(options.state, (options.state,))
    cases = [
        Case(Shape(), batch, tokens, SETS.get(batch, 4), getattr(torch, dtype))
        for dtype in dtypes
        for batch in map(int, options.batches.split(","))
        for tokens in map(int, options.tokens.split(","))
    ]
    # What the summary needs comes first: a run that is cut short still answers it.
    cases.sort(key=lambda case: case.tokens not in IN_MODEL_TOKENS)
    broken: dict = {}
    if not options.no_compile_pool:
        tasks = [(m, c) for c in cases for m in methods if m.supports(c)]
        tasks.sort(key=lambda task: (task[0].name != "RPL", -task[1].tokens))
        cores = len(os.sched_getaffinity(0))
        broken = precompile(tasks, device=device, processes=min(14, max(1, cores - 2)), limit_s=90)
    bandwidth = copy_bandwidth(device)
    empty_us = empty_launches(Shape().layers + 1, repeats)
    print(f"{where['gpu']}, copy {bandwidth / 1e9:.0f} GB/s, {elapsed()}", flush=True)
    print(f"{Shape().layers + 1} launches of nothing in a graph: {empty_us:.0f} us")

    rows: list[dict[str, Any]] = []
    stopped = ""
    # `timeout` sends this: what was measured is kept.
    signal.signal(signal.SIGTERM, lambda *_: (_ for _ in ()).throw(Stopped("ended by SIGTERM")))
    try:
        traffic = None
        for case in cases:
            workload, rounds, found = checked(methods, case, device, broken)
            rows += found
            time_case(case, rounds, found, repeats, bandwidth)
            inside = {name: rounds[name] for name in (*IN_MODEL, chosen) if name in rounds}
            if case.batch == 1 and case.tokens in IN_MODEL_TOKENS and not options.no_model:
                traffic = traffic or Traffic(device, SEED)
                rows += in_model_cost(traffic, workload, inside, repeats)
            del workload, rounds, inside
            torch.cuda.empty_cache()
            print(f"batch {case.batch} T={case.tokens}, {elapsed()}", flush=True)
        for gates in GATES_CHECKED:
            case = Case(Shape(layers=6), 1, max(c.tokens for c in cases), 2, gates=gates)
            rows += checked(methods, case, device, broken)[2]
            print(f"checked gates {gates}, {elapsed()}", flush=True)
    except Exception:
        # A fault of one kernel ends this process's CUDA context; what was measured is kept.
        stopped = traceback.format_exc()
        print(stopped, flush=True)
    summary = report.summarise(rows, chosen)
    summary["stopped"] = stopped.strip().rpartition("\n")[2]
    summary["copy_gb_per_s"] = bandwidth / 1e9
    summary["empty_launches_us"] = empty_us
    path = save(rows, summary, where, options.out)
    for dtype in dtypes:
        for batch in dict.fromkeys(case.batch for case in cases):
            for column in ("round_us", "verify_us", "commit_us"):
                print(f"\n{dtype} state, batch {batch}, {column} of 30 layers, median")
                print(report.round_table(rows, batch, dtype, column))
    print("\n" + report.model_table(rows))
    for key, value in summary.items():
        print(f"{key}: {value:.3g}" if isinstance(value, float) else f"{key}: {value}")
    print(f"wrote {path}, {elapsed()}")
    if stopped or summary["failed_checks"]:
        sys.exit(1 if stopped else 5)


if __name__ == "__main__":
    main()
