"""The target's forward pass over blocks of B requests, in pieces, on static buffers.

Nothing is allocated and nothing is read on the host, so every piece can be captured. Rows lie
request by request, `rows` of them each; the pass is split at layer 0's router:

    embed > first_mixer > first_router | rest_of_layers > logits
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from hybridspec.errors import UsageError
from hybridspec.kernels.gdn.factors import BLOCK_ROWS
from hybridspec.reference.gpu import flash, norms
from hybridspec.reference.gpu.gdn import GdnBlocks, GdnKernels, GdnPlain
from hybridspec.reference.gpu.heads import place_heads, rotary_halves
from hybridspec.reference.gpu.moe import MoeKernels, MoePlain, RoutedExperts
from hybridspec.reference.gpu.projections import project
from hybridspec.reference.gpu.routing import route
from hybridspec.reference.gpu.weights import AttentionWeights, GdnWeights, TargetWeights

# Blocks behind the last position of the context: a round writes all its rows, verified or not.
SPARE_POSITIONS = 2 * BLOCK_ROWS
MAX_BATCH = 8

MakeGdn = Callable[..., GdnBlocks]


def context_splits(batch: int) -> int:
    """Pieces of the context, a power of two: enough programs for a GPU, fewer for many requests."""
    return max(4, 1 << ((32 // batch).bit_length() - 1))


class TargetPass:
    """Weights, caches and buffers of one target.

    Args:
        weights: as loaded.
        batch: requests, 1..8; each has one slot of caches and states.
        max_context: tokens a request may hold.
        feature_layers: layers whose outputs a drafter wants, rising.
        make_gdn: another form of the GDN layers than the kernels (bf16) or plain PyTorch.

    Attributes:
        starts_B: int32, tokens of each request that are in the caches; the anchor's position.
        anchors_B: int32, newest token of each request, not in the caches yet.
        drafts_BD: int32 [B, 15]. residual_RH, hidden_RH, logits_RV, features_RF: of the pass.
        ids_RK, weights_RK: routes of the layer that ran last. forced_XRK: int32 routes to take
            instead, [layers, rows, top-k], or None. kept_XRK: int32, where the routes of every
            layer are kept, of the same shape, or None.
    """

    def __init__(
        self,
        weights: TargetWeights,
        *,
        batch: int,
        max_context: int,
        feature_layers: tuple[int, ...] = (),
        make_gdn: MakeGdn | None = None,
    ) -> None:
        if not 1 <= batch <= MAX_BATCH:
            raise UsageError(f"a batch of {batch}; captured rounds take 1..{MAX_BATCH} requests")
        config, device, dtype = weights.config, weights.device, weights.dtype
        self.weights, self.config, self.device = weights, config, device
        self.batch, self.max_context = batch, max_context
        self.feature_layers = feature_layers
        rows, hidden = batch * BLOCK_ROWS, config.hidden_size

        def buffer(*shape: int, like: torch.dtype = dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=like, device=device)

        integer, wide = torch.int32, torch.float32
        self.starts_B = buffer(batch, like=integer)
        self.anchors_B = buffer(batch, like=integer)
        self.drafts_BD = buffer(batch, BLOCK_ROWS - 1, like=integer)
        self.residual_RH, self.hidden_RH = buffer(rows, hidden), buffer(rows, hidden)
        self._mixed_RH, self._experts_RH = buffer(rows, hidden), buffer(rows, hidden)
        self._shared_out_RH = buffer(rows, hidden)
        self._shared_RS = buffer(rows, config.shared_width)
        self._router_RF = buffer(rows, weights.blocks[0].front_FH.shape[0])
        self.ids_RK = buffer(rows, config.experts_per_token, like=integer)
        self.weights_RK = buffer(rows, config.experts_per_token, like=wide)
        self.forced_XRK: torch.Tensor | None = None
        self.kept_XRK: torch.Tensor | None = None
        self.features_RF = buffer(rows, max(1, len(feature_layers)) * hidden)
        self.logits_RV = buffer(rows, config.vocab_size)

        gdn = [m for m in weights.mixers if isinstance(m, GdnWeights)]
        fronts = buffer(len(gdn), rows, gdn[0].front_FH.shape[0])
        if make_gdn is None:
            make_gdn = GdnKernels if dtype == torch.bfloat16 else GdnPlain
        self.gdn: GdnBlocks = make_gdn(config, gdn, fronts, batch)
        self._fronts_XRF = fronts
        self._gated_RX = buffer(rows, config.gdn_value_heads * config.gdn_value_dim)
        self.moe: RoutedExperts = (
            MoeKernels(config, device) if dtype == torch.bfloat16 else MoePlain()
        )

        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        capacity = max_context + SPARE_POSITIONS
        layers = len(config.attention_layers)
        self.keys_XBCGD = buffer(layers, batch, capacity, kv_heads, dim)
        self.values_XBCGD = buffer(layers, batch, capacity, kv_heads, dim)
        self._attention_RF = buffer(rows, (2 * heads + 2 * kv_heads) * dim)
        self._q_RHD = buffer(rows, heads, dim)
        self._attended_RX = buffer(rows, heads * dim)
        self.pieces = flash.Pieces.allocate(rows, heads, dim, context_splits(batch), device)
        self._rotary = rotary_halves(capacity, config.rotary_dim, config.rope_theta, device)
        # Place of each layer among those of its kind.
        self._place = [
            config.layer_is_attention[:i].count(kind)
            for i, kind in enumerate(config.layer_is_attention)
        ]

    # ------------------------------------------------------------------ pieces

    def embed(self, rows: int) -> None:
        """Anchors and drafts to the residual stream, and layer 0's input norm."""
        count = self.batch * rows
        norms.embed(
            self.weights.embedding_VH,
            self.anchors_B,
            self.drafts_BD,
            self.weights.input_norms_XH[0],
            self.config.rms_norm_eps,
            rows=rows,
            residual_RH=self.residual_RH[:count],
            hidden_RH=self.hidden_RH[:count],
        )

    def mix(self, layer: int, rows: int, lengths_B: torch.Tensor, *, decode: bool = False) -> None:
        """Attention or GDN of a layer from `hidden_RH`, added to the residual, and the next norm.

        Args:
            lengths_B: rows that count; the others come out finite.
            decode: one row a request whose state advances at once.
        """
        count, config = self.batch * rows, self.config
        weights = self.weights.mixers[layer]
        hidden = self.hidden_RH[:count]
        if isinstance(weights, AttentionWeights):
            inner = self._attend(weights, self._place[layer], rows, hidden, lengths_B)
        else:
            index = self._place[layer]
            front = self._fronts_XRF[index, :count]
            project(hidden, weights.front_FH, front)
            out = (
                self.gdn.decode(index, front, lengths_B)
                if decode
                else self.gdn.verify(index, rows, front, lengths_B)
            )
            inner = self._gated_RX[:count]
            z_start = config.conv_channels
            norms.gated_norm(
                out, front[:, z_start : z_start + inner.shape[1]], weights.norm_V,
                config.rms_norm_eps, inner,
            )  # fmt: skip
        mixed = self._mixed_RH[:count]
        project(inner, weights.out_HX, mixed)
        norms.add_norm(
            self.residual_RH[:count],
            mixed,
            self.weights.post_norms_XH[layer],
            config.rms_norm_eps,
            hidden,
        )

    def _attend(
        self,
        weights: AttentionWeights,
        index: int,
        rows: int,
        hidden: torch.Tensor,
        lengths_B: torch.Tensor,
    ) -> torch.Tensor:
        config, count = self.config, hidden.shape[0]
        front, q = self._attention_RF[:count], self._q_RHD[:count]
        project(hidden, weights.front_FH, front)
        keys, values = self.keys_XBCGD[index], self.values_XBCGD[index]
        place_heads(
            front,
            weights.norm_2D,
            self._rotary,
            self.starts_B,
            config.rms_norm_eps,
            rows=rows,
            q_RHD=q,
            keys_BCGD=keys,
            values_BCGD=values,
        )
        out = self._attended_RX[:count]
        gate_start = front.shape[1] - out.shape[1]
        flash.attend(
            q,
            keys,
            values,
            self.starts_B,
            self.pieces,
            out,
            rows=rows,
            causal=True,
            lengths_B=lengths_B,
            gate_RX=front[:, gate_start:],
        )
        return out

    def router(self, layer: int, rows: int, lengths_B: torch.Tensor | None) -> None:
        """Routes of a layer from `hidden_RH`; rows past `lengths_B` get none."""
        count, config = self.batch * rows, self.config
        front = self._router_RF[:count]
        project(self.hidden_RH[:count], self.weights.blocks[layer].front_FH, front)
        route(
            front,
            lengths_B,
            self.ids_RK[:count],
            self.weights_RK[:count],
            self._shared_RS[:count],
            rows=rows,
            experts=config.num_experts,
            normalise=config.normalise_top_k,
            forced_RK=None if self.forced_XRK is None else self.forced_XRK[layer, :count],
        )
        if self.kept_XRK is not None:
            self.kept_XRK[layer, :count].copy_(self.ids_RK[:count])

    def experts(self, layer: int, rows: int) -> None:
        """Routed and shared experts of a layer, added to the residual, and the next norm."""
        count, config, blocks = self.batch * rows, self.config, self.weights.blocks
        hidden, out = self.hidden_RH[:count], self._experts_RH[:count]
        self.moe(
            blocks[layer], hidden, self.ids_RK[:count], self.weights_RK[:count], out, rows=rows
        )
        shared = self._shared_out_RH[:count]
        project(self._shared_RS[:count], blocks[layer].shared_down_HS, shared)
        last = layer + 1 == config.num_layers
        feature = None
        if layer in self.feature_layers:
            place = self.feature_layers.index(layer) * config.hidden_size
            feature = self.features_RF[:count, place : place + config.hidden_size]
        norms.add_norm(
            self.residual_RH[:count],
            out,
            self.weights.final_norm_H if last else self.weights.input_norms_XH[layer + 1],
            config.rms_norm_eps,
            hidden,
            shared_RH=shared,
            switch_R=self._router_RF[:count, config.num_experts + 2 * config.shared_width],
            feature_RH=feature,
        )

    def rest_of_layers(self, rows: int, lengths_B: torch.Tensor, *, decode: bool = False) -> None:
        """From layer 0's experts to the final norm; `hidden_RH` holds it then."""
        self.experts(0, rows)
        for layer in range(1, self.config.num_layers):
            self.mix(layer, rows, lengths_B, decode=decode)
            self.router(layer, rows, lengths_B)
            self.experts(layer, rows)

    def head(self, rows: int) -> torch.Tensor:
        """Logits [B x rows, vocabulary] of the rows."""
        count = self.batch * rows
        logits = self.logits_RV[:count]
        project(self.hidden_RH[:count], self.weights.lm_head_VH, logits)
        return logits
