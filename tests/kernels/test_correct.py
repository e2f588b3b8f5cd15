"""Correction at the first router: equal to its naive twin, to sets and to the host policy."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import policy_kit
import pytest
import select_kit as kit
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridspec.errors import UsageError
from hybridspec.kernels.route_mask import naive as naive_mask
from hybridspec.kernels.select import naive
from hybridspec.kernels.select.correct import correct
from hybridspec.kernels.select.select import select

Rule = Literal["select", "paper", "off"]
RULES: tuple[Rule, ...] = ("select", "paper", "off")


def routes(
    g: np.random.Generator, count: int, top_k: int, num_experts: int, rows: int = 16
) -> np.ndarray:
    """int32 [count, rows, top_k]; rows reuse experts, a few ids are no experts."""
    reach = np.maximum(top_k, (num_experts * g.random((count, 1, 1))).astype(np.int64) + 1)
    ids = (g.integers(0, 1 << 30, (count, rows, top_k)) % np.minimum(reach, num_experts)).astype(
        np.int32
    )
    stray = g.random(ids.shape)
    ids[stray < 0.02] = -1
    ids[stray > 0.98] = num_experts + 3
    ids[stray > 0.995] = -(1 << 31)
    return ids


def random_selection(
    g: np.random.Generator, count: int, device: torch.device
) -> tuple[kit.Selection, torch.Tensor]:
    """A selection as select could have written it, and the caps."""
    caps = g.integers(0, 17, count)
    out = kit.poisoned(count, device)
    out.lengths_B.copy_(kit.ints((caps * g.random(count) + 0.999).astype(np.int64), device))
    score = np.cumsum(g.normal(0.0, 0.02, (count, 16)), 1)
    score[g.random(count) < 0.2, 4:9] = 0.5
    out.score_BL.copy_(torch.as_tensor(score))
    out.price_B.copy_(torch.as_tensor(g.random(count) * 4e-3))
    out.fallback_B.copy_(
        kit.ints(np.where(g.random(count) < 0.05, g.integers(1, 3, count), 0), device)
    )
    return out, kit.ints(caps, device)


def compare(
    experts: torch.Tensor, selection: kit.Selection, caps: torch.Tensor, tables: Any, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run both forms on poisoned outputs and assert equal bits."""
    per_program = options.pop("requests_per_program", 1)
    count = len(caps)
    out = (
        torch.full((count,), -777, dtype=torch.int32, device=caps.device),
        torch.full((count, 16), -777, dtype=torch.int32, device=caps.device),
    )
    expected = naive.correct(
        experts,
        selection.lengths_B,
        selection.score_BL,
        selection.price_B,
        selection.fallback_B,
        caps,
        tables,
        **options,
    )
    correct(experts, selection, caps, tables, out=out, requests_per_program=per_program, **options)
    kit.assert_same_bits(out[0], expected[0], "final")
    kit.assert_same_bits(out[1], expected[1], "distinct")
    return out


@pytest.mark.parametrize("chunk", range(5))
def test_equal_to_the_bit_over_random_tables(device: torch.device, chunk: int) -> None:
    count, g = 20_000, np.random.default_rng(chunk)
    selection, caps = random_selection(g, count, device)
    final, _ = compare(
        torch.as_tensor(routes(g, count, 4, 64), device=device),
        selection,
        caps,
        kit.random_tables(g, count, device),
        num_experts=64,
        rule=RULES[chunk % 2],
        lookahead=1 + chunk // 3,
        requests_per_program=2048 if device.type == "cpu" else 1,
    )
    assert bool((final <= caps).all())
    assert bool(((final == 0) == (selection.lengths_B == 0)).all())
    changed = (final != selection.lengths_B).double().mean()
    assert 0.05 < float(changed) < 0.95


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    ("count", "top_k", "num_experts", "rows", "dtype"),
    [
        (1, 8, 256, 16, torch.int32),
        (5, 10, 512, 17, torch.int32),
        (3, 1, 1, 16, torch.int64),
        (4, 6, 33, 16, torch.int32),
    ],
    ids=["qwen", "top10-of-512-17-rows", "one-expert-int64", "odd"],
)
def test_awkward_shapes(
    device: torch.device,
    rule: Rule,
    count: int,
    top_k: int,
    num_experts: int,
    rows: int,
    dtype: torch.dtype,
) -> None:
    g = np.random.default_rng(count)
    tables = kit.random_tables(g, 1, device)
    wide = torch.as_tensor(routes(g, count, top_k + 3, num_experts, rows), device=device).to(dtype)
    for lookahead in (0, 1, 3):
        selection, caps = random_selection(g, count, device)
        compare(
            wide[:, :, :top_k],
            selection,
            caps,
            tables,
            num_experts=num_experts,
            rule=rule,
            lookahead=lookahead,
        )


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**20), st.floats(1e-4, 5e-3), st.sampled_from(["select", "paper"]))
def test_decides_as_the_host_policy(seed: int, lam: float, rule: Rule) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    policy, signals = policy_kit.random_policy(seed, rule), policy_kit.random_signals(seed + 3, 4)
    g = np.random.default_rng(seed)
    caps = g.integers(1, 17, 4).tolist()
    chosen = signals.select(policy, lam, caps, batch=2)
    tables = kit.packed(policy, device)
    selection = select(
        signals.p1.to(device),
        signals.p2.to(device),
        signals.entropy.to(device),
        kit.ints(signals.contexts, device),
        kit.ints(caps, device),
        kit.ints([2], device),
        tables,
        lam_B=torch.full((4,), lam, dtype=torch.float64, device=device),
        requests_per_program=4,
    )
    if selection.lengths_B.tolist() != chosen.lengths:
        return  # a tie but for rounding, which test_select looks at
    experts = np.stack(
        [[g.choice(32, 4, replace=False) for _ in range(16)] for _ in range(4)]
    ).astype(np.int32)
    final, distinct = correct(
        torch.as_tensor(experts, device=device),
        selection,
        kit.ints(caps, device),
        tables,
        num_experts=32,
        rule=rule,
        requests_per_program=4,
    )
    for i, length in enumerate(chosen.lengths):
        rows = length + (1 if policy.looks_ahead(length, caps[i]) else 0)
        seen = [len(set(experts[i, : k + 1].ravel().tolist())) for k in range(rows)]
        assert distinct[i].tolist() == seen + [0] * (16 - rows)
        host = length
        if length > 1:
            routed = torch.as_tensor(experts[i, :rows], dtype=torch.int64)
            host = policy.correct(routed, chosen, i, num_experts=32)
        if int(final[i]) != host:
            assert near_tie(policy, chosen.score_BL[i], seen, lam, host, int(final[i]))


