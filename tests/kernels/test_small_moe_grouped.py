"""MoE of more than 16 rows: pairs grouped by expert, masked rows free, rows independent in bits."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_moe_kit import (
    EXPERTS,
    HIDDEN,
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
from hybridspec.kernels.small_moe.grouping import Groups, allocate_groups, group_pairs
from hybridspec.kernels.small_moe.moe import Scratch, allocate_scratch, small_moe
from hybridspec.kernels.small_moe.tiles import MAX_ROWS, GroupedTiles

# 3 programs for gate-up: strides over items that end unevenly.
GROUPED = GroupedTiles(
    item_rows=8,
    gate_up_n=32,
    gate_up_k=32,
    gate_up_stages=2,
    gate_up_programs=3,
    gate_up_fused=False,
    down_n=32,
    down_parts=4,
    down_stages=2,
    dependent=False,
)
SIXTEEN = dataclasses.replace(GROUPED, item_rows=16, gate_up_fused=True, down_parts=2)


def poison_groups(groups: Groups) -> None:
    for tensor in vars(groups).values():
        tensor.fill_(-(2**30))


def poisoned_scratch(
    device: torch.device, rows: int, top_k: int = TOP_K, width: int = WIDTH
) -> Scratch:
    scratch = allocate_scratch(rows, top_k, width, device, hidden=HIDDEN)
    assert scratch.grouped is not None
    scratch.hidden_TKI.fill_(float("nan"))
    scratch.grouped.partial_NH.fill_(float("nan"))
    poison_groups(scratch.grouped.groups)
    return scratch


def run(
    x: torch.Tensor,
    experts: tuple[torch.Tensor, torch.Tensor],
    ids: torch.Tensor,
    weights: torch.Tensor,
    tiles: GroupedTiles = GROUPED,
) -> torch.Tensor:
    out = torch.full_like(x, float("nan"))
    scratch = poisoned_scratch(x.device, len(x), ids.shape[1], experts[1].shape[2])
    small_moe(x, *experts, ids, weights, scratch, out=out, tiles=tiles)
    return out


@pytest.mark.parametrize(
    ("rows", "tiles"),
    [
        pytest.param(17, GROUPED, id="17"),
        pytest.param(32, GROUPED, id="32"),
        pytest.param(48, SIXTEEN, id="48 by 16"),
        pytest.param(64, GROUPED, id="64"),
        pytest.param(100, SIXTEEN, id="100 by 16"),
        pytest.param(128, GROUPED, id="128"),
    ],
)
def test_matches_float64(device: torch.device, rows: int, tiles: GroupedTiles) -> None:
    experts = make_weights(device)
    x, ids, weights = make_rows(device, rows, seed=rows)
    found_error = error(run(x, experts, ids, weights, tiles), expected(x, experts, ids, weights))
    assert found_error < TOLERANCE


def test_most_rows_and_one_expert(device: torch.device) -> None:
    """128 rows of a single expert are 16 items of it."""
    experts = make_weights(device)
    x, ids, weights = make_rows(device, MAX_ROWS, seed=1, top_k=1)
    ids[:] = 5
    found_error = error(run(x, experts, ids, weights), expected(x, experts, ids, weights))
    assert found_error < TOLERANCE


def test_no_expert_is_shared(device: torch.device) -> None:
    experts = make_weights(device, experts=40)
    x, ids, weights = make_rows(device, 20, seed=2, top_k=2)
    ids[:] = torch.randperm(40, generator=torch.Generator().manual_seed(3)).view(20, 2)
    found_error = error(run(x, experts, ids, weights), expected(x, experts, ids, weights))
    assert found_error < TOLERANCE


def test_missing_ids_and_repeated_experts(device: torch.device) -> None:
    experts = make_weights(device)
    x, ids, weights = make_rows(device, 18, seed=4)
    ids[0] = -1
    ids[2, 1] = -1
    ids[3, 0] = EXPERTS
    ids[7, 2] = ids[7, 0].clone()
    found = run(x, experts, ids, weights)
    assert not found[0].any()
    assert error(found, expected(x, experts, ids, weights)) < TOLERANCE


def test_nothing_counts(device: torch.device) -> None:
    experts = make_weights(device)
    x, ids, weights = make_rows(device, 17, seed=5)
    assert not run(x, experts, ids, torch.zeros_like(weights)).any()
    assert not run(x, experts, torch.full_like(ids, -1), weights).any()


def test_masked_rows_read_nothing_and_change_nothing(device: torch.device) -> None:
    """2 requests of 16 rows, 4 of them live; masked rows alias their anchor or name other experts.

    Weights of experts that masked rows alone name are NaN, and so are the rows.
    """
    gate_up, down = make_weights(device)
    x, ids, weights = make_rows(device, 32, seed=6, experts=EXPERTS - 4)
    live = torch.arange(32, device=device) % 16 < 4
    weights[~live] = 0
    dropped = ids.clone()
    dropped[~live] = -1
    wanted = run(x, (gate_up, down), dropped, weights)
    ids[4:12] = ids[0].clone()
    ids[12:16] = torch.arange(EXPERTS - 4, EXPERTS, dtype=torch.int32, device=device)
    ids[20:] = ids[16].clone()
    gate_up[EXPERTS - 4 :] = float("nan")
    down[EXPERTS - 4 :] = float("nan")
    x[~live] = float("nan")
    found = run(x, (gate_up, down), ids, weights)
    assert not found[~live].any()
    assert found[live].any(1).all()
    assert torch.equal(found, wanted)


def test_bits_of_a_row_depend_on_nothing_else(device: torch.device) -> None:
    """Among other rows, at other places of the call and of its expert's items: the same bits.

    Two slots cancel, so that another order of the sum over slots shows in bf16. Weight rows have a
    single element: products on the host depend on the column in their last bit otherwise.
    """
    generator = torch.Generator().manual_seed(9)
    gate_up, down = (torch.zeros_like(one) for one in make_weights(device))
    for one in (gate_up, down):
        places = torch.randint(one.shape[-1], one.shape[:-1], generator=generator)
        one.scatter_(-1, places[..., None].to(device), 1.5)
    x, ids, weights = make_rows(device, 40, seed=7)
    ids[:, 2] = ids[:, 0].clone()
    weights[:, 0], weights[:, 2] = 2.0**16, -(2.0**16)
    ids[:20] = ids[0].clone()
    first = run(x, (gate_up, down), ids, weights)
    chosen = torch.randperm(40, generator=torch.Generator().manual_seed(8))[:21].to(device)
    found = run(x[chosen], (gate_up, down), ids[chosen], weights[chosen])
    assert torch.equal(found, first[chosen])


def test_scratch_of_more_rows_serves_fewer(device: torch.device) -> None:
    experts = make_weights(device)
    scratch = poisoned_scratch(device, MAX_ROWS)
    for rows, tiles in ((40, GROUPED), (5, TILES), (17, GROUPED)):
        x, ids, weights = make_rows(device, rows, seed=rows)
        out = small_moe(x, *experts, ids, weights, scratch, tiles=tiles)
        assert error(out, expected(x, experts, ids, weights)) < TOLERANCE


@settings(max_examples=10, deadline=None)
@given(
    ids=st.lists(st.lists(st.integers(-1, 6), min_size=2, max_size=2), min_size=17, max_size=24),
    dead=st.sets(st.integers(0, 47)),
    item_rows=st.sampled_from([8, 16]),
)
def test_groups_of_any_routes(
    device: torch.device, ids: list[list[int]], dead: set[int], item_rows: int
) -> None:
    """Positions, items and their pairs against sorting; 6 experts, id 6 is none."""
    flat = [expert for row in ids for expert in row]
    pairs = len(flat)
    weights = torch.ones(pairs)
    weights[[pair for pair in dead if pair < pairs]] = 0
    groups = allocate_groups(pairs, device)
    poison_groups(groups)
    ids_TK = torch.tensor(ids, dtype=torch.int32, device=device)
    tiles = dataclasses.replace(GROUPED, item_rows=item_rows)
    group_pairs(ids_TK, weights.view(-1, 2).to(device), groups, 6, tiles)

    counting = [p for p in range(pairs) if 0 <= flat[p] < 6 and weights[p]]
    ordered = sorted(counting, key=lambda p: flat[p])
    positions = [-1] * pairs
    for position, pair in enumerate(ordered):
        positions[pair] = position
    assert groups.positions_N.tolist() == positions
    found = []
    for item in range(int(groups.num_items)):
        word = int(groups.items_X[item])
        expert, start, rows = word // 65536, word // 16 % 4096, word % 16 + 1
        first = item * item_rows
        assert 1 <= rows <= item_rows
        assert groups.pairs_XR[first : first + rows].tolist() == ordered[start : start + rows]
        assert {flat[pair] for pair in ordered[start : start + rows]} == {expert}
        found += ordered[start : start + rows]
    assert found == ordered
    wanted_items = sum(-(-sum(flat[p] == e for p in ordered) // item_rows) for e in range(6))
    assert int(groups.num_items) == wanted_items


def test_refusals(device: torch.device) -> None:
    experts = make_weights(device)
    with pytest.raises(UsageError, match="pass hidden"):
        allocate_scratch(17, TOP_K, WIDTH, device)
    with pytest.raises(UsageError, match="129 rows"):
        allocate_scratch(129, TOP_K, WIDTH, device, hidden=HIDDEN)
    x, ids, weights = make_rows(device, 17, seed=9)
    scratch = poisoned_scratch(device, 17)
    with pytest.raises(UsageError, match="Tiles for 17 rows"):
        small_moe(x, *experts, ids, weights, scratch, tiles=TILES)
    with pytest.raises(UsageError, match="GroupedTiles for 16 rows"):
        small_moe(x[:16], *experts, ids[:16], weights[:16], scratch, tiles=GROUPED)
    bare = dataclasses.replace(scratch, grouped=None)
    with pytest.raises(UsageError, match="allocate it with hidden"):
        small_moe(x, *experts, ids, weights, bare, tiles=GROUPED)
