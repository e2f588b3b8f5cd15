"""States for a prefix cache inside a block: at which row they end, and copies to start from.

A cache of prefixes keeps a request's state where its text passes a multiple of an interval. A round
knows the state before itself and what each of its rows adds, so a snapshot inside it is a copy of
the state before to the cache's slot, and there a commit of the rows up to the boundary.
"""

# What Triton's compiler takes and makes is not in its annotations.
# pyright: reportGeneralTypeIssues=false, reportCallIssue=false
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hybridspec.errors import UsageError
from hybridspec.kernels.compilation import CompileCase
from hybridspec.kernels.select.selection import require_column

# A program moves so many words; of a state of Qwen3.6 there are 128 such tiles a layer.
BLOCK_WORDS = 4096
BLOCK_REQUESTS = 32
# Bits are moved, whatever they mean.
_WORDS = {4: torch.int32, 2: torch.int16}
_INTEGERS = (torch.int32, torch.int64)


@triton.jit(do_not_specialize=["num_requests", "interval"])
def plan_kernel(
    p_before,
    p_rows,
    p_slots,
    p_track_slots,
    p_snapshot_rows,
    p_snapshot_slots,
    num_requests,
    interval,
    BLOCK: tl.constexpr,
):
    """Some requests a program; see `plan` for the arguments."""
    o_b = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    present = o_b < num_requests
    before = tl.load(p_before + o_b, mask=present, other=0).to(tl.int64)
    rows = tl.load(p_rows + o_b, mask=present, other=0).to(tl.int64)
    slot = tl.load(p_slots + o_b, mask=present, other=-1)
    track_slot = tl.load(p_track_slots + o_b, mask=present, other=-1)
    boundary = (before + rows) // interval * interval
    passed = (rows > 0) & (boundary > before) & (slot >= 0) & (track_slot >= 0)
    snapshot_rows = tl.where(passed, boundary - before, 0)
    snapshot_slots = tl.where(passed, track_slot.to(tl.int64), -1)
    tl.store(p_snapshot_rows + o_b, snapshot_rows.to(tl.int32), mask=present)
    tl.store(p_snapshot_slots + o_b, snapshot_slots.to(tl.int32), mask=present)


def plan(
    before_B: torch.Tensor,
    commit_rows_B: torch.Tensor,
    state_slots_B: torch.Tensor,
    track_slots_B: torch.Tensor,
    interval: int,
    *,
    out: tuple[torch.Tensor, torch.Tensor],
) -> None:
    """Which requests pass a multiple of `interval` with the rows they keep, and behind which row.

    A round may pass one multiple at most, so the interval must be at least its rows.

    Args:
        before_B: int32 or int64, tokens in the caches before the round.
        commit_rows_B: int32, rows that are kept; 0 or less passes nothing.
        state_slots_B: int32, slots of the requests; -1 passes nothing.
        track_slots_B: int32 or int64, slots that the snapshots are for; -1: there is none.
        interval: in tokens.
        out: int32 rows up to the boundary, 0 for none, and int32 slots of the snapshots, -1 for
            none.

    Raises:
        UsageError: shapes, dtypes or numbers that do not fit.
    """
    num_requests = before_B.shape[0]
    for name, column, kinds in (
        ("tokens before", before_B, _INTEGERS),
        ("commit rows", commit_rows_B, (torch.int32,)),
        ("state slots", state_slots_B, (torch.int32,)),
        ("track slots", track_slots_B, _INTEGERS),
        ("snapshot rows", out[0], (torch.int32,)),
        ("snapshot slots", out[1], (torch.int32,)),
    ):
        require_column(name, column, num_requests, kinds)
    if interval < 1:
        raise UsageError(f"an interval of {interval} tokens: pass a positive number")
    if num_requests == 0:
        return
    plan_kernel[(triton.cdiv(num_requests, BLOCK_REQUESTS),)](
        before_B,
        commit_rows_B,
        state_slots_B,
        track_slots_B,
        *out,
        num_requests,
        interval,
        BLOCK=BLOCK_REQUESTS,
        num_warps=1,
    )


