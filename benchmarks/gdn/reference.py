"""Float64 outputs and states of a round, one token after another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from gdn.workload import Workload


@dataclass(frozen=True)
class Expected:
    """What a round should give.

    Attributes:
        index: slot set.
        accepted: rows committed for each request.
        outputs_XBTHV: float64.
        state_XBHVK: state after the accepted rows, float64.
    """

    index: int
    accepted: tuple[int, ...]
    outputs_XBTHV: torch.Tensor
    state_XBHVK: torch.Tensor


def expected_round(workload: Workload, index: int, accepted: Sequence[int]) -> Expected:
    """The gated delta rule, S = e^g S + beta (v - e^g S k) k^T and o = S q, from the first state.

    Query and key are divided by sqrt(sum of squares + 1e-6), the query also by sqrt(K);
    g = -e^A_log softplus(a + dt_bias), beta = sigmoid(b).
    """
    shape, real = workload.case.shape, torch.float64
    keys = shape.key_heads * shape.key_dim
    mixed = workload.mixed_NXBTC[index].to(real)
    query, key, value = mixed.split([keys, keys, shape.channels - 2 * keys], dim=-1)
    groups = shape.value_heads // shape.key_heads

    def normalised(x: torch.Tensor) -> torch.Tensor:
        x = x.unflatten(-1, (shape.key_heads, shape.key_dim))
        x = x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()
        return x.repeat_interleave(groups, dim=-2)

    query, key = normalised(query) * shape.key_dim**-0.5, normalised(key)
    value = value.unflatten(-1, (shape.value_heads, shape.value_dim))
    dt_bias, A_log = workload.dt_bias_XH.to(real), workload.A_log_XH.to(real)
    logits = workload.a_NXBTH[index].to(real) + dt_bias[:, None, None]
    g = -A_log.exp()[:, None, None] * F.softplus(logits, threshold=1e9)
    decay, beta = g.exp()[..., None, None], workload.b_NXBTH[index].to(real).sigmoid()[..., None]
    slots = workload.slots_NB[index].long()
    state = workload.first_state_XSHVK[:, slots].to(real)
    counts = torch.tensor(list(accepted), device=state.device)[None, :, None, None, None]
    outputs, picked = [], state
    for t in range(workload.case.tokens):
        state = state * decay[:, :, t]
        found = (state @ key[:, :, t, ..., None]).squeeze(-1)
        update = beta[:, :, t] * (value[:, :, t] - found)
        state = state + update[..., None] * key[:, :, t, :, None, :]
        outputs.append((state @ query[:, :, t, ..., None]).squeeze(-1))
        picked = torch.where(counts == t + 1, state, picked)
    return Expected(index, tuple(accepted), torch.stack(outputs, dim=2), picked)
