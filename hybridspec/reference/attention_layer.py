"""One full-attention layer of the target: gated, grouped queries, partial rotary positions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from hybridspec.reference.checkpoint import Checkpoint
from hybridspec.reference.config import TargetConfig
from hybridspec.reference.layers import Norm, accumulate_dtype, grouped_attention, rotate
from hybridspec.reference.rows import RowLayout, causal_mask
from hybridspec.reference.state import KVCache


class AttentionLayer:
    """Weights of one layer; keys and values live in each request's cache under `index`."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        prefix: str,
        config: TargetConfig,
        dtype: torch.dtype,
        index: int,
    ) -> None:
        self.index = index
        self.heads, self.kv_heads, self.dim = config.num_heads, config.num_kv_heads, config.head_dim
        hidden = config.hidden_size

        def read(name: str, *shape: int) -> torch.Tensor:
            return checkpoint.tensor(prefix + name, shape, dtype)

        q_gate = read("q_proj.weight", self.heads * 2 * self.dim, hidden)
        q, gate = q_gate.view(self.heads, 2, self.dim, hidden).unbind(1)
        self.front = torch.cat(
            [
                q.reshape(-1, hidden),
                read("k_proj.weight", self.kv_heads * self.dim, hidden),
                read("v_proj.weight", self.kv_heads * self.dim, hidden),
                gate.reshape(-1, hidden),
            ]
        )
        self.out = read("o_proj.weight", hidden, self.heads * self.dim)
        # One norm over query and key heads; the softmax scale rides on the queries' weights.
        scale = self.dim**-0.5
        wide = accumulate_dtype(dtype)
        query = (read("q_norm.weight", self.dim).to(wide) + 1.0) * scale
        key = read("k_norm.weight", self.dim).to(wide) + 1.0
        self.norm = Norm.build(
            torch.stack([query] * self.heads + [key] * self.kv_heads), config.rms_norm_eps
        )

    def __call__(
        self,
        hidden_RH: torch.Tensor,
        layout: RowLayout,
        caches: Sequence[KVCache],
        rotary: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        """Write the rows' keys and values at their positions and attend. Returns [R, H]."""
        front = F.linear(hidden_RH, self.front)
        qk_heads = self.heads + self.kv_heads
        v_start = qk_heads * self.dim
        gate_start = v_start + self.kv_heads * self.dim
        cos, sin, permutation = rotary
        qk = self.norm(front[:, :v_start].view(-1, qk_heads, self.dim))
        qk = rotate(qk, cos[layout.positions_R], sin[layout.positions_R], permutation)
        qk = qk.transpose(0, 1)
        values = front[:, v_start:gate_start].view(-1, self.kv_heads, self.dim).transpose(0, 1)
        outputs = []
        for cache, offset, start, length in zip(
            caches, layout.offsets, layout.starts, layout.lengths, strict=True
        ):
            rows, stop = slice(offset, offset + length), start + length
            cache.write(self.index, start, qk[self.heads :, rows], values[:, rows])
            mask = causal_mask(length, qk.dtype, qk.device) if length > 1 else None
            outputs.append(
                grouped_attention(
                    qk[: self.heads, rows],
                    cache.keys[self.index, :, :stop],
                    cache.values[self.index, :, :stop],
                    mask,
                )
            )
        out = outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)
        gated = out.transpose(0, 1).reshape(-1, self.heads * self.dim)
        return F.linear(gated.mul_(front[:, gate_start:].sigmoid()), self.out)
