"""Select against its naive twin to the bit, and against the host policy in its decisions."""

# Arguments are spread from lists whose lengths a checker cannot see.
# pyright: reportCallIssue=false

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import policy_kit
import pytest
import select_kit as kit
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridspec.errors import UsageError
from hybridspec.kernels.select import elementary, naive
from hybridspec.kernels.select.select import select
from hybridspec.kernels.select.selection import NOT_FINITE, STATIC_POLICY
from hybridspec.kernels.select.tables import DeviceTables, pack_tables

NAMES = ("lengths", "expected", "score", "survival", "price", "fallback")


NO_CONTRACTION = """
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from hybridspec.kernels.select import correct, joint, select
for case in (select.compile_cases()[0], joint.compile_cases()[0], correct.compile_cases()[0]):
    source = ASTSource(case.kernel, dict(case.signature), dict(case.constexprs), {})
    for fused in (False, True):
        options = {"num_warps": case.num_warps, "enable_fp_fusion": fused}
        ptx = compile(source, GPUTarget("cuda", 90, 32), options).asm["ptx"]
        print(case.name, fused, ptx.count("fma.rn"), ptx.count("div.full"))
"""


def compare(*args: Any, requests_per_program: int = 2, **options: Any) -> kit.Selection:
    """Run both forms, assert equal bits, and return the kernel's."""
    out = kit.poisoned(len(args[0]), args[0].device)
    got = select(*args, out=out, requests_per_program=requests_per_program, **options)
    assert got is out
    expected = naive.select(*args, **options)
    for name, column, twin in zip(NAMES, kit.columns(got), expected, strict=True):
        kit.assert_same_bits(column, twin, name)
    return got


@triton.jit
def elementary_kernel(p_x, p_log, p_exp, SIZE: tl.constexpr):
    o_x = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    x = tl.load(p_x + o_x)
    tl.store(p_log + o_x, elementary.log(tl.abs(x)))
    tl.store(p_exp + o_x, elementary.exp(x))


