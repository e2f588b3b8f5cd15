"""Who decides, on the GPU, how much of a round runs: three mechanisms behind one interface.

* `masked` (default): one graph of the largest geometry; rows past the device length do no work.
* `switch`: a prefix graph, then a conditional SWITCH node whose condition a kernel sets from the
  device length, and one captured graph a body. One launch, no host read.
* `host`: a prefix graph, a host read of the length, then the graph of that length. The baseline.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal, Protocol, get_args

import torch

from hybridspec.errors import UsageError

ControlName = Literal["masked", "switch", "host"]
CONTROL_NAMES: tuple[ControlName, ...] = get_args(ControlName)
# Geometries that `switch` and `host` capture by default: the smallest that holds the length runs.
DEFAULT_BODIES = (1, 2, 4, 8, 16)


class SplitRound(Protocol):
    """A decode round in two capturable parts over static buffers.

    Both parts launch work on the current stream and read nothing on the host. Every tensor that is
    read after a replay has to be a buffer of the round's own: a body that did not run last leaves
    what it allocated while it was captured to the others.
    """

    @property
    def lengths_B(self) -> torch.Tensor:
        """int32 [batch] on the device: rows that each request verifies, as `prefix` left them."""
        ...

    @property
    def max_rows(self) -> int:
        """Rows a request of the largest geometry; no length is longer."""
        ...

    def prefix(self) -> None:
        """Runs everything up to the last change of `lengths_B`."""
        ...

    def rest(self, rows: int) -> None:
        """Runs everything else, launched for `rows` rows a request.

        Live rows of a request are the first `min(length, rows)`; those behind it do no work. It
        must be safe for every device length, as capturing warms each geometry up behind one
        `prefix`.
        """
        ...


class GraphControl(Protocol):
    """A captured round that is replayed.

    Attributes:
        name: as `--graph-control` names it.
        waits: whether the host waits for the length within `replay`.
    """

    name: ControlName
    waits: bool

    def capture(self, round: SplitRound, *, warm_up: bool = True) -> None:
        """Captures the round; a second capture replaces the first.

        Args:
            round: is kept, as its buffers are what the graphs work on.
            warm_up: run both parts first, which compiles kernels and sets up libraries. This
                advances the round's state: the caller restores it.
        """
        ...

    def replay(self) -> None:
        """Launches one whole round on the current stream."""
        ...


def check_bodies(bodies: Sequence[int], *, max_rows: int) -> tuple[int, ...]:
    """Geometries cut to `max_rows`, which is always among them.

    Raises:
        UsageError: not rising, or below 1.
    """
    rising = all(a < b for a, b in pairwise(bodies))
    if not bodies or bodies[0] < 1 or not rising:
        raise UsageError(
            f"bodies {list(bodies)} must be rising numbers of rows from 1 on: use for instance "
            f"{','.join(map(str, DEFAULT_BODIES))}"
        )
    return (*(rows for rows in bodies if rows < max_rows), max_rows)


def body_of_length(bodies: Sequence[int], *, max_rows: int) -> tuple[int, ...]:
    """Index of the smallest body that holds each length 0..max_rows.

    Args:
        bodies: rising, the last of at least `max_rows` rows.
    """
    return tuple(
        next(index for index, rows in enumerate(bodies) if rows >= length)
        for length in range(max_rows + 1)
    )


def make_control(name: str, *, bodies: Sequence[int] = DEFAULT_BODIES) -> GraphControl:
    """The mechanism of that name, nothing captured yet.

    Args:
        bodies: geometries of `switch` and `host`, in rows a request; `masked` has one.

    Raises:
        UsageError: no such mechanism.
        EnvironmentMissing: `switch` without a driver that has SWITCH nodes.
    """
    if name == "masked":
        from hybridspec.reference.gpu.control_masked import MaskedControl

        return MaskedControl()
    if name == "switch":
        from hybridspec.reference.gpu.control_switch import SwitchControl

        return SwitchControl(bodies)
    if name == "host":
        from hybridspec.reference.gpu.control_host import HostControl

        return HostControl(bodies)
    raise UsageError(f"graph control {name!r} is unknown: use {', '.join(CONTROL_NAMES)}")
