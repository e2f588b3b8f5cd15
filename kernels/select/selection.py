"""What select writes, and the refusals of inputs that do not fit it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hybridspec.errors import UsageError
from hybridspec.kernels.select.tables import BLOCK_SIZE, NUM_DRAFTS

CHOSEN, NOT_FINITE, STATIC_POLICY = 0, 1, 2


@dataclass(frozen=True)
class Selection:
    """What select writes, one row a request; `allocate` makes the buffers.

    Attributes:
        lengths_B: int32 rows to verify, 0 for inactive requests.
        expected_BL: fp64 [B, 16], E(L) for L = 1..16.
        score_BL: fp64 [B, 16], E(L) - lam T(L).
        survival_BL: fp64 [B, 16], survivals S_0 .. S_15.
        price_B: fp64, the price of time in the score, tokens/us.
        fallback_B: int32, 0 where the length is the policy's own choice, 1 where a signal or the
            price is not finite, 2 where the policy is static.
    """

    lengths_B: torch.Tensor
    expected_BL: torch.Tensor
    score_BL: torch.Tensor
    survival_BL: torch.Tensor
    price_B: torch.Tensor
    fallback_B: torch.Tensor

    @classmethod
    def allocate(cls, num_requests: int, device: torch.device | str) -> Selection:
        """Buffers for so many requests."""

        def ints() -> torch.Tensor:
            return torch.empty(num_requests, dtype=torch.int32, device=device)

        def floats(*columns: int) -> torch.Tensor:
            return torch.empty(num_requests, *columns, dtype=torch.float64, device=device)

        tiles = [floats(BLOCK_SIZE) for _ in range(3)]
        return cls(ints(), tiles[0], tiles[1], tiles[2], floats(), ints())


def check_signals(
    p1_BD: torch.Tensor,
    p2_BD: torch.Tensor,
    entropy_BD: torch.Tensor,
    context_tokens_B: torch.Tensor,
    caps_B: torch.Tensor,
    batch_size: torch.Tensor,
    lam_B: torch.Tensor | None,
    hazards_BD: torch.Tensor | None = None,
) -> None:
    """Refuse inputs of `select` whose shapes, dtypes or strides do not fit."""
    shape = (p1_BD.shape[0], NUM_DRAFTS)
    for name, signal in (("p1", p1_BD), ("p2", p2_BD), ("entropy", entropy_BD)):
        if signal.shape != shape or signal.dtype != torch.float32 or signal.stride(1) != 1:
            raise UsageError(
                f"{name} is {signal.dtype} {tuple(signal.shape)} with strides {signal.stride()}; "
                f"expected float32 {shape} with rows in one piece"
            )
    columns = [("context", context_tokens_B), ("caps", caps_B)]
    for name, column in columns:
        require_column(name, column, shape[0], (torch.int32,))
    require_column("batch size", batch_size, 1, (torch.int32,))
    if lam_B is not None:
        require_column("lam", lam_B, shape[0], (torch.float32, torch.float64))
    if hazards_BD is not None and not (
        hazards_BD.shape == shape
        and hazards_BD.dtype == torch.float64
        and hazards_BD.is_contiguous()
    ):
        raise UsageError(
            f"hazards are {hazards_BD.dtype} {tuple(hazards_BD.shape)}; expected contiguous "
            f"float64 {shape}"
        )


def check_selection(out: Selection, num_requests: int) -> None:
    """Refuse buffers that `select` cannot write."""
    require_column("lengths", out.lengths_B, num_requests, (torch.int32,))
    require_column("fallback", out.fallback_B, num_requests, (torch.int32,))
    require_column("price", out.price_B, num_requests, (torch.float64,))
    shape = (num_requests, BLOCK_SIZE)
    for tile in (out.expected_BL, out.score_BL, out.survival_BL):
        if tile.shape != shape or tile.dtype != torch.float64 or not tile.is_contiguous():
            raise UsageError(
                f"a buffer is {tile.dtype} {tuple(tile.shape)}; expected contiguous float64 {shape}"
            )


def require_column(
    name: str, column: torch.Tensor, length: int, dtypes: tuple[torch.dtype, ...]
) -> None:
    """Refuse a vector of another length, dtype or stride."""
    if column.shape != (length,) or column.dtype not in dtypes or not column.is_contiguous():
        raise UsageError(
            f"{name} is {column.dtype} {tuple(column.shape)}; expected contiguous "
            f"{' or '.join(str(dtype) for dtype in dtypes)} ({length},)"
        )
