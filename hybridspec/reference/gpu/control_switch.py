"""A prefix, then a SWITCH node over graphs of a few geometries; the device picks the body."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hybridspec.errors import UsageError
from hybridspec.reference.gpu import capture as capturing
from hybridspec.reference.gpu.conditional import SwitchGraph
from hybridspec.reference.gpu.control import (
    DEFAULT_BODIES,
    ControlName,
    SplitRound,
    body_of_length,
    check_bodies,
)
from hybridspec.reference.gpu.driver import driver


class SwitchControl:
    """See `GraphControl`; one launch a round, no host read.

    Args:
        bodies: geometries, in rows a request.

    Raises:
        EnvironmentMissing: the driver is missing or has no SWITCH nodes.
    """

    name: ControlName = "switch"
    waits = False

    def __init__(self, bodies: Sequence[int] = DEFAULT_BODIES) -> None:
        self.bodies = tuple(bodies)
        self._driver = driver()
        self._graph: SwitchGraph | None = None
        self._round: SplitRound | None = None

    def capture(self, round: SplitRound, *, warm_up: bool = True) -> None:
        """Capture prefix and bodies and join them; see `GraphControl.capture`."""
        bodies = check_bodies(self.bodies, max_rows=round.max_rows)
        if warm_up:
            capturing.warm_up(round, bodies)
        pool = torch.cuda.graph_pool_handle()
        prefix = capturing.capture(round.prefix, pool=pool, keep_graph=True)
        graphs = [
            capturing.capture(lambda rows=rows: round.rest(rows), pool=pool, keep_graph=True)
            for rows in bodies
        ]
        if self._graph is not None:
            self._graph.close()
        table = body_of_length(bodies, max_rows=round.max_rows)
        self._graph = SwitchGraph(self._driver, prefix, graphs, table, round.lengths_B)
        self._round = round

    def replay(self) -> None:
        """Launch one round on the current stream."""
        if self._graph is None:
            raise UsageError("nothing is captured yet: call capture first")
        self._graph.launch()
