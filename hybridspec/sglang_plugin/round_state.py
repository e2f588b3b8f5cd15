"""Device memory that the drafter's graph, the target's graph and the round between them share.

Everything is allocated once, for the largest batch, and never moves: captured graphs hold the
addresses. Rows are batch rows (the i-th request of the batch), not request slots; a row past the
batch is inactive and has a cap of 0, a length of 0 and a state slot of -1.

| column | written by | read by |
|---|---|---|
| caps_B, forced_B, batch_size, lam_B, state_slots_B, history_slots_B | host, when the batch changes | both graphs |
| context_B, selection, router_rows_B | tail of the drafter's graph | the target's graph |
| lengths_B | tail of the drafter's graph; the target's first router may shorten it | the target's graph, acceptance |
| commit_rows_B | acceptance | the commit of the target, the next round's hazards |
"""  # noqa: E501

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from hybridspec.kernels.select.selection import Selection

if TYPE_CHECKING:
    from hybridspec.kernels.select.tables import DeviceTables

BLOCK_SIZE = 16
NUM_DRAFTS = 15
# Reasons in `fallback_B`; 0, 1 and 2 are select's own.
CHOSEN, NOT_FINITE, STATIC_POLICY, FORCED = 0, 1, 2, 3
NO_SLOT = -1


class TargetHalf(Protocol):
    """What `hybridspec.sglang_plugin.target.install.install_target` returns."""

    def commit(
        self, commit_rows_B: torch.Tensor, state_slots_B: torch.Tensor, num_requests: int
    ) -> None:
        """Move the recurrent state and conv window of every GDN layer past the committed rows.

        Launched after acceptance, in stream order, for the first `num_requests` batch rows. Reads
        the device columns; the host knows neither the lengths nor the rows.
        """
        ...

    def capture_scope(self) -> AbstractContextManager[None]:
        """Active while the target verifies (captured, or run without a graph).

        Modules of the target take lengths into account inside it alone, so prefill through the same
        modules is untouched. The worker enters it around every verify pass; a capture happens
        before the worker's first round, so the target half enters it there by itself.
        """
        ...


@dataclass(frozen=True)
class TargetOptions:
    """What the target half has to know of the configuration.

    Attributes:
        correction: `select`, `paper` or `off`; anything but `off` needs `tables`.
        lookahead: rows beyond the length that run up to the first router, 0 without correction.
        tables: packed tables of the bundle, which `correct` prices experts with; None without one.
        num_layers_masked: layers whose routes are masked, None: all.
    """

    correction: str = "off"
    lookahead: int = 0
    tables: DeviceTables | None = None
    num_layers_masked: int | None = None


class RoundState:
    """Columns of a round; see the table above for who writes which.

    Attributes:
        max_requests: rows of every column.
        lengths_B: int32, rows of each block to verify, anchor included; 0: inactive.
        router_rows_B: int32, rows that run up to the first router: the length, plus the lookahead
            where a correction may still lengthen it.
        caps_B: int32, longest length allowed, 1..16; 0: inactive row.
        forced_B: int32, exact length that the request asked for, 0: none.
        lam_B: fp64, price of time in tokens/us.
        context_B: int32, position of the anchor.
        state_slots_B: int32, slot of the request in SGLang's mamba pool; -1: inactive row.
        history_slots_B: int32, row of the request in SGLang's request pool, all different.
        commit_rows_B: int32, accepted drafts + 1.
        fallback_B: int32, `selection.fallback_B`: 0 where the policy chose, else one of the reasons
            above. Length and reason of such a request stay as they are: the correction keeps them.
        selection: what select wrote, for the correction. `selection.lengths_B` is the length before
            it, after forcing.
        batch_size: int32 [1], requests of the batch.
    """

    def __init__(
        self,
        max_requests: int,
        device: torch.device | str,
        block: int = BLOCK_SIZE,
        num_drafts: int = NUM_DRAFTS,
    ) -> None:
        if (block, num_drafts) != (BLOCK_SIZE, NUM_DRAFTS):
            raise ValueError(
                f"block {block} with {num_drafts} drafts; kernels take {BLOCK_SIZE} and "
                f"{NUM_DRAFTS}: start with --speculative-num-draft-tokens {BLOCK_SIZE}"
            )
        self.max_requests = max_requests
        self.device = torch.device(device)
        self.block = block
        self.num_drafts = num_drafts

        def column(value: int) -> torch.Tensor:
            return torch.full((max_requests,), value, dtype=torch.int32, device=device)

        # Full length until the first round: what is captured is a valid round.
        self.lengths_B = column(block)
        self.router_rows_B = column(block)
        self.state_slots_B = column(NO_SLOT)
        self.context_B = column(0)
        self.commit_rows_B = column(1)
        # One piece, so that a change of the batch is one copy.
        self.controls_CB = torch.zeros(4, max_requests, dtype=torch.int32, device=device)
        self.caps_B, self.forced_B, self.history_slots_B, spare_B = self.controls_CB
        self.batch_size = spare_B[:1]
        self.caps_B.fill_(block)
        self.history_slots_B.copy_(torch.arange(max_requests, dtype=torch.int32))
        self.batch_size.fill_(1)
        self.lam_B = torch.zeros(max_requests, dtype=torch.float64, device=device)
        self.selection = Selection.allocate(max_requests, device)
        self.fallback_B = self.selection.fallback_B
        for tensor in vars(self.selection).values():
            tensor.zero_()
        self.selection.lengths_B.fill_(block)

    def selection_of(self, num_requests: int) -> Selection:
        """The first rows of `selection`, as select and correct take them."""
        return Selection(
            **{name: tensor[:num_requests] for name, tensor in vars(self.selection).items()}
        )
