"""Small-batch MoE at the full shape: dependent launches, graphs, determinism."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from hybridspec.kernels.small_moe.moe import Scratch, allocate_scratch, small_moe
from hybridspec.kernels.small_moe.naive import small_moe_naive
from hybridspec.kernels.small_moe.tiles import grouped_tiles_for, tiles_for

pytestmark = pytest.mark.gpu

EXPERTS, TOP_K, HIDDEN, WIDTH = 256, 8, 2048, 512


@pytest.fixture(scope="module")
def experts(cuda: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        weights = torch.empty(shape, dtype=torch.bfloat16, device=cuda)
        return weights.normal_(std=shape[-1] ** -0.5)

    return random(EXPERTS, 2 * WIDTH, HIDDEN), random(EXPERTS, HIDDEN, WIDTH)


@pytest.fixture(scope="module")
def scratch(cuda: torch.device) -> Scratch:
    return allocate_scratch(128, TOP_K, WIDTH, cuda, hidden=HIDDEN)


def random_inputs(device: torch.device, rows: int) -> tuple[torch.Tensor, ...]:
    x = torch.randn(rows, HIDDEN, device=device).bfloat16()
    weights, ids = torch.rand(rows, EXPERTS, device=device).topk(TOP_K)
    return x, ids.int(), weights / weights.sum(-1, keepdim=True)


def poison(scratch: Scratch) -> None:
    assert scratch.grouped is not None
    scratch.hidden_TKI.fill_(float("nan"))
    scratch.experts.fill_(-(2**30))
    scratch.grouped.partial_NH.fill_(float("nan"))
    for tensor in vars(scratch.grouped.groups).values():
        tensor.fill_(-(2**30))


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8, 9, 16, 17, 32, 48, 64, 100, 128])
def test_matches_float64(experts, scratch: Scratch, rows: int) -> None:
    gate_up, down = experts
    x, ids, weights = random_inputs(gate_up.device, rows)
    poison(scratch)
    out = torch.full_like(x, float("nan"))
    small_moe(x, gate_up, down, ids, weights, scratch, out=out)
    found_error = error(out, small_moe_naive(x.double(), gate_up, down, ids, weights))
    assert found_error < 5e-3


def test_graph_replays_with_other_routes_equal_eager_calls(experts, scratch: Scratch) -> None:
    """Back-to-back calls share one scratch, 50 replays."""
    gate_up, down = experts
    steps = [random_inputs(gate_up.device, rows) for rows in (16, 128, 1, 17, 16, 4, 64)]
    outputs = [torch.empty_like(x) for x, _, _ in steps]

    def work() -> None:
        for (x, ids, weights), out in zip(steps, outputs, strict=True):
            small_moe(x, gate_up, down, ids, weights, scratch, out=out)

    work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    for _ in range(50):
        for (x, ids, weights), out in zip(steps, outputs, strict=True):
            fresh = random_inputs(x.device, len(x))
            for buffer, values in zip((x, ids, weights), fresh, strict=True):
                buffer.copy_(values)
            out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        for (x, ids, weights), out in zip(steps, outputs, strict=True):
            alone = small_moe(x, gate_up, down, ids, weights, scratch)
            assert torch.equal(out, alone)


@pytest.mark.parametrize("rows", [16, 32, 128])
def test_dependent_launch_changes_no_bit(experts, scratch: Scratch, rows: int) -> None:
    gate_up, down = experts
    x, ids, weights = random_inputs(gate_up.device, rows)
    base = tiles_for(rows, 90) if rows <= 16 else grouped_tiles_for(90)
    plain = dataclasses.replace(base, dependent=False)
    alone = small_moe(x, gate_up, down, ids, weights, scratch, tiles=plain)
    assert torch.equal(small_moe(x, gate_up, down, ids, weights, scratch), alone)


@pytest.mark.parametrize("rows", [17, 128])
def test_fused_loops_and_larger_items(experts, scratch: Scratch, rows: int) -> None:
    gate_up, down = experts
    x, ids, weights = random_inputs(gate_up.device, rows)
    ids[3:] = torch.where(ids[3:] % 4 == 0, ids[0], ids[3:])
    wanted = small_moe_naive(x.double(), gate_up, down, ids, weights)
    found = []
    for fused in (False, True):
        for item_rows in (8, 16):
            poison(scratch)
            tiles = dataclasses.replace(
                grouped_tiles_for(90), gate_up_fused=fused, item_rows=item_rows
            )
            found.append(small_moe(x, gate_up, down, ids, weights, scratch, tiles=tiles))
            assert error(found[-1], wanted) < 5e-3
    # Items of 8 and of 16 use other instructions; loops fused or not do not.
    assert torch.equal(found[0], found[2])
    assert torch.equal(found[1], found[3])


def test_all_rows_share_the_experts(experts, scratch: Scratch) -> None:
    """16 items an expert."""
    gate_up, down = experts
    x, ids, weights = random_inputs(gate_up.device, 128)
    ids[:] = ids[0].clone()
    poison(scratch)
    out = small_moe(x, gate_up, down, ids, weights, scratch)
    assert error(out, small_moe_naive(x.double(), gate_up, down, ids, weights)) < 5e-3


def test_bits_of_a_row_depend_on_nothing_else(experts, scratch: Scratch) -> None:
    """Beyond 16 rows: among other rows, at other places, in calls of other sizes.

    Two slots cancel, so that another order of the sum over slots shows in bf16.
    """
    gate_up, down = experts
    x, ids, weights = random_inputs(gate_up.device, 128)
    ids[:, 5] = ids[:, 1].clone()
    weights[:, 1], weights[:, 5] = 2.0**16, -(2.0**16)
    ids[:24] = ids[0].clone()
    first = small_moe(x, gate_up, down, ids, weights, scratch)
    for rows in (17, 40, 127):
        chosen = torch.randperm(128, device=x.device)[:rows]
        found = small_moe(x[chosen], gate_up, down, ids[chosen], weights[chosen], scratch)
        assert torch.equal(found, first[chosen])


@pytest.mark.parametrize("requests", [2, 4, 8])
def test_masked_rows_of_a_batch_read_nothing(experts, scratch: Scratch, requests: int) -> None:
    """4 live rows of 16 a request; masked rows hold NaN and alias their anchor with weight 0."""
    gate_up, down = experts
    x, ids, weights = random_inputs(gate_up.device, 16 * requests)
    live = torch.arange(len(x), device=x.device) % 16 < 4
    dropped = torch.where(live[:, None], ids, -1)
    weights[~live] = 0
    wanted = small_moe(x, gate_up, down, dropped, weights, scratch)
    ids = torch.where(live[:, None], ids, ids[::16].repeat_interleave(16, 0))
    x[~live] = float("nan")
    poison(scratch)
    out = small_moe(x, gate_up, down, ids, weights, scratch)
    assert not out[~live].any()
    assert torch.equal(out, wanted)
    assert error(out[live], small_moe_naive(x.double(), gate_up, down, ids, weights)[live]) < 5e-3


def test_masked_rows_are_zero_and_change_nothing(experts, scratch: Scratch) -> None:
    gate_up, down = experts
    x, ids, weights = random_inputs(gate_up.device, 16)
    alone = small_moe(x[:5], gate_up, down, ids[:5], weights[:5], scratch)
    ids[5:12] = ids[0].clone()
    weights[5:12] = 0
    ids[12:] = -1
    x[5:] = float("nan")
    out = small_moe(x, gate_up, down, ids, weights, scratch)
    assert not out[5:].any()
    assert error(out[:5], alone.double()) < 5e-3
