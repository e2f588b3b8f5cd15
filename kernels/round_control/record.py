"""What a round did, kept on the device: counters for telemetry, and the last round of each slot.

`record_round` is one launch at the end of a round. `recall_rounds` is one launch inside the
drafter's graph and brings back, in the order of the batch, what the round before left in each
request's slot, because the batch may have changed since.
"""

# Launch options and static ranges are not in triton's annotations.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from hybridspec.errors import UsageError
from hybridspec.kernels.compilation import CompileCase
from hybridspec.kernels.select.selection import require_column
from hybridspec.kernels.select.tables import BLOCK_SIZE

# Entries of the counters.
REQUEST_ROUNDS, EMITTED_TOKENS, VERIFIED_ROWS = 0, 1, 2
LENGTH_HISTOGRAM, EMITTED_HISTOGRAM, FALLBACKS = 8, 32, 56
NUM_FALLBACKS = 4
NUM_COUNTERS = 64


@dataclass(frozen=True)
class LastRounds:
    """The last round of each of S request slots.

    Attributes:
        emitted_ST: int64 [S, 16], tokens that it emitted.
        commit_rows_S: int32 [S], how many they are; 0: nothing yet.
        lengths_S: int32 [S], its verify length; 0 where nothing was drafted (prefill).
    """

    emitted_ST: torch.Tensor
    commit_rows_S: torch.Tensor
    lengths_S: torch.Tensor

    @classmethod
    def allocate(cls, slots: int, device: torch.device | str) -> LastRounds:
        """For slots that have emitted nothing."""
        return cls(
            torch.zeros(slots, BLOCK_SIZE, dtype=torch.int64, device=device),
            torch.zeros(slots, dtype=torch.int32, device=device),
            torch.zeros(slots, dtype=torch.int32, device=device),
        )


@triton.jit
def record_kernel(
    p_lengths,
    p_fallback,
    p_commit_rows,
    p_emitted,
    p_slots,
    p_counters,
    p_verified,
    p_last_emitted,
    p_last_rows,
    p_last_lengths,
    REMEMBERS: tl.constexpr,
):
    """One program a request; see `record_round` for the arguments."""
    i_request = tl.program_id(0).to(tl.int64)
    length = tl.load(p_lengths + i_request)
    rows = tl.load(p_commit_rows + i_request)
    fallback = tl.load(p_fallback + i_request)
    tl.store(p_verified + i_request, length)
    tl.atomic_add(p_counters, 1, sem="relaxed")
    tl.atomic_add(p_counters + 1, rows.to(tl.int64), sem="relaxed")
    tl.atomic_add(p_counters + 2, length.to(tl.int64), sem="relaxed")
    tl.atomic_add(p_counters + 8 + length, 1, sem="relaxed")
    tl.atomic_add(p_counters + 32 + rows, 1, sem="relaxed")
    tl.atomic_add(p_counters + 56 + fallback, 1, sem="relaxed")
    if REMEMBERS:
        i_slot = tl.load(p_slots + i_request).to(tl.int64)
        o_row = tl.arange(0, 16)
        emitted = tl.load(p_emitted + i_request * 16 + o_row)
        tl.store(p_last_emitted + i_slot * 16 + o_row, emitted)
        tl.store(p_last_rows + i_slot, rows)
        tl.store(p_last_lengths + i_slot, length)


def record_round(
    lengths_B: torch.Tensor,
    fallback_B: torch.Tensor,
    commit_rows_B: torch.Tensor,
    counters_N: torch.Tensor,
    verified_B: torch.Tensor,
    *,
    emitted_BT: torch.Tensor | None = None,
    slots_B: torch.Tensor | None = None,
    last: LastRounds | None = None,
) -> None:
    """Count a round of each request, and keep it by slot where `last` is given.

    Args:
        lengths_B, fallback_B, commit_rows_B: int32 [B] of this round.
        counters_N: int64 [64], added to; the names above say which is which.
        verified_B: int32 [B], the lengths copied, for whoever reads them after the next round.
        emitted_BT: int64 [B, 16], tokens emitted.
        slots_B: int32 [B], slot of each request, all different.
        last: written at those slots.

    Raises:
        UsageError: shapes or dtypes that do not fit.
    """
    num_requests = lengths_B.shape[0]
    columns = {"lengths": lengths_B, "fallback": fallback_B, "commit rows": commit_rows_B}
    columns["verified"] = verified_B
    # What would be remembered is never touched without a place to keep it.
    memory = [counters_N] * 5
    remembers = last is not None and emitted_BT is not None and slots_B is not None
    if last is not None and emitted_BT is not None and slots_B is not None:
        columns["slots"] = slots_B
        _require_emitted(emitted_BT, num_requests)
        memory = [emitted_BT, slots_B, last.emitted_ST, last.commit_rows_S, last.lengths_S]
    for name, column in columns.items():
        require_column(name, column, num_requests, (torch.int32,))
    require_column("counters", counters_N, NUM_COUNTERS, (torch.int64,))
    if num_requests == 0:
        return
    record_kernel[(num_requests,)](
        lengths_B,
        fallback_B,
        commit_rows_B,
        memory[0],
        memory[1],
        counters_N,
        verified_B,
        *memory[2:],
        REMEMBERS=remembers,
        num_warps=1,
    )


