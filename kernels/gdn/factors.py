"""Compact factors of a verified block, from which any prefix of it can be committed."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hybridspec.errors import UsageError

BLOCK_ROWS = 16


@dataclass(frozen=True)
class Factors:
    """What `verify` writes and `commit` reads; X layers, R batch rows, at most 16 block rows.

    About 20 KiB a row, layer and request at the shape of Qwen3.6-35B-A3B (9.4 MiB a request for
    30 layers) against 2 MiB of state a row in engines that keep every intermediate state.

    Attributes:
        key_XRHTK: bf16, keys as they left the conv, not normalised: exact.
        update_XRHTV: fp32, `u_t / ||k_t||`, one head a value head, so that
            `u_t k_t^T = update_t key_t^T` with the raw key. fp32 is not optional: in bf16 each
            round adds a state error of about 2e-3.
        decay_XRHT: fp32 log decays, one head a value head.
    """

    key_XRHTK: torch.Tensor
    update_XRHTV: torch.Tensor
    decay_XRHT: torch.Tensor

    def __post_init__(self) -> None:
        key, update, decay = self.key_XRHTK, self.update_XRHTV, self.decay_XRHT
        if key.shape[3] != BLOCK_ROWS or update.shape[3] != BLOCK_ROWS:
            raise UsageError(
                f"factors hold {key.shape[3]} block rows; the kernels need {BLOCK_ROWS}: use "
                "Factors.allocate"
            )
        if (key.dtype, update.dtype, decay.dtype) != (
            torch.bfloat16,
            torch.float32,
            torch.float32,
        ):
            raise UsageError(
                f"factors are {key.dtype}, {update.dtype}, {decay.dtype}; they must be bfloat16 "
                "keys, float32 updates and decays (anything less drifts): use Factors.allocate"
            )
        if not (key.is_contiguous() and update.is_contiguous() and decay.is_contiguous()):
            raise UsageError("factors must be contiguous: use Factors.allocate")

    @classmethod
    def allocate(
        cls,
        layers: int,
        rows: int,
        key_heads: int,
        value_heads: int,
        key_dim: int,
        value_dim: int,
        *,
        device: torch.device | str,
    ) -> Factors:
        """Uninitialised factors; `commit` reads only what `verify` wrote.

        Args:
            rows: requests in a batch (or pool slots, where factors outlive the round).
        """

        def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        return cls(
            empty(layers, rows, key_heads, BLOCK_ROWS, key_dim, dtype=torch.bfloat16),
            empty(layers, rows, value_heads, BLOCK_ROWS, value_dim),
            empty(layers, rows, value_heads, BLOCK_ROWS),
        )

    @property
    def layers(self) -> int:
        """GDN layers."""
        return self.key_XRHTK.shape[0]

    def bytes(self) -> int:
        """Memory of the factors."""
        return sum(
            t.numel() * t.element_size()
            for t in (self.key_XRHTK, self.update_XRHTV, self.decay_XRHT)
        )
