"""Decoding with captured rounds: the host launches, and reads what was emitted one round late.

Every round's report is copied to pinned memory behind it and an event marks the copy. The host
waits for the event of the round before the one it has just launched, so the GPU never waits for the
host, and a request that is finished costs one round more, which is dropped.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from hybridspec.acceptance import Coins
from hybridspec.reference.gpu.buffers import Report
from hybridspec.reference.gpu.engine import GpuEngine

RING = 4


class RoundLine(NamedTuple):
    """One request's part of one round.

    Attributes:
        emitted: tokens, cut behind an end-of-sequence token and at the limit.
        length: rows verified. accepted: drafts accepted.
        us: time from the end of the round before to the end of this one, by the GPU's clock.
        margins: ln(p1 / p2) of the target at each emitted token: how far it was from a tie.
        fallback: why a policy did not choose the length, as of `Selection.fallback_B`; else 0.
    """

    emitted: list[int]
    length: int
    accepted: int
    us: float
    margins: list[float]
    fallback: int = 0


@dataclass
class Decoded:
    """Text of one request.

    Attributes:
        first: token of the prefill; not among the rounds.
        lines: rounds up to the one that finished it.
    """

    first: int
    lines: list[RoundLine] = field(default_factory=list)
    finished: bool = False
    failed: bool = False

    @property
    def tokens(self) -> list[int]:
        """The prefill's token and all emitted ones."""
        return [self.first, *(t for line in self.lines for t in line.emitted)]


class _Mark:
    """A moment on the device's stream; on a CPU, where launches return when done, of the host."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event(enable_timing=True) if device.type == "cuda" else None
        self._at = 0.0

    def record(self) -> None:
        if self._event is None:
            self._at = time.perf_counter()
        else:
            self._event.record()

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()

    def us_since(self, other: _Mark) -> float:
        if self._event is None or other._event is None:
            return (self._at - other._at) * 1e6
        return other._event.elapsed_time(self._event) * 1e3


class _Slot(NamedTuple):
    report: Report
    copied: _Mark


class Decoder:
    """Runs rounds of one engine until its requests are finished.

    Args:
        engine: prefilled, or restored to a snapshot, before each call.
        stop_tokens: end-of-sequence ids.
    """

    def __init__(self, engine: GpuEngine, *, stop_tokens: frozenset[int] = frozenset()) -> None:
        self.engine, self.stop_tokens = engine, stop_tokens
        device, host = engine.target.device, torch.device("cpu")
        pinned = device.type == "cuda"
        self._ring = [
            _Slot(Report(engine.batch, host, pinned=pinned), _Mark(device)) for _ in range(RING)
        ]
        self._began = _Mark(device)
        self._limits = torch.zeros(engine.batch, dtype=torch.int32, pin_memory=pinned)
        self.rounds_launched = 0

    @torch.inference_mode()
    def decode(
        self,
        replay: Callable[[], None],
        first_tokens: Sequence[int],
        *,
        max_new_tokens: int,
        coins: Sequence[Coins] | None = None,
        rows: int = 16,
        choose: Callable[[list[Decoded]], Callable[[], None]] | None = None,
    ) -> list[Decoded]:
        """Decode every request to its end.

        Args:
            replay: launches one round on the current stream.
            first_tokens: of the prefill.
            max_new_tokens: of each request, the first token included.
            coins: of each request, for sampled rounds; taken ahead of the rounds they are for.
            rows: rows a request of the graph (1 of plain decoding), to find margins.
            choose: gives the launch of the next round from what is known then (the rounds before
                the running one); None: always `replay`.
        """
        texts = [Decoded(first, finished=first in self.stop_tokens) for first in first_tokens]
        self.rounds_launched = 0
        pending: deque[int] = deque()
        drawn = None if coins is None else self._draw(coins, max_new_tokens)
        previous = self._began
        self._began.record()
        while not all(text.finished for text in texts):
            if drawn is not None:
                self.engine.sampling_buffers().coins_BC.copy_(drawn[self.rounds_launched])
            (replay if choose is None else choose(texts))()
            pending.append(self._push())
            if len(pending) < 2:
                continue
            previous = self._take(pending.popleft(), previous, texts, max_new_tokens, rows)
        return texts

    def _draw(self, coins: Sequence[Coins], rounds: int) -> torch.Tensor:
        """Coins of all rounds that there can be, on the device: [rounds, B, 16]."""
        values = [[coin.next_round() for coin in coins] for _ in range(rounds + RING)]
        return torch.tensor(values, dtype=torch.float64).to(self.engine.target.device)

    def _push(self) -> int:
        """Send the report of the round just launched to the host; returns its place in the ring."""
        place = self.rounds_launched % RING
        slot = self._ring[place]
        slot.report.flat.copy_(self.engine.buffers.report.flat, non_blocking=True)
        slot.copied.record()
        self.rounds_launched += 1
        return place

    def _take(
        self,
        place: int,
        previous: _Mark,
        texts: list[Decoded],
        max_new_tokens: int,
        rows: int,
    ) -> _Mark:
        report, copied = self._ring[place]
        # Waits for a round that a later one already runs behind.
        copied.wait()
        us = copied.us_since(previous)
        emitted_BT, lengths, accepted, counts, valid, fallbacks = (
            values.tolist()
            for values in (
                report.emitted_BT,
                report.lengths_B,
                report.accepted_B,
                report.commit_rows_B,
                report.valid_B,
                report.fallback_B,
            )
        )
        ratio = (report.p1_R / report.p2_R).log().tolist()
        changed = False
        for b, text in enumerate(texts):
            if text.finished:
                continue
            new = emitted_BT[b][: counts[b]]
            if not valid[b] or not new:
                # Unusable logits, or a full context.
                text.finished, text.failed = True, not valid[b]
                changed = True
                continue
            left = max_new_tokens - len(text.tokens)
            stop = next((i for i, token in enumerate(new) if token in self.stop_tokens), len(new))
            text.finished = stop < len(new) or left <= len(new)
            new = new[: min(stop + 1, left)]
            margins = ratio[b * rows : b * rows + len(new)]
            text.lines.append(RoundLine(new, lengths[b], accepted[b], us, margins, fallbacks[b]))
            changed |= text.finished
        if changed and not all(text.finished for text in texts):
            self._limits.copy_(torch.tensor([0 if text.finished else 16 for text in texts]))
            self.engine.buffers.limits_B.copy_(self._limits, non_blocking=True)
        return copied
