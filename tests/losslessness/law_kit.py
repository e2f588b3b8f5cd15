"""The law of several tokens of a small target, its samples, and tests that tell laws apart.

The target is a table: the logits of the next token depend on the last one. So the law of a text is
a product that can be written down, also under a bias that is planted in the acceptance rule.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from scipy import stats

from hybridspec.acceptance import Coins, Verdict, accept_sampled, distribution, draw
from hybridspec.artifacts.tables import BLOCK_SIZE, NUM_DRAFTS
from hybridspec.request import SamplingParams

VOCAB = 4
DEPTH = 3
ANCHOR = 0
LOGITS_VV = torch.tensor(
    [[1.2, 0.5, 0.1, -0.9], [0.2, 1.0, 0.9, -0.4], [-0.6, 0.3, 0.8, 0.7], [0.9, -0.2, 0.4, 0.6]],
    dtype=torch.float64,
)
# What the drafter says behind each token: by turns the best and the second best.
DRAFT_OF = (0, 2, 2, 3)
Length = Callable[[list[int], int], int]
Accept = Callable[[list[int], torch.Tensor, SamplingParams, list[float]], Verdict]


def drafts_behind(token: int) -> list[int]:
    drafts = [DRAFT_OF[token]]
    while len(drafts) < NUM_DRAFTS:
        drafts.append(DRAFT_OF[drafts[-1]])
    return drafts


def fixed(length: int) -> Length:
    return lambda _text, _seed: length


def by_text(text: list[int], _seed: int) -> int:
    """As a policy chooses: from the text and nothing else."""
    return 1 + (5 * len(text) + 3 * text[-1]) % BLOCK_SIZE


def at_random(text: list[int], seed: int) -> int:
    """Any length, round by round, from a stream that has nothing to do with the coins."""
    return 1 + (seed * 7919 + len(text) * 104_729) % 97 % BLOCK_SIZE


def sample_counts(
    params: SamplingParams,
    length: Length,
    size: int,
    *,
    first_seed: int = 0,
    accept: Accept = accept_sampled,
) -> np.ndarray:
    """Counts of all texts of `DEPTH` tokens, int64 [VOCAB ** DEPTH]; a request for each text.

    Rounds are put together as the engine does it: coins of the round, verdict, tokens.
    """
    blocks = [drafts_behind(token) for token in range(VOCAB)]
    logits = [LOGITS_VV[[token, *blocks[token]]] for token in range(VOCAB)]
    counts = np.zeros(VOCAB**DEPTH, dtype=np.int64)
    for seed in range(first_seed, first_seed + size):
        coins, text = Coins(seed), [ANCHOR]
        while len(text) <= DEPTH:
            anchor, rows = text[-1], length(text, seed)
            drafts = blocks[anchor][: rows - 1]
            verdict = accept(drafts, logits[anchor][:rows], params, coins.next_round())
            text += [*drafts[: verdict.accepted], verdict.bonus]
        counts[index_of(tuple(text[1 : DEPTH + 1]))] += 1
    return counts


def direct_counts(params: SamplingParams, size: int, *, first_seed: int) -> np.ndarray:
    """The same from plain decoding: one draw a token."""
    rows = [distribution(LOGITS_VV[[token]], params)[0] for token in range(VOCAB)]
    counts = np.zeros(VOCAB**DEPTH, dtype=np.int64)
    for seed in range(first_seed, first_seed + size):
        coins, text = Coins(seed), [ANCHOR]
        while len(text) <= DEPTH:
            text.append(draw(rows[text[-1]], coins.next_round()[-1]))
        counts[index_of(tuple(text[1:]))] += 1
    return counts


def index_of(text: tuple[int, ...]) -> int:
    index = 0
    for token in text:
        index = index * VOCAB + token
    return index


def shaped(params: SamplingParams) -> np.ndarray:
    """Rows of probabilities [VOCAB, VOCAB], written apart from the code under test."""
    p = np.exp(LOGITS_VV.numpy() / params.temperature)
    p /= p.sum(1, keepdims=True)
    for row in p:
        order = np.argsort(-row, kind="stable")
        size = int(np.searchsorted(np.cumsum(row[order]), params.top_p)) + 1
        row[order[size:]] = 0.0
    return p / p.sum(1, keepdims=True)


def law(conditional_VV: np.ndarray) -> np.ndarray:
    """Probability of every text, [VOCAB ** DEPTH]."""
    found = []
    for text in itertools.product(range(VOCAB), repeat=DEPTH):
        pairs = itertools.pairwise((ANCHOR, *text))
        found.append(float(np.prod([conditional_VV[a, b] for a, b in pairs])))
    return np.array(found)


def biased(conditional_VV: np.ndarray, bias: float) -> np.ndarray:
    """Rows where the draft is accepted with `bias` more than its probability.

    Holds where every token is judged as a draft, so for blocks of more than `DEPTH` rows.
    """
    q = conditional_VV.copy()
    for token, draft in enumerate(DRAFT_OF):
        p = conditional_VV[token, draft]
        q[token] *= (1.0 - p - bias) / (1.0 - p)
        q[token, draft] = p + bias
    return q


def accept_too_often(bias: float) -> Accept:
    """The real rule, whose judging coins come out `bias` too low."""

    def accept(
        drafts: list[int], logits_LV: torch.Tensor, params: SamplingParams, coins: list[float]
    ) -> Verdict:
        low = [coin - bias for coin in coins[: BLOCK_SIZE - 1]]
        return accept_sampled(drafts, logits_LV, params, [*low, coins[-1]])

    return accept


@dataclass(frozen=True)
class Fit:
    """How well counts fit a law.

    Attributes:
        p_value: of the chi-square test over the texts that the law can produce, see `pool`.
        total_variation: half the absolute difference, summed. limit: its 99.9 % quantile where the
            law holds.
    """

    p_value: float
    total_variation: float
    limit: float


def pool(values: np.ndarray, expected: np.ndarray, size: int) -> np.ndarray:
    """`values` of the texts that can come out; the rarest joined until 8 are expected of them."""
    order = np.argsort(expected)
    order = order[expected[order] > 0]
    joined = 1 + int(np.searchsorted(np.cumsum(expected[order]) * size, 8.0))
    return np.concatenate([[values[order[:joined]].sum()], values[order[joined:]]])


def fit_to(counts: np.ndarray, expected: np.ndarray) -> Fit:
    size = int(counts.sum())
    assert counts[expected == 0].sum() == 0, "a text came out that the target cannot produce"
    want = pool(expected, expected, size) * size
    assert want.min() >= 5, "too few samples for a chi-square test"
    p_value = float(stats.chisquare(pool(counts, expected, size), want).pvalue)
    draws = np.random.default_rng(0).multinomial(size, expected / expected.sum(), size=4000)
    distances = np.abs(draws / size - expected).sum(1) / 2
    return Fit(
        p_value,
        float(np.abs(counts / size - expected).sum() / 2),
        float(np.quantile(distances, 0.999)),
    )


def power(expected: np.ndarray, other: np.ndarray, size: int, *, level: float) -> float:
    """Chance that the chi-square test at `level` tells `other` from `expected`."""
    want, have = (pool(x, expected, size) for x in (expected, other))
    freedom = len(want) - 1
    shift = size * float(((have - want) ** 2 / want).sum())
    return float(stats.ncx2.sf(stats.chi2.isf(level, freedom), freedom, shift))
