"""Sequential GDN verification: the recurrence in registers, factors stored instead of states."""

# Triton's decorators and constexprs are outside what pyright can follow.
# pyright: reportGeneralTypeIssues=false, reportCallIssue=false
# pyright: reportAttributeAccessIssue=false, reportAssignmentType=false, reportOperatorIssue=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from hybridspec.errors import UsageError
from hybridspec.kernels.compilation import CompileCase
from hybridspec.kernels.gdn.arithmetic import NORM_EPSILON, log_decay
from hybridspec.kernels.gdn.block import Release, default_release
from hybridspec.kernels.gdn.factors import BLOCK_ROWS, Factors
from hybridspec.kernels.gdn.inputs import Shape, check_inputs, check_parameters
from hybridspec.kernels.interpreter import computed_here

# Values of K that a lane holds side by side: 16 bytes of the bf16 rows.
LANE_WIDTH = 8
# Rows that are loaded at once and computed without a branch between them; longer blocks loop.
STRAIGHT_ROWS = 4
LOOP_ROWS = 2


@triton.jit
def _sum_keys(x):
    """Sum over the three key dimensions of [KL, BL, KO, KV]: registers first, then lanes."""
    in_lane = tl.sum(tl.sum(x, axis=3, keep_dims=True), axis=2, keep_dims=True)
    return tl.sum(in_lane, axis=0, keep_dims=True)


@triton.jit
def _load_rows(
    p_q,
    p_k,
    p_v,
    first,
    S_MIXED_T: tl.constexpr,
    T: tl.constexpr,
    C: tl.constexpr,
    R: tl.constexpr,
    BL: tl.constexpr,
):
    """Rows `first` to `first + C` of the block as tuples (q, k, values of each tile)."""
    rows = ()
    for c in tl.static_range(C):
        t = tl.minimum(first + c, T - 1)
        values = ()
        for r in tl.static_range(R):
            values += (tl.load(p_v + t * S_MIXED_T + r * BL),)
        rows += ((tl.load(p_q + t * S_MIXED_T), tl.load(p_k + t * S_MIXED_T), values),)
    return rows


