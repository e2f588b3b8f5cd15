"""Small pieces that the target and the drafter share: norms, rotary positions, gated MLP."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last axis, computed in fp32, returned in x's dtype."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * weight.float()).to(x.dtype)


class RMSNorm(nn.Module):
    """RMS norm with a plain weight (drafter, and the output norm of Gated DeltaNet)."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalises the last axis."""
        return rms_norm(x, self.weight, self.eps)


class ZeroCentredRMSNorm(nn.Module):
    """RMS norm whose stored weight is the difference from one (all norms of the target)."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalises the last axis."""
        return rms_norm(x, 1.0 + self.weight.float(), self.eps)


class Weight(nn.Module):
    """Holder of one parameter named `weight`, where a checkpoint has a module with no more."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(*shape))


class GatedMLP(nn.Module):
    """SwiGLU: `down(silu(gate(x)) * up(x))`."""

    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, width, bias=False)
        self.up_proj = nn.Linear(hidden, width, bias=False)
        self.down_proj = nn.Linear(width, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Maps [..., hidden] to [..., hidden]."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def rotary_table(positions: Tensor, *, dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Returns cosines and sines [..., dim] (fp32) for integer positions [...]."""
    exponent = torch.arange(0, dim, 2, dtype=torch.float32, device=positions.device) / dim
    angles = positions.float().unsqueeze(-1) * (theta**-exponent)
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """Applies rotary positions to the first `dim` channels of x.

    Args:
        x: [batch, heads, tokens, head_dim].
        table: cosines and sines, [tokens, dim] or [batch, tokens, dim] with dim <= head_dim.
    """
    cos, sin = (part.to(x.dtype) for part in table)
    if cos.dim() == 3:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    dim = cos.shape[-1]
    turned, kept = x[..., :dim], x[..., dim:]
    low, high = turned.chunk(2, dim=-1)
    turned = turned * cos + torch.cat([-high, low], dim=-1) * sin
    return torch.cat([turned, kept], dim=-1) if kept.shape[-1] else turned


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Grouped-query attention, causal if there is no mask.

    Args:
        q: [batch, heads, queries, head_dim].
        k: [batch, kv_heads, keys, head_dim]; heads is a multiple of kv_heads.
        v: like k.
        mask: bool, broadcastable to [batch, heads, queries, keys]; True may be attended to.

    Returns:
        [batch, queries, heads * head_dim].
    """
    groups = q.shape[1] // k.shape[1]
    if groups > 1:  # Not enable_gqa: with a mask it takes the slow path on GPUs.
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    k, v = k.to(q.dtype), v.to(q.dtype)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
    return out.transpose(1, 2).flatten(2)
