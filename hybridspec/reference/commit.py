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
    keys = torch.stack([f.keys_BHTK for f in factors])
    update = torch.stack([f.update_BHTV for f in factors])
    gate = torch.stack([f.gate_BHT for f in factors])
    layers, batch, heads, rows, key_dim = keys.shape
    index = layout.slot_index
    states = pool.recurrent_XSHVK[:, index]
    flat = layers * batch * heads
    counts: torch.Tensor | int
    if min(committed) == max(committed):
        counts = committed[0]
    else:
        counts = torch.tensor(committed, device=gate.device).view(1, batch, 1)
        counts = counts.expand(layers, batch, heads).reshape(flat)
    value_dim = update.shape[-1]
    new = fold_factors(
        states.reshape(flat, value_dim, key_dim),
        keys.view(flat, rows, key_dim),
        update.view(flat, rows, value_dim),
        gate.view(flat, rows),
        counts,
    )
    pool.recurrent_XSHVK[:, index] = new.view(states.shape)
    taps = pool.conv_XSWC.shape[2]
    conv = torch.stack([f.conv_BTC for f in factors])
    if isinstance(counts, int):
        windows = conv[:, :, counts : counts + taps]
    else:
        first = torch.tensor(committed, device=conv.device)
        rows_BW = first[:, None] + torch.arange(taps, device=conv.device)
        gather = rows_BW[None, :, :, None].expand(layers, batch, taps, conv.shape[-1])
        windows = conv.gather(2, gather)
    pool.conv_XSWC[:, index] = windows
