"""Codes of rows of Q or K with scales of their own, and what fits these scales to them: quantize.fit."""

from __future__ import annotations

import triton
import triton.language as tl

from .. import quantize as definition
from .tile import ROUNDER, e4m3_code, half_of_code

FIT_STEP: tl.constexpr = tl.constexpr(definition.FIT_STEP)
FIT_NAN: tl.constexpr = tl.constexpr(definition.FIT_NAN)
BASE: tl.constexpr = tl.constexpr(0x7A00)  # of bits of halves from 1.5 * 2^15 on, which are FIT_STEP apart

PTX: tl.constexpr = tl.constexpr("""{
    .reg .b32 low, high, first, second, eighth, base;
    .reg .b16 codes, more;
    mov.b32 base, 0x7A007A00;
    mov.b32 eighth, 0x30003000;
    cvt.rn.satfinite.e4m3x2.f32 codes, $6, $5;
    cvt.rn.satfinite.e4m3x2.f32 more, $8, $7;
    mov.b32 $0, {codes, more};
    cvt.rn.f16x2.f32 low, $6, $5;
    cvt.rn.f16x2.f32 high, $8, $7;
    cvt.rn.f16x2.e4m3x2 first, codes;
    cvt.rn.f16x2.e4m3x2 second, more;
    sub.rn.f16x2 low, low, first;
    sub.rn.f16x2 high, high, second;
    fma.rn.f16x2 $1, first, low, base;
    fma.rn.f16x2 $2, second, high, base;
    mul.rn.f16x2 low, first, eighth;
    mul.rn.f16x2 high, second, eighth;
    fma.rn.f16x2 $3, first, low, base;
    fma.rn.f16x2 $4, second, high, base;
}""")
"""Of four numbers $5 to $8 the codes $0, and bits of halves, BASE and a number's steps: of its products $1 and $2, of its squares $3 and $4."""


@triton.jit
def fit_steps(a, b):
    """quantize.fit_steps of halves, int32."""
    steps = (a.to(tl.float32) * b.to(tl.float32) * (1 / FIT_STEP) + ROUNDER) - ROUNDER
    return tl.where(steps == steps, steps, FIT_NAN).to(tl.int32)


@triton.jit
def fitted_codes(y, NATIVE: tl.constexpr):
    """The e4m3 bytes of float32 rows y (M, N) over their scales, as e4m3_code has them, and what the scales (M,) are to be multiplied by.

    NATIVE: the architecture converts by itself; by PTX, as feedback.feed_back does and for the same reasons.
    """
    if NATIVE:
        types: tl.constexpr = (tl.uint8, tl.int16, tl.int16)
        codes, products, squares = tl.inline_asm_elementwise(PTX, "=r,=r,=r,=r,=r,r,r,r,r", [y], dtype=types, is_pure=True, pack=4)
        product = tl.sum(products.to(tl.int32), 1) - BASE * y.shape[1]
        square = tl.sum(squares.to(tl.int32), 1) - BASE * y.shape[1]
    else:
        codes = e4m3_code(y, False)
        code = half_of_code(codes)
        product = tl.sum(fit_steps(code, y.to(tl.float16) - code), 1)
        square = tl.sum(fit_steps(code, code * 0.125), 1)
    square *= 8
    return codes, tl.where(square > 0, tl.div_rn((square + product).to(tl.float32), square.to(tl.float32)), 1.0)
