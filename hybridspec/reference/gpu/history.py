"""What hazards by trees remember of each request of the captured engine, one slot a request.

The round before is read from the engine's report: rows of a batch keep their slots here, so nothing
is kept aside and brought back.
"""

from __future__ import annotations

import torch

from hybridspec.kernels.hazard_trees.ensemble import DeviceTrees
from hybridspec.kernels.hazard_trees.state import EMPTY, HistoryState
from hybridspec.kernels.hazard_trees.trees import Hazards, hazard_trees
from hybridspec.reference.gpu.buffers import Report

# Places of each table of a text; answers of the laboratory are a few hundred tokens.
ENTRIES = 4096


class TextHistory:
    """Emitted texts of all requests and the buffers of a round.

    Rounds without trees in between are not seen: a request decodes by one kind of round.

    Args:
        batch: requests.
    """

    def __init__(self, batch: int, device: torch.device | str) -> None:
        self._text = HistoryState.allocate(batch, device, entries=ENTRIES)
        self._hazards = Hazards.allocate(batch, device)
        self._slots_B = torch.arange(batch, dtype=torch.int32, device=device)

    def start(self, first_tokens_B: torch.Tensor, report: Report) -> None:
        """Forget all texts; every request has emitted one token, the prefill's. Nothing waits.

        Args:
            first_tokens_B: int32.
            report: made to say so, as the first round takes in what it says.
        """
        self._text.tables_SGN.fill_(EMPTY)
        self._text.tail_S2.fill_(EMPTY)
        self._text.numbers_SF.zero_()
        self._text.expected_SL.zero_()
        report.emitted_BT[:, 0].copy_(first_tokens_B)
        report.commit_rows_B.fill_(1)
        report.lengths_B.zero_()

    def hazards(
        self,
        p1_BD: torch.Tensor,
        p2_BD: torch.Tensor,
        entropy_BD: torch.Tensor,
        drafts_BD: torch.Tensor,
        last: Report,
        trees: DeviceTrees,
    ) -> torch.Tensor:
        """Take in the last round and give the hazards of this one's drafts, fp64 [B, 15].

        Once a round: text is taken in as often as it is called.
        """
        return hazard_trees(
            p1_BD,
            p2_BD,
            entropy_BD,
            drafts_BD,
            last.emitted_BT,
            last.commit_rows_B,
            last.lengths_B,
            self._slots_B,
            self._text,
            trees,
            out=self._hazards,
        ).hazards_BD
