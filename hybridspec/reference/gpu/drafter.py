"""The drafter's passes on static buffers: 15 drafts behind each anchor, and context from features.

A round injects the features of all its rows, verified or not: those past the accepted ones lie
where the next draft pass puts its own block, and the features of the next round after it.
"""

from __future__ import annotations

import torch

from hybridspec.kernels.gdn.factors import BLOCK_ROWS
from hybridspec.reference.gpu import flash, norms
from hybridspec.reference.gpu.heads import inject_heads, place_heads, rotary_halves
from hybridspec.reference.gpu.projections import project
from hybridspec.reference.gpu.target import SPARE_POSITIONS, TargetPass, context_splits
from hybridspec.reference.gpu.weights import DrafterWeights


class DrafterPass:
    """Weights, caches and buffers of a drafter beside its target.

    Attributes:
        keys_LBCGD, values_LBCGD: its caches, in the positions of the target's.
        logits_RV: [B x 15, vocabulary] of the last draft pass.
    """

    def __init__(self, weights: DrafterWeights, target: TargetPass) -> None:
        self.weights, self.config, self.target = weights, weights.config, target
        config, batch, device = weights.config, target.batch, target.device
        rows, hidden = batch * BLOCK_ROWS, config.hidden_size
        dtype = target.weights.dtype
        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim

        def buffer(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        capacity = target.max_context + SPARE_POSITIONS
        shape = (config.num_layers, batch, capacity, kv_heads, dim)
        self.keys_LBCGD, self.values_LBCGD = buffer(*shape), buffer(*shape)
        self._residual_RH, self._hidden_RH = buffer(rows, hidden), buffer(rows, hidden)
        self._mixed_RH = buffer(rows, hidden)
        self._front_RF = buffer(rows, (heads + 2 * kv_heads) * dim)
        self._q_RHD = buffer(rows, heads, dim)
        self._attended_RX = buffer(rows, heads * dim)
        self._gate_up_RF = buffer(rows, 2 * config.mlp_width)
        self._inner_RI = buffer(rows, config.mlp_width)
        self._context_RH = buffer(rows, hidden)
        self._kv_RX = buffer(rows, weights.context_kv_FH.shape[0])
        self._drafted_RH = buffer(batch * (BLOCK_ROWS - 1), hidden)
        self.logits_RV = buffer(batch * (BLOCK_ROWS - 1), config.vocab_size)
        self._pieces = flash.Pieces.allocate(rows, heads, dim, context_splits(batch), device)
        self._rotary = rotary_halves(capacity, dim, config.rope_theta, device)
        # Rows of drafts among all rows: the anchor's own prediction is not needed.
        places = torch.arange(rows, device=device)
        self._drafted_rows = places[places % BLOCK_ROWS != 0]

    def draft(self) -> torch.Tensor:
        """Logits of the 15 drafts behind each request's anchor; contexts are as injected."""
        config, target, eps = self.config, self.target, self.config.rms_norm_eps
        rows, layers = BLOCK_ROWS, self.weights.layers
        norms.embed(
            target.weights.embedding_VH,
            target.anchors_B,
            target.drafts_BD,
            layers[0].input_norm_H,
            eps,
            rows=rows,
            residual_RH=self._residual_RH,
            hidden_RH=self._hidden_RH,
            fill=config.mask_token_id,
        )
        for i, layer in enumerate(layers):
            project(self._hidden_RH, layer.qkv_FH, self._front_RF)
            place_heads(
                self._front_RF,
                layer.norm_2D,
                self._rotary,
                target.starts_B,
                eps,
                rows=rows,
                q_RHD=self._q_RHD,
                keys_BCGD=self.keys_LBCGD[i],
                values_BCGD=self.values_LBCGD[i],
            )
            flash.attend(
                self._q_RHD,
                self.keys_LBCGD[i],
                self.values_LBCGD[i],
                target.starts_B,
                self._pieces,
                self._attended_RX,
                rows=rows,
                causal=False,
            )
            project(self._attended_RX, layer.out_HX, self._mixed_RH)
            norms.add_norm(
                self._residual_RH, self._mixed_RH, layer.post_norm_H, eps, self._hidden_RH
            )
            project(self._hidden_RH, layer.gate_up_FH, self._gate_up_RF)
            norms.swiglu(self._gate_up_RF, self._inner_RI)
            project(self._inner_RI, layer.down_HI, self._mixed_RH)
            last = i + 1 == len(layers)
            following = self.weights.final_norm_H if last else layers[i + 1].input_norm_H
            norms.add_norm(self._residual_RH, self._mixed_RH, following, eps, self._hidden_RH)
        if target.batch == 1:
            drafted = self._hidden_RH[1:]
        else:
            drafted = self._drafted_RH
            torch.index_select(self._hidden_RH, 0, self._drafted_rows, out=drafted)
        project(drafted, target.weights.lm_head_VH, self.logits_RV)
        return self.logits_RV

    def inject(self, rows: int) -> None:
        """Context keys and values of the rows that the target has just run, at `starts_B` on."""
        target, weights = self.target, self.weights
        count = target.batch * rows
        context, kv = self._context_RH[:count], self._kv_RX[:count]
        project(target.features_RF[:count], weights.fuse_HF, context)
        norms.rms_norm(context, weights.hidden_norm_H, self.config.rms_norm_eps, context)
        project(context, weights.context_kv_FH, kv)
        inject_heads(
            kv,
            weights.context_norms_LD,
            self._rotary,
            target.starts_B,
            self.config.rms_norm_eps,
            rows=rows,
            keys_LBCGD=self.keys_LBCGD,
            values_LBCGD=self.values_LBCGD,
        )
