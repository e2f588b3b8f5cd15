"""Gated DeltaNet over a short block: verify in parallel, commit any prefix from compact factors.

Maths (`docs/gdn.md` spells it out). State S is [V, K]; with G_i the running sum of the gates g and
k, q normalised, the recurrence S_t = e^{g_t} S_{t-1} + u_t k_t^T unrolls to

    (I + A) U = beta (V - e^G K S_0^T),   A_ij = beta_i e^{G_i - G_j} (k_i . k_j)   for j < i
    O = e^G Q S_0^T + P U,                P_ij = e^{G_i - G_j} (q_i . k_j)          for j <= i
    S_n = e^{G_n} S_0 + sum_{i <= n} e^{G_n - G_i} u_i k_i^T                        for every n

A is strictly lower triangular, so u_i depends on earlier rows only and every prefix is exact. The
factors (k, u, g) are about 1 % of a state. Shape letters: N = batch x value heads, T rows of the
block, K and V the head dims, X layers.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class BlockConstants(NamedTuple):
    """Masks of one block size, made once.

    Attributes:
        strict_lower_TT: 1 below the diagonal, else 0.
        lower_TT: 1 on and below the diagonal, else 0.
    """

    strict_lower_TT: torch.Tensor
    lower_TT: torch.Tensor


def block_constants(rows: int, dtype: torch.dtype, device: torch.device) -> BlockConstants:
    """Build the masks for blocks of `rows` rows."""
    ones = torch.ones(rows, rows, dtype=dtype, device=device)
    return BlockConstants(ones.tril(-1), ones.tril())


def verify_block(
    qk_N2TK: torch.Tensor,
    v_NTV: torch.Tensor,
    gate_NT: torch.Tensor,
    beta_NT: torch.Tensor,
    state_NVK: torch.Tensor,
    constants: BlockConstants,
    query_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs and update factors of T rows against a state that is left as it is.

    Args:
        qk_N2TK: rows 0..T-1 are the L2-normalised queries, rows T..2T-1 the keys.
        v_NTV: values.
        gate_NT: log decay of each row, <= 0.
        beta_NT: write strengths in (0, 1).
        state_NVK: state before the block.
        constants: masks of size T.
        query_scale: factor on the queries, K ** -0.5 for Qwen3.5.

    Returns:
        outputs [N, T, V] and factors u [N, T, V].
    """
    rows = v_NTV.shape[1]
    keys = qk_N2TK[:, rows:]
    against_state = torch.bmm(qk_N2TK, state_NVK.transpose(1, 2))
    if rows == 1:
        decay_N11 = gate_NT.exp().unsqueeze(-1)
        beta_N11 = beta_NT.unsqueeze(-1)
        factors = torch.addcmul(v_NTV, decay_N11, against_state[:, 1:], value=-1).mul_(beta_N11)
        own_N11 = (qk_N2TK[:, :1] * keys).sum(-1, keepdim=True)
        out = torch.addcmul(against_state[:, :1] * decay_N11, own_N11, factors)
        return out.mul_(query_scale), factors
    gram = torch.bmm(qk_N2TK, keys.transpose(1, 2))
    # Sums over segments, not differences of running sums: a strong early gate would eat the digits.
    segments = (gate_NT.unsqueeze(-1) * constants.strict_lower_TT).cumsum(1)
    decay_NTT = segments.exp_().mul_(constants.lower_TT)
    decay_NT1 = gate_NT.cumsum(1).exp_().unsqueeze(-1)
    beta_NT1 = beta_NT.unsqueeze(-1)
    system = decay_NTT * gram[:, rows:] * beta_NT1
    right = torch.addcmul(v_NTV, decay_NT1, against_state[:, rows:], value=-1).mul_(beta_NT1)
    factors = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    out = torch.baddbmm(
        against_state[:, :rows] * decay_NT1, decay_NTT.mul_(gram[:, :rows]), factors
    )
    return out.mul_(query_scale), factors


def fold_factors(
    state_MVK: torch.Tensor,
    keys_MTK: torch.Tensor,
    factors_MTV: torch.Tensor,
    gate_MT: torch.Tensor,
    committed_M: torch.Tensor | int,
) -> torch.Tensor:
    """State after the first `n` rows of a block, for all layers and requests at once.

    Args:
        state_MVK: states before the block; M = layers x batch x value heads.
        keys_MTK, factors_MTV, gate_MT: what `verify_block` saw and returned.
        committed_M: rows to commit, one int for all or int64 [M]; 0 leaves a state as it is.

    Returns:
        new states [M, V, K], a fresh tensor.
    """
    if isinstance(committed_M, int):
        n = committed_M
        if n == 0:
            return state_MVK.clone()
        gate = gate_MT[:, :n]
        total_M = gate.sum(1)
        weights = (gate.flip(1).cumsum(1).flip(1) - gate).exp_()
        weighted = factors_MTV[:, :n] * weights.unsqueeze(-1)
        return torch.baddbmm(
            state_MVK * total_M.exp_()[:, None, None], weighted.transpose(1, 2), keys_MTK[:, :n]
        )
    rows = torch.arange(gate_MT.shape[1], device=gate_MT.device)
    live_MT = rows < committed_M.unsqueeze(1)
    gate = torch.where(live_MT, gate_MT, 0.0)
    total_M = gate.sum(1)
    weights = (gate.flip(1).cumsum(1).flip(1) - gate).exp_().mul_(live_MT)
    weighted = factors_MTV * weights.unsqueeze(-1)
    return torch.baddbmm(
        state_MVK * total_M.exp_()[:, None, None], weighted.transpose(1, 2), keys_MTK
    )


def naive_recurrence(
    q_NTK: torch.Tensor,
    k_NTK: torch.Tensor,
    v_NTV: torch.Tensor,
    gate_NT: torch.Tensor,
    beta_NT: torch.Tensor,
    state_NVK: torch.Tensor,
    query_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Row-by-row recurrence, the oracle of the two functions above.

    Returns:
        outputs [N, T, V] and the state after all rows [N, V, K].
    """
    state = state_NVK.clone()
    outputs = []
    for row in range(v_NTV.shape[1]):
        state = state * gate_NT[:, row].exp()[:, None, None]
        read = torch.einsum("nvk,nk->nv", state, k_NTK[:, row])
        update = (v_NTV[:, row] - read) * beta_NT[:, row, None]
        state = state + torch.einsum("nv,nk->nvk", update, k_NTK[:, row])
        outputs.append(torch.einsum("nvk,nk->nv", state, q_NTK[:, row]) * query_scale)
    return torch.stack(outputs, 1), state
