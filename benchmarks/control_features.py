"""Draft features of 248,320-token rows against one pass over the same logits.

Checked against float64 first, timed second: CUDA graphs that rotate through sets of logits well
past the L2, replays of all kernels in turn. The read is a Triton kernel with the same programs, the
same loads and one maximum a program, so what it leaves out is what features cost; `parts` is
the same kernel as features with tickets that never let a program merge.

    python benchmarks/control_features.py [--quick] [--out DIR]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

sys.path.append(str(Path(__file__).resolve().parent.parent))

from gdn.timing import Graph, copy_bandwidth, empty_launches, summarise
from gdn.timing import measure as time_graphs

from hybridspec.kernels.draft_features import naive
from hybridspec.kernels.draft_features.features import draft_features, row_parts
from hybridspec.kernels.draft_features.rows import NUM_FIELDS, DraftFeatures
from hybridspec.kernels.draft_features.shards import merge_shards
from hybridspec.kernels.draft_features.split import TILING, Tiling, Workspace

VOCAB = 248320
DRAFTS = 15
# Logits of one graph, several times the 60 MiB of L2.
ROTATED_BYTES = 240 << 20
RANKS = 4
SHAPES = ((8, 1), (16, 1), (8, 2), (8, 4), (8, 8), (4, 2), (4, 4), (4, 8))
TILINGS = {f"{v}x{w}": Tiling(v, w) for v, w in SHAPES}


@triton.jit
def _read_kernel(
    p_logits,
    p_largest,
    stride_row,
    vocab,
    SPLITS: tl.constexpr,
    VECTORS: tl.constexpr,
    LANES: tl.constexpr,
    W: tl.constexpr,
):
    i_split = tl.program_id(0)
    i_row = tl.program_id(1).to(tl.int64)
    o_vector = tl.arange(0, VECTORS * LANES)
    o_x = i_split * (VECTORS * LANES * W) + o_vector[:, None] * W + tl.arange(0, W)[None, :]
    b_x = tl.load(p_logits + i_row * stride_row + o_x, mask=o_x < vocab, other=-float("inf"))
    b_x = b_x.to(tl.float32).reshape(VECTORS, LANES, W)
    largest = tl.max(tl.max(tl.max(b_x, 2), 0), 0)
    tl.store(p_largest + i_row * SPLITS + i_split, largest)


def read(logits_RV: torch.Tensor, largest: torch.Tensor, tiling: Tiling) -> None:
    """Load all logits once with a tiling, and keep one maximum a program."""
    element_bytes = logits_RV.dtype.itemsize
    splits = tiling.splits(logits_RV.shape[1], element_bytes)
    kernel: Any = _read_kernel
    kernel[(splits, logits_RV.shape[0])](
        logits_RV,
        largest,
        logits_RV.stride(0),
        logits_RV.shape[1],
        SPLITS=splits,
        VECTORS=tiling.vectors,
        LANES=32 * tiling.num_warps,
        W=16 // element_bytes,
        num_warps=tiling.num_warps,
    )


def torch_features(logits_RV: torch.Tensor) -> None:
    """What the reference engine computes, in PyTorch's own kernels."""
    log_p = logits_RV.float().log_softmax(-1)
    log_p.topk(2, -1).values.exp()
    log_p.exp().mul_(log_p).sum(-1).neg_()


