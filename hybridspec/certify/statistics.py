"""Tests and intervals of the certificate: plain numbers in, plain numbers out."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import optimize, stats

LEAST_EXPECTED = 8.0
_DRAWS = 4000


@dataclass(frozen=True)
class Paired:
    """Outcomes of the same n prompts two ways.

    Attributes:
        both, neither: prompts right, or wrong, both ways.
        only_first, only_second: right one way only (b and c of McNemar's table).
    """

    both: int
    only_first: int
    only_second: int
    neither: int

    @property
    def n(self) -> int:
        """Pairs."""
        return self.both + self.only_first + self.only_second + self.neither

    @property
    def difference(self) -> float:
        """Share right the second way minus the share right the first way."""
        return (self.only_second - self.only_first) / self.n


def paired(first: Sequence[bool], second: Sequence[bool]) -> Paired:
    """Count the four outcomes of pairs."""
    table = [0, 0, 0, 0]
    for one, two in zip(first, second, strict=True):
        table[2 * (not one) + (not two)] += 1
    return Paired(*table)


def mcnemar_exact(counts: Paired) -> float:
    """Two-sided exact p-value of McNemar's test: discordant pairs against a fair coin.

    McNemar, Psychometrika 12 (1947) 153-157, with the binomial distribution in place of its
    chi-square approximation.
    """
    discordant = counts.only_first + counts.only_second
    if discordant == 0:
        return 1.0
    return float(stats.binomtest(counts.only_second, discordant, 0.5).pvalue)


def tango_interval(counts: Paired, *, level: float = 0.95) -> tuple[float, float]:
    """Score interval of the paired difference of two shares, second minus first.

    Tango, Statistics in Medicine 17 (1998) 891-908: the differences d for which the score test
    with d as its null hypothesis is not significant. At d = 0 that test is McNemar's.

    Returns:
        lower and upper limit.
    """
    z = float(stats.norm.isf((1.0 - level) / 2.0))

    def score(difference: float) -> float:
        return tango_score(counts, difference)

    middle = counts.difference
    lower = upper = middle
    if middle > -1.0:
        lower = _root(lambda d: score(d) - z, -1.0, middle)
    if middle < 1.0:
        upper = _root(lambda d: score(d) + z, middle, 1.0)
    return lower, upper


def tango_score(counts: Paired, difference: float) -> float:
    """Score statistic of `difference` as the null hypothesis; it falls as the difference grows."""
    n, b, c = counts.n, counts.only_second, counts.only_first
    # The restricted estimate of the share right only the first way: root of a quadratic.
    linear = -b - c + (2 * n - b + c) * difference
    constant = -c * difference * (1.0 - difference)
    root = math.sqrt(max(linear * linear - 8.0 * n * constant, 0.0))
    share = (root - linear) / (4.0 * n)
    variance = n * (2.0 * share + difference * (1.0 - difference))
    top = b - c - n * difference
    if variance <= 0.0:
        return 0.0 if top == 0.0 else math.copysign(math.inf, top)
    return top / math.sqrt(variance)


def _root(function: Callable[[float], float], low: float, high: float) -> float:
    inside = 1e-12
    low, high = low + inside, high - inside
    if function(low) * function(high) > 0.0:
        # The limit lies at the end of the range.
        return low if abs(function(low)) < abs(function(high)) else high
    return _brentq(function, low, high)


def _brentq(function: Callable[[float], float], low: float, high: float) -> float:
    found: Any = optimize.brentq(function, low, high, xtol=1e-12)
    return float(found)


def pairs_needed(margin: float, *, level: float = 0.95) -> int:
    """Pairs below which not even complete agreement can show a difference above `-margin`.

    Without discordant pairs the lower limit of `tango_interval` is -z^2 / (n + z^2).
    """
    z2 = float(stats.norm.isf((1.0 - level) / 2.0)) ** 2
    return math.floor(z2 * (1.0 - margin) / margin) + 1


@dataclass(frozen=True)
class Fit:
    """How well counts fit a law.

    Attributes:
        p_value: Pearson's chi-square test over `bins` bins, rare ones joined.
        total_variation: half the absolute difference of shares, summed over all bins.
        limit: its quantile at 1 - level where the law holds.
        effect: smallest Cohen's w that the test finds with 90 % power at its level.
    """

    bins: int
    p_value: float
    total_variation: float
    limit: float
    effect: float


def fit_to_law(
    counts: npt.NDArray[np.int64], law: npt.NDArray[np.float64], *, level: float, seed: int
) -> Fit:
    """Test counts [bins] against their probabilities [bins].

    The rarest bins are joined until `LEAST_EXPECTED` are expected of them (Cochran, Biometrics 10
    (1954) 417-451 asks for five). The limit of the total variation distance comes from draws of
    the law. A count in a bin of probability zero gives p = 0.
    """
    size = int(counts.sum())
    if size == 0 or bool((counts[law <= 0.0] > 0).any()):
        return Fit(len(law), 0.0, 1.0, 0.0, math.inf)
    order = np.argsort(law, kind="stable")
    order = order[law[order] > 0.0]
    joined = 1 + int(np.searchsorted(np.cumsum(law[order]) * size, LEAST_EXPECTED))
    have, want = (
        np.concatenate([[values[order[:joined]].sum()], values[order[joined:]]])
        for values in (counts.astype(np.float64), law * size)
    )
    distance = float(np.abs(counts / size - law).sum() / 2.0)
    draws = np.random.default_rng(seed).multinomial(size, law / law.sum(), size=_DRAWS)
    limit = float(np.quantile(np.abs(draws / size - law).sum(1) / 2.0, 1.0 - level))
    freedom = have.size - 1
    if freedom < 1:
        # Everything is one bin: nothing can be told.
        return Fit(1, 1.0, distance, limit, math.inf)
    p_value = float(stats.chisquare(have, want * (size / want.sum())).pvalue)
    return Fit(have.size, p_value, distance, limit, smallest_effect(freedom, size, level=level))


def smallest_effect(freedom: int, size: int, *, level: float, power: float = 0.9) -> float:
    """Cohen's w that a chi-square test of `size` samples finds with `power`.

    w^2 is the sum of (q - p)^2 / p; the statistic is then noncentral chi-square with size * w^2
    (Cohen, Statistical Power Analysis for the Behavioral Sciences, 1988, chapter 7).
    """
    critical = float(stats.chi2.isf(level, freedom))

    def missing(shift: float) -> float:
        return float(stats.ncx2.sf(critical, freedom, shift)) - power

    high = 1.0
    while missing(high) < 0.0:
        high *= 2.0
    return math.sqrt(_brentq(missing, 1e-9, high) / size)
