"""Whether kernels run in Triton's interpreter on the host, and the dot product that works there."""

from __future__ import annotations

import os

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET", "0") == "1")


@triton.jit
def dot(x, y, acc, PRECISION: tl.constexpr = "tf32x3"):
    """`acc + x @ y` with fp32 accumulation.

    Triton 3.6's interpreter multiplies the raw bits of bf16 operands, so they are widened there;
    their products are exact in both forms.
    """
    if INTERPRETED:
        return tl.dot(x.to(tl.float32), y.to(tl.float32), acc)
    else:
        return tl.dot(x, y, acc, input_precision=PRECISION)
