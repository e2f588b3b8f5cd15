"""The commit of recurrent states as captured graphs of short launches, to run beside other kernels.

In one launch the commit fills the registers of every multiprocessor and keeps its blocks queued
almost to its end; a kernel of another stream starts behind the last of them. In launches of a few
layers each, such a kernel waits for one of them at most. A captured graph makes them one call of
the host.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from hybridspec.errors import UsageError
from hybridspec.kernels.gdn.commit import BLOCK_CHANNELS, ConvWindows, commit
from hybridspec.kernels.gdn.factors import Factors


@dataclass(frozen=True)
class SliceOptions:
    """How the commit is cut.

    Attributes:
        programs: most programs of a launch, unless one layer has more. An H200 holds 1452 of them
            at a time (132 multiprocessors, 65,536 registers each, 64 threads of 88); a launch of
            fewer than half leaves registers for others.
        value_block: value rows of a program, the commit's own default.
    """

    programs: int = 640
    value_block: int = 16

    def __post_init__(self) -> None:
        if self.programs < 1 or self.value_block < 1:
            raise UsageError(
                f"slices of {self.programs} programs of {self.value_block} value rows: pass "
                "positive numbers"
            )


class Commit(Protocol):
    """What `target.gdn.StateCommit` holds."""

    state_XSHVK: torch.Tensor
    windows: ConvWindows
    factors: Factors


def layers_per_launch(state_XSHVK: torch.Tensor, channels: int, requests: int, most: int) -> int:
    """Layers whose programs for `requests` requests are at most `most`; at least one."""
    _, _, heads, value_dim, _ = state_XSHVK.shape
    tiles = heads * value_dim // SliceOptions.value_block + -(-channels // BLOCK_CHANNELS)
    return max(1, most // (tiles * requests))


def sliced(whole: Commit, layers: int) -> list[tuple[torch.Tensor, Factors, ConvWindows]]:
    """States, factors and windows of `layers` layers at a time, as views."""
    factors, windows = whole.factors, whole.windows
    pieces = []
    for first in range(0, whole.state_XSHVK.shape[0], layers):
        part = slice(first, first + layers)
        pieces.append(
            (
                whole.state_XSHVK[part],
                Factors(
                    factors.key_XRHTK[part], factors.update_XRHTV[part], factors.decay_XRHT[part]
                ),
                ConvWindows(windows.pool_XSCW[part], windows.raw_XRTC[part]),
            )
        )
    return pieces


def commit_in_slices(
    whole: Commit,
    commit_rows_B: torch.Tensor,
    state_slots_B: torch.Tensor,
    num_requests: int,
    options: SliceOptions | None = None,
) -> None:
    """Commit the first `num_requests` batch rows, a few layers a launch.

    Args:
        whole: states, windows and factors of all layers.
        commit_rows_B, state_slots_B: int32, as `gdn.commit.commit` takes them.
    """
    options = options or SliceOptions()
    channels = whole.windows.pool_XSCW.shape[2]
    layers = layers_per_launch(whole.state_XSHVK, channels, num_requests, options.programs)
    for states, factors, windows in sliced(whole, layers):
        commit(
            states,
            state_slots_B[:num_requests],
            commit_rows_B[:num_requests],
            factors,
            windows=windows,
            value_block=options.value_block,
        )


class CommitGraphs:
    """Graphs of `commit_in_slices` for some batch sizes, over columns that never move.

    Args:
        whole: states, windows and factors of all layers.
        commit_rows_B, state_slots_B: int32 columns of a `RoundState`; rows past the batch have no
            slot, so a larger graph serves a smaller batch.
        sizes: requests of each graph.
        stream: that they will run on.
    """

    def __init__(
        self,
        whole: Commit,
        commit_rows_B: torch.Tensor,
        state_slots_B: torch.Tensor,
        sizes: Sequence[int],
        stream: torch.cuda.Stream,
        options: SliceOptions | None = None,
    ) -> None:
        self._sizes = sorted({size for size in sizes if size <= commit_rows_B.shape[0]})
        # Compiled, on a request without a slot, before anything is captured.
        nothing = torch.full((1,), -1, dtype=torch.int32, device=commit_rows_B.device)
        commit_in_slices(whole, nothing, nothing, 1, options)
        self._graphs: list[torch.cuda.CUDAGraph] = []
        for size in self._sizes:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                commit_in_slices(whole, commit_rows_B, state_slots_B, size, options)
            self._graphs.append(graph)

    def serves(self, num_requests: int) -> bool:
        """Whether there is a graph for so many requests."""
        return bool(self._sizes) and num_requests <= self._sizes[-1]

    def launch(self, num_requests: int) -> None:
        """Commit the first `num_requests` batch rows on the current stream."""
        self._graphs[bisect_left(self._sizes, num_requests)].replay()
