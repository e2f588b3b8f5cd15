"""Gated DeltaNet row by row in plain torch: the oracle of every kernel here.

State S is [V, K]. With `g = -exp(A_log) softplus(a + dt_bias)`, `beta = sigmoid(b)`, keys and
queries L2-normalised (1e-6 inside the root) and queries scaled by `K^-0.5`:

    S_t = e^{g_t} S_{t-1} + u_t k_t^T,   u_t = beta_t (v_t - e^{g_t} S_{t-1} k_t),   o_t = S_t q_t

Everything runs in the dtype of the state, so tests call it in float64.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

NORM_EPSILON = 1e-6
SOFTPLUS_THRESHOLD = 20.0


def split_mixed(
    mixed_BTC: torch.Tensor, key_heads: int, value_heads: int, key_dim: int, value_dim: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries [B, T, H, K], keys [B, T, H, K], values [B, T, HV, V] of rows behind the conv."""
    width = key_heads * key_dim
    q, k, v = mixed_BTC.split((width, width, value_heads * value_dim), -1)
    return (
        q.unflatten(-1, (key_heads, key_dim)),
        k.unflatten(-1, (key_heads, key_dim)),
        v.unflatten(-1, (value_heads, value_dim)),
    )


def log_decay(a: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor) -> torch.Tensor:
    """Log decay of each row and value head, <= 0, shape of `a`."""
    return -A_log.exp() * F.softplus(a + dt_bias, threshold=SOFTPLUS_THRESHOLD)


def normalise(x: torch.Tensor) -> torch.Tensor:
    """L2-normalised along the last dimension."""
    return x / (x.square().sum(-1, keepdim=True) + NORM_EPSILON).sqrt()


def naive_states(
    mixed_TC: torch.Tensor,
    a_TH: torch.Tensor,
    b_TH: torch.Tensor,
    A_log_H: torch.Tensor,
    dt_bias_H: torch.Tensor,
    state_HVK: torch.Tensor,
    *,
    key_heads: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One request's rows.

    Returns:
        outputs [T, HV, V] and the states before the block and after every row [T + 1, HV, V, K].
    """
    dtype = state_HVK.dtype
    value_heads, value_dim, key_dim = state_HVK.shape
    q, k, v = split_mixed(mixed_TC.to(dtype), key_heads, value_heads, key_dim, value_dim)
    repeat = value_heads // key_heads
    q = (normalise(q) * key_dim**-0.5).repeat_interleave(repeat, -2)
    k = normalise(k).repeat_interleave(repeat, -2)
    gate = log_decay(a_TH.to(dtype), A_log_H.to(dtype), dt_bias_H.to(dtype)).exp()
    beta = b_TH.to(dtype).sigmoid()
    state, outputs, states = state_HVK, [], [state_HVK]
    for t in range(mixed_TC.shape[0]):
        state = state * gate[t, :, None, None]
        read = torch.einsum("hvk,hk->hv", state, k[t])
        update = (v[t] - read) * beta[t, :, None]
        state = state + torch.einsum("hv,hk->hvk", update, k[t])
        outputs.append(torch.einsum("hvk,hk->hv", state, q[t]))
        states.append(state)
    empty = state_HVK.new_empty(0, value_heads, value_dim)
    return torch.stack(outputs) if outputs else empty, torch.stack(states)


def naive_commit(
    state_HVK: torch.Tensor, key_THK: torch.Tensor, update_HTV: torch.Tensor, decay_HT: torch.Tensor
) -> torch.Tensor:
    """State after the rows whose factors are given: `S <- e^{g_t} S + u_t k_t^T` row by row.

    Args:
        key_THK: raw keys; update_HTV: updates already divided by the norm of their key;
            decay_HT: log decays. See `factors.Factors`.
    """
    state = state_HVK
    repeat = state.shape[0] // key_THK.shape[1]
    keys = key_THK.to(state.dtype).repeat_interleave(repeat, 1)
    for t in range(key_THK.shape[0]):
        state = state * decay_HT[:, t, None, None].to(state.dtype).exp()
        state = state + torch.einsum("hv,hk->hvk", update_HTV[:, t].to(state.dtype), keys[t])
    return state
