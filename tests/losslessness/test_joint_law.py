"""The joint law of three tokens under the point-mass rule is the target's.

Samples are compared with the law itself and with plain decoding. The power against a rule that
accepts drafts 2 percentage points too often is computed, asked to be 99 %, and shown by planting
that rule. Every token of a request that verifies more than three rows is judged as a draft, so the
biased law is known too. Seeds are fixed, so the outcome is.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from law_kit import (
    Accept,
    Length,
    accept_too_often,
    at_random,
    biased,
    by_text,
    direct_counts,
    fit_to,
    fixed,
    law,
    power,
    sample_counts,
    shaped,
)
from scipy import stats

from hybridspec.acceptance import Verdict, accept_sampled, distribution
from hybridspec.artifacts.tables import BLOCK_SIZE
from hybridspec.request import SamplingParams

LEVEL = 1e-3
BIAS = 0.02
SIZE = 20_000
LENGTHS: dict[str, Length] = {
    "none": fixed(1),
    "fixed 2": fixed(2),
    "fixed 3": fixed(3),
    "fixed 16": fixed(16),
    "by text": by_text,
    "at random": at_random,
}
PARAMS = [
    SamplingParams(temperature, top_p) for temperature in (1.0, 0.7, 1.5) for top_p in (1.0, 0.8)
]


def check(params: SamplingParams, length: Length, size: int) -> None:
    expected = law(shaped(params))
    fit = fit_to(sample_counts(params, length, size), expected)
    assert fit.p_value > LEVEL
    assert fit.total_variation < fit.limit


@pytest.mark.parametrize(
    ("params", "length"),
    [(PARAMS[0], "fixed 16"), (PARAMS[3], "at random")],
    ids=["plain, fixed 16", "shaped, at random"],
)
def test_joint_law(params: SamplingParams, length: str) -> None:
    check(params, LENGTHS[length], SIZE)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("params", PARAMS, ids=lambda p: f"{p.temperature}-{p.top_p}")
def test_joint_law_everywhere(params: SamplingParams, length: str) -> None:
    check(params, LENGTHS[length], 3 * SIZE)


def test_power_against_two_percent_is_as_stated() -> None:
    for params in PARAMS:
        conditional = shaped(params)
        expected, other = law(conditional), law(biased(conditional, BIAS))
        assert other.sum() == pytest.approx(1.0)
        assert power(expected, other, SIZE, level=LEVEL) > 0.99


def test_two_percent_of_bias_are_caught() -> None:
    params = PARAMS[0]
    conditional = shaped(params)
    counts = sample_counts(params, fixed(16), SIZE, accept=accept_too_often(BIAS))
    fit = fit_to(counts, law(conditional))
    assert fit.p_value < LEVEL
    assert fit.total_variation > fit.limit
    # And it is the bias that was meant: its own law fits.
    assert fit_to(counts, law(biased(conditional, BIAS))).p_value > LEVEL


def test_same_as_direct_sampling() -> None:
    params = PARAMS[1]
    size = SIZE // 2
    drafted = sample_counts(params, by_text, size)
    direct = direct_counts(params, size, first_seed=10**6)
    seen = (drafted + direct) > 0
    table = np.stack([drafted[seen], direct[seen]])
    result: Any = stats.chi2_contingency(table)
    assert result.pvalue > LEVEL
    fit = fit_to(direct, law(shaped(params)))
    assert fit.p_value > LEVEL


def accept_with_length_from_coins(
    drafts: list[int], logits_LV: torch.Tensor, params: SamplingParams, coins: list[float]
) -> Verdict:
    """Draws reordered: the coins are seen first and the block is cut where a draft would fall."""
    chances = distribution(logits_LV, params)
    for row, (draft, coin) in enumerate(zip(drafts, coins, strict=False)):
        if coin >= float(chances[row, draft]):
            return accept_sampled(drafts[:row], logits_LV[: row + 1], params, coins)
    return accept_sampled(drafts, logits_LV, params, coins)


def accept_with_one_coin_twice(
    drafts: list[int], logits_LV: torch.Tensor, params: SamplingParams, coins: list[float]
) -> Verdict:
    """The coin that judges the first draft draws the last token too."""
    return accept_sampled(drafts, logits_LV, params, [*coins[: BLOCK_SIZE - 1], coins[0]])


@pytest.mark.parametrize("wrong", [accept_with_length_from_coins, accept_with_one_coin_twice])
def test_wrong_use_of_coins_changes_the_law(wrong: Accept) -> None:
    counts = sample_counts(PARAMS[1], fixed(16), SIZE // 10, accept=wrong)
    fit = fit_to(counts, law(shaped(PARAMS[1])))
    assert fit.p_value < LEVEL / 1000
    assert fit.total_variation > fit.limit
