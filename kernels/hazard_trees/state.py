"""What a request's rounds leave behind for the hazards of its next one, in device memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hybridspec.errors import UsageError

BLOCK_SIZE = 16
NUM_DRAFTS = 15
# n-grams of one, two and three tokens, and the tokens that followed two tokens last.
NUM_TABLES = 4
# Three token ids make one key.
TOKEN_BITS = 20
MAX_VOCAB = 1 << TOKEN_BITS
EMPTY = -1
# Odd, its bits without pattern: the high bits of a key's product with it are its place.
MIX = 0x1E3779B97F4A7C15
MEAN_SURPRISE, ROUNDS, TEXT_TOKENS = 0, 1, 2
MOVING_WEIGHT = 0.25


@dataclass(frozen=True)
class HistoryState:
    """History of S request slots; `allocate` makes it, `reset` starts a request.

    Attributes:
        tables_SGN: int64 [S, 4, N], direct-mapped tables of what was emitted. An entry is a whole
            key, so a hit is never wrong; of two keys in one place the later stays. 32 bytes x N a
            slot.
        tail_S2: int64 [S, 2], the last two emitted tokens, -1 before there are any.
        numbers_SF: fp32 [S, 4]: mean surprise, drafted rounds, emitted tokens, unused.
        expected_SL: fp32 [S, 16], accepted drafts that the drafter expects of the first 0..15.
    """

    tables_SGN: torch.Tensor
    tail_S2: torch.Tensor
    numbers_SF: torch.Tensor
    expected_SL: torch.Tensor

    @classmethod
    def allocate(
        cls, slots: int, device: torch.device | str, *, entries: int = 4096
    ) -> HistoryState:
        """State of `slots` requests that have emitted nothing.

        Args:
            entries: N, a power of two. A text of n tokens finds an n-gram again with probability
                about exp(-n / N); a lost one counts as never seen.
        """
        if entries < 16 or entries & (entries - 1):
            raise UsageError(f"entries = {entries}: pass a power of two of at least 16")
        return cls(
            torch.full((slots, NUM_TABLES, entries), EMPTY, dtype=torch.int64, device=device),
            torch.full((slots, 2), EMPTY, dtype=torch.int64, device=device),
            torch.zeros(slots, 4, device=device),
            torch.zeros(slots, BLOCK_SIZE, device=device),
        )

    @property
    def entries(self) -> int:
        """Places of each table, N."""
        return self.tables_SGN.shape[2]

    def reset(self, slot: int) -> None:
        """Forget the request of a slot; asynchronous, before the first round of the next one."""
        self.tables_SGN[slot].fill_(EMPTY)
        self.tail_S2[slot].fill_(EMPTY)
        self.numbers_SF[slot].zero_()
        self.expected_SL[slot].zero_()
