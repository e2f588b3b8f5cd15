"""Route mask in plain torch."""

from __future__ import annotations

import torch


def route_mask(
    topk_ids_RK: torch.Tensor,
    topk_weights_RK: torch.Tensor,
    lengths_B: torch.Tensor,
    *,
    mode: str = "alias",
    rows_per_request: int = 16,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and weights with rows at or past their request's length masked; inputs stay."""
    requests, top_k = lengths_B.shape[0], topk_ids_RK.shape[1]
    ids = topk_ids_RK.clone().view(requests, rows_per_request, top_k)
    weights = topk_weights_RK.clone().view(requests, rows_per_request, top_k)
    lengths = lengths_B.tolist()
    anchors = [ids[i, 0].clone() for i in range(requests)]
    active = [i for i in range(requests) if lengths[i] > 0]
    nothing = torch.zeros(top_k, dtype=ids.dtype, device=ids.device)
    for i, length in enumerate(lengths):
        source = anchors[i] if length > 0 else anchors[active[0]] if active else nothing
        ids[i, max(length, 0) :] = source if mode == "alias" else -1
        weights[i, max(length, 0) :] = 0.0
    return ids.view_as(topk_ids_RK), weights.view_as(topk_weights_RK)
