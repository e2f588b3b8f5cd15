"""Correction at the first router against plain numpy and sets of experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_kit import (
    TIE,
    oracle_expected,
    oracle_latency,
    random_policy,
    random_signals,
    signals_of,
)

from hybridspec.artifacts.tables import BLOCK_SIZE
from hybridspec.policy import Policy

MakePolicy = Callable[..., Policy]


@settings(max_examples=120, deadline=None)
@given(
    st.integers(0, 2**20),
    st.floats(1e-4, 5e-3),
    st.sampled_from(["select", "paper"]),
    st.integers(1, 8),
    st.data(),
)
def test_correction_equals_brute_force(
    seed: int, lam: float, rule: Literal["select", "paper"], top_k: int, data: st.DataObject
) -> None:
    policy, signals = random_policy(seed, rule), random_signals(seed + 3, 2)
    chosen = signals.select(policy, lam, batch=2)
    experts = 32
    g = np.random.default_rng(seed)
    row = data.draw(st.integers(0, 1))
    selected = chosen.lengths[row]
    rows = min(selected + data.draw(st.integers(0, 1)), BLOCK_SIZE)
    routes = np.stack([g.choice(experts, top_k, replace=False) for _ in range(rows)])
    final = policy.correct(torch.tensor(routes), chosen, row, num_experts=experts)

    hazards = policy.hazards(signals.p1, signals.p2, signals.entropy, signals.contexts).numpy()
    expected = oracle_expected(hazards[row])
    latency = oracle_latency(policy, 2, signals.contexts[row])
    routing = data_of(policy)
    scores = {}
    for length in range(selected if rule == "paper" else 1, rows + 1):
        seen = len(set(routes[:length].ravel().tolist()))
        surplus = routing["slope"][length - 1] * (seen - routing["mean"][length - 1])
        time_us = latency[length] + policy.cost.expert_slope_us * surplus
        scores[length] = expected[length - 1] - lam * time_us
    best = max(scores.values())
    assert final == min(length for length, s in scores.items() if s >= best - TIE)
    if rule == "paper":
        assert final in (selected, selected + 1)


def data_of(policy: Policy) -> dict[str, np.ndarray]:
    return {
        "mean": policy._first_mean_L.numpy(),
        "slope": policy._expert_price_L.numpy() / policy.cost.expert_slope_us,
    }


def test_correction_moves_only_where_experts_surprise(make_policy: MakePolicy) -> None:
    means = [4.0 + 3.0 * row for row in range(BLOCK_SIZE)]
    signals = signals_of([0.9] * 8 + [0.05] * 7)
    routes = {
        "expected": torch.tensor([[i * 3 + j for j in range(4)] for i in range(10)]),
        "repeated": torch.tensor([[0, 1, 2, 3]] * 10),
        "all new": torch.tensor([[i * 4 + j for j in range(4)] for i in range(10)]),
    }
    lengths: dict[str, dict[str, int]] = {}
    for rule in ("select", "paper"):
        policy = make_policy(
            first_mean=means, slope=[2.0] * 16, expert_us=120.0, row_us=60.0, correction=rule
        )
        chosen = signals.select(policy, 1.5e-3)
        assert chosen.lengths == [9]
        lengths[rule] = {
            name: policy.correct(experts, chosen, 0, num_experts=64)
            for name, experts in routes.items()
        }
    assert lengths["select"]["expected"] == lengths["paper"]["expected"] == 9
    assert lengths["select"]["repeated"] == lengths["paper"]["repeated"] == 10
    assert lengths["paper"]["all new"] == 9
    assert lengths["select"]["all new"] < 9


@pytest.mark.parametrize(
    ("correction", "routing", "lookahead"),
    [("select", True, 1), ("paper", True, 1), ("off", True, 0), ("select", False, 0)],
)
def test_lookahead_only_where_something_is_corrected(
    correction: str, routing: bool, lookahead: int, make_policy: MakePolicy
) -> None:
    tables: dict[str, Any] = {"first_mean": [1.0] * 16, "slope": [1.0] * 16} if routing else {}
    policy = make_policy(correction=correction, **tables)
    assert policy.lookahead == lookahead
    assert policy.looks_ahead(5, 16) == bool(lookahead)
    assert not policy.looks_ahead(5, 5)
    assert not policy.looks_ahead(1, 16)
