"""The dispatcher's table: where it looks, what it admits, and that every choice is launched."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from gdn_kit import make_inputs, poisoned_factors, relative_error

from hybridspec.errors import UsageError
from hybridspec.kernels.gdn.dispatch import choice_of, verify
from hybridspec.kernels.gdn.pending import Pending, advance
from hybridspec.kernels.gdn.table import DEFAULT, Choice, Point, choice_for, choose, points_of

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
POINTS = (
    Point(1, 1, "float32", "sequential", 4, 1, 8, 60.0),
    Point(4, 1, "float32", "sequential", 8, 1, 8, 80.0),
    Point(16, 1, "float32", "block", 16, 1, 8, 189.0),
    Point(2, 4, "float32", "sequential", 16, 1, 8, 150.0),
    Point(16, 4, "float32", "block", 32, 2, 8, None),
)


@pytest.mark.parametrize(
    ("rows", "batch", "expected"),
    [
        (1, 1, 0),
        (2, 1, 1),
        (4, 1, 1),
        (5, 1, 2),
        (16, 2, 2),
        (1, 3, 3),
        (3, 3, 4),
        (1, 64, 3),
    ],
    ids=str,
)
def test_next_larger_rows_at_the_nearest_batch(rows: int, batch: int, expected: int) -> None:
    assert choose(POINTS, rows, batch, "float32") == POINTS[expected].choice()


def test_of_two_batches_as_near_the_larger() -> None:
    points = (POINTS[0], Point(1, 3, "float32", "block", 16, 1, 8, 1.0))
    assert choose(points, 1, 2, "float32").form == "block"


def test_rows_beyond_the_table_take_its_largest() -> None:
    assert choose(POINTS[:2], 16, 1, "float32") == POINTS[1].choice()


def test_nothing_is_guessed_silently() -> None:
    assert choose(POINTS, 1, 1, "bfloat16") is DEFAULT
    assert not choose(POINTS, 16, 4, "float32").measured
    assert choose(POINTS, 16, 1, "float32").measured
    for architecture in (0, 80, 89, 100, 120):
        assert choice_for(1, 1, "float32", architecture) is DEFAULT
    assert not DEFAULT.measured
    with pytest.raises(UsageError, match="at least 1"):
        choice_for(0, 1, "float32", 90)


def test_the_shipped_table_is_launchable() -> None:
    points = points_of(90)
    assert len({(p.rows, p.batch, p.state_dtype) for p in points}) == len(points)
    for point in points:
        tile = 32 // point.key_lanes * point.warps if point.form == "sequential" else 16
        assert point.value_block % tile == 0, point
        assert 128 % point.value_block == 0, point
    for dtype in ("float32", "bfloat16"):
        for batch in (1, 2, 4, 8):
            for rows in range(1, 17):
                choice = choice_for(rows, batch, dtype, 90)
                assert choice.form in ("block", "sequential")


@pytest.mark.parametrize(
    "choice",
    [None, Choice("sequential", 32, 2, 16, measured=True), Choice("block", 32, 1, 8, True)],
    ids=["default", "sequential", "block"],
)
def test_every_choice_gives_the_same(choice: Choice | None, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(3)
    inputs = make_inputs(generator, 1, 3, 1, 2, 64, 64, device=device)
    state = torch.randn(2, 2, 64, 64, generator=generator).to(device)
    factors = poisoned_factors(1, 1, 1, 2, 64, 64, device)
    out = torch.full((1, 3, 2, 64), float("nan"), device=device)
    slots = torch.tensor([1], dtype=torch.int32, device=device)
    lengths = torch.tensor([2], dtype=torch.int32, device=device)
    arguments: Any = (*inputs.tensors(), state, slots, lengths, factors, 0, out)
    verify(*arguments, key_heads=1, choice=choice)
    outputs, _ = inputs.reference(0, 2, state[1])
    assert relative_error(out[0, :2], outputs) < 2e-6
    assert not out[0, 2:].any()
    if device.type != "cuda":
        assert choice_of(inputs.mixed_BTC, state) is DEFAULT
        with pytest.raises(UsageError, match="dependent launch"):
            verify(*arguments, key_heads=1, dependent_launch=True)


def test_pending_rows_are_folded_whatever_the_rows(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(4)
    state = torch.randn(1, 2, 64, 64, generator=generator).to(device)
    slots = torch.tensor([0], dtype=torch.int32, device=device)
    for rows in (2, 9):
        lazy_state, pending = state.clone(), Pending.allocate(1, device=device)
        factors = poisoned_factors(1, 2, 1, 2, 64, 64, device)
        expected = state[0].double().cpu()
        call: Any = ()
        for _ in range(2):
            inputs = make_inputs(generator, 1, rows, 1, 2, 64, 64, device=device)
            out = torch.full((1, rows, 2, 64), float("nan"), device=device)
            lengths = torch.tensor([rows], dtype=torch.int32, device=device)
            call = (*inputs.tensors(), lazy_state, slots, lengths, factors, 0, out)
            verify(*call, key_heads=1, pending=pending)
            outputs, states = inputs.reference(0, rows, expected.to(device))
            assert relative_error(out[0], outputs) < 3e-6
            expected = states[rows - 1].cpu()
            advance(pending, slots, lengths - 1)
        with pytest.raises(UsageError, match="only the block form"):
            verify(*call, key_heads=1, pending=pending, choice=Choice("sequential", 8, 1, 8, True))


@pytest.fixture(scope="module")
def benchmark() -> Any:
    if not (BENCHMARKS / "gdn_dispatch.py").exists():
        pytest.skip("benchmarks are not in this tree (an sdist has none)")
    sys.path.insert(0, str(BENCHMARKS))
    try:
        return importlib.import_module("gdn_dispatch")
    finally:
        sys.path.remove(str(BENCHMARKS))


def test_the_table_is_made_of_the_fastest_right_one(benchmark: Any) -> None:
    def row(form: str, value_block: int, time_us: float | None, problem: str = "") -> dict:
        tile = {"form": form, "value_block": value_block, "warps": 1, "key_lanes": 8}
        place = {"state_dtype": "float32", "batch": 1, "tokens": 2}
        method = f"{form} {value_block}x1"
        return {**place, **tile, "method": method, "verify_us": time_us, "problem": problem}

    rows = [
        row("block", 16, 90.0),
        row("sequential", 8, 70.4),
        row("sequential", 4, 70.0),
        row("sequential", 16, 50.0, "state error"),
        row("block", 32, None),
    ]
    machine = {"gpu": "a GPU", "architecture": 90}
    result = {"machine": machine, "commit": "abc", "rows": rows}
    written: dict[str, Any] = {}
    exec(benchmark.table_module(result), written)
    assert written["POINTS"] == ((2, 1, "float32", "sequential", 8, 1, 8, 70.4),)
    assert written["SOURCE"] == "a GPU, commit abc"
    assert benchmark.summarise(rows)["fp32_b1_t2_block_us"] == 90.0
    assert benchmark.summarise(rows)["failed_checks"] == 1
