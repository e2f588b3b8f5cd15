"""Rounds of the captured engine whose lengths, cuts and drafts are planned.

The drafter and the policy's kernel run; what they propose is replaced on the device, inside the
graph. Verification, acceptance and commit are the engine's own.
"""

from __future__ import annotations

from typing import Literal

import torch

from hybridspec.kernels.gdn.factors import BLOCK_ROWS
from hybridspec.reference.gpu.engine import GpuEngine
from hybridspec.reference.gpu.measured import longest_tables
from hybridspec.reference.gpu.round import GpuRound, RoundRules

Kind = Literal["plain", "fixed", "cut"]


class PlannedRound(GpuRound):
    """`plain` without drafts, `fixed` with planned lengths, or `cut` at the first router.

    A round that is cut selects as many rows as `buffers.limits_B` allows; the correction's place
    is taken by a cut to `buffers.fixed_B`.

    Attributes:
        script_BD: int32 [B, 15], drafts of the next round.
    """

    def __init__(self, engine: GpuEngine, kind: Kind, *, sampled: bool) -> None:
        if kind == "cut":
            tables = longest_tables(engine.target.device)
            rules = RoundRules("policy", tables=tables, correction="select", sampled=sampled)
        else:
            rules = RoundRules(kind, sampled=sampled)
        super().__init__(engine, rules)
        self.script_BD = torch.zeros_like(engine.target.drafts_BD)
        self._places_R = torch.arange(BLOCK_ROWS, dtype=torch.int32, device=engine.target.device)

    def _draft(self) -> None:
        super()._draft()
        self.target.drafts_BD.copy_(self.script_BD)

    def _correct(self) -> None:
        buffers, target = self.buffers, self.target
        torch.minimum(buffers.selected_B, buffers.fixed_B, out=self.lengths_B)
        dropped = (self._places_R >= self.lengths_B[:, None]).view(-1, 1)
        target.ids_RK.masked_fill_(dropped, -1)
        target.weights_RK.masked_fill_(dropped, 0.0)
