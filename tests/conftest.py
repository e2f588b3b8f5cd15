"""Skips what this machine cannot run, and makes policies of hand-made tables."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import pytest

if TYPE_CHECKING:
    from hybridspec.policy import Policy

sys.path.insert(0, str(Path(__file__).parent))

# Triton reads this once, when it is first imported (transformers does that too): without a GPU its
# kernels run in the interpreter.
if not any(Path("/dev").glob("nvidia[0-9]*")):
    os.environ.setdefault("TRITON_INTERPRET", "1")

# What a shell starts in the background ignores Ctrl-C, and so would every command that tests start
# and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_runtest_setup() -> None:
    """Makes Triton's interpreter faster as soon as it is imported."""
    from interpreter_kit import remember_builtins

    remember_builtins()


def pytest_runtest_teardown() -> None:
    """Gives torch the threads back that the run asks for.

    Commands that tests run in this process set their own. Two, where two processes test on two
    cores, make everything after them wait for each other: a training of 10 s took 104.
    """
    torch, wanted = sys.modules.get("torch"), os.environ.get("OMP_NUM_THREADS")
    if torch is not None and wanted is not None and torch.get_num_threads() != int(wanted):
        torch.set_num_threads(int(wanted))


@pytest.fixture(scope="session")
def make_policy() -> Callable[..., Policy]:
    """A policy whose hazards are the top-1 probabilities and whose costs are a line in L.

    `first_mean` and `slope` [16] make a routing table; without them there is no correction.
    """
    from hybridspec.artifacts.tables import (
        BLOCK_SIZE,
        NUM_DRAFTS,
        HazardTable,
        RoutingTable,
        StepCostTable,
        ThroughputTable,
    )
    from hybridspec.policy import Policy

    def make(
        *,
        plain_us: float = 1000.0,
        drafted_us: float = 1200.0,
        row_us: float = 100.0,
        lam: float = 1.5e-3,
        expert_us: float = 1.0,
        first_mean: Sequence[float] | None = None,
        slope: Sequence[float] | None = None,
        correction: Literal["select", "paper", "off"] = "select",
        fixed_length: int = 8,
    ) -> Policy:
        grid = np.ones(1, dtype=np.int64)
        latency = drafted_us + row_us * np.arange(BLOCK_SIZE + 1, dtype=np.float64)
        latency[0] = plain_us
        latency = latency.reshape(1, 1, -1)
        routing = None
        if first_mean is not None and slope is not None:
            means = np.asarray(first_mean, dtype=np.float64)
            routing = RoutingTable(1, means, means, np.asarray(slope, dtype=np.float64))
        knots = np.linspace(0.0, 1.0, 17)
        return Policy(
            # log p - log(1 - p) is the logit of p, so the logistic gives p back.
            HazardTable(
                "raw", np.array([1.0, 1.0, 0.0, 0.0, 0.0]), np.zeros(NUM_DRAFTS), knots, knots
            ),
            StepCostTable(
                grid, grid, latency, latency, latency, np.full((1, 1), 200.0), expert_us, 1.0
            ),
            ThroughputTable(grid, np.array([lam]), np.array([fixed_length])),
            routing,
            correction=correction,
        )

    return make
