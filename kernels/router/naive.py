"""Softmax router in plain torch."""

from __future__ import annotations

import torch

from hybridspec.kernels.route_mask.naive import route_mask


def router(
    logits_RE: torch.Tensor,
    top_k: int,
    *,
    renormalize: bool = True,
    lengths_B: torch.Tensor | None = None,
    mode: str = "alias",
    rows_per_request: int = 16,
) -> tuple[torch.Tensor, torch.Tensor]:
    """int32 ids and weights [R, K] of the largest softmax probabilities, the lowest id on ties.

    Args:
        logits_RE: floating point, no NaN; weights come in this dtype.
        lengths_B: rows at or past them are masked; None masks nothing.
    """
    probabilities_RE = logits_RE.softmax(1)
    ids_RK = logits_RE.sort(dim=1, descending=True, stable=True).indices[:, :top_k]
    weights_RK = probabilities_RE.gather(1, ids_RK)
    if renormalize:
        weights_RK = weights_RK / weights_RK.sum(1, keepdim=True)
    ids_RK = ids_RK.to(torch.int32)
    if lengths_B is None:
        return ids_RK, weights_RK
    return route_mask(ids_RK, weights_RK, lengths_B, mode=mode, rows_per_request=rows_per_request)
