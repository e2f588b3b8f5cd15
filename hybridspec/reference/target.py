"""The hybrid target: Gated DeltaNet and attention layers with routed experts, over ragged rows.

Rows of all requests lie behind one another ([R, H]); only the convolution, the delta rule and
attention know which request a row belongs to. A forward pass can stop at the first router
(`first_router`) and go on with fewer rows (`finish`); nothing is computed twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F

from hybridspec.reference.attention_layer import AttentionLayer
from hybridspec.reference.checkpoint import Checkpoint
from hybridspec.reference.config import TargetConfig
from hybridspec.reference.gdn_layer import GdnFactors, GdnLayer
from hybridspec.reference.layers import Norm, rotary_tables
from hybridspec.reference.moe import MoeBlock, Routed
from hybridspec.reference.rows import RowLayout
from hybridspec.reference.state import KVCache, StatePool


@dataclass
class TargetPass:
    """A forward pass under way.

    Attributes:
        layout: which rows belong to which request, and where they stand.
        in_place: recurrent states were advanced by the pass itself (one row a request), so there
            are no factors to commit.
        residual_RH: residual stream after the layers run so far.
        factors: of the GDN layers run so far, in order.
        features: hidden states after the drafter's target layers, each [R, H].
        routes: int64 [R, top-k] of each layer run so far.
    """

    layout: RowLayout
    in_place: bool
    residual_RH: torch.Tensor
    factors: list[GdnFactors] = field(default_factory=list)
    features: list[torch.Tensor] = field(default_factory=list)
    routes: list[torch.Tensor] = field(default_factory=list)


class Target:
    """Weights and forward pass of one target model.

    Args:
        folder: Hugging Face folder.
        config: from `load_target_config(folder)`.
        dtype: float32 or bfloat16 (float64 for tests); norms, gates and states stay fp32 or wider.
        device: where it lives.
        max_positions: rows of the rotary tables.
        feature_layers: layers whose output hidden states a drafter wants.

    Raises:
        ModelError: weights that are missing, damaged or of another shape.
    """

    def __init__(
        self,
        folder: Path,
        config: TargetConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
        max_positions: int,
        feature_layers: Sequence[int] = (),
    ) -> None:
        checkpoint = Checkpoint(folder, device)
        self.config = config
        self.dtype = dtype
        self.device = device
        self.feature_layers = frozenset(feature_layers)
        prefix = config.weight_prefix
        hidden = (config.vocab_size, config.hidden_size)
        self.embedding_VH = checkpoint.tensor(prefix + "embed_tokens.weight", hidden, dtype)
        self.lm_head_VH = (
            self.embedding_VH
            if config.tied_embeddings
            else checkpoint.tensor("lm_head.weight", hidden, dtype)
        )
        self.rotary = rotary_tables(
            max_positions,
            head_dim=config.head_dim,
            rotary_dim=config.rotary_dim,
            theta=config.rope_theta,
            dtype=dtype,
            device=device,
        )

        def norm(name: str) -> Norm:
            weight = checkpoint.tensor(name, (config.hidden_size,), dtype)
            return Norm.zero_centred(weight, config.rms_norm_eps)

        self.mixers: list[GdnLayer | AttentionLayer] = []
        self.blocks: list[MoeBlock] = []
        self.input_norms: list[Norm] = []
        self.post_norms: list[Norm] = []
        gdn = attention = 0
        for i, is_attention in enumerate(config.layer_is_attention):
            layer = f"{prefix}layers.{i}."
            if is_attention:
                self.mixers.append(
                    AttentionLayer(checkpoint, layer + "self_attn.", config, dtype, attention)
                )
                attention += 1
            else:
                self.mixers.append(GdnLayer(checkpoint, layer + "linear_attn.", config, dtype, gdn))
                gdn += 1
            self.blocks.append(MoeBlock(checkpoint, layer + "mlp.", config, dtype))
            self.input_norms.append(norm(layer + "input_layernorm.weight"))
            self.post_norms.append(norm(layer + "post_attention_layernorm.weight"))
        self.final_norm = norm(prefix + "norm.weight")

    def _mix(
        self, index: int, state: TargetPass, pool: StatePool, caches: Sequence[KVCache]
    ) -> None:
        hidden = self.input_norms[index](state.residual_RH)
        mixer = self.mixers[index]
        if isinstance(mixer, AttentionLayer):
            mixed = mixer(hidden, state.layout, caches, self.rotary)
        elif state.in_place:
            mixed = mixer.advance(hidden, state.layout, pool)
        else:
            mixed, factors = mixer.verify(hidden, state.layout, pool)
            state.factors.append(factors)
        state.residual_RH = state.residual_RH + mixed

    def first_router(
        self,
        tokens_R: torch.Tensor,
        layout: RowLayout,
        pool: StatePool,
        *,
        in_place: bool = False,
    ) -> tuple[TargetPass, Routed]:
        """Embedding, layer 0's GDN and router; no routed expert runs.

        Args:
            tokens_R: int64 target-input tokens.
            layout: their rows.
            pool: states; written only where `in_place`.
            in_place: advance the states during the pass (every request has exactly one row).
        """
        state = TargetPass(layout, in_place, F.embedding(tokens_R, self.embedding_VH))
        self._mix(0, state, pool, ())
        return state, self.blocks[0].route(self.post_norms[0](state.residual_RH))

    def finish(
        self,
        state: TargetPass,
        routed: Routed,
        pool: StatePool,
        caches: Sequence[KVCache],
        keep: RowLayout | None = None,
    ) -> torch.Tensor:
        """Go on from the first router to the final norm, with the rows of `keep` if given.

        Returns:
            final normed hidden states [rows, H]; `state` holds factors, features and routes.
        """
        if keep is not None and keep is not state.layout:
            index = state.layout.index_of(keep)
            routed = routed.rows(index)
            state.residual_RH = state.residual_RH[index]
            state.factors = [factors.rows(keep.widest) for factors in state.factors]
            state.layout = keep
        for i, block in enumerate(self.blocks):
            if i > 0:
                self._mix(i, state, pool, caches)
                routed = block.route(self.post_norms[i](state.residual_RH))
            state.routes.append(routed.experts_RK)
            state.residual_RH = state.residual_RH + block.combine(routed)
            if i in self.feature_layers:
                state.features.append(state.residual_RH)
        return self.final_norm(state.residual_RH)

    def logits(self, normed_RH: torch.Tensor) -> torch.Tensor:
        """LM head: [R, H] to [R, vocabulary]."""
        return F.linear(normed_RH, self.lm_head_VH)
