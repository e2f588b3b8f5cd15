"""Device functions shared by the GDN kernels: exact splits, gates, the triangular solve."""

# What Triton's compiler takes and makes is not in its annotations.
# pyright: reportGeneralTypeIssues=false, reportCallIssue=false
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from hybridspec.kernels.interpreter import dot

SOFTPLUS_THRESHOLD = tl.constexpr(20.0)
NORM_EPSILON = tl.constexpr(1e-6)


@triton.jit
def log_decay(a, A_log, dt_bias):
    """`g = -exp(A_log) softplus(a + dt_bias)` in fp32, linear above a threshold of 20."""
    x = a.to(tl.float32) + dt_bias
    e = tl.exp(x)
    w = 1.0 + e
    # The second term is what the sum `w` lost: without it every gentle gate is off by up to 1e-6,
    # and states that forget nothing drift by that.
    softplus = tl.where(x <= SOFTPLUS_THRESHOLD, tl.log(w) + (e - (w - 1.0)) / w, x)
    return -tl.exp(A_log) * softplus


@triton.jit
def upper_half(x):
    """fp32 -> (bf16 by truncation, exact fp32 remainder).

    Truncation and not rounding: an integer mask costs less than a conversion, and the remainder of
    a truncated value is exact just the same. Three halves hold all 24 bits.
    """
    bits = x.to(tl.int32, bitcast=True)
    upper = (bits & -65536).to(tl.float32, bitcast=True)
    return (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True), x - upper


@triton.jit
def split(x):
    """fp32 -> three bf16 terms whose sum is `x`."""
    high, rest = upper_half(x)
    middle, rest = upper_half(rest)
    low, rest = upper_half(rest)
    return high, middle, low


@triton.jit
def tf32_halves(x):
    """fp32 -> (first 11 bits, exact remainder); the tensor core reads 11 bits of either."""
    high = (x.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
    return high, x - high


@triton.jit
def even_then_odd(x):
    """Columns of every 8 of `x` [N, 16] reordered to 0 2 4 6 1 3 5 7.

    Of an accumulator that is a renaming: the four threads of a row hold two neighbouring columns
    each, and as tf32 operand they must hold columns four apart. Products do not care about the
    order of the index they sum over, as long as both operands agree.
    """
    pairs = tl.reshape(x, [x.shape[0], 2, 4, 2])
    return tl.reshape(tl.permute(pairs, (0, 1, 3, 2)), x.shape)


@triton.jit
def dot_split(x, yt, acc):
    """`acc + x @ yt^T` of two fp32 matrices [N, 16] and [16, 16], 22 bits of each used.

    Short chains of products instead of one long one: on one warp the latency counts. The right
    operand comes transposed because the accumulator of `y^T` holds, register by register, what the
    tensor core wants as right operand `y`: nothing moves between threads. Both must not depend on
    16-bit loads by arithmetic alone (see `computed_here`), or the compiler picks another layout.
    """
    x_high, x_low = tf32_halves(even_then_odd(x))
    # Split behind the transposition: it then stays a renaming of registers.
    y_high, y_low = tf32_halves(tl.trans(even_then_odd(yt)))
    small = dot(x_low, y_high, tl.zeros(acc.shape, tl.float32), "tf32")
    small = dot(x_high, y_low, small, "tf32")
    return dot(x_high, y_high, acc, "tf32") + small


@triton.jit
def solve(right, A, At, ROWS: tl.constexpr):
    """`right @ ((I + A)^-1)^T` for a strictly lower triangular fp32 `A` [16, 16], `At` = `A^T`.

    `right` [N, 16] holds one column of the block a row. Two levels of 4 x 4 blocks, both nilpotent:
    with D the diagonal blocks, X = (I + D)^-1 = (I - D)(I + D^2) and M = X (A - D), the inverse is
    (I + M^2)(I - M) X, applied from the right so that it is never formed. Powers stay bounded by
    about 3 for repeated keys, where doubling all of A would reach binomials of 3400 and lose four
    digits. Rows and columns of A past ROWS must be zero.
    """
    o = tl.arange(0, 16)
    eye = (o[:, None] == o[None, :]).to(tl.float32)
    same_block = (o[:, None] // 4) == (o[None, :] // 4)
    zero = tl.zeros([16, 16], tl.float32)
    D = tl.where(same_block, A, 0.0)
    D2t = dot_split(tl.where(same_block, At, 0.0), D, zero)
    X = dot_split(eye - D, D2t, eye - D)
    solved = dot_split(right, X, tl.zeros(right.shape, tl.float32))
    if ROWS > 4:
        M = dot_split(X, tl.where(same_block, 0.0, -At), zero)
        solved = dot_split(solved, M, solved)
        if ROWS > 8:
            once = dot_split(solved, M, tl.zeros(right.shape, tl.float32))
            solved = dot_split(once, M, solved)
    return solved
