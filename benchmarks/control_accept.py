"""Greedy and sampled acceptance of 16-row blocks, fused with the cursors, inside CUDA graphs.

Checked against the naive twins first, timed second. Greedy acceptance reads a few hundred bytes
that the launch before it has just written. Sampling reads one row of 248,320 probabilities: cold
(sets past the L2) and warm (one set), as a sampler that has just written the rows leaves them.

    python benchmarks/control_accept.py [--quick] [--out DIR]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).resolve().parent.parent))

from gdn.timing import Graph, empty_launches, summarise
from gdn.timing import measure as time_graphs

from hybridspec.kernels.accept import naive
from hybridspec.kernels.accept.greedy import accept_greedy
from hybridspec.kernels.accept.outcome import BLOCK_SIZE, NUM_DRAFTS, Cursors, Outcome
from hybridspec.kernels.accept.sampled import SamplingWorkspace, accept_sampled

VOCAB = 248320
BATCHES = (1, 4, 16)
GREEDY_ROUNDS = 64
# Rows that one graph draws from: 1 MB each, twice the 60 MiB of L2.
COLD_ROWS = 128
# How often a draft stands; blocks of 16 rows then emit about six tokens.
CHANCE = 0.85


@dataclass
class Blocks:
    """One round's inputs of `batch` requests, and where its results go."""

    drafts_BD: torch.Tensor
    lengths_B: torch.Tensor
    tokens_BT: torch.Tensor
    cursors: Cursors
    out: Outcome

    @classmethod
    def random(cls, batch: int, generator: torch.Generator) -> Blocks:
        """Verify lengths 1..16, drafts that stand with `CHANCE`."""
        device = generator.device

        def integers(high: int, *shape: int) -> torch.Tensor:
            return torch.randint(high, shape, device=device, generator=generator)

        tokens_BT = integers(VOCAB, batch, BLOCK_SIZE)
        wrong = torch.rand(batch, NUM_DRAFTS, device=device, generator=generator) > CHANCE
        return cls(
            torch.where(wrong, (tokens_BT[:, :-1] + 1) % VOCAB, tokens_BT[:, :-1]),
            (integers(BLOCK_SIZE, batch) + 1).int(),
            tokens_BT,
            Cursors(integers(1000, batch).int(), integers(VOCAB, batch)),
            Outcome.empty(batch, device),
        )

    def poison(self) -> None:
        for values in vars(self.out).values():
            values.fill_(-77)

    def require(self, expected: Outcome, moved: Cursors, name: str) -> None:
        for found, wanted in ((self.out, expected), (self.cursors, moved)):
            for key, values in vars(found).items():
                if not torch.equal(values, getattr(wanted, key)):
                    raise SystemExit(f"{name}: {key} differs from the naive twin")

    def cursors_copy(self) -> Cursors:
        return Cursors(self.cursors.sequence_lengths_B.clone(), self.cursors.anchors_B.clone())


def torch_greedy(blocks: Blocks) -> None:
    """The same in PyTorch's own kernels."""
    out, cursors = blocks.out, blocks.cursors
    column = torch.arange(BLOCK_SIZE, device=blocks.lengths_B.device)
    verified = column[:-1] < blocks.lengths_B[:, None] - 1
    agrees = (blocks.drafts_BD == blocks.tokens_BT[:, :-1]) & verified
    accepted = agrees.int().cumprod(-1).sum(-1)
    bonus = blocks.tokens_BT.gather(1, accepted[:, None])
    emitted = torch.where(column < accepted[:, None], blocks.tokens_BT, -1)
    out.emitted_BT.copy_(emitted.scatter_(1, accepted[:, None], bonus))
    out.accepted_B.copy_(accepted)
    out.bonus_B.copy_(bonus[:, 0])
    torch.add(accepted, 1, out=out.commit_rows_B)
    cursors.sequence_lengths_B.add_(out.commit_rows_B)
    cursors.anchors_B.copy_(bonus[:, 0])


def measure_greedy(batch: int, repeats: int, generator: torch.Generator) -> list[dict[str, Any]]:
    """Ours and PyTorch's chain of launches."""
    all_blocks = [Blocks.random(batch, generator) for _ in range(GREEDY_ROUNDS)]

    def ours() -> None:
        for blocks in all_blocks:
            accept_greedy(
                blocks.drafts_BD,
                blocks.lengths_B,
                blocks.tokens_BT,
                cursors=blocks.cursors,
                out=blocks.out,
            )

    def theirs() -> None:
        for blocks in all_blocks:
            torch_greedy(blocks)

    for name, work in (("accept_greedy", ours), ("torch greedy", theirs)):
        before = [blocks.cursors_copy() for blocks in all_blocks]
        for blocks in all_blocks:
            blocks.poison()
            # PyTorch's chain has no notion of an unusable row.
            blocks.out.valid_B.fill_(1)
        work()
        for blocks, moved in zip(all_blocks, before, strict=True):
            expected = naive.accept_greedy(
                blocks.drafts_BD, blocks.lengths_B, blocks.tokens_BT, cursors=moved
            )
            blocks.require(expected, moved, name)
    graphs = {
        "accept_greedy": Graph(ours, rounds=GREEDY_ROUNDS),
        "torch_greedy": Graph(theirs, rounds=GREEDY_ROUNDS),
    }
    return _rows(graphs, repeats, batch=batch)


