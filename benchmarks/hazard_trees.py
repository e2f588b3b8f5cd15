"""Time of the hazard trees inside a CUDA graph, by batch and ensemble size.

    python benchmarks/hazard_trees.py [--quick] [--out DIR] [--seed N]

Two figures each. Cold: a graph of 24 times (read 192 MiB, then the launch) less a graph of the
reads alone, both replayed in turn: what a round pays, whose weights have flushed the L2 in between.
Warm: a chain of 96 launches over 96 sets of buffers. Outputs are poisoned and compared with the
naive twin before anything is measured.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.append(str(Path(__file__).resolve().parent.parent))

from results_file import gpu, machine, write_results

from hybridspec.kernels.hazard_trees import naive
from hybridspec.kernels.hazard_trees.ensemble import FEATURES, DeviceTrees, pack_trees
from hybridspec.kernels.hazard_trees.state import HistoryState
from hybridspec.kernels.hazard_trees.trees import Hazards, hazard_trees

SETS, FLUSHES, FLUSH_BYTES = 96, 24, 192 << 20
BATCHES = (1, 4, 32)
SIZES = ((16, 4), (32, 5), (64, 6))
TEXT_TOKENS, VOCAB = 64, 512


def full_trees(g: np.random.Generator, trees: int, depth: int, device: torch.device) -> DeviceTrees:
    """Complete trees with random comparisons: the longest way for every draft."""
    inner, nodes = 2**depth - 1, 2 ** (depth + 1) - 1
    own = np.arange(nodes)
    left = np.where(own < inner, 2 * own + 1, -1)
    roots = np.arange(trees) * nodes
    leaf = np.tile(own >= inner, trees)
    threshold = g.uniform(0.0, 1.0, trees * nodes).astype(np.float32).astype(np.float64)
    return pack_trees(
        baseline=0.3,
        root_T=roots,
        feature_K=np.where(leaf, -1, g.integers(0, len(FEATURES), trees * nodes)),
        threshold_K=np.where(leaf, 0.0, threshold),
        left_K=np.where(leaf, -1, np.tile(left, trees) + np.repeat(roots, nodes)),
        value_K=np.where(leaf, g.normal(0.0, 0.2, trees * nodes), 0.0),
        depth=depth,
        device=device,
    )


@dataclass
class Inputs:
    """Arguments of one launch, its own state and outputs."""

    tensors: list[torch.Tensor]
    state: HistoryState
    trees: DeviceTrees
    out: Hazards

    def launch(self) -> None:
        hazard_trees(*self.tensors, self.state, self.trees, out=self.out)  # type: ignore[call-arg]

    def poison(self) -> None:
        self.out.hazards_BD.fill_(float("nan"))
        self.out.features_BLF.fill_(float("nan"))


def make_inputs(
    g: np.random.Generator, batch: int, trees: DeviceTrees, device: torch.device
) -> Inputs:
    """Requests in the middle of a text of 64 tokens whose last round emitted 5."""

    def floats(values: np.ndarray) -> torch.Tensor:
        return torch.as_tensor(values, dtype=torch.float32, device=device)

    def ints(values: Any) -> torch.Tensor:
        return torch.as_tensor(np.asarray(values), dtype=torch.int32, device=device)

    host = HistoryState.allocate(batch, "cpu")
    for slot in range(batch):
        text = g.integers(0, VOCAB, TEXT_TOKENS).tolist()
        naive.observe(host, slot, text, accepted=0, length=0)
    p1 = g.beta(2.0, 0.7, (batch, 15))
    emitted = np.full((batch, 16), -1)
    emitted[:, :5] = g.integers(0, VOCAB, (batch, 5))
    tensors = [
        floats(p1),
        floats((1.0 - p1) * g.random((batch, 15))),
        floats(g.gamma(1.0, 1.0, (batch, 15))),
        torch.as_tensor(g.integers(0, VOCAB, (batch, 15)), device=device),
        torch.as_tensor(emitted, device=device),
        ints(np.full(batch, 5)),
        ints(np.full(batch, 9)),
        ints(g.permutation(batch)),
    ]
    state = HistoryState(*(tensor.to(device) for tensor in vars(host).values()))
    return Inputs(tensors, state, trees, Hazards.allocate(batch, device))


def check(inputs: Inputs) -> float:
    """Largest difference of hazards from the naive twin; moves the state by one round."""
    host = HistoryState(*(tensor.cpu().clone() for tensor in vars(inputs.state).values()))
    trees = DeviceTrees(
        inputs.trees.words_K.cpu(),
        inputs.trees.values_K.cpu(),
        inputs.trees.roots_T.cpu(),
        inputs.trees.depth,
    )
    p1, p2, entropy, drafts, emitted, counts, lengths, slots = (t.cpu() for t in inputs.tensors)
    inputs.poison()
    inputs.launch()
    torch.cuda.synchronize()
    worst = 0.0
    for row, slot in enumerate(slots.tolist()):
        count = int(counts[row])
        tokens = emitted[row, :count].tolist()
        naive.observe(host, slot, tokens, accepted=count - 1, length=int(lengths[row]))
        features = naive.features(host, slot, p1[row], p2[row], entropy[row], drafts[row].tolist())
        hazards = naive.walk(trees, features)
        worst = max(worst, float((inputs.out.hazards_BD[row].cpu() - hazards).abs().max()))
        if not torch.equal(inputs.out.features_BLF[row, :15].cpu(), features):
            raise SystemExit(f"error: features of request {row} differ from the naive twin")
    return worst


def captured(work: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """A graph of `work`, warmed up."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        work()
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        work()
    return graph


