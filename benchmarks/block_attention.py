"""Attention of blocks of 16 rows against SGLang's kernels: checked first, timed second.

A target's and a drafter's full-attention layer over a paged pool. CUDA graphs of many calls, each
with other requests and slots, so that keys and values come from memory where `calls` allows it;
replays take turns. SGLang's kernels get block rows that are contiguous and indices that lie ready;
the engine makes both, in launches that are not timed here. Its split kernel runs on AMD GPUs only
in the engine and takes no block that sees both ways.

    python benchmarks/block_attention.py [--quick] [--sweep] [--limit 45] [--out DIR]
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from attention.workload import ROWS, SEED, SHAPES, Shape, Workload, sglang_kernels
from results_file import gpu, machine, write_results

CONTEXTS = (64, 256, 640, 1024, 4096, 16384)
BATCHES = (1, 4, 8)
# Up to here one request, and here every batch, before anything else: a run may be cut short.
FIRST_CONTEXT = 1024
# bf16 weights and outputs over random values of size one.
TOLERANCE = 2e-2
Work = Callable[[int], None]


def our_work(
    w: Workload, length: int | None, *, dependent: bool = True, tiling: Any = None
) -> Work:
    """One call of ours; `length` None: without lengths on the device, as a drafter."""
    from hybridspec.kernels.block_attention.attention import Scratch, attend

    lengths_B = None if length is None else w.lengths(length)
    scratch = Scratch.allocate(w.batch, ROWS, w.shape.heads, w.shape.dim, w.device)

    def run(n: int) -> None:
        attend(
            w.q_NRHD[n],
            w.keys_SGD,
            w.values_SGD,
            w.table_XP,
            w.requests_NB[n],
            w.starts_B,
            scratch,
            w.out_NRHD[n],
            scale=w.scale,
            causal=w.shape.causal,
            lengths_B=lengths_B,
            tiling=tiling,
            dependent_launch=dependent,
        )

    return run


def sglang_work(w: Workload, kernel: Any, *, split: bool) -> Work:
    """One call of SGLang's extend or split kernel."""

    def run(n: int) -> None:
        done = kernel(
            w.q_NRHD[n],
            w.k_NRGD[n],
            w.v_NRGD[n],
            w.out_NRHD[n],
            w.keys_SGD,
            w.values_SGD,
            w.qo_indptr,
            w.kv_indptr,
            w.indices_NK[n],
            None,
            w.shape.causal,
            w.mask_indptr,
            ROWS,
            1.0,
            1.0,
            w.scale,
        )
        if split and not done:
            raise RuntimeError("verify_splitkv_fwd does not take these shapes")

    return run


def works(w: Workload, kernels: tuple[Any, Any] | None) -> dict[str, Work]:
    """What is timed, by name."""
    found: dict[str, Work] = {}
    if kernels is not None:
        found["sglang extend"] = sglang_work(w, kernels[0], split=False)
        if w.shape.causal:
            found["sglang split"] = sglang_work(w, kernels[1], split=True)
    if w.shape.causal:
        for length in (16, 8, 4):
            found[f"ours length {length}"] = our_work(w, length)
        found["ours length 16, plain launch"] = our_work(w, 16, dependent=False)
    else:
        found["ours"] = our_work(w, None)
    return found


def check(w: Workload, work: Work, length: int) -> float:
    """Largest error of the first call against float64 in the rows that count, zeros in the rest."""
    w.out_NRHD[0].fill_(float("nan"))
    work(0)
    exact = w.exact(0).unflatten(0, (w.batch, ROWS))
    found = w.out_NRHD[0].double().unflatten(0, (w.batch, ROWS))
    exact[:, length:] = 0
    error = (found - exact).abs().max().item()
    return error if error == error else float("inf")


def time_all(w: Workload, found: dict[str, Work], repeats: int) -> dict[str, Any]:
    """Microseconds a call of each, by name."""
    from gdn.timing import Graph, measure, summarise

    graphs = {}
    for name, work in found.items():
        work(0)

        def all_calls(work: Work = work) -> None:
            for n in range(w.calls):
                work(n)

        graphs[name] = Graph(all_calls, rounds=w.calls)
    return {name: summarise(samples) for name, samples in measure(graphs, repeats).items()}


def length_of(name: str) -> int:
    """Rows that a work computes."""
    return int(name.split("length ")[1].split(",")[0]) if "length" in name else ROWS


