"""Filler for weights that compute nothing that counts: the same bits on every machine.

Engines read these weights like any other, so they should look like weights; zeros would draw less
power on a GPU and let its clocks rise.
"""

from __future__ import annotations

import hashlib
import math
import zlib

import torch

# A prime, so that rows of any width start at different places of the pool.
_POOL_VALUES = 4_194_301
_SEED = b"hybridspec padding 1"
# Bytes as signed integers have a standard deviation of 73.9; with this factor one of 0.018, near
# the 0.02 that such models are initialised with. Every value is exact in bf16.
_SCALE = 2.0**-12


class Noise:
    """Tensors cut from one pool of pseudo-random values, each from a place that its name decides.

    Args:
        device: where they are made.
    """

    def __init__(self, device: torch.device) -> None:
        raw = hashlib.shake_128(_SEED).digest(_POOL_VALUES)
        pool = torch.frombuffer(bytearray(raw), dtype=torch.int8).to(device, torch.float32)
        self._pools = {torch.float32: pool * _SCALE}
        self.device = device

    def __call__(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor of values with mean 0 and standard deviation 0.018."""
        if dtype not in self._pools:
            self._pools[dtype] = self._pools[torch.float32].to(dtype)
        pool = self._pools[dtype]
        out = torch.empty(shape, dtype=dtype, device=self.device)
        flat, total = out.view(-1), math.prod(shape)
        place, start = zlib.crc32(name.encode()) % _POOL_VALUES, 0
        while start < total:
            count = min(_POOL_VALUES - place, total - start)
            flat[start : start + count] = pool[place : place + count]
            place, start = 0, start + count
        return out
