"""Accepting a block, in plain Python over PyTorch: the oracle of the kernels beside it."""

from __future__ import annotations

import math

import torch

from hybridspec.kernels.accept.outcome import BLOCK_SIZE, NO_TOKEN, Cursors, Outcome


def accept_greedy(
    drafts_BD: torch.Tensor,
    lengths_B: torch.Tensor,
    tokens_BT: torch.Tensor,
    *,
    cursors: Cursors | None = None,
) -> Outcome:
    """Longest prefix of the verified drafts that equals the target's choices.

    Args:
        drafts_BD: [B, 15]; lengths_B: rows verified, 0..16; tokens_BT: the target's argmax [B, 16].
        cursors: moved in place.
    """
    outcome = _nothing(lengths_B)
    for b, (drafts, length, tokens) in enumerate(
        zip(drafts_BD.tolist(), lengths_B.tolist(), tokens_BT.tolist(), strict=True)
    ):
        length = min(length, BLOCK_SIZE)
        if length <= 0:
            continue
        accepted = 0
        while accepted < length - 1 and drafts[accepted] == tokens[accepted]:
            accepted += 1
        if min(tokens[: accepted + 1]) < 0:
            outcome.valid_B[b] = 0
            continue
        _emit(outcome, b, drafts[:accepted], tokens[accepted], cursors)
    return outcome


def accept_sampled(
    drafts_BD: torch.Tensor,
    lengths_B: torch.Tensor,
    probabilities_BTV: torch.Tensor,
    coins_BC: torch.Tensor,
    *,
    cursors: Cursors | None = None,
) -> Outcome:
    """Point-mass rule with coins drawn before, in float64.

    Args:
        drafts_BD, lengths_B: as `accept_greedy`.
        probabilities_BTV: the target's distribution of each row, [B, 16, V].
        coins_BC: uniforms in [0, 1), [B, 16]: coin i judges draft i, the last draws.
        cursors: moved in place.
    """
    outcome = _nothing(lengths_B)
    for b, (drafts, length, coins) in enumerate(
        zip(drafts_BD.tolist(), lengths_B.tolist(), coins_BC.double().tolist(), strict=True)
    ):
        length = min(length, BLOCK_SIZE)
        if length <= 0:
            continue
        row_TV = probabilities_BTV[b].double()
        chance, accepted, usable = 0.0, 0, True
        for accepted in range(length):
            if accepted == length - 1:
                break
            known = 0 <= drafts[accepted] < row_TV.shape[1]
            chance = float(row_TV[accepted, drafts[accepted]]) if known else 0.0
            usable &= 0.0 <= chance < math.inf
            if not coins[accepted] < chance:
                break
        weights_V = row_TV[accepted].clone()
        rejected = accepted < length - 1
        if rejected and 0 <= drafts[accepted] < weights_V.shape[0]:
            weights_V[drafts[accepted]] = 0.0
        total = float(weights_V.sum())
        usable &= bool((weights_V >= 0).all()) and total < math.inf
        if usable and total > 0:
            _emit(outcome, b, drafts[:accepted], draw(weights_V, coins[-1]), cursors)
        elif usable and rejected and chance > 0:
            # Rounding kept p(x) below one: the rejected draft has all the mass.
            _emit(outcome, b, drafts[:accepted], drafts[accepted], cursors)
        else:
            outcome.valid_B[b] = 0
    return outcome


def draw(weights_V: torch.Tensor, coin: float) -> int:
    """First token whose cumulative weight exceeds coin x total; never one without weight."""
    cumulative_V = weights_V.cumsum(0)
    beyond = ((cumulative_V > coin * float(weights_V.sum())) & (weights_V > 0)).nonzero()
    return int(beyond[0] if len(beyond) else weights_V.nonzero()[-1])


def _nothing(lengths_B: torch.Tensor) -> Outcome:
    outcome = Outcome.empty(len(lengths_B), lengths_B.device)
    outcome.accepted_B.zero_()
    outcome.bonus_B.fill_(NO_TOKEN)
    outcome.emitted_BT.fill_(NO_TOKEN)
    outcome.commit_rows_B.zero_()
    outcome.valid_B.fill_(1)
    return outcome


def _emit(
    outcome: Outcome, b: int, accepted: list[int], bonus: int, cursors: Cursors | None
) -> None:
    tokens = [*accepted, bonus]
    outcome.accepted_B[b] = len(accepted)
    outcome.bonus_B[b] = bonus
    outcome.emitted_BT[b, : len(tokens)] = torch.tensor(tokens)
    outcome.commit_rows_B[b] = len(tokens)
    if cursors is not None:
        cursors.sequence_lengths_B[b] += len(tokens)
        cursors.anchors_B[b] = bonus
