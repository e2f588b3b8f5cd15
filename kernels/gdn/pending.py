"""Lazy commit: accepted rows stay factors until the next verification folds them into the state.

It saves the commit launch and one pass over the state a round. The pool then lags by one round:
whoever reads it otherwise (prefix cache, plain decoding, request end) calls `flush` first.
"""

# What Triton's compiler takes and makes is not in its annotations.
# pyright: reportGeneralTypeIssues=false, reportCallIssue=false
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from hybridspec.errors import UsageError
from hybridspec.kernels.gdn.commit import commit
from hybridspec.kernels.gdn.factors import Factors


@dataclass(frozen=True)
class Pending:
    """Accepted rows that are not in the states yet, one cursor for all layers.

    Request `b` owns rows `2 b` and `2 b + 1` of the factors; they take turns.

    Attributes:
        count_B: int32 rows pending.
        side_B: int32 0 or 1, which of the two factor rows holds them.
    """

    count_B: torch.Tensor
    side_B: torch.Tensor

    @classmethod
    def allocate(cls, batch: int, *, device: torch.device | str) -> Pending:
        """Nothing pending."""
        zeros = torch.zeros(2, batch, dtype=torch.int32, device=device)
        return cls(zeros[0], zeros[1])

    def check(self, batch: int, factors: Factors) -> None:
        """Refuse cursors or factors that are too small for a batch.

        Raises:
            UsageError: with value, rule and remedy.
        """
        rows = factors.update_XRHTV.shape[1]
        if self.count_B.shape[0] < batch or rows < 2 * batch:
            raise UsageError(
                f"pending cursors for {self.count_B.shape[0]} requests and {rows} factor rows; a "
                f"batch of {batch} needs {batch} and {2 * batch}: two factor rows a request"
            )


@triton.jit
def _advance_kernel(p_count, p_side, p_slots, p_accepted, batch, BLOCK: tl.constexpr):
    o_b = tl.arange(0, BLOCK)
    m_b = o_b < batch
    live = m_b & (tl.load(p_slots + o_b, mask=m_b, other=-1) >= 0)
    accepted = tl.load(p_accepted + o_b, mask=live, other=0)
    side = tl.load(p_side + o_b, mask=live, other=0)
    tl.store(p_count + o_b, accepted, mask=live)
    tl.store(p_side + o_b, 1 - side, mask=live)


def advance(pending: Pending, slots_B: torch.Tensor, accepted_B: torch.Tensor) -> None:
    """After a round: its accepted rows are what is pending now. One launch, nothing on the host.

    Args:
        slots_B: int32 slots of the round; a request at -1 was not verified and stays as it is.
        accepted_B: int32 rows to commit, 0 to 16.
    """
    batch = slots_B.shape[0]
    _advance_kernel[(1,)](
        pending.count_B,
        pending.side_B,
        slots_B,
        accepted_B,
        batch,
        BLOCK=triton.next_power_of_2(batch),
        num_warps=1,
    )


def flush(
    state_XSHVK: torch.Tensor, slots_B: torch.Tensor, factors: Factors, pending: Pending
) -> None:
    """Bring the states of all layers up to date and clear what was pending.

    Args:
        state_XSHVK: state pools of all layers.
        slots_B: int32 slots of the requests that own `pending`; -1 is left alone.
    """
    batch = slots_B.shape[0]
    rows = 2 * torch.arange(batch, dtype=torch.int32, device=slots_B.device)
    commit(
        state_XSHVK,
        slots_B,
        pending.count_B[:batch],
        factors,
        factor_rows_B=rows + pending.side_B[:batch],
    )
    pending.count_B[:batch].masked_fill_(slots_B >= 0, 0)
