"""Joint selection: equal to its naive twin, and no allocation is better."""

# Arguments are spread from lists whose lengths a checker cannot see.
# pyright: reportCallIssue=false

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import select_kit as kit
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridspec.errors import UsageError
from hybridspec.kernels.select import naive
from hybridspec.kernels.select.joint import select_jointly
from hybridspec.kernels.select.select import select
from hybridspec.kernels.select.selection import NOT_FINITE, STATIC_POLICY
from hybridspec.kernels.select.tables import DeviceTables, pack_tables

NAMES = ("lengths", "expected", "score", "survival", "price", "fallback")


def device_here() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def round_of(seed: int, count: int, device: torch.device, *, rounds: int = 1) -> tuple[Any, ...]:
    g = np.random.default_rng(seed)
    total = rounds * count
    caps = np.where(g.random(total) < 0.5, 16, g.integers(-1, 18, total))
    tables = kit.random_tables(g, rounds, device)
    signals = kit.random_signals(g, total, device)
    signals[0][torch.as_tensor(g.random((total, 15)) < 0.002)] = float("nan")
    lam = torch.as_tensor(g.random(total) * 2e-3, device=device)
    lam[torch.as_tensor(g.random(total) < 0.02)] = float("inf")
    return (
        *signals,
        kit.ints(g.integers(0, 5000, total), device),
        kit.ints(caps, device),
        kit.ints(g.integers(1, 8, rounds), device),
        tables,
    ), lam


def check_against_naive(args: tuple[Any, ...], lam: torch.Tensor | None) -> kit.Selection:
    total, rounds = len(args[0]), len(args[5])
    count = total // rounds
    out = select_jointly(*args, lam_B=lam, out=kit.poisoned(total, args[0].device))
    for i in range(rounds):
        rows = slice(i * count, (i + 1) * count)
        values = args[6].values_TP[i : i + 1]
        table = DeviceTables(values, args[6].knots, args[6].batches, args[6].contexts)
        twin = naive.select_jointly(
            *(x[rows] for x in args[:5]),
            args[5][i : i + 1],
            table,
            lam_B=None if lam is None else lam[rows],
        )
        for name, column, expected in zip(NAMES, kit.columns(out), twin, strict=True):
            kit.assert_same_bits(column[rows], expected, f"round {i} {name}")
    return out


@pytest.mark.parametrize("given_lam", [True, False], ids=["lam", "table-lam"])
@pytest.mark.parametrize(("count", "rounds"), [(1, 8), (2, 8), (3, 6), (8, 5), (21, 2), (64, 1)])
def test_equal_to_the_bit(device: torch.device, count: int, rounds: int, given_lam: bool) -> None:
    args, lam = round_of(count, count, device, rounds=rounds)
    out = check_against_naive(args, lam if given_lam else None)
    assert bool((out.lengths_B <= args[4].clamp(0, 16)).all())
    assert bool(((out.lengths_B == 0) == (args[4] <= 0)).all())
    assert all(bool(c.isfinite().all()) for c in kit.columns(out))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(7))
def test_equal_to_the_bit_over_many_rounds(device: torch.device, seed: int) -> None:
    count = (1, 2, 4, 5, 8, 16, 32)[seed % 7]
    args, lam = round_of(1000 + seed, count, device, rounds=100)
    check_against_naive(args, lam)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**20), st.integers(1, 3), st.data())
