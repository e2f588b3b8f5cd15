"""Random tables and signals for the policy, and its rules once more in plain numpy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from hybridspec.artifacts.tables import (
    BLOCK_SIZE,
    NUM_DRAFTS,
    HazardTable,
    RoutingTable,
    StepCostTable,
    ThroughputTable,
)
from hybridspec.policy import Policy, Selection

TIE = 1e-9


@dataclass
class Signals:
    """Draft signals [B, 15] in fp32 and the position of each anchor."""

    p1: torch.Tensor
    p2: torch.Tensor
    entropy: torch.Tensor
    contexts: list[int]

    def select(
        self, policy: Policy, lam: float, caps: Sequence[int] | None = None, batch: int = 1
    ) -> Selection:
        count = len(self.contexts)
        return policy.select(
            self.p1,
            self.p2,
            self.entropy,
            self.contexts,
            [lam] * count,
            caps or [BLOCK_SIZE] * count,
            batch,
        )


def random_signals(seed: int, batch: int) -> Signals:
    g = np.random.default_rng(seed)
    p1 = g.beta(2.0, 0.7, (batch, NUM_DRAFTS))
    p1[g.random(p1.shape) < 0.1] = 1.0
    p1[g.random(p1.shape) < 0.05] = 0.0
    p2 = (1.0 - p1) * g.random(p1.shape)
    entropy = g.gamma(1.0, 1.0, p1.shape)
    single = [torch.tensor(x, dtype=torch.float32) for x in (p1, p2, entropy)]
    return Signals(single[0], single[1], single[2], g.integers(1, 4000, batch).tolist())


def signals_of(p1: Sequence[float], context: int = 100) -> Signals:
    row = torch.tensor([list(p1)], dtype=torch.float32)
    return Signals(row, torch.zeros_like(row), torch.zeros_like(row), [context])


def random_policy(seed: int, correction: Literal["select", "paper", "off"] = "select") -> Policy:
    g = np.random.default_rng(seed)
    knots = int(g.integers(2, 40))
    hazard = HazardTable(
        "random",
        g.normal(0, 0.5, 5),
        g.normal(0, 0.5, NUM_DRAFTS),
        np.sort(g.choice(1001, knots, replace=False)) / 1000.0,
        np.sort(g.random(knots)),
    )
    shape = (2, 3, BLOCK_SIZE + 1)
    latency = 1000.0 + np.cumsum(g.random(shape) * 150.0, axis=-1)
    latency[0, 0, 5:9] = latency[0, 0, 5:6]  # A graph tier: some lengths cost the same.
    cost = StepCostTable(
        np.array([1, 4]),
        np.array([64, 512, 2048]),
        latency,
        latency,
        latency,
        np.full(shape[:2], 200.0),
        float(g.random() * 3),
        1.0,
    )
    routing = RoutingTable(
        4,
        np.sort(g.random(BLOCK_SIZE) * 20),
        np.sort(g.random(BLOCK_SIZE) * 80),
        g.normal(3, 1, BLOCK_SIZE),
    )
    throughput = ThroughputTable(np.array([1, 4]), np.array([1.5e-3, 1.1e-3]), g.integers(0, 17, 2))
    return Policy(hazard, cost, throughput, routing, correction=correction)


def oracle_latency(policy: Policy, batch: int, context: int) -> np.ndarray:
    """float64 [17] by plain interpolation at the centre of the context's bucket."""
    cost = policy.cost
    row = next((i for i, b in enumerate(cost.batch_sizes) if b >= batch), -1)
    centre = context // 64 * 64 + 32
    return np.array(
        [
            np.interp(centre, cost.context_tokens, cost.latency_us[row, :, length])
            for length in range(BLOCK_SIZE + 1)
        ]
    )


def oracle_expected(hazards: np.ndarray) -> np.ndarray:
    """E(L) for L = 1..16 by its definition: the sum of the survivals before L."""
    return np.array(
        [sum(np.prod(hazards[:k]) for k in range(length)) for length in range(1, BLOCK_SIZE + 1)]
    )


def shortest_best(score: np.ndarray) -> int:
    return int(np.flatnonzero(score >= score.max() - TIE)[0])
