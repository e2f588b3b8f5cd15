"""Sampled answers of two servers: whether both follow one law.

Texts of a few tokens behind one prompt are counted; rare ones share a bin, and where even that is
rare it joins the smallest of the others. Chi-square over the two rows of counts asks whether one
law made both. It says nothing about differences far smaller than what so many samples show:
`detectable` tells how small that is.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Of both samples together; chi-square wants 5 expected in each cell.
LEAST_IN_BIN = 20
LEVEL = 0.001
# Tokens that share what the likeliest ones leave.
RARE_TOKENS = 100


@dataclass(frozen=True)
class Comparison:
    """Two samples of one size or two.

    Attributes:
        texts: different ones in both together.
        bins: texts with a bin of their own and one for all others, if there are any.
        p_value: of chi-square with bins - 1 degrees of freedom; 1 where all texts are one.
        total_variation: of the two empirical laws over the bins.
        detectable: share of answers that has to move from one bin to another, each of half the
            probability, until chi-square at `LEVEL` shows it half the time; between rarer bins it
            is less. None where there is one bin, so that nothing can move.
    """

    samples: tuple[int, int]
    texts: int
    bins: int
    p_value: float
    total_variation: float
    detectable: float | None

    @property
    def passed(self) -> bool:
        """Whether one law may have made both."""
        # Written so that NaN fails.
        return self.p_value >= LEVEL

    @property
    def compares(self) -> bool:
        """Whether anything was compared: all answers in one bin may be any texts."""
        return self.bins > 1 or self.texts == 1


def compare_samples(one: Sequence[str], other: Sequence[str]) -> Comparison:
    """Two samples of texts.

    Raises:
        ValueError: a sample is empty.
    """
    if not one or not other:
        raise ValueError(f"{len(one)} and {len(other)} texts: both samples need some")
    from scipy.stats import chi2, chi2_contingency

    counts = Counter(one), Counter(other)
    both = counts[0] + counts[1]
    kept = sorted(
        (text for text, count in both.items() if count >= LEAST_IN_BIN), key=lambda text: both[text]
    )
    rows = [[count[text] for text in kept] for count in counts]
    rest = [len(sample) - sum(row) for sample, row in zip((one, other), rows, strict=True)]
    if sum(rest) >= LEAST_IN_BIN or not kept:
        rows = [[*row, left] for row, left in zip(rows, rest, strict=True)]
    elif len(kept) > 1:
        rows = [[row[0] + left, *row[1:]] for row, left in zip(rows, rest, strict=True)]
    elif sum(rest):
        # Few other texts beside one: small cells, but what is in them must not be lost.
        rows = [[*row, left] for row, left in zip(rows, rest, strict=True)]
    bins = len(rows[0])
    sizes = len(one), len(other)
    shares = [[value / size for value in row] for row, size in zip(rows, sizes, strict=True)]
    apart = 0.5 * sum(abs(a - b) for a, b in zip(*shares, strict=True))
    if bins == 1:
        return Comparison(sizes, len(both), 1, 1.0, apart, None)
    tested: Any = chi2_contingency(rows, correction=False)
    # Two bins of one half: chi-square is 4 * share^2 / (1 / n + 1 / m) in expectation, plus its
    # degrees of freedom.
    limit = float(chi2.isf(LEVEL, bins - 1)) - (bins - 1)
    detectable = 0.5 * math.sqrt(max(limit, 0.0) * (1 / sizes[0] + 1 / sizes[1]))
    return Comparison(sizes, len(both), bins, float(tested.pvalue), apart, detectable)


def nearest_to(texts: float, entries: Sequence[Mapping[str, Any]]) -> list[int]:
    """Answers in the order of how near they come to `texts` equally likely ones behind a prompt.

    By the entropy at each place of plain decoding's own answer, where all that are no candidates
    count as `RARE_TOKENS` equally likely ones. Nothing can be compared where one text is all, nor
    where each is rarer than samples can count.

    Args:
        entries: of `texts.top_two`, with `near` and `best_nats`.

    Returns:
        indices into `entries`, the nearest first.
    """

    def entropy(near: Mapping[int, float], best_nats: float) -> float:
        shares = [math.exp(best_nats - gap) for gap in near.values()]
        rest = max(0.0, 1.0 - math.fsum(shares))
        shares += [rest / RARE_TOKENS] * RARE_TOKENS
        return -math.fsum(share * math.log(share) for share in shares if share > 0.0)

    found = [
        math.fsum(entropy(*place) for place in zip(e["near"], e["best_nats"], strict=True))
        for e in entries
    ]
    return sorted(range(len(found)), key=lambda k: abs(found[k] - math.log(texts)))
