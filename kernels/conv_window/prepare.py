"""All that the GDN block verify needs from the raw projections, in one launch a layer.

Conv and silu, split into heads, log decay and write strength of each value head, inverse L2 norms
of queries and keys. A program owns a few rows of one whole head, so that a norm is a sum within
one warp and nothing passes between programs.
"""

# ruff: noqa: RUF005
# Triton does not compile starred tuples, and its types are what its compiler makes of them.
# pyright: reportGeneralTypeIssues=false, reportCallIssue=false
# pyright: reportAttributeAccessIssue=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybridspec.kernels.compilation import CompileCase
from hybridspec.kernels.conv_window.naive import NORM_EPSILON, SOFTPLUS_THRESHOLD, Prepared
from hybridspec.kernels.conv_window.shapes import (
    check_indices,
    check_like,
    check_pool,
    check_rows,
    check_weight,
    require,
)
from hybridspec.kernels.conv_window.taps import convolve, load_taps, load_weights, narrow

ROWS_PER_PROGRAM = 4


@triton.jit
def store_rows(
    p_out, b_rows, first_row, STRIDE_ROW: tl.constexpr, NUM_ROWS: tl.constexpr, ROWS: tl.constexpr
):
    """Write a tuple of rows of one head from `first_row` on, as many as there are."""
    for t in tl.static_range(ROWS):
        row = first_row + t
        tl.store(p_out + row * STRIDE_ROW, b_rows[t], mask=row < NUM_ROWS)


