"""Block-parallel GDN verification: all rows of a block at once against a state that stays."""

# What Triton's compiler takes and makes is not in its annotations.
# pyright: reportGeneralTypeIssues=false, reportCallIssue=false
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import itertools
from typing import Literal

import torch
import triton
import triton.language as tl

from hybridspec.kernels.compilation import CompileCase
from hybridspec.kernels.gdn.arithmetic import (
    NORM_EPSILON,
    dot_split,
    log_decay,
    solve,
    split,
)
from hybridspec.kernels.gdn.factors import BLOCK_ROWS, Factors
from hybridspec.kernels.gdn.fold import fold
from hybridspec.kernels.gdn.inputs import check_inputs, check_parameters
from hybridspec.kernels.gdn.pending import Pending
from hybridspec.kernels.interpreter import computed_here, dot

Release = Literal["start", "inputs"]


def default_release(rows: int, *, lazy: bool = False) -> Release:
    """When a kernel lets the one behind it start (README).

    A kernel that folds first has so much to do ahead of its inputs that it wants every start.
    """
    return "start" if lazy or rows <= 8 else "inputs"


# Scalars of a request: any alignment will do, and a view of a few ids must not compile anew.
@triton.jit(do_not_specialize_on_alignment=["p_slots", "p_lengths", "p_pending", "p_side"])
def verify_block_kernel(
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
    p_pending,
    p_side,
    scale,
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
    T: tl.constexpr,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    PARTS: tl.constexpr,
    DEPENDENT: tl.constexpr,
    RELEASE: tl.constexpr,
    LAZY: tl.constexpr,
):
    """One request, value head and BV rows of V; grid (V / BV, HV, B)."""
    i_v = tl.program_id(0)
    i_hv = tl.program_id(1)
    i_b = tl.program_id(2).to(tl.int64)
    i_h = i_hv // (HV // H)
    o_v = i_v * BV + tl.arange(0, BV)
    o_k = tl.arange(0, K)
    o_t = tl.arange(0, 16)

    slot = tl.load(p_slots + i_b).to(tl.int64)
    if RELEASE == "start":
        tl.extra.cuda.gdc_launch_dependents()
    # The state first: no kernel of this forward pass writes it, so its way from memory, and its
    # split into halves, hide behind the tail of the previous kernel.
    p_s = p_state + tl.maximum(slot, 0) * S_STATE_SLOT + i_hv * S_STATE_H
    p_s = p_s + o_v[:, None] * K + o_k[None, :]
    b_state = tl.load(p_s)
    i_r = i_b
    if LAZY:
        # Two factor rows a request: one holds what is pending, the other takes this round's.
        side = tl.load(p_side + i_b)
        pending = tl.load(p_pending + i_b)
        i_r = 2 * i_b + side
        if (slot >= 0) & (pending > 0):
            folded = fold(
                b_state.to(tl.float32),
                p_key + i_r * S_KEY_B + i_h * S_KEY_H,
                p_update + i_r * S_UPDATE_B + i_hv * S_UPDATE_H,
                p_decay + i_r * S_DECAY_B + i_hv * S_DECAY_H,
                o_v,
                o_k,
                tl.minimum(pending, 16),
                V,
                K,
            )
            b_state = folded.to(p_state.dtype.element_ty)
            tl.store(p_s, b_state)
        i_r = 2 * i_b + 1 - side
    if PARTS == 3:
        s_high, s_middle, s_low = split(b_state)
        s_high = computed_here(s_high)
        s_middle = computed_here(s_middle)
        s_low = computed_here(s_low)
    else:
        s_high = b_state
    A_log = tl.load(p_A_log + i_hv).to(tl.float32)
    dt_bias = tl.load(p_dt_bias + i_hv).to(tl.float32)
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
    rows = tl.where(slot >= 0, tl.minimum(tl.load(p_lengths + i_b), T), 0)

    # Rows past the length are read too: a mask that waits for the length would put one memory
    # latency behind another. What they hold, NaN included, reaches only rows and columns past the
    # length of the matrices below, which are masked there.
    m_T = o_t < T
    p_row = p_mixed + i_b * S_MIXED_B + o_t[:, None] * S_MIXED_T + o_k[None, :]
    p_v = p_mixed + i_b * S_MIXED_B + 2 * H * K + i_hv * V
    b_k = tl.load(p_row + (H + i_h) * K, mask=m_T[:, None], other=0.0)
    b_q = tl.load(p_row + i_h * K, mask=m_T[:, None], other=0.0)
    b_vt = tl.load(p_v + o_t[None, :] * S_MIXED_T + o_v[:, None], mask=m_T[None, :], other=0.0)
    b_a = tl.load(p_a + i_b * S_A_B + o_t * S_A_T + i_hv, mask=m_T, other=0.0)
    b_b = tl.load(p_b + i_b * S_B_B + o_t * S_B_T + i_hv, mask=m_T, other=0.0)
    m_t = o_t < rows

    g = tl.where(m_t, log_decay(b_a, A_log, dt_bias), 0.0)
    beta = computed_here(tl.where(m_t, 1.0 / (1.0 + tl.exp(-b_b.to(tl.float32))), 0.0))

    zero_tt = tl.zeros([16, 16], tl.float32)
    zero_vt = tl.zeros([BV, 16], tl.float32)
    b_kT = tl.trans(b_k)
    b_qT = tl.trans(b_q)
    kk = dot(b_k, b_kT, zero_tt)
    qk = dot(b_q, b_kT, zero_tt)
    qq = dot(b_q, b_qT, zero_tt)
    if RELEASE == "inputs":
        tl.extra.cuda.gdc_launch_dependents()
    read_kt = dot(s_high, b_kT, zero_vt)
    read_qt = dot(s_high, b_qT, zero_vt)
    if PARTS == 3:
        read_kt += dot(s_middle, b_kT, dot(s_low, b_kT, zero_vt))
        read_qt += dot(s_middle, b_qT, dot(s_low, b_qT, zero_vt))

    # Sums of g over segments (j, i] as differences of fp64 running sums: in fp32 a strong gate
    # would eat the digits of the gentle ones behind it.
    running = tl.cumsum(g.to(tl.float64), axis=0)
    row = o_t[:, None]
    column = o_t[None, :]
    segment = (running[:, None] - running[None, :]).to(tl.float32)
    from_state = tl.exp(running.to(tl.float32))
    eye = row == column
    rk_i = tl.rsqrt(tl.sum(tl.where(eye, kk, 0.0), axis=1) + NORM_EPSILON)
    rk_j = tl.rsqrt(tl.sum(tl.where(eye, kk, 0.0), axis=0) + NORM_EPSILON)
    rq_i = scale * tl.rsqrt(tl.sum(tl.where(eye, qq, 0.0), axis=1) + NORM_EPSILON)
    rq_j = scale * tl.rsqrt(tl.sum(tl.where(eye, qq, 0.0), axis=0) + NORM_EPSILON)
    below = (row > column) & m_t[:, None]
    above = (row < column) & m_t[None, :]
    keys = rk_i[:, None] * rk_j[None, :] * kk
    A = tl.where(below, beta[:, None] * tl.exp(segment) * keys, 0.0)
    At = tl.where(above, beta[None, :] * tl.exp(-segment) * keys, 0.0)
    P = tl.where(
        below | (eye & m_t[:, None]), rq_i[:, None] * rk_j[None, :] * tl.exp(segment) * qk, 0.0
    )

    right = computed_here(b_vt.to(tl.float32)) - (from_state * rk_j)[None, :] * read_kt
    right = tl.where(m_t[None, :], beta[None, :] * right, 0.0)
    from_query = tl.where(m_t[None, :], (from_state * rq_j)[None, :] * read_qt, 0.0)
    update = solve(right, A, At, T)
    output = dot_split(update, P, from_query)
    p_o = p_out + i_b * S_OUT_B + i_hv * S_OUT_H
    tl.store(
        p_o + o_t[None, :] * S_OUT_T + o_v[:, None],
        output.to(p_out.dtype.element_ty),
        mask=(o_t < T)[None, :],
    )
    tl.store(
        p_update + i_r * S_UPDATE_B + i_hv * S_UPDATE_H + o_t[None, :] * V + o_v[:, None],
        update * rk_j[None, :],
        mask=m_t[None, :],
    )
    if i_v == 0:
        tl.store(p_decay + i_r * S_DECAY_B + i_hv * S_DECAY_H + o_t, g, mask=m_t)
        if i_hv % (HV // H) == 0:
            tl.store(
                p_key + i_r * S_KEY_B + i_h * S_KEY_H + o_t[:, None] * K + o_k[None, :],
                b_k,
                mask=m_t[:, None],
            )


def verify_block(
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
    value_block: int = 16,
    warps: int = 1,
    dependent_launch: bool = False,
    release: Release | None = None,
) -> None:
    """Outputs and factors of every request's rows of one layer, all rows at once. One launch.

    Args:
        mixed_BTC: bf16 [B, T <= 16, 2 H K + HV V], queries, keys, values behind the conv.
        a_BTH, b_BTH: gate and write-strength inputs [B, T, HV].
        A_log_H, dt_bias_H: gate parameters [HV].
        state_SHVK: state pool of this layer, fp32 or bf16, read only (without `pending`).
        slots_B: int32 pool slot of each request; -1 is padding: zero output, nothing else.
        lengths_B: int32 rows to verify, on the device; rows past it come out as zeros.
        factors: row `b` of `layer` is overwritten for the live rows of request `b`.
        out_BTHV: output [B, T, HV, V], bf16 or fp32.
        pending: accepted rows of the last round that the states do not hold yet: they are folded
            in first (`lazy.Pending`), with two factor rows a request.
        value_block: rows of V a program holds; warps: of a program.
        dependent_launch: programmatic dependent launch: the state (and what is pending) is read
            before the previous kernel of the stream has finished. Only where that kernel, and
            those it overlaps with, do not write them: not right behind `commit` or `advance`.
        release: when the kernel behind may start to run ahead: at the `start`, or when the
            `inputs` are there, so that its reads of the state do not delay them. Default: the
            start up to 8 rows and with `pending`, else the inputs (README).

    Raises:
        UsageError: shapes, dtypes or strides that do not fit.
    """
    s = check_inputs(
        mixed_BTC, a_BTH, b_BTH, state_SHVK, slots_B, lengths_B, factors, out_BTHV, key_heads
    )
    check_parameters(A_log_H, dt_bias_H, s, value_block)
    if pending is not None:
        pending.check(s.batch, factors)
    key, update, decay = (
        factors.key_XRHTK[layer],
        factors.update_XRHTV[layer],
        factors.decay_XRHT[layer],
    )
    launch = {"launch_pdl": True} if dependent_launch else {}
    verify_block_kernel[(s.value_dim // value_block, s.value_heads, s.batch)](
        mixed_BTC,
        a_BTH,
        b_BTH,
        A_log_H,
        dt_bias_H,
        state_SHVK,
        slots_B,
        lengths_B,
        key,
        update,
        decay,
        out_BTHV,
        None if pending is None else pending.count_B,
        None if pending is None else pending.side_B,
        s.key_dim**-0.5,
        *mixed_BTC.stride()[:2],
        *a_BTH.stride()[:2],
        *b_BTH.stride()[:2],
        *state_SHVK.stride()[:2],
        *key.stride()[:2],
        *update.stride()[:2],
        *decay.stride()[:2],
        *out_BTHV.stride()[:3],
        T=s.rows,
        H=s.key_heads,
        HV=s.value_heads,
        K=s.key_dim,
        V=s.value_dim,
        BV=value_block,
        PARTS=1 if state_SHVK.dtype == torch.bfloat16 else 3,
        DEPENDENT=dependent_launch,
        RELEASE=(
            release or default_release(s.rows, lazy=pending is not None)
            if dependent_launch
            else None
        ),
        LAZY=pending is not None,
        num_warps=warps,
        **launch,
    )


def compile_cases() -> list[CompileCase]:
    """Shipped tiles at the shape of Qwen3.6-35B-A3B; dependent launch where there is one."""
    H, HV, K, V = 16, 32, 128, 128
    width = 2 * H * K + HV * V
    kinds = {
        **dict.fromkeys(("p_mixed", "p_a", "p_b", "p_key", "p_out"), "*bf16"),
        **dict.fromkeys(("p_A_log", "p_dt_bias", "p_update", "p_decay"), "*fp32"),
        **dict.fromkeys(("p_slots", "p_lengths"), "*i32"),
        "scale": "fp32",
    }
    cases = []
    for rows, (value_block, warps), state, dependent in itertools.product(
        (4, 8, 16), ((16, 1), (32, 2)), ("fp32", "bf16"), (False, True)
    ):
        kinds["p_state"] = f"*{state}"
        constexprs = {
            "p_pending": None,
            "p_side": None,
            "S_MIXED_B": rows * width,
            "S_MIXED_T": width,
            **dict.fromkeys(("S_A_B", "S_B_B"), rows * HV),
            **dict.fromkeys(("S_A_T", "S_B_T"), HV),
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
            "T": rows,
            "H": H,
            "HV": HV,
            "K": K,
            "V": V,
            "BV": value_block,
            "PARTS": 3 if state == "fp32" else 1,
            "DEPENDENT": dependent,
            "RELEASE": default_release(rows) if dependent else None,
            "LAZY": False,
        }
        name = f"gdn_block T={rows} BV={value_block} warps={warps} {state}"
        cases.append(
            CompileCase(
                name=name + (" dependent" if dependent else ""),
                kernel=verify_block_kernel,
                signature={
                    name: kinds.get(name, "constexpr") for name in verify_block_kernel.arg_names
                },
                constexprs=constexprs,
                num_warps=warps,
                dependent_launch=dependent,
                architectures=(90,) if dependent else (80,),
            )
        )
    return cases