def test_exponential_and_logarithm_are_within_one_unit(device: torch.device) -> None:
    g = np.random.default_rng(0)
    parts = [g.uniform(-700, 700, 8192), g.uniform(-1, 1, 8192), g.uniform(-1, 1, 8192) * 1e-5]
    parts += [1.0 + g.uniform(-1, 1, 4096) * 1e-6, np.linspace(0.5, 2.0, 4096)]
    x = np.concatenate(parts)
    on_device = torch.as_tensor(x, device=device)
    logs, exps = torch.full_like(on_device, torch.nan), torch.full_like(on_device, torch.nan)
    elementary_kernel[(len(x) // 4096,)](on_device, logs, exps, SIZE=4096, enable_fp_fusion=False)
    kit.assert_same_bits(logs, naive.log(on_device.abs()))
    kit.assert_same_bits(exps, naive.exp(on_device))
    wide = x.astype(np.longdouble)
    for found, truth in ((logs, np.log(np.abs(wide))), (exps, np.exp(wide))):
        unit = np.spacing(np.abs(truth.astype(np.float64)))
        assert float(np.max(np.abs(found.cpu().numpy() - truth) / unit)) < 1.0
    assert float(naive.log(torch.ones(1, dtype=torch.float64))) == 0.0
    assert float(naive.exp(torch.zeros(1, dtype=torch.float64))) == 1.0


def test_compiled_without_contraction() -> None:
    done = subprocess.run(
        [sys.executable, "-c", NO_CONTRACTION],
        env={**os.environ, "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for line in done.stdout.splitlines():
        _, fused, multiply_adds, fast_divisions = line.split()
        assert (int(multiply_adds) > 0) == (fused == "True"), line
        assert fast_divisions == "0", line
    assert len(done.stdout.splitlines()) == 6


@pytest.mark.parametrize("chunk", range(5))
def test_equal_to_the_bit_over_random_tables(device: torch.device, chunk: int) -> None:
    count, g = 20_000, np.random.default_rng(chunk)
    tables = kit.random_tables(g, count, device)
    out = compare(
        *kit.random_signals(g, count, device),
        kit.ints(g.integers(0, 5000, count), device),
        kit.ints(g.integers(-1, 18, count), device),
        kit.ints([1 + chunk], device),
        tables,
        lam_B=torch.as_tensor(g.random(count) * 4e-3, device=device) if chunk % 2 else None,
        requests_per_program=4096 if device.type == "cpu" else 2,
    )
    assert len(out.lengths_B.unique()) == 17
    assert not out.fallback_B.any()


@pytest.mark.parametrize("count", [1, 2, 3, 17])
@pytest.mark.parametrize(
    ("knots", "batches", "contexts", "lam"),
    [(8, 1, 1, None), (64, 5, 2, torch.float32), (16, 2, 7, torch.float64)],
    ids=["one-cell", "many-knots-fp32-lam", "many-contexts-fp64-lam"],
)
def test_awkward_shapes(
    device: torch.device,
    count: int,
    knots: int,
    batches: int,
    contexts: int,
    lam: torch.dtype | None,
) -> None:
    g = np.random.default_rng(count)
    tables = kit.random_tables(g, 1, device, knots=knots, batches=batches, contexts=contexts)
    wide = [torch.nn.functional.pad(x, (0, 5)) for x in kit.random_signals(g, count, device)]
    p1, p2, entropy = (x[:, :15] for x in wide)
    lam_B = None if lam is None else torch.as_tensor(g.random(count) * 2e-3, device=device).to(lam)
    compare(
        p1,
        p2.contiguous(),
        entropy,
        kit.ints(g.integers(0, 9000, count), device),
        kit.ints(g.integers(0, 18, count), device),
        kit.ints([count], device),
        tables,
        lam_B=lam_B,
    )


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**20), st.floats(1e-5, 5e-3), st.integers(1, 6), st.data())
def test_decides_as_the_host_policy(seed: int, lam: float, batch: int, data: st.DataObject) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    policy, signals = policy_kit.random_policy(seed), policy_kit.random_signals(seed + 1, 3)
    caps = data.draw(st.lists(st.integers(1, 16), min_size=3, max_size=3))
    chosen = signals.select(policy, lam, caps, batch)
    got = select(
        signals.p1.to(device),
        signals.p2.to(device),
        signals.entropy.to(device),
        kit.ints(signals.contexts, device),
        kit.ints(caps, device),
        kit.ints([batch], device),
        kit.packed(policy, device),
        lam_B=torch.full((3,), lam, dtype=torch.float64, device=device),
        requests_per_program=4,
    )
    score = np.array(chosen.score_BL)
    np.testing.assert_allclose(got.score_BL.cpu().numpy(), score, rtol=0, atol=1e-9)
    np.testing.assert_allclose(got.expected_BL.cpu().numpy(), chosen.expected_BL, rtol=0, atol=1e-9)
    for i, length in enumerate(got.lengths_B.tolist()):
        if length != chosen.lengths[i]:
            best = score[i, : caps[i]].max() - 1e-9
            assert abs(score[i, min(length, chosen.lengths[i]) - 1] - best) < 1e-12


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 2**20), st.integers(2, 5))
def test_rows_do_not_depend_on_their_neighbours(seed: int, count: int) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    g = np.random.default_rng(seed)
    tables, signals = kit.random_tables(g, 1, device), kit.random_signals(g, count, device)
    context, caps = g.integers(0, 5000, count), g.integers(0, 17, count)
    whole = select(
        *signals,
        kit.ints(context, device),
        kit.ints(caps, device),
        kit.ints([2], device),
        tables,
    )
    assert bool((whole.lengths_B.cpu() <= torch.as_tensor(caps)).all())
    assert bool((whole.survival_BL.diff(dim=1) <= 0).all())
    order = g.permutation(count)
    moved = select(
        *(x[torch.as_tensor(order, device=device)] for x in signals),
        kit.ints(context[order], device),
        kit.ints(caps[order], device),
        kit.ints([2], device),
        tables,
    )
    for a, b in zip(kit.columns(whole), kit.columns(moved), strict=True):
        kit.assert_same_bits(b, a[torch.as_tensor(order, device=device)])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("signal", [0, 1, 2, "lam"])
def test_broken_signals_take_the_fixed_length(
    device: torch.device, signal: int | str, value: float
) -> None:
    g = np.random.default_rng(5)
    tables = kit.random_tables(g, 1, device)
    signals = kit.random_signals(g, 6, device)
    lam = torch.full((6,), 1e-3, device=device)
    clean = compare(
        *signals,
        kit.ints([10] * 6, device),
        kit.ints([16] * 6, device),
        kit.ints([1], device),
        tables,
        lam_B=lam,
    )
    if isinstance(signal, int):
        for i, position in ((1, 0), (2, 7), (4, 14)):
            signals[signal][i, position] = value
    else:
        lam[torch.tensor([1, 2, 4], device=device)] = value
    caps = [16, 16, 3, 16, 0, 16]
    out = compare(
        *signals,
        kit.ints([10] * 6, device),
        kit.ints(caps, device),
        kit.ints([1], device),
        tables,
        lam_B=lam,
    )
    row = tables.values_TP[0].cpu()
    start = 56 + 3 * tables.knots
    fixed = max(1, int(row[start + 2 * tables.batches]))
    assert out.fallback_B.tolist() == [0, NOT_FINITE, NOT_FINITE, 0, 0, 0]
    lengths = out.lengths_B.tolist()
    assert lengths[1:3] == [fixed, min(fixed, 3)]
    assert lengths[4] == 0
    assert [lengths[i] for i in (0, 3, 5)] == [clean.lengths_B.tolist()[i] for i in (0, 3, 5)]
    assert all(bool(c.isfinite().all()) for c in kit.columns(out))


