"""Records rounds: packed on the device, copied to pinned memory, written by a thread.

Nothing in a round waits. Signals are packed into one staging row a request in stream order, copied
into the next free place of a ring of pinned memory, and an event marks the copy. A thread waits for
the event, takes the rows in and gives the place back. Where no place is free the round is not
copied, and its requests are left out of the trace: memory stays bounded and no request waits.

SGLang ends its ranks with SIGKILL, so rounds are written as soon as their requests have ended.
"""

from __future__ import annotations

import atexit
import logging
import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hybridspec.errors import EngineRefusal, HybridSpecError
from hybridspec.kernels.draft_features.rows import DraftFeatures
from hybridspec.sglang_plugin import recorded_requests as words
from hybridspec.sglang_plugin.controls import RecordTag
from hybridspec.sglang_plugin.recorded_requests import NUM_WORDS, RecordedRequests
from hybridspec.sglang_plugin.round_state import BLOCK_SIZE, NUM_DRAFTS, RoundState

logger = logging.getLogger(__name__)

RING = 32
WRITE_SECONDS = 0.5
# uint8 ids up to this many experts, as traces have them.
NARROW_EXPERTS = 256


@dataclass(frozen=True)
class Member:
    """A request of the batch that is recorded: its batch row, key, object and tag."""

    row: int
    key: str
    request: Any
    tag: RecordTag


@dataclass(frozen=True)
class _Copied:
    members: Sequence[Member]
    place: int | None  # None: no place was free
    copied: Any  # event, None without a GPU


