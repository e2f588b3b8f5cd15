"""Capturing parts of a round as torch graphs that share one memory pool."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from hybridspec.reference.gpu.control import SplitRound


@cache
def capture_stream(device: int) -> torch.cuda.Stream:
    """The one stream of a device that captures, and warms up for it.

    Libraries keep their workspaces by stream. Graphs captured on this one share a workspace that
    was allocated outside of any capture; eager work on other streams never touches it.
    """
    return torch.cuda.Stream(device)


def warm(work: Callable[[], Any]) -> None:
    """Run what will be captured, on the stream that captures. Waits for it."""
    stream = capture_stream(torch.cuda.current_device())
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()


def warm_up(round: SplitRound, bodies: Sequence[int]) -> None:
    """Run the prefix and each geometry once, which compiles kernels and sets libraries up."""

    def work() -> None:
        round.prefix()
        for rows in reversed(bodies):
            round.rest(rows)

    warm(work)


class CapturedGraph:
    """A captured graph and the work that it was captured of.

    A graph holds addresses, no tensors: without the work, whatever only the work refers to (a
    round and its tables) would be freed, and replays would read what took its place.
    """

    def __init__(self, graph: torch.cuda.CUDAGraph, work: Callable[[], Any]) -> None:
        self._graph, self._work = graph, work

    def replay(self) -> None:
        """Launch on the current stream."""
        self._graph.replay()

    def raw_cuda_graph(self) -> Any:
        """Handle of the graph, of one captured with `keep_graph`."""
        return self._graph.raw_cuda_graph()


def capture(work: Callable[[], Any], *, pool: Any, keep_graph: bool = False) -> CapturedGraph:
    """Capture what `work` launches.

    Graphs of one pool must not run at the same time, and what one of them allocated is not kept
    for the others. A pool ends with the last graph of it: no further one can be captured into it.

    Args:
        work: already warm; lives as long as the graph.
        pool: from `torch.cuda.graph_pool_handle()`.
        keep_graph: keep what other graphs can be built of; it is then instantiated when it is
            first replayed.
    """
    graph = torch.cuda.CUDAGraph(keep_graph=keep_graph)
    stream = capture_stream(torch.cuda.current_device())
    torch.cuda.synchronize()
    # Not through `torch.cuda.graph`, which collects garbage at every capture. Relaxed, as lazily
    # loaded kernels of libraries may allocate when they are first launched.
    with torch.cuda.stream(stream):
        graph.capture_begin(pool=pool, capture_error_mode="relaxed")
        try:
            work()
        finally:
            graph.capture_end()
    torch.cuda.synchronize()
    return CapturedGraph(graph, work)
