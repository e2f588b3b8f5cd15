"""Random packed tables, signals and poisoned buffers for the selection kernels."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import torch

from hybridspec.kernels.select.selection import Selection
from hybridspec.kernels.select.tables import BLOCK_SIZE, DeviceTables, pack_tables
from hybridspec.policy import Policy

Signals = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def random_tables(
    g: np.random.Generator,
    count: int,
    device: torch.device,
    *,
    knots: int = 8,
    batches: int = 2,
    contexts: int = 3,
) -> DeviceTables:
    """As many tables as asked for, all random; some with tiers of equal latency or a flat map."""
    pieces = g.integers(1, knots + 1, (count, 1))
    index = np.arange(knots)
    x = np.cumsum(g.random((count, knots + 1)) + 1e-3, 1)
    last = np.take_along_axis(x, pieces, 1)
    x /= last * (1.0 + 0.2 * g.random((count, 1)))
    y = np.sort(g.random((count, knots + 1)), 1)
    y[g.random(count) < 0.05] = 0.5
    y[g.random(count) < 0.05, -1] = 1.0
    slope = np.diff(y) / np.diff(x)
    inner = np.where(index < pieces - 1, x[:, 1:], np.inf)
    latency = 1000.0 + np.cumsum(g.random((count, batches, contexts, BLOCK_SIZE + 1)) * 150.0, -1)
    tiers = g.random(count) < 0.3
    latency[tiers, :, :, 5:9] = latency[tiers, :, :, 5:6]
    parts = [
        g.normal(0.0, 0.5, (count, 5)),
        np.zeros((count, 1)),
        x[:, :1],
        np.take_along_axis(x, pieces, 1),
        np.pad(g.normal(0.0, 0.5, (count, 15)), ((0, 0), (0, 1))),
        np.sort(g.random((count, BLOCK_SIZE)) * 20.0, 1),
        g.normal(3.0, 1.0, (count, BLOCK_SIZE)),
        inner,
        y[:, :-1] - slope * x[:, :-1],
        slope,
        np.cumsum(g.integers(1, 4, (count, batches)), 1),
        g.random((count, batches)) * 3e-3,
        g.integers(0, 17, (count, batches)),
        np.cumsum(g.integers(32, 1500, (count, contexts)), 1),
        latency.reshape(count, -1),
    ]
    values = torch.as_tensor(np.concatenate(parts, 1), dtype=torch.float64, device=device)
    return DeviceTables(values, knots, batches, contexts)


def random_signals(g: np.random.Generator, count: int, device: torch.device) -> Signals:
    """p1, p2 and entropy, fp32 [count, 15]; some p1 are exactly 0 or 1."""
    p1 = g.beta(2.0, 0.7, (count, 15))
    p1[g.random(p1.shape) < 0.1] = 1.0
    p1[g.random(p1.shape) < 0.03] = 0.0
    p2 = (1.0 - p1) * g.random(p1.shape)
    entropy = g.gamma(1.0, 1.0, p1.shape)
    p1, p2, entropy = (
        torch.as_tensor(x, dtype=torch.float32, device=device) for x in (p1, p2, entropy)
    )
    return p1, p2, entropy


def ints(values: object, device: torch.device) -> torch.Tensor:
    return torch.as_tensor(np.asarray(values), dtype=torch.int32, device=device)


def poisoned(count: int, device: torch.device) -> Selection:
    """Buffers that hold NaN and absurd lengths."""
    out = Selection.allocate(count, device)
    for name in fields(out):
        buffer = getattr(out, name.name)
        buffer.fill_(float("nan") if buffer.is_floating_point() else -777)
    return out


def columns(selection: Selection) -> list[torch.Tensor]:
    return [getattr(selection, name.name) for name in fields(selection)]


def assert_same_bits(got: torch.Tensor, expected: torch.Tensor, name: str = "") -> None:
    assert got.dtype == expected.dtype, name
    if got.is_floating_point():
        got, expected = got.contiguous().view(torch.int64), expected.contiguous().view(torch.int64)
    different = (got != expected).nonzero()
    assert not len(different), f"{name}: {len(different)} differ, first at {different[:3].tolist()}"


def packed(policy: Policy, device: torch.device) -> DeviceTables:
    """The tables of a host policy."""
    cost, hazard, throughput = policy.cost, policy.hazard, policy.throughput
    routing = hasattr(policy, "_first_mean_L")
    return pack_tables(
        weights_F=hazard.weights_F,
        position_bias_D=hazard.position_bias_D,
        knots_x=hazard.knots_x,
        knots_y=hazard.knots_y,
        batch_sizes=cost.batch_sizes,
        context_tokens=cost.context_tokens,
        latency_us=cost.latency_us,
        tokens_per_us=throughput.tokens_per_us,
        best_fixed_length=throughput.best_fixed_length,
        first_mean_L=policy._first_mean_L.numpy() if routing else None,
        slope_L=policy._expert_price_L.numpy() if routing else None,
        expert_slope_us=1.0,
        device=device,
    )
