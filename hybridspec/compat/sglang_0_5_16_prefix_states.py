"""Slots that SGLang 0.5.16's radix cache wants recurrent states in, and what it knows of a round.

With `extra_buffer` every request has two slots beside its own (one without the overlap scheduler),
written in turn; `mamba_next_track_idx` says which is next. A prefill writes one itself. In decoding
the scheduler takes for written what a round passed a boundary with, as soon as it sees the round
(`_mamba_check_track_boundary`), and hands the slot to the cache when the request ends. Its rule and
ours agree because DFLASH refuses requests with a grammar, which may cut a round's tokens.
"""

# SGLang lives in an environment of its own.
# pyright: reportMissingImports=false

from __future__ import annotations

from typing import Any

import torch

from hybridspec.sglang_plugin.prefix_snapshots import PrefixSnapshots


def track_interval(server_args: Any) -> int | None:
    """Tokens between two states that the cache keeps of a text, None where it keeps none."""
    if not (server_args.uses_mamba_radix_cache and server_args.enable_mamba_extra_buffer()):
        return None
    return int(server_args.mamba_track_interval)


def expect(snapshots: PrefixSnapshots, batch: Any) -> None:
    """Before a round of a `ScheduleBatch`: what its snapshots need, where it may take any.

    The batch is left without slots and masks. Those of the prefill that it may come from would make
    SGLang look at them, and wait for them, in a pass that tracks nothing.
    """

    def tensors() -> tuple[torch.Tensor, torch.Tensor]:
        return batch.seq_lens, track_slots(batch)

    _clear(batch)
    # The rule of the scheduler counts the last token out: its keys and values are not there yet.
    snapshots.expect((req.seqlen - 1 for req in batch.reqs), tensors)


def track_slots(batch: Any) -> torch.Tensor:
    """[B] slots of the state pool that the scheduler takes for the next ones to be written."""
    from sglang.srt.managers.schedule_batch import set_mamba_track_indices_from_reqs

    set_mamba_track_indices_from_reqs(batch)
    slots: torch.Tensor = batch.req_to_token_pool.translate_mamba_indices(batch.mamba_track_indices)
    _clear(batch)
    return slots


def _clear(batch: Any) -> None:
    batch.mamba_track_indices = None
    batch.mamba_track_mask = None
    batch.mamba_track_seqlens = None
