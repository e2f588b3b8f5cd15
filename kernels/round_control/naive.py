"""The same in plain PyTorch."""

from __future__ import annotations

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


def finish_lengths(
    selected_B: torch.Tensor,
    fallback_B: torch.Tensor,
    caps_B: torch.Tensor,
    forced_B: torch.Tensor,
    *,
    lookahead: int,
    fixed_length: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Lengths, reasons and rows up to the first router."""
    lengths, reasons, router_rows = [], [], []
    rows = zip(
        selected_B.tolist(), fallback_B.tolist(), caps_B.tolist(), forced_B.tolist(), strict=True
    )
    for selected, reason, cap, forced in rows:
        if cap <= 0:
            lengths.append(0)
            reasons.append(0)
            router_rows.append(0)
            continue
        cap = min(cap, 16)
        if fixed_length:
            selected, reason = fixed_length, 2
        if forced:
            selected, reason = forced, 3
        length = min(max(selected, 1), cap)
        looks = 1 < length < cap and reason == 0
        lengths.append(length)
        reasons.append(reason)
        router_rows.append(min(length + lookahead, cap) if looks else length)
    return (
        torch.tensor(lengths, dtype=torch.int32),
        torch.tensor(reasons, dtype=torch.int32),
        torch.tensor(router_rows, dtype=torch.int32),
    )


def limit_acceptance(
    candidates_BT: torch.Tensor, lengths_B: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Candidates up to the length, and the chain over them."""
    row = torch.arange(16, device=candidates_BT.device)
    lengths = lengths_B.clamp(min=1)[:, None]
    following = torch.where(row + 1 < lengths, row + 1, -1)
    return candidates_BT.masked_fill(row >= lengths, -1), following


def counters(
    lengths_B: torch.Tensor, fallback_B: torch.Tensor, commit_rows_B: torch.Tensor
) -> torch.Tensor:
    """Counters of one round, int64 [64]."""
    found = torch.zeros(NUM_COUNTERS, dtype=torch.int64)
    found[REQUEST_ROUNDS] = len(lengths_B)
    found[EMITTED_TOKENS] = int(commit_rows_B.sum())
    found[VERIFIED_ROWS] = int(lengths_B.sum())
    for start, column in (
        (LENGTH_HISTOGRAM, lengths_B),
        (EMITTED_HISTOGRAM, commit_rows_B),
        (FALLBACKS, fallback_B),
    ):
        for value in column.tolist():
            found[start + value] += 1
    return found
