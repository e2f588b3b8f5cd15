"""Commit of a round: recurrent states and conv windows of all GDN layers from compact factors."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hybridspec.reference.gdn import fold_factors
from hybridspec.reference.gdn_layer import GdnFactors
from hybridspec.reference.rows import RowLayout
from hybridspec.reference.state import StatePool

QK, UPDATE, GATE = 1, 2, 3


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
    states = pool.recurrent_SXHVK[index]
    heads = states.shape[2]
    flat = states.reshape(-1, *states.shape[3:])
    if batch == 1:
        qk, update, gate = (torch.cat([f[i] for f in factors]) for i in (QK, UPDATE, GATE))
    else:
        # Factors of a layer lie request by request; states request by request, then layer.
        qk, update, gate = (
            torch.stack([f[i].view(batch, heads, *f[i].shape[1:]) for f in factors], 1).flatten(
                0, 2
            )
            for i in (QK, UPDATE, GATE)
        )
    counts: torch.Tensor | int = committed[0]
    if min(committed) != max(committed):
        counts = torch.tensor(committed, device=flat.device)
    fold_factors(
        flat,
        qk,
        update,
        gate,
        counts if isinstance(counts, int) else counts.repeat_interleave(layers * heads),
    )
    if batch > 1:
        # Several slots came as a copy; a single one is a view, already up to date.
        pool.recurrent_SXHVK[index] = flat.view(states.shape)
    taps = pool.conv_SXWC.shape[2]
    if isinstance(counts, int):
        windows = torch.stack([f.conv_BTC.narrow(1, counts, taps) for f in factors], 1)
    else:
        conv = torch.stack([f.conv_BTC for f in factors], 1)
        rows_BW = counts[:, None] + torch.arange(taps, device=conv.device)
        gather = rows_BW[:, None, :, None].expand(batch, layers, taps, conv.shape[-1])
        windows = conv.gather(2, gather)
    pool.conv_SXWC[index] = windows
