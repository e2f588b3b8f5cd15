"""Trainable DFlash drafter: one bidirectional pass over anchor and masks drafts a whole block.

Parameter names are those that DFlash checkpoints have. Embeddings and language-model head are the
target's. Context keys and values come from the target's hidden states, not from tokens.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from hybridspec.artifacts.tables import BLOCK_SIZE
from hybridspec.demo.layers import GatedMLP, RMSNorm, attend, rotary_table, rotate
from hybridspec.demo.presets import PairPreset

RotaryTable = tuple[Tensor, Tensor]


class BlockAttention(nn.Module):
    """Attention of block rows to the context before the anchor and to their own block."""

    def __init__(self, preset: PairPreset) -> None:
        super().__init__()
        self.heads, self.kv_heads = preset.draft_heads, preset.draft_kv_heads
        self.dim = preset.draft_head_dim
        hidden = preset.hidden
        self.q_proj = nn.Linear(hidden, self.heads * self.dim, bias=False)
        self.k_proj = nn.Linear(hidden, self.kv_heads * self.dim, bias=False)
        self.v_proj = nn.Linear(hidden, self.kv_heads * self.dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.dim, hidden, bias=False)
        self.q_norm = RMSNorm(self.dim, preset.norm_eps)
        self.k_norm = RMSNorm(self.dim, preset.norm_eps)

    def _keys_values(self, x: Tensor, table: RotaryTable) -> tuple[Tensor, Tensor]:
        k = self.k_norm(self.k_proj(x).unflatten(-1, (self.kv_heads, self.dim)))
        v = self.v_proj(x).unflatten(-1, (self.kv_heads, self.dim))
        return rotate(k.transpose(1, 2), table), v.transpose(1, 2)

    def forward(
        self, x: Tensor, context: Tensor, tables: tuple[RotaryTable, RotaryTable], mask: Tensor
    ) -> Tensor:
        """Maps block rows [batch, rows, hidden]; `tables` are those of rows and context."""
        q = self.q_norm(self.q_proj(x).unflatten(-1, (self.heads, self.dim))).transpose(1, 2)
        q = rotate(q, tables[0])
        block_k, block_v = self._keys_values(x, tables[0])
        context_k, context_v = self._keys_values(context, tables[1])
        k = torch.cat([context_k, block_k], dim=2)
        v = torch.cat([context_v, block_v], dim=2)
        return self.o_proj(attend(q, k, v, mask))


class DrafterLayer(nn.Module):
    """Block attention and gated MLP, each behind a norm and a residual connection."""

    def __init__(self, preset: PairPreset) -> None:
        super().__init__()
        self.self_attn = BlockAttention(preset)
        self.mlp = GatedMLP(preset.hidden, preset.draft_width)
        self.input_layernorm = RMSNorm(preset.hidden, preset.norm_eps)
        self.post_attention_layernorm = RMSNorm(preset.hidden, preset.norm_eps)

    def forward(
        self, x: Tensor, context: Tensor, tables: tuple[RotaryTable, RotaryTable], mask: Tensor
    ) -> Tensor:
        """Maps block rows [batch, rows, hidden]."""
        x = x + self.self_attn(self.input_layernorm(x), context, tables, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


def block_mask(anchors: Tensor, context_tokens: int) -> Tensor:
    """Returns which keys each block row may attend to.

    Args:
        anchors: int64 [batch, blocks], position of each block's anchor.
        context_tokens: length of the context that all blocks share.

    Returns:
        bool [batch, 1, blocks * 16, context_tokens + blocks * 16]: context before the row's anchor,
        and the row's own block in both directions.
    """
    blocks = anchors.shape[1]
    device = anchors.device
    rows = anchors.repeat_interleave(BLOCK_SIZE, dim=1)
    before = torch.arange(context_tokens, device=device).view(1, 1, -1) < rows.unsqueeze(-1)
    owner = torch.arange(blocks, device=device).repeat_interleave(BLOCK_SIZE)
    own = (owner.unsqueeze(1) == owner).expand(anchors.shape[0], -1, -1)
    return torch.cat([before, own], dim=-1).unsqueeze(1)


def block_positions(anchors: Tensor) -> Tensor:
    """Returns positions int64 [batch, blocks * 16] of block rows for anchors [batch, blocks]."""
    steps = torch.arange(BLOCK_SIZE, device=anchors.device)
    return (anchors.unsqueeze(-1) + steps).flatten(1)


def block_embeddings(embedding: Tensor, anchor_tokens: Tensor, mask_token: int) -> Tensor:
    """Returns input rows [batch, blocks * 16, hidden]: each anchor followed by 15 masks.

    Args:
        embedding: the target's table [vocab, hidden].
        anchor_tokens: int64 [batch, blocks].
        mask_token: id of the mask token.
    """
    ids = anchor_tokens.new_full((*anchor_tokens.shape, BLOCK_SIZE), mask_token)
    ids[..., 0] = anchor_tokens
    return embedding[ids.flatten(1)]


class Drafter(nn.Module):
    """The drafter without embeddings and head."""

    def __init__(self, preset: PairPreset) -> None:
        super().__init__()
        self.preset = preset
        taps = len(preset.target_layer_ids)
        self.layers = nn.ModuleList(DrafterLayer(preset) for _ in range(preset.draft_layers))
        self.norm = RMSNorm(preset.hidden, preset.norm_eps)
        self.fc = nn.Linear(taps * preset.hidden, preset.hidden, bias=False)
        self.hidden_norm = RMSNorm(preset.hidden, preset.norm_eps)

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Draws the parameters; the same seed gives the same values on every device."""
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if parameter.dim() >= 2:
                std = 0.7 / math.sqrt(parameter.shape[-1])
                std *= 0.5 if "o_proj" in name or "down_proj" in name else 1.0
                parameter.copy_(torch.empty(parameter.shape).normal_(0, std, generator=generator))

    def forward(self, rows: Tensor, positions: Tensor, features: Tensor, mask: Tensor) -> Tensor:
        """Returns hidden rows after the final norm.

        Args:
            rows: block embeddings, [batch, rows, hidden].
            positions: int64 [batch, rows].
            features: target hidden states of the context, [batch, context, taps * hidden].
            mask: bool [batch, 1, rows, context + rows].
        """
        dim, theta = self.preset.draft_head_dim, self.preset.rope_theta
        context = self.hidden_norm(self.fc(features))
        where = torch.arange(features.shape[1], device=features.device)
        tables = (
            rotary_table(positions, dim=dim, theta=theta),
            rotary_table(where, dim=dim, theta=theta),
        )
        for layer in self.layers:
            rows = layer(rows, context, tables, mask)
        return self.norm(rows)
