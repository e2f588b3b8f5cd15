"""End the chain of drafts at the length, for an engine that verifies and accepts whole blocks.

The engine's own acceptance stays as it is: greedy acceptance stops at a candidate that is no token,
sampling at the end of the chain, where it draws from the unmodified row of the target.
"""

# Launch options and static ranges are not in triton's annotations.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hybridspec.errors import UsageError
from hybridspec.kernels.compilation import CompileCase
from hybridspec.kernels.select.selection import require_column
from hybridspec.kernels.select.tables import BLOCK_SIZE

NO_TOKEN = -1


@triton.jit
def limit_kernel(p_lengths, p_candidates, p_next, HAS_NEXT: tl.constexpr):
    """One program a request; see `limit_acceptance` for the arguments."""
    i_request = tl.program_id(0).to(tl.int64)
    o_row = tl.arange(0, 16)
    length = tl.load(p_lengths + i_request)
    length = tl.where(length > 1, length, 1)
    none = tl.full((16,), -1, tl.int64)
    tl.store(p_candidates + i_request * 16 + o_row, none, mask=o_row >= length)
    if HAS_NEXT:
        following = tl.where(o_row + 1 < length, o_row + 1, -1).to(tl.int64)
        tl.store(p_next + i_request * 16 + o_row, following)


def limit_acceptance(
    candidates_BT: torch.Tensor, lengths_B: torch.Tensor, *, next_BT: torch.Tensor | None = None
) -> None:
    """Take the candidates at and past the length away, in place; the anchor always stays.

    Args:
        candidates_BT: int64 [B, 16], anchor and drafts; rows past the length become -1.
        lengths_B: int32 [B], rows verified; at least one counts as verified.
        next_BT: int64 [B, 16], the chain that a tree verification walks: row after each row, -1 at
            its end. Written whole.

    Raises:
        UsageError: shapes or dtypes that do not fit.
    """
    num_requests = candidates_BT.shape[0]
    for name, tile in (("candidates", candidates_BT), ("next", next_BT)):
        if tile is not None and not (
            tile.shape == (num_requests, BLOCK_SIZE)
            and tile.dtype == torch.int64
            and tile.is_contiguous()
        ):
            raise UsageError(
                f"{name} are {tile.dtype} {tuple(tile.shape)}; expected contiguous int64 "
                f"[B, {BLOCK_SIZE}]"
            )
    require_column("lengths", lengths_B, num_requests, (torch.int32,))
    if num_requests == 0:
        return
    limit_kernel[(num_requests,)](
        lengths_B,
        candidates_BT,
        candidates_BT if next_BT is None else next_BT,
        HAS_NEXT=next_BT is not None,
        num_warps=1,
    )


def compile_cases() -> list[CompileCase]:
    """Shipped configurations: greedy, and sampling along a chain."""
    cases = []
    for has_next in (False, True):
        kinds = {"p_lengths": "*i32", "p_candidates": "*i64", "p_next": "*i64"}
        constexprs = {"HAS_NEXT": has_next}
        kinds |= dict.fromkeys(constexprs, "constexpr")
        cases.append(CompileCase(f"limit-{has_next}", limit_kernel, kinds, constexprs, num_warps=1))
    return cases
