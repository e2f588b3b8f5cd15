"""Trainable target: Gated DeltaNet and full attention layers, each with a mixture of experts.

Parameter names are those of `Qwen3_5MoeForConditionalGeneration` below `model.language_model.`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hybridspec.demo.gated_delta import DeltaState, GatedDeltaNet
from hybridspec.demo.layers import (
    GatedMLP,
    Weight,
    ZeroCentredRMSNorm,
    attend,
    rotary_table,
    rotate,
)
from hybridspec.demo.presets import ROTARY_FRACTION, PairPreset

RotaryTable = tuple[Tensor, Tensor]


@dataclass
class AttentionState:
    """Fixed-size key-value cache of one layer; all sequences are at the same position.

    Attributes:
        keys: [batch, kv_heads, capacity, head_dim].
        values: like keys.
        position: int64 scalar on the device, position of the next token.
    """

    keys: Tensor
    values: Tensor
    position: Tensor


LayerState = DeltaState | AttentionState


class GatedAttention(nn.Module):
    """Full attention with normalised queries and keys and a sigmoid output gate."""

    def __init__(self, preset: PairPreset) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.dim = preset.heads, preset.kv_heads, preset.head_dim
        hidden = preset.hidden
        self.q_proj = nn.Linear(hidden, 2 * self.heads * self.dim, bias=False)
        self.k_proj = nn.Linear(hidden, self.kv_heads * self.dim, bias=False)
        self.v_proj = nn.Linear(hidden, self.kv_heads * self.dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.dim, hidden, bias=False)
        self.q_norm = ZeroCentredRMSNorm(self.dim, preset.norm_eps)
        self.k_norm = ZeroCentredRMSNorm(self.dim, preset.norm_eps)

    def forward(
        self, x: Tensor, table: RotaryTable, state: AttentionState | None, *, keep: bool
    ) -> tuple[Tensor, AttentionState | None]:
        """Maps [batch, tokens, hidden]; with a state, exactly one token is appended to it."""
        q, gate = self.q_proj(x).unflatten(-1, (self.heads, 2 * self.dim)).chunk(2, dim=-1)
        q = rotate(self.q_norm(q).transpose(1, 2), table)
        k = self.k_norm(self.k_proj(x).unflatten(-1, (self.kv_heads, self.dim)))
        k = rotate(k.transpose(1, 2), table)
        v = self.v_proj(x).unflatten(-1, (self.kv_heads, self.dim)).transpose(1, 2)
        mask, new_state = None, None
        if state is not None:
            slots = torch.arange(state.keys.shape[2], device=k.device)
            here = (slots == state.position).view(1, 1, -1, 1)
            k = state.keys.copy_(torch.where(here, k.to(state.keys.dtype), state.keys))
            v = state.values.copy_(torch.where(here, v.to(state.values.dtype), state.values))
            mask = (slots <= state.position).view(1, 1, 1, -1)
            new_state = state
        elif keep:
            new_state = AttentionState(k, v, torch.tensor(x.shape[1], device=x.device))
        out = attend(q, k, v, mask) * torch.sigmoid(gate.flatten(2))
        return self.o_proj(out), new_state


class Experts(nn.Module):
    """Stacked expert matrices."""

    def __init__(self, preset: PairPreset) -> None:
        super().__init__()
        count, width, hidden = preset.experts, preset.expert_width, preset.hidden
        self.gate_up_proj = nn.Parameter(torch.empty(count, 2 * width, hidden))
        self.down_proj = nn.Parameter(torch.empty(count, hidden, width))


class MixtureOfExperts(nn.Module):
    """Routed experts and a gated shared expert, computed over all experts at once.

    The experts of these models are a few channels wide, so three plain matrix products over all of
    them beat any gather or scatter; experts that a token did not choose get weight zero.
    """

    def __init__(self, preset: PairPreset) -> None:
        super().__init__()
        self.count, self.chosen = preset.experts, preset.experts_per_token
        self.gate = Weight(preset.experts, preset.hidden)
        self.experts = Experts(preset)
        self.shared_expert = GatedMLP(preset.hidden, preset.shared_width)
        self.shared_expert_gate = nn.Linear(preset.hidden, 1, bias=False)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns normalised weights [tokens, experts] (zero: not chosen) and the balance loss."""
        with torch.autocast(x.device.type, enabled=False):
            probabilities = (x.float() @ self.gate.weight.float().t()).softmax(-1)
            # Peeling off maxima compiles into one pass; topk would be a kernel of its own.
            rest = probabilities.detach()
            for _ in range(self.chosen - 1):
                rest = rest.masked_fill(rest >= rest.amax(-1, keepdim=True), -1.0)
            chosen = probabilities.detach() >= rest.amax(-1, keepdim=True)
            weights = torch.where(chosen, probabilities, 0.0)
            weights = weights / weights.sum(-1, keepdim=True)
            share = chosen.float().mean(0) / self.chosen
            balance = self.count * (share * probabilities.mean(0)).sum()
        return weights, balance

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Maps [batch, tokens, hidden]; also returns the balance loss and the weights."""
        rows = x.flatten(0, 1)
        weights, balance = self.route(rows)
        wide = F.linear(rows, self.experts.gate_up_proj.flatten(0, 1))
        gate, up = wide.unflatten(-1, (self.count, -1)).chunk(2, dim=-1)
        inner = F.silu(gate) * up * weights.unsqueeze(-1).to(wide.dtype)
        down = self.experts.down_proj.permute(1, 0, 2).flatten(1)
        out = F.linear(inner.flatten(1), down)
        out = out + torch.sigmoid(self.shared_expert_gate(rows)) * self.shared_expert(rows)
        return out.view_as(x).to(x.dtype), balance, weights


class TargetLayer(nn.Module):
    """Token mixer and experts, each behind a norm and a residual connection."""

    def __init__(self, preset: PairPreset, index: int) -> None:
        super().__init__()
        if preset.is_full_attention(index):
            self.self_attn = GatedAttention(preset)
        else:
            self.linear_attn = GatedDeltaNet(preset)
        self.full = preset.is_full_attention(index)
        self.mlp = MixtureOfExperts(preset)
        self.input_layernorm = ZeroCentredRMSNorm(preset.hidden, preset.norm_eps)
        self.post_attention_layernorm = ZeroCentredRMSNorm(preset.hidden, preset.norm_eps)

    def forward(
        self, x: Tensor, table: RotaryTable, state: LayerState | None = None, *, keep: bool = False
    ) -> tuple[Tensor, LayerState | None, Tensor, Tensor]:
        """Returns hidden states, the new state, the balance loss and the expert weights."""
        normed = self.input_layernorm(x)
        new_state: LayerState | None
        if self.full:
            assert state is None or isinstance(state, AttentionState)
            mixed, new_state = self.self_attn(normed, table, state, keep=keep)
        else:
            assert state is None or isinstance(state, DeltaState)
            mixed, new_state = self.linear_attn(normed, state, keep=keep)
        x = x + mixed.to(x.dtype)
        routed, balance, weights = self.mlp(self.post_attention_layernorm(x))
        return x + routed, new_state, balance, weights


@dataclass
class TargetOutput:
    """What a forward pass returns.

    Attributes:
        hidden: after the final norm, [batch, tokens, hidden].
        balance: mean balance loss of the layers, scalar.
        states: one a layer if they were kept.
        features: outputs of the asked-for layers, [batch, tokens, layers asked for * hidden].
        chosen: bool [layers, batch * tokens, experts] if routes were asked for.
    """

    hidden: Tensor
    balance: Tensor
    states: list[LayerState] = field(default_factory=list)
    features: Tensor | None = None
    chosen: Tensor | None = None


class Target(nn.Module):
    """The target without its language-model head, which is the embedding (tied)."""

    def __init__(self, preset: PairPreset) -> None:
        super().__init__()
        self.preset = preset
        self.embed_tokens = nn.Embedding(preset.vocab, preset.hidden)
        self.layers = nn.ModuleList(TargetLayer(preset, i) for i in range(preset.layers))
        self.norm = ZeroCentredRMSNorm(preset.hidden, preset.norm_eps)

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Draws the parameters; the same seed gives the same values on every device."""
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if name.endswith("A_log"):
                value = torch.empty(parameter.shape).uniform_(0.5, 8, generator=generator).log()
            elif name.endswith("dt_bias"):
                value = torch.empty(parameter.shape).uniform_(-4, 0, generator=generator)
            elif parameter.dim() >= 2:
                std = 0.7 / math.sqrt(parameter.shape[-1])
                if "embed" in name or name.endswith("mlp.gate.weight"):
                    std = 0.02
                elif "conv1d" in name:
                    std = 0.5
                elif re.search(r"(out_proj|o_proj|down_proj)(\.weight)?$", name):
                    std *= 0.5
                value = torch.empty(parameter.shape).normal_(0, std, generator=generator)
            else:
                continue
            parameter.copy_(value)

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns fp32 logits [..., vocab], computed in fp32 so that ties stay rare."""
        with torch.autocast(hidden.device.type, enabled=False):
            return F.linear(hidden.float(), self.embed_tokens.weight.float())

    def forward(
        self,
        tokens: Tensor,
        *,
        states: Sequence[LayerState] | None = None,
        position: Tensor | None = None,
        keep: bool = False,
        features_of: Sequence[int] = (),
        routes: bool = False,
        layers: Sequence[Callable[..., tuple]] | None = None,
    ) -> TargetOutput:
        """Runs the layers.

        Args:
            tokens: int64 [batch, tokens].
            states: continue from these with one token a sequence.
            position: int64 scalar, position of that token; needed with `states`.
            keep: return the states.
            features_of: layers whose outputs are returned.
            routes: return which experts each token chose.
            layers: compiled stand-ins of `self.layers`.
        """
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        if position is not None:
            positions = positions + position
        table = rotary_table(
            positions,
            dim=int(self.preset.head_dim * ROTARY_FRACTION),
            theta=self.preset.rope_theta,
        )
        x = self.embed_tokens(tokens)
        if torch.is_autocast_enabled(tokens.device.type):
            x = x.to(torch.get_autocast_dtype(tokens.device.type))
        new_states, features, chosen, balances = [], [], [], []
        for i, layer in enumerate(layers or self.layers):
            x, state, balance, weights = layer(x, table, states[i] if states else None, keep=keep)
            balances.append(balance)
            if keep:
                new_states.append(state)
            if i in features_of:
                features.append(x)
            if routes:
                chosen.append(weights > 0)
        return TargetOutput(
            hidden=self.norm(x),
            balance=torch.stack(balances).mean(),
            states=new_states,
            features=torch.cat(features, dim=-1) if features else None,
            chosen=torch.stack(chosen) if routes else None,
        )