# Scalars of a request: any alignment will do, and a view of a few ids must not compile anew.
@triton.jit(do_not_specialize_on_alignment=["p_slots", "p_lengths"])
def _prepare_kernel(
    p_rows,
    p_pool,
    p_weight,
    p_bias,
    p_slots,
    p_lengths,
    p_a,
    p_b,
    p_a_log,
    p_dt_bias,
    p_q,
    p_k,
    p_v,
    p_g,
    p_beta,
    p_rq,
    p_rk,
    p_raw,
    stride_rows_batch,
    stride_rows_row,
    stride_pool_slot,
    stride_a_batch,
    stride_a_row,
    stride_b_batch,
    stride_b_row,
    stride_raw_batch,
    stride_raw_row,
    NUM_ROWS: tl.constexpr,
    NUM_KEY_HEADS: tl.constexpr,
    NUM_VALUE_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    STRIDE_POOL_CHANNEL: tl.constexpr,
    STRIDE_POOL_COLUMN: tl.constexpr,
    STRIDE_WEIGHT_CHANNEL: tl.constexpr,
    STRIDE_WEIGHT_TAP: tl.constexpr,
    EPSILON: tl.constexpr,
    THRESHOLD: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    KEEP_RAW: tl.constexpr,
    ROWS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    i_head, i_group, i_b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    o_d = tl.arange(0, HEAD_DIM)
    o_c = i_head * HEAD_DIM + o_d
    mask_c = o_d < HEAD_DIM
    first_row = i_group * ROWS
    o_t = first_row + tl.arange(0, ROWS)
    is_value = i_head >= 2 * NUM_KEY_HEADS
    i_value = tl.maximum(i_head - 2 * NUM_KEY_HEADS, 0)

    # Parameters are never written on the stream, so they may be read before the launch ahead ends.
    b_weights = load_weights(p_weight, o_c, mask_c, STRIDE_WEIGHT_CHANNEL, STRIDE_WEIGHT_TAP)
    if HAS_BIAS:
        b_bias = tl.load(p_bias + o_c).to(tl.float32)
    else:
        b_bias = tl.zeros([HEAD_DIM], dtype=tl.float32)
    a_log = tl.load(p_a_log + i_value).to(tl.float32)
    dt_bias = tl.load(p_dt_bias + i_value).to(tl.float32)
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()

    slot = tl.load(p_slots + i_b).to(tl.int64)
    length = tl.load(p_lengths + i_b)
    mask_gate = is_value & (o_t < NUM_ROWS)
    b_a = tl.load(
        p_a + i_b * stride_a_batch + o_t * stride_a_row + i_value, mask=mask_gate, other=0.0
    ).to(tl.float32)
    b_b = tl.load(
        p_b + i_b * stride_b_batch + o_t * stride_b_row + i_value, mask=mask_gate, other=0.0
    ).to(tl.float32)
    has_window = slot >= 0
    # Rows are read whatever the length is: waiting for it first would cost a trip to memory, and
    # what lies past it reaches no output.
    b_taps = load_taps(
        p_rows + i_b * stride_rows_batch + o_c,
        p_pool + slot * stride_pool_slot + o_c * STRIDE_POOL_CHANNEL,
        first_row,
        mask_c,
        has_window,
        stride_rows_row,
        STRIDE_POOL_COLUMN,
        NUM_ROWS,
        ROWS,
    )

    b_outs = ()
    for t in tl.static_range(ROWS):
        live = has_window & (first_row + t < length)
        b_out = tl.where(live, convolve(b_taps, b_weights, b_bias, t), 0.0)
        b_outs = b_outs + (narrow(b_out, p_q.dtype.element_ty),)
        if KEEP_RAW:
            tl.store(
                p_raw + i_b * stride_raw_batch + (first_row + t) * stride_raw_row + o_c,
                tl.where(live, b_taps[t + 3], tl.zeros_like(b_taps[t + 3])),
                mask=mask_c & (has_window & (first_row + t < NUM_ROWS)),
            )
    if is_value:
        p_out = p_v + (i_b * NUM_ROWS * NUM_VALUE_HEADS + i_value) * HEAD_DIM + o_d
        store_rows(p_out, b_outs, first_row, NUM_VALUE_HEADS * HEAD_DIM, NUM_ROWS, ROWS)
        b_live = has_window & (o_t < length)
        b_x = b_a + dt_bias
        b_softplus = tl.where(b_x <= THRESHOLD, tl.log(1.0 + tl.exp(b_x)), b_x)
        b_g = tl.where(b_live, -tl.exp(a_log) * b_softplus, 0.0)
        b_beta = tl.where(b_live, 1.0 / (1.0 + tl.exp(-b_b)), 0.0)
        o_gate = (i_b * NUM_VALUE_HEADS + i_value) * NUM_ROWS + o_t
        tl.store(p_g + o_gate, b_g, mask=mask_gate)
        tl.store(p_beta + o_gate, b_beta, mask=mask_gate)
    else:
        is_query = i_head < NUM_KEY_HEADS
        i_key = tl.where(is_query, i_head, i_head - NUM_KEY_HEADS)
        o_head = (i_b * NUM_ROWS * NUM_KEY_HEADS + i_key) * HEAD_DIM
        o_norm = (i_b * NUM_KEY_HEADS + i_key) * NUM_ROWS
        if is_query:
            store_rows(
                p_q + o_head + o_d, b_outs, first_row, NUM_KEY_HEADS * HEAD_DIM, NUM_ROWS, ROWS
            )
            p_norm = p_rq + o_norm
        else:
            store_rows(
                p_k + o_head + o_d, b_outs, first_row, NUM_KEY_HEADS * HEAD_DIM, NUM_ROWS, ROWS
            )
            p_norm = p_rk + o_norm
        b_squares = ()
        for t in tl.static_range(ROWS):
            # Of the rounded values: those are what the consumer multiplies.
            b_wide = b_outs[t].to(tl.float32)
            b_squares = b_squares + (tl.sum(b_wide * b_wide),)
        for t in tl.static_range(ROWS):
            row = first_row + t
            norm = 1.0 / tl.sqrt(b_squares[t] + EPSILON)
            live = has_window & (row < length)
            tl.store(p_norm + row, tl.where(live, norm, 0.0), mask=row < NUM_ROWS)


def allocate(
    batch: int,
    num_rows: int,
    num_key_heads: int,
    num_value_heads: int,
    head_dim: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> Prepared:
    """Outputs of `prepare`, not initialised."""
    wide = {"dtype": torch.float32, "device": device}
    heads = (num_key_heads, num_key_heads, num_value_heads)
    return Prepared(
        *(torch.empty(batch, num_rows, h, head_dim, dtype=dtype, device=device) for h in heads),
        *(torch.empty(batch, num_value_heads, num_rows, **wide) for _ in range(2)),
        *(torch.empty(batch, num_key_heads, num_rows, **wide) for _ in range(2)),
    )


def prepare(
    rows_BTC: Tensor,
    pool_SCW: Tensor,
    weight_CW: Tensor,
    slots_B: Tensor,
    lengths_B: Tensor,
    a_BTH: Tensor,
    b_BTH: Tensor,
    a_log_H: Tensor,
    dt_bias_H: Tensor,
    *,
    num_key_heads: int,
    head_dim: int,
    bias_C: Tensor | None = None,
    out: Prepared | None = None,
    raw_out: Tensor | None = None,
    dependent_launch: bool = False,
) -> Prepared:
    """Conv, silu, split, gates and inverse norms of a block of rows. One launch.

    Args:
        rows_BTC: rows before the conv [B, T <= 16, C = (2 H + HV) D], bf16 or fp32: queries, keys
            and values of the H key heads and HV value heads behind one another; any batch and row
            stride.
        pool_SCW: conv windows [slots, C, 3], bf16 or fp32 and no narrower than the rows, any
            strides; only read.
        weight_CW: [C, 4] in the dtype of the rows, any strides.
        slots_B: int32 or int64 slot of each request; negative is padding, whose outputs are zeros.
        lengths_B: int32 or int64 rows of each request that count, 0..T, read on the device.
        a_BTH: decay projection [B, T, HV], any float dtype, any batch and row stride.
        b_BTH: write strength projection, likewise.
        a_log_H: log of the decay rates [HV], any float dtype.
        dt_bias_H: [HV], any float dtype.
        num_key_heads: H.
        head_dim: D of keys and of values, a power of two from 16 to 256.
        bias_C: [C] or none.
        out: where to write; allocated where it is not given.
        raw_out: [B, T, C] in the dtype of the rows: a copy of the rows that count, zeros past
            them, for `commit`. Requests that are padding leave it as it is.
        dependent_launch: start before the launch ahead on the stream ends (Hopper and later).

    Returns:
        `Prepared`, zeros past each length, whatever the inputs hold there.

    Raises:
        UsageError: a shape, dtype or stride that is not handled.
    """
    check_rows("rows", rows_BTC, dimensions=3)
    batch, num_rows, channels = rows_BTC.shape
    require(
        16 <= head_dim <= 256 and head_dim & (head_dim - 1) == 0,
        f"head dimension {head_dim}: a power of two from 16 to 256 is handled; call `verify` and "
        "split its output",
    )
    num_value_heads = channels // head_dim - 2 * num_key_heads
    require(
        num_key_heads > 0 and num_value_heads > 0 and channels % head_dim == 0,
        f"{channels} channels do not hold {num_key_heads} query, {num_key_heads} key and some "
        f"value heads of {head_dim}; pass the counts of this rank",
    )
    check_weight(weight_CW, bias_C, rows_BTC)
    check_pool(pool_SCW, rows_BTC, dimensions=3)
    check_indices("slots", slots_B, batch)
    check_indices("lengths", lengths_B, batch)
    for name, gate in (("a", a_BTH), ("b", b_BTH)):
        require(
            tuple(gate.shape) == (batch, num_rows, num_value_heads) and gate.stride(-1) == 1,
            f"{name} has shape {list(gate.shape)} and strides {list(gate.stride())}: "
            f"{[batch, num_rows, num_value_heads]} with adjacent heads is needed; view it so",
        )
    for name, parameter in (("A_log", a_log_H), ("dt_bias", dt_bias_H)):
        require(
            parameter.shape == (num_value_heads,) and parameter.is_contiguous(),
            f"{name} has shape {list(parameter.shape)}: [{num_value_heads}], contiguous, is "
            "needed; pass that of this layer and rank",
        )
    sizes = (batch, num_rows, num_key_heads, num_value_heads, head_dim)
    if out is None:
        out = allocate(*sizes, dtype=rows_BTC.dtype, device=rows_BTC.device)
    for name, value in out._asdict().items():
        heads = num_value_heads if name in ("v_BTHD", "g_BHT", "beta_BHT") else num_key_heads
        if name.endswith("_BTHD"):
            check_like(name, value, (batch, num_rows, heads, head_dim), rows_BTC.dtype)
        else:
            check_like(name, value, (batch, heads, num_rows), torch.float32)
        require(value.is_contiguous(), f"{name} is not contiguous; allocate it with `allocate`")
    if raw_out is not None:
        check_like("raw_out", raw_out, (batch, num_rows, channels), rows_BTC.dtype)
    raw = rows_BTC if raw_out is None else raw_out
    if batch == 0:
        return out
    _prepare_kernel[
        (2 * num_key_heads + num_value_heads, triton.cdiv(num_rows, ROWS_PER_PROGRAM), batch)
    ](
        rows_BTC,
        pool_SCW,
        weight_CW,
        weight_CW if bias_C is None else bias_C,
        slots_B,
        lengths_B,
        a_BTH,
        b_BTH,
        a_log_H,
        dt_bias_H,
        *out,
        raw,
        rows_BTC.stride(0),
        rows_BTC.stride(1),
        pool_SCW.stride(0),
        a_BTH.stride(0),
        a_BTH.stride(1),
        b_BTH.stride(0),
        b_BTH.stride(1),
        raw.stride(0),
        raw.stride(1),
        NUM_ROWS=num_rows,
        NUM_KEY_HEADS=num_key_heads,
        NUM_VALUE_HEADS=num_value_heads,
        HEAD_DIM=head_dim,
        STRIDE_POOL_CHANNEL=pool_SCW.stride(1),
        STRIDE_POOL_COLUMN=pool_SCW.stride(2),
        STRIDE_WEIGHT_CHANNEL=weight_CW.stride(0),
        STRIDE_WEIGHT_TAP=weight_CW.stride(1),
        EPSILON=NORM_EPSILON,
        THRESHOLD=SOFTPLUS_THRESHOLD,
        HAS_BIAS=bias_C is not None,
        KEEP_RAW=raw_out is not None,
        ROWS=ROWS_PER_PROGRAM,
        DEPENDENT=dependent_launch,
        num_warps=1,
        **({"launch_pdl": True} if dependent_launch else {}),
    )
    return out


def compile_cases() -> list[CompileCase]:
    """Shipped configurations: block sizes, head dimensions, with and without dependent launch."""
    outputs = {"p_q": "*bf16", "p_k": "*bf16", "p_v": "*bf16"}
    outputs |= {f"p_{name}": "*fp32" for name in ("g", "beta", "rq", "rk", "a_log", "dt_bias")}
    inputs = {f"p_{name}": "*bf16" for name in ("rows", "pool", "weight", "bias", "a", "b", "raw")}
    indices = {"p_slots": "*i32", "p_lengths": "*i32"}
    strides = {
        name: "i64" if name == "stride_pool_slot" else "i32"
        for name in _prepare_kernel.arg_names
        if name.startswith("stride_")
    }
    kinds = {**outputs, **inputs, **indices, **strides}
    cases = []
    for num_rows, head_dim in ((4, 128), (8, 128), (16, 128), (16, 64)):
        for dependent in (False, True):
            constexprs = {
                "NUM_ROWS": num_rows,
                "NUM_KEY_HEADS": 16,
                "NUM_VALUE_HEADS": 32,
                "HEAD_DIM": head_dim,
                "STRIDE_POOL_CHANNEL": 3,
                "STRIDE_POOL_COLUMN": 1,
                "STRIDE_WEIGHT_CHANNEL": 4,
                "STRIDE_WEIGHT_TAP": 1,
                "EPSILON": NORM_EPSILON,
                "THRESHOLD": SOFTPLUS_THRESHOLD,
                "HAS_BIAS": dependent,
                "KEEP_RAW": True,
                "ROWS": ROWS_PER_PROGRAM,
                "DEPENDENT": dependent,
            }
            cases.append(
                CompileCase(
                    name=f"conv_prepare T={num_rows} D={head_dim}"
                    + (" dependent" if dependent else ""),
                    kernel=_prepare_kernel,
                    signature={
                        name: kinds.get(name, "constexpr") for name in _prepare_kernel.arg_names
                    },
                    constexprs=constexprs,
                    divisible_by_16=frozenset(strides),
                    num_warps=1,
                    dependent_launch=dependent,
                    architectures=(90,) if dependent else (80, 90),
                )
            )
    return cases
