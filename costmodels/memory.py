"""Memory that a request needs so that the recurrent state can be rolled back to any prefix.

Engines keep the state after every row of the block (snapshots); HybridSpec keeps the factors of a
row, from which any prefix is rebuilt (`kernels/gdn/factors.py`). The state itself is needed either
way and is listed apart.
"""

from __future__ import annotations

from dataclasses import dataclass

from hybridspec.artifacts.tables import BLOCK_SIZE
from hybridspec.errors import UsageError

STATE_BYTES = 4  # fp32 recurrent state, updates and decays
ROW_BYTES = 2  # bf16 keys and rows of the conv


@dataclass(frozen=True)
class GdnShape:
    """Gated DeltaNet layers of a target.

    Attributes:
        layers: Gated DeltaNet layers, the full-attention ones not counted.
        key_heads, value_heads, key_dim, value_dim: of one layer.
        conv_kernel: width of the causal convolution; its window is one column less.
    """

    layers: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_kernel: int

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            least = 0 if name == "layers" else 1
            if value < least:
                raise UsageError(f"{name} = {value}; it must be at least {least}")

    @property
    def conv_channels(self) -> int:
        """Channels of one layer's convolution: q, k and v."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


@dataclass(frozen=True)
class RollbackMemory:
    """Bytes a request, all Gated DeltaNet layers together.

    Attributes:
        state: the recurrent state and the conv window, needed in any case.
        snapshots: state and window after each row of the block, as engines keep them.
        factors: keys, updates, decays and conv inputs of each row.
    """

    state: int
    snapshots: int
    factors: int


def rollback_memory(shape: GdnShape, *, rows: int = BLOCK_SIZE) -> RollbackMemory:
    """Returns what a request needs for blocks of up to `rows` rows.

    One state is `value_heads x key_dim x value_dim` fp32; its window `conv_kernel - 1` columns in
    bf16. A row's factors are its raw key (bf16), its update and decay (fp32) and its conv input
    (bf16).

    Raises:
        UsageError: rows outside 1..16.
    """
    if not 1 <= rows <= BLOCK_SIZE:
        raise UsageError(f"{rows} rows; a block has 1..{BLOCK_SIZE}")
    window = shape.conv_channels * (shape.conv_kernel - 1) * ROW_BYTES
    state = shape.value_heads * shape.key_dim * shape.value_dim * STATE_BYTES + window
    factors = (
        shape.key_heads * shape.key_dim * ROW_BYTES
        + shape.value_heads * (shape.value_dim + 1) * STATE_BYTES
        + shape.conv_channels * ROW_BYTES
    )
    return RollbackMemory(
        state=shape.layers * state,
        snapshots=shape.layers * rows * state,
        factors=shape.layers * rows * factors,
    )
