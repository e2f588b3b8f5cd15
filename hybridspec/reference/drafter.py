"""The DFlash block drafter: 15 tokens in one pass over the target's hidden states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from hybridspec.artifacts.tables import BLOCK_SIZE
from hybridspec.reference.checkpoint import Checkpoint
from hybridspec.reference.config import DrafterConfig
from hybridspec.reference.layers import (
    Norm,
    accumulate_dtype,
    grouped_attention,
    rotary_tables,
    rotate,
    swiglu,
)
from hybridspec.reference.state import KVCache


@dataclass
class _Layer:
    """Packed weights of one drafter layer."""

    input_norm: Norm
    qkv: torch.Tensor
    qk_norm: Norm
    out: torch.Tensor
    post_norm: Norm
    gate_up: torch.Tensor
    down: torch.Tensor


@dataclass(frozen=True)
class DraftSignals:
    """Draft tokens of B requests and what the drafter thinks of them.

    Attributes:
        tokens_BD: int64 [B, 15], most probable token of each position.
        p1_BD, p2_BD: fp32, probability of it and of the runner-up.
        entropy_BD: fp32, nats, over the whole vocabulary.
    """

    tokens_BD: torch.Tensor
    p1_BD: torch.Tensor
    p2_BD: torch.Tensor
    entropy_BD: torch.Tensor

    def select(self, rows: list[int]) -> DraftSignals:
        """Those of some of the requests."""
        return DraftSignals(
            self.tokens_BD[rows], self.p1_BD[rows], self.p2_BD[rows], self.entropy_BD[rows]
        )


class Drafter:
    """Weights and passes of one drafter.

    Args:
        folder: Hugging Face folder of a `DFlashDraftModel`.
        config: from `load_drafter_config(folder)`, checked against the target.
        embedding_VH, lm_head_VH: the target's.
        dtype, device, max_positions: as the target's.

    Raises:
        ModelError: weights that are missing, damaged or of another shape.
    """

    def __init__(
        self,
        folder: Path,
        config: DrafterConfig,
        *,
        embedding_VH: torch.Tensor,
        lm_head_VH: torch.Tensor,
        dtype: torch.dtype,
        device: torch.device,
        max_positions: int,
    ) -> None:
        checkpoint = Checkpoint(folder, device)
        self.config = config
        self.dtype, self.device = dtype, device
        self.embedding_VH, self.lm_head_VH = embedding_VH, lm_head_VH
        hidden, dim = config.hidden_size, config.head_dim
        heads, kv_heads, eps = config.num_heads, config.num_kv_heads, config.rms_norm_eps
        wide = accumulate_dtype(dtype)

        def read(name: str, *shape: int) -> torch.Tensor:
            return checkpoint.tensor(name, shape, dtype)

        def norm(name: str) -> Norm:
            return Norm.build(read(name, hidden), eps)

        self.layers: list[_Layer] = []
        context_kv, context_norms = [], []
        for i in range(config.num_layers):
            prefix = f"layers.{i}."
            attention = prefix + "self_attn."
            key = read(attention + "k_proj.weight", kv_heads * dim, hidden)
            value = read(attention + "v_proj.weight", kv_heads * dim, hidden)
            query_norm = read(attention + "q_norm.weight", dim).to(wide) * dim**-0.5
            key_norm = read(attention + "k_norm.weight", dim).to(wide)
            self.layers.append(
                _Layer(
                    input_norm=norm(prefix + "input_layernorm.weight"),
                    qkv=torch.cat(
                        [read(attention + "q_proj.weight", heads * dim, hidden), key, value]
                    ),
                    qk_norm=Norm.build(
                        torch.stack([query_norm] * heads + [key_norm] * kv_heads), eps
                    ),
                    out=read(attention + "o_proj.weight", hidden, heads * dim),
                    post_norm=norm(prefix + "post_attention_layernorm.weight"),
                    gate_up=torch.cat(
                        [
                            read(prefix + "mlp.gate_proj.weight", config.mlp_width, hidden),
                            read(prefix + "mlp.up_proj.weight", config.mlp_width, hidden),
                        ]
                    ),
                    down=read(prefix + "mlp.down_proj.weight", hidden, config.mlp_width),
                )
            )
            context_kv += [key, value]
            context_norms.append(key_norm.expand(kv_heads, dim))
        features = len(config.target_layer_ids) * hidden
        self.fuse = read("fc.weight", hidden, features)
        self.context_norm = norm("hidden_norm.weight")
        self.context_kv = torch.cat(context_kv)
        self.context_key_norm = Norm.build(torch.stack(context_norms), eps)
        self.final_norm = norm("norm.weight")
        self.rotary = rotary_tables(
            max_positions + BLOCK_SIZE,
            head_dim=dim,
            rotary_dim=dim,
            theta=config.rope_theta,
            dtype=dtype,
            device=device,
        )
        mask = torch.full((BLOCK_SIZE - 1,), config.mask_token_id, device=device)
        self._mask_embeddings = F.embedding(mask, embedding_VH)

    def new_cache(self) -> KVCache:
        """Empty context cache of one request."""
        config = self.config
        return KVCache(
            config.num_layers, config.num_kv_heads, config.head_dim, self.dtype, self.device
        )

    def inject(self, cache: KVCache, start: int, features_TF: torch.Tensor) -> None:
        """Turn the target's hidden states of T processed tokens into context keys and values.

        Args:
            cache: of the request.
            start: context position of the first token.
            features_TF: concatenated hidden states of the target layers, [T, layers x hidden].
        """
        config = self.config
        rows, dim = features_TF.shape[0], config.head_dim
        context = self.context_norm(F.linear(features_TF, self.fuse))
        kv = F.linear(context, self.context_kv)
        kv = kv.view(rows, config.num_layers, 2, config.num_kv_heads, dim)
        keys = self.context_key_norm(kv[:, :, 0])
        cos, sin, permutation = self.rotary
        span = slice(start, start + rows)
        keys = rotate(keys, cos[span].unsqueeze(1), sin[span].unsqueeze(1), permutation)
        cache.reserve(start + rows + BLOCK_SIZE)
        cache.keys[:, :, span] = keys.permute(1, 2, 0, 3)
        cache.values[:, :, span] = kv[:, :, 1].permute(1, 2, 0, 3)

    def draft(
        self, anchors: Sequence[int], starts: Sequence[int], caches: Sequence[KVCache]
    ) -> DraftSignals:
        """Draft 15 tokens behind each anchor.

        Args:
            anchors: newest emitted token of each request, not yet seen by the target.
            starts: its context position; the cache holds every position before it.
            caches: context of each request.
        """
        config = self.config
        batch, dim, heads = len(anchors), config.head_dim, config.num_heads
        qk_heads = heads + config.num_kv_heads
        anchor_embeddings = F.embedding(
            torch.tensor(anchors, device=self.device), self.embedding_VH
        )
        masks = self._mask_embeddings.expand(batch, -1, -1)
        residual = torch.cat([anchor_embeddings.unsqueeze(1), masks], 1).flatten(0, 1)
        cos, sin, permutation = self.rotary
        if batch == 1:
            positions: slice | torch.Tensor = slice(starts[0], starts[0] + BLOCK_SIZE)
        else:
            block = torch.arange(BLOCK_SIZE, device=self.device)
            positions = (torch.tensor(starts, device=self.device)[:, None] + block).flatten()
        cos, sin = cos[positions], sin[positions]
        for cache, start in zip(caches, starts, strict=True):
            cache.reserve(start + BLOCK_SIZE)
        for i, layer in enumerate(self.layers):
            qkv = F.linear(layer.input_norm(residual), layer.qkv).view(batch * BLOCK_SIZE, -1, dim)
            qk = rotate(layer.qk_norm(qkv[:, :qk_heads]), cos, sin, permutation).transpose(0, 1)
            values = qkv[:, qk_heads:].transpose(0, 1)
            outputs = []
            for b, (cache, start) in enumerate(zip(caches, starts, strict=True)):
                rows, stop = slice(b * BLOCK_SIZE, (b + 1) * BLOCK_SIZE), start + BLOCK_SIZE
                # The block's own keys sit where the next context will overwrite them.
                cache.write(i, start, qk[heads:, rows], values[:, rows])
                outputs.append(
                    grouped_attention(
                        qk[:heads, rows],
                        cache.keys[i, :, :stop],
                        cache.values[i, :, :stop],
                        None,
                    )
                )
            out = outputs[0] if batch == 1 else torch.cat(outputs, 1)
            mixed = F.linear(out.transpose(0, 1).reshape(-1, heads * dim), layer.out)
            residual = residual + mixed
            inner = swiglu(F.linear(layer.post_norm(residual), layer.gate_up), config.mlp_width)
            residual = residual + F.linear(inner, layer.down)
        drafted = residual.view(batch, BLOCK_SIZE, -1)[:, 1:]
        return signals(F.linear(self.final_norm(drafted), self.lm_head_VH))


def signals(logits_BDV: torch.Tensor) -> DraftSignals:
    """Top token, its probability, the runner-up's and the entropy, in fp32."""
    log_p = logits_BDV.float().log_softmax(-1)
    top = log_p.topk(2, -1)
    p1, p2 = top.values.exp().unbind(-1)
    entropy = log_p.exp().mul_(log_p).sum(-1).neg_()
    return DraftSignals(top.indices[..., 0], p1, p2, entropy)
