"""Plain decoding of a Gated DeltaNet layer: one row verified and committed in one launch."""

from __future__ import annotations

from functools import lru_cache

import torch

from hybridspec.errors import UsageError
from hybridspec.kernels.gdn.block import Release
from hybridspec.kernels.gdn.factors import Factors
from hybridspec.kernels.gdn.inputs import check_inputs
from hybridspec.kernels.gdn.sequential import launch


@lru_cache(maxsize=64)
def _no_factors(batch: int, key_heads: int, value_heads: int, K: int, V: int) -> Factors:
    """Factors without memory, for the checks of a call that writes none."""
    return Factors.allocate(1, batch, key_heads, value_heads, K, V, device="meta")


def decode_step(
    mixed_BTC: torch.Tensor,
    a_BTH: torch.Tensor,
    b_BTH: torch.Tensor,
    A_log_H: torch.Tensor,
    dt_bias_H: torch.Tensor,
    state_SHVK: torch.Tensor,
    slots_B: torch.Tensor,
    lengths_B: torch.Tensor,
    out_BTHV: torch.Tensor,
    *,
    key_heads: int,
    value_block: int = 8,
    warps: int = 1,
    key_lanes: int = 8,
    dependent_launch: bool = False,
    release: Release | None = None,
) -> None:
    """One row a request, verified and committed in one launch: decoding without drafts.

    Right only where the row is accepted whatever it holds, which is true of a row that no draft
    wrote. Arguments as of `verify_sequential` with T = 1, but the state is updated in place where
    `lengths_B` is 1 and stays bit-identical where it is 0; there are no factors, so nothing may be
    committed afterwards.

    Raises:
        UsageError: more than one row; shapes, dtypes or strides that do not fit.
    """
    if mixed_BTC.shape[1] != 1:
        raise UsageError(
            f"decode step of {mixed_BTC.shape[1]} rows; it commits what it reads, so it takes one: "
            "verify and commit longer blocks"
        )
    batch, (_, value_heads, value_dim, key_dim) = mixed_BTC.shape[0], state_SHVK.shape
    s = check_inputs(
        mixed_BTC,
        a_BTH,
        b_BTH,
        state_SHVK,
        slots_B,
        lengths_B,
        _no_factors(batch, key_heads, value_heads, key_dim, value_dim),
        out_BTHV,
        key_heads,
    )
    launch(
        s,
        (mixed_BTC, a_BTH, b_BTH, A_log_H, dt_bias_H, state_SHVK, slots_B, lengths_B),
        (out_BTHV, out_BTHV, out_BTHV),
        out_BTHV,
        value_block=value_block,
        warps=warps,
        key_lanes=key_lanes,
        dependent_launch=dependent_launch,
        release=release,
        in_place=True,
    )
