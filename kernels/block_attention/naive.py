"""Attention of a block's rows over an engine's paged cache, one row at a time, in plain torch."""

from __future__ import annotations

import torch


def attend(
    q_RHD: torch.Tensor,
    keys_SGD: torch.Tensor,
    values_SGD: torch.Tensor,
    table_XP: torch.Tensor,
    requests_B: torch.Tensor,
    starts_B: torch.Tensor,
    *,
    scale: float,
    causal: bool,
    lengths_B: torch.Tensor | None = None,
) -> torch.Tensor:
    """Softmax attention in the dtype of the queries.

    Args:
        q_RHD: queries [B x rows, heads, D].
        keys_SGD, values_SGD: pools [slots, kv heads, D] that hold the block's own rows too.
        table_XP: slot of every position of every request.
        requests_B: row of `table_XP` of each request.
        starts_B: tokens before the block; row t is position start + t.
        scale: of the scores.
        causal: row t sees positions up to start + t; else every row sees the whole block.
        lengths_B: rows that count, the rest are zeros; None: all of them.

    Returns:
        [B x rows, heads, D].
    """
    heads, batch = q_RHD.shape[1], len(starts_B)
    rows, group = len(q_RHD) // batch, heads // keys_SGD.shape[1]
    out_RHD = torch.zeros_like(q_RHD)
    for b in range(batch):
        start = int(starts_B[b])
        length = rows if lengths_B is None else min(rows, int(lengths_B[b]))
        for t in range(length):
            end = start + t + 1 if causal else start + rows
            slots = table_XP[int(requests_B[b]), :end].long()
            keys_NHD = keys_SGD[slots].to(q_RHD.dtype).repeat_interleave(group, dim=1)
            values_NHD = values_SGD[slots].to(q_RHD.dtype).repeat_interleave(group, dim=1)
            scores_HN = torch.einsum("hd,nhd->hn", q_RHD[b * rows + t], keys_NHD) * scale
            weights_HN = scores_HN.softmax(dim=-1)
            out_RHD[b * rows + t] = torch.einsum("hn,nhd->hd", weights_HN, values_NHD)
    return out_RHD
