"""Signals of a drafted round as plain numbers, for traces."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from hybridspec.reference.drafter import DraftSignals
from hybridspec.request import RoundRecord


def round_record(
    *,
    anchor: int,
    context_tokens: int,
    signals: DraftSignals,
    draft_row: int,
    logits_LV: torch.Tensor,
    routes: Sequence[torch.Tensor],
    num_experts: int,
) -> RoundRecord:
    """Signals of one request in one round.

    Args:
        anchor, context_tokens: the first row's token and position.
        signals: of all drafted requests; draft_row: this one's row.
        logits_LV: the target's logits of the verified rows.
        routes: experts [L, top-k] of each layer, or nothing to leave them out.
        num_experts: of a layer; decides the width of a route.
    """
    top = logits_LV.float().softmax(-1).max(-1)
    packed = b""
    if routes:
        narrow = np.uint8 if num_experts <= 256 else np.dtype("<u2")
        packed = torch.stack(list(routes)).cpu().numpy().astype(narrow).tobytes()
    return RoundRecord(
        anchor=anchor,
        context_tokens=context_tokens,
        draft_tokens=signals.tokens_BD[draft_row].tolist(),
        p1=signals.p1_BD[draft_row].tolist(),
        p2=signals.p2_BD[draft_row].tolist(),
        entropy_nats=signals.entropy_BD[draft_row].tolist(),
        target_tokens=top.indices.tolist(),
        target_p1=top.values.tolist(),
        routes=packed,
    )