def measure_sampled(
    batch: int, repeats: int, generator: torch.Generator, *, chunks: tuple[int, ...]
) -> list[dict[str, Any]]:
    """Cold and warm, for each size of chunk."""
    device = generator.device
    all_blocks = [Blocks.random(batch, generator) for _ in range(max(1, COLD_ROWS // batch))]
    everything: list[tuple[Blocks, torch.Tensor, torch.Tensor]] = []
    for blocks in all_blocks:
        x = torch.randn(batch, BLOCK_SIZE, VOCAB, device=device, generator=generator)
        p = x.mul_(3.0).softmax(-1).mul_(1.0 - CHANCE)
        stands = torch.full((batch, NUM_DRAFTS, 1), CHANCE, device=device)
        p[:, :-1].scatter_add_(-1, blocks.drafts_BD[..., None], stands)
        p[:, -1] /= 1.0 - CHANCE
        coins = torch.rand(
            batch, BLOCK_SIZE, device=device, generator=generator, dtype=torch.float64
        )
        everything.append((blocks, p, coins))

    def work_on(
        sets: list[tuple[Blocks, torch.Tensor, torch.Tensor]], chunk: int
    ) -> Callable[[], None]:
        workspace = SamplingWorkspace.create(batch, VOCAB, device, chunk=chunk)

        def work() -> None:
            for blocks, p, coins in sets:
                accept_sampled(
                    blocks.drafts_BD,
                    blocks.lengths_B,
                    p,
                    coins,
                    cursors=blocks.cursors,
                    out=blocks.out,
                    workspace=workspace,
                    chunk=chunk,
                )

        return work

    graphs: dict[str, Graph] = {}
    for chunk in chunks:
        checked = everything[: max(1, 8 // batch)]
        before = [blocks.cursors_copy() for blocks, _, _ in checked]
        for blocks, _, _ in checked:
            blocks.poison()
        work_on(checked, chunk)()
        for (blocks, p, coins), moved in zip(checked, before, strict=True):
            expected = naive.accept_sampled(
                blocks.drafts_BD, blocks.lengths_B, p, coins, cursors=moved
            )
            blocks.require(expected, moved, f"accept_sampled, chunks of {chunk}")
        cold, warm = work_on(everything, chunk), work_on(everything[:1] * 32, chunk)
        graphs[f"accept_sampled|cold|{chunk}"] = Graph(cold, rounds=len(everything))
        graphs[f"accept_sampled|warm|{chunk}"] = Graph(warm, rounds=32)
    return _rows(graphs, repeats, batch=batch)


def _rows(graphs: dict[str, Graph], repeats: int, **common: Any) -> list[dict[str, Any]]:
    rows = []
    for name, values in time_graphs(graphs, repeats).items():
        kernel, cache, chunk = [*name.split("|"), None, None][:3]
        latency = summarise(values)
        nodes = graphs[name].nodes
        rows.append(
            {
                "kernel": kernel,
                **common,
                "cache": cache,
                "chunk": int(chunk) if chunk else None,
                "launches": None if nodes is None else nodes / graphs[name].rounds,
                "latency_us": latency.median_us,
                "p10_us": latency.p10_us,
                "p90_us": latency.p90_us,
            }
        )
    return rows


def measure(
    device: torch.device, *, quick: bool, generator: torch.Generator
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Rows of all forms and the summary's keys.

    Args:
        device: CUDA. generator: on that device.
        quick: fewer repeats, batch 1 and 4, the shipped chunk.

    Returns:
        Rows, and `accept_us` (greedy, batch 1), `accept_sampled_cold_us` and
        `accept_sampled_warm_us` (batch 1, shipped chunk), `accept_empty_launch_us`.
    """
    repeats = 9 if quick else 25
    rows: list[dict[str, Any]] = []
    for batch in BATCHES[:2] if quick else BATCHES:
        rows += measure_greedy(batch, repeats, generator)
        chunks = (2048,) if quick or batch > 1 else (1024, 2048, 4096)
        rows += measure_sampled(batch, repeats, generator, chunks=chunks)
        torch.cuda.empty_cache()

    def latency(kernel: str, cache: str | None = None) -> float:
        return next(
            row["latency_us"]
            for row in rows
            if (row["kernel"], row["batch"], row["cache"]) == (kernel, 1, cache)
            and row["chunk"] in (None, 2048)
        )

    return rows, {
        "accept_us": latency("accept_greedy"),
        "accept_sampled_cold_us": latency("accept_sampled", "cold"),
        "accept_sampled_warm_us": latency("accept_sampled", "warm"),
        "accept_empty_launch_us": empty_launches(8, repeats) / 8,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer repeats and batches")
    parser.add_argument("--out", type=Path, help="folder for the rows as JSON")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("control_accept.py needs a CUDA device")
        raise SystemExit(4)
    device = torch.device("cuda", 0)
    generator = torch.Generator(device).manual_seed(0)
    rows, summary = measure(device, quick=options.quick, generator=generator)
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        content = json.dumps({"rows": rows, "summary": summary}, indent=1)
        (options.out / "control_accept.json").write_text(content + "\n", encoding="utf-8")
    for row in rows:
        print(
            f"{row['kernel']:15} {row['cache'] or '':5} {row['chunk'] or '':5} b{row['batch']:<3} "
            f"{row['latency_us']:8.2f} us"
        )
    print({key: round(value, 3) for key, value in summary.items()})


if __name__ == "__main__":
    main()
