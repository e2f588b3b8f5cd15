"""Oracle of the append: row by row, layer by layer."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def append(
    keys_LTHD: torch.Tensor,
    values_LTHD: torch.Tensor,
    key_caches: Sequence[torch.Tensor],
    value_caches: Sequence[torch.Tensor],
    places: Sequence[Sequence[int]],
    commit_rows: Sequence[int],
) -> None:
    """As `append.append`, with caches by layer [slots, heads, D] and host numbers."""
    for layer, caches in enumerate(zip(key_caches, value_caches, strict=True)):
        for block, slots in enumerate(places):
            for row, slot in enumerate(slots):
                if row < commit_rows[block]:
                    i_row = block * len(slots) + row
                    caches[0][slot] = keys_LTHD[layer, i_row]
                    caches[1][slot] = values_LTHD[layer, i_row]
