"""Small-batch MoE against float64: row counts, shared and missing experts, masked rows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_moe_kit import (
    EXPERTS,
    TILES,
    TOLERANCE,
    TOP_K,
    WIDTH,
    error,
    expected,
    make_rows,
    make_weights,
)

from hybridspec.errors import UsageError
from hybridspec.kernels.small_moe.moe import allocate_scratch, small_moe
from hybridspec.kernels.small_moe.tiles import Tiles


def poisoned_scratch(device: torch.device, rows: int, top_k: int = TOP_K, width: int = WIDTH):
    scratch = allocate_scratch(rows, top_k, width, device)
    scratch.hidden_TKI.fill_(float("nan"))
    scratch.experts.fill_(-(2**30))
    return scratch


Experts = tuple[torch.Tensor, torch.Tensor]


def run(
    x: torch.Tensor,
    experts: Experts,
    ids: torch.Tensor,
    weights: torch.Tensor,
    tiles: Tiles = TILES,
) -> torch.Tensor:
    gate_up, down = experts
    out = torch.full_like(x, float("nan"))
    scratch = poisoned_scratch(x.device, len(x), ids.shape[1], down.shape[2])
    found = small_moe(x, gate_up, down, ids, weights, scratch, out=out, tiles=tiles)
    assert found is out
    return out


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 7, 8, 13, 16])
def test_matches_float64(device: torch.device, rows: int) -> None:
    experts = make_weights(device)
    x, ids, weights = make_rows(device, rows, seed=rows)
    found = run(x, experts, ids, weights)
    found_error = error(found, expected(x, experts, ids, weights))
    assert found_error < TOLERANCE


@pytest.mark.parametrize(
    ("top_k", "tiles"),
    [
        pytest.param(1, TILES, id="top-1"),
        pytest.param(3, TILES, id="top-3"),
        pytest.param(8, Tiles(16, 64, 1, 16, 2, 1, False), id="top-8, one stage"),
    ],
)
def test_other_top_k_and_tiles(device: torch.device, top_k: int, tiles: Tiles) -> None:
    experts = make_weights(device)
    x, ids, weights = make_rows(device, 5, seed=top_k, top_k=top_k)
    found = run(x, experts, ids, weights, tiles)
    found_error = error(found, expected(x, experts, ids, weights))
    assert found_error < TOLERANCE


def test_all_rows_share_the_experts(device: torch.device) -> None:
    experts = make_weights(device)
    x, ids, weights = make_rows(device, 16, seed=3)
    ids[:] = ids[0].clone()
    found_error = error(run(x, experts, ids, weights), expected(x, experts, ids, weights))
    assert found_error < TOLERANCE


def test_missing_ids_add_nothing(device: torch.device) -> None:
    """Rows of -1 come out as 0, single -1s and ids past the last expert are skipped."""
    experts = make_weights(device)
    x, ids, weights = make_rows(device, 6, seed=5)
    ids[0] = -1
    ids[2, 1] = -1
    ids[3, 0] = EXPERTS
    ids[5] = -1
    found = run(x, experts, ids, weights)
    found_error = error(found, expected(x, experts, ids, weights))
    assert found_error < TOLERANCE
    assert not found[[0, 5]].any()


def test_no_expert_at_all(device: torch.device) -> None:
    experts = make_weights(device)
    x, ids, weights = make_rows(device, 4, seed=6)
    assert not run(x, experts, torch.full_like(ids, -1), weights).any()


def test_aliased_rows_of_weight_zero_are_zero(device: torch.device) -> None:
    """Rows past a device length: the ids of row 0, weight 0, and garbage in x."""
    experts = make_weights(device)
    x, ids, weights = make_rows(device, 8, seed=8)
    alone = run(x[:5].clone(), experts, ids[:5].clone(), weights[:5].clone())
    ids[5:] = ids[0].clone()
    weights[5:] = 0
    x[5:7] = float("nan")
    x[7] = float("inf")
    found = run(x, experts, ids, weights)
    assert not found[5:].any()
    assert torch.equal(found[:5], alone)


def test_expert_twice_in_a_row_counts_with_both_weights(device: torch.device) -> None:
    experts = make_weights(device)
    x, ids, weights = make_rows(device, 3, seed=9)
    ids[1, 3] = ids[1, 0]
    ids[2, 1] = ids[2, 2]
    found_error = error(run(x, experts, ids, weights), expected(x, experts, ids, weights))
    assert found_error < TOLERANCE


def test_unused_experts_are_not_read(device: torch.device) -> None:
    gate_up, down = make_weights(device)
    x, ids, weights = make_rows(device, 2, seed=10)
    clean = run(x, (gate_up, down), ids, weights)
    unused = [e for e in range(EXPERTS) if e not in ids.flatten().tolist()]
    gate_up[unused] = float("nan")
    down[unused] = float("nan")
    assert torch.equal(run(x, (gate_up, down), ids, weights), clean)


@settings(max_examples=12, deadline=None)
@given(
    ids=st.lists(st.lists(st.integers(-1, 5), min_size=2, max_size=2), min_size=1, max_size=5),
    seed=st.integers(0, 2**16),
)
def test_any_routes(device: torch.device, ids: list[list[int]], seed: int) -> None:
    experts = make_weights(device, experts=6)
    x, _, weights = make_rows(device, len(ids), seed, top_k=2, experts=6)
    routes = torch.tensor(ids, dtype=torch.int32, device=device)
    found = error(run(x, experts, routes, weights), expected(x, experts, routes, weights))
    assert found < TOLERANCE


def test_rows_do_not_depend_on_their_neighbours(device: torch.device) -> None:
    """A row's bits stay the same beside any other rows of the same experts."""
    experts = make_weights(device)
    x, ids, weights = make_rows(device, 4, seed=11)
    ids[:] = ids[0].clone()
    first = run(x, experts, ids, weights)
    x[1:] = x[1:].flip(0).clone()
    assert torch.equal(run(x, experts, ids, weights)[0], first[0])


