"""States for the engine's radix cache: taken in rounds that pass a multiple of its interval.

The scheduler believes that a request whose text passed a multiple of the interval in a round left
its state there in the slot that was next for it (the contract tests hold its rule beside ours). It
learns of a round after the next one has been launched, for the same slot, so two rounds in a row
must not pass one. The first of them began before its boundary, so the second ends less than two
blocks behind it: two blocks are the least interval. Where a round does pass one is known on the
device alone, but the host knows enough to say of most rounds that none will: those launch nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

import torch

from hybridspec.errors import UsageError
from hybridspec.kernels.gdn.commit import ConvWindows
from hybridspec.kernels.state_snapshot.snapshot import copy_slots, plan
from hybridspec.sglang_plugin.radix_refusals import LEAST_TRACK_INTERVAL
from hybridspec.sglang_plugin.round_state import BLOCK_SIZE, NO_SLOT

# The scheduler is one round behind what it launches; that it never is two is not ours to promise.
UNSEEN_ROUNDS = 2


class Commit(Protocol):
    """What `target.gdn.StateCommit` is."""

    state_XSHVK: torch.Tensor
    windows: ConvWindows

    def __call__(
        self, commit_rows_B: torch.Tensor, state_slots_B: torch.Tensor, num_requests: int
    ) -> None:
        """Move states and windows past their rows, in place."""
        ...


def may_pass(contexts: Iterable[int], interval: int) -> bool:
    """Whether a round can pass a multiple of the interval, by what the host knows.

    Args:
        contexts: tokens in the caches of each request behind the last round that the host has seen;
            up to `UNSEEN_ROUNDS` more run or wait, the prefill of a first token may be one of them.
    """
    ahead = (UNSEEN_ROUNDS + 1) * BLOCK_SIZE
    return any((context + ahead) // interval != context // interval for context in contexts)


class PrefixSnapshots:
    """Snapshots of one worker.

    Args:
        commit: of the target, on its pools.
        interval: tokens between two snapshots of a text.
        max_requests: largest batch.
    """

    def __init__(self, commit: Commit, interval: int, max_requests: int) -> None:
        if interval < LEAST_TRACK_INTERVAL:
            raise UsageError(
                f"snapshots every {interval} tokens; the scheduler sees one round late which slot "
                "was written, so two rounds in a row must not write: set --mamba-track-interval "
                f"{LEAST_TRACK_INTERVAL} or more"
            )
        self._commit = commit
        self.interval = interval
        device = commit.state_XSHVK.device
        # Of the round; the launches that read them follow in the same stream.
        self._rows_B, self._slots_B = torch.full(
            (2, max_requests), NO_SLOT, dtype=torch.int32, device=device
        )
        self._expected: tuple[torch.Tensor, torch.Tensor] | None = None

    def compile(self) -> None:
        """Launch for a request without a slot, which changes nothing: no graph holds these."""
        one = torch.ones(1, dtype=torch.int32, device=self._rows_B.device)
        self.expect([self.interval - 1], lambda: (one.long(), one.long()))
        self.take(one, one * NO_SLOT, 1)

    def expect(
        self, contexts: Iterable[int], tensors: Callable[[], tuple[torch.Tensor, torch.Tensor]]
    ) -> None:
        """Before a round: whether it may pass a boundary, and what its snapshots need then.

        Args:
            contexts: as `may_pass` takes them.
            tensors: tokens in the caches before the round and slots of the pool for a snapshot,
                integers [B] on the device; called only where one may be taken.
        """
        self._expected = tensors() if may_pass(contexts, self.interval) else None

    @property
    def reads(self) -> tuple[torch.Tensor, ...]:
        """Tensors of the main stream that `take` is going to read."""
        return self._expected or ()

    def take(
        self, commit_rows_B: torch.Tensor, state_slots_B: torch.Tensor, num_requests: int
    ) -> None:
        """Before the commit of a round, in its stream: snapshots of those who pass a boundary.

        Args:
            commit_rows_B, state_slots_B: columns of the round, as the commit will take them.
        """
        if self._expected is None:
            return
        (before_B, track_slots_B), self._expected = self._expected, None
        slots_B = state_slots_B[:num_requests]
        snapshot_rows_B = self._rows_B[:num_requests]
        snapshot_slots_B = self._slots_B[:num_requests]
        plan(
            before_B,
            commit_rows_B[:num_requests],
            slots_B,
            track_slots_B,
            self.interval,
            out=(snapshot_rows_B, snapshot_slots_B),
        )
        commit = self._commit
        copy_slots(commit.state_XSHVK, commit.windows.pool_XSCW, slots_B, snapshot_slots_B)
        commit(self._rows_B, self._slots_B, num_requests)