# Scalars of a request: any alignment will do, and a view of a few ids must not compile anew.
@triton.jit(do_not_specialize_on_alignment=["p_slots", "p_lengths"])
def verify_sequential_kernel(
    p_mixed,
    p_a,
    p_b,
    p_A_log,
    p_dt_bias,
    p_state,
    p_slots,
    p_lengths,
    p_key,
    p_update,
    p_decay,
    p_out,
    S_MIXED_B: tl.constexpr,
    S_MIXED_T: tl.constexpr,
    S_A_B: tl.constexpr,
    S_A_T: tl.constexpr,
    S_B_B: tl.constexpr,
    S_B_T: tl.constexpr,
    S_STATE_SLOT: tl.constexpr,
    S_STATE_H: tl.constexpr,
    S_KEY_B: tl.constexpr,
    S_KEY_H: tl.constexpr,
    S_UPDATE_B: tl.constexpr,
    S_UPDATE_H: tl.constexpr,
    S_DECAY_B: tl.constexpr,
    S_DECAY_H: tl.constexpr,
    S_OUT_B: tl.constexpr,
    S_OUT_T: tl.constexpr,
    S_OUT_H: tl.constexpr,
    SCALE: tl.constexpr,
    T: tl.constexpr,
    TP: tl.constexpr,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BL: tl.constexpr,
    R: tl.constexpr,
    KL: tl.constexpr,
    KV: tl.constexpr,
    C: tl.constexpr,
    IN_PLACE: tl.constexpr,
    DEPENDENT: tl.constexpr,
    RELEASE: tl.constexpr,
):
    """One request, value head and R tiles of rows of V; grid (V / (R BL), HV, B)."""
    if RELEASE == "start":
        tl.extra.cuda.gdc_launch_dependents()
    i_v = tl.program_id(0)
    i_hv = tl.program_id(1)
    i_b = tl.program_id(2).to(tl.int64)
    i_h = i_hv // (HV // H)
    # A tile is [BL, K] with K as [KL, KO, KV]: KL lanes hold KO runs of KV neighbours each, and the
    # BL rows of a tile share nothing but the row of the block. Four dimensions, because the
    # compiler hands lanes out in this order: KV, KL, BL. A program holds R tiles.
    KO: tl.constexpr = K // (KL * KV)
    i_kl = tl.arange(0, KL)[:, None, None, None]
    i_ko = tl.arange(0, KO)[None, None, :, None]
    o_k = (i_ko * KL + i_kl) * KV + tl.arange(0, KV)[None, None, None, :]
    # Backwards: it must not look like a run of neighbours that is worth other lanes.
    i_bl = (tl.arange(0, BL) ^ (BL - 1))[None, :, None, None]
    o_v = i_v * (R * BL) + i_bl
    o_t = tl.arange(0, TP)

    slot = tl.load(p_slots + i_b).to(tl.int64)
    p_s = p_state + tl.maximum(slot, 0) * S_STATE_SLOT + i_hv * S_STATE_H
    states = ()
    for r in tl.static_range(R):
        states += (computed_here(tl.load(p_s + (o_v * K + o_k) + r * BL * K).to(tl.float32)),)
    A_log = tl.load(p_A_log + i_hv).to(tl.float32)
    dt_bias = tl.load(p_dt_bias + i_hv).to(tl.float32)

    o_row = tl.broadcast_to(o_k, [KL, BL, KO, KV])
    p_row = p_mixed + i_b * S_MIXED_B
    p_q = p_row + i_h * K + o_row
    p_k = p_row + (H + i_h) * K + o_row
    p_v = p_row + 2 * H * K + i_hv * V + o_v
    p_aT = p_a + i_b * S_A_B + i_hv + o_t * S_A_T
    p_bT = p_b + i_b * S_B_B + i_hv + o_t * S_B_T
    one_lane = tl.broadcast_to(i_kl == 0, [KL, BL, 1, 1])
    o_store = tl.broadcast_to(o_v, [KL, BL, 1, 1])
    p_o = p_out + i_b * S_OUT_B + i_hv * S_OUT_H + o_store
    p_u = p_update + i_b * S_UPDATE_B + i_hv * S_UPDATE_H + o_store
    p_g = p_decay + i_b * S_DECAY_B + i_hv * S_DECAY_H
    p_f = p_key + i_b * S_KEY_B + i_h * S_KEY_H + o_row
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
    # Rows past the length are loaded too: a mask that waits for the length would put one memory
    # latency behind another. What they hold, NaN included, reaches only rows past the length.
    a_T = tl.load(p_aT, mask=o_t < T, other=0.0)
    b_T = tl.load(p_bT, mask=o_t < T, other=0.0)
    loaded = _load_rows(p_q, p_k, p_v, 0, S_MIXED_T, T, C, R, BL)
    rows = tl.where(slot >= 0, tl.minimum(tl.load(p_lengths + i_b), T), 0)

    # To save registers the assembler moves loads behind the first arithmetic, which puts one memory
    # latency behind another. It moves no load across a barrier and no arithmetic across a branch.
    tl.debug_barrier()
    if RELEASE == "inputs":
        tl.extra.cuda.gdc_launch_dependents()
    if rows > 0:
        # The gates of all rows at once, a row a lane.
        g_T = log_decay(a_T, A_log, dt_bias)
        gate_T = tl.exp(g_T)
        beta_T = 1.0 / (1.0 + tl.exp(-b_T.to(tl.float32)))
        if not IN_PLACE:
            tl.store(p_g + o_t, g_T, mask=(o_t < rows) & (i_v == 0))
        for first in range(0, rows if C < T else T, C):
            following = loaded
            if C < T:
                following = _load_rows(p_q, p_k, p_v, first + C, S_MIXED_T, T, C, R, BL)
            for c in tl.static_range(C):
                t = first + c
                live = t < rows
                q, k, values = loaded[c]
                gate = tl.sum(tl.where(o_t == t, gate_T, 0.0))
                beta = tl.sum(tl.where(o_t == t, beta_T, 0.0))
                b_q = q.to(tl.float32)
                b_k = k.to(tl.float32)
                rk = tl.rsqrt(_sum_keys(b_k * b_k) + NORM_EPSILON)
                rq = SCALE * tl.rsqrt(_sum_keys(b_q * b_q) + NORM_EPSILON)
                from_update = rq * _sum_keys(b_q * b_k)
                advanced = ()
                for r in tl.static_range(R):
                    # Both products of the state before this row: one reduction in the chain.
                    read_k = _sum_keys(states[r] * b_k)
                    read_q = _sum_keys(states[r] * b_q)
                    # Divided by the norm of the key, as it is stored.
                    update = beta * rk * (values[r].to(tl.float32) - gate * rk * read_k)
                    output = gate * rq * read_q + from_update * update
                    advanced += (states[r] * gate + update * b_k,)
                    output = tl.where(live, output, 0.0).to(p_out.dtype.element_ty)
                    tl.store(
                        p_o + t * S_OUT_T + r * BL,
                        tl.broadcast_to(output, [KL, BL, 1, 1]),
                        mask=one_lane & (t < T),
                    )
                    if not IN_PLACE:
                        tl.store(
                            p_u + t * V + r * BL,
                            tl.broadcast_to(update, [KL, BL, 1, 1]),
                            mask=one_lane & live,
                        )
                states = advanced
                if not IN_PLACE:
                    own = live & (i_v == 0) & (i_hv % (HV // H) == 0)
                    tl.store(p_f + t * K, k, mask=own & (i_bl == 0))
            loaded = following
        if IN_PLACE:
            W: tl.constexpr = 128 // p_state.dtype.element_ty.primitive_bitwidth
            i_w = tl.arange(0, KV // W)[None, None, None, :, None]
            o_home = (i_ko * KL + i_kl)[:, :, :, :, None] * KV + i_w * W
            o_home = o_home + tl.arange(0, W)[None, None, None, None, :]
            o_home = o_v[:, :, :, :, None] * K + o_home
            for r in tl.static_range(R):
                b_state = states[r].to(p_state.dtype.element_ty)
                # 16 bytes a store, from the lanes that hold them.
                tl.store(p_s + o_home + r * BL * K, tl.reshape(b_state, o_home.shape))
    dead = (rows + (C - 1)) // C * C
    for t in range(dead, T):
        zero = tl.zeros([KL, BL, 1, 1], p_out.dtype.element_ty)
        for r in tl.static_range(R):
            tl.store(p_o + t * S_OUT_T + r * BL, zero, mask=one_lane)


def launch(
    s: Shape,
    tensors: tuple[torch.Tensor, ...],
    factor_tensors: tuple[torch.Tensor, ...],
    out_BTHV: torch.Tensor,
    *,
    value_block: int,
    warps: int,
    key_lanes: int,
    dependent_launch: bool,
    release: Release | None,
    in_place: bool,
) -> None:
    """Launch on checked tensors: the eight inputs in order, then keys, updates, decays, outputs."""
    rows_a_tile = 32 // key_lanes * warps if key_lanes in (4, 8, 16) else 0
    if not rows_a_tile or value_block % rows_a_tile or s.value_dim % value_block:
        raise UsageError(
            f"value block of {value_block} rows on {warps} warps with {key_lanes} lanes along K; "
            f"lanes are 4, 8 or 16, and the block a multiple of {rows_a_tile or '32 / lanes'} "
            f"that divides V = {s.value_dim}"
        )
    if key_lanes * LANE_WIDTH > s.key_dim:
        raise UsageError(
            f"{key_lanes} lanes along K hold {key_lanes * LANE_WIDTH} values, keys have "
            f"{s.key_dim}: use fewer lanes"
        )
    mixed_BTC, a_BTH, b_BTH, A_log_H, dt_bias_H, state_SHVK, _, _ = tensors
    check_parameters(A_log_H, dt_bias_H, s, value_block)
    key, update, decay = factor_tensors
    options: dict[str, Any] = {"launch_pdl": True} if dependent_launch else {}
    verify_sequential_kernel[(s.value_dim // value_block, s.value_heads, s.batch)](
        *tensors,
        key,
        update,
        decay,
        out_BTHV,
        *mixed_BTC.stride()[:2],
        *a_BTH.stride()[:2],
        *b_BTH.stride()[:2],
        *state_SHVK.stride()[:2],
        *key.stride()[:2],
        *update.stride()[:2],
        *decay.stride()[:2],
        *out_BTHV.stride()[:3],
        SCALE=s.key_dim**-0.5,
        T=s.rows,
        TP=triton.next_power_of_2(s.rows),
        H=s.key_heads,
        HV=s.value_heads,
        K=s.key_dim,
        V=s.value_dim,
        BL=rows_a_tile,
        R=value_block // rows_a_tile,
        KL=key_lanes,
        KV=LANE_WIDTH,
        C=s.rows if s.rows <= STRAIGHT_ROWS else LOOP_ROWS,
        IN_PLACE=in_place,
        DEPENDENT=dependent_launch,
        RELEASE=(release or default_release(s.rows)) if dependent_launch else None,
        num_warps=warps,
        **options,
    )


def verify_sequential(
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
    value_block: int = 8,
    warps: int = 1,
    key_lanes: int = 8,
    dependent_launch: bool = False,
    release: Release | None = None,
) -> None:
    """Outputs and factors of every request's rows of one layer, row after row. One launch.

    The recurrence of `naive` on a state in registers; costs what the live rows cost, in steps of
    two for blocks of more than four.

    Args:
        mixed_BTC: bf16 [B, T <= 16, 2 H K + HV V], queries, keys, values behind the conv.
        a_BTH, b_BTH: gate and write-strength inputs [B, T, HV].
        A_log_H, dt_bias_H: gate parameters [HV].
        state_SHVK: state pool of this layer, fp32 or bf16, read only.
        slots_B: int32 pool slot of each request; -1 is padding: zero output, nothing else.
        lengths_B: int32 rows to verify, on the device; rows past it come out as zeros.
        factors: row `b` of `layer` is overwritten for the live rows of request `b`.
        out_BTHV: output [B, T, HV, V], bf16 or fp32.
        value_block: rows of V a program holds, a multiple of `32 / key_lanes * warps`.
        warps: of a program; they share nothing.
        key_lanes: lanes of a warp along K: 4, 8 or 16.
        dependent_launch: programmatic dependent launch: the state is read before the previous
            kernel of the stream has finished. Only where that kernel, and those it overlaps with,
            do not write this layer's state: not right behind `commit`.
        release: when the kernel behind may start to run ahead, as of `verify_block`.

    Raises:
        UsageError: shapes, dtypes or strides that do not fit.
    """
    s = check_inputs(
        mixed_BTC, a_BTH, b_BTH, state_SHVK, slots_B, lengths_B, factors, out_BTHV, key_heads
    )
    launch(
        s,
        (mixed_BTC, a_BTH, b_BTH, A_log_H, dt_bias_H, state_SHVK, slots_B, lengths_B),
        (factors.key_XRHTK[layer], factors.update_XRHTV[layer], factors.decay_XRHT[layer]),
        out_BTHV,
        value_block=value_block,
        warps=warps,
        key_lanes=key_lanes,
        dependent_launch=dependent_launch,
        release=release,
        in_place=False,
    )


def compile_cases() -> list[CompileCase]:
    """Qwen3.6-35B-A3B, one request: every shipped tile at rows that differ in code."""
    H, HV, K, V = 16, 32, 128, 128
    width = 2 * H * K + HV * V
    cases = []
    for rows, value_block, warps, state in (
        (1, 4, 1, "fp32"),
        (1, 8, 1, "bf16"),
        (2, 8, 1, "fp32"),
        (3, 8, 1, "fp32"),
        (4, 8, 1, "fp32"),
        (4, 16, 1, "fp32"),
        (16, 8, 1, "fp32"),
        (16, 16, 2, "bf16"),
        (16, 16, 1, "fp32"),
    ):
        for architecture in (80, 90):
            tile = 4 * warps
            strides = {
                "S_MIXED_B": rows * width,
                "S_MIXED_T": width,
                "S_A_B": rows * 2 * HV,
                "S_A_T": 2 * HV,
                "S_B_B": rows * 2 * HV,
                "S_B_T": 2 * HV,
                "S_STATE_SLOT": HV * V * K,
                "S_STATE_H": V * K,
                "S_KEY_B": H * BLOCK_ROWS * K,
                "S_KEY_H": BLOCK_ROWS * K,
                "S_UPDATE_B": HV * BLOCK_ROWS * V,
                "S_UPDATE_H": BLOCK_ROWS * V,
                "S_DECAY_B": HV * BLOCK_ROWS,
                "S_DECAY_H": BLOCK_ROWS,
                "S_OUT_B": rows * HV * V,
                "S_OUT_T": HV * V,
                "S_OUT_H": V,
            }
            dependent = architecture >= 90
            constexprs = {
                **strides,
                "SCALE": K**-0.5,
                "T": rows,
                "TP": triton.next_power_of_2(rows),
                "H": H,
                "HV": HV,
                "K": K,
                "V": V,
                "BL": tile,
                "R": value_block // tile,
                "KL": 8,
                "KV": LANE_WIDTH,
                "C": rows if rows <= STRAIGHT_ROWS else LOOP_ROWS,
                "IN_PLACE": rows == 1 and value_block == 4,
                "DEPENDENT": dependent,
                "RELEASE": default_release(rows) if dependent else None,
            }
            pointers = {
                "p_mixed": "*bf16",
                "p_a": "*bf16",
                "p_b": "*bf16",
                "p_A_log": "*fp32",
                "p_dt_bias": "*fp32",
                "p_state": f"*{state}",
                "p_slots": "*i32",
                "p_lengths": "*i32",
                "p_key": "*bf16",
                "p_update": "*fp32",
                "p_decay": "*fp32",
                "p_out": "*bf16",
            }
            cases.append(
                CompileCase(
                    f"sequential T={rows} block={value_block} warps={warps} {state}",
                    verify_sequential_kernel,
                    {**pointers, **dict.fromkeys(constexprs, "constexpr")},
                    constexprs,
                    num_warps=warps,
                    dependent_launch=dependent,
                    architectures=(architecture,),
                )
            )
    return cases