class RoundRecorder:
    """Copies rounds out of the engine.

    Args:
        state: columns of the rounds.
        features: of the drafts, [max requests * 15].
        requests: what takes the rounds in, on the recorder's thread.
        kept_XRK: int32 [layers, max requests * 16, top-k], experts of the last verify pass; None
            leaves routes out.
        num_experts: of a layer.
        ring: places for rounds on their way to the thread.

    Attributes:
        lost: rounds that no place was free for.
    """

    def __init__(
        self,
        state: RoundState,
        features: DraftFeatures,
        requests: RecordedRequests,
        *,
        kept_XRK: torch.Tensor | None = None,
        num_experts: int = 0,
        ring: int = RING,
    ) -> None:
        self._state = state
        self._features = features
        self._requests = requests
        self._kept_XRK = kept_XRK
        self._on_gpu = state.device.type == "cuda"
        most = state.max_requests
        self._staged = torch.zeros(most, NUM_WORDS, dtype=torch.int32, device=state.device)
        self._staged_reals = self._staged.view(torch.float32)
        self._pinned = self._pin(ring, most, NUM_WORDS, dtype=torch.int32)
        self._staged_routes = self._pinned_routes = None
        if kept_XRK is not None:
            layers, rows, top_k = kept_XRK.shape
            if rows < most * BLOCK_SIZE:
                raise EngineRefusal(f"routes of {rows} rows for {most} requests; record no routes")
            narrow = torch.uint8 if num_experts <= NARROW_EXPERTS else torch.int16
            shape = (layers, BLOCK_SIZE, top_k)
            self._staged_routes = torch.zeros(most, *shape, dtype=narrow, device=state.device)
            self._pinned_routes = self._pin(ring, most, *shape, dtype=narrow)
        self._free: queue.SimpleQueue[int] = queue.SimpleQueue()
        for place in range(ring):
            self._free.put(place)
        self._filled: queue.SimpleQueue[_Copied | None] = queue.SimpleQueue()
        self._failed = False
        self.lost = 0
        self._thread = threading.Thread(target=self._take_in, name="record", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def _pin(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(*shape, dtype=dtype, pin_memory=self._on_gpu)

    def add(
        self,
        members: Sequence[Member],
        anchors_B: torch.Tensor,
        logits_RV: torch.Tensor,
        commit_rows_B: torch.Tensor,
    ) -> None:
        """After a round: copy what it saw; launches and waits for nothing.

        Args:
            members: the requests to keep.
            anchors_B: int64 [B], first tokens of the blocks.
            logits_RV: [B * 16, V], as acceptance read them.
            commit_rows_B: int32 [B], accepted drafts + 1.
        """
        if not members or self._failed:
            return
        try:
            place = self._free.get_nowait()
        except queue.Empty:
            self.lost += 1
            self._filled.put(_Copied(members, None, None))
            return
        requests = commit_rows_B.shape[0]
        self._pack(requests, anchors_B, logits_RV, commit_rows_B)
        self._pinned[place, :requests].copy_(self._staged[:requests], non_blocking=True)
        if self._staged_routes is not None and self._pinned_routes is not None:
            self._pinned_routes[place, :requests].copy_(
                self._staged_routes[:requests], non_blocking=True
            )
        copied = None
        if self._on_gpu:
            # A thread that waits for this one sleeps instead of spinning.
            copied = torch.cuda.Event(blocking=True)
            copied.record()
        self._filled.put(_Copied(members, place, copied))

    def _pack(
        self,
        requests: int,
        anchors_B: torch.Tensor,
        logits_RV: torch.Tensor,
        commit_rows_B: torch.Tensor,
    ) -> None:
        staged, reals = self._staged[:requests], self._staged_reals[:requests]
        staged[:, words.LENGTH].copy_(self._state.lengths_B[:requests])
        staged[:, words.ACCEPTED].copy_(commit_rows_B - 1)
        staged[:, words.CONTEXT].copy_(self._state.context_B[:requests])
        staged[:, words.ANCHOR].copy_(anchors_B)
        drafts = slice(0, requests * NUM_DRAFTS)
        features = self._features
        for rows, out, where in (
            (features.tokens_R, staged, words.DRAFTS),
            (features.p1_R, reals, words.P1),
            (features.p2_R, reals, words.P2),
            (features.entropy_R, reals, words.ENTROPY),
        ):
            out[:, where].copy_(rows[drafts].view(requests, NUM_DRAFTS))
        # One request after the other: fp32 copies of a whole batch's logits take too much memory.
        for row in range(requests):
            logits_LV = logits_RV[row * BLOCK_SIZE : (row + 1) * BLOCK_SIZE]
            # The same call as the greedy acceptance makes, so that ties end alike.
            best_L = torch.argmax(logits_LV, dim=-1)
            top_L = logits_LV.gather(1, best_L[:, None]).squeeze(1).float()
            p1_L = (top_L - torch.logsumexp(logits_LV.float(), dim=-1)).exp().clamp(max=1.0)
            staged[row, words.TARGETS].copy_(best_L)
            reals[row, words.TARGET_P1].copy_(p1_L)
        if self._staged_routes is not None and self._kept_XRK is not None:
            layers, _, top_k = self._kept_XRK.shape
            kept = self._kept_XRK[:, : requests * BLOCK_SIZE]
            self._staged_routes[:requests].copy_(
                kept.view(layers, requests, BLOCK_SIZE, top_k).transpose(0, 1)
            )

    def close(self) -> None:
        """Take in what is copied, write what has ended, and stop. Idempotent."""
        if self._thread.is_alive():
            self._filled.put(None)
            self._thread.join(timeout=30.0)
        atexit.unregister(self.close)

    def _take_in(self) -> None:
        try:
            self._forever()
        except (OSError, HybridSpecError) as error:
            logger.warning("HYBRIDSPEC: nothing is recorded any more: %s", error)
        finally:
            self._failed = True

    def _forever(self) -> None:
        requests = self._requests
        written = time.monotonic()
        stopping = False
        while not stopping:
            try:
                round_ = self._filled.get(timeout=WRITE_SECONDS)
                stopping = round_ is None
                if round_ is not None:
                    self._take(round_)
            except queue.Empty:
                pass
            if self._filled.empty():
                requests.settle()
                if stopping:
                    requests.settle()  # what has ended by now has all its rounds in
            due = time.monotonic() - written > WRITE_SECONDS or stopping
            if requests.num_rows and (due or requests.num_rows > words.MOST_ROWS):
                requests.write()
                written = time.monotonic()

    def _take(self, round_: _Copied) -> None:
        place = round_.place
        if place is None:
            for member in round_.members:
                self._requests.lost(member.key, member.request, member.tag)
            return
        if round_.copied is not None:
            round_.copied.synchronize()
        rows = self._pinned[place].numpy()
        routes = None if self._pinned_routes is None else self._pinned_routes[place].numpy()
        for member in round_.members:
            taken = b"" if routes is None else routes[member.row].tobytes()
            self._requests.add(
                member.key, member.request, member.tag, rows[member.row].copy(), taken
            )
        self._free.put(place)
