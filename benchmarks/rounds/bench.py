"""Weights, findings so far and the clock of one benchmark run."""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from rounds.random_pair import (
    FULL,
    SMALL,
    Random,
    drafter_config,
    drafter_tensors,
    routes_with_reuse,
    target_config,
    target_tensors,
)
from rounds.subject import MAX_ROWS
from rounds.timing import Deadline, Latency

from hybridspec.reference.gpu.weights import (
    DrafterWeights,
    TargetWeights,
    load_drafter,
    load_target,
)

SEED = 0


class Bench:
    """Weights, findings so far and the clock."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.shape = SMALL if options.small else FULL
        self.deadline = Deadline(options.limit)
        self.repeats = 5 if options.quick else 11
        self.rows: list[dict[str, Any]] = []
        self.summary: dict[str, Any] = {}
        self.failed: list[str] = []
        self.device = torch.device("cuda")

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Run a stage; its failure is printed and kept, and the next one runs."""
        self.deadline.say(name)
        try:
            yield
        except Exception as error:
            self.failed.append(f"{name}: {type(error).__name__}: {error}".splitlines()[0][:300])
            print(f"FAILED {name}", flush=True)
            traceback.print_exc(file=sys.stdout)

    def add(self, kind: str, found: Latency, **facts: Any) -> float:
        """Keep one measurement; returns its median."""
        self.rows.append({"kind": kind, **facts, **found.row()})
        return found.median_us

    def routes(self, reuse: float, batch: int = 1) -> torch.Tensor:
        config = target_config(self.shape)
        return routes_with_reuse(config, batch=batch, rows=MAX_ROWS, reuse=reuse, seed=SEED)


def load(bench: Bench) -> tuple[TargetWeights, DrafterWeights]:
    """Random weights straight onto the card."""
    random_weights = Random(bench.device, torch.bfloat16, SEED)
    target, drafter = target_config(bench.shape), drafter_config(bench.shape)
    began = bench.deadline.elapsed_s
    loaded = (
        load_target(
            target,
            target_tensors(target, random_weights),
            dtype=torch.bfloat16,
            device=bench.device,
        ),
        load_drafter(
            drafter,
            drafter_tensors(drafter, random_weights),
            dtype=torch.bfloat16,
            device=bench.device,
        ),
    )
    torch.cuda.synchronize()
    bench.summary["load_s"] = round(bench.deadline.elapsed_s - began, 1)
    bench.summary["weights_gib"] = round(loaded[0].num_bytes / 2**30, 2)
    bench.deadline.say(f"{bench.summary['weights_gib']} GiB of target weights")
    return loaded
