"""Committed state of all GDN layers and requests from compact factors, in one launch."""

# What Triton's compiler takes and makes is not in its annotations.
# pyright: reportGeneralTypeIssues=false, reportCallIssue=false
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from hybridspec.errors import UsageError
from hybridspec.kernels.compilation import CompileCase
from hybridspec.kernels.conv_window.commit import commit_window
from hybridspec.kernels.gdn.factors import BLOCK_ROWS, Factors
from hybridspec.kernels.gdn.fold import fold

BLOCK_CHANNELS = 256


# Scalars of a request: any alignment will do, and a view of a few ids must not compile anew.
@triton.jit(do_not_specialize_on_alignment=["p_slots", "p_accepted"])
def commit_kernel(
    p_state,
    p_slots,
    p_accepted,
    p_rows,
    p_key,
    p_update,
    p_decay,
    p_windows,
    p_raw,
    S_STATE_X: tl.constexpr,
    S_STATE_SLOT: tl.constexpr,
    S_KEY_X: tl.constexpr,
    S_UPDATE_X: tl.constexpr,
    S_DECAY_X: tl.constexpr,
    S_WINDOWS_X: tl.constexpr,
    S_WINDOWS_SLOT: tl.constexpr,
    S_WINDOWS_CHANNEL: tl.constexpr,
    S_WINDOWS_COLUMN: tl.constexpr,
    S_RAW_X: tl.constexpr,
    S_RAW_B: tl.constexpr,
    S_RAW_T: tl.constexpr,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK_CHANNELS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One [BV, K] tile of a state, or one block of conv channels; grid (tiles, B, layers)."""
    i_tile = tl.program_id(0)
    i_b = tl.program_id(1).to(tl.int64)
    i_x = tl.program_id(2).to(tl.int64)
    slot = tl.load(p_slots + i_b).to(tl.int64)
    TILES: tl.constexpr = V // BV * HV
    if i_tile < TILES:
        i_v = i_tile % (V // BV)
        i_hv = i_tile // (V // BV)
        i_h = i_hv // (HV // H)
        o_v = i_v * BV + tl.arange(0, BV)
        o_k = tl.arange(0, K)
        p_s = p_state + i_x * S_STATE_X + tl.maximum(slot, 0) * S_STATE_SLOT + i_hv * V * K
        p_s = p_s + o_v[:, None] * K + o_k[None, :]
        # With dependent launch the state is on its way before the last verification has ended:
        # verification only reads states.
        b_state = tl.load(p_s, mask=(slot >= 0) & (o_v[:, None] >= 0), other=0.0)
        if DEPENDENT:
            tl.extra.cuda.gdc_wait()
        count = tl.load(p_accepted + i_b).to(tl.int32)
        if (slot >= 0) & (count > 0):
            i_r = tl.load(p_rows + i_b).to(tl.int64) if p_rows is not None else i_b
            folded = fold(
                b_state.to(tl.float32),
                p_key + i_x * S_KEY_X + (i_r * H + i_h) * (16 * K),
                p_update + i_x * S_UPDATE_X + (i_r * HV + i_hv) * (16 * V),
                p_decay + i_x * S_DECAY_X + (i_r * HV + i_hv) * 16,
                o_v,
                o_k,
                tl.minimum(count, 16),
                V,
                K,
            )
            tl.store(p_s, folded.to(p_state.dtype.element_ty))
    else:
        if DEPENDENT:
            tl.extra.cuda.gdc_wait()
        o_c = (i_tile - TILES) * BLOCK_CHANNELS + tl.arange(0, BLOCK_CHANNELS)
        count = tl.load(p_accepted + i_b).to(tl.int32)
        if slot >= 0:
            commit_window(
                p_windows + i_x * S_WINDOWS_X + slot * S_WINDOWS_SLOT,
                p_raw + i_x * S_RAW_X + i_b * S_RAW_B,
                tl.minimum(count, 16),
                o_c,
                o_c < CHANNELS,
                S_RAW_T,
                S_WINDOWS_CHANNEL,
                S_WINDOWS_COLUMN,
            )


@dataclass(frozen=True)
class ConvWindows:
    """Conv windows that advance in the same launch as the states.

    Attributes:
        pool_XSCW: windows of all layers, bf16 or fp32 [X, slots, C, 3], updated in place.
        raw_XRTC: rows of the round as they went into the conv, [X, batch, T, C].
    """

    pool_XSCW: torch.Tensor
    raw_XRTC: torch.Tensor


def commit(
    state_XSHVK: torch.Tensor,
    slots_B: torch.Tensor,
    accepted_B: torch.Tensor,
    factors: Factors,
    *,
    windows: ConvWindows | None = None,
    factor_rows_B: torch.Tensor | None = None,
    value_block: int = 16,
    warps: int = 2,
    dependent_launch: bool = False,
) -> None:
    """Advance states (and conv windows) of all layers by each request's accepted rows, in place.

    One launch, whatever the number of layers and requests.

    Args:
        state_XSHVK: state pools of all layers, fp32 or bf16 [X, slots, HV, V, K].
        slots_B: int32 pool slot of each request, -1 is padding.
        accepted_B: int32 rows to commit, on the device; 0 leaves everything bit-identical.
        factors: of the last verification.
        windows: conv windows to advance as well.
        factor_rows_B: int32 row of `factors` that holds each request; default its place in the
            batch.
        dependent_launch: states are read before the previous kernel has finished; right where that
            kernel only reads states, as `verify` does.

    Raises:
        UsageError: shapes, dtypes or strides that do not fit.
    """
    layers, _, value_heads, value_dim, key_dim = state_XSHVK.shape
    batch = slots_B.shape[0]
    tile = (value_dim * key_dim, key_dim, 1)
    _require(
        layers == factors.layers and state_XSHVK.stride()[2:] == tile,
        f"state pool of {layers} layers with strides {state_XSHVK.stride()}; the factors are of "
        f"{factors.layers} layers, and [HV, V, K] must be contiguous",
    )
    _require(
        state_XSHVK.dtype in (torch.float32, torch.bfloat16),
        f"state pool is {state_XSHVK.dtype}; expected float32 or bfloat16",
    )
    _, held_rows, key_heads, _, held_key_dim = factors.key_XRHTK.shape
    _, _, held_heads, _, held_value_dim = factors.update_XRHTV.shape
    _require(
        (held_heads, held_value_dim, held_key_dim) == (value_heads, value_dim, key_dim)
        and value_heads % key_heads == 0
        and (held_rows >= batch or factor_rows_B is not None),
        f"factors hold {held_rows} rows of {held_heads} heads of [{held_value_dim}, "
        f"{held_key_dim}]; the states of {batch} requests have {value_heads} heads of "
        f"[{value_dim}, {key_dim}]: pass the factors that verified them",
    )
    _require(
        value_dim % value_block == 0,
        f"value block of {value_block} rows does not divide V = {value_dim}: use 16 or 32",
    )
    for name, tensor in (
        ("slots", slots_B),
        ("accepted", accepted_B),
        ("factor rows", slots_B if factor_rows_B is None else factor_rows_B),
    ):
        _require(
            tensor.dtype == torch.int32 and tensor.shape == (batch,) and tensor.is_contiguous(),
            f"{name} is {tensor.dtype} {tuple(tensor.shape)}; expected contiguous int32 ({batch},)",
        )
    tiles, channels = value_dim // value_block * value_heads, 0
    pool, raw, strides = state_XSHVK, state_XSHVK, (0,) * 7
    if windows is not None:
        pool, raw = windows.pool_XSCW, windows.raw_XRTC
        channels = pool.shape[2]
        _require(
            pool.shape[0] == raw.shape[0] == layers
            and pool.shape[3] == 3
            and raw.shape[1] >= batch
            and raw.shape[3] == channels
            and raw.stride(3) == 1,
            f"conv windows {tuple(pool.shape)} and rows {tuple(raw.shape)}; expected "
            f"[{layers}, slots, C, 3] and [{layers}, >= {batch}, T, C] with adjacent channels",
        )
        strides = (*pool.stride(), *raw.stride()[:3])
    launch = {"launch_pdl": True} if dependent_launch else {}
    commit_kernel[(tiles + triton.cdiv(channels, BLOCK_CHANNELS), batch, layers)](
        state_XSHVK,
        slots_B,
        accepted_B,
        factor_rows_B,
        factors.key_XRHTK,
        factors.update_XRHTV,
        factors.decay_XRHT,
        pool,
        raw,
        *state_XSHVK.stride()[:2],
        factors.key_XRHTK.stride(0),
        factors.update_XRHTV.stride(0),
        factors.decay_XRHT.stride(0),
        *strides,
        H=factors.key_XRHTK.shape[2],
        HV=value_heads,
        K=key_dim,
        V=value_dim,
        BV=value_block,
        CHANNELS=channels,
        BLOCK_CHANNELS=BLOCK_CHANNELS,
        DEPENDENT=dependent_launch,
        num_warps=warps,
        **launch,
    )


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise UsageError(message)


def compile_cases() -> list[CompileCase]:
    """The shipped tile at the shape of Qwen3.6-35B-A3B, with conv windows, 30 layers."""
    H, HV, K, V = 16, 32, 128, 128
    channels, slots, rows = 2 * H * K + HV * V, 8, 16
    kinds = {
        **dict.fromkeys(("p_key", "p_windows", "p_raw"), "*bf16"),
        **dict.fromkeys(("p_update", "p_decay"), "*fp32"),
        **dict.fromkeys(("p_slots", "p_accepted"), "*i32"),
    }
    cases = []
    for state in ("fp32", "bf16"):
        for dependent in (False, True):
            kinds["p_state"] = f"*{state}"
            constexprs = {
                "p_rows": None,
                "S_STATE_X": slots * HV * V * K,
                "S_STATE_SLOT": HV * V * K,
                "S_KEY_X": H * BLOCK_ROWS * K,
                "S_UPDATE_X": HV * BLOCK_ROWS * V,
                "S_DECAY_X": HV * BLOCK_ROWS,
                "S_WINDOWS_X": slots * channels * 3,
                "S_WINDOWS_SLOT": channels * 3,
                "S_WINDOWS_CHANNEL": 3,
                "S_WINDOWS_COLUMN": 1,
                "S_RAW_X": rows * channels,
                "S_RAW_B": rows * channels,
                "S_RAW_T": channels,
                "H": H,
                "HV": HV,
                "K": K,
                "V": V,
                "BV": 16,
                "CHANNELS": channels,
                "BLOCK_CHANNELS": BLOCK_CHANNELS,
                "DEPENDENT": dependent,
            }
            cases.append(
                CompileCase(
                    name=f"gdn_commit {state}" + (" dependent" if dependent else ""),
                    kernel=commit_kernel,
                    signature={
                        name: kinds.get(name, "constexpr") for name in commit_kernel.arg_names
                    },
                    constexprs=constexprs,
                    num_warps=2,
                    dependent_launch=dependent,
                    architectures=(90,) if dependent else (80,),
                )
            )
    return cases
