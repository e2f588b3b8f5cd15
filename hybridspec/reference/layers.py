"""Small pieces that target and drafter share: norms, rotary tables, packed weights."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """Precision of norms, gates and recurrent state: fp32, or fp64 where the model runs in it."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class Norm(NamedTuple):
    """An RMSNorm ready to run: `x / sqrt(mean(x^2) + eps) * weight` over the last dimension.

    Attributes:
        scaled_weight: weight x sqrt(D) in `accumulate_dtype`, broadcastable to x.
        floor: sqrt(D x eps), one element.
    """

    scaled_weight: torch.Tensor
    floor: torch.Tensor

    @classmethod
    def build(cls, weight: torch.Tensor, eps: float) -> Norm:
        """Prepare a norm from its plain weight [..., D] (1 already added where zero-centred)."""
        dim = weight.shape[-1]
        wide = weight.to(accumulate_dtype(weight.dtype))
        return cls(wide * math.sqrt(dim), wide.new_tensor(math.sqrt(dim * eps)))

    @classmethod
    def zero_centred(cls, weight: torch.Tensor, eps: float) -> Norm:
        """As `build`, for weights stored around zero (Qwen3.5: the factor is 1 + weight)."""
        return cls.build(weight.to(accumulate_dtype(weight.dtype)) + 1.0, eps)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise x [..., D]; the result has x's dtype."""
        wide = x if x.dtype == self.scaled_weight.dtype else x.to(self.scaled_weight.dtype)
        # hypot(|x|, sqrt(D eps)) is sqrt(D (mean(x^2) + eps)) in two launches instead of five.
        norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).hypot_(self.floor)
        out = wide.div(norm).mul_(self.scaled_weight)
        return out if out.dtype == x.dtype else out.to(x.dtype)


def l2_normalise(x: torch.Tensor, floor: torch.Tensor) -> torch.Tensor:
    """`x / sqrt(sum(x^2) + floor^2)` over the last dimension (fp32 or fp64)."""
    return x.div(torch.linalg.vector_norm(x, dim=-1, keepdim=True).hypot_(floor))


def rotary_tables(
    positions: int,
    *,
    head_dim: int,
    rotary_dim: int,
    theta: float,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Cosine and signed-sine rows over the whole head, and the permutation that pairs dimensions.

    With them rotation is `x * cos + x[..., permutation] * sin`: dimensions past `rotary_dim` have
    cosine 1 and sine 0. Halves are rotated (NeoX form), as Qwen does.

    Returns:
        cos and sin [positions, 1, head_dim] and the permutation int64 [head_dim].
    """
    half = rotary_dim // 2
    exponent = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device=device) / rotary_dim
    angles = torch.arange(positions, dtype=torch.float32, device=device)[:, None] * (
        1.0 / theta**exponent
    )
    cos = torch.ones(positions, head_dim, device=device)
    sin = torch.zeros(positions, head_dim, device=device)
    cos[:, :half] = cos[:, half:rotary_dim] = angles.cos()
    sin[:, half:rotary_dim] = angles.sin()
    sin[:, :half] = -angles.sin()
    permutation = torch.arange(head_dim, device=device)
    permutation[:half] = torch.arange(half, rotary_dim, device=device)
    permutation[half:rotary_dim] = torch.arange(half, device=device)
    return cos.to(dtype).unsqueeze(1), sin.to(dtype).unsqueeze(1), permutation


def rotate(
    x_RHD: torch.Tensor, cos_R1D: torch.Tensor, sin_R1D: torch.Tensor, permutation_D: torch.Tensor
) -> torch.Tensor:
    """Apply rotary position encoding to rows of heads."""
    return (x_RHD * cos_R1D).addcmul_(x_RHD.index_select(-1, permutation_D), sin_R1D)


def swiglu(gate_up: torch.Tensor, width: int) -> torch.Tensor:
    """`silu(gate) * up` of a fused projection [..., 2 * width]."""
    gate, up = gate_up.split(width, -1)
    return F.silu(gate).mul_(up)


def grouped_attention(
    q_HLD: torch.Tensor,
    keys_GCD: torch.Tensor,
    values_GCD: torch.Tensor,
    mask_LL: torch.Tensor | None,
) -> torch.Tensor:
    """Attention of L new rows over C cached positions, the last L of which are their own.

    Args:
        q_HLD: queries with the softmax scale folded in; H = G x group, group-major.
        keys_GCD, values_GCD: cache of G key-value heads.
        mask_LL: additive mask over the last L positions (-inf above the diagonal), or None when
            every row sees everything.

    Returns:
        [H, L, D].
    """
    heads, rows, dim = q_HLD.shape
    groups = keys_GCD.shape[0]
    q = q_HLD.reshape(groups, -1, dim)
    scores = torch.bmm(q, keys_GCD.transpose(1, 2))
    if mask_LL is not None:
        scores.view(groups, -1, rows, scores.shape[-1])[..., -rows:] += mask_LL
    scores = torch.softmax(scores, -1, dtype=accumulate_dtype(q.dtype)).to(q.dtype)
    return torch.bmm(scores, values_GCD).view(heads, rows, dim)
