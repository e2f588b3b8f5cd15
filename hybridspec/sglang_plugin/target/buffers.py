"""What verification keeps of a block until acceptance is known, in place of a state a row.

SGLang keeps a recurrent state for every row of every request (`intermediate_ssm`, 2 MiB a row and
layer at the shape of Qwen3.6-35B-A3B) and a conv window for every row. Factors and the rows as they
went into the conv hold the same, because a state after n rows follows from them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hybridspec.errors import EngineRefusal
from hybridspec.kernels.gdn.factors import BLOCK_ROWS, Factors

CONV_COLUMNS = 3


@dataclass(frozen=True)
class BlockShape:
    """Sizes of the GDN layers on one rank.

    Attributes:
        layer_ids: of the GDN layers, in the order in which pools hold them.
        channels: of the conv, 2 H K + HV V.
    """

    layer_ids: tuple[int, ...]
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    channels: int

    @classmethod
    def of(cls, cache_params: Any, layer_ids: Sequence[int]) -> BlockShape:
        """Sizes in a `Mamba2CacheParams` of SGLang, heads already divided by the ranks.

        Raises:
            EngineRefusal: states of another kind than GDN's.
        """
        shape = cache_params.shape
        heads, value_dim, key_dim = shape.temporal
        key_heads = getattr(shape, "num_k_heads_per_tp", 0)
        channels, columns = shape.conv[0]
        if (
            getattr(cache_params, "is_kda", False)
            or len(shape.conv) != 1
            or channels != 2 * key_heads * key_dim + heads * value_dim
            or columns != CONV_COLUMNS
        ):
            raise EngineRefusal(
                f"recurrent states {shape.temporal} with conv windows {shape.conv} and {key_heads} "
                "key heads are not those of Gated DeltaNet with a conv of width 4, which is what "
                "HYBRIDSPEC verifies: use --speculative-algorithm DFLASH for this model"
            )
        return cls(tuple(layer_ids), key_heads, heads, key_dim, value_dim, channels)

    def factor_bytes(self) -> int:
        """Factors of one request, all layers."""
        row = 2 * self.key_heads * self.key_dim + 4 * self.value_heads * (self.value_dim + 1)
        return len(self.layer_ids) * BLOCK_ROWS * row

    def row_bytes(self) -> int:
        """Rows of one request as they went into the conv, all layers."""
        return len(self.layer_ids) * BLOCK_ROWS * 2 * self.channels

    def bytes_per_request(self) -> int:
        """Everything that `VerifyBuffers` keeps for one request."""
        return self.factor_bytes() + self.row_bytes()


@dataclass(frozen=True)
class VerifyBuffers:
    """Buffers of one rank, indexed by batch row; they live as long as the pool.

    Attributes:
        factors: of all GDN layers.
        raw_XRTC: bf16 rows as they went into the conv, [layers, rows, 16, channels].
        index_of_layer: place of a layer id in both, and in the pools.
    """

    shape: BlockShape
    factors: Factors
    raw_XRTC: torch.Tensor
    index_of_layer: dict[int, int]

    @classmethod
    def allocate(
        cls, shape: BlockShape, batch_rows: int, *, device: torch.device | str
    ) -> VerifyBuffers:
        """Zeroed rows and unwritten factors; `commit` reads only what verification wrote."""
        layers = len(shape.layer_ids)
        factors = Factors.allocate(
            layers,
            batch_rows,
            shape.key_heads,
            shape.value_heads,
            shape.key_dim,
            shape.value_dim,
            device=device,
        )
        raw_XRTC = torch.zeros(
            layers, batch_rows, BLOCK_ROWS, shape.channels, dtype=torch.bfloat16, device=device
        )
        index_of_layer = {layer: index for index, layer in enumerate(shape.layer_ids)}
        return cls(shape, factors, raw_XRTC, index_of_layer)

    @property
    def batch_rows(self) -> int:
        """Requests that one pass may verify."""
        return self.raw_XRTC.shape[1]

    def bytes(self) -> int:
        """Memory held."""
        return self.factors.bytes() + self.raw_XRTC.numel() * self.raw_XRTC.element_size()
