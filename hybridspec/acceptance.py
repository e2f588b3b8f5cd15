"""Which drafts stand, and what the target says after them. Lengths are fixed before this runs."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hybridspec.artifacts.tables import BLOCK_SIZE
from hybridspec.request import SamplingParams


@dataclass(frozen=True)
class Verdict:
    """Accepted drafts of one block and the target's own token behind them."""

    accepted: int
    bonus: int


def accept_greedy(drafts: list[int], best_tokens: list[int]) -> Verdict:
    """Longest prefix of drafts that equals the target's choices.

    Args:
        drafts: the L - 1 drafts verified.
        best_tokens: the target's argmax of each of the L rows.
    """
    accepted = 0
    for draft, best in zip(drafts, best_tokens, strict=False):
        if draft != best:
            break
        accepted += 1
    return Verdict(accepted, best_tokens[accepted])


def distribution(logits_LV: torch.Tensor, sampling: SamplingParams) -> torch.Tensor:
    """Target distribution of each row after temperature and nucleus, fp64 [L, V].

    The nucleus is the smallest set of most probable tokens whose mass reaches `top_p`; among equal
    probabilities the lower token id counts as more probable.
    """
    scaled = logits_LV.to(torch.float64) / sampling.temperature
    probabilities = scaled.softmax(-1)
    if sampling.top_p < 1.0:
        ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
        outside = ordered.cumsum(-1) - ordered >= sampling.top_p
        probabilities = torch.zeros_like(probabilities).scatter_(
            -1, order, ordered.masked_fill_(outside, 0.0)
        )
        probabilities /= probabilities.sum(-1, keepdim=True)
    return probabilities


def draw(weights_V: torch.Tensor, coin: float) -> int:
    """Token by inversion: the first whose cumulative weight exceeds coin x total.

    Args:
        weights_V: fp64, non-negative, not all zero; need not sum to one.
        coin: uniform in [0, 1).
    """
    cumulative = weights_V.cumsum(0)
    token = int(torch.searchsorted(cumulative, cumulative[-1] * coin, right=True))
    if token >= weights_V.shape[0] or weights_V[token] == 0:
        # coin x total rounded up to the total itself: the last token with weight is meant.
        token = int(weights_V.nonzero()[-1])
    return token


def accept_sampled(
    drafts: list[int], logits_LV: torch.Tensor, sampling: SamplingParams, coins: list[float]
) -> Verdict:
    """Point-mass rule: accept draft x with the target's p(x); on rejection draw from p without x.

    The drafter proposes one token, a point mass, so min(1, p / q) is p(x) and the residual is p
    with x removed (DESIGN section 6). Exact for every length that was fixed before the coins.

    Args:
        drafts: the L - 1 drafts verified.
        logits_LV: the target's logits of the L rows.
        sampling: temperature > 0.
        coins: `BLOCK_SIZE` uniforms of this round and request alone; coin i judges draft i,
            the last draws the token behind the accepted ones.
    """
    probabilities = distribution(logits_LV, sampling)
    accepted = 0
    if drafts:
        index = torch.tensor(drafts, device=logits_LV.device)
        chances = probabilities[: len(drafts)].gather(1, index[:, None])[:, 0].tolist()
        for chance, coin in zip(chances, coins, strict=False):
            if coin >= chance:
                break
            accepted += 1
    row = probabilities[accepted]
    if accepted < len(drafts):
        row = row.clone()
        row[drafts[accepted]] = 0.0
    return Verdict(accepted, draw(row, coins[BLOCK_SIZE - 1]))


class Coins:
    """Uniform coins of one request: `BLOCK_SIZE` fresh ones a round, whatever its length.

    A fixed number a round keeps the stream independent of the lengths chosen, and no coin is ever
    used twice. Requests have generators of their own.
    """

    def __init__(self, seed: int | None) -> None:
        self._generator = torch.Generator()
        if seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(seed)

    def next_round(self) -> list[float]:
        """`BLOCK_SIZE` uniforms in [0, 1)."""
        return torch.rand(BLOCK_SIZE, generator=self._generator, dtype=torch.float64).tolist()