def hand_made(device: torch.device, latency: np.ndarray, fixed: int = 6) -> DeviceTables:
    """Hazards are the top-1 probabilities."""
    return pack_tables(
        weights_F=np.array([1.0, 1.0, 0.0, 0.0, 0.0]),
        position_bias_D=np.zeros(15),
        knots_x=np.array([0.0, 1.0]),
        knots_y=np.array([0.0, 1.0]),
        batch_sizes=[1],
        context_tokens=[1],
        latency_us=latency.reshape(1, 1, 17),
        tokens_per_us=np.array([1e-3]),
        best_fixed_length=[fixed],
        device=device,
    )


def test_ties_go_to_the_shorter_length_and_static_to_the_fixed_one(device: torch.device) -> None:
    latency = np.full(17, 1000.0)
    latency[9:] = 5000.0
    tables = hand_made(device, latency)
    p1 = torch.zeros(3, 15, device=device)
    p1[1] = 0.9
    p1[2, :5] = 0.5
    p1[2, 5:] = 1e-12  # clamped to 1e-6: gains below a tie behind it
    zeros = torch.zeros_like(p1)
    inputs = (p1, zeros, zeros, kit.ints([1] * 3, device), kit.ints([16, 16, 4], device))
    out = compare(*inputs, kit.ints([1], device), tables)
    # One millionth of a draft is a gain, of a millionth of that it is a tie.
    assert out.lengths_B.tolist() == [2, 8, 4]
    tables.set_static()
    out = compare(*inputs, kit.ints([1], device), tables)
    assert out.lengths_B.tolist() == [6, 6, 4]
    assert out.fallback_B.tolist() == [STATIC_POLICY] * 3
    tables.set_static(False)
    assert compare(*inputs, kit.ints([1], device), tables).lengths_B.tolist() == [2, 8, 4]


def test_misfits_are_refused(device: torch.device) -> None:
    g = np.random.default_rng(0)
    tables = kit.random_tables(g, 1, device)
    p1, p2, entropy = kit.random_signals(g, 2, device)
    context, caps, batch = (
        kit.ints([1, 1], device),
        kit.ints([16, 16], device),
        kit.ints([1], device),
    )
    good = (p1, p2, entropy, context, caps, batch, tables)
    for index, bad in (
        (0, p1.double()),
        (1, p2[:, :14]),
        (2, entropy.T.contiguous().T),
        (3, context.long()),
        (4, caps[:1]),
        (5, kit.ints([1, 1], device)),
    ):
        args: list[Any] = [*good]
        args[index] = bad
        with pytest.raises(UsageError):
            select(*args)
    with pytest.raises(UsageError, match="3 tables"):
        select(*good[:6], kit.random_tables(g, 3, device))
    out = kit.poisoned(2, device)
    with pytest.raises(UsageError, match="expected contiguous"):
        select(*good, out=replace(out, score_BL=out.score_BL.float()))
    with pytest.raises(UsageError, match="65 knots"):
        pack_tables(
            weights_F=np.zeros(5),
            position_bias_D=np.zeros(15),
            knots_x=np.linspace(0, 1, 65),
            knots_y=np.linspace(0, 1, 65),
            batch_sizes=[1],
            context_tokens=[1],
            latency_us=np.ones((1, 1, 17)),
            tokens_per_us=np.ones(1),
            best_fixed_length=[1],
        )
    assert select(
        p1[:0], p2[:0], entropy[:0], context[:0], caps[:0], batch, tables
    ).lengths_B.shape == (0,)


def test_hazards_of_another_model_are_taken_as_they_are(device: torch.device) -> None:
    g = np.random.default_rng(11)
    count = 300
    tables = kit.random_tables(g, 1, device)
    signals = kit.random_signals(g, count, device)
    hazards = torch.as_tensor(g.beta(2.0, 0.7, (count, 15)), device=device)
    hazards[3, 4] = float("nan")
    hazards[5, 14] = 1.0 + 1e-9
    hazards[7, 0] = -1e-9
    hazards[9] = 1.0
    # Signals are not read: they may hold anything.
    broken_signals = tuple(torch.full_like(signal, float("nan")) for signal in signals)
    context = kit.ints(g.integers(0, 4000, count), device)
    caps = kit.ints(g.integers(0, 17, count), device)
    batch = kit.ints([2], device)
    out = kit.poisoned(count, device)
    select(*broken_signals, context, caps, batch, tables, hazards_BD=hazards, out=out)
    expected = naive.select(*broken_signals, context, caps, batch, tables, hazards_BD=hazards)
    for got, value in zip(kit.columns(out), expected, strict=True):
        kit.assert_same_bits(got, value)
    active = caps.cpu().numpy() > 0
    fallback = out.fallback_B.cpu().numpy() == 1
    assert set(np.flatnonzero(fallback)) == {row for row in (3, 5, 7) if active[row]}
    assert out.survival_BL[9].eq(1.0).all()
    with pytest.raises(UsageError, match="hazards are"):
        select(*signals, context, caps, batch, tables, hazards_BD=hazards.float())