def near_tie(
    policy: Any, score_L: Any, seen: list[int], lam: float, first: int, second: int
) -> bool:
    """Whether two lengths differ by a tie and not more."""
    scores = [
        float(score_L[k - 1])
        - lam
        * float(policy._expert_price_L[k - 1])
        * (seen[k - 1] - float(policy._first_mean_L[k - 1]))
        for k in (first, second)
    ]
    return abs(scores[0] - scores[1]) < 1.001e-9


@pytest.mark.parametrize("mode", ["alias", "drop"])
@pytest.mark.parametrize("rule", RULES)
def test_masks_the_first_layer_in_the_same_launch(
    device: torch.device, rule: Rule, mode: Literal["alias", "drop"]
) -> None:
    g = np.random.default_rng(7)
    count = 6
    tables = kit.random_tables(g, 1, device)
    selection, caps = random_selection(g, count, device)
    selection.lengths_B[0] = 0
    ids = torch.as_tensor(routes(g, count, 8, 256), device=device)
    weights = torch.rand(count, 16, 8, device=device)
    weights[:, 15] = float("nan")
    selection.lengths_B.clamp_(max=13)
    plain = correct(ids, selection, caps, tables, num_experts=256, rule=rule)
    masked_ids, masked_weights = ids.clone(), weights.clone()
    fused = correct(
        masked_ids,
        selection,
        caps,
        tables,
        num_experts=256,
        rule=rule,
        mask=(mode, masked_weights),
    )
    assert torch.equal(fused[0], plain[0])
    assert torch.equal(fused[1], plain[1])
    expected = naive_mask.route_mask(ids.view(-1, 8), weights.view(-1, 8), plain[0], mode=mode)
    assert torch.equal(masked_ids.view(-1, 8), expected[0])
    assert torch.equal(masked_weights.view(-1, 8), expected[1])
    assert bool(masked_weights.isfinite().all())


def test_misfits_are_refused(device: torch.device) -> None:
    g = np.random.default_rng(0)
    tables = kit.random_tables(g, 1, device)
    selection, caps = random_selection(g, 2, device)
    experts = torch.as_tensor(routes(g, 2, 8, 256), device=device)
    for bad in (
        {"num_experts": 513},
        {"num_experts": 256, "rule": "newest"},
        {"num_experts": 256, "lookahead": -1},
    ):
        with pytest.raises(UsageError, match=r"1\.\.512 experts"):
            correct(experts, selection, caps, tables, **bad)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="at least 16"):
        correct(experts[:, :15], selection, caps, tables, num_experts=256)
    with pytest.raises(UsageError, match="int32 or int64"):
        correct(experts.short(), selection, caps, tables, num_experts=256)
    with pytest.raises(UsageError, match="caps"):
        correct(experts, selection, caps.long(), tables, num_experts=256)
    longer = torch.as_tensor(routes(g, 2, 8, 256, 17), device=device)
    with pytest.raises(UsageError, match="exactly 16"):
        correct(
            longer,
            selection,
            caps,
            tables,
            num_experts=256,
            mask=("alias", torch.rand(2, 17, 8, device=device)),
        )
