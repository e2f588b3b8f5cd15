"""Hazards by trees across rounds: each request's text and last round, by slot.

Trees read what a request emitted so far. That lives in device memory by request slot, because rows
of a batch move between rounds: the end of a round is kept by slot and recalled by the next draft.
"""

from __future__ import annotations

import torch

from hybridspec.kernels.hazard_trees.ensemble import DeviceTrees
from hybridspec.kernels.hazard_trees.state import EMPTY, HistoryState
from hybridspec.kernels.hazard_trees.trees import Hazards, hazard_trees
from hybridspec.kernels.round_control.record import LastRounds, recall_rounds
from hybridspec.kernels.select.tables import BLOCK_SIZE


class HazardHistory:
    """State of all slots, and the buffers of a round.

    Args:
        trees: packed ensemble.
        slots: of requests; rows past the batch have `max_requests` more, one each.
        entries: places of each table of a text.

    Attributes:
        last: the last round of each slot; the end of a round writes it.
    """

    def __init__(
        self,
        trees: DeviceTrees,
        *,
        slots: int,
        max_requests: int,
        entries: int,
        device: torch.device | str,
    ) -> None:
        self._trees = trees
        total = slots + max_requests
        self._text = HistoryState.allocate(total, device, entries=entries)
        self.last = LastRounds.allocate(total, device)
        self._hazards = Hazards.allocate(max_requests, device)
        self._emitted = torch.zeros(max_requests, BLOCK_SIZE, dtype=torch.int64, device=device)
        self._rows = torch.zeros(2, max_requests, dtype=torch.int32, device=device)

    def start(self, slots_B: torch.Tensor, first_tokens_B: torch.Tensor) -> None:
        """Forget what the slots held; their requests have emitted one token each, from prefill.

        Args:
            slots_B: int64 [B].
            first_tokens_B: [B], tokens that prefill gave.
        """
        slots_B = slots_B.to(torch.int64)
        self._text.tables_SGN.index_fill_(0, slots_B, EMPTY)
        self._text.tail_S2.index_fill_(0, slots_B, EMPTY)
        self._text.numbers_SF.index_fill_(0, slots_B, 0.0)
        self._text.expected_SL.index_fill_(0, slots_B, 0.0)
        self.last.emitted_ST[:, 0].index_copy_(0, slots_B, first_tokens_B.to(torch.int64))
        self.last.commit_rows_S.index_fill_(0, slots_B, 1)
        self.last.lengths_S.index_fill_(0, slots_B, 0)

    def hazards(
        self,
        p1_BD: torch.Tensor,
        p2_BD: torch.Tensor,
        entropy_BD: torch.Tensor,
        drafts_BD: torch.Tensor,
        slots_B: torch.Tensor,
    ) -> torch.Tensor:
        """Take in the last round of each slot and give the hazards of this one, fp64 [B, 15].

        Once a round: text is taken in as often as it is called.
        """
        requests = p1_BD.shape[0]
        emitted = self._emitted[:requests]
        rows, lengths = self._rows[0, :requests], self._rows[1, :requests]
        recall_rounds(slots_B, self.last, out=(emitted, rows, lengths))
        out = Hazards(self._hazards.hazards_BD[:requests], self._hazards.features_BLF[:requests])
        return hazard_trees(
            p1_BD,
            p2_BD,
            entropy_BD,
            drafts_BD,
            emitted,
            rows,
            lengths,
            slots_B,
            self._text,
            self._trees,
            out=out,
        ).hazards_BD