# Scalars of a request: any alignment will do, and a view of a few ids must not compile anew.
@triton.jit(do_not_specialize_on_alignment=["p_from", "p_to"])
def copy_kernel(
    p_state,
    p_windows,
    p_from,
    p_to,
    S_STATE_X: tl.constexpr,
    S_STATE_SLOT: tl.constexpr,
    S_WINDOWS_X: tl.constexpr,
    S_WINDOWS_SLOT: tl.constexpr,
    STATE_WORDS: tl.constexpr,
    WINDOW_WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A tile of a state or of a window; grid (tiles, B, layers)."""
    i_tile = tl.program_id(0)
    i_b = tl.program_id(1).to(tl.int64)
    i_x = tl.program_id(2).to(tl.int64)
    source = tl.load(p_from + i_b).to(tl.int64)
    target = tl.load(p_to + i_b).to(tl.int64)
    TILES: tl.constexpr = (STATE_WORDS + BLOCK - 1) // BLOCK
    if (source >= 0) & (target >= 0):
        # What two branches set under one name must be of one type.
        if i_tile < TILES:
            o_state = i_tile * BLOCK + tl.arange(0, BLOCK)
            m_state = o_state < STATE_WORDS
            p_s = p_state + i_x * S_STATE_X + o_state
            b_state = tl.load(p_s + source * S_STATE_SLOT, mask=m_state)
            tl.store(p_s + target * S_STATE_SLOT, b_state, mask=m_state)
        else:
            o_window = (i_tile - TILES) * BLOCK + tl.arange(0, BLOCK)
            m_window = o_window < WINDOW_WORDS
            p_w = p_windows + i_x * S_WINDOWS_X + o_window
            b_window = tl.load(p_w + source * S_WINDOWS_SLOT, mask=m_window)
            tl.store(p_w + target * S_WINDOWS_SLOT, b_window, mask=m_window)


def copy_slots(
    state_XSHVK: torch.Tensor,
    windows_XSCW: torch.Tensor,
    from_B: torch.Tensor,
    to_B: torch.Tensor,
) -> None:
    """Copy state and conv window of all layers from slot to slot, bit by bit. One launch.

    Args:
        state_XSHVK: state pools of all layers, each state contiguous.
        windows_XSCW: conv windows of all layers, each window contiguous.
        from_B: int32 slots to read; -1 copies nothing.
        to_B: int32 slots to write, all different and none of them read; -1 copies nothing.

    Raises:
        UsageError: shapes, dtypes or strides that do not fit.
    """
    layers, slots = state_XSHVK.shape[:2]
    for name, pool in (("states", state_XSHVK), ("conv windows", windows_XSCW)):
        if (
            pool.shape[:2] != (layers, slots)
            or pool.element_size() not in _WORDS
            or not pool[0, 0].is_contiguous()
        ):
            raise UsageError(
                f"{name} are {pool.dtype} {tuple(pool.shape)} with strides {pool.stride()}; "
                f"expected 2 or 4 bytes an element, [{layers}, {slots}, ...], contiguous in a slot"
            )
    num_requests = from_B.shape[0]
    require_column("slots to read", from_B, num_requests, (torch.int32,))
    require_column("slots to write", to_B, num_requests, (torch.int32,))
    if num_requests == 0:
        return
    state_words, window_words = state_XSHVK[0, 0].numel(), windows_XSCW[0, 0].numel()
    tiles = triton.cdiv(state_words, BLOCK_WORDS) + triton.cdiv(window_words, BLOCK_WORDS)
    copy_kernel[(tiles, num_requests, layers)](
        state_XSHVK.view(_WORDS[state_XSHVK.element_size()]),
        windows_XSCW.view(_WORDS[windows_XSCW.element_size()]),
        from_B,
        to_B,
        *state_XSHVK.stride()[:2],
        *windows_XSCW.stride()[:2],
        STATE_WORDS=state_words,
        WINDOW_WORDS=window_words,
        BLOCK=BLOCK_WORDS,
        num_warps=4,
    )


def compile_cases() -> list[CompileCase]:
    """The shape of Qwen3.6-35B-A3B with states of 4 and of 2 bytes, and both widths of columns."""
    heads, dim, channels, slots = 32, 128, 8192, 64
    cases = []
    for state in ("i32", "i16"):
        kinds = {"p_state": f"*{state}", "p_windows": "*i16", "p_from": "*i32", "p_to": "*i32"}
        constexprs = {
            "S_STATE_X": slots * heads * dim * dim,
            "S_STATE_SLOT": heads * dim * dim,
            "S_WINDOWS_X": slots * channels * 3,
            "S_WINDOWS_SLOT": channels * 3,
            "STATE_WORDS": heads * dim * dim,
            "WINDOW_WORDS": channels * 3,
            "BLOCK": BLOCK_WORDS,
        }
        kinds |= dict.fromkeys(constexprs, "constexpr")
        cases.append(CompileCase(f"snapshot_copy {state}", copy_kernel, kinds, constexprs))
    for column in ("i32", "i64"):
        kinds = {
            "p_before": f"*{column}",
            "p_rows": "*i32",
            "p_slots": "*i32",
            "p_track_slots": f"*{column}",
            "p_snapshot_rows": "*i32",
            "p_snapshot_slots": "*i32",
            "num_requests": "i32",
            "interval": "i32",
            "BLOCK": "constexpr",
        }
        cases.append(
            CompileCase(
                f"snapshot_plan {column}", plan_kernel, kinds, {"BLOCK": BLOCK_REQUESTS},
                num_warps=1,
            )
        )  # fmt: skip
    return cases
