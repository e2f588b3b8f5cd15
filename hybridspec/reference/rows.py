"""Which rows of a flat pass belong to which request."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache

import torch


class RowLayout:
    """Rows of several requests behind one another, each request a block of its own length.

    Args:
        slots: state slot of each request.
        starts: context position of each request's first row.
        lengths: rows of each request, >= 1.
        device: of the index tensors.

    Attributes:
        rows: all rows.
        widest: longest block.
        uniform: all blocks have the same length.
    """

    def __init__(
        self,
        slots: Sequence[int],
        starts: Sequence[int],
        lengths: Sequence[int],
        device: torch.device,
    ) -> None:
        self.slots = list(slots)
        self.starts = list(starts)
        self.lengths = list(lengths)
        self.device = device
        self.rows = sum(lengths)
        self.widest = max(lengths)
        self.uniform = min(lengths) == self.widest

    @property
    def requests(self) -> int:
        """Requests in the pass."""
        return len(self.slots)

    @cached_property
    def offsets(self) -> list[int]:
        """First row of each request."""
        offsets, row = [], 0
        for length in self.lengths:
            offsets.append(row)
            row += length
        return offsets

    @cached_property
    def slot_index(self) -> torch.Tensor | slice:
        """Index of the slots in a pool: a slice (no copy) where they are neighbours."""
        first = self.slots[0]
        if self.slots == list(range(first, first + len(self.slots))):
            return slice(first, first + len(self.slots))
        return torch.tensor(self.slots, device=self.device)

    @cached_property
    def positions_R(self) -> torch.Tensor | slice:
        """Context position of every row, as an index into the rotary tables."""
        if self.requests == 1:
            return slice(self.starts[0], self.starts[0] + self.lengths[0])
        spans = zip(self.starts, self.lengths, strict=True)
        return torch.cat([torch.arange(s, s + n, device=self.device) for s, n in spans])

    @cached_property
    def _padded_index(self) -> torch.Tensor:
        """int64 [requests x widest]: the row at each padded place, `rows` where there is none."""
        index = torch.full((self.requests, self.widest), self.rows, device=self.device)
        for i, (offset, length) in enumerate(zip(self.offsets, self.lengths, strict=True)):
            index[i, :length] = torch.arange(offset, offset + length, device=self.device)
        return index.view(-1)

    @cached_property
    def _flat_index(self) -> torch.Tensor:
        """int64 [rows]: the padded place of each row."""
        index = self._padded_index
        return (index < self.rows).nonzero().view(-1)

    def pad(self, rows_RX: torch.Tensor) -> torch.Tensor:
        """[R, ...] to [requests, widest, ...]; places past a block's end are zero."""
        if not self.uniform:
            zero = rows_RX.new_zeros(1, *rows_RX.shape[1:])
            rows_RX = torch.cat([rows_RX, zero]).index_select(0, self._padded_index)
        return rows_RX.view(self.requests, self.widest, *rows_RX.shape[1:])

    def unpad(self, padded_BTX: torch.Tensor) -> torch.Tensor:
        """[requests, widest, ...] to [R, ...]."""
        flat = padded_BTX.reshape(-1, *padded_BTX.shape[2:])
        return flat if self.uniform else flat.index_select(0, self._flat_index)

    def index_of(self, keep: RowLayout) -> torch.Tensor | slice:
        """Rows of this layout that a layout with shorter blocks keeps."""
        if self.requests == 1:
            return slice(0, keep.lengths[0])
        spans = zip(self.offsets, keep.lengths, strict=True)
        return torch.cat([torch.arange(o, o + n, device=self.device) for o, n in spans])


@lru_cache(maxsize=64)
def causal_mask(rows: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Additive mask [rows, rows]: -inf above the diagonal."""
    return torch.full((rows, rows), float("-inf"), dtype=dtype, device=device).triu_(1)
