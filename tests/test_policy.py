"""Hazards and selection against plain numpy; ties, caps, fall-backs and table look-ups."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_kit import (
    Signals,
    oracle_expected,
    oracle_latency,
    random_policy,
    random_signals,
    shortest_best,
    signals_of,
)

from hybridspec.artifacts.tables import (
    BLOCK_SIZE,
    NUM_DRAFTS,
    ThroughputTable,
)
from hybridspec.calibrate.features import position_features
from hybridspec.calibrate.hazard import predict_hazards
from hybridspec.errors import BundleError
from hybridspec.policy import Policy

MakePolicy = Callable[..., Policy]


# ---------------------------------------------------------------------------- hazards


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**20), st.integers(1, 5))
def test_hazards_equal_the_calibrations_own(seed: int, batch: int) -> None:
    policy, signals = random_policy(seed), random_signals(seed + 1, batch)
    have = policy.hazards(signals.p1, signals.p2, signals.entropy, signals.contexts)
    features = position_features(
        signals.p1.numpy(), signals.p2.numpy(), signals.entropy.numpy(), signals.contexts
    )
    np.testing.assert_allclose(
        have.numpy(), predict_hazards(policy.hazard, features), atol=1e-9, rtol=0
    )


def test_hazards_take_signals_of_fp64_without_changing_them() -> None:
    policy, signals = random_policy(3), random_signals(4, 2)
    p1, p2, entropy = (x.double() for x in (signals.p1, signals.p2, signals.entropy))
    kept = [x.clone() for x in (p1, p2, entropy)]
    policy.hazards(p1, p2, entropy, signals.contexts)
    assert all(torch.equal(a, b) for a, b in zip((p1, p2, entropy), kept, strict=True))


# ---------------------------------------------------------------------------- select


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 2**20), st.integers(1, 4), st.floats(1e-5, 1e-2), st.data())
def test_selection_equals_brute_force(
    seed: int, batch: int, lam: float, data: st.DataObject
) -> None:
    policy, signals = random_policy(seed), random_signals(seed + 7, batch)
    caps = data.draw(st.lists(st.integers(1, 16), min_size=batch, max_size=batch))
    round_size = data.draw(st.sampled_from([batch, 3, 9]))
    policy._on_host = data.draw(st.booleans())
    chosen = signals.select(policy, lam, caps, round_size)
    hazards = policy.hazards(signals.p1, signals.p2, signals.entropy, signals.contexts).numpy()
    assert chosen.fallback == [None] * batch
    for i in range(batch):
        expected = oracle_expected(hazards[i])
        latency = oracle_latency(policy, round_size, signals.contexts[i])
        score = (expected - lam * latency[1:])[: caps[i]]
        assert chosen.lengths[i] == shortest_best(score) + 1
        np.testing.assert_allclose(np.asarray(chosen.expected_BL[i]), expected, atol=1e-12)


def test_lengths_follow_certainty(make_policy: MakePolicy) -> None:
    policy = make_policy(row_us=100.0, lam=2e-3)
    for sure in range(NUM_DRAFTS + 1):
        p1 = [0.999] * sure + [0.01] * (NUM_DRAFTS - sure)
        assert signals_of(p1).select(policy, 2e-3).lengths == [sure + 1]


def set_bias(policy: Policy, value: float) -> None:
    policy._table._bias_D.fill_(value)
    policy._table._host_tables = (policy._table._bias_D.tolist(), *policy._table._host_tables[1:])


def test_ties_go_to_the_shorter_length(make_policy: MakePolicy) -> None:
    # A row costs exactly what a sure draft brings: sixteen equal scores, but for rounding.
    for row_us, lam in itertools.product((0.1, 100.0, 333.3), (1.0, 0.7, 1e-3)):
        policy = make_policy(row_us=1.0 / lam, drafted_us=row_us)
        set_bias(policy, 100.0)  # Hazards of exactly one.
        for policy._on_host in (True, False):
            assert signals_of([0.5] * NUM_DRAFTS).select(policy, lam).lengths == [1]
    # Rows for nothing, and drafts that bring nothing: no reason to verify them.
    policy = make_policy(row_us=0.0)
    set_bias(policy, -1000.0)
    assert signals_of([0.5] * NUM_DRAFTS).select(policy, 1e-3).lengths == [1]


def test_caps_bind_each_request_alone(make_policy: MakePolicy) -> None:
    policy = make_policy(row_us=1.0)
    row = signals_of([0.999] * NUM_DRAFTS)
    p1, p2, entropy = (x.expand(3, -1) for x in (row.p1, row.p2, row.entropy))
    three = Signals(p1, p2, entropy, [5, 5, 5])
    assert three.select(policy, 1e-3, [16, 4, 1]).lengths == [16, 4, 1]


def test_a_dearer_time_never_makes_a_longer_length() -> None:
    policy, signals = random_policy(11), random_signals(12, 1)
    lengths = [
        signals.select(policy, lam).lengths[0] for lam in np.geomspace(1e-6, 1e-1, 60).tolist()
    ]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] > 1
    assert lengths[-1] == 1


@pytest.mark.parametrize("broken", ["p1", "p2", "entropy"])
@pytest.mark.parametrize("on_host", [True, False])
def test_broken_signals_fall_back_to_the_fixed_length(broken: str, on_host: bool) -> None:
    policy = random_policy(21)
    policy._on_host = on_host
    policy.throughput.best_fixed_length[:] = 7
    signals = random_signals(5, 3)
    whole = signals.select(policy, 1e-3)
    getattr(signals, broken)[1, 14] = math.nan
    chosen = signals.select(policy, 1e-3)
    assert chosen.lengths == [whole.lengths[0], 7, whole.lengths[2]]
    assert chosen.fallback == [None, "draft signals are not finite", None]
    assert signals.select(policy, 1e-3, [16, 3, 16]).lengths[1] == 3


@given(
    st.sampled_from(["p1", "p2", "entropy"]),
    st.sampled_from([math.inf, -math.inf, 1e30]),
    st.booleans(),
)
def test_absurd_signals_give_a_length_all_the_same(
    broken: str, value: float, on_host: bool
) -> None:
    policy, signals = random_policy(23), random_signals(5, 2)
    policy._on_host = on_host
    getattr(signals, broken)[0, 3] = value
    chosen = signals.select(policy, 1e-3)
    assert all(1 <= length <= BLOCK_SIZE for length in chosen.lengths)
    hazards = policy.hazards(signals.p1, signals.p2, signals.entropy, signals.contexts)
    assert chosen.fallback[0] is not None or bool(((hazards >= 0) & (hazards <= 1)).all())


def test_static_policy_takes_the_fixed_length_and_says_why() -> None:
    policy = random_policy(22)
    policy.throughput.best_fixed_length[:] = [0, 5]
    policy.set_static("times drifted")
    signals = random_signals(6, 2)
    chosen = signals.select(policy, 1e-3, [16, 3], batch=2)
    assert chosen.lengths == [5, 3]
    assert chosen.fallback == ["times drifted"] * 2
    # Zero would mean no draft pass, which has run by then.
    assert random_signals(6, 1).select(policy, 1e-3).lengths == [1]


# ---------------------------------------------------------------------------- tables


def test_latency_between_and_beyond_the_measured_grid() -> None:
    policy = random_policy(31)
    for batch, context in itertools.product((1, 2, 4, 50), (0, 63, 64, 300, 511, 1500, 9000)):
        plain, drafted = policy.latency(batch, context)
        want = oracle_latency(policy, batch, context)
        np.testing.assert_allclose([plain, *drafted.tolist()], want, rtol=1e-12)
    assert policy.lam(1) == 1.5e-3
    assert policy.lam(2) == policy.lam(4) == policy.lam(99) == 1.1e-3


def test_one_measured_context_serves_all(make_policy: MakePolicy) -> None:
    plain, drafted = make_policy(plain_us=900.0).latency(3, 5000)
    assert plain == 900.0
    assert drafted.tolist() == [1200.0 + 100.0 * length for length in range(1, 17)]


def test_tables_of_different_batches_are_refused() -> None:
    policy = random_policy(41)
    other = ThroughputTable(np.array([1, 8]), np.array([1e-3, 1e-3]), np.array([4, 4]))
    with pytest.raises(BundleError, match=r"\[1, 8\].*\[1, 4\]"):
        Policy(policy.hazard, policy.cost, other)


def test_same_signals_give_the_same_lengths() -> None:
    policy, signals = random_policy(51), random_signals(52, 4)
    first = signals.select(policy, 1e-3).lengths
    assert all(signals.select(policy, 1e-3).lengths == first for _ in range(5))
    for i, context in enumerate(signals.contexts):
        p1, p2, entropy = (x[i : i + 1] for x in (signals.p1, signals.p2, signals.entropy))
        assert Signals(p1, p2, entropy, [context]).select(policy, 1e-3).lengths == first[i : i + 1]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**31 - 1), st.integers(1, 4))
def test_host_and_device_evaluation_agree(seed: int, batch: int) -> None:
    g = np.random.default_rng(seed)
    policy = random_policy(seed)
    p1, p2, entropy = (
        torch.from_numpy(g.random((batch, NUM_DRAFTS)).astype(np.float32)) for _ in range(3)
    )
    contexts = g.integers(1, 3000, batch).tolist()
    lams = (g.random(batch) * 2e-3).tolist()
    caps = g.integers(1, BLOCK_SIZE + 1, batch).tolist()
    hazards = policy.hazard_model.hazards(p1, p2, entropy, contexts, None, None)
    on_host = policy._evaluate_host(hazards, contexts, lams, caps, batch)
    on_device = policy._evaluate(p1, p2, entropy, contexts, lams, caps, batch)
    host = [torch.tensor(values, dtype=torch.float64) for values in on_host[:2]]
    torch.testing.assert_close(host[0], on_device[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(host[1], on_device[1], rtol=1e-12, atol=1e-12)
    for row in range(batch):
        best = [float(scores[row, : caps[row]].max()) for scores in (host[1], on_device[1])]
        for lengths in (on_host[2], on_device[2]):
            assert float(on_device[1][row, lengths[row] - 1]) >= max(best) - 1e-8
