"""What a request leaves behind in the engine: KV, conv windows, recurrent states.

Recurrent states and conv windows of all GDN layers lie in one tensor each, a request's layers
behind one another, so that a commit is one batched update over layers and requests, in place for a
single one. KV grows in pages, a request at a time.
"""

from __future__ import annotations

import torch

from hybridspec.reference.config import TargetConfig
from hybridspec.reference.layers import accumulate_dtype

PAGE_TOKENS = 256


class KVCache:
    """Keys and values of one request over some layers.

    Attributes:
        keys, values: [layers, heads, capacity, head_dim]; positions at or past the owner's cursor
            are garbage and are overwritten by the next rows.
    """

    def __init__(
        self, layers: int, heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.keys = torch.empty(layers, heads, PAGE_TOKENS, head_dim, dtype=dtype, device=device)
        self.values = torch.empty_like(self.keys)

    @property
    def capacity(self) -> int:
        """Positions that fit without growing."""
        return self.keys.shape[2]

    def reserve(self, tokens: int) -> None:
        """Grow, in whole pages and by at least half, until `tokens` positions fit."""
        if tokens <= self.capacity:
            return
        wanted = max(tokens, self.capacity + self.capacity // 2)
        pages = -(-wanted // PAGE_TOKENS)
        for name in ("keys", "values"):
            old = getattr(self, name)
            layers, heads, used, dim = old.shape
            new = old.new_empty(layers, heads, pages * PAGE_TOKENS, dim)
            new[:, :, :used] = old
            setattr(self, name, new)

    def write(
        self, layer: int, start: int, keys_GTD: torch.Tensor, values_GTD: torch.Tensor
    ) -> None:
        """Put T new positions at `start`; `reserve` must have made room."""
        stop = start + keys_GTD.shape[1]
        self.keys[layer, :, start:stop] = keys_GTD
        self.values[layer, :, start:stop] = values_GTD


class StatePool:
    """Recurrent states and conv windows of `slots` requests.

    Attributes:
        recurrent_SXHVK: [slots, GDN layers, value heads, V, K] in fp32 (fp64 in tests).
        conv_SXWC: [slots, GDN layers, kernel - 1, channels], newest row last.
    """

    def __init__(
        self, config: TargetConfig, slots: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        layers = len(config.gdn_layers)
        self.recurrent_SXHVK = torch.zeros(
            slots,
            layers,
            config.gdn_value_heads,
            config.gdn_value_dim,
            config.gdn_key_dim,
            dtype=accumulate_dtype(dtype),
            device=device,
        )
        self.conv_SXWC = torch.zeros(
            slots, layers, config.conv_kernel - 1, config.conv_channels, dtype=dtype, device=device
        )
        self._free = list(range(slots - 1, -1, -1))

    @property
    def free_slots(self) -> int:
        """Slots that no request holds."""
        return len(self._free)

    def take(self) -> int:
        """Hand out a zeroed slot; the caller checks `free_slots` first."""
        slot = self._free.pop()
        self.recurrent_SXHVK[slot] = 0
        self.conv_SXWC[slot] = 0
        return slot

    def give_back(self, slot: int) -> None:
        """Return a slot."""
        self._free.append(slot)
