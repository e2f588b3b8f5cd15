"""Gated DeltaNet in chunk form: batched matrix products and an exact triangular inverse."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hybridspec.demo.layers import RMSNorm, Weight
from hybridspec.demo.presets import CONV_WIDTH, PairPreset

CHUNK = 64
_L2_EPS = 1e-6


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Matrix product; sums for tiny blocks, of which there are too many for a batched kernel."""
    if a.shape[-1] == 1:
        return a * b
    if a.shape[-1] <= 4:
        return (a.unsqueeze(-1) * b.unsqueeze(-3)).sum(-2)
    return a @ b


class UnitLowerInverse(torch.autograd.Function):
    """`(I + A)^-1` of strictly lower triangular A [..., n, n], n a power of two.

    Doubling over diagonal blocks is exact (no series): the inverse of `[[P, 0], [C, Q]]` is
    `[[P', 0], [-Q' C P', Q']]`, so log2(n) steps of small products suffice.
    """

    @staticmethod
    def forward(ctx: Any, a: Tensor) -> Tensor:
        """Returns the inverse, unit lower triangular, shape of `a`."""
        n, lead = a.shape[-1], a.shape[:-2]
        inverse = a.new_ones(*lead, n, 1, 1)
        size = 1
        while size < n:
            pairs = n // (2 * size)
            tiles = a.reshape(*lead, pairs, 2 * size, pairs, 2 * size)
            corner = tiles.diagonal(dim1=-4, dim2=-2)[..., size:, :size, :].movedim(-1, -3)
            upper, lower = inverse.unflatten(-3, (pairs, 2)).unbind(-3)
            block = -_product(_product(lower, corner), upper)
            top = torch.cat([upper, torch.zeros_like(upper)], dim=-1)
            inverse = torch.cat([top, torch.cat([block, lower], dim=-1)], dim=-2)
            size *= 2
        inverse = inverse.reshape(a.shape)
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """d(X^-1) = -X^-1 dX X^-1, kept to the strictly lower part."""
        (inverse,) = ctx.saved_tensors
        transposed = inverse.transpose(-1, -2)
        return -(transposed @ grad @ transposed).tril(-1)


def _l2_norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _L2_EPS)


