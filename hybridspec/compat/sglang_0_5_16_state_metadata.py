"""Slots of recurrent states in the target's graph, written again only when the batch is another.

Before every replay SGLang 0.5.16 looks up the slots of the batch and copies them and the starts of
its blocks into the graph's buffers: three launches. Both depend on who is in the batch alone.
"""

from __future__ import annotations

from typing import Any

from hybridspec.compat.sglang_0_5_16_target import is_verification


class StateMetadata:
    """Stands in for `init_forward_metadata_out_graph` of one GDN backend.

    Args:
        backend: SGLang's `GDNAttnBackend`.
    """

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self._stock = backend.init_forward_metadata_out_graph
        # Size of the last replay and what it left; None: write it.
        self._held: tuple[int, Any] | None = None

    def install(self) -> None:
        """Replace the method of this backend."""
        self._backend.init_forward_metadata_out_graph = self.init_forward_metadata_out_graph

    def forget(self) -> None:
        """Requests, their order or their slots may be others from here on."""
        self._held = None

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """As SGLang's, or what the replay before left in the same buffers."""
        # Padding is reset in every round; rings and tracked slots, which move in every round, do
        # not come here with HYBRIDSPEC, which takes tracked ones off the batch.
        lasts = (
            not in_capture
            and getattr(forward_batch, "num_padding", None) == 0
            and is_verification(forward_batch)
            and getattr(forward_batch, "mamba_track_indices", None) is None
            and self._backend.replayssm_write_pos_list is None
        )
        size = int(forward_batch.batch_size)
        if lasts and self._held is not None and self._held[0] == size:
            self._backend.forward_metadata = self._held[1]
            return
        self._stock(forward_batch, in_capture=in_capture)
        self._held = (size, self._backend.forward_metadata) if lasts else None