def test_scratch_of_more_rows_serves_fewer(device: torch.device) -> None:
    experts = make_weights(device)
    scratch = poisoned_scratch(device, 16)
    for rows in (16, 1, 5):
        x, ids, weights = make_rows(device, rows, seed=rows)
        out = small_moe(x, *experts, ids, weights, scratch, tiles=TILES)
        found_error = error(out, expected(x, experts, ids, weights))
    assert found_error < TOLERANCE


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param({"x": lambda x: x.float()}, "x is", id="fp32 x"),
        pytest.param({"x": lambda x: x[:, ::2]}, "x is", id="strided x"),
        pytest.param({"ids": lambda ids: ids.long()}, "ids is", id="int64 ids"),
        pytest.param({"ids": lambda ids: ids.repeat(65, 1)}, "130 rows", id="too many rows"),
        pytest.param({"weights": lambda w: w.bfloat16()}, "weights is", id="bf16 weights"),
        pytest.param({"tiles": lambda t: Tiles(48, 32, 1, 16, 4, 1, False)}, "width", id="tile"),
    ],
)
def test_refusals(device: torch.device, change: dict, message: str) -> None:
    experts = make_weights(device)
    x, ids, weights = make_rows(device, 2, seed=1)
    inputs = {"x": x, "ids": ids, "weights": weights, "tiles": TILES}
    inputs |= {name: edit(inputs[name]) for name, edit in change.items()}
    scratch = allocate_scratch(2, TOP_K, WIDTH, device)
    with pytest.raises(UsageError, match=message):
        small_moe(
            inputs["x"],
            *experts,
            inputs["ids"],
            inputs["weights"],
            scratch,
            tiles=inputs["tiles"],
        )


def test_refuses_out_on_x_and_small_scratch(device: torch.device) -> None:
    experts = make_weights(device)
    x, ids, weights = make_rows(device, 2, seed=1)
    with pytest.raises(UsageError, match="out is x"):
        small_moe(
            x, *experts, ids, weights, allocate_scratch(2, TOP_K, WIDTH, device), out=x, tiles=TILES
        )
    with pytest.raises(UsageError, match="scratch holds"):
        small_moe(x, *experts, ids, weights, allocate_scratch(1, TOP_K, WIDTH, device), tiles=TILES)
