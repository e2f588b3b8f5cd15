"""A round of a batch as the worker drives it: begin, draft, verify, accept, commit, end.

Nothing here waits for the device or reads from it. What a round needs of the host (who is in the
batch, what they ask for, their slots) is sent when the batch changes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from hybridspec.kernels.draft_features.split import TILING, Tiling
from hybridspec.kernels.round_control.limit import limit_acceptance
from hybridspec.kernels.round_control.record import LastRounds, record_round
from hybridspec.kernels.select.tables import BLOCK_SIZE
from hybridspec.sglang_plugin.commit_graphs import CommitGraphs
from hybridspec.sglang_plugin.config import PluginConfig
from hybridspec.sglang_plugin.controls import BatchControls, LengthRequest, Row
from hybridspec.sglang_plugin.draft_lengths import DraftLengths
from hybridspec.sglang_plugin.hazard_history import HazardHistory
from hybridspec.sglang_plugin.policy import DevicePolicy
from hybridspec.sglang_plugin.prefix_snapshots import PrefixSnapshots
from hybridspec.sglang_plugin.round_counters import RoundCounters
from hybridspec.sglang_plugin.round_state import NO_SLOT, RoundState, TargetHalf
from hybridspec.sglang_plugin.side_stream import SideStream

logger = logging.getLogger(__name__)


def default_lengths(config: PluginConfig) -> LengthRequest:
    """What a request gets that asks for nothing."""
    return LengthRequest(min(config.force_length or 0, config.max_length), config.max_length)


class Rounds:
    """State and steps of the rounds of one worker.

    Args:
        config: of the plugin.
        policy: what chooses lengths.
        max_requests: largest batch.
        history_slots: rows of the engine's request pool.
        device: of the engine.
        counters: telemetry.

    Attributes:
        state: columns that the graphs share.
        target: the target half once it is installed; None: the engine verifies and commits.
        drafts: tail of the drafter's graph, see `make_drafts`.
        side: stream of the commit and of telemetry; joined before every pass of the target.
        commit_graphs: the target's commit beside the rest of the round; None: in line with it.
        snapshots: of states for the engine's radix cache; None: it has none.
    """

    def __init__(
        self,
        config: PluginConfig,
        policy: DevicePolicy,
        *,
        max_requests: int,
        history_slots: int,
        device: torch.device | str,
        counters: RoundCounters,
    ) -> None:
        self.config = config
        self.policy = policy
        # A multiple of 4, so that every column of the controls starts at 16 bytes.
        max_requests = -(-max_requests // 4) * 4
        self.state = RoundState(max_requests, device)
        self.counters = counters
        self.target: TargetHalf | None = None
        self.drafts: DraftLengths | None = None
        self.side = SideStream(device)
        self.commit_graphs: CommitGraphs | None = None
        self.snapshots: PrefixSnapshots | None = None
        self.controls = BatchControls(self.state, policy.price, spare_slots=history_slots)
        self.history: HazardHistory | None = None
        if policy.trees is not None:
            self.history = HazardHistory(
                policy.trees,
                slots=history_slots,
                max_requests=max_requests,
                entries=config.history_entries,
                device=device,
            )

    def make_drafts(
        self,
        *,
        vocab: int,
        vocab_start: int,
        dtype: torch.dtype,
        tp_group: Any,
        tiling: Tiling = TILING,
    ) -> DraftLengths:
        """Tail of the drafter's graph for this rank's columns of the logits."""
        self.drafts = DraftLengths(
            self.state,
            self.policy,
            vocab=vocab,
            vocab_start=vocab_start,
            dtype=dtype,
            history=self.history,
            tp_group=tp_group,
            tiling=tiling,
        )
        return self.drafts

    def compile(self) -> None:
        """Launch what no graph holds once, on scratch: else the first request waits for it."""
        device = self.state.device
        one = torch.ones(1, dtype=torch.int32, device=device)
        tokens = torch.zeros(1, BLOCK_SIZE, dtype=torch.int64, device=device)
        limit_acceptance(tokens, one, next_BT=None)
        limit_acceptance(tokens, one, next_BT=tokens.clone())
        counters = torch.zeros_like(self.counters.device_counters)
        if self.history is None:
            record_round(one, one, one, counters, one.clone())
        else:
            record_round(
                one,
                one,
                one,
                counters,
                one.clone(),
                emitted_BT=tokens,
                slots_B=one,
                last=LastRounds.allocate(2, device),
            )

    def prefilled(self, slots_B: torch.Tensor, first_tokens_B: torch.Tensor) -> None:
        """Requests were prefilled and emitted their first token; slots may have new owners."""
        self.controls.forget()
        if self.history is not None and slots_B.shape == first_tokens_B.shape:
            self.history.start(slots_B, first_tokens_B)

    def begin(
        self,
        keys: tuple[Any, ...],
        rows: Callable[[], Sequence[Row]],
        state_slots: Callable[[], torch.Tensor | None],
    ) -> bool:
        """Before the drafter of a round runs.

        Args:
            keys: identifies the requests of the batch, in order.
            rows: the requests; called only if the batch is another one.
            state_slots: [B] slots of recurrent states, None without such layers; likewise.

        Returns:
            whether the batch is another one, or its slots may be.
        """
        if not self.controls.update(keys, rows):
            return False
        requests = len(keys)
        state = self.state
        # The last commit reads slots.
        self.side.join()
        # Rows that pad a graph are inactive, also where the two graphs pad differently.
        state.lengths_B[requests:].zero_()
        state.router_rows_B[requests:].zero_()
        state.state_slots_B[requests:].fill_(NO_SLOT)
        slots = state_slots()
        if slots is not None:
            state.state_slots_B[:requests].copy_(slots)
        return True

    def verifying(self) -> AbstractContextManager[None]:
        """Around the target's verify pass."""
        return nullcontext() if self.target is None else self.target.capture_scope()

    def limit(self, candidates_BT: torch.Tensor, next_BT: torch.Tensor | None) -> None:
        """After the target, before acceptance: drafts past the lengths cannot be accepted."""
        limit_acceptance(candidates_BT, self.state.lengths_B[: len(candidates_BT)], next_BT=next_BT)

    def commit(self, commit_rows_B: torch.Tensor) -> bool:
        """Commit recurrent states; False: the engine has to do it.

        Args:
            commit_rows_B: int [B], accepted drafts + 1.
        """
        requests = commit_rows_B.shape[0]
        state = self.state
        snapshots = self.snapshots
        if self.commit_graphs is not None and self.commit_graphs.serves(requests):
            # Nothing of the drafter reads states, so its caches and its graph need not wait.
            with self.side.beside(commit_rows_B, *(snapshots.reads if snapshots else ())):
                state.commit_rows_B[:requests].copy_(commit_rows_B)
                if snapshots is not None:
                    snapshots.take(state.commit_rows_B, state.state_slots_B, requests)
                self.commit_graphs.launch(requests)
            return True
        state.commit_rows_B[:requests].copy_(commit_rows_B)
        if self.target is None:
            return False
        if snapshots is not None:
            snapshots.take(state.commit_rows_B, state.state_slots_B, requests)
        self.target.commit(state.commit_rows_B, state.state_slots_B, requests)
        return True

    def join(self) -> None:
        """Before anything on the current stream that uses states: the commit has been made."""
        self.side.join()

    def end(self, commit_rows_B: torch.Tensor, emitted_T: torch.Tensor) -> torch.Tensor:
        """Count the round and keep it by slot.

        Args:
            commit_rows_B: int32 [B].
            emitted_T: int64 [B * 16], rows of emitted tokens.

        Returns:
            int32 [B], the lengths verified; stays as it is until the end of the round after next.
        """
        requests = commit_rows_B.shape[0]
        state = self.state
        verified_B = self.counters.verified(requests)
        remember: dict[str, Any] = {}
        if self.history is not None:
            remember = {
                "emitted_BT": emitted_T.view(requests, BLOCK_SIZE),
                "slots_B": state.history_slots_B[:requests],
                "last": self.history.last,
            }
        record_round(
            state.lengths_B[:requests],
            state.fallback_B[:requests],
            commit_rows_B,
            self.counters.device_counters,
            verified_B,
            **remember,
        )
        # What follows in a stream waits for a copy to the host.
        with self.side.beside():
            self.counters.publish()
        return verified_B
