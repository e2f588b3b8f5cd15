"""Programmatic dependent launch of this package's kernels, in one place.

A kernel launched so may start while the one before it on the stream still ends: its setup, and
reads of weights, overlap with that tail. It waits, before it touches anything that a kernel writes,
until the one before has finished; so results are those of plain launches, bit for bit.
"""

from __future__ import annotations

from typing import Any

import torch

from hybridspec.kernels.gdn.dispatch import FIRST_WITH_DEPENDENT_LAUNCH, architecture_of

_allowed = True


def allow_dependent_launch(allowed: bool) -> None:
    """Switch it off, or on again, for what is launched or captured from now on; to compare."""
    global _allowed
    _allowed = allowed


def is_dependent(device: torch.device) -> bool:
    """Whether launches on this device are dependent ones."""
    return _allowed and architecture_of(device) >= FIRST_WITH_DEPENDENT_LAUNCH


def launch_options(device: torch.device) -> dict[str, Any]:
    """Keyword arguments of a launch: the constexpr `DEPENDENT` and the launch attribute."""
    return {"DEPENDENT": True, "launch_pdl": True} if is_dependent(device) else {"DEPENDENT": False}
