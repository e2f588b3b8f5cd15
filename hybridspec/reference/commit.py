"""Commit of a round: recurrent states and conv windows of all GDN layers from compact factors."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hybridspec.reference.gdn import fold_factors
from hybridspec.reference.gdn_layer import GdnFactors
from hybridspec.reference.rows import RowLayout
from hybridspec.reference.state import StatePool


def commit(
    pool: StatePool, factors: Sequence[GdnFactors], layout: RowLayout, committed: Sequence[int]
) -> None:
    """Advance every request's states by its committed rows, one batched update over all layers.

    Args:
        pool: states, written at the layout's slots.
        factors: of all GDN layers, in order.
        layout: rows that were verified.
        committed: rows to keep of each request, 0..length; 0 leaves its states as they are.
    """
    layers, batch = len(factors), layout.requests
    index = layout.slot_index
    states = pool.recurrent_XSHVK[:, index]
    heads = states.shape[2]
    counts: torch.Tensor | int = committed[0]
    if min(committed) != max(committed):
        counts = torch.tensor(committed, device=pool.recurrent_XSHVK.device)
    new = fold_factors(
        states.reshape(-1, *states.shape[3:]),
        torch.cat([f.qk_N2TK for f in factors]),
        torch.cat([f.update_NTV for f in factors]),
        torch.cat([f.gate_NT1 for f in factors]),
        counts if isinstance(counts, int) else counts.repeat_interleave(heads).repeat(layers),
    )
    pool.recurrent_XSHVK[:, index] = new.view(states.shape)
    taps = pool.conv_XSWC.shape[2]
    if isinstance(counts, int):
        windows = torch.stack([f.conv_BTC.narrow(1, counts, taps) for f in factors])
    else:
        conv = torch.stack([f.conv_BTC for f in factors])
        rows_BW = counts[:, None] + torch.arange(taps, device=conv.device)
        gather = rows_BW[None, :, :, None].expand(layers, batch, taps, conv.shape[-1])
        windows = conv.gather(2, gather)
    pool.conv_XSWC[:, index] = windows
