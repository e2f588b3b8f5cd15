"""Lengths of a batch together: no combination is better, and the device kernel's twin agrees."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridspec.costmodels.joint import UnionCost, choose_by_rows, choose_by_union
from hybridspec.errors import UsageError


def emitted(hazards: np.ndarray, length: int) -> float:
    return 1.0 + float(np.cumprod(hazards)[: length - 1].sum())


def rows_score(
    hazards: np.ndarray, latency: np.ndarray, lam: np.ndarray, lengths: tuple[int, ...]
) -> float:
    gain = sum(emitted(h, k) for h, k in zip(hazards, lengths, strict=True))
    mean = sum(lengths) / len(lengths)
    whole = min(int(mean), 15)
    time_us = latency[whole] + (mean - whole) * (latency[whole + 1] - latency[whole])
    return gain - float(lam.sum()) * time_us


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 3))
def test_no_other_lengths_score_better_by_rows(seed: int, requests: int) -> None:
    g = np.random.default_rng(seed)
    hazards = g.beta(2.0, 0.8, (requests, 15))
    caps = g.integers(1, 7, requests)
    # Steps between graph tiers: not convex.
    latency = 1000.0 + np.cumsum(g.choice([0.0, 20.0, 400.0], 17))
    lam = g.random(requests) * 2e-3
    found = choose_by_rows(hazards, latency, lam, caps=caps)
    assert np.all((found >= 1) & (found <= caps))
    scores = {
        lengths: rows_score(hazards, latency, lam, lengths)
        for lengths in itertools.product(*(range(1, cap + 1) for cap in caps))
    }
    best = max(scores.values())
    assert scores[tuple(found.tolist())] >= best - 1e-8
    fewest = min(sum(key) for key, score in scores.items() if score >= best - 1e-10)
    assert found.sum() <= fewest


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 6))
def test_equal_to_the_naive_twin_of_the_kernel(seed: int, requests: int) -> None:
    import torch

    from hybridspec.kernels.select import naive
    from hybridspec.kernels.select.tables import DeviceTables

    g = np.random.default_rng(seed)
    p1 = np.clip(g.beta(2.0, 0.7, (requests, 15)), 0.01, 0.99)
    latency = 1000.0 + np.cumsum(g.random(17) * 150.0)
    lam = g.random(requests) * 2e-3
    # log p - log(1 - p) is the logit of p, so the logistic gives p back; one piece, identity.
    head = [1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0]
    flat = [*head, *np.zeros(16), *np.ones(16), *np.zeros(16), np.inf, 0.0, 1.0, 1.0, 0.0, 8.0]
    values = torch.tensor([[*flat, 64.0, *latency]], dtype=torch.float64)
    signal = torch.as_tensor(p1)
    zeros = torch.zeros_like(signal)
    lengths, *_ = naive.select_jointly(
        signal,
        zeros,
        zeros,
        torch.full((requests,), 64, dtype=torch.int32),
        torch.full((requests,), 16, dtype=torch.int32),
        torch.ones(1, dtype=torch.int32),
        DeviceTables(values, knots=1, batches=1, contexts=1),
        lam_B=torch.as_tensor(lam),
    )
    found = choose_by_rows(p1, latency, lam)
    theirs = tuple(int(x) for x in lengths)
    # The twin rounds survivals to units of 2^-40, so equal scores count as equal choices.
    ours = rows_score(p1, latency, lam, tuple(found.tolist()))
    assert ours == pytest.approx(rows_score(p1, latency, lam, theirs), abs=1e-8)


def union_score(
    hazards: np.ndarray,
    experts: np.ndarray,
    cost: UnionCost,
    lam: float,
    lengths: tuple[int, ...],
) -> float:
    seen: set[tuple[int, int]] = set()
    for request, length in enumerate(lengths):
        for row in range(length):
            for layer, ids in enumerate(experts[request, row]):
                seen |= {(layer, int(expert)) for expert in ids}
    gain = sum(emitted(h, k) for h, k in zip(hazards, lengths, strict=True))
    return gain - lam * cost.time_us(sum(lengths), len(seen))


def shared_batch(
    seed: int, requests: int, cap: int
) -> tuple[np.ndarray, np.ndarray, UnionCost, float, np.ndarray]:
    g = np.random.default_rng(seed)
    hazards = g.beta(3.0, 0.8, (requests, 15))
    experts = g.integers(0, 12, (requests, 16, 3, 2))
    cost = UnionCost(np.concatenate([[0.0], 500.0 + np.cumsum(g.random(16 * requests) * 30)]), 20.0)
    return hazards, experts, cost, float(g.random() * 4e-3), np.full(requests, cap)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 3))
def test_small_batches_by_union_are_exact(seed: int, requests: int) -> None:
    hazards, experts, cost, lam, caps = shared_batch(seed, requests, 5)
    found = choose_by_union(hazards, experts, 12, cost, lam, caps=caps)
    scores = [
        union_score(hazards, experts, cost, lam, lengths)
        for lengths in itertools.product(range(1, 6), repeat=requests)
    ]
    assert union_score(hazards, experts, cost, lam, tuple(found.tolist())) == pytest.approx(
        max(scores), abs=1e-8
    )


def test_greedy_by_union_stays_close_to_the_best_and_never_below_the_anchors() -> None:
    lost = []
    for seed in range(40):
        hazards, experts, cost, lam, caps = shared_batch(seed, 4, 4)
        found = tuple(choose_by_union(hazards, experts, 12, cost, lam, caps=caps).tolist())
        ours = union_score(hazards, experts, cost, lam, found)
        best = max(
            union_score(hazards, experts, cost, lam, lengths)
            for lengths in itertools.product(range(1, 5), repeat=4)
        )
        anchors = union_score(hazards, experts, cost, lam, (1, 1, 1, 1))
        assert anchors - 1e-9 <= ours <= best + 1e-9
        lost.append(best - ours)
    # Tokens of a round; a round of four requests emits about ten.
    assert np.mean(lost) < 0.05
    assert np.mean(np.asarray(lost) < 1e-9) > 0.6


def test_shared_experts_make_a_longer_choice_worth_it() -> None:
    hazards = np.full((4, 15), 0.7)
    own = np.arange(4 * 16 * 2).reshape(4, 16, 1, 2)
    shared = np.broadcast_to(np.arange(16 * 2).reshape(16, 1, 2), (4, 16, 1, 2))
    cost = UnionCost(np.full(65, 100.0), 50.0)
    apart = choose_by_union(hazards, own, 128, cost, 5e-3)
    together = choose_by_union(hazards, shared, 128, cost, 5e-3)
    assert np.all(together >= apart)
    assert together.sum() > apart.sum()


def test_refusals() -> None:
    hazards, experts, cost, lam, caps = shared_batch(0, 2, 4)
    latency = np.full(17, 9.0)
    with pytest.raises(UsageError, match="expected \\(B >= 1, 15\\)"):
        choose_by_rows(hazards[:, :3], latency, np.ones(2))
    with pytest.raises(UsageError, match="without NaN"):
        choose_by_rows(np.full((2, 15), np.nan), latency, np.ones(2))
    with pytest.raises(UsageError, match=r"one in 1\.\.16"):
        choose_by_rows(hazards, latency, np.ones(2), caps=np.array([0, 4]))
    with pytest.raises(UsageError, match="expert ids"):
        choose_by_union(hazards, experts, 5, cost, lam, caps=caps)
    with pytest.raises(UsageError, match="experts have shape"):
        choose_by_union(hazards, experts[:1], 12, cost, lam, caps=caps)
    with pytest.raises(UsageError, match="reach 4 rows; 8 are needed"):
        choose_by_union(hazards, experts, 12, UnionCost(np.ones(5), 1.0), lam, caps=caps)
    with pytest.raises(UsageError, match="finite and at least 0"):
        UnionCost(np.ones(5), -1.0)
    with pytest.raises(UsageError, match="finite numbers"):
        UnionCost(np.array([1.0, np.nan]), 1.0)
