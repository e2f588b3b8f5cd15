"""The same in plain PyTorch, request by request."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def plan(
    before: Sequence[int],
    commit_rows: Sequence[int],
    state_slots: Sequence[int],
    track_slots: Sequence[int],
    interval: int,
) -> tuple[list[int], list[int]]:
    """Rows up to the boundary and slots of the snapshots, as `snapshot.plan` writes them."""
    rows, slots = [], []
    for start, kept, slot, track_slot in zip(
        before, commit_rows, state_slots, track_slots, strict=True
    ):
        ends = [n for n in range(1, kept + 1) if (start + n) % interval == 0]
        taken = bool(ends) and slot >= 0 and track_slot >= 0
        rows.append(ends[-1] if taken else 0)
        slots.append(track_slot if taken else -1)
    return rows, slots


def copy_slots(
    state_XSHVK: torch.Tensor,
    windows_XSCW: torch.Tensor,
    from_B: torch.Tensor,
    to_B: torch.Tensor,
) -> None:
    """As `snapshot.copy_slots`."""
    for source, target in zip(from_B.tolist(), to_B.tolist(), strict=True):
        if source >= 0 and target >= 0:
            state_XSHVK[:, target] = state_XSHVK[:, source]
            windows_XSCW[:, target] = windows_XSCW[:, source]