def sweep(device: torch.device, repeats: int, begun_before: float) -> list[dict[str, Any]]:
    """Other geometries for one request, dependent launches."""
    from hybridspec.kernels.block_attention import attention

    rows: list[dict[str, Any]] = []
    for shape in SHAPES:
        shipped = attention.default_tiling(shape.dim, torch.cuda.get_device_capability(device))
        tilings = [
            shipped,
            *(
                attention.Tiling(m, n, warps, stages)
                for m, n, warps, stages in (
                    ((32, 32, 4, 2), (32, 64, 8, 3), (64, 32, 8, 2), (16, 64, 4, 2))
                    if shape.dim > 128
                    else ((64, 32, 4, 2), (64, 64, 8, 2), (32, 64, 4, 3), (128, 64, 8, 2))
                )
            ),
            dataclasses.replace(shipped, stages=3),
            dataclasses.replace(shipped, combine_warps=2, chunk=32),
            dataclasses.replace(shipped, combine_warps=4),
        ]
        options = [(tiling, attention.PROGRAMS) for tiling in dict.fromkeys(tilings)]
        options += [(shipped, 128), (shipped, 256), (shipped, 1024)]
        for context in (640, 4096, 16384):
            w = Workload(shape, 1, context, device)
            for tiling, programs in options:
                if time.perf_counter() > begun_before:
                    return rows
                with mock.patch.object(attention, "PROGRAMS", programs):
                    names = (4, 16) if shape.causal else (None,)
                    found = {f"length {n}": our_work(w, n, tiling=tiling) for n in names}
                    try:
                        timed = time_all(w, found, repeats)
                    except Exception as error:  # too much shared memory, for one
                        print(f"  {tiling}: {type(error).__name__}")
                        continue
                for name, latency in timed.items():
                    rows.append(
                        {
                            "kind": "sweep",
                            "shape": shape.name,
                            "context": context,
                            "work": name,
                            "programs": programs,
                            **dataclasses.asdict(tiling),
                            "us": latency.median_us,
                        }
                    )
                    print(f"  {latency.median_us:7.2f} us  {list(rows[-1].values())[1:11]}")
    return rows


def urgency(case: tuple[int, int, Shape]) -> int:
    """Place of a case in the order of a run; the longest context comes last."""
    batch, context, _ = case
    if context == FIRST_CONTEXT or (batch == 1 and context < FIRST_CONTEXT):
        return 0
    return 1 if context < max(CONTEXTS) else 2


def main() -> None:
    # Our kernels come from the folder above.
    sys.path.append(str(Path(__file__).resolve().parent.parent))
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="folder for the result file")
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    parser.add_argument("--sweep", action="store_true", help="other geometries of ours, only these")
    parser.add_argument("--limit", type=float, default=45.0, help="seconds for beginning cases")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("block_attention.py needs a CUDA device", file=sys.stderr)
        raise SystemExit(4)
    begun = time.perf_counter()
    where, device = {**machine(), **gpu()}, torch.device("cuda", 0)
    repeats = 5 if options.quick else 15
    rows: list[dict[str, Any]] = []
    summary: dict[str, Any] = {}
    if options.sweep:
        rows = sweep(device, repeats, begun + options.limit)
        name = "block_attention_sweep"
    else:
        name = "block_attention"
        kernels = sglang_kernels()
        if kernels is None:
            print("sglang is not installed: only ours is timed")
        cases = [(b, c, shape) for b in BATCHES for c in CONTEXTS for shape in SHAPES]
        cases.sort(key=urgency)
        left_out = 0
        for batch, context, shape in cases:
            if time.perf_counter() > begun + options.limit:
                left_out += 1
                continue
            rows += run_case(Workload(shape, batch, context, device), kernels, repeats, summary)
            summary["failed_checks"] = sum(row["failed"] for row in rows)
            summary["largest_error"] = max(row["error"] for row in rows)
            # Whoever ends the run keeps the cases that are done.
            keep(name, rows, {**summary, "complete": False}, where, options.out)
        summary["cases_left_out"] = left_out
        summary["complete"] = left_out == 0
    path = keep(name, rows, summary, where, options.out)
    print(f"{time.perf_counter() - begun:.0f} s, wrote {path}")
    if summary.get("failed_checks"):
        sys.exit(5)


def keep(
    name: str,
    rows: list[dict[str, Any]],
    summary: dict[str, Any],
    where: dict[str, Any],
    out: Path | None,
) -> Path:
    """Write the result file as it stands."""
    return write_results(
        name, rows=rows, summary=summary, seed=SEED, where=where,
        packages=("torch", "triton", "sglang"), out=out,
    )  # fmt: skip


def run_case(
    w: Workload, kernels: tuple[Any, Any] | None, repeats: int, summary: dict[str, Any]
) -> list[dict[str, Any]]:
    """Rows of one shape, batch and context."""
    found = works(w, kernels)
    errors = {name: check(w, work, length_of(name)) for name, work in found.items()}
    timed = time_all(w, found, repeats)
    key = f"{w.shape.name}_b{w.batch}_c{w.context}"
    line = []
    for name, latency in timed.items():
        summary[f"{key} {name}_us"] = round(latency.median_us, 2)
        line.append(f"{name} {latency.median_us:.1f}")
    print(f"{key:<22} {w.calls:3} calls: {', '.join(line)}", flush=True)
    return [
        {
            "shape": w.shape.name,
            "batch": w.batch,
            "context": w.context,
            "calls": w.calls,
            "read_bytes_per_replay": w.calls * w.shape.bytes_of(w.batch, w.context),
            "work": name,
            "us": latency.median_us,
            "p10_us": latency.p10_us,
            "p90_us": latency.p90_us,
            "error": errors[name],
            # A bound on ours: SGLang's is its own business.
            "failed": name.startswith("ours") and not errors[name] <= TOLERANCE,
        }
        for name, latency in timed.items()
    ]


if __name__ == "__main__":
    main()
