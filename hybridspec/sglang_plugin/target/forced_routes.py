"""Routes that requests force, for measuring what an expert costs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from hybridspec.errors import UsageError
from hybridspec.sglang_plugin.controls import KEY, LengthRequest
from hybridspec.sglang_plugin.round_state import BLOCK_SIZE


class ForcedRoutes:
    """Fills the table that a server with `LaunchOptions.force_routes` routes by.

    Each live row takes `top_k` different experts, the rows of a request together as many as it asks
    for, and every layer another choice of them. Requests that ask for nothing have the same `top_k`
    experts in all rows. Ranks fill their tables alike.

    Args:
        forced_XRK: int32 [layers, rows of the largest batch, top_k], which the graphs read.
        num_experts: of each layer.
    """

    def __init__(self, forced_XRK: torch.Tensor, num_experts: int) -> None:
        self._forced_XRK = forced_XRK
        self._num_experts = num_experts
        self._layers, rows, self._top_k = forced_XRK.shape
        # Before the first request too, graphs are captured with rows that a router could choose.
        self.write([LengthRequest()] * (rows // BLOCK_SIZE))

    def check(self, lengths: LengthRequest) -> None:
        """Refuse what routing cannot reach.

        Raises:
            UsageError: more experts than rows can take, or fewer than one row takes.
        """
        rows = min(lengths.forced, lengths.cap)
        most = min(self._num_experts, rows * self._top_k)
        if lengths.distinct_experts and not self._top_k <= lengths.distinct_experts <= most:
            raise UsageError(
                f"custom_params.{KEY}.distinct_experts = {lengths.distinct_experts}: "
                f"{rows} rows of {self._top_k} experts each go to {self._top_k}..{most}"
            )

    def write(self, batch: Sequence[LengthRequest]) -> None:
        """Fill the rows of a batch; waits for the copy.

        Args:
            batch: what its requests ask for, in order. A request that was refused can still be in a
                round before SGLang lets it go: it gets the routes of one that asks for nothing.
        """
        if not batch:
            return
        table = torch.from_numpy(np.concatenate([self._rows(one) for one in batch], axis=1))
        self._forced_XRK[:, : table.shape[1]].copy_(table)

    def _reaches(self, lengths: LengthRequest) -> bool:
        try:
            self.check(lengths)
        except UsageError:
            return False
        return lengths.distinct_experts > 0

    def _rows(self, lengths: LengthRequest) -> np.ndarray:
        """int32 [layers, 16, top_k]; rows past the length load nothing, theirs are any ids."""
        distinct = lengths.distinct_experts if self._reaches(lengths) else self._top_k
        places = (np.arange(BLOCK_SIZE * self._top_k) % distinct).reshape(BLOCK_SIZE, self._top_k)
        rng = np.random.default_rng(distinct * 1009 + lengths.forced)
        layers = [rng.permutation(self._num_experts)[places] for _ in range(self._layers)]
        return np.stack(layers).astype(np.int32)
