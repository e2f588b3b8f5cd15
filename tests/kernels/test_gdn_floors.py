"""Byte floors of the GDN benchmark against figures worked out by hand."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
MIB = 2**20


@pytest.fixture(scope="module")
def floors() -> Any:
    if not (BENCHMARKS / "gdn" / "floors.py").exists():
        pytest.skip("benchmarks are not in this tree (an sdist has none)")
    sys.path.insert(0, str(BENCHMARKS))
    try:
        return importlib.import_module("gdn.floors")
    finally:
        sys.path.remove(str(BENCHMARKS))


@pytest.fixture(scope="module")
def shape(floors: Any) -> Any:
    return floors.Shape()


def test_parts_of_one_layer(floors: Any, shape: Any) -> None:
    assert floors.state_bytes(shape) == 2 * MIB
    assert floors.state_bytes(shape, 2) == MIB
    # 4 KiB of raw key, 16 KiB of update, 128 bytes of log decay.
    assert floors.factor_bytes(shape) == 4096 + 16384 + 128
    # 16 KiB of query, key and value, 128 bytes of a and b, 8 KiB of output.
    assert floors.token_bytes(shape) == 16384 + 128 + 8192


# MiB of one layer at batch 1 in fp32 state, to the digits of a table made before this code.
@pytest.mark.parametrize(
    ("tokens", "kept_verify", "kept_round", "factor_verify", "factor_round"),
    [
        (1, 4.02, 8.02, 2.04, 6.06),
        (4, 10.1, 14.1, 2.17, 6.25),
        (8, 18.2, 22.2, 2.34, 6.50),
        (16, 34.4, 38.4, 2.69, 7.00),
    ],
)
def test_rounds_agree_with_the_table(
    floors: Any,
    shape: Any,
    tokens: int,
    kept_verify: float,
    kept_round: float,
    factor_verify: float,
    factor_round: float,
) -> None:
    one = floors.Shape(layers=1)
    coarse, fine = pytest.approx, 0.006
    assert floors.verify_bytes(shape, tokens, "states") / MIB == coarse(kept_verify, abs=0.06)
    assert floors.round_bytes(one, 1, tokens, "states") / MIB == coarse(kept_round, abs=0.06)
    assert floors.verify_bytes(shape, tokens) / MIB == coarse(factor_verify, abs=fine)
    assert floors.round_bytes(one, 1, tokens) / MIB == coarse(factor_round, abs=fine)


def test_a_round_grows_with_layers_and_batch(floors: Any, shape: Any) -> None:
    one = floors.round_bytes(floors.Shape(layers=1), 1, 8)
    assert floors.round_bytes(shape, 4, 8) == 30 * 4 * one


def test_half_the_state_dtype_halves_only_the_state(floors: Any, shape: Any) -> None:
    saved = floors.verify_bytes(shape, 4) - floors.verify_bytes(shape, 4, state_bytes_per_value=2)
    assert saved == MIB


def test_nothing_accepted_moves_nothing(floors: Any, shape: Any) -> None:
    assert floors.commit_bytes(shape, 0) == 0
    assert floors.commit_bytes(shape, 0, "states") == 0


def test_microseconds_at_the_measured_copy_bandwidth(floors: Any, shape: Any) -> None:
    # 30 layers, 16 tokens: 80 us at 2763 GB/s in the table of the prototype's run.
    floor_us = floors.microseconds(floors.round_bytes(shape, 1, 16), 2763e9)
    assert floor_us == pytest.approx(80, abs=0.5)
