"""One graph of the largest geometry: rows past the device length do no work."""

from __future__ import annotations

import torch

from hybridspec.errors import UsageError
from hybridspec.reference.gpu import capture as capturing
from hybridspec.reference.gpu.control import ControlName, SplitRound


class MaskedControl:
    """See `GraphControl`; one launch a round, no host read."""

    name: ControlName = "masked"
    waits = False

    def __init__(self) -> None:
        self._graph: capturing.CapturedGraph | None = None
        self._round: SplitRound | None = None

    def capture(self, round: SplitRound, *, warm_up: bool = True) -> None:
        """Capture the whole round; see `GraphControl.capture`."""
        rows = round.max_rows
        if warm_up:
            capturing.warm_up(round, [rows])

        def whole() -> None:
            round.prefix()
            round.rest(rows)

        self._graph = capturing.capture(whole, pool=torch.cuda.graph_pool_handle())
        self._round = round

    def replay(self) -> None:
        """Launch one round on the current stream."""
        if self._graph is None:
            raise UsageError("nothing is captured yet: call capture first")
        self._graph.replay()
