"""Last word on the lengths of a round before the target runs: what a request forced, and lookahead.

One launch after select, inside the drafter's graph; one program takes all requests.
"""

# Launch options and static ranges are not in triton's annotations.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hybridspec.errors import UsageError
from hybridspec.kernels.compilation import CompileCase
from hybridspec.kernels.select.selection import STATIC_POLICY, require_column
from hybridspec.kernels.select.tables import BLOCK_SIZE

# Reason beside those of select: the request asked for this very length.
FORCED_VALUE = 3
FORCED = tl.constexpr(FORCED_VALUE)
STATIC = tl.constexpr(STATIC_POLICY)


@triton.jit(do_not_specialize=["num_requests", "lookahead", "fixed_length"])
def finish_kernel(
    p_selected,
    p_fallback,
    p_caps,
    p_forced,
    p_lengths,
    p_router_rows,
    num_requests,
    lookahead,
    fixed_length,
    BLOCK_REQUESTS: tl.constexpr,
):
    """One program; see `finish_lengths` for the arguments."""
    o_request = tl.arange(0, BLOCK_REQUESTS)
    present = o_request < num_requests
    cap = tl.load(p_caps + o_request, mask=present, other=0)
    forced = tl.load(p_forced + o_request, mask=present, other=0)
    length = tl.load(p_selected + o_request, mask=present, other=0)
    fallback = tl.load(p_fallback + o_request, mask=present, other=0)
    cap = tl.where(cap < 16, cap, 16)
    active = cap > 0

    length = tl.where(fixed_length > 0, fixed_length, length)
    fallback = tl.where(fixed_length > 0, STATIC, fallback)
    length = tl.where(forced > 0, forced, length)
    fallback = tl.where(forced > 0, FORCED, fallback)
    length = tl.where(length > 1, length, 1)
    length = tl.where(length < cap, length, cap)
    length = tl.where(active, length, 0)
    fallback = tl.where(active, fallback, 0)

    ahead = length + lookahead
    ahead = tl.where(ahead < cap, ahead, cap)
    looks = (length > 1) & (length < cap) & (fallback == 0)
    tl.store(p_selected + o_request, length, mask=present)
    tl.store(p_lengths + o_request, length, mask=present)
    tl.store(p_fallback + o_request, fallback, mask=present)
    tl.store(p_router_rows + o_request, tl.where(looks, ahead, length), mask=present)


def finish_lengths(
    selected_B: torch.Tensor,
    fallback_B: torch.Tensor,
    caps_B: torch.Tensor,
    forced_B: torch.Tensor,
    *,
    lookahead: int,
    out: tuple[torch.Tensor, torch.Tensor],
    fixed_length: int = 0,
) -> None:
    """Apply forced lengths and say how many rows run up to the first router.

    Args:
        selected_B, fallback_B: int32 [B] as select wrote them; rewritten, so that a correction
            keeps what was forced.
        caps_B: int32 [B], longest length allowed; 0 or less: inactive, its length becomes 0.
        forced_B: int32 [B], exact length up to the cap, 0: none.
        lookahead: rows beyond the length that run up to the first router where a correction may
            still move it: not for lengths of 1, at the cap, or that the policy did not choose.
        out: int32 [B] lengths and int32 [B] rows up to the first router.
        fixed_length: 1..16 where select did not run and every request takes this one.

    Raises:
        UsageError: shapes, dtypes or numbers that do not fit.
    """
    num_requests = selected_B.shape[0]
    columns = {"selected": selected_B, "fallback": fallback_B, "caps": caps_B, "forced": forced_B}
    columns |= {"lengths": out[0], "router rows": out[1]}
    for name, column in columns.items():
        require_column(name, column, num_requests, (torch.int32,))
    if not 0 <= fixed_length <= BLOCK_SIZE or lookahead < 0:
        raise UsageError(
            f"fixed length {fixed_length} with lookahead {lookahead}; expected 0..{BLOCK_SIZE} and "
            "at least 0"
        )
    if num_requests == 0:
        return
    finish_kernel[(1,)](
        selected_B,
        fallback_B,
        caps_B,
        forced_B,
        out[0],
        out[1],
        num_requests,
        lookahead,
        fixed_length,
        BLOCK_REQUESTS=max(32, triton.next_power_of_2(num_requests)),
        num_warps=1,
    )


def compile_cases() -> list[CompileCase]:
    """Shipped configurations: up to 32 and up to 256 requests."""
    names = "p_selected p_fallback p_caps p_forced p_lengths p_router_rows"
    numbers = "num_requests lookahead fixed_length"
    cases = []
    for block in (32, 256):
        kinds = dict.fromkeys(names.split(), "*i32") | dict.fromkeys(numbers.split(), "i32")
        constexprs = {"BLOCK_REQUESTS": block}
        kinds |= dict.fromkeys(constexprs, "constexpr")
        cases.append(CompileCase(f"finish-{block}", finish_kernel, kinds, constexprs, num_warps=1))
    return cases
