"""How the rows of one launch are split over programs, and the scratch in which their parts meet."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hybridspec.errors import UsageError
from hybridspec.kernels.draft_features.rows import NUM_FIELDS, next_power_of_2

# Bits that no part consists of (a NaN with sign and payload): not written yet.
UNWRITTEN = -1


@dataclass(frozen=True)
class Tiling:
    """Every thread of a program holds `vectors` loads of 16 bytes.

    Attributes:
        vectors: loads of a thread, all in flight at once.
        num_warps: of a program.
    """

    vectors: int = 16
    num_warps: int = 1

    def chunk(self, element_bytes: int) -> int:
        """Logits of one program."""
        return self.vectors * self.num_warps * 32 * (16 // element_bytes)

    def splits(self, vocab: int, element_bytes: int) -> int:
        """Programs of one row."""
        return max(1, -(-vocab // self.chunk(element_bytes)))


TILING = Tiling()


@dataclass(frozen=True)
class Workspace:
    """Scratch of one launch at a time: launches that may overlap need one each.

    Each launch leaves it as it found it, so it serves any number of graph replays.

    Attributes:
        parts: int32, bits of the parts of every chunk of every row.
        tickets_R: int32, zero between launches.
        tiling: that it was made for.
    """

    parts: torch.Tensor
    tickets_R: torch.Tensor
    tiling: Tiling

    @classmethod
    def create(
        cls,
        rows: int,
        vocab: int,
        dtype: torch.dtype,
        device: torch.device | str,
        *,
        tiling: Tiling = TILING,
    ) -> Workspace:
        """For at most `rows` rows of at most `vocab` logits."""
        splits = next_power_of_2(tiling.splits(vocab, dtype.itemsize))
        parts = torch.full(
            (rows * NUM_FIELDS * splits,), UNWRITTEN, dtype=torch.int32, device=device
        )
        return cls(parts, torch.zeros(rows, dtype=torch.int32, device=device), tiling)

    def check(self, rows: int, splits_padded: int) -> None:
        """Refuse a launch that it is too small for.

        Raises:
            UsageError: too few rows or parts.
        """
        needed = rows * NUM_FIELDS * splits_padded
        if self.parts.numel() < needed or self.tickets_R.shape[0] < rows:
            raise UsageError(
                f"the workspace is too small for {rows} rows of {splits_padded} parts: "
                "create it for the largest launch"
            )