class Sets:
    """Sets of draft logits that a graph goes through, one a launch, and where results go."""

    def __init__(
        self, batch: int, dtype: torch.dtype, vocab: int, generator: torch.Generator
    ) -> None:
        self.rows, self.dtype = batch * DRAFTS, dtype
        self.bytes = self.rows * vocab * dtype.itemsize
        count = max(4, -(-ROTATED_BYTES // self.bytes))
        device = generator.device
        # As drafters are: from sure to unsure over the block, a few strong candidates a row.
        scale = torch.linspace(1.5, 3.0, DRAFTS, device=device).repeat(batch)[:, None]
        self.logits: list[torch.Tensor] = []
        for _ in range(count):
            x = torch.randn(self.rows, vocab, device=device, generator=generator) * scale
            places = torch.randint(vocab, (self.rows, 4), device=device, generator=generator)
            lift = 12 * torch.rand(self.rows, 4, device=device, generator=generator)
            self.logits.append(x.scatter_add_(1, places, lift).to(dtype))
        self.outs = [DraftFeatures.empty(self.rows, device) for _ in range(count)]
        self.vocab = vocab

    def features(self, tiling: Tiling, *, merged: bool = True) -> Callable[[], None]:
        workspace = self.workspace(tiling)
        if not merged:
            # No program ever draws the row's last ticket.
            workspace.tickets_R.fill_(1 << 20)

        def work() -> None:
            for logits_RV, out in zip(self.logits, self.outs, strict=True):
                draft_features(logits_RV, out=out, workspace=workspace, tiling=tiling)

        return work

    def workspace(self, tiling: Tiling) -> Workspace:
        device = self.logits[0].device
        return Workspace.create(self.rows, self.vocab, self.dtype, device, tiling=tiling)

    def read(self, tiling: Tiling) -> Callable[[], None]:
        splits = tiling.splits(self.vocab, self.dtype.itemsize)
        largest = torch.empty(self.rows * splits, device=self.logits[0].device)

        def work() -> None:
            for logits_RV in self.logits:
                read(logits_RV, largest, tiling)

        return work

    def copy(self) -> Callable[[], None]:
        """Reads and writes the logits' bytes."""
        target = torch.empty_like(self.logits[0])

        def work() -> None:
            for logits_RV in self.logits:
                target.copy_(logits_RV)

        return work

    def torch(self) -> Callable[[], None]:
        def work() -> None:
            for logits_RV in self.logits:
                torch_features(logits_RV)

        return work

    def poison(self) -> None:
        for out in self.outs:
            out.tokens_R.fill_(-7)
            for values in (out.p1_R, out.p2_R, out.entropy_R):
                values.fill_(float("nan"))

    def check(self) -> dict[str, float]:
        """Largest errors of all sets against float64; raises where a token differs."""
        errors = {"p1": 0.0, "p2": 0.0, "entropy_nats": 0.0}
        for logits_RV, out in zip(self.logits, self.outs, strict=True):
            for start in range(0, self.rows, 60):
                part = slice(start, start + 60)
                expected = naive.draft_features(logits_RV[part].double())
                if not torch.equal(out.tokens_R[part], expected.tokens_R):
                    raise SystemExit("draft features: a token differs from the float64 reference")
                for name, key in (("p1", "p1"), ("p2", "p2"), ("entropy", "entropy_nats")):
                    difference = getattr(out, f"{name}_R")[part] - getattr(expected, f"{name}_R")
                    errors[key] = max(errors[key], float(difference.abs().max()))
        if not max(errors.values()) < 2e-5:
            raise SystemExit(f"draft features: errors {errors} against the float64 reference")
        return errors


def measure_case(
    batch: int,
    dtype: torch.dtype,
    tilings: dict[str, Tiling],
    repeats: int,
    bandwidth: float,
    generator: torch.Generator,
) -> list[dict[str, Any]]:
    """One row a kernel and tiling, checked."""
    sets, graphs, errors = Sets(batch, dtype, VOCAB, generator), {}, {}
    for name, tiling in tilings.items():
        work = sets.features(tiling)
        sets.poison()
        work()
        errors[name] = sets.check()
        graphs[f"features|{name}"] = Graph(work, rounds=len(sets.logits))
        for kernel, work in (
            ("read", sets.read(tiling)),
            ("parts", sets.features(tiling, merged=False)),
        ):
            work()
            graphs[f"{kernel}|{name}"] = Graph(work, rounds=len(sets.logits))
    for name, work in (("copy|", sets.copy()), ("torch|", sets.torch())):
        work()
        graphs[name] = Graph(work, rounds=len(sets.logits))
    sets.poison()
    samples = time_graphs(graphs, repeats)
    for graph in graphs.values():
        graph.replay()
    sets.check()
    rows = []
    for name, values in samples.items():
        kernel, tiling = name.split("|")
        latency = summarise(values)
        rows.append(
            {
                "kernel": kernel,
                "tiling": tiling or None,
                "batch": batch,
                "rows": sets.rows,
                "dtype": str(dtype).removeprefix("torch."),
                "sets": len(sets.logits),
                "latency_us": latency.median_us,
                "p10_us": latency.p10_us,
                "p90_us": latency.p90_us,
                "read_tb_per_s": sets.bytes / latency.median_us / 1e6,
                "byte_floor_us": 1e6 * sets.bytes / bandwidth,
                "errors": errors.get(tiling) if kernel == "features" else None,
            }
        )
    return rows


def measure_shards(repeats: int, generator: torch.Generator) -> list[dict[str, Any]]:
    """A rank's part of the vocabulary, and the merge of all parts, batch 1."""
    width = VOCAB // RANKS
    sets = Sets(1, torch.bfloat16, width, generator)
    workspace = sets.workspace(TILING)
    parts = torch.full((RANKS, DRAFTS, NUM_FIELDS), float("nan"), device=generator.device)
    for rank in range(RANKS):
        row_parts(sets.logits[rank], vocab_offset=rank * width, out=parts[rank])
    merged = merge_shards(parts)
    expected = naive.draft_features(torch.cat(sets.logits[:RANKS], 1).double())
    if not torch.equal(merged.tokens_R, expected.tokens_R):
        raise SystemExit("merged shards: a token differs from the float64 reference")
    out = torch.empty(DRAFTS, NUM_FIELDS, device=generator.device)

    def shard_work() -> None:
        for logits_RV in sets.logits:
            row_parts(logits_RV, out=out, workspace=workspace)

    def merge_work() -> None:
        for _ in sets.logits:
            merge_shards(parts, out=merged)

    shard_work()
    rounds = len(sets.logits)
    graphs = {
        "row_parts": Graph(shard_work, rounds=rounds),
        "merge_shards": Graph(merge_work, rounds=rounds),
    }
    return [
        {
            "kernel": kernel,
            "batch": 1,
            "dtype": "bfloat16",
            "ranks": RANKS,
            "latency_us": summarise(values).median_us,
        }
        for kernel, values in time_graphs(graphs, repeats).items()
    ]


def measure(
    device: torch.device, *, quick: bool, generator: torch.Generator
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Rows of all kernels and the summary's keys.

    Args:
        device: CUDA. generator: on that device.
        quick: fewer repeats and only the shipped tiling.

    Returns:
        Rows, and `features_over_read` (shipped tiling over the read with the same tiling, batch 1,
        bf16), `features_over_best_read` (over the fastest read of any tiling), `features_us`,
        `features_read_us`.
    """
    repeats = 9 if quick else 25
    shipped = {name: tiling for name, tiling in TILINGS.items() if tiling == TILING}
    bandwidth = copy_bandwidth(device)
    rows = measure_case(
        1, torch.bfloat16, shipped if quick else TILINGS, repeats, bandwidth, generator
    )

    def latency(kernel: str, tiling: str) -> float:
        found = [r for r in rows if (r["kernel"], r["tiling"]) == (kernel, tiling)]
        return found[0]["latency_us"]

    own = next(name for name, tiling in TILINGS.items() if tiling == TILING)
    best_read_us = min(r["latency_us"] for r in rows if r["kernel"] == "read")
    summary = {
        "features_us": latency("features", own),
        "features_read_us": latency("read", own),
        "features_over_best_read": latency("features", own) / best_read_us,
        "empty_launch_us": empty_launches(8, repeats) / 8,
    }
    summary["features_over_read"] = summary["features_us"] / summary["features_read_us"]
    rows += measure_case(1, torch.float32, shipped, repeats, bandwidth, generator)
    rows += measure_case(4, torch.bfloat16, shipped, repeats, bandwidth, generator)
    rows += measure_shards(repeats, generator)
    return rows, summary


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer repeats and tilings")
    parser.add_argument("--out", type=Path, help="folder for the rows as JSON")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("control_features.py needs a CUDA device")
        raise SystemExit(4)
    device = torch.device("cuda", 0)
    generator = torch.Generator(device).manual_seed(0)
    rows, summary = measure(device, quick=options.quick, generator=generator)
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        content = json.dumps({"rows": rows, "summary": summary}, indent=1)
        (options.out / "control_features.json").write_text(content + "\n", encoding="utf-8")
    for row in rows:
        print(
            f"{row['kernel']:13} {row.get('tiling') or '':9} b{row['batch']} {row['dtype']:9} "
            f"{row['latency_us']:8.2f} us {row.get('read_tb_per_s', 0.0):6.2f} TB/s"
        )
    print({key: round(value, 3) for key, value in summary.items()})


if __name__ == "__main__":
    main()
