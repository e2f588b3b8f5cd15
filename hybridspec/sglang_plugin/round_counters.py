"""Telemetry of rounds: counted on the device, copied without waiting, written by a thread.

Each round ends with a copy of 512 bytes to pinned memory, so that the last round before an engine
is killed is there too: SGLang ends its ranks with SIGKILL, and nothing runs at such an exit.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from pathlib import Path
from typing import Any

import torch

from hybridspec.kernels.round_control.record import (
    EMITTED_HISTOGRAM,
    EMITTED_TOKENS,
    FALLBACKS,
    LENGTH_HISTOGRAM,
    NUM_COUNTERS,
    REQUEST_ROUNDS,
    VERIFIED_ROWS,
)
from hybridspec.kernels.select.tables import BLOCK_SIZE

logger = logging.getLogger(__name__)

REASONS = ("chosen", "not_finite", "static_policy", "forced")


class RoundCounters:
    """Counters of all rounds since the start.

    Args:
        device: of the engine.
        max_requests: of a batch.
        path: JSON file to write; None: count only.
        interval_s: between two writes.
        about: constant entries of the file.

    Attributes:
        device_counters: int64 [64], see `kernels.round_control.record`.
    """

    def __init__(
        self,
        device: torch.device | str,
        *,
        max_requests: int,
        path: Path | None = None,
        interval_s: float = 2.0,
        about: dict[str, Any] | None = None,
    ) -> None:
        self.device_counters = torch.zeros(NUM_COUNTERS, dtype=torch.int64, device=device)
        on_gpu = torch.device(device).type == "cuda"
        self._host = torch.zeros(NUM_COUNTERS, dtype=torch.int64, pin_memory=on_gpu)
        # The scheduler reads the lengths one round late.
        self._verified = torch.zeros(2, max_requests, dtype=torch.int32, device=device)
        self._turn = 0
        self._path = path
        self._interval_s = interval_s
        self._about = dict(about or {})
        self._started = time.time()
        self._stop = threading.Event()
        if path is not None:
            thread = threading.Thread(target=self._write_forever, name="telemetry", daemon=True)
            thread.start()

    def verified(self, num_requests: int) -> torch.Tensor:
        """Buffer for the lengths of this round, int32 [B]; the one of the last round stays."""
        self._turn = 1 - self._turn
        return self._verified[self._turn, :num_requests]

    def tell(self, **entries: Any) -> None:
        """Add entries to the file, or replace them, from its next write on."""
        self._about = {**self._about, **entries}

    def publish(self) -> None:
        """Copy the counters to the host in stream order."""
        if self._path is not None:
            self._host.copy_(self.device_counters, non_blocking=True)

    def snapshot(self) -> dict[str, Any]:
        """What the host knows, as the file holds it; counts may be one round old."""
        previous = self._host.tolist()
        # A copy may land between two reads: counts of one moment are those read twice alike.
        for _ in range(8):
            counts = self._host.tolist()
            if counts == previous:
                break
            previous = counts
        rounds = previous[REQUEST_ROUNDS]
        share = 1.0 / rounds if rounds else 0.0
        return {
            **self._about,
            "uptime_s": round(time.time() - self._started, 3),
            "request_rounds": rounds,
            "emitted_tokens": previous[EMITTED_TOKENS],
            "verified_rows": previous[VERIFIED_ROWS],
            "mean_verify_length": previous[VERIFIED_ROWS] * share,
            "tokens_per_round": previous[EMITTED_TOKENS] * share,
            "length_histogram": previous[LENGTH_HISTOGRAM : LENGTH_HISTOGRAM + BLOCK_SIZE + 1],
            "emitted_histogram": previous[EMITTED_HISTOGRAM : EMITTED_HISTOGRAM + BLOCK_SIZE + 1],
            "lengths_by": {
                reason: previous[FALLBACKS + index] for index, reason in enumerate(REASONS)
            },
        }

    def write(self) -> None:
        """Write the file, whole or not at all."""
        if self._path is None:
            return
        text = json.dumps(self.snapshot(), indent=1)
        temporary = self._path.with_name(f"{self._path.name}.{os.getpid()}.tmp")
        temporary.write_text(text + "\n")
        temporary.replace(self._path)

    def close(self) -> None:
        """Stop writing, after one last time."""
        self._stop.set()
        self.write()

    def _write_forever(self) -> None:
        written: Any = None
        while not self._stop.wait(self._interval_s):
            counts = (self._host.tolist(), self._about)
            if counts == written:
                continue
            try:
                self.write()
            except OSError as error:
                logger.warning("HYBRIDSPEC: telemetry is not written any more: %s", error)
                return
            written = counts
