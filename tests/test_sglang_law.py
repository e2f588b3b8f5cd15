"""Two samples of short texts: whether one law made both, and what would show if not."""

# Modules of benchmarks are found by the path that this test adds.
# pyright: reportMissingImports=false

from __future__ import annotations

import math
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
if not BENCHMARKS.is_dir():
    pytest.skip("no benchmarks in this tree (an sdist)", allow_module_level=True)
sys.path.insert(0, str(BENCHMARKS))

from serving.law import compare_samples, nearest_to  # noqa: E402


def draws(shares: Sequence[float], count: int, seed: int) -> list[str]:
    names = [f"text {k}" for k in range(len(shares))]
    return random.Random(seed).choices(names, shares, k=count)


SHARES = [0.3, 0.2, 0.1, *[0.01] * 30, *[0.001] * 100]


def test_samples_of_one_law_fit_it_and_p_values_are_even() -> None:
    found = [
        compare_samples(draws(SHARES, 1500, seed), draws(SHARES, 1500, 1000 + seed))
        for seed in range(60)
    ]
    assert all(comparison.passed for comparison in found)
    below = sum(comparison.p_value < 0.5 for comparison in found)
    assert 17 <= below <= 43
    assert 20 <= found[0].bins <= 40


def test_a_moved_share_is_found_where_it_is_said_to_be() -> None:
    halves = compare_samples(draws([0.5, 0.5], 1500, 1), draws([0.5, 0.5], 1500, 2))
    assert halves.passed
    assert 0.02 < halves.detectable < 0.07
    moved = [0.5 + 2 * halves.detectable, 0.5 - 2 * halves.detectable]
    found = [
        compare_samples(draws([0.5, 0.5], 1500, 3 * seed), draws(moved, 1500, 3 * seed + 1))
        for seed in range(20)
    ]
    assert not any(comparison.passed for comparison in found)
    # Half of them at the edge, as it says.
    edge = [0.5 + halves.detectable, 0.5 - halves.detectable]
    near = [
        compare_samples(draws([0.5, 0.5], 1500, 7 * seed), draws(edge, 1500, 7 * seed + 1)).passed
        for seed in range(100)
    ]
    assert 25 <= sum(near) <= 75


def test_one_text_alone_is_one_law_and_several_in_one_bin_compare_nothing() -> None:
    alone = compare_samples(["a"] * 30, ["a"] * 30)
    assert (alone.compares, alone.texts, alone.bins, alone.detectable) == (True, 1, 1, None)
    rare = compare_samples([f"a{k}" for k in range(300)], [f"b{k}" for k in range(300)])
    assert (rare.compares, rare.texts, rare.bins) == (False, 600, 1)
    assert not compare_samples(["a"] * 9, ["b"] * 9).compares
    with pytest.raises(ValueError, match="0 and 1 texts"):
        compare_samples([], ["a"])


def test_rare_texts_are_never_lost() -> None:
    assert not compare_samples(["a"] * 300, ["b"] * 300).passed
    # Too few for a bin of their own, and yet more than one law makes.
    few = compare_samples(["a"] * 181 + [f"b{k}" for k in range(19)], ["a"] * 200)
    assert (few.passed, few.bins) == (False, 2)
    three = ["a"] * 100 + ["b"] * 60
    joined = compare_samples([*three, *(f"c{k}" for k in range(19))], three)
    assert joined.bins == 2
    assert joined.total_variation == pytest.approx(79 / 179 - 60 / 160)


def test_prompts_are_taken_by_how_many_texts_lie_behind_them() -> None:
    def even(count: int) -> dict[int, float]:
        return dict.fromkeys(range(count), 0.0)

    def entry(*near: dict[int, float], rest: float = 0.0) -> dict[str, Any]:
        shares = [math.fsum(math.exp(-gap) for gap in place.values()) for place in near]
        return {"near": near, "best_nats": [math.log((1.0 - rest) / share) for share in shares]}

    sure = entry({1: 0.0, 2: 30.0}, {1: 0.0, 2: 9.0})
    two, sixteen = entry(even(2), even(1)), entry(even(8), even(2))
    assert nearest_to(14.0, [sure, sixteen, two]) == [1, 2, 0]
    assert nearest_to(3.0, [sixteen, sure, two]) == [2, 1, 0]
    assert nearest_to(1.0, [sixteen, two, sure]) == [2, 1, 0]
    # What the candidates leave makes more texts, too.
    assert nearest_to(60.0, [two, entry(even(2), even(1), rest=0.3)]) == [1, 0]
