"""Whether kernels run in Triton's interpreter on the host, and the dot product that works there."""

from __future__ import annotations

import os

import triton
import triton.language as tl

# Of fp32 operands: three products of 11-bit halves.
EXACT = tl.constexpr("tf32x3")
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET", "0") == "1")


@triton.jit
def dot(x, y, acc, PRECISION: tl.constexpr = EXACT):
    """`acc + x @ y` with fp32 accumulation.

    Triton 3.6's interpreter multiplies the raw bits of bf16 operands, so they are widened there;
    their products are exact in both forms.
    """
    if INTERPRETED:
        return tl.dot(x.to(tl.float32), y.to(tl.float32), acc)
    else:
        return tl.dot(x, y, acc, input_precision=PRECISION)


@triton.jit
def computed_here(x):
    """`x` (bf16, an even number a thread, or fp32), opaque to the compiler from here on.

    Two uses. The compiler moves pure arithmetic to its first use; in front of a wait for the
    previous kernel that takes it from where it is free to where it is waited for. And it picks the
    layout of a dot operand by the width that the operand was loaded with, however far back.
    """
    if INTERPRETED:
        return x
    elif x.dtype == tl.float32:
        return tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=False, pack=1
        )
    else:
        return tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [x], dtype=tl.bfloat16, is_pure=False, pack=2
        )
