"""The drafter's keys and values of committed rows, into the caches of all its layers at once.

SGLang 0.5.16 computes them for all layers together and then launches a writer a layer. What it
computes is taken as it is; the writers are one launch.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

from hybridspec.errors import UsageError
from hybridspec.kernels.kv_append.append import Caches, append
from hybridspec.kernels.select.tables import BLOCK_SIZE

logger = logging.getLogger(__name__)


def no_writer(layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
    """In place of the writer of a layer."""
    del layer, keys, values


def caches_of(pool: Any, layer_ids: Sequence[int], computed: torch.dtype) -> Caches:
    """Caches of a drafter's layers.

    Args:
        pool: of SGLang. layer_ids: of the drafter, in order.
        computed: dtype of keys and values as they are computed.

    Raises:
        UsageError: a pool that is written in another way than row by row as it is.
    """
    # Subclasses quantise, or lay pages out in another way.
    kind, layout = type(pool).__name__, getattr(pool, "kv_cache_layout", "unknown")
    if kind != "MHATokenToKVPool" or layout != "nhd" or pool.store_dtype != computed:
        raise UsageError(
            f"the pool is a {kind} in layout {layout} of {getattr(pool, 'store_dtype', None)}, the "
            f"drafter computes {computed}: use --kv-cache-dtype auto and pages of tokens"
        )
    places = [layer - pool.start_layer for layer in layer_ids]
    return Caches.of([pool.k_buffer[i] for i in places], [pool.v_buffer[i] for i in places])


class DrafterCaches:
    """Append for one drafter.

    Args:
        helper: SGLang's `FusedKVMaterializeHelper`.
        caches: of the drafter's layers.
    """

    def __init__(self, helper: Any, caches: Caches) -> None:
        self._helper = helper
        self._caches = caches

    @classmethod
    def of(cls, draft_model_runner: Any, helper: Any | None) -> DrafterCaches | None:
        """For the pool of a drafter; None, with a line in the log, where it is another kind.

        Compiles, so that no request waits for it.
        """
        if helper is None:
            return None
        layer_ids = [layer.self_attn.attn.layer_id for layer in draft_model_runner.model.layers]
        pool, computed = draft_model_runner.token_to_kv_pool, helper.flat_kv_weight_t.dtype
        try:
            caches = caches_of(pool, layer_ids, computed)
        except UsageError as error:
            logger.info("HYBRIDSPEC: SGLang writes the drafter's caches layer by layer: %s", error)
            return None
        found = cls(helper, caches)
        found.compile()
        return found

    def compile(self) -> None:
        """Launch for a block of which no row is committed."""
        caches = self._caches
        device = caches.tables_2L.device
        shape = (caches.layers, BLOCK_SIZE, 1, caches.width)
        nothing = torch.zeros(shape, dtype=caches.dtype, device=device)
        places = torch.zeros(1, BLOCK_SIZE, dtype=torch.int64, device=device)
        no_rows = torch.zeros(1, dtype=torch.int32, device=device)
        append(nothing, nothing, caches, places, no_rows)

    def append(
        self,
        hidden_TH: torch.Tensor,
        positions_T: torch.Tensor,
        places_BR: torch.Tensor,
        commit_rows_B: torch.Tensor,
    ) -> None:
        """Write the committed rows of blocks whose target features are `hidden_TH`.

        Args:
            hidden_TH: of all rows, as `project_target_hidden` gives them.
            positions_T: int64. places_BR: int64, slots of the rows. commit_rows_B: int32.
        """
        helper, rows = self._helper, hidden_TH.shape[0]
        helper.materialize(ctx_hidden=hidden_TH, positions=positions_T, write_layer_kv=no_writer)
        append(
            helper._k_workspace[:, :rows],
            helper._v_workspace[:, :rows],
            self._caches,
            places_BR,
            commit_rows_B,
        )