def chunk_gated_delta(
    q: Tensor, k: Tensor, v: Tensor, *, log_decay: Tensor, beta: Tensor, state: Tensor | None,
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Runs the gated delta rule over a sequence.

    Per value head: `S <- exp(g) S`, `S <- S + k (beta (v - S^T k))^T`, `o = S^T q`, with q and k
    normalised and q scaled by `key_dim ** -0.5`.

    Args:
        q: [batch, tokens, key_heads, key_dim], fp32 or wider like all inputs.
        k: like q.
        v: [batch, tokens, value_heads, value_dim].
        log_decay: g <= 0, [batch, tokens, value_heads].
        beta: write strength in (0, 1), [batch, tokens, value_heads].
        state: S before the first token, [batch, value_heads, key_dim, value_dim], or None for 0.
        chunk: tokens a chunk, a power of two.

    Returns:
        Output [batch, tokens, value_heads, value_dim] and the state after the last token.
    """
    batch, tokens, key_heads, key_dim = q.shape
    value_heads, value_dim = v.shape[2:]
    q, k = _l2_norm(q) * key_dim**-0.5, _l2_norm(k)
    if key_heads != value_heads:
        q, k = (x.repeat_interleave(value_heads // key_heads, dim=2) for x in (q, k))
    pad = -tokens % chunk
    q, k, v = (F.pad(x.transpose(1, 2), (0, 0, 0, pad)) for x in (q, k, v))
    g, beta = (F.pad(x.transpose(1, 2), (0, pad)) for x in (log_decay, beta))
    q, k, v = (x.unflatten(2, (-1, chunk)) for x in (q, k, v))
    g = g.unflatten(2, (-1, chunk)).cumsum(-1)
    beta = beta.unflatten(2, (-1, chunk)).unsqueeze(-1)

    future = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).triu(1)
    decay = (g.unsqueeze(-1) - g.unsqueeze(-2)).masked_fill(future, float("-inf")).exp()
    k_beta, k_t = k * beta, k.transpose(-1, -2)
    inverse = UnitLowerInverse.apply(((k_beta @ k_t) * decay).tril(-1))
    from_start = g.exp().unsqueeze(-1)
    values = inverse @ (v * beta)
    reads = inverse @ (k_beta * from_start)
    scores = (q @ k_t) * decay
    q_start = q * from_start
    k_end = (k * (g[..., -1:] - g).exp().unsqueeze(-1)).transpose(-1, -2)
    chunk_decay = g[..., -1].exp()[..., None, None]
    after = q.new_zeros(batch, value_heads, key_dim, value_dim) if state is None else state
    outputs = []
    for i in range(values.shape[2]):
        written = values[:, :, i] - reads[:, :, i] @ after
        outputs.append(q_start[:, :, i] @ after + scores[:, :, i] @ written)
        after = after * chunk_decay[:, :, i] + k_end[:, :, i] @ written
    out = torch.stack(outputs, dim=2).flatten(2, 3)[:, :, :tokens]
    return out.transpose(1, 2), after


def recurrent_gated_delta(
    q: Tensor, k: Tensor, v: Tensor, *, log_decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """One token of `chunk_gated_delta`: the same arguments with tokens = 1 and a state."""
    key_heads, value_heads = q.shape[2], v.shape[2]
    q, k = _l2_norm(q[:, 0]) * q.shape[-1] ** -0.5, _l2_norm(k[:, 0])
    if key_heads != value_heads:
        q, k = (x.repeat_interleave(value_heads // key_heads, dim=1) for x in (q, k))
    state = state * log_decay[:, 0].exp()[..., None, None]
    held = (state * k.unsqueeze(-1)).sum(-2)
    write = (v[:, 0] - held) * beta[:, 0].unsqueeze(-1)
    state = state + k.unsqueeze(-1) * write.unsqueeze(-2)
    return (state * q.unsqueeze(-1)).sum(-2).unsqueeze(1), state


@dataclass
class DeltaState:
    """What a Gated DeltaNet layer carries: raw convolution inputs and the recurrent state.

    Attributes:
        conv: [batch, 3, channels], the last projected rows before the convolution.
        recurrent: fp32 [batch, value_heads, key_dim, value_dim].
    """

    conv: Tensor
    recurrent: Tensor


class GatedDeltaNet(nn.Module):
    """Linear attention layer with the parameter names of the Hugging Face checkpoint."""

    def __init__(self, preset: PairPreset) -> None:
        super().__init__()
        self.key_heads, self.value_heads = preset.gdn_key_heads, preset.gdn_value_heads
        self.key_dim, self.value_dim = preset.gdn_key_dim, preset.gdn_value_dim
        keys, values = self.key_heads * self.key_dim, self.value_heads * self.value_dim
        self.widths = (keys, keys, values)
        self.in_proj_qkv = nn.Linear(preset.hidden, 2 * keys + values, bias=False)
        self.in_proj_z = nn.Linear(preset.hidden, values, bias=False)
        self.in_proj_b = nn.Linear(preset.hidden, self.value_heads, bias=False)
        self.in_proj_a = nn.Linear(preset.hidden, self.value_heads, bias=False)
        self.conv1d = Weight(2 * keys + values, 1, CONV_WIDTH)
        self.dt_bias = nn.Parameter(torch.ones(self.value_heads))
        self.A_log = nn.Parameter(torch.zeros(self.value_heads))
        self.norm = RMSNorm(self.value_dim, preset.norm_eps)
        self.out_proj = nn.Linear(values, preset.hidden, bias=False)

    def forward(
        self, x: Tensor, state: DeltaState | None = None, *, keep: bool = False
    ) -> tuple[Tensor, DeltaState | None]:
        """Maps [batch, tokens, hidden] to the same shape; returns the new state if `keep`."""
        batch, tokens, _ = x.shape
        mixed = self.in_proj_qkv(x)
        past = CONV_WIDTH - 1
        before = mixed.new_zeros(batch, past, mixed.shape[-1]) if state is None else state.conv
        window = torch.cat([before.to(mixed.dtype), mixed], dim=1)
        taps = self.conv1d.weight[:, 0].to(mixed.dtype)
        convolved = window[:, :tokens] * taps[:, 0]
        for tap in range(1, CONV_WIDTH):
            convolved = convolved + window[:, tap : tap + tokens] * taps[:, tap]
        gate = self.in_proj_z(x).unflatten(-1, (self.value_heads, self.value_dim))
        b, a = self.in_proj_b(x), self.in_proj_a(x)
        with torch.autocast(x.device.type, enabled=False):
            dtype = torch.promote_types(x.dtype, torch.float32)
            q, k, v = F.silu(convolved).to(dtype).split(self.widths, dim=-1)
            q, k = (y.unflatten(-1, (self.key_heads, self.key_dim)) for y in (q, k))
            v = v.unflatten(-1, (self.value_heads, self.value_dim))
            rate = self.A_log.to(dtype).exp()
            log_decay = -rate * F.softplus(a.to(dtype) + self.dt_bias.to(dtype))
            beta = b.to(dtype).sigmoid()
            if tokens == 1 and state is not None:
                out, after = recurrent_gated_delta(
                    q, k, v, log_decay=log_decay, beta=beta, state=state.recurrent
                )
            else:
                out, after = chunk_gated_delta(
                    q, k, v, log_decay=log_decay, beta=beta,
                    state=None if state is None else state.recurrent,
                    chunk=min(CHUNK, 1 << (tokens - 1).bit_length()),
                )  # fmt: skip
            out = self.norm(out) * F.silu(gate.to(dtype))
        new_state = DeltaState(window[:, -past:], after) if keep else None
        return self.out_proj(out.to(x.dtype).flatten(2)), new_state
