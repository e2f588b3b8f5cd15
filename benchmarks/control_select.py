"""Time of select, correct and route mask inside a CUDA graph.

    python benchmarks/control_select.py [--quick] [--out DIR]

Two figures each. Cold: a graph of 24 times (read 192 MiB, then the launches) less a graph of the
reads alone, both replayed in turn; that is what a round pays, whose weights have flushed the L2 in
between. Warm: a chain of 96 launches over 96 sets of buffers. Every launch writes poisoned buffers
and is compared with its naive twin before anything is measured.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton
from results_file import machine, write_results

from hybridspec.kernels.route_mask import naive as naive_mask
from hybridspec.kernels.route_mask.route_mask import route_mask
from hybridspec.kernels.select import naive
from hybridspec.kernels.select.correct import correct
from hybridspec.kernels.select.joint import select_jointly
from hybridspec.kernels.select.select import select
from hybridspec.kernels.select.selection import Selection
from hybridspec.kernels.select.tables import DeviceTables, pack_tables

SEED = 20_261_129
NUM_EXPERTS, TOP_K = 256, 8
SETS, FLUSHES, FLUSH_BYTES = 96, 24, 192 << 20
BATCHES = (1, 4, 32)


@triton.jit
def nothing_kernel():
    pass


@dataclass
class Inputs:
    """One set of inputs and buffers of a round with `batch` requests."""

    signals: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    context: torch.Tensor
    caps: torch.Tensor
    batch_size: torch.Tensor
    lam: torch.Tensor
    tables: DeviceTables
    experts: torch.Tensor
    weights: torch.Tensor
    selection: Selection
    final: tuple[torch.Tensor, torch.Tensor]

    @property
    def arguments(self) -> tuple[Any, ...]:
        return (*self.signals, self.context, self.caps, self.batch_size, self.tables)

    def select(self) -> None:
        select(*self.arguments, lam_B=self.lam, out=self.selection)

    def select_jointly(self) -> None:
        select_jointly(*self.arguments, lam_B=self.lam, out=self.selection)

    def correct(self, mask: bool = False) -> None:
        correct(
            self.experts,
            self.selection,
            self.caps,
            self.tables,
            num_experts=NUM_EXPERTS,
            out=self.final,
            mask=("alias", self.weights) if mask else None,
        )

    def mask(self) -> None:
        routes = self.experts.view(-1, TOP_K), self.weights.view(-1, TOP_K)
        route_mask(*routes, self.selection.lengths_B)

    def poison(self) -> None:
        for name in fields(self.selection):
            buffer = getattr(self.selection, name.name)
            buffer.fill_(float("nan") if buffer.is_floating_point() else -777)
        for buffer in self.final:
            buffer.fill_(-777)


def make_inputs(g: np.random.Generator, batch: int, device: torch.device) -> Inputs:
    """Random signals over tables of the size that a bundle has: 33 knots, 6 batches, 8 contexts."""
    sizes, contexts = [1, 2, 4, 8, 16, 32], [128, 512, 1024, 2048, 4096, 8192, 16384, 32768]
    # 3.9 ms for one row and 8.7 ms for sixteen: a 40-layer target in bf16 on H200.
    rows = 3900.0 + 320.0 * np.arange(17)
    latency = rows * (1.0 + 0.2 * np.log2(sizes))[:, None, None]
    latency = latency + 0.01 * np.array(contexts)[:, None] + g.random((6, 8, 17))
    p1 = g.beta(2.0, 0.7, (batch, 15))
    p2, entropy = (1.0 - p1) * g.random((batch, 15)), g.gamma(1.0, 1.0, (batch, 15))
    signals = [torch.as_tensor(x, dtype=torch.float32, device=device) for x in (p1, p2, entropy)]

    def ints(values: object) -> torch.Tensor:
        return torch.as_tensor(np.asarray(values), dtype=torch.int32, device=device)

    tables = pack_tables(
        weights_F=np.array([0.8, 0.6, -0.1, 0.2, 0.02]),
        position_bias_D=g.normal(0.0, 0.3, 15),
        knots_x=np.linspace(0.0, 1.0, 33),
        knots_y=np.sort(g.random(33)),
        batch_sizes=sizes,
        context_tokens=contexts,
        latency_us=latency,
        tokens_per_us=np.full(6, 5e-4),
        best_fixed_length=[8] * 6,
        first_mean_L=np.array([8.0 * row**0.85 for row in range(1, 17)]),
        slope_L=np.full(16, 20.0),
        expert_slope_us=1.57,
        device=device,
    )
    experts = g.integers(0, NUM_EXPERTS, (batch, 16, TOP_K))
    reused = g.random(experts.shape) < 0.3
    experts = np.where(reused, experts[:, :1], experts)
    made = Inputs(
        (signals[0], signals[1], signals[2]),
        ints(g.integers(64, 20_000, batch)),
        ints(np.full(batch, 16)),
        ints([batch]),
        torch.as_tensor(3e-4 + 3e-4 * g.random(batch), device=device),
        tables,
        ints(experts),
        torch.as_tensor(g.random(experts.shape), dtype=torch.float32, device=device),
        Selection.allocate(batch, device),
        (ints(np.zeros(batch)), ints(np.zeros((batch, 16)))),
    )
    made.poison()
    return made


def check(made: Inputs) -> None:
    """Compare select, joint select, correct and both masks with their twins, to the bit."""

    def same(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], name: str) -> None:
        for a, b in zip(found, expected, strict=True):
            if not torch.equal(a, b):
                raise SystemExit(f"{name} differs from its naive twin")

    def columns() -> list[torch.Tensor]:
        return [getattr(made.selection, name.name) for name in fields(made.selection)]

    options = {"lam_B": made.lam}
    made.select_jointly()
    same(columns(), naive.select_jointly(*made.arguments, **options), "select_jointly")
    made.poison()
    made.select()
    same(columns(), naive.select(*made.arguments, **options), "select")
    lengths, _, score, _, price, fallback = columns()
    experts, weights = made.experts.clone(), made.weights.clone()
    twin = naive.correct(
        experts, lengths, score, price, fallback, made.caps, made.tables, num_experts=NUM_EXPERTS
    )
    made.correct()
    same(made.final, twin, "correct")
    made.correct(mask=True)
    same(made.final, twin, "correct with mask")
    flat = experts.view(-1, TOP_K), weights.view(-1, TOP_K)
    masked = naive_mask.route_mask(*flat, twin[0])
    same((made.experts.view(-1, TOP_K), made.weights.view(-1, TOP_K)), masked, "mask")
    made.experts.copy_(experts)
    made.weights.copy_(weights)
    made.mask()
    masked = naive_mask.route_mask(*flat, lengths)
    same((made.experts.view(-1, TOP_K), made.weights.view(-1, TOP_K)), masked, "route_mask")
    made.experts.copy_(experts)
    made.weights.copy_(weights)


def capture(body: Callable[[], None]) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        body()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body()
    return graph


def replay_us(graphs: Mapping[Any, torch.cuda.CUDAGraph], repeats: int) -> dict[Any, list[float]]:
    """Time of each graph, replayed in turn."""
    found: dict[Any, list[float]] = {name: [] for name in graphs}
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for repeat in range(repeats + 2):
        for name, graph in graphs.items():
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            if repeat >= 2:
                found[name].append(start.elapsed_time(end) * 1e3)
    return found


def measure(
    device: torch.device, *, quick: bool, generator: torch.Generator
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Check, then measure.

    Returns:
        One row a launch (or pair of launches) and batch, and the summary of batch 1.
    """
    seed = torch.randint(2**31, (1,), generator=generator, device=generator.device)
    g = np.random.default_rng(int(seed))
    ballast = torch.randint(-9, 9, (FLUSH_BYTES // 4,), dtype=torch.int32, device=device)
    total = torch.empty((), dtype=torch.int64, device=device)
    cold, warm = {}, {}

    def flush() -> None:
        torch.sum(ballast, dim=0, dtype=torch.int64, out=total)

    def flushed(launches: Callable[[int], None]) -> Callable[[], None]:
        def body() -> None:
            for i in range(FLUSHES):
                flush()
                launches(i)

        return body

    def chained(launches: Callable[[int], None]) -> Callable[[], None]:
        def body() -> None:
            for i in range(SETS):
                launches(i)

        return body

    cold["flush", 0] = capture(flushed(lambda i: None))
    cold["nothing", 0] = capture(flushed(lambda i: nothing_kernel[(1,)](num_warps=1)))  # type: ignore[call-arg]
    warm["nothing", 0] = capture(chained(lambda i: nothing_kernel[(1,)](num_warps=1)))  # type: ignore[call-arg]
    for batch in BATCHES:
        sets = [make_inputs(g, batch, device) for _ in range(SETS)]
        check(sets[0])
        for made in sets:
            made.select()  # correct alone and route mask alone need lengths
        for name, launches in ways(sets).items():
            cold[name, batch] = capture(flushed(launches))
            warm[name, batch] = capture(chained(launches))
    repeats = 15 if quick else 60
    cold_us, warm_us = replay_us(cold, repeats), replay_us(warm, repeats)
    base = statistics.median(cold_us["flush", 0])
    rows = []
    for name, batch in warm:
        samples = [(x - base) / FLUSHES for x in cold_us[name, batch]]
        tenth, median, ninetieth = np.percentile(samples, (10, 50, 90))
        rows.append(
            {
                "launches": name,
                "batch": batch,
                "cold_us": round(float(median), 3),
                "cold_p10_us": round(float(tenth), 3),
                "cold_p90_us": round(float(ninetieth), 3),
                "warm_us": round(statistics.median(warm_us[name, batch]) / SETS, 3),
                "repeats": repeats,
            }
        )
    at = {(row["launches"], row["batch"]): row for row in rows}
    pair = at["select + correct", 1]
    summary = {
        "select_correct_us": pair["cold_us"],
        "select_correct_warm_us": pair["warm_us"],
        "select_us": at["select", 1]["cold_us"],
        "correct_us": at["correct", 1]["cold_us"],
        "correct_and_mask_us": at["correct with mask", 1]["cold_us"],
        "route_mask_us": at["route mask", 1]["cold_us"],
        "select_jointly_b4_us": at["select jointly", 4]["cold_us"],
        "select_jointly_b32_us": at["select jointly", 32]["cold_us"],
        "empty_launch_us": at["nothing", 0]["cold_us"],
    }
    return rows, summary


def ways(sets: Sequence[Inputs]) -> dict[str, Callable[[int], None]]:
    """What is measured: the i-th call of each launches on the i-th set."""

    def both(i: int) -> None:
        sets[i].select()
        sets[i].correct()

    return {
        "select": lambda i: sets[i].select(),
        "select jointly": lambda i: sets[i].select_jointly(),
        "correct": lambda i: sets[i].correct(),
        "correct with mask": lambda i: sets[i].correct(mask=True),
        "select + correct": both,
        "route mask": lambda i: sets[i].mask(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    parser.add_argument("--out", type=Path, help="folder for the result file")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("control_select measures GPU kernels and found no CUDA device", file=sys.stderr)
        raise SystemExit(4)
    where = machine() | {"gpu": torch.cuda.get_device_name()}
    generator = torch.Generator().manual_seed(SEED)
    rows, summary = measure(torch.device("cuda"), quick=options.quick, generator=generator)
    path = write_results(
        "control_select",
        rows=rows,
        summary=summary,
        seed=SEED,
        where=where,
        packages=("torch", "triton", "numpy"),
        out=options.out,
    )
    for row in rows:
        print(
            f"{row['launches']:>18}  batch {row['batch']:>2}  cold {row['cold_us']:6.2f} us  "
            f"warm {row['warm_us']:6.2f} us"
        )
    print(f"select + correct, batch 1: {summary['select_correct_us']:.2f} us -> {path}")


if __name__ == "__main__":
    main()
