"""Features of draft logits in plain PyTorch: the oracle of the kernels beside it.

Works in the dtype it is given (float64 in tests); 16-bit logits are widened to fp32.
"""

from __future__ import annotations

import torch

from hybridspec.kernels.draft_features.rows import DraftFeatures


def draft_features(logits_RV: torch.Tensor, *, vocab: int | None = None) -> DraftFeatures:
    """Top token, its probability, the runner-up's and the entropy of each row.

    Args:
        logits_RV: [R, >= vocab], any floating dtype.
        vocab: columns that are real; None: all. The others never win and have no mass.
    """
    logits_RV = _wide(logits_RV)[:, :vocab]
    log_p = logits_RV.log_softmax(-1)
    p1_R, p2_R = log_p.topk(2, -1).values.exp().unbind(-1)
    # 0 log 0 = 0.
    terms = torch.where(log_p == float("-inf"), 0.0, log_p.exp() * log_p)
    broken_R = _broken(logits_RV)
    p1_R, p2_R, entropy_R = (
        values.masked_fill(broken_R, float("nan")) for values in (p1_R, p2_R, -terms.sum(-1))
    )
    return DraftFeatures(_first_argmax(logits_RV), p1_R, p2_R, entropy_R)


def row_parts(
    logits_RV: torch.Tensor, *, vocab: int | None = None, vocab_offset: int = 0
) -> torch.Tensor:
    """One part a row, [R, 5], fields as in `PART_FIELDS`.

    Args:
        logits_RV: columns `vocab_offset + (0..vocab)` of the whole vocabulary.
        vocab: columns that are real; None: all.
        vocab_offset: id of the first column.
    """
    logits_RV = _wide(logits_RV)[:, :vocab]
    rows = logits_RV.shape[0]
    lowest = logits_RV.new_full((rows, 2), float("-inf"))
    ordered = torch.where(logits_RV.isnan(), float("-inf"), logits_RV)
    best, second = torch.cat([ordered, lowest], 1).topk(2, -1).values.unbind(-1)
    shifted = logits_RV - torch.where(best == float("-inf"), 0.0, best)[:, None]
    weights = shifted.exp()
    products = torch.where(logits_RV == float("-inf"), weights, shifted * weights)
    token = torch.cat([ordered, lowest], 1).argmax(-1) + vocab_offset
    parts = [best, second, token.to(best.dtype), weights.sum(-1), products.sum(-1)]
    return torch.stack(parts, -1)


def merge_shards(parts_SRF: torch.Tensor) -> DraftFeatures:
    """Features of R rows from the parts of S shards of the vocabulary, [S, R, 5]."""
    best_SR, second_SR, token_SR, sum_SR, weighted_SR = parts_SRF.unbind(-1)
    best_R = best_SR.amax(0)
    gap_SR = best_SR - torch.where(best_R == float("-inf"), 0.0, best_R)
    scale_SR = gap_SR.exp()
    empty_SR = best_SR == float("-inf")
    sum_R = (scale_SR * sum_SR).sum(0)
    rebased_SR = scale_SR * (weighted_SR + gap_SR.masked_fill(empty_SR, 0.0) * sum_SR)
    holders_SR = torch.where(best_SR == best_R, token_SR, float("inf"))
    # The winner's own runner-up, or the best of any other shard.
    winner_R = holders_SR.argmin(0)
    others_SR = best_SR.scatter(0, winner_R[None], float("-inf"))
    second_R = torch.maximum(second_SR.amax(0), others_SR.amax(0))
    broken_R = (best_R == float("-inf")) | sum_R.isnan()
    p1_R = 1.0 / sum_R
    p2_R = (second_R - best_R).exp() / sum_R
    entropy_R = sum_R.log() - rebased_SR.sum(0) / sum_R
    return DraftFeatures(
        token_SR.gather(0, winner_R[None])[0].to(torch.int64),
        *(values.masked_fill(broken_R, float("nan")) for values in (p1_R, p2_R, entropy_R)),
    )


def _wide(logits: torch.Tensor) -> torch.Tensor:
    return logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits


def _broken(logits_RV: torch.Tensor) -> torch.Tensor:
    """Rows that are refused: a NaN, a +inf, or nothing but -inf."""
    infinite_R = (logits_RV == float("inf")).any(-1)
    nothing_R = (logits_RV == float("-inf")).all(-1)
    return logits_RV.isnan().any(-1) | infinite_R | nothing_R


def _first_argmax(logits_RV: torch.Tensor) -> torch.Tensor:
    return torch.where(logits_RV.isnan(), float("-inf"), logits_RV).argmax(-1)