def replay_us(graph: torch.cuda.CUDAGraph) -> float:
    """One replay, us."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) * 1e3


def measure_us(sets: Sequence[Inputs], repeats: int) -> dict[str, float]:
    """Cold and warm time of a launch, medians with the 10th and 90th percentile of the cold one."""
    flush = torch.randn(FLUSH_BYTES // 4, device=sets[0].out.hazards_BD.device)
    sink = torch.empty((), device=flush.device)

    def reads() -> None:
        for _ in range(FLUSHES):
            torch.sum(flush, dim=0, out=sink)

    def cold() -> None:
        for index in range(FLUSHES):
            torch.sum(flush, dim=0, out=sink)
            sets[index % len(sets)].launch()

    def warm() -> None:
        for inputs in sets:
            inputs.launch()

    graphs = [captured(work) for work in (reads, cold, warm)]
    for inputs in sets:
        inputs.poison()
    times = np.array([[replay_us(graph) for graph in graphs] for _ in range(repeats)])
    if not all(bool(torch.isfinite(inputs.out.hazards_BD).all()) for inputs in sets):
        raise SystemExit("error: a launch left a poisoned buffer")
    differences = (times[:, 1] - times[:, 0]) / FLUSHES
    return {
        "cold_us": float(np.median(differences)),
        "cold_p10_us": float(np.quantile(differences, 0.1)),
        "cold_p90_us": float(np.quantile(differences, 0.9)),
        "warm_us": statistics.median((times[:, 2] / len(sets)).tolist()),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer repeats, batches and sizes")
    parser.add_argument("--out", type=Path, help="folder of hazard_trees.json")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("error: no CUDA device; this times a GPU kernel: run it on a GPU", file=sys.stderr)
        return 4
    where = {**machine(), **gpu()}
    device = torch.device("cuda")
    g = np.random.default_rng(options.seed)
    rows: list[dict[str, Any]] = []
    for trees, depth in SIZES[1:2] if options.quick else SIZES:
        ensemble = full_trees(g, trees, depth, device)
        for batch in BATCHES[:1] if options.quick else BATCHES:
            sets = [make_inputs(g, batch, ensemble, device) for _ in range(SETS)]
            worst = check(sets[0])
            found = measure_us(sets, 15 if options.quick else 60)
            rows.append(
                {
                    "trees": trees,
                    "depth": depth,
                    "batch_size": batch,
                    "hazard_error": worst,
                    **found,
                }
            )
            print(
                f"{trees:3d} x {depth}, batch {batch:2d}: cold {found['cold_us']:.2f} us, "
                f"warm {found['warm_us']:.2f} us, error {worst:.0e}",
                flush=True,
            )
    by_size = {(row["trees"], row["depth"], row["batch_size"]): row for row in rows}
    summary = {
        "cold_us_32x5_batch1": by_size[32, 5, 1]["cold_us"],
        "warm_us_32x5_batch1": by_size[32, 5, 1]["warm_us"],
        "largest_hazard_error": max(row["hazard_error"] for row in rows),
    }
    path = write_results(
        "hazard_trees",
        rows=rows,
        summary=summary,
        seed=options.seed,
        where=where,
        packages=("torch", "triton", "numpy"),
        out=options.out,
    )
    print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
