"""The gate's product for few rows, cut over the hidden size so that every multiprocessor reads.

Leaves partial sums; `router` adds them in one order and rounds to bf16 once.
"""

# Launch options and static ranges are not in triton's annotations.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hybridspec.errors import UsageError
from hybridspec.kernels.compilation import CompileCase
from hybridspec.kernels.interpreter import dot
from hybridspec.kernels.router.router import FIRST_WITH_DEPENDENT_LAUNCH, MAX_SPLITS, dependent_on

# Rows of one matrix instruction.
MAX_ROWS = 16
# A program of one warp takes so many experts and hidden elements: 128 programs for 256 experts of a
# hidden size of 2048.
BLOCK_N, BLOCK_K = 16, 256


@triton.jit(do_not_specialize=["num_rows"])
def gate_kernel(
    p_x,
    p_gate,
    p_out,
    num_rows,
    stride_split,
    stride_row,
    HIDDEN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One program a (BLOCK_N experts, BLOCK_K hidden elements). See `gate` for shapes."""
    i_split = tl.program_id(1)
    o_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    o_k = i_split * BLOCK_K + tl.arange(0, BLOCK_K)
    # Weights are older than any launch ahead.
    b_w = tl.load(p_gate + o_n[:, None] * HIDDEN + o_k[None, :])
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    o_row = tl.arange(0, ROWS)
    p_row = p_x + o_row[:, None] * HIDDEN + o_k[None, :]
    b_x = tl.load(p_row, mask=(o_row < num_rows)[:, None], other=0.0)
    acc = dot(b_x, tl.trans(b_w), tl.zeros([ROWS, BLOCK_N], tl.float32))
    p_to = p_out + i_split * stride_split + o_row[:, None] * stride_row + o_n[None, :]
    tl.store(p_to, acc, mask=(o_row < num_rows)[:, None])


def gate(
    x_RH: torch.Tensor,
    gate_EH: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    dependent: bool | None = None,
) -> torch.Tensor:
    """Partial sums of `x @ gate.T`, products exact and sums in fp32.

    One launch, safe to capture; equal inputs give equal bits. Rows do not touch one another.

    Args:
        x_RH: bf16 [1..16, H], contiguous like all arguments; H a multiple of 256, up to 4096.
        gate_EH: bf16 [E, H], E a multiple of 16. With `dependent`, not written by the launch ahead.
        out: fp32 [H / 256, at least R, E], allocated if None.
        dependent: begin while the launch ahead ends; None: on sm_90 and later.

    Returns:
        fp32 [H / 256, R, E], for `router`.

    Raises:
        UsageError: for shapes, dtypes or strides other than these.
    """
    if not takes(x_RH, gate_EH):
        raise UsageError(
            f"gate {gate_EH.dtype} {tuple(gate_EH.shape)} of {x_RH.dtype} {tuple(x_RH.shape)}; "
            f"pass contiguous bfloat16 of 1..{MAX_ROWS} rows, a multiple of {BLOCK_N} experts and "
            f"of {BLOCK_K} hidden elements, at most {MAX_SPLITS * BLOCK_K}"
        )
    (num_rows, hidden), num_experts = x_RH.shape, gate_EH.shape[0]
    if out is None:
        out = allocate_partials(gate_EH)
    splits = hidden // BLOCK_K
    fits = out.ndim == 3 and out.shape[0] == splits and out.shape[1] >= num_rows
    if not fits or out.shape[2] != num_experts or out.dtype != torch.float32:
        raise UsageError(
            f"partial sums are {out.dtype} {tuple(out.shape)}; pass float32 "
            f"[{splits}, {num_rows} or more, {num_experts}]"
        )
    if not out.is_contiguous():
        raise UsageError(f"partial sums have strides {out.stride()}; pass them contiguous")
    if dependent is None:
        dependent = dependent_on(x_RH.device)
    gate_kernel[(num_experts // BLOCK_N, splits)](
        x_RH,
        gate_EH,
        out,
        num_rows,
        out.stride(0),
        out.stride(1),
        HIDDEN=hidden,
        ROWS=MAX_ROWS,
        BLOCK_N=BLOCK_N,
        BLOCK_K=BLOCK_K,
        DEPENDENT=dependent,
        num_warps=1,
        **({"launch_pdl": True} if dependent else {}),
    )
    return out[:, :num_rows]


def takes(x_RH: torch.Tensor, gate_EH: torch.Tensor) -> bool:
    """Whether `gate` takes these."""
    if x_RH.ndim != 2 or gate_EH.ndim != 2 or x_RH.shape[1] != gate_EH.shape[1]:
        return False
    experts, hidden = gate_EH.shape
    return (
        1 <= x_RH.shape[0] <= MAX_ROWS
        and experts % BLOCK_N == 0
        and hidden % BLOCK_K == 0
        and 1 <= hidden // BLOCK_K <= MAX_SPLITS
        and all(
            tensor.dtype == torch.bfloat16 and tensor.is_contiguous() for tensor in (x_RH, gate_EH)
        )
    )


def allocate_partials(gate_EH: torch.Tensor) -> torch.Tensor:
    """Partial sums of 16 rows; one serves all layers of a stream."""
    experts, hidden = gate_EH.shape
    return torch.empty(
        hidden // BLOCK_K, MAX_ROWS, experts, dtype=torch.float32, device=gate_EH.device
    )


def compile_cases() -> list[CompileCase]:
    """256 experts of hidden size 2048."""
    cases = []
    for architecture in (80, 90):
        dependent = architecture >= FIRST_WITH_DEPENDENT_LAUNCH
        constexprs = {
            "HIDDEN": 2048,
            "ROWS": MAX_ROWS,
            "BLOCK_N": BLOCK_N,
            "BLOCK_K": BLOCK_K,
            "DEPENDENT": dependent,
        }
        kinds = {"p_x": "*bf16", "p_gate": "*bf16", "p_out": "*fp32"}
        kinds |= dict.fromkeys(("num_rows", "stride_split", "stride_row"), "i32")
        kinds |= dict.fromkeys(constexprs, "constexpr")
        cases.append(
            CompileCase(
                "gate-256-of-2048",
                gate_kernel,
                kinds,
                constexprs,
                divisible_by_16=frozenset({"stride_split", "stride_row"}),
                num_warps=1,
                dependent_launch=dependent,
                architectures=(architecture,),
            )
        )
    return cases
