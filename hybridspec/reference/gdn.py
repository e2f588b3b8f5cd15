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

import torch


def decay_mask(rows: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Which gates decay what, [T, T + 1]: 1 where gate `l` acts on source `j`.

    Source 0 is the state before the block, source j + 1 is row j; a row's own gate acts on the
    state but not on the row itself.
    """
    return torch.ones(rows, rows + 1, dtype=dtype, device=device).tril()


def verify_block(
    qk_N2TK: torch.Tensor,
    v_NTV: torch.Tensor,
    gate_NT1: torch.Tensor,
    beta_NT1: torch.Tensor,
    state_NVK: torch.Tensor,
    mask: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs and update factors of T rows against a state that is left as it is.

    Args:
        qk_N2TK: rows 0..T-1 are the L2-normalised queries, rows T..2T-1 the keys.
        v_NTV: values.
        gate_NT1: log decay of each row, <= 0.
        beta_NT1: write strengths in (0, 1).
        state_NVK: state before the block.
        mask: `decay_mask(T)`.

    Returns:
        outputs [N, T, V] of unscaled queries, and factors u [N, T, V].
    """
    batch, rows, _ = v_NTV.shape
    keys = qk_N2TK.narrow(1, rows, rows)
    state_q, state_k = torch.bmm(qk_N2TK, state_NVK.mT).split(rows, 1)
    gram = torch.bmm(qk_N2TK, keys.mT).view(batch, 2, rows, rows)
    # Sums over segments, not differences of running sums: a strong early gate would eat the digits.
    decay_NTT = (gate_NT1 * mask).cumsum(1).exp_()
    from_state_NT1, between_NTT = decay_NTT.split((1, rows), 2)
    output_NTT, system_NTT = (gram * between_NTT.unsqueeze(1)).tril_().unbind(1)
    right = torch.addcmul(v_NTV, from_state_NT1, state_k, value=-1).mul_(beta_NT1)
    # The solver reads below the diagonal only and takes the diagonal as ones.
    factors = torch.linalg.solve_triangular(
        system_NTT * beta_NT1, right, upper=False, unitriangular=True
    )
    return torch.baddbmm(state_q * from_state_NT1, output_NTT, factors), factors


def fold_factors(
    state_MVK: torch.Tensor,
    qk_M2TK: torch.Tensor,
    factors_MTV: torch.Tensor,
    gate_MT1: torch.Tensor,
    committed_M: torch.Tensor | int,
) -> None:
    """Advance states by the first `n` rows of a block, in place, for all layers and requests.

    Args:
        state_MVK: states before the block, overwritten; M = batch x layers x value heads.
        qk_M2TK, factors_MTV, gate_MT1: what `verify_block` saw and returned.
        committed_M: rows to commit, one int for all or int64 [M]; 0 leaves a state as it is.
    """
    rows = gate_MT1.shape[1]
    if isinstance(committed_M, int):
        count = committed_M
        if count == 0:
            return
        gate = gate_MT1.narrow(1, 0, count)
        live = None
    else:
        count = rows
        live = (torch.arange(rows, device=gate_MT1.device) < committed_M.unsqueeze(1)).unsqueeze(2)
        gate = torch.where(live, gate_MT1, 0.0)
    # Sum of the gates from each row on, summed from the back so that no digits cancel.
    tail = gate.flip(1).cumsum(1).flip(1)
    weights = (tail - gate).exp_()
    if live is not None:
        weights.mul_(live)
    weighted = factors_MTV.narrow(1, 0, count) * weights
    state_MVK.mul_(tail.narrow(1, 0, 1).exp())
    state_MVK.baddbmm_(weighted.mT, qk_M2TK.narrow(1, rows, count))


def naive_recurrence(
    q_NTK: torch.Tensor,
    k_NTK: torch.Tensor,
    v_NTV: torch.Tensor,
    gate_NT: torch.Tensor,
    beta_NT: torch.Tensor,
    state_NVK: torch.Tensor,
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
        outputs.append(torch.einsum("nvk,nk->nv", state, q_NTK[:, row]))
    return torch.stack(outputs, 1), state
