"""SGLang's GDN verification inside the captured engine: a state a row, and its scatter.

The recurrent kernel keeps the state behind every row, the scatter copies the accepted one back, as
SGLang 0.5.16 does for draft blocks by default. Conv, windows and everything else of the round stay
ours, so a round with it is faster than one of SGLang.
"""

from __future__ import annotations

import torch
from gdn.baselines import RECURRENT, SCATTER, _missing, sglang_module

from hybridspec.kernels.conv_window.commit import commit as commit_windows
from hybridspec.kernels.gdn.factors import BLOCK_ROWS
from hybridspec.reference.config import TargetConfig
from hybridspec.reference.gpu.gdn import GdnKernels
from hybridspec.reference.gpu.weights import GdnWeights


def missing() -> str | None:
    """Why SGLang's kernels cannot be had, or None."""
    return _missing(RECURRENT, SCATTER)


class StockGdn(GdnKernels):
    """`GdnBlocks` with SGLang's verify and commit of the states."""

    def __init__(
        self,
        config: TargetConfig,
        weights: list[GdnWeights],
        fronts_XRF: torch.Tensor,
        batch: int,
    ) -> None:
        super().__init__(config, weights, fronts_XRF, batch)
        device = fronts_XRF.device
        self._snapshots = torch.zeros(
            len(weights),
            batch,
            BLOCK_ROWS,
            self.heads,
            config.gdn_value_dim,
            config.gdn_key_dim,
            device=device,
        )
        self._steps_B = torch.zeros(batch, dtype=torch.int32, device=device)
        self._starts = torch.arange(batch + 1, dtype=torch.int32, device=device) * BLOCK_ROWS
        self._last_out = torch.empty(0)

    def verify(
        self, index: int, rows: int, front_RF: torch.Tensor, lengths_B: torch.Tensor
    ) -> torch.Tensor:
        """All rows, whatever the lengths, as stock DFlash verifies them."""
        mixed, a, b = self._convolved(index, rows, front_RF, lengths_B)
        config, weights = self.config, self.weights[index]
        keys = config.gdn_key_heads * config.gdn_key_dim
        flat = mixed.flatten(0, 1)
        q, k, v = flat.split((keys, keys, flat.shape[1] - 2 * keys), 1)
        shape = (1, flat.shape[0], config.gdn_key_heads, config.gdn_key_dim)
        out = sglang_module(RECURRENT).fused_sigmoid_gating_delta_rule_update(
            A_log=weights.A_log_H,
            dt_bias=weights.dt_bias_H,
            q=q.unflatten(1, shape[2:])[None],
            k=k.unflatten(1, shape[2:])[None],
            v=v.unflatten(1, (self.heads, config.gdn_value_dim))[None],
            a=a.flatten(0, 1),
            b=b.flatten(0, 1),
            initial_state_source=self.state_XSHVK[index],
            initial_state_indices=self.slots_B,
            cu_seqlens=self._starts,
            use_qk_l2norm_in_kernel=True,
            softplus_beta=1.0,
            softplus_threshold=20.0,
            is_kda=False,
            disable_state_update=True,
            intermediate_states_buffer=self._snapshots[index],
            intermediate_state_indices=self.slots_B,
            cache_steps=BLOCK_ROWS,
            retrieve_parent_token=None,
        )
        self._last_rows = rows
        return out.view(-1, self.heads, config.gdn_value_dim)

    def commit(self, rows_B: torch.Tensor) -> None:
        """The state behind the last accepted row, of all layers, and our windows."""
        torch.sub(rows_B, 1, out=self._steps_B)
        sglang_module(SCATTER).fused_mamba_state_scatter_with_mask(
            self.state_XSHVK, self._snapshots, self.slots_B, self._steps_B
        )
        commit_windows(self.windows_XSCW, self.raw_rows(self._last_rows), self.slots_B, rows_B)
