"""Few-row projections against float64: odd shapes, masked rows, split sums, order of summation."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridspec.errors import UsageError
from hybridspec.kernels.skinny_linear.linear import Workspace, skinny_linear, skinny_linear_pair
from hybridspec.kernels.skinny_linear.naive import skinny_linear_naive
from hybridspec.kernels.skinny_linear.table import SM90, SM90_FUSED, tiles_for
from hybridspec.kernels.skinny_linear.tiles import WGMMA_ROWS, Tiles, row_tile

NAN = float("nan")
# Outputs are rounded to bf16 once; Triton's interpreter cuts off instead, which doubles the error.
# Of the norm of many outputs, and of a single one: a last place is 2^-7 just above a power of two.
TOLERANCE = 3e-3 if torch.cuda.is_available() else 6e-3
LAST_PLACE = 2**-8 if torch.cuda.is_available() else 2**-7
TABLES = SM90 | SM90_FUSED
PLAIN = Tiles(columns=24, block_k=16, stages=2)
PARTS = Tiles(columns=16, block_k=16, stages=2, parts=4)
SPLITS = Tiles(columns=24, block_k=16, stages=2, splits=3)
BOTH = Tiles(columns=7, block_k=16, stages=1, parts=2, splits=2)
ALL = [
    pytest.param(tiles, id=name)
    for name, tiles in (("plain", PLAIN), ("parts", PARTS), ("splits", SPLITS), ("both", BOTH))
]


def random(device: torch.device, seed: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).bfloat16().to(device)


def poisoned_workspace(tiles: Tiles, rows: int, outputs: int, device: torch.device) -> Workspace:
    workspace = Workspace.create(tiles, rows, outputs, device)
    workspace.partials.fill_(NAN)
    return workspace


def run(x: torch.Tensor, weight: torch.Tensor, tiles: Tiles) -> torch.Tensor:
    """Into a poisoned output between guards; tickets must come back as zeros."""
    rows, outputs = len(x), len(weight)
    guarded = torch.full((rows + 2, outputs), NAN, dtype=torch.bfloat16, device=x.device)
    workspace = poisoned_workspace(tiles, rows, outputs, x.device)
    out = skinny_linear(x, weight, tiles, workspace=workspace, out=guarded[1:-1])
    assert not workspace.tickets.any()
    assert guarded[[0, -1]].isnan().all()
    return out


def error(found: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> float:
    wanted = skinny_linear_naive(x.double(), weight)
    return float((found.double() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("rows", [1, 2, 7, 15, 16, 17, 33, 48, 64])
@pytest.mark.parametrize("tiles", ALL)
def test_matches_float64(device: torch.device, rows: int, tiles: Tiles) -> None:
    x, weight = random(device, rows, rows, 192), random(device, 1, 40, 192)
    assert error(run(x, weight, tiles), x, weight) < TOLERANCE


@pytest.mark.parametrize(
    ("outputs", "inputs", "tiles"),
    [
        pytest.param(1, 16, Tiles(1, 16, 1), id="one output, one step"),
        pytest.param(23, 48, Tiles(24, 16, 4), id="fewer outputs than a tile, 3 steps, 4 stages"),
        pytest.param(49, 80, Tiles(24, 16, 2), id="one output in the last tile"),
        pytest.param(37, 128, Tiles(5, 16, 2, parts=8), id="5 outputs a program in 8 parts"),
        pytest.param(33, 112, Tiles(16, 16, 3, splits=7), id="a step a split"),
    ],
)
def test_awkward_shapes(device: torch.device, outputs: int, inputs: int, tiles: Tiles) -> None:
    x, weight = random(device, 3, 5, inputs), random(device, 4, outputs, inputs)
    assert error(run(x, weight, tiles), x, weight) < TOLERANCE


@settings(max_examples=8, deadline=None)
@given(
    rows=st.integers(1, 20),
    outputs=st.integers(1, 70),
    columns=st.integers(1, 40),
    parts=st.sampled_from([1, 2, 4]),
    splits=st.integers(1, 3),
    steps=st.integers(1, 3),
)
def test_any_shape(
    device: torch.device,
    rows: int,
    outputs: int,
    columns: int,
    parts: int,
    splits: int,
    steps: int,
) -> None:
    inputs = 16 * parts * splits * steps
    x, weight = random(device, rows, rows, inputs), random(device, outputs, outputs, inputs)
    tiles = Tiles(columns, 16, 2, parts=parts, splits=splits)
    found = run(x, weight, tiles).double()
    wanted = skinny_linear_naive(x.double(), weight)
    # Sums of fp32 lose far less than that, even where terms cancel.
    rounding = 1e-5 * (x.double().abs() @ weight.double().abs().T)
    assert bool(((found - wanted).abs() <= LAST_PLACE * wanted.abs() + rounding).all())


@pytest.mark.parametrize("tiles", ALL)
def test_rows_past_the_count_and_apart_are_not_read(device: torch.device, tiles: Tiles) -> None:
    """x is a view: NaN between its rows, and behind the last one."""
    wide = torch.full((16, 2, 192), NAN, dtype=torch.bfloat16, device=device)
    x = wide[:5, 0]
    x.copy_(random(device, 1, 5, 192))
    weight = random(device, 2, 40, 192)
    assert torch.equal(run(x, weight, tiles), run(x.contiguous(), weight, tiles))


@pytest.mark.parametrize("tiles", ALL)
def test_bits_of_a_row_depend_on_no_other_row(device: torch.device, tiles: Tiles) -> None:
    x, weight = random(device, 1, 16, 192), random(device, 2, 40, 192)
    row = run(x, weight, tiles)[5]
    others = x.flip(0).contiguous()
    others[5] = x[5]
    others[6] = NAN
    assert torch.equal(run(others, weight, tiles)[5], row)
    assert torch.equal(run(x[5:9], weight, tiles)[0], row)


@pytest.mark.parametrize("tiles", ALL)
def test_pair_is_both_projections(device: torch.device, tiles: Tiles) -> None:
    """The border between the weights lies inside a tile, and the second ends inside one."""
    x = random(device, 1, 6, 192)
    first, second = random(device, 2, 29, 192), random(device, 3, 10, 192)
    shapes = (6, 29), (6, 10)
    out = tuple(torch.full(s, NAN, dtype=torch.bfloat16, device=device) for s in shapes)
    workspace = poisoned_workspace(tiles, 6, 39, device)
    skinny_linear_pair(x, first, second, tiles, workspace=workspace, out=(out[0], out[1]))
    assert torch.equal(out[0], run(x, first, tiles))
    assert torch.equal(out[1], run(x, second, tiles))


def test_one_workspace_serves_call_after_call(device: torch.device) -> None:
    weight = random(device, 2, 40, 192)
    workspace = poisoned_workspace(SPLITS, 16, 40, device)
    for rows in (16, 3, 16):
        x = random(device, rows, rows, 192)
        found = skinny_linear(x, weight, SPLITS, workspace=workspace)
        assert torch.equal(found, run(x, weight, SPLITS))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param({"x": lambda x: x.float()}, "float32", id="fp32 x"),
        pytest.param({"x": lambda x: x[:, ::2]}, "strides", id="inputs apart"),
        pytest.param({"x": lambda x: x.repeat(33, 1)}, r"\[1\.\.64 rows", id="too many rows"),
        pytest.param({"x": lambda x: x[:0]}, r"\[1\.\.64 rows", id="no row"),
        pytest.param({"weight": lambda w: w.t()}, "contiguous", id="transposed weight"),
        pytest.param({"weight": lambda w: w[:, :176]}, "inputs|contiguous", id="other inputs"),
        pytest.param({"out": lambda o: o.float()}, "bfloat16", id="fp32 out"),
        pytest.param({"out": lambda o: o[:1]}, "out is", id="small out"),
        pytest.param({"tiles": lambda t: Tiles(24, 128, 2)}, "multiple", id="steps do not divide"),
        pytest.param(
            {"workspace": lambda w: Workspace(w.partials[1:], w.tickets)},
            "holds",
            id="small workspace",
        ),
    ],
)
def test_refusals(device: torch.device, change: dict, message: str) -> None:
    inputs = {
        "x": random(device, 1, 2, 192),
        "weight": random(device, 2, 40, 192),
        "tiles": SPLITS,
        "workspace": Workspace.create(SPLITS, 2, 40, device),
        "out": torch.empty(2, 40, dtype=torch.bfloat16, device=device),
        "next_weight": None,
    }
    inputs |= {name: edit(inputs[name]) for name, edit in change.items()}
    x, weight, tiles = inputs.pop("x"), inputs.pop("weight"), inputs.pop("tiles")
    with pytest.raises(UsageError, match=message):
        skinny_linear(x, weight, tiles, **inputs)


@pytest.mark.parametrize(
    "fields",
    [{"columns": 0}, {"block_k": 48}, {"block_k": 8}, {"parts": 3}, {"splits": 0}, {"prefetch": 2}],
)
def test_tiles_that_cannot_be(fields: dict[str, int]) -> None:
    with pytest.raises(UsageError):
        dataclasses.replace(PLAIN, **fields)


@pytest.mark.parametrize("shape", TABLES, ids=str)
def test_the_table_fits_its_shapes(shape: tuple[int, int, int]) -> None:
    for tiles in TABLES[shape].values():
        assert tiles.fits(shape[2])
        # Otherwise another instruction sums, and bits would tell the number of rows.
        assert tiles.block_n * tiles.parts >= WGMMA_ROWS
    assert len({tiles.order for tiles in TABLES[shape].values()}) == 1


@pytest.mark.parametrize("shape", SM90_FUSED, ids=str)
def test_fused_shapes_are_for_those_who_ask(shape: tuple[int, int, int]) -> None:
    outputs, beside, inputs = shape
    assert tiles_for(16, outputs, inputs, 90, beside=beside) is None
    assert tiles_for(16, outputs, inputs, 90, beside=beside, fused=True) is SM90_FUSED[shape][16]
    assert not SM90.keys() & SM90_FUSED.keys()


def test_what_is_not_in_the_table_stays_with_cublas() -> None:
    shape = next(iter(SM90))
    outputs, beside, inputs = shape
    rows = max(SM90[shape])
    assert tiles_for(rows, outputs, inputs, 90, beside=beside) is SM90[shape][row_tile(rows)]
    assert tiles_for(rows, outputs, inputs, 80, beside=beside) is None
    assert tiles_for(rows, outputs, inputs, 100, beside=beside) is None
    assert tiles_for(rows, outputs + 1, inputs, 90, beside=beside) is None
    assert tiles_for(rows, outputs, inputs, 90, beside=beside + 1) is None
    assert tiles_for(0, outputs, inputs, 90, beside=beside) is None
    assert tiles_for(65, outputs, inputs, 90, beside=beside) is None


def test_no_shipped_tiles_split_a_sum() -> None:
    """Products of one shape share a workspace, and may run on two streams at once in an engine."""
    assert [
        tiles for by_rows in SM90.values() for tiles in by_rows.values() if tiles.splits > 1
    ] == []
