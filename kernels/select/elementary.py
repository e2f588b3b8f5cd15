"""Exponential and logarithm in fp64 that give the same bits on every device.

A GPU's `exp` and a host's differ in the last bits, and a last bit may move a length where two
scores tie. Both functions are therefore made of additions, multiplications, divisions and bit
operations alone, which IEEE 754 rounds in one way everywhere; kernels that call them must be
launched with `enable_fp_fusion=False`, because a contracted multiply-add rounds once, not twice.

Both stay below 1 unit in the last place of the true value over the ranges named in them.
"""

# Launch options and static ranges are not in triton's annotations.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import math
from decimal import Decimal

import triton
import triton.language as tl

LN2 = Decimal("0.69314718055994530941723212145817656807550013436026")
# 32 leading bits: products with an exponent below 2^21 in magnitude are exact.
LN2_HIGH_PART = math.floor(LN2 * 2**32) / 2**32
LN2_LOW_PART = float(LN2 - Decimal(LN2_HIGH_PART))
INVERSE_LN2_VALUE = float(1 / LN2)

# 2 atanh(s) - 2 s = s R(s^2), R(z) = 2/3 z + 2/5 z^2 + ...: for |s| <= 0.1716 the first term left
# out is below 2^-57 of the sum.
LOG_COEFFICIENTS = tuple(2.0 / (2 * n + 1) for n in range(1, 13))
# exp(r) = 1 + r + r^2 P(r): for |r| <= 0.3466 the first term left out is below 2^-57.
EXP_COEFFICIENTS = tuple(1.0 / math.factorial(n) for n in range(2, 14))

MANTISSA_BITS = (1 << 52) - 1
SQRT_HALF_VALUE = math.sqrt(0.5)

LN2_HIGH = tl.constexpr(LN2_HIGH_PART)
LN2_LOW = tl.constexpr(LN2_LOW_PART)
INVERSE_LN2 = tl.constexpr(INVERSE_LN2_VALUE)
MANTISSA = tl.constexpr(MANTISSA_BITS)
HALF_EXPONENT = tl.constexpr(1022 << 52)
SQRT_HALF = tl.constexpr(SQRT_HALF_VALUE)
LOG_TERMS = tl.constexpr(LOG_COEFFICIENTS)
EXP_TERMS = tl.constexpr(EXP_COEFFICIENTS)


@triton.jit
def _polynomial(x, TERMS: tl.constexpr):
    """`sum_n TERMS[n] x^n` for twelve terms: even and odd powers as two shorter chains."""
    square = x * x
    even = square * TERMS[10] + TERMS[8]
    odd = square * TERMS[11] + TERMS[9]
    for n in tl.static_range(4):
        even = even * square + TERMS[6 - 2 * n]
        odd = odd * square + TERMS[7 - 2 * n]
    return even + x * odd


@triton.jit
def log(x):
    """Natural logarithm of a tile of normal positive fp64 numbers.

    `x = 2^k m` with m in [sqrt(1/2), sqrt(2)), `f = m - 1` (exact), `s = f / (2 + f)`, so that
    `log m = 2 atanh(s) = f - s (f - R(s^2))`: rounding of s enters scaled by f, not as it stands.
    """
    bits = x.to(tl.int64, bitcast=True)
    exponent = (bits >> 52) - 1022
    mantissa = ((bits & MANTISSA) | HALF_EXPONENT).to(tl.float64, bitcast=True)
    small = mantissa < SQRT_HALF
    mantissa = tl.where(small, mantissa + mantissa, mantissa)
    k = tl.where(small, exponent - 1, exponent).to(tl.float64)
    f = mantissa - 1.0
    s = f / (f + 2.0)
    z = s * s
    remainder = z * _polynomial(z, LOG_TERMS)
    return k * LN2_HIGH + (f - (s * (f - remainder) - k * LN2_LOW))


@triton.jit
def exp(x):
    """Exponential of a tile of fp64 numbers in [-700, 700].

    `x = k ln 2 + r` with |r| <= ln(2) / 2, `exp x = 2^k (1 + (r + r^2 P(r)))`.
    """
    k = tl.floor(x * INVERSE_LN2 + 0.5)
    r = (x - k * LN2_HIGH) - k * LN2_LOW
    value = 1.0 + (r + r * r * _polynomial(r, EXP_TERMS))
    scale = ((k.to(tl.int64) + 1023) << 52).to(tl.float64, bitcast=True)
    return value * scale
