"""The baseline: the host waits for the length and launches the graph of its geometry."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hybridspec.errors import UsageError
from hybridspec.reference.gpu import capture as capturing
from hybridspec.reference.gpu.control import (
    DEFAULT_BODIES,
    ControlName,
    SplitRound,
    body_of_length,
    check_bodies,
)


class HostControl:
    """See `GraphControl`; two launches a round and a wait between them.

    Args:
        bodies: geometries, in rows a request.
    """

    name: ControlName = "host"
    waits = True

    def __init__(self, bodies: Sequence[int] = DEFAULT_BODIES) -> None:
        self.bodies = tuple(bodies)
        self._prefix: capturing.CapturedGraph | None = None
        self._graphs: list[capturing.CapturedGraph] = []
        self._table: tuple[int, ...] = ()
        self._round: SplitRound | None = None

    def capture(self, round: SplitRound, *, warm_up: bool = True) -> None:
        """Capture prefix and bodies; see `GraphControl.capture`."""
        bodies = check_bodies(self.bodies, max_rows=round.max_rows)
        if warm_up:
            capturing.warm_up(round, bodies)
        lengths_B = round.lengths_B
        # Pinned, so that the copy is a node of the graph and the read is as cheap as it gets.
        read_B = torch.empty_like(lengths_B, device="cpu").pin_memory()

        def prefix() -> None:
            round.prefix()
            read_B.copy_(lengths_B, non_blocking=True)

        pool = torch.cuda.graph_pool_handle()
        self._prefix = capturing.capture(prefix, pool=pool)
        self._graphs = [
            capturing.capture(lambda rows=rows: round.rest(rows), pool=pool) for rows in bodies
        ]
        self._table = body_of_length(bodies, max_rows=round.max_rows)
        self._read_B = read_B
        self._read = torch.cuda.Event()
        self._round = round

    def replay(self) -> None:
        """Launch the prefix, wait for its lengths, launch the rest."""
        if self._prefix is None:
            raise UsageError("nothing is captured yet: call capture first")
        self._prefix.replay()
        self._read.record()
        self._read.synchronize()
        longest = min(max(self._read_B.tolist()), len(self._table) - 1)
        self._graphs[self._table[max(longest, 0)]].replay()
