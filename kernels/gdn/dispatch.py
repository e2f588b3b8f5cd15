"""GDN verification in the form and tile that were measured fastest."""

from __future__ import annotations

from functools import cache

import torch

from hybridspec.errors import UsageError
from hybridspec.kernels.gdn.block import Release, verify_block
from hybridspec.kernels.gdn.factors import Factors
from hybridspec.kernels.gdn.pending import Pending
from hybridspec.kernels.gdn.sequential import LANE_WIDTH, verify_sequential
from hybridspec.kernels.gdn.table import Choice, choice_for

FIRST_WITH_DEPENDENT_LAUNCH = 90
# Of verifies that fold pending rows first; the fastest of `gdn_kernels_lazy.json` on an H200.
LAZY_SHORT_ROWS = 8
LAZY_SHORT = Choice("block", 16, 1, 8, measured=True)
LAZY_LONG = Choice("block", 32, 2, 8, measured=True)


@cache
def architecture_of(device: torch.device) -> int:
    """Compute capability of a device, 90 for an H200; 0 on the host, where the interpreter runs."""
    if device.type != "cuda":
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def choice_of(mixed_BTC: torch.Tensor, state_SHVK: torch.Tensor) -> Choice:
    """What `verify` launches for these inputs; its `measured` says whether a figure backs it."""
    batch, rows = mixed_BTC.shape[:2]
    dtype = str(state_SHVK.dtype).removeprefix("torch.")
    return choice_for(rows, batch, dtype, architecture_of(state_SHVK.device))


def verify(
    mixed_BTC: torch.Tensor,
    a_BTH: torch.Tensor,
    b_BTH: torch.Tensor,
    A_log_H: torch.Tensor,
    dt_bias_H: torch.Tensor,
    state_SHVK: torch.Tensor,
    slots_B: torch.Tensor,
    lengths_B: torch.Tensor,
    factors: Factors,
    layer: int,
    out_BTHV: torch.Tensor,
    *,
    key_heads: int,
    pending: Pending | None = None,
    dependent_launch: bool = False,
    release: Release | None = None,
    choice: Choice | None = None,
) -> None:
    """Outputs and factors of every request's rows of one layer. One launch.

    Picked by what the host knows, so that a captured graph stays as it is: T, batch, state dtype
    and architecture. Both forms write the same factors, equal to rounding.

    Args:
        mixed_BTC: bf16 [B, T <= 16, 2 H K + HV V], queries, keys, values behind the conv.
        a_BTH, b_BTH: gate and write-strength inputs [B, T, HV].
        A_log_H, dt_bias_H: gate parameters [HV].
        state_SHVK: state pool of this layer, fp32 or bf16, read only (without `pending`).
        slots_B: int32 pool slot of each request; -1 is padding: zero output, nothing else.
        lengths_B: int32 rows to verify, on the device; rows past it come out as zeros.
        factors: row `b` of `layer` is overwritten for the live rows of request `b`.
        out_BTHV: output [B, T, HV, V], bf16 or fp32.
        pending: accepted rows that the states do not hold yet, as of `verify_block`: only the block
            form folds them.
        dependent_launch: programmatic dependent launch, as of `verify_block`; sm_90 and later.
        release: when the kernel behind may start to run ahead, as of `verify_block`.
        choice: instead of the table's; with `pending` of the block form.

    Raises:
        UsageError: shapes, dtypes or strides that do not fit; dependent launch where there is none.
    """
    architecture = architecture_of(state_SHVK.device)
    if dependent_launch and architecture < FIRST_WITH_DEPENDENT_LAUNCH:
        raise UsageError(
            f"dependent launch on compute capability {architecture}; it needs "
            f"{FIRST_WITH_DEPENDENT_LAUNCH} or later: leave it off"
        )
    pinned = choice is not None
    choice = choice or choice_of(mixed_BTC, state_SHVK)
    if pending is not None and choice.form != "block" and pinned:
        raise UsageError(
            f"choice of the {choice.form} form with rows pending; only the block form folds them: "
            "leave the choice to the table, or commit first"
        )
    if pending is not None and not pinned:
        choice = LAZY_SHORT if mixed_BTC.shape[1] <= LAZY_SHORT_ROWS else LAZY_LONG
    inputs = (mixed_BTC, a_BTH, b_BTH, A_log_H, dt_bias_H, state_SHVK, slots_B, lengths_B)
    if choice.form == "block":
        verify_block(
            *inputs,
            factors,
            layer,
            out_BTHV,
            key_heads=key_heads,
            pending=pending,
            value_block=choice.value_block,
            warps=choice.warps,
            dependent_launch=dependent_launch,
            release=release,
        )
    else:
        verify_sequential(
            *inputs,
            factors,
            layer,
            out_BTHV,
            key_heads=key_heads,
            value_block=choice.value_block,
            warps=choice.warps,
            # The table is of K = 128; shorter keys have fewer lanes' worth of values.
            key_lanes=min(choice.key_lanes, state_SHVK.shape[-1] // LANE_WIDTH),
            dependent_launch=dependent_launch,
            release=release,
        )
