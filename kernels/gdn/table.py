"""Which form and tile of verify is fastest where, as measured; nothing is guessed silently."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

from hybridspec.errors import UsageError

Form = Literal["block", "sequential"]


@dataclass(frozen=True)
class Choice:
    """How to launch one verify.

    Attributes:
        form: `block` or `sequential`.
        value_block: rows of V a program holds; warps: of a program.
        key_lanes: lanes along K, of the sequential form only.
        measured: whether a measurement on this architecture stands behind it. Where it is False,
            say so before numbers are compared.
    """

    form: Form
    value_block: int
    warps: int
    key_lanes: int
    measured: bool


# Right everywhere, and within a small factor of the best wherever it was measured.
DEFAULT = Choice("block", 16, 1, 8, measured=False)


@dataclass(frozen=True)
class Point:
    """The fastest of what was tried at one place.

    Attributes:
        rows: T of the launch, not the length on the device.
        batch: requests.
        state_dtype: `float32` or `bfloat16`.
        verify_us: of 30 layers of Qwen3.6-35B-A3B in a graph; None: expected, not measured.
    """

    rows: int
    batch: int
    state_dtype: str
    form: Form
    value_block: int
    warps: int
    key_lanes: int
    verify_us: float | None

    def choice(self) -> Choice:
        """What to launch here."""
        return Choice(
            self.form,
            self.value_block,
            self.warps,
            self.key_lanes,
            measured=self.verify_us is not None,
        )


def choose(points: Sequence[Point], rows: int, batch: int, state_dtype: str) -> Choice:
    """The choice at the nearest batch and, there, at the next larger T.

    Nearest batch: of two as near, the larger. Beyond the largest T: that of the largest.
    Without a point of that dtype: `DEFAULT`.
    """
    there = [point for point in points if point.state_dtype == state_dtype]
    if not there:
        return DEFAULT
    nearest = min({point.batch for point in there}, key=lambda b: (abs(b - batch), -b))
    column = sorted((p for p in there if p.batch == nearest), key=lambda point: point.rows)
    return next((p for p in column if p.rows >= rows), column[-1]).choice()


def points_of(architecture: int) -> tuple[Point, ...]:
    """Measured points of compute capability `architecture` (90 for an H200); none: empty."""
    if architecture == 90:
        from hybridspec.kernels.gdn.measured_sm90 import POINTS

        return tuple(Point(*row) for row in POINTS)
    return ()


@cache
def choice_for(rows: int, batch: int, state_dtype: str, architecture: int) -> Choice:
    """What `dispatch.verify` launches.

    Raises:
        UsageError: no rows or no requests.
    """
    if rows < 1 or batch < 1:
        raise UsageError(f"verify of {rows} rows and {batch} requests; both must be at least 1")
    return choose(points_of(architecture), rows, batch, state_dtype)