@triton.jit
def recall_kernel(
    p_slots, p_last_emitted, p_last_rows, p_last_lengths, p_emitted, p_commit_rows, p_lengths
):
    """One program a request; see `recall_rounds` for the arguments."""
    i_request = tl.program_id(0).to(tl.int64)
    i_slot = tl.load(p_slots + i_request).to(tl.int64)
    o_row = tl.arange(0, 16)
    emitted = tl.load(p_last_emitted + i_slot * 16 + o_row)
    tl.store(p_emitted + i_request * 16 + o_row, emitted)
    tl.store(p_commit_rows + i_request, tl.load(p_last_rows + i_slot))
    tl.store(p_lengths + i_request, tl.load(p_last_lengths + i_slot))


def recall_rounds(
    slots_B: torch.Tensor,
    last: LastRounds,
    *,
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    """Bring the last round of each request's slot into batch order.

    Args:
        slots_B: int32 [B].
        last: of all slots.
        out: int64 [B, 16] tokens emitted, int32 [B] how many, int32 [B] lengths.

    Raises:
        UsageError: shapes or dtypes that do not fit.
    """
    num_requests = slots_B.shape[0]
    emitted_BT, commit_rows_B, lengths_B = out
    _require_emitted(emitted_BT, num_requests)
    for name, column in (
        ("slots", slots_B),
        ("commit rows", commit_rows_B),
        ("lengths", lengths_B),
    ):
        require_column(name, column, num_requests, (torch.int32,))
    if num_requests == 0:
        return
    recall_kernel[(num_requests,)](
        slots_B,
        last.emitted_ST,
        last.commit_rows_S,
        last.lengths_S,
        emitted_BT,
        commit_rows_B,
        lengths_B,
        num_warps=1,
    )


def _require_emitted(emitted_BT: torch.Tensor, num_requests: int) -> None:
    shape = (num_requests, BLOCK_SIZE)
    if (
        emitted_BT.shape != shape
        or emitted_BT.dtype != torch.int64
        or not emitted_BT.is_contiguous()
    ):
        raise UsageError(
            f"emitted tokens are {emitted_BT.dtype} {tuple(emitted_BT.shape)}; expected contiguous "
            f"int64 {shape}"
        )


def compile_cases() -> list[CompileCase]:
    """Shipped configurations: counters alone, counters and slots, and the way back."""
    cases = []
    for remembers in (False, True):
        kinds = dict.fromkeys(("p_lengths", "p_fallback", "p_commit_rows"), "*i32")
        kinds |= {"p_emitted": "*i64", "p_slots": "*i32" if remembers else "*i64"}
        kinds |= {"p_counters": "*i64", "p_verified": "*i32", "p_last_emitted": "*i64"}
        kinds |= dict.fromkeys(("p_last_rows", "p_last_lengths"), "*i32" if remembers else "*i64")
        constexprs = {"REMEMBERS": remembers}
        kinds |= dict.fromkeys(constexprs, "constexpr")
        cases.append(
            CompileCase(f"record-{remembers}", record_kernel, kinds, constexprs, num_warps=1)
        )
    kinds = {"p_slots": "*i32", "p_last_emitted": "*i64", "p_last_rows": "*i32"}
    kinds |= {"p_last_lengths": "*i32", "p_emitted": "*i64"}
    kinds |= {"p_commit_rows": "*i32", "p_lengths": "*i32"}
    cases.append(CompileCase("recall", recall_kernel, kinds, {}, num_warps=1))
    return cases