def test_no_allocation_is_better(seed: int, count: int, data: st.DataObject) -> None:
    device = device_here()
    g = np.random.default_rng(seed)
    tables, signals = kit.random_tables(g, 1, device), kit.random_signals(g, count, device)
    caps = data.draw(st.lists(st.integers(0, 9), min_size=count, max_size=count))
    lam = g.random(count) * 2e-3
    context = g.integers(0, 4000, count)
    out = select_jointly(
        *signals,
        kit.ints(context, device),
        kit.ints(caps, device),
        kit.ints([count], device),
        tables,
        lam_B=torch.as_tensor(lam, device=device),
    )
    active = [i for i in range(count) if caps[i] > 0]
    lengths = out.lengths_B.tolist()
    assert [i for i in range(count) if lengths[i]] == active
    if not active:
        return
    row, _, _ = naive.batch_columns(tables, kit.ints([count], device), 1)
    mean = kit.ints([int(context[active].sum()) // len(active)], device)
    latency = naive.latency(tables, row, mean)[0].cpu().numpy()
    expected = out.expected_BL.cpu().numpy()
    price = lam[active].sum()

    def objective(choice: tuple[int, ...]) -> float:
        time_us = np.interp(sum(choice) / len(active), np.arange(1, 17), latency)
        emitted = sum(expected[i, k - 1] for i, k in zip(active, choice, strict=True))
        return float(emitted - price * time_us)

    choices = itertools.product(*(range(1, caps[i] + 1) for i in active))
    scores = {choice: objective(choice) for choice in choices}
    best = max(scores.values())
    chosen = tuple(lengths[i] for i in active)
    assert scores[chosen] >= best - 2e-9
    fewest = min(sum(choice) for choice, score in scores.items() if score >= best - 1e-10)
    assert sum(chosen) <= fewest
    # The score that goes on to the correction is that of changing one length alone.
    score = out.score_BL.cpu().numpy()
    for at, i in enumerate(active):
        for k in range(1, caps[i] + 1):
            moved = (*chosen[:at], k, *chosen[at + 1 :])
            gap = score[i, k - 1] - score[i, chosen[at] - 1]
            assert gap == pytest.approx(scores[moved] - scores[chosen], abs=1e-9)
        assert score[i, chosen[at] - 1] >= score[i, : caps[i]].max() - 2e-9


@pytest.mark.parametrize("seed", range(4))
def test_one_request_decides_as_select(device: torch.device, seed: int) -> None:
    args, _ = round_of(seed, 1, device)
    together, alone = select_jointly(*args), select(*args)
    assert together.lengths_B.tolist() == alone.lengths_B.tolist()
    assert together.fallback_B.tolist() == alone.fallback_B.tolist()
    torch.testing.assert_close(together.score_BL, alone.score_BL, rtol=0, atol=1e-9)


def test_ties_go_to_the_earlier_position_then_to_the_earlier_request(device: torch.device) -> None:
    g = np.random.default_rng(0)
    tables = kit.random_tables(g, 1, device, batches=1, contexts=1)
    signals = [x[:1].repeat(4, 1) for x in kit.random_signals(g, 1, device)]
    latency = tables.values_TP[0, -17:]
    latency.copy_(torch.arange(17, device=device) * 400.0 + 1000.0)
    found = set()
    for lam in np.geomspace(1e-5, 1e-2, 12):
        out = select_jointly(
            *signals,
            kit.ints([5] * 4, device),
            kit.ints([16] * 4, device),
            kit.ints([4], device),
            tables,
            lam_B=torch.full((4,), lam, device=device),
        )
        lengths = out.lengths_B.tolist()
        assert lengths == sorted(lengths, reverse=True)
        assert lengths[0] - lengths[3] <= 1
        found.add(tuple(lengths))
    assert len(found) > 3


def test_equal_gains_are_shared_out_by_position(device: torch.device) -> None:
    latency = np.full(17, 1000.0)
    latency[4:] += 1e6 * np.arange(1, 14)
    tables = pack_tables(
        weights_F=np.zeros(5),
        position_bias_D=np.zeros(15),
        knots_x=np.array([0.0, 1.0]),
        knots_y=np.ones(2),
        batch_sizes=[4],
        context_tokens=[1],
        latency_us=latency.reshape(1, 1, 17),
        tokens_per_us=np.array([1e-4]),
        best_fixed_length=[1],
        device=device,
    )
    half = torch.full((3, 15), 0.5, device=device)
    inputs = (half, half, half, kit.ints([1] * 3, device), kit.ints([16, 2, 16], device))
    out = check_against_naive((*inputs, kit.ints([3], device), tables), None)
    # Three rows a request are free: nine in all, of which the middle one can take two.
    assert out.lengths_B.tolist() == [4, 2, 3]


def test_fallbacks_keep_their_rows_and_the_others_choose_around_them(device: torch.device) -> None:
    args, _ = round_of(11, 4, device)
    args[0].nan_to_num_(0.5)
    args[4].fill_(16)
    args[0][2, 4] = float("nan")
    out = check_against_naive(args, None)
    assert out.fallback_B.tolist() == [0, 0, NOT_FINITE, 0]
    tables = args[6]
    start = 56 + 3 * tables.knots + 2 * tables.batches
    fixed = [max(1, int(v)) for v in tables.values_TP[0, start : start + tables.batches].tolist()]
    assert out.lengths_B.tolist()[2] in fixed
    tables.set_static()
    out = check_against_naive(args, None)
    assert out.fallback_B.tolist() == [STATIC_POLICY] * 4
    assert len(set(out.lengths_B.tolist())) == 1
    args[4].fill_(0)
    assert check_against_naive(args, None).lengths_B.tolist() == [0] * 4


def test_misfits_are_refused(device: torch.device) -> None:
    args, _ = round_of(0, 4, device)
    with pytest.raises(UsageError, match="4 requests in 3 rounds"):
        select_jointly(*args[:5], kit.ints([1, 1, 1], device), args[6])
    many, _ = round_of(0, 65, device)
    with pytest.raises(UsageError, match="65 requests"):
        select_jointly(*many)
