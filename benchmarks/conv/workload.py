"""Inputs of the conv of all layers, in as many sets as the L2 cannot hold."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

SEED = 0
COLD_BYTES = 96 << 20
MAX_SETS = 16
KEY_HEADS, VALUE_HEADS, HEAD_DIM, LAYERS = 16, 32, 128, 30


@dataclass
class Workload:
    """Inputs of `sets` rounds; dimension X is layers, N is sets. Rows of all lengths are full."""

    batch: int
    tokens: int
    device: torch.device
    layers: int = LAYERS
    key_heads: int = KEY_HEADS
    value_heads: int = VALUE_HEADS
    head_dim: int = HEAD_DIM
    dtype: torch.dtype = torch.bfloat16
    sets: int = 0

    def __post_init__(self) -> None:
        torch.manual_seed(SEED + self.tokens)
        self.channels = (2 * self.key_heads + self.value_heads) * self.head_dim
        self.slots = self.batch + 1
        size = self.dtype.itemsize
        per_set = size * self.layers * self.channels * (self.batch * (self.tokens + 3) + 4)
        self.sets = self.sets or min(MAX_SETS, max(2, math.ceil(COLD_BYTES / per_set)))
        leading = (self.sets, self.layers)

        def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
            return (torch.randn(*shape, device=self.device) * scale).to(self.dtype)

        rows = (self.batch, self.tokens)
        self.rows_NXBTC = random(*leading, *rows, self.channels)
        self.weight_NXCW = random(*leading, self.channels, 4, scale=0.5)
        self.pool_NXSCW = random(*leading, self.slots, self.channels, 3)
        self.a_XBTH = random(self.layers, *rows, self.value_heads)
        self.b_XBTH = random(self.layers, *rows, self.value_heads)
        self.a_log_XH = torch.rand(self.layers, self.value_heads, device=self.device)
        self.dt_bias_XH = random(self.layers, self.value_heads)
        self.slots_B = torch.arange(self.batch, 0, -1, dtype=torch.int32, device=self.device)
        self.rows_B = torch.arange(self.batch, dtype=torch.int32, device=self.device)
        self.full_B = torch.full_like(self.rows_B, self.tokens)
        # One buffer for all sets: an engine has one too.
        self.raw_XBTC = torch.full_like(self.rows_NXBTC[0], float("nan"))
        width = self.tokens + 2
        shared = torch.full(
            (self.layers, self.batch + 1, self.channels, width),
            float("nan"),
            dtype=self.dtype,
            device=self.device,
        )
        layer, request, channel, column = shared.stride()
        self.windows_XBTCW = shared.as_strided(
            (self.layers, self.batch + 1, self.tokens, self.channels, 3),
            (layer, request, column, channel, column),
        )
